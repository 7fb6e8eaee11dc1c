# SPDX-License-Identifier: Apache-2.0
"""One connection of the trainer channel, and the listening socket.  Contains no policy."""

from __future__ import annotations

import errno
import os
import select
import socket
import sys
from collections import deque
from contextlib import suppress
from pathlib import Path

from swansong.protocol import MAX_MESSAGE_BYTES, Hello
from swansong_bucket.errors import SwansongError

from swansongd.trainers.peers import Peer
from swansongd.util import unix
from swansongd.util.rates import TokenBucket
from swansongd.util.unix import CREDENTIALS_BYTES, unpack_credentials

OUTGOING_MESSAGES_MAX = 64
OUTGOING_BYTES_MAX = 512 * 2**10
MESSAGES_PER_S_MAX = 200.0
_HELLOS_AT_ONCE, _HELLOS_PER_S = 10.0, 1.0
_BACKLOG = 1024
"""Pending connections; the kernel refuses further ones."""


class PeerConnection:
    """A connected peer: its socket (None once closed), its process, and its queue of outgoing messages."""

    def __init__(
        self, number: int, connected: socket.socket | None, peer: Peer, now_mono_s: float
    ) -> None:
        self.number = number
        self.socket = connected
        self.peer = peer
        self.has_joined = False
        self.hello: Hello | None = None
        """The last hello."""
        self.hellos = TokenBucket(_HELLOS_AT_ONCE, _HELLOS_PER_S)
        self.messages = TokenBucket(MESSAGES_PER_S_MAX, MESSAGES_PER_S_MAX)
        self.received_mono_s = now_mono_s
        """Time of the last valid message, or of the connection."""
        self._outgoing: deque[tuple[bytes, int]] = deque()
        self._outgoing_bytes = 0

    @property
    def is_sending(self) -> bool:
        """Whether messages are queued until the peer reads."""
        return bool(self._outgoing)

    def is_alive(self) -> bool:
        """Whether the process runs and its end of the socket is open; reads no message."""
        try:
            if self.socket is None or select.select([self.peer.pidfd], [], [], 0)[0]:
                return False
            # An empty message is the end of the stream; an unread one hides whether the end follows.
            return bool(self.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def receive(self) -> tuple[bytes, int, bool]:
        """The next message, the pid of its sender, and whether it was truncated at the size limit.

        An empty message means that the peer has closed its end.

        Raises:
            BlockingIOError: there is no message.
            OSError: the connection is broken.
        """
        assert self.socket is not None
        # The buffer fits only the credentials, so the kernel drops descriptors that a peer may pass.
        limits = MAX_MESSAGE_BYTES, socket.CMSG_SPACE(CREDENTIALS_BYTES), socket.MSG_CMSG_CLOEXEC
        try:
            data, ancillary, flags, _ = self.socket.recvmsg(*limits)
        except ConnectionResetError:
            # It closed with messages of ours unread.  The kernel says so once; its own last ones follow.
            data, ancillary, flags, _ = self.socket.recvmsg(*limits)
        pid = 0
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                pid = unpack_credentials(content)[0]
        return data, pid, bool(flags & socket.MSG_TRUNC)

    def send(self, message: bytes, fd: int = -1) -> bool:
        """Send, or queue until the peer reads; False if the queue is full.

        Args:
            message: one datagram.
            fd: a descriptor to pass with it, which this object closes; -1: none.

        Raises:
            OSError: the connection is broken.
        """
        size_bytes = self._outgoing_bytes + len(message)
        is_full = len(self._outgoing) >= OUTGOING_MESSAGES_MAX
        if self.socket is None or is_full or size_bytes > OUTGOING_BYTES_MAX:
            _close(fd)
            return False
        self._outgoing.append((message, fd))
        self._outgoing_bytes = size_bytes
        self.flush()
        return True

    def flush(self) -> None:
        """Send as much as the socket takes now; nothing to a peer that has closed its end.

        The last messages of such a peer, and then the end, are still to be received.

        Raises:
            OSError: the connection is broken.
        """
        with suppress(BlockingIOError):
            while self._outgoing and self.socket is not None:
                message, fd = self._outgoing[0]
                with suppress(BrokenPipeError, ConnectionResetError):
                    _send(self.socket, message, fd)
                self._outgoing.popleft()
                self._outgoing_bytes -= len(message)
                _close(fd)

    def close(self, last_message: bytes | None = None) -> None:
        """Close the socket; send ``last_message`` before, if the peer's buffer has room for it."""
        if self.socket is not None:
            close_socket(self.socket, last_message)
            self.socket = None
            for _, fd in self._outgoing:
                _close(fd)
            self._outgoing.clear()
            self._outgoing_bytes = 0


def _send(connected: socket.socket, message: bytes, fd: int) -> None:
    """Send a message with a descriptor; without it if the kernel has too many descriptors in flight."""
    if fd >= 0:
        rights = fd.to_bytes(4, sys.byteorder)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
        try:
            connected.sendmsg([message], ancillary, socket.MSG_NOSIGNAL)
            return
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:
                raise
    connected.send(message, socket.MSG_NOSIGNAL)


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)


def close_socket(connected: socket.socket, last_message: bytes | None) -> None:
    """Close a non-blocking socket, after a last message."""
    if last_message is not None:
        with suppress(OSError):
            # Unread bytes at the close would reset the connection, and the peer would lose the message.
            connected.shutdown(socket.SHUT_RD)
            while connected.recv(1):
                pass
        with suppress(OSError):
            connected.send(last_message, socket.MSG_NOSIGNAL)
    connected.close()


def listen(path: Path) -> socket.socket:
    """A listening socket for the channel; see :func:`swansongd.util.unix.listen`."""
    return unix.listen(path, socket.SOCK_SEQPACKET, key="trainer.socket", backlog=_BACKLOG)


def adopt(listener_fd: int) -> socket.socket:
    """The listening socket that systemd passed.

    Raises:
        SwansongError: it has another type.
    """
    listener = socket.socket(fileno=listener_fd)
    if (listener.family, listener.type) != (socket.AF_UNIX, socket.SOCK_SEQPACKET):
        listener.close()
        raise SwansongError(
            "the socket from systemd has the wrong type",
            hint="use ListenSequentialPacket= in the socket unit",
        )
    return listener
