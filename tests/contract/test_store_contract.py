# SPDX-License-Identifier: Apache-2.0
"""Every statement of stores/base.py, for every backend.

tests/unit/stores/test_wrappers.py shows that the wrappers change no call.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from swansong_bucket.config.sections import StoreAccess, StoreConfig
from swansong_bucket.errors import Changed, ConfigError, Exists, NotFound, Permanent
from swansong_bucket.stores.base import DELETED_MAX, Body, ObjectInfo, ObjectStore, all_pages
from swansong_bucket.stores.file.store import FileStore
from swansong_bucket.stores.opening import open_store
from swansong_bucket.stores.remote import RemoteStore

from testkit.store_backends import (
    Cloud,
    every_call,
    get_range,
    lacks,
    retrying,
)
from testkit.waiting import in_threads

# ---------------------------------------------------------------- small objects


def test_get_returns_what_put_stored(store: ObjectStore) -> None:
    """GET returns every byte, HEAD the size; bytes and memoryviews are equivalent.

    Without if_absent the newer content replaces the older one.
    """
    for content in (b"x", b"", bytes(range(256)) * 40):
        store.put("run/one", content)
        store.put("run/two", memoryview(bytearray(content)))
        assert store.get("run/one") == store.get("run/two") == content
        assert store.head("run/one") == ObjectInfo("run/one", len(content))


@pytest.mark.fault("O08")
def test_create_if_absent_refuses_an_existing_key(
    store: ObjectStore, requires: Callable[[str], None]
) -> None:
    """The second create raises Exists and changes nothing; after a delete it succeeds."""
    requires("create if absent")
    store.put("claim", b"first", if_absent=True)
    with pytest.raises(Exists):
        store.put("claim", b"second", if_absent=True)
    assert store.get("claim") == b"first"
    store.delete("claim")
    store.put("claim", b"third", if_absent=True)
    assert store.get("claim") == b"third"


@pytest.mark.fault("O08")
def test_of_many_creators_exactly_one_wins(
    store: ObjectStore, requires: Callable[[str], None]
) -> None:
    """Eight threads create one key: one succeeds, and the object has its bytes."""
    requires("create if absent")
    winners: list[int] = []

    def create(number: int) -> None:
        try:
            store.put("claims/1", f"writer {number}".encode(), if_absent=True)
            winners.append(number)
        except Exists:
            pass

    in_threads(8, create)
    assert len(winners) == 1
    assert store.get("claims/1") == f"writer {winners[0]}".encode()


def test_missing_objects(store: ObjectStore) -> None:
    """Reads raise NotFound with the key, HEAD returns None; a delete and an empty listing are not errors."""
    with pytest.raises(NotFound, match="absent"):
        store.get("absent")
    with pytest.raises(NotFound):
        get_range(store, "absent", 0, 1)
    assert store.head("absent") is None
    assert list(store.list("absent/")) == []
    store.delete("absent")


def test_an_object_is_not_a_directory(store: ObjectStore, requires: Callable[[str], None]) -> None:
    """A prefix of a key is not an object, and a key below an object is not one either."""
    requires("flat keys")
    store.put("a/b/c", b"1")
    assert store.head("a/b") is None
    assert store.head("a/b/c/d") is None
    store.delete("a/b")
    with pytest.raises(NotFound):
        store.get("a/b")
    with pytest.raises(NotFound):
        store.get("a/b/c/d")
    assert store.get("a/b/c") == b"1"


def test_delete(store: ObjectStore) -> None:
    """A deleted object is gone, its neighbours are not, and a second delete is not an error."""
    store.put("dir/one", b"1")
    store.put("dir/two", b"2")
    store.delete("dir/one")
    store.delete("dir/one")
    assert [info.key for info in store.list("")] == ["dir/two"]
    store.delete("dir/two")
    store.put("dir/two", b"again")
    assert store.get("dir/two") == b"again"


def test_a_conditional_delete_deletes_only_the_listed_object(
    store: ObjectStore, requires: Callable[[str], None]
) -> None:
    """An object that was replaced after the listing stays, and Changed is raised."""
    requires("conditional delete")
    store.put("key", b"old")
    [listed] = store.list("")
    assert listed.tag
    store.put("key", b"newer")
    with pytest.raises(Changed):
        store.delete("key", if_tag=listed.tag)
    assert store.get("key") == b"newer"
    found = store.head("key")
    assert found is not None
    store.delete("key", if_tag=found.tag)
    assert store.head("key") is None
    store.delete("key", if_tag=found.tag)


def test_listings_and_head_give_one_tag_and_one_age(store: ObjectStore) -> None:
    """The tags are equal, and the age counts from the write by the store's clock."""
    store.put("key", b"content")
    [listed] = store.list("")
    found = store.head("key")
    assert found is not None
    assert listed.tag == found.tag != ""
    for info in (listed, found):
        assert info.age_s is not None
        assert 0 <= info.age_s < 60


