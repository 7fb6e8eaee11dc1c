# SPDX-License-Identifier: Apache-2.0
"""The example for PyTorch and each framework: a preempted and resumed run ends like an uninterrupted one.

Compared byte by byte is all that the last checkpoint holds, but for what tells of the run and not of the
state: clock times in logs, paths, and counters of validation batches.  The processes are forks of one that
has imported the framework.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from swansong.testing import ResumeReport, check_resume

from testkit import EXAMPLES, TRAINERS
from testkit.python_process import ENVIRONMENT, run_python

pytestmark = pytest.mark.timeout(900)
"""Each test starts a trainer up to five times."""


TORCH_DDP = [
    str(EXAMPLES / "torch_ddp.py"),
    # Four optimizer steps of two batches make an epoch.
    *("--windows", "128", "--accumulate", "2", "--epochs", "9", "--evaluate-every", "5"),
]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def check(
    directory: Path, *command: object, steps: int, kill_at: list[int | str], **options: Any
) -> ResumeReport:
    return check_resume(
        [str(word) for word in command],
        steps=steps,
        kill_at=kill_at,
        directory=directory,
        environment={**ENVIRONMENT, "HF_HUB_OFFLINE": "1"},
        limit_s=300,
        **options,
    )


@pytest.mark.fault("T02", "T16", "S26")
def test_one_process(tmp_path: Path, warm_python: str) -> None:
    """Killed twice in one epoch, in an evaluation and at an epoch's end; with dropout and loader workers."""
    command = [warm_python, *TORCH_DDP, "--workers", "1"]
    report = check(tmp_path, *command, steps=10, kill_at=[2, 3, "evaluating", 8])
    # On a loaded machine the evaluation after step 5 may be over when the request arrives.
    assert report.saved_steps in ([2, 3, 5, 8], [2, 3, 6, 8])
    assert report.losses == 10


@pytest.mark.fault("T12")
def test_two_ranks_under_torchrun(tmp_path: Path, warm_python: str) -> None:
    """Each rank has its own dropout and its own part of the data."""
    command = [warm_python, *TORCHRUN, *TORCH_DDP]
    report = check(tmp_path, *command, steps=5, kill_at=[3], ranks=2, has_launcher=True)
    assert report.saved_steps == [3]
    assert report.losses == 5


def test_torchdata(tmp_path: Path, warm_python: str) -> None:
    """torchdata's loader with two workers resumes in the middle of an epoch, after the yielded batches.

    Twice, the second time in an epoch that began after a resume; what the workers draw comes back too.
    """
    script = TRAINERS / "stateful_loader.py"
    report = check(tmp_path, warm_python, script, steps=16, kill_at=[5, 14])
    assert report.saved_steps == [5, 14]
    assert report.losses >= 16


def test_lightning(tmp_path: Path, warm_frameworks: str) -> None:
    """In a validation and at the end of an epoch, which has four optimizer steps of two batches."""
    command = [warm_frameworks, EXAMPLES / "with_lightning.py", "--windows", "128"]
    report = check(tmp_path, *command, steps=10, kill_at=["evaluating", 8])
    assert len(report.saved_steps) == 2
    assert report.losses >= 8  # Lightning may be killed before it prints the last loss
    assert report.files == 4
    assert _epoch_progress(tmp_path / "resumed") == _epoch_progress(tmp_path / "reference")


def _epoch_progress(run: Path) -> object:
    """Lightning's count of epochs in the last checkpoint."""
    (path,) = run.glob("staging/step-000000000010.*/rank-00000/state.json")
    loops = dict(json.loads(path.read_text())["index"]["objects"]["lightning"]["dict"])["progress"]
    return dict(dict(loops["dict"])["fit_loop"]["dict"])["epoch_progress"]


def test_lightning_refuses_a_strategy_that_it_cannot_save(tmp_path: Path) -> None:
    """A strategy whose state cannot be saved by rank is refused by name before the first step."""
    from swansong.lightning import SwansongCallback

    class Trainer:
        strategy = object()

    with pytest.raises(TypeError, match="FSDP2"):
        SwansongCallback().on_fit_start(Trainer(), None)


