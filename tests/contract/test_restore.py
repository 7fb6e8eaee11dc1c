# SPDX-License-Identifier: Apache-2.0
"""Restore: exactly what was sealed, or an older commit and the reason, or a clear failure."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from swansong_bucket.errors import (
    CorruptError,
    NotFound,
    NothingToRestore,
    StagingError,
    Transient,
)
from swansong_bucket.format import manifest
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.model import CHUNK_BYTES_MAX, CommitRef, Extent, StoredShard, Verdict
from swansong_bucket.runs import catalog
from swansong_bucket.runs.signing import signed
from swansong_bucket.stores.base import ObjectInfo
from swansong_bucket.stores.file.store import FileStore
from swansong_bucket.transfer.reader import ReadOptions
from swansong_bucket.transfer.restore import Selection, restore
from swansong_bucket.transfer.target import RestoreTarget
from swansong_tools.upkeep.verify import verify

from testkit.committed import (
    CHUNK_BYTES,
    commit,
    file_store,
    flip_bit,
    object_path,
    tree,
)
from testkit.memory_store import MemoryStore
from testkit.odd_store import OddStore
from testkit.records import KEY, farewell

KEYS = RunKeys("r")
OLD = {"model.pt": b"old" * 700, "meta/rng-0.pt": b"seed", "empty": b""}
NEW = {"model.pt": b"new" * 1000, "deep/er/optim.pt": os.urandom(2 * CHUNK_BYTES), "x": b"1"}
OLD_REF, NEW_REF = CommitRef(1, 100), CommitRef(1, 200)


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    """A store with an older and a newer commit."""
    made = file_store(tmp_path / "store")
    commit(made, OLD, step=100)
    commit(made, NEW, step=200)
    return made


@pytest.fixture
def to(tmp_path: Path) -> Path:
    return tmp_path / "restored" / "here"


def in_store(tmp_path: Path, step: int, path: str, number: int = 0) -> Path:
    """The file of a chunk of a shard."""
    made = manifest.decode(manifest_in_store(tmp_path, step).read_bytes())
    (shard,) = (shard for shard in made.shards if shard.path == path)
    return object_path(tmp_path / "store", shard.extents[number].chunk.key)


def manifest_in_store(tmp_path: Path, step: int) -> Path:
    return object_path(tmp_path / "store", KEYS.commit(CommitRef(1, step), 0, 1))


def test_the_newest_commit_comes_back_exactly(store: FileStore, to: Path) -> None:
    """Same paths, same bytes, no other files; the result counts the bytes, and progress reaches the total."""
    reported: list[tuple[int, int]] = []
    got = restore(
        store,
        KEYS,
        RestoreTarget(to),
        options=ReadOptions(connections=3, progress=lambda *both: reported.append(both)),
    )
    size_bytes = sum(map(len, NEW.values()))
    assert tree(to) == NEW
    assert (got.ref, got.path, got.size_bytes, got.skipped) == (NEW_REF, to, size_bytes, ())
    assert reported[-1] == (size_bytes, size_bytes)
    assert [done for done, _ in reported] == sorted(done for done, _ in reported)
    assert os.listdir(to.parent) == ["here"]
    assert verify(store, KEYS).defects == []


def test_one_step_can_be_selected(store: FileStore, tmp_path: Path) -> None:
    """The newest generation that has the step; a step without a commit is an error."""
    assert restore(store, KEYS, RestoreTarget(tmp_path / "1"), Selection(step=100)).ref == OLD_REF
    commit(store, {"a": b"again"}, generation=2, step=100)
    assert restore(
        store, KEYS, RestoreTarget(tmp_path / "2"), Selection(step=100)
    ).ref == CommitRef(2, 100)
    with pytest.raises(NothingToRestore, match="step 150"):
        restore(store, KEYS, RestoreTarget(tmp_path / "3"), Selection(step=150))


def test_a_run_with_other_commits_is_not_called_empty(store: FileStore, to: Path) -> None:
    """No commit has the generation: the error names one that the run has, and is not of a fresh run."""
    with pytest.raises(NothingToRestore, match="is another one") as caught:
        restore(store, KEYS, RestoreTarget(to), Selection(accepts=lambda ref: ref.generation > 8))
    assert not caught.value.is_fresh


def test_only_manifests_of_accepted_commits_are_read(to: Path) -> None:
    """A run may have thousands of other commits, and their damage is no reason to report."""
    store = MemoryStore()
    store.put(KEYS.generation(1), b"{}")
    commit(store, OLD, step=100)
    store.put(KEYS.commit(CommitRef(1, 200), 0, 1), b"{}")
    read: list[str] = []
    store.before = lambda what, key: read.append(key) if what.startswith("get") else None
    got = restore(store, KEYS, RestoreTarget(to), Selection(accepts=lambda ref: ref == OLD_REF))
    assert (got.ref, got.skipped) == (OLD_REF, ())
    assert [key for key in read if key.startswith(KEYS.commits)] == [KEYS.commit(OLD_REF, 0, 1)]


def test_runs_do_not_mix(store: FileStore, to: Path) -> None:
    """A run sees no commits of other runs in the same store."""
    with pytest.raises(NothingToRestore, match="run other has no commit"):
        restore(store, RunKeys("other"), RestoreTarget(to))
    assert not to.exists()


# ---------------------------------------------------------------- damaged commits


def flip_in_shard(tmp_path: Path) -> None:
    flip_bit(in_store(tmp_path, 200, "deep/er/optim.pt", 1), 8 * 17 + 3)


NEWER_FORMAT = b'{"format":"swansong-manifest","version":7}'
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped chunk": (flip_in_shard, "does not match its digest"),
    "missing chunk": (
        lambda at: in_store(at, 200, "x").unlink(),
        "x is missing from the store",
    ),
    "short chunk": (
        lambda at: os.truncate(in_store(at, 200, "model.pt"), 999),
        "model.pt has an object of 999 bytes instead of 1000",
    ),
    "flipped manifest": (lambda at: flip_bit(manifest_in_store(at, 200), 1234), "manifest"),
    "short manifest": (
        lambda at: os.truncate(manifest_in_store(at, 200), 100),
        "manifest is not JSON",
    ),
    "empty manifest": (
        lambda at: os.truncate(manifest_in_store(at, 200), 0),
        "manifest is not JSON",
    ),
    "newer format": (lambda at: manifest_in_store(at, 200).write_bytes(NEWER_FORMAT), "upgrade"),
}


@pytest.mark.fault("G08", "G09", "G10", "O20")
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_commit_is_skipped_and_reported(
    store: FileStore, tmp_path: Path, to: Path, kind: str
) -> None:
    """The next older commit is restored, whole and unmixed, with the reason; the store is unchanged."""
    damage, reason = DAMAGE[kind]
    damage(tmp_path)
    before = tree(tmp_path / "store")
    reported: list[tuple[CommitRef, str]] = []
    got = restore(
        store, KEYS, RestoreTarget(to), Selection(skipped=lambda *both: reported.append(both))
    )
    assert tree(to) == OLD
    assert got.ref == OLD_REF
    assert list(got.skipped) == reported
    ((ref, why),) = reported
    assert ref == NEW_REF
    assert reason in why
    assert os.listdir(to.parent) == ["here"]
    assert tree(tmp_path / "store") == before
    findings = verify(store, KEYS).defects
    assert [finding.ref for finding in findings] == [NEW_REF]
    assert reason in findings[0].problem


class Omitting(FileStore):
    """A store whose listings omit every second key, as a server with wrong page tokens does."""

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        return islice(super().list(prefix, after=after), 0, None, 2)


@pytest.mark.fault("O15")
def test_chunks_that_a_listing_omits_are_not_missing(tmp_path: Path, to: Path) -> None:
    """A restore does not list the chunks; verify sends a HEAD for each chunk that the listing omits."""
    omitting = Omitting(file_store(tmp_path / "store").url)
    files = {f"rank-00000/{number}.bin": b"x" * number for number in range(20)}
    commit(omitting, files, step=7)
    assert restore(omitting, KEYS, RestoreTarget(to)).ref.step == 7
    assert {path.name: path.read_bytes() for path in to.rglob("*.bin")} == {
        path.rpartition("/")[2]: data for path, data in files.items()
    }
    assert verify(omitting, KEYS).defects == []


def test_bytes_after_a_chunk_are_reported_and_not_read(
    store: FileStore, tmp_path: Path, to: Path
) -> None:
    """An object that has the bytes of its name and further ones can be restored."""
    os.truncate(in_store(tmp_path, 200, "model.pt"), 1001)
    assert restore(store, KEYS, RestoreTarget(to)).ref == NEW_REF
    assert tree(to) == NEW
    (defect,) = verify(store, KEYS).defects
    assert "model.pt has an object of 1001 bytes instead of 1000" in defect.problem


def test_nothing_whole_lists_all_reasons(store: FileStore, tmp_path: Path, to: Path) -> None:
    """If every commit is damaged, the error names each with its reason; no trainer may start from scratch."""
    flip_in_shard(tmp_path)
    in_store(tmp_path, 100, "model.pt").unlink()
    with pytest.raises(NothingToRestore) as caught:
        restore(store, KEYS, RestoreTarget(to))
    assert "generation 1 step 200: deep/er/optim.pt does not match" in str(caught.value)
    assert "generation 1 step 100: model.pt is missing" in str(caught.value)
    assert not caught.value.is_fresh
    assert os.listdir(to.parent) == []


@pytest.mark.fault("G17")
def test_a_checkpoint_that_a_node_never_committed_is_skipped(store: FileStore, to: Path) -> None:
    """Two of three nodes make no checkpoint; three of three do, with the files of all nodes together."""
    for node in (0, 2):
        commit(store, {f"rank-{node}": b"x" * node}, step=300, node=node, nodes=3)
    got = restore(store, KEYS, RestoreTarget(to / "1"))
    assert got.ref == NEW_REF
    assert got.skipped == ((CommitRef(1, 300), "2 of 3 nodes committed it"),)
    assert verify(store, KEYS).defects == []
    commit(store, {"rank-1": b"late"}, step=300, node=1, nodes=3)
    assert restore(store, KEYS, RestoreTarget(to / "2")).ref == CommitRef(1, 300)
    assert tree(to / "2") == {"rank-0": b"", "rank-1": b"late", "rank-2": b"xx"}


def test_nodes_that_disagree_about_a_file_make_no_checkpoint(store: FileStore, to: Path) -> None:
    """Equal files of two nodes are one file; a commit with different files of one name is skipped."""
    for node in (0, 1):
        commit(store, {"config": b"same", f"n{node}": b"x"}, step=300, node=node, nodes=2)
        commit(store, {"config": b"%d" % node}, step=400, node=node, nodes=2)
    got = restore(store, KEYS, RestoreTarget(to))
    assert got.ref == CommitRef(1, 300)
    assert "different files called config" in got.skipped[0][1]
    assert tree(to) == {"config": b"same", "n0": b"x", "n1": b"x"}


@pytest.mark.fault("S6", "S24", "G16")
@pytest.mark.parametrize("path", ["../../escaped", "/tmp/escaped", "a/../../../escaped", "."])
def test_a_hostile_manifest_writes_nothing_outside(
    store: FileStore, tmp_path: Path, to: Path, path: str
) -> None:
    """A manifest with a correct digest and an unsafe path is skipped before any file is written."""
    made = commit(store, {"a": b"x"}, step=300)
    hostile = replace(made, shards=(replace(made.shards[0], path=path),))
    store.put(KEYS.commit(CommitRef(1, 300), 0, 1), manifest.encode(hostile))
    before = tree(tmp_path)
    got = restore(store, KEYS, RestoreTarget(to))
    assert "not safe" in got.skipped[0][1]
    written = set(tree(tmp_path)) - set(before)
    assert written == {f"restored/here/{name}" for name in NEW}


@pytest.mark.fault("G12", "S25")
def test_a_small_manifest_of_a_huge_checkpoint_fails_before_a_byte_is_written(
    store: FileStore, to: Path
) -> None:
    """Its extents name one chunk many times.  No older commit is restored in its place.

    An honest checkpoint may be too large for the disk as well, and an older one would lose training.
    """
    made = commit(store, {"a": b"x"}, step=300)
    chunk = replace(made.chunks[0], size_bytes=CHUNK_BYTES_MAX)
    extents = (Extent.whole(chunk),) * 2**16
    huge = StoredShard(path="a", size_bytes=2**16 * CHUNK_BYTES_MAX, extents=extents)
    data = manifest.encode(replace(made, shards=(huge,)))
    assert len(data) < 2**18
    store.put(KEYS.commit(made.ref, 0, 1), data)
    with pytest.raises(StagingError, match=r"needs 1759\d+ bytes"):
        restore(store, KEYS, RestoreTarget(to))
    assert not to.exists()
    assert list(to.parent.iterdir()) == []


@pytest.mark.fault("O15", "G07")
def test_a_run_whose_farewell_names_a_commit_is_not_fresh(store: FileStore, to: Path) -> None:
    """A listing without commits contradicts the farewell: the trainer must not start from scratch.

    A run whose farewells name no commit has lost nothing, so it is fresh.
    """
    for info in list(store.list(KEYS.commits)):
        store.delete(info.key)
    named = farewell(verdict=Verdict.SAFE, commit=CommitRef(1, 300))
    store.put(KEYS.farewell(1, "a"), named)
    for number in range(110):
        store.put(KEYS.farewell(1, f"b{number:03d}"), farewell())
    with pytest.raises(NothingToRestore, match="00000001-a") as caught:
        restore(store, KEYS, RestoreTarget(to))
    assert not caught.value.is_fresh
    assert "run.name" in caught.value.hint
    store.delete(KEYS.farewell(1, "a"))
    with pytest.raises(NothingToRestore, match="has no commit") as caught:
        restore(store, KEYS, RestoreTarget(to))
    assert caught.value.is_fresh
    store.put(KEYS.farewell(1, "c"), b"no json")
    with pytest.raises(NothingToRestore, match="may name one") as caught:
        restore(store, KEYS, RestoreTarget(to))
    assert not caught.value.is_fresh


@pytest.mark.parametrize("prefix", ["commits", "farewells"])
def test_more_records_than_a_reader_holds_are_not_fresh(
    store: FileStore, to: Path, monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    """A flood of valid keys may hide the commits of the run."""
    for info in list(store.list(KEYS.commits)):
        store.delete(info.key)
    monkeypatch.setattr(catalog, "LISTED_MAX", 20)
    monkeypatch.setattr(catalog, "FRESH_FAREWELLS_MAX", 20)
    for number in range(21):
        flood = KEYS.commit(CommitRef(9, number), 0, 2)
        if prefix == "farewells":
            flood = KEYS.farewell(9, f"x{number}")
        store.put(flood, farewell())
    with pytest.raises(NothingToRestore, match=r"20 manifests|21 farewells") as caught:
        restore(store, KEYS, RestoreTarget(to))
    assert not caught.value.is_fresh


@pytest.mark.fault("S25")
def test_with_a_key_only_signed_commits_are_restored(store: FileStore, to: Path) -> None:
    """A newer commit of another writer is passed over; a run of such commits is not fresh."""
    view = signed(store, KEY)
    with pytest.raises(NothingToRestore, match="none has a name that this key signed") as caught:
        restore(view, KEYS, RestoreTarget(to))
    assert not caught.value.is_fresh
    key = KEYS.commit(OLD_REF, 0, 1)
    view.put(key, store.get(key))
    got = restore(view, KEYS, RestoreTarget(to))
    assert (got.ref, got.skipped, tree(to)) == (OLD_REF, (), OLD)
    assert verify(view, KEYS).defects == []
    with pytest.raises(CorruptError, match="no key is configured") as without:
        restore(store, KEYS, RestoreTarget(to.with_name("other")))
    assert "store.signing_key_file" in without.value.hint


def test_the_error_does_not_grow_with_the_number_of_damaged_commits(
    store: FileStore, to: Path
) -> None:
    """It names ten reasons and the number of the others."""
    for step in range(300, 320):
        store.put(KEYS.commit(CommitRef(1, step), 0, 1), b"{}")
    with pytest.raises(NothingToRestore, match=r"and 10 more$"):
        restore(store, KEYS, RestoreTarget(to), Selection(is_healthy=True))


# ---------------------------------------------------------------- failing stores


@pytest.mark.parametrize("prefix", [KEYS.commits, KEYS.data])
def test_an_unreachable_store_is_not_a_damaged_commit(to: Path, prefix: str) -> None:
    """A transient error is raised: a network failure must not restore an older commit."""
    unreachable = MemoryStore()
    unreachable.put(KEYS.generation(1), b"{}")
    commit(unreachable, OLD, step=100)
    commit(unreachable, NEW, step=200)

    def fail(what: str, key: str) -> None:
        if what.startswith("get") and key.startswith(prefix):
            raise Transient("connection reset")

    unreachable.before = fail
    with pytest.raises(Transient, match="connection reset"):
        restore(unreachable, KEYS, RestoreTarget(to))
    assert not to.exists()


def test_a_missing_store_is_not_an_empty_one(tmp_path: Path, to: Path) -> None:
    """A missing bucket is an error, and not a fresh run."""
    with pytest.raises(NotFound):
        restore(FileStore(f"file://{tmp_path / 'nowhere'}"), KEYS, RestoreTarget(to))
    assert not to.parent.exists()


# ---------------------------------------------------------------- the destination


def test_a_destination_in_use_is_refused_before_the_download(
    store: FileStore, tmp_path: Path
) -> None:
    """A file, a name below it, a link and a directory with entries stay untouched."""
    full = tmp_path / "full"
    full.mkdir()
    (full / "precious").write_text("x")
    file = tmp_path / "file"
    file.write_text("x")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    for destination in (full, file, link):
        with pytest.raises(StagingError, match="not an empty directory") as caught:
            restore(store, KEYS, RestoreTarget(destination))
        assert caught.value.hint
    with pytest.raises(StagingError, match="file/below failed: Not a directory") as caught:
        restore(store, KEYS, RestoreTarget(file / "below"))
    assert caught.value.hint
    assert tree(full) == {"precious": b"x"}
    assert file.read_text() == "x"
    assert sorted(os.listdir(tmp_path)) == ["file", "full", "link", "store"]


def test_an_empty_directory_is_replaced(store: FileStore, to: Path) -> None:
    """A destination may exist as an empty directory."""
    to.mkdir(parents=True)
    restore(store, KEYS, RestoreTarget(to))
    assert tree(to) == NEW


@pytest.mark.fault("S24")
def test_a_link_in_place_of_the_parent_is_not_followed(store: FileStore, tmp_path: Path) -> None:
    """A user who can write beside the destination cannot redirect the bytes."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "parent").symlink_to(elsewhere)
    with pytest.raises(StagingError, match="writing to"):
        restore(store, KEYS, RestoreTarget(tmp_path / "parent" / "here"))
    assert os.listdir(elsewhere) == []


