# SPDX-License-Identifier: Apache-2.0
"""Training on a GPU that is preempted, and ends like an uninterrupted run, bit by bit."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import swansong
import torch
from swansong.testing import check_resume
from swansong_bucket.model import Health
from swansongd.sources.gpu import GpuSource

from testkit import EXAMPLES, TRAINERS
from testkit.clouds import Aws
from testkit.emulators.process import EmulatorProcess
from testkit.rig import Process, Vm
from testkit.source_run import SourceRun
from testkit.waiting import until

HOOKS = str(Path(swansong.__file__).parents[1])
SCRIPT = [sys.executable, "-u", str(TRAINERS / "mixed_precision.py")]
DETERMINISTIC = {"PYTHONPATH": HOOKS, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
DETERMINISTICALLY = """
import runpy, sys, torch
torch.use_deterministic_algorithms(True)
del sys.argv[0]
sys.path[0] = ""
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_mixed_precision(tmp_path: Path) -> None:
    """Killed twice and resumed in new processes; in two epochs."""
    report = check_resume(
        [*SCRIPT, "1000"],
        steps=80,
        kill_at=[5, 70],
        directory=tmp_path,
        environment={"PYTHONPATH": HOOKS},
    )
    assert report.saved_steps == [5, 70]
    assert report.losses >= 80


@pytest.mark.parametrize("options", [[], ["--fsdp"]], ids=["ddp", "fsdp2"])
def test_one_rank_of_a_distributed_job(tmp_path: Path, options: list[str]) -> None:
    """The example, with NCCL and the environment of torchrun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    report = check_resume(
        [sys.executable, "-c", DETERMINISTICALLY, str(EXAMPLES / "torch_ddp.py"), *options],
        steps=10,
        kill_at=[3],
        directory=tmp_path,
        environment={
            **rank,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "PYTHONPATH": HOOKS,
        },
    )
    assert report.saved_steps == [3]


@pytest.fixture
def aws() -> Iterator[Aws]:
    with EmulatorProcess("testkit.emulators.aws_imds", "--port", "0") as emulator:
        yield Aws(emulator.url)


def test_a_notice_ends_safe_and_the_next_vm_continues(tmp_path: Path, aws: Aws) -> None:
    """A real daemon watches the GPU, answers the notice of AWS, and restores on the next VM."""
    (tmp_path / "bucket").mkdir()
    store = {"url": f"file://{tmp_path}/bucket"}
    with vm_of(tmp_path / "first", store, aws) as vm:
        daemon = vm.start_daemon()
        train(vm, 10**9).lines.wait(step=5)
        until(lambda: vm.status()["gpus"], what="the GPU in the status")
        gpu = vm.status()["gpus"][0]
        assert (gpu["health"], gpu["name"]) == ("ok", torch.cuda.get_device_name(0))
        aws.notice(in_s=30)
        daemon.lines.wait(event="verdict", verdict="SAFE")
        (commit, *_) = vm.commits()
        vm.power_off()
    aws.withdraw()
    steps = commit["step"] + 100
    with vm_of(tmp_path / "second", store, aws) as vm:
        vm.start_daemon()
        resumed = train(vm, steps)
        assert resumed.wait(120) == 0
        assert resumed.lines.all()[0]["step"] == commit["step"] + 1
        alone = train(vm, steps, socket="/nonexistent/socket")
        assert alone.wait(120) == 0
    assert resumed.lines.all()[-1] == alone.lines.all()[-1]


def vm_of(disk: Path, store: dict[str, str], aws: Aws) -> Vm:
    disk.mkdir()
    return Vm(disk, store, metadata=aws.metadata, settings={"trainer": {"follow_ups": False}})


def train(vm: Vm, steps: int, socket: str = "") -> Process:
    environment = {**DETERMINISTIC, "SWANSONG_SOCKET": socket or str(vm.socket)}
    return vm.spawn([*SCRIPT, str(steps)], lines_on="stdout", **environment)


def test_nvml_of_a_healthy_gpu_raises_no_notice() -> None:
    """The probe reads the real library, and names each GPU as CUDA does."""
    with SourceRun(GpuSource(monotonic=time.monotonic)) as run:
        until(lambda: run.is_now(Health.OK), what="a healthy source")
        read = [event.gpus for event in run.events if hasattr(event, "gpus")][-1]
        assert {gpu.health.value for gpu in read} == {"ok"}
        uuids = {gpu.uuid for gpu in read}
        assert f"GPU-{torch.cuda.get_device_properties(0).uuid}" in uuids
        assert run.notices == []
