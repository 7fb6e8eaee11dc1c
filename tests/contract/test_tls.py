# SPDX-License-Identifier: Apache-2.0
"""TLS in memory: the same bytes as with a socket of the ssl module, in fewer calls."""

from __future__ import annotations

import fcntl
import hashlib
import socket
import ssl
import struct
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from swansong_bucket.stores.http.tls import PIECE_BYTES, Tls

from testkit.raw_server import certificate
from testkit.waiting import until

HOST = "127.0.0.1"
RECORD_BYTES = 2**14


class Counting(socket.socket):
    """A socket that counts the calls of recv_into."""

    receipts = 0

    def recv_into(  # type: ignore[override]
        self, buffer: memoryview, nbytes: int = 0, flags: int = 0
    ) -> int:
        self.receipts += 1
        return super().recv_into(buffer, nbytes, flags)


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificate(tmp_path_factory.mktemp("tls"))


@contextmanager
def facing(
    pem: Path, serve: Callable[[ssl.SSLSocket], None], version: ssl.TLSVersion
) -> Iterator[Counting]:
    """A socket whose peer speaks TLS in a thread, by the ssl module."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    context.maximum_version = version
    listener = socket.create_server((HOST, 0))
    errors: list[BaseException] = []

    def run() -> None:
        raw, _ = listener.accept()
        with raw, suppress(OSError), context.wrap_socket(raw, server_side=True) as theirs:
            try:
                serve(theirs)
            except BaseException as error:
                errors.append(error)

    with ExitStack() as stack:
        stack.callback(listener.close)
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        stack.callback(thread.join, 10)
        ours = stack.enter_context(Counting(socket.AF_INET))
        ours.settimeout(10)
        ours.connect(listener.getsockname())
        yield ours
    assert not errors, errors
    assert not thread.is_alive()


def trusting(pem: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(pem))


def received(tls: Tls, size_bytes: int) -> bytes:
    window = memoryview(bytearray(size_bytes))
    have = 0
    while have < size_bytes and (count := tls.receive_into(window[have:])):
        have += count
    return bytes(window[:have])


def queued_bytes(sock: socket.socket) -> int:
    return int(struct.unpack("i", fcntl.ioctl(sock, termios.FIONREAD, b"\0" * 4))[0])


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("size_bytes", [1, RECORD_BYTES, 2**18 - 1, 2**18 + 1, 3 * 2**20 + 7])
def test_bytes_arrive_as_they_are(pem: Path, size_bytes: int, version: ssl.TLSVersion) -> None:
    """Sent bytes return unchanged, for any size relative to records and pieces; then the connection ends."""
    content = hashlib.shake_128(b"bytes").digest(size_bytes)

    def echo(theirs: ssl.SSLSocket) -> None:
        got = bytearray()
        while len(got) < size_bytes:
            got += theirs.recv(2**16)
        theirs.sendall(got)
        with suppress(OSError):  # the peer's end is received, ours is not sent
            theirs.unwrap()

    with facing(pem, echo, version) as sock:
        tls = Tls(sock, trusting(pem), HOST)
        tls.send_all(memoryview(content))
        assert received(tls, size_bytes + 1) == content


def test_many_records_are_received_in_one_call(pem: Path) -> None:
    """After the first piece, one call takes a whole piece from the socket, not one record."""
    size_bytes = 16 * RECORD_BYTES
    is_over = threading.Event()

    def serve(theirs: ssl.SSLSocket) -> None:
        theirs.sendall(bytes(size_bytes))
        is_over.wait(10)

    with facing(pem, serve, ssl.TLSVersion.TLSv1_3) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * size_bytes)
        tls = Tls(sock, trusting(pem), HOST)
        until(lambda: queued_bytes(sock) > size_bytes, what="all of it in the socket")
        sock.receipts = 0
        assert received(tls, size_bytes) == bytes(size_bytes)
        assert (
            sock.receipts <= 3 + size_bytes // PIECE_BYTES
        )  # the first, and the end of its record
        is_over.set()


@pytest.mark.parametrize("records", [(b"ab",), (b"a", b"b")])
def test_unread_bytes_are_detected(pem: Path, records: tuple[bytes, ...]) -> None:
    """Bytes after the requested ones are detected, decrypted or not."""
    is_over = threading.Event()

    def serve(theirs: ssl.SSLSocket) -> None:
        for record in records:
            theirs.sendall(record)
        is_over.wait(10)

    with facing(pem, serve, ssl.TLSVersion.TLSv1_3) as sock:
        tls = Tls(sock, trusting(pem), HOST)
        overhead_bytes = 22
        sent_bytes = sum(len(record) + overhead_bytes for record in records)
        # The server's tickets precede them, with a few hundred bytes.
        until(lambda: queued_bytes(sock) >= sent_bytes + 200, what="all of it in the socket")
        assert received(tls, 1) == b"a"
        assert tls.has_more
        assert received(tls, 1) == b"b"
        assert not tls.has_more
        is_over.set()


def test_an_end_within_the_handshake(pem: Path) -> None:
    """A peer that closes before its certificate breaks the connection."""
    with socket.create_server((HOST, 0)) as listener, socket.socket() as sock:
        sock.settimeout(10)
        sock.connect(listener.getsockname())
        theirs, _ = listener.accept()
        theirs.shutdown(socket.SHUT_WR)
        with theirs, pytest.raises(ConnectionResetError):
            Tls(sock, trusting(pem), HOST)


def test_an_unknown_certificate(pem: Path) -> None:
    """It is refused, and the peer gets an alert."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    with socket.create_server((HOST, 0)) as listener, socket.socket() as sock:
        sock.settimeout(10)
        sock.connect(listener.getsockname())
        theirs, _ = listener.accept()
        told: list[ssl.SSLError] = []

        def serve() -> None:
            try:
                context.wrap_socket(theirs, server_side=True)
            except ssl.SSLError as error:
                told.append(error)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with theirs:
            with pytest.raises(ssl.SSLCertVerificationError):
                Tls(sock, ssl.create_default_context(), HOST)
            thread.join(10)
    assert "ALERT" in (told[0].reason or "")


def test_a_waiting_thread_is_freed(pem: Path) -> None:
    """A shutdown of the socket by another thread ends a receive immediately: with an end or an error."""
    is_over = threading.Event()
    ends: list[int] = []

    def serve(_theirs: ssl.SSLSocket) -> None:
        is_over.wait(10)

    def wait(tls: Tls) -> None:
        try:
            ends.append(tls.receive_into(memoryview(bytearray(1))))
        except OSError:  # data that the peer sent meanwhile was refused
            ends.append(0)

    with facing(pem, serve, ssl.TLSVersion.TLSv1_3) as sock:
        tls = Tls(sock, trusting(pem), HOST)
        sock.receipts = 0
        thread = threading.Thread(target=wait, args=(tls,), daemon=True)
        thread.start()
        until(lambda: sock.receipts > 0, what="the thread waits")
        sock.shutdown(socket.SHUT_RDWR)
        thread.join(5)  # it would be 10 by itself
        assert ends == [0]
        is_over.set()
