# SPDX-License-Identifier: Apache-2.0
"""A strict HTTP/1.1 parser for the responses of stores and metadata servers, in bounded memory.

A malformed response raises Transient, and its connection must not be used again.  The parser supports what
those servers send: a content length or chunks, and interim responses; no compression and no upgrade.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from swansong_bucket.errors import Transient

HEAD_BYTES_MAX = 16 * 2**10
HEADERS_MAX = 64
"""Largest number of header fields, and of trailer lines."""
_LINE_BYTES_MAX = 4096
_INTERIM_MAX = 16
_RECEIVE_BYTES = 16 * 2**10
"""One TLS record; a single read never returns more."""

_NAME, _VALUE = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", r"[^\r\n\0]*"
_HEAD = re.compile(rf"HTTP/1\.([01]) ([1-5][0-9]{{2}})(?: [^\r\n]*)?((?:\r\n{_NAME}:{_VALUE})*)")
_FIELD = re.compile(rf"({_NAME}):({_VALUE})")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,12})[ \t]*(?:;[^\r\n]*)?")
_SECONDS = re.compile(r"[0-9]{1,6}")
_LENGTH = re.compile(r"[0-9]{1,15}")


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """The ``Retry-After`` header in seconds; None if it is missing or contains a date."""
    text = headers.get("retry-after", "")
    return float(text) if _SECONDS.fullmatch(text) else None


def http_date(text: str) -> datetime | None:
    """The instant of a header such as ``Date``, in UTC; None if it is not valid."""
    try:
        stated = parsedate_to_datetime(text)
        return stated.replace(tzinfo=stated.tzinfo or UTC).astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def request_head(lines: Sequence[str]) -> bytes:
    """The head of a request.

    Args:
        lines: the request line and the header fields.

    Raises:
        ValueError: a line contains a line break, or a character beyond Latin-1.
    """
    head = "\r\n".join([*lines, "", ""]).encode("latin-1")
    if head.count(b"\n") != len(lines) + 1 or head.count(b"\r") != len(lines) + 1:
        raise ValueError("a header contains a line break")
    return head


def receive_until(sock: socket.socket, end_mono_s: float) -> Callable[[memoryview], int]:
    """A ``recv_into`` of ``sock`` that raises TimeoutError after ``end_mono_s``.

    The timeout of a socket restarts with each byte, so a slow peer could block the caller forever.
    """

    def receive_into(window: memoryview) -> int:
        sock.settimeout(left_s(end_mono_s))
        return sock.recv_into(window)

    return receive_into


def left_s(end_mono_s: float) -> float:
    """Seconds until ``end_mono_s``; raises TimeoutError at and after that time."""
    seconds = end_mono_s - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("no complete response arrived in time")
    return seconds


@dataclass(frozen=True, slots=True)
class Head:
    """The status and the header fields of a response."""

    status: int
    headers: Mapping[str, str]
    """By name in lower case; the values of a repeated field are joined by commas."""
    size_bytes: int | None
    """Length of the body; None if it is chunked, or ends with the connection."""
    is_chunked: bool
    keeps_open: bool
    """Whether the connection may be used again after the body."""

    @property
    def has_end(self) -> bool:
        """Whether the end of the body is marked, so that a truncated body is detected."""
        return self.is_chunked or self.size_bytes is not None


class ResponseReader:
    """Reads one response from a connection.

    Args:
        receive_into: fills part of a window, and returns the number of bytes; 0 at the end.
        method: of the request; the response to a HEAD request has no body.
    """

    def __init__(self, receive_into: Callable[[memoryview], int], method: str) -> None:
        self._receive_into = receive_into
        self._method = method
        self._buffer = bytearray()
        """Bytes that were received and not yet returned."""

    @property
    def is_drained(self) -> bool:
        """Whether no byte arrived after the response."""
        return not self._buffer

    def head(self) -> Head:
        """The head of the final response; interim responses are skipped."""
        for _ in range(_INTERIM_MAX):
            head = self._parsed(self._until(b"\r\n\r\n", HEAD_BYTES_MAX))
            if head.status >= 200:
                return head
            if head.status == 101:
                break
        raise Transient("the server switched protocols, or sent only interim responses")

    def pieces(self, head: Head, window: memoryview) -> Iterator[memoryview]:
        """The body in pieces, each at the start of ``window``; raises Transient if it ends early."""
        if head.is_chunked:
            while size_bytes := self._chunk_size_bytes():
                yield from self._exactly(size_bytes, window)
                if self._until(b"\r\n", 2):
                    raise Transient("a chunk of the response does not end at its length")
            self._pass_trailers()
        elif head.size_bytes is not None:
            yield from self._exactly(head.size_bytes, window)
        else:
            while count := self._some(window):
                yield window[:count]

    def _pass_trailers(self) -> None:
        for _ in range(HEADERS_MAX):
            if not self._until(b"\r\n", _LINE_BYTES_MAX):
                return
        raise Transient(f"the response has more than {HEADERS_MAX} trailers")

    def _exactly(self, size_bytes: int, window: memoryview) -> Iterator[memoryview]:
        left_bytes = size_bytes
        while left_bytes:
            piece = window[: min(left_bytes, window.nbytes)]
            filled = 0
            while filled < piece.nbytes:
                count = self._some(piece[filled:])
                if not count:
                    raise Transient("the response ended early")
                filled += count
            left_bytes -= filled
            yield piece

    def _some(self, window: memoryview) -> int:
        if not self._buffer:
            return self._receive_into(window)
        count = min(len(self._buffer), window.nbytes)
        window[:count] = self._buffer[:count]
        del self._buffer[:count]
        return count

    def _chunk_size_bytes(self) -> int:
        match = _CHUNK.fullmatch(self._until(b"\r\n", _LINE_BYTES_MAX))
        if not match:
            raise Transient("the response has a chunk without a size")
        return int(match[1], 16)

    def _until(self, mark: bytes, size_bytes_max: int) -> bytes:
        """The bytes before ``mark``; consumes the mark too."""
        while (end := self._buffer.find(mark)) < 0 or end > size_bytes_max:
            if len(self._buffer) > size_bytes_max:
                raise Transient(
                    f"the response is not HTTP, or its head has over {size_bytes_max} bytes"
                )
            window = memoryview(bytearray(_RECEIVE_BYTES))
            count = self._receive_into(window)
            if not count:
                raise Transient("the connection ended before the response")
            self._buffer += window[:count]
        taken = bytes(self._buffer[:end])
        del self._buffer[: end + len(mark)]
        return taken

    def _parsed(self, text: bytes) -> Head:
        found = _HEAD.fullmatch(text.decode("latin-1"))
        if not found:
            line = text.partition(b"\r\n")[0]
            raise Transient(f"the response is not HTTP, or has a malformed header: {line!r:.80}")
        fields = _FIELD.findall(found[3])
        if len(fields) > HEADERS_MAX:
            raise Transient(f"the response has {len(fields)} headers; the limit is {HEADERS_MAX}")
        headers: dict[str, str] = {}
        for spelled, padded in fields:
            name, value = spelled.lower(), padded.strip(" \t")
            if name == "content-length" and headers.get(name, value) != value:
                raise Transient("the response has two lengths")
            is_repeated = name in headers and name != "content-length"
            headers[name] = f"{headers[name]}, {value}" if is_repeated else value
        status = int(found[2])
        has_body = self._method != "HEAD" and status >= 200 and status not in (204, 304)
        length = headers.get("content-length")
        coding = headers.get("transfer-encoding", "").lower()
        if coding not in ("", "chunked") or (coding and length is not None):
            raise Transient("the response does not mark the end of its body")
        if length is not None and not _LENGTH.fullmatch(length):
            raise Transient(f"the response has an invalid length: {length!r:.40}")
        size_bytes = int(length) if length is not None else None
        wants_close = "close" in headers.get("connection", "").lower()
        has_end = not has_body or bool(coding) or size_bytes is not None
        return Head(
            status=status,
            headers=headers,
            size_bytes=size_bytes if has_body else 0,
            is_chunked=has_body and bool(coding),
            keeps_open=found[1] == "1" and not wants_close and has_end,
        )
