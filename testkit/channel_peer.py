# SPDX-License-Identifier: Apache-2.0
"""A running trainer channel, and peers of it: in this process, or in processes."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TypeVar

from structlog.testing import CapturingLogger
from swansong import protocol
from swansong.protocol import Message
from swansongd.core.events import Event, TrainerJoined, TrainerLeft
from swansongd.trainers.admission import Reply
from swansongd.trainers.channel import TrainerChannel

from testkit.waiting import until

M = TypeVar("M", bound=Message)


class RunningChannel:
    """A channel that serves run ``r1``; records its events and its log."""

    def __init__(
        self,
        *,
        allowed_uids: frozenset[int] = frozenset({0}),
        answer: Callable[[Message, Reply], None] = lambda _, __: None,
        path: Path | None = None,
        listener_fd: int | None = None,
        naming_secret: Callable[[int], str] = lambda _: "",
    ) -> None:
        # Not tmp_path: the path of a socket has at most 107 bytes, and other users must be able to reach it.
        self.directory = Path(tempfile.mkdtemp(prefix="swansong-"))
        self.directory.chmod(0o755)
        self.path = path or self.directory / "trainer.sock"
        self.events: list[Event] = []
        self.log = CapturingLogger()
        self.channel = TrainerChannel(
            self.path,
            run="r1",
            staging=Path("/staging/r1"),
            allowed_uids=allowed_uids,
            post=self.events.append,
            answer=answer,
            log=self.log,
            listener_fd=listener_fd,
            naming_secret=naming_secret,
        )

    def __enter__(self) -> Self:
        self.channel.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()
        shutil.rmtree(self.directory)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def wait(self, kind: type, count: int = 1) -> list[Any]:
        until(lambda: len(self.of(kind)) >= count, what=f"{count} {kind.__name__}")
        return self.of(kind)

    def wait_for_exit(self) -> None:
        """Wait until the process of a peer has ended."""
        until(lambda: any(left.exited for left in self.of(TrainerLeft)), what="the exit")

    @property
    def lines(self) -> list[str]:
        return [json.dumps([call.args, call.kwargs], default=str) for call in self.log.calls]

    def connect(self) -> Client:
        return Client(self.path)

    def joined(self, **hello: Any) -> Client:
        """A client that has sent its hello and got its welcome."""
        before = len(self.of(TrainerJoined))
        client = self.connect()
        client.send(protocol.Hello(run="r1", **hello))
        assert isinstance(client.receive(), protocol.Welcome)
        client.number = self.wait(TrainerJoined, before + 1)[before].trainer.connection
        return client


class HeldChannel(RunningChannel):
    """A channel whose thread can be blocked, so that several things reach it at the same time."""

    def __init__(self) -> None:
        super().__init__(answer=self._wait)
        self._is_held, self._may_run = threading.Event(), threading.Event()

    def _wait(self, _: Message, __: Callable[[Message], None]) -> None:
        self._is_held.set()
        assert self._may_run.wait(60)

    def hold(self, client: Client) -> None:
        client.send(protocol.StatusQuery())
        assert self._is_held.wait(60)

    def release(self) -> None:
        self._may_run.set()


class Client:
    """A peer in this process.  ``number`` is that of its connection, once it has joined."""

    number = 0

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(60)
        try:
            self.socket.connect(str(path))
        except OSError:
            self.socket.close()
            raise

    def send(self, message: Message | bytes) -> None:
        self.socket.send(message if isinstance(message, bytes) else protocol.encode(message))

    def receive(self) -> Message | None:
        """The next message; None after the daemon has closed the connection."""
        data = self.socket.recv(protocol.MAX_MESSAGE_BYTES)
        return protocol.decode(data) if data else None

    def receive_a(self, kind: type[M]) -> M:
        """The next message of this kind."""
        while not isinstance(message := self.receive(), kind):
            assert message is not None, "the daemon has closed the connection"
        return message

    def refusal(self) -> str:
        """The reason of the refusal, after which the daemon has closed the connection."""
        answer = self.receive()
        assert isinstance(answer, protocol.Refused), answer
        assert self.receive() is None
        return answer.reason

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_PRELUDE = """
import json, os, socket, sys
path = sys.argv[1]
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
def send(**body): s.send(json.dumps(body).encode())
def receive(): return s.recv(65536).decode()
def show(text): print(text, flush=True)
def wait(): sys.stdin.readline()
def join():
    s.connect(path); send(type="hello", run="r1"); return receive()
"""


class PeerProcess:
    """A peer in another process; ``script`` continues after ``_PRELUDE``.

    With ``uid`` and ``gid`` it changes the user, also if only root can read the interpreter.
    """

    def __init__(self, path: Path, script: str, *, uid: int = 0, gid: int = 0) -> None:
        become = f"os.setgroups([]); os.setgid({gid}); os.setuid({uid})\n" if uid or gid else ""
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PRELUDE + become + script, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        """The next line that it prints; empty after its end."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def resume(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
