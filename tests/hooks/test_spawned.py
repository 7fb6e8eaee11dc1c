# SPDX-License-Identifier: Apache-2.0
"""Ranks that the script starts itself: no environment variable describes them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import swansong
from swansong.protocol import RankManifest
from swansong.testing import TrainerFailedError, check_resume
from swansong.torch import load_weights

from testkit import TRAINERS
from testkit.fake_daemon import FakeDaemon

SPAWNED = [sys.executable, str(TRAINERS / "spawned.py")]
ENVIRONMENT = {"PYTHONPATH": str(Path(swansong.__file__).parents[1])}


@pytest.mark.fault("T12")
@pytest.mark.parametrize("options", [[], ["--fsdp"]], ids=["ddp", "fsdp2"])
def test_a_spawned_job_resumes_to_the_bit(tmp_path: Path, options: list[str]) -> None:
    """DDP and FSDP2 in ``torch.multiprocessing``: one set of two ranks, and each rank loads its own state."""
    report = check_resume(
        [*SPAWNED, "--method", "fork", *options],
        steps=6,
        kill_at=[3],
        ranks=2,
        has_launcher=True,
        directory=tmp_path,
        environment=ENVIRONMENT,
    )
    assert report.saved_steps == [3]
    assert report.losses == 6
    assert report.files >= 4, "the files of two ranks"


def test_attach_before_the_process_group_is_refused(tmp_path: Path) -> None:
    """``restore()`` raises with the fix; it does not save one rank as if it were the whole job."""
    with pytest.raises(TrainerFailedError, match="init_process_group") as failed:
        check_resume(
            [*SPAWNED, "--method", "fork", "--early"],
            steps=3,
            kill_at=[2],
            ranks=2,
            has_launcher=True,
            directory=tmp_path,
            environment=ENVIRONMENT,
        )
    assert "of 2 in torch.distributed, but it was rank 0 of 1 in swansong.attach()" in str(
        failed.value
    )


def test_the_process_group_may_end_before_the_guard(daemon: FakeDaemon) -> None:
    """``destroy_process_group()`` comes before ``finish()``: the last set has both ranks."""
    command = [*SPAWNED, "--method", "fork", "--steps", "2", "--end-early", "--fsdp"]
    variables = {**os.environ, **ENVIRONMENT, "SWANSONG_SOCKET": daemon.path}
    subprocess.run(command, env=variables, stdout=subprocess.DEVNULL, check=True, timeout=200)
    (sealed,) = daemon.sealed()
    for rank in range(2):
        manifest = RankManifest.decode((sealed / f"rank-{rank:05d}.json").read_bytes())
        assert (manifest.step, manifest.rank, manifest.world_size) == (2, rank, 2)
    assert load_weights(sealed)["0.weight"].shape == (16, 8)
