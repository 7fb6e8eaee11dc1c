# SPDX-License-Identifier: Apache-2.0
"""TLS in memory, over a socket that moves many records a call.

The ``ssl`` module's own socket asks the kernel twice for each record of 16 KiB, and is called once for
each.  Here ciphertext comes and goes in large pieces, which the processor's cache still holds when they
are opened.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from typing import cast

from swansongd.util.http1 import receive_until

PIECE_BYTES = 2**19
"""Received, or sealed and sent, at once at most.  Smaller ones cost more hand-overs between threads."""
_FIRST_BYTES = 2**14


class Tls:
    """One TLS connection, from our side of it.  Used by one thread at a time.

    Whoever shuts down the socket ends what the thread waits for.

    Args:
        sock: connected, and still the caller's to close.
        context: what is trusted, and spoken.
        host: whose certificate it must be.
        handshake_s: limit of the handshake, even if it comes byte by byte.

    Raises:
        OSError: the handshake failed; an ``ssl.SSLCertVerificationError`` when nobody trusts the host.
    """

    def __init__(
        self,
        sock: socket.socket,
        context: ssl.SSLContext,
        host: str,
        handshake_s: float = 10.0,
    ) -> None:
        self._sock = sock
        self._receive_into = receive_until(sock, time.monotonic() + handshake_s)
        self._arrived = ssl.MemoryBIO()
        self._leaving = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._arrived, self._leaving, server_hostname=host)
        # What is typed as reading into a bytearray only takes any buffer, and tells the length.
        self._read = cast("Callable[[int, memoryview], int]", self._tls.read)
        self._ciphertext = memoryview(bytearray(_FIRST_BYTES))
        timeout_s = sock.gettimeout()
        self._shake_hands()
        sock.settimeout(timeout_s)
        self._receive_into = sock.recv_into

    @property
    def has_more(self) -> bool:
        """Whether something came that nobody has asked for yet."""
        return bool(self._arrived.pending or self._tls.pending())

    def send_all(self, data: memoryview | bytes) -> None:
        """All of ``data``; raises OSError."""
        whole = memoryview(data)
        for start in range(0, whole.nbytes, PIECE_BYTES):
            self._tls.write(whole[start : start + PIECE_BYTES])
            self._sock.sendall(self._leaving.read())

    def receive_into(self, window: memoryview) -> int:
        """Fill ``window`` with what has come, at least one byte; 0 at the end.  Raises OSError."""
        filled = 0
        while filled < window.nbytes:
            try:
                count = self._read(window.nbytes - filled, window[filled:])
            except ssl.SSLWantReadError:
                if filled or not self._fetch():
                    break
            else:
                if not count:
                    break
                filled += count
        return filled

    def _shake_hands(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                if not self._fetch():
                    raise ConnectionResetError("it ended within the TLS handshake") from None
            except ssl.SSLError:
                with suppress(OSError):
                    self._flush()  # tell the other side why
                raise
            else:
                self._flush()
                return

    def _fetch(self) -> bool:
        """Wait for ciphertext; False at its end."""
        self._flush()  # an answer to a change of keys, for one
        count = self._receive_into(self._ciphertext)
        self._arrived.write(self._ciphertext[:count])
        if (
            count == self._ciphertext.nbytes < PIECE_BYTES
        ):  # much comes: only then there is room for it
            self._ciphertext = memoryview(bytearray(min(4 * count, PIECE_BYTES)))
        return count > 0

    def _flush(self) -> None:
        if self._leaving.pending:
            self._sock.sendall(self._leaving.read())
