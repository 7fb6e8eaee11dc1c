# SPDX-License-Identifier: Apache-2.0
"""Ranks that the script starts itself: no environment variable describes them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import swansong
from swansong.testing import TrainerFailedError, check_resume

from testkit import TRAINERS

SPAWNED = [sys.executable, str(TRAINERS / "spawned.py")]
ENVIRONMENT = {"PYTHONPATH": str(Path(swansong.__file__).parents[1])}


@pytest.mark.fault("T12")
@pytest.mark.parametrize("options", [["--method", "spawn"], ["--method", "fork", "--fsdp"]])
def test_a_spawned_job_resumes_to_the_bit(tmp_path: Path, options: list[str]) -> None:
    """DDP and FSDP2 in ``torch.multiprocessing``: one set of two ranks, and each rank loads its own state."""
    report = check_resume(
        [*SPAWNED, *options],
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
    with pytest.raises(TrainerFailedError, match=r"before swansong\.attach") as failed:
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
