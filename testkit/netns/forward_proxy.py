# SPDX-License-Identifier: Apache-2.0
"""A forward proxy for plain HTTP that can reach one host only, and records the requested targets."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

_HOP_BY_HOP = {
    "connection",
    "proxy-connection",
    "keep-alive",
    "transfer-encoding",
    "content-length",
}


class ForwardProxy:
    """Requests for ``host`` (``address:port``) go to ``url``; ``asked`` holds every target as received."""

    def __init__(self, host: str, url: str) -> None:
        self.asked: list[str] = []
        proxy = self
        beyond = urlsplit(url).netloc

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _forward(self) -> None:
                proxy.asked.append(self.path)
                content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                target = urlsplit(self.path)
                if target.netloc != host:
                    self.send_error(502)
                    return
                with closing(http.client.HTTPConnection(beyond, timeout=10)) as connection:
                    path = target._replace(scheme="", netloc="").geturl()
                    fields = {
                        name: value
                        for name, value in self.headers.items()
                        if name.lower() not in {*_HOP_BY_HOP, "expect"}
                    }
                    connection.request(self.command, path, content, fields)
                    answer = connection.getresponse()
                    body = answer.read()
                self.send_response_only(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in _HOP_BY_HOP:
                        self.send_header(name, value)
                size = answer.getheader("Content-Length") if self.command == "HEAD" else len(body)
                self.send_header("Content-Length", str(size or 0))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_CONNECT = _forward  # noqa: N815

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def serving(self) -> Iterator[ForwardProxy]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            thread.join(60)
            self._server.server_close()
