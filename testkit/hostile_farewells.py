# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies for evacuations that any writer of the bucket may have recorded."""

from __future__ import annotations

from hypothesis import strategies as st
from swansong_bucket.format.farewell import RecordedEvacuation, TimelineEntry
from swansong_bucket.loss_records import PARTS, LastReport, NoticeRecord
from swansong_bucket.model import CommitRef, Verdict, VmPart
from swansong_bucket.util.printable import printable
from swansong_tools.economics.loss import Interruption

PHASES = (
    *("notice", "request", "signal", "accepted", "target", "sealed", "early_shards", "flush", "flushed"),
    *("flush_stopped", "committed", "complete", "waiting_for_peers", "waiting_for_trainer", "verdict"),
    *("follow_up", "follow_up_failed", "request_failed", "withdrawn", "deadline_moved", "stall"),
)  # fmt: skip
MARKUP = "<script>alert(1)</script><img src=https://example.invalid/x onerror=alert(2)>\"'&amp;"

texts = st.one_of(
    st.just(MARKUP),
    st.text(max_size=40).map(lambda text: str(printable(text))),
    st.just("x" * 500),
)
seconds = st.one_of(st.floats(0, 200), st.floats(0, 1e9))
steps = st.integers(0, 10**12 - 1)
walls = st.one_of(st.floats(1795312860, 1795320000), st.floats(0, 4.1e9))


@st.composite
def timelines(draw: st.DrawFn) -> tuple[TimelineEntry, ...]:
    at_s = 0.0
    entries = []
    for _ in range(draw(st.integers(0, 25))):
        at_s = min(1e9, at_s + draw(seconds))
        facts = draw(
            st.dictionaries(
                st.sampled_from(
                    ("step", "size_bytes", "expected_s", "pessimistic_s", "plan", "why", "verdict")
                ),
                st.one_of(
                    texts, st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(-1e300, 1e300)
                ),
                max_size=4,
            )
        )
        entries.append(TimelineEntry(draw(st.one_of(st.sampled_from(PHASES), texts)), at_s, facts))
    return tuple(entries)


@st.composite
def samples(draw: st.DrawFn) -> tuple[tuple[float, int], ...]:
    pairs = draw(st.lists(st.tuples(seconds, st.integers(0, 2**60)), max_size=20))
    times = sorted(pair[0] for pair in pairs)
    return tuple(zip(times, sorted(pair[1] for pair in pairs), strict=True))


reports = st.builds(
    LastReport,
    step=steps, wall_s=walls, step_s=st.none() | seconds, ranks=st.integers(1, 99_999), saves_s=seconds,
    stall_s=seconds, is_over=st.booleans(), deadline_wall_s=st.none() | walls,
)  # fmt: skip
refs = st.builds(CommitRef, st.integers(0, 10**8 - 1), steps)
evacuations = st.builds(
    RecordedEvacuation,
    run=st.just("r"),
    generation=st.integers(1, 3),
    evacuation_id=st.sampled_from(("e1", "e2")),
    node=st.integers(0, 2),
    notices=st.lists(st.builds(NoticeRecord, texts, texts), max_size=3).map(tuple),
    opened_wall_s=walls,
    deadline_s=st.none() | st.floats(-1e9, 1e9),
    verdict=st.sampled_from(Verdict),
    reason=texts,
    commit=st.none() | refs,
    part=st.none() | st.builds(VmPart, refs, st.integers(1, 9)),
    slack_s=st.floats(-1e9, 1e9),
    expected_s=st.none() | seconds,
    took_s=st.none() | seconds,
    timeline=timelines(),
    left_out=st.integers(0, 10**6),
    samples=samples(),
    training=st.none() | reports,
    written_wall_s=walls,
)


@st.composite
def interruptions(draw: st.DrawFn) -> Interruption:
    ended_s = draw(walls)
    names = draw(st.sampled_from([PARTS, ("unknown",)]))
    parts_s = {name: draw(st.none() | seconds) for name in names}
    down_s = sum(each or 0.0 for each in parts_s.values())
    return Interruption(
        after_generation=1,
        generation=2,
        ended_wall_s=ended_s,
        resumed_wall_s=ended_s + down_s,
        last_step=draw(steps),
        start_step=draw(steps),
        is_same_vm=draw(st.booleans()),
        is_estimated=draw(st.booleans()),
        is_skewed=draw(st.booleans()),
        ranks=8,
        nodes=1,
        stall_s=draw(st.none() | seconds),
        redone_s=draw(seconds),
        down_s=down_s,
        parts_s=parts_s,
        lost_parts_gpu_s={},
        bytes_fetched=None,
        bytes_linked=None,
    )
