# SPDX-License-Identifier: Apache-2.0
"""The connection to the daemon: one background thread, which connects again whenever it is lost.

Knows nothing of checkpoints.  The training loop never waits here: sending does not block.
"""

from __future__ import annotations

import logging
import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable

from swansong import protocol
from swansong._daemon.trust import StrangerError, check_listener
from swansong.protocol import Message, ProtocolError

BACKOFF_MIN_S = 0.2
BACKOFF_MAX_S = 5.0
RESTART_PATIENCE_S = 30.0
"""How long a restore waits for a daemon that was there a moment ago."""
CONNECT_TIMEOUT_S = 2.0
TICK_S = 1.0
SAY_EVERY_S = 60.0
"""Least time between two log lines of one kind."""

log = logging.getLogger("swansong")


class Channel:
    """One rank's connection to the daemon.

    Args:
        path: of the daemon's socket.
        expected: whether somebody said that there is a daemon; its absence is then worth a warning.
        hello: the first message of each connection; called in the thread, like the others.
        connected: called after it was sent.
        handle: gets each message of the daemon.
        tick: called at least once a second, connected or not.
    """

    def __init__(
        self,
        path: str,
        *,
        expected: bool,
        hello: Callable[[], Message],
        connected: Callable[[], None],
        handle: Callable[[Message], None],
        tick: Callable[[], None],
    ) -> None:
        self.path = path
        self.trusted_uids = frozenset({0, os.geteuid()})
        """Root, this user, and since the first connection the daemon's user."""
        self._absence = logging.WARNING if expected else logging.INFO
        self._hello = hello
        self._connected = connected
        self._handle = handle
        self._tick = tick
        self._said: dict[str, tuple[str, float]] = {}
        """By the kind of log line: the last one, and when it was written."""
        self._closing = threading.Event()
        self._tried = threading.Event()
        self._lock = threading.Lock()  # over the life of the socket, not over reads from it
        self._socket: socket.socket | None = None
        self._opening: socket.socket | None = None
        self._was_refused = False
        self._arrived = threading.Event()
        self._thread = threading.Thread(target=self._run, name="swansong", daemon=True)

    def start(self) -> None:
        """Begin to connect."""
        self._thread.start()

    def is_connected(self) -> bool:
        """Whether there is a connection; waits until the first attempt has come to an end.

        A socket that is there and refuses belongs to a daemon that is being restarted: that one is
        waited for, up to :data:`RESTART_PATIENCE_S`.
        """
        self._tried.wait(2 * CONNECT_TIMEOUT_S)
        if self._socket is None and self._was_refused:
            log.warning("swansongd at %s does not answer; waiting for its restart", self.path)
            self._arrived.wait(RESTART_PATIENCE_S)
        return self._socket is not None

    def send(self, message: Message) -> bool:
        """Send without waiting.  False when it cannot be said now; a reconnect says what matters again."""
        try:
            data = protocol.encode(message)
        except ValueError as error:
            self._say(
                "unsent", logging.WARNING, f"a {message.TYPE} message cannot be sent: {error}"
            )
            return False
        with self._lock:
            if self._socket is None:
                return False
            try:
                self._socket.send(data)
                return True
            except OSError:  # BlockingIOError among them: the daemon has stopped to read
                self._hang_up()
                return False

    def close(self, farewell: Message) -> None:
        """Say farewell and end the thread; waits for it a second at most."""
        if not self._closing.is_set():
            self.send(farewell)
            self._closing.set()
            with self._lock:
                self._hang_up()
            if threading.current_thread() is not self._thread:
                self._thread.join(1.0)

    def forked(self) -> None:
        """In the child of a fork, where the thread does not exist: let go of the parent's connection."""
        # New ones, for the thread may have held the locks of the old ones.
        self._lock = threading.Lock()
        self._closing, self._tried = threading.Event(), threading.Event()
        self._closing.set()
        self._tried.set()
        for connection in (self._socket, self._opening):
            if connection is not None:
                connection.close()
        self._socket = self._opening = None

    def _hang_up(self) -> None:
        if self._socket is not None:
            try:
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closes it
            except OSError:
                pass

    def _run(self) -> None:
        backoff_s = BACKOFF_MIN_S
        while not self._closing.is_set():
            connected = self._connect()
            self._tried.set()
            if connected and self._converse():
                backoff_s = BACKOFF_MIN_S
            self._let_go()
            resume_mono_s = time.monotonic() + backoff_s
            while (left_s := resume_mono_s - time.monotonic()) > 0 and not self._closing.is_set():
                self._guarded(self._tick)
                self._closing.wait(min(left_s, TICK_S))
            backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)

    def _connect(self) -> bool:
        connection = self._opening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.settimeout(CONNECT_TIMEOUT_S)
            connection.connect(self.path)
            connection.setblocking(False)
            self.trusted_uids |= {check_listener(connection, self.path)}
            connection.send(protocol.encode(self._hello()))  # before anybody else can say a word
        except StrangerError as error:
            self._say("stranger", logging.WARNING, str(error))
        except PermissionError:
            self._say(
                "permission",
                logging.WARNING,
                f"no permission to use {self.path}: add this user to the group that owns it (see"
                f" ls -l {self.path}) and log in again; training goes on without checkpoints",
            )
        except (OSError, ProtocolError) as error:
            self._was_refused |= isinstance(error, ConnectionRefusedError)
            why = getattr(error, "strerror", None) or str(error)
            self._say(
                "absence",
                self._absence,
                f"no swansongd at {self.path} ({why}); the hooks do nothing",
            )
        else:
            with self._lock:
                self._socket, self._opening = connection, None
            self._arrived.set()
            return True
        connection.close()
        return False

    def _converse(self) -> bool:
        """Until the connection ends.  Whether the daemon ever said anything."""
        connection = self._socket
        assert connection is not None
        self._guarded(self._connected)
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        heard = False
        while not self._closing.is_set():
            if poll.poll(TICK_S * 1000):
                try:
                    data = connection.recv(protocol.MAX_MESSAGE_BYTES + 1)
                except BlockingIOError:
                    continue
                except OSError:
                    return heard
                if not data:
                    return heard
                heard = True
                self._received(data)
            self._guarded(self._tick)
        return heard

    def _received(self, data: bytes) -> None:
        try:
            message = protocol.decode(data)
        except ProtocolError as error:
            self._say(
                "unread", logging.WARNING, f"a message of the daemon is not understood: {error}"
            )
            return
        self._guarded(lambda: self._handle(message))

    def _guarded(self, call: Callable[[], None]) -> None:
        # The thread must outlive every surprise, for without it no request is ever heard.
        try:
            call()
        except Exception as error:
            text = f"an error in the hooks of Swansong; training continues: {error!r:.300}"
            self._say("fault", logging.ERROR, text, trace=True)

    def _let_go(self) -> None:
        with self._lock:
            if self._socket is not None:
                self._socket.close()
                self._socket = None

    def _say(self, kind: str, level: int, text: str, *, trace: bool = False) -> None:
        """Log a line when it differs from the last one of its kind, once a minute at most."""
        now = time.monotonic()
        said, said_mono_s = self._said.get(kind, ("", -math.inf))
        if text != said and now - said_mono_s >= SAY_EVERY_S:
            self._said[kind] = text, now
            log.log(level, "%s", text, exc_info=trace)


def socket_path(given: str | os.PathLike[str] | None) -> tuple[str, bool]:
    """Where the daemon listens, and whether somebody said so."""
    named = given or os.environ.get(protocol.SOCKET_ENV)
    return (os.fspath(named), True) if named else (protocol.DEFAULT_SOCKET, False)
