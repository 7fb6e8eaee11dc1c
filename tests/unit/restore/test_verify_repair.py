# SPDX-License-Identifier: Apache-2.0
"""Verification by parts, samples of them, and the repair of damaged objects from intact copies."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swansongd.bucket import manifest
from swansongd.bucket.keys import RunKeys
from swansongd.bucket.manifest import Manifest
from swansongd.errors import Permanent, Transient
from swansongd.model import (
    CheckpointId,
    CheckpointKind,
    CommitRef,
    Extent,
    StoredObject,
    StoredShard,
)
from swansongd.restore.local_files import copies_in
from swansongd.restore.reader import ReadOptions
from swansongd.restore.repair import RepairOutcome, repair, repair_manifests
from swansongd.restore.stored_parts import gaps, parts_of, runs
from swansongd.restore.verify import Findings, verify
from swansongd.stores.checksums import crc32c

from testkit.committed import PART_SIZE_BYTES, commit, digests_of, part_digest
from testkit.memory_store import MemoryStore

KEYS = RunKeys("r")
QUICK = ReadOptions(connections=2)
LARGE = random.Random(1).randbytes(20 * PART_SIZE_BYTES + 7)
"""One file of many parts."""


def shard(path: str, data: bytes, extents: list[Extent]) -> StoredShard:
    return StoredShard(
        path=path,
        size_bytes=len(data),
        part_size_bytes=PART_SIZE_BYTES,
        part_digests=digests_of(data),
        crc32c=crc32c(data),
        extents=tuple(extents),
    )


def put_commit(
    store: MemoryStore, step: int, shards: list[StoredShard], generation: int = 1
) -> None:
    made = Manifest(
        run="r", generation=generation, step=step, kind=CheckpointKind.PERIODIC, node=0, nodes=1,
        nonce=f"n{step}", shards=tuple(shards), created="2030-01-01T00:00:00Z",
    )  # fmt: skip
    store.objects[KEYS.commit(made.ref, 0, 1)] = manifest.encode(made)


def stored(store: MemoryStore, step: int, path: str, data: bytes) -> StoredObject:
    key = KEYS.shard(1, CheckpointId(step, "abc"), "a1", 0, path)
    store.objects[key] = data
    return StoredObject(key, len(data))


@pytest.fixture
def store() -> MemoryStore:
    """Step 1 has a large file; step 2 changes one part of it; both have two small files in a pack."""
    made = MemoryStore()
    size = PART_SIZE_BYTES
    changed = LARGE[: 5 * size] + b"x" * size + LARGE[6 * size :]
    whole = stored(made, 1, "large", LARGE)
    part = stored(made, 2, "large", b"x" * size)
    pack = stored(made, 1, "pack", b"first" + b"second" * 300)
    small = [
        shard("a", b"first", [Extent(pack, 0, 5)]),
        shard("b", b"second" * 300, [Extent(pack, 5, 1800)]),
    ]
    put_commit(made, 1, [shard("large", LARGE, [Extent(whole, 0, len(LARGE))]), *small])
    extents = [
        Extent(whole, 0, 5 * size),
        Extent(part, 0, size),
        Extent(whole, 6 * size, len(LARGE) - 6 * size),
    ]
    put_commit(made, 2, [shard("large", changed, extents), *small])
    return made


def key(store: MemoryStore, name: str, step: int = 1) -> str:
    (found,) = (k for k in store.objects if k.endswith(f"/{name}") and f"{step:012d}-" in k)
    return found


def flip(store: MemoryStore, key: str, at: int) -> None:
    data = bytearray(store.objects[key])
    data[at] ^= 1
    store.objects[key] = bytes(data)


def copied(store: MemoryStore) -> MemoryStore:
    other = MemoryStore()
    other.objects = dict(store.objects)
    return other


def fix(store: MemoryStore, findings: Findings, **sources: object) -> list[RepairOutcome]:
    return repair(store, KEYS, findings.damaged, options=QUICK, **sources)  # type: ignore[arg-type]


# ---------------------------------------------------------------- parts


@given(st.data())
def test_the_parts_of_a_shard_are_its_bytes_in_order(data: st.DataObject) -> None:
    """For any extents, also if parts and extents end at different places."""
    content = random.Random(3).randbytes(data.draw(st.integers(0, 60)))
    cuts = sorted(data.draw(st.sets(st.integers(1, 59).filter(lambda cut: cut < len(content)))))
    bounds = [0, *cuts, len(content)]
    objects = {}
    extents = []
    for number, (start, end) in enumerate(itertools.pairwise(bounds)):
        if end > start:
            objects[f"o{number}"] = b"pad" + content[start:end]
            extents.append(Extent(StoredObject(f"o{number}", end - start + 3), 3, end - start))
    part_bytes = data.draw(st.integers(1, 20))
    made = replace(
        shard("p", content, extents),
        part_size_bytes=part_bytes,
        part_digests=digests_of(content, part_bytes),
    )
    parts = list(parts_of(made))
    joined = [
        b"".join(
            objects[piece.object.key][piece.offset_bytes : piece.offset_bytes + piece.size_bytes]
            for piece in part.pieces
        )
        for part in parts
    ]
    assert b"".join(joined) == content
    assert [part_digest(each) for each in joined] == [part.digest for part in parts]
    grouped = runs((part for part in parts if part.pieces), 30)
    assert sorted(map(hash, (p for run in grouped for p in run))) == sorted(
        hash(part) for part in parts if part.pieces
    )
    for run in grouped:
        assert len(run) == 1 or sum(part.size_bytes for part in run) <= 30


def test_gaps_are_the_bytes_that_no_range_covers() -> None:
    """Ranges may overlap and come in any order."""
    assert gaps([(5, 5), (0, 2), (1, 2), (6, 1)], 12) == [(3, 2), (10, 2)]
    assert gaps([(0, 12)], 12) == []
    assert gaps([], 3) == [(0, 3)]


# ---------------------------------------------------------------- verification


def test_a_part_that_several_commits_share_is_read_once(store: MemoryStore) -> None:
    """Neighbouring parts and small files in one pack cost one request."""
    findings = verify(store, KEYS)
    assert findings.defects == []
    assert findings.read_bytes == findings.size_bytes
    assert findings.size_bytes == len(LARGE) + PART_SIZE_BYTES + 1805
    reads = Counter(k for what, k in store.requests if what == "get" and KEYS.is_data(k))
    assert reads == {key(store, "large"): 1, key(store, "large", 2): 1, key(store, "pack"): 1}


def test_damage_is_reported_for_the_commits_that_name_the_part(store: MemoryStore) -> None:
    """The part that step 2 replaced damages step 1 alone; any other part damages both."""
    flip(store, key(store, "large"), 5 * PART_SIZE_BYTES)
    assert [defect.ref.step for defect in verify(store, KEYS).defects] == [1]
    flip(store, key(store, "large"), 0)
    findings = verify(store, KEYS)
    assert [defect.ref.step for defect in findings.defects] == [2, 1]
    assert {damaged.key for damaged in findings.damaged} == {key(store, "large")}


def test_a_sample_reads_its_share_and_compares_all_sizes(store: MemoryStore) -> None:
    """About this share of the bytes; a missing object is found in any case."""
    numbers = random.Random(5)
    findings = verify(store, KEYS, sample=0.3, chance=numbers.random)
    assert 0.1 < findings.read_bytes / findings.size_bytes < 0.5
    assert verify(store, KEYS, sample=1e-9).read_bytes > 0
    del store.objects[key(store, "pack")]
    findings = verify(store, KEYS, sample=1e-9)
    assert {defect.problem for defect in findings.defects} == {
        "a is missing from the store",
        "b is missing from the store",
    }


def test_a_commit_that_is_deleted_meanwhile_is_no_damage(store: MemoryStore) -> None:
    """Retention deletes the manifest first, and then the objects of the commit."""
    gone = key(store, "large", 2)

    def prune(what: str, each: str) -> None:
        if what == "list" and each.startswith(KEYS.data):
            store.objects.pop(gone, None)
            store.objects.pop(KEYS.commit(CommitRef(1, 2), 0, 1), None)

    store.before = prune
    assert verify(store, KEYS).defects == []


# ---------------------------------------------------------------- repair

Damage = Callable[[MemoryStore, str], object]
DAMAGES: dict[str, Damage] = {
    "flipped": lambda store, key: flip(store, key, 4),
    "missing": lambda store, key: store.objects.pop(key),
    "shorter": lambda store, key: store.objects.update({key: store.objects[key][:-1]}),
    "empty": lambda store, key: store.objects.update({key: b""}),
}


@pytest.mark.fault("O80")
@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("name", ["large", "pack"])
def test_an_object_comes_back_from_the_mirror(store: MemoryStore, how: str, name: str) -> None:
    """With exactly the bytes that the manifests name; nothing else changes."""
    mirror = copied(store)
    DAMAGES[how](store, key(store, name))
    findings = verify(store, KEYS)
    assert [defect.ref.step for defect in findings.defects][-1] == 1
    (outcome,) = fix(store, findings, mirror=mirror)
    assert outcome.problem == ""
    assert outcome.copied_bytes["mirror"] > 0
    assert store.objects == mirror.objects
    assert verify(store, KEYS).defects == []


@pytest.mark.fault("O80")
def test_a_large_object_is_replaced_in_parts(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store completes the new bytes at once, and a failed upload leaves none behind."""
    monkeypatch.setattr("swansongd.restore.repair.PUT_BYTES_MAX", 100)
    monkeypatch.setattr("swansongd.restore.repair._PART_BYTES", 4000)
    mirror = copied(store)
    flip(store, key(store, "large"), 4)
    findings = verify(store, KEYS)
    broken = store.objects[key(store, "large")]

    def refuse(what: str, _key: str) -> None:
        if what == "complete":
            raise Permanent("403")

    store.before = refuse
    (outcome,) = fix(store, findings, mirror=mirror)
    assert "403" in outcome.problem
    assert store.objects[key(store, "large")] == broken
    assert not store.open
    store.before = lambda *_: None
    (outcome,) = fix(store, findings, mirror=mirror)
    assert outcome.problem == ""
    assert store.objects == mirror.objects