def test_delete_many_deletes_all_and_names_what_remains(
    store: ObjectStore, requires: Callable[[str], None]
) -> None:
    """Many objects go in one call; a replaced one remains, a missing one is not an error."""
    keys = [f"dir/{number} & <ü>+%20" for number in range(5)]
    for key in keys:
        store.put(key, b"old")
    infos = sorted(store.list("dir/"), key=lambda info: info.key)
    store.delete(keys[1])
    assert store.delete_many(infos[:3]) == {}
    assert sorted(info.key for info in store.list("")) == sorted(keys[3:])
    requires("conditional deletes of many")
    store.put(keys[3], b"newer")
    assert list(store.delete_many(infos[3:])) == [keys[3]]
    assert [info.key for info in store.list("")] == [keys[3]]
    assert store.delete_many([]) == {}


def test_delete_many_has_a_limit(store: ObjectStore) -> None:
    """More objects than a store accepts in one request are refused before any is deleted."""
    store.put("key", b"content")
    with pytest.raises(Permanent):
        store.delete_many([ObjectInfo("key", 7)] * (DELETED_MAX + 1))
    assert store.get("key") == b"content"


def test_no_retention_by_default(store: ObjectStore) -> None:
    """Without a retention, neither an object nor a missing one is locked, and a delete deletes."""
    store.put("key", b"content")
    assert store.lock("key") is None
    assert store.lock("absent") is None
    store.delete("key")
    assert store.head("key") is None


