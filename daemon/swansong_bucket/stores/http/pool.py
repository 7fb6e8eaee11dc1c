# SPDX-License-Identifier: Apache-2.0
"""A pool of persistent connections to one store, and a watchdog for connections that stall.

Sockets block, which costs the least processor time.  One thread checks all connections in use several times a
second, and shuts down those on which no byte moves.  Its measure is the kernel's count of acknowledged and
received bytes: bytes in a send buffer are not progress.
"""

from __future__ import annotations

import math
import select
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from enum import Enum
from typing import ParamSpec, TypeVar

from swansong_bucket.errors import Transient
from swansong_bucket.stores.http.tls import Tls
from swansong_bucket.util.threads import lasting_thread

IDLE_S_MAX = 20.0
"""S3 and other stores close connections that are idle for longer."""

P = ParamSpec("P")
T = TypeVar("T")

_POLL_S = 0.25
_LATE_SHARE = 0.25
"""A small request that has no answer after this share of the limit gets a second attempt: after 2 of 8 s, as
AWS advises for S3.
https://docs.aws.amazon.com/AmazonS3/latest/userguide/optimizing-performance-guidelines.html"""
_LATE_BYTES_MAX = 2**19
_OUTLIER_AFTER_S = 2.0
_OUTLIER_SHARE = 0.25
_OUTLIER_OTHERS_MIN = 3
_RATED_AFTER_S = 0.1
"""A rate over a shorter time is not significant."""

# From struct tcp_info of the kernel: tcpi_unacked; tcpi_bytes_acked and tcpi_bytes_received;
# tcpi_notsent_bytes.
_TCP_INFO_BYTES = 148
_UNACKED = struct.Struct("@24xI")
_MOVED = struct.Struct("@120xQQ")
_NOT_SENT = struct.Struct("@144xI")


class ConnectionBroken(Transient):
    """The connection failed; the request may have taken effect."""


class TooSlow(ConnectionBroken):
    """The watchdog cut a request because a second attempt should be faster."""


class ConnectionPhase(Enum):
    """The state of the request on a connection."""

    LOCAL = "elsewhere"
    """It does not use the network: a body is read, or a sink written."""
    SENDING = "sending"
    AWAITING = "awaiting"
    """The request is sent; the response is short, or its body has not started."""
    RECEIVING = "receiving"
    """A sink receives the body, of any length."""


