# SPDX-License-Identifier: Apache-2.0
"""Checks that a trainer resumes bit by bit: compares an uninterrupted run with one that is killed and
resumed.

::

    from swansong.testing import check_resume

    def test_resume(tmp_path):
        check_resume([sys.executable, "train.py"], steps=40, kill_at=[7, 12, 31], directory=tmp_path)

No daemon, root or cloud is needed: a stand-in answers the hooks.  At each step of ``kill_at`` it requests a
checkpoint, kills the trainer with SIGKILL when the checkpoint is sealed, and starts the same command
again.  Both runs take a last checkpoint at step ``steps``, or at their ends.  All bytes of the two must be
equal: weights, optimizer, random generators, position in the data, and all else that the trainer saves.  If
they differ, both runs are repeated up to the first difference, and the error names the step, the objects and
the likely cause.

``python -m swansong.testing --kill-at 7 -- python train.py`` is the same check as a command, and
``SWANSONG_CHECK=1 python train.py`` runs it when a fresh run of the script begins.

The trainer must seed all generators that it uses (``swansong.torch.seed_all``).  If nothing else differs, a
generator that differs between two uninterrupted starts is not compared.  Run the trainer with
deterministic kernels, or on the CPU with a fixed number of threads (the default here is one).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

from swansong import layout, protocol
from swansong._differences import Difference, find_differences, has_loader, likely_cause
from swansong.fields import ProtocolError
from swansong.guard import RESTORE_ENV
from swansong.protocol import (
    CHECK_ENV,
    Accepted,
    Declined,
    Failed,
    Hello,
    Message,
    Sealed,
)

_DETERMINISTIC = {
    "PYTHONUNBUFFERED": "1",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}


_NOT_DETERMINISTIC = (
    "the trainer is not deterministic: two uninterrupted starts differ, too; seed all generators with"
    " seed_all(), and use one thread"
)
_COMMAND_LIMIT_S = 1800.0
"""Longest time of one start by the command: the script may load a large data set first."""
_LINE_BYTES_MAX = 2**20
"""A longer line is read in pieces."""
_END_PATIENCE_S = 10.0
"""Longest wait for killed processes to end.  Only a blocked device driver delays the end."""


class ResumeMismatchError(AssertionError):
    """The resumed run differs from the uninterrupted one; the text names the place."""


class TrainerFailedError(AssertionError):
    """The trainer ended, declined or stopped making progress before it had saved."""


@dataclass
class ResumeReport:
    """The result of :func:`check_resume` for two equal runs."""

    saved_steps: list[int] = field(default_factory=list)
    """Steps at which the run was saved and killed."""
    last_step: int = 0
    """Step of the last checkpoints, which were compared."""
    files: int = 0
    """Number of compared files of the last checkpoint."""
    losses: int = 0
    """Number of compared losses: of steps up to ``last_step`` that both runs printed."""
    unseeded: list[str] = field(default_factory=list)
    """Generators that were not compared, because they differ between two uninterrupted starts."""


def check_resume(
    command: Sequence[str] | Callable[[], object],
    *,
    steps: int | None = None,
    kill_at: Sequence[int | str],
    directory: str | os.PathLike[str] | None = None,
    ranks: int = 1,
    has_launcher: bool = False,
    environment: Mapping[str, str] | None = None,
    loss_of: Callable[[str], tuple[int, float] | None] | None = None,
    ignoring: str = "(?!)",
    limit_s: float = 120.0,
    is_verbose: bool = False,
) -> ResumeReport:
    """Compare a run that is killed and resumed with one that is not.

    Args:
        command: starts the trainer; or a function at the top level of a module, which runs in a new Python.
        steps: step of the last checkpoint, at which the runs are compared.  The trainer must reach it.  None:
            both runs train to their ends, ``guard.finish()``, and must end at the same step.
        kill_at: moments at which a start of the trainer is saved and killed.  Each is a step, whose
            ``guard.step()`` saves, or a regular expression that matches a line of output.
        directory: for staging and the trainer's stderr; default: a temporary directory, removed at the end.
        ranks: number of ranks.
        has_launcher: whether ``command`` starts all ranks, as torchrun does.  Otherwise it is started once
            for each rank, with the environment variables of torchrun.
        environment: variables in addition to those of this process.
        loss_of: parses step and loss from a line of output, or returns None; default: lines that are JSON
            objects with ``step`` and ``loss``.  The trainer must print the line before ``guard.step()``,
            because it is killed when the checkpoint of that step is sealed.
        ignoring: a regular expression; files of a checkpoint whose path matches may differ, and places in its
            index, such as ``rank-00000/state.json:values.started``.
        limit_s: longest time of one start of the trainer, in seconds.
        is_verbose: print each start of the trainer on stderr.

    Raises:
        ResumeMismatchError: the runs differ.
        TrainerFailedError: the trainer did not save at a moment of ``kill_at``, or at ``steps``; or its
            processes do not agree with ``ranks``.
    """
    if callable(command):
        code = f"from {command.__module__} import {command.__qualname__} as f; f()"
        command = [sys.executable, "-c", code]
    trainer = _Trainer(
        list(command),
        ranks,
        has_launcher,
        dict(environment or {}),
        loss_of or _json_loss,
        limit_s,
        is_verbose,
    )
    if directory is not None:
        return _compare(trainer, steps, kill_at, Path(directory), ignoring)
    with tempfile.TemporaryDirectory(prefix="swansong-check-") as temporary:
        return _compare(trainer, steps, kill_at, Path(temporary), ignoring)


def _summary(report: ResumeReport) -> str:
    kills = " and ".join(f"step {step}" for step in report.saved_steps)
    summary = (
        f"killed and resumed at {kills}, the run is equal to the bit at step {report.last_step}"
    )
    return summary + (f", except for {', '.join(report.unseeded)}" if report.unseeded else "")


def _compare(
    trainer: _Trainer,
    steps: int | None,
    kill_at: Sequence[int | str],
    directory: Path,
    ignoring: str,
) -> ResumeReport:
    report = ResumeReport()
    reference, resumed = _Run(directory / "reference"), _Run(directory / "resumed")
    wanted = trainer.until_saved(reference, steps)
    saved: list[Path] = []
    losses_of_first: dict[int, float] = {}
    for moment in kill_at:
        saved.append(trainer.until_saved(resumed, moment))
        losses_of_first = losses_of_first or dict(resumed.losses)
    report.saved_steps = [_step_of(path) for path in saved]
    got = trainer.until_saved(resumed, steps)
    report.last_step = last = _step_of(wanted)
    # Either run may have printed losses of later steps before it was killed.
    both = [step for step in reference.losses.keys() & resumed.losses.keys() if step <= last]
    report.losses = len(both)
    loss = _first_difference(reference.losses, resumed.losses, last)
    if _step_of(got) != last:
        raise ResumeMismatchError(
            f"the resumed run ends at step {_step_of(got)}, and the uninterrupted one at step {last}:"
            " count the steps from guard.restore()"
        )
    found, report.files = find_differences(wanted, got, ignoring)
    if not found and loss is None:
        return report
    repeat = _Repeat(trainer, directory, saved, ignoring)
    first_step, unresumed = repeat.without_resume(kill_at) or (last, found)
    repeat.unseeded = frozenset().union(*(each.generators for each in unresumed))
    report.unseeded = sorted(repeat.unseeded)
    found, _ = find_differences(wanted, got, ignoring, repeat.unseeded)
    if not found and loss is None:
        return report
    has_other_losses = _first_difference(reference.losses, losses_of_first, first_step) is not None
    if has_other_losses or not all(each.generators for each in unresumed):
        step, found, cause = first_step, unresumed, _NOT_DETERMINISTIC
    else:
        step, found = repeat.first(loss) or (last, found)
        cause = likely_cause(found, has_loader(wanted))
    lines = ["the resumed run differs from the uninterrupted one"]
    if loss is not None:
        before, after = reference.losses[loss], resumed.losses[loss]
        lines += [f"step {loss} is the first whose loss differs: {after!r} instead of {before!r}"]
    lines += [f"the checkpoints of step {step} differ:"] if found else []
    lines += [f"  {difference.text}" for difference in found]
    raise ResumeMismatchError("\n".join([*lines, f"likely cause: {cause}"]))


def _first_difference(
    wanted: Mapping[int, float], got: Mapping[int, float], last: int
) -> int | None:
    """Return the first step, up to ``last``, whose losses differ."""
    for step in sorted(wanted.keys() & got.keys()):
        if step <= last and struct.pack("d", wanted[step]) != struct.pack("d", got[step]):
            return step
    return None


@dataclass
class _Repeat:
    """Repeats parts of both runs after a mismatch, to find the first checkpoints that differ."""

    trainer: _Trainer
    directory: Path
    saved: list[Path]
    """Checkpoints at which the resumed run was killed."""
    ignoring: str
    unseeded: frozenset[str] = frozenset()
    """Names of generators that may differ."""
    count: int = 0

    def without_resume(self, moments: Sequence[int | str]) -> tuple[int, list[Difference]] | None:
        """Return how two starts differ that resume nothing, and their step; None if this is unknown."""
        if not self.saved:
            return None
        step = _step_of(self.saved[0])
        try:
            one = self.saved[0]
            if not isinstance(moments[0], int):
                one = self._until(step, None)  # another moment of the step may have another state
            other = self._until(step, None)
        except TrainerFailedError:
            return step, []
        found, _ = find_differences(other, one, self.ignoring)
        return step, found if _step_of(one) == _step_of(other) else []

    def first(self, loss: int | None) -> tuple[int, list[Difference]] | None:
        """Return the first step whose checkpoints differ, and how; None if no repeated part differs.

        Args:
            loss: first step whose loss differs.  Without one, the steps of ``saved`` are compared.
        """
        pairs = [(_step_of(path), path) for path in self.saved]
        if loss is not None:
            starts = [path for path in self.saved if _step_of(path) < loss]
            pairs = [(loss, starts[-1])] if starts else []
        for step, path in pairs:
            try:
                wanted = self._until(step, None)
                got = self._until(step, path) if loss is not None else path
            except TrainerFailedError:
                return None
            found, _ = find_differences(wanted, got, self.ignoring, self.unseeded)
            if found and _step_of(wanted) == _step_of(got):
                return step, found
        return None

    def _until(self, step: int, start: Path | None) -> Path:
        self.count += 1
        name = f"repeat-{self.count}-until-{step}"
        return self.trainer.until_saved(_Run(self.directory / name, start), step)


class _Run:
    """One logical run: its staging directory, and the losses of all its starts."""

    def __init__(self, directory: Path, newest: Path | None = None) -> None:
        self.directory = directory
        self.newest = newest
        """The checkpoint from which the next start resumes.  One that is sealed between it and the kill, such
        as the end of a short run, does not count: the power is cut at once."""
        self.staging = directory / "staging"
        self.staging.mkdir(parents=True)
        self.starts = 0
        self.losses: dict[int, float] = {}


@dataclass
class _Trainer:
    command: list[str]
    ranks: int
    has_launcher: bool
    environment: dict[str, str]
    loss_of: Callable[[str], tuple[int, float] | None]
    limit_s: float
    is_verbose: bool = False
    """Whether each start is printed."""

    def until_saved(self, run: _Run, moment: int | str | None) -> Path:
        """Start the trainer, save it at this moment, kill it, and return the sealed set.

        None is the end of the run.
        """
        if self.is_verbose:
            until = "its end" if moment is None else repr(moment)
            print(f"{run.directory.name}: start {run.starts + 1}, until {until}", file=sys.stderr)
        run.starts += 1
        errors = run.directory / f"stderr-{run.starts}"
        with contextlib.closing(_Start(self, run, moment)) as start, errors.open("w") as stderr:
            start.run(stderr)
        if start.misuse:
            raise TrainerFailedError(start.misuse)
        if isinstance(start.answer, Sealed):
            run.newest = run.staging / start.answer.directory
            return run.newest
        problem = start.problem
        if start.answer is not None:
            problem = f"the trainer did not save: {start.answer.reason}"
        tail = errors.read_text(errors="replace")[-2000:]
        waiting = "waiting for guard.finish()" if moment is None else f"waiting for {moment!r}"
        raise TrainerFailedError(f"start {run.starts}, {waiting}: {problem}\n{tail}")


class _Start:
    """One start of the trainer, with a stand-in for the daemon of its ranks.

    One loop, in the caller's thread, handles connections, messages, lines of output and ends of processes.
    """

    def __init__(self, trainer: _Trainer, run: _Run, moment: int | str | None) -> None:
        self.answer: Sealed | Failed | Declined | None = None
        """The first answer to the request for a checkpoint."""
        self.misuse = ""
        """Why the processes of the trainer cannot be checked."""
        self.problem = ""
        """Why no answer will arrive, unless one has arrived already."""
        self._trainer, self._run, self._moment = trainer, run, moment
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ended = 0
        self._unfinished_lines: dict[int, bytes] = {}
        """By pid."""
        self._ranks: dict[socket.socket, int] = {}
        """Rank of each connection, known after its Hello."""
        self._start_id = ""
        """Id of the start, which rank 0 has drawn."""
        self._without_start: list[socket.socket] = []
        """Connections of ranks that do not know the start yet, and decline requests."""
        self._pidfds: dict[int, int] = {}
        """By pid, for each process that sent a Hello: at the kill, the pid alone may be another process."""
        self._pid_of: dict[int, int] = {}
        """By rank, of the process that said last that it is this rank."""
        self._must_restore = run.newest is not None
        """Whether there is a checkpoint, and no rank has asked for it."""
        self._accepted: dict[int, int] = {}
        self._held: list[tuple[socket.socket, Message]] = []
        self._target: protocol.Target | None = None
        self._is_requested = isinstance(moment, int)
        # Short, because the path of a socket is limited to about 100 characters.
        self._directory = tempfile.TemporaryDirectory(prefix="swansong-")
        self._path = os.path.join(self._directory.name, "socket")
        self._events = selectors.DefaultSelector()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(self._path)
        listener.listen(64)
        self._events.register(listener, selectors.EVENT_READ, self._accept)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._free_port: int = probe.getsockname()[1]

    def run(self, stderr: IO[str]) -> None:
        """Start the processes, wait for the checkpoint, and kill them."""
        give_up = time.monotonic() + self._trainer.limit_s
        try:
            for rank in range(self._process_count):
                self._spawn(rank, stderr)
            while not (self.answer or self.misuse or self.problem):
                self._handle(max(0.0, give_up - time.monotonic()))
                if time.monotonic() >= give_up:
                    self.problem = self.problem or f"no answer after {self._trainer.limit_s:.0f} s"
        finally:
            self._kill()
        # Output, answers and exit codes arrive in any order.  A surviving process may keep printing.
        give_up = time.monotonic() + _END_PATIENCE_S
        while self._handle(0.0) and time.monotonic() < give_up:
            pass
        self._kill_ranks()  # also those whose Hello came only now

    def close(self) -> None:
        """Close all files."""
        for key in list(self._events.get_map().values()):
            self._forget(key.fileobj)
        for pidfd in self._pidfds.values():
            os.close(pidfd)
        self._events.close()
        self._directory.cleanup()

    def _handle(self, limit_s: float) -> bool:
        """Handle pending events; wait up to the limit for the first.  Return whether there was one."""
        ready = self._events.select(limit_s)
        for key, _ in ready:
            key.data(key.fileobj)
        return bool(ready)

    def _forget(self, source: Any) -> None:
        self._events.unregister(source)
        if isinstance(source, int):
            os.close(source)
        else:
            source.close()

    # ------------------------------------------------------------ processes

    @property
    def _process_count(self) -> int:
        return 1 if self._trainer.has_launcher else self._trainer.ranks

    def _spawn(self, rank: int, stderr: IO[str]) -> None:
        trainer = self._trainer
        variables = {**os.environ, **_DETERMINISTIC}
        variables |= {protocol.SOCKET_ENV: self._path, CHECK_ENV: self._path}
        variables.pop(RESTORE_ENV, None)
        if "MASTER_PORT" in variables:  # the launcher of this process has that port
            variables["MASTER_PORT"] = str(self._free_port)
            variables["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        if self._process_count > 1:
            variables |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(trainer.ranks),
                "LOCAL_WORLD_SIZE": str(trainer.ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._free_port),
            }
        process = subprocess.Popen(  # noqa: S603 - runs the command that the caller gave
            trainer.command,
            env={**variables, **trainer.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        )
        self._processes.append(process)
        assert process.stdout is not None
        read = partial(self._read_lines, process.pid)
        self._events.register(process.stdout, selectors.EVENT_READ, read)
        try:
            pidfd = os.pidfd_open(process.pid)
        except OSError as error:
            self.problem = f"this system cannot watch a process: {error}"
        else:
            self._events.register(pidfd, selectors.EVENT_READ, partial(self._end, process))

    def _read_lines(self, pid: int, output: IO[bytes]) -> None:
        data = os.read(output.fileno(), 2**20)
        if not data:
            self._forget(output)
        lines = (self._unfinished_lines.get(pid, b"") + data).splitlines(keepends=True)
        is_cut = data and not data.endswith((b"\n", b"\r")) and len(lines[-1]) < _LINE_BYTES_MAX
        self._unfinished_lines[pid] = lines.pop() if is_cut else b""
        for line in lines:  # a progress bar ends its lines with a carriage return
            self._read_line(line.rstrip(b"\r\n").decode(errors="replace") + "\n")

    def _read_line(self, line: str) -> None:
        found = self._trainer.loss_of(line)
        if found is not None:
            self._run.losses[found[0]] = found[1]
        if isinstance(self._moment, str) and re.search(self._moment, line):
            self._request()

    def _end(self, process: subprocess.Popen[bytes], pidfd: int) -> None:
        self._forget(pidfd)
        self._ended += 1
        if process.wait() != 0 or self._ended == self._process_count:
            self.problem = self.problem or f"the trainer ended with {process.returncode}"

    def _kill(self) -> None:
        """Kill all processes and wait for their end.  The launcher is first, so that it restarts none."""
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        self._kill_ranks()
        for process in self._processes:
            process.wait()
        give_up = time.monotonic() + _END_PATIENCE_S
        for pidfd in self._pidfds.values():
            _has_ended(pidfd, max(0.0, give_up - time.monotonic()))

    def _kill_ranks(self) -> None:
        for pidfd in self._pidfds.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    # ------------------------------------------------------------ the daemon

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.setblocking(False)  # a stopped process reads nothing
        self._events.register(connection, selectors.EVENT_READ, self._receive)

    def _receive(self, connection: socket.socket) -> None:
        data = b""
        try:
            data = connection.recv(protocol.MAX_MESSAGE_BYTES)
        except (BlockingIOError, ConnectionResetError):
            return  # the process has ended with an unread message; its own messages come next
        except OSError:
            pass  # the process has just ended
        if not data:
            self._ranks.pop(connection, None)
            self._forget(connection)
            return
        try:
            self._answer(connection, protocol.decode(data))
        except (OSError, ProtocolError) as error:
            self.problem = self.problem or f"a message of the trainer: {error}"

    def _answer(self, connection: socket.socket, message: Message) -> None:
        if isinstance(message, Hello):
            self._welcome(connection, message)
        elif isinstance(message, protocol.RestoreQuery):
            self._restore(connection, message.query_id)
        elif isinstance(message, Accepted):
            self._agree(self._ranks[connection], message)
        is_end = isinstance(message, Sealed) and self._commit(message) and self._moment is None
        if isinstance(message, Sealed | Failed | Declined) and (message.request_id or is_end):
            self.answer = self.answer or message
            if self._must_restore:  # it trains from scratch, which looks like an equal run
                self.misuse = "the trainer has not called guard.restore(): a resume loses all steps"

    def _welcome(self, connection: socket.socket, hello: Hello) -> None:
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid = struct.unpack("3i", peer)[0]
        if pid not in self._pidfds:
            with contextlib.suppress(OSError):  # it has just ended
                self._pidfds[pid] = os.pidfd_open(pid)
        self._ranks[connection] = hello.rank
        run = self._run
        self._send(connection, protocol.Welcome("check", str(run.staging), run.starts))
        self._without_start.append(connection)
        if hello.rank == 0:
            self._start_id = hello.start_id
        if self._start_id:
            for each in self._without_start:
                self._send(each, protocol.StartDrawn(self._start_id))
                # Before the answer to its restore query, so that it cannot have passed the step.
                if self._is_requested:
                    self._send_request(each)
            self._without_start.clear()
        self._check(hello, pid)

    def _check(self, hello: Hello, pid: int) -> None:
        """Report processes that do not know their place among the ranks."""
        place = f"rank {hello.rank} of {hello.world_size}"
        other = self._pid_of.get(hello.rank, pid)
        self._pid_of[hello.rank] = pid
        if other != pid and other in self._pidfds and not _has_ended(self._pidfds[other]):
            self.misuse = (
                f"2 processes say that they are {place}: swansong.attach() does not see the other ranks;"
                " call it after init_process_group()"
            )
        elif hello.world_size != self._trainer.ranks:
            self.misuse = (
                f"a process says that it is {place}, and check_resume() expects"
                f" ranks={self._trainer.ranks}: pass the number of ranks, and call swansong.attach() after"
                " init_process_group()"
            )

    def _request(self) -> None:
        """Request a checkpoint; a second call does nothing."""
        if not self._is_requested:
            self._is_requested = True
            for connection in self._ranks.keys() - set(self._without_start):
                self._send_request(connection)

    def _send_request(self, connection: socket.socket) -> None:
        request_id = f"check-{self._run.starts}"
        self._send(connection, protocol.Request(request_id, "resume check", seconds_left=3600.0))

    def _restore(self, connection: socket.socket, query_id: str) -> None:
        self._must_restore = False
        newest = self._run.newest
        path, step = ("", -1) if newest is None else (str(newest), _step_of(newest))
        answer = protocol.Restored(query_id, path, step, self._run.starts)
        # If the moment is a step, no rank may train before all ranks know the target.
        if isinstance(self._moment, int) and self._target is None:
            self._held.append((connection, answer))
        else:
            self._send(connection, answer)

    def _agree(self, rank: int, accepted: Accepted) -> None:
        self._accepted[rank] = accepted.step
        if len(self._accepted) < self._trainer.ranks:
            return
        step = max(self._accepted.values()) + 1
        if isinstance(self._moment, int):
            step = max(step, self._moment)
        self._target = protocol.Target(accepted.request_id, step)
        for connection in self._ranks:
            self._send(connection, self._target)
        for connection, answer in self._held:
            self._send(connection, answer)
        self._held.clear()

    def _commit(self, sealed: Sealed) -> bool:
        """Report the commit of a set to the ranks; returns whether it is the end of the run."""
        manifest = self._run.staging / sealed.directory / layout.rank_manifest_name(0)
        is_final = layout.RankManifest.decode(manifest.read_bytes()).kind == "final"
        for connection in self._ranks:
            self._send(connection, protocol.Committed(self._run.starts, sealed.step, is_final))
        return is_final

    @staticmethod
    def _send(connection: socket.socket, message: Message) -> None:
        # A process that has just ended reports its exit code.
        with contextlib.suppress(OSError):
            connection.send(protocol.encode(message))


def _has_ended(pidfd: int, limit_s: float = 0.0) -> bool:
    """Wait for the end of a process; returns whether it has ended within the limit."""
    ended = select.poll()
    ended.register(pidfd, select.POLLIN)
    return bool(ended.poll(limit_s * 1000))


def _json_loss(line: str) -> tuple[int, float] | None:
    try:
        body = json.loads(line)
        return int(body["step"]), float(body["loss"])
    except (ValueError, TypeError, KeyError):
        return None


def _step_of(path: Path) -> int:
    name = layout.parse_sealed_name(path.name)
    assert name is not None
    return name[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Check a command; returns the exit code: 0 if the resumed run is equal, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m swansong.testing",
        description="Compare a run that is killed and resumed with one that is not.",
    )
    parser.add_argument("--steps", type=int, help="last step; default: the end, guard.finish()")
    parser.add_argument(
        "--kill-at",
        action="append",
        required=True,
        metavar="MOMENT",
        help="a step, or a regular expression of a line of output; repeat it for further kills",
    )
    parser.add_argument("--ranks", type=int, default=1, help="number of ranks that COMMAND starts")
    parser.add_argument("--ignoring", default="(?!)", help="regular expression of files")
    parser.add_argument("--limit-s", type=float, default=_COMMAND_LIMIT_S, help="of one start")
    parser.add_argument("--while-stdin", action="store_true", help="end when stdin is closed")
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="after --")
    options = parser.parse_args(arguments)
    # With the trainers, which are in sessions of their own.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("the check was ended"))
    if options.while_stdin:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
    try:
        report = check_resume(
            options.command,
            steps=options.steps,
            kill_at=[int(each) if each.isdecimal() else each for each in options.kill_at],
            ranks=options.ranks,
            has_launcher=options.ranks > 1,
            ignoring=options.ignoring,
            limit_s=options.limit_s,
            is_verbose=not options.while_stdin,
        )
    except AssertionError as error:
        print(error, file=sys.stderr)
        return 1
    print(_summary(report))
    return 0


def _end_with_stdin() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