@pytest.mark.parametrize("example", ["with_accelerate", "with_fabric", "with_transformers"])
def test_an_example_trains_in_one_process(
    tmp_path: Path, warm_frameworks: str, example: str
) -> None:
    """As the first line of its docstring says, without a daemon, and with nothing outside of its state."""
    command = (EXAMPLES / f"{example}.py", "--epochs", "1", "--windows", "256")
    settings = {"HF_HUB_OFFLINE": "1", "SWANSONG_SOCKET": str(tmp_path / "none")}
    ended = run_python(*command, python=warm_frameworks, cwd=tmp_path, **settings)
    assert ended.returncode == 0, ended.stderr[-2000:]
    lines = [line for line in ended.stderr.splitlines() if "no swansongd at" not in line]
    warnings = [line for line in lines if " state" in line or "step" in line]
    assert not warnings


@pytest.mark.fault("T12")
def test_transformers(tmp_path: Path, warm_frameworks: str) -> None:
    """torchrun with accumulation: both ranks save the same step in an epoch, and the resumed ranks first do
    the evaluation due then.  Losses and learning rates, which are in the log, are equal, too.
    """
    report = check(
        tmp_path,
        *(warm_frameworks, *TORCHRUN, EXAMPLES / "with_transformers.py"),
        *("--windows", "256", "--output", tmp_path / "output"),
        steps=6,
        kill_at=[3],
        ranks=2,
        has_launcher=True,
        ignoring=r"trainer_state\.json",  # its log contains clock times
    )
    assert report.saved_steps == [3]
    # Weights, their two configurations, optimizer, schedule, and of each rank the generators and a note.
    assert report.files >= 9
    assert list(tmp_path.glob("resumed/staging/*/rank-00001/checkpoint-6/rng_state_1.pth"))
    log = _trainer_log(tmp_path / "resumed")
    assert log == _trainer_log(tmp_path / "reference")
    # Four optimizer steps make an epoch; the last checkpoint comes before the log of its step.
    trained = [(entry["step"], entry["epoch"]) for entry in log if "learning_rate" in entry]
    assert trained == [(step, step / 4) for step in range(1, 6)]
    assert [entry["step"] for entry in log if "eval_loss" in entry] == [3]


def _trainer_log(run: Path) -> list[dict[str, float]]:
    """The Trainer's log in the last checkpoint, without clock times."""
    (path,) = run.glob("staging/step-000000000006.*/rank-00000/checkpoint-6/trainer_state.json")
    log = json.loads(path.read_text())["log_history"]
    times = ("runtime", "per_second")
    return [{name: entry[name] for name in entry if not name.endswith(times)} for entry in log]


@pytest.mark.fault("T12")
def test_accelerate(tmp_path: Path, warm_frameworks: str) -> None:
    """Two ranks with accumulation, and each with loader workers and dropout."""
    command = [warm_frameworks, EXAMPLES / "with_accelerate.py", "--windows", "256"]
    report = check(tmp_path, *command, steps=6, kill_at=[3], ranks=2)
    assert report.saved_steps == [3]
    assert report.losses == 6
    one, other = tmp_path.glob("resumed/staging/step-000000000006.*/rank-*/model-*")
    assert one.read_bytes() == other.read_bytes(), "the ranks did not train together"


@pytest.mark.fault("T12")
def test_dcp(tmp_path: Path, warm_python: str) -> None:
    """Two ranks of FSDP2 write to separate directories."""
    # The ignored file contains an id of the save.
    options = {"ranks": 2, "ignoring": r"\.metadata"}
    script = EXAMPLES / "with_dcp.py"
    report = check(tmp_path, warm_python, script, steps=6, kill_at=[3], **options)
    assert report.saved_steps == [3]
    assert report.losses == 6
    assert report.files == 2
