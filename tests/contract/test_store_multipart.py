# SPDX-License-Identifier: Apache-2.0
"""Multipart uploads as in stores/base.py, for every backend."""

from __future__ import annotations

import os
from collections.abc import Callable

import google_crc32c
import pytest
from swansongd.errors import Exists, NotFound, Permanent
from swansongd.stores.base import ObjectInfo, ObjectStore, OpenUpload, PartReceipt, Upload

from testkit.bodies import CountedBody, CountedSink
from testkit.store_backends import PART, get_range, in_threads, send_part, send_parts

PARTS_CONTENT = os.urandom(2 * PART + 12345)


def test_an_upload_is_invisible_until_it_is_complete(store: ObjectStore) -> None:
    """The object does not exist at the start or with all parts; after the completion it is whole."""
    upload = store.begin("shard", len(PARTS_CONTENT), PART)
    receipts = send_parts(store, upload, PARTS_CONTENT)
    assert store.head("shard") is None
    assert list(store.list("")) == []
    with pytest.raises(NotFound):
        store.get("shard")
    store.complete(upload, receipts)
    assert store.head("shard") == ObjectInfo("shard", len(PARTS_CONTENT))
    assert store.get("shard") == PARTS_CONTENT
    assert list(store.list("")) == [ObjectInfo("shard", len(PARTS_CONTENT))]


def test_parts_from_many_threads_in_any_order(store: ObjectStore) -> None:
    """The number of a part, not its time, decides its place."""
    content = os.urandom(3 * PART + 1)
    upload = store.begin("shard", len(content), PART)
    receipts: dict[int, PartReceipt] = {}

    def send(thread: int) -> None:
        number = 4 - thread
        piece = content[(number - 1) * PART : number * PART]
        receipts[number] = send_part(store, upload, number, piece)

    in_threads(4, send)
    store.complete(upload, [receipts[number] for number in (1, 2, 3, 4)])
    assert get_range(store, "shard", 0, len(content)) == content


def test_a_part_sent_again_replaces_the_first(
    store: ObjectStore, requires: Callable[[str], None]
) -> None:
    """The object contains a retried part once, with its last content."""
    requires("parts again")
    content = os.urandom(PART + 10)
    upload = store.begin("shard", len(content), PART)
    send_part(store, upload, 1, bytes(PART))
    last = send_part(store, upload, 2, content[PART:])
    first = send_part(store, upload, 1, content[:PART])
    store.complete(upload, [first, last])
    assert store.get("shard") == content


@pytest.mark.parametrize("size_bytes", [1, PART - 1, PART, PART + 1, 2 * PART])
def test_uploads_around_the_part_size(bare_store: ObjectStore, size_bytes: int) -> None:
    """One short part, one full part, and a last part of one byte are accepted."""
    content = os.urandom(size_bytes)
    upload = bare_store.begin("shard", size_bytes, PART)
    bare_store.complete(upload, send_parts(bare_store, upload, content))
    assert bare_store.get("shard") == content


def test_completion_needs_all_parts(store: ObjectStore) -> None:
    """With a part missing, repeated or out of order, no object becomes visible."""
    upload = store.begin("shard", len(PARTS_CONTENT), PART)
    receipts = send_parts(store, upload, PARTS_CONTENT)
    for wrong in (
        [],
        receipts[:2],
        receipts[1:],
        receipts[::2],
        receipts[::-1],
        receipts + receipts[-1:],
    ):
        with pytest.raises(Permanent):
            store.complete(upload, wrong)
    assert store.head("shard") is None
    store.complete(upload, receipts)
    assert store.get("shard") == PARTS_CONTENT


@pytest.mark.parametrize(("number", "size_bytes"), [(0, PART), (1, PART + 1), (2, 9), (3, 1)])
def test_a_part_has_the_length_of_its_place(
    store: ObjectStore, number: int, size_bytes: int
) -> None:
    """A longer or shorter part is refused."""
    upload = store.begin("shard", PART + 10, PART)
    with pytest.raises(Permanent):
        send_part(store, upload, number, bytes(size_bytes))


