# SPDX-License-Identifier: Apache-2.0
"""Checks of the daemon's inputs: configuration, cloud, environment."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

import swansongd
from swansong_bucket.errors import ConfigError
from swansongd.config.config import Config, load
from swansongd.sources.detect import detect_cloud

from swansong_tools.doctor import fixes
from swansong_tools.doctor.findings import Check, Finding, Judgement, failure, ok, warning

FAMILY = "configuration"

_PROXY = ("http_proxy", "https_proxy", "all_proxy")
_REDIRECT = (
    "AWS_EC2_METADATA_SERVICE_ENDPOINT", "AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE",
    "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL_STS",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "GCE_METADATA_HOST", "GCE_METADATA_ROOT", "GCE_METADATA_IP", "STORAGE_EMULATOR_HOST",
    "AZURE_POD_IDENTITY_AUTHORITY_HOST", "IDENTITY_ENDPOINT", "IMDS_ENDPOINT", "MSI_ENDPOINT",
)  # fmt: skip
_NO_PROXY = "Environment=NO_PROXY=169.254.169.254,metadata.google.internal"


def read(path: Path) -> tuple[Config | None, list[Finding]]:
    """The configuration with its finding; without a valid configuration, one finding per problem."""
    try:
        config = load(path)
    except ConfigError as error:
        fix = fixes.edit(path)
        if not path.exists():
            source = Path(swansongd.__file__).with_name("swansong.example.toml")
            make = f"install -D -m 0644 {fixes.quoted(source)} {fixes.quoted(path)}"
            fix = fixes.then(fixes.as_root(make), fixes.restart())
        return None, [_finding(failure(problem, fix)) for problem in error.problems]
    return config, [_finding(ok(f"{path} is valid; run {config.run.name}"))]


def _finding(judgement: Judgement) -> Finding:
    return Check(family=FAMILY, name="configuration", judge=lambda: judgement).finding(judgement)


def checks(config: Config, path: Path) -> Iterator[Check]:
    """The check of the configured cloud."""
    configured, detected = config.sources.cloud, detect_cloud()
    emulated = config.sources.metadata_url is not None
    fix = fixes.edit(path) if detected == "none" else set_key(path, "cloud", "auto")
    yield Check(
        family=FAMILY,
        name="cloud",
        judge=lambda: judge_cloud(configured, detected, emulated=emulated, fix=fix),
    )


def set_key(path: Path, key: str, value: str, *, table: str = "") -> str:
    """A command that sets a key of the configuration, or opens the editor if no command can.

    Args:
        key: a key with a string value.
        table: table to add the key to if it is not set; empty: the key must be in the file.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""

    def is_once(line: str) -> bool:
        return len(re.findall(line, text, re.MULTILINE)) == 1

    if is_once(rf'^{key} *= *"[^"]*"'):
        expression = f's|^{key} *= *"[^"]*"|{key} = "{value}"|'
    elif table and is_once(rf"^\[{table}\]") and not re.search(rf"^ *{key}\b", text, re.MULTILINE):
        expression = f's|^\\[{table}\\].*|&\\n{key} = "{value}"|'
    else:
        return fixes.edit(path)
    command = f"sed -i {shlex.quote(expression)} {fixes.quoted(path)}"
    return fixes.then(fixes.as_root(command), fixes.restart())


def judge_cloud(configured: str, detected: str, *, emulated: bool, fix: str) -> Judgement:
    """Whether ``sources.cloud`` matches the cloud that the VM runs in."""
    if configured == "auto" and detected == "none":
        return warning(
            "the firmware names neither AWS nor GCP: the daemon polls no metadata service "
            "(sources.cloud = auto)",
            fix,
        )
    if configured in ("auto", detected):
        return ok(f"sources.cloud = {configured}, the firmware names {_named(detected)}")
    found = f"sources.cloud = {configured}, but the firmware names {_named(detected)}"
    if detected == "none" and emulated:
        return ok(f"{found}; sources.metadata_url is set")
    if configured == "none":
        return warning(f"{found}: the daemon will not receive its notices", fix)
    return (failure if detected != "none" else warning)(found, fix)


def _named(cloud: str) -> str:
    return {"aws": "AWS", "gcp": "GCP"}.get(cloud, "no cloud")


def judge_environment(names: Iterable[str], whose: str) -> Judgement:
    """Whether environment variables redirect metadata requests, and the tokens in them, to another host.

    Args:
        names: names of the variables; values are not passed because they may be secret.
        whose: owner of the environment, for the message.
    """
    there = sorted(set(names))
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
        fixes.drop_in("environment", *lines)
        if fixes.BOOTED.is_dir()
        else f"unset {' '.join(harmful)}",
    )
