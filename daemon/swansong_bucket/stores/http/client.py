# SPDX-License-Identifier: Apache-2.0
"""The data plane: HTTP/1.1 requests over persistent connections, at the speed of TLS on this machine.

A body is in the memory of the caller, and is sent from there.  A connection that receives bodies has
one window of memory for them.  There is no other copy.  The callers sign, retry and interpret responses.
"""

from __future__ import annotations

import base64
import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import SplitResult, unquote, urlsplit

from swansong_bucket.errors import Permanent, Transient
from swansong_bucket.stores.base import WINDOW_BYTES, Body, Sink
from swansong_bucket.stores.http.pool import ConnectionBroken, HttpConnection, Pool, TooSlow
from swansong_bucket.stores.http.tls import Tls
from swansong_bucket.util.http1 import Head, ResponseReader, receive_until, request_head

RESPONSE_BYTES_MAX = 4 * 2**20
"""Limit of a response body without a sink: a listing of a thousand keys."""
REFUSAL_BYTES_MAX = 64 * 2**10
"""Limit of the bytes that are read of an error response."""
HEAD_BYTES_MAX = 16 * 2**10
"""Limit of the head of a request."""
_JOINED_BYTES_MAX = 64 * 2**10
"""Smaller bodies are sent in one call with their head."""
_UNSENT_BYTES_MAX = 2**20
"""Bytes of a connection that wait in the kernel to be sent.  More would count as sent far too early, and a
quarter of it costs 6 % of an upload: a thread then waits more often."""
_SILENT_MAX = 256
"""Silent addresses that a wire remembers."""
_SPAN = re.compile(r"bytes=([0-9]+)-([0-9]+)")
_PORTS = {"https": 443, "http": 80}


