# SPDX-License-Identifier: Apache-2.0
"""TLS in memory, over a socket that transfers many records in one call.

A socket of the ``ssl`` module needs two system calls and one Python call for each record of 16 KiB.  Here
ciphertext is sent and received in large pieces, which are still in the processor's cache when they are
decrypted.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from typing import cast

from swansong_bucket.util.http1 import receive_until

PIECE_BYTES = 2**19
"""Limit of one piece.  Smaller pieces cost more switches between threads."""
_FIRST_BYTES = 2**14


class Tls:
    """The client side of a TLS connection.  One thread uses it at a time.

    A shutdown of the socket by another thread ends every wait.

    Args:
        sock: connected; the caller closes it.
        context: trusted certificates and protocol versions.
        host: the certificate must be valid for this name.
        handshake_s: limit of the handshake, also of one that arrives byte by byte.

    Raises:
        OSError: the handshake failed; ``ssl.SSLCertVerificationError`` if the certificate is not trusted.
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
        # The stubs allow only a bytearray; any buffer works, and the length is returned.
        self._read = cast("Callable[[int, memoryview], int]", self._tls.read)
        self._ciphertext = memoryview(bytearray(_FIRST_BYTES))
        timeout_s = sock.gettimeout()
        self._shake_hands()
        sock.settimeout(timeout_s)
        self._receive_into = sock.recv_into

    @property
    def has_more(self) -> bool:
        """Whether there are received bytes that were not read yet."""
        return bool(self._arrived.pending or self._tls.pending())

    def send_all(self, data: memoryview | bytes) -> None:
        """Send all of ``data``; raises OSError."""
        whole = memoryview(data)
        for start in range(0, whole.nbytes, PIECE_BYTES):
            self._tls.write(whole[start : start + PIECE_BYTES])
            self._sock.sendall(self._leaving.read())

    def receive_into(self, window: memoryview) -> int:
        """Receive at least one byte into ``window``; returns 0 at the end, and raises OSError."""
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
                    raise ConnectionResetError(
                        "the connection ended during the TLS handshake"
                    ) from None
            except ssl.SSLError:
                with suppress(OSError):
                    self._flush()  # send the alert
                raise
            else:
                self._flush()
                return

    def _fetch(self) -> bool:
        """Wait for ciphertext; returns False at the end of the connection."""
        self._flush()  # for example the response to a key update
        count = self._receive_into(self._ciphertext)
        self._arrived.write(self._ciphertext[:count])
        if count == self._ciphertext.nbytes < PIECE_BYTES:
            # The buffer was full: only connections that receive much get a large one.
            self._ciphertext = memoryview(bytearray(min(4 * count, PIECE_BYTES)))
        return count > 0

    def _flush(self) -> None:
        if self._leaving.pending:
            self._sock.sendall(self._leaving.read())
