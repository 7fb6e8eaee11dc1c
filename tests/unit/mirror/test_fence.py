# SPDX-License-Identifier: Apache-2.0
"""Which store continues the run: promotions, their repetition, and two lines of one run."""

from __future__ import annotations

import threading

import pytest
from swansong_bucket.errors import NothingToRestore
from swansong_bucket.format.keys import ManifestPlace, RunKeys
from swansong_bucket.mirror.copier import Copier
from swansong_bucket.mirror.fence import PROMOTION_GAP, PromotedError, foreign_claim, promote
from swansong_bucket.runs import catalog, commit
from swansong_bucket.runs.signing import signed

from testkit import committed
from testkit.memory_store import MemoryStore
from testkit.records import KEY

KEYS = RunKeys("r")


def a_store(name: str) -> MemoryStore:
    made = MemoryStore()
    made.url = f"memory://{name}"
    return made


def claim(store: MemoryStore, start_id: str, keys: RunKeys = KEYS) -> int:
    return commit.claim_generation(store, keys, identity={}, start_id=start_id).generation


def commit_and_copy(primary: MemoryStore, mirror: MemoryStore, step: int, generation: int) -> None:
    made = committed.commit(primary, {"w": b"x" * 10}, step=step, generation=generation)
    copier = Copier(primary, mirror, KEYS, threading.Event(), connections=2)
    copier.copy(ManifestPlace(made.ref, 0, 1))


@pytest.fixture
def east() -> MemoryStore:
    """A store with generation 1 and its commit."""
    return a_store("east")


@pytest.fixture
def west(east: MemoryStore) -> MemoryStore:
    """Its mirror."""
    mirror = a_store("west")
    claim(east, "vm1")
    commit_and_copy(east, mirror, 100, 1)
    return mirror


@pytest.mark.fault("M06")
def test_a_promotion_fences_the_store_that_was_left(east: MemoryStore, west: MemoryStore) -> None:
    """Its number is far above all copied ones, so claims of the lost region cannot be confused with it."""
    promotion = promote(west, KEYS, host="op")
    assert promotion.generation == 1 + PROMOTION_GAP + 1
    assert (promotion.newest.step, promotion.is_new) == (100, True)
    assert foreign_claim(east, west, KEYS) == promotion.generation
    assert claim(west, "vm3") == promotion.generation + 1
    claim(east, "vm2")
    assert foreign_claim(east, west, KEYS) == promotion.generation + 1


@pytest.mark.fault("M06")
def test_a_vm_that_uses_the_mirror_as_its_store_fences_as_well(
    east: MemoryStore, west: MemoryStore
) -> None:
    """Without a promotion both lines may claim the same number: the bytes of the claims decide."""
    assert claim(west, "vm3") == claim(east, "vm2") == 2
    assert foreign_claim(east, west, KEYS) == 2
    for number in range(3, 7):
        assert claim(east, f"vm{number}") == number
    assert foreign_claim(east, west, KEYS) == 2


def test_a_promotion_is_made_once(east: MemoryStore, west: MemoryStore) -> None:
    """A repeated call changes nothing; once a VM has continued there, it is refused unless forced."""
    first = promote(west, KEYS, host="op")
    again = promote(west, KEYS, host="op")
    assert (again.generation, again.is_new) == (first.generation, False)
    continued = claim(west, "vm3")
    with pytest.raises(PromotedError):
        promote(west, KEYS, host="op")
    assert promote(west, KEYS, host="op", force=True).generation > continued


def test_an_empty_mirror_cannot_be_promoted(east: MemoryStore) -> None:
    """There is nothing to continue from: the run would silently start from scratch."""
    mirror = a_store("west")
    with pytest.raises(NothingToRestore):
        promote(mirror, KEYS, host="op")
    assert not mirror.objects


def test_the_run_can_return_to_the_first_region(east: MemoryStore, west: MemoryStore) -> None:
    """After a promotion, the old store becomes the mirror, and may be promoted later in turn."""
    promote(west, KEYS, host="op")
    generation = claim(west, "vm3")
    commit_and_copy(west, east, 200, generation)
    assert foreign_claim(west, east, KEYS) is None
    back = promote(east, KEYS, host="op")
    assert back.is_new
    assert back.newest.step == 200
    assert foreign_claim(west, east, KEYS) == back.generation
    commit_and_copy(east, west, 300, claim(east, "vm4"))
    assert promote(west, KEYS, host="op").newest.step == 300


@pytest.mark.fault("M06")
def test_two_lines_of_a_run_are_never_merged(east: MemoryStore, west: MemoryStore) -> None:
    """The old region continued without contact to the mirror: neither store gets a copy of the other."""
    promote(west, KEYS, host="op")
    ours, theirs = claim(west, "vm3"), claim(east, "vm2")
    committed.commit(west, {"w": b"west"}, step=150, generation=ours)
    committed.commit(east, {"w": b"east"}, step=150, generation=theirs)
    before = dict(east.objects), dict(west.objects)
    for primary, mirror, generation in ((east, west, theirs), (west, east, ours)):
        with pytest.raises(PromotedError):
            commit_and_copy(primary, mirror, 160, generation)
    assert not set(west.objects) & {key for key in east.objects if key.endswith("160/00000")}
    for store, objects in zip((east, west), before, strict=True):
        assert store.objects.items() >= objects.items()
    assert [c.ref.step for c in catalog.list_commits(west, KEYS)] == [160, 150, 100]


def test_an_unsigned_claim_in_the_mirror_fences_no_vm() -> None:
    """With a signing key, write access to the mirror is not enough: not with many claims, nor with copies."""
    east, planted_in = signed(a_store("east"), KEY), a_store("west")
    west = signed(planted_in, KEY)
    claim(east, "vm1")
    Copier(east, west, KEYS, threading.Event(), connections=1).copy_claims()
    (name,) = planted_in.objects
    for number in range(2, 300):
        planted_in.put(KEYS.generation(number), west.get(KEYS.generation(1)))
        planted_in.put(name.replace("00000001", f"{number:08d}"), planted_in.objects[name])
    assert foreign_claim(east, west, KEYS) is None
    claim(west, "signed")
    assert foreign_claim(east, west, KEYS) == 2
