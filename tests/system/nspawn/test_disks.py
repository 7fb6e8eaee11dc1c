# SPDX-License-Identifier: Apache-2.0
"""Disks that are missing or cannot be written."""

from __future__ import annotations

from typing import Any

import pytest

from testkit.clouds import Aws, Bucket
from testkit.nspawn.container import DAEMON
from testkit.waiting import until

pytestmark = pytest.mark.timeout(300, func_only=True)

NVME = "/mnt/nvme/staging"
NVME_UNIT = "swansong-nvme.service"
READ_WRITE = f"[Service]\nReadWritePaths=-{NVME}\n"


@pytest.mark.fault("D08")
def test_staging_is_not_mounted(new_vm: Any, bucket: Bucket, aws: Aws) -> None:
    """The daemon reports the missing path, writes nothing to the root disk, and starts after the mount."""
    vm = new_vm(bucket, staging=NVME)
    vm.drop_in(DAEMON, READ_WRITE)
    vm.power_on()

    refused = vm.journal.wait(event="cannot_start", unit=DAEMON)
    assert NVME in refused.facts["problem"]
    hint = vm.journal.wait("create or mount it", unit=DAEMON)
    assert hint.mono_s >= refused.mono_s
    assert vm.run("ls", "-d", "/mnt/nvme", may_fail=True) == ""

    # The operator mounts the path; systemd restarts the daemon without a command.
    vm.run("mkdir", "/mnt/nvme")
    vm.run("mount", "-t", "tmpfs", "tmpfs", "/mnt/nvme")
    vm.run("install", "-d", "-o", "swansong", "-g", "swansong-trainers", "-m", "2750", NVME)
    vm.journal.wait(event="started", unit=DAEMON)
    vm.wait_active()


def test_memory_in_place_of_an_nvme_disk(new_vm: Any, bucket: Bucket, aws: Aws) -> None:
    """swansong-nvme.service with the drop-in from its comment: staging exists before the daemon starts."""
    vm = new_vm(bucket, staging="/mnt/swansong/staging")
    comment = vm.image_file(f"/usr/lib/systemd/system/{NVME_UNIT}").partition("[Unit]\n")[2]
    drop_in = [line.removeprefix("#").strip() for line in comment.splitlines()[:3]]
    vm.drop_in(DAEMON, "\n".join(["[Unit]", *drop_in, ""]))
    start = "/usr/lib/swansong/swansong-nvme --tmpfs 256m /mnt/swansong"
    vm.drop_in(NVME_UNIT, f"[Service]\nExecStart=\nExecStart={start}\n")
    vm.power_on()
    vm.wait_active()
    vm.wait_step(20)
    until(lambda: vm.status()["trainers"], what="the trainer's Hello")
    assert vm.run("findmnt", "-no", "FSTYPE", "/mnt/swansong") == "tmpfs"
    assert vm.run("stat", "-c", "%a %U %G", "/mnt/swansong/staging") == (
        "2750 swansong swansong-trainers"
    )


def test_root_is_read_only(new_vm: Any, bucket: Bucket, aws: Aws) -> None:
    """With /var in memory and no other writable file system, boot, notice and verdict work."""
    vm = new_vm(bucket, options=("--volatile=state",))
    vm.power_on()
    vm.wait_step(20)
    vm.wait_active()
    assert vm.run("touch", "/etc/x", may_fail=True) == ""
    assert "ro" in vm.run("findmnt", "-no", "OPTIONS", "/").split(",")

    vm.wait_connected()
    aws.notice(in_s=30)

    assert vm.journal.wait(event="verdict").facts["verdict"] == "SAFE"
