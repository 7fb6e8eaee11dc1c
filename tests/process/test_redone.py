# SPDX-License-Identifier: Apache-2.0
"""The next VM says whether it repeats the steps of the interrupted run, with real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from testkit import TRAINERS
from testkit.clouds import Aws, Bucket
from testkit.rig import Process, Vm
from testkit.waiting import until

FAREWELL = {"swansongd.observe.accounting.LAST_FAREWELL_LEAD_S": 7.0}
"""The last farewell is written this long before the deadline; without this constant 2 s before."""
SCRIPT = str(TRAINERS / "redone.py")


def start(vm: Vm, python: str) -> Process:
    command = [python, "-u", SCRIPT]
    return vm.spawn(command, lines_on="stdout", SWANSONG_SOCKET=str(vm.socket))


def digested(bucket: Bucket, step: int) -> bool:
    """Whether a farewell has the digests of the two steps after this one."""
    wanted = {str(step + 1), str(step + 2)}
    return any(
        wanted <= {text.split()[0] for text in farewell.get("digests", {}).get("0", ())}
        for farewell in bucket.farewells()
    )


@pytest.mark.fault("T19")
def test_the_next_vm_compares_the_steps_that_it_repeats(
    aws: Aws, bucket: Bucket, new_vm: Any, warm_torch: str, tmp_path: Path
) -> None:
    """The power is cut after steps that no commit has.  The resumed run, its daemon, its status and a
    notification name the first part that differs; its next commit has the result, too."""
    vm = new_vm("vm", bucket.store, metadata=aws.metadata, constants=FAREWELL)
    daemon = vm.start_daemon()
    start(vm, warm_torch).lines.wait(step=5)
    aws.notice(in_s=8)
    step = daemon.lines.wait(event="verdict", verdict="SAFE")["step"]
    until(lambda: digested(bucket, step), every_s=0.1, what="a farewell with digests")
    vm.power_off()
    aws.withdraw()

    told = tmp_path / "told"
    script = f'echo "$SWANSONG_EVENT $SWANSONG_SUMMARY" >> {told}'
    notify = {"exec": ["/bin/sh", "-c", script], "exec_on": ["redone"]}
    elsewhere = new_vm(
        "elsewhere", bucket.store, metadata=aws.metadata, settings={"notify": notify}
    )
    daemon = elsewhere.start_daemon()
    trainer = start(elsewhere, warm_torch)
    assert trainer.lines.wait(event="resumed")["from_step"] == step

    found = daemon.lines.wait(event="redone_steps")
    report = until(lambda: elsewhere.status()["trainers"], what="the trainer in the status")[0]
    assert report["redone"] == found["result"]
    assert report["redone_differs"]
    assert found["level"] == "warning"
    cause = "differs from the interrupted run: the batch is another one (loader loader)"
    assert cause in found["result"]
    until(lambda: told.exists() and told.read_text().endswith("\n"), what="the notification")
    assert told.read_text().startswith("redone The resume is not exact: step ")
    aws.notice(in_s=60)
    daemon.lines.wait(event="verdict", verdict="SAFE")
    newest = max(bucket.manifests(), key=lambda manifest: manifest["step"])
    assert newest["health"]["redone_differs"] == 1
