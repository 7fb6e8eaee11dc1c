# SPDX-License-Identifier: Apache-2.0
"""The records of a run that lost VMs: claims, resumptions and farewells of the run ``r``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from swansong_bucket.format import claim as claims
from swansong_bucket.format import resumption as resumptions
from swansong_bucket.format import wall
from swansong_bucket.format.claim import ClaimObject
from swansong_bucket.format.farewell import Farewell, encode
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.loss_records import EvacuationRecord, GenerationEnd, LastReport, Resumption
from swansong_bucket.model import CommitRef, Verdict
from swansong_bucket.runs import lives
from swansong_bucket.stores.base import ObjectStore
from swansongd.core.events import Conclude

from testkit import committed

KEYS = RunKeys("r")
BEGUN_S = 1_800_000_000.0
ENDING = GenerationEnd(
    generation=6,
    step=120,
    wall_s=1_800_000_000.125,
    is_estimated=True,
    step_s=0.5,
    ranks=8,
    saves_s=2.0,
    stall_s=0.25,
)
RESUMPTION = Resumption(
    run="r",
    generation=7,
    vm="0af1",
    ranks=8,
    node=0,
    nodes=2,
    booted_wall_s=1_800_000_100.0,
    daemon_wall_s=1_800_000_101.5,
    download_began_wall_s=1_800_000_102.0,
    download_ended_wall_s=1_800_000_103.0,
    bytes_fetched=10**9,
    bytes_linked=5,
    asked_wall_s=1_800_000_104.0,
    answered_wall_s=1_800_000_105.0,
    started_wall_s=1_800_000_106.0,
    first_step_wall_s=1_800_000_107.001,
    start_step=100,
    first_step=101,
    restored=CommitRef(6, 100),
    earlier=ENDING,
)


def claim(store: ObjectStore, generation: int, claimed_s: float) -> None:
    identity = {"boot_id": f"b{generation}", "claimed": wall.text(claimed_s)}
    made = ClaimObject(run="r", generation=generation, start=f"s{generation}", identity=identity)
    store.put(KEYS.generation(generation), claims.encode(made))


def resumed(
    generation: int,
    first_s: float,
    *,
    start: int,
    parts_s: Sequence[float] = (10.0, 5.0, 5.0, 5.0, 5.0),
    **changes: Any,
) -> Resumption:
    """A resume whose first step ended then.

    Args:
        parts_s: durations of boot, start, fetch, load and warm-up.
    """
    booted_s = first_s - sum(parts_s)
    booted, daemon, asked, answered, started, first = accumulate(parts_s, initial=booted_s)
    return replace(
        RESUMPTION,
        generation=generation,
        vm=f"vm{generation}",
        booted_wall_s=booted,
        daemon_wall_s=daemon,
        asked_wall_s=asked,
        answered_wall_s=answered,
        started_wall_s=started,
        first_step_wall_s=first,
        start_step=start,
        first_step=start + 1,
        **changes,
    )


def record(
    store: ObjectStore, generation: int, first_s: float, *, start: int = 100, **changes: Any
) -> None:
    """Store the resumption, with the end of the generation before it."""
    made = resumed(generation, first_s, start=start, **changes)
    ended_by_s = (made.booted_wall_s, made.daemon_wall_s)
    earlier = lives.earlier_ending(store, KEYS, generation, ended_by_s=ended_by_s)
    store.put(KEYS.resumption(generation), resumptions.encode(replace(made, earlier=earlier)))


def farewell(
    store: ObjectStore,
    generation: int,
    step: int,
    at_s: float,
    *,
    over: bool,
    stamp: str = "t",
    verdict: Verdict = Verdict.SAFE,
    evacuation: EvacuationRecord | None = None,
    **training: Any,
) -> None:
    """Store the farewell with this last step; ``training`` are further fields of its report."""
    report = LastReport(
        step=step,
        wall_s=at_s,
        step_s=1.0,
        ranks=8,
        saves_s=0.0,
        stall_s=0.5,
        is_over=over,
        deadline_wall_s=at_s + 10,
    )
    made = Farewell(
        run="r",
        generation=generation,
        conclusion=Conclude("e", verdict, "why", CommitRef(generation, step), 1.0),
        evacuation=evacuation or EvacuationRecord(opened_wall_s=at_s),
        training=replace(report, **training),
        written=wall.text(at_s) or "",
    )
    store.put(KEYS.farewell(generation, stamp), encode(made))


def a_run(store: ObjectStore) -> None:
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
