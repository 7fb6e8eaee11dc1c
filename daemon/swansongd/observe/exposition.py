# SPDX-License-Identifier: Apache-2.0
"""Exposes metrics over HTTP and as a textfile, for the daemon and for the exporter.

prometheus_client writes the formats.  Clients are not trusted: the number of connections, their rate, the
size of a request and the time of a connection are bounded.  A reply is complete before its first byte is
sent, so a client that reads slowly holds nothing but its own thread.

A failure here changes nothing else in the process: it is logged, and tried again.
"""

from __future__ import annotations

import errno
import os
import socket
import socketserver
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import structlog
from prometheus_client import generate_latest
from prometheus_client.exposition import MetricsHandler
from prometheus_client.registry import Collector, CollectorRegistry
from swansong_bucket.config.values import ListenAddress
from swansong_bucket.errors import SwansongError
from swansong_bucket.util.threads import lasting_thread

from swansongd.observe.status import MetricsStatus
from swansongd.util import listeners, unix
from swansongd.util.rates import LogLimit, TokenBucket

CONNECTIONS_MAX = 16
"""Connections with a thread; a further one ends the oldest, and is refused while that thread still runs."""
CONNECTION_S_MAX = 10.0
"""Time after which a connection is closed: the default timeout of a scrape."""
CONNECTIONS_AT_ONCE, CONNECTIONS_PER_S = 40.0, 20.0
HEAD_BYTES_MAX = 16 * 2**10
TEXTFILE_INTERVAL_S = 15.0
_RETRY_S = 10.0
_POLL_S = 0.5
_ROOM_S = 0.5
"""Time in which the thread of a connection that was ended gives its place to a new one."""
_FAULT_LINE_EVERY_S = 60.0
_OPENMETRICS = "application/openmetrics-text"

_log = structlog.get_logger(__name__)


def registry_of(collector: Collector) -> CollectorRegistry:
    """A registry with this collector only, without the metrics of the Python process."""
    registry = CollectorRegistry()
    registry.register(collector)
    return registry


class Exposition:
    """Serves metrics at an address, in threads of its own.

    Args:
        address: a TCP port or a Unix socket.
        registry: collected at each scrape, one scrape at a time.
        key: the key of the configuration or the option that names the address, for log lines.
        stop: ends the thread.
        retry_s: time between two attempts to listen.
    """

    def __init__(
        self,
        address: ListenAddress,
        registry: CollectorRegistry,
        *,
        key: str,
        stop: threading.Event,
        retry_s: float = _RETRY_S,
    ) -> None:
        self._address = address
        self._registry = registry
        self._key = key
        self._stop = stop
        self._retry_s = retry_s
        self._own_file: os.stat_result | None = None
        self.served_at = ""
        """The address with the port that the kernel chose; empty while it does not listen."""
        self.failure = ""
        """Why the last attempt to listen failed; empty before the first one."""

    def status(self) -> MetricsStatus:
        address = self.served_at or str(self._address)
        return MetricsStatus(address=address, failure=self.failure or None)

    def start(self) -> None:
        """Start the thread.  Returns immediately."""
        lasting_thread("metrics", self._run).start()

    def close(self) -> None:
        """Remove the Unix socket, after ``stop`` was set.  Returns immediately."""
        path, own = self._address.path, self._own_file
        with suppress(OSError):
            # Never unlink the socket of another daemon that has taken the path since.
            if path is not None and own is not None and os.path.samestat(os.lstat(path), own):
                os.unlink(path)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                listener = open_listener(self._address, key=self._key)
            except (OSError, SwansongError) as error:
                self._failed(error)
                self._stop.wait(self._retry_s)
                continue
            self.failure = ""
            try:
                self._serve(listener)
            except Exception:
                _log.exception("metrics_fault")
                self._stop.wait(self._retry_s)

    def _failed(self, error: Exception) -> None:
        """Log each reason once."""
        reason = str(error)
        if reason != self.failure:
            _log.error(
                "metrics_failed",
                key=self._key,
                address=str(self._address),
                reason=reason,
                hint=getattr(error, "hint", "") or f"name another address in {self._key}",
            )
        self.failure = reason

    def _serve(self, listener: socket.socket) -> None:
        if self._address.path is not None:
            self._own_file = os.lstat(self._address.path)
            self.served_at = str(self._address)
        else:
            self.served_at = str(replace(self._address, port=listener.getsockname()[1]))
        _log.info("metrics_served", key=self._key, address=self.served_at)
        if not self._address.is_local:
            _log.warning(
                "metrics_not_local",
                key=self._key,
                address=self.served_at,
                hint="anyone who reaches this address can read the metrics",
            )
        server = _Server(listener, self._registry, self._stop)
        try:
            server.serve_until_stop()
        finally:
            self.served_at = ""
            server.server_close()


