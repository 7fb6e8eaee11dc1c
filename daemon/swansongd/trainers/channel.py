# SPDX-License-Identifier: Apache-2.0
"""The trainer channel: one thread that accepts connections, exchanges messages, and watches processes end.

It turns messages into events, and decides only which peers are served.  No peer can block it: sockets are
non-blocking; messages, rates, queues and connections are bounded; and a peer that exceeds a bound is
dropped.  :mod:`swansongd.trainers.admission` has the bounds for each user.

The events of a connection that sent a hello, in order:

- TrainerJoined, again for each repeated hello;
- at most one TrainerLeft with ``exited=False``: the connection ended, and the process runs;
- at most one TrainerLeft with ``exited=True``: the process ended, or sent a goodbye.

When a process joins with another connection, its earlier, closed connection has no further events.
"""

from __future__ import annotations

import functools
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
from swansong.fields import ProtocolError
from swansong.protocol import Message
from swansong_bucket.errors import ConfigError
from swansong_bucket.util.threads import lasting_thread

from swansongd.core.events import TrainerJoined, TrainerLeft
from swansongd.observe.facts import Observed, TrainerRefused
from swansongd.trainers import peers, translate
from swansongd.trainers.admission import (
    CONNECTIONS_PER_USER,
    HELLO_LIMIT_S,
    QUERIES_MAX,
    STATUS_COST,
    Admission,
    PeerRefused,
    Reply,
)
from swansongd.trainers.connection import (
    MESSAGES_PER_S_MAX,
    PeerConnection,
    adopt,
    close_socket,
    listen,
)
from swansongd.util.rates import LogLimit
from swansongd.util.unix import SHORT_OF_RESOURCES

ACCEPT_PAUSE_S = 1.0
CLOSE_TIMEOUT_S = 1.0
_MESSAGES_PER_TURN = 16
_SWEEP_S = 1.0
_LOG_INTERVAL_S = 60.0
_BETWEEN_VMS = (protocol.Agreed, protocol.PeerRequest, protocol.Finish)