class HttpConnection:
    """A socket, its window, and the progress of its request.  One thread uses it at a time."""

    def __init__(self, sock: socket.socket, tls: Tls | None = None) -> None:
        self.sock = sock
        self._tls = tls
        self._send_all = tls.send_all if tls else sock.sendall
        self._receive_into = tls.receive_into if tls else sock.recv_into
        self._window = memoryview(bytearray())
        self.idle_since_mono_s = 0.0
        self.cut = ""
        """Why the watchdog shut the connection down; else empty."""
        self.is_too_slow = False
        """The watchdog shut it down in favour of a second attempt."""
        self.phase = ConnectionPhase.LOCAL
        self.is_first_attempt = True
        self.total_bytes = 0
        """Size of the body, as far as it is known."""
        self.local_s = 0.0
        self.limit_mono_s = math.inf
        """Deadline of the response, or of its head if a sink receives the body."""
        self.moved_bytes = 0
        self.moved_mono_s = 0.0
        self.is_answer_due = False
        """The store has acknowledged the whole request."""
        self._seen_mono_s: float | None = None
        """Instant of the watchdog's first check of the request; all measures start there."""
        self._base_bytes = 0

    def window(self, size_bytes: int) -> memoryview:
        """Memory that receives a response; a connection that only sends has none of it."""
        if self._window.nbytes < size_bytes:
            self._window = memoryview(bytearray(size_bytes))
        return self._window[:size_bytes]

    def begin(self, *, is_first_attempt: bool) -> None:
        """Start the measures of a new request."""
        self.is_first_attempt = is_first_attempt
        self.total_bytes = 0
        self.local_s = 0.0
        self.limit_mono_s = math.inf
        self._seen_mono_s = None

    def await_response(self, limit_s: float) -> None:
        """Set the deadline of the response, which also limits a response that arrives byte by byte."""
        self.phase = ConnectionPhase.AWAITING
        self.limit_mono_s = time.monotonic() + limit_s

    def receive_body(self) -> None:
        """Remove the deadline: the head has arrived, and a large body may take longer."""
        self.phase = ConnectionPhase.RECEIVING
        self.limit_mono_s = math.inf

    def send(self, data: memoryview | bytes) -> None:
        """Send all of ``data``; raises ConnectionBroken."""
        self.phase = ConnectionPhase.SENDING
        try:
            self._send_all(data)
        except OSError as error:
            raise self.broken(error) from error

    def receive_into(self, window: memoryview) -> int:
        """Receive some bytes; returns 0 at the end, and raises ConnectionBroken."""
        try:
            count = self._receive_into(window)
        except OSError as error:
            raise self.broken(error) from error
        if not count and self.cut:
            raise self.broken(None)
        return count

    def run_local(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call ``work``; its time does not count as a stall."""
        phase, self.phase = self.phase, ConnectionPhase.LOCAL
        began_mono_s = time.monotonic()
        result = work(*args, **kwargs)
        self.local_s += time.monotonic() - began_mono_s
        self.phase = phase
        return result

    def broken(self, error: OSError | None) -> ConnectionBroken:
        if self.is_too_slow:
            return TooSlow(self.cut)
        return ConnectionBroken(self.cut or f"the connection broke: {error!s:.200}")

    def is_usable(self) -> bool:
        """Whether an idle connection can be reused: nothing was received, and the peer has not closed."""
        if self._tls is not None and self._tls.has_more:
            return False
        poll = select.poll()
        poll.register(self.sock, select.POLLIN | select.POLLRDHUP)
        return not poll.poll(0)

    # ------------------------------------------------------------ for the watchdog

    def hangs(self, now_mono_s: float, stall_s: float, first_byte_s: float) -> bool:
        """Record the bytes that have moved; returns whether none moved for too long."""
        info = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        total_bytes = sum(_MOVED.unpack_from(info))
        if self._seen_mono_s is None:
            self._base_bytes, self.moved_bytes, self.local_s = total_bytes, 0, 0.0
            self._seen_mono_s = self.moved_mono_s = now_mono_s
        moved_bytes = total_bytes - self._base_bytes
        if moved_bytes != self.moved_bytes or self.phase is ConnectionPhase.LOCAL:
            self.moved_bytes, self.moved_mono_s = moved_bytes, now_mono_s
        self.is_answer_due = self.phase is ConnectionPhase.AWAITING and not (
            _UNACKED.unpack_from(info)[0] or _NOT_SENT.unpack_from(info)[0]
        )
        return self.still_s(now_mono_s) > (first_byte_s if self.is_answer_due else stall_s)

    def still_s(self, now_mono_s: float) -> float:
        """Time since a byte has moved."""
        return now_mono_s - self.moved_mono_s

    def on_network_s(self, now_mono_s: float) -> float:
        """Time of the request without that in bodies and sinks."""
        return now_mono_s - (self._seen_mono_s or now_mono_s) - self.local_s

    def rate(self, now_mono_s: float) -> float | None:
        """Bytes per second on the network; None if the time is too short."""
        took_s = self.on_network_s(now_mono_s)
        if took_s < _RATED_AFTER_S or self.phase is ConnectionPhase.LOCAL:
            return None
        return self.moved_bytes / took_s

    def shut_down(self, why: str) -> None:
        """Shut the socket down, which ends every wait on it immediately."""
        self.cut = why
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)


@dataclass(eq=False, repr=False)
class Pool:
    """A pool of connections; the most recently used one is taken first.

    Args:
        dial: opens a connection, with its own time limit.
        connections: limit of the connections in use.
        stall_s: a request fails if no byte moves for this time.
        first_byte_s: the same limit while only the response is outstanding.
    """

    dial: Callable[[], HttpConnection]
    _: KW_ONLY
    connections: int
    stall_s: float
    first_byte_s: float

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._freed = threading.Condition(self._lock)
        self._taken = 0
        self._idle: list[HttpConnection] = []
        self._in_use: dict[HttpConnection, None] = {}
        """Oldest request first."""
        self._closed = threading.Event()
        self._watchdog: threading.Thread | None = None

    def take(self, *, is_first_attempt: bool) -> HttpConnection:
        """Take a connection for a request, until :meth:`release`.  Raises the errors of ``dial``.

        Args:
            is_first_attempt: another one will follow :class:`TooSlow`.
        """
        with self._lock:
            if not self._freed.wait_for(lambda: self._taken < self.connections, self.first_byte_s):
                raise Transient("all connections to the store are busy")
            self._taken += 1
            connection = self._reusable()
        try:
            connection = connection or self.dial()
            with self._lock:
                self._register(connection, is_first_attempt=is_first_attempt)
        except BaseException as error:
            if connection is not None:
                connection.sock.close()
            with self._lock:
                self._free_one()
            if isinstance(error, OSError):
                raise Transient(f"no connection: {error!s:.200}") from error
            raise
        return connection

    def release(self, connection: HttpConnection, *, is_reusable: bool) -> None:
        """Return a connection at the end of its request.

        Args:
            is_reusable: the connection can serve another request.
        """
        with self._lock:
            self._in_use.pop(connection, None)
            is_reusable = is_reusable and not connection.cut and not self._closed.is_set()
            if is_reusable:
                connection.phase = ConnectionPhase.LOCAL
                connection.idle_since_mono_s = time.monotonic()
                self._idle.append(connection)
            else:
                connection.sock.close()
            self._free_one()

    def close(self) -> None:
        """Close the idle connections, and from now on each connection that is returned."""
        self._closed.set()
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.sock.close()

    # ------------------------------------------------------------ under the lock

    def _reusable(self) -> HttpConnection | None:
        while self._idle:
            connection = self._idle.pop()
            age_s = time.monotonic() - connection.idle_since_mono_s
            if age_s < IDLE_S_MAX and connection.is_usable():
                return connection
            connection.sock.close()
        return None

    def _register(self, connection: HttpConnection, *, is_first_attempt: bool) -> None:
        connection.begin(is_first_attempt=is_first_attempt)
        if self._watchdog is None:
            watchdog = lasting_thread("wire-watchdog", self._watch)
            watchdog.start()
            self._watchdog = watchdog
        self._in_use[connection] = None

    def _free_one(self) -> None:
        self._taken -= 1
        self._freed.notify()

    # ------------------------------------------------------------ the watchdog

    def _watch(self) -> None:
        """Check the connections until there are none: an unused pool has no thread."""
        pause = threading.Event()
        while True:
            pause.wait(min(_POLL_S, self.stall_s / 4))
            with self._lock:
                self._poll(time.monotonic())
                if not self._in_use and not self._idle:
                    self._watchdog = None
                    return

    def _poll(self, now_mono_s: float) -> None:
        # With the lock held: else a connection could be closed meanwhile, and its descriptor reused.
        for connection in self._in_use:
            if connection.cut:
                continue
            if now_mono_s > connection.limit_mono_s:
                connection.shut_down("no complete response in time")
            elif connection.hangs(now_mono_s, self.stall_s, self.first_byte_s):
                connection.shut_down(f"nothing moved for {connection.still_s(now_mono_s):.1f} s")
            elif self._is_late(connection, now_mono_s):
                connection.is_too_slow = True
                connection.shut_down(f"no answer after {connection.still_s(now_mono_s):.1f} s")
        outlier = self._outlier(now_mono_s)
        if outlier is not None:
            outlier.is_too_slow = True
            outlier.shut_down("far slower than the other connections")
        while self._idle and now_mono_s - self._idle[0].idle_since_mono_s > IDLE_S_MAX:
            self._idle.pop(0).sock.close()

    def _is_late(self, connection: HttpConnection, now_mono_s: float) -> bool:
        return (
            connection.is_first_attempt
            and connection.is_answer_due
            and connection.total_bytes <= _LATE_BYTES_MAX
            and connection.still_s(now_mono_s) > _LATE_SHARE * self.first_byte_s
        )

    def _outlier(self, now_mono_s: float) -> HttpConnection | None:
        """A request that would end sooner if it were repeated on another connection."""
        rates = {
            c: rate for c in self._in_use if not c.cut and (rate := c.rate(now_mono_s)) is not None
        }
        for connection, rate in rates.items():
            left_bytes = connection.total_bytes - connection.moved_bytes
            if (
                connection.on_network_s(now_mono_s) < _OUTLIER_AFTER_S
                or left_bytes <= 0
                or not connection.is_first_attempt
                or len(rates) <= _OUTLIER_OTHERS_MIN
            ):
                continue
            usual = statistics.median(r for c, r in rates.items() if c is not connection)
            is_slow = rate < _OUTLIER_SHARE * usual
            # A nearly complete request is not cut: left / rate > total / usual, without a division by 0.
            if is_slow and left_bytes * usual > connection.total_bytes * rate:
                return connection
        return None
