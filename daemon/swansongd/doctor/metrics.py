# SPDX-License-Identifier: Apache-2.0
"""Checks of ``[metrics]``: the address answers or is free, and the textfile can be written."""

from __future__ import annotations

import http.client
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from swansongd.config.config import Config
from swansongd.config.values import ListenAddress
from swansongd.doctor import fixes
from swansongd.doctor.accounts import DAEMON_USER, account
from swansongd.doctor.findings import Check, Judgement, ok, warning

FAMILY = "metrics"
_TIMEOUT_S = 3.0
_ANSWER_BYTES_MAX = 2**20


def checks(config: Config, path: Path) -> Iterator[Check]:
    """The checks of what is configured.  None of them is a failure: checkpoints do not depend on them.

    Args:
        config: of the daemon.
        path: of the configuration.
    """
    listen, textfile = config.metrics.listen, config.metrics.textfile
    if listen is not None:
        yield Check(
            family=FAMILY,
            name="metrics address",
            judge=lambda: judge_address(listen, config.run.name, fixes.edit(path)),
        )
    if textfile is not None:
        yield Check(
            family=FAMILY, name="metrics textfile", judge=lambda: judge_directory(textfile.parent)
        )


def judge_address(listen: ListenAddress, run: str, edit: str) -> Judgement:
    """Whether the daemon answers there, or could."""
    if not listen.is_local:
        return warning(f"{listen}: other machines can read the metrics, without a password", edit)
    try:
        answer = _scraped(listen)
    except (FileNotFoundError, ConnectionRefusedError):
        return _judge_free(listen, edit)
    except (OSError, http.client.HTTPException) as error:
        return warning(f"{listen}: another program listens there ({error!s:.100})", edit)
    if b"swansong_build_info{" not in answer:
        return warning(f"{listen}: another program listens there", edit)
    if f'run="{run}"'.encode() not in answer:
        return warning(f"{listen}: the daemon of another run listens there", edit)
    return ok(f"{listen}: the daemon serves its metrics")


def _judge_free(listen: ListenAddress, edit: str) -> Judgement:
    if listen.path is not None:
        if not listen.path.parent.is_dir():
            return warning(f"{listen.path.parent} does not exist", edit)
        return ok(f"{listen} is free")
    try:
        family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
        socket.create_server((listen.host, listen.port), family=family).close()
    except OSError as error:
        return warning(f"listening at {listen} failed: {error.strerror}", edit)
    return ok(f"{listen} is free")


def _scraped(listen: ListenAddress) -> bytes:
    """The answer at this address.

    Raises:
        OSError: no program answers there.
        HTTPException: the answer is not HTTP.
    """
    kind = socket.AF_UNIX if listen.path is not None else socket.AF_INET
    if ":" in listen.host:
        kind = socket.AF_INET6
    connection = http.client.HTTPConnection("localhost")
    with socket.socket(kind) as client:
        client.settimeout(_TIMEOUT_S)
        client.connect(os.fspath(listen.path) if listen.path else (listen.host, listen.port))
        connection.sock = client
        connection.request("GET", "/metrics")
        return connection.getresponse().read(_ANSWER_BYTES_MAX)


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
