# SPDX-License-Identifier: Apache-2.0
"""The cloud: its name in the configuration and the firmware, network, metadata service, and clock."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from swansong_bucket.util.http1 import http_date
from swansongd.sources import aws, aws_events, azure, gcp
from swansongd.sources.metadata import (
    DEFAULT_URL,
    TIMEOUT_MAX_S,
    TIMEOUT_S,
    MetadataClient,
    MetadataResponse,
    MetadataUnavailable,
    retry_timeouts,
    shortened,
)

from swansong_tools.doctor import fixes
from swansong_tools.doctor.findings import (
    Checklist,
    Judgement,
    Probe,
    failure,
    ok,
    skipped,
    warning,
)
from swansong_tools.doctor.installation import BOOTED, Installation
from swansong_tools.doctor.sandbox import systemctl
from swansong_tools.doctor.store_fixes import address

_METADATA_LIMIT_S = 4 * TIMEOUT_MAX_S
"""As long as the sources wait: the timeout doubles from TIMEOUT_S, then the hop limit is checked."""
CLOCK_WARNING_S = 5.0
CLOCK_FAILURE_S = 600.0
"""Below the 15 minutes at which S3 refuses signatures."""

_PROXY = ("http_proxy", "https_proxy", "all_proxy")
_REDIRECT = (
    "AWS_EC2_METADATA_SERVICE_ENDPOINT", "AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE",
    "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL_STS",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "GCE_METADATA_HOST", "GCE_METADATA_ROOT", "GCE_METADATA_IP", "STORAGE_EMULATOR_HOST",
    "AZURE_POD_IDENTITY_AUTHORITY_HOST", "IDENTITY_ENDPOINT", "IMDS_ENDPOINT", "MSI_ENDPOINT",
)  # fmt: skip
_NO_PROXY = "Environment=NO_PROXY=169.254.169.254,metadata.google.internal"
_MANAGERS = ("systemd-networkd", "NetworkManager", "networking")
_RESOLVERS = ("systemd-resolved", "NetworkManager")
_NETWORKS = Path("/sys/class/net")
_IFF_UP = 1
_GCP = "/computeMetadata/v1/instance/"
_FIX = {
    "aws": "aws ec2 modify-instance-metadata-options --instance-id ID --http-endpoint enabled",
    "gcp": "gcloud compute instances describe VM",
    "azure": "az vm show --resource-group GROUP --name NAME",
}

Judge = Callable[[int, str], Judgement]
"""Judges the status and the text of an answer of the metadata service."""


def _metadata_fix(vm: Installation) -> str:
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return (
            "# in the template of the pod, set hostNetwork: true; see docs/trainers/kubernetes.md"
        )
    return _FIX[vm.cloud]


CONFIGURATION = Checklist(family="configuration")
AS_DAEMON = Checklist(family="metadata", fix=_metadata_fix, limit_s=_METADATA_LIMIT_S)


# ------------------------------------------------------------ configuration


@CONFIGURATION.add("cloud")
def cloud(vm: Installation) -> Judgement:
    """``sources.cloud`` against the firmware."""
    configured, detected = vm.config.sources.cloud, vm.detected_cloud
    fix = fixes.edit(vm.path) if detected == "none" else fixes.set_key(vm.path, 'cloud = "auto"')
    if configured == "auto" and detected == "none":
        return warning(
            "the firmware names no known cloud: the daemon polls no metadata service. In aws, gcp or azure "
            "set sources.cloud to that name, elsewhere to none",
            fix,
        )
    if configured in ("auto", detected):
        return ok(f"sources.cloud = {configured}, the firmware names {_named(detected)}")
    found = f"sources.cloud = {configured}, but the firmware names {_named(detected)}"
    if detected == "none" and vm.config.sources.metadata_url is not None:
        return ok(f"{found}; sources.metadata_url is set")
    if configured == "none":
        return warning(f"{found}: the daemon will not receive its notices", fix)
    return (failure if detected != "none" else warning)(found, fix)


def _named(cloud: str) -> str:
    return {"aws": "AWS", "gcp": "GCP", "azure": "Azure"}.get(cloud, "no cloud")


@AS_DAEMON.add("environment", family="configuration")
def environment(vm: Installation) -> Judgement:
    """Variables that would redirect metadata requests, and the tokens in them, to another host.

    Values are not shown, because they may be secret.
    """
    whose, there = vm.options.environment_of, sorted(os.environ)
    redirected = [name for name in there if name in _REDIRECT]
    # A proxy with NO_PROXY is a deliberate setup, see docs/operations/permissions.md.
    has_exceptions = any(name.lower() == "no_proxy" for name in there)
    proxied = [name for name in there if name.lower() in _PROXY and not has_exceptions]
    if not redirected and not proxied:
        return ok(f"no variable redirects metadata requests in the environment of {whose}")
    harmful = [*proxied, *redirected]
    lines = [_NO_PROXY] if proxied else []
    lines += [f"UnsetEnvironment={' '.join(redirected)}"] if redirected else []
    return warning(
        f"the environment of {whose} sets {', '.join(harmful)}: SDKs may send metadata requests and "
        "credentials there",
        (BOOTED.is_dir() and fixes.drop_in("environment", *lines)) or f"unset {' '.join(harmful)}",
    )


# ------------------------------------------------------------ network


def hosts(vm: Installation) -> dict[str, str]:
    """The servers that the daemon needs, by their description."""
    urls = {"the store": address(vm.config)}
    if vm.cloud in _FIX:
        urls["the metadata service"] = vm.config.sources.metadata_url or DEFAULT_URL
    return {name: host for name, url in urls.items() if (host := urlsplit(url).hostname)}


@AS_DAEMON.add("network", family="network", applies=hosts, settle_s=5.0)
def network(vm: Installation) -> Judgement:
    """The names of store and metadata service resolve, and a route exists.

    Sends no packet.
    """
    wanted = hosts(vm)
    for name, host in sorted(wanted.items()):
        try:
            found = socket.getaddrinfo(host, 443, type=socket.SOCK_DGRAM)
        except socket.gaierror as error:
            return failure(
                f"resolving the name of {name} failed: {host}: {error.strerror}",
                _revive(_MANAGERS if _no_link() else _RESOLVERS) or "cat /etc/resolv.conf",
            )
        problems = {_problem(family, where) for family, _, _, _, where in found}
        if "" not in problems:
            link = "; no network interface is up" if _no_link() else ""
            return failure(
                f"no route to {name} at {host}: {min(problems)}{link}",
                _revive(_MANAGERS) or "ip route",
            )
    return ok(f"routes exist to {' and '.join(sorted(wanted))}")


def _problem(family: int, where: tuple[object, ...]) -> str:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as datagrams:
            datagrams.connect(where)  # looks up the route, sends nothing
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _no_link() -> bool:
    """Whether all interfaces except the loopback are down."""
    for flags in _NETWORKS.glob("*/flags"):
        try:
            is_up = int(flags.read_text(), 16) & _IFF_UP
        except (OSError, ValueError):
            continue
        if is_up and flags.parent.name != "lo":
            return False
    return True


def _revive(services: tuple[str, ...]) -> str:
    """Restart the first of these services that is enabled; empty if none is."""
    with suppress(OSError, subprocess.TimeoutExpired):
        for service in services:
            if systemctl("is-enabled", service) == "enabled":
                return fixes.as_root(f"systemctl restart {service}")
    return ""


# ------------------------------------------------------------ metadata service


def metadata(path: str, judge: Judge, shows: str) -> Probe:
    """The check of one path, which is below ``instance/`` on Google."""

    def probe(vm: Installation) -> Judgement:
        try:
            answer = _request(vm, path)
        except MetadataUnavailable as error:
            return failure(error.reason, error.command)
        if answer.status not in (200, 404):
            return failure(f"request failed: HTTP {answer.status}", "")
        return judge(answer.status, shortened(answer.body.decode("utf-8", "replace"), 100))

    probe.__doc__ = shows
    return probe


def _request(vm: Installation, path: str) -> MetadataResponse:
    url = vm.config.sources.metadata_url or DEFAULT_URL
    with MetadataClient(
        url,
        timeout_s=TIMEOUT_S,
        timeout_max_s=TIMEOUT_MAX_S,
        cloud=vm.cloud,
    ) as client:
        if vm.cloud == "gcp":
            return retry_timeouts(lambda: gcp.get(client, _GCP + path))
        if vm.cloud == "azure":
            return retry_timeouts(lambda: azure.get(client, path))
        session = vm.shared(_session)
        imds = aws.Imds(client, monotonic=time.monotonic, session=session)
        return retry_timeouts(lambda: imds.get(path))


def _session(_: Installation) -> aws.ImdsSession:
    return aws.ImdsSession()


def judge_instance(status: int, text: str) -> Judgement:
    if status != 200:
        return failure(f"instance identity request failed: HTTP {status}", "")
    return ok(f"instance identity: {text}")


def judge_life_cycle(status: int, text: str) -> Judgement:
    if status != 200:
        return ok("404: this VM does not have the key")
    if text != "spot":
        return ok(f"{text}: this VM will get no spot notice")
    return ok("spot")


def judge_spot(status: int, text: str) -> Judgement:
    if status == 404:
        return ok("404: no notice")
    return warning(f"a notice is in force: {text}", "swansong status")


def judge_preemptible(status: int, text: str) -> Judgement:
    if status == 200 and text.upper() == "TRUE":
        return ok("TRUE: a Spot VM")
    return ok(f"{text or status}: not a Spot VM, will not be preempted")


def judge_preempted(status: int, text: str) -> Judgement:
    if status == 404:
        return warning("404: a preemption of this VM would not be detected", "")
    if text.upper() == "TRUE":
        return warning("TRUE: this VM is being preempted", "swansong status")
    if text.upper() != "FALSE":
        return failure(f"the value is neither TRUE nor FALSE: {text}", "")
    return ok("FALSE: no notice")


def judge_optional(status: int, text: str) -> Judgement:
    return ok("404: no event" if status == 404 else text or "empty answer")


def judge_events(status: int, text: str) -> Judgement:
    if status != 200:
        return failure(f"{status}: an eviction of this VM would not be detected", "")
    return ok(text)


_SPOT = "Whether this is a Spot VM."
_PATHS: dict[str, tuple[tuple[str, str, Judge, str], ...]] = {
    "aws": (
        (
            "IMDS token",
            "/latest/meta-data/instance-id",
            judge_instance,
            "A token; a hop limit that is too low has its own message.",
        ),
        ("instance-life-cycle", aws_events.LIFE_CYCLE_PATH, judge_life_cycle, _SPOT),
        ("spot notice", aws.SPOT_PATH, judge_spot, "A notice of termination."),
        ("rebalance", aws_events.REBALANCE_PATH, judge_optional, "A rebalance recommendation."),
        ("Auto Scaling", aws_events.ASG_PATH, judge_optional, "The target lifecycle state."),
        ("scheduled events", aws_events.SCHEDULED_PATH, judge_optional, "Maintenance that is due."),
        ("event history", aws_events.HISTORY_PATH, judge_optional, "Maintenance that is over."),
    ),
    "gcp": (
        ("metadata server", "id", judge_instance, "The flavor header."),
        ("preemptible", "scheduling/preemptible", judge_preemptible, _SPOT),
        ("preempted", "preempted", judge_preempted, "A preemption in progress."),
        ("maintenance-event", "maintenance-event", judge_optional, "Maintenance in progress."),
        (
            "upcoming-maintenance",
            "upcoming-maintenance",
            judge_optional,
            "Maintenance that is due.",
        ),
        ("stop-state", "shutdown-details/stop-state", judge_optional, "A stop in progress."),
    ),
    "azure": (
        ("instance metadata", azure.NAME_PATH, judge_instance, "The name of the VM."),
        (
            "Scheduled Events",
            azure.EVENTS_PATH,
            judge_events,
            "Events that are due; the first answer can take two minutes.",
        ),
    ),
}
"""Name, path, judge and description of the checks of each metadata service; the others need the first."""


def _declare_metadata() -> None:
    for cloud, rows in _PATHS.items():

        def applies(vm: Installation, cloud: str = cloud) -> bool:
            return vm.cloud == cloud

        needs = "network"
        for name, path, judge, shows in rows:
            AS_DAEMON.add(name, needs=(needs,), applies=applies)(metadata(path, judge, shows))
            needs = rows[0][0]


_declare_metadata()


# ------------------------------------------------------------ clock


def skew_s(date: str, asked_wall_s: float, answered_wall_s: float) -> float | None:
    """Seconds by which this VM is ahead, negative if behind; None if ``date`` is not valid.

    Date has a resolution of one second, and the answer has a latency.  A difference within both is zero.
    """
    stated = http_date(date)
    if stated is None:
        return None
    date_s = stated.timestamp()
    if asked_wall_s > date_s + 1:
        return asked_wall_s - date_s - 1
    return min(answered_wall_s - date_s, 0.0)


def _step_clock() -> str:
    """Let this machine's time service correct the clock at once; install one if the machine has none.

    A service that runs would correct a large difference over hours, or never.
    """
    if shutil.which("chronyc"):
        is_debian = Path("/usr/lib/systemd/system/chrony.service").exists()
        return fixes.then(
            fixes.as_root(f"systemctl restart {'chrony' if is_debian else 'chronyd'}"),
            # Without a new measurement chronyd does not know the difference, and makestep does nothing.
            fixes.as_root("chronyc waitsync 60 0 0 1"),
            fixes.as_root("chronyc makestep"),
        )
    if not Path("/usr/lib/systemd/systemd-timesyncd").exists():
        return fixes.as_root("apt-get install -y systemd-timesyncd")
    enable = fixes.as_root("timedatectl set-ntp true")
    return fixes.then(enable, fixes.as_root("systemctl restart systemd-timesyncd"))


def judge_skew(skew_s: float | None, server: str) -> Judgement:
    """Whether the clock is accurate enough for deadlines, credentials and certificates."""
    if skew_s is None:
        return skipped(f"{server} sent no Date header")
    found = f"{abs(skew_s):.0f} s {'behind' if skew_s < 0 else 'ahead of'} {server}"
    if abs(skew_s) >= CLOCK_FAILURE_S:
        return failure(f"{found}: credentials and certificates may count as invalid", _step_clock())
    if abs(skew_s) >= CLOCK_WARNING_S:
        return warning(found, _step_clock())
    return ok(f"within {CLOCK_WARNING_S:g} s of {server}")


@AS_DAEMON.add(
    "clock (metadata)",
    needs=tuple(rows[0][0] for rows in _PATHS.values()),
    applies=lambda vm: vm.cloud != "none",
)
def metadata_clock(vm: Installation) -> Judgement:
    """This VM's clock against the metadata service."""
    asked_wall_s = time.time()
    try:
        _, path, _, _ = _PATHS[vm.cloud][0]
        date = _request(vm, path).headers.get("date", "")
    except MetadataUnavailable as error:
        return skipped(str(error))
    return judge_skew(skew_s(date, asked_wall_s, time.time()), "the metadata service")
