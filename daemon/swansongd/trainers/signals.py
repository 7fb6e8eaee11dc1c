# SPDX-License-Identifier: Apache-2.0
"""Trainers without the hooks: their process, and the signal that it gets.

Each process is a start of the training.  The id of the start is computed from the pid, the start of the
process and the boot, so a restarted daemon finds the same id.

The signal is sent through a pidfd, and only to a process that survives it.

The default action of most signals ends the process.  So the target must have a handler for the signal, belong
to an allowed user, and be the training script itself: a launcher would die and leave its workers behind.
The pid comes from a file that the trainer writes, and the daemon may be able to signal any process of the VM.
The target is therefore never a process of another user, the daemon itself, or one of its ancestors.
"""

from __future__ import annotations

import hashlib
import os
import re
import select
import signal
import stat
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path, PurePath

from swansong import openat
from swansong.fields import PROCESS_PREFIX
from swansong_bucket.config.values import signal_number

from swansongd.config.config import TrainerConfig
from swansongd.core.events import (
    Event,
    ProcessFound,
    SignalledExited,
    SignalRefused,
    SignalSent,
)
from swansongd.trainers import peers, users
from swansongd.util.boot import booted_wall_ns

SYSTEMCTL_TIMEOUT_S = 2.0
LOOK_S = 1.0
LOOK_UNIT_S = 10.0
"""Interval at which the process is looked up: in the pid file, and with systemctl."""
REQUESTS_MAX = 64
"""Remembered requests, and watched processes after their signal."""
FILE_CLOCK = 5
"""CLOCK_REALTIME_COARSE: times of files are those of its last tick, so a file may look older than it is."""
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_FIRST_PID = 1
_PID_FILE = re.compile(rb"\s*([1-9][0-9]{0,9})\s*")
_LAUNCHERS = re.compile(
    r"(torchrun|deepspeed|accelerate(-launch)?|torch\.distributed\.(run|launch)"
    r"|deepspeed\.launcher\.\w+|accelerate\.commands\.\w+)"
)


class SignalRefusal(Exception):
    """The signal is not sent; ``str()`` is the reason and the advice.

    Args:
        reason: in one line.
        advice: for the operator.
        command: words of a command for root that puts it right.
    """

    def __init__(self, reason: str, advice: str = "", command: Sequence[str] = ()) -> None:
        super().__init__(f"{reason}: {advice}" if advice else reason)
        self.reason, self.advice, self.command = reason, advice, command


