# SPDX-License-Identifier: Apache-2.0
"""A fake daemon for the tests of the hooks: a real socket without policy."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self, TypeVar

from swansong import fields, layout, protocol
from swansong.layout import RankManifest
from swansong.protocol import (
    Accepted,
    Committed,
    Finish,
    Finished,
    Hello,
    Message,
    NotRequested,
    Request,
    RequestQuery,
    Restored,
    RestoreQuery,
    Sealed,
    ShardVerified,
    StartDrawn,
    Target,
    Welcome,
)

from testkit.waiting import until

M = TypeVar("M", bound=Message)


class FakeDaemon:
    """Welcomes every trainer, tells the start to its ranks, answers restore queries with ``restorable``, and
    records all messages.

    Args:
        directory: for the socket, and the staging directory, which :meth:`stop` keeps.
    """

    def __init__(self, directory: Path) -> None:
        self.path = str(directory / "trainer.sock")
        self.staging = directory / "run"
        self.staging.mkdir(exist_ok=True)
        self.restorable: Callable[[], tuple[Path, int] | None] = lambda: None
        self.on_query: Callable[[str], object] | None = None
        self.on_request_query: Callable[[], list[Message]] = lambda: [NotRequested()]
        self.commits = True
        """Whether a set is committed as soon as a rank has sealed it."""
        self.is_signed = False
        self.takes_request_query = True
        """Whether it knows RequestQuery; an older daemon does not."""
        self.sends_targets = True
        """Whether the step after the greatest one is the target, when all connected ranks have accepted."""
        self.received: list[Message] = []
        self._lock = threading.Lock()
        self._connections: list[socket.socket] = []
        self._accepted: dict[str, dict[int, int]] = {}
        self._rank_0: tuple[socket.socket, str] | None = None
        """Connection of rank 0 of a job on one VM, and the start that it has drawn."""
        self._without_start: list[socket.socket] = []
        self._listener: socket.socket | None = None
        self.start()

    def start(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.path)
        self._listener.listen(16)
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def stop(self) -> None:
        """Remove the socket and close all connections, as when the daemon ends; nothing is received later."""
        listener, self._listener = self._listener, None
        if listener is not None:
            os.unlink(self.path)
            listener.shutdown(socket.SHUT_RDWR)
        self.drop()
        until(lambda: not self._connections, what="the end of all connections")

    def drop(self) -> None:
        with self._lock:
            for connection in self._connections:
                connection.shutdown(socket.SHUT_RDWR)

    def send(self, message: Message) -> None:
        """Send a message on all connections."""
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):  # its messages can still be read
                    connection.send(protocol.encode(message))

    def send_shard(self, query_id: str, download: str, root: Path, path: str) -> None:
        """Send a verified file below ``root``, with its descriptor, on all connections."""
        message = protocol.encode(ShardVerified(query_id, download, path))
        with open(root / path, "rb") as file, self._lock:
            for connection in self._connections:
                socket.send_fds(connection, [message], [file.fileno()])

    def request(self, request_id: str = "r1", seconds_left: float = 100.0) -> None:
        self.send(Request(id=request_id, reason="test", seconds_left=seconds_left))

    def all_of(self, kind: type[M]) -> list[M]:
        return [message for message in self.received if isinstance(message, kind)]

    def wait_for(self, kind: type[M], count: int = 1) -> M:
        """Wait for the ``count``-th message of this kind, and return it."""
        until(lambda: len(self.all_of(kind)) >= count, what=f"{count} x {kind.__name__}")
        return self.all_of(kind)[count - 1]

    def wait_connected(self, count: int = 1) -> None:
        until(lambda: len(self._connections) >= count, what=f"{count} connections")

    def sealed(self) -> list[Path]:
        """Return the sealed sets in staging, by step."""
        names = sorted(os.listdir(self.staging))
        return [self.staging / name for name in names if layout.parse_sealed_name(name)]

    def wait_sealed(self, count: int) -> list[Path]:
        """Wait until staging has at least ``count`` sealed sets, and return them."""
        until(lambda: len(self.sealed()) >= count, what=f"{count} sealed sets")
        return self.sealed()

    def partial(self) -> list[str]:
        names = os.listdir(self.staging)
        return [name for name in names if layout.parse_partial_name(name)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _accept(self, listener: socket.socket) -> None:
        with listener:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(protocol.MAX_MESSAGE_BYTES):
                    message = protocol.decode(data)
                    answers = self._answers(connection, message)
                    # Who has an answer finds its message here; :meth:`send` comes later.
                    with self._lock:
                        self.received.append(message)
                        for answer in answers:
                            connection.send(protocol.encode(answer))
            except OSError:
                pass
            finally:
                with self._lock:
                    if connection in self._connections:
                        self._connections.remove(connection)
                    if self._rank_0 is not None and self._rank_0[0] is connection:
                        self._rank_0 = (
                            None  # ranks that connect from now on belong to the next start
                        )

    def _answers(self, connection: socket.socket, message: Message) -> list[Message]:
        if isinstance(message, Hello):
            welcome = Welcome(
                run="run",
                staging=str(self.staging),
                generation=1,
                takes_request_query=self.takes_request_query,
                is_signed=self.is_signed,
            )
            connection.send(protocol.encode(welcome))
            with self._lock:
                self._tell_start(connection, message)
                if connection not in self._connections:
                    self._connections.append(connection)
                if self._listener is None:  # it was accepted just before the end
                    connection.shutdown(socket.SHUT_RDWR)
        if isinstance(message, Sealed) and self.commits:
            is_final = self._is_final(self.staging / message.directory)
            self.send(Committed(generation=1, step=message.step, is_final=is_final))
        if isinstance(message, RequestQuery):
            return self.on_request_query()
        if isinstance(message, Finish):
            return [Finished(message.start_id)]
        if isinstance(message, RestoreQuery):
            if self.on_query is not None:
                self.on_query(message.query_id)
                return []
            found = self.restorable()
            if found is None:
                return [Restored(message.query_id)]
            return [Restored(message.query_id, path=str(found[0]), step=found[1], generation=1)]
        if isinstance(message, Accepted) and self.sends_targets:
            with self._lock:
                accepted = self._accepted.setdefault(message.request_id, {})
                accepted[connection.fileno()] = message.step
                if len(accepted) < len(self._connections):
                    return []
                target = Target(message.request_id, max(accepted.values()) + 1)
                for other in self._connections:
                    other.send(protocol.encode(target))
        return []

    def _tell_start(self, connection: socket.socket, hello: Hello) -> None:
        """Tell the other ranks of one VM the start that rank 0 has drawn."""
        if hello.nodes == 1 and not hello.start_id:
            self._without_start.append(connection)
        if hello.nodes == 1 and hello.rank == 0:
            self._rank_0 = connection, hello.start_id
        if self._rank_0 is not None:
            for each in self._without_start:
                with contextlib.suppress(OSError):
                    each.send(protocol.encode(StartDrawn(self._rank_0[1])))
            self._without_start.clear()

    def _is_final(self, directory: Path) -> bool:
        """Whether a set is the end of a run, by the manifest of any rank; a damaged set is not."""
        manifests = [path for path in directory.iterdir() if layout.is_rank_manifest(path.name)]
        try:
            return RankManifest.decode(manifests[0].read_bytes()).kind == "final"
        except (IndexError, OSError, fields.ProtocolError):
            return False
