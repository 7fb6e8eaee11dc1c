# SPDX-License-Identifier: Apache-2.0
"""The catalog: commits and generations from listings, and errors for objects that no writer made."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from swansong import bounds
from swansong_bucket.errors import CorruptError
from swansong_bucket.format import claim, manifest, wall
from swansong_bucket.format.claim import ClaimObject
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.format.manifest import Manifest
from swansong_bucket.loss_records import History
from swansong_bucket.model import CheckpointKind, CommitRef, Verdict
from swansong_bucket.runs import catalog
from swansong_bucket.stores.base import ObjectInfo, ObjectStore
from swansong_bucket.stores.file.store import FileStore

from testkit import records
from testkit.committed import commit, file_store, object_path
from testkit.memory_store import MemoryStore

KEYS = RunKeys("r")


class Listing:
    """A store with listings only; objects are listed in the given order."""

    url = "list://store"

    def __init__(self, keys: list[str], *, size_bytes: int = 1) -> None:
        self._keys = keys
        self._size_bytes = size_bytes

    def list(self, prefix: str, *, after: str = "") -> list[ObjectInfo]:
        found = [key for key in self._keys if key.startswith(prefix) and key > after]
        return [ObjectInfo(key, self._size_bytes) for key in found]


@given(
    st.sets(
        st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(1, 3)).flatmap(
            lambda it: st.tuples(*map(st.just, it), st.integers(0, it[2] - 1))
        )
    )
)
def test_commits_are_grouped_ordered_and_complete(named: set[tuple[int, int, int, int]]) -> None:
    """Newest first by (generation, step); complete if the manifest of each node is listed."""
    listing = Listing(
        [
            KEYS.commit(CommitRef(generation, step), node, nodes)
            for generation, step, nodes, node in named
        ]
        + ["other/commits/x"]
    )
    commits = catalog.list_commits(listing, KEYS)  # type: ignore[arg-type]
    refs = [commit.ref for commit in commits]
    assert refs == sorted(refs, reverse=True)
    assert sum(len(commit.manifest_keys) for commit in commits) == len(named)
    for found in commits:
        listed = {node for *other, node in named if other == [*_numbers(found.ref), found.nodes]}
        assert set(found.manifest_keys) == listed
        assert found.is_complete == (len(listed) == found.nodes)


def _numbers(ref: CommitRef) -> tuple[int, int]:
    return ref.generation, ref.step


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return file_store(tmp_path / "store")


FOREIGN = [
    "x", "99.json", "100000000.json", "00000001.json/", "00000001.json.bak", "\n", "Ü",
    "00000001/000000000001/00001-of-00001.json",
    "00000001/000000000001/00000-of-00000.json",
    "000000001/000000000001/00000-of-00001.json",
    "00000001/0000000000001/00000-of-00001.json",
    "00000001/000000000001/00000-of-100000.json",
]  # fmt: skip


@pytest.mark.fault("G16", "S25")
@pytest.mark.parametrize("name", FOREIGN)
def test_an_object_that_no_swansong_writes_is_an_error_and_not_an_empty_run(name: str) -> None:
    """The error names the object and the fix; it never means "no commit" or "no generation".

    Also beside valid keys: the object may be the newest commit.
    """
    valid = [KEYS.commit(CommitRef(1, 1), 0, 1), KEYS.generation(1)]
    for prefix, read in (
        (KEYS.generations, lambda store: catalog.newest_generation(store, KEYS)),
        (KEYS.commits, lambda store: catalog.list_commits(store, KEYS)),
    ):
        for others in ([], valid):
            listing = Listing([*others, f"{prefix}{name}"])
            with pytest.raises(CorruptError, match="has a key that no swansong") as caught:
                read(listing)
            assert repr(f"{listing.url}/{prefix}{name}") in str(caught.value)
            assert "delete" in caught.value.hint


def test_folder_markers_of_consoles_are_left_out() -> None:
    """Empty objects whose key ends in a slash are left out; such a key with content is an error."""
    markers = ["r/generations/", "r/commits/", "r/commits/00000001/", "r/commits/a folder/"]
    good = KEYS.commit(CommitRef(1, 1), 0, 1)
    empty = Listing([*markers, good], size_bytes=0)
    assert [found.ref for found in catalog.list_commits(empty, KEYS)] == [CommitRef(1, 1)]  # type: ignore[arg-type]
    assert catalog.newest_generation(empty, KEYS) == 0  # type: ignore[arg-type]
    with pytest.raises(CorruptError):
        catalog.list_commits(Listing(markers), KEYS)  # type: ignore[arg-type]


def test_hostile_commits_for_many_nodes_cost_little_time() -> None:
    """20,000 manifests, each of another commit with 99,999 nodes."""
    listing = Listing([KEYS.commit(CommitRef(1, step), 0, 99_999) for step in range(20_000)])
    began_s = time.thread_time()
    assert not any(found.is_complete for found in catalog.list_commits(listing, KEYS))  # type: ignore[arg-type]
    assert time.thread_time() - began_s < 5


@pytest.mark.parametrize("order", ["of bytes", "reversed", "any"])
def test_a_reader_holds_the_newest_commits_only(
    monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    """Of a flooded listing in any order, only the newest commits are in memory."""
    monkeypatch.setattr(catalog, "LISTED_MAX", 10)
    steps = list(range(50))
    if order != "of bytes":
        steps.reverse()
    if order == "any":
        random.Random(3).shuffle(steps)
    listing = Listing([KEYS.commit(CommitRef(1, step), 0, 1) for step in steps])
    steps = [found.ref.step for found in catalog.list_commits(listing, KEYS)]  # type: ignore[arg-type]
    assert steps == list(range(49, 39, -1))


@pytest.mark.parametrize(
    "key",
    [
        KEYS.commit(CommitRef(2, 100), 0, 1),
        KEYS.commit(CommitRef(1, 101), 0, 1),
        KEYS.commit(CommitRef(1, 100), 0, 2),
        KEYS.commit(CommitRef(1, 100), 1, 2),
        KEYS.commit(CommitRef(1, 100, is_final=True), 0, 1),
        RunKeys("q").commit(CommitRef(1, 100), 0, 1),
    ],
)
def test_a_manifest_under_another_name_is_refused(
    store: FileStore, tmp_path: Path, key: str
) -> None:
    """A copied or renamed manifest does not match its key."""
    commit(store, {"a": b"x"})
    right = KEYS.commit(CommitRef(1, 100), 0, 1)
    store.put(key, store.get(right))
    store.delete(right)
    keys = RunKeys(key.partition("/")[0])
    (found,) = catalog.list_commits(store, keys)
    with pytest.raises(CorruptError, match="is that of run 'r'"):
        catalog.load(store, keys, found)


def test_a_manifest_that_vanished_is_refused(store: FileStore) -> None:
    """Retention may delete a commit between the listing and the read."""
    commit(store, {"a": b"x"})
    (found,) = catalog.list_commits(store, KEYS)
    store.delete(found.manifest_keys[0])
    with pytest.raises(CorruptError, match="missing"):
        catalog.load(store, KEYS, found)


@pytest.mark.fault("G08")
def test_manifests_that_are_too_large_are_not_fetched(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is for all nodes together; the listing has the sizes before any read."""
    for node in range(3):
        commit(store, {f"n{node}": b"x"}, node=node, nodes=3)
    (found,) = catalog.list_commits(store, KEYS)
    assert found.size_bytes == sum(info.size_bytes for info in store.list(KEYS.commits))
    monkeypatch.setattr(catalog, "COMMIT_BYTES_MAX", found.size_bytes)
    catalog.load(store, KEYS, found)
    monkeypatch.setattr(catalog, "COMMIT_BYTES_MAX", found.size_bytes - 1)
    monkeypatch.setattr(FileStore, "get", None)
    with pytest.raises(CorruptError, match="limit"):
        catalog.load(store, KEYS, found)
    sizes = {
        node: replace(info, size_bytes=manifest.BYTES_MAX + (node == 0))
        for node, info in found.manifests.items()
    }
    large = replace(found, manifests=sizes)
    monkeypatch.setattr(catalog, "COMMIT_BYTES_MAX", 10 * large.size_bytes)
    with pytest.raises(CorruptError, match="limit"):
        catalog.load(store, KEYS, large)


