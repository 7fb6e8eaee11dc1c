# SPDX-License-Identifier: Apache-2.0
"""The supervisor of ``swansong run``: starts the daemon and the trainer, restarts them, and reports verdicts.

It has one thread, and polls: signals only set a field.
"""

from __future__ import annotations

import math
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from swansong.protocol import (
    EXIT_SAVED,
    SIGTERM_LIMIT_S,
    SOCKET_ENV,
    Noted,
    Notify,
    NotifyWithdrawn,
)
from swansong_bucket.errors import ConfigError, FencedError, SwansongError, Unreachable
from swansong_bucket.model import Health, Verdict
from swansongd.observe.status import DaemonStatus
from swansongd.sources.manual import SOON_S, identity_of

from swansong_tools.commands import run_processes as processes
from swansong_tools.commands.common import note
from swansong_tools.commands.daemon_client import DaemonClient
from swansong_tools.commands.notify import EXIT_BY_VERDICT, committed_text, verdict_on
from swansong_tools.units import human_s

_EXIT_BY_VERDICT = {**EXIT_BY_VERDICT, Verdict.SAFE: EXIT_SAVED}
_POLL_S = 0.1
_LOOK_S, _LOOK_SOON_S = 1.0, 0.2
"""Time between two looks at the status; the second one after a notice or a signal."""
_RESTART_S = 1.0
_READY_LIMIT_S = 60.0
_HANG_LIMIT_S = 45.0
"""A daemon that does not answer for this long is killed, as with ``WatchdogSec=`` of the daemon's unit."""
_STOP_LIMIT_S = 10.0
"""Time for a trainer to end after its signal, and for the daemon."""
_UPLOAD_LIMIT_S = 300.0
"""As :meth:`swansong.Guard.finish` waits at most."""
_FOUND_S = 1.0
"""Longer than the daemon takes to find a set that the trainer has sealed."""
_CLEAN_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)
_NO_RESTART = (0, EXIT_SAVED, *(-number for number in _CLEAN_SIGNALS))
"""As ``Restart=on-failure`` and ``RestartPreventExitStatus=`` of a trainer's unit."""
_DAEMON_FINAL = (ConfigError.exit_code, FencedError.exit_code)
"""As ``RestartPreventExitStatus=`` of the daemon's unit."""


