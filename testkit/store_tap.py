# SPDX-License-Identifier: Apache-2.0
"""A proxy between a daemon and its store that injects a fault at the k-th request."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, Self
from urllib.parse import urlsplit

When = Literal["before", "after"]
WRITES = ("PUT", "POST", "DELETE")


class StoreTap:
    """A forwarding HTTP server on loopback, at ``url``.

    ``before``: the k-th request never reaches the store.  ``after``: it takes effect, and its reply is
    lost.
    """

    def __init__(self, upstream_url: str) -> None:
        self.upstream = urlsplit(upstream_url).netloc
        self.lock = threading.Lock()
        self._left = 0
        self._when: When = "before"
        self._strike: Callable[[], object] = lambda: None
        self._methods: Sequence[str] = ()
        tap = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def _serve(self) -> None:
                tap.forward(self)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve  # noqa: N815

            def log_message(self, format: str, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # a killed client closes its connection

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def arm(
        self,
        request: int,
        when: When,
        strike: Callable[[], object],
        *,
        methods: Sequence[str] = ("GET", "HEAD", *WRITES),
    ) -> None:
        """Call ``strike`` at the next request number ``request`` (from 1) of these methods."""
        with self.lock:
            self._left, self._when, self._strike = request, when, strike
            self._methods = methods

    def forward(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        counts = handler.command in self._methods
        with self.lock:
            self._left -= counts
            when = self._when if counts and self._left == 0 else None
        if when == "before":
            self._strike()
            handler.close_connection = True
            return
        upstream = http.client.HTTPConnection(self.upstream, timeout=10)
        try:
            upstream.request(handler.command, handler.path, body, dict(handler.headers.items()))
            answer = upstream.getresponse()
            content = answer.read()
        finally:
            upstream.close()
        if when == "after":
            self._strike()
            handler.close_connection = True
            return
        handler.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("connection", "transfer-encoding"):
                handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(content)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
