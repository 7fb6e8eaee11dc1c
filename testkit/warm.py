# SPDX-License-Identifier: Apache-2.0
"""Warm Python: an executable that starts a script like ``python`` does, in a process that has torch already.

A server imports the modules once, with one thread, and forks for each start.  The executable is a small
client: it passes its arguments, environment, working directory, network namespace and open files to the
server, waits for the forked process, and ends with its status.  The forked process has its own pid and
session.  Signals to the client are passed on.  The end of the client kills the forked process with its
group and its descendants, and the end of the server kills all.  :class:`WarmProcess` is a client without a
process: its pid is that of the forked one.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import math
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

_CLIENT = """#!{python} -SE
import _socket, os, select, signal, sys
server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
server.connect({path!r})
passed = []
for name in os.listdir("/proc/self/fd"):
    fd = int(name)
    try:
        if fd != server.fileno() and os.get_inheritable(fd):
            passed.append(fd)
    except OSError:
        pass  # the directory itself
passed.append(os.open("/proc/self/ns/net", os.O_RDONLY))
asked = repr((sys.argv, dict(os.environ), os.getcwd(), passed[:-1])).encode()
rights = b"".join(fd.to_bytes(4, sys.byteorder) for fd in passed)
# A handler would run after the next answer, if the signal comes an instant before the wait for it.
signals, wakes = os.pipe()
os.set_blocking(wakes, False)
signal.set_wakeup_fd(wakes)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda *_: None)
server.sendmsg([asked], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)])
os.closerange(3, server.fileno())
def received():
    while server not in select.select([server, signals], [], [])[0]:
        try:
            server.send(os.read(signals, 1))
        except OSError:
            pass  # the forked process has just ended
    try:
        return server.recv(4)
    except ConnectionResetError:  # the server has closed before it read a signal; its answers follow
        return server.recv(4)
received()  # the pid
status = received()
code = int.from_bytes(status, "big", signed=True) if status else -9
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    signal.pause()
os._exit(code)
"""
MODULES = {
    "torch": (
        *("torch", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp"),
        *("torch.distributed.launcher.api", "torchdata.stateful_dataloader", "swansong.torch"),
    ),
    "frameworks": (
        *("accelerate", "ignite.engine", "lightning", "transformers.trainer"),
        # For the workers of pytest-xdist, which would import each of these.
        *("swansongd.service.main", "swansong_tools.commands.main", "google.cloud.storage"),
    ),
    "swansongd": (
        *(
            "swansongd.service.main",
            "swansong_tools.commands.main",
            "swansong_tools.commands.doctor",
            "swansong_tools.commands.ls",
        ),
        *("boto3", "google.cloud.storage", "numpy", "swansong"),
    ),
    "emulators": (
        *("testkit.emulators.faults", "testkit.emulators.s3_bucket"),
        *("testkit.emulators.gcs_model", "testkit.emulators.store_server", "jeepney.io.blocking"),
    ),
}
"""Modules of each kind of warm Python."""
_FAMILIES = (("torch", "frameworks"), ("swansongd",), ("emulators",))
"""The kinds of each server.  The second kind of a server has the modules of the first, too."""
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
"""Environment variables that keep numpy and torch from starting threads."""
_MAX_BYTES, _MAX_FDS = 2**18, 250
_ABOVE_ALL = 700
"""Received descriptors wait here until their own numbers are free."""
_PR_SET_PDEATHSIG = 1
_CLONE_NEWNET = 0x40000000
_END_PATIENCE_S = 10


class WarmPythons:
    """A warm Python of each kind.

    Nothing is imported before the first start.  Several processes may use the executables; their servers
    end with this object.
    """

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="warm-", ignore_cleanup_errors=True)
        self.directory = self._directory.name
        self._servers = [self._server(family) for family in _FAMILIES]

    def _server(self, kinds: tuple[str, ...]) -> subprocess.Popen[bytes]:
        listeners: dict[str, socket.socket] = {}
        for kind in kinds:
            os.mkdir(os.path.join(self.directory, kind))
            path = os.path.join(self.directory, kind, "socket")
            python = Path(python_of(self.directory, kind))
            python.write_text(_CLIENT.format(python=sys.executable, path=path))
            python.chmod(0o700)
            listeners[kind] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            listeners[kind].bind(path)
            listeners[kind].listen(64)
        fds = {kind: listener.fileno() for kind, listener in listeners.items()}
        server = subprocess.Popen(
            [sys.executable, "-u", "-m", __name__, *(f"{kind}={fd}" for kind, fd in fds.items())],
            cwd=Path(__file__).parents[1],
            env={**os.environ, **ONE_THREAD, "PYTHONHASHSEED": "0"},
            stdin=subprocess.PIPE,
            pass_fds=tuple(fds.values()),
        )
        for listener in listeners.values():
            listener.close()
        return server

    def clients(self) -> list[str]:
        """The command lines of the executables that still run."""
        lines = []
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = file.read_bytes().decode(errors="replace").split("\0")
                if any(word.startswith(self.directory) for word in words):
                    lines.append(" ".join(words).strip())
        return lines

    def close(self) -> None:
        """Kill the servers and all processes below them, without waiting for an import or a test."""
        for server in self._servers:
            kill_tree(server)
        self._directory.cleanup()


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its descendants; never raises, and blocks for a limited time."""
    pids = [process.pid] if process.poll() is None else []
    kill(pids + [child for pid in pids for child in descendants(pid)])
    if process.stdin is not None:
        process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):  # a blocked device driver
        process.wait(_END_PATIENCE_S)


