# SPDX-License-Identifier: Apache-2.0
"""A farewell contains the course of an evacuation, and a reader refuses everything that is out of bounds."""

from __future__ import annotations

import json
from typing import Any

import pytest
from swansong_bucket.errors import CorruptError
from swansong_bucket.format.farewell import (
    BYTES_MAX,
    Farewell,
    RecordedEvacuation,
    TimelineEntry,
    decode,
    encode,
)
from swansong_bucket.loss_records import EvacuationRecord, LastReport, NoticeRecord
from swansong_bucket.model import CommitRef, Verdict, VmPart
from swansongd.core.events import Conclude

from testkit.records import record_of

WRITTEN = "2030-01-01T00:00:00Z"
OPENED_S = 1893455970.0
SAFE = Conclude("e1", Verdict.SAFE, "it is committed", CommitRef(2, 7), 101.5)


def written(conclusion: Conclude = SAFE, **fields: Any) -> bytes:
    evacuation = EvacuationRecord(opened_wall_s=OPENED_S, **fields)
    return encode(
        Farewell(
            run="r", generation=2, conclusion=conclusion, evacuation=evacuation, written=WRITTEN
        )
    )


def test_a_field_that_says_nothing_is_left_out() -> None:
    """Without a part and without missing entries, there are no fields for them."""
    assert full().keys() >= {"part", "left_out"}
    assert not json.loads(written()).keys() & {"part", "left_out"}


def test_a_loss_names_no_commit() -> None:
    """The field is null, not a commit of step 0."""
    data = written(Conclude("e1", Verdict.LOST, "nothing was staged", None, -0.5), left_out=3)
    body = json.loads(data)
    assert (body["commit"], body["timeline"], body["left_out"]) == (None, [], 3)
    assert (body["verdict"], body["slack_s"]) == ("LOST", -0.5)
    assert decode(data).commit is None


@pytest.mark.parametrize("data", [b"", b"no json", b"[]", b'{"a": 1' + b" " * BYTES_MAX + b"}"])
def test_bytes_that_are_not_a_farewell_are_corrupt(data: bytes) -> None:
    """They are refused."""
    with pytest.raises(CorruptError):
        decode(data)


FULL = EvacuationRecord(
    opened_wall_s=OPENED_S,
    deadline_s=120.0,
    is_assumed=True,
    is_ended=True,
    node=1,
    notices=(NoticeRecord("aws.spot", "reclaim"),),
    timeline=(
        {"phase": "notice", "at_s": 0.0, "seconds_left": 120.0, "plan": "TAKE"},
        {"phase": "stall", "at_s": 0.5, "ranks": [0, 1], "step": 3},
    ),
    left_out=2,
    samples=((0.0, 0), (0.25, 1000)),
)
PART = VmPart(CommitRef(2, 9), 3, 2)
LATE = Conclude("e1", Verdict.PARTIAL, "late", CommitRef(2, 7), 1.0, PART, 9, 8, is_foretold=True)
TRAINING = LastReport(
    step=9, wall_s=OPENED_S, step_s=1.0, ranks=8, saves_s=0.0, stall_s=0.5, is_over=True
)


def full() -> dict[str, Any]:
    """A farewell with all fields, as JSON values."""
    made = Farewell(
        run="r",
        generation=2,
        conclusion=LATE,
        evacuation=FULL,
        training=TRAINING,
        digests={0: ("9 loss=1",)},
        written=WRITTEN,
    )
    body: dict[str, Any] = json.loads(encode(made))
    return body


def test_a_farewell_is_read_as_it_was_written() -> None:
    """All fields return, except for facts of the timeline that are lists."""
    assert decode(record_of(full())) == RecordedEvacuation(
        run="r",
        generation=2,
        evacuation_id="e1",
        node=1,
        notices=FULL.notices,
        opened_wall_s=OPENED_S,
        deadline_s=120.0,
        verdict=Verdict.PARTIAL,
        reason="late",
        commit=CommitRef(2, 7),
        part=PART,
        slack_s=1.0,
        expected_s=9.0,
        took_s=8.0,
        timeline=(
            TimelineEntry("notice", 0.0, {"seconds_left": 120.0, "plan": "TAKE"}),
            TimelineEntry("stall", 0.5, {"step": 3}),
        ),
        left_out=2,
        samples=((0.0, 0), (0.25, 1000)),
        training=TRAINING,
        written_wall_s=OPENED_S + 30,
        is_assumed=True,
        is_ended=True,
        is_foretold=True,
        digests={0: ("9 loss=1",)},
    )


def test_the_bytes_of_a_farewell_stay_the_same() -> None:
    """The digest of its bytes stays: a change of the format would need another version."""
    assert full()["digest"] == (
        "sha256:52e2fd45f74ddbe18de5a85385f41ee92e2580a5f9f3b058585f4ac6180e5dbe"
    )


def test_texts_of_a_farewell_are_printable() -> None:
    """Control characters and direction marks are escaped, and long texts are cut."""
    hostile = "a\x1b[31m\u202eb\n"
    entry = {"phase": hostile, "at_s": 0, "why": hostile * 100}
    notice = {"source": hostile, "kind": hostile}
    changed = full() | {"reason": hostile, "timeline": [entry], "notices": [notice]}
    found = decode(record_of(changed))
    texts = (found.reason, found.source, found.kind, found.timeline[0].phase)
    assert all(text.isprintable() for text in (*texts, str(found.timeline[0].facts["why"])))
    assert len(str(found.timeline[0].facts["why"])) < 4000


@pytest.mark.parametrize(
    "change",
    [
        {"format": "swansong-manifest"},
        {"version": 2},
        {"run": 7},
        {"generation": -1},
        {"generation": True},
        {"evacuation": "<script>"},
        {"node": 10**6},
        {"notices": [{"source": "a"}]},
        {"notices": [{"source": "a", "kind": "b"}] * 101},
        {"opened": None},
        {"opened": "yesterday"},
        {"deadline_s": 1e12},
        {"verdict": "FINE"},
        {"reason": "x" * 10_000},
        {"commit": {"generation": 1}},
        {"part": []},
        {"slack_s": None},
        {"took_s": -1.0},
        {"timeline": [{"phase": "notice", "at_s": 1.0}, {"phase": "flush", "at_s": 0.5}]},
        {"timeline": [{"phase": "notice", "at_s": 0.0}] * 1001},
        {"timeline": [{"phase": "notice", "at_s": 0.0, "step": 2**64}]},
        {"timeline": [{"phase": "target", "at_s": 0.0, "step": 10**12}]},
        {"timeline": [{"phase": "notice", "at_s": 0.0, "expected_s": 1e10}]},
        {"timeline": [{"phase": "notice", "at_s": 0.0, "pessimistic_s": -1e300}]},
        {"timeline": [{"phase": "flushed", "at_s": 0.0, "size_bytes": 1e300}]},
        {"samples": [[0.0]]},
        {"samples": [[0.0, 0, 0]]},
        {"samples": [[1.0, 5], [2.0, 4]]},
        {"samples": [[2.0, 5], [1.0, 6]]},
        {"samples": [[0.0, 0.5]]},
        {"samples": [[0.0, 0]] * 1001},
        {"training": {"step": 1}},
        {"written": ""},
    ],
)
def test_a_farewell_out_of_bounds_is_corrupt(change: dict[str, Any]) -> None:
    """Every writer of the bucket may have written it."""
    with pytest.raises(CorruptError):
        decode(record_of(full() | change))