@pytest.mark.fault("O80")
def test_an_identical_part_of_another_object_is_a_copy(store: MemoryStore) -> None:
    """A full copy of the file in another commit repairs both directions, without a mirror."""
    whole = stored(store, 3, "large", LARGE)
    put_commit(store, 3, [shard("large", LARGE, [Extent(whole, 0, len(LARGE))])])
    before = dict(store.objects)
    flip(store, key(store, "large"), 0)
    (outcome,) = fix(store, verify(store, KEYS))
    assert outcome.copied_bytes["run"] == PART_SIZE_BYTES
    assert store.objects == before


@pytest.mark.fault("O80")
def test_a_sealed_set_on_this_machine_is_a_copy(store: MemoryStore, tmp_path: Path) -> None:
    """A file of the same path and size whose bytes match; links, FIFOs and other bytes do not count."""
    before = dict(store.objects)
    flip(store, key(store, "large"), 0)
    findings = verify(store, KEYS)
    other, same = tmp_path / "step-000000000001.aa", tmp_path / "step-000000000001.bb"
    other.mkdir()
    (other / "large").write_bytes(b"y" * len(LARGE))
    with copies_in(tmp_path) as local:
        (outcome,) = fix(store, findings, local=local)
    assert "no intact copy" in outcome.problem
    assert outcome.commits == [CommitRef(1, 2), CommitRef(1, 1)]
    same.mkdir()
    (same / "large").write_bytes(LARGE)
    with copies_in(tmp_path) as local:
        (outcome,) = fix(store, findings, local=local)
    assert outcome.copied_bytes["staging"] == PART_SIZE_BYTES
    assert store.objects == before


