# SPDX-License-Identifier: Apache-2.0
"""Copies of commits: verified, idempotent, and whole at every instant."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import pytest
from blake3 import blake3
from swansong_bucket.errors import CorruptError, MissingError, NotFound, Stopped, Transient
from swansong_bucket.format import claim, manifest
from swansong_bucket.format.keys import ManifestPlace, RunKeys
from swansong_bucket.format.manifest import Manifest
from swansong_bucket.mirror.copier import VERIFIED_MAX, Copier
from swansong_bucket.mirror.fence import PromotedError
from swansong_bucket.model import Chunk, CommitRef
from swansong_bucket.runs import catalog, commit
from swansong_bucket.runs.signing import signed
from swansong_bucket.stores.base import ObjectInfo
from swansong_bucket.util.threads import parallel

from testkit import committed
from testkit.memory_store import MemoryStore
from testkit.records import KEY

KEYS = RunKeys("r")
FILES = {"weights": bytes(range(256)) * 40, "index.json": b"{}", "empty": b""}
"""A file of eleven chunks, a small one, and an empty one."""


class Rig:
    """A store with commits, and a mirror."""

    def __init__(self, keys: RunKeys = KEYS) -> None:
        self.keys = keys
        self.primary, self.mirror = MemoryStore(), MemoryStore()
        self.mirror.url = "memory://mirror"
        self.stop = threading.Event()

    def copier(self) -> Copier:
        return Copier(self.primary, self.mirror, self.keys, self.stop, connections=4)

    def claim(self, generation: int, store: MemoryStore | None = None, by: str = "vm") -> None:
        made = claim.ClaimObject(run="r", generation=generation, start=f"{by}{generation}")
        data = claim.encode(made)
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

    def chunks(self, place: ManifestPlace) -> tuple[Chunk, ...]:
        return self.manifest(place).chunks

    def manifest(self, place: ManifestPlace) -> Manifest:
        return manifest.decode(self.primary.objects[self.keys.commit(place.ref, 0, 1)])

    def read_back(self) -> int:
        """Number of chunks that were read from the mirror."""
        return sum(what == "get" and "/data/" in key for what, key in self.mirror.requests)

    def whole(self) -> list[CommitRef]:
        """The commits of the mirror; fails if one names a chunk that the mirror lacks."""
        found = []
        for each in catalog.list_commits(self.mirror, self.keys):
            for made in catalog.load(self.mirror, self.keys, each):
                for chunk in made.chunks:
                    assert blake3(self.mirror.objects[chunk.key]).digest() == chunk.digest
            found.append(each.ref)
        return found


def flipped(data: bytes) -> bytes:
    """The data with one flipped bit."""
    return data[:-1] + bytes([data[-1] ^ 4])


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


def test_a_second_copy_sends_nothing(rig: Rig) -> None:
    """A commit that is in the mirror costs a few small requests."""
    place = rig.commit()
    copier = rig.copier()
    copier.copy(place)
    sent = rig.mirror.bytes_sent
    result = copier.copy(place)
    assert (result.is_new, result.chunks, result.size_bytes) == (False, 0, 0)
    assert copier.absent() == []
    assert (rig.mirror.bytes_sent, rig.read_back()) == (sent, 0)
    copier.copy_records()
    assert not rig.mirror.overwritten


def test_chunks_of_earlier_commits_are_named_and_not_sent(rig: Rig) -> None:
    """A later commit costs its new chunks; the many others cost a page of a listing each."""
    shared = bytes(i % 251 for i in range(1_000 * 120))
    first = rig.commit(files={"frozen": shared})
    copier = rig.copier()
    copier.copy(first)
    second = rig.commit(step=200, files={"frozen": shared, "head": b"new"})
    rig.mirror.requests.clear()
    result = copier.copy(second)
    assert (result.chunks, result.size_bytes) == (1, 3)
    assert rig.mirror.count("head") < 5
    assert rig.read_back() == 0


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
@pytest.mark.parametrize("place_of_chunk", [0, 5, -1])
def test_damaged_bytes_are_never_copied_as_good(rig: Rig, place_of_chunk: int) -> None:
    """A flipped bit of the store ends the copy; the mirror gets neither the chunk nor the manifest."""
    place = rig.commit()
    key = rig.chunks(place)[place_of_chunk].key
    rig.primary.objects[key] = flipped(rig.primary.objects[key])
    with pytest.raises(CorruptError, match="does not match its digest"):
        rig.copier().copy(place)
    assert key not in rig.mirror.objects
    assert rig.whole() == []


def test_a_chunk_that_arrives_damaged_once_is_read_again(rig: Rig) -> None:
    """The bytes of the second read are copied, and none of the first one."""
    place = rig.commit()
    key = rig.chunks(place)[0].key
    intact, reads = rig.primary.objects[key], 0

    def damage(what: str, asked: str) -> None:
        nonlocal reads
        if (what, asked) == ("get", key):
            reads += 1
            rig.primary.objects[key] = flipped(intact) if reads == 1 else intact

    rig.primary.before = damage
    rig.copier().copy(place)
    assert rig.whole() == [place.ref]
    assert reads == 2


def test_a_manifest_in_the_place_of_another_one_is_damaged(rig: Rig) -> None:
    """No reader would take it: neither it nor its chunks are copied."""
    place, other = rig.commit(100), rig.commit(200)
    wrong = KEYS.commit(other.ref, other.node, other.nodes)
    rig.primary.objects[wrong] = rig.primary.objects[KEYS.commit(place.ref, 0, 1)]
    with pytest.raises(CorruptError, match="is that of run"):
        rig.copier().copy(other)
    assert not rig.mirror.objects


@pytest.mark.parametrize("has_manifest", [False, True])
@pytest.mark.parametrize("planted", ["one chunk", "all chunks", "each the bytes of the next"])
def test_planted_bytes_of_the_right_size_are_found(
    rig: Rig, has_manifest: bool, planted: str
) -> None:
    """Equal size is no proof: a chunk that this process did not write is read back and hashed."""
    place = rig.commit()
    names = [each.key for each in rig.chunks(place)][:-1]
    for key, other in zip(names, [*names[1:], names[0]], strict=True):
        if planted == "each the bytes of the next":
            rig.mirror.put(key, rig.primary.objects[other])
        elif planted == "all chunks" or key == names[3]:
            rig.mirror.put(key, flipped(rig.primary.objects[key]))
    if has_manifest:
        manifest_key = rig.keys.commit(place.ref, 0, 1)
        rig.mirror.put(manifest_key, rig.primary.objects[manifest_key])
    copier = rig.copier()
    for _ in range(2):
        with pytest.raises(CorruptError, match="the mirror has other bytes under"):
            copier.copy(place)
    if not has_manifest:
        assert rig.whole() == []


def test_a_chunk_is_read_back_once(rig: Rig) -> None:
    """Chunks of an earlier process are verified by the first manifest that names them, and then known."""
    rig.copier().copy(rig.commit())
    copier = rig.copier()
    later = [rig.commit(step) for step in (200, 300)]
    read = []
    for place in later:
        rig.mirror.requests.clear()
        copier.copy(place)
        read.append(rig.read_back())
    assert read == [len(rig.chunks(later[0])), 0]


def test_the_memory_of_verified_chunks_has_a_limit(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above the limit, the copier remembers the chunks of the manifest in work."""
    assert VERIFIED_MAX >= 100_000
    monkeypatch.setattr("swansong_bucket.mirror.copier.VERIFIED_MAX", 5)
    copier = rig.copier()
    places = [
        rig.commit(step, files={"weights": bytes([step, *range(250)]) * 18}) for step in (1, 2)
    ]
    for place in places:
        copier.copy(place)
    assert [copier.lacks(rig.chunks(place)[0]) for place in places] == [True, False]
    assert len(rig.whole()) == 2


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