class SignalSender:
    """Signals the configured process, in a thread.

    Args:
        config: with a signal; ``pid_file`` takes precedence over ``unit``.
        allowed_uids: users that may own the process, see :func:`users.may_be_signalled`; the pid file may
            also belong to root.
        boot_id: of this boot.
        post: takes ProcessFound whenever the process changes, SignalSent or SignalRefused, and
            SignalledExited after the end of the process.
    """

    def __init__(
        self,
        config: TrainerConfig,
        allowed_uids: frozenset[int],
        *,
        boot_id: str,
        post: Callable[[Event], None],
    ) -> None:
        self._boot_id = boot_id
        self._booted_wall_ns = booted_wall_ns()
        self._found = ProcessFound("")
        self._looking = threading.Lock()
        self._config = config
        number = signal_number(config.signal)
        assert number is not None  # the configuration refuses other names
        self._number = number
        self._allowed_uids = allowed_uids
        self._post = post
        self._known: deque[str] = deque(maxlen=REQUESTS_MAX)
        self._waiting: deque[str] = deque(maxlen=REQUESTS_MAX)
        self._signalled: dict[int, tuple[str, int]] = {}  # by pidfd: the request and the process
        self._wakefd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poller = select.poll()
        self._poller.register(self._wakefd, select.POLLIN)
        self._stop = threading.Event()
        # Slow to import, and the commands only look for the process.
        from swansong_bucket.util.threads import lasting_thread  # noqa: PLC0415

        self._thread = lasting_thread("signals", self._run)

    def start(self) -> None:
        """Look the process up in the pid file, then start the thread."""
        self.look()
        self._thread.start()

    def stop(self) -> None:
        """End the thread; wait a second for it, because it may read a file that hangs."""
        self._stop.set()
        os.eventfd_write(self._wakefd, 1)
        if self._thread.ident is not None:
            self._thread.join(1.0)

    def look(self) -> None:
        """Look the process up in the pid file, if there is one; from any thread."""
        if self._config.pid_file is not None:
            self._look()

    def send(self, request_id: str) -> None:
        """Signal the trainer, once per request, without blocking.  For one thread."""
        if request_id not in self._known:
            self._known.append(request_id)
            self._waiting.append(request_id)
            os.eventfd_write(self._wakefd, 1)

    def examine(self) -> int:
        """The pid of the process that would be signalled now; sends no signal.

        Raises:
            SignalRefusal: no process would be signalled.
        """
        pid, pidfd = self._target()
        os.close(pidfd)
        return pid

    def _run(self) -> None:
        every_s = LOOK_S if self._config.pid_file is not None else LOOK_UNIT_S
        look_mono_s = 0.0
        while not self._stop.is_set():
            if time.monotonic() >= look_mono_s:
                self._look()
                look_mono_s = time.monotonic() + every_s
            left_s = max(0.0, look_mono_s - time.monotonic())
            for fd, _ in self._poller.poll(1000 * left_s):
                if fd == self._wakefd:
                    os.eventfd_read(fd)
                else:
                    self._post(SignalledExited(*self._forget(fd)))
            while self._waiting:
                self._send(self._waiting.popleft())

    def _look(self) -> None:
        """Post the process if it is another one than before."""
        with self._looking:
            found = ProcessFound("")
            with suppress(SignalRefusal, OSError, ValueError, IndexError):
                found = self._identified(self._resolve())
            if found != self._found:
                self._found = found
                self._post(found)

    def _identified(self, pid: int) -> ProcessFound:
        ticks = peers.start_ticks(pid)
        if peers.uids_of(pid) - self._allowed_uids:
            return ProcessFound("")
        facts = f"{self._boot_id} {pid} {ticks}".encode()
        start_id = PROCESS_PREFIX + hashlib.sha256(facts).hexdigest()[:16]
        started_ns = self._booted_wall_ns + ticks * 10**9 // os.sysconf("SC_CLK_TCK")
        return ProcessFound(start_id, pid, started_ns)

    def _send(self, request_id: str) -> None:
        self._look()  # first: the answer belongs to this process
        try:
            pid, pidfd = self._target()
        except SignalRefusal as refusal:
            self._post(SignalRefused(request_id, str(refusal)))
            return
        except Exception as error:  # the decision loop needs an answer to each request
            self._post(SignalRefused(request_id, f"the process cannot be examined: {error}"))
            return
        self._await_file_clock()
        try:
            # The checks read /proc by pid.  They are valid because the process of the pidfd still runs.
            signal.pidfd_send_signal(pidfd, self._number)
        except OSError as error:
            os.close(pidfd)
            self._post(SignalRefused(request_id, _not_sent(pid, error)))
            return
        self._post(SignalSent(request_id, pid))
        if len(self._signalled) >= REQUESTS_MAX:
            self._forget(next(iter(self._signalled)))
        self._signalled[pidfd] = request_id, pid
        self._poller.register(pidfd, select.POLLIN)

    def _await_file_clock(self) -> None:
        """Wait for its next tick: the times of files of the answer are then later than the request."""
        now_ns, tick_s = time.time_ns(), time.clock_getres(FILE_CLOCK)
        for _ in range(10):  # no more: the wall clock may be set back
            if time.clock_gettime_ns(FILE_CLOCK) >= now_ns or self._stop.wait(tick_s / 4):
                return

    def _forget(self, pidfd: int) -> tuple[str, int]:
        self._poller.unregister(pidfd)
        os.close(pidfd)
        return self._signalled.pop(pidfd)

    def _target(self) -> tuple[int, int]:
        pid = self._resolve()
        try:
            pidfd = peers.open_process(pid)
        except ProcessLookupError:
            pid_file = self._config.pid_file
            remove = () if pid_file is None else ("rm", "-f", str(pid_file))
            raise SignalRefusal(f"process {pid} has ended", command=remove) from None
        with openat.closed_on_error(pidfd):
            self._check(pid)
        return pid, pidfd

    def _check(self, pid: int) -> None:
        if pid == _FIRST_PID or pid in peers.lineage(os.getpid()):
            raise SignalRefusal(
                f"process {pid} is the daemon, one of its ancestors or the first process",
                "let the training script write its own pid to trainer.pid_file",
            )
        foreign_uids = peers.uids_of(pid) - self._allowed_uids
        if foreign_uids:
            named = ", ".join(map(str, sorted(foreign_uids)))
            raise SignalRefusal(
                f"process {pid} belongs to user id {named}, which is not in trainer.users",
                "add that user if the process is the trainer",
            )
        name = program(peers.command_line(pid))
        if _LAUNCHERS.fullmatch(name):
            raise SignalRefusal(
                f"process {pid} is the launcher {name}, which would die or end the job",
                "let the training script write its own pid to trainer.pid_file",
            )
        if not peers.catches_signal(pid, self._number):
            raise SignalRefusal(
                f"process {pid} has no handler for {self._config.signal}, which would end it",
                "install one in the training script, or use the hooks",
            )

    def _resolve(self) -> int:
        return configured_process(self._config, self._allowed_uids)


