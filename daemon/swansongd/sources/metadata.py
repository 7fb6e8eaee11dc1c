# SPDX-License-Identifier: Apache-2.0
"""The HTTP client for metadata servers, and the poll loop of the sources.

Requests carry tokens, so they go only to the configured address: the client follows no redirect, and ignores
proxies and environment variables.  A response that is too large or too late is an error.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlencode, urlsplit

from swansong_bucket.errors import Transient
from swansong_bucket.util.http1 import ResponseReader, left_s, receive_until, request_head

from swansongd.observe.health import HealthTracker

DEFAULT_URL = "http://169.254.169.254"
IPV6_URLS = {"aws": "http://[fd00:ec2::254]", "gcp": "http://[fd20:ce::254]"}
"""Addresses on a VM without IPv4, by cloud."""
TIMEOUT_S, TIMEOUT_MAX_S = 1.0, 5.0
"""First and longest timeout of a request that the server does not hold."""
MAX_BODY_BYTES = 65536
_ROOM, _DECAY = 3.0, 0.9
"""The next timeout is at least ``_ROOM`` times the last duration, and ``_DECAY`` times the last timeout."""
_NO_ROUTE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
_WINDOW_BYTES = 8192


class MetadataUnavailable(Exception):
    """The request got no valid response, so the value is *unknown*.  ``str()`` is the reason and the fix.

    The same cause gives the same reason.

    Args:
        command: the shell command that fixes the cause, if there is one.
        timed_out: the response was late; the server may have received the request.
        is_final: the timeout is at its maximum, so a retry would not get more time.
    """

    def __init__(
        self, reason: str, *, command: str = "", timed_out: bool = False, is_final: bool = True
    ) -> None:
        super().__init__(f"{reason}; fix it with `{command}`" if command else reason)
        self.reason = reason
        self.command = command
        self.timed_out = timed_out
        self.is_final = is_final


@dataclass(frozen=True, slots=True)
class MetadataResponse:
    """A complete HTTP response of any status."""

    status: int
    headers: Mapping[str, str]
    """With names in lower case."""
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace").strip()


class MetadataClient:
    """One persistent connection to the metadata server, for one thread; others may only call :meth:`abort`.

    The timeout of an exchange adapts to the server: it doubles after each timeout, up to a maximum, and falls
    slowly while responses are fast.

    Args:
        url: ``http://`` and an address, without a path.
        timeout_s: first timeout of a whole exchange, from the connection to the last byte.
        timeout_max_s: the longest timeout; None: the timeout does not grow.
        cloud: its address of IPv6 is used if there is no route to the default URL.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        timeout_s: float,
        timeout_max_s: float | None = None,
        cloud: str = "",
    ) -> None:
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._timeout_max_s = timeout_s if timeout_max_s is None else timeout_max_s
        self._limit_s = timeout_s
        self._fallback_url = IPV6_URLS.get(cloud) if url == DEFAULT_URL else None
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._aborted = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()

    def request(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str] | None = None,
        params: Mapping[str, str] | None = None,
        body: bytes = b"",
    ) -> MetadataResponse:
        """Send one request; returns a response of any status.

        Raises:
            MetadataUnavailable: no connection, no complete response in time, a head that is invalid or
                exceeds the limits of :mod:`swansong_bucket.util.http1`, or a body of more than
                :data:`MAX_BODY_BYTES`.
        """
        asked_mono_s, limit_s = time.monotonic(), self._limit_s
        target = f"{path}?{urlencode(params)}" if params else path
        fields = {"User-Agent": "swansongd", **(headers or {})}
        if method in ("PUT", "POST"):
            fields["Content-Length"] = str(len(body))
        lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {fields[name]}" for name in fields)]
        try:
            answer = self._exchange(method, lines, body, asked_mono_s + limit_s)
        except TimeoutError as error:
            self._limit_s = min(2 * limit_s, self._timeout_max_s)
            is_final = limit_s >= self._timeout_max_s
            words = f"{self._url}: no complete response within {limit_s:g} s"
            raise MetadataUnavailable(words, timed_out=True, is_final=is_final) from error
        except OSError as error:
            words = os.strerror(error.errno).lower() if error.errno else "the connection broke"
            raise MetadataUnavailable(f"{self._url}: {words}") from error
        except Transient as error:
            raise MetadataUnavailable(f"{self._url}: {error}") from error
        took_s = time.monotonic() - asked_mono_s
        wanted_s = max(self._timeout_s, _ROOM * took_s, _DECAY * limit_s)
        self._limit_s = min(wanted_s, self._timeout_max_s)
        return answer

    def abort(self) -> None:
        """End the current exchange and refuse all further ones.  May be called from any thread."""
        with self._lock:
            self._aborted = True
            if self._socket is not None:
                # Unlike close, a shutdown wakes a thread that blocks in recv.
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def _exchange(
        self, method: str, lines: list[str], body: bytes, end_mono_s: float
    ) -> MetadataResponse:
        keep = False
        try:
            sock = self._connected(end_mono_s)
            sock.settimeout(left_s(end_mono_s))
            host = urlsplit(self._url).netloc
            sock.sendall(request_head([lines[0], f"Host: {host}", *lines[1:]]) + body)
            reader = ResponseReader(receive_until(sock, end_mono_s), method)
            found = reader.head()
            if found.status == 200 and not found.has_end:
                raise Transient("the response does not declare the length of its body")
            received = bytearray()
            for piece in reader.pieces(found, memoryview(bytearray(_WINDOW_BYTES))):
                if len(received) + piece.nbytes > MAX_BODY_BYTES:
                    raise Transient(f"the response exceeds {MAX_BODY_BYTES} bytes")
                received += piece
            keep = found.keeps_open and reader.is_drained
            return MetadataResponse(found.status, found.headers, bytes(received))
        finally:
            if not keep:
                self._close()

    def _connected(self, end_mono_s: float) -> socket.socket:
        sock = self._socket
        if sock is not None and _is_idle(sock):
            return sock
        self._close()
        self._expect_no_abort()
        sock = self._connect(end_mono_s)
        with self._lock:
            self._socket = sock
        self._expect_no_abort()  # a concurrent abort found no connection to shut down
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def _connect(self, end_mono_s: float) -> socket.socket:
        try:
            return _connect(self._url, end_mono_s)
        except OSError as error:
            if self._fallback_url is None or error.errno not in _NO_ROUTE:
                raise
            try:
                sock = _connect(self._fallback_url, end_mono_s)
            except OSError:
                raise error from None
            self._url, self._fallback_url = self._fallback_url, self._url
            return sock

    def _expect_no_abort(self) -> None:
        if self._aborted:
            raise ConnectionAbortedError("the client was stopped")

    def _close(self) -> None:
        with self._lock:
            if self._socket is not None:
                self._socket.close()
                self._socket = None