def test_get_refuses_a_large_object(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object above the limit raises Permanent before it fills the memory."""
    backend = RemoteStore if isinstance(store, RemoteStore) else type(store)
    monkeypatch.setattr(sys.modules[backend.__module__], "GET_BYTES_MAX", 1000)
    store.put("small", b"x" * 1000)
    store.put("large", b"x" * 1001)
    assert len(store.get("small")) == 1000
    with pytest.raises(Permanent):
        store.get("large")


KEYS = ["plain", "with space/a b", "ümläut/日本", "a+b=c@d,e.f-g_h", "per%20cent/100%", "(x)'&y!"]


def test_keys_of_every_kind(store: ObjectStore) -> None:
    """A listing returns the key that was stored, and the key names one object only."""
    for key in KEYS:
        store.put(key, b"content")
        assert list(store.list("")) == [ObjectInfo(key, 7)]
        assert store.get(key) == b"content"
        assert store.head(key) == ObjectInfo(key, 7)
        store.delete(key)
        store.create(key, Body(b"new"))
        assert store.get(key) == b"new"
        store.delete(key)
        assert list(store.list("")) == []


# ---------------------------------------------------------------- ranges


def test_ranges(store: ObjectStore) -> None:
    """Exactly the requested bytes, anywhere in the object."""
    content = os.urandom(300_000)
    store.put("shard", content)
    for offset, count in (
        (0, 300_000),
        (0, 1),
        (299_999, 1),
        (7, 250_000),
        (1000, 0),
        (300_000, 0),
    ):
        assert get_range(store, "shard", offset, count) == content[offset : offset + count]


def test_a_range_beyond_the_object(store: ObjectStore) -> None:
    """A range that is not within the object raises Permanent, also if its beginning is."""
    store.put("shard", b"0123456789")
    for offset, count in ((0, 11), (5, 6), (10, 1), (50, 1)):
        with pytest.raises(Permanent) as caught:
            get_range(store, "shard", offset, count)
        assert not isinstance(caught.value, NotFound), (offset, count)


# ---------------------------------------------------------------- listing


def test_a_listing_names_whole_keys(store: ObjectStore) -> None:
    """Each key once with its size, without directories, in any order."""
    keys = ["a", "a-b/c", "a.b", "a/b", "a/b-c", "a/b/c", "a0", "b/00002", "b/00010", "z", "é"]
    keys.remove("a")  # a file system cannot have both "a" and "a/b"
    keys.remove("a/b")
    for size_bytes, key in enumerate(reversed(keys)):
        store.put(key, b"x" * size_bytes)
    listed = list(store.list(""))
    assert sorted(info.key for info in listed) == sorted(keys)
    assert {info.key: info.size_bytes for info in listed} == {
        key: size_bytes for size_bytes, key in enumerate(reversed(keys))
    }


def test_a_prefix_is_a_prefix_of_the_key(store: ObjectStore) -> None:
    """A prefix is not a directory: it may end within a name."""
    for key in ("run/commits/1", "run/commits/2", "run/commits-old/1", "run-2/commits/1"):
        store.put(key, b"")
    commits = {"run/commits/1", "run/commits/2"}
    assert {info.key for info in store.list("run/commits")} == {"run/commits-old/1", *commits}
    assert {info.key for info in store.list("run/commits/")} == commits
    assert {info.key for info in store.list("run/commits/2")} == {"run/commits/2"}


def test_a_listing_starts_after_a_key(store: ObjectStore) -> None:
    """Only greater keys in byte order, whether or not the store has the key itself.

    Keys that are not greater in the order of directories may be left out.
    """
    keys = ["b/1/x", "b/2.json", "b/2/x", "b/3/x/y", "b/é", "c"]
    for key in ("a", *keys):
        store.put(key, b"")
    for after in (
        "",
        "b/1/x",
        "b/1",
        "b/1z",
        "b/2",
        "b/2.json",
        "b/2/",
        "b/3/x/z",
        "b/z",
        "c",
        "é",
    ):
        found = {info.key for info in store.list("b/", after=after)}
        greater = {key for key in keys[:-1] if key > after}
        assert found <= greater, after
        names = after.split("/")
        certain = {
            key for key in greater if key.split("/") > names and not key.startswith(f"{after}/")
        }
        assert found >= certain, after


def test_folders_are_the_names_before_a_slash(store: ObjectStore) -> None:
    """Each name of a folder, for any number of keys below it; objects beside the folders are left out."""
    for key in ("a/1", "a/2/3", "a-b/1", "b.c/d/1", "é/1", "object"):
        store.put(key, b"")

    def folders(prefix: str) -> set[str]:
        return set(all_pages("folders", lambda token: store.folders(prefix, token)))

    assert folders("") == {"a", "a-b", "b.c", "é"}
    assert folders("a/") == {"2"}
    assert folders("none/") == set()


def test_stores_with_different_prefixes_are_separate(cloud: Cloud) -> None:
    """Also if one prefix begins with the other one."""
    one, other = cloud.open(), replace(cloud, prefix=f"{cloud.prefix}-other").open()
    one.put("key", b"1")
    other.put("other", b"2")
    assert [info.key for info in one.list("")] == ["key"]
    assert [info.key for info in other.list("")] == ["other"]


def test_a_listing_of_more_than_one_page(store: ObjectStore) -> None:
    """More than a thousand keys are listed completely, for any order of "/" and "."."""
    keys = [f"shard-{number // 100}/{number:05d}" for number in range(995)]
    keys = sorted([*keys, *(f"shard-{number}.json" for number in range(10))])

    patient = retrying(store, budget_s=10.0)  # rclone may answer 500 while it makes a directory

    def create(number: int) -> None:
        for key in keys[number::8]:
            patient.put(key, b"")

    in_threads(8, create)
    assert sorted(info.key for info in store.list("shard-")) == keys


# ---------------------------------------------------------------- the store itself


def test_check_passes_with_a_working_store(store: ObjectStore) -> None:
    """It raises nothing and creates no object."""
    store.check()
    assert list(store.list("")) == []


def every_call_is_not_found(store: ObjectStore, hint: str) -> None:
    for name, call in every_call(store).items():
        with pytest.raises(NotFound) as caught:
            call()
        assert hint in caught.value.hint, name


@pytest.mark.fault("O07")
def test_a_missing_bucket(cloud: Cloud) -> None:
    """Every call raises NotFound with a hint, and never means a missing object."""
    every_call_is_not_found(cloud.open(bucket="no-such-bucket"), "store.url")


def test_a_missing_directory_is_like_a_missing_bucket(tmp_path: Path) -> None:
    """Each call creates nothing; with the directory it works."""
    store = FileStore((tmp_path / "not" / "there").as_uri())
    every_call_is_not_found(store, "install -d")
    assert os.listdir(tmp_path) == []
    (tmp_path / "not" / "there").mkdir(parents=True)
    store.check()
    assert list(store.list("")) == []


def test_many_threads(store: ObjectStore, server_name: str) -> None:
    """Eight threads with puts, reads, ranges and listings do not affect each other."""

    if "deletes beside puts" in lacks(server_name):
        store = retrying(store)

    def work(number: int) -> None:
        for turn in range(5):
            key, content = f"{number}/{turn}", os.urandom(20_000)
            store.put(key, content)
            assert get_range(store, key, 5_000, 10_000) == content[5_000:15_000]
            assert store.get(key) == content
            assert ObjectInfo(key, 20_000) in list(store.list(f"{number}/"))
            store.delete(key)

    in_threads(8, work)
    assert list(store.list("")) == []


# ---------------------------------------------------------------- opening


def test_open_store_chooses_by_the_scheme(tmp_path: Path) -> None:
    """Each scheme has its backend; opening sends no request."""
    assert open_store(StoreConfig(url=tmp_path.as_uri())).url == tmp_path.as_uri()
    s3 = open_store(StoreConfig(url="s3://bucket/a/b", region="us-west-2"))
    assert s3.url == "s3://bucket/a/b"
    assert open_store(StoreConfig(url="gs://bucket")).url == "gs://bucket"


@pytest.mark.parametrize(
    ("url", "key", "value"),
    [
        ("s3://bucket", "ca_bundle", Path("/nonexistent.pem")),
        ("gs://bucket", "ca_bundle", Path("/nonexistent.pem")),
        ("gs://bucket", "endpoint", "https://host/path"),
    ],
)
def test_a_wrong_option_is_refused_when_the_store_is_opened(url: str, key: str, value: Any) -> None:
    """The error names the key of the configuration."""
    with pytest.raises(ConfigError, match=rf"^store\.{key}: "):
        open_store(StoreAccess(url=url, **{key: value}))
