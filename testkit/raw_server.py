# SPDX-License-Identifier: Apache-2.0
"""A socket server, plain or TLS, that runs a script of the test on each connection."""

from __future__ import annotations

import re
import socket
import ssl
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path
from types import TracebackType
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

_LENGTH = re.compile(rb"\r\ncontent-length: *([0-9]+)\r\n", re.IGNORECASE)


@dataclass(frozen=True)
class Request:
    """The bytes of a request."""

    head: bytes
    body: bytes

    @property
    def line(self) -> str:
        return self.head.partition(b"\r\n")[0].decode()

    def header(self, name: str) -> str | None:
        for line in self.head.split(b"\r\n")[1:]:
            key, _, value = line.decode("latin-1").partition(":")
            if key.lower() == name:
                return value.strip()
        return None


class Peer:
    """One accepted connection."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._held = b""

    def request(self) -> Request | None:
        """The next request, with its body; None when the client closed."""
        head = self.head()
        if head is None:
            return None
        length = _LENGTH.search(head)
        return Request(head, self.body(int(length[1]) if length else 0))

    def head(self) -> bytes | None:
        while b"\r\n\r\n" not in self._held:
            received = self.sock.recv(2**16)
            if not received:
                return None
            self._held += received
        head, _, self._held = self._held.partition(b"\r\n\r\n")
        return head + b"\r\n"

    def held(self) -> bytes:
        """The bytes that were received together with the last head."""
        held, self._held = self._held, b""
        return held

    def body(self, size_bytes: int) -> bytes:
        """``size_bytes`` bytes, or fewer if the client closes."""
        got = bytearray(self._held[:size_bytes])
        self._held = self._held[size_bytes:]
        with suppress(OSError):
            while len(got) < size_bytes:
                received = self.sock.recv(min(2**18, size_bytes - len(got)))
                if not received:
                    break
                got += received
        return bytes(got)

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def answer(self, status: int = 200, body: bytes = b"", *headers: str) -> None:
        lines = [f"HTTP/1.1 {status} Whatever", f"Content-Length: {len(body)}", *headers, "", ""]
        self.send("\r\n".join(lines).encode() + body)

    def reset(self) -> None:
        """Close the connection with a RST."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        socket.socket.close(self.sock)

    def wait_for_end(self) -> None:
        """Read and discard everything until the client closes."""
        with suppress(OSError):
            while self.sock.recv(2**18):
                pass


Script = Callable[[Peer], None]


def answering(
    status: int = 200, body: bytes = b"", *headers: str, seen: list[Request] | None = None
) -> Script:
    """A script that sends the same response to every request of a connection."""

    def script(peer: Peer) -> None:
        while (request := peer.request()) is not None:
            if seen is not None:
                seen.append(request)
            peer.answer(status, body, *headers)

    return script


class RawServer:
    """Runs ``script`` on each connection in a separate thread; closes all connections at the end.

    A new ``script`` applies to later connections.
    """

    def __init__(
        self, script: Script, certificate: Path | None = None, *, host: str = "127.0.0.1"
    ) -> None:
        self.script = script
        self.accepted = 0
        self.errors: list[BaseException] = []
        self._context: ssl.SSLContext | None = None
        if certificate is not None:
            self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._context.load_cert_chain(certificate)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        scheme = "https" if certificate else "http"
        named = f"[{host}]" if ":" in host else host
        self.url = f"{scheme}://{named}:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._acceptor = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> Self:
        self._acceptor.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        socket.socket.shutdown(self._listener, socket.SHUT_RDWR)
        self._acceptor.join(timeout=60)
        self._listener.close()
        with self._lock:
            for sock in self._open:
                with suppress(OSError):
                    socket.socket.shutdown(sock, socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(timeout=60)
            assert not thread.is_alive()
        if error is None and self.errors:
            raise self.errors[0]

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            thread = threading.Thread(target=self._serve, args=(sock,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        with self._lock:
            self._open.add(sock)
        raw = sock
        try:
            if self._context is not None:
                sock = self._context.wrap_socket(sock, server_side=True)
                with self._lock:
                    self._open = (self._open - {raw}) | {sock}
            self.script(Peer(sock))
        except OSError:
            pass
        except BaseException as error:
            self.errors.append(error)
        finally:
            with self._lock:
                self._open -= {raw, sock}
            sock.close()


def certificate(folder: Path) -> Path:
    """Write a file with a key and a certificate of 127.0.0.1, for the server and as the CA bundle."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(UTC)
    built = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))]), False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    path = folder / "server.pem"
    path.write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        + built.public_bytes(Encoding.PEM)
    )
    return path
