# SPDX-License-Identifier: Apache-2.0
"""Any response costs little memory and bounded time: of metadata servers, stores and token servers."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from swansong_bucket.errors import NotFound, Transient
from swansong_bucket.stores.http.client import Wire
from swansongd.sources.metadata import MetadataClient, MetadataUnavailable

from testkit.forked import peak_bytes
from testkit.raw_server import Peer, RawServer, Script, answering
from testkit.store_backends import store_at

MIB = 2**20
LINE = b"HTTP/1.1 200 OK\r\n"
CHUNKED = LINE + b"Metadata-Flavor: Google\r\nTransfer-Encoding: chunked\r\n\r\n"
HEADS: dict[str, tuple[bytes, bytes]] = {
    "one header without an end": (LINE + b"X: ", b"y" * 8 * MIB),
    "nothing of HTTP": (b"", b"SSH-2.0-OpenSSH_9.2\r\n" * 400_000),
    "interim answers": (b"", (b"HTTP/1.1 100 Continue\r\nX: " + b"y" * 15_000 + b"\r\n\r\n") * 500),
    "a chunk's size without an end": (CHUNKED, b"0" * 8 * MIB),
    "trailers": (CHUNKED + b"1\r\n{\r\n0\r\n", b"X: y\r\n" * 100_000),
}  # fmt: skip
"""Responses that the parser refuses, which all requests share."""
BODIES: dict[str, tuple[bytes, bytes]] = {
    "a huge chunk": (CHUNKED + b"ffffffffff\r\n", b"x" * 12 * MIB),
    "many chunks": (CHUNKED, b"400\r\n%b\r\n" % (b"x" * 1024) * 12288),
    "a huge length": (LINE + b"Metadata-Flavor: Google\r\nContent-Length: 99999999\r\n\r\n", b"x" * 12 * MIB),
    "no length": (LINE + b"Metadata-Flavor: Google\r\n\r\n", b"x" * 12 * MIB),
}  # fmt: skip
"""Responses that each kind of request refuses by its own limit."""


def sending(head: bytes, rest: bytes) -> Script:
    """Send this response to each request, until the client closes."""

    def script(peer: Peer) -> None:
        while peer.request() is not None:
            with suppress(OSError):
                peer.send(head)
                peer.send(rest)
                # A client that waits for more gets the end.
                peer.sock.shutdown(socket.SHUT_WR)
            peer.wait_for_end()
            return

    return script


def metadata(url: str) -> object:
    with MetadataClient(url, timeout_s=20) as client:
        return client.request("GET", "/latest/meta-data/spot/instance-action")


def wire(url: str) -> object:
    return Wire(url, connections=1).request("GET", "/bucket?list-type=2", {})


ASKERS: dict[str, tuple[Callable[[str], object], type[Exception], int]] = {
    "metadata": (metadata, MetadataUnavailable, 65536),
    "wire": (wire, Transient, 4 * MIB),
}
"""Requests, the error for a response without a result, and the limit of the body."""


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.mark.fault("S18", "H07")
@pytest.mark.parametrize(
    ("asker", "case"),
    [
        *(("metadata", case) for case in HEADS),
        *((asker, case) for asker in ASKERS for case in BODIES),
    ],
)
def test_a_hostile_response_costs_little_memory(asker: str, case: str) -> None:
    """Unavailable or Transient, with less than 2 MB beside the body."""
    request, error, body_bytes = ASKERS[asker]
    with RawServer(sending(*(HEADS | BODIES)[case])) as server:

        def ask() -> None:
            with pytest.raises(error):
                request(server.url)

        ask()  # imports and compilation do not count
        limit_bytes = 2 * MIB + (2 * body_bytes if body_bytes > MIB else 0)
        assert peak_bytes(ask) < limit_bytes


def test_a_response_within_the_limits_is_read() -> None:
    """64 headers, a head of 16 KiB, a body of 64 KiB."""
    fields = [f"X-{n}: {'y' * 200}" for n in range(62)]
    body = b"x" * 65536
    with RawServer(answering(200, body, "Metadata-Flavor: Google", *fields)) as server:
        answer: Any = metadata(server.url)
        assert (answer.status, answer.body, len(answer.headers)) == (200, body, 64)
        found: Any = wire(server.url)
        assert (found.status, found.body) == (200, body)


# ---------------------------------------------------------------- byte by byte


@pytest.fixture
def dripping() -> Iterator[Callable[..., RawServer]]:
    """Start servers that send a beginning, and then one byte at a time without an end."""
    over = threading.Event()

    with ExitStack() as stack:

        def start(head: bytes, piece: bytes, *, asks: bool = True) -> RawServer:
            def script(peer: Peer) -> None:
                if asks and peer.head() is None:
                    return
                with suppress(OSError):
                    peer.send(head)
                    while not over.wait(0.02):
                        peer.send(piece)

            return stack.enter_context(RawServer(script))

        yield start
        over.set()


DRIPS = {
    "the head": (LINE + b"X: ", b"y"),
    "interim answers": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "chunks": (CHUNKED, b"1\r\nx\r\n"),
}


@pytest.mark.fault("N07", "S18")
@pytest.mark.parametrize("drip", DRIPS)
def test_a_metadata_response_that_drips(dripping: Callable[..., RawServer], drip: str) -> None:
    """Each byte is in time, the response is not: the limit is for the whole exchange."""
    server = dripping(*DRIPS[drip])
    began = time.monotonic()
    with MetadataClient(server.url, timeout_s=0.5) as client:
        with pytest.raises(MetadataUnavailable) as caught:
            client.request("GET", "/")
        # Sixteen interim responses are refused before the time limit.
        assert caught.value.timed_out or drip == "interim answers"
    assert time.monotonic() - began < 10


@pytest.mark.fault("O02")
@pytest.mark.parametrize("drip", DRIPS)
def test_a_response_of_a_store_that_drips(dripping: Callable[..., RawServer], drip: str) -> None:
    """The wire ends it, although bytes keep moving."""
    server = dripping(*DRIPS[drip])
    began = time.monotonic()
    drawn = Wire(server.url, connections=1, stall_s=5, first_byte_s=5, response_s=0.5)
    with pytest.raises(Transient):
        drawn.request("GET", "/", {})
    assert time.monotonic() - began < 10


@pytest.mark.fault("O02")
def test_the_head_of_a_shard_that_drips(dripping: Callable[..., RawServer]) -> None:
    """The head of a shard has a time limit; a slow body is not cut."""

    class Counted:
        size_bytes = 0

        def rewind(self) -> None:
            pass

        def write(self, window: memoryview) -> None:
            self.size_bytes += window.nbytes

    head = b"HTTP/1.1 206 OK\r\nContent-Range: bytes 0-99/100\r\n"
    span = {"range": "bytes=0-99"}
    server = dripping(head + b"X: ", b"y")
    drawn = Wire(server.url, connections=1, stall_s=5, first_byte_s=5, response_s=0.5)
    with pytest.raises(Transient, match="in time"):
        drawn.request("GET", "/", span, sink=Counted())
    sink = Counted()
    server = dripping(head + b"Content-Length: 100\r\n\r\n", b"x")
    slow = Wire(server.url, connections=1, stall_s=5, first_byte_s=5, response_s=0.5)
    assert slow.request("GET", "/", span, sink=sink).status == 206
    assert sink.size_bytes == 100


@pytest.mark.fault("O02")
def test_a_handshake_that_drips(dripping: Callable[..., RawServer]) -> None:
    """A TLS handshake byte by byte ends at the limit of connecting."""
    record = b"\x16\x03\x03\x40\x00\x02\x00\x40\x00\x03\x03"
    server = dripping(record, b"\x00", asks=False)
    began = time.monotonic()
    drawn = Wire(server.url.replace("http:", "https:"), connections=1, connect_timeout_s=0.5)
    with pytest.raises(Transient):
        drawn.request("GET", "/", {})
    assert time.monotonic() - began < 10


@pytest.mark.fault("O02", "O22")
def test_a_proxy_that_drips(
    dripping: Callable[..., RawServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for the response of a proxy to CONNECT."""
    server = dripping(LINE + b"X: ", b"y")
    monkeypatch.setenv("HTTPS_PROXY", server.url)
    monkeypatch.setenv("NO_PROXY", "")
    began = time.monotonic()
    drawn = Wire("https://store.example", connections=1, connect_timeout_s=0.5)
    with pytest.raises(Transient):
        drawn.request("GET", "/", {})
    assert time.monotonic() - began < 10


