# SPDX-License-Identifier: Apache-2.0
"""The recipe of docs/trainers/ray.md under a real Ray cluster, in the environment of ``make test-ray``."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import swansong

from testkit import REPOSITORY, TRAINERS
from testkit.rig import Process, Vm
from testkit.waiting import until

PYTHON = os.environ.get("SWANSONG_RAY_PYTHON", str(REPOSITORY / "build" / "ray" / "bin" / "python"))
RAY = str(Path(PYTHON).with_name("ray"))
TRAINER = str(TRAINERS / "ray_trainer.py")
PAGE = REPOSITORY / "docs" / "trainers" / "ray.md"
STEPS = 500
ENVIRONMENT = {
    "PYTHONPATH": str(Path(swansong.__file__).parents[1]),
    "RAY_USAGE_STATS_ENABLED": "0",
    "CUDA_VISIBLE_DEVICES": "",
}
NODES = """
import json, sys
from ray._raylet import GcsClient
nodes = GcsClient(address=sys.argv[1]).get_all_node_info()
print(json.dumps({node.node_manager_address: key.hex() for key, node in nodes.items() if node.state == 0}))
"""

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not os.path.exists(PYTHON), reason="make test-ray makes its environment"),
]


def python(*arguments: str) -> str:
    """The output of the Python with Ray."""
    return subprocess.run(
        [PYTHON, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, **ENVIRONMENT},
    ).stdout


def live_nodes(head: str) -> dict[str, str]:
    """The ID of each live node by its address; empty before the head answers."""
    try:
        found: dict[str, str] = json.loads(python("-c", NODES, head))
    except subprocess.CalledProcessError:
        return {}
    return found


def program(ray: str, head: str) -> str:
    """The program of the page, for this head."""
    (text,) = re.findall(r"```sh\n(#!/bin/sh.*?)```", PAGE.read_text(), re.DOTALL)
    return str(text).replace("/opt/ray/bin/ray", ray).replace("ray-head:6379", head)


class Cluster:
    """A head without workers and three nodes, each with a daemon and room for one worker.

    Each node has an address of the loopback network, so that Ray takes it for another machine.
    """

    def __init__(self, directory: Path, started: ExitStack) -> None:
        self.directory = directory
        with socket.socket() as probe:
            probe.bind(("127.0.0.2", 0))
            self.address = "127.0.0.2:{1}".format(*probe.getsockname())
        store = directory / "store"
        store.mkdir()
        self.vms: list[Vm] = []
        for name in ("head", "a", "b", "c"):
            disk = directory / name
            disk.mkdir()
            program = {"exec": [str(disk / "drain.sh")], "exec_on": ["verdict"]}
            vm = Vm(disk, {"url": f"file://{store}"}, settings={"notify": program})
            self.vms.append(started.enter_context(vm))
        self.head, *self.nodes = self.vms
        port = self.address.partition(":")[2]
        self._ray_start(0, "--head", f"--port={port}", "--include-dashboard=false",
                        f"--temp-dir={directory}/ray")  # fmt: skip
        until(lambda: live_nodes(self.address), timeout_s=120, what="the head")
        for index, vm in enumerate(self.nodes, 1):
            vm.start_daemon()
            self._ray_start(index, f"--address={self.address}", '--resources={"slot": 1}')
            # One after the other: a raylet ends if its agents are not up within 30 s.
            name = f"127.0.0.{index + 2}"
            until(
                lambda name=name: name in live_nodes(self.address),
                timeout_s=120,
                what=name,
                every_s=1,
            )
            self._install(vm, live_nodes(self.address)[name])

    def _ray_start(self, index: int, *options: str) -> None:
        vm = self.vms[index]
        vm.spawn(
            [RAY, "start", "--block", f"--node-ip-address=127.0.0.{index + 2}", "--num-cpus=1",
             "--num-gpus=0", "--object-store-memory=80000000", *options],
            SWANSONG_SOCKET=str(vm.socket), **ENVIRONMENT,
        )  # fmt: skip

    def _install(self, vm: Vm, node_id: str) -> None:
        """Install the program of the page."""
        (vm.disk / "ray-node").write_text(node_id)
        drain = vm.disk / "drain.sh"
        drain.write_text(program(RAY, self.address).replace("/etc/swansong", str(vm.disk)))
        drain.chmod(0o755)

    def train(self, *interval: str) -> Process:
        """Start the job on two of the nodes, and wait for its first steps."""
        driver = self.head.spawn(
            [PYTHON, TRAINER, self.address, str(STEPS), str(self.directory), *interval],
            **ENVIRONMENT,
        )
        until(lambda: self.records("step"), timeout_s=240, what="the first steps", every_s=0.1)
        return driver

    def vm_of(self, rank: int) -> Vm:
        """The VM on which this rank was started first."""
        first = next(record for record in self.records("resumed") if record["rank"] == rank)
        return next(vm for vm in self.nodes if str(vm.socket) == first["socket"])

    def records(self, key: str) -> list[dict[str, Any]]:
        """The lines of the workers that have this key, in their order."""
        log = self.directory / "train.jsonl"
        lines = log.read_text().splitlines() if log.exists() else []
        return [record for record in map(json.loads, lines) if key in record]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    # A short path: it contains sockets.
    with tempfile.TemporaryDirectory(prefix="ray-") as directory, ExitStack() as started:
        yield Cluster(Path(directory), started)


@pytest.fixture
def expected(tmp_path: Path) -> str:
    """The digest of the weights without an interruption."""
    python(TRAINER, "alone", str(STEPS), str(tmp_path))
    last = (tmp_path / "train.jsonl").read_text().splitlines()[-1]
    return str(json.loads(last)["digest"])


def test_a_notice_moves_the_job_to_another_node(cluster: Cluster, expected: str) -> None:
    """Train restarts on undrained nodes from a commit, and trains to the same weights as without a notice."""
    driver = cluster.train()
    notified = cluster.vm_of(rank=1)
    answer = notified.swansong("notify", "--in", "60s", "--wait")
    assert answer.returncode == 0, answer.stderr
    assert "SAFE" in answer.stdout

    assert driver.wait(240) == 0, "\n".join(driver.lines.raw[-30:])
    resumed = cluster.records("resumed")
    assert len(resumed) == 4
    assert min(record["resumed"] for record in resumed[2:]) > 0
    assert str(notified.socket) not in {record["socket"] for record in resumed[2:]}
    assert [record["digest"] for record in cluster.records("digest")] == [expected, expected]


@pytest.mark.fault("OE06")
def test_a_node_that_dies_moves_the_job_to_another_node(cluster: Cluster, expected: str) -> None:
    """Without a notice, all workers resume from the newest commit, and train to the same weights."""
    driver = cluster.train("20")
    lost = cluster.vm_of(rank=1)
    assert lost.daemon is not None
    committed = lost.daemon.lines.wait(event="committed")
    lost.power_off()
    until(
        lambda: len(cluster.records("resumed")) == 4, timeout_s=240, what="the restart", every_s=0.1
    )
    commits = cluster.directory / "store" / "run" / "commits" / "00000001"
    newest = max(int(step.name) for step in commits.iterdir())
    assert newest >= committed["step"]
    resumed = cluster.records("resumed")[2:]
    assert [record["resumed"] for record in resumed] == [newest, newest]
    assert str(lost.socket) not in {record["socket"] for record in resumed}

    assert driver.wait(240) == 0, "\n".join(driver.lines.raw[-30:])
    assert [record["digest"] for record in cluster.records("digest")] == [expected, expected]