@pytest.mark.fault("O81")
@pytest.mark.parametrize("mirror_has", ["other bytes", "nothing", "no answer"])
def test_without_an_intact_copy_nothing_is_written(store: MemoryStore, mirror_has: str) -> None:
    """A damaged or unreachable mirror helps nothing and harms nothing; the commits are reported."""
    mirror = copied(store)
    flip(store, key(store, "large"), 0)
    damaged = dict(store.objects)
    if mirror_has == "other bytes":
        flip(mirror, key(store, "large"), 1)
    elif mirror_has == "nothing":
        mirror.objects.clear()
    else:
        mirror.before = _unreachable
    (outcome,) = fix(store, verify(store, KEYS), mirror=mirror)
    assert "no intact copy of 1000 bytes from 0 of large" in outcome.problem
    assert store.objects == damaged
    assert outcome.copied_bytes == {}


def _unreachable(*_: str) -> None:
    raise Transient("timed out")


@pytest.mark.fault("O81")
def test_bytes_that_no_manifest_names_cannot_be_made_up(store: MemoryStore) -> None:
    """They stay as they are in a damaged object; a missing object with such bytes is not repaired."""
    del store.objects[
        KEYS.commit(CommitRef(1, 1), 0, 1)
    ]  # step 2 does not name one part of the file
    mirror = copied(store)
    flip(store, key(store, "large"), 0)
    flip(store, key(store, "large"), 5 * PART_SIZE_BYTES)
    kept = store.objects[key(store, "large")][5 * PART_SIZE_BYTES]
    (outcome,) = fix(store, verify(store, KEYS), mirror=mirror)
    assert outcome.problem == ""
    assert store.objects[key(store, "large")][5 * PART_SIZE_BYTES] == kept
    assert verify(store, KEYS).defects == []
    del store.objects[key(store, "large")]
    (outcome,) = fix(store, verify(store, KEYS), mirror=mirror)
    assert outcome.problem == "no manifest names 1000 of its bytes"
    assert key(mirror, "large") not in store.objects


