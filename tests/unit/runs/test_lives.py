# SPDX-License-Identifier: Apache-2.0
"""The lives of a run, read from the bucket with few requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from swansong_bucket.format import claim as claims
from swansong_bucket.format import resumption as resumptions
from swansong_bucket.format.claim import ClaimObject
from swansong_bucket.format.farewell import Farewell, encode
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.loss_records import EvacuationRecord, GenerationEnd, LastReport
from swansong_bucket.model import CommitRef, Verdict
from swansong_bucket.runs import lives
from swansong_bucket.runs.run import Run
from swansong_tools.economics.loss import loss
from swansongd.core.events import Conclude

from testkit import committed
from testkit.memory_store import MemoryStore
from tests.unit.format.test_resumption import RESUMPTION

KEYS = RunKeys("r")
BEGUN_S = 1_800_000_000.0


def text(wall_s: float) -> str:
    return datetime.fromtimestamp(wall_s, UTC).isoformat()


@contextmanager
def counted(store: MemoryStore) -> Iterator[list[str]]:
    """The keys of the objects that are read meanwhile."""
    read: list[str] = []
    before = len(store.requests)
    yield read
    read += [key for what, key in store.requests[before:] if what == "get"]


def claim(store: MemoryStore, generation: int, claimed_s: float) -> None:
    identity = {"boot_id": f"b{generation}", "claimed": text(claimed_s)}
    made = ClaimObject(run="r", generation=generation, start=f"s{generation}", identity=identity)
    store.put(KEYS.generation(generation), claims.encode(made))


def record(store: MemoryStore, generation: int, first_s: float, *, start: int = 100) -> None:
    made = replace(
        RESUMPTION,
        generation=generation,
        vm=f"vm{generation}",
        booted_wall_s=first_s - 30,
        daemon_wall_s=first_s - 20,
        asked_wall_s=first_s - 15,
        answered_wall_s=first_s - 10,
        started_wall_s=first_s - 5,
        first_step_wall_s=first_s,
        start_step=start,
        first_step=start + 1,
        earlier=lives.earlier_ending(
            store, KEYS, generation, ended_by_s=(first_s - 30, first_s - 20)
        ),
    )
    store.put(KEYS.resumption(generation), resumptions.encode(made))


def farewell(
    store: MemoryStore, generation: int, step: int, at_s: float, *, over: bool, stamp: str = "t"
) -> None:
    training = LastReport(
        step=step,
        wall_s=at_s,
        step_s=1.0,
        ranks=8,
        saves_s=0.0,
        stall_s=0.5,
        is_over=over,
        deadline_wall_s=at_s + 10,
    )
    conclusion = Conclude("e", Verdict.SAFE, "why", CommitRef(generation, step), 1.0)
    made = Farewell(
        run="r",
        generation=generation,
        conclusion=conclusion,
        evacuation=EvacuationRecord(opened_wall_s=at_s),
        training=training,
        written=text(at_s),
    )
    store.put(KEYS.farewell(generation, stamp), encode(made))


def a_run(store: MemoryStore) -> None:
    """Three VMs: one with an exact farewell, one that lost its power, and one that trains."""
    claim(store, 1, BEGUN_S)
    record(store, 1, BEGUN_S + 60, start=0)
    committed.commit(store, {"a": b"1"}, generation=1, step=140)
    farewell(store, 1, 150, BEGUN_S + 200, over=False, stamp="t1")
    farewell(store, 1, 160, BEGUN_S + 210, over=True, stamp="t2")
    claim(store, 2, BEGUN_S + 300)
    record(store, 2, BEGUN_S + 400, start=150)
    claim(store, 3, BEGUN_S + 900)
    record(store, 3, BEGUN_S + 1000, start=150)


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
