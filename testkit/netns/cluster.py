# SPDX-License-Identifier: Apache-2.0
"""Several VMs on one machine: a network namespace, a disk, a daemon and a metadata service for each.

They share only a network and a bucket.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from testkit import TRAINERS
from testkit.clouds import Aws, Bucket
from testkit.emulators.process import EmulatorProcess
from testkit.rig import Process, Vm
from testkit.warm import python_of

METADATA_ADDRESS = "169.254.169.254"
STORE_ADDRESS = "10.77.0.254"
TRAINER = TRAINERS / "gloo_trainer.py"
RENDEZVOUS_PORT = 29400
_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


class Namespace:
    """A network namespace; inside of it a thread starts processes and opens sockets."""

    def __init__(self) -> None:
        home = _own_network()
        try:
            _check(_libc.unshare(_CLONE_NEWNET))
            self.fd = _own_network()
        finally:
            _check(_libc.setns(home, _CLONE_NEWNET))
            os.close(home)

    @contextmanager
    def inside(self) -> Iterator[None]:
        home = _own_network()
        _check(_libc.setns(self.fd, _CLONE_NEWNET))
        try:
            yield
        finally:
            _check(_libc.setns(home, _CLONE_NEWNET))
            os.close(home)

    def close(self) -> None:
        os.close(self.fd)


class Machine:
    """One VM of a cluster."""

    def __init__(
        self, number: int, directory: Path, store: dict[str, str], started: ExitStack
    ) -> None:
        self.number = number
        self.address = f"10.77.0.{number + 1}"
        self.namespace = Namespace()
        started.callback(self.namespace.close)
        port, path = f"vm{number}", f"/proc/{os.getpid()}/fd/{self.namespace.fd}"
        _run("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", path)
        _run("ip", "link", "set", port, "master", "switch", "up")
        disk = directory / f"vm{number}"
        disk.mkdir()
        with self.namespace.inside():
            _run("ip", "link", "set", "lo", "up")
            _run("ip", "link", "set", "eth0", "up")
            _run("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
            _run("ip", "address", "add", f"{METADATA_ADDRESS}/32", "dev", "lo")
            emulator = EmulatorProcess(
                "testkit.emulators.aws_imds", "--host", "0.0.0.0", "--port", "80"
            )
            started.enter_context(emulator)
        warm = python_of(os.environ["SWANSONG_TEST_WARM"], "swansongd")
        vm = Vm(disk, store, metadata=("aws", None), warm=warm)
        self.vm = started.enter_context(vm)
        started.callback(self.power_off)  # before the VM kills torchrun and orphans its workers

    def boot(self) -> Process:
        """Start the daemon; after a power-off on an empty disk."""
        self.vm.staging.mkdir(exist_ok=True)
        with self.namespace.inside():
            return self.vm.start_daemon()

    def notice(self, *, in_s: float) -> None:
        """Give a notice of EC2 to this VM."""
        with self.namespace.inside():
            Aws("http://127.0.0.1").notice(in_s=in_s)

    def lose_store(self) -> None:
        """Drop all packets to the S3 server silently."""
        rule = f"type filter hook output priority 0; ip daddr {STORE_ADDRESS} drop;"
        with self.namespace.inside():
            _run("nft", f"table ip way {{ chain output {{ {rule} }}; }}")

    def find_store(self) -> None:
        with self.namespace.inside():
            _run("nft", "flush", "ruleset")

    def torchrun(
        self,
        *arguments: str,
        nodes: str,
        endpoint: str,
        restarts: int = 0,
        script: Path = TRAINER,
        **environment: str,
    ) -> Process:
        """Start this VM's part of the job, as forks of a warm Python."""
        settings = {
            "is_host": int(endpoint == self.address),
            "last_call_timeout": 6,
            "keep_alive_interval": 1,
            # An agent that is silent for longer on a loaded machine leaves the job, and never returns to it.
            "keep_alive_max_attempt": 8,
        }
        warm = python_of(os.environ["SWANSONG_TEST_WARM"], "torch")
        rendezvous = ",".join(f"{name}={value}" for name, value in settings.items())
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1"),
            *(f"--nnodes={nodes}", f"--max-restarts={restarts}", "--rdzv-backend=c10d"),
            *(f"--rdzv-endpoint={endpoint}:{RENDEZVOUS_PORT}", "--rdzv-id=job"),
            *(f"--local-addr={self.address}", "--monitor-interval=0.2"),
            f"--rdzv-conf={rendezvous}",
            *("--no-python", warm),
            *(str(script), *arguments),
        ]
        with self.namespace.inside():
            process = Process(
                command,
                lines_on="stdout",
                warm=warm,
                SWANSONG_SOCKET=str(self.vm.socket),
                GLOO_SOCKET_IFNAME="eth0",
                TORCH_CPP_LOG_LEVEL="ERROR",
                # With the shared store of torch 2.13, gloo may find the addresses of an earlier start.
                TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
                **environment,
            )
        self.vm.processes.append(process)
        return process

    def power_off(self) -> None:
        """Kill every process of the VM, including torchrun's workers; the disk is lost."""
        for process in self.vm.processes:
            _kill_tree(process.pid)
        self.vm.power_off(keep_disk=not self.vm.staging.exists())
        self.vm.processes.clear()