@dataclass(frozen=True, slots=True)
class Response:
    """The response of the store."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes
    """Empty if the sink received it."""


@dataclass(slots=True)
class _Request:
    method: str
    target: str
    headers: Mapping[str, str]
    body: Body | None
    sink: Sink | None
    range: str = field(init=False)

    def __post_init__(self) -> None:
        self.range = {name.lower(): value for name, value in self.headers.items()}.get("range", "")


def _proxy_of(endpoint: str) -> str | None:
    """The proxy that the environment names for an endpoint."""
    if not any(name.lower().endswith("_proxy") for name in os.environ):
        return None
    # Slow to import, and most VMs have no proxy.
    from requests.utils import get_environ_proxies, select_proxy  # noqa: PLC0415

    proxy: str | None = select_proxy(endpoint, get_environ_proxies(endpoint))
    return proxy


class Wire:
    """Requests to one endpoint.  Every method is safe to call from many threads at the same time.

    Args:
        endpoint: ``https://host[:port]`` or ``http://host[:port]``.
        connections: limit of the requests in flight, and of the open connections.
        ca_bundle: file of the certificates to trust instead of the system's.
        connect_timeout_s: limit for opening a connection, and for its TLS handshake.
        stall_s: a request fails if no byte moves for this time.
        first_byte_s: the same limit while only the response is outstanding.
        response_s: limit of a whole response, or of its head if a sink receives the body.
        is_proxied: use the proxy of the environment.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        connections: int,
        ca_bundle: str | None = None,
        connect_timeout_s: float = 3.0,
        stall_s: float = 3.0,
        first_byte_s: float = 10.0,
        response_s: float = 60.0,
        is_proxied: bool = True,
    ) -> None:
        parts = urlsplit(endpoint)
        self._scheme = parts.scheme
        self._address = (parts.hostname or "", parts.port or _PORTS[parts.scheme])
        self.host = parts.netloc.removesuffix(f":{_PORTS[parts.scheme]}")
        """Value of the Host header, which signatures contain."""
        self._ca_bundle = ca_bundle
        self._connect_timeout_s = connect_timeout_s
        self._response_s = response_s
        proxy = _proxy_of(endpoint) if is_proxied else None
        self._proxy = urlsplit(proxy if "://" in proxy else f"http://{proxy}") if proxy else None
        is_forwarded = self._proxy is not None and parts.scheme == "http"
        self._prefix = endpoint.rstrip("/") if is_forwarded else ""
        self._proxy_lines = _authorization(self._proxy) if self._proxy is not None else []
        self._silent = set[object]()
        """Addresses at which a connection ended with a timeout."""
        self._lock = threading.Lock()
        self._context: ssl.SSLContext | None = None
        self._pool = Pool(
            self._dial, connections=connections, stall_s=stall_s, first_byte_s=first_byte_s
        )

    def request(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        *,
        body: Body | None = None,
        sink: Sink | None = None,
    ) -> Response:
        """Send one request, and send it again if it is much slower than requests are as a rule.

        So it may take effect twice: a create-if-absent then raises Exists for its own object, as after any
        lost reply.  Errors are not retried.

        Args:
            target: path and query, percent-encoded.
            headers: all except Host, Content-Length and Connection.
            body: rewound first.
            sink: receives the body of a 200, or exactly the range in ``headers``; rewound first.  A 200 or
                206 with another Content-Range is returned without its body.

        Raises:
            Transient: the network failed, or the response is not HTTP.
            Permanent: the certificate is not trusted.
            Exception: exceptions of ``body`` and ``sink``, unchanged; the connection is closed.
        """
        request = _Request(method, target, headers, body, sink)
        head = self._head(request)
        try:
            return self._attempt(head, request, is_first=True)
        except TooSlow:
            return self._attempt(head, request, is_first=False)

    def close(self) -> None:
        """Close the idle connections, and each other one at the end of its request."""
        self._pool.close()

    # ------------------------------------------------------------ one request

    def _attempt(self, head: bytes, request: _Request, *, is_first: bool) -> Response:
        connection = self._pool.take(is_first_attempt=is_first)
        is_reusable = False
        try:
            reader = ResponseReader(connection.receive_into, request.method)
            try:
                self._send(connection, head, request.body)
            except TooSlow:
                raise
            except ConnectionBroken:
                return self._early_response(connection, reader, request)
            connection.await_response(self._response_s)
            response_head = reader.head()
            response, is_whole = self._receive(connection, reader, response_head, request)
            is_reusable = is_whole and response_head.keeps_open and reader.is_drained
            return response
        finally:
            self._pool.release(connection, is_reusable=is_reusable)

    def _head(self, request: _Request) -> bytes:
        size_bytes = request.body.size_bytes if request.body else 0
        lines = [f"{request.method} {self._prefix}{request.target} HTTP/1.1", f"Host: {self.host}"]
        lines += [f"{name}: {value}" for name, value in request.headers.items()]
        if self._prefix:
            lines += self._proxy_lines
        if request.body is not None or request.method in ("PUT", "POST"):
            lines.append(f"Content-Length: {size_bytes}")
        head = request_head(lines)
        if len(head) > HEAD_BYTES_MAX:
            raise Permanent(f"the head of the request has {len(head)} bytes")
        return head

    def _send(self, connection: HttpConnection, head: bytes, body: Body | None) -> None:
        if body is None:
            connection.send(head)
            return
        body.rewind()
        connection.total_bytes = body.size_bytes
        if body.size_bytes <= _JOINED_BYTES_MAX:
            connection.send(b"".join((head, connection.run_local(body.next_window))))
            return
        connection.send(head)
        while window := connection.run_local(body.next_window):
            connection.send(window)

    def _early_response(
        self, connection: HttpConnection, reader: ResponseReader, request: _Request
    ) -> Response:
        """Read the response after sending failed: a store may refuse a body early, and close.

        Raises:
            ConnectionBroken: there is no error response.
        """
        connection.await_response(self._response_s)
        try:
            head = reader.head()
            if head.status < 300:
                raise Transient("the store sent a success before it had the whole body")
            return self._receive(connection, reader, head, request)[0]
        except Transient as error:
            raise ConnectionBroken(
                f"{connection.cut or 'the connection broke'} while sending: {error}"
            ) from error

    def _receive(
        self,
        connection: HttpConnection,
        reader: ResponseReader,
        head: Head,
        request: _Request,
    ) -> tuple[Response, bool]:
        """Receive the response; returns it, and whether its body was read to the end."""
        body = bytearray()
        is_whole = True
        is_refusal = head.status >= 300
        if not (is_refusal or head.has_end) and request.method in ("GET", "POST"):
            raise Transient("the response has no length and no chunks")
        if request.sink is not None and head.status in (200, 206):
            if is_whole := _is_wanted(head, request.range):
                connection.receive_body()
                connection.total_bytes = head.size_bytes or 0
                request.sink.rewind()
                wanted_bytes = _span_bytes(request.range)
                received_bytes = 0
                for piece in reader.pieces(head, connection.window(WINDOW_BYTES)):
                    received_bytes += piece.nbytes
                    if wanted_bytes is not None and received_bytes > wanted_bytes:
                        raise Transient("the response is longer than its range")
                    connection.run_local(request.sink.write, piece)
                if wanted_bytes not in (None, received_bytes):
                    raise Transient("the response is shorter than its range")
        else:
            limit_bytes = REFUSAL_BYTES_MAX if is_refusal else RESPONSE_BYTES_MAX
            for piece in reader.pieces(head, connection.window(REFUSAL_BYTES_MAX)):
                body += piece
                if len(body) > limit_bytes:
                    if not is_refusal:
                        raise Transient(f"the response has more than {RESPONSE_BYTES_MAX} bytes")
                    is_whole = False  # the reason of the refusal is at its beginning
                    break
        return Response(head.status, head.headers, bytes(body)), is_whole

    # ------------------------------------------------------------ connections

    def _dial(self) -> HttpConnection:
        address = self._address
        if self._proxy is not None:
            address = (self._proxy.hostname or "", self._proxy.port or 80)
        sock = self._connect(address)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES_MAX)
            tls = None
            if self._scheme == "https":
                if self._proxy is not None:
                    self._tunnel(sock)
                tls = Tls(sock, self._tls(), self._address[0], self._connect_timeout_s)
        except ssl.SSLCertVerificationError as error:
            sock.close()
            raise Permanent(
                f"connecting to {self.host}: {error!s:.200}",
                hint="The store's certificate is not trusted on this VM",
            ) from error
        except BaseException:
            sock.close()
            raise
        sock.settimeout(None)
        return HttpConnection(sock, tls)

    def _connect(self, address: tuple[str, int]) -> socket.socket:
        """Connect to the name; addresses that were silent at the last attempt are tried after the others."""
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
        failure = OSError(f"{address[0]} has no address")
        for family, kind, protocol, _, place in sorted(
            found, key=lambda each: each[4] in self._silent
        ):
            try:
                return self._connected(socket.socket(family, kind, protocol), place)
            except OSError as error:
                failure = error
        raise failure

    def _connected(self, sock: socket.socket, place: object) -> socket.socket:
        sock.settimeout(self._connect_timeout_s)
        try:
            sock.connect(place)  # type: ignore[arg-type] # an address of getaddrinfo
        except BaseException as error:
            sock.close()
            if isinstance(error, TimeoutError):
                if len(self._silent) >= _SILENT_MAX:
                    self._silent.clear()  # the names of large stores have other addresses by now
                self._silent.add(place)
            raise
        self._silent.discard(place)
        return sock

    def _tls(self) -> ssl.SSLContext:
        with self._lock:
            if self._context is None:
                self._context = ssl.create_default_context(cafile=self._ca_bundle)
                self._context.minimum_version = ssl.TLSVersion.TLSv1_2
                self._context.set_alpn_protocols(["http/1.1"])
            return self._context

    def _tunnel(self, sock: socket.socket) -> None:
        """Request a tunnel to the store from the proxy."""
        where = f"{self._address[0]}:{self._address[1]}"
        lines = [f"CONNECT {where} HTTP/1.1", f"Host: {where}", *self._proxy_lines]
        sock.sendall(request_head(lines))
        end_mono_s = time.monotonic() + self._connect_timeout_s
        status = ResponseReader(receive_until(sock, end_mono_s), "HEAD").head().status
        if status != 200:
            raise Transient(f"the proxy refused a tunnel to {where}: HTTP {status}")


def _authorization(proxy: SplitResult) -> list[str]:
    """The header line with the credentials of the proxy's URL."""
    if not proxy.username:
        return []
    pair = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return [f"Proxy-Authorization: Basic {base64.b64encode(pair.encode()).decode()}"]


def _is_wanted(head: Head, range_: str) -> bool:
    """Whether the body is exactly the requested object or range."""
    if not range_:
        return head.status == 200
    # Some stores send a range with status 200 and a Content-Range.
    span = range_.removeprefix("bytes=")
    return head.headers.get("content-range", "").startswith(f"bytes {span}/")


def _span_bytes(range_: str) -> int | None:
    """Length of a range with both ends; None for other ranges."""
    span = _SPAN.fullmatch(range_)
    return int(span[2]) - int(span[1]) + 1 if span else None
