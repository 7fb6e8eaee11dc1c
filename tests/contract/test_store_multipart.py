# SPDX-License-Identifier: Apache-2.0
"""What stores/base.py says of multipart uploads, for every backend."""

from __future__ import annotations

import os

import pytest
from contract.store_backends import PART, in_threads, send_parts
from swansongd.errors import NotFound, Permanent
from swansongd.stores.base import ObjectInfo, ObjectStore, PartReceipt

PARTS_CONTENT = os.urandom(2 * PART + 12345)


def test_an_upload_is_invisible_until_it_is_complete(store: ObjectStore) -> None:
    """Neither begun, nor with all parts there, does the object exist; completed, it is whole."""
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
    """The number says where a part belongs, not when it came."""
    content = os.urandom(3 * PART + 1)
    upload = store.begin("shard", len(content), PART)
    receipts: dict[int, PartReceipt] = {}

    def send(thread: int) -> None:
        number = 4 - thread
        piece = memoryview(content)[(number - 1) * PART : number * PART]
        receipts[number] = store.put_part(upload, number, piece)

    in_threads(4, send)
    store.complete(upload, [receipts[number] for number in (1, 2, 3, 4)])
    into = bytearray(len(content))
    store.get_range("shard", 0, memoryview(into))
    assert into == content


def test_a_part_sent_again_replaces_the_first(store: ObjectStore) -> None:
    """A retried part is in the object once, with its last content."""
    content = os.urandom(PART + 10)
    upload = store.begin("shard", len(content), PART)
    store.put_part(upload, 1, memoryview(bytes(PART)))
    last = store.put_part(upload, 2, memoryview(content)[PART:])
    first = store.put_part(upload, 1, memoryview(content)[:PART])
    store.complete(upload, [first, last])
    assert store.get("shard") == content


@pytest.mark.parametrize("size_bytes", [1, PART - 1, PART, PART + 1, 2 * PART])
def test_uploads_around_the_part_size(bare_store: ObjectStore, size_bytes: int) -> None:
    """One short part, one full part, and a last part of one byte are all legal."""
    content = os.urandom(size_bytes)
    upload = bare_store.begin("shard", size_bytes, PART)
    bare_store.complete(upload, send_parts(bare_store, upload, content))
    assert bare_store.get("shard") == content


def test_completion_wants_all_parts(store: ObjectStore) -> None:
    """With a part missing, twice there or out of order, nothing becomes visible."""
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
    """What would run into the next part, or leave a hole, is refused."""
    upload = store.begin("shard", PART + 10, PART)
    with pytest.raises(Permanent):
        store.put_part(upload, number, memoryview(bytes(size_bytes)))


@pytest.mark.fault("O11")
def test_completing_twice_is_no_error(store: ObjectStore) -> None:
    """A completion whose reply was lost is asked for again, and finds the object there."""
    upload = store.begin("shard", 10, PART)
    receipts = send_parts(store, upload, b"0123456789")
    store.complete(upload, receipts)
    store.complete(upload, receipts)
    assert store.get("shard") == b"0123456789"


@pytest.mark.fault("O11")
def test_completing_what_is_unknown(store: ObjectStore) -> None:
    """Without the object, or with one of another size in its place, the upload is NotFound."""
    upload = store.begin("shard", 10, PART)
    receipts = send_parts(store, upload, b"0123456789")
    store.abort(upload)
    with pytest.raises(NotFound):
        store.complete(upload, receipts)
    store.put("shard", b"another")
    with pytest.raises(NotFound):
        store.complete(upload, receipts)
    assert store.get("shard") == b"another"


def test_an_aborted_upload_is_gone(store: ObjectStore) -> None:
    """It takes no more parts, never becomes visible, and can be aborted again."""
    upload = store.begin("shard", 10, PART)
    send_parts(store, upload, b"0123456789")
    store.abort(upload)
    store.abort(upload)
    with pytest.raises(NotFound):
        send_parts(store, upload, b"0123456789")
    assert store.head("shard") is None
    assert list(store.list("")) == []


def test_two_uploads_of_one_key_do_not_mix(store: ObjectStore) -> None:
    """Two writers of one name: each completion publishes its own bytes, whole."""
    content = {"one": b"1" * 10, "two": b"2" * 10}
    uploads = {name: store.begin("shard", 10, PART) for name in content}
    receipts = {name: send_parts(store, uploads[name], content[name]) for name in content}
    for name, wanted in content.items():
        store.complete(uploads[name], receipts[name])
        assert store.get("shard") == wanted