def descendants(pid: int) -> list[int]:
    """The processes below a process, as far as their parents still run."""
    pids = [pid]
    for each in pids:  # grows
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{each}/task").iterdir():
                pids += map(int, (thread / "children").read_text().split())
    return pids[1:]


def kill(pids: Iterable[int]) -> None:
    """Kill these processes, except those that have ended or belong to another user."""
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def python_of(directory: str, kind: str) -> str:
    """Return the path of the executable of a kind, one of :data:`MODULES`."""
    return os.path.join(directory, kind, "python")


_LOOK_S = 0.05
"""Longest time for which a wait keeps other threads from the process."""


class WarmProcess:
    """A process that a warm Python forked, with a part of the interface of :class:`subprocess.Popen`.

    Args:
        python: path of the warm Python.
        arguments: a command line of Python, without its first word.
        streams: descriptors of standard input, output and error.
    """

    def __init__(
        self, python: str, arguments: list[str], *, env: dict[str, str], streams: tuple[int, ...]
    ) -> None:
        self.returncode: int | None = None
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server.connect(os.path.join(os.path.dirname(python), "socket"))
        start = ([sys.executable, *arguments], env, os.getcwd(), list(range(len(streams))))
        network = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        socket.send_fds(self._server, [repr(start).encode()], [*streams, network])
        os.close(network)
        self.pid = int.from_bytes(self._server.recv(4), "big")
        self._pidfd = -1
        # It may have ended already, and its status follows.
        with contextlib.suppress(ProcessLookupError):
            self._pidfd = os.pidfd_open(self.pid)
        self._lock = (
            threading.Lock()
        )  # one thread may kill the process while another one waits for it

    def poll(self, within_s: float = 0.0) -> int | None:
        """The exit code as of Popen, None as long as the process runs."""
        with self._lock:
            if self.returncode is None and select.select([self._server], [], [], within_s)[0]:
                self._end()
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code.  :class:`subprocess.TimeoutExpired` if the process does not end in time."""
        end_mono_s = math.inf if timeout is None else time.monotonic() + timeout
        while (code := self.poll(_LOOK_S)) is None:
            if time.monotonic() >= end_mono_s:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self.returncode is None and self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, number)

    def _end(self) -> None:
        status = self._server.recv(4)
        self.returncode = int.from_bytes(status, "big", signed=True) if status else -signal.SIGKILL
        self._server.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)


# ---------------------------------------------------------------- in the server


Start = tuple[list[str], dict[str, str], str, dict[int, int]]
"""Command line, environment, working directory, and descriptors by the number that they shall have."""


class _Server:
    """Imports the modules of a kind at the first start, and forks for each client until standard input ends.

    Args:
        listeners: kinds by descriptor.  The first is served here, and each other one by a fork.
    """

    def __init__(self, listeners: dict[int, str]) -> None:
        self._listeners = listeners
        self._clients: dict[int, socket.socket] = {}
        """By pid of the forked process."""
        self._pids: dict[int, int] = {}
        """By descriptor of a connection or of a process."""
        self._poll = select.poll()
        for fd in (0, *self._listeners):
            self._poll.register(fd, select.POLLIN)

    def serve(self) -> Start | None:
        """Return, in a forked process, the start that a client asked for; None in the server, at its end."""
        kind, *_ = self._listeners.values()
        ready = self._poll.poll()
        _import(kind)
        while 0 not in dict(ready):
            for fd, _ in ready:
                if fd in self._pids:
                    self._serve_one(fd, self._pids[fd])
                elif self._listeners.get(fd) == kind:
                    start = self._accept(fd)
                    if start is not None:
                        return start
                elif fd in self._listeners:
                    other = self._listeners.pop(fd)
                    if not self._fork():
                        return _Server({fd: other}).serve()
                    self._poll.unregister(fd)
                    os.close(fd)
            ready = self._poll.poll()
        return None

    def _accept(self, listener: int) -> Start | None:
        with socket.socket(fileno=os.dup(listener)) as listening:
            client, _ = listening.accept()
        data, fds, _, _ = socket.recv_fds(client, _MAX_BYTES, _MAX_FDS)
        if not data:
            client.close()
            return None
        arguments, environment, directory, numbers = ast.literal_eval(data.decode())
        pid = self._fork()
        if not pid:
            client.close()
            os.close(0)
            _join_network(fds.pop())
            return arguments, environment, directory, dict(zip(numbers, fds, strict=True))
        for fd in fds:
            os.close(fd)
        with contextlib.suppress(OSError):
            client.send(pid.to_bytes(4, "big"))
        self._clients[pid] = client
        for fd in (client.fileno(), os.pidfd_open(pid)):
            self._pids[fd] = pid
            self._poll.register(fd, select.POLLIN)
        return None

    def _fork(self) -> int:
        """Fork; the child has no descriptor of another child's, and ends with this process."""
        server, pid = os.getpid(), os.fork()
        if not pid:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != server:
                os._exit(1)
            connections = {client.detach() for client in self._clients.values()}
            for fd in {*self._listeners, *self._pids, *connections}:
                os.close(fd)
        return pid

    def _serve_one(self, fd: int, pid: int) -> None:
        client = self._clients[pid]
        if fd == client.fileno():
            try:
                signals = client.recv(1)
            except ConnectionResetError:  # it was killed before it read the pid or the status
                signals = b""
            for number in signals:
                os.kill(pid, number)
            if not signals:
                self._poll.unregister(fd)
                below = descendants(pid)  # the workers of torchrun have sessions of their own
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                kill([pid, *below])
            return
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(OSError):
            client.send(os.waitstatus_to_exitcode(status).to_bytes(4, "big", signed=True))
        for each in (fd, client.fileno()):
            with contextlib.suppress(KeyError):
                self._poll.unregister(each)
            del self._pids[each]
        os.close(fd)
        self._clients.pop(pid).close()