def test_a_chunk_of_another_size_is_a_conflict(rig: Rig) -> None:
    """A key that a foreign writer took is never counted as copied, also during the copy."""
    place = rig.commit()
    key = rig.chunks(place)[0].key

    def plant(what: str, asked: str) -> None:
        if what == "create" and asked == key:
            rig.mirror.objects.setdefault(key, b"short")

    rig.mirror.before = plant
    for _ in range(2):
        with pytest.raises(CorruptError, match="the mirror has other bytes under"):
            rig.copier().copy(place)
    with pytest.raises(CorruptError, match="the mirror has other bytes under"):
        rig.copier().absent_of(place)
    assert rig.whole() == []


@pytest.mark.parametrize("data", [None, b"short"])
def test_a_commit_without_its_chunks_is_damaged(rig: Rig, data: bytes | None) -> None:
    """A chunk that is missing or too short costs this commit; it is no error of the store."""
    place = rig.commit()
    key = rig.chunks(place)[2].key
    if data is None:
        del rig.primary.objects[key]
    else:
        rig.primary.objects[key] = data
    with pytest.raises(CorruptError, match=r"is missing from the store|has an object of 5 bytes"):
        rig.copier().copy(place)
    assert rig.whole() == []


def test_a_commit_that_retention_deletes_is_gone(rig: Rig) -> None:
    """A manifest that vanishes before or during its copy is no damage."""
    place = rig.commit()
    manifest_key = rig.keys.commit(place.ref, 0, 1)
    chunk_key = rig.chunks(place)[0].key
    del rig.primary.objects[chunk_key]

    def before(_what: str, key: str) -> None:
        if key == chunk_key:
            rig.primary.objects.pop(manifest_key, None)

    rig.primary.before = before
    for _ in range(2):
        with pytest.raises(MissingError):
            rig.copier().copy(place)
    assert rig.whole() == []


