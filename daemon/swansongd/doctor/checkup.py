# SPDX-License-Identifier: Apache-2.0
"""All checks, for a VM that runs or for an image that is being baked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from swansongd.config import Config
from swansongd.doctor import configuration, host, image, metadata, staging, store, trainers
from swansongd.doctor.accounts import DAEMON_USER, account, daemon_account, with_trainers
from swansongd.doctor.findings import Check, Finding, examine
from swansongd.sources.aws import NOTICE_S
from swansongd.sources.detect import detect_cloud
from swansongd.sources.gcp import LONG_NOTICE_S

AskDaemon = Callable[[Path], dict[str, Any]]


def check_vm(path: Path, ask_daemon: AskDaemon, *, speed: bool) -> Iterator[Finding]:
    """Everything, as it is found.

    Args:
        path: of the configuration.
        ask_daemon: the report of the daemon on a socket; raises Unreachable.
        speed: measure the bandwidth to the store, too.
    """
    config, findings = configuration.read(path)
    yield from findings
    if config is not None:
        yield from examine(_vm_checks(config, path, ask_daemon, speed=speed))
    elif host.is_installed():
        yield from examine(_image_checks(path))


def check_image(path: Path) -> Iterator[Finding]:
    """What makes sense without a cloud, a bucket and a daemon: for the build of an image."""
    config, findings = configuration.read(path)
    yield from findings
    yield from examine(_image_checks(path))
    yield from examine(image.checks(config))


def _vm_checks(
    config: Config, path: Path, ask_daemon: AskDaemon, *, speed: bool
) -> Iterator[Check]:
    configured = config.sources.cloud
    cloud = detect_cloud() if configured == "auto" else configured
    edit, daemon = configuration.edit(path), daemon_account()
    yield from configuration.checks(config, path, ask_daemon)
    yield from metadata.checks(config, cloud)
    yield from store.checks(config, edit, grace_s=grace_s(config, cloud), speed=speed)
    yield from staging.checks(config, daemon)
    installed = host.is_installed()
    yield from trainers.checks(config, edit, daemon, ask_daemon, installed=installed)
    if installed:
        yield from _image_checks(path)
    yield from host.checks(
        cloud,
        wanted_delay_s=config.deadline.shutdown_delay_s,
        stop_s=longest_grace_s(config, cloud) + config.deadline.reserve_s,
        written=host.written_directories(config),
    )


def _image_checks(path: Path) -> Iterator[Check]:
    user = account(DAEMON_USER)
    return host.image_checks(path, user and with_trainers(user))


def grace_s(config: Config, cloud: str) -> float:
    """What a notice of this cloud leaves, as far as anyone knows beforehand."""
    if cloud == "aws":
        return NOTICE_S
    if cloud == "gcp" and config.sources.gcp_preemption_notice_s:
        return config.sources.gcp_preemption_notice_s
    return config.deadline.assumed_grace_s


def longest_grace_s(config: Config, cloud: str) -> float:
    """The longest grace period that may be under way when systemd asks the daemon to stop."""
    deadline, sources = config.deadline, config.sources
    may_be_long = cloud == "gcp" and sources.gcp_preemption_notice_s != 0
    return max(
        deadline.sigterm_grace_s,
        deadline.assumed_grace_s,
        grace_s(config, cloud),
        LONG_NOTICE_S if may_be_long else 0.0,
    )