def test_a_commit_that_costs_too_much_processor_time_is_refused(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The budget counts the work of this thread, not the time of requests."""
    for node in range(2):
        commit(store, {f"n{node}": b"x"}, node=node, nodes=2)
    (found,) = catalog.list_commits(store, KEYS)
    get = FileStore.get

    def slow(self: FileStore, key: str) -> bytes:
        threading.Event().wait(0.2)
        return get(self, key)

    monkeypatch.setattr(catalog, "EXAMINE_CPU_S", 0.15)
    monkeypatch.setattr(FileStore, "get", slow)
    assert len(catalog.load(store, KEYS, found)) == 2

    def busy(data: bytes) -> Manifest:
        began_s = time.thread_time()
        while time.thread_time() - began_s < 0.2:
            pass
        return manifest.decode(data)

    monkeypatch.setattr(catalog, "decode", busy)
    with pytest.raises(CorruptError, match="processor time"):
        catalog.load(store, KEYS, found)


@pytest.mark.parametrize("in_memory_bytes", [catalog.IN_MEMORY_BYTES, 1])
def test_manifests_of_one_commit_are_read_in_parallel(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, in_memory_bytes: int
) -> None:
    """A job over many VMs waits for a few requests, not for one after the other; memory stays limited."""
    nodes = 2 * catalog.MANIFEST_READS
    for node in range(nodes):
        commit(store, {f"n{node}": b"x"}, node=node, nodes=nodes)
    (found,) = catalog.list_commits(store, KEYS)
    at_once = catalog.MANIFEST_READS if in_memory_bytes > 1 else 1
    together, events, get = threading.Barrier(at_once), list[str](), FileStore.get

    def met(self: FileStore, key: str) -> bytes:
        events.append("read")
        together.wait(60)
        return get(self, key)

    def decoded(data: bytes) -> Manifest:
        events.append("decoded")
        return manifest.decode(data)

    monkeypatch.setattr(catalog, "IN_MEMORY_BYTES", in_memory_bytes)
    monkeypatch.setattr(catalog, "decode", decoded)
    monkeypatch.setattr(FileStore, "get", met)
    assert [each.node for each in catalog.load(store, KEYS, found)] == list(range(nodes))
    batch = ["read"] * at_once + ["decoded"] * at_once
    assert events == batch * (nodes // at_once)


def a_claim(generation: int) -> ClaimObject:
    return ClaimObject(run="r", generation=generation, start="abc")


# ---------------------------------------------------------------- what became of earlier VMs


def put_claim(
    store: ObjectStore, generation: int, claimed: str, boot: str = "", **ids: str
) -> None:
    identity = {"claimed": claimed, "boot_id": boot or f"boot-{generation}", **ids}
    store.put(
        KEYS.generation(generation), claim.encode(replace(a_claim(generation), identity=identity))
    )


def farewell(store: ObjectStore, generation: int, verdict: str, written: str) -> None:
    made = records.farewell(Verdict(verdict), generation=generation, written=written)
    store.put(KEYS.farewell(generation, written.replace(":", "")), made)


def test_vms_without_a_safe_farewell_are_counted(store: FileStore) -> None:
    """A VM without a farewell counts, one with SAFE does not; each lived until its last object."""
    put_claim(store, 1, "2029-12-31T23:00:00Z")
    commit(store, {"a": b"1"}, generation=1, step=5)  # created at 2030-01-01T00:00:00Z
    put_claim(store, 2, "2030-01-01T10:00:00Z")
    farewell(store, 2, "PARTIAL", "2030-01-01T11:00:00Z")
    farewell(store, 2, "SAFE", "2030-01-01T12:00:00Z")
    put_claim(store, 3, "2030-01-01T20:00:00Z")
    farewell(store, 3, "LOST", "2030-01-01T20:30:00Z")
    put_claim(store, 4, "2030-01-02T00:00:00Z")
    assert catalog.history(store, KEYS, 4) == History(3600 + 7200 + 1800, 2)
    assert catalog.history(store, KEYS, 1) == History()


def test_the_newest_farewells_of_a_vm_count(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A VM with many drills writes more farewells than are read: the last one says how it ended."""
    monkeypatch.setattr(catalog, "_FAREWELLS_MAX", 2)
    for minute, verdict in enumerate(["SAFE", "LOST", "PARTIAL"]):
        farewell(store, 1, verdict, f"2030-01-01T00:0{minute}:00Z")
    said = catalog.farewells_of(store, KEYS, 1)
    assert [each.verdict for each in said] == [Verdict.PARTIAL, Verdict.LOST]


def test_a_rollback_and_a_final_commit_are_not_interruptions(store: FileStore) -> None:
    """Two generations of one boot are one VM; a VM with a final commit ended by itself."""
    put_claim(store, 1, "2030-01-01T00:00:00Z", "same")
    put_claim(store, 2, "2030-01-01T01:00:00Z", "same")
    commit(store, {"a": b"1"}, generation=2, kind=CheckpointKind.FINAL)
    put_claim(store, 3, "2030-01-05T00:00:00Z")
    assert catalog.history(store, KEYS, 3) == History(3600.0, 0)


def test_containers_of_one_boot_are_several_vms(store: FileStore) -> None:
    """Pods of a node have its boot id; a claim without another id is of a further VM."""
    put_claim(store, 1, "2030-01-01T00:00:00Z", "node", vm="a")
    put_claim(store, 2, "2030-01-01T01:00:00Z", "node", vm="b")
    put_claim(store, 3, "2030-01-01T02:00:00Z", "node")
    put_claim(store, 4, "2030-01-01T03:00:00Z", "node", vm="c")
    put_claim(store, 5, "2030-01-01T04:00:00Z", "node", vm="c")
    assert catalog.history(store, KEYS, 5, "c") == History(0.0, 3)


lived = st.tuples(
    st.integers(1, 60),  # starts of the training
    st.sampled_from(["SAFE", "PARTIAL", "commit"]),  # the last object of the VM
)


@settings(max_examples=50)
@given(st.lists(lived, min_size=1, max_size=4), st.integers(0, 200))
@example([(1, "PARTIAL"), (1, "SAFE")], 2000)
def test_restarts_of_a_trainer_change_no_mtbf_and_a_lost_vm_does(
    vms: list[tuple[int, str]], own: int
) -> None:
    """The history counts VMs: however often the training was started on each of them and on this VM, the
    lost VMs and the time of all earlier VMs are the same."""

    def history(starts: list[int], own: int) -> History:
        store, generation = MemoryStore(), 0
        for number, (count, (_, last)) in enumerate(zip(starts, vms, strict=True)):
            begun_s = 10_000 * number
            for start in range(count):
                generation += 1
                claimed = wall.text(begun_s + 1000 * start / count)
                put_claim(store, generation, claimed or "", f"vm-{number}")
            ended = wall.text(begun_s + 2000) or ""
            if last == "commit":
                commit(store, {"a": b"1"}, generation=generation, created=ended)
            else:
                farewell(store, generation, last, ended)
        for _ in range(own + 1):
            generation += 1
            put_claim(store, generation, "2030-01-01T00:00:00Z", "own")
        return catalog.history(store, KEYS, generation, "own")

    lost = sum(last != "SAFE" for _, last in vms)
    expected = History(2000.0 * len(vms), lost)
    assert history([1] * len(vms), 0) == expected
    assert history([count for count, _ in vms], own) == expected


def test_a_malformed_history_raises_nothing(store: FileStore, tmp_path: Path) -> None:
    """Clocks that ran backwards, malformed claims and farewells, and many generations."""
    for generation in range(1, 28):
        store.put(KEYS.generation(generation), [b"{", b"[]", b'{"identity": 7}'][generation % 3])
    put_claim(store, 29, "0001-01-01T00:00:00")
    for number, content in enumerate((b"\xff", b"[]", b'{"verdict": [], "written": "x"}', b"")):
        store.put(KEYS.farewell(29, f"x{number}"), content)
    with object_path(tmp_path, f"store/{KEYS.farewell(29, 'x3')}").open("r+b") as file:
        file.truncate(65 * 2**20)
    put_claim(store, 28, "2030-01-01T00:00:00Z")
    farewell(store, 28, "LOST", "2029-01-01T00:00:00Z")
    assert catalog.history(store, KEYS, 30) == History(0.0, catalog.HISTORY_MAX)


@pytest.mark.fault("S25")
def test_the_last_generation_of_the_format_has_a_history(store: FileStore) -> None:
    """A planted claim takes the last number: a VM that has claimed nothing reads the history all the same."""
    store.put(KEYS.generation(bounds.GENERATION_MAX), b"{}")
    assert catalog.history(store, KEYS, bounds.GENERATION_MAX + 1) == History(0.0, 1)


def test_a_wrong_clock_does_not_stretch_the_history(store: FileStore) -> None:
    """A planted claim of the year 1 must not make periodic checkpoints years apart."""
    put_claim(store, 1, "1000-01-01T00:00:00Z")
    farewell(store, 1, "PARTIAL", "9000-01-01T00:00:00Z")
    put_claim(store, 2, "2030-01-01T00:00:00Z")
    assert catalog.history(store, KEYS, 2).observed_s <= 366 * 24 * 3600


@pytest.mark.fault("S25")
def test_planted_claims_do_not_delay_the_first_commit() -> None:
    """One thread reads the history and creates manifests: the reads are limited."""
    store = MemoryStore()
    put_claim(store, 1, "2030-01-01T00:00:00Z")
    for generation in range(2, 302):
        store.put(KEYS.generation(generation), b"{}")
    assert catalog.history(store, KEYS, 302) != History()
    assert store.count("get") <= catalog.HISTORY_CLAIMS_MAX + 1  # our own claim
