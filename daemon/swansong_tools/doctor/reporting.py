# SPDX-License-Identifier: Apache-2.0
"""Metrics and notifications.  Checkpoints depend on neither, so only a test that was asked for can fail."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from swansong_bucket.config.values import ListenAddress
from swansong_bucket.errors import SwansongError, Unreachable
from swansongd.notifications import heartbeat, webhook
from swansongd.notifications.delivery import Deliverer, HttpRequest, NotDelivered
from swansongd.observe.notifications import Origin, sample
from swansongd.util import listeners

from swansong_tools.doctor import fixes
from swansong_tools.doctor.findings import Checklist, Judgement, failure, of_error, ok, warning
from swansong_tools.doctor.installation import DAEMON_USER, Installation

AS_DAEMON = Checklist(family="notify")
METRICS = Checklist(family="metrics")


@METRICS.add("metrics address", applies=lambda vm: vm.config.metrics.listen)
def metrics_address(vm: Installation) -> Judgement:
    """The daemon serves ``metrics.listen``, or the address is free; otherwise the process that has it.

    Only root sees that process.
    The daemon itself reports it, on its own socket: any process can answer a scrape with forged metrics.
    """
    listen, edit = vm.config.metrics.listen, fixes.edit(vm.path)
    assert listen is not None
    try:
        metrics = vm.status().metrics
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


@AS_DAEMON.add("metrics textfile", family="metrics", applies=lambda vm: vm.config.metrics.textfile)
def textfile(vm: Installation) -> Judgement:
    """The daemon can write to the directory of ``metrics.textfile``."""
    assert vm.config.metrics.textfile is not None
    directory = vm.config.metrics.textfile.parent
    place = fixes.quoted(directory)
    if not directory.is_dir():
        return warning(f"{directory} does not exist", fixes.directory(directory, "0755"))
    probe = directory / f".swansong-doctor-{os.getpid()}"
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError as error:
        # Not its group, which trainers have: they could write figures of their own.
        own = fixes.as_root(f"chown {DAEMON_USER} {place}") if fixes.has_daemon_user() else ""
        allow = fixes.drop_in("metrics", f"ReadWritePaths={directory}")
        return warning(f"writing to {directory} failed: {error.strerror}", fixes.then(own, allow))
    with suppress(OSError):
        os.unlink(probe)
    return ok(f"the daemon can write to {directory}")


# ------------------------------------------------------------ notifications


@AS_DAEMON.add("webhook", applies=lambda vm: vm.config.notify.has_webhook)
def webhook_address(vm: Installation) -> Judgement:
    """Secrets are private, the address resolves, the template becomes JSON."""
    return _judge_address(vm, _test_notification)


@AS_DAEMON.add(
    "test notification",
    needs=("webhook",),
    applies=lambda vm: vm.config.notify.has_webhook and vm.options.send_notification,
)
def test_notification(vm: Installation) -> Judgement:
    """With ``--send-notification``: the receiver accepts a notification."""
    return _judge_sending(vm, _test_notification)


@AS_DAEMON.add("heartbeat", applies=lambda vm: vm.config.notify.has_heartbeat)
def heartbeat_address(vm: Installation) -> Judgement:
    """The secret is private, the address resolves."""
    return _judge_address(vm, _test_heartbeat)


@AS_DAEMON.add(
    "test heartbeat",
    needs=("heartbeat",),
    applies=lambda vm: vm.config.notify.has_heartbeat and vm.options.send_notification,
)
def test_heartbeat(vm: Installation) -> Judgement:
    """With ``--send-notification``: the receiver accepts a call."""
    return _judge_sending(vm, _test_heartbeat)


def _test_notification(vm: Installation) -> HttpRequest:
    """The request with the test notification.  Its id names no VM: a trial need not know the daemon's VM."""
    host = platform.node()
    vm_id = hashlib.sha256(f"doctor {host}".encode()).hexdigest()[:16]
    origin = Origin(run=vm.config.run.name, vm=vm_id, host=host)
    return webhook.request_for(vm.config.notify, origin, sample(time.time()))


def _test_heartbeat(vm: Installation) -> HttpRequest:
    return heartbeat.request_for(vm.config.notify)


def _judge_address(vm: Installation, make: Callable[[Installation], HttpRequest]) -> Judgement:
    """Whether the secrets can be read, and the name of the host resolves.  Sends nothing to the host."""
    edit = fixes.edit(vm.path)
    try:
        host = urlsplit(make(vm).url).hostname or ""
    except SwansongError as error:
        found = of_error(error, "")
        return warning(found.found, found.fix or edit)
    try:
        socket.getaddrinfo(host, 443, type=socket.SOCK_STREAM)
    except OSError as error:
        return warning(f"resolving {host} failed: {error.strerror}", edit)
    return ok(f"the secrets are private, and {host} resolves")


def _judge_sending(vm: Installation, make: Callable[[Installation], HttpRequest]) -> Judgement:
    """Whether the receiver accepts the request."""
    began_mono_s, edit = time.monotonic(), fixes.edit(vm.path)
    try:
        Deliverer().send(make(vm))
    except NotDelivered as error:
        return failure(f"sending failed: {error}", edit)
    except SwansongError as error:
        found = of_error(error, "")
        return found._replace(fix=found.fix or edit)
    return ok(f"accepted after {time.monotonic() - began_mono_s:.1f} s")


@AS_DAEMON.add("notify.exec", applies=lambda vm: vm.config.notify.exec)
def program(vm: Installation) -> Judgement:
    """The program can run, and no other user can change it."""
    settings = vm.config.notify
    program = Path(settings.exec[0])
    try:
        facts = program.stat()
    except OSError as error:
        return warning(f"{program} cannot run: {error.strerror}", fixes.edit(vm.path))
    if not stat.S_ISREG(facts.st_mode) or not os.access(program, os.X_OK):
        command = f"chmod 0755 {fixes.quoted(program)}"
        return warning(f"{program} is not an executable file", fixes.as_root(command))
    if facts.st_mode & 0o022 or facts.st_uid not in (0, os.geteuid()):
        command = f"chown root {fixes.quoted(program)} && sudo chmod 0755 {fixes.quoted(program)}"
        return warning(f"other users can change {program}", fixes.as_root(command))
    return ok(f"{program} runs at {', '.join(settings.exec_on)}")
