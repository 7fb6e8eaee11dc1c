# SPDX-License-Identifier: Apache-2.0
"""Checks of the network: names that do not resolve and missing routes, which cause later failures."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from swansongd.config.config import Config
from swansongd.sources.metadata import DEFAULT_URL

from swansong_tools.doctor import fixes
from swansong_tools.doctor.findings import Check, Judgement, Level, failure, ok
from swansong_tools.doctor.store_fixes import address

FAMILY = "network"

_MANAGERS = ("systemd-networkd", "NetworkManager", "networking")
_RESOLVERS = ("systemd-resolved", "NetworkManager")
_TIMEOUT_S = 3.0
_SETTLE_S = 5.0
_POLL_S = 0.2
_NETWORKS = Path("/sys/class/net")
_IFF_UP = 1


def checks(config: Config, cloud: str) -> Iterator[Check]:
    """Whether the metadata service and the store have resolvable names and routes; no packet is sent.

    Args:
        cloud: cloud whose metadata service the daemon polls.
    """
    urls = {"the store": address(config)}
    if cloud in ("aws", "gcp"):
        urls["the metadata service"] = config.sources.metadata_url or DEFAULT_URL
    hosts = {name: host for name, url in urls.items() if (host := urlsplit(url).hostname)}
    if hosts:
        yield Check(family=FAMILY, name="network", judge=lambda: _settled(hosts))


def _settled(hosts: dict[str, str]) -> Judgement:
    """The judgement after a network that has just been restarted has had time to settle."""
    deadline_mono_s = time.monotonic() + _SETTLE_S
    while (judged := _routes(hosts)).level is Level.FAILURE and time.monotonic() < deadline_mono_s:
        time.sleep(_POLL_S)
    return judged


def _routes(hosts: dict[str, str]) -> Judgement:
    for name, host in sorted(hosts.items()):
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
    return ok(f"routes exist to {' and '.join(sorted(hosts))}")


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
    for service in services:
        try:
            done = subprocess.run(  # noqa: S603 - fixed names
                ["systemctl", "is-enabled", "--quiet", service],  # noqa: S607
                timeout=_TIMEOUT_S,
                check=False,
                capture_output=True,
            )
        except (OSError, subprocess.TimeoutExpired):
            return ""
        if done.returncode == 0:
            return fixes.as_root(f"systemctl restart {service}")
    return ""