@dataclass(kw_only=True, slots=True)
class Supervisor:
    """Runs one trainer.

    Args:
        socket: of the daemon.
        config: configuration of the daemon to start; None: a daemon listens on the socket already.
        log: file for the log of the daemon to start.
        sigterm_grace_s: time until SIGKILL after SIGTERM.
        command: of the trainer.
        restarts: of the trainer, after failures without a newer commit between them.
    """

    socket: Path
    config: Path | None
    log: Path
    sigterm_grace_s: float
    command: Sequence[str]
    restarts: int
    _signal: int = 0
    _daemon: subprocess.Popen[bytes] | None = None
    _trainer: subprocess.Popen[bytes] | None = None
    _start_daemon_mono_s: float = 0.0
    _look_mono_s: float = 0.0
    _hang_mono_s: float = math.inf
    """The daemon hangs if it has not answered by then."""
    _status: DaemonStatus | None = None
    """None while the daemon does not answer."""
    _has_been_ready: bool = False
    _has_connected: bool = False
    """Whether the trainer has used its hooks."""
    _verdict: Verdict | None = None
    """The newest one since the start."""
    _reported: dict[str, object] = field(default_factory=dict)
    """The last fact of each kind that was printed."""
    _committed_step: int = -1
    _failures: int = 0
    """Failures of the trainer since that commit."""

    def run(self) -> int:
        """Run until the trainer has ended and its checkpoints are stored; returns the exit code."""
        processes.handle_stops(self._on_signal)
        try:
            return self._run()
        except SwansongError as error:
            _say(error.line())
            return error.exit_code
        finally:
            if self._daemon is not None:
                # Without systemd a SIGTERM is a notice; a SIGINT never is.
                self._daemon.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    self._daemon.wait(_STOP_LIMIT_S)
            processes.kill_descendants()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signal = self._signal or number

    def _run(self) -> int:
        # A trainer that starts before the daemon answers would train from scratch.
        if not self._wait(_READY_LIMIT_S, lambda: self._status or self._signal):
            problem = f"starting the daemon failed: no answer within {_READY_LIMIT_S:g} s"
            raise Unreachable(problem, hint=f"Its log is {self.log}")
        while not self._signal:
            trainer = self._start_trainer()
            self._wait(math.inf, lambda: self._signal or trainer.returncode is not None)  # noqa: B023
            code = trainer.returncode
            if code is not None:
                self._kill_trainer()  # what it has left running
            if code:  # a signal to all processes of a job may reach the trainer first
                self._wait(_RESTART_S, lambda: self._signal)
            if code is None or (code and self._signal):
                return self._interrupt(trainer)
            if code in _NO_RESTART:
                return self._finish(code)
            if self._is_saved_at_a_notice():
                return self._finish(EXIT_SAVED)
            if self._failures >= self.restarts:
                return self._finish(code)
            self._failures += 1
            _say(f"the trainer {_ended(code)}; restart {self._failures} of {self.restarts}")
        return processes.exit_code(-self._signal)

    # ------------------------------------------------------------------ one turn

    def _wait(self, limit_s: float, is_over: Callable[[], object]) -> bool:
        """Watch all processes until the condition holds; returns False after the limit."""
        limit_mono_s = time.monotonic() + limit_s
        while not is_over():
            if time.monotonic() >= limit_mono_s:
                return False
            time.sleep(_POLL_S)
            self._note_ends(processes.reaped())
            if self.config and not self._daemon and time.monotonic() >= self._start_daemon_mono_s:
                self._start_daemon(self.config)
            if time.monotonic() >= self._look_mono_s:
                self._look()
            if self._daemon and self._has_been_ready and time.monotonic() >= self._hang_mono_s:
                _say("the daemon hangs: it does not answer; killing it")
                self._daemon.kill()
                self._hang_mono_s = math.inf
        return True

    def _note_ends(self, ended: dict[int, int]) -> None:
        for process in filter(None, (self._trainer, self._daemon)):
            process.returncode = ended.get(process.pid, process.returncode)
        if self._daemon is None or self._daemon.returncode is None:
            return
        code, self._daemon, self._status = self._daemon.returncode, None, None
        if not self._has_been_ready or code in _DAEMON_FINAL:
            for line in self.log.read_text(errors="replace").splitlines()[-2:]:  # problem and fix
                _say(line)
            error = SwansongError(f"the daemon {_ended(code)}", hint=f"Its log is {self.log}")
            error.exit_code = processes.exit_code(code) or 1
            raise error
        _say(f"the daemon {_ended(code)}; starting it again; its log is {self.log}")
        self._start_daemon_mono_s = time.monotonic() + _RESTART_S

    def _look(self) -> None:
        try:
            with DaemonClient(self.socket) as daemon:
                self._status = daemon.status()
        except Unreachable:
            self._status = None
            # Counted from a query without an answer: this process may have been stopped, too.
            if self._hang_mono_s == math.inf:
                self._hang_mono_s = time.monotonic() + _HANG_LIMIT_S
        else:
            self._report(self._status)
            self._has_been_ready, self._hang_mono_s = True, math.inf
        is_urgent = self._signal or self._status is None or self._status.evacuation is not None
        self._look_mono_s = time.monotonic() + (_LOOK_SOON_S if is_urgent else _LOOK_S)

    def _report(self, status: DaemonStatus) -> None:
        """Print what has changed: the health of the store, notices, verdicts."""
        store, evacuation, last = status.store, status.evacuation, status.last_verdict
        # A start may be too short for a look to find its trainer.
        self._has_connected |= bool(status.trainers) or status.generation is not None
        if store is not None and self._is_new("store", store.health, first=Health.OK):
            _say(f"the store is {store.health}: {store.reason}")
        is_own = self._signal != 0  # printed already
        if evacuation is not None and self._is_new("evacuation", evacuation.id) and not is_own:
            left = human_s(evacuation.seconds_left)
            _say(f"notice from {evacuation.reason}, {left} left: saving a checkpoint")
        if last is not None:
            verdict = (last.verdict, last.evacuation, last.generation, last.step)
            # The verdict of an earlier start is not news.
            if self._is_new("verdict", verdict, first=None if self._has_been_ready else verdict):
                self._verdict = last.verdict
                _say(f"{last.verdict}: {committed_text(status)}")
        if status.last_commit is not None and status.last_commit.step > self._committed_step:
            self._committed_step, self._failures = status.last_commit.step, 0

    def _is_new(self, kind: str, fact: object, *, first: object = None) -> bool:
        is_new = self._reported.get(kind, first) != fact
        self._reported[kind] = fact
        return is_new

    # ------------------------------------------------------------------ the processes

    def _start_daemon(self, config: Path) -> None:
        # A unit that runs this command may expect messages, but not from this daemon.
        of_systemd = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
        env = {name: value for name, value in os.environ.items() if name not in of_systemd}
        program = (sys.executable, "-P", "-m", "swansongd.service.main", "--config", str(config))
        with open(self.log, "ab") as log:
            # Slurm signals every process of a job.  The daemon would stop before the checkpoint is stored.
            self._daemon = processes.start(
                program, env, stdin=subprocess.DEVNULL, output=log, blocked=[signal.SIGTERM]
            )
        self._hang_mono_s = time.monotonic() + _READY_LIMIT_S

    def _start_trainer(self) -> subprocess.Popen[bytes]:
        self._has_connected = False
        # The first two variables are those of the drop-in of a trainer's unit, which says why.
        env = {
            "PYTHONHASHSEED": "0",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            **os.environ,
            SOCKET_ENV: str(self.socket),
        }
        # In its own session, a program cannot read from the terminal.
        stdin = subprocess.DEVNULL if sys.stdin is None or sys.stdin.isatty() else None
        try:
            self._trainer = processes.start(self.command, env, stdin=stdin, output=None)
        except OSError as error:
            problem = f"starting {self.command[0]} failed: {error.strerror}; name a program"
            raise ConfigError([problem]) from None
        return self._trainer

    def _kill_trainer(self) -> None:
        spared = () if self._daemon is None else (self._daemon.pid,)
        self._note_ends(processes.kill_descendants(spared))

    # ------------------------------------------------------------------ the end

    def _interrupt(self, trainer: subprocess.Popen[bytes]) -> int:
        """Save a checkpoint, end the trainer, and return the exit code that shows the verdict."""
        verdict = self._evacuate(signal.Signals(self._signal))
        # Ranks that are signalled save once more, each without those that have ended: the next start would
        # resume from that set, instead of from the whole checkpoint.
        has_ranks = self._status is not None and any(
            t.world_size > 1 for t in self._status.trainers
        )
        if verdict is None and self._has_connected:
            trainer.send_signal(signal.SIGTERM)  # at which the hooks save without a notice
            self._wait(SIGTERM_LIMIT_S, lambda: trainer.returncode is not None)
        elif verdict is not Verdict.SAFE or not has_ranks:
            trainer.send_signal(self._signal)
            self._wait(_STOP_LIMIT_S, lambda: trainer.returncode is not None)
        self._kill_trainer()
        if verdict is None:
            code = trainer.returncode
            return self._finish(-signal.SIGKILL if code is None else code)
        _say("the same command line resumes the run")
        return _EXIT_BY_VERDICT[verdict]

    def _evacuate(self, number: signal.Signals) -> Verdict | None:
        """Give the daemon a notice, and wait for its verdict; None without a verdict."""
        self._look()  # the trainer may have connected since the last look
        if not self._has_connected:
            _say(
                f"{number.name}: the trainer is not connected to the daemon, and ends without a checkpoint"
            )
            return None
        left_s = SOON_S if number == signal.SIGINT else self.sigterm_grace_s
        notice = Notify(secrets.token_hex(8), left_s, f"{number.name} to swansong run")
        identity = identity_of(notice.nonce, drill=notice.drill)
        limit_mono_s = time.monotonic() + left_s
        self._wait(left_s, lambda: self._status)  # the daemon may restart at this moment
        try:
            self._tell(notice)
        except Unreachable as error:
            _say(f"{error}; the trainer saves a checkpoint, and there is no verdict")
            return None
        _say(f"{number.name}: saving a checkpoint; Ctrl-C again ends everything at once")
        self._wait(
            limit_mono_s - time.monotonic(),
            lambda: self._status and verdict_on(self._status, identity),
        )
        found = self._status and verdict_on(self._status, identity)
        with suppress(Unreachable):  # the machine stays: the next start must not find the notice
            self._tell(NotifyWithdrawn(reason="the command ends"))
        return found.verdict if found else None

    def _tell(self, message: Notify | NotifyWithdrawn) -> None:
        with DaemonClient(self.socket) as daemon:
            daemon.request(message, Noted)

    def _is_saved_at_a_notice(self) -> bool:
        """Whether the machine is about to be terminated, and the checkpoint is stored.

        Ranks that end with exit code 75 make torchrun end with 1.
        """
        self._look()
        if self._status is None or self._status.evacuation is None:
            return False
        return self._wait(_FOUND_S, lambda: self._is_safe() or self._signal) and self._is_safe()

    def _is_safe(self) -> bool:
        status = self._status
        return bool(status and status.evacuation and status.verdict is Verdict.SAFE)

    def _finish(self, code: int) -> int:
        """Wait until everything in staging is stored; returns the exit code of the command."""
        if code not in (0, EXIT_SAVED):
            _say(f"the trainer {_ended(code)}")
        before = self._signal
        self._wait(_FOUND_S, lambda: self._signal != before)
        self._look()
        if pending := self._pending():
            _say(f"waiting for {pending}")
            self._wait(_UPLOAD_LIMIT_S, lambda: not self._pending() or self._signal != before)
        if pending := self._pending():
            _say(f"ending without {pending}; the next start on this machine continues")
        if code == EXIT_SAVED and self._verdict is not None:
            return _EXIT_BY_VERDICT[self._verdict]
        return processes.exit_code(code)

    def _pending(self) -> str:
        """The reason to wait before the command ends; empty without one."""
        status = self._status
        if status is not None and status.evacuation is not None and status.verdict is None:
            return "the verdict"
        if self.config is None:
            return ""  # the daemon uploads after the end of this command as well
        if status is None:
            return "the daemon"
        return "the upload of checkpoints" if status.flush or status.unsent.sets else ""


def _say(line: str) -> None:
    # After the end of an ssh session the terminal is gone, and the checkpoint still has to be saved.
    with suppress(OSError):
        note(line)


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was ended by {signal.Signals(-code).name}"
