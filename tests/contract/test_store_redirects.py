# SPDX-License-Identifier: Apache-2.0
"""No request to a store follows a redirect: no response can send bytes or tokens to another host."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from swansong_bucket.errors import Permanent, StoreError
from swansong_bucket.stores.base import ObjectInfo, ObjectStore

from testkit import service_account
from testkit.raw_server import Peer, RawServer, Request, answering
from testkit.store_backends import every_call, store_at

STATUSES = (301, 302, 303, 307, 308)


class Places:
    """A trusted TLS server that redirects all requests, and plain ones that record them."""

    def __init__(self, stack: ExitStack, ca: Path, pem: Path) -> None:
        self.got: list[Request] = []
        self.redirected: list[Request] = []
        self.status = 307
        self.headers: tuple[str, ...] = ()
        self.elsewhere = stack.enter_context(RawServer(self._note))
        self.store = stack.enter_context(RawServer(self._redirect, pem))
        self.ca = ca

    def _note(self, peer: Peer) -> None:
        while (request := peer.request()) is not None:
            self.got.append(request)
            peer.answer(200, b"{}", 'ETag: "x"')

    def _redirect(self, peer: Peer) -> None:
        while (request := peer.request()) is not None:
            self.redirected.append(request)
            location = f"Location: {self.elsewhere.url}{request.line.split()[1]}"
            code = b"<Error><Code>TemporaryRedirect</Code></Error>"
            peer.answer(self.status, code, location, *self.headers)


@pytest.fixture
def places(certificates: tuple[Path, Path], cloud_environment: None) -> Iterator[Places]:
    with ExitStack() as stack:
        yield Places(stack, *certificates)


@pytest.fixture
def token_desk(
    tmp_path: Path,
    certificates: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    cloud_environment: None,
) -> Iterator[Callable[[str], None]]:
    """Sets the credentials to a service account with a token server at an address."""
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "account.json"))
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificates[0]))

    def at(url: str) -> None:
        service_account.write(tmp_path / "account.json", f"{url}/token")

    token = {"access_token": "secret-token", "expires_in": 3600, "token_type": "Bearer"}
    script = answering(200, json.dumps(token).encode(), "Content-Type: application/json")
    with RawServer(script, certificates[1]) as desk:
        at(desk.url)
        yield at


def deletes_nothing(store: ObjectStore) -> bool:
    """Whether a request that deletes several objects fails, or says why each of them stays."""
    try:
        return store.delete_many([ObjectInfo("key", 3)]).keys() == {"key"}
    except StoreError:
        return True


@pytest.mark.fault("S17", "O07")
@pytest.mark.parametrize("status", STATUSES)
def test_gcs_follows_no_redirect(
    places: Places, token_desk: Callable[[str], None], status: int
) -> None:
    """From https to http on another host: no call follows, and no token or byte of a shard arrives."""
    places.status = status
    store = store_at("gs://bucket/prefix", places.store.url, ca_bundle=places.ca)
    settings = {"settings": store.settings.lifecycle_rules}
    for name, call in {**every_call(store), **settings}.items():
        with pytest.raises(Permanent) as caught:
            call()
        assert "Redirects are not followed" in caught.value.hint, name
        assert places.redirected, f"{name} sent no request"
        assert all(request.header("authorization") for request in places.redirected)
        places.redirected.clear()
    assert deletes_nothing(store)
    assert places.elsewhere.accepted == 0
    assert places.got == []


@pytest.mark.fault("S17", "O07")
@pytest.mark.parametrize(
    ("status", "region"),
    [
        *((status, None) for status in STATUSES),
        *((307, region) for region in ("us-east-1", "evil.example/", "x" * 100, "a@evil.example#")),
        *((status, "eu-west-1") for status in (301, 307)),
    ],
)
def test_s3_follows_no_redirect(places: Places, status: int, region: str | None) -> None:
    """A redirect can only name another region of the same store, never an address or host."""
    places.status = status
    places.headers = () if region is None else (f"x-amz-bucket-region: {region}",)
    store = store_at(
        "s3://bucket/prefix", places.store.url, region="us-east-1", ca_bundle=places.ca
    )
    for name, call in every_call(store).items():
        with pytest.raises(StoreError) as caught:
            call()
        if region != "eu-west-1":
            assert isinstance(caught.value, Permanent)
            assert "store.region" in caught.value.hint
        assert places.redirected, f"{name} sent no request"
        places.redirected.clear()
    assert deletes_nothing(store)
    assert places.elsewhere.accepted == 0
    assert places.got == []


@pytest.mark.fault("S17", "O05")
def test_a_token_request_follows_no_redirect(
    places: Places, token_desk: Callable[[str], None]
) -> None:
    """A token server cannot pass our signed request to another host."""
    token_desk(places.store.url)
    store = store_at("gs://bucket/prefix", places.store.url, ca_bundle=places.ca)
    for status in (301, 307):
        places.status = status
        for call in (store.warm, lambda: store.put("key", b"1"), lambda: list(store.list(""))):
            with pytest.raises(StoreError, match="credentials"):
                call()
    assert {request.line.split()[1] for request in places.redirected} == {"/token"}
    assert places.elsewhere.accepted == 0


@pytest.mark.fault("S17")
def test_the_address_of_a_bucket_is_that_of_its_region(
    monkeypatch: pytest.MonkeyPatch, cloud_environment: None
) -> None:
    """Without an endpoint the host is that of the region, below amazonaws.com, over TLS."""
    for region, host in (
        ("us-east-1", "s3.amazonaws.com"),
        ("eu-west-1", "s3.eu-west-1.amazonaws.com"),
        ("no-such-region-7", "s3.no-such-region-7.amazonaws.com"),
    ):
        store = store_at("s3://bucket/prefix", region=region)
        assert store._access.route().endpoint == f"https://bucket.{host}"
