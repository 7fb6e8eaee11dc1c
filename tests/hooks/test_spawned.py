# SPDX-License-Identifier: Apache-2.0
"""Ranks that the script starts itself: no environment variable describes them."""

from __future__ import annotations

from pathlib import Path

import pytest
from swansong.layout import RankManifest
from swansong.testing import check_resume
from swansong.torch import load_weights

from testkit import TRAINERS
from testkit.fake_daemon import FakeDaemon
from testkit.python_process import ENVIRONMENT, output_of

SPAWNED = str(TRAINERS / "spawned.py")


@pytest.mark.fault("T12")
def test_a_spawned_job_resumes_to_the_bit(tmp_path: Path, warm_python: str) -> None:
    """FSDP2 in ``torch.multiprocessing``: one set of two ranks, and each rank loads its own state."""
    report = check_resume(
        [warm_python, SPAWNED, "--fsdp"],
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


def test_the_process_group_may_end_before_the_guard(daemon: FakeDaemon, warm_python: str) -> None:
    """``destroy_process_group()`` comes before ``finish()``: the last set has both ranks."""
    options = ("--steps", "2", "--end-early", "--fsdp")
    output_of(SPAWNED, *options, python=warm_python, SWANSONG_SOCKET=daemon.path)
    (sealed,) = daemon.sealed()
    for rank in range(2):
        manifest = RankManifest.decode((sealed / f"rank-{rank:05d}.json").read_bytes())
        assert (manifest.step, manifest.rank, manifest.world_size) == (2, rank, 2)
    assert load_weights(sealed)["0.weight"].shape == (16, 8)
