# SPDX-License-Identifier: Apache-2.0
"""Checks of ``[notify]``: secrets, addresses, template and program; sends nothing unless asked to."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from swansong_bucket.errors import SwansongError
from swansongd.config.config import Config
from swansongd.config.notify import NotifyConfig
from swansongd.notifications import heartbeat, webhook
from swansongd.notifications.delivery import Deliverer, HttpRequest, NotDelivered
from swansongd.observe.notifications import Origin, sample

from swansong_tools.doctor import fixes
from swansong_tools.doctor.findings import Check, Judgement, failure, ok, warning

FAMILY = "notify"
Judge = Callable[[], Judgement]
RequestMaker = Callable[[], HttpRequest]
_LIMIT_S = 30.0


def checks(config: Config, path: Path, *, send: bool) -> Iterator[Check]:
    """The checks of what is configured.  None of them is a failure: checkpoints do not depend on them.

    Args:
        path: of the configuration.
        send: send a test notification, and call the heartbeat address.
    """
    settings = config.notify
    edit = fixes.edit(path)
    if settings.has_webhook:
        yield _check("webhook", lambda: _judge_address(lambda: _webhook(config), edit))
        if send:
            yield _check(
                "test notification",
                lambda: _judge_delivery(lambda: _webhook(config), edit),
                needs="webhook",
            )
    if settings.has_heartbeat:
        yield _check(
            "heartbeat", lambda: _judge_address(lambda: heartbeat.request_for(settings), edit)
        )
        if send:
            yield _check(
                "test heartbeat",
                lambda: _judge_delivery(lambda: heartbeat.request_for(settings), edit),
                needs="heartbeat",
            )
    if settings.exec:
        yield _check("notify.exec", lambda: judge_program(settings, edit))


def _check(name: str, judge: Judge, *, needs: str = "") -> Check:
    return Check(
        family=FAMILY, name=name, judge=judge, needs=(needs,) if needs else (), limit_s=_LIMIT_S
    )


def _webhook(config: Config) -> HttpRequest:
    """The test notification.  Its id is not that of the daemon's VM, which a trial need not know."""
    host = platform.node()
    vm = hashlib.sha256(f"doctor {host}".encode()).hexdigest()[:16]
    origin = Origin(run=config.run.name, vm=vm, host=host)
    return webhook.request_for(config.notify, origin, sample(time.time()))


def _judge_address(request: RequestMaker, edit: str) -> Judgement:
    """Whether the secrets can be read, and the name of the host resolves.  Sends nothing to the host."""
    try:
        host = urlsplit(request().url).hostname or ""
    except SwansongError as error:
        return warning(str(error), f"# {error.hint}" if error.hint else edit)
    try:
        socket.getaddrinfo(host, 443, type=socket.SOCK_STREAM)
    except OSError as error:
        return warning(f"resolving {host} failed: {error.strerror}", edit)
    return ok(f"the secrets are private, and {host} resolves")


def _judge_delivery(request: RequestMaker, edit: str) -> Judgement:
    began_mono_s = time.monotonic()
    try:
        Deliverer().send(request())
    except NotDelivered as error:
        return failure(f"sending failed: {error}", edit)
    except SwansongError as error:
        return failure(str(error), f"# {error.hint}" if error.hint else edit)
    return ok(f"accepted after {time.monotonic() - began_mono_s:.1f} s")


def judge_program(settings: NotifyConfig, edit: str) -> Judgement:
    """Whether the program of ``notify.exec`` can run, and only its owner and root can change it."""
    program = Path(settings.exec[0])
    try:
        facts = program.stat()
    except OSError as error:
        return warning(f"{program} cannot run: {error.strerror}", edit)
    if not stat.S_ISREG(facts.st_mode) or not os.access(program, os.X_OK):
        command = f"chmod 0755 {fixes.quoted(program)}"
        return warning(f"{program} is not an executable file", fixes.as_root(command))
    if facts.st_mode & 0o022 or facts.st_uid not in (0, os.geteuid()):
        command = f"chown root {fixes.quoted(program)} && sudo chmod 0755 {fixes.quoted(program)}"
        return warning(f"other users can change {program}", fixes.as_root(command))
    return ok(f"{program} runs at {', '.join(settings.exec_on)}")
