# SPDX-License-Identifier: Apache-2.0
"""The connection to the daemon: a background thread that connects, receives and reconnects.

Sending never blocks, so the training loop can do it.
"""

from __future__ import annotations

import logging
import math
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable

from swansong import protocol
from swansong._daemon.trust import StrangerError, check_listener
from swansong._log import log
from swansong.fields import ProtocolError
from swansong.protocol import Message

BACKOFF_MIN_S = 0.2
BACKOFF_MAX_S = 5.0
RESTART_PATIENCE_S = 30.0
"""Longest wait of a restore for a daemon whose socket exists but refuses connections."""
CONNECT_TIMEOUT_S = 2.0
HAS_DAEMON = sys.platform == "linux"
_FD_BYTES = 4
TICK_S = 1.0
WATCHFUL_TICK_S = 0.1
LOG_INTERVAL_S = 60.0
"""Shortest time between two log lines of one kind."""


class Channel:
    """One rank's connection to the daemon.

    Args:
        path: of the daemon's socket.
        expected: whether this machine has a daemon; its absence is then logged as a warning.
        hello: returns the first message of each connection.  The thread calls it, and the functions below.
        connected: called after the first message was sent.
        handle: called with each message of the daemon, and with the descriptor that came with it, which
            the callee closes; -1 if none came.
        tick: called at least once a second, connected or not.
    """

    def __init__(
        self,
        path: str,
        *,
        expected: bool,
        hello: Callable[[], Message],
        connected: Callable[[], None],
        handle: Callable[[Message, int], None],
        tick: Callable[[], None],
    ) -> None:
        self.path = path
        self.trusted_uids = frozenset({0, os.geteuid()} if HAS_DAEMON else ())
        """Root, this user and, after the first connection, the daemon's user."""
        self.absence_level = logging.WARNING if expected else logging.INFO
        self._hello = hello
        self._connected = connected
        self._handle = handle
        self._tick = tick
        self.tick_s = TICK_S
        """Longest time between two ticks."""
        self._logged: dict[str, tuple[str, float]] = {}
        """By kind of log line: the last line, and its time in seconds of ``time.monotonic()``."""
        self._closing = threading.Event()
        self._tried = threading.Event()
        self._lock = threading.Lock()  # guards the lifetime of the socket, not reads from it
        self._socket: socket.socket | None = None
        self._opening: socket.socket | None = None
        self._was_refused = False
        self._arrived = threading.Event()
        self._thread = threading.Thread(target=self._run, name="swansong", daemon=True)

    def start(self) -> None:
        """Start the thread, which begins to connect."""
        if HAS_DAEMON:
            self._thread.start()
        else:
            self._tried.set()
            log.info("swansongd needs Linux; training continues without checkpoints")

    def has_connected(self) -> bool:
        """Whether a daemon has accepted a connection of this process; if that ended, the daemon restarts.

        Blocks until the first attempt has ended.  A socket that refuses connections belongs to a daemon that
        restarts, too.  For that daemon it waits up to :data:`RESTART_PATIENCE_S`.
        """
        # The thread may not have run yet: the process was suspended, or the machine is busy.
        while not self._tried.wait(CONNECT_TIMEOUT_S) and self._thread.is_alive():
            pass
        if self._was_refused and not self._arrived.is_set():
            log.warning("swansongd at %s does not answer; waiting for its restart", self.path)
            self._arrived.wait(RESTART_PATIENCE_S)
        return self._arrived.is_set()

    def send(self, message: Message) -> bool:
        """Send a message without blocking.

        Returns:
            False if the message was not sent.  After a reconnect the callers repeat what matters.
        """
        try:
            data = protocol.encode(message)
        except ValueError as error:
            self._log("unsent", logging.WARNING, f"cannot send a {message.TYPE} message: {error}")
            return False
        with self._lock:
            if self._socket is None:
                return False
            try:
                self._socket.send(data)
                return True
            except OSError:  # such as BlockingIOError: the daemon has stopped reading
                self._hang_up()
                return False

    def close(self, farewell: Message) -> None:
        """Send a last message and end the thread; blocks for at most 1 s."""
        if not self._closing.is_set():
            self.send(farewell)
            self._closing.set()
            with self._lock:
                self._hang_up()
            if self._thread.is_alive() and threading.current_thread() is not self._thread:
                self._thread.join(1.0)

    def close_in_child(self) -> None:
        """Close the parent's connection in the child of a fork, which has another channel from now on."""
        for connection in (self._socket, self._opening):
            if connection is not None:
                connection.close()

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
            if connected and self._receive_all():
                backoff_s = BACKOFF_MIN_S
            self._disconnect()
            resume_mono_s = time.monotonic() + backoff_s
            while (left_s := resume_mono_s - time.monotonic()) > 0 and not self._closing.is_set():
                self._guarded(self._tick)
                self._closing.wait(min(left_s, self.tick_s))
            backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)

    def _connect(self) -> bool:
        connection = self._opening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.settimeout(CONNECT_TIMEOUT_S)
            connection.connect(self.path)
            connection.setblocking(False)
            self.trusted_uids |= {check_listener(connection, self.path)}
            connection.send(protocol.encode(self._hello()))  # before another thread can send
        except StrangerError as error:
            self._log("stranger", logging.WARNING, str(error))
        except PermissionError:
            self._log(
                "permission",
                logging.WARNING,
                f"cannot connect to {self.path}: permission denied; add this user to the group that owns it"
                f" (see ls -l {self.path}) and log in again; training continues without checkpoints",
            )
        except (OSError, ProtocolError) as error:
            self._was_refused |= isinstance(error, ConnectionRefusedError)
            why = getattr(error, "strerror", None) or str(error)
            self._log(
                "absence",
                self.absence_level,
                f"no swansongd at {self.path} ({why}); training continues without checkpoints",
            )
        else:
            with self._lock:
                self._socket, self._opening = connection, None
            self._arrived.set()
            return True
        connection.close()
        return False

    def _receive_all(self) -> bool:
        """Receive messages until the connection ends; returns whether any message arrived."""
        connection = self._socket
        assert connection is not None
        self._guarded(self._connected)
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        has_received = False
        while not self._closing.is_set():
            if poll.poll(self.tick_s * 1000):
                try:
                    data, fd = _receive(connection)
                except BlockingIOError:
                    continue
                except OSError:
                    return has_received
                if not data:
                    return has_received
                has_received = True
                self._received(data, fd)
            self._guarded(self._tick)
        return has_received

    def _received(self, data: bytes, fd: int) -> None:
        try:
            message = protocol.decode(data)
        except ProtocolError as error:
            self._log("unread", logging.WARNING, f"cannot decode a message of the daemon: {error}")
            if fd >= 0:
                os.close(fd)
            return
        self._guarded(lambda: self._handle(message, fd))

    def _guarded(self, call: Callable[[], None]) -> None:
        # The thread must survive every error: without it, no request would be answered.
        try:
            call()
        except Exception as error:
            text = f"an error in the hooks of Swansong; training continues: {error!r:.300}"
            self._log("fault", logging.ERROR, text, trace=True)

    def _disconnect(self) -> None:
        with self._lock:
            if self._socket is not None:
                self._socket.close()
                self._socket = None

    def _log(self, kind: str, level: int, text: str, *, trace: bool = False) -> None:
        """Log a line if it differs from the last one of its kind; at most once a minute."""
        now = time.monotonic()
        last, logged_mono_s = self._logged.get(kind, ("", -math.inf))
        if text != last and now - logged_mono_s >= LOG_INTERVAL_S:
            self._logged[kind] = text, now
            log.log(level, "%s", text, exc_info=trace)


def _receive(connection: socket.socket) -> tuple[bytes, int]:
    """Return a message, and the descriptor that came with it; -1 if none came.

    Raises:
        OSError: there is no message, or the connection is broken.
    """
    # Not socket.recv_fds: in Python 3.11 it ignores its flags, and children of the trainer would inherit.
    data, ancillary, _, _ = connection.recvmsg(
        protocol.MAX_MESSAGE_BYTES + 1, socket.CMSG_LEN(_FD_BYTES), socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS) and len(content) == _FD_BYTES:
            return data, int.from_bytes(content, sys.byteorder)
    return data, -1


def socket_path(given: str | os.PathLike[str] | None) -> tuple[str, bool]:
    """Return the path of the daemon's socket, and whether this machine has a daemon.

    The caller or the environment named the socket, or its directory exists: a daemon that stops leaves it.
    """
    check = os.environ.get(protocol.CHECK_ENV, "")
    named = check if os.path.isabs(check) else given or os.environ.get(protocol.SOCKET_ENV)
    if named:
        return os.fspath(named), True
    return protocol.DEFAULT_SOCKET, os.path.isdir(os.path.dirname(protocol.DEFAULT_SOCKET))
