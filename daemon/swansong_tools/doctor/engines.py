# SPDX-License-Identifier: Apache-2.0
"""Checks for a daemon under Slurm, Kubernetes, Ray or torchrun, as far as this machine shows them.

The terms of a pod, the exit codes that SkyPilot and Kubernetes recover from, and the ``--signal`` of a job of
Slurm cannot be seen here: no check guesses them.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from swansong_bucket.errors import Unreachable
from swansong_bucket.stores.file import mount_points
from swansongd.trainers import peers

from swansong_tools.doctor import fixes
from swansong_tools.doctor.findings import Checklist, Judgement, ok, skipped, warning
from swansong_tools.doctor.installation import Installation, tool
from swansong_tools.doctor.staging import mount_of

RAY_NODE = Path("/etc/swansong/ray-node")
_LAYERS = ("overlay", "fuse.fuse-overlayfs")
_HIDDEN = ("/home/", "/root/", "/tmp/")  # noqa: S108 - the sandbox of the unit hides them
_PROGRAM_BYTES_MAX = 2**16


def _daemon_environ(vm: Installation) -> dict[str, str]:
    """The environment of the daemon; empty if it does not run, or cannot be read."""
    try:
        return peers.environment_of(vm.status().pid)
    except (Unreachable, OSError):
        return {}


def _slurm_job(vm: Installation) -> str:
    """The id of the daemon's job of Slurm; empty without one."""
    job = vm.shared(_daemon_environ).get("SLURM_JOB_ID", "")
    return job if job.isdecimal() and shutil.which("scontrol") else ""


CHECKS = Checklist(family="engine")


@CHECKS.add("Slurm requeue", applies=_slurm_job)
def slurm_requeue(vm: Installation) -> Judgement:
    """Slurm may requeue the job of the daemon, by its script and after the death of a node."""
    job = _slurm_job(vm)
    found = re.search(r"\bRequeue=(\d)", tool("scontrol", "show", "job", job).stdout)
    if found is None:
        return skipped(f"scontrol show job {job} does not show whether Slurm may requeue it")
    if found[1] == "0":
        return warning(
            f"Slurm refuses to requeue job {job}: the run ends with a notice, or a dead node",
            f"scontrol update JobId={job} Requeue=1  # for the next jobs: #SBATCH --requeue",
        )
    return ok(f"Slurm may requeue job {job}")


@CHECKS.add("Slurm step", applies=_slurm_job)
def slurm_step(vm: Installation) -> Judgement:
    """The daemon is in a step of ``srun``: Slurm sends the signal of ``--signal`` only to steps."""
    if "SLURM_STEP_ID" in vm.shared(_daemon_environ):
        return ok("the daemon is in a step of srun")
    return warning(
        "the daemon is not in a step of srun: the signal of sbatch --signal before the time limit does not "
        "reach it",
        "# in the script of the job, start the command with: srun swansong run",
    )


@CHECKS.add("Slurm KillWait", applies=_slurm_job)
def slurm_kill_wait(vm: Installation) -> Judgement:
    """After SIGTERM Slurm waits as long as ``deadline.sigterm_grace_s``."""
    grace_s = vm.config.deadline.sigterm_grace_s
    found = re.search(
        r"^KillWait\s*=\s*(\d+) sec", tool("scontrol", "show", "config").stdout, re.MULTILINE
    )
    if found is None:
        return skipped("scontrol show config does not show KillWait")
    if int(found[1]) < grace_s:
        return warning(
            f"after scancel and at preemption Slurm kills the job {found[1]} s after SIGTERM (KillWait), and "
            f"the grace period is {grace_s:g} s",
            f"# give swansong run --grace {found[1]}s or less, or set KillWait in slurm.conf",
        )
    return ok(f"Slurm kills a job {found[1]} s after SIGTERM")


def _layer(vm: Installation) -> str:
    """The kind of the file system of staging if it is the writable layer of a container."""
    kind = mount_of(Path(os.path.realpath(vm.staging)), mount_points.mounted()).kind
    return kind if kind in _LAYERS else ""


@CHECKS.add("staging volume", applies=_layer)
def staging_volume(vm: Installation) -> Judgement:
    """Staging is not in the writable layer of a container, which is deleted with the container."""
    return warning(
        f"{vm.staging} is in the writable layer of this container ({_layer(vm)}): the next container does "
        "not have the checkpoints that are not stored yet",
        "# mount a volume there, such as an emptyDir, or put staging on one with --staging",
    )


def _drain_program(vm: Installation) -> str:
    """The text of the program of ``notify.exec`` if it drains a node of Ray, else empty."""
    text = ""
    with suppress(OSError, IndexError):
        program = Path(vm.config.notify.exec[0])
        if program.is_file():
            with program.open(encoding="utf-8", errors="replace") as file:
                text = file.read(_PROGRAM_BYTES_MAX)
    return text if "drain-node" in text else ""


@CHECKS.add("Ray drain", applies=_drain_program)
def ray_drain(vm: Installation) -> Judgement:
    """The program that drains a node of Ray runs after the verdict, and finds ``ray`` and the node's id."""
    text, program = _drain_program(vm), vm.config.notify.exec[0]
    if vm.config.notify.exec_on != ("verdict",):
        return warning(
            f"{program} drains the node at {', '.join(vm.config.notify.exec_on)}: Ray may end the workers "
            "before the checkpoint",
            fixes.set_key(vm.path, 'exec_on = ["verdict"] in [notify]'),
        )
    if str(RAY_NODE) in text and not (RAY_NODE.is_file() and RAY_NODE.stat().st_size):
        return warning(
            f"{RAY_NODE} is missing or empty: no node would be drained",
            "# write the id of the node there after ray start, see docs/trainers/ray.md",
        )
    ray = re.search(r"(/\S+) drain-node", text)
    if ray and shutil.which(ray[1]) is None:
        return warning(f"{program} calls {ray[1]}, which cannot run", fixes.edit(Path(program)))
    if ray and vm.by_systemd and ray[1].startswith(_HIDDEN):
        return warning(
            f"{program} calls {ray[1]}, which the sandbox of the daemon's unit hides",
            "# install Ray in another directory, such as /opt/ray",
        )
    return ok(f"{program} drains the node after the verdict")


def _torchruns(vm: Installation) -> list[int]:
    """Connected trainers whose ``torchrun`` restarts a job of several VMs with a shared rendezvous store."""
    found = []
    with suppress(Unreachable):
        for trainer in vm.status().trainers:
            with suppress(OSError):  # it has ended, or this user may not read it
                environ = peers.environment_of(trainer.pid) if trainer.connected else {}
                is_restarted = environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
                has_peers = environ.get("GROUP_WORLD_SIZE", "1") != "1"
                is_shared = environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1"
                found += [trainer.pid] * (is_restarted and has_peers and is_shared)
    return found


@CHECKS.add("torchrun restart", applies=lambda vm: vm.shared(_torchruns))
def torchrun_restart(vm: Installation) -> Judgement:
    """``torchrun`` can restart a job of several VMs: it does not share its rendezvous store."""
    return warning(
        f"torchrun of process {vm.shared(_torchruns)[0]} shares its rendezvous store with the ranks: a "
        "restart of the job may fail with Connection refused",
        "# start torchrun on every VM with the variable TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
    )
