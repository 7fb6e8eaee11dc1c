# SPDX-License-Identifier: Apache-2.0
"""S3 and GCS stores with broken connections, untrusted certificates and long outages."""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from swansong_bucket.errors import Permanent, StoreError, Transient
from swansong_bucket.stores.gcs.store import GcsStore
from swansong_bucket.stores.options import GcsOptions, S3Options
from swansong_bucket.stores.s3.store import S3Store

from testkit.emulators.fault_proxy import FaultProxy, Way
from testkit.store_backends import (
    BUCKET,
    Cloud,
    get_range,
    retrying,
)
from testkit.waiting import until

CONTENT = os.urandom(200_000)


@pytest.mark.fault("O01")
def test_connection_refused(cloud: Cloud, proxy: FaultProxy) -> None:
    """Transient, and a later call works: the client recovers."""
    store = cloud.open(cloud.by(proxy))
    store.put("key", b"content")
    proxy.refuse()
    for call in (lambda: store.get("key"), lambda: store.put("key", b""), store.check):
        with pytest.raises(Transient):
            call()
    proxy.forward()
    assert store.get("key") == b"content"


@pytest.mark.fault("O01")
@pytest.mark.parametrize("way", ["up", "down"])
def test_reset_at_every_offset(cloud: Cloud, proxy: FaultProxy, way: Way) -> None:
    """A reset at any byte, in either direction, is Transient; the retry succeeds."""
    store = cloud.open(cloud.by(proxy))
    store.put("key", CONTENT)

    def create() -> None:
        store.create("chunk", memoryview(CONTENT))

    def read() -> None:
        assert get_range(store, "key", 0, len(CONTENT)) == CONTENT

    calls = [create, read]
    offsets = (0, 1, 17, 60, 150, 250, *range(1_000, 190_000, 37_123))
    struck = 0
    for offset in offsets:
        for call in calls:
            proxy.reset(way, offset)
            before = proxy.hits
            try:
                call()
            except Transient:
                assert proxy.hits > before
                struck += 1
            else:
                assert proxy.hits == before, "the connection broke without an error"
    assert struck >= len(offsets)
    proxy.reset(way, 100, times=1)
    careful = retrying(store)
    careful.create("other", memoryview(CONTENT))
    proxy.reset(way, 100, times=1)
    assert careful.get("other") == CONTENT


@pytest.mark.fault("O02")
def test_a_server_that_never_responds(cloud: Cloud, proxy: FaultProxy) -> None:
    """The read timeout ends the wait, for small calls and for chunks."""
    store = cloud.open(cloud.by(proxy), connect_timeout_s=0.5, read_timeout_s=0.3)
    store.check()
    proxy.mute()
    for call in (
        lambda: store.get("key"),
        lambda: store.put("key", b"content"),
        lambda: store.create("chunk", memoryview(CONTENT)),
        store.check,
    ):
        began = time.monotonic()
        with pytest.raises(Transient):
            call()
        assert time.monotonic() - began < 8
    proxy.forward()
    store.check()


@pytest.mark.fault("O02")
def test_a_response_that_stalls(cloud: Cloud, proxy: FaultProxy) -> None:
    """The read timeout ends the wait, and the retry reads the whole body."""
    store = cloud.open(cloud.by(proxy), read_timeout_s=0.3)
    store.put("key", CONTENT)
    proxy.stall("down", 50_000)
    with pytest.raises(Transient):
        get_range(store, "key", 0, len(CONTENT))
    proxy.stall("down", 50_000, times=1)
    assert get_range(retrying(store), "key", 0, len(CONTENT)) == CONTENT


@pytest.mark.fault("O13")
def test_a_bit_flipped_in_transit(cloud: Cloud, proxy: FaultProxy) -> None:
    """The store refuses the chunk by its checksum, the chunk is sent again, and the object is right."""
    store = cloud.open(cloud.by(proxy))
    proxy.flip("up", 100_000)
    with pytest.raises(Transient):
        store.create("chunk", memoryview(CONTENT))
    assert store.head("chunk") is None
    proxy.flip("up", 100_000)
    with pytest.raises(StoreError):  # the refusal of a small object by GCS has no code
        store.put("small", CONTENT)
    assert store.head("small") is None
    proxy.flip("up", 100_000, times=1)
    careful = retrying(store)
    careful.create("chunk", memoryview(CONTENT))
    assert proxy.hits == 3
    assert careful.get("chunk") == CONTENT


@pytest.mark.fault("O07")
def test_a_server_that_is_not_trusted(
    cloud_environment: None, untrusted_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A certificate that this VM does not trust is Permanent: a retry cannot help."""
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nonexistent")
    s3 = S3Store(f"s3://{BUCKET}", S3Options(endpoint=untrusted_url))
    gcs = GcsStore(f"gs://{BUCKET}", GcsOptions(endpoint=untrusted_url))
    for store in (s3, gcs):
        with pytest.raises(Permanent) as caught:
            store.check()
        assert "certificate" in caught.value.hint


@pytest.fixture
def untrusted_url(tmp_path: Path) -> Iterator[str]:
    """A TLS server with a self-signed certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    pem = tmp_path / "server.pem"
    pem.write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        + certificate.public_bytes(Encoding.PEM)
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    listener = socket.create_server(("127.0.0.1", 0))
    done = threading.Event()

    def serve() -> None:
        while not done.is_set():
            client, _ = listener.accept()
            with client, suppress(OSError):
                context.wrap_socket(client, server_side=True).close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    port = listener.getsockname()[1]
    yield f"https://127.0.0.1:{port}"
    done.set()
    socket.create_connection(("127.0.0.1", port)).close()
    thread.join(timeout=10)
    listener.close()


# ---------------------------------------------------------------- storms


@pytest.mark.fault("O04")
def test_an_outage_ends_with_success(cloud: Cloud) -> None:
    """The wrapper retries during 503 responses, and the call succeeds after the outage."""
    store = retrying(cloud.open())
    cloud.order("outage", seconds=0.7)
    store.put("key", b"content", if_absent=True)
    assert store.get("key") == b"content"


@pytest.mark.fault("O04")
def test_an_outage_longer_than_the_time_left(cloud: Cloud) -> None:
    """No attempt starts after the deadline, and the last error is raised."""
    bare = cloud.open()
    bare.check()
    cloud.order("outage", seconds=60)
    give_up = time.monotonic() + 0.5
    with pytest.raises(Transient):
        retrying(bare, give_up_mono_s=lambda: give_up).put("key", b"")
    assert time.monotonic() - give_up < 5
    asked = len(cloud.requests())
    assert asked > 2
    with pytest.raises(Transient):
        retrying(bare, give_up_mono_s=time.monotonic).put("key", b"")
    assert len(cloud.requests()) == asked


def test_stop_ends_the_retries(cloud: Cloud) -> None:
    """A stop event raises the last error immediately, during any outage."""
    stop = threading.Event()
    store = retrying(cloud.open(), stop=stop)
    store.check()
    cloud.order("outage", seconds=60)
    caught: list[StoreError] = []

    def call() -> None:
        try:
            store.put("key", b"")
        except StoreError as error:
            caught.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    until(lambda: len(cloud.requests()) >= 3, what="three attempts")
    stop.set()
    thread.join(timeout=10)
    assert not thread.is_alive()
    assert isinstance(caught[0], Transient)
