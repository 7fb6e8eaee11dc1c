# SPDX-License-Identifier: Apache-2.0
"""Signed records: nothing that another writer creates is seen.  The key: its file, rights and size."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swansong_bucket.errors import ConfigError, CorruptError
from swansong_bucket.format.keys import UNSIGNED, RunKeys
from swansong_bucket.model import CommitRef
from swansong_bucket.runs import catalog, signing
from swansong_bucket.runs.commit import claim_generation, ensure_not_fenced
from swansong_bucket.runs.pins import Pins
from swansong_bucket.runs.signing import SigningKey, signed
from swansong_bucket.stores.base import ObjectInfo

from testkit import committed
from testkit.as_user import DAEMON, GROUP, TRAINER, as_user, place_for_all
from testkit.memory_store import MemoryStore
from testkit.other_users import needs_root
from testkit.records import KEY as RUN_KEY
from testkit.records import farewell

KEY = bytes(range(64))
KEYS = RunKeys("r")
RECORDS = [
    KEYS.generation(1),
    KEYS.generation(2),
    KEYS.commit(CommitRef(1, 10), 0, 1),
    KEYS.commit(CommitRef(2, 10), 0, 1),
    KEYS.commit(CommitRef(2, 10), 0, 2),
    KEYS.farewell(1, "x"),
    KEYS.resumption(2),
    KEYS.suspect(CommitRef(2, 10), 0),
    KEYS.pin("paper"),
]
keys = st.sampled_from(RECORDS)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "signing.key"
    path.write_bytes(KEY)
    path.chmod(0o400)
    return path


def problem(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        signing.load(path)
    (line,) = caught.value.problems
    assert line.startswith("store.signing_key_file: ")
    assert str(path) in line
    assert "; " in line, "names the fix"
    assert "\x00\x01\x02" not in line
    return line


def test_all_bytes_of_the_file_are_the_key(key_file: Path) -> None:
    assert signing.load(key_file) == SigningKey(KEY)
    assert signing.load(None) is None


@pytest.mark.fault("S25")
@pytest.mark.parametrize("mode", [0o440, 0o404, 0o620, 0o602, 0o401])
def test_a_key_with_rights_for_others_is_refused(key_file: Path, mode: int) -> None:
    """Readable, writable or executable for group or others."""
    key_file.chmod(mode)
    assert f"has mode {mode:04o}; keep it private: chmod 0400" in problem(key_file)


@needs_root
def test_a_key_of_another_user_is_for_root_alone() -> None:
    """The daemon's user owns the key, and root restores with it; no third user gets it."""
    with place_for_all(DAEMON) as place:
        path = place / "signing.key"
        path.write_bytes(KEY)
        path.chmod(0o400)
        os.chown(path, DAEMON, GROUP)
        assert signing.load(path) == SigningKey(KEY)
        assert as_user(DAEMON, lambda: signing.load(path) == SigningKey(KEY)) is True
        refused = as_user(TRAINER, lambda: str(signing.load(path)))
    assert "Permission denied" in refused


@pytest.mark.parametrize("size_bytes", [0, 1, signing.KEY_BYTES_MIN - 1, signing.KEY_BYTES_MAX + 1])
def test_a_key_of_the_wrong_size_is_refused(tmp_path: Path, size_bytes: int) -> None:
    path = tmp_path / "key"
    path.touch(0o600)
    path.write_bytes(b"k" * size_bytes)
    assert "bytes, not 32 to 4096" in problem(path)


@pytest.mark.fault("S1", "S4")
def test_only_a_regular_file_is_accepted(key_file: Path, tmp_path: Path) -> None:
    """A link, a FIFO, a directory or a missing file is refused without waiting."""
    link, fifo, directory = tmp_path / "link", tmp_path / "fifo", tmp_path / "directory"
    link.symlink_to(key_file)
    os.mkfifo(fifo, 0o600)
    directory.mkdir(0o700)
    for path in (link, fifo, directory, tmp_path / "missing", tmp_path / "no" / "directory"):
        assert "cannot be used" in problem(path)


# ---------------------------------------------------------------- records


def contents(store: MemoryStore) -> dict[str, bytes | None]:
    """The records that a holder of the key sees; None for a damaged one."""
    view, found = signed(store, RUN_KEY), dict[str, bytes | None]()
    for info in view.list("r/"):
        if info.key.endswith(UNSIGNED):
            continue
        try:
            found[info.key] = view.get(info.key)
        except CorruptError:
            found[info.key] = None
        else:
            assert info.size_bytes == len(found[info.key] or b"")
    return found


