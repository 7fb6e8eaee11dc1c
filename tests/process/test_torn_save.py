# SPDX-License-Identifier: Apache-2.0
"""A trainer that dies during a save."""

from __future__ import annotations

from typing import Any

import pytest

from testkit.clouds import Aws, Bucket


@pytest.mark.fault("T02", "T03")
def test_a_half_written_checkpoint_is_not_restored(
    aws: Aws, bucket: Bucket, new_vm: Any, witness: str
) -> None:
    """The trainer is killed during the requested save: the older commit remains, and is restored."""
    vm = new_vm("vm", bucket.store, metadata=aws.metadata)
    daemon = vm.start_daemon()
    vm.start_trainer("--steps", "20", "--every-steps", "20", script=witness)
    daemon.lines.wait(event="committed", step=20)
    trainer = vm.start_trainer("--die-in-save", "21", script=witness)
    trainer.lines.wait(step=25)

    aws.notice(in_s=30)

    assert trainer.wait() == -9
    verdict = daemon.lines.wait(event="verdict")
    assert (verdict["verdict"], verdict["step"]) == ("PARTIAL", 20)
    assert verdict["slack_s"] > 15, "the daemon waited for a trainer that had ended"

    (torn,) = vm.run_directory.glob("*.partial")
    assert any(path.is_file() for path in torn.rglob("*"))
    assert [manifest["step"] for manifest in bucket.manifests()] == [20]
    nonce = torn.name.removesuffix(".partial").partition(".")[2]
    assert not [key for key in bucket.objects() if nonce in key]

    vm.power_off()
    aws.withdraw()
    second = new_vm("second", bucket.store, metadata=aws.metadata)
    second.start_daemon()
    resumed = second.start_trainer(script=witness).lines.wait(event="resumed")
    assert resumed["from_step"] == 20
