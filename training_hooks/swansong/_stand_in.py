# SPDX-License-Identifier: Apache-2.0
"""Starts a trainer with a stand-in for its daemon, which saves the trainer at a moment and kills it."""

from __future__ import annotations

import contextlib
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
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from swansong import layout, protocol
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
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
_LINE_BYTES_MAX = 2**20
"""A longer line is read in pieces."""
_END_PATIENCE_S = 10.0
"""Longest wait for killed processes to end.  Only a blocked device driver delays the end."""


class TrainerFailedError(AssertionError):
    """The trainer ended, declined or stopped making progress before it had saved."""


class CheckedRun:
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

    def errors(self) -> str:
        """The end of what all starts wrote to standard error, such as the warnings of the hooks."""
        paths = [self.errors_path(start) for start in range(1, self.starts + 1)]
        return "".join(path.read_text(errors="replace") for path in paths)[-3000:].strip()

    def errors_path(self, start: int) -> Path:
        return self.directory / f"stderr-{start}"


@dataclass
class CheckedTrainer:
    command: list[str]
    ranks: int
    has_launcher: bool
    environment: dict[str, str]
    loss_of: Callable[[str], tuple[int, float] | None]
    limit_s: float
    is_verbose: bool = False
    """Whether each start is printed."""

    def until_saved(self, run: CheckedRun, moment: int | str | None) -> Path:
        """Start the trainer, save it at this moment, kill it, and return the sealed set.

        None is the end of the run.
        """
        if self.is_verbose:
            until = "its end" if moment is None else repr(moment)
            print(f"{run.directory.name}: start {run.starts + 1}, until {until}", file=sys.stderr)
        run.starts += 1
        with (
            contextlib.closing(CheckedStart(self, run, moment)) as start,
            run.errors_path(run.starts).open("w") as stderr,
        ):
            start.run(stderr)
        if start.misuse:
            raise TrainerFailedError(start.misuse)
        if isinstance(start.answer, Sealed):
            run.newest = run.staging / start.answer.directory
            return run.newest
        if (
            moment is None
            and run.newest is not None
            and start.has_succeeded
            and _is_end(run.newest)
        ):
            return run.newest  # the request of the last kill was answered by guard.finish()
        problem = start.problem
        if start.answer is not None:
            problem = f"the trainer did not save: {start.answer.reason}"
        waiting = "waiting for guard.finish()" if moment is None else f"waiting for {moment!r}"
        raise TrainerFailedError(f"start {run.starts}, {waiting}: {problem}\n{run.errors()}")


def _is_end(directory: Path) -> bool:
    """Whether a sealed set is the end of a run."""
    manifest = directory / layout.rank_manifest_name(0)
    return layout.RankManifest.decode(manifest.read_bytes()).kind == "final"


class CheckedStart:
    """One start of the trainer, with a stand-in for the daemon of its ranks.

    One loop, in the caller's thread, handles connections, messages, lines of output and ends of processes.
    """

    def __init__(self, trainer: CheckedTrainer, run: CheckedRun, moment: int | str | None) -> None:
        self.answer: Sealed | Failed | Declined | None = None
        """The first answer to the request for a checkpoint."""
        self.misuse = ""
        """Why the processes of the trainer cannot be checked."""
        self.problem = ""
        """Why no answer will arrive, unless one has arrived already."""
        self.has_succeeded = False
        """Whether all processes ended with 0."""
        self._trainer, self._run, self._moment = trainer, run, moment
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ended = 0
        self._unfinished_lines: dict[int, bytes] = {}
        """By pid."""
        self._ranks: dict[socket.socket, int] = {}
        """Rank of each connection, known after its Hello."""
        self._start_id = ""
        """Id of the start, which rank 0 has drawn.  Ranks that do not know it yet decline requests."""
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
            self.has_succeeded = process.returncode == 0 and not self.problem
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
            has_ended(pidfd, max(0.0, give_up - time.monotonic()))

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
        if hello.rank == 0:
            self._start_id = hello.start_id
        if self._start_id:
            for each in self._ranks if hello.rank == 0 else [connection]:
                self._send(each, protocol.StartDrawn(self._start_id))
                # Before the answer to its restore query, so that it cannot have passed the step.
                if self._is_requested:
                    self._send_request(each)
        self._check(hello, pid)

    def _check(self, hello: Hello, pid: int) -> None:
        """Report processes that do not know their place among the ranks."""
        place = f"rank {hello.rank} of {hello.world_size}"
        other = self._pid_of.get(hello.rank, pid)
        self._pid_of[hello.rank] = pid
        if other != pid and other in self._pidfds and not has_ended(self._pidfds[other]):
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
            for connection in self._ranks if self._start_id else ():
                self._send_request(connection)

    def _send_request(self, connection: socket.socket) -> None:
        request_id = f"check-{self._run.starts}"
        self._send(connection, protocol.Request(request_id, "resume check", seconds_left=3600.0))

    def _restore(self, connection: socket.socket, query_id: str) -> None:
        self._must_restore = False
        newest = self._run.newest
        path, step = ("", -1) if newest is None else (str(newest), step_of(newest))
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
        is_final = _is_end(self._run.staging / sealed.directory)
        for connection in self._ranks:
            self._send(connection, protocol.Committed(self._run.starts, sealed.step, is_final))
        return is_final

    @staticmethod
    def _send(connection: socket.socket, message: Message) -> None:
        # A process that has just ended reports its exit code.
        with contextlib.suppress(OSError):
            connection.send(protocol.encode(message))


def has_ended(pidfd: int, limit_s: float = 0.0) -> bool:
    """Wait for the end of a process; returns whether it has ended within the limit."""
    ended = select.poll()
    ended.register(pidfd, select.POLLIN)
    return bool(ended.poll(limit_s * 1000))


def step_of(path: Path) -> int:
    name = layout.parse_sealed_name(path.name)
    assert name is not None
    return name[0]
