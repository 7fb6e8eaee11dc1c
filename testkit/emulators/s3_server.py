# SPDX-License-Identifier: Apache-2.0
"""S3 in memory, by moto with more checks: ``python -m testkit.emulators.s3_server --port 0 --bucket NAME``.

This adds checks of S3 that moto lacks.  Every request is atomic, and the CRC32C of a body is verified.
Signatures are not verified.  Control: see :mod:`testkit.emulators.store_control`.
"""

from __future__ import annotations

import argparse
import base64
import io
import os
import threading
from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote_to_bytes

import google_crc32c

from testkit.emulators.process import announce
from testkit.emulators.store_control import Call, StoreControl, StoreResponse, error_response

PRECONDITIONS = ("if-none-match", "if-match")
_ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "emulated",
    "AWS_SECRET_ACCESS_KEY": "emulated",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "MOTO_S3_DEFAULT_KEY_BUFFER_SIZE": str(2**30),  # keep everything in memory
    "S3_IGNORE_SUBDOMAIN_BUCKETNAME": "true",
}


class S3:
    """Moto with a lock, as a function from request to response."""

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import (
            DomainDispatcherApplication,
            create_backend_app,
        )

        self._application = DomainDispatcherApplication(create_backend_app)
        self._lock = threading.Lock()

    def create_bucket(self, name: str) -> None:
        response = self.respond(Call("PUT", f"/{name}", "", {"host": "127.0.0.1"}, b""))
        assert response.status == 200, response

    def respond(self, call: Call) -> StoreResponse:
        with self._lock:
            wanted = call.headers.get("x-amz-checksum-crc32c")
            value = google_crc32c.value(call.body).to_bytes(4, "big")
            if wanted is not None and wanted != base64.b64encode(value).decode():
                return error_response(400, "BadDigest")
            return self._moto(call)

    def _moto(self, call: Call) -> StoreResponse:
        environment: dict[str, Any] = {
            "REQUEST_METHOD": call.method,
            "SCRIPT_NAME": "",
            "PATH_INFO": unquote_to_bytes(call.path).decode("latin-1"),  # the name in WSGI
            "RAW_URI": call.target,
            "REQUEST_URI": call.target,
            "QUERY_STRING": call.query,
            "SERVER_NAME": "127.0.0.1",
            "SERVER_PORT": "80",
            "SERVER_PROTOCOL": "HTTP/1.1",
            "wsgi.version": (1, 0),
            "wsgi.url_scheme": "http",
            "wsgi.input": io.BytesIO(call.body),
            "wsgi.errors": io.StringIO(),
            "wsgi.multithread": True,
            "wsgi.multiprocess": False,
            "wsgi.run_once": False,
            "CONTENT_LENGTH": str(len(call.body)),
            "CONTENT_TYPE": call.headers.get("content-type", ""),
        }
        for name, value in call.headers.items():
            if name not in ("content-length", "content-type", "expect"):
                environment[f"HTTP_{name.upper().replace('-', '_')}"] = value
        status, headers = "", {}

        def start(line: str, pairs: list[tuple[str, str]], _error: object = None) -> None:
            nonlocal status, headers
            status, headers = line, dict(pairs)

        body = b"".join(self._application(environment, start))
        return StoreResponse(int(status.partition(" ")[0]), body, headers)


def wsgi(control: StoreControl) -> Any:
    """The emulator as a WSGI application."""

    def application(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        size_bytes = int(environ.get("CONTENT_LENGTH") or 0)
        headers = {
            name.removeprefix("HTTP_").lower().replace("_", "-"): value
            for name, value in environ.items()
            if name.startswith("HTTP_") or name == "CONTENT_TYPE"
        }
        path, _, query = environ["REQUEST_URI"].partition("?")
        body = environ["wsgi.input"].read(size_bytes) if size_bytes else b""
        call = Call(environ["REQUEST_METHOD"], path, query, headers, body)
        response = control.handle(call)
        pairs = {"Content-Length": str(len(response.body)), **response.headers}
        start_response(f"{response.status} -", list(pairs.items()))
        return [] if call.method == "HEAD" else [response.body]

    return application


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--bucket", action="append", default=[])
    options = parser.parse_args()
    os.environ.update(_ENVIRONMENT)  # before the import of moto, which reads them once

    from werkzeug.serving import WSGIRequestHandler, make_server

    class Handler(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log(self, type: str, message: str, *args: Any) -> None:
            pass

    s3 = S3()
    for bucket in options.bucket:
        s3.create_bucket(bucket)
    control = StoreControl(s3.respond, PRECONDITIONS)
    server = make_server(
        options.host, options.port, wsgi(control), threaded=True, request_handler=Handler
    )
    announce(f"http://{options.host}:{server.server_port}", buckets=options.bucket)
    server.serve_forever()


if __name__ == "__main__":
    main()
