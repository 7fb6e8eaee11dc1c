# SPDX-License-Identifier: Apache-2.0
"""An S3 store with the speed that a cloud gives one VM: ``python -m bench.preemption.store --directory DIR``.

The store waits before each answer, and limits each connection and the sum of all connections, in each
direction.  Objects are files, and the parts of an upload stay separate files, so that the store itself needs
little processor time.  It verifies no signature and no checksum: the contract tests do.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import socket
import socketserver
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, cast
from urllib.parse import parse_qs, unquote
from xml.sax.saxutils import escape

from testkit.emulators.process import announce
from testkit.emulators.store_server import Pace

LATENCY_S = 0.030
CONNECTION_BYTES_S = 85e6
TOTAL_BYTES_S = 300e6
"""The limits of one VM: those of the profile ``paced`` of ``make bench``, and a total."""

RATES = "rates"
"""A control command: the bytes per second in each direction since the last such command, as a JSON list."""

_PIECE_BYTES = 2**20
_PAUSE_S = 1.0
_KEPT_HEADERS = ("content-type", "x-amz-meta-", "x-amz-checksum-crc", "x-amz-checksum-sha")
_NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"


@dataclass(frozen=True)
class Blob:
    """An object, or a part of an upload, as one or more files."""

    files: tuple[tuple[str, int], ...]
    """Path and size of each file."""
    etag: str
    headers: Mapping[str, str]
    modified: float

    @property
    def size_bytes(self) -> int:
        return sum(size for _, size in self.files)


@dataclass
class Upload:
    key: str
    headers: Mapping[str, str]
    parts: dict[int, Blob] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    blob: Blob | None = None
    first: int = 0
    count: int = 0
    """Bytes of ``blob`` to send, from ``first``."""


class Store:
    """One bucket.  The lock guards the two tables; transfers run outside of it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._objects: dict[str, Blob] = {}
        self._uploads: dict[str, Upload] = {}
        self._numbers = itertools.count(1)

    def new_file(self) -> str:
        with self._lock:
            return str(self._directory / f"{next(self._numbers)}")

    def reply(
        self, method: str, target: str, headers: Mapping[str, str], body: Blob | None
    ) -> Reply:
        path, _, query = target.partition("?")
        _, _, key = unquote(path).lstrip("/").partition("/")
        names = parse_qs(query, keep_blank_values=True)
        with self._lock:
            if "uploadId" in names:
                return self._of_upload(method, names, headers, body, key)
            if not key:
                return self._of_bucket(method, names, body)
            if method == "POST" and "uploads" in names:
                upload_id = f"upload-{next(self._numbers)}"
                self._uploads[upload_id] = Upload(key, _kept(headers))
                return _document(
                    "InitiateMultipartUploadResult", _tags(Key=key, UploadId=upload_id)
                )
            return self._of_object(method, headers, body, key)

    def _of_object(
        self, method: str, headers: Mapping[str, str], body: Blob | None, key: str
    ) -> Reply:
        found = self._objects.get(key)
        if method == "PUT":
            if found is not None and headers.get("if-none-match") == "*":
                return _error(412, "PreconditionFailed")
            source = headers.get("x-amz-copy-source")
            if source is not None:
                copied = self._objects.get(unquote(source).lstrip("/").partition("/")[2])
                if copied is None:
                    return _error(404, "NoSuchKey")
                self._objects[key] = Blob(copied.files, copied.etag, _kept(headers), time.time())
                return _document("CopyObjectResult", _tags(ETag=copied.etag))
            assert body is not None
            self._objects[key] = body
            return Reply(200, b"", {"ETag": body.etag, **body.headers})
        if method == "DELETE":
            self._objects.pop(key, None)
            return Reply(204)
        if found is None:
            return _error(404, "NoSuchKey")
        facts = {
            "ETag": found.etag,
            "Accept-Ranges": "bytes",
            "Last-Modified": time.strftime(
                "%a, %d %b %Y %H:%M:%S GMT", time.gmtime(found.modified)
            ),
            **found.headers,
        }
        spec = re.fullmatch(r"bytes=(\d+)-(\d*)", headers.get("range", ""))
        size = found.size_bytes
        if spec is None:
            return Reply(200, b"", facts, found, 0, size)
        first, last = int(spec[1]), min(int(spec[2] or size), size - 1)
        if first > last:
            return _error(416, "InvalidRange")
        for name in [name for name in facts if name.startswith("x-amz-checksum")]:
            del facts[name]  # they are of the whole object
        facts["Content-Range"] = f"bytes {first}-{last}/{size}"
        return Reply(206, b"", facts, found, first, last - first + 1)

    def _of_upload(
        self,
        method: str,
        names: Mapping[str, list[str]],
        headers: Mapping[str, str],
        body: Blob | None,
        key: str,
    ) -> Reply:
        upload_id = names["uploadId"][0]
        upload = self._uploads.get(upload_id)
        if upload is None or upload.key != key:
            return _error(404, "NoSuchUpload")
        if method == "PUT":
            assert body is not None
            upload.parts[int(names["partNumber"][0])] = body
            return Reply(200, b"", {"ETag": body.etag, **body.headers})
        if method == "DELETE":
            del self._uploads[upload_id]
            return Reply(204)
        if method == "GET":
            parts = "".join(
                "<Part>"
                + _tags(PartNumber=number, ETag=part.etag, Size=part.size_bytes)
                + "</Part>"
                for number, part in sorted(upload.parts.items())
            )
            return _document("ListPartsResult", _tags(IsTruncated="false") + parts)
        if key in self._objects and headers.get("if-none-match") == "*":
            return _error(412, "PreconditionFailed")
        assert body is not None
        listed = re.findall(rb"<PartNumber>(\d+)</PartNumber>", Path(body.files[0][0]).read_bytes())
        files = tuple(file for number in listed for file in upload.parts[int(number)].files)
        etag = f'"{abs(hash(files)):032x}-{len(listed)}"'
        self._objects[key] = Blob(files, etag, {**upload.headers, **_kept(headers)}, time.time())
        del self._uploads[upload_id]
        return _document("CompleteMultipartUploadResult", _tags(Key=key, ETag=etag))

    def _of_bucket(self, method: str, names: Mapping[str, list[str]], body: Blob | None) -> Reply:
        if method == "POST" and "delete" in names:
            assert body is not None
            text = Path(body.files[0][0]).read_text()
            for key in re.findall(r"<Key>(.*?)</Key>", text):
                self._objects.pop(key, None)
            return _document("DeleteResult", "")
        if method != "GET" or "location" in names:
            return _document("LocationConstraint", "")
        if "lifecycle" in names:
            return _error(404, "NoSuchLifecycleConfiguration")
        if "uploads" in names:
            found = "".join(
                "<Upload>" + _tags(Key=upload.key, UploadId=upload_id) + "</Upload>"
                for upload_id, upload in self._uploads.items()
            )
            return _document("ListMultipartUploadsResult", _tags(IsTruncated="false") + found)
        prefix = names.get("prefix", [""])[0]
        delimiter = names.get("delimiter", [""])[0]
        contents, below = [], {}
        for key, blob in sorted(self._objects.items()):
            if not key.startswith(prefix):
                continue
            head, mark, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            if mark:
                below[prefix + head + mark] = None
                continue
            stamp = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(blob.modified))
            facts = _tags(Key=key, LastModified=stamp, ETag=blob.etag, Size=blob.size_bytes)
            contents.append(f"<Contents>{facts}<StorageClass>STANDARD</StorageClass></Contents>")
        commons = "".join(
            f"<CommonPrefixes>{_tags(Prefix=name)}</CommonPrefixes>" for name in below
        )
        count = len(contents) + len(below)
        facts = _tags(Prefix=prefix, KeyCount=count, MaxKeys=10**6, IsTruncated="false")
        return _document("ListBucketResult", facts + "".join(contents) + commons)


