# SPDX-License-Identifier: Apache-2.0
"""GCS beyond the contract: tokens, checksums in responses, emulator hosts."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import parse_qs

import pytest
from swansong_bucket.errors import ConfigError, Exists, Permanent, Transient
from swansong_bucket.stores import credentials
from swansong_bucket.stores.base import Body
from swansong_bucket.stores.gcs.store import GcsStore

from testkit import service_account
from testkit.emulators.process import EmulatorProcess
from testkit.raw_server import Peer, RawServer, answering
from testkit.store_backends import BUCKET, MIB, Cloud, retrying, store_at
from testkit.waiting import in_threads

LARGE = 2 * MIB + 17
"""More than a window: its checksum is compared with the response."""


class TokenDesk:
    """The token server of a service account, which issues t1, t2, ...

    Args:
        path: of the key file of the account.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._handed = 0
        self.asked = 0
        """Number of token requests."""
        self.life_s = 3600
        self.revoked: set[str] = set()
        """Ids of revoked keys."""
        self.server = RawServer(self._hand_out)
        self.rotate("1")

    def rotate(self, key_id: str) -> None:
        """Replace the file by one with another key id."""
        service_account.write(self._path, f"{self.server.url}/token", key_id)

    def _hand_out(self, peer: Peer) -> None:
        while (request := peer.request()) is not None:
            head = parse_qs(request.body.decode())["assertion"][0].partition(".")[0]
            key_id = json.loads(base64.urlsafe_b64decode(head + "=" * (-len(head) % 4)))["kid"]
            with self._lock:
                self.asked += 1
                if key_id in self.revoked:
                    peer.answer(400, b'{"error": "invalid_grant"}')
                    continue
                self._handed += 1
                token = {"access_token": f"t{self._handed}", "token_type": "Bearer"}
            peer.answer(200, json.dumps({**token, "expires_in": self.life_s}).encode())


@pytest.fixture
def desk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cloud_environment: None
) -> Iterator[TokenDesk]:
    """Default credentials from a service account's file."""
    desk = TokenDesk(tmp_path / "account.json")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "account.json"))
    with desk.server:
        yield desk


@pytest.fixture
def gcs(open_cloud: Callable[[str], Cloud]) -> Cloud:
    return open_cloud("gcs")


@pytest.fixture
def gcs_tls(open_cloud: Callable[[str], Cloud]) -> Cloud:
    return open_cloud("gcs-tls")


# ---------------------------------------------------------------- tokens


def test_a_service_account(gcs_tls: Cloud, desk: TokenDesk) -> None:
    """Every request to either interface has the one token that was fetched."""
    gcs_tls.order("token", valid="t1")
    store = gcs_tls.open()
    store.warm()
    store.put("small", b"1")
    store.create("large", Body(bytes(LARGE)))
    assert store.get("small") == b"1"
    assert [info.key for info in store.list("")] == ["large", "small"]
    store.warm()
    assert desk.asked == 1


@pytest.mark.fault("O05")
def test_a_token_that_expires_soon_is_renewed_before_a_flush(
    gcs_tls: Cloud, desk: TokenDesk
) -> None:
    """One token serves all threads.  While the token server fails, the old token is used."""
    desk.life_s = 120
    store = gcs_tls.open()
    in_threads(8, lambda _: store.check())
    hand_out, desk.server.script = desk.server.script, lambda _peer: None
    with pytest.raises(Transient):
        store.warm()
    store.create("shard", Body(bytes(LARGE)))
    assert desk.asked == 1
    desk.server.script, desk.life_s = hand_out, 3600
    store.warm()
    store.warm()
    assert desk.asked == 2


