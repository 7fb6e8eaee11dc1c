# SPDX-License-Identifier: Apache-2.0
"""A run with a past, in any store: four VMs, three interruptions, and commits that reference earlier ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from swansong_bucket.format import claim as claims
from swansong_bucket.format import farewell as farewells
from swansong_bucket.format import manifest, wall
from swansong_bucket.format import resumption as resumptions
from swansong_bucket.format.claim import ClaimObject
from swansong_bucket.format.farewell import Farewell
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.loss_records import (
    EvacuationRecord,
    GenerationEnd,
    LastReport,
    NoticeRecord,
    Resumption,
)
from swansong_bucket.model import CheckpointKind, CommitRef, StoredShard, Verdict
from swansong_bucket.stores.base import ObjectStore
from swansongd.core.events import Conclude

from testkit.committed import named_shard

BEGUN_S = 1795312860.0
"""2026-11-22 02:01 UTC."""
GB = 10**9
RANKS = 8
RUN = "my-run"

Entry = dict[str, object]


def write(store: ObjectStore, run: str = RUN) -> None:
    """Store the objects of the run: claims, commits, farewells and resumptions."""
    keys = RunKeys(run)
    first = BEGUN_S
    for generation, at_s in enumerate((first, first + 2705, first + 25990, first + 40000), 1):
        claim = ClaimObject(
            run=run,
            generation=generation,
            start=f"start-{generation}",
            identity={"boot_id": f"b{generation}", "claimed": wall.text(at_s + 40)},
        )
        store.put(keys.generation(generation), claims.encode(claim))
    _commits(store, keys)
    _first_evacuation(store, keys)
    _second_evacuation(store, keys)
    _resumptions(store, keys)


def _commits(store: ObjectStore, keys: RunKeys) -> None:
    shared: tuple[StoredShard, ...] = ()
    for number in range(24):
        generation = 1 if number < 4 else 2 if number < 17 else 3
        base = {1: BEGUN_S + 120, 2: BEGUN_S + 2830, 3: BEGUN_S + 26150}[generation]
        place = number - {1: 0, 2: 4, 3: 17}[generation]
        step = {1: 0, 2: 5117, 3: 60900}[generation] + 1200 * (place + 1)
        made = _manifest(
            keys, CommitRef(generation, step), base + 610 * (place + 1), number, shared
        )
        shared = tuple(shard for shard in made.shards if shard.path.startswith("optimizer"))[:3]
        store.put(keys.commit(made.ref, 0, 1), manifest.encode(made))
    urgent = _manifest(keys, CommitRef(1, 5117), BEGUN_S + 2617, 30, shared)
    urgent = replace(urgent, kind=CheckpointKind.EMERGENCY)
    store.put(keys.commit(urgent.ref, 0, 1), manifest.encode(urgent))


def _manifest(
    keys: RunKeys,
    ref: CommitRef,
    created_s: float,
    number: int,
    shared: Sequence[StoredShard],
) -> manifest.Manifest:
    files = {f"model-{rank}.pt": GB // 2 for rank in range(4)}
    files |= {f"optimizer-{rank}.pt": GB // 2 + 1000 * number for rank in range(4)}
    own = [
        _shard(keys, ref, path, size_bytes)
        for path, size_bytes in files.items()
        if path not in {shard.path for shard in shared} or number % 4 == 0
    ]
    kept = [shard for shard in shared if shard.path not in {each.path for each in own}]
    return manifest.Manifest(
        run=keys.run,
        generation=ref.generation,
        step=ref.step,
        kind=CheckpointKind.PERIODIC,
        node=0,
        nodes=1,
        nonce=f"n{number}",
        shards=(*own, *kept),
        health={"loss": 3.2 - 0.05 * number},
        created=wall.text(created_s),
    )


def _shard(keys: RunKeys, ref: CommitRef, path: str, size_bytes: int) -> StoredShard:
    content = f"{ref} {path}"
    return named_shard(
        path, size_bytes, content, run=keys.run, generation=ref.generation, chunk_bytes=2**26
    )


def _entry(at_s: float, phase: str, **facts: object) -> Entry:
    return {"phase": phase, "at_s": at_s, **facts}


def _samples(*points: tuple[float, float]) -> list[tuple[float, int]]:
    """Samples each half second between these points of time and gigabytes, with some unevenness."""
    samples = [(0.0, 0), (points[0][0], 0)]
    for (from_s, from_gb), (to_s, to_gb) in pairwise(points):
        steps = max(1, int((to_s - from_s) * 2))
        for step in range(1, steps + 1):
            share = step / steps
            uneven = 0.2 * math.sin(9.0 * step) / steps
            sent = int(GB * (from_gb + (to_gb - from_gb) * min(1.0, share + uneven)))
            samples.append((round(from_s + (to_s - from_s) * share, 3), max(sent, samples[-1][1])))
    return samples[:240]


def _first_evacuation(store: ObjectStore, keys: RunKeys) -> None:
    """A spot reclaim with follow-ups, after which the next VM boots at once."""
    opened_s = BEGUN_S + 2565
    timeline = [
        _entry(
            0.0,
            "notice",
            source="aws.spot",
            kind="reclaim",
            seconds_left=118.9,
            plan="TAKE",
            why="needs 55.2 s of 118.9 s, reserve included",
            expected_s=48.3,
            pessimistic_s=61.0,
        ),
        _entry(0.01, "request", ranks=RANKS),
        *(_entry(0.3 + rank / 10, "accepted", rank=rank, step=5115) for rank in range(RANKS)),
        _entry(1.4, "target", step=5117),
        _entry(8.0, "early_shards", step=5117, size_bytes=2 * GB),
        _entry(15.2, "sealed", step=5117, size_bytes=4 * GB),
        _entry(15.2, "flush", step=5117, size_bytes=4 * GB),
        _entry(50.1, "flushed", step=5117, size_bytes=4 * GB),
        _entry(51.9, "committed", generation=1, step=5117),
        _entry(51.9, "verdict", verdict="SAFE", slack_s=67.0),
        _entry(52.5, "follow_up", number=1, seconds_left=66.4),
        _entry(65.0, "flush", step=5119, size_bytes=4 * GB),
        _entry(94.0, "flushed", step=5119, size_bytes=4 * GB),
        _entry(95.2, "committed", generation=1, step=5119),
        _entry(95.2, "verdict", verdict="SAFE", slack_s=23.7),
    ]  # fmt: skip
    conclusion = Conclude(
        "5c1d2e3f4a5b6c7d",
        Verdict.SAFE,
        "the requested checkpoint is committed: generation 1 step 5117",
        CommitRef(1, 5119),
        4.9,
        expected_s=48.3,
        took_s=51.9,
    )
    _farewell(
        store,
        keys,
        1,
        "20261122T024533Z-0001",
        conclusion=conclusion,
        evacuation=EvacuationRecord(
            opened_wall_s=opened_s,
            deadline_s=118.9,
            notices=(NoticeRecord("aws.spot", "reclaim"),),
            timeline=timeline,
            samples=_samples((8, 0), (15, 0.5), (30, 2.2), (50, 4), (65, 4), (94, 6.4)),
        ),
        training=LastReport(
            step=5120,
            wall_s=opened_s + 113.5,
            step_s=0.9,
            ranks=RANKS,
            saves_s=21.0,
            stall_s=0.4,
            is_over=True,
            deadline_wall_s=opened_s + 118.9,
        ),
    )


def _second_evacuation(store: ObjectStore, keys: RunKeys) -> None:
    """The store fails during the evacuation, and the cloud has no VM for hours."""
    opened_s = BEGUN_S + 13000
    timeline = [
        _entry(
            0.0,
            "notice",
            source="gcp.preempted",
            kind="reclaim",
            seconds_left=30.0,
            plan="TAKE",
            why="nothing else fits, so it is attempted",
            expected_s=27.5,
            pessimistic_s=33.1,
        ),
        _entry(0.02, "request", ranks=RANKS),
        *(_entry(0.4 + rank / 20, "accepted", rank=rank, step=17300) for rank in range(RANKS)),
        _entry(1.1, "target", step=17301),
        _entry(13.6, "sealed", step=17301, size_bytes=4 * GB),
        _entry(13.6, "flush", step=17301, size_bytes=4 * GB),
        _entry(26.0, "flush_stopped", step=17301, bytes_stored=GB),
        _entry(30.0, "verdict", verdict="PARTIAL", slack_s=0.0),
    ]
    conclusion = Conclude(
        "77aa88bb99cc00dd",
        Verdict.PARTIAL,
        "the time ran out; generation 2 step 16117 stands",
        CommitRef(2, 16117),
        0.0,
        expected_s=27.5,
    )
    _farewell(
        store,
        keys,
        2,
        "20261122T053801Z-0002",
        conclusion=conclusion,
        evacuation=EvacuationRecord(
            opened_wall_s=opened_s,
            deadline_s=30.0,
            notices=(NoticeRecord("gcp.preempted", "reclaim"),),
            timeline=timeline,
            samples=_samples((13.6, 0), (17, 0.7), (21, 0.75), (26, 1.1)),
        ),
        training=LastReport(
            step=17304,
            wall_s=opened_s + 29.0,
            step_s=0.9,
            ranks=RANKS,
            saves_s=60.0,
            stall_s=3.1,
            is_over=True,
            deadline_wall_s=opened_s + 30.0,
        ),
    )


def _farewell(
    store: ObjectStore,
    keys: RunKeys,
    generation: int,
    stamp: str,
    *,
    conclusion: Conclude,
    evacuation: EvacuationRecord,
    training: LastReport,
) -> None:
    made = Farewell(
        run=keys.run,
        generation=generation,
        conclusion=conclusion,
        evacuation=evacuation,
        training=training,
        written=wall.text(evacuation.opened_wall_s + 120),
    )
    store.put(keys.farewell(generation, stamp), farewells.encode(made))


def _resumptions(store: ObjectStore, keys: RunKeys) -> None:
    begun_s = BEGUN_S
    endings: Mapping[int, GenerationEnd | None] = {
        1: None,
        2: _ending(1, 5120, begun_s + 2678.5, stall_s=0.4),
        3: _ending(2, 17304, begun_s + 13029, stall_s=3.1),
    }
    starts = {1: (0, begun_s), 2: (5119, begun_s + 2745), 3: (16117, begun_s + 25990)}
    for generation, (start_step, booted_s) in starts.items():
        store.put(
            keys.resumption(generation),
            resumptions.encode(
                _resumption(keys.run, generation, start_step, booted_s, endings[generation])
            ),
        )


def _ending(generation: int, step: int, wall_s: float, *, stall_s: float) -> GenerationEnd:
    return GenerationEnd(
        generation=generation,
        step=step,
        wall_s=wall_s,
        is_estimated=False,
        step_s=0.9,
        ranks=RANKS,
        saves_s=21.0,
        stall_s=stall_s,
    )


def _resumption(
    run: str, generation: int, start_step: int, booted_s: float, earlier: GenerationEnd | None
) -> Resumption:
    return Resumption(
        run=run,
        generation=generation,
        vm=f"vm{generation}",
        ranks=RANKS,
        node=0,
        nodes=1,
        booted_wall_s=booted_s,
        daemon_wall_s=booted_s + 21,
        download_began_wall_s=booted_s + 22,
        download_ended_wall_s=booted_s + 37,
        bytes_fetched=4 * GB,
        bytes_linked=0,
        asked_wall_s=booted_s + 33,
        answered_wall_s=booted_s + 37.1,
        started_wall_s=booted_s + 38.3,
        first_step_wall_s=booted_s + 48.1,
        start_step=start_step,
        first_step=start_step + 1,
        restored=CommitRef(generation - 1, start_step) if earlier else None,
        earlier=earlier,
    )