def open_listener(address: ListenAddress, *, key: str) -> socket.socket:
    """A listening socket.

    Raises:
        SwansongError: another process listens at the address, or the path is not a socket.
        OSError: the address is not one of this machine, or the directory is not writable.
    """
    if address.path is not None:
        return unix.listen(address.path, socket.SOCK_STREAM, key=key, backlog=CONNECTIONS_MAX)
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    where = (address.host, address.port)
    try:
        # Without SO_REUSEPORT, which is the default: no other process can share the port.
        return socket.create_server(where, family=family, backlog=CONNECTIONS_MAX)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        who = listeners.holder(address.host, address.port) or "another process"
        raise SwansongError(
            f"{who} listens at {address} and answers the scrapes",
            hint=f"stop that process, or name another address in {key}",
        ) from None


class _Handler(MetricsHandler):
    """One request, read and answered in memory."""

    server_version = "swansong"
    sys_version = ""
    server: _Server

    def setup(self) -> None:
        self.registry = self.server.registry

    def handle(self) -> None:
        head = self._head()
        if head is None:
            return
        reply = BytesIO()
        self.rfile, self.wfile = BytesIO(head), reply
        if not self.server.generating.acquire(timeout=CONNECTION_S_MAX):
            return  # another reply takes too long: threads must not pile up behind it
        try:
            if self.server.is_ended(self.request):
                return
            self.handle_one_request()
        finally:
            self.server.generating.release()
        with suppress(OSError):  # the client has closed the connection, or its time is over
            self.request.sendall(reply.getvalue())

    def finish(self) -> None:
        """Nothing is buffered."""

    def _head(self) -> bytes | None:
        """The request up to its empty line; None if it does not arrive, or is too long."""
        head = b""
        while b"\n\r\n" not in head and b"\n\n" not in head:
            try:
                received = self.request.recv(HEAD_BYTES_MAX)
            except OSError:
                return None
            head += received
            if not received or len(head) > HEAD_BYTES_MAX:
                return None
        return head

    def do_GET(self) -> None:  # noqa: N802 - the name that http.server calls
        try:
            urlsplit(self.path)
        except ValueError:
            self.send_error(400)
            return
        # The library fails at versions that it cannot compare, and repeats the client's text in its answer.
        accepted = self.headers.get("Accept", "")
        del self.headers["Accept"]
        if _OPENMETRICS in accepted:
            self.headers["Accept"] = _OPENMETRICS
        try:
            super().do_GET()
        except Exception as error:
            self.server.fault(error)
            self.send_error(500)


