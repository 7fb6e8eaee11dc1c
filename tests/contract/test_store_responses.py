# SPDX-License-Identifier: Apache-2.0
"""A response that is truncated, empty or foreign is never a success, and never means a missing object."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from swansong_bucket.errors import Permanent, Transient
from swansong_bucket.stores.base import Body, ObjectInfo, ObjectStore, all_pages

from testkit.emulators.store_control import SPOILS
from testkit.memory_store import MemoryStore
from testkit.store_backends import (
    Cloud,
    get_range,
    retrying,
)

CONTENT = os.urandom(200_000)
KEYS = [f"run/commits/00000001/{step:012d}" for step in range(7)]


def query(cloud: Cloud) -> str:
    """A part of the target of a listing."""
    return "list-type=2" if cloud.is_s3 else "/o?prefix"


# ---------------------------------------------------------------- listings in any order


def test_a_listing_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket with too many keys is an error, before it fills the memory."""
    monkeypatch.setattr("swansong_bucket.stores.base.LISTED_MAX", 1000)
    store = MemoryStore()
    store.objects = {f"key-{number}": b"" for number in range(1001)}
    with pytest.raises(Permanent, match="more than 1000"):
        list(store.list(""))


@pytest.mark.fault("O15")
def test_servers_that_list_in_any_order(cloud: Cloud) -> None:
    """The same from servers: several pages, in another order than that of bytes, with duplicates."""
    store = cloud.open()
    names = ["rank-00000.json", "rank-00000/model", "rank-00000/optimizer", "z", "a", "é/ +%"]
    for name in names:
        store.put(name, name.encode())
    cloud.order("page", size=2)
    cloud.order("listing", reversed=1, duplicates=1)
    for each in (store, retrying(store)):
        found = list(each.list(""))
        assert sorted(info.key for info in found) == sorted(names)
        assert {info.size_bytes for info in found} == {len(name.encode()) for name in names}
        assert sorted(info.key for info in each.list("rank-")) == sorted(names[:3])


@pytest.mark.fault("O15")
def test_a_server_whose_pages_loop(cloud: Cloud) -> None:
    """Its continuation tokens repeat: the listing is an error after one round."""
    store = cloud.open()
    for key in KEYS[:3]:
        store.put(key, b"1")
    cloud.order("page", size=1)
    cloud.order("listing", loop=1)
    for each in (store, retrying(store)):
        with pytest.raises(Permanent, match="do not end"):
            list(each.list(""))
    assert len(cloud.requests()) < 10


# ---------------------------------------------------------------- answers that are cut

MISSING = {
    "s3": ("IsTruncated", "Key", "Size", "NextContinuationToken"),
    "gcs": ("kind", "name", "size"),
}
"""Required fields of a listing."""


def folders(store: ObjectStore, prefix: str) -> set[str]:
    return set(all_pages("folders", lambda token: store.folders(prefix, token)))


def test_folders_on_several_pages(cloud: Cloud) -> None:
    """All pages are read; a page without its mark is requested again."""
    store = cloud.open()
    for key in KEYS:
        store.put(f"{key}/1", b"1")
    cloud.order("page", size=2)
    prefix = KEYS[0].rpartition("/")[0] + "/"
    assert folders(store, prefix) == {key.removeprefix(prefix) for key in KEYS}
    for field in MISSING["s3" if cloud.is_s3 else "gcs"][:1]:
        cloud.order("spoil", how="without", field=field, match=query(cloud))
        with pytest.raises(Transient, match=r"truncated, or not from a store"):
            folders(store, prefix)


@pytest.mark.fault("O15")
@pytest.mark.parametrize("how", SPOILS)
def test_a_spoilt_listing_is_not_empty(cloud: Cloud, how: str) -> None:
    """Truncated after its headers or within the body, empty, or another page: Transient, then complete."""
    store = cloud.open()
    for key in KEYS:
        store.put(key, b"1")
    cloud.order("page", size=5)
    questions: list[Callable[[ObjectStore], object]] = [
        lambda each: sorted(info.key for info in each.list("run/")) == KEYS,
        lambda each: folders(each, "run/") == {"commits"},
        lambda each: each.check() is None,
        lambda each: each.head("absent") is None,
    ]
    for question in questions:
        cloud.order("spoil", how=how, match=query(cloud))
        with pytest.raises(Transient):
            question(store)
        cloud.order("spoil", how=how, match=query(cloud))
        assert question(retrying(store))


