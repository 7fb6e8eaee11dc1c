# SPDX-License-Identifier: Apache-2.0
"""Doctor's checks of Slurm, Kubernetes, Ray and torchrun: each fault has its finding with a fix."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from swansong_bucket.stores.file.mount_points import parsed
from swansong_tools.doctor import cloud, engines
from swansong_tools.doctor.findings import Finding, examine
from swansong_tools.doctor.installation import Installation

from testkit.status_picture import status
from tests.unit.doctor.test_doctor import installation

STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
SLURM = "Requeue=1 Restarts=0\nKillWait                = 30 sec"
RUN = {"TORCHELASTIC_MAX_RESTARTS": "3", "GROUP_WORLD_SIZE": "2"}


@contextmanager
def started_with(**environ: str) -> Iterator[int]:
    """The id of a process with this environment."""
    with subprocess.Popen(["/bin/sleep", "60"], env=environ) as process:
        try:
            yield process.pid
        finally:
            process.kill()


def findings(vm: Installation) -> dict[str, Finding]:
    return {found.name: found for found in examine(vm, engines.CHECKS)}


@pytest.mark.parametrize(
    ("environ", "shown", "warned", "fix"),
    [
        (STEP, SLURM, None, ""),
        (STEP, SLURM.replace("Requeue=1", "Requeue=0"), "Slurm requeue", "JobId=7 Requeue=1"),
        (STEP, SLURM.replace("30", "20"), "Slurm KillWait", "--grace 20s"),
        ({"SLURM_JOB_ID": "7"}, SLURM, "Slurm step", "srun swansong run"),
    ],
)
def test_the_daemon_in_a_job_of_slurm(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    environ: dict[str, str],
    shown: str,
    *,
    warned: str | None,
    fix: str,
) -> None:
    """A job that is not requeued, not signalled, or killed early is a warning."""
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\ncat <<end\n{shown}\nend\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with started_with(**environ) as pid:
        found = findings(installation(replace(status(0.0), pid=pid)))
    assert found.keys() == {"Slurm requeue", "Slurm step", "Slurm KillWait"}
    assert [name for name in found if found[name].level != "ok"] == [warned] * bool(warned)
    assert fix in found[warned or "Slurm step"].fix


@pytest.mark.parametrize(("kind", "is_warned"), [("overlay", True), ("ext4", False)])
def test_staging_in_the_layer_of_a_container(
    monkeypatch: pytest.MonkeyPatch, kind: str, *, is_warned: bool
) -> None:
    """A volume is needed; a disk or an emptyDir has no finding."""
    table = parsed(f"1 0 0:5 / / rw - {kind} none rw\n")
    monkeypatch.setattr(engines.mount_points, "mounted", lambda: table)
    assert ("staging volume" in findings(installation())) == is_warned


@pytest.mark.parametrize(
    ("exec_on", "node", "ray", "words"),
    [
        ("verdict", "id", "/bin/sh", "after the verdict"),
        ("notice", "id", "/bin/sh", "before the checkpoint"),
        ("verdict", "", "/bin/sh", "is missing or empty"),
        ("verdict", "id", "/opt/no/ray", "/opt/no/ray, which cannot run"),
        ("verdict", "id", "/tmp/ray", "the sandbox of the daemon's unit hides"),
    ],
)
def test_a_program_that_drains_a_node_of_ray(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    *,
    exec_on: str,
    node: str,
    ray: str,
    words: str,
) -> None:
    """It runs after the verdict, and finds the id of the node and ``ray``."""
    (tmp_path / "node").write_text(node)
    monkeypatch.setattr(engines, "RAY_NODE", tmp_path / "node")
    monkeypatch.setattr(engines.shutil, "which", lambda name: None if "no" in name else name)
    program = tmp_path / "drain"
    program.write_text(f'exec {ray} drain-node --node-id "$(cat {tmp_path}/node)"\n')
    vm = installation(notify={"exec": [str(program)], "exec_on": [exec_on]})
    vm.by_systemd = True
    found = findings(vm)["Ray drain"]
    assert words in found.found
    assert bool(found.fix) == (found.level == "warning")


@pytest.mark.parametrize(
    ("change", "is_warned"),
    [
        ({}, True),
        ({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, False),
        ({"GROUP_WORLD_SIZE": "1"}, False),
        ({"TORCHELASTIC_MAX_RESTARTS": "0"}, False),
    ],
)
def test_a_torchrun_that_restarts_several_vms(change: dict[str, str], *, is_warned: bool) -> None:
    """The variable is needed only there."""
    with started_with(**{**RUN, **change}) as pid:
        trainer = replace(status(0.0).trainers[0], pid=pid, connected=True)
        found = findings(installation(replace(status(0.0), pid=pid, trainers=(trainer,))))
    assert ("torchrun restart" in found) == is_warned


def test_in_a_pod_the_metadata_service_needs_the_network_of_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No command of the cloud helps there."""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    (check,) = (each for each in cloud.AS_DAEMON if each.name == "IMDS token")
    vm = installation(sources={"cloud": "aws", "metadata_url": "http://127.0.0.1:9"})
    (found,) = examine(vm, [check])
    assert (found.level, "hostNetwork: true" in found.fix) == ("failure", True)
