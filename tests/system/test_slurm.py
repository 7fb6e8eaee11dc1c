# SPDX-License-Identifier: Apache-2.0
"""The batch script of docs/trainers/slurm.md under a real Slurm with two nodes."""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from testkit import REPOSITORY, TRAINERS
from testkit.other_users import needs_root
from testkit.rig import BIN
from testkit.slurm import TOOLS, Slurm
from testkit.waiting import until

pytestmark = [needs_root, pytest.mark.runs_first]
PAGE = REPOSITORY / "docs" / "trainers" / "slurm.md"
(REQUEUE_EXIT,) = re.findall(r"`(RequeueExit=[\d,]+)`", PAGE.read_text())
WITNESS = {"python train.py": f"{sys.executable} {TRAINERS / 'witness.py'} --stop-after-save"}


@pytest.fixture
def slurm(request: pytest.FixtureRequest) -> Iterator[Slurm]:
    """A cluster; the parameter has lines of slurm.conf."""
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        pytest.skip(f"needs {', '.join(missing)}")
    # A short path: it contains sockets.
    with tempfile.TemporaryDirectory(prefix="slurm-") as directory, ExitStack() as started:
        yield Slurm(Path(directory), started, getattr(request, "param", ""))


class Job:
    """The job of the page, with a small trainer and a directory as its store.

    Args:
        changes: to the script: a text, and the text in its place.
    """

    def __init__(self, slurm: Slurm, changes: dict[str, str] = WITNESS) -> None:
        self._slurm = slurm
        self._output = slurm.directory / "job.txt"
        store = slurm.directory / "store"
        store.mkdir()
        found = re.search(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
        assert found
        text = found[1]
        for old, new in {"s3://my-bucket/prefix": f"file://{store}", **changes}.items():
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        script = slurm.directory / "job.sh"
        script.write_text(text)
        self.id = slurm.run(
            "sbatch", "--parsable", f"--output={self._output}", str(script),
            PATH=f"{BIN}:/usr/sbin:/usr/bin:/sbin:/bin", PYTHONPATH=str(REPOSITORY),
        )  # fmt: skip

    def found(self, pattern: str, count: int) -> list[Any]:
        """All matches of a pattern in the output of the job, once there are ``count``."""

        def matches() -> list[Any]:
            text = self._output.read_text() if self._output.exists() else ""
            every = re.findall(pattern, text)
            return every if len(every) >= count else []

        try:
            return until(matches, what=pattern, timeout_s=180, every_s=0.05)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self._output.read_text()}") from None

    def is_in(self, state: str) -> bool:
        return self._slurm.run("squeue", "-h", "-j", self.id, "-t", "all", "-o", "%T") == state

    def doctor(self) -> dict[str, dict[str, str]]:
        """The findings of the command of the page in the job, by the name of the check."""
        found = re.search(r"`swansong (--config .+) doctor` checks", PAGE.read_text())
        assert found
        path = f"XDG_STATE_HOME=/var/tmp/$USER PATH={BIN}:/usr/bin:/bin"
        command = f"{path}; export PATH; swansong {found[1]} doctor --json || true"
        output = self._slurm.run("srun", "--overlap", f"--jobid={self.id}", "sh", "-c", command)
        return {each["name"]: each for each in json.loads(output)}

    def start_on(self, nodes: str) -> None:
        """Start the requeued job on these nodes, instead of after two minutes.

        A node refuses a job in the second in which it has ended there.
        """
        self._slurm.run("scontrol", "update", f"JobId={self.id}", "StartTime=now+1")
        until(lambda: self.is_in("RUNNING"), what="the start", every_s=0.1)
        assert self._slurm.run("squeue", "-h", "-j", self.id, "-o", "%N") == nodes


@pytest.mark.timeout(300)
@pytest.mark.fault("OE01", "OE02", "OE07")
def test_the_job_moves_between_nodes_and_loses_no_step(slurm: Slurm) -> None:
    """Its coming time limit and a preemption save, requeue and resume it; scancel saves and ends it.

    The third start is on the node of the first one, whose disk has the checkpoint of a generation that the
    other node has overtaken.
    """
    slurm.start_jobs_on("node1")
    job = Job(slurm)
    job.found(r'"step": 10,', 1)
    slurm.run("scontrol", "update", f"JobId={job.id}", "TimeLimit=2")  # the script has TERM@120
    until(lambda: job.is_in("PENDING"), what="the requeue", every_s=0.1)
    slurm.run("scontrol", "update", f"JobId={job.id}", "TimeLimit=1440")
    saved = [int(step) for step in job.found(r"SAFE: generation \d+ step (\d+)", 1)]

    slurm.start_jobs_on("node2")
    job.start_on("node2")
    assert [int(step) for step in job.found(r'"resumed", "from_step": (\d+)', 2)] == [0, *saved]
    urgent = ("--partition=urgent", "--exclusive", "--output=/dev/null")
    slurm.run("sbatch", *urgent, "--wrap=true")
    until(lambda: job.is_in("PENDING"), what="the requeue", every_s=0.1)
    saved = [int(step) for step in job.found(r"SAFE: generation \d+ step (\d+)", 2)]

    slurm.start_jobs_on("node1")
    job.start_on("node1")
    assert [int(step) for step in job.found(r'"resumed", "from_step": (\d+)', 3)] == [0, *saved]
    slurm.run("scancel", job.id)
    until(lambda: job.is_in("CANCELLED"), what="the end", every_s=0.1)
    saved = [int(step) for step in job.found(r"SAFE: generation \d+ step (\d+)", 3)]
    assert saved == sorted(saved)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("slurm", [REQUEUE_EXIT], indirect=True)
