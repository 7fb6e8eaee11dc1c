# SPDX-License-Identifier: Apache-2.0
"""The trainer channel: one thread that listens, reads, writes and sees processes end.

Turns messages into events and decides nothing beyond who may speak.  No peer can make it wait: sockets
do not block, messages, rates, queues and connections are bounded, and whoever exceeds a bound is dropped.
:mod:`swansongd.trainers.admission` has the bounds for each user.

For one connection that said hello: one TrainerJoined (again if it repeats its hello), then at most one
TrainerLeft with ``exited=False`` (the connection ended and the process lives), then at most one with
``exited=True`` (the process ended, or said goodbye).  Once a process joins with another connection, what
became of its earlier, closed one is not told any more.
"""

from __future__ import annotations

import errno
import itertools
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from swansong import protocol
from swansong.protocol import Message, ProtocolError

from swansongd.core.events import Event, TrainerJoined, TrainerLeft, TrainerRefused
from swansongd.errors import ConfigError
from swansongd.trainers import peers, translate
from swansongd.trainers.admission import (
    CONNECTIONS_PER_USER,
    HELLO_LIMIT_S,
    QUERIES_MAX,
    STATUS_COST,
    Admission,
    Refusal,
)
from swansongd.trainers.connection import (
    MESSAGES_PER_S_MAX,
    Connection,
    adopt,
    close_socket,
    listen,
)
from swansongd.util.rates import LogLimit