def _kept(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers of a write that every read of the object returns."""
    return {name: text for name, text in headers.items() if name.startswith(_KEPT_HEADERS)}


def _tags(**facts: object) -> str:
    return "".join(f"<{name}>{escape(str(value))}</{name}>" for name, value in facts.items())


def _document(root: str, content: str) -> Reply:
    text = (
        f'<?xml version="1.0" encoding="UTF-8"?>\n<{root} xmlns="{_NAMESPACE}">{content}</{root}>'
    )
    return Reply(200, text.encode(), {"Content-Type": "application/xml"})


def _error(status: int, code: str) -> Reply:
    body = f"<Error>{_tags(Code=code, Message=code)}</Error>"
    return Reply(status, body.encode(), {"Content-Type": "application/xml"})


class _Flow:
    """Bytes in one direction, and the time that they took: pauses of a second and more do not count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last_mono_s = 0.0
        self.size_bytes = 0
        self.seconds = 0.0

    def add(self, count: int) -> None:
        with self._lock:
            now = time.monotonic()
            if now - self._last_mono_s < _PAUSE_S:
                self.seconds += now - self._last_mono_s
            self._last_mono_s = now
            self.size_bytes += count


class _Handler(socketserver.BaseRequestHandler):
    server: _Server
    request: socket.socket

    def handle(self) -> None:
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._paces = (Pace(), Pace())
        self._buffer = memoryview(bytearray(_PIECE_BYTES))
        self._reader = cast("BinaryIO", self.request.makefile("rb", 2**18))
        with self._reader:
            while self._exchange():
                pass

    def _exchange(self) -> bool:
        line = self._reader.readline(65537).decode("latin-1").split()
        if len(line) != 3:
            return False
        method, target, _ = line
        headers: dict[str, str] = {}
        while text := self._reader.readline(65537).decode("latin-1").strip():
            name, _, value = text.partition(":")
            headers[name.strip().lower()] = value.strip()
        if headers.get("expect", "").lower() == "100-continue":
            self.request.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = None
        if int(headers.get("content-length", 0)) or method == "PUT":
            body = self._body(headers)
        if target == f"/_control/{RATES}":
            reply = Reply(200, json.dumps(self.server.rates()).encode())
        else:
            reply = self.server.store.reply(method, target, headers, body)
        time.sleep(self.server.latency_s)
        self._send(method, reply)
        return headers.get("connection", "").lower() != "close"

    def _body(self, headers: Mapping[str, str]) -> Blob:
        path = self.server.store.new_file()
        size_bytes, trailers = 0, dict[str, str]()
        with open(path, "wb", buffering=0) as file:
            if "aws-chunked" in headers.get("content-encoding", ""):
                while count := int(self._reader.readline(1024).partition(b";")[0], 16):
                    self._take(file, count)
                    size_bytes += count
                    self._reader.readline(16)
                while text := self._reader.readline(65537).decode("latin-1").strip():
                    name, _, value = text.partition(":")
                    trailers[name.lower()] = value.strip()
            else:
                size_bytes = int(headers.get("content-length", 0))
                self._take(file, size_bytes)
        kept = {**_kept(headers), **_kept(trailers)}
        etag = f'"{os.path.basename(path):0>32}-1"'  # no MD5: clients must not compare it
        return Blob(((path, size_bytes),), etag, kept, time.time())

    def _take(self, file: BinaryIO, count: int) -> None:
        while count:
            piece = self._buffer[: min(count, _PIECE_BYTES)]
            if self._reader.readinto(piece) < len(piece):  # type: ignore[attr-defined]
                raise ConnectionError("the body ended early")
            file.write(piece)
            count -= len(piece)
            self._passed(0, len(piece))

    def _send(self, method: str, reply: Reply) -> None:
        size_bytes = reply.count if reply.blob else len(reply.body)
        facts = dict(reply.headers)
        if reply.status != 204:
            facts["Content-Length"] = str(size_bytes)
        lines = [f"HTTP/1.1 {reply.status} -", *(f"{name}: {text}" for name, text in facts.items())]
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        if method == "HEAD" or reply.blob is None:
            self.request.sendall(head if method == "HEAD" else head + reply.body)
            return
        self.request.sendall(head)
        skip, left = reply.first, reply.count
        for path, size in reply.blob.files:
            count = min(size - skip, left)
            if count <= 0:
                skip -= size
                continue
            with open(path, "rb", buffering=0) as file:
                while count:
                    sent = os.sendfile(
                        self.request.fileno(), file.fileno(), skip, min(count, _PIECE_BYTES)
                    )
                    self._passed(1, sent)
                    skip, count, left = skip + sent, count - sent, left - sent
            skip = 0

    def _passed(self, way: int, count: int) -> None:
        server = self.server
        server.flows[way].add(count)
        self._paces[way].pass_bytes(count, server.connection_bytes_s, server.never)
        server.paces[way].pass_bytes(count, server.total_bytes_s, server.never)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 256

    def __init__(self, options: argparse.Namespace) -> None:
        self.store = Store(options.directory)
        self.latency_s: float = options.latency_s
        self.connection_bytes_s: float = options.connection_bytes_s
        self.total_bytes_s: float = options.total_bytes_s
        self.paces = (Pace(), Pace())
        self.flows = (_Flow(), _Flow())
        self.never = threading.Event()
        super().__init__(("127.0.0.1", 0), _Handler)

    def rates(self) -> list[float]:
        """Bytes per second of all transfers to and from the store since the last call."""
        flows, self.flows = self.flows, (_Flow(), _Flow())
        return [flow.size_bytes / max(flow.seconds, 1e-3) for flow in flows]

    def handle_error(self, request: object, client_address: object) -> None:
        """Drop the connection: VMs without power close theirs at any time."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--latency-s", type=float, default=LATENCY_S)
    parser.add_argument("--connection-bytes-s", type=float, default=CONNECTION_BYTES_S)
    parser.add_argument("--total-bytes-s", type=float, default=TOTAL_BYTES_S)
    with _Server(parser.parse_args()) as server:
        announce(f"http://127.0.0.1:{server.server_address[1]}")
        server.serve_forever()


if __name__ == "__main__":
    main()