# ---------------------------------------------------------------- refusals and pages


STORES: dict[str, Callable[[str], Any]] = {
    "s3": lambda url: store_at("s3://bucket", url, region="us-east-1"),
    "gcs": lambda url: store_at("gs://bucket", url),
}


@pytest.mark.fault("H07", "O07")
@pytest.mark.parametrize("kind", STORES)
def test_a_refusal_is_read_up_to_its_limit(kind: str, cloud_environment: None) -> None:
    """8 MB after the code of a 404: NotFound, at low cost."""
    body = b"<Error><Code>NoSuchKey</Code></Error>" + b" " * 8 * MIB
    head = b"HTTP/1.1 404 No\r\nContent-Length: %d\r\n\r\n" % len(body)
    with RawServer(sending(head, body)) as server:
        store = STORES[kind](server.url)

        def ask() -> None:
            with pytest.raises(NotFound):
                store.get("key")

        ask()
        assert peak_bytes(ask) < 2 * MIB


@pytest.mark.fault("H07", "O15")
def test_a_hostile_page_is_transient(cloud_environment: None) -> None:
    """Deep, wide, with entities, too large, in another encoding: Transient, with at most 20 MB."""
    for body in (
        b"<ListBucketResult>" + b"<a>" * 500_000,
        b"<ListBucketResult>" + b"<a/>" * 500_000 + b"</ListBucketResult>",
        b'<!DOCTYPE x [<!ENTITY a "%b">]><ListBucketResult>&a;</ListBucketResult>' % (b"y" * 1000),
        b"<ListBucketResult>" + b" " * 5 * MIB + b"</ListBucketResult>",
        "<?xml version='1.0' encoding='utf-16'?><ListBucketResult/>".encode("utf-16"),
        b"\xff\xfe\x00",
    ):
        with RawServer(answering(200, body)) as server:
            store = STORES["s3"](server.url)

            def ask(store: Any = store) -> None:
                with pytest.raises(Transient):
                    list(store.list(""))

            ask()
            assert peak_bytes(ask) < 20 * MIB


@pytest.mark.fault("H07")
@pytest.mark.parametrize("kind", STORES)
def test_settings_of_a_bucket_are_bounded(kind: str, cloud_environment: None) -> None:
    """The SDKs read a body of any size; their requests use the store's client, which ends the body."""
    body = b'<LifecycleConfiguration x="' if kind == "s3" else b'{"kind": "'

    def script(peer: Peer) -> None:
        while peer.request() is not None:
            with suppress(OSError):
                peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (100 * MIB))
                peer.send(body)
                for _ in range(100):
                    peer.send(b"x" * MIB)

    with RawServer(script) as server:
        store = STORES[kind](server.url)

        def ask() -> None:
            with pytest.raises(Transient):
                store.settings.lifecycle_rules()

        ask()
        assert peak_bytes(ask) < 12 * MIB
