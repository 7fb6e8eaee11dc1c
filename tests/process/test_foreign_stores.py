# SPDX-License-Identifier: Apache-2.0
"""Servers of other projects: from the notice to the restored files, with a kill during the flush."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any

import pytest

from testkit.clouds import Aws
from testkit.emulators import tls
from testkit.emulators.fault_proxy import FaultProxy
from testkit.foreign_servers import ACCOUNT, AZURE_ACCOUNT, BUCKET, SERVE
from testkit.trainers.witness import FILES, content
from testkit.waiting import until

SERVERS = ("rclone", *os.environ.get("SWANSONG_STORES", "").split())
DOCTOR_FAILURES = {
    "rclone": {"create-if-absent"},
}
LARGE = 6 * 2**20
"""More than a chunk of 5 MiB."""


@pytest.mark.fault("H01", "O15")
@pytest.mark.parametrize("name", SERVERS)
def test_a_foreign_store_returns_what_was_committed(
    aws: Aws, new_vm: Any, witness: str, tmp_path: Path, name: str
) -> None:
    """Killed during a flush, the daemon still commits the set, and the commit can be restored.

    Its trainer reconnects, so that the verdict is SAFE.

    A listing that is truncated after its headers never counts as an empty bucket.
    """
    ca, pem = tls.make(tmp_path)
    is_tls = name.endswith("-tls")
    folder = tmp_path / "server"
    folder.mkdir()
    with (
        SERVE[name.removesuffix("-tls")](folder, pem if is_tls else None) as server,
        FaultProxy(server.url) as proxy,
    ):
        is_azure = name.startswith("azurite")
        endpoint = f"http{'s' if is_tls else ''}:{proxy.url.partition(':')[2]}"
        bucket = f"az://{AZURE_ACCOUNT}/{BUCKET}" if is_azure else f"s3://{BUCKET}"
        store = {
            "url": f"{bucket}/{secrets.token_hex(4)}",
            "endpoint": f"{endpoint}/{AZURE_ACCOUNT}" if is_azure else endpoint,
            "region": "us-east-1",
            **({"ca_bundle": str(ca)} if is_tls else {}),
        }
        flush = {"flush": {"chunk_bytes": "5MiB", "connections": 2}}
        vm = new_vm("vm", store, metadata=aws.metadata, settings=flush)
        daemon = vm.start_daemon(**ACCOUNT)
        daemon.lines.wait(event="health", source="store", health="ok")
        trainer = vm.start_trainer("--size-bytes", str(LARGE), script=witness)
        trainer.lines.wait(step=2)
        proxy.stall("up", after_bytes=3_000_000)
        aws.notice(in_s=90)
        step = daemon.lines.wait(event="evacuation", phase="flush")["step"]
        until(lambda: proxy.hits, timeout_s=60, what="a chunk whose upload stalls")
        daemon.kill()
        proxy.forward()

        # Its doctor reads the environment of the daemon in /proc, where a fork has none.
        warm, vm.warm = vm.warm, None
        restarted = vm.start_daemon(**ACCOUNT)
        verdict = restarted.lines.wait(event="verdict", timeout_s=60)
        assert (verdict["verdict"], verdict["step"]) == ("SAFE", step)
        examined = json.loads(vm.swansong("doctor", "--json", **ACCOUNT).stdout)
        store_findings = [finding for finding in examined if finding["family"] == "store"]
        failures = {finding["name"] for finding in store_findings if finding["level"] == "failure"}
        assert failures == DOCTOR_FAILURES.get(name.removesuffix("-tls"), set()), examined
        restarted.kill()
        vm.warm = warm
        listed = json.loads(vm.swansong("ls", "--json", **ACCOUNT).stdout)
        assert [commit["step"] for commit in listed] == [step]
        verified = vm.swansong("verify", **ACCOUNT)
        assert verified.returncode == 0, verified.stdout + verified.stderr

        if not is_tls:
            proxy.hits = 0
            proxy.reset("down", 65_536, times=2)
        place = tmp_path / "restored"
        restored = vm.swansong("restore", "--to", str(place), "--fresh-ok", **ACCOUNT)
        assert restored.returncode == 0, restored.stderr
        assert proxy.hits == 2 or is_tls
        for file in FILES:
            assert (place / "rank-00000" / file).read_bytes() == content(step, file, LARGE)
