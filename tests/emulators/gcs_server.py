# SPDX-License-Identifier: Apache-2.0
"""Google Cloud Storage in memory, strict: ``python -m emulators.gcs_server --port 0 --bucket NAME``.

The JSON interface as google-cloud-storage uses it, and of the XML interface reads, puts and multipart
uploads.  What it does not know it refuses with 501 instead of guessing.  Checksums that come with the
data are verified, objects appear whole and only when they are complete.  Control: see
:mod:`emulators.store_control`.
"""

from __future__ import annotations

import argparse
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from emulators.gcs_model import PRECONDITIONS, Gcs
from emulators.process import announce
from emulators.store_control import Answer, Call, StoreControl


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def _serve(self) -> None:
        if "Transfer-Encoding" in self.headers:
            self.close_connection = True
            self._send(Answer(411, b"Content-Length, please"))
            return
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path, _, query = self.path.partition("?")
        headers = {name.lower(): value for name, value in self.headers.items()}
        self._send(self.server.control.handle(Call(self.command, path, query, headers, body)))

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve  # noqa: N815

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if answer.status != 204:
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], control: StoreControl) -> None:
        self.control = control
        super().__init__(address, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # clients may leave at any time
            super().handle_error(request, client_address)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--bucket", action="append", default=[])
    options = parser.parse_args()
    gcs = Gcs(options.bucket)
    control = StoreControl(gcs.respond, gcs.corrupt, PRECONDITIONS)
    with _Server((options.host, options.port), control) as server:
        announce(f"http://{options.host}:{server.server_port}", buckets=options.bucket)
        server.serve_forever()


if __name__ == "__main__":
    main()
