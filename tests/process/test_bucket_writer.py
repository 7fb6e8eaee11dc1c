# SPDX-License-Identifier: Apache-2.0
"""A bucket writer plants claims, commits and junk; a store does not return the objects that it accepted."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from swansong import bounds

from testkit import TRAINERS
from testkit.clouds import Aws, Bucket
from testkit.records import record_of

CORRUPT = 8
LAST = f"run/generations/{bounds.GENERATION_MAX}.json"


def planted_commit(bucket: Bucket, *, generation: int, step: int) -> str:
    """A copy of the newest genuine manifest under a higher number, with a valid digest and no signature."""
    body = bucket.manifests()[0] | {"generation": generation, "step": step}
    for shard in body["shards"]:
        shard.pop("key", None)
    key = f"run/commits/{generation:08d}/{step:012d}/00000-of-00001.json"
    bucket.put(key, record_of(body))
    return key


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "signing.key"
    path.write_bytes(os.urandom(32))
    path.chmod(0o400)
    return path


@pytest.mark.fault("S25")
def test_with_a_signing_key_a_bucket_writer_gains_nothing(
    bucket: Bucket, new_vm: Any, witness: str, key_file: Path
) -> None:
    """A planted higher generation does not fence the daemon, and the next VM restores the newest signed
    commit, not the planted one."""
    store = bucket.store | {"signing_key_file": str(key_file)}
    vm = new_vm("vm", store)
    daemon = vm.start_daemon()
    vm.start_trainer("--every-steps", "20", script=witness)
    daemon.lines.wait(event="committed", step=20)
    bucket.put("run/generations/00000009.json", b'{"nonce": "planted"}')
    planted_commit(bucket, generation=9, step=90)
    seen = daemon.lines.all(event="committed")[-1]["step"]
    daemon.lines.wait(event="committed", step=seen + 40)
    assert daemon.lines.all(event="unsigned_objects_ignored")
    assert daemon.popen.poll() is None
    vm.power_off()
    newest = max(m["step"] for m in bucket.manifests() if m["generation"] == 1)

    heir = new_vm("heir", store)
    place = heir.disk / "restored"
    answer = heir.swansong("restore", "--to", str(place), "--json")
    assert answer.returncode == 0, answer.stderr
    restored = json.loads(answer.stdout)
    assert (restored["generation"], restored["step"]) == (1, newest)
    assert restored["skipped"] == []
    assert {row["generation"] for row in heir.commits()} == {1}
    assert heir.swansong("verify").returncode == 0
    second = heir.start_daemon()
    trainer = heir.start_trainer(script=witness)
    assert trainer.lines.wait(event="resumed")["from_step"] == newest
    assert heir.status()["generation"] == 2
    assert second.popen.poll() is None

    without = new_vm("without", bucket.store).swansong("ls")
    assert without.returncode == CORRUPT
    assert "store.signing_key_file" in without.stderr


@pytest.mark.fault("S25")
def test_a_planted_last_generation_is_reported_and_never_safe(
    aws: Aws, bucket: Bucket, new_vm: Any, witness: str
) -> None:
    """The daemon runs, reports the reason and claims nothing, and the trainer gets an error: PARTIAL.

    Once the object is deleted, the next training starts and is SAFE.
    """
    bucket.put(LAST, b"{}")
    vm = new_vm("vm", bucket.store, metadata=aws.metadata)
    daemon = vm.start_daemon()
    trainer = vm.start_trainer(script=witness)
    line = daemon.lines.wait(event="claim_refused")
    assert LAST in line["hint"]
    assert trainer.wait() != 0
    assert LAST in daemon.lines.wait(event="resume")["error"]
    report = vm.status()
    assert report["generation"] is None
    assert report["store"]["health"] != "ok"
    assert LAST in report["store"]["reason"]
    aws.notice(in_s=4)
    assert daemon.lines.wait(event="verdict")["verdict"] == "PARTIAL"
    assert bucket.keys("run/generations/") == [LAST]
    assert bucket.keys("run/commits/") == []
    aws.withdraw()
    bucket.delete(LAST)
    vm.start_trainer(script=witness).lines.wait(step=5)
    aws.notice(in_s=60)
    assert daemon.lines.wait(event="verdict", verdict="SAFE")["generation"] == 1
    assert vm.status()["store"]["health"] == "ok"


@pytest.mark.fault("S25", "G16")
def test_a_commit_that_no_reader_parses_is_not_an_empty_run(
    bucket: Bucket, new_vm: Any, witness: str
) -> None:
    """``restore --fresh-ok`` fails, and a trainer gets an error instead of a fresh start.  The message names
    the object to delete."""
    foreign = "run/commits/100000000/000000000020/00000-of-00001.json"
    bucket.put(foreign, b"{}")
    vm = new_vm("vm", bucket.store)
    place = str(vm.disk / "restored")
    for command in (["restore", "--to", place, "--fresh-ok"], ["ls"], ["verify"]):
        answer = vm.swansong(*command)
        assert answer.returncode == CORRUPT, command
        assert foreign in answer.stderr
        assert "delete it" in answer.stderr
    daemon = vm.start_daemon()
    trainer = vm.start_trainer(script=witness)
    assert trainer.wait() != 0
    assert not trainer.lines.all(event="resumed")
    assert foreign in daemon.lines.wait(event="resume")["error"]
    assert bucket.keys("run/commits/") == [foreign]
    assert bucket.keys("run/data/") == []
    bucket.delete(foreign)
    assert vm.swansong("restore", "--to", place, "--fresh-ok").returncode == 0


@pytest.mark.fault("S25")
@pytest.mark.parametrize("is_signed", [True, False], ids=["signed", "unsigned"])
def test_compiled_kernels_travel_only_with_a_signing_key(
    bucket: Bucket, new_vm: Any, warm_torch: str, key_file: Path, *, is_signed: bool
) -> None:
    """They are code, which another writer of the bucket could plant in a run without a key."""
    store = bucket.store | ({"signing_key_file": str(key_file)} if is_signed else {})
    found = []
    for name in ("vm", "heir"):
        vm = new_vm(name, store)
        vm.start_daemon()
        trainer = vm.spawn(
            [warm_torch, "-u", str(TRAINERS / "kernels.py")],
            lines_on="stdout",
            SWANSONG_SOCKET=str(vm.socket),
            SWANSONG_COMPILE_CACHE=str(vm.disk / "kernels"),
        )
        resumed = trainer.lines.wait(event="resumed")
        found.append((resumed["from_step"] > 0, resumed["kernels"]))
        assert vm.swansong("notify", "--in", "60s", "--wait").returncode == 0
        vm.power_off()
    assert found == [(False, []), (True, ["kernel.so"] if is_signed else [])]
