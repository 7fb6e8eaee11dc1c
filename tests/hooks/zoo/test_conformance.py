# SPDX-License-Identifier: Apache-2.0
"""Each trainer of the zoo, preempted at every step and in every pause, continues like an uninterrupted run.

Compared are all printed lines, with losses, batches, rates and metrics, and the last checkpoint, with
weights, optimizer, generators and positions.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from swansong._differences import find_differences
from swansong.testing import ResumeMismatchError, check_resume

from testkit.fake_daemon import FakeDaemon
from testkit.python_process import ENVIRONMENT

HERE = Path(__file__).parent
TRAINERS = sorted((HERE / "trainers").glob("*.py"))
WITHOUT_OPTIMIZER = """
import runpy, sys, torch
torch.optim.Optimizer.load_state_dict = lambda self, state: None
runpy.run_path(sys.argv[1], run_name="__main__")
"""
pytestmark = pytest.mark.timeout(300)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]


def lines(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines that the trainer printed itself."""
    return [event for event in events if "saved" not in event and "final" not in event]


@pytest.mark.parametrize("script", TRAINERS, ids=lambda path: path.stem)
def test_resumed_at_any_moment(
    tmp_path: Path, daemon: FakeDaemon, warm_python: str, script: Path
) -> None:
    """From each checkpoint to the end, and after two preemptions."""
    subprocess.run(
        [warm_python, str(HERE / "drive.py"), str(script), str(tmp_path), str(daemon.staging)],
        env={**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": "1", "SWANSONG_SOCKET": daemon.path},
        stdin=subprocess.DEVNULL,
        timeout=280,
        check=True,
    )
    reference = read(tmp_path / "reference")
    steps = [event for event in reference if "step" in event]
    saved = [place for place, event in enumerate(reference) if "saved" in event]
    assert [event["step"] for event in steps] == list(range(1, len(steps) + 1))
    assert len(steps) >= 8
    once = read(tmp_path / "once")
    assert lines(once) == lines(reference[saved[2] :])
    wanted = {f"from-{number}": reference[place:] for number, place in enumerate(saved)}
    wanted["twice"] = reference[saved[7] :]
    final = daemon.staging / reference[-1]["final"]
    problems = []
    for name, events in wanted.items():
        got = read(tmp_path / name)
        pairs = zip(lines(events), lines(got), strict=False)
        first = next(((a, b) for a, b in pairs if a != b), None)
        if first is not None or len(lines(got)) != len(lines(events)):
            problems.append(f"{name}: {first or (lines(events)[-1:], lines(got)[-1:])}")
        found, _ = find_differences(final, daemon.staging / got[-1]["final"])
        problems += [f"{name}: {difference.text}" for difference in found]
    assert not problems, "\n".join(problems[:20])


def test_a_resume_that_lacks_something_is_named(tmp_path: Path, warm_python: str) -> None:
    """A value of the optimizer that is not restored is found at its first step, and named."""
    script = HERE / "trainers" / "lbfgs.py"
    with pytest.raises(ResumeMismatchError) as raised:
        check_resume(
            [warm_python, "-c", WITHOUT_OPTIMIZER, str(script)],
            steps=7,
            kill_at=[3],
            directory=tmp_path,
            environment=ENVIRONMENT,
        )
    text = str(raised.value)
    assert re.search(r"^step [456] is the first whose loss differs", text, re.MULTILINE)
    assert "\n  optimizer: 'state.0.func_evals' is " in text, text