def configured_process(config: TrainerConfig, allowed_uids: frozenset[int]) -> int:
    """The pid in ``trainer.pid_file``, or the main process of ``trainer.unit``.

    Args:
        config: of the trainer.
        allowed_uids: users other than root that may own the pid file.

    Raises:
        SignalRefusal: neither names a process.
    """
    if config.pid_file is not None:
        return _pid_from_file(config.pid_file, allowed_uids | {users.ROOT})
    if config.unit is not None:
        return _main_pid(config.unit)
    raise SignalRefusal("the trainer's process is unknown", "set trainer.pid_file or trainer.unit")


def _pid_from_file(path: Path, owners: frozenset[int]) -> int:
    try:
        # Do not follow a link, and do not block on a FIFO.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise SignalRefusal(
            f"the pid file {path} cannot be opened ({error.strerror})",
            "the training script writes it when it starts",
        ) from None
    with openat.held(fd):
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            raise SignalRefusal(f"the pid file {path} is not a regular file")
        if facts.st_uid not in owners:
            raise SignalRefusal(
                f"the pid file {path} has owner {facts.st_uid}, not root or one of trainer.users",
                "remove it: the training script writes it when it starts",
                ("rm", "-f", str(path)),
            )
        if facts.st_mode & _WRITABLE_BY_OTHERS:
            raise SignalRefusal(
                f"the pid file {path} has mode {facts.st_mode & 0o777:o}, and only its owner may write to it",
                f"chmod 644 {path}",
                ("chmod", "644", str(path)),
            )
        match = _PID_FILE.fullmatch(os.read(fd, 64))
    if match is None:
        raise SignalRefusal(f"the pid file {path} does not contain exactly one number")
    return int(match[1])


def _not_sent(pid: int, error: OSError) -> str:
    if isinstance(error, ProcessLookupError):
        return f"process {pid} has ended"
    if isinstance(error, PermissionError):
        return (
            f"no permission to signal process {pid}: give the daemon CAP_KILL, "
            "or run both as the same user"
        )
    return f"signalling process {pid} failed: {error.strerror}"


def _main_pid(unit: str) -> int:
    command = ["systemctl", "show", "--property", "MainPID", "--value", "--", unit]
    try:
        done = subprocess.run(  # noqa: S603 - the unit's name is the operator's
            command, capture_output=True, timeout=SYSTEMCTL_TIMEOUT_S, check=True, text=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise SignalRefusal(
            f"systemctl did not return the main process of {unit}: {error}"
        ) from None
    pid = 0
    with suppress(ValueError):
        pid = int(done.stdout)
    if pid <= 0:
        raise SignalRefusal(f"unit {unit} has no main process: is it running?")
    return pid


def program(arguments: list[str]) -> str:
    """Name of the program, or of the script or module that Python runs."""
    if not arguments:
        return ""
    name = PurePath(arguments[0]).name
    if not name.startswith(("python", "pypy")):
        return name
    rest = iter(arguments[1:])
    for argument in rest:
        if argument == "-m":
            return next(rest, "")
        if argument in ("-X", "-W", "--check-hash-based-pycs"):
            next(rest, None)
        elif argument.startswith("-"):
            if argument.endswith("c"):
                return ""
        else:
            return PurePath(argument).name
    return ""
