# SPDX-License-Identifier: Apache-2.0
"""The program of docs/trainers/ray.md in the real unit of the daemon, with the real Ray."""

from __future__ import annotations

import os
import re
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from testkit.clouds import Aws, Bucket
from testkit.rig import Process
from testkit.waiting import until
from testkit.warm import kill_tree
from tests.hooks_ray.test_ray_train import ENVIRONMENT, PAGE, PYTHON, RAY, live_nodes, program

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not os.path.exists(PYTHON), reason="make test-ray makes its environment"),
]
HEAD, NODE = "10.99.0.1", "127.0.0.3"
# The interpreter of the environment is on the disk of the test.
LAUNCHER = """#!/bin/sh
export PYTHONPATH=/opt/environment/lib/python3.11/site-packages
exec python3 -c 'from ray.scripts.scripts import main; main()' "$@"
"""


def test_the_program_drains_the_node_from_the_sandbox(
    new_vm: Any, bucket: Bucket, aws: Aws
) -> None:
    """After the verdict of a notice, ``ray`` runs, and the head accepts the drain of the node."""
    environment = Path(PYTHON).parents[1]
    vm = new_vm(bucket, options=(f"--bind-ro={environment}:/opt/environment",))
    vm.write("/opt/ray/bin/ray", LAUNCHER, mode=0o755)
    vm.write(
        "/usr/local/bin/swansong-drain", program("/opt/ray/bin/ray", f"{HEAD}:6379"), mode=0o755
    )
    (settings,) = re.findall(
        r"```\n(# /etc/swansong/swansong.toml.*?)```", PAGE.read_text(), re.DOTALL
    )
    config = "/etc/swansong/swansong.toml"
    vm.write(config, vm.read(config) + settings)
    vm.power_on()
    vm.wait_active()
    vm.wait_connected()

    def start(address: str, *options: str) -> None:
        command = [
            *(RAY, "start", "--block", f"--node-ip-address={address}", "--num-cpus=1"),
            *("--num-gpus=0", "--object-store-memory=80000000", *options),
        ]
        process = Process(command, lines_on="both", **ENVIRONMENT)
        started.callback(kill_tree, process.popen)

    head = f"{HEAD}:6379"
    # A short path: it contains sockets.
    with tempfile.TemporaryDirectory(prefix="ray-") as short, ExitStack() as started:
        start(HEAD, "--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={short}/ray")
        start(NODE, f"--address={head}")
        until(lambda: NODE in live_nodes(head), timeout_s=120, what="the node", every_s=1)
        vm.run("sh", "-c", f"echo {live_nodes(head)[NODE]} >/etc/swansong/ray-node")
        aws.notice(in_s=60)
        done = vm.journal.wait(event="notification_command").facts
        assert done["exit_code"] == 0, done