@pytest.mark.fault("O11")
def test_completing_twice_is_not_an_error(
    store: ObjectStore, requires: Callable[[str], None]
) -> None:
    """A completion whose reply was lost is repeated, and finds the object."""
    requires("completion again")
    upload = store.begin("shard", 10, PART)
    receipts = send_parts(store, upload, b"0123456789")
    store.complete(upload, receipts)
    store.complete(upload, receipts)
    assert store.get("shard") == b"0123456789"


@pytest.mark.fault("O11")
def test_completing_an_unknown_upload(store: ObjectStore, requires: Callable[[str], None]) -> None:
    """Without the object, or with one of another size, the upload is NotFound."""
    requires("abort")
    requires("unknown completion")
    upload = store.begin("shard", 10, PART)
    receipts = send_parts(store, upload, b"0123456789")
    store.abort(upload.key, upload.upload_id)
    with pytest.raises(NotFound):
        store.complete(upload, receipts)
    store.put("shard", b"another")
    with pytest.raises(NotFound):
        store.complete(upload, receipts)
    assert store.get("shard") == b"another"


def test_an_aborted_upload_is_gone(store: ObjectStore, requires: Callable[[str], None]) -> None:
    """It accepts no more parts, never becomes visible, and can be aborted again."""
    requires("abort")
    upload = store.begin("shard", 10, PART)
    send_parts(store, upload, b"0123456789")
    store.abort(upload.key, upload.upload_id)
    store.abort(upload.key, upload.upload_id)
    with pytest.raises(NotFound):
        send_parts(store, upload, b"0123456789")
    assert store.head("shard") is None
    assert list(store.list("")) == []


def test_two_uploads_of_one_key_do_not_mix(store: ObjectStore) -> None:
    """Two writers of one key: each completion publishes its own bytes."""
    content = {"one": b"1" * 10, "two": b"2" * 10}
    uploads = {name: store.begin("shard", 10, PART) for name in content}
    receipts = {name: send_parts(store, uploads[name], content[name]) for name in content}
    for name, wanted in content.items():
        store.complete(uploads[name], receipts[name])
        assert store.get("shard") == wanted


# ---------------------------------------------------------------- what is there


@pytest.mark.fault("O19")
def test_parts_lists_the_parts_of_the_store(
    store: ObjectStore, requires: Callable[[str], None]
) -> None:
    """Sorted by number; a stored receipt is valid if it is among them."""
    requires("list of parts")
    content = os.urandom(2 * PART + 1)
    upload = store.begin("shard", len(content), PART)
    assert list(store.parts(upload)) == []
    sent = {n: send_part(store, upload, n, content[(n - 1) * PART : n * PART]) for n in (3, 1)}
    told = list(store.parts(upload))
    assert told == [sent[1], sent[3]]
    for part in told:
        if part.crc32c >= 0:
            assert part.crc32c == sent[part.number].crc32c
    send_part(store, upload, 2, content[PART : 2 * PART])
    store.abort(upload.key, upload.upload_id)
    with pytest.raises(NotFound):
        store.parts(upload)


def test_parts_of_an_unknown_upload(store: ObjectStore, requires: Callable[[str], None]) -> None:
    """NotFound."""
    requires("list of parts")
    upload = store.begin("shard", 10, PART)
    store.abort(upload.key, upload.upload_id)
    with pytest.raises(NotFound):
        store.parts(upload)


@pytest.mark.fault("O19")
def test_uploads_lists_uploads_in_progress(
    store: ObjectStore, requires: Callable[[str], None]
) -> None:
    """Below the prefix only, with an age; a listed upload can be aborted."""
    requires("list of uploads")
    first = store.begin("run/a", 10, PART)
    second = store.begin("run/b c+d%20e", 10, PART)
    other = store.begin("runs", 10, PART)
    for upload in (first, second, other):
        send_parts(store, upload, b"0123456789")

    def under_way(prefix: str) -> list[tuple[str, str]]:
        return [(found.key, found.upload_id) for found in store.uploads(prefix)]

    assert sorted(under_way("run/")) == _named(first, second)
    assert sorted(under_way("")) == _named(first, second, other)
    for found in list(store.uploads("run/")):
        assert isinstance(found, OpenUpload)
        store.abort(found.key, found.upload_id)
    assert under_way("") == _named(other)
    store.complete(other, send_parts(store, other, b"0123456789"))
    assert under_way("") == []


