# SPDX-License-Identifier: Apache-2.0
"""Eight seconds of random faults for the whole daemon; ``SWANSONG_SEED`` repeats a run."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

from testkit.clouds import Aws, Bucket
from testkit.rig import Process, control
from testkit.waiting import until

TROUBLE_S = 8.0
NOTICES = 3
STATUSES = (401, 429, 500, 503)


def trouble(aws: Aws, rng: random.Random) -> None:
    """Add one fault for the next few requests; several may be queued."""
    kind = rng.choice(("delay", "reset", "status", "tokens"))
    if kind == "tokens":
        control(aws.url, "invalidate-tokens")
        return
    value = {"delay": rng.uniform(0.05, 1.5), "reset": None, "status": rng.choice(STATUSES)}[kind]
    control(aws.url, "fault", kind=kind, value=value, count=rng.randint(1, 4))


def counted(daemon: Process, count: int, **facts: str) -> None:
    """Wait for this number of lines with these facts."""
    until(lambda: len(daemon.lines.all(**facts)) >= count, what=f"{count} times {facts}")


def open_files_and_threads(daemon: Process) -> tuple[int, int]:
    """Number of open files and of threads of the daemon."""
    status = Path(f"/proc/{daemon.pid}/status").read_text().split()
    threads = int(status[status.index("Threads:") + 1])
    return len(os.listdir(f"/proc/{daemon.pid}/fd")), threads


@pytest.mark.fault("N02", "N03", "N06", "N09")
def test_under_random_faults_the_daemon_sees_each_notice_once(
    aws: Aws, bucket: Bucket, new_vm: Any, witness: str
) -> None:
    """Three notices during faults: each is evacuated once and withdrawn, no other appears, nothing leaks."""
    seed = int(os.environ.get("SWANSONG_SEED", random.randrange(10**6)))
    print(f"SWANSONG_SEED={seed}")
    rng = random.Random(seed)
    vm = new_vm("vm", bucket.store, metadata=aws.metadata)
    daemon = vm.start_daemon()
    vm.start_trainer(script=witness).lines.wait(step=5)
    daemon.lines.wait(event="health", source="aws.spot", health="ok")
    daemon.lines.wait(event="health", source="store", health="ok")
    before = open_files_and_threads(daemon)

    began = time.monotonic()
    due = sorted(rng.uniform(0.05, 0.7) * TROUBLE_S for _ in range(NOTICES))
    given = 0
    while given < NOTICES or time.monotonic() < began + TROUBLE_S:
        trouble(aws, rng)
        if given < NOTICES and time.monotonic() >= began + due[given]:
            given += 1
            aws.notice(in_s=60 + given)
            counted(daemon, given, event="verdict")
            trouble(aws, rng)
            aws.withdraw()
            counted(daemon, given, event="notice_withdrawn", source="aws.spot")
        daemon.lines._thread.join(rng.uniform(0.05, 0.4))  # until the daemon ends, or a moment
        assert daemon.popen.poll() is None
    control(aws.url, "clear")

    def source() -> str:
        found = {item["name"]: item["health"] for item in vm.status()["sources"]}
        return str(found["aws.spot"])

    until(lambda: source() == "ok", what="aws.spot to be ok again")
    assert len(daemon.lines.all(event="notice")) == NOTICES
    assert len(daemon.lines.all(event="evacuation", phase="notice")) == NOTICES
    verdicts = [line["verdict"] for line in daemon.lines.all(event="verdict")]
    assert verdicts == ["SAFE"] * NOTICES
    report = vm.status()
    assert (report["pid"], report["state"], report["notices"]) == (daemon.pid, "IDLE", [])
    assert not [line for line in daemon.lines.all() if str(line.get("event")).endswith("_fault")]
    fds, threads = before
    until(lambda: open_files_and_threads(daemon)[0] <= fds + 8, what="no leaked files")
    until(lambda: open_files_and_threads(daemon)[1] <= threads + 8, what="no leaked threads")