@pytest.mark.fault("O15")
def test_a_listing_that_lacks_a_field(cloud: Cloud) -> None:
    """Without a name, a size or the mark of the last page, the page is requested again."""
    store = cloud.open()
    for key in KEYS:
        store.put(key, b"1")
    cloud.order("page", size=5)
    for field in MISSING["s3" if cloud.is_s3 else "gcs"]:
        cloud.order("spoil", how="without", field=field, match=query(cloud))
        with pytest.raises(Transient, match=r"truncated, or not from a store"):
            list(store.list("run/"))
        cloud.order("spoil", how="without", field=field, match=query(cloud))
        assert len(list(retrying(store).list("run/"))) == len(KEYS)


@pytest.mark.fault("O15")
def test_keys_outside_of_the_prefix(open_cloud: Callable[[str], Cloud]) -> None:
    """A server that lists other keys did not process the request."""
    cloud = open_cloud("s3")
    store = cloud.open()
    store.put("other/key", b"1")
    cloud.order("spoil", how="without", field="EncodingType", match=query(cloud))
    assert [info.key for info in store.list("other/")] == ["other/key"]
    document = (
        "<ListBucketResult><IsTruncated>false</IsTruncated><Contents><Key>etc/passwd</Key>"
        "<Size>1</Size></Contents></ListBucketResult>"
    )
    cloud.order("say", body=document, match=query(cloud))
    with pytest.raises(Transient, match="is not below"):
        list(store.list("other/"))


@pytest.mark.fault("O12")
@pytest.mark.parametrize("how", ["cut", "half a body"])
def test_an_object_that_ends_with_the_connection(cloud: Cloud, how: str) -> None:
    """Without a length, half of a manifest looks complete: it is read again."""
    store = cloud.open()
    store.put("manifest", CONTENT)
    for read in (store.get, lambda key: get_range(store, key, 0, len(CONTENT))):
        cloud.order("spoil", how=how, match="manifest", method="GET")
        with pytest.raises(Transient):
            read("manifest")
    cloud.order("spoil", how=how, match="manifest", method="GET")
    assert retrying(store).get("manifest") == CONTENT


@pytest.mark.fault("O12")
@pytest.mark.parametrize("how", [*SPOILS, "without kind", "without name", "without size"])
def test_spoilt_metadata(open_cloud: Callable[[str], Cloud], how: str) -> None:
    """Metadata of GCS must contain the name of the object, and its size."""
    cloud = open_cloud("gcs")
    store = cloud.open()
    store.put("key", CONTENT)
    how, _, field = how.partition(" ") if how.startswith("without") else (how, "", "")
    cloud.order("spoil", how=how, field=field, match="fields=kind,name")
    with pytest.raises(Transient):
        store.head("key")
    assert store.head("key") == ObjectInfo("key", len(CONTENT))


@pytest.mark.fault("O12")
def test_a_head_without_a_length(open_cloud: Callable[[str], Cloud]) -> None:
    """The response to a HEAD must contain the size of the object."""
    cloud = open_cloud("s3")
    store = cloud.open()
    store.put("key", CONTENT)
    cloud.order("spoil", how="cut", method="HEAD")
    with pytest.raises(Transient):
        store.head("key")
    assert store.head("key") == ObjectInfo("key", len(CONTENT))


# ---------------------------------------------------------------- writes


@pytest.mark.fault("O12")
def test_a_write_that_had_no_effect(cloud: Cloud) -> None:
    """A foreign server acknowledges nothing: its page is never a success, and the chunk is sent again."""
    store = cloud.open()
    for body in ("", "<html><body>welcome</body></html>"):
        cloud.order("say", body=body, method="PUT")
        with pytest.raises(Transient):
            store.create("key", Body(CONTENT))
    assert store.head("key") is None
    cloud.order("say", body="ok", method="PUT", times=3)
    retrying(store).create("key", Body(CONTENT))
    assert store.get("key") == CONTENT
