# SPDX-License-Identifier: Apache-2.0
"""Experiment trackers over three preemptions, with the real packages, offline, and the real daemon."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import swansong
from swansong.trackers import PREEMPTING_TAG

from testkit import TRAINERS
from testkit.rig import Process, Vm, environment
from testkit.waiting import until

HOOKS = Path(swansong.__file__).parents[1]
PYTHON = os.environ.get(
    "SWANSONG_FRAMEWORKS_PYTHON", str(HOOKS.parent / "build" / "frameworks" / "bin" / "python")
)
SCRIPT = str(TRAINERS / "tracked.py")
VMS = 4

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not os.path.exists(PYTHON), reason="make test-frameworks makes its environment"
    ),
]


def last_step(trainer: Process) -> int:
    return max((int(line["step"]) for line in trainer.lines.all() if "step" in line), default=-1)


def has_tag(database: Path) -> bool:
    """Whether an MLflow run is marked; the writer may hold the lock."""
    opened = contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True))
    with opened as connection, contextlib.suppress(sqlite3.OperationalError):
        found = connection.execute("select 1 from tags where key = ?", (PREEMPTING_TAG,))
        return found.fetchone() is not None
    return False


def preempted(
    vm: Vm, command: list[str], steps: int, is_marked: Callable[[], bool]
) -> tuple[int, int]:
    """Train this many steps, get a notice, and lose the power after some more steps: first and last step."""
    daemon = vm.start_daemon()
    paths = f"{HOOKS}{os.pathsep}{TRAINERS.parents[1]}"
    trainer = vm.spawn(command, lines_on="stdout", SWANSONG_SOCKET=str(vm.socket), PYTHONPATH=paths)
    start = int(trainer.lines.wait(event="resumed", timeout_s=120)["from_step"])
    until(lambda: last_step(trainer) >= start + steps, what="the steps before the notice")
    assert vm.swansong("notify", "--in", "60s").returncode == 0
    safe = int(daemon.lines.wait(event="verdict", verdict="SAFE")["step"])
    until(lambda: last_step(trainer) >= safe + steps, what="steps that will be repeated")
    until(is_marked, what="the mark, which a thread of its own sets")
    vm.power_off()
    return start, last_step(trainer)


@pytest.mark.parametrize("kind", ["wandb", "mlflow", "tensorboard"])
def test_no_step_has_two_points(tmp_path: Path, kind: str) -> None:
    """Four VMs log to one run of the tracker: each step has one point, in order, without a gap."""
    points = tmp_path / "points"
    points.mkdir()
    (tmp_path / "bucket").mkdir()
    command = [PYTHON, "-u", SCRIPT, kind, str(points)]
    # W&B keeps blocks of 32 KiB, which is about 45 steps here.
    steps = 120 if kind == "wandb" else 30
    database = points / "mlflow.db"
    is_marked = partial(has_tag, database) if kind == "mlflow" else lambda: True
    spans = []
    for number in range(VMS):
        disk = tmp_path / f"vm{number}"
        disk.mkdir()
        store = {"url": f"file://{tmp_path}/bucket"}
        settings = {"trainer": {"follow_ups": False}}
        with Vm(disk, store, run="run", settings=settings) as vm:
            spans.append(preempted(vm, command, steps, is_marked))
    starts, ends = zip(*spans, strict=True)
    assert starts[0] == 0
    assert all(end > start for end, start in zip(ends, starts[1:], strict=False))  # repeated steps
    found = read(command)
    last = found["steps"][-1]
    assert found["steps"] == list(range(1, last + 1))
    assert last >= starts[-1]
    assert found["runs"] == ["run"]
    assert found["marked"]


def test_the_block_of_the_page_runs(tmp_path: Path) -> None:
    """It logs to an offline run of W&B, without a daemon."""
    page = (HOOKS.parent / "docs" / "trainers" / "trackers.md").read_text(encoding="utf-8")
    block = page.split("```py\n")[1].split("```")[0]
    subprocess.run(
        [PYTHON, "-c", block],
        cwd=tmp_path,
        env=environment(PYTHONPATH=str(HOOKS), WANDB_MODE="offline"),
        check=True,
    )
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def read(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(
        [*command, "--read"],
        env=environment(PYTHONPATH=str(HOOKS)),
        capture_output=True,
        text=True,
        check=True,
    )
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts
