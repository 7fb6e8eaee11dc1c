# SPDX-License-Identifier: Apache-2.0
"""Verification of chunks, samples of them, and the repair of damaged chunks from intact copies."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3
from swansong_bucket.errors import NothingToRestore, Permanent, Transient
from swansong_bucket.format import manifest
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.model import Chunk, CommitRef, Extent, StoredShard
from swansong_bucket.transfer.reader import ReadOptions
from swansong_tools.upkeep.repair import RepairOutcome, repair, repair_manifests
from swansong_tools.upkeep.verify import Findings, verify
from swansongd.restore.local_files import sets_in

from testkit.committed import CHUNK_BYTES, chunk_of, manifest_of, whole_shard
from testkit.memory_store import MemoryStore

KEYS = RunKeys("r")
QUICK = ReadOptions(connections=2)
LARGE = random.Random(1).randbytes(20 * CHUNK_BYTES + 7)
"""One file of many chunks."""
PIECES = [LARGE[start : start + CHUNK_BYTES] for start in range(0, len(LARGE), CHUNK_BYTES)]
FIRST, CHANGED = chunk_of(PIECES[0]), chunk_of(PIECES[5])
SMALL = {"a": b"first", "b": b"second" * 300}
PACK = chunk_of(b"".join(SMALL.values()))
MANIFESTS = [KEYS.commit(CommitRef(1, step), 0, 1) for step in (1, 2)]


def put_commit(store: MemoryStore, step: int, shards: list[StoredShard]) -> None:
    made = manifest_of(*shards, step=step, nonce=f"n{step}")
    store.objects[KEYS.commit(made.ref, 0, 1)] = manifest.encode(made)


def stored(store: MemoryStore, data: bytes, nonce: str = "a1") -> Chunk:
    chunk = chunk_of(data, nonce=nonce)
    store.objects[chunk.key] = data
    return chunk


@pytest.fixture
def store() -> MemoryStore:
    """Step 1 has a large file; step 2 changes one chunk of it; two small files of both share a chunk."""
    made = MemoryStore()
    chunks = [stored(made, piece) for piece in PIECES]
    pack = stored(made, b"".join(SMALL.values()))
    small = [
        StoredShard(path="a", size_bytes=5, extents=(Extent(pack, 0, 5),)),
        StoredShard(path="b", size_bytes=1800, extents=(Extent(pack, 5, 1800),)),
    ]
    put_commit(made, 1, [whole_shard("large", *chunks), *small])
    chunks[5] = stored(made, b"x" * CHUNK_BYTES)
    put_commit(made, 2, [whole_shard("large", *chunks), *small])
    return made


def flip(store: MemoryStore, key: str, at: int = 4) -> None:
    data = bytearray(store.objects[key])
    data[at] ^= 1
    store.objects[key] = bytes(data)


def copied(store: MemoryStore) -> MemoryStore:
    other = MemoryStore()
    other.objects = dict(store.objects)
    return other


def fix(store: MemoryStore, findings: Findings, **sources: object) -> list[RepairOutcome]:
    return repair(store, KEYS, findings.damaged, options=QUICK, **sources)  # type: ignore[arg-type]


# ---------------------------------------------------------------- verification


def test_a_chunk_that_several_commits_name_is_read_once(store: MemoryStore) -> None:
    """So is each manifest.  One listing compares the sizes of all chunks of a generation."""
    findings = verify(store, KEYS)
    assert findings.defects == []
    assert findings.read_bytes == findings.size_bytes == len(LARGE) + CHUNK_BYTES + 1805
    assert (findings.objects, findings.shared) == (len(PIECES) + 2, len(PIECES))
    reads = Counter(key for what, key in store.requests if what == "get")
    assert reads == dict.fromkeys(store.objects, 1)
    lists = {key for what, key in store.requests if what == "list" and key.startswith(KEYS.data)}
    assert lists == {f"{KEYS.data}00000001/"}
    assert store.count("head") == 0


def test_damage_is_reported_for_the_commits_that_name_the_chunk(store: MemoryStore) -> None:
    """The chunk that step 2 replaced damages step 1 alone; any other chunk damages both.

    A damaged chunk is read once more, and not once for each commit.
    """
    flip(store, CHANGED.key)
    assert [defect.ref.step for defect in verify(store, KEYS).defects] == [1]
    assert verify(store, KEYS, step=2).defects == []
    flip(store, FIRST.key)
    store.requests.clear()
    findings = verify(store, KEYS)
    assert [defect.ref.step for defect in findings.defects] == [2, 1]
    assert set(findings.damaged) == {FIRST, CHANGED}
    assert store.requests.count(("get", FIRST.key)) == 2
    assert [defect.ref.step for defect in verify(store, KEYS, step=2).defects] == [2]
    with pytest.raises(NothingToRestore):
        verify(store, KEYS, step=3)


def test_a_bit_that_flips_in_transit_is_no_damage(store: MemoryStore) -> None:
    """A chunk that does not match its name is read a second time."""
    flip(store, FIRST.key)

    def heal(what: str, key: str) -> None:
        if (what, key) == ("get", FIRST.key) and store.requests.count((what, key)) == 2:
            store.objects[key] = PIECES[0]

    store.before = heal
    assert verify(store, KEYS).defects == []


def test_a_sample_reads_its_share_and_compares_all_sizes(store: MemoryStore) -> None:
    """About this share of the bytes; a missing object is found in any case."""
    numbers = random.Random(5)
    findings = verify(store, KEYS, sample=0.3, chance=numbers.random)
    assert 0.1 < findings.read_bytes / findings.size_bytes < 0.5
    assert verify(store, KEYS, sample=1e-9).read_bytes > 0
    del store.objects[PACK.key]
    store.objects[FIRST.key] += b"."
    findings = verify(store, KEYS, sample=1e-9)
    assert {defect.problem for defect in findings.defects} == {
        "a is missing from the store",
        "b is missing from the store",
        "large has an object of 1001 bytes instead of 1000",
    }


def test_a_commit_that_is_deleted_meanwhile_is_no_damage(store: MemoryStore) -> None:
    """Retention deletes the manifest first, and then the chunks of the commit."""
    gone = chunk_of(b"x" * CHUNK_BYTES).key

    def prune(what: str, each: str) -> None:
        if what == "list" and each.startswith(KEYS.data):
            store.objects.pop(gone, None)
            store.objects.pop(MANIFESTS[1], None)

    store.before = prune
    assert verify(store, KEYS).defects == []


# ---------------------------------------------------------------- repair

Damage = Callable[[MemoryStore, str], object]
DAMAGES: dict[str, Damage] = {
    "flipped": flip,
    "missing": lambda store, key: store.objects.pop(key),
    "shorter": lambda store, key: store.objects.update({key: store.objects[key][:-1]}),
    "longer": lambda store, key: store.objects.update({key: store.objects[key] + b"."}),
    "empty": lambda store, key: store.objects.update({key: b""}),
}


@pytest.mark.fault("O80")
@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("chunk", [FIRST, PACK], ids=["whole", "shared"])
def test_a_chunk_comes_back_from_the_mirror(store: MemoryStore, how: str, chunk: Chunk) -> None:
    """With exactly the bytes of its name; nothing else changes."""
    mirror = copied(store)
    DAMAGES[how](store, chunk.key)
    findings = verify(store, KEYS)
    assert {defect.ref.step for defect in findings.defects} == {1, 2}
    (outcome,) = fix(store, findings, mirror=mirror)
    assert (outcome.problem, outcome.origin) == ("", "mirror")
    assert outcome.commits == [CommitRef(1, 2), CommitRef(1, 1)]
    assert store.objects == mirror.objects
    assert verify(store, KEYS).defects == []


@pytest.mark.fault("O80")
def test_a_refused_replacement_is_reported(store: MemoryStore) -> None:
    """The damaged object stays as it is."""
    mirror = copied(store)
    flip(store, FIRST.key)
    findings = verify(store, KEYS)
    broken = dict(store.objects)

    def refuse(what: str, _key: str) -> None:
        if what == "put":
            raise Permanent("403")

    store.before = refuse
    (outcome,) = fix(store, findings, mirror=mirror)
    assert "403" in outcome.problem
    assert store.objects == broken


@pytest.mark.fault("O80")
def test_a_chunk_with_the_same_digest_is_a_copy(store: MemoryStore) -> None:
    """Another commit has the same bytes under another key; no mirror is needed."""
    chunks = [stored(store, piece, nonce="b2") for piece in PIECES]
    put_commit(store, 3, [whole_shard("renamed", *chunks)])
    before = dict(store.objects)
    flip(store, FIRST.key)
    (outcome,) = fix(store, verify(store, KEYS))
    assert (outcome.problem, outcome.origin) == ("", "run")
    assert store.objects == before
    flip(store, FIRST.key, at=1)
    flip(store, chunks[0].key, at=2)
    outcomes = fix(store, verify(store, KEYS))
    assert all("no intact copy" in outcome.problem for outcome in outcomes)


@pytest.mark.fault("O80")
@pytest.mark.parametrize("chunk", [FIRST, PACK], ids=["whole", "shared"])
def test_files_of_a_set_on_this_machine_are_a_copy(
    store: MemoryStore, tmp_path: Path, chunk: Chunk
) -> None:
    """Files of the same paths and sizes whose bytes match; other bytes do not count."""
    before = dict(store.objects)
    del store.objects[chunk.key]
    findings = verify(store, KEYS)
    other, same = tmp_path / "step-000000000001.aa", tmp_path / "step-000000000001.bb"
    for directory in (other, same):
        directory.mkdir()
        (directory / "large").write_bytes(b"y" * len(LARGE))
        (directory / "a").write_bytes(SMALL["a"])
        (directory / "b").write_bytes(b"y" * 1800)
    with sets_in(tmp_path) as local:
        (outcome,) = fix(store, findings, local=local)
    assert "no intact copy" in outcome.problem
    assert chunk.key not in store.objects
    (same / "large").write_bytes(LARGE)
    (same / "b").write_bytes(SMALL["b"])
    with sets_in(tmp_path) as local:
        (outcome,) = fix(store, findings, local=local)
    assert (outcome.problem, outcome.origin) == ("", "staging")
    assert store.objects == before


@pytest.mark.fault("O81")
@pytest.mark.parametrize("mirror_has", ["other bytes", "nothing", "no answer"])
def test_without_an_intact_copy_nothing_is_written(store: MemoryStore, mirror_has: str) -> None:
    """A damaged or unreachable mirror helps nothing and harms nothing; the commits are reported."""
    mirror = copied(store)
    flip(store, FIRST.key, at=0)
    damaged = dict(store.objects)
    if mirror_has == "other bytes":
        flip(mirror, FIRST.key, at=1)
    elif mirror_has == "nothing":
        mirror.objects.clear()
    else:
        mirror.before = _unreachable
    (outcome,) = fix(store, verify(store, KEYS), mirror=mirror)
    why = "the mirror failed: timed out" if mirror_has == "no answer" else "of its 1000 bytes"
    assert "no intact copy" in outcome.problem
    assert why in outcome.problem
    assert store.objects == damaged
    assert outcome.origin == ""


def _unreachable(*_: str) -> None:
    raise Transient("timed out")


PLANTED: dict[str, Callable[[Chunk], Extent]] = {
    "a byte more": lambda chunk: Extent.whole(Chunk(chunk.key, chunk.size_bytes + 1)),
    "a byte less": lambda chunk: Extent.whole(Chunk(chunk.key, chunk.size_bytes - 1)),
    "one byte": lambda chunk: Extent.whole(Chunk(chunk.key, 1)),
    "another offset": lambda chunk: Extent(chunk, 7, chunk.size_bytes - 7),
    "more and another offset": lambda chunk: Extent(Chunk(chunk.key, chunk.size_bytes + 9), 9, 10),
}


@pytest.mark.fault("S6", "O81")
@pytest.mark.parametrize("manifests", [1, 50])
@pytest.mark.parametrize("claim", PLANTED)
def test_a_planted_manifest_cannot_change_an_intact_object(
    store: MemoryStore, tmp_path: Path, claim: str, manifests: int
) -> None:
    """It names honest chunks with other sizes or offsets; all possible copies have other bytes.

    Neither do many such manifests, nor a second repair.
    """
    steps = range(3, 3 + manifests)
    extents = [PLANTED[claim](chunk) for chunk in (FIRST, CHANGED, PACK)]
    twins = [
        stored(store, b"planted" * 200, nonce=f"p{number}") for number, _ in enumerate(extents)
    ]
    renamed = [
        Extent.whole(Chunk(KEYS.chunk(1, extent.chunk.digest, f"q{number}"), 1400))
        for number, extent in enumerate(extents)
    ]
    for extent, twin in zip(renamed, twins, strict=True):
        store.objects[extent.chunk.key] = store.objects[twin.key]
    all_extents = (*extents, *renamed)
    size_bytes = sum(extent.size_bytes for extent in all_extents)
    planted = [StoredShard(path="large", size_bytes=size_bytes, extents=all_extents)]
    for step in steps:
        put_commit(store, step, planted)
    (tmp_path / "step-000000000003.aa").mkdir()
    (tmp_path / "step-000000000003.aa" / "large").write_bytes(bytes(size_bytes))
    mirror = copied(store)
    for chunk in (FIRST, CHANGED, PACK):
        mirror.objects[chunk.key] = bytes(size_bytes)
    honest = {k: d for k, d in store.objects.items() if KEYS.is_data(k) and _is_honest(k, d)}
    with sets_in(tmp_path) as local:
        outcomes = [
            outcome
            for _ in range(2)
            for outcome in fix(store, verify(store, KEYS), mirror=mirror, local=local)
        ]
    assert {key: store.objects[key] for key in honest} == honest
    puts = [key for what, key in store.requests if what == "put"]
    assert all(_is_honest(key, store.objects[key]) for key in puts)
    assert not set(puts) & set(honest)
    assert {defect.ref.step for defect in verify(store, KEYS).defects} <= set(steps)
    assert all(outcome.problem for outcome in outcomes if outcome.key in honest)


def _is_honest(key: str, data: bytes) -> bool:
    return blake3(data).digest() == Chunk(key, 1).digest


@pytest.mark.fault("O80", "S6")
def test_a_planted_size_does_not_prevent_the_repair(store: MemoryStore) -> None:
    """The honest commits are whole again; the planted one stays damaged."""
    planted = whole_shard("p", Chunk(FIRST.key, 1001))
    put_commit(store, 3, [planted])
    mirror = copied(store)
    flip(store, FIRST.key)
    problems = {o.size_bytes: o.problem for o in fix(store, verify(store, KEYS), mirror=mirror)}
    assert problems[1000] == ""
    assert problems[1001]
    assert store.objects == mirror.objects
    assert {defect.ref.step for defect in verify(store, KEYS).defects} == {3}


@pytest.mark.fault("O80")
def test_an_object_that_is_intact_by_now_is_not_written(store: MemoryStore) -> None:
    """Another repair was faster, or the damage was in transit."""
    mirror = copied(store)
    flip(store, FIRST.key)
    findings = verify(store, KEYS)
    store.objects = dict(mirror.objects)
    store.requests.clear()
    (outcome,) = fix(store, findings, mirror=mirror)
    assert (outcome.problem, outcome.origin) == ("", "object")
    assert store.count("put") == 0


@pytest.mark.fault("O80")
def test_a_store_that_does_not_keep_the_new_bytes_is_not_reported_as_repaired(
    store: MemoryStore,
) -> None:
    """The repaired object is read back."""
    mirror = copied(store)
    flip(store, FIRST.key)
    findings = verify(store, KEYS)
    store.after = lambda what, key: flip(store, key, 7) if what == "put" else None
    (outcome,) = fix(store, findings, mirror=mirror)
    assert "does not return the bytes" in outcome.problem


@pytest.mark.fault("O80")
def test_a_chunk_whose_commits_are_gone_is_not_written_again(store: MemoryStore) -> None:
    """Retention deleted them between the verification and the repair."""
    mirror = copied(store)
    del store.objects[PACK.key]
    findings = verify(store, KEYS)
    for key in MANIFESTS:
        del store.objects[key]
    assert fix(store, findings, mirror=mirror) == []
    assert PACK.key not in store.objects


@pytest.mark.fault("O80")
def test_a_damaged_manifest_comes_back_and_a_missing_one_stays_away(store: MemoryStore) -> None:
    """A missing manifest may have been deleted on purpose: its commit does not exist."""
    mirror = copied(store)
    first, second = MANIFESTS
    flip(store, first, 30)
    del store.objects[second]
    (outcome,) = repair_manifests(store, KEYS, mirror, QUICK)
    assert (outcome.key, outcome.problem, outcome.origin) == (first, "", "mirror")
    assert second not in store.objects
    assert store.objects[first] == mirror.objects[first]
    assert repair_manifests(store, KEYS, mirror, QUICK) == []
    flip(store, first, 30)
    mirror.objects[first] = mirror.objects[second]
    (outcome,) = repair_manifests(store, KEYS, mirror, QUICK)
    assert "in the mirror" in outcome.problem
    assert store.objects[first] != mirror.objects[first]


def test_a_repair_shows_its_progress(store: MemoryStore) -> None:
    """In bytes of the damaged chunks, up to all of them; manifests in commits."""
    mirror = copied(store)
    for chunk in (FIRST, CHANGED, PACK):
        flip(store, chunk.key)
    findings = verify(store, KEYS)
    steps: list[tuple[int, int]] = []
    options = replace(QUICK, progress=lambda done, total: steps.append((done, total)))
    repair(store, KEYS, findings.damaged, mirror=mirror, options=options)
    assert len(steps) == 3
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)
    assert steps[-1] == (3805, 3805)
    commits: list[tuple[int, int]] = []
    repair_manifests(
        store, KEYS, mirror, QUICK, progress=lambda done, total: commits.append((done, total))
    )
    assert commits[-1] == (2, 2)