def _import(kind: str) -> None:
    for module in MODULES[kind]:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{MODULES[kind]} started {len(threads) - 1} threads"


def _join_network(fd: int) -> None:
    """Move to a network namespace, and close its descriptor.  Only a move needs rights."""
    own = os.stat("/proc/self/ns/net")
    if not os.path.samestat(own, os.fstat(fd)):
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(fd, _CLONE_NEWNET):
            raise OSError(
                ctypes.get_errno(), "the network namespace of the client cannot be joined"
            )
    os.close(fd)


def _become(start: Start) -> dict[str, Any]:
    """Make a forked process like a new one; returns the namespace of its ``__main__``."""
    (executable, *arguments), environment, directory, descriptors = start
    os.setsid()
    high = {
        number: fcntl.fcntl(fd, fcntl.F_DUPFD, _ABOVE_ALL) for number, fd in descriptors.items()
    }
    for fd in descriptors.values():
        os.close(fd)
    for number, fd in high.items():
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    sys.executable = executable
    if "multiprocessing" in sys.modules:
        sys.modules["multiprocessing"].set_executable(executable)
    sys.argv = arguments
    sys.path[1:1] = [path for path in os.environ.get("PYTHONPATH", "").split(":") if path]
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    sys.modules["__main__"] = types.ModuleType("__main__")
    return vars(sys.modules["__main__"])


def _run(main: dict[str, Any]) -> None:
    """Run ``sys.argv`` like the command line of ``python``."""
    while sys.argv[0].startswith("-") and sys.argv[0] not in ("-c", "-m"):
        del sys.argv[0]
    sys.path[0] = ""
    if sys.argv[0] == "-c":
        code = sys.argv.pop(1)
        exec(compile(code, "<string>", "exec"), main)
    elif sys.argv[0] == "-m":
        sys.path[0] = os.getcwd()
        module = sys.argv.pop(1)
        runpy._run_module_as_main(module)  # type: ignore[attr-defined]
    else:
        sys.path[0] = os.path.dirname(os.path.realpath(sys.argv[0]))
        main["__file__"] = sys.argv[0]
        source = Path(sys.argv[0]).read_bytes()
        exec(compile(source, sys.argv[0], "exec"), main)


def _main() -> None:
    kinds = (argument.split("=") for argument in sys.argv[1:])
    start = _Server({int(fd): kind for kind, fd in kinds}).serve()
    if start is None:
        os._exit(0)
    main = _become(start)
    try:
        _run(main)
    except SystemExit as ended:
        _end(ended.code)
    except BaseException as error:
        sys.last_value = error  # as Python does for functions that atexit calls
        sys.excepthook(*sys.exc_info())
        _end(1)
    _end(0)


def _end(code: Any) -> NoReturn:
    """End this process as Python does, except that it does not free the modules, which takes 0.4 s."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    _main()
