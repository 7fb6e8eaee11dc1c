# SPDX-License-Identifier: Apache-2.0
"""PyTorch trainers without our hooks, signalled with SIGTERM: their frameworks' checkpoints are adopted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from testkit import TRAINERS
from testkit.clouds import Aws, Bucket

SCRIPT = str(TRAINERS / "signalled_torch.py")


@pytest.mark.fault("T11")
@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("layout", ["dcp", "ckpt"])
def test_a_checkpoint_of_a_framework_is_adopted_and_restored(
    aws: Aws, bucket: Bucket, new_vm: Any, warm_torch: str, tmp_path: Path, *, layout: str
) -> None:
    """The signalled worker saves once and continues; another VM loads the files."""
    settings = {"trainer": {"signal": "SIGTERM", "pid_file": str(tmp_path / "vm" / "trainer.pid")}}
    vm = new_vm("vm", bucket.store, metadata=aws.metadata, settings=settings)
    daemon = vm.start_daemon()
    command = [warm_torch, "-u", SCRIPT, layout, str(vm.run_directory), str(vm.pid_file)]
    trainer = vm.spawn(command, lines_on="stdout")
    trainer.lines.wait(step=5)

    aws.notice(in_s=60)

    daemon.lines.wait(event="verdict", verdict="SAFE")
    (manifest,) = bucket.manifests()
    step = manifest["step"]
    trainer.lines.wait(step=step + 3)
    vm.power_off()

    elsewhere = new_vm("elsewhere", bucket.store)
    place = elsewhere.disk / "checkpoint"
    assert elsewhere.swansong("restore", "--to", str(place)).returncode == 0
    weights = torch.zeros(100)
    if layout == "dcp":
        dcp.load({"weights": weights}, checkpoint_id=place, no_dist=True)
    else:
        weights = torch.load(place / f"epoch=0-step={step}.ckpt", weights_only=True)["weights"]
    assert torch.equal(weights, torch.full((100,), float(step)))
