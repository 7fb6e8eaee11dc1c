# SPDX-License-Identifier: Apache-2.0
"""The report for ``swansong status``, in each phase of an evacuation."""

from __future__ import annotations

import json
from typing import Any

import pytest
from swansong_bucket.model import CommitRef, Health, Severity
from swansongd.core.events import FlushProgress, TrainerFailed
from swansongd.observe.build_status import status_line
from swansongd.observe.facts import NewestDated, TrainerRefused
from swansongd.observe.status import STORE_HEALTH, from_json, to_json

from testkit.story import MIB, Story


def shown(story: Story) -> dict[str, Any]:
    """The JSON of the status."""
    shown: dict[str, Any] = json.loads(json.dumps(to_json(story.status), allow_nan=False))
    assert from_json(shown) == story.status
    return shown


def test_unknown_values_are_null_and_not_zero() -> None:
    report = shown(Story(claimed=False))
    assert (report["generation"], report["state"], report["verdict"]) == (None, "IDLE", None)
    assert report["store"] is None
    assert report["sources"] == report["notices"] == report["trainers"] == []
    assert (report["last_commit"], report["evacuation"]) == (None, None)
    assert report["bandwidth_bytes_per_s"] is None
    assert report["replication_lag"] == {"steps": 0, "seconds": None, "bytes": 0}


def test_each_phase_of_an_evacuation() -> None:
    """State, plan and time left are current."""
    story = Story()
    story.join(step=40)
    story.notice(900, "aws.rebalance", severity=Severity.ADVISORY)
    assert shown(story)["state"] == "ARMED"
    story.notice(120)
    report = shown(story)
    assert report["state"] == "CHECKPOINTING"
    assert report["evacuation"]["plan"] == "TAKE"
    assert report["evacuation"]["reason"] == "aws.spot: reclaim"
    assert report["evacuation"]["seconds_left"] == 120
    assert {n["source"]: n["severity"] for n in report["notices"]} == {
        "aws.rebalance": "advisory",
        "aws.spot": "imminent",
    }
    story.accept(40)
    story.answer(41)
    assert shown(story)["state"] == "FLUSHING"
    assert shown(story)["pending_bytes"] == 100 * MIB
    story.flushed(after_s=4)
    assert shown(story)["state"] == "COMMITTING"
    story.committed()
    report = shown(story)
    assert (report["state"], report["verdict"]) == ("SAFE", "SAFE")
    assert report["last_commit"] == {"generation": 2, "step": 41, "is_final": False, "age_s": 0.0}
    assert report["evacuation"]["seconds_left"] == 116
    assert report["pending_bytes"] == 0
    assert (
        status_line(story.state, story.now) == "SAFE; 116 s left; last commit generation 2 step 41"
    )
    story.withdraw()
    story.withdraw("aws.rebalance")
    report = shown(story)
    assert (report["state"], report["verdict"], report["notices"]) == ("IDLE", "SAFE", [])
    assert report["last_verdict"]["step"] == 41


def test_the_lag_is_the_work_that_a_power_cut_would_lose() -> None:
    """Steps after the commit, seconds since the commit, and bytes that are not stored yet."""
    story = Story()
    story.join(step=10)
    story.commit(10, after_s=1)
    assert shown(story)["replication_lag"] == {"steps": 0, "seconds": 0.0, "bytes": 0}
    story.progress(17)
    story.now += 30
    assert shown(story)["replication_lag"] == {"steps": 7, "seconds": 30.0, "bytes": 0}
    story.seal(20)
    story.tell(FlushProgress(story.flight.flush_id, 60 * MIB))
    assert shown(story)["replication_lag"] == {"steps": 10, "seconds": 30.0, "bytes": 40 * MIB}


def test_a_commit_that_was_found_has_the_age_of_its_manifest() -> None:
    """After a restart the age is unknown until the manifest was read; then it grows as for any commit."""
    story = Story(newest=CommitRef(1, 500))
    report = shown(story)
    assert report["last_commit"] == {"generation": 1, "step": 500, "is_final": False, "age_s": None}
    assert report["replication_lag"] == {"steps": 0, "seconds": None, "bytes": 0}
    story.tell(NewestDated(CommitRef(1, 400), 9000.0))
    assert shown(story)["last_commit"]["age_s"] is None
    story.tell(NewestDated(CommitRef(1, 500), 60.0))
    story.now += 5
    report = shown(story)
    assert report["last_commit"] == {"generation": 1, "step": 500, "is_final": False, "age_s": 65.0}
    assert report["replication_lag"]["seconds"] == 65.0


def test_the_age_belongs_to_the_reported_commit() -> None:
    """A restored bucket makes an older commit the newest; it does not get the age of the one that is gone."""
    story = Story()
    story.join(step=10)
    story.commit(10, after_s=1)
    assert shown(story)["last_commit"]["age_s"] == 0.0
    story.grants = False
    story.join(pid=200, start_id="b")
    story.grant("b", CommitRef(2, 5))
    newest = {"generation": 2, "step": 5, "is_final": False, "age_s": None}
    assert shown(story)["last_commit"] == newest


def test_failed_saves_are_shown() -> None:
    """The number of checkpoints that the trainer could not write, and the reason of the last failure."""
    story = Story()
    assert shown(story)["failed_saves"] == {"count": 0, "last": None}
    story.join(3, rank=3, ranks=4, step=8)
    story.tell(TrainerFailed(3, "", "disk full", 8))
    story.now += 2
    assert shown(story)["failed_saves"] == {
        "count": 1,
        "last": {"step": 8, "rank": 3, "reason": "disk full", "age_s": 2.0},
    }


def test_refused_ranks_are_shown() -> None:
    """The number of processes that were refused, and the last reason with its age."""
    story = Story()
    for reason in ("rank 0 of 2", "rank 1 of 2"):
        story.tell(TrainerRefused(7, reason))
        story.now += 2
    refused = {"count": 2, "last": "rank 1 of 2", "age_s": 2.0}
    assert shown(story)["trainers_refused"] == refused


def test_a_follow_up_shows_beside_safe() -> None:
    """The state stays SAFE; the report has their number, and the time until the next one."""
    story = Story()
    story.join(step=40, takes_follow_ups=True)
    story.notice(in_s=120)
    assert shown(story)["evacuation"]["follow_ups"] == {
        "count": 0, "under_way": False, "next_in_s": None,
    }  # fmt: skip
    story.serve(40, after_s=1.0)
    story.progress(60)
    wait_s = shown(story)["evacuation"]["follow_ups"]["next_in_s"]
    assert 1 < wait_s < 120
    story.wait(wait_s + 0.1)
    assert shown(story)["state"] == "SAFE"
    assert shown(story)["evacuation"]["follow_ups"]["under_way"]
    assert "a follow-up checkpoint is under way" in status_line(story.state, story.now)
    story.serve(60)
    assert not shown(story)["evacuation"]["follow_ups"]["under_way"]


@pytest.mark.parametrize("health", list(Health))
def test_the_store_has_its_own_health_field(health: Health) -> None:
    story = Story()
    for name in (STORE_HEALTH, "aws.spot"):
        story.health(name, health, "why")
    story.now += 3
    report = shown(story)
    expected = {"health": health.value, "reason": "why", "for_s": 3.0}
    assert report["store"] == {"name": "store", **expected}
    assert report["sources"] == [{"name": "aws.spot", **expected}]
