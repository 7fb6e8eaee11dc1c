# SPDX-License-Identifier: Apache-2.0
"""A Slurm cluster on one machine: slurmctld and munged, and two nodes with slurmd.

Each node has its own network, processes, metadata service and disk below ``/var/tmp``.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from testkit.clouds import Aws
from testkit.emulators.process import EmulatorProcess
from testkit.netns.cluster import METADATA_ADDRESS, Namespace
from testkit.waiting import until
from testkit.warm import descendants, kill

TOOLS = ("slurmctld", "slurmd", "srun", "munged", "ip")
NODES = ("node1", "node2")
_CONTROLLER_ADDRESS = "10.78.0.254"
_CONF = """
ClusterName=test
SlurmctldHost={host}({controller})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.sock
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/%n.pid
SlurmdSpoolDir={directory}/spool-%n
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/%n.log
StateSaveLocation={directory}/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0
SlurmctldTimeout=10
SlurmdTimeout=10
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=node1 NodeAddr=10.78.0.1 CPUs=2
NodeName=node2 NodeAddr=10.78.0.2 CPUs=2
PartitionName=spot Nodes=node1,node2 Default=YES
PartitionName=urgent Nodes=node1,node2 PriorityTier=2
"""
_NODE = """
hostname {name}
mount --bind {directory}/hosts /etc/hosts
mkdir -p -m 1777 {disk}
mount --bind {disk} /var/tmp
mount -t tmpfs none /sys/class
mkdir -p /sys/class/dmi/id
echo 'Amazon EC2' >/sys/class/dmi/id/sys_vendor
slurmd -D -N {name} &
wait
"""


class Slurm:
    """A cluster that is up.

    Args:
        directory: a short path, for sockets, logs and disks.
        started: ends what this starts.
        settings: more lines of slurm.conf.
    """

    def __init__(self, directory: Path, started: ExitStack, settings: str = "") -> None:
        self.directory = directory
        self._controller = Namespace()
        started.callback(self._controller.close)
        self._networks: dict[str, Namespace] = {}
        self._running: dict[str, ExitStack] = {}
        """Ends the processes of a node."""
        self._environment = {"SLURM_CONF": str(directory / "slurm.conf")}
        host = socket.gethostname().partition(".")[0]
        (directory / "slurm.conf").write_text(
            _CONF.format(host=host, controller=_CONTROLLER_ADDRESS, directory=directory) + settings
        )
        (directory / "hosts").write_text("127.0.0.1 localhost\n10.78.0.1 node1\n10.78.0.2 node2\n")
        key = directory / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        (directory / "state").mkdir(mode=0o700)
        with self._controller.inside():
            _run("ip", "link", "set", "lo", "up")
            _run("ip", "link", "add", "switch", "type", "bridge")
            _run("ip", "link", "set", "switch", "up")
            _run("ip", "address", "add", f"{_CONTROLLER_ADDRESS}/24", "dev", "switch")
            files = {
                "socket": "munge.sock",
                "pid-file": "pid",
                "seed-file": "seed",
                "log-file": "log",
            }
            options = [f"--{name}={directory / file}" for name, file in files.items()]
            started.enter_context(
                self._processes("munged", "--foreground", "--force", f"--key-file={key}", *options)
            )
            until((directory / "munge.sock").exists, what="munged")
            started.enter_context(self._processes("slurmctld", "-D", "-i"))
        for number, name in enumerate(NODES, 1):
            self._networks[name] = self._connect(name, number, started)
            self._running[name] = started.enter_context(ExitStack())
            self.boot(name)
        until(lambda: self.run("sinfo", "-h", "-o", "%T %D") == "idle 2", what="two idle nodes")

    def run(self, *command: str, **environment: str) -> str:
        """Standard output of a command of a user of the cluster."""
        with self._controller.inside():
            return _run(*command, **self._environment, **environment)

    def boot(self, node: str) -> None:
        """Start a node, without a notice; after a power-off with an empty disk."""
        script = _NODE.format(directory=self.directory, disk=self.directory / node, name=node)
        with self._networks[node].inside():
            Aws("http://127.0.0.1").withdraw()
            _run("ip", "link", "set", "eth0", "up")
            self._running[node].enter_context(self._processes("sh", "-euc", script))

    def power_off(self, node: str) -> None:
        """Break the network of a node, then end its processes and empty its disk."""
        with self._networks[node].inside():
            _run("ip", "link", "set", "eth0", "down")
        self._running[node].close()
        shutil.rmtree(self.directory / node)

    def start_jobs_on(self, node: str) -> None:
        """Let only this node start jobs."""
        for each in NODES:
            states = ("State=UNDRAIN",) if each == node else ("State=DRAIN", "Reason=test")
            self.run("scontrol", "update", f"NodeName={each}", *states)

    def notice(self, node: str, *, in_s: float) -> None:
        """Give a notice of EC2 to this node."""
        with self._networks[node].inside():
            Aws("http://127.0.0.1").notice(in_s=in_s)

    def _connect(self, name: str, number: int, started: ExitStack) -> Namespace:
        network = Namespace()
        started.callback(network.close)
        path = f"/proc/{os.getpid()}/fd/{network.fd}"
        with self._controller.inside():
            _run("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", path)
            _run("ip", "link", "set", name, "master", "switch", "up")
        with network.inside():
            _run("ip", "link", "set", "lo", "up")
            _run("ip", "address", "add", f"10.78.0.{number}/24", "dev", "eth0")
            _run("ip", "address", "add", f"{METADATA_ADDRESS}/32", "dev", "lo")
            emulator = EmulatorProcess(
                "testkit.emulators.aws_imds", "--host", "0.0.0.0", "--port", "80"
            )
        started.enter_context(emulator)
        return network

    @contextmanager
    def _processes(self, *command: str) -> Iterator[None]:
        """A program as the init process of a new namespace: all its descendants end with it."""
        namespaces = ("--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
        with open(self.directory / "output", "ab") as output:
            outside = subprocess.Popen(
                ["unshare", *namespaces, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **self._environment},
            )
        try:
            yield
        finally:
            kill(descendants(outside.pid))
            outside.wait(60)


def _run(*command: str, **environment: str) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout.strip()