@pytest.mark.fault("OE09")
def test_slurm_conf_can_requeue_by_the_exit_code(slurm: Slurm) -> None:
    """As the lines after srun do, which the job lacks here: after a notice, and not after scancel."""
    (end,) = re.findall(r"^code=.*?^exit [^\n]*", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    slurm.start_jobs_on("node1")
    job = Job(slurm, {**WITNESS, end: ""})
    job.found(r'"step": 10,', 1)
    slurm.notice("node1", in_s=60)
    until(lambda: job.is_in("PENDING"), what="the requeue", every_s=0.1)
    (saved,) = job.found(r"SAFE: generation \d+ step (\d+)", 1)

    slurm.start_jobs_on("node2")
    job.start_on("node2")
    assert job.found(r'"resumed", "from_step": (\d+)', 2) == ["0", saved]
    slurm.run("scancel", job.id)
    until(lambda: job.is_in("CANCELLED"), what="the end", every_s=0.1)
    assert job.found("node2: task 0: Exited with exit code (\\d+)", 1) == ["75"]


@pytest.mark.timeout(120)
def test_doctor_in_the_job_finds_that_slurm_may_not_requeue_it(slurm: Slurm) -> None:
    """The user of the job may run its fix, which changes the running job."""
    slurm.start_jobs_on("node1")
    job = Job(slurm)
    job.found(r'"step": 10,', 1)
    names = ("Slurm requeue", "Slurm step", "Slurm KillWait")
    found = job.doctor()
    assert {name: found[name]["level"] for name in names} == dict.fromkeys(names, "ok")

    slurm.run("scontrol", "update", f"JobId={job.id}", "Requeue=0")
    found = job.doctor()
    assert {name for name in names if found[name]["level"] != "ok"} == {"Slurm requeue"}
    slurm.run(*found["Slurm requeue"]["fix"].partition("#")[0].split())
    assert job.doctor()["Slurm requeue"]["level"] == "ok"


@pytest.mark.timeout(600)
@pytest.mark.fault("OE05", "OE06")
def test_a_job_over_two_nodes_is_one_job(slurm: Slurm) -> None:
    """The death of one node and a notice on one requeue all of it, and it loses no step.

    Without the rank of the dead node the verdict is PARTIAL.  Both nodes resume from its step, one of them
    with an empty disk.
    """
    pytest.importorskip("torch")
    (command,) = re.findall(r"```\n +(torchrun .*?)\n +```", PAGE.read_text(), re.DOTALL)
    for old, new in {
        "--nproc-per-node=8": "--nproc-per-node=1",
        "train.py": f"{TRAINERS / 'gloo_trainer.py'} --stop-after-save",
    }.items():
        assert command.count(old) == 1, old
        command = command.replace(old, new)
    job = Job(slurm, {"--nodes=1": "--nodes=2", "python train.py": command})
    verdicts: list[tuple[str, str]] = []

    def trains_from(step: int, *, start: int) -> None:
        """Wait until both nodes have resumed from this step, and have trained."""
        assert job.found(r'"resumed", "from_step": (\d+)', 2 * start)[-2:] == [str(step)] * 2
        job.found(rf'"step": {step + 10}}}', 2)

    def requeued(*expected: str) -> int:
        """The last step of training, after the requeue; this start had these verdicts on it."""
        until(lambda: job.is_in("PENDING"), what="the requeue", timeout_s=180, every_s=0.1)
        last = max(int(step) for step in job.found(r'"step": (\d+)}', 1))
        count = len(verdicts) + len(expected)
        found = job.found(r"(SAFE|PARTIAL): generation \d+ step (\d+)", count)
        assert found[len(verdicts) :] == [(verdict, str(last)) for verdict in expected]
        verdicts[:] = found
        return last

    trains_from(0, start=1)
    slurm.power_off("node2")
    step = requeued("PARTIAL")
    slurm.boot("node2")
    job.start_on("node[1-2]")
    trains_from(step, start=2)
    slurm.notice("node2", in_s=60)
    requeued("SAFE", "SAFE")
