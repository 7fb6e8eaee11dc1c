# SPDX-License-Identifier: Apache-2.0
"""HTTP to a cloud's metadata server, and the loop of the sources that ask it.

What a metadata server is asked, tokens among it, goes to the configured address and nowhere else: no
proxy, no redirect, no environment variable.  An answer is small and in time, or it is no answer.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import requests
from requests.adapters import HTTPAdapter
from urllib3 import HTTPConnectionPool
from urllib3.connection import HTTPConnection

from swansongd.sources.base import HealthTracker

DEFAULT_URL = "http://169.254.169.254"
MAX_BODY_BYTES = 65536


class MetadataUnavailable(Exception):
    """There is no answer that could be trusted: *unknown*.  ``str()`` is the reason, in words.

    The same cause gives the same words.  ``timed_out``: the server was reached, or might have been,
    and said nothing.
    """

    def __init__(self, reason: str, *, timed_out: bool = False) -> None:
        super().__init__(reason)
        self.timed_out = timed_out


@dataclass(frozen=True, slots=True)
class Answer:
    """One complete HTTP answer, of whatever status."""

    status: int
    headers: Mapping[str, str]
    """Case-insensitive."""
    body: bytes


class MetadataClient:
    """One warm connection to the metadata server.  For one thread; only :meth:`abort` is for others.

    Args:
        url: ``http://`` and an address, without a path.
        timeout_s: limit of a whole exchange, from connecting to the last byte.
    """

    def __init__(self, url: str = DEFAULT_URL, *, timeout_s: float) -> None:
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._aborted = False
        self._session = requests.Session()
        self._session.trust_env = False
        self._session.headers.clear()
        self._session.headers["User-Agent"] = "swansongd"
        self._session.mount("http://", _Adapter(self._connected))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._session.close()

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
            MetadataUnavailable: no connection, nothing complete within the limit, or a body of more
                than :data:`MAX_BODY_BYTES`.
        """
        overdue = threading.Event()

        def give_up() -> None:
            overdue.set()
            self._shut()

        # The timeout of requests counts from one received byte to the next; only this one counts all.
        timer = threading.Timer(self._timeout_s, give_up)
        timer.daemon = True
        timer.start()
        try:
            with self._session.request(
                method,
                self._url + path,
                headers=headers,
                params=params,
                timeout=self._timeout_s,
                allow_redirects=False,
                stream=True,
            ) as response:
                return Answer(response.status_code, response.headers, self._body(response))
        except requests.RequestException as error:
            if overdue.is_set() or isinstance(error, requests.Timeout):
                words = f"gives no complete answer within {self._timeout_s:g} s"
                raise MetadataUnavailable(f"{self._url} {words}", timed_out=True) from error
            raise MetadataUnavailable(f"{self._url}: {_cause(error)}") from error
        finally:
            timer.cancel()

    def abort(self) -> None:
        """End the exchange under way and refuse all further ones.  May be called from any thread."""
        with self._lock:
            self._aborted = True
        self._shut()

    def _body(self, response: Any) -> bytes:
        body = bytearray()
        for chunk in response.iter_content(8192):
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                raise MetadataUnavailable(f"{self._url} answers with over {MAX_BODY_BYTES} bytes")
        return bytes(body)

    def _connected(self, connection: HTTPConnection) -> None:
        with self._lock:
            if not self._aborted:
                self._socket = connection.sock
                return
        connection.close()
        raise ConnectionAbortedError("the client was told to stop")

    def _shut(self) -> None:
        with self._lock:
            if self._socket is not None:
                # Wakes a thread that waits in recv, which closing the descriptor would not.
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)


class _Adapter(HTTPAdapter):
    """Plain HTTP over one kept connection, each new one shown to ``connected``; no retries."""

    def __init__(self, connected: Callable[[HTTPConnection], None]) -> None:
        self._connected = connected
        super().__init__(pool_connections=1, pool_maxsize=1, max_retries=0)

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        connected = self._connected

        class Connection(HTTPConnection):
            def connect(self) -> None:
                super().connect()
                connected(self)

        class Pool(HTTPConnectionPool):
            ConnectionCls = Connection

        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = {"http": Pool}


def _cause(error: BaseException) -> str:
    """The first operating-system error behind ``error``, in words that do not vary."""
    behind: BaseException | None = error
    while behind is not None:
        if isinstance(behind, OSError) and behind.errno is not None:
            return os.strerror(behind.errno).lower()
        behind = behind.__cause__ or behind.__context__
    return f"the connection broke ({type(error).__name__})"


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


def shortened(text: str, limit: int = 200) -> str:
    """What a server said, fit for one line of a log."""
    line = "".join(char if char.isprintable() else " " for char in text)
    line = " ".join(line.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
