# SPDX-License-Identifier: Apache-2.0
"""HTTP to a cloud's metadata server, and the loop of the sources that ask it.

What a metadata server is asked, tokens among it, goes to the configured address and nowhere else: no
proxy, no redirect, no environment variable.  An answer is small and in time, or it is no answer.
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

from swansongd.errors import Transient
from swansongd.observe.health import HealthTracker
from swansongd.util.http1 import ResponseReader, left_s, receive_until, request_head

DEFAULT_URL = "http://169.254.169.254"
IPV6_URLS = {"aws": "http://[fd00:ec2::254]", "gcp": "http://[fd20:ce::254]"}
"""By cloud: the address on a VM that has no IPv4."""
TIMEOUT_S, TIMEOUT_MAX_S = 1.0, 5.0
"""First and largest limit of an exchange that is answered at once."""
MAX_BODY_BYTES = 65536
_ROOM, _DECAY = 3.0, 0.9
"""The limit is so many times the last duration, or the last limit less a tenth."""
_NO_ROUTE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
_WINDOW_BYTES = 8192


class MetadataUnavailable(Exception):
    """There is no answer that could be trusted: *unknown*.  ``str()`` is the reason, in words.

    The same cause gives the same words.  ``timed_out``: the server was reached, or might have been, and did
    not answer in time.  ``is_final``: nor would it get more time when asked again.
    """

    def __init__(self, reason: str, *, timed_out: bool = False, is_final: bool = True) -> None:
        super().__init__(reason)
        self.timed_out = timed_out
        self.is_final = is_final


@dataclass(frozen=True, slots=True)
class Answer:
    """One complete HTTP answer, of whatever status."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes


class MetadataClient:
    """One warm connection to the metadata server.  For one thread; only :meth:`abort` is for others.

    The limit of an exchange adapts to the server: it doubles after a timeout, up to a maximum, and falls
    slowly while answers come fast.

    Args:
        url: ``http://`` and an address, without a path.
        timeout_s: limit of a whole exchange, from connecting to the last byte.
        timeout_max_s: to which the limit may grow; None: it does not.
        fallback_url: used where no route leads to ``url``.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        timeout_s: float,
        timeout_max_s: float | None = None,
        fallback_url: str | None = None,
    ) -> None:
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._timeout_max_s = timeout_s if timeout_max_s is None else timeout_max_s
        self._limit_s = timeout_s
        self._fallback_url = fallback_url
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
    ) -> Answer:
        """Ask once.  Any status is an answer.

        Raises:
            MetadataUnavailable: no connection, nothing complete within the limit, a head that is broken
                or beyond the limits of :mod:`swansongd.util.http1`, or a body of more than
                :data:`MAX_BODY_BYTES`.
        """
        asked_mono_s, limit_s = time.monotonic(), self._limit_s
        target = f"{path}?{urlencode(params)}" if params else path
        fields = {"User-Agent": "swansongd", **(headers or {})}
        if method in ("PUT", "POST"):
            fields["Content-Length"] = "0"
        lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {fields[name]}" for name in fields)]
        try:
            answer = self._exchange(method, lines, asked_mono_s + limit_s)
        except TimeoutError as error:
            self._limit_s = min(2 * limit_s, self._timeout_max_s)
            is_final = limit_s >= self._timeout_max_s
            words = f"{self._url} gives no complete answer within {limit_s:g} s"
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
        """End the exchange under way and refuse all further ones.  May be called from any thread."""
        with self._lock:
            self._aborted = True
            if self._socket is not None:
                # Wakes a thread that waits in recv, which closing the descriptor would not.
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def _exchange(self, method: str, lines: list[str], end_mono_s: float) -> Answer:
        keep = False
        try:
            sock = self._connected(end_mono_s)
            sock.settimeout(left_s(end_mono_s))
            host = urlsplit(self._url).netloc
            sock.sendall(request_head([lines[0], f"Host: {host}", *lines[1:]]))
            reader = ResponseReader(receive_until(sock, end_mono_s), method)
            found = reader.head()
            if found.status == 200 and not found.has_end:
                raise Transient("the answer does not say where its body ends")
            body = bytearray()
            for piece in reader.pieces(found, memoryview(bytearray(_WINDOW_BYTES))):
                if len(body) + piece.nbytes > MAX_BODY_BYTES:
                    raise Transient(f"the answer has over {MAX_BODY_BYTES} bytes")
                body += piece
            keep = found.keeps_open and reader.is_drained
            return Answer(found.status, found.headers, bytes(body))
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
        self._expect_no_abort()  # one that came meanwhile found no connection to end
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
            raise ConnectionAbortedError("the client was told to stop")

    def _close(self) -> None:
        with self._lock:
            if self._socket is not None:
                self._socket.close()
                self._socket = None


def patiently(ask: Callable[[], Answer]) -> Answer:
    """Ask as a source does poll after poll: again after each timeout, until the limit is at its maximum.

    Raises:
        MetadataUnavailable: no answer, even so.
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
    """Whether nothing came on a kept connection, not even its end."""
    poll = select.poll()
    poll.register(sock, select.POLLIN | select.POLLRDHUP)
    return not poll.poll(0)


class Backoff:
    """Delays after failures: doubling from ``first_s`` up to ``cap_s``, each cut by up to a half."""

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
        """Seconds to wait after one more failure."""
        full_s = self._full_s
        self._full_s = min(2 * full_s, self._cap_s)
        return self._uniform(full_s / 2, full_s)

    def reset(self) -> None:
        """Something worked."""
        self._full_s = min(self._first_s, self._cap_s)


def watch(
    look: Callable[[], float],
    *,
    client: MetadataClient,
    health: HealthTracker,
    backoff: Backoff,
    stop: threading.Event,
) -> None:
    """Call ``look`` again and again until ``stop``, whatever it raises; then close the client.

    Args:
        look: asks once, posts what it learnt, and returns the seconds until it wants to be called again.
    """

    def abort_on_stop() -> None:
        stop.wait()
        client.abort()

    threading.Thread(target=abort_on_stop, daemon=True, name="metadata-stop").start()
    with client:
        while not stop.is_set():
            try:
                delay_s = look()
                backoff.reset()
            except Exception as error:
                if stop.is_set():
                    return
                expected = isinstance(error, MetadataUnavailable)
                health.failed(str(error) if expected else f"internal error: {error!r:.200}")
                delay_s = backoff.next_s()
            stop.wait(delay_s)


def fallback_url(url: str, cloud: str) -> str | None:
    """Where the metadata service is on a VM without IPv4; None for an address that was configured."""
    return IPV6_URLS.get(cloud) if url == DEFAULT_URL else None


def shortened(text: str, limit: int = 200) -> str:
    """What a server said, fit for one line of a log."""
    line = "".join(char if char.isprintable() else " " for char in text)
    line = " ".join(line.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
