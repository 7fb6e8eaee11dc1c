# SPDX-License-Identifier: Apache-2.0
"""The upper limit: HTTP on raw TLS sockets, without SDK, digests, signatures or retries."""

from __future__ import annotations

import os
import re
import socket
import ssl
import threading
from collections.abc import Callable
from urllib.parse import urlsplit

from job import Job, in_threads, parts, run

PART_BYTES = 16 * 2**20
WINDOW_BYTES = 2**20


class Connection:
    """One socket and one buffer, used by one thread."""

    def __init__(self, job: Job, context: ssl.SSLContext) -> None:
        address = urlsplit(job.endpoint)
        assert address.hostname
        self.host = address.netloc
        raw = socket.create_connection((address.hostname, address.port or 443))
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = context.wrap_socket(raw, server_hostname=address.hostname)
        self.buffer = memoryview(bytearray(WINDOW_BYTES))

    def ask(self, line: str, size_bytes: int = 0, extra: str = "") -> None:
        text = (
            f"{line} HTTP/1.1\r\nHost: {self.host}\r\nContent-Length: {size_bytes}\r\n{extra}\r\n"
        )
        self.socket.sendall(text.encode())

    def send(self, fd: int, offset: int, size_bytes: int) -> None:
        while size_bytes:
            count = os.preadv(fd, [self.buffer[: min(size_bytes, WINDOW_BYTES)]], offset)
            self.socket.sendall(self.buffer[:count])
            offset += count
            size_bytes -= count

    def answer(self) -> bytes:
        """The body of a small answer.  The connection must have no other request in flight."""
        data = b""
        while b"\r\n\r\n" not in data:
            data += self._more()
        head, _, body = data.partition(b"\r\n\r\n")
        assert head.split(b" ", 2)[1] == b"200", head
        length = re.search(rb"(?i)content-length: (\d+)", head)
        while length and len(body) < int(length[1]):
            body += self._more()
        return body

    def receive(self, fd: int, offset: int, size_bytes: int) -> None:
        """Write the body of a ranged GET into the file."""
        data = b""
        while b"\r\n\r\n" not in data:
            data += self._more()
        head, _, body = data.partition(b"\r\n\r\n")
        assert head.split(b" ", 2)[1] == b"206", head
        have = len(body)
        self.buffer[:have] = body
        while size_bytes:
            wanted = min(size_bytes, WINDOW_BYTES)
            while have < wanted:
                count = self.socket.recv_into(self.buffer[have:wanted])
                assert count, "the answer ended early"
                have += count
            os.pwrite(fd, self.buffer[:have], offset)
            offset += have
            size_bytes -= have
            have = 0

    def _more(self) -> bytes:
        data = self.socket.recv(16384)
        assert data, "the connection ended"
        return data


def prepare(job: Job) -> Callable[[], object]:
    context = ssl.create_default_context(cafile=job.ca)
    local = threading.local()
    connections = job.option("connections", 8)

    def connection() -> Connection:
        if not hasattr(local, "connection"):
            local.connection = Connection(job, context)
        made: Connection = local.connection
        return made

    def upload() -> None:
        first = Connection(job, context)
        tasks: list[tuple[int, str, int, int]] = []
        finish: list[str] = []
        for name, size_bytes in job.files:
            fd = os.open(job.directory / name, os.O_RDONLY)
            target = f"/{job.bucket}/{job.key(name)}"
            if size_bytes <= PART_BYTES:
                tasks.append((fd, target, 0, size_bytes))
                continue
            first.ask(f"POST {target}?uploads")
            found = re.search(rb"<UploadId>(.*?)</UploadId>", first.answer())
            assert found
            upload_id = found[1].decode()
            for number, (offset, length) in enumerate(parts(size_bytes, PART_BYTES), 1):
                query = f"partNumber={number}&uploadId={upload_id}"
                tasks.append((fd, f"{target}?{query}", offset, length))
            finish.append(f"POST {target}?uploadId={upload_id}")

        def put(task: tuple[int, str, int, int]) -> None:
            fd, target, offset, length = task
            mine = connection()
            mine.ask(f"PUT {target}", length)
            mine.send(fd, offset, length)
            mine.answer()

        in_threads(connections, tasks, put)
        for line in finish:
            first.ask(line)
            first.answer()

    def download() -> None:
        tasks = []
        for name, size_bytes in job.files:
            fd = os.open(job.directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            tasks += [(fd, name, *part) for part in parts(size_bytes, PART_BYTES)]

        def get(task: tuple[int, str, int, int]) -> None:
            fd, name, offset, length = task
            mine = connection()
            span = f"Range: bytes={offset}-{offset + length - 1}\r\n"
            mine.ask(f"GET /{job.bucket}/{job.key(name)}", extra=span)
            mine.receive(fd, offset, length)

        in_threads(connections, tasks, get)

    return upload if job.operation == "upload" else download


if __name__ == "__main__":
    run(prepare)