@pytest.mark.fault("O05")
@pytest.mark.parametrize("found_by", ["a refused token", "an expired token"])
def test_a_rotated_account_key_is_read_again(
    gcs_tls: Cloud, desk: TokenDesk, monkeypatch: pytest.MonkeyPatch, found_by: str
) -> None:
    """Without a new file the refusal is Permanent, after few token requests; a new file ends it."""
    if found_by == "an expired token":
        desk.life_s = 0
    else:
        gcs_tls.order("token", valid="t1")
    monkeypatch.setattr(credentials, "_PAUSE_S", 3600.0)
    store = gcs_tls.open()
    store.create("first", Body(b"1"))
    desk.revoked = {"1"}
    before = desk.asked
    if found_by == "a refused token":
        gcs_tls.order("token", valid="t2")
    for _ in range(5):
        with pytest.raises(Permanent) as caught:
            store.create("second", Body(b"2"))
        assert "service account" in caught.value.hint
    assert desk.asked <= before + 2
    desk.rotate("2")
    monkeypatch.setattr(credentials, "_PAUSE_S", 0.0)
    retrying(store).create("second", Body(b"2"))
    assert store.get("second") == b"2"


@pytest.mark.fault("O05")
def test_an_account_that_lacks_a_right_may_have_been_replaced(
    gcs_tls: Cloud, desk: TokenDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On 403 the file is read again, once: it may be of another account."""
    monkeypatch.setattr(credentials, "_PAUSE_S", 3600.0)
    store = gcs_tls.open()
    store.check()
    gcs_tls.order("answer", status=403, code="AccessDenied", method="PUT", times=1_000_000)
    with pytest.raises(Transient):
        store.create("shard", Body(b"1"))
    for _ in range(3):
        with pytest.raises(Permanent) as caught:
            store.create("shard", Body(b"1"))
        assert "gcp-vm.yaml" in caught.value.hint
        store.check()
    assert desk.asked == 2


def test_no_token_over_plain_http(gcs: Cloud, desk: TokenDesk) -> None:
    """Also if the server requires one: no token is fetched."""
    store = gcs.open()
    store.check()
    gcs.order("token", valid="t1")
    store_calls: list[Callable[[], object]] = [
        lambda: store.create("shard", Body(b"1")),
        lambda: store.put("small", b"1"),
        lambda: list(store.list("")),
        store.warm,
    ]
    for call in store_calls:
        with pytest.raises(Permanent) as caught:
            call()
        assert "service account" in caught.value.hint
    assert desk.asked == 0


def test_the_service_account_of_the_vm(
    gcs_tls: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a file the token is from the metadata server."""
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    with EmulatorProcess("testkit.emulators.gcp_metadata") as metadata:
        host = metadata.url.removeprefix("http://")
        monkeypatch.setenv("GCE_METADATA_HOST", host)
        monkeypatch.setenv("GCE_METADATA_IP", host)
        gcs_tls.order("token", valid="none that it has")
        store = gcs_tls.open()
        with pytest.raises(Permanent):  # it has only the refused one
            store.create("shard", Body(b"1"))
        gcs_tls.order("token", valid="emulated-token-1")
        store.create("shard", Body(b"1"))


# ---------------------------------------------------------------- checksums


@pytest.mark.fault("O13")
def test_a_write_without_a_checksum_in_its_response(gcs: Cloud) -> None:
    """Permanent, for objects of any size: such a store may not verify the bytes."""
    store = gcs.open()
    calls: list[Callable[[], object]] = [
        lambda: store.put("small", b"1"),
        lambda: store.create("chunk", Body(b"1")),
        lambda: store.create("large", Body(bytes(LARGE))),
    ]
    for call in calls:
        gcs.order("spoil", how="without", field="x-goog-hash", method="PUT")
        with pytest.raises(Permanent, match="no checksum") as caught:
            call()
        assert "endpoint" in caught.value.hint


# ---------------------------------------------------------------- a role that may not overwrite


@pytest.fixture(params=["condition", "rights"])
def narrow(request: pytest.FixtureRequest, gcs: Cloud) -> Cloud:
    """GCS with the role of packer/permissions, for either order of its checks."""
    gcs.order("role", delete=0, first=request.param)
    return gcs


@pytest.mark.fault("O11", "O09")
@pytest.mark.parametrize("size_bytes", [0, 1000, LARGE])
def test_a_lost_reply_without_the_right_to_overwrite(narrow: Cloud, size_bytes: int) -> None:
    """The stored shard is compared and counts as stored; nothing is replaced."""
    content = bytes(size_bytes)
    store = narrow.open()
    narrow.order("answer", status=503, method="PUT", match="shard", carry_out=1)
    retrying(store).create("shard", Body(content))
    asked = [method for method, target in narrow.requests() if "shard" in target]
    assert asked[:2] == ["PUT", "PUT"], "sent, refused"
    assert set(asked[2:]) == {"GET"}, "asked for"
    assert store.get("shard") == content
    with pytest.raises(Exists):
        store.create("shard", Body(content + b"1"))
    assert store.get("shard") == content


def test_a_missing_right(gcs: Cloud) -> None:
    """403 for a missing object is an error: the shard must not count as stored."""
    store = gcs.open()
    calls: list[Callable[[], object]] = [
        lambda: store.create("shard", Body(b"1")),
        lambda: store.put("claim", b"1", if_absent=True),
    ]
    for call in calls:
        gcs.order("answer", status=403, code="AccessDenied")
        with pytest.raises(Permanent) as caught:
            call()
        assert not isinstance(caught.value, Exists)
        assert "gcp-vm.yaml" in caught.value.hint


# ---------------------------------------------------------------- addresses, trust, errors


def test_storage_emulator_host(gcs: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is used if no endpoint is configured, with and without its scheme."""
    server = gcs.server.url
    for shard, named in (("first", server), ("second", server.removeprefix("http://"))):
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", named)
        store = store_at(f"gs://{BUCKET}/{gcs.prefix}")
        store.create(shard, Body(named.encode()))
        store.put("small", b"1")
        assert store.get(shard) == named.encode()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:1")
    assert store_at(f"gs://{BUCKET}/{gcs.prefix}", server).get("small") == b"1"


@pytest.mark.parametrize("endpoint", ["storage", "ftp://storage", "https://", "http://s/path?x"])
def test_an_invalid_endpoint(endpoint: str) -> None:
    """The error names the key of the configuration."""
    with pytest.raises(ConfigError, match=r"store\.endpoint"):
        store_at("gs://bucket/prefix", endpoint)


def test_trusted_certificates(
    gcs_tls: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A custom authority by configuration or environment; the configured one has priority."""

    def use(store: GcsStore) -> None:
        store.create("shard", Body(b"1"))
        store.put("small", b"1")

    where = f"gs://{BUCKET}/{gcs_tls.prefix}"
    for call in (lambda s: s.create("shard", Body(b"1")), lambda s: s.put("small", b"1")):
        with pytest.raises(Permanent) as caught:
            call(store_at(where, gcs_tls.server.url))
        assert "not trusted" in caught.value.hint
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(gcs_tls.ca))
    use(store_at(where, gcs_tls.server.url))
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "nowhere"))
    use(gcs_tls.open())


# ---------------------------------------------------------------- settings of the bucket

MOVES = {"type": "SetStorageClass", "storageClass": "NEARLINE"}
RULES = {"rule": [{"action": MOVES, "condition": {"age": 3}}]}


MANY_RULES = {"rule": 1001 * RULES["rule"]}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        *(
            json.dumps({"kind": "storage#bucket", "lifecycle": lifecycle}).encode()
            for lifecycle in (
                5,
                {"rule": 5},
                {"rule": [5]},
                {"rule": [{"action": 5, "condition": {"age": 3}}]},
                {"rule": [{"action": MOVES, "condition": {"matchesPrefix": 5}}]},
                MANY_RULES,
            )
        ),
    ],
    ids=lambda body: body[:80].decode(),
)
@pytest.mark.usefixtures("cloud_environment")
def test_malformed_settings_are_an_error(body: bytes) -> None:
    """Doctor reports that they cannot be read, and does not fail itself."""
    with RawServer(answering(200, body)) as server, pytest.raises(Transient):
        store_at("gs://bucket/prefix", server.url).settings.lifecycle_rules()
