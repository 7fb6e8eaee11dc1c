# SPDX-License-Identifier: Apache-2.0
"""The catalog: what a listing says, and what it does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from committed import commit, file_store, object_path
from hypothesis import given
from hypothesis import strategies as st
from swansongd import catalog
from swansongd.core.cadence import History
from swansongd.errors import CorruptError, NotFound
from swansongd.keys import RunKeys
from swansongd.model import CheckpointKind, CommitRef
from swansongd.stores.base import ObjectInfo
from swansongd.stores.files import FileStore

KEYS = RunKeys("r")


class Listing:
    """A store of which only the listing is asked."""

    def __init__(self, keys: list[str]) -> None:
        self._keys = keys

    def list(self, prefix: str) -> list[ObjectInfo]:
        return [ObjectInfo(key, 1) for key in sorted(self._keys) if key.startswith(prefix)]


@given(
    st.sets(
        st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(1, 3)).flatmap(
            lambda it: st.tuples(*map(st.just, it), st.integers(0, it[2] - 1))
        )
    )
)
def test_commits_are_grouped_ordered_and_complete(named: set[tuple[int, int, int, int]]) -> None:
    """Newest first by (generation, step); complete exactly when each node's manifest is listed."""
    listing = Listing(
        [
            KEYS.commit(CommitRef(generation, step), node, nodes)
            for generation, step, nodes, node in named
        ]
        + ["r/commits/junk", "r/commits/00000001/x.json", "other/commits/x"]
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


def test_the_newest_generation(store: FileStore) -> None:
    """The highest claim counts, whoever made it; none is 0, and what is no claim is passed over."""
    assert catalog.newest_generation(store, KEYS) == 0
    for name in (
        KEYS.generation(9),
        KEYS.generation(10),
        "r/generations/x",
        "r/generations/99.json",
    ):
        store.put(name, b"{}")
    store.put(RunKeys("other").generation(11), b"{}")
    assert catalog.newest_generation(store, KEYS) == 10


def test_load_returns_the_manifests_by_node(store: FileStore) -> None:
    """All manifests of a commit, in order of their nodes."""
    made = [commit(store, {f"n{node}": b"x"}, node=node, nodes=3) for node in (2, 0, 1)]
    (found,) = catalog.list_commits(store, KEYS)
    assert found.is_complete
    assert catalog.load(store, KEYS, found) == tuple(sorted(made, key=lambda it: it.node))


@pytest.mark.parametrize(
    "key",
    [
        KEYS.commit(CommitRef(2, 100), 0, 1),
        KEYS.commit(CommitRef(1, 101), 0, 1),
        KEYS.commit(CommitRef(1, 100), 0, 2),
        KEYS.commit(CommitRef(1, 100), 1, 2),
        RunKeys("q").commit(CommitRef(1, 100), 0, 1),
    ],
)
def test_a_manifest_under_another_name_is_refused(
    store: FileStore, tmp_path: Path, key: str
) -> None:
    """A copied or renamed manifest is not taken for what its key says."""
    commit(store, {"a": b"x"})
    right = KEYS.commit(CommitRef(1, 100), 0, 1)
    store.put(key, store.get(right))
    store.delete(right)
    keys = RunKeys(key.partition("/")[0])
    (found,) = catalog.list_commits(store, keys)
    with pytest.raises(CorruptError, match="is that of run 'r'"):
        catalog.load(store, keys, found)


def test_a_manifest_that_vanished_is_refused(store: FileStore) -> None:
    """Retention may delete a commit between the listing and the reading."""
    commit(store, {"a": b"x"})
    (found,) = catalog.list_commits(store, KEYS)
    store.delete(found.manifest_keys[0])
    with pytest.raises(CorruptError, match="gone"):
        catalog.load(store, KEYS, found)


def test_a_store_that_is_not_there_is_not_an_empty_one(store: FileStore, tmp_path: Path) -> None:
    """A missing bucket is an error, and never "no commits"."""
    object_path(tmp_path, "store/.swansong-tmp").rmdir()
    object_path(tmp_path, "store").rmdir()
    with pytest.raises(NotFound):
        catalog.list_commits(store, KEYS)


# ---------------------------------------------------------------- what became of earlier VMs


def claim(store: FileStore, generation: int, claimed: str, boot: str = "") -> None:
    identity = {"claimed": claimed, "boot_id": boot or f"boot-{generation}"}
    store.put(KEYS.generation(generation), json.dumps({"identity": identity}).encode())


def farewell(store: FileStore, generation: int, verdict: str, written: str) -> None:
    body = {"verdict": verdict, "written": written}
    store.put(KEYS.farewell(generation, written.replace(":", "")), json.dumps(body).encode())


def test_vms_that_went_without_a_safe_farewell_are_counted(store: FileStore) -> None:
    """One that said nothing counts, one that was SAFE does not; each lived until its last sign."""
    claim(store, 1, "2029-12-31T23:00:00Z")
    commit(store, {"a": b"1"}, generation=1, step=5)  # created at 2030-01-01T00:00:00Z
    claim(store, 2, "2030-01-01T10:00:00Z")
    farewell(store, 2, "PARTIAL", "2030-01-01T11:00:00Z")
    farewell(store, 2, "SAFE", "2030-01-01T12:00:00Z")
    claim(store, 3, "2030-01-01T20:00:00Z")
    farewell(store, 3, "LOST", "2030-01-01T20:30:00Z")
    claim(store, 4, "2030-01-02T00:00:00Z")
    assert catalog.history(store, KEYS, 4) == History(3600 + 7200 + 1800, 2)
    assert catalog.history(store, KEYS, 1) == History()


def test_a_rollback_and_an_end_are_no_interruptions(store: FileStore) -> None:
    """Two generations of one boot are one VM, and who made a final commit has ended by itself."""
    claim(store, 1, "2030-01-01T00:00:00Z", "same")
    claim(store, 2, "2030-01-01T01:00:00Z", "same")
    commit(store, {"a": b"1"}, generation=2, kind=CheckpointKind.FINAL)
    claim(store, 3, "2030-01-05T00:00:00Z")
    assert catalog.history(store, KEYS, 3) == History(0.0, 0)


def test_a_history_that_makes_no_sense_stops_nobody(store: FileStore) -> None:
    """Clocks that ran backwards, claims and farewells that are no JSON or say nothing, many generations."""
    for generation in range(1, 30):
        store.put(KEYS.generation(generation), [b"{", b"[]", b'{"identity": 7}'][generation % 3])
    store.put(KEYS.farewell(29, "x"), b"\xff")
    claim(store, 28, "2030-01-01T00:00:00Z")
    farewell(store, 28, "LOST", "2029-01-01T00:00:00Z")
    assert catalog.history(store, KEYS, 30) == History(0.0, catalog.HISTORY_MAX)