def test_the_age_of_an_upload(bare_store: ObjectStore, requires: Callable[[str], None]) -> None:
    """By the store's own clock, so that uploads in progress are not swept."""
    requires("ages")
    bare_store.begin("shard", 10, PART)
    (found,) = bare_store.uploads("")
    assert 0 <= found.age_s < 60


def _named(*uploads: Upload) -> list[tuple[str, str]]:
    return sorted((upload.key, upload.upload_id) for upload in uploads)


# ---------------------------------------------------------------- shards in one request


@pytest.mark.parametrize("size_bytes", [0, 1, 2**20 - 1, 2**20, 2**20 + 1, 3 * 2**20 + 5])
def test_put_shard(store: ObjectStore, size_bytes: int) -> None:
    """Every byte arrives, for any size; the returned checksum is that of the bytes."""
    content = os.urandom(size_bytes)
    assert store.put_shard("shard", CountedBody(content)) == google_crc32c.value(content)
    assert store.head("shard") == ObjectInfo("shard", size_bytes)
    assert get_range(store, "shard", 0, size_bytes) == content
    assert store.put_shard("shard", CountedBody(content)) == google_crc32c.value(content)
    assert get_range(store, "shard", 0, size_bytes) == content


@pytest.mark.fault("O11")
@pytest.mark.parametrize("size_bytes", [5, 2**20 + 5])
def test_put_shard_overwrites_nothing(
    store: ObjectStore, size_bytes: int, requires: Callable[[str], None]
) -> None:
    """An object with other bytes, of the same or another size, does not count as ours and is not replaced."""
    requires("spent names")
    content = os.urandom(size_bytes)
    store.put_shard("shard", CountedBody(content))
    for other in (content[1:] + bytes([content[0] ^ 1]), content + b"1"):
        with pytest.raises(Exists):
            store.put_shard("shard", CountedBody(other))
    assert get_range(store, "shard", 0, size_bytes) == content


def test_receipts_carry_the_checksum_of_what_was_sent(store: ObjectStore) -> None:
    """CRC32C of exactly the part's bytes."""
    upload = store.begin("shard", len(PARTS_CONTENT), PART)
    receipts = send_parts(store, upload, PARTS_CONTENT)
    pieces = [PARTS_CONTENT[at : at + PART] for at in range(0, len(PARTS_CONTENT), PART)]
    assert [part.crc32c for part in receipts] == [google_crc32c.value(piece) for piece in pieces]


class _Trouble(Exception):
    pass


class _BrokenBody(CountedBody):
    """Raises after its first window: the file was truncated during the upload."""

    def read_into(self, window: memoryview) -> None:
        if self._at:
            raise _Trouble
        super().read_into(window)


class _BrokenSink(CountedSink):
    def write(self, window: memoryview) -> None:
        super().write(window)
        raise _Trouble


@pytest.mark.fault("S5")
def test_an_exception_of_a_body_reaches_the_caller(
    store: ObjectStore, requires: Callable[[str], None]
) -> None:
    """Unchanged and without a retry; no object and no part exist, and the store works."""
    content = os.urandom(PART)
    upload = store.begin("shard", PART, PART)
    for send in (
        lambda body: store.put_shard("whole", body),
        lambda body: store.put_part(upload, 1, body),
    ):
        body = _BrokenBody(content)
        with pytest.raises(_Trouble):
            send(body)
        assert body.passes == 1
    requires("cut bodies")
    assert store.head("whole") is None
    store.complete(upload, [send_part(store, upload, 1, content)])
    assert store.get("shard") == content


def test_an_exception_of_a_sink_reaches_the_caller(store: ObjectStore) -> None:
    """Unchanged and without a retry."""
    content = os.urandom(3 * 2**20)
    store.put_shard("shard", CountedBody(content))
    sink = _BrokenSink()
    with pytest.raises(_Trouble):
        store.get_range("shard", 0, len(content), sink)
    assert sink.passes == 1
    assert get_range(store, "shard", 1, len(content) - 1) == content[1:]
