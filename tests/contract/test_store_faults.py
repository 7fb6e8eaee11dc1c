# SPDX-License-Identifier: Apache-2.0
"""The store rows of the fault matrix, for the retry wrapper around each backend."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from swansongd.errors import Exists, NotFound, StoreError, Transient
from swansongd.stores.base import WINDOW_BYTES, ObjectInfo, ObjectStore, PartReceipt
from swansongd.stores.checksums import crc32c

from testkit.bodies import CountedBody
from testkit.emulators.fault_proxy import FaultProxy, Way
from testkit.emulators.store_control import POINTS
from testkit.store_backends import (
    MIB,
    ONE_EACH,
    PART,
    Cloud,
    get_range,
    in_threads,
    retrying,
    send_part,
    send_parts,
    staged_upload,
)

CONTENT = os.urandom(2 * MIB + 17)
LIMITS: dict[str, Any] = {"connect_timeout_s": 1.0, "read_timeout_s": 0.5}


def careful(cloud: Cloud, **options: object) -> ObjectStore:
    return retrying(cloud.open(**LIMITS), budget_s=30.0, **options)


class Errand:
    """One call of each kind, each with a check of its exact effect."""

    def __init__(self, store: ObjectStore, content: bytes = CONTENT) -> None:
        self.store = store
        self.content = content
        store.put_shard("old", CountedBody(content))
        self.upload, self.receipts = staged_upload(store, content)

    def put(self) -> None:
        self.store.put("small", self.content[:1000])
        assert self.store.get("small") == self.content[:1000]

    def put_shard(self) -> None:
        self.store.put_shard("new", CountedBody(self.content))
        assert get_range(self.store, "new", 0, len(self.content)) == self.content

    def put_part(self) -> None:
        assert send_part(self.store, self.upload, 1, self.content).crc32c == self.receipts[0].crc32c

    def complete(self) -> None:
        self.store.complete(self.upload, self.receipts)
        assert self.store.head("shard") == ObjectInfo("shard", len(self.content))

    def get_range(self) -> None:
        assert get_range(self.store, "old", 1, len(self.content) - 1) == self.content[1:]


CALLS = {
    "put": ("small", ""),
    "put_shard": ("new", "PUT"),
    "put_part": ("partNumber", "PUT"),
    "complete": ("uploadId", "POST"),
    "get_range": ("old", "GET"),
}
"""By call: a part of the target of its requests, and the method if that is ambiguous."""


@pytest.mark.fault("O01", "O11")
@ONE_EACH
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("point", POINTS)
def test_a_reset_at_every_point(cloud: Cloud, point: str, call: str) -> None:
    """After a reset at any point, also after the effect, the retry succeeds."""
    errand = Errand(careful(cloud))
    match, method = CALLS[call]
    cloud.order("break", kind="reset", at=point, match=match, method=method)
    getattr(errand, call)()


@pytest.mark.fault("O02")
@pytest.mark.parametrize(
    ("call", "point"),
    [
        ("put_shard", "mid_body"),
        ("put_part", "mid_body"),
        ("put_part", "before_answer"),
        ("complete", "before_answer"),
        ("get_range", "in_answer"),
    ],
)
def test_a_stall(cloud: Cloud, call: str, point: str) -> None:
    """A stall at any point is detected, and the request is repeated on another connection."""
    errand = Errand(careful(cloud))
    match, method = CALLS[call]
    cloud.order("break", kind="stall", at=point, match=match, method=method)
    began = time.monotonic()
    getattr(errand, call)()
    assert time.monotonic() - began < 15


@pytest.mark.fault("O04")
def test_retry_after_is_respected(cloud: Cloud) -> None:
    """No request is sent before that time; then all calls succeed."""
    store = careful(cloud)
    store.check()
    cloud.order("answer", status=503, code="SlowDown", retry_after_s=1)
    began = time.monotonic()
    store.put("key", b"content")
    assert time.monotonic() - began >= 1.0
    assert store.get("key") == b"content"


@pytest.mark.fault("O04")
def test_the_deadline_is_stronger_than_retry_after(cloud: Cloud) -> None:
    """With a Retry-After of an hour, the call still ends at the deadline."""
    bare = cloud.open(**LIMITS)
    bare.check()
    cloud.order("outage", seconds=60, retry_after_s=3600)
    give_up = time.monotonic() + 0.5
    with pytest.raises(Transient):
        retrying(bare, give_up_mono_s=lambda: give_up).put("key", b"content")
    assert time.monotonic() - give_up < 5


@pytest.mark.fault("O04")
def test_a_storm_of_refusals(cloud: Cloud) -> None:
    """Eight senders, every second request refused: all parts arrive unchanged."""
    store = careful(cloud)
    content = os.urandom(7 * PART + 1)
    upload = store.begin("shard", len(content), PART)
    receipts: dict[int, PartReceipt] = {}
    cloud.order("answer", status=503, code="SlowDown", match="partNumber", times=8)

    def send(thread: int) -> None:
        number = thread + 1
        piece = content[thread * PART : number * PART]
        receipts[number] = send_part(store, upload, number, piece)

    in_threads(8, send)
    store.complete(upload, [receipts[number] for number in range(1, 9)])
    assert get_range(store, "shard", 0, len(content)) == content


@pytest.mark.fault("O10")
@ONE_EACH
def test_a_race_of_two_creates(cloud: Cloud) -> None:
    """409: the store could not decide the race.  After retries exactly one of them has the key."""
    store = careful(cloud)
    race = {"status": 409, "code": "ConditionalRequestConflict", "match": ""}
    cloud.order("answer", **race, times=2)
    store.put("claim", b"ours", if_absent=True)
    cloud.order("answer", **race)
    with pytest.raises(Exists):
        store.put("claim", b"theirs", if_absent=True)
    cloud.order("answer", **race, carry_out=1)  # a lost reply: the caller reads it back
    with pytest.raises(Exists):
        store.put("other", b"ours", if_absent=True)
    assert (store.get("claim"), store.get("other")) == (b"ours", b"ours")
    cloud.order("answer", **race, carry_out=1)
    store.put_shard("shard", CountedBody(CONTENT))
    assert get_range(store, "shard", 0, len(CONTENT)) == CONTENT


@pytest.mark.fault("O17")
@ONE_EACH
@pytest.mark.parametrize("way", ["up", "down"])
def test_a_path_that_drops_large_packets(cloud: Cloud, proxy: FaultProxy, way: Way) -> None:
    """Large requests stall: detected in time, nothing counts as stored, and it ends with the fault."""
    through = cloud.open(cloud.by(proxy), **LIMITS)
    store = retrying(through, budget_s=30.0)
    store.put_shard("old", CountedBody(CONTENT))
    through.check()
    proxy.stall(way, 6000 if cloud.ca else 1400)  # TLS needs a part of it
    if way == "up" and not cloud.ca:
        assert store.head("old") == ObjectInfo("old", len(CONTENT)), "small requests get through"
    give_up = time.monotonic() + 2
    limited = retrying(through, give_up_mono_s=lambda: give_up)
    large: dict[Way, Callable[[], object]] = {
        "up": lambda: limited.put_shard("new", CountedBody(CONTENT)),
        "down": lambda: get_range(limited, "old", 0, len(CONTENT)),
    }
    with pytest.raises(Transient):
        large[way]()
    assert time.monotonic() - give_up < 5
    assert proxy.hits
    proxy.forward()
    assert store.head("new") is None
    store.put_shard("new", CountedBody(CONTENT))
    assert get_range(store, "new", 0, len(CONTENT)) == CONTENT


@pytest.mark.fault("O04")
def test_a_storm_of_refusals_while_reading(cloud: Cloud) -> None:
    """Eight readers, each refused twice: every range arrives at its place."""
    store = careful(cloud)
    content = os.urandom(8 * MIB)
    store.put_shard("shard", CountedBody(content))
    cloud.order("answer", status=503, code="SlowDown", method="GET", match="shard", times=16)
    pieces: dict[int, bytes] = {}

    def read(thread: int) -> None:
        pieces[thread] = get_range(store, "shard", thread * MIB, MIB)

    in_threads(8, read)
    assert b"".join(pieces[number] for number in range(8)) == content


@pytest.mark.fault("O12")
@pytest.mark.parametrize("call", ["put_shard", "put_part", "complete"])
@pytest.mark.parametrize("code", ["InternalError", "SlowDown"])
def test_an_error_in_a_200_response_is_retried(cloud: Cloud, code: str, call: str) -> None:
    """The request has failed; the retry succeeds."""
    errand = Errand(careful(cloud))
    match, method = CALLS[call]
    cloud.order("answer", status=200, code=code, method=method, match=match)
    getattr(errand, call)()


@pytest.mark.fault("O11")
def test_a_shard_whose_reply_was_lost(cloud: Cloud) -> None:
    """The retry is refused, the object is compared, and it counts as stored."""
    store = careful(cloud)
    cloud.order("clear")
    cloud.order("answer", status=503, method="PUT", match="shard", carry_out=1)
    body = CountedBody(CONTENT)
    assert store.put_shard("shard", body) == crc32c(CONTENT)
    asked = [method for method, target in cloud.requests() if "shard" in target]
    assert asked == ["PUT", "PUT", "HEAD" if cloud.is_s3 else "GET"]
    assert get_range(store, "shard", 0, len(CONTENT)) == CONTENT


@pytest.mark.fault("O11")
@ONE_EACH
def test_a_completion_whose_reply_was_lost_is_decided_by_checksum(cloud: Cloud) -> None:
    """An object of the right size with other bytes does not count as ours."""
    store = careful(cloud)
    upload, receipts = staged_upload(store, CONTENT)
    cloud.order("answer", status=503, method="POST", match="uploadId", carry_out=1)
    store.complete(upload, receipts)
    assert get_range(store, "shard", 0, len(CONTENT)) == CONTENT
    store.complete(upload, receipts)
    store.delete("shard")
    store.put_shard("shard", CountedBody(CONTENT[:-1] + bytes([CONTENT[-1] ^ 1])))
    with pytest.raises(NotFound):
        store.complete(upload, receipts)


@pytest.mark.fault("O13")
@pytest.mark.parametrize("call", ["put", "put_shard", "put_part"])
def test_a_bit_that_changes_in_transit(cloud: Cloud, call: str) -> None:
    """The store refuses a body with a wrong checksum, and the body is sent again."""
    # GCS compares larger bodies afterwards: tests/contract/test_store_gcs.py.
    is_small = call == "put_shard" and not cloud.is_s3
    errand = Errand(careful(cloud), CONTENT[:WINDOW_BYTES] if is_small else CONTENT)
    match, _ = CALLS[call]
    cloud.order("flip", match=match)
    getattr(errand, call)()


@pytest.mark.fault("O11", "O19")
def test_an_upload_that_the_store_forgot(cloud: Cloud) -> None:
    """Every call for it raises NotFound immediately: the caller restarts the upload."""
    store = careful(cloud)
    upload, receipts = staged_upload(store, CONTENT)
    cloud.order("forget")
    calls: list[Callable[[], object]] = [
        lambda: send_part(store, upload, 1, CONTENT),
        lambda: store.parts(upload),
        lambda: store.complete(upload, receipts),
    ]
    for call in calls:
        with pytest.raises(NotFound):
            call()
    store.abort(upload.key, upload.upload_id)
    assert store.head("shard") is None


@pytest.mark.fault("O19")
def test_an_abort_that_races_a_part(cloud: Cloud) -> None:
    """The part gets NotFound in any order; no object becomes visible, and no part remains."""
    store = careful(cloud)
    upload = store.begin("shard", PART, PART)
    cloud.order("pace", connection_bytes_per_s=8 * MIB)
    outcomes: list[object] = []

    def send() -> None:
        try:
            outcomes.append(send_part(store, upload, 1, bytes(PART)))
        except StoreError as error:
            outcomes.append(type(error))

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    store.abort(upload.key, upload.upload_id)
    thread.join(20)
    assert not thread.is_alive()
    assert outcomes[0] is NotFound or isinstance(outcomes[0], PartReceipt)
    assert store.head("shard") is None
    assert list(store.uploads("")) == []


@pytest.mark.fault("O03")
def test_a_slow_store_is_not_a_stalled_one(cloud: Cloud) -> None:
    """At a low rate no attempt is cut, and one request is enough."""
    store = retrying(cloud.open())
    upload = store.begin("shard", len(CONTENT), PART)
    cloud.order("clear")
    cloud.order("pace", connection_bytes_per_s=MIB)
    store.complete(upload, [send_part(store, upload, 1, CONTENT)])
    assert len([target for _, target in cloud.requests() if "partNumber" in target]) == 1


@pytest.mark.fault("O21")
def test_no_key_is_written_twice_in_a_second(cloud: Cloud) -> None:
    """A multipart upload writes its object once, far below the rate limit of a key."""
    store = careful(cloud)
    content = os.urandom(3 * PART)
    upload = store.begin("shard", len(content), PART)
    receipts = send_parts(store, upload, content)
    store.complete(upload, receipts)
    asked = [target for _, target in cloud.requests()]
    assert len([target for target in asked if "/shard" in target and "uploadId" not in target]) <= 1


# ---------------------------------------------------------------- credentials in the middle


@pytest.mark.fault("O05")
def test_credentials_that_expire_during_a_flush(
    open_cloud: Callable[[str], Cloud], renewable: Renewable
) -> None:
    """Eight senders are refused; the credentials are fetched about once, and all parts arrive."""
    cloud = open_cloud("s3-tls")
    with renewable(cloud):
        store = retrying(cloud.open(profile="swansong"), budget_s=30.0)
        content = os.urandom(8 * PART)
        upload = store.begin("shard", len(content), PART)
        fetched = renewable.fetched
        renewable.renew(cloud)
        receipts: dict[int, PartReceipt] = {}

        def send(thread: int) -> None:
            piece = content[thread * PART : (thread + 1) * PART]
            receipts[thread + 1] = send_part(store, upload, thread + 1, piece)

        in_threads(8, send)
        store.complete(upload, [receipts[number] for number in range(1, 9)])
        assert get_range(store, "shard", 0, len(content)) == content
        assert renewable.fetched - fetched <= 2


class Renewable:
    """Credentials of a helper program in the AWS configuration, which counts its runs."""

    def __init__(self, folder: os.PathLike[str]) -> None:
        self.folder = os.fspath(folder)
        self._serial = 0

    @property
    def config(self) -> str:
        return f"{self.folder}/config"

    @property
    def fetched(self) -> int:
        path = f"{self.folder}/runs"
        if not os.path.exists(path):
            return 0
        with open(path) as runs:
            return len(runs.readlines())

    def renew(self, cloud: Cloud) -> None:
        """Make the store accept only new credentials."""
        self._serial += 1
        name = f"key{self._serial}"
        with open(f"{self.folder}/answer.new", "w") as answer:
            answer.write(
                f'{{"Version": 1, "AccessKeyId": "{name}", "SecretAccessKey": "secret",'
                f' "SessionToken": "token", "Expiration": "2100-01-01T00:00:00Z"}}'
            )
        os.replace(f"{self.folder}/answer.new", f"{self.folder}/answer")
        cloud.order("credentials", access_key=name, secret_key="secret", session_token="token")

    @contextmanager
    def __call__(self, cloud: Cloud) -> Iterator[None]:
        with open(self.config, "w") as config:
            program = f"sh -c 'echo run >> {self.folder}/runs; cat {self.folder}/answer'"
            config.write(f"[profile swansong]\ncredential_process = {program}\n")
        self.renew(cloud)
        yield


@pytest.fixture
def renewable(tmp_path: os.PathLike[str], monkeypatch: pytest.MonkeyPatch) -> Renewable:
    made = Renewable(tmp_path)
    monkeypatch.setenv("AWS_CONFIG_FILE", made.config)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    return made