@pytest.mark.fault("S25")
@given(st.data())
def test_nothing_that_another_writer_creates_is_seen(data: st.DataObject) -> None:
    """Any history of honest writes and deletes, with a writer that can create, read and list.

    It can replace nothing.  It can only bring back a record that was deleted, whole or damaged.
    """
    store = MemoryStore()
    view = signed(store, RUN_KEY)
    elsewhere = MemoryStore()
    elsewhere.url = "memory://elsewhere"
    live: dict[str, bytes] = {}
    written: dict[str, set[bytes]] = {}
    seen: list[tuple[str, bytes]] = []
    for number in range(data.draw(st.integers(1, 12), label="steps")):
        key, content = data.draw(keys), b"%d" % number
        action = data.draw(
            st.sampled_from(("write", "write elsewhere", "delete", "plant", "plant"))
        )
        if action == "write" and key not in live:
            view.delete(key)  # what was brought back
            view.put(key, content, if_absent=True)
            live[key] = content
            written.setdefault(key, set()).add(content)
        elif action == "write elsewhere":
            signed(elsewhere, RUN_KEY).put(key, content)
        elif action == "delete":
            view.delete(key)
            live.pop(key, None)
        elif action == "plant":
            seen += store.objects.items()
            seen += elsewhere.objects.items()
            tags = [name.split(".")[-2] for name, _ in seen if name.count(".") == 2]
            tag = data.draw(st.sampled_from([*tags, "0" * 32]))
            named = [key, f"{key.removesuffix('.json')}.{tag}.json", *(name for name, _ in seen)]
            bodies = [content, *(body for _, body in seen)]
            name = data.draw(st.sampled_from(named), label="key")
            store.objects.setdefault(name, data.draw(st.sampled_from(bodies), label="bytes"))
    found = contents(store)
    assert found.items() >= live.items()
    for key, body in found.items():
        assert body is None or body in written[key]
        assert key in written


def test_a_record_counts_for_one_key_one_store_and_one_name() -> None:
    """Another key, another bucket with the same objects, and another name; other bytes are damage."""
    store = MemoryStore()
    signed(store, RUN_KEY).put(KEYS.generation(1), b"{}")
    assert contents(store) == {KEYS.generation(1): b"{}"}
    ((name, data),) = store.objects.items()
    assert list(signed(store, SigningKey(b"K" * 32)).list("r/")) == [
        ObjectInfo(name + UNSIGNED, len(data))
    ]
    store.url = "memory://elsewhere"
    assert contents(store) == {}
    store.url = MemoryStore().url
    store.objects = {name.replace("00000001", "00000002"): data}
    assert contents(store) == {}
    for forged in (data[1:], b"[]" + data[2:], b"", data[2:]):
        store.objects = {name: forged}
        assert contents(store) == {KEYS.generation(1): None}


def test_a_chunk_has_no_signature() -> None:
    """Its name contains the digest of its bytes."""
    store = MemoryStore()
    view = signed(store, RUN_KEY)
    made = committed.commit(view, {"a": b"x"})
    (chunk,) = made.chunks
    assert store.objects[chunk.key] == b"x"
    assert [info.key for info in view.list(KEYS.data)] == [chunk.key]


def test_each_call_reaches_the_stored_record() -> None:
    """HEAD, conditional and multiple deletes, and locks, with the names that callers know."""
    store = MemoryStore()
    view = signed(store, RUN_KEY)
    for key in RECORDS:
        view.put(key, key.encode())
    info = view.head(RECORDS[0])
    assert info == ObjectInfo(RECORDS[0], len(RECORDS[0]))
    assert info.tag
    view.delete(info.key, if_tag=info.tag)
    assert view.head(RECORDS[0]) is None
    assert view.delete_many(list(view.list(KEYS.commits))) == {}
    assert {info.key for info in view.list("r/")} == {*RECORDS[1:2], *RECORDS[5:]}
    assert view.lock(RECORDS[1]) is None


@pytest.mark.fault("S25")
def test_a_flood_of_planted_records_costs_the_listing_alone() -> None:
    """Claims, commits, farewells and pins of another writer cause no request besides the listings."""
    store = MemoryStore()
    view = signed(store, RUN_KEY)
    ours = claim_generation(view, KEYS, start_id="us", identity={}).content
    made = committed.commit(view, {"a": b"x"}, step=10)
    for number in range(2, 302):
        store.put(KEYS.generation(number), b"{}")
        store.put(KEYS.commit(CommitRef(number, 1), 0, 1), b"{}")
        store.put(KEYS.farewell(1, f"x{number}"), farewell(commit=CommitRef(number, 1)))
        store.put(KEYS.pin(f"x{number}"), b"{}")
    store.put(f"{KEYS.commits}junk", b"")
    for folder in (KEYS.generations, KEYS.commits, KEYS.pins):
        store.put(folder, b"not the empty object of a console")
    store.requests.clear()
    assert catalog.newest_generation(view, KEYS) == 1
    assert [commit.ref for commit in catalog.newest_commits(view, KEYS)] == [made.ref]
    assert catalog.history(view, KEYS, 1) == catalog.History()
    assert Pins(view, KEYS).now() == []
    assert {what for what, _ in store.requests} == {"list"}
    ensure_not_fenced(view, KEYS, ours)
    assert store.count("get") == 1
    again = claim_generation(view, KEYS, start_id="next", identity={})
    assert again.generation == 2


def test_a_key_is_never_shown() -> None:
    """Neither in the text of the key nor in that of a store."""
    assert "kkk" not in repr(RUN_KEY)
