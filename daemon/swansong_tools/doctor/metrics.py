# SPDX-License-Identifier: Apache-2.0
"""Checks of ``[metrics]``: the daemon serves the address or could, and the textfile can be written.

None of them is a failure: checkpoints do not depend on metrics.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from swansong_bucket.config.values import ListenAddress
from swansong_bucket.errors import Unreachable
from swansongd.config.config import Config
from swansongd.observe.status import DaemonStatus
from swansongd.util import listeners

from swansong_tools.doctor import fixes
from swansong_tools.doctor.accounts import DAEMON_USER, account
from swansong_tools.doctor.daemon import AskDaemon
from swansong_tools.doctor.findings import Check, Judgement, ok, warning

FAMILY = "metrics"


def address_checks(config: Config, path: Path, ask: AskDaemon) -> Iterator[Check]:
    """The check of ``metrics.listen``.  Root also sees which process has taken the address.

    Args:
        config: of the daemon.
        path: of the configuration.
        ask: returns the answer of the daemon on a socket; raises Unreachable.
    """
    listen = config.metrics.listen
    if listen is not None:
        yield Check(
            family=FAMILY,
            name="metrics address",
            judge=lambda: judge_address(
                listen, lambda: ask(config.trainer.socket).status, fixes.edit(path)
            ),
        )


def textfile_checks(config: Config) -> Iterator[Check]:
    """The check of ``metrics.textfile``, which must run as the daemon."""
    textfile = config.metrics.textfile
    if textfile is not None:
        yield Check(
            family=FAMILY, name="metrics textfile", judge=lambda: judge_directory(textfile.parent)
        )


def judge_address(
    listen: ListenAddress, status: Callable[[], DaemonStatus], edit: str
) -> Judgement:
    """Whether the daemon serves its metrics there, or could.

    The daemon itself reports it, on its own socket: any process can answer a scrape with forged metrics.
    """
    try:
        metrics = status().metrics
    except Unreachable:
        return _judge_free(listen, edit)
    if metrics is None:
        return warning("the daemon was started without metrics.listen", fixes.restart())
    if metrics.failure:
        return _not_served(listen, metrics.failure, edit)
    if not listen.is_local:
        return warning(f"{listen}: other machines can read the metrics, without a password", edit)
    return ok(f"{metrics.address}: the daemon serves its metrics")


def _judge_free(listen: ListenAddress, edit: str) -> Judgement:
    if listen.path is not None:
        if not listen.path.parent.is_dir():
            return warning(f"{listen.path.parent} does not exist", edit)
        return ok(f"{listen} is free")
    try:
        family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
        socket.create_server((listen.host, listen.port), family=family).close()
    except OSError as error:
        return _not_served(listen, error.strerror or "unknown error", edit)
    return ok(f"{listen} is free")


def _not_served(listen: ListenAddress, reason: str, edit: str) -> Judgement:
    who = "" if listen.path is not None else listeners.holder(listen.host, listen.port)
    if not who:
        return warning(f"{listen}: {reason}", edit)
    return warning(
        f"{who} listens at {listen}: Prometheus gets the metrics of that process. Stop it, or name another "
        "address in metrics.listen",
        edit,
    )


def judge_directory(directory: Path) -> Judgement:
    """Whether the daemon can write a file there, in its sandbox."""
    place = fixes.quoted(directory)
    if not directory.is_dir():
        return warning(f"{directory} does not exist", fixes.directory(directory, "0755"))
    probe = directory / f".swansong-doctor-{os.getpid()}"
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError as error:
        # Not its group, which trainers have: they could write figures of their own.
        own = fixes.as_root(f"chown {DAEMON_USER} {place}") if account(DAEMON_USER) else ""
        allow = fixes.drop_in("metrics", f"ReadWritePaths={directory}")
        return warning(f"writing to {directory} failed: {error.strerror}", fixes.then(own, allow))
    with suppress(OSError):
        os.unlink(probe)
    return ok(f"the daemon can write to {directory}")
