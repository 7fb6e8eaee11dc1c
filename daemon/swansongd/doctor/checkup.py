# SPDX-License-Identifier: Apache-2.0
"""All checks, for a VM that runs or for an image that is being baked."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from swansongd.config.config import Config
from swansongd.doctor import (
    configuration,
    daemon,
    fixes,
    host,
    image,
    inside,
    sandbox,
    trainers,
)
from swansongd.doctor.accounts import DAEMON_USER, account, daemon_account, with_trainers
from swansongd.doctor.findings import Check, Examination, Finding, Level, examine
from swansongd.doctor.grace import longest_grace_s
from swansongd.errors import Unreachable
from swansongd.sources.detect import detect_cloud

AskDaemon = Callable[[Path], dict[str, Any]]

_KEEP_OUT = ("users", "permissions", "sandbox")
"""Checks without whose success nothing can be run as the daemon."""


def check_vm(path: Path, ask_daemon: AskDaemon, *, speed: bool, trial: bool) -> Iterator[Finding]:
    """Everything, causes first, as it is found.

    Args:
        path: of the configuration.
        ask_daemon: the report of the daemon on a socket, with ``peer_uid``, the user that listens there;
            raises Unreachable.
        speed: measure the bandwidth to the store, too.
        trial: a store that dies with the VM is no failure.
    """
    # The commands must work in the caller's shell, wherever that is.
    path = path.absolute()
    config, findings = configuration.read(path)
    yield from _adapted(findings)
    if config is not None:
        yield from _adapted(_vm_findings(config, path, ask_daemon, speed=speed, trial=trial))
    elif host.is_installed():
        yield from _adapted(examine(_image_checks(path)))


def check_image(path: Path) -> Iterator[Finding]:
    """What makes sense without a cloud, a bucket and a daemon: for the build of an image."""
    path = path.absolute()
    config, findings = configuration.read(path)
    yield from _adapted(findings)
    yield from _adapted(examine(_image_checks(path)))
    yield from _adapted(examine(image.checks(config)))


def _adapted(findings: Iterable[Finding]) -> Iterator[Finding]:
    for finding in findings:
        yield replace(finding, fix=fixes.for_this_shell(finding.fix))


def _vm_findings(
    config: Config, path: Path, ask_daemon: AskDaemon, *, speed: bool, trial: bool
) -> Iterator[Finding]:
    configured = config.sources.cloud
    cloud = detect_cloud() if configured == "auto" else configured
    by_systemd, user = host.is_run_by_systemd(), daemon_account()
    checked = Examination()
    yield from checked.run(configuration.checks(config, path))
    if host.is_installed():
        yield from checked.run(_image_checks(path))
    yield from checked.run(
        host.checks(
            cloud,
            wanted_delay_s=config.deadline.shutdown_delay_s,
            stop_s=longest_grace_s(config, cloud) + config.deadline.reserve_s,
            written=host.written_directories(config),
        )
    )
    identity, whose = _identity(config, ask_daemon)
    options = inside.Options(
        config=path,
        speed=speed,
        trial=trial,
        operator_file=_operator_file(config),
        environment_of="the daemon's unit" if by_systemd else whose,
    )
    if by_systemd and os.geteuid() != 0:
        found = (
            "only root can look at store and staging as the daemon does, in the sandbox of its unit"
        )
        yield checked.note(_not_as_the_daemon(Level.FAILURE, found, "sudo swansong doctor"))
    elif lacking := checked.lacking(_KEEP_OUT):
        yield checked.note(
            _not_as_the_daemon(Level.SKIPPED, f"not looked at, for want of {lacking}")
        )
    else:
        if by_systemd:
            looked = sandbox.in_unit(options.words())
        elif identity.is_this_process():
            looked = examine(inside.checks(config, options))
        else:
            looked = sandbox.in_process(identity, options.words())
        yield from map(checked.note, looked)
    yield from checked.run(trainers.needed_checks(config, path))
    yield from checked.run(daemon.checks(config, path, ask_daemon, by_systemd=by_systemd))
    yield from checked.run(trainers.checks(config, path, user, ask_daemon, by_systemd=by_systemd))


def _not_as_the_daemon(level: Level, found: str, fix: str = "") -> Finding:
    return Finding(family="host", name="as the daemon", level=level, found=found, fix=fix)


def _identity(config: Config, ask_daemon: AskDaemon) -> tuple[sandbox.ProcessIdentity, str]:
    """Who the daemon is, or would be; and whose environment that is, in words."""
    try:
        report = ask_daemon(config.trainer.socket)
        pid, uid = int(report["pid"]), int(report["peer_uid"])
        found = sandbox.identity_of(pid, uid)
    except (Unreachable, KeyError, ValueError, TypeError):
        found = None  # it does not run, or is not ours to ask: another check reports it
    if found is not None:
        return found, f"the daemon (process {pid})"
    return sandbox.presumed(), "this command (that of the daemon cannot be read)"


def _operator_file(config: Config) -> Path | None:
    """Credentials that a person left in a home, where the daemon does not look."""
    below = {
        "s3": ".aws/credentials",
        "gs": ".config/gcloud/application_default_credentials.json",
    }.get(config.store.url.partition(":")[0])
    if below is None or not host.is_run_by_systemd():
        return None
    for name in (os.environ.get("SUDO_USER", ""), "root"):
        try:
            path = Path(pwd.getpwnam(name).pw_dir, below)
            if path.is_file():
                return path
        except (KeyError, OSError):
            continue
    return None


def _image_checks(path: Path) -> Iterator[Check]:
    user = account(DAEMON_USER)
    return host.image_checks(path, user and with_trainers(user))
