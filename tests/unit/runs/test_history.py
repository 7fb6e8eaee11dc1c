# SPDX-License-Identifier: Apache-2.0
"""The history of a run is bounded, and a damaged object never makes it fail."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swansong_bucket.format import farewell as farewells
from swansong_bucket.format import manifest
from swansong_bucket.format.farewell import Farewell
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.loss_records import EvacuationRecord
from swansong_bucket.model import CommitRef, Verdict
from swansong_bucket.runs import history
from swansong_bucket.runs.run import Run
from swansongd.core.events import Conclude

from testkit import committed
from testkit.memory_store import MemoryStore
from testkit.records import record_of
from testkit.strategies import json_values

KEYS = RunKeys("r")
OPENED_S = 1893456000.0


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def farewell(
    store: MemoryStore,
    generation: int,
    stamp: str,
    *,
    evacuation_id: str = "e1",
    verdict: Verdict = Verdict.SAFE,
    is_foretold: bool = False,
    **fields: Any,
) -> None:
    conclusion = Conclude(
        evacuation_id, verdict, "why", CommitRef(generation, 7), 1.0, is_foretold=is_foretold
    )
    made = Farewell(
        run="r",
        generation=generation,
        conclusion=conclusion,
        evacuation=EvacuationRecord(opened_wall_s=OPENED_S + generation, **fields),
        written="2030-01-01T00:00:00Z",
    )
    store.put(KEYS.farewell(generation, stamp), farewells.encode(made))


def test_a_commit_has_its_size_and_the_bytes_that_it_references(store: MemoryStore) -> None:
    """Bytes in chunks that an older commit names were not sent again."""
    first = committed.commit(store, {"a": b"12345"}, step=100)
    second = committed.commit(store, {"b": b"123"}, step=200)
    both = replace(second, shards=(*first.shards, *second.shards))
    store.put(KEYS.commit(both.ref, 0, 1), manifest.encode(both))
    found = history.commits(Run.listed(store, KEYS)).commits
    assert [(each.size_bytes, each.bytes_referenced, each.bytes_sent) for each in found] == [
        (5, 0, 5),
        (8, 5, 3),
    ]
    assert [each.ref.step for each in found] == [100, 200]
    assert (found[0].created_wall_s, found[0].loss) == (OPENED_S, 2.5)
    assert all(each.is_whole for each in found)


def test_only_the_newest_commits_are_read(store: MemoryStore) -> None:
    """The number of the others is known, and only one of them is read: it has the chunks of the oldest."""
    for step in range(1, 31):
        committed.commit(store, {"a": b"1"}, step=step)
    store.requests.clear()
    found = history.commits(Run.listed(store, KEYS), commits_max=4)
    assert [each.ref.step for each in found.commits] == [27, 28, 29, 30]
    assert found.left_out == 26
    assert sum(what == "get" for what, _ in store.requests) == 5
    assert [each.bytes_sent for each in found.commits] == [0, 0, 0, 0]


def test_a_commit_that_is_not_whole_or_damaged_is_marked(store: MemoryStore) -> None:
    """One lacks the part of a VM, and one has a manifest that is not JSON."""
    committed.commit(store, {"a": b"1"}, step=1, nodes=2)
    store.put(KEYS.commit(CommitRef(1, 2), 0, 1), b"no json")
    part, damaged = history.commits(Run.listed(store, KEYS)).commits
    assert (part.is_whole, part.kind) == (False, "periodic")
    assert (damaged.is_whole, damaged.kind, damaged.created_wall_s) == (False, None, None)


def test_an_evacuation_counts_once_with_its_newest_farewell(store: MemoryStore) -> None:
    """The verdict has improved; farewells of the same second have no order in their keys."""
    notice = {"phase": "notice", "at_s": 0.0}
    farewell(store, 1, "t1-b", verdict=Verdict.PARTIAL, timeline=[notice])
    farewell(store, 1, "t1-a", timeline=[notice, notice])
    farewell(store, 2, "t2", evacuation_id="e2")
    found = history.evacuations(Run.listed(store, KEYS))
    assert [(each.evacuation_id, each.verdict) for each in found.evacuations] == [
        ("e1", Verdict.SAFE),
        ("e2", Verdict.SAFE),
    ]
    assert (found.farewells_left_out, found.damaged) == (0, ())


def test_a_notice_that_was_withdrawn_before_any_verdict_is_no_evacuation(
    store: MemoryStore,
) -> None:
    """A VM that died with it had one: its farewell has a deadline."""
    farewell(store, 1, "t1", is_foretold=True)
    farewell(store, 1, "t2", evacuation_id="e2", is_foretold=True, deadline_s=60.0)
    found = history.evacuations(Run.listed(store, KEYS)).evacuations
    assert [each.evacuation_id for each in found] == ["e2"]


def test_evacuations_of_several_vms_count_separately(store: MemoryStore) -> None:
    """The VMs of a job share the generation, and the evacuation that one of them caused."""
    farewell(store, 1, "t1", node=0)
    farewell(store, 1, "t2", node=1)
    assert [each.node for each in history.evacuations(Run.listed(store, KEYS)).evacuations] == [
        0,
        1,
    ]


def test_only_the_newest_evacuations_are_read(store: MemoryStore) -> None:
    """A run of years costs the requests of a few farewells."""
    for generation in range(1, 101):
        farewell(store, generation, "t", evacuation_id=f"e{generation}")
    store.requests.clear()
    found = history.evacuations(Run.listed(store, KEYS), evacuations_max=3)
    assert [each.generation for each in found.evacuations] == [98, 99, 100]
    assert found.farewells_left_out == 100 - 16
    assert sum(what == "get" for what, _ in store.requests) == 16


@pytest.mark.fault("O41")
@settings(max_examples=60)
@given(name=st.sampled_from(sorted({"timeline", "samples", "notices", "training", "part", "commit",
        "opened", "deadline_s", "verdict", "reason", "node", "took_s"})), value=json_values)  # fmt: skip
def test_a_hostile_farewell_is_read_or_counted(name: str, value: Any) -> None:
    """Any value of any field: the farewell is in bounds, or it is damaged."""
    store = MemoryStore()
    farewell(store, 1, "t")
    body = json.loads(store.get(KEYS.farewell(1, "t"))) | {name: value}
    store.put(KEYS.farewell(1, "t"), record_of(body))
    found = history.evacuations(Run.listed(store, KEYS))
    assert len(found.evacuations) + len(found.damaged) == 1
