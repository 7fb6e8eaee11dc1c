# SPDX-License-Identifier: Apache-2.0
"""``swansong loss`` with real processes: each second of a run that lost two VMs belongs to one part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from testkit.clouds import Aws, Bucket
from testkit.waiting import until


def loss_of(vm: Any) -> dict[str, Any]:
    answer = vm.swansong("loss", "--json")
    assert answer.returncode == 0, answer.stderr
    report: dict[str, Any] = json.loads(answer.stdout)
    return report


@pytest.mark.fault("N12")
def test_two_lost_vms_and_their_cost(
    aws: Aws, bucket: Bucket, new_vm: Any, witness: str, tmp_path: Path
) -> None:
    """A preemption with a farewell, then a power cut without one: the third VM has the whole account."""
    first = new_vm("first", bucket.store, metadata=aws.metadata)
    daemon = first.start_daemon()
    first.start_trainer(script=witness)
    daemon.lines.wait(event="resumption_recorded")
    fresh = loss_of(first)
    assert (fresh["interruptions"], fresh["total"]["unproductive"]["redone"]) == ([], 0.0)
    aws.notice(in_s=6)
    verdict = daemon.lines.wait(event="verdict", verdict="SAFE")
    # The last farewell comes shortly before the deadline.
    until(lambda: len(farewells(bucket)) > 1, every_s=0.1, what="the last farewell")
    first.power_off()
    aws.withdraw()

    second = new_vm("second", bucket.store)
    daemon = second.start_daemon()
    trainer = second.start_trainer("--step-delay-s", "3", script=witness)
    resumed = trainer.lines.wait(event="resumed")
    daemon.lines.wait(event="resumption_recorded")
    second.power_off()

    third = new_vm("third", bucket.store)
    daemon = third.start_daemon()
    third.start_trainer(script=witness)
    daemon.lines.wait(event="resumption_recorded")
    report = loss_of(third)

    preempted, cut = report["interruptions"]
    assert (preempted["generation"], cut["generation"]) == (2, 3)
    assert preempted["resumed_from_step"] == resumed["from_step"] >= verdict["step"]
    assert preempted["last_step"] >= preempted["resumed_from_step"]
    check_witness(preempted, steps_of(first), steps_of(second))
    assert preempted["stall_s"] is not None
    assert cut["estimated"] is True
    assert cut["stall_s"] is None
    assert not preempted["same_vm"]
    for each in (preempted, cut):
        known_s = sum(seconds or 0.0 for seconds in each["down"].values())
        assert known_s == pytest.approx(each["down_s"], abs=0.01)
        assert each["down"]["fetch"] is not None
        assert each["bytes_fetched"] > 0
    total = report["total"]
    spent_s = total["productive_s"] + sum(total["unproductive"].values())
    assert spent_s == pytest.approx(total["wall_s"], rel=0.01)
    assert sum(total["goodput"].values()) == pytest.approx(
        sum(total["unproductive"].values()), rel=0.01
    )
    assert 0.0 < total["ettr"] < 1.0
    shown = third.swansong("loss")
    assert shown.returncode == 0
    assert "ETTR" in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 80
    check_report(third, verdict, tmp_path / "report.html")


def steps_of(vm: Any) -> dict[int, float]:
    """The instant of each step that the trainer of a VM completed, as its own process noted it."""
    vm.trainer.lines.drained()
    return {line["step"]: line["mono_s"] for line in vm.trainer.lines.all() if "step" in line}


def check_witness(
    interruption: dict[str, Any], before: dict[int, float], after: dict[int, float]
) -> None:
    """*Redone* and *down* are those of a witness that saw each step.

    The records give the last step to about a second.  An error there moves time between the two parts, so
    their sum is exact to a few tenths of a second.  The first new step takes 3 s here, and counts.
    """
    last, restored = max(before), interruption["resumed_from_step"]
    redone_s = before[last] - before[restored]
    down_s = min(after.values()) - before[last]
    assert redone_s > 2.0, "the test needs a part that the tolerance does not hide"
    assert down_s > 2.0
    found_s = interruption["redone_s"], interruption["down_s"]
    assert found_s == (pytest.approx(redone_s, abs=1.0), pytest.approx(down_s, abs=1.0))
    stall_s = interruption["stall_s"]
    assert sum(found_s) + stall_s == pytest.approx(redone_s + down_s, abs=0.5)


def check_report(vm: Any, verdict: dict[str, Any], page: Path) -> None:
    """The report of the run has the verdict of the log, and the figures of ``swansong loss``."""
    loss = loss_of(vm)
    answer = vm.swansong("report", "--html", str(page), "--json", "--price", "spot=1.20")
    assert answer.returncode == 0, answer.stderr
    report: dict[str, Any] = json.loads(answer.stdout)
    # The third VM still trains, so the end of the run moves.
    assert report["loss"]["interruptions"] == loss["interruptions"]
    (evacuation,) = report["evacuations"]
    assert (evacuation["verdict"], evacuation["resumed_by"]) == ("SAFE", 2)
    assert evacuation["notices"] == [{"source": "aws.spot", "kind": "reclaim"}]
    assert 0 < evacuation["deadline_s"] < 10
    assert evacuation["took_s"] == verdict["took_s"]
    phases = [entry["phase"] for entry in evacuation["timeline"]]
    for phase in ("notice", "request", "sealed", "flush", "flushed", "committed", "verdict"):
        assert phase in phases
    sent = [sample[1] for sample in evacuation["samples"]]
    assert sent == sorted(sent)
    newest = report["commits"][0]
    assert sent[-1] >= newest["size_bytes"] - newest["bytes_referenced"] > 0
    assert report["cost"]["GPU time on spot VMs"].endswith(" USD")
    assert not report["farewells_damaged"]
    text = page.read_text()
    assert "The verdict is SAFE" in text
    for lane in ("Upload", "Fetch", "First step"):
        assert f">{lane}</tspan>" in text
    told = vm.swansong("report")
    assert told.returncode == 0, told.stderr
    assert max(map(len, told.stdout.splitlines())) < 80
    assert "SAFE" in told.stdout


def farewells(bucket: Bucket) -> list[str]:
    return [key for key in bucket.keys("run/farewells/") if key]