class Cluster:
    """Several VMs on one switch, in the namespace of the caller.

    Args:
        directory: for the disks of the VMs, and for the store unless it is S3.
        started: ends what this starts.
        has_s3: whether the store is an S3 server at the switch, instead of a directory.
    """

    def __init__(self, directory: Path, started: ExitStack, *, has_s3: bool = False) -> None:
        self._directory = directory
        self._started = started
        self._shelf = directory / "shelf"
        self._shelf.mkdir()
        self.machines: list[Machine] = []
        _run("ip", "link", "add", "switch", "type", "bridge")
        _run("ip", "link", "set", "switch", "up")
        self.store = {"url": f"file://{self._shelf}"}
        if has_s3:
            _run("ip", "address", "add", f"{STORE_ADDRESS}/24", "dev", "switch")
            server = EmulatorProcess(
                "testkit.emulators.s3_strict", "--host", STORE_ADDRESS, "--bucket", "ckpt"
            )
            self.bucket = Bucket(started.enter_context(server).url, "job")
            self.store = self.bucket.store

    def add(self, count: int) -> list[Machine]:
        """Add VMs and start a daemon on each."""
        new = [
            Machine(len(self.machines) + number, self._directory, self.store, self._started)
            for number in range(count)
        ]
        self.machines += new
        for machine in new:
            machine.boot()
        return new

    def power_off(self) -> None:
        for machine in self.machines:
            machine.power_off()

    def start(
        self,
        machines: list[Machine],
        *arguments: str,
        nodes: str = "",
        restarts: int = 0,
        script: Path = TRAINER,
        **environment: str,
    ) -> list[Process]:
        """Start a job on these VMs; the first one hosts the rendezvous."""
        return [
            machine.torchrun(
                *arguments,
                nodes=nodes or str(len(machines)),
                endpoint=machines[0].address,
                restarts=restarts,
                script=script,
                **environment,
            )
            for machine in machines
        ]

    def parts(self) -> set[str]:
        """Generation, step, node and nodes of all manifests: ``00000001/000000000007/00000-of-00002``."""
        commits = self._shelf / "run" / "commits"
        return {
            str(path.relative_to(commits).with_suffix("")) for path in commits.glob("*/*/*.json")
        }

    def farewells(self) -> list[dict[str, Any]]:
        """All farewells of the daemons, oldest first."""
        paths = sorted((self._shelf / "run" / "farewells").glob("*.json"))
        return [json.loads(path.read_text()) for path in paths]


def part(generation: int, step: int, node: int, nodes: int) -> str:
    return f"{generation:08d}/{step:012d}/{node:05d}-of-{nodes:05d}"


def _kill_tree(pid: int) -> None:
    # torchrun starts its workers in separate process groups.
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in children:
        _kill_tree(int(child))
    try:
        os.kill(pid, 9)
    except ProcessLookupError:
        pass


def _own_network() -> int:
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _check(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _run(*command: str) -> Any:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout
