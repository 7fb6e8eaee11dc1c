# SPDX-License-Identifier: Apache-2.0
"""One bit of the newest checkpoint flips in the store: trainers get the older commit, or an error."""

from __future__ import annotations

from typing import Any

import pytest

from testkit.clouds import Bucket


@pytest.mark.fault("G08", "G10", "O20")
def test_a_trainer_resumes_from_the_older_commit_and_never_from_scratch(
    bucket: Bucket, new_vm: Any, witness: str
) -> None:
    """``guard.restore()`` returns only verified bytes; the daemon logs the reason for the older commit.

    With every commit damaged, the trainer and ``restore`` fail instead of silently starting from scratch.
    """
    first = new_vm("first", bucket.store)
    daemon = first.start_daemon()
    for step in (20, 40):  # by two starts of the training, so in two generations
        trainer = first.start_trainer("--steps", str(step), "--every-steps", "20", script=witness)
        daemon.lines.wait(event="committed", step=step)
        assert trainer.wait() == 0
    first.power_off()
    newest, older = bucket.manifests()
    (shard,) = (shard for shard in newest["shards"] if shard["path"].endswith("weights.bin"))
    bucket.damage(shard)

    second = new_vm("second", bucket.store)
    daemon = second.start_daemon()
    trainer = second.start_trainer(script=witness)
    assert trainer.lines.wait(event="resumed")["from_step"] == 20
    (skipped,) = daemon.lines.all(event="commit_skipped")
    assert skipped["commit"] == "generation 2 step 40"
    assert "does not match its digest" in skipped["reason"]
    second.power_off()

    bucket.damage(older["shards"][0])
    third = new_vm("third", bucket.store)
    daemon = third.start_daemon()
    trainer = third.start_trainer(script=witness)
    assert trainer.wait() != 0
    assert not trainer.lines.all(event="resumed")
    assert daemon.lines.wait(event="resume")["error"]
    assert third.swansong("restore", "--to", str(third.disk / "restored")).returncode == 17
    assert not (third.disk / "restored").exists()