def retry_timeouts(ask: Callable[[], MetadataResponse]) -> MetadataResponse:
    """Repeat a request after each timeout, until its timeout is at the maximum.

    Raises:
        MetadataUnavailable: the last attempt failed.
    """
    while True:
        try:
            return ask()
        except MetadataUnavailable as error:
            if not error.timed_out or error.is_final:
                raise


def _connect(url: str, end_mono_s: float) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname or "", parts.port or 80), left_s(end_mono_s))


def _is_idle(sock: socket.socket) -> bool:
    """Whether a reused connection is open and has no unread bytes."""
    poll = select.poll()
    poll.register(sock, select.POLLIN | select.POLLRDHUP)
    return not poll.poll(0)


class Backoff:
    """Delays after failures: they double from ``first_s`` to ``cap_s``, and jitter takes up to half."""

    def __init__(
        self,
        first_s: float,
        cap_s: float,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._first_s = first_s
        self._cap_s = cap_s
        self._uniform = uniform
        self._full_s = min(first_s, cap_s)

    def next_s(self) -> float:
        """Seconds to wait after a further failure."""
        full_s = self._full_s
        self._full_s = min(2 * full_s, self._cap_s)
        return self._uniform(full_s / 2, full_s)

    def reset(self) -> None:
        """Start from ``first_s`` again, after a success."""
        self._full_s = min(self._first_s, self._cap_s)


def watch(
    poll: Callable[[], float],
    *,
    client: MetadataClient,
    health: HealthTracker,
    backoff: Backoff,
    stop: threading.Event,
) -> None:
    """Call ``poll`` until ``stop``, also after any exception; then close the client.

    Args:
        poll: sends one request, posts events, and returns the seconds until the next call.
    """

    def abort_on_stop() -> None:
        stop.wait()
        client.abort()

    threading.Thread(target=abort_on_stop, daemon=True, name="metadata-stop").start()
    with client:
        while not stop.is_set():
            try:
                delay_s = poll()
                backoff.reset()
            except Exception as error:
                if stop.is_set():
                    return
                expected = isinstance(error, MetadataUnavailable)
                health.failed(str(error) if expected else f"internal error: {error!r:.200}")
                delay_s = backoff.next_s()
            stop.wait(delay_s)


def shortened(text: str, limit: int = 200) -> str:
    """Text of a server, cut and cleaned for one line of a log."""
    line = "".join(char if char.isprintable() else " " for char in text)
    line = " ".join(line.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
