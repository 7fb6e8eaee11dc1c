# SPDX-License-Identifier: Apache-2.0
"""Each process imports only what it needs: most of the CPU time of a start is imports."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from testkit.clouds import Aws, Bucket
from testkit.rig import CREDENTIALS, Process, Vm

SDKS = {"azure", "boto3", "botocore", "google", "msal", "requests", "urllib3"}
"""Loaded for the first request, or for a proxy."""
TOOLS = {"jinja2", "rich", "shtab", "swansong_tools"}
"""Code that people run, with the libraries of screens and pages."""
DAEMON = f"""
import os, sys
from swansongd.service.main import main

def audit(event, arguments):
    if event == "import" and arguments[0].partition(".")[0] in {TOOLS}:
        os.write(2, f"the daemon imports {{arguments[0]}}\\n".encode())
        os._exit(99)

sys.addaudithook(audit)
main()
"""


STATUS = """
from swansong_tools.commands.main import main
try:
    main(["status", "--help"])
except SystemExit:
    pass
"""


def loaded(program: str) -> set[str]:
    """Names of the modules that a program has loaded at its end."""
    done = subprocess.run(
        [sys.executable, "-c", f"{program}\nimport sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    ("module", "unwanted", "most"),
    [
        ("swansongd.service.main", SDKS | TOOLS | {"watchdog", "crc32c"}, 545),
        # Beside a daemon the restore unit only asks it.
        (
            "swansong_tools.commands.restore",
            SDKS
            | {"structlog", "rich", "swansong_bucket.stores", "swansong_bucket.format"}
            | {"swansong_bucket.runs", "swansongd.core"},
            170,
        ),
        ("swansong_tools.commands.fetch", SDKS | {"crc32c"}, 480),
        # A command that is repeated every second does not load the code of the others.
        (
            "swansong_tools.commands.status",
            SDKS
            | {"structlog", "swansong_bucket.stores", "swansongd.core.machine", "shtab"}
            | {"swansong_tools.doctor", "swansong_tools.commands.restore"},
            240,
        ),
    ],
)
def test_a_start_imports_no_more_than_it_needs(module: str, unwanted: set[str], most: int) -> None:
    """No cloud library is loaded at the start, and the number of modules is bounded."""
    found = loaded(STATUS if module.endswith(".status") else f"import {module}")
    assert module in found
    assert not found & {*unwanted, "swansong.guard"}  # the daemon needs the hooks' protocol only
    assert len(found) <= most


def test_a_daemon_imports_no_tool_later(
    aws: Aws, bucket: Bucket, new_vm: Any, witness: str
) -> None:
    """An evacuation, a prune, the metrics and a resume need none of the tools."""
    settings = {"metrics": {"listen": "127.0.0.1:0"}, "retention": {"in_daemon": True}}

    def started(vm: Vm) -> Process:
        command = [sys.executable, "-c", DAEMON, "--config", str(vm.config)]
        vm.daemon = vm.spawn(command, **CREDENTIALS)
        vm.daemon.lines.wait(event="metrics_served")
        vm.daemon.lines.wait(event="health", source="store", health="ok")
        return vm.daemon

    vm = new_vm("vm", bucket.store, metadata=aws.metadata, settings=settings, warm=None)
    daemon = started(vm)
    vm.start_trainer(script=witness)
    aws.notice(in_s=60)
    assert daemon.lines.wait(event="verdict")["verdict"] == "SAFE"
    assert vm.status()["decision_faults"]["count"] == 0
    following = new_vm("following", bucket.store, settings=settings, warm=None)
    daemon = started(following)
    following.start_trainer(script=witness).lines.wait(event="resumed")
    daemon.kill(15)
    assert daemon.wait() == 0
