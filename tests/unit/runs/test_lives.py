# SPDX-License-Identifier: Apache-2.0
"""The lives of a run, read from the bucket with few requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from swansong_bucket.loss_records import GenerationEnd
from swansong_bucket.model import CommitRef
from swansong_bucket.runs import lives
from swansong_bucket.runs.run import Run
from swansong_tools.economics.loss import loss

from testkit import committed
from testkit.lost_vms import BEGUN_S, KEYS, a_run, claim, farewell, record
from testkit.memory_store import MemoryStore


@contextmanager
def counted(store: MemoryStore) -> Iterator[list[str]]:
    """The keys of the objects that are read meanwhile."""
    read: list[str] = []
    before = len(store.requests)
    yield read
    read += [key for what, key in store.requests[before:] if what == "get"]


def test_each_vm_that_trained_is_a_life() -> None:
    """The newest farewell is the end of the first VM; the second one left only its first step."""
    store = MemoryStore()
    a_run(store)
    found = lives.lives_of(Run.listed(store, KEYS)).lives
    assert [life.generation for life in found] == [1, 2, 3]
    first, second, third = found
    assert (first.ending.step, first.ending.is_estimated) == (160, False)
    assert first.ending.wall_s == pytest.approx(BEGUN_S + 210)
    assert (second.ending.step, second.ending.is_estimated) == (151, True)
    assert (third.ending.step, third.start_step) == (151, 150)
    total = loss(found)
    assert total is not None
    assert total.interruptions[0].redone_s == pytest.approx(10.0)
    assert total.interruptions[0].stall_s == pytest.approx(0.5)
    assert total.interruptions[0].down_s == pytest.approx(190.0)


def test_a_generation_that_never_trained_is_no_life() -> None:
    """Its time is part of the time down of the next one, whose record has the end before it."""
    store = MemoryStore()
    claim(store, 1, BEGUN_S)
    record(store, 1, BEGUN_S + 60, start=0)
    farewell(store, 1, 160, BEGUN_S + 210, over=True)
    for number in (2, 3):
        claim(store, number, BEGUN_S + 300)
    record(store, 4, BEGUN_S + 1000, start=150)
    claim(store, 4, BEGUN_S + 900)
    first, second = lives.lives_of(Run.listed(store, KEYS)).lives
    assert second.resumption is not None
    assert second.resumption.earlier == first.ending
    assert first.ending.generation == 1


def test_few_objects_are_read_however_many_commits_there_are() -> None:
    """Each resumption, and for the newest VM its farewells and two manifests."""
    store = MemoryStore()
    a_run(store)
    for step in range(200, 500):
        committed.commit(store, {"a": b"1"}, generation=3, step=step)
    with counted(store) as read:
        lives.lives_of(Run.listed(store, KEYS))
    assert sorted(read) == sorted(
        [
            *(KEYS.resumption(number) for number in (1, 2, 3)),
            *(KEYS.commit(CommitRef(3, step), 0, 1) for step in (498, 499)),
        ]
    )


@pytest.mark.fault("G29")
def test_lost_records_are_made_up_for() -> None:
    """Without resumptions, claims, farewells and commits give an estimate."""
    store = MemoryStore()
    a_run(store)
    for number in (1, 2, 3):
        store.objects[KEYS.resumption(number)] = b"damaged"
    committed.commit(store, {"a": b"1"}, generation=3, step=170)
    first, third = lives.lives_of(Run.listed(store, KEYS)).lives
    assert (first.resumption, third.resumption) == (None, None)
    assert first.claimed_wall_s == pytest.approx(BEGUN_S)
    assert (first.ending.step, third.start_step, third.ending.step) == (160, 140, 170)


def test_an_old_run_is_cut() -> None:
    """The newest generations are read, and the number of the others is known."""
    store = MemoryStore()
    a_run(store)
    found = lives.lives_of(Run.listed(store, KEYS), lives_max=2)
    assert ([life.generation for life in found.lives], found.left_out) == ([2, 3], 1)


def test_an_empty_run_has_no_lives() -> None:
    """A claim alone is no training."""
    store = MemoryStore()
    assert lives.lives_of(Run.listed(store, KEYS)).lives == ()
    claim(store, 1, BEGUN_S)
    assert lives.lives_of(Run.listed(store, KEYS)).lives == ()
    assert lives.earlier_ending(store, KEYS, 2, ended_by_s=()) is None


def test_an_end_before_it_is_kept_in_the_record() -> None:
    """Farewells and commits may be deleted later: the record is enough."""
    store = MemoryStore()
    a_run(store)
    for key in [key for key in store.objects if "/farewells/" in key or "/commits/" in key]:
        del store.objects[key]
    first = lives.lives_of(Run.listed(store, KEYS)).lives[0]
    assert isinstance(first.ending, GenerationEnd)
    assert (first.ending.step, first.ending.stall_s) == (160, 0.5)
