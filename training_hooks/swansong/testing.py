# SPDX-License-Identifier: Apache-2.0
"""Checks that a trainer resumes bit by bit: compares an uninterrupted run with one that is killed and
resumed.

::

    from swansong.testing import check_resume

    def test_resume(tmp_path):
        check_resume([sys.executable, "train.py"], steps=40, kill_at=[7, 12, 31], directory=tmp_path)

No daemon, root or cloud is needed: a stand-in answers the hooks.  At each step of ``kill_at`` it requests a
checkpoint, kills the trainer with SIGKILL when the checkpoint is sealed, and starts the same command
again.  At step ``steps`` both runs take a last checkpoint.  All bytes of the two must be equal: weights,
optimizer, random generators, position in the data, and all else that the trainer saves.  If they differ, both
runs are repeated up to the first difference, and the error names the step, the objects and the likely cause.

The trainer must seed all generators that it uses (``swansong.torch.seed_all``).  If nothing else differs, a
generator that differs between two uninterrupted starts is not compared.  Run the trainer with
deterministic kernels, or on the CPU with a fixed number of threads (the default here is one).
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import secrets
import select
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
from pathlib import Path
from typing import Any, TypeGuard

from swansong import layout, protocol
from swansong._differences import Difference, find_differences, has_loader, likely_cause
from swansong.protocol import Accepted, Declined, Failed, Hello, Message, Sealed

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
_END_PATIENCE_S = 10.0
"""Longest wait for killed processes to end.  Only a blocked device driver delays the end."""


class ResumeMismatchError(AssertionError):
    """The resumed run differs from the uninterrupted one; the text names the place."""


class TrainerFailedError(AssertionError):
    """The trainer ended, declined or stopped making progress before it had saved."""


@dataclass(frozen=True)
class _Misuse:
    """A reason why the processes of the trainer cannot be checked."""

    reason: str


_Event = Message | _Misuse | str | int
"""A message to the daemon, a misuse, a line of output, or an exit code."""


@dataclass
class ResumeReport:
    """The result of :func:`check_resume` for two equal runs."""

    saved_steps: list[int] = field(default_factory=list)
    """Steps at which the run was saved and killed."""
    files: int = 0
    """Number of compared files of the last checkpoint."""
    losses: int = 0
    """Number of compared losses: those of steps up to ``steps`` that both runs printed."""
    unseeded: list[str] = field(default_factory=list)
    """Generators that were not compared, because they differ between two uninterrupted starts."""


def check_resume(
    command: Sequence[str] | Callable[[], object],
    *,
    steps: int,
    kill_at: Sequence[int | str],
    directory: str | os.PathLike[str] | None = None,
    ranks: int = 1,
    has_launcher: bool = False,
    environment: Mapping[str, str] | None = None,
    loss_of: Callable[[str], tuple[int, float] | None] | None = None,
    ignoring: str = "(?!)",
    limit_s: float = 120.0,
) -> ResumeReport:
    """Compare a run that is killed and resumed with one that is not.

    Args:
        command: starts the trainer; or a function at the top level of a module, which runs in a new Python.
        steps: step of the last checkpoint, at which the runs are compared.  The trainer must reach it.
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

    Raises:
        ResumeMismatchError: the runs differ.
        TrainerFailedError: the trainer did not save at a moment of ``kill_at``, or at ``steps``; or its
            processes do not agree with ``ranks``.
    """
    if directory is None:
        with tempfile.TemporaryDirectory(prefix="swansong-check-") as temporary:
            return check_resume(
                command,
                steps=steps,
                kill_at=kill_at,
                directory=temporary,
                ranks=ranks,
                has_launcher=has_launcher,
                environment=environment,
                loss_of=loss_of,
                ignoring=ignoring,
                limit_s=limit_s,
            )
    if callable(command):
        code = f"from {command.__module__} import {command.__qualname__} as f; f()"
        command = [sys.executable, "-c", code]
    trainer = _Trainer(
        list(command), ranks, has_launcher, dict(environment or {}), loss_of or _json_loss, limit_s
    )
    report = ResumeReport()
    reference, resumed = _Run(Path(directory, "reference")), _Run(Path(directory, "resumed"))
    wanted = trainer.until_saved(reference, steps)
    saved: list[Path] = []
    losses_of_first: dict[int, float] = {}
    for moment in kill_at:
        saved.append(trainer.until_saved(resumed, moment))
        losses_of_first = losses_of_first or dict(resumed.losses)
    report.saved_steps = [_step_of(path) for path in saved]
    got = trainer.until_saved(resumed, steps)
    # Either run may have printed losses of later steps before it was killed.
    both = [step for step in reference.losses.keys() & resumed.losses.keys() if step <= steps]
    report.losses = len(both)
    loss = _first_difference(reference.losses, resumed.losses, steps)
    if _step_of(wanted) != _step_of(got):
        raise ResumeMismatchError(f"{got.name} is of another step than {wanted.name}")
    found, report.files = find_differences(wanted, got, ignoring)
    if not found and loss is None:
        return report
    repeat = _Repeat(trainer, Path(directory), saved, ignoring)
    first_step, unresumed = repeat.without_resume(kill_at) or (steps, found)
    repeat.unseeded = frozenset().union(*(each.generators for each in unresumed))
    report.unseeded = sorted(repeat.unseeded)
    found, _ = find_differences(wanted, got, ignoring, repeat.unseeded)
    if not found and loss is None:
        return report
    has_other_losses = _first_difference(reference.losses, losses_of_first, first_step) is not None
    if has_other_losses or not all(each.generators for each in unresumed):
        step, found, cause = first_step, unresumed, _NOT_DETERMINISTIC
    else:
        step, found = repeat.first(loss) or (steps, found)
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

    def __init__(self, directory: Path, start: Path | None = None) -> None:
        self.directory = directory
        self.start = start
        self.staging = directory / "staging"
        self.staging.mkdir(parents=True)
        self.starts = 0
        self.losses: dict[int, float] = {}

    def newest(self) -> tuple[Path, int] | None:
        found = [(layout.parse_sealed_name(path.name), path) for path in self.staging.iterdir()]
        sets = [(name[0], path) for name, path in found if name is not None]
        step, path = max(sets, default=(-1, None))
        if path is not None:
            return path, step
        return (self.start, _step_of(self.start)) if self.start is not None else None


@dataclass
class _Trainer:
    command: list[str]
    ranks: int
    has_launcher: bool
    environment: dict[str, str]
    loss_of: Callable[[str], tuple[int, float] | None]
    limit_s: float

    def until_saved(self, run: _Run, moment: int | str) -> Path:
        """Start the trainer, save it at this moment, kill it, and return the sealed set."""
        run.starts += 1
        events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        stand_in = _StandIn(run, self.ranks, moment, events.put)
        processes: list[subprocess.Popen[bytes]] = []
        outputs: list[_Output] = []
        errors = run.directory / f"stderr-{run.starts}"
        try:
            with errors.open("w") as stderr:
                for rank in range(1 if self.has_launcher else self.ranks):
                    # Append each immediately, so that the cleanup ends every process that was started.
                    outputs.append(_Output(events.put))
                    process = self._start(stand_in, rank, outputs[-1].write_fd, stderr)
                    processes.append(process)
                    threading.Thread(
                        target=_report_exit, args=(process, events.put), daemon=True
                    ).start()
            decided = self._wait(run, stand_in, moment, events)
        finally:
            stand_in.kill(processes)
            for output in outputs:
                output.end()
            stand_in.close()
        # Output, answers and exit codes arrive in any order: decide after all three are read to the end.
        while not events.empty():
            event = events.get()
            self._note_loss(run, event)
            if isinstance(event, _Misuse) or (isinstance(decided, str) and _is_answer(event)):
                decided = event
        if isinstance(decided, _Misuse):
            raise TrainerFailedError(decided.reason)
        if isinstance(decided, Sealed):
            return run.staging / decided.directory
        if isinstance(decided, Failed | Declined):
            decided = f"the trainer did not save: {decided.reason}"
        tail = errors.read_text(errors="replace")[-2000:]
        raise TrainerFailedError(f"start {run.starts}, waiting for {moment!r}: {decided}\n{tail}")

    def _start(
        self, stand_in: _StandIn, rank: int, stdout: int, stderr: Any
    ) -> subprocess.Popen[bytes]:
        variables = {**os.environ, **_DETERMINISTIC, protocol.SOCKET_ENV: stand_in.path}
        if not self.has_launcher and self.ranks > 1:
            variables |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.ranks),
                "LOCAL_WORLD_SIZE": str(self.ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(stand_in.free_port),
            }
        return subprocess.Popen(  # noqa: S603 - runs the command that the caller gave
            self.command,
            env={**variables, **self.environment},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )

    def _wait(
        self,
        run: _Run,
        stand_in: _StandIn,
        moment: int | str,
        events: queue.SimpleQueue[_Event],
    ) -> Message | _Misuse | str:
        """Return the answer to the request, or the reason why none will arrive."""
        give_up = time.monotonic() + self.limit_s
        ended = 0
        while True:
            try:
                event = events.get(timeout=max(0.0, give_up - time.monotonic()))
            except queue.Empty:
                return f"no answer after {self.limit_s:.0f} s"
            self._note_loss(run, event)
            if isinstance(event, str):
                if isinstance(moment, str) and re.search(moment, event):
                    stand_in.request()
            elif isinstance(event, int):
                ended += 1
                if event != 0 or (ended == (1 if self.has_launcher else self.ranks)):
                    return f"the trainer ended with {event}"
            elif isinstance(event, _Misuse) or _is_answer(event):
                return event

    def _note_loss(self, run: _Run, event: _Event) -> None:
        found = self.loss_of(event) if isinstance(event, str) else None
        if found is not None:
            run.losses[found[0]] = found[1]


class _StandIn:
    """A stand-in for the daemon, for one start of the trainer."""

    def __init__(
        self, run: _Run, ranks: int, moment: int | str, report: Callable[[_Event], object]
    ) -> None:
        self._run = run
        self._ranks = ranks
        self._moment = moment
        self._report = report
        self._lock = threading.Lock()
        self._connections: list[socket.socket] = []
        self._start_id = ""
        """Id of the start, which rank 0 has drawn."""
        self._without_start: list[socket.socket] = []
        """Connections of ranks that do not know the start yet, and decline requests."""
        self._pidfds: dict[int, int] = {}
        """By pid, for each process that sent a Hello: at the kill, the pid alone may be another process."""
        self._pid_of: dict[int, int] = {}
        """By rank, of the process that said last that it is this rank."""
        self._served: list[tuple[socket.socket, threading.Thread]] = []
        self._accepted: dict[int, int] = {}
        self._held: list[tuple[socket.socket, Message]] = []
        self._target: protocol.Target | None = None
        self._is_requested = isinstance(moment, int)
        # Short, because the path of a socket is limited to about 100 characters.
        self._directory = tempfile.TemporaryDirectory(prefix="swansong-")
        self.path = os.path.join(self._directory.name, "socket")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.path)
        self._listener.listen(64)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.free_port: int = probe.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def request(self) -> None:
        """Request a checkpoint; a second call does nothing."""
        with self._lock:
            if not self._is_requested:
                self._is_requested = True
                for connection in self._connections:
                    if connection not in self._without_start:
                        self._send(connection, self._request)

    def kill(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        """Kill all processes and wait for their end.  The launcher is first, so that it restarts none."""
        for process in processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        with self._lock:
            pidfds = list(self._pidfds.values())
            self._pidfds.clear()
        for pidfd in pidfds:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        for process in processes:
            process.wait()
        give_up = time.monotonic() + _END_PATIENCE_S
        for pidfd in pidfds:
            ended = select.poll()
            ended.register(pidfd, select.POLLIN)
            ended.poll(max(0.0, give_up - time.monotonic()) * 1000)
            os.close(pidfd)

    def close(self) -> None:
        """Return after each message that was sent before this call has been passed on."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        for connection, thread in self._served:
            with contextlib.suppress(OSError):  # the thread has closed it already
                connection.shutdown(
                    socket.SHUT_RDWR
                )  # messages that have arrived can still be read
            thread.join()
        self._directory.cleanup()

    @property
    def _request(self) -> Message:
        return protocol.Request(
            id=f"check-{self._run.starts}", reason="resume check", seconds_left=3600.0
        )

    def _accept(self) -> None:
        with self._listener:
            while True:
                try:
                    connection, _ = self._listener.accept()
                except OSError:
                    return
                thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
                self._served.append((connection, thread))
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            pid = struct.unpack("3i", peer)[0]
            rank = 0
            try:
                while data := connection.recv(protocol.MAX_MESSAGE_BYTES):
                    message = protocol.decode(data)
                    if isinstance(message, Hello):
                        rank = message.rank
                        self._welcome(connection, pid)
                        self._tell_start(connection, message)
                        self._check(message, pid)
                    elif isinstance(message, protocol.RestoreQuery):
                        self._restore(connection, message.query_id)
                    elif isinstance(message, Accepted):
                        self._agree(rank, message)
                    elif isinstance(message, Sealed):
                        self._commit(message)
                    self._report(message)
            except OSError:
                pass
            finally:
                with self._lock:
                    if connection in self._connections:
                        self._connections.remove(connection)

    def _welcome(self, connection: socket.socket, pid: int) -> None:
        with self._lock:
            if pid not in self._pidfds:
                with contextlib.suppress(OSError):  # it has just ended
                    self._pidfds[pid] = os.pidfd_open(pid)
            self._connections.append(connection)
            self._send(
                connection, protocol.Welcome("check", str(self._run.staging), self._run.starts)
            )

    def _tell_start(self, connection: socket.socket, hello: Hello) -> None:
        """Tell the ranks the start that rank 0 has drawn, as soon as rank 0 is connected."""
        with self._lock:
            self._without_start.append(connection)
            if hello.rank == 0:
                self._start_id = hello.start_id
            if not self._start_id:
                return
            for each in self._without_start:
                self._send(each, protocol.StartDrawn(self._start_id))
                # Before the answer to its restore query, so that it cannot have passed the step.
                if self._is_requested:
                    self._send(each, self._request)
            self._without_start.clear()

    def _check(self, hello: Hello, pid: int) -> None:
        """Report processes that do not know their place among the ranks."""
        place = f"rank {hello.rank} of {hello.world_size}"
        with self._lock:
            other = self._pid_of.get(hello.rank, pid)
            self._pid_of[hello.rank] = pid
            is_taken = other != pid and not _has_ended(self._pidfds.get(other))
        if is_taken:
            self._report(
                _Misuse(
                    f"2 processes say that they are {place}: swansong.attach() does not see the other ranks;"
                    " call it after init_process_group()"
                )
            )
        elif hello.world_size != self._ranks:
            self._report(
                _Misuse(
                    f"a process says that it is {place}, and check_resume() expects ranks={self._ranks}: pass"
                    " the number of ranks, and call swansong.attach() after init_process_group()"
                )
            )

    def _restore(self, connection: socket.socket, query_id: str) -> None:
        found = self._run.newest()
        path, step = (str(found[0]), found[1]) if found is not None else ("", -1)
        answer = protocol.Restored(query_id, path, step, self._run.starts)
        with self._lock:
            # If the moment is a step, no rank may train before all ranks know the target.
            if isinstance(self._moment, int) and self._target is None:
                self._held.append((connection, answer))
            else:
                self._send(connection, answer)

    def _agree(self, rank: int, accepted: Accepted) -> None:
        with self._lock:
            self._accepted[rank] = accepted.step
            if len(self._accepted) < self._ranks:
                return
            step = max(self._accepted.values()) + 1
            if isinstance(self._moment, int):
                step = max(step, self._moment)
            self._target = protocol.Target(accepted.request_id, step)
            for connection in self._connections:
                self._send(connection, self._target)
            for connection, answer in self._held:
                self._send(connection, answer)
            self._held.clear()

    def _commit(self, sealed: Sealed) -> None:
        manifest = self._run.staging / sealed.directory / layout.rank_manifest_name(0)
        is_final = layout.RankManifest.decode(manifest.read_bytes()).kind == "final"
        committed = protocol.Committed(self._run.starts, sealed.step, is_final)
        with self._lock:
            for connection in self._connections:
                self._send(connection, committed)

    @staticmethod
    def _send(connection: socket.socket, message: Message) -> None:
        try:
            connection.send(protocol.encode(message))
        except OSError:
            pass  # the process has just ended, and its exit code is reported


