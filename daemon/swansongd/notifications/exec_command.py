# SPDX-License-Identifier: Apache-2.0
"""Runs the operator's command for notifications, with the facts in its environment."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import structlog
from swansong_bucket.model import DRILL
from swansong_bucket.util.threads import lasting_thread

from swansongd.config.notify import NotifyConfig
from swansongd.notifications.outbox import Outbox
from swansongd.notifications.sent import SentNotifications
from swansongd.observe.notifications import Notification, NotificationKind, Origin, fields
from swansongd.util.rates import TokenBucket

NAME = "exec"
OUTPUT_BYTES_MAX = 400
"""The end of the output, for the log."""
AT_ONCE, PER_S = 3, 1 / 600
"""Runs of one kind, at once and on average: forged notices must not order any number of VMs."""
_POLL_S = 0.1
_REAP_S = 2.0
"""A killed process that blocks in the kernel, such as on a file server, may remain forever."""
_READ_BYTES = 2**16
"""Read in each interval: a command that prints more waits, and takes no time from the daemon."""
_INHERITED = (
    "PATH", "LANG", "LC_ALL", "TZ", "HOME",
    "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_REGION", "AWS_DEFAULT_REGION", "CLOUDSDK_CONFIG",
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy",
)  # fmt: skip
"""Variables of the daemon that the command gets.  None of them contains a secret of ``[notify]``."""
_LAUNCHER = "/usr/bin/env"
"""On the root file system.  Between fork and exec the interpreter stands still, which a command on a file
server that hangs would prolong without limit."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a command."""

    code: int | None
    """The exit code, negative for a signal; None: it was killed after the time limit."""
    output: str
    seconds: float


class Command:
    """One thread that runs the command for the notifications of its outbox, one after another.

    It runs once for each problem that begins, and never again after the daemon was killed meanwhile: to order
    two VMs is worse than to order none.  Drills and ends of problems do not run it.

    Args:
        config: with a command.
        origin: of all notifications.
        record: remembers which were begun.
    """

    def __init__(self, config: NotifyConfig, origin: Origin, record: SentNotifications) -> None:
        self.outbox = Outbox()
        self._config = config
        self._origin = origin
        self._record = record
        self._rates = {kind: TokenBucket(AT_ONCE, PER_S) for kind in NotificationKind}
        self._queued: set[str] = set()
        """Keys of all runs of this life of the daemon; the rate bounds their number."""
        self._stop = threading.Event()

    def start(self) -> None:
        lasting_thread("notify-exec", self._run).start()

    def stop(self) -> None:
        """Kill the command that runs."""
        self._stop.set()

    def put(self, notification: Notification) -> None:
        """Queue a notification, unless the command is not for it or has run for it."""
        is_wanted = notification.kind.value in self._config.exec_on and notification.source != DRILL
        key = _key(notification)
        if not is_wanted or notification.ends or key in self._queued or self._record.has(key):
            return
        if self._rates[notification.kind].take(time.monotonic()):
            self._queued.add(key)
            self.outbox.put(notification)
        else:
            self.outbox.refuse()

    def _run(self) -> None:
        while True:
            notification = self.outbox.take().notification
            if self._stop.is_set():
                self.outbox.finish("the daemon ended")
                continue
            try:
                self._record.add(_key(notification))
                done = run_bounded(
                    self._config.exec,
                    environment(fields(self._origin, notification)),
                    timeout_s=self._config.exec_timeout_s,
                    stop=self._stop,
                )
            except OSError as error:
                done = Outcome(127, error.strerror or type(error).__name__, 0.0)
            except Exception as error:
                done = Outcome(127, type(error).__name__, 0.0)
            self._finished(notification, done)

    def _finished(self, notification: Notification, done: Outcome) -> None:
        how = "was killed after the time limit" if done.code is None else f"ended with {done.code}"
        error = "" if done.code == 0 else f"the command {how}"
        self.outbox.finish(error)
        facts = {
            "kind": notification.kind.value,
            "exit_code": done.code,
            "seconds": round(done.seconds, 1),
            "output": done.output,
        }
        if error:
            _log.error("notification_command", **facts)
        else:
            _log.info("notification_command", **facts)


def environment(
    facts: Mapping[str, object], inherited: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The environment of the command: a few variables of the daemon, and the facts as ``SWANSONG_...``.

    Unknown values are empty.  Control characters of texts were escaped before.
    """
    made = {name: inherited[name] for name in _INHERITED if name in inherited}
    for name, value in facts.items():
        text = "" if value is None or value is False else "1" if value is True else str(value)
        made["SWANSONG_EVENT" if name == "kind" else f"SWANSONG_{name.upper()}"] = text
    return made


def run_bounded(
    command: tuple[str, ...],
    variables: Mapping[str, str],
    *,
    timeout_s: float,
    stop: threading.Event,
) -> Outcome:
    """Run a command in a process group of its own, and kill the group at its end or after the limit.

    Raises:
        OSError: it cannot be started.
    """
    began_mono_s = time.monotonic()
    process = subprocess.Popen(  # noqa: S603 - the command is from the configuration
        [_LAUNCHER, *command],
        env=dict(variables),
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    with process.stdout:
        fd = process.stdout.fileno()
        os.set_blocking(fd, False)
        output = b""
        has_time, has_ended = True, False
        try:
            # A command that ended while this thread did not run has ended, however late it is by now.
            while not (has_ended := _has_ended(process.pid)) and has_time:
                output = _read(fd, output)
                is_stopped = stop.wait(_POLL_S)
                has_time = not is_stopped and time.monotonic() - began_mono_s < timeout_s
        finally:
            code = _end(process)
        output = _read(fd, output)
    text = output.decode(errors="replace").strip()
    return Outcome(code if has_ended else None, text, time.monotonic() - began_mono_s)


def _end(process: subprocess.Popen[bytes]) -> int | None:
    """Kill the group, and return the exit code; None if the process cannot be killed now."""
    # The group's number is not free before the process is waited for.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        return process.wait(_REAP_S)
    return None


def _has_ended(pid: int) -> bool:
    """Whether the process has ended; it stays a zombie."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _read(fd: int, output: bytes) -> bytes:
    try:
        data = os.read(fd, _READ_BYTES)
    except BlockingIOError:
        data = b""
    return (output + data)[-OUTPUT_BYTES_MAX:]


def _key(notification: Notification) -> str:
    """The key under which the run is recorded: a notice that becomes more urgent orders no second VM.

    An advisory notice is the exception, because most of them are not followed by another one.
    """
    is_urgent = notification.kind is NotificationKind.NOTICE and notification.urgency != "advisory"
    key = (
        notification.key.removesuffix(f"/{notification.urgency}") if is_urgent else notification.key
    )
    return f"{NAME} {key}"
