# SPDX-License-Identifier: Apache-2.0
"""The examples with further frameworks, in the environment of ``make test-frameworks``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import swansong
from swansong.testing import ResumeReport, check_resume

HOOKS = Path(swansong.__file__).parents[1]
PYTHON = os.environ.get(
    "SWANSONG_FRAMEWORKS_PYTHON", str(HOOKS.parent / "build" / "frameworks" / "bin" / "python")
)
RUN = Path(__file__).with_name("run_example.py")

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not os.path.exists(PYTHON), reason="make test-frameworks makes its environment"
    ),
]


def check(
    directory: Path,
    example: str,
    *arguments: object,
    steps: int,
    kill_at: list[int | str],
    ignoring: str = "(?!)",
) -> ResumeReport:
    return check_resume(
        [PYTHON, str(RUN), str(HOOKS / "examples" / example), *map(str, arguments)],
        steps=steps,
        kill_at=kill_at,
        directory=directory,
        environment={"PYTHONPATH": str(HOOKS), "HF_HUB_OFFLINE": "1"},
        ignoring=ignoring,
        limit_s=300,
    )


def test_stable_baselines3(tmp_path: Path) -> None:
    """PPO with two environments: policy, optimizer, environments and generators."""
    report = check(tmp_path, "with_stable_baselines3.py", steps=6, kill_at=[1, 3, 4])
    assert report.losses == 6


def test_xgboost(tmp_path: Path) -> None:
    """The model of the resumed run is equal byte by byte, with sampled rows and columns."""
    report = check(tmp_path, "with_xgboost.py", steps=8, kill_at=[1, 4, 5])
    assert report.files == 1
    assert report.losses == 8


def test_lightgbm(tmp_path: Path) -> None:
    """The same, with bagged rows and sampled columns."""
    report = check(tmp_path, "with_lightgbm.py", steps=6, kill_at=[1, 4])
    assert report.files == 1
    assert report.losses == 6


def test_timm(tmp_path: Path) -> None:
    """Random erasing draws one batch ahead in the trainer's process; steps 6 and 12 end an epoch."""
    report = check(tmp_path, "with_timm.py", steps=9, kill_at=[1, 6, 8])
    assert report.losses == 9


def test_timm_with_persistent_workers(tmp_path: Path) -> None:
    """timm keeps its workers by default; the checkpoint is of the second epoch."""
    report = check(tmp_path, "with_timm.py", "--workers", 1, steps=9, kill_at=[8])
    assert report.losses == 9


def test_trl(tmp_path: Path) -> None:
    """Supervised fine-tuning, with an evaluation at step 3 and an epoch that ends at step 16."""
    report = check(
        tmp_path,
        "with_trl.py",
        *("--output", tmp_path / "output"),
        steps=18,
        kill_at=[3, 16],
        ignoring=r"training_args\.bin|trainer_state\.json",
    )
    assert report.files >= 7
