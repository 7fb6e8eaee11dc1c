# SPDX-License-Identifier: Apache-2.0
"""The PyTorch example, killed and resumed, ends like an uninterrupted run."""

from __future__ import annotations

from pathlib import Path

import pytest
import swansong
from swansong.testing import check_resume

from testkit import TRAINERS

HOOKS = Path(swansong.__file__).parents[1]
EXAMPLE = [
    str(HOOKS / "examples" / "torch_ddp.py"),
    # Four optimizer steps of two batches make an epoch.
    *("--windows", "128", "--accumulate", "2", "--epochs", "9", "--evaluate-every", "5"),
]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
ENVIRONMENT = {"PYTHONPATH": str(HOOKS)}


@pytest.mark.fault("T02", "T16", "S26")
@pytest.mark.timeout(300)
def test_one_process(tmp_path: Path, warm_python: str) -> None:
    """Killed twice in one epoch, in an evaluation and at an epoch's end; with dropout and loader workers."""
    report = check_resume(
        [warm_python, *EXAMPLE, "--workers", "1"],
        steps=10,
        kill_at=[2, 3, "evaluating", 8],
        directory=tmp_path,
        environment=ENVIRONMENT,
    )
    # On a loaded machine the evaluation after step 5 may be over when the request arrives.
    assert report.saved_steps in ([2, 3, 5, 8], [2, 3, 6, 8])
    assert report.losses == 10


@pytest.mark.fault("T12")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("launcher", "options"), [(TORCHRUN, []), ([], ["--fsdp"])], ids=["ddp-under-torchrun", "fsdp2"]
)
def test_two_ranks(
    tmp_path: Path, warm_python: str, launcher: list[str], options: list[str]
) -> None:
    """Each rank has its own dropout and its own part of the data; under torchrun, or with its variables."""
    report = check_resume(
        [warm_python, *launcher, *EXAMPLE, *options],
        steps=5,
        kill_at=[3],
        ranks=2,
        has_launcher=bool(launcher),
        directory=tmp_path,
        environment=ENVIRONMENT,
    )
    assert report.saved_steps == [3]
    assert report.losses == 5


@pytest.mark.timeout(300)
def test_torchdata(tmp_path: Path, warm_python: str) -> None:
    """torchdata's loader with two workers resumes in the middle of an epoch, after the yielded batches.

    Twice, the second time in an epoch that began after a resume; what the workers draw comes back too.
    """
    report = check_resume(
        [warm_python, str(TRAINERS / "stateful_loader.py")],
        steps=16,
        kill_at=[5, 14],
        directory=tmp_path,
        environment=ENVIRONMENT,
    )
    assert report.saved_steps == [5, 14]
    assert report.losses >= 16
