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

import pytest

from testkit import REPOSITORY, TRAINERS
from testkit.other_users import needs_root
from testkit.rig import BIN
from testkit.slurm import TOOLS, Slurm
from testkit.waiting import until

pytestmark = needs_root
PAGE = REPOSITORY / "docs" / "trainers" / "slurm.md"


@pytest.fixture
def slurm() -> Iterator[Slurm]:
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        pytest.skip(f"needs {', '.join(missing)}")
    # A short path: it contains sockets.
    with tempfile.TemporaryDirectory(prefix="slurm-") as directory, ExitStack() as started:
        yield Slurm(Path(directory), started)


class Job:
    """The job of the page, with a small trainer and a directory as its store."""

    def __init__(self, slurm: Slurm) -> None:
        self._slurm = slurm
        self._output = slurm.directory / "job.txt"
        store = slurm.directory / "store"
        store.mkdir()
        found = re.search(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
        assert found
        trainer = f"{sys.executable} {TRAINERS / 'witness.py'} --stop-after-save"
        script = slurm.directory / "job.sh"
        script.write_text(
            found[1]
            .replace("s3://my-bucket/prefix", f"file://{store}")
            .replace("python train.py", trainer)
        )
        self.id = slurm.run(
            "sbatch", "--parsable", f"--output={self._output}", str(script),
            PATH=f"{BIN}:/usr/sbin:/usr/bin:/sbin:/bin", PYTHONPATH=str(REPOSITORY),
        )  # fmt: skip

    def found(self, pattern: str, count: int) -> list[str]:
        """All matches of a pattern in the output of the job, once there are ``count``."""

        def matches() -> list[str]:
            text = self._output.read_text() if self._output.exists() else ""
            every = re.findall(pattern, text)
            return every if len(every) >= count else []

        try:
            return until(matches, what=pattern, every_s=0.05)
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

    def start_on(self, node: str) -> None:
        """Start the requeued job on this node now, instead of after two minutes."""
        self._slurm.run("scontrol", "update", f"JobId={self.id}", "StartTime=now")
        until(lambda: self.is_in("RUNNING"), what="the start", every_s=0.1)
        assert self._slurm.run("squeue", "-h", "-j", self.id, "-o", "%N") == node


@pytest.mark.timeout(120)
@pytest.mark.fault("OE01", "OE02")
def test_the_job_moves_between_nodes_and_loses_no_step(slurm: Slurm) -> None:
    """Its warning signal and a notice save, requeue and resume it elsewhere; scancel saves and ends it.

    The third start is on the node of the first one, whose disk has the checkpoint of a generation that the
    other node has overtaken.
    """
    slurm.start_jobs_on("node1")
    job = Job(slurm)
    job.found(r'"step": 10,', 1)
    slurm.run("scancel", "--signal=TERM", job.id)  # as --signal=TERM@120 does
    until(lambda: job.is_in("PENDING"), what="the requeue", every_s=0.1)
    saved = [int(step) for step in job.found(r"SAFE: generation \d+ step (\d+)", 1)]

    slurm.start_jobs_on("node2")
    job.start_on("node2")
    assert [int(step) for step in job.found(r'"resumed", "from_step": (\d+)', 2)] == [0, *saved]
    slurm.notice("node2", in_s=60)
    until(lambda: job.is_in("PENDING"), what="the requeue", every_s=0.1)
    saved = [int(step) for step in job.found(r"SAFE: generation \d+ step (\d+)", 2)]

    slurm.start_jobs_on("node1")
    job.start_on("node1")
    assert [int(step) for step in job.found(r'"resumed", "from_step": (\d+)', 3)] == [0, *saved]
    slurm.run("scancel", job.id)
    until(lambda: job.is_in("CANCELLED"), what="the end", every_s=0.1)
    saved = [int(step) for step in job.found(r"SAFE: generation \d+ step (\d+)", 3)]
    assert saved == sorted(saved)


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