ACCEPT_PAUSE_S = 1.0
CLOSE_TIMEOUT_S = 1.0
_MESSAGES_PER_TURN = 16
_SWEEP_S = 1.0
_COMPLAINT_EVERY_S = 60.0
_BETWEEN_VMS = (protocol.Agreed, protocol.PeerRequest, protocol.Finish, protocol.JobStart)
_SHORT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class TrainerChannel:
    """Where trainers, and ``swansong status``, reach the daemon.  All methods return at once.

    Args:
        path: of the Unix socket.
        run: name of the daemon's run.
        staging: absolute staging directory of the run, told to trainers.
        allowed_uids: users that may speak here; the caller adds root and the daemon's own.
        post: takes the events.
        answer: takes RestoreQuery, StatusQuery, Notify and NotifyWithdrawn with a function that sends
            the reply, now or later, from whatever thread.  Each RestoreQuery gets a Restored in the end.
        log: a structlog logger.
        listener_fd: the listening socket when there is one already; ``path`` is then not touched.
        several_vms: whether trainers may have ranks on other VMs.
        naming_secret: by user id, see :class:`swansong.protocol.Welcome`.
    """

    def __init__(
        self,
        path: Path,
        *,
        run: str,
        staging: Path,
        allowed_uids: frozenset[int],
        post: Callable[[Event], None],
        answer: Callable[[Message, Callable[[Message], None]], None],
        log: Any,
        listener_fd: int | None = None,
        several_vms: bool = False,
        naming_secret: Callable[[int], str] = lambda _: "",
    ) -> None:
        self.grace_s = 0.0
        """Shortest notice to be expected, told to trainers; 0 when unknown.  To be set before the start."""
        self._path = path
        self._run = run
        self._staging = staging
        self._allowed_uids = allowed_uids
        self._post = post
        self._answer = answer
        self._log = log
        self._listener_fd = listener_fd
        self._several_vms = several_vms
        self._naming_secret = naming_secret
        self._born: os.stat_result | None = None  # the socket file, when it is ours
        self._generation: int | None = None
        self._numbers = itertools.count(1)
        self._connections: dict[int, Connection] = {}
        self._lingering: dict[int, Connection] = {}  # by pid: closed, and the process still watched
        self._admission = Admission(frozenset({0, os.geteuid()}))
        self._complaints = LogLimit(burst=1, interval_s=_COMPLAINT_EVERY_S)
        self._swept_mono_s = 0.0
        self._accept_again_mono_s: float | None = None
        self._commands: deque[tuple[frozenset[int] | None, bytes]] = deque()
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._wakefd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._is_closing = False
        self._thread = threading.Thread(target=self._serve, name="trainer-channel", daemon=True)

    # ------------------------------------------------------------------ from any thread

    def start(self) -> None:
        """Listen, and serve in a thread.

        Raises:
            SwansongError: another process answers at the path, or the path is no socket.
            ConfigError: the socket cannot be made there.
        """
        if self._listener_fd is None:
            try:
                self._listener = listen(self._path)
            except OSError as error:
                raise ConfigError(
                    [f"trainer.socket: cannot listen at {self._path}: {error.strerror}"],
                    hint="Create its directory, and let the daemon's user write there",
                ) from error
            self._born = os.lstat(self._path)
        else:
            self._listener = adopt(self._listener_fd)
        self._listener.setblocking(False)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wakefd, selectors.EVENT_READ, self._run_commands)
        self._thread.start()

    def share_listener(self) -> int:
        """The listening socket, for others who keep it open: its path is then left behind at the end."""
        self._born = None
        return self._listener.fileno()

    def send(self, connections: Iterable[int] | None, message: Message) -> None:
        """Send to these connections; None means all that said hello.  Unknown numbers are skipped.

        Raises:
            ProtocolError: the message is too large.
        """
        targets = None if connections is None else frozenset(connections)
        self._commands.append((targets, protocol.encode(message)))
        self._wake()

    def set_generation(self, generation: int) -> None:
        """From now on the welcome tells this generation."""
        self._generation = generation

    def close(self) -> None:
        """Send what was asked for so far, as far as peers take it, and end the thread."""
        self._is_closing = True
        self._wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_TIMEOUT_S)

    def _wake(self) -> None:
        with self._lock:
            if self._wakefd >= 0:
                os.eventfd_write(self._wakefd, 1)

    # ------------------------------------------------------------------ the thread

    def _serve(self) -> None:
        while not self._is_closing:
            for key, mask in self._selector.select(self._pause_s()):
                key.data(mask)
            self._drop_silent()
        self._run_commands()
        for connection in [*self._connections.values(), *self._lingering.values()]:
            connection.close()
            os.close(connection.peer.pidfd)
        self._selector.close()
        self._listener.close()
        with suppress(OSError):
            # Not the socket of a daemon that has taken the path over meanwhile.
            if self._born is not None and os.path.samestat(os.lstat(self._path), self._born):
                os.unlink(self._path)
        with self._lock:
            os.close(self._wakefd)
            self._wakefd = -1

    def _pause_s(self) -> float | None:
        """How long to wait for something to happen."""
        pause_s = None
        if any(not each.has_joined for each in self._connections.values()):
            pause_s = _SWEEP_S
        if self._accept_again_mono_s is not None:
            left_s = self._accept_again_mono_s - time.monotonic()
            if left_s > 0:
                return left_s if pause_s is None else min(left_s, pause_s)
            self._accept_again_mono_s = None
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        return pause_s

    def _drop_silent(self) -> None:
        """Close the connections that send nothing, so that others get their place."""
        now = time.monotonic()
        if now - self._swept_mono_s < _SWEEP_S:
            return
        self._swept_mono_s = now
        for connection in list(self._connections.values()):
            if not connection.has_joined and now - connection.heard_mono_s > HELLO_LIMIT_S:
                self._refuse(
                    connection, f"no hello came within {HELLO_LIMIT_S:g} s: say hello first"
                )

    def _run_commands(self, _: int = 0) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wakefd)
        while self._commands:
            targets, data = self._commands.popleft()
            for connection in list(self._connections.values()):
                if connection.number in targets if targets is not None else connection.has_joined:
                    self._send(connection, data)

    def _accept(self, _: int) -> None:
        try:
            connected, _address = self._listener.accept()
        except OSError as error:
            if error.errno in _SHORT_OF_RESOURCES:
                # The peer would stay acceptable, and this thread would spin.
                self._selector.unregister(self._listener)
                self._accept_again_mono_s = time.monotonic() + ACCEPT_PAUSE_S
                self._complain("trainer_not_accepted", reason=error.strerror)
            return
        connected.setblocking(False)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        try:
            peer = peers.identify(connected)
        except OSError as error:
            self._turn_away(connected, f"the process cannot be identified: {error}")
            return
        try:
            if peer.uid not in self._allowed_uids:
                raise Refusal(
                    f"user id {peer.uid} may not speak to the daemon: "
                    "add it to trainer.users in the configuration"
                )
            makes_room = self._admission.seat(peer.uid, self._connections.values())
        except Refusal as refusal:
            os.close(peer.pidfd)
            self._turn_away(connected, str(refusal), uid=peer.uid)
            return
        if makes_room is not None:
            self._refuse(makes_room, "others need the connection: send hello at once")
        connection = Connection(next(self._numbers), connected, peer, time.monotonic())
        self._connections[connection.number] = connection
        self._selector.register(connected, selectors.EVENT_READ, partial(self._ready, connection))

    def _ready(self, connection: Connection, mask: int) -> None:
        if mask & selectors.EVENT_WRITE and connection.socket is not None:
            try:
                connection.flush()
            except OSError as error:
                self._drop(connection, f"connection lost: {error.strerror}")
            self._watch_writing(connection)
        for _ in range(_MESSAGES_PER_TURN):
            if not self._receive(connection):
                return

    def _receive(self, connection: Connection) -> bool:
        """Handle the next message; whether there may be more."""
        if connection.socket is None:
            return False
        try:
            data, pid, is_cut = connection.receive()
        except BlockingIOError:
            return False
        except OSError as error:
            self._drop(connection, f"connection lost: {error.strerror}")
            return False
        if not data:
            self._drop(connection, "connection closed")
            return False
        now = time.monotonic()
        of_user = self._admission.user(connection.peer.uid).messages
        if not (connection.messages.take(now) and of_user.take(now)):
            self._refuse(
                connection,
                f"more than {MESSAGES_PER_S_MAX:.0f} messages a second: report less often",
            )
        elif is_cut:
            self._refuse(
                connection,
                f"a message has over {protocol.MAX_MESSAGE_BYTES} bytes: "
                "put large data into staging, not into messages",
            )
        else:
            self._heard(connection, data, pid)
        return True

    def _heard(self, connection: Connection, data: bytes, sender_pid: int) -> None:
        # Number 0: sent in the moment between connect and our asking for credentials; only a hello can be.
        if sender_pid != connection.peer.pid and (sender_pid or connection.has_joined):
            if connection.has_joined:
                self._complain(
                    "forked_child_ignored",
                    reason=f"process {sender_pid} speaks on the connection of {connection.peer.pid}: "
                    "close it in children, or connect again",
                    uid=connection.peer.uid,
                    pid=connection.peer.pid,
                )
            else:
                self._refuse(connection, "another process made this connection: connect again")
            return
        try:
            message = protocol.decode(data)
        except ProtocolError as error:
            self._refuse(connection, f"{error}: use matching versions of daemon and hooks")
            return
        connection.heard_mono_s = time.monotonic()
        try:
            self._handle(connection, message)
        except Exception as error:  # one peer's message must not silence the others
            self._complain(
                "trainer_message_failed",
                level="error",
                uid=connection.peer.uid,
                type=message.TYPE,
                exc_info=error,
            )
            self._drop(connection, "the daemon failed at a message")

    def _handle(self, connection: Connection, message: Message) -> None:
        number = connection.number
        if isinstance(message, protocol.Hello):
            self._greet(connection, message)
        elif isinstance(message, protocol.StatusQuery):
            of_user = self._admission.user(connection.peer.uid).messages
            if of_user.take(time.monotonic(), STATUS_COST):
                self._answer(message, partial(self.send, (number,)))
            else:
                self._refuse(connection, "too many status queries: ask less often")
        elif isinstance(message, protocol.RestoreQuery) and connection.has_joined:
            self._ask_restore(connection, message)
        elif isinstance(message, (protocol.Notify, protocol.NotifyWithdrawn)):
            if connection.peer.uid in (0, os.geteuid()):
                self._answer(message, partial(self.send, (number,)))
            else:
                self._refuse(connection, "only root and the daemon's own user may give notice")
        elif not isinstance(message, protocol.FROM_TRAINER):
            self._refuse(connection, f"{message.TYPE} is not for the daemon")
        elif not connection.has_joined:
            self._refuse(connection, f"{message.TYPE} came before hello: say hello first")
        elif isinstance(message, _BETWEEN_VMS) and not _spans_vms(connection):
            self._refuse(
                connection,
                f"{message.TYPE} is for jobs over several VMs: say so in hello, and set "
                "run.several_vms = true in the configuration",
            )
        elif isinstance(message, protocol.Bye):
            self._leave(connection)
            self._post(TrainerLeft(number, exited=True, reason=translate.short(message.reason)))
        else:
            self._post(translate.event_of(number, message))

    def _ask_restore(self, connection: Connection, query: protocol.RestoreQuery) -> None:
        queries = self._admission.user(connection.peer.uid).queries
        key = connection.number, query.query_id
        if key in queries:
            return  # its answer is on the way
        own = sum(number == connection.number for number, _ in tuple(queries))
        if own >= QUERIES_MAX or len(queries) >= CONNECTIONS_PER_USER:
            self._refuse(
                connection,
                f"{own} restore queries are not answered yet, and {len(queries)} of user id "
                f"{connection.peer.uid}: wait for the answers",
            )
            return

        def reply(message: Message) -> None:
            if isinstance(message, protocol.Restored):
                queries.discard(key)
            self.send((connection.number,), message)

        queries.add(key)
        try:
            self._answer(query, reply)
        except BaseException:
            queries.discard(key)
            raise

    def _greet(self, connection: Connection, hello: protocol.Hello) -> None:
        now = time.monotonic()
        problem = translate.problem_with(hello, self._run, several_vms=self._several_vms)
        if not problem and connection.hello is not None:
            problem = translate.change_of(connection.hello, hello)
        if not problem and not connection.hellos.take(now):
            problem = "more than one hello a second: say it once for each connection"
        try:
            if not problem and not connection.has_joined:
                self._admission.hello(connection.peer.uid, self._connections.values(), now)
        except Refusal as refusal:
            problem = str(refusal)
        other = None if problem else self._same_rank(connection, hello)
        if other is not None:
            problem = translate.taken(hello, other.peer.pid)
            self._post(TrainerRefused(pid=connection.peer.pid, reason=problem))
        if problem:
            self._refuse(connection, problem)
            return
        connection.hello = hello
        pid = connection.peer.pid
        if not connection.has_joined:
            self._forget_closed(pid)
            connection.has_joined = True
            self._selector.register(
                connection.peer.pidfd, selectors.EVENT_READ, partial(self._exited, connection)
            )
        welcome = protocol.Welcome(
            run=self._run,
            staging=os.fspath(self._staging),
            generation=self._generation,
            grace_s=self.grace_s,
            naming_secret=self._naming_secret(connection.peer.uid),
        )
        self._send(connection, protocol.encode(welcome))
        if connection.socket is not None:
            view = translate.view_of(connection.number, pid, hello, greeted_mono_s=now)
            self._post(TrainerJoined(view))

    def _same_rank(self, connection: Connection, hello: protocol.Hello) -> Connection | None:
        """The connection of another living process that is the same rank of this VM."""
        for other in self._connections.values():
            if (
                other.has_joined
                and other.socket is not None
                and other.hello is not None
                and other.peer.pid != connection.peer.pid
                and other.hello.rank == hello.rank
                and other.is_alive()
            ):
                return other
        return None

    # ------------------------------------------------------------------ sending and ending

    def _send(self, connection: Connection, data: bytes) -> None:
        if connection.socket is None:
            return
        try:
            if not connection.send(data):
                self._complain(
                    "trainer_dropped",
                    reason="it does not read",
                    uid=connection.peer.uid,
                    pid=connection.peer.pid,
                )
                self._drop(connection, "it does not read its messages")
        except OSError as error:
            self._drop(connection, f"connection lost: {error.strerror}")
        self._watch_writing(connection)

    def _watch_writing(self, connection: Connection) -> None:
        if connection.socket is not None:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.is_sending else 0)
            key = self._selector.get_key(connection.socket)
            if key.events != events:
                self._selector.modify(connection.socket, events, key.data)

    def _refuse(self, connection: Connection, reason: str) -> None:
        self._complain(
            "trainer_refused", reason=reason, uid=connection.peer.uid, pid=connection.peer.pid
        )
        self._drop(connection, reason, last_words=translate.refused(reason))

    def _turn_away(self, connected: socket.socket, reason: str, uid: int | None = None) -> None:
        self._complain("trainer_refused", reason=reason, uid=uid)
        close_socket(connected, translate.refused(reason))

    def _drop(self, connection: Connection, reason: str, last_words: bytes | None = None) -> None:
        """Close the connection; the process of one that had joined stays watched."""
        if connection.socket is None:
            return
        self._selector.unregister(connection.socket)
        connection.close(last_words)
        del self._connections[connection.number]
        if not connection.has_joined:
            os.close(connection.peer.pidfd)
            return
        self._forget_closed(connection.peer.pid)
        uid = connection.peer.uid
        own = [each for each in self._lingering.values() if each.peer.uid == uid]
        if len(own) >= CONNECTIONS_PER_USER:
            self._forget_closed(own[0].peer.pid)
            reason = "too many processes of its user have closed their connections"
            self._post(TrainerLeft(own[0].number, exited=True, reason=reason))
        self._lingering[connection.peer.pid] = connection
        self._post(TrainerLeft(connection.number, exited=False, reason=translate.short(reason)))

    def _exited(self, connection: Connection, _: int) -> None:
        if not connection.has_joined:
            return  # settled by another event of the same turn
        while self._receive(connection):  # what it said last, such as "sealed", comes first
            pass
        if self._lingering.get(connection.peer.pid) is connection:
            self._forget_closed(connection.peer.pid)
        elif connection.has_joined:
            self._leave(connection)
            self._drop(connection, "the process ended")
        else:
            return  # it said goodbye
        self._post(TrainerLeft(connection.number, exited=True, reason="the process ended"))

    def _leave(self, connection: Connection) -> None:
        """Back to where it was before its hello."""
        self._selector.unregister(connection.peer.pidfd)
        connection.has_joined = False

    def _forget_closed(self, pid: int) -> None:
        """Stop watching the process for the sake of a connection that is closed already."""
        earlier = self._lingering.pop(pid, None)
        if earlier is not None:
            self._leave(earlier)
            os.close(earlier.peer.pidfd)

    def _complain(self, event: str, *, level: str = "warning", **facts: object) -> None:
        """Log a line, once a minute for each user: peers may retry for ever."""
        extra = self._complaints.admit((event, facts.get("uid")), time.monotonic())
        if extra is not None:
            getattr(self._log, level)(event, **facts, **extra)


def _spans_vms(connection: Connection) -> bool:
    """Whether the hello of the rank is of a job over several VMs; without ``several_vms`` it was refused."""
    return connection.hello is not None and connection.hello.nodes > 1