@pytest.mark.fault("O80")
def test_a_part_across_two_objects_repairs_either(store: MemoryStore) -> None:
    """Only its bytes within the damaged object are written."""
    data = random.Random(9).randbytes(PART_SIZE_BYTES)
    one, two = stored(store, 4, "one", data[:300]), stored(store, 4, "two", data[300:])
    put_commit(store, 4, [shard("s", data, [Extent(one, 0, 300), Extent(two, 0, 700)])])
    mirror = copied(store)
    assert verify(store, KEYS).defects == []
    flip(store, two.key, 5)
    findings = verify(store, KEYS)
    assert [defect.problem for defect in findings.defects] == ["s does not match its digest"]
    assert {outcome.problem for outcome in fix(store, findings, mirror=mirror)} == {""}
    assert store.objects == mirror.objects


@pytest.mark.fault("O80")
def test_a_store_that_does_not_keep_the_new_bytes_is_not_reported_as_repaired(
    store: MemoryStore,
) -> None:
    """The repaired object is read back."""
    mirror = copied(store)
    flip(store, key(store, "large"), 0)
    findings = verify(store, KEYS)
    store.after = lambda what, key: flip(store, key, 7) if what == "put" else None
    (outcome,) = fix(store, findings, mirror=mirror)
    assert "does not return the bytes" in outcome.problem


@pytest.mark.fault("O80")
def test_an_object_whose_commits_are_gone_is_not_written_again(store: MemoryStore) -> None:
    """Retention deleted them between the verification and the repair."""
    mirror = copied(store)
    del store.objects[key(store, "pack")]
    findings = verify(store, KEYS)
    for step in (1, 2):
        del store.objects[KEYS.commit(CommitRef(1, step), 0, 1)]
    assert fix(store, findings, mirror=mirror) == []
    assert key(mirror, "pack") not in store.objects


@pytest.mark.fault("O80")
def test_a_damaged_manifest_comes_back_and_a_missing_one_stays_away(store: MemoryStore) -> None:
    """A missing manifest may have been deleted on purpose: its commit does not exist."""
    mirror = copied(store)
    first, second = (KEYS.commit(CommitRef(1, step), 0, 1) for step in (1, 2))
    flip(store, first, 30)
    del store.objects[second]
    (outcome,) = repair_manifests(store, KEYS, mirror, QUICK)
    assert (outcome.key, outcome.problem) == (first, "")
    assert second not in store.objects
    assert store.objects[first] == mirror.objects[first]
    assert repair_manifests(store, KEYS, mirror, QUICK) == []
    flip(store, first, 30)
    mirror.objects[first] = mirror.objects[second]
    (outcome,) = repair_manifests(store, KEYS, mirror, QUICK)
    assert "in the mirror" in outcome.problem
    assert store.objects[first] != mirror.objects[first]


def test_a_commit_of_the_testkit_is_whole() -> None:
    """The commits of the other tests have the same parts."""
    made = MemoryStore()
    commit(made, {"a": LARGE, "empty": b""})
    findings = verify(made, KEYS)
    assert (findings.defects, findings.read_bytes) == ([], len(LARGE))


def test_a_repair_shows_its_progress(store: MemoryStore) -> None:
    """In bytes of the damaged object, up to all of them; manifests in commits."""
    mirror = copied(store)
    flip(store, key(store, "large"), 5)
    findings = verify(store, KEYS)
    steps: list[tuple[int, int]] = []
    options = replace(QUICK, progress=lambda done, total: steps.append((done, total)))
    assert not repair(store, KEYS, findings.damaged, mirror=mirror, options=options)[0].problem
    assert len(steps) == 21, "one for each part of the object"
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)
    assert steps[-1] == (len(LARGE), len(LARGE))
    commits: list[tuple[int, int]] = []
    repair_manifests(
        store, KEYS, mirror, QUICK, progress=lambda done, total: commits.append((done, total))
    )
    assert commits[-1] == (2, 2)