class _Server(socketserver.ThreadingMixIn, socketserver.BaseServer):
    """Accepts connections in one thread, and handles each in another, with a limited life."""

    daemon_threads = True
    block_on_close = False

    def __init__(
        self, listener: socket.socket, registry: CollectorRegistry, stop: threading.Event
    ) -> None:
        super().__init__(listener.getsockname(), _Handler)
        self.registry = registry
        self.generating = threading.Lock()
        """Held while a reply is computed, never while bytes move."""
        listener.settimeout(_POLL_S)
        self.socket = listener
        self._stop = stop
        self._changed = threading.Condition()
        """Guards both tables of connections."""
        self._open: dict[socket.socket, float] = {}
        """When each connection with a thread was accepted, the oldest first."""
        self._ended: set[socket.socket] = set()
        """Those of them that were ended, and whose threads still run."""
        self._rate = TokenBucket(CONNECTIONS_AT_ONCE, CONNECTIONS_PER_S)
        self._faults = LogLimit(burst=1, interval_s=_FAULT_LINE_EVERY_S)

    def serve_until_stop(self) -> None:
        """Serve until ``stop`` is set."""
        while not self._stop.is_set():
            self.handle_request()
            self._close_old()

    def fault(self, error: BaseException | None) -> None:
        """Log a fault of ours, not of a client."""
        extra = self._faults.admit("fault", time.monotonic())
        if extra is not None:
            _log.error("metrics_fault", exc_info=error, **extra)

    def fileno(self) -> int:
        return self.socket.fileno()

    def get_request(self) -> tuple[socket.socket, tuple[str, int]]:
        """The next connection, no sooner than the rate allows: a flood waits in the kernel."""
        while not self._rate.take(time.monotonic()) and not self._stop.wait(1 / CONNECTIONS_PER_S):
            pass
        connection, _ = self.socket.accept()
        return connection, ("client", 0)

    def is_ended(self, connection: socket.socket) -> bool:
        """Whether the connection was ended to make room, so that a reply would reach no client."""
        with self._changed:
            return connection in self._ended

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._has_room():
            with self._changed:
                self._open[request] = time.monotonic()
            super().process_request(request, client_address)
        else:
            request.close()

    def _has_room(self) -> bool:
        """Whether another thread may start, after the oldest connection was ended if necessary."""
        with self._changed:
            if len(self._open) < CONNECTIONS_MAX:
                return True
            oldest = next((each for each in self._open if each not in self._ended), None)
            if oldest is not None:
                self._end(oldest)
            return self._changed.wait_for(lambda: len(self._open) < CONNECTIONS_MAX, _ROOM_S)

    def close_request(self, request: Any) -> None:
        with self._changed:
            self._open.pop(request, None)
            self._ended.discard(request)
            self._changed.notify()
        request.close()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """Log the exception that is being handled."""
        self.fault(sys.exception())

    def server_close(self) -> None:
        self.socket.close()

    def _close_old(self) -> None:
        with self._changed:
            for connection, accepted_mono_s in self._open.items():
                if time.monotonic() - accepted_mono_s > CONNECTION_S_MAX:
                    self._end(connection)

    def _end(self, connection: socket.socket) -> None:
        """Make each call that blocks on this connection return."""
        self._ended.add(connection)
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


class Textfile:
    """Writes metrics to a file for the textfile collector of node_exporter, in a thread of its own.

    Args:
        path: of the file; other users can read it.
        registry: collected for each write.
        key: the key of the configuration that names the file, for log lines.
        stop: ends the thread, which then removes the file.
        interval_s: time between two writes.
    """

    def __init__(
        self,
        path: Path,
        registry: CollectorRegistry,
        *,
        key: str,
        stop: threading.Event,
        interval_s: float = TEXTFILE_INTERVAL_S,
    ) -> None:
        self._path = path
        self._registry = registry
        self._key = key
        self._stop = stop
        self._interval_s = interval_s
        self._thread = lasting_thread("textfile", self._run)

    def start(self) -> None:
        """Start the thread.  Returns immediately."""
        self._thread.start()

    def removed(self, timeout_s: float) -> bool:
        """Wait for the end of the thread, after ``stop``; False on timeout."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        is_failing = False
        own: os.stat_result | None = None
        while not self._stop.is_set():
            try:
                own = write_textfile(self._path, self._registry)
                is_failing = False
            except Exception as error:
                if not is_failing:
                    _log.warning(
                        "metrics_failed", key=self._key, address=str(self._path), reason=str(error)
                    )
                is_failing = True
            self._stop.wait(self._interval_s)
        with suppress(OSError):
            # Another daemon may have replaced the file since, and may have got the same inode number.
            now = os.lstat(self._path)
            if (
                own is not None
                and os.path.samestat(now, own)
                and now.st_mtime_ns == own.st_mtime_ns
            ):
                os.unlink(self._path)


def write_textfile(path: Path, registry: CollectorRegistry) -> os.stat_result:
    """Replace the file, and return the status of the new one; a reader never sees a part.

    Not :func:`prometheus_client.write_to_textfile`: with the umask of the daemon, its file is closed to
    node_exporter, and it leaves a temporary file for each process that died.

    Raises:
        OSError: the directory is missing or not writable.
    """
    data = generate_latest(registry)
    temporary = path.with_name(f".{path.name}.new")  # node_exporter reads *.prom only
    with suppress(FileNotFoundError):
        os.unlink(temporary)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(temporary, flags, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fchmod(file.fileno(), 0o644)
        written = os.fstat(file.fileno())
    os.replace(temporary, path)
    return written
