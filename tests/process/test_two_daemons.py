# SPDX-License-Identifier: Apache-2.0
"""Two VMs with one run: the older is fenced, and neither damages what the other wrote."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from clouds import Bucket
from waiting import until

pytestmark = pytest.mark.timeout(60)

FENCED = 14


@pytest.mark.fault("G03")
def test_the_older_of_two_is_fenced(bucket: Bucket, new_vm: Any, witness: str) -> None:
    """A copy of the VM takes the run over: the first daemon leaves, its trainer is told and trains on."""
    older = new_vm("older", bucket.store)
    first = older.start_daemon()
    orphan = older.start_trainer("--every-steps", "20", script=witness)
    first.lines.wait(event="committed", step=20)

    newer = new_vm("newer", bucket.store)
    second = newer.start_daemon()
    until(lambda: newer.status()["generation"] == 2, what="generation 2")
    before = bucket.objects()  # all that the first had written when it was overtaken, or nearly

    assert first.wait(timeout_s=20) == FENCED
    assert first.lines.all(event="fenced", generation=1, newer_generation=2)
    orphan.lines.wait(event="fenced")
    steps = [line["step"] for line in orphan.lines.all() if "step" in line]
    orphan.lines.wait(step=steps[-1] + 30)
    assert orphan.popen.poll() is None

    newer.start_trainer("--every-steps", "20", script=witness).lines.wait(event="resumed")
    until(lambda: second.lines.all(event="committed", generation=2), what="a commit of the second")
    after = bucket.objects()
    assert before.items() <= after.items()
    assert second.popen.poll() is None
    assert newer.commits()[0]["generation"] == 2


@pytest.mark.fault("G03")
def test_a_zombie_that_wakes_in_mid_flush_commits_nothing(
    bucket: Bucket, new_vm: Any, witness: str
) -> None:
    """Frozen while it uploads, overtaken, thawed: its shards are garbage of its own, no commit."""
    zombie = new_vm("zombie", bucket.store)
    frozen = zombie.start_daemon()
    trainer = zombie.start_trainer("--every-steps", "20", script=witness)
    frozen.lines.wait(event="committed", step=20)
    bucket.order("answer", status=503, method="PUT", match="/data/00000001/", times=1_000_000)
    frozen.lines.wait(event="store_retry")
    frozen.kill(signal.SIGSTOP)
    trainer.kill()
    commits_before = [manifest["step"] for manifest in bucket.manifests()]

    heir = new_vm("heir", bucket.store)
    second = heir.start_daemon()
    heir.start_trainer("--every-steps", "20", script=witness)
    until(lambda: second.lines.all(event="committed", generation=2), what="a commit of the heir")
    bucket.order("clear")
    before = bucket.objects()
    frozen.kill(signal.SIGCONT)

    assert frozen.wait(timeout_s=20) == FENCED
    own = [manifest["step"] for manifest in bucket.manifests() if manifest["generation"] == 1]
    assert own == commits_before
    assert before.items() <= bucket.objects().items()
    assert heir.commits()[0]["generation"] == 2
