# SPDX-License-Identifier: Apache-2.0
"""Copies of commits: verified, idempotent, and whole at every instant."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import pytest
from swansongd.bucket import catalog, claim, manifest
from swansongd.bucket.keys import RunKeys
from swansongd.bucket.signing import Signer
from swansongd.errors import CorruptError, NotFound, Permanent, Stopped, Transient
from swansongd.mirror.copier import Copier, Gone, ManifestPlace
from swansongd.mirror.fence import PromotedError
from swansongd.mirror.gate import Gate
from swansongd.model import CheckpointId, CommitRef, Extent, StoredObject
from swansongd.util.threads import parallel

from testkit import committed
from testkit.memory_store import MemoryStore

KEYS = RunKeys("r")
FILES = {"weights": bytes(range(256)) * 40, "index.json": b"{}", "empty": b""}
"""A file of eleven parts, a small one, and an empty one."""
CHUNK = 2_000


class Rig:
    """A store with commits, and a mirror."""

    def __init__(self, keys: RunKeys = KEYS) -> None:
        self.keys = keys
        self.primary, self.mirror = MemoryStore(), MemoryStore()
        self.mirror.url = "memory://mirror"
        self.stop = threading.Event()

    def copier(self, *, chunk_bytes: int = CHUNK, gate: Gate | None = None) -> Copier:
        return Copier(
            self.primary,
            self.mirror,
            self.keys,
            self.stop,
            gate=gate,
            connections=4,
            chunk_bytes=chunk_bytes,
        )

    def claim(self, generation: int, store: MemoryStore | None = None, by: str = "vm") -> None:
        made = claim.ClaimObject(run="r", generation=generation, start=f"{by}{generation}")
        data = claim.encode(made, self.keys.signer)
        (store or self.primary).put(self.keys.generation(generation), data)

    def commit(self, step: int = 100, generation: int = 1, **options: object) -> ManifestPlace:
        made = committed.commit(
            self.primary,
            options.pop("files", FILES),  # type: ignore[arg-type]
            step=step,
            generation=generation,
            **options,  # type: ignore[arg-type]
        )
        return ManifestPlace(made.ref, made.node, made.nodes)

    def whole(self) -> list[CommitRef]:
        """The commits of the mirror; fails if one names an object that the mirror lacks."""
        found = []
        for each in catalog.list_commits(self.mirror, self.keys):
            for made in catalog.load(self.mirror, self.keys, each):
                for stored in made.objects:
                    assert self.mirror.objects[stored.key] == self.primary.objects[stored.key]
            found.append(each.ref)
        return found


@pytest.fixture
def rig() -> Rig:
    made = Rig()
    made.claim(1)
    return made


def test_a_mirror_has_the_same_bytes_under_the_same_keys(rig: Rig) -> None:
    """Claim, data, manifest and records: the mirror is a store from which any Swansong restores."""
    place = rig.commit()
    rig.primary.put("r/farewells/00000001-x.json", b"{}")
    rig.primary.put("r/resumptions/00000001.json", b"{}")
    rig.primary.put("r/pins/best.json", b"{}")
    copier = rig.copier()
    result = copier.copy(place)
    assert copier.copy_records() == 3
    assert rig.mirror.objects == rig.primary.objects
    assert result.size_bytes == sum(map(len, FILES.values()))
    assert not rig.mirror.open, "no upload is left"


def test_a_second_copy_sends_nothing(rig: Rig) -> None:
    """A commit that is in the mirror costs a few small requests."""
    place = rig.commit()
    rig.copier().copy(place)
    sent, requests = rig.mirror.bytes_sent, rig.mirror.count("put_part")
    result = rig.copier().copy(place)
    assert (result.is_new, result.size_bytes) == (False, 0)
    assert rig.copier().absent() == []
    assert (rig.mirror.bytes_sent, rig.mirror.count("put_part")) == (sent, requests)
    rig.copier().copy_records()
    assert not rig.mirror.overwritten


@pytest.mark.fault("M04")
def test_a_crash_at_any_request_leaves_whole_commits_only(rig: Rig) -> None:
    """After each request to the mirror, every manifest there has all its objects; the next copy finishes."""
    place = rig.commit()
    reference = Rig()
    reference.primary.objects = rig.primary.objects
    reference.copier().copy(place)
    for last in range(1, len(reference.mirror.requests) + 1):
        rig.mirror = MemoryStore()
        left = last

        def before(*_: str) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise Transient("the copier was killed")

        rig.mirror.before = before
        with suppress(Transient):
            rig.copier().copy(place)
        rig.mirror.before = lambda *_: None
        assert rig.whole() in ([], [place.ref])
        rig.copier().copy(place)
        assert rig.whole() == [place.ref]
        assert not rig.mirror.overwritten


@pytest.mark.fault("M05")
@pytest.mark.parametrize("path", ["weights", "index.json"])
@pytest.mark.parametrize("chunk_bytes", [700, CHUNK, 10**6])
def test_damaged_bytes_are_never_copied_as_good(rig: Rig, path: str, chunk_bytes: int) -> None:
    """A flipped bit of the store ends the copy; the mirror gets neither the object nor the manifest."""
    place = rig.commit()
    key = next(key for key in rig.primary.objects if key.endswith(f"/{path}"))
    data = bytearray(rig.primary.objects[key])
    data[len(data) // 2] ^= 4
    rig.primary.objects[key] = bytes(data)
    with pytest.raises(CorruptError, match="do not match the digest"):
        rig.copier(chunk_bytes=chunk_bytes).copy(place)
    assert key not in rig.mirror.objects
    assert rig.whole() == []
    assert not rig.mirror.open


def test_two_copiers_at_once_are_harmless(rig: Rig) -> None:
    """Both finish, and no key is written with different bytes."""
    places = [rig.commit(step) for step in (1, 2, 3)]
    copiers = [rig.copier(), rig.copier()]
    pairs = [(copier, place) for place in places for copier in copiers]
    parallel(pairs, lambda pair: pair[0].copy(pair[1]) and None, threads=4)
    assert rig.whole() == sorted((place.ref for place in places), reverse=True)
    assert not rig.mirror.overwritten


def test_a_manifest_of_another_line_is_a_conflict(rig: Rig) -> None:
    """The same place with other bytes: nothing is replaced, and the copy fails."""
    place = rig.commit()
    key = rig.keys.commit(place.ref, 0, 1)
    rig.mirror.put(key, b"another manifest")
    with pytest.raises(CorruptError, match="differs from the same manifest"):
        rig.copier().copy(place)
    assert rig.mirror.objects[key] == b"another manifest"


def test_an_object_of_another_size_is_a_conflict(rig: Rig) -> None:
    """A key that a foreign writer took is never counted as copied."""
    place = rig.commit()
    key = next(key for key in rig.primary.objects if key.endswith("/weights"))
    rig.mirror.put(key, b"short")
    with pytest.raises(CorruptError, match="the mirror has other bytes under"):
        rig.copier().copy(place)
    assert rig.whole() == []


def test_a_commit_that_retention_deletes_is_gone(rig: Rig) -> None:
    """A manifest that vanishes before or during its copy is no damage; one that stays without its data is."""
    place = rig.commit()
    manifest_key = rig.keys.commit(place.ref, 0, 1)
    shard_key = next(key for key in rig.primary.objects if key.endswith("/weights"))
    del rig.primary.objects[shard_key]
    with pytest.raises(CorruptError, match="weights is missing from the store"):
        rig.copier().copy(place)

    def before(_what: str, key: str) -> None:
        if key == shard_key:
            rig.primary.objects.pop(manifest_key, None)

    rig.primary.before = before
    with pytest.raises(Gone):
        rig.copier().copy(place)
    with pytest.raises(Gone):
        rig.copier().copy(place)
    assert rig.whole() == []


def test_a_mirror_without_its_bucket_is_an_error_of_the_mirror(rig: Rig) -> None:
    """NotFound of the mirror is not taken for damage of the store."""
    place = rig.commit()

    def before(what: str, _key: str) -> None:
        if what in ("put_part", "put_shard", "begin"):
            raise NotFound("no such bucket")

    rig.mirror.before = before
    with pytest.raises(NotFound):
        rig.copier().copy(place)


@pytest.mark.fault("M03")
def test_a_mirror_that_refuses_leaves_the_store_as_it_is(rig: Rig) -> None:
    """Without the right to write, the copy fails, and the store got reads only."""
    place = rig.commit()
    before = dict(rig.primary.objects)

    def refuse(what: str, _key: str) -> None:
        if what.startswith(("put", "begin")):
            raise Permanent("access denied")

    rig.mirror.before = refuse
    rig.primary.requests.clear()
    with pytest.raises(Permanent):
        rig.copier().copy(place)
    assert rig.primary.objects == before
    assert {what for what, _ in rig.primary.requests} <= {"get", "head", "list"}


def test_a_signed_manifest_stays_valid() -> None:
    """A manifest is copied byte for byte; one without the signature of the run is not copied."""
    signer = Signer(b"k" * 32)
    rig = Rig(RunKeys("r", signer))
    rig.claim(1)
    place = rig.commit()
    with pytest.raises(CorruptError, match="not signed"):
        rig.copier().copy(place)
    key = rig.keys.commit(place.ref, 0, 1)
    made = manifest.decode(rig.primary.objects[key])
    rig.primary.objects[key] = manifest.encode(made, signer)
    rig.copier().copy(place)
    assert rig.whole() == [place.ref]


def test_a_pause_ends_a_transfer_within_a_window(rig: Rig) -> None:
    """A notice during a request ends that request; after the pause its chunk is sent again."""
    place = rig.commit(files={"weights": bytes(20_000)})
    is_open = threading.Event()
    is_open.set()
    parts = 0

    def before(what: str, _key: str) -> None:
        nonlocal parts
        parts += what == "put_part"
        if what == "put_part" and parts == 1:
            is_open.clear()
            threading.Timer(0.1, is_open.set).start()

    rig.mirror.before = before
    rig.copier(gate=Gate(rig.stop, is_open.is_set)).copy(place)
    assert rig.whole() == [place.ref]
    assert parts > 20_000 // CHUNK


def test_digests_that_cover_bytes_of_two_chunks_are_compared(rig: Rig) -> None:
    """A pack has small shards at any offset: its chunks move in order, and a flipped bit is found."""
    rig.commit(step=100)
    made = manifest.decode(rig.primary.objects[rig.keys.commit(CommitRef(1, 100), 0, 1)])
    (weights,) = [shard for shard in made.shards if shard.path == "weights"]
    data = b"odd" + rig.primary.objects[weights.extents[0].object.key]
    pack = StoredObject(rig.keys.pack(1, CheckpointId(200, "abc"), "b1", 0, 0), len(data))
    rig.primary.put(pack.key, data)
    packed = replace(weights, extents=(Extent(pack, 3, weights.size_bytes),))
    later = replace(made, step=200, shards=(packed,))
    place = ManifestPlace(later.ref, 0, 1)
    rig.primary.put(rig.keys.commit(later.ref, 0, 1), manifest.encode(later))
    flipped = bytearray(data)
    flipped[CHUNK + 1] ^= 1
    rig.primary.objects[pack.key] = bytes(flipped)
    with pytest.raises(CorruptError, match="do not match the digest"):
        rig.copier().copy(place)
    rig.primary.objects[pack.key] = data
    rig.copier().copy(place)
    assert rig.mirror.objects[pack.key] == data


def test_a_stop_ends_a_pause(rig: Rig) -> None:
    """A daemon that ends during an evacuation does not wait for the mirror."""
    place = rig.commit()
    gate = Gate(rig.stop, lambda: False)
    threading.Timer(0.1, rig.stop.set).start()
    with pytest.raises(Stopped):
        rig.copier(gate=gate).copy(place)
    assert rig.whole() == []


@pytest.mark.fault("M06")
@pytest.mark.parametrize("by", ["vm", "other"])
def test_nothing_is_copied_into_a_promoted_mirror(rig: Rig, by: str) -> None:
    """A claim that was made in the mirror fences the copier, whatever its number."""
    first = rig.commit()
    rig.copier().copy(first)
    rig.claim(2 if by == "vm" else 1, rig.mirror, by)
    rig.claim(3)
    second = rig.commit(step=200, generation=3)
    before = dict(rig.mirror.objects)
    with pytest.raises(PromotedError):
        rig.copier().copy(second)
    assert rig.mirror.objects == before


@pytest.mark.fault("M06")
def test_a_promotion_during_a_copy_keeps_the_manifest_out(rig: Rig) -> None:
    """The claims are compared once more before the manifest, because the data may have taken hours."""
    place = rig.commit()
    once: list[Callable[[], None]] = [lambda: rig.claim(1001, rig.mirror)]

    def before(what: str, _key: str) -> None:
        if what == "complete" and once:
            once.pop()()

    rig.mirror.before = before
    with pytest.raises(PromotedError):
        rig.copier().copy(place)
    assert rig.whole() == []


def test_records_are_created_and_never_replaced(rig: Rig) -> None:
    """A farewell that exists in the mirror stays, and a very large object is left out."""
    rig.primary.put("r/farewells/00000001-a.json", b"ours")
    rig.mirror.put("r/farewells/00000001-a.json", b"theirs")
    rig.primary.put("r/farewells/00000001-b.json", bytes(2**20 + 1))
    assert rig.copier().copy_records() == 0
    assert rig.mirror.objects["r/farewells/00000001-a.json"] == b"theirs"


def test_retention_of_the_mirror_during_a_copy_is_repaired(rig: Rig) -> None:
    """An object that a prune deletes after it was counted as present is copied before the manifest."""
    place = rig.commit()
    key = next(key for key in rig.primary.objects if key.endswith("/index.json"))
    rig.mirror.put(key, rig.primary.objects[key])

    def before(what: str, _key: str) -> None:
        if what == "begin":
            rig.mirror.objects.pop(key, None)

    rig.mirror.before = before
    rig.copier().copy(place)
    assert rig.whole() == [place.ref]


def test_digests_of_the_first_commit_cover_what_a_later_one_leaves_out(rig: Rig) -> None:
    """A later manifest names a part of an object: the first commit verifies the others."""
    rig.commit(step=100)
    key = next(key for key in rig.primary.objects if key.endswith("/weights"))
    first = manifest.decode(rig.primary.objects[rig.keys.commit(CommitRef(1, 100), 0, 1)])
    (weights,) = [shard for shard in first.shards if shard.path == "weights"]
    whole = weights.extents[0]
    begin = replace(
        weights,
        size_bytes=1000,
        part_digests=weights.part_digests[:32],
        extents=(replace(whole, size_bytes=1000),),
    )
    later = replace(first, step=200, shards=(begin,))
    place = ManifestPlace(later.ref, 0, 1)
    rig.primary.put(rig.keys.commit(later.ref, 0, 1), manifest.encode(later))
    data = rig.primary.objects[key]
    rig.primary.objects[key] = data[:-1] + bytes([data[-1] ^ 1])
    with pytest.raises(CorruptError, match="do not match the digest"):
        rig.copier().copy(place)
    rig.primary.objects[key] = data
    rig.copier().copy(place)
    assert rig.mirror.objects[key] == data