@pytest.mark.fault("S24")
def test_a_link_put_into_the_target_during_the_restore_is_not_followed(
    store: FileStore, tmp_path: Path, to: Path
) -> None:
    """If a directory of the target becomes a link, the restore fails and writes nothing behind it."""
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "er").mkdir(parents=True)
    (elsewhere / "er" / "optim.pt").write_bytes(b"precious")

    def swap(_key: str, _offset: int, _into: memoryview) -> bool:
        partial = next(to.parent.iterdir()) / "files"
        if not (partial / "deep").is_symlink():
            (partial / "deep").rename(partial / "moved")
            (partial / "deep").symlink_to(elsewhere)
        return True

    with pytest.raises(StagingError, match="writing to"):
        restore(
            OddStore(tmp_path / "store", swap),
            KEYS,
            RestoreTarget(to),
            options=ReadOptions(connections=1),
        )
    assert (elsewhere / "er" / "optim.pt").read_bytes() == b"precious"
    assert not to.exists()


@pytest.mark.fault("G11", "D12")
def test_partial_directories_of_dead_restores_are_removed(store: FileStore, to: Path) -> None:
    """Those of another destination stay.  A running restore keeps its own: test_restore_interrupted.py."""
    dead = to.parent / ".here.partial-0123456789abcdef"
    (dead / "files").mkdir(parents=True)
    dead.chmod(0o700)
    (dead / "files" / "model.pt").write_bytes(b"half")
    other = to.parent / ".there.partial-0123456789abcdef"
    other.mkdir()
    restore(store, KEYS, RestoreTarget(to))
    assert tree(to) == NEW
    assert set(os.listdir(to.parent)) == {"here", other.name}
