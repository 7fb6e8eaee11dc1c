# SPDX-License-Identifier: Apache-2.0
"""GPUs that degrade or fail: daemon, probe and trainer are processes, and NVML is a fake library."""

from __future__ import annotations

from typing import Any

import pytest

from testkit.clouds import Bucket
from testkit.fake_nvml import FakeNvml
from testkit.waiting import until


@pytest.mark.fault("X01", "X02", "X03", "X09")
def test_a_gpu_degrades_and_then_dies(
    nvml: FakeNvml, bucket: Bucket, new_vm: Any, witness: str
) -> None:
    """A precaution at first; after the failure only what is sealed is committed, also while NVML hangs."""
    vm = new_vm("vm", bucket.store)
    daemon = vm.start_daemon(**nvml.environment)
    trainer = vm.start_trainer(script=witness)
    trainer.lines.wait(step=5)
    until(lambda: len(vm.status()["gpus"]) == 2, what="two GPUs in the status")

    nvml.xid(94, gpu=1)
    daemon.lines.wait(event="precaution_done")
    (commit,) = vm.commits()
    degraded = vm.status()
    assert degraded["state"] == "ARMED"
    assert [gpu["health"] for gpu in degraded["gpus"]] == ["ok", "degraded"]
    # The verdict counts the steps that the trainer has reported.
    until(lambda: vm.status()["trainers"][0]["step"] > commit["step"], what="a later step")

    nvml.xid(95, gpu=1)
    verdict = daemon.lines.wait(event="verdict")
    assert verdict["verdict"] == "PARTIAL"
    assert "GPU 1 is dying: Xid 95" in verdict["reason"]
    nvml.set(hang=1)
    noted = vm.swansong("notify", "--in", "20s", "--wait")
    assert "PARTIAL" in noted.stdout + noted.stderr
    assert len(vm.commits()) == 1
    evacuations = daemon.lines.all(event="evacuation")
    assert [line["plan"] for line in evacuations if line["phase"] == "notice"] == ["NONE", "NONE"]
    assert len([line for line in evacuations if line["phase"] == "request"]) == 1
    table = vm.status_words()
    assert "dying" in table
    assert "Xid 95" in table

    daemon.kill()  # NVML still hangs: only the record of the killed daemon shows the failure
    restarted = vm.start_daemon(**nvml.environment)
    until(lambda: vm.status()["trainers"], what="the trainer, which connects again")
    assert [gpu["health"] for gpu in vm.status()["gpus"]] == ["ok", "dying"]
    vm.swansong("notify", "--in", "20s", "--wait")
    requests = [
        line for line in restarted.lines.all(event="evacuation") if line["phase"] == "request"
    ]
    assert requests == []