def test_a_mirror_without_its_bucket_is_an_error_of_the_mirror(rig: Rig) -> None:
    """NotFound of the mirror is not taken for damage of the store."""
    place = rig.commit()

    def before(what: str, _key: str) -> None:
        if what == "create":
            raise NotFound("no such bucket")

    rig.mirror.before = before
    with pytest.raises(NotFound):
        rig.copier().copy(place)


@pytest.mark.fault("S25")
def test_records_are_signed_for_the_mirror() -> None:
    """With a key, a copy counts in the mirror and nowhere else; a planted commit is not copied."""
    store, mirror = MemoryStore(), MemoryStore()
    mirror.url = "memory://mirror"
    committed.commit(store, FILES, step=900, generation=9)
    primary, copies = signed(store, KEY), signed(mirror, KEY)
    made = committed.commit(primary, FILES, step=100)
    place = ManifestPlace(made.ref, 0, 1)
    copier = Copier(primary, copies, KEYS, threading.Event(), connections=4)
    assert [commit.ref for commit in copier.absent()] == [made.ref]
    copier.copy(place)
    assert [commit.ref for commit in catalog.list_commits(copies, KEYS)] == [made.ref]
    store.objects.update(mirror.objects)
    assert [commit.ref for commit in catalog.list_commits(primary, KEYS)] == [made.ref]
    mirror.url = "memory://elsewhere"
    assert catalog.list_commits(signed(mirror, KEY), KEYS) == []


def test_a_stop_ends_a_copy_within_a_window(rig: Rig) -> None:
    """A daemon that ends does not wait for the mirror."""
    place = rig.commit()
    rig.mirror.before = lambda what, _key: rig.stop.set() if what == "create" else None
    with pytest.raises(Stopped):
        rig.copier().copy(place)
    assert not rig.mirror.bytes_sent


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
        if what == "create" and once:
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
    """A chunk that a prune deletes after it was counted as present is copied before the manifest."""
    copier = rig.copier()
    first = rig.commit()
    copier.copy(first)
    second = rig.commit(step=200, files={**FILES, "head": b"new"})
    key = rig.chunks(first)[0].key

    def before(what: str, _key: str) -> None:
        if what == "create":
            rig.mirror.objects.pop(key, None)

    rig.mirror.before = before
    copier.copy(second)
    assert key in rig.mirror.objects


def test_a_chunk_that_only_the_look_has_found_is_copied(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store may still report an object that it has deleted."""
    place = rig.commit()
    sizes = {chunk.key: chunk.size_bytes for chunk in rig.chunks(place)}
    head = rig.mirror.head
    monkeypatch.setattr(
        rig.mirror, "head", lambda k: ObjectInfo(k, sizes[k]) if k in sizes else head(k)
    )
    rig.copier().copy(place)
    assert rig.whole() == [place.ref]


def test_the_mark_of_a_suspect_share_is_in_the_mirror_before_its_manifest() -> None:
    """A daemon that uses the mirror as its store knows of the failed GPU as well."""
    primary, copies = MemoryStore(), MemoryStore()
    commit.claim_generation(primary, KEYS, start_id="us", identity={})
    made = committed.manifest_of(
        step=5, node=3, nodes=commit.MANIFESTS_READ + 1, health={"gpu_is_sound": 0.0}
    )
    commit.commit(primary, KEYS, made, claim.ClaimObject(run="r", generation=1, start="us"))
    copier = Copier(primary, copies, KEYS, threading.Event(), connections=1)
    copier.copy(ManifestPlace(made.ref, made.node, made.nodes))
    created = [key for what, key in copies.requests if what == "put"]
    mark, key = KEYS.suspect(made.ref, 3), KEYS.commit(made.ref, 3, made.nodes)
    assert created.index(mark) < created.index(key)
