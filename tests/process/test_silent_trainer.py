# SPDX-License-Identifier: Apache-2.0
"""A trainer that does not respond: stopped, or inside a step that does not end."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from testkit.clouds import Aws, Bucket


@pytest.mark.fault("T04")
def test_a_silent_trainer_costs_the_newest_steps_and_nothing_else(
    aws: Aws, bucket: Bucket, new_vm: Any, witness: str
) -> None:
    """PARTIAL before the deadline, and the older commit remains; the daemon does not kill the trainer."""
    vm = new_vm("vm", bucket.store, metadata=aws.metadata)
    daemon = vm.start_daemon()
    trainer = vm.start_trainer("--every-steps", "20", script=witness)
    daemon.lines.wait(event="committed", step=20)
    trainer.kill(signal.SIGSTOP)

    aws.notice(in_s=4)

    verdict = daemon.lines.wait(event="verdict")
    (before, *_) = bucket.manifests()
    assert (verdict["verdict"], verdict["step"]) == ("PARTIAL", before["step"])
    assert verdict["slack_s"] >= 0
    assert before["kind"] == "periodic"
    assert trainer.popen.poll() is None

    stopped_at = vm.status()["trainers"][0]["step"]
    trainer.kill(signal.SIGCONT)
    trainer.lines.wait(step=stopped_at + 30)
    assert trainer.popen.poll() is None
