# SPDX-License-Identifier: Apache-2.0
"""One bit of the newest checkpoint flips in the store: restore reports it and takes the older commit."""

from __future__ import annotations

import json
from typing import Any

import pytest

from testkit.clouds import Bucket

CORRUPT = 8


@pytest.fixture
def two_commits(bucket: Bucket, new_vm: Any, witness: str) -> Bucket:
    """A run with commits at steps 20 and 40, whose VM is terminated."""
    vm = new_vm("first", bucket.store)
    daemon = vm.start_daemon()
    for step in (20, 40):  # by two starts of the training, so in two generations
        trainer = vm.start_trainer("--steps", str(step), "--every-steps", "20", script=witness)
        daemon.lines.wait(event="committed", step=step)
        assert trainer.wait() == 0
    vm.power_off()
    return bucket


@pytest.fixture
def damaged(two_commits: Bucket) -> Bucket:
    """One bit in the data of the newer commit has flipped."""
    newest = two_commits.manifests()[0]
    shard = next(shard for shard in newest["shards"] if shard["path"].endswith("weights.bin"))
    two_commits.damage(shard)
    return two_commits


def test_verify_finds_the_flipped_bit(damaged: Bucket, new_vm: Any) -> None:
    """Exit code 8, and findings that name the commit and the files of the chunk."""
    vm = new_vm("vm", damaged.store)
    answer = vm.swansong("verify", "--json")
    assert answer.returncode == CORRUPT
    findings = json.loads(answer.stdout)["defects"]
    assert {(finding["generation"], finding["step"]) for finding in findings} == {(2, 40)}
    assert any("weights.bin" in finding["problem"] for finding in findings)


def test_restore_skips_the_damaged_commit_and_reports_why(damaged: Bucket, new_vm: Any) -> None:
    """The older commit is restored; the newer one is reported with the reason and stays in the bucket."""
    vm = new_vm("vm", damaged.store)
    before = damaged.objects()
    place = vm.disk / "restored"
    answer = vm.swansong("restore", "--to", str(place), "--json")
    assert answer.returncode == 0, answer.stderr
    restored = json.loads(answer.stdout)
    assert restored["step"] == 20
    ((step, reason),) = [(item["step"], item["reason"]) for item in restored["skipped"]]
    assert step == 40
    assert "does not match its digest" in reason
    assert "skipped generation 2 step 40" in answer.stderr
    assert (
        (place / "rank-00000" / "weights.bin").read_bytes().startswith(b"weights.bin at step 20;")
    )
    assert damaged.objects() == before


def test_a_trainer_on_a_new_vm_resumes_from_the_older_commit(
    damaged: Bucket, new_vm: Any, witness: str
) -> None:
    """``guard.restore()`` returns only verified bytes; the daemon logs the reason for the older commit."""
    vm = new_vm("vm", damaged.store)
    daemon = vm.start_daemon()
    trainer = vm.start_trainer(script=witness)
    assert trainer.lines.wait(event="resumed")["from_step"] == 20
    (skipped,) = daemon.lines.all(event="commit_skipped")
    assert skipped["commit"] == "generation 2 step 40"
    assert "does not match its digest" in skipped["reason"]


def test_with_every_commit_damaged_no_run_starts_from_scratch(
    damaged: Bucket, new_vm: Any, witness: str
) -> None:
    """Restore fails instead of silently starting the run from scratch."""
    older = damaged.manifests()[-1]
    damaged.damage(older["shards"][0])
    vm = new_vm("vm", damaged.store)
    daemon = vm.start_daemon()
    trainer = vm.start_trainer(script=witness)
    assert trainer.wait() != 0
    assert not trainer.lines.all(event="resumed")
    assert daemon.lines.wait(event="resume")["error"]
    assert vm.swansong("restore", "--to", str(vm.disk / "restored")).returncode == 17
    assert not (vm.disk / "restored").exists()


@pytest.mark.fault("G08", "G10", "O20")
@pytest.mark.parametrize("damage", ["manifest flipped", "shard deleted"])
def test_other_damaged_commits_are_skipped_as_well(
    two_commits: Bucket, new_vm: Any, damage: str
) -> None:
    """For either damage verify finds the commit, and restore takes the next older one."""
    if damage == "manifest flipped":
        two_commits.flip_bit(max(two_commits.keys("run/commits/")))
    else:
        newest = two_commits.manifests()[0]
        two_commits.delete(newest["shards"][-1]["key"])
    vm = new_vm("vm", two_commits.store)
    assert vm.swansong("verify").returncode == CORRUPT
    answer = vm.swansong("restore", "--to", str(vm.disk / "restored"))
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.startswith("restored step 20 of run run")
    assert "skipped generation 2 step 40" in answer.stderr
