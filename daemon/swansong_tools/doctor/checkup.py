# SPDX-License-Identifier: Apache-2.0
"""All checks, for a running VM or for an image during its build."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from swansong_bucket.errors import Unreachable
from swansongd.config.config import Config
from swansongd.sources.detect import detect_cloud

from swansong_tools.doctor import (
    configuration,
    daemon,
    fixes,
    host,
    image,
    inside,
    metrics,
    sandbox,
    trainers,
)
from swansong_tools.doctor.accounts import DAEMON_USER, account, daemon_account, with_trainers
from swansong_tools.doctor.daemon import AskDaemon
from swansong_tools.doctor.findings import Check, Examination, Finding, Level, examine
from swansong_tools.doctor.grace import longest_grace_s

_PREREQUISITES = ("users", "permissions", "sandbox")
"""Checks that must succeed before anything can run as the daemon."""


def check_vm(
    path: Path,
    ask: AskDaemon,
    *,
    speed: bool,
    trial: bool,
    send_notification: bool = False,
) -> Iterator[Finding]:
    """Yield all findings as the checks finish, causes before consequences.

    Args:
        path: configuration file.
        ask: returns the answer of the daemon on a socket; raises Unreachable.
        speed: also measure the bandwidth to the store.
        trial: report a store that is lost with the VM as a warning.
        send_notification: also send a test notification.
    """
    # Absolute, so that the printed commands work in any directory.
    path = path.absolute()
    fixes.choose_unit(path)
    config, findings = configuration.read(path)
    yield from _adapted(findings)
    if config is not None:
        found = _vm_findings(
            config,
            path,
            ask,
            speed=speed,
            trial=trial,
            send_notification=send_notification,
        )
        yield from _adapted(found)
    elif host.is_installed():
        yield from _adapted(examine(_image_checks(path)))


def check_image(path: Path) -> Iterator[Finding]:
    """The checks that need no cloud, no bucket and no daemon: for the build of an image."""
    path = path.absolute()
    fixes.choose_unit(path)
    config, findings = configuration.read(path)
    yield from _adapted(findings)
    yield from _adapted(examine(_image_checks(path)))
    yield from _adapted(examine(image.checks(config)))


def _adapted(findings: Iterable[Finding]) -> Iterator[Finding]:
    for finding in findings:
        yield replace(finding, fix=fixes.for_this_shell(finding.fix))


def _vm_findings(
    config: Config,
    path: Path,
    ask: AskDaemon,
    *,
    speed: bool,
    trial: bool,
    send_notification: bool,
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
    identity, whose = _identity(config, ask)
    options = inside.Options(
        config=path,
        speed=speed,
        trial=trial,
        operator_file=_operator_file(config),
        environment_of="the daemon's unit" if by_systemd else whose,
        send_notification=send_notification,
    )
    if by_systemd and os.geteuid() != 0:
        found = (
            "checking store and staging requires root: these checks run in the sandbox of the unit"
        )
        yield checked.note(_not_as_the_daemon(Level.FAILURE, found, "sudo swansong doctor"))
    elif lacking := checked.lacking(_PREREQUISITES):
        yield checked.note(
            _not_as_the_daemon(Level.SKIPPED, f"depends on a check that did not succeed: {lacking}")
        )
    else:
        if by_systemd:
            findings = sandbox.in_unit(options.words())
        elif identity.is_this_process():
            findings = examine(inside.checks(config, options))
        else:
            findings = sandbox.in_process(identity, options.words())
        yield from map(checked.note, findings)
    yield from checked.run(trainers.needed_checks(config, path))
    yield from checked.run(daemon.checks(config, path, ask, by_systemd=by_systemd))
    yield from checked.run(metrics.address_checks(config, path, ask))
    yield from checked.run(trainers.checks(config, path, user, ask, by_systemd=by_systemd))


def _not_as_the_daemon(level: Level, found: str, fix: str = "") -> Finding:
    return Finding(family="host", name="as the daemon", level=level, found=found, fix=fix)


def _identity(config: Config, ask: AskDaemon) -> tuple[sandbox.ProcessIdentity, str]:
    """The identity to run checks with, and a description of its environment's owner."""
    try:
        answer = ask(config.trainer.socket)
        found = sandbox.identity_of(answer.status.pid, answer.uid)
    except Unreachable:
        found = None  # the daemon does not run or refuses; another check reports that
    if found is not None:
        return found, f"the daemon (process {answer.status.pid})"
    return sandbox.presumed(), "this command (the daemon's environment cannot be read)"


def _operator_file(config: Config) -> Path | None:
    """Credentials in an operator's home, which the daemon does not read."""
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