def _has_ended(pidfd: int | None) -> bool:
    if pidfd is None:
        return True
    ended = select.poll()
    ended.register(pidfd, select.POLLIN)
    return bool(ended.poll(0))


def _report_exit(process: subprocess.Popen[bytes], report: Callable[[int], object]) -> None:
    report(process.wait())


class _Output:
    """Passes on each line that a process and its children print.

    A random line marks the end: children of a launcher may outlive it, and hold the pipe open.

    Args:
        report: called with each complete line, in a thread.
    """

    def __init__(self, report: Callable[[str], object]) -> None:
        read_fd, self.write_fd = os.pipe()
        self._end = f"{secrets.token_hex(16)}\n"
        self._thread = threading.Thread(target=self._read, args=(read_fd, report), daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Return after each line that was printed before this call has been passed on."""
        os.write(self.write_fd, self._end.encode())
        os.close(self.write_fd)
        self._thread.join()

    def _read(self, read_fd: int, report: Callable[[str], object]) -> None:
        with open(read_fd, errors="replace") as lines:
            for line in lines:
                if line.endswith(self._end):  # the kill truncated the text before it
                    return
                report(line)


def _is_answer(event: _Event) -> TypeGuard[Message]:
    """Whether an event is a message that answers the request for a checkpoint."""
    return isinstance(event, Sealed | Failed | Declined) and bool(event.request_id)


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
