# SPDX-License-Identifier: Apache-2.0
"""The farewell says what happened when, and how it ended."""

from __future__ import annotations

import json

from swansongd.core.events import Conclude, Mark
from swansongd.model import CommitRef, Part, Verdict
from swansongd.observe.timeline import ENTRIES_MAX, Timeline

WRITTEN = "2030-01-01T00:00:00Z"


def test_a_farewell_is_the_timeline_and_the_verdict() -> None:
    """Instants are seconds since the notice; the facts of each stand beside them."""
    timeline = Timeline("e1", 500.0)
    timeline.add(Mark("e1", "notice", (("source", "aws.spot"), ("seconds_left", 120.0))), 500.0)
    entry = timeline.add(Mark("e1", "flush", (("step", 7),)), 502.34567)
    assert entry == {"phase": "flush", "at_s": 2.346, "step": 7}
    conclusion = Conclude("e1", Verdict.SAFE, "it is committed", CommitRef(2, 7), 101.5)
    body = json.loads(timeline.farewell(conclusion, run="r", generation=2, written=WRITTEN))
    assert body == {
        "format": "swansong-farewell",
        "version": 1,
        "run": "r",
        "generation": 2,
        "evacuation": "e1",
        "verdict": "SAFE",
        "reason": "it is committed",
        "commit": {"generation": 2, "step": 7},
        "complete": True,
        "slack_s": 101.5,
        "timeline": [
            {"phase": "notice", "at_s": 0.0, "source": "aws.spot", "seconds_left": 120.0},
            {"phase": "flush", "at_s": 2.346, "step": 7},
        ],
        "written": WRITTEN,
    }


def test_a_farewell_names_the_part_of_a_checkpoint_that_is_not_whole() -> None:
    """Over several VMs: what this VM has committed, and how many of the others."""
    part = Part(CommitRef(2, 9), 3, 2)
    conclusion = Conclude("e1", Verdict.PARTIAL, "late", CommitRef(2, 7), 1.0, part)
    data = Timeline("e1", 0.0).farewell(conclusion, run="r", generation=2, written=WRITTEN)
    body = json.loads(data)
    assert (body["commit"]["step"], body["complete"]) == (7, False)
    assert body["part"] == {"generation": 2, "step": 9, "nodes": 3, "nodes_committed": 2}


def test_a_loss_names_no_commit() -> None:
    """Null, and not a commit of step nought."""
    conclusion = Conclude("e1", Verdict.LOST, "nothing was staged", None, -0.5)
    data = Timeline("e1", 0.0).farewell(conclusion, run="r", generation=None, written=WRITTEN)
    body = json.loads(data)
    assert (body["commit"], body["generation"], body["timeline"]) == (None, None, [])
    assert (body["verdict"], body["slack_s"]) == ("LOST", -0.5)


def test_a_second_farewell_tells_all_of_the_first_and_more() -> None:
    """A verdict that got better: the timeline goes on."""
    timeline = Timeline("e1", 0.0)
    timeline.add(Mark("e1", "notice"), 0.0)
    partial = Conclude("e1", Verdict.PARTIAL, "late", CommitRef(1, 5), 0.0)
    first = json.loads(timeline.farewell(partial, run="r", generation=1, written=WRITTEN))
    timeline.add(Mark("e1", "committed", (("step", 6),)), 9.0)
    safe = Conclude("e1", Verdict.SAFE, "there", CommitRef(1, 6), -1.0)
    second = json.loads(timeline.farewell(safe, run="r", generation=1, written=WRITTEN))
    assert second["timeline"][:1] == first["timeline"]
    assert second["timeline"][1]["phase"] == "committed"


def test_a_timeline_is_bounded_and_keeps_both_ends() -> None:
    """However often a trainer answers: the farewell has the beginning, the end, and how much is left out."""
    timeline = Timeline("e1", 0.0)
    for number in range(2000):
        timeline.add(Mark("e1", "accepted", (("rank", number),)), float(number))
    conclusion = Conclude("e1", Verdict.LOST, "no", None, 0.0)
    body = json.loads(timeline.farewell(conclusion, run="r", generation=2, written=WRITTEN))
    assert len(body["timeline"]) == ENTRIES_MAX
    assert (body["timeline"][0]["rank"], body["timeline"][-1]["rank"]) == (0, 1999)
    assert body["left_out"] == 2000 - ENTRIES_MAX