class TrainerChannel:
    """The Unix socket for trainers, and for commands such as ``swansong status``.  No method blocks.

    Args:
        path: of the Unix socket.
        run: name of the daemon's run.
        staging: absolute staging directory of the run, sent to trainers.
        allowed_uids: users that may connect, including root and the daemon's own.
        post: takes the events.
        answer: takes RestoreQuery, RedoneQuery, StatusQuery, Notify and NotifyWithdrawn with a function that
            sends the reply, now or later, from any thread.  Each RestoreQuery must get one Restored; until
            then ShardsTaken comes with the same function.
        log: a structlog logger.
        listener_fd: the listening socket, if it exists already; ``path`` is then left alone.
        is_signed: whether the daemon restores only signed checkpoints.
        naming_secret: by user id, see :class:`swansong.protocol.Welcome`.
    """

    def __init__(
        self,
        path: Path,
        *,
        run: str,
        staging: Path,
        allowed_uids: frozenset[int],
        post: Callable[[Observed], None],
        answer: Callable[[Message, Reply], None],
        log: Any,
        listener_fd: int | None = None,
        is_signed: bool = False,
        naming_secret: Callable[[int], str] = lambda _: "",
    ) -> None:
        self.grace_s = 0.0
        """Shortest expected grace period, sent to trainers; 0 if unknown.  Set it before :meth:`start`."""
        self._path = path
        self._run = run
        self._staging = staging
        self._allowed_uids = allowed_uids
        self._post = post
        self._answer = answer
        self._log = log
        self._listener_fd = listener_fd
        self._is_signed = is_signed
        # A disk error may change the result; ranks with different names would write different sets.
        self._naming_secret = functools.cache(naming_secret)
        self._own_file: os.stat_result | None = None  # the socket file, if this channel created it
        self._generation: int | None = None
        self._numbers = itertools.count(1)
        self._connections: dict[int, PeerConnection] = {}
        self._lingering: dict[
            int, PeerConnection
        ] = {}  # by pid: closed, the process is still watched
        self._admission = Admission(frozenset({0, os.geteuid()}))
        self._log_limit = LogLimit(burst=1, interval_s=_LOG_INTERVAL_S)
        self._swept_mono_s = 0.0
        self._accept_again_mono_s: float | None = None
        self._commands: deque[tuple[frozenset[int] | None, bytes, int]] = deque()
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._wakefd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._is_closing = False
        self._last_message: bytes | None = None
        self._thread = lasting_thread("trainer-channel", self._serve)

    # ------------------------------------------------------------------ from any thread

    def start(self) -> None:
        """Listen, and serve in a thread.

        Raises:
            ConfigError: the socket cannot be created there, or another process listens at it.
        """
        if self._listener_fd is None:
            try:
                self._listener = listen(self._path)
            except OSError as error:
                raise ConfigError(
                    [f"trainer.socket: cannot listen at {self._path}: {error.strerror}"],
                    hint="Create its directory, and let the daemon's user write there",
                ) from error
            self._own_file = os.lstat(self._path)
        else:
            self._listener = adopt(self._listener_fd)
        self._listener.setblocking(False)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wakefd, selectors.EVENT_READ, self._run_commands)
        self._thread.start()

    def share_listener(self) -> int:
        """The listening socket, to be stored for the next daemon; :meth:`close` then keeps its path."""
        self._own_file = None
        return self._listener.fileno()

    def send(self, connections: Iterable[int] | None, message: Message, fd: int = -1) -> None:
        """Send to these connections; None means all that have joined.  Unknown numbers are skipped.

        Args:
            connections: their numbers.
            message: for each of them.
            fd: a descriptor for the only one of them, which the channel closes; -1: none.

        Raises:
            ProtocolError: the message is too large.
        """
        targets = None if connections is None else frozenset(connections)
        self._commands.append((targets, protocol.encode(message), fd))
        self._wake()

    def set_generation(self, generation: int) -> None:
        """Put this generation into each welcome from now on."""
        self._generation = generation

    def close(self, last_message: Message | None = None) -> None:
        """Send the queued messages as far as peers read them, and end the thread.

        Args:
            last_message: for the commands, which send no hello.

        Raises:
            ProtocolError: the message is too large.
        """
        if last_message is not None:
            self._last_message = protocol.encode(last_message)
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
            began_mono_s = time.monotonic()
            for key, mask in self._selector.select(self._pause_s()):
                key.data(mask)
            self._drop_silent(began_mono_s)
        self._run_commands()
        for connection in [*self._connections.values(), *self._lingering.values()]:
            connection.close(None if connection.has_joined else self._last_message)
            os.close(connection.peer.pidfd)
        self._selector.close()
        self._listener.close()
        with suppress(OSError):
            # Never unlink the socket of another daemon that has taken the path since.
            own = self._own_file
            if own is not None and os.path.samestat(os.lstat(self._path), own):
                os.unlink(self._path)
        with self._lock:
            os.close(self._wakefd)
            self._wakefd = -1

    def _pause_s(self) -> float | None:
        """Timeout of the next select."""
        pause_s = None
        if any(not each.has_joined for each in self._connections.values()):
            pause_s = _SWEEP_S
        if self._accept_again_mono_s is not None:
            left_s = self._accept_again_mono_s - time.monotonic()
            if left_s > 0:
                return left_s if pause_s is None else min(left_s, pause_s)
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
            self._accept_again_mono_s = None
        return pause_s

    def _drop_silent(self, now: float) -> None:
        """Close connections without a hello in time, to make room for others.

        Args:
            now: when the last look for messages began, before which nothing is unread.
        """
        if now - self._swept_mono_s < _SWEEP_S:
            return
        self._swept_mono_s = now
        for connection in list(self._connections.values()):
            is_silent = now - connection.received_mono_s > HELLO_LIMIT_S
            if is_silent and not connection.has_joined and not self._queries_of(connection):
                reason = f"no hello within {HELLO_LIMIT_S:g} s: send hello first"
                self._refuse(connection, reason)

    def _run_commands(self, _: int = 0) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wakefd)
        while self._commands:
            targets, data, fd = self._commands.popleft()
            for connection in list(self._connections.values()):
                if connection.number in targets if targets is not None else connection.has_joined:
                    self._send(connection, data, fd)
                    fd = -1
            if fd >= 0:
                os.close(fd)  # the connection has ended

    def _accept(self, _: int) -> None:
        try:
            connected, _address = self._listener.accept()
        except OSError as error:
            if error.errno in SHORT_OF_RESOURCES:
                # The connection stays pending, so without a pause this thread would spin.
                self._selector.unregister(self._listener)
                self._accept_again_mono_s = time.monotonic() + ACCEPT_PAUSE_S
                self._log_limited("trainer_not_accepted", reason=error.strerror)
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
                raise PeerRefused(
                    f"user id {peer.uid} may not connect to the daemon: add {peer.uid} to trainer.users "
                    "in its configuration, then run: sudo systemctl reload swansongd"
                )
            evicted = self._admission.admit(peer.uid, self._connections.values())
        except PeerRefused as refusal:
            os.close(peer.pidfd)
            self._turn_away(connected, str(refusal), uid=peer.uid)
            return
        if evicted is not None:
            self._refuse(evicted, "closed to make room for another peer: send hello immediately")
        connection = PeerConnection(next(self._numbers), connected, peer, time.monotonic())
        try:
            self._selector.register(
                connected, selectors.EVENT_READ, partial(self._ready, connection)
            )
        except OSError as error:
            os.close(peer.pidfd)
            self._turn_away(connected, f"the connection cannot be watched: {error}", uid=peer.uid)
            return
        self._connections[connection.number] = connection

    def _ready(self, connection: PeerConnection, mask: int) -> None:
        if mask & selectors.EVENT_WRITE and connection.socket is not None:
            try:
                connection.flush()
            except OSError as error:
                self._drop(connection, f"connection lost: {error.strerror}")
            self._watch_writing(connection)
        for _ in range(_MESSAGES_PER_TURN):
            if not self._receive(connection):
                return

    def _receive(self, connection: PeerConnection) -> bool:
        """Handle the next message; returns whether there may be more."""
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
                f"more than {MESSAGES_PER_S_MAX:.0f} messages per second: report less often",
            )
        elif is_cut:
            self._refuse(
                connection,
                f"a message has over {protocol.MAX_MESSAGE_BYTES} bytes: "
                "put large data into staging, not into messages",
            )
        else:
            self._decode(connection, data, pid)
        return True

    def _decode(self, connection: PeerConnection, data: bytes, sender_pid: int) -> None:
        # Pid 0: sent before this socket requested credentials, which is possible only for a hello.
        if sender_pid != connection.peer.pid and (sender_pid or connection.has_joined):
            if connection.has_joined:
                self._log_limited(
                    "forked_child_ignored",
                    reason=f"process {sender_pid} sent on the connection of {connection.peer.pid}: "
                    "close it in child processes, or connect again",
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
        connection.received_mono_s = time.monotonic()
        try:
            self._handle(connection, message)
        except Exception as error:  # one message must not end the channel for all peers
            self._log_limited(
                "trainer_message_failed",
                level="error",
                uid=connection.peer.uid,
                type=message.TYPE,
                exc_info=error,
            )
            self._drop(connection, "the daemon failed to handle a message")

    def _handle(self, connection: PeerConnection, message: Message) -> None:
        number = connection.number
        if isinstance(message, protocol.Hello):
            self._join(connection, message)
        elif isinstance(message, protocol.StatusQuery):
            of_user = self._admission.user(connection.peer.uid).messages
            if of_user.take(time.monotonic(), STATUS_COST):
                self._answer(message, partial(self.send, (number,)))
            else:
                self._refuse(connection, "too many status queries: query less often")
        elif isinstance(message, protocol.RestoreQuery) and (
            connection.has_joined or connection.peer.uid in (0, os.geteuid())
        ):
            self._ask_restore(connection, message)  # also for the restore unit
        elif isinstance(message, protocol.ShardsTaken):
            self._take_shards(connection, message)
        elif isinstance(message, protocol.FROM_OPERATOR):
            if connection.peer.uid in (0, os.geteuid()):
                self._answer(message, partial(self.send, (number,)))
            else:
                self._refuse(connection, "only root and the daemon's own user may send notices")
        elif not isinstance(message, protocol.FROM_TRAINER):
            self._refuse(connection, f"{message.TYPE} is not a message for the daemon")
        elif not connection.has_joined:
            self._refuse(connection, f"{message.TYPE} came before hello: send hello first")
        elif isinstance(message, _BETWEEN_VMS) and not _spans_vms(connection):
            self._refuse(
                connection,
                f"{message.TYPE} is for jobs over several VMs: set nodes in hello",
            )
        elif isinstance(message, protocol.RedoneQuery):
            self._answer(message, partial(self.send, (number,)))
        elif isinstance(message, protocol.Bye):
            self._leave(connection)
            reason = translate.short(message.reason)
            self._post(TrainerLeft(number, exited=True, reason=reason, is_goodbye=True))
        else:
            self._post(translate.event_of(number, message))

    def _ask_restore(self, connection: PeerConnection, query: protocol.RestoreQuery) -> None:
        queries = self._admission.user(connection.peer.uid).queries
        key = connection.number, query.query_id
        if key in queries:
            return  # a repeated query: the answer follows
        own = self._queries_of(connection)
        if own >= QUERIES_MAX or len(queries) >= CONNECTIONS_PER_USER:
            self._refuse(
                connection,
                f"too many restore queries: {own} of this connection and {len(queries)} of user id "
                f"{connection.peer.uid} are pending; wait for their answers",
            )
            return

        def reply(message: Message, fd: int = -1) -> None:
            if isinstance(message, protocol.Restored):
                queries.pop(key, None)
            self.send((connection.number,), message, fd)

        queries[key] = reply
        try:
            self._answer(query, reply)
        except BaseException:
            queries.pop(key, None)
            raise

    def _take_shards(self, connection: PeerConnection, taken: protocol.ShardsTaken) -> None:
        queries = self._admission.user(connection.peer.uid).queries
        reply = queries.get((connection.number, taken.query_id))
        if reply is not None:  # otherwise the answer is on its way
            self._answer(taken, reply)

    def _queries_of(self, connection: PeerConnection) -> int:
        """Number of the pending restore queries of this connection."""
        queries = self._admission.user(connection.peer.uid).queries
        return sum(number == connection.number for number, _ in tuple(queries))

    def _join(self, connection: PeerConnection, hello: protocol.Hello) -> None:
        """Accept a hello: send the welcome, watch the process, and post TrainerJoined."""
        now = time.monotonic()
        problem = translate.problem_with(hello, self._run)
        if not problem and connection.hello is not None:
            problem = translate.change_of(connection.hello, hello)
        if not problem and not connection.hellos.take(now):
            problem = "more than one hello per second: send it once for each connection"
        try:
            if not problem and not connection.has_joined:
                self._admission.hello(connection.peer.uid, self._connections.values(), now)
        except PeerRefused as refusal:
            problem = str(refusal)
        if not problem:
            problem = self._conflict(connection, hello)
            if problem:
                self._post(TrainerRefused(pid=connection.peer.pid, reason=problem))
        if problem:
            self._refuse(connection, problem)
            return
        connection.hello = hello
        pid = connection.peer.pid
        if not connection.has_joined:
            self._forget_closed(pid)
            self._watch_process(connection)
        process_start = peers.process_start(connection.peer)
        welcome = protocol.Welcome(
            run=self._run,
            staging=os.fspath(self._staging),
            generation=self._generation,
            grace_s=self.grace_s,
            takes_digests=True,
            takes_request_query=True,
            is_signed=self._is_signed,
            naming_secret=self._naming_secret(connection.peer.uid),
        )
        self._send(connection, protocol.encode(welcome))
        if connection.socket is not None:
            view = translate.view_of(
                connection.number,
                pid,
                hello,
                greeted_mono_s=now,
                process_start=process_start,
            )
            self._post(TrainerJoined(view))

    def _watch_process(self, connection: PeerConnection) -> None:
        self._selector.register(
            connection.peer.pidfd, selectors.EVENT_READ, partial(self._exited, connection)
        )
        connection.has_joined = True

    def _conflict(self, connection: PeerConnection, hello: protocol.Hello) -> str:
        """Why another running process on this VM excludes this rank, and the fix; empty if none does."""
        for other in self._connections.values():
            if (
                other.has_joined
                and other.socket is not None
                and other.hello is not None
                and other.peer.pid != connection.peer.pid
                and translate.are_in_conflict(hello, other.hello)
                and other.is_alive()
            ):
                return translate.conflict(hello, other.hello, other.peer.pid)
        return ""

    # ------------------------------------------------------------------ sending and ending

    def _send(self, connection: PeerConnection, data: bytes, fd: int = -1) -> None:
        if connection.socket is None:
            return
        try:
            if not connection.send(data, fd):
                self._log_limited(
                    "trainer_dropped",
                    reason="the peer does not read its messages",
                    uid=connection.peer.uid,
                    pid=connection.peer.pid,
                )
                self._drop(connection, "the peer does not read its messages")
        except OSError as error:
            self._drop(connection, f"connection lost: {error.strerror}")
        self._watch_writing(connection)

    def _watch_writing(self, connection: PeerConnection) -> None:
        if connection.socket is not None:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.is_sending else 0)
            key = self._selector.get_key(connection.socket)
            if key.events != events:
                self._selector.modify(connection.socket, events, key.data)

    def _refuse(self, connection: PeerConnection, reason: str) -> None:
        self._log_limited(
            "trainer_refused", reason=reason, uid=connection.peer.uid, pid=connection.peer.pid
        )
        self._drop(connection, reason, last_message=translate.refused(reason))

    def _turn_away(self, connected: socket.socket, reason: str, uid: int | None = None) -> None:
        self._log_limited("trainer_refused", reason=reason, uid=uid)
        close_socket(connected, translate.refused(reason))

    def _drop(
        self, connection: PeerConnection, reason: str, last_message: bytes | None = None
    ) -> None:
        """Close the connection; if it had joined, its process is still watched."""
        if connection.socket is None:
            return
        self._selector.unregister(connection.socket)
        connection.close(last_message)
        del self._connections[connection.number]
        if not connection.has_joined:
            os.close(connection.peer.pidfd)
            return
        self._forget_closed(connection.peer.pid)
        uid = connection.peer.uid
        own = [each for each in self._lingering.values() if each.peer.uid == uid]
        if len(own) >= CONNECTIONS_PER_USER:
            self._forget_closed(own[0].peer.pid)
            reason = "too many processes of this user have closed their connections"
            self._post(TrainerLeft(own[0].number, exited=True, reason=reason))
        self._lingering[connection.peer.pid] = connection
        self._post(TrainerLeft(connection.number, exited=False, reason=translate.short(reason)))

    def _exited(self, connection: PeerConnection, _: int) -> None:
        if not connection.has_joined:
            return  # handled by another event of the same select
        while self._receive(connection):  # its last messages, such as "sealed", come first
            pass
        if self._lingering.get(connection.peer.pid) is connection:
            self._forget_closed(connection.peer.pid)
        elif connection.has_joined:
            self._leave(connection)
            self._drop(connection, "the process ended")
        else:
            return  # it sent a goodbye
        self._post(TrainerLeft(connection.number, exited=True, reason="the process ended"))

    def _leave(self, connection: PeerConnection) -> None:
        """Return to the state before the hello."""
        self._selector.unregister(connection.peer.pidfd)
        connection.has_joined = False

    def _forget_closed(self, pid: int) -> None:
        """Stop watching the process of a closed connection."""
        earlier = self._lingering.pop(pid, None)
        if earlier is not None:
            self._leave(earlier)
            os.close(earlier.peer.pidfd)

    def _log_limited(self, event: str, *, level: str = "warning", **facts: object) -> None:
        """Log a line, at most once a minute for each event and user: peers may retry forever."""
        extra = self._log_limit.admit((event, facts.get("uid")), time.monotonic())
        if extra is not None:
            getattr(self._log, level)(event, **facts, **extra)


def _spans_vms(connection: PeerConnection) -> bool:
    """Whether the rank belongs to a job over several VMs."""
    return connection.hello is not None and connection.hello.nodes > 1
