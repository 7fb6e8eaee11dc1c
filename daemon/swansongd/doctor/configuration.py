# SPDX-License-Identifier: Apache-2.0
"""Checks of what the daemon is told: its configuration, the cloud, its environment."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from swansongd import signing
from swansongd.config import Config, load
from swansongd.doctor.accounts import Account, daemon_account
from swansongd.doctor.findings import (
    Check,
    Finding,
    Judgement,
    failure,
    ok,
    warning,
)
from swansongd.errors import ConfigError
from swansongd.sources.detect import detect_cloud

FAMILY = "configuration"

_PROXY = ("http_proxy", "https_proxy", "all_proxy")
_REDIRECT = (
    "AWS_EC2_METADATA_SERVICE_ENDPOINT", "AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE",
    "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL_STS",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "GCE_METADATA_HOST", "GCE_METADATA_ROOT", "GCE_METADATA_IP", "STORAGE_EMULATOR_HOST",
)  # fmt: skip


def edit(path: Path) -> str:
    """The command that opens the configuration."""
    return f"sudoedit {shlex.quote(str(path))}"


def read(path: Path) -> tuple[Config | None, list[Finding]]:
    """The configuration, and a finding for it: one for each problem where it is unusable."""
    try:
        config = load(path)
    except ConfigError as error:
        mend = edit(path)
        if not path.exists():
            source = Path(__file__).parents[1] / "swansong.example.toml"
            mend = f"install -D -m 0644 {shlex.quote(str(source))} {shlex.quote(str(path))}"
        return None, [_finding(failure(problem, mend)) for problem in error.problems]
    return config, [_finding(ok(f"{path} is in order; run {config.run.name}"))]


def _finding(judgement: Judgement) -> Finding:
    return Check(family=FAMILY, name="configuration", ask=lambda: judgement).says(judgement)


def checks(
    config: Config, path: Path, ask_daemon: Callable[[Path], dict[str, Any]]
) -> Iterator[Check]:
    """Signing key, cloud and environment."""
    key_file = config.store.signing_key_file
    if key_file is not None:
        yield Check(
            family=FAMILY,
            name="signing key",
            ask=lambda: judge_signing_key(key_file, daemon_account()),
        )
    configured = config.sources.cloud
    emulated = config.sources.metadata_url is not None
    yield Check(
        family=FAMILY,
        name="cloud",
        ask=lambda: judge_cloud(configured, detect_cloud(), emulated=emulated, mend=edit(path)),
    )
    yield Check(
        family=FAMILY,
        name="environment",
        ask=lambda: judge_environment(*_environment(config.trainer.socket, ask_daemon)),
    )


def judge_signing_key(path: Path, account: Account) -> Judgement:
    """Whether the daemon will accept the key: it does not start otherwise."""
    quoted = shlex.quote(str(path))
    mend = f"chown {account.name}: {quoted} && chmod 0400 {quoted}"
    try:
        signing.load(path, owners={0, account.uid})
    except ConfigError as error:
        return failure(str(error), mend)
    if not account.may("r", path):
        return failure(f"{account.name} may not read {path}", mend)
    return ok(f"{path} is private, and manifests and claims are signed with it")


def judge_cloud(configured: str, detected: str, *, emulated: bool, mend: str) -> Judgement:
    """Whether the cloud that is watched is the one that the VM runs in."""
    if configured == "auto" and detected == "none":
        return warning(
            "the firmware names neither AWS nor GCP: no metadata service is watched "
            "(sources.cloud = auto)",
            mend,
        )
    if configured in ("auto", detected):
        return ok(f"sources.cloud = {configured}, the firmware names {_named(detected)}")
    found = f"sources.cloud = {configured}, but the firmware names {_named(detected)}"
    if detected == "none" and emulated:
        return ok(f"{found}; sources.metadata_url is set")
    if configured == "none":
        return warning(f"{found}: its notices are not watched for", mend)
    return (failure if detected != "none" else warning)(found, mend)


def _named(cloud: str) -> str:
    return {"aws": "AWS", "gcp": "GCP"}.get(cloud, "no cloud")


def judge_environment(names: Iterable[str], whose: str) -> Judgement:
    """Whether variables would send metadata requests, and the tokens in them, elsewhere.

    Args:
        names: of the variables; their values may be secret and are of no interest.
        whose: environment it is.
    """
    there = sorted(set(names))
    harmful = [name for name in there if name.lower() in _PROXY or name in _REDIRECT]
    # With NO_PROXY for the metadata service a proxy is a decision, described in docs/operations.md.
    if any(name.lower() == "no_proxy" for name in there):
        harmful = [name for name in harmful if name in _REDIRECT]
    if not harmful:
        return ok(f"no proxy and no other metadata service in the environment of {whose}")
    return warning(
        f"the environment of {whose} has {', '.join(harmful)}: the SDKs may take metadata requests "
        "and credentials there",
        f"systemctl restart swansongd  # its unit removes them; by hand: unset {' '.join(harmful)}",
    )


def _environment(
    socket: Path, ask_daemon: Callable[[Path], dict[str, Any]]
) -> tuple[list[str], str]:
    """Names of the variables that the daemon sees, or as near to it as can be looked."""
    try:
        pid = int(ask_daemon(socket)["pid"])
        content = Path(f"/proc/{pid}/environ").read_bytes()
    except Exception:  # not running, not ours to ask: another check says so
        return list(os.environ), "this command (that of the daemon cannot be read)"
    return [os.fsdecode(item.partition(b"=")[0]) for item in content.split(b"\0") if item], (
        f"the daemon (process {pid})"
    )
