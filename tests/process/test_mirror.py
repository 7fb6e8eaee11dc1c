# SPDX-License-Identifier: Apache-2.0
"""A store on S3, its mirror on GCS: copies, the loss of the store, and the two lines of a promotion."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from typing import Any

import pytest

from testkit.clouds import Bucket
from testkit.emulators.fault_proxy import FaultProxy
from testkit.emulators.process import EmulatorProcess
from testkit.rig import Vm, control
from testkit.waiting import until

EXIT_FENCED = 14
EXIT_STORE = 16
SOON = {
    "swansong_tools.commands.bucket_command._CALL_BUDGET_WITH_MIRROR_S": 2.0,
    "swansongd.flush.mirroring.CALL_BUDGET_S": 2.0,
}
"""A command waits 10 s for a store that has a mirror, a copy 20 s for the mirror, without these constants."""


@pytest.fixture
def mirror(gcs: EmulatorProcess) -> Iterator[dict[str, str]]:
    """An empty prefix of the mirror, without faults: its keys of the configuration."""
    yield {"url": f"gs://ckpt/{secrets.token_hex(4)}", "endpoint": gcs.url}
    control(gcs.url, "clear")


def vm_with(new_vm: Any, name: str, store: dict[str, str], mirror: dict[str, str]) -> Vm:
    made: Vm = new_vm(name, store, settings={"mirror": mirror}, constants=SOON)
    return made


def answer(vm: Vm, *arguments: str, code: int = 0) -> Any:
    """The JSON that a command prints."""
    done = vm.swansong(*arguments, "--json")
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def mirror_of(vm: Vm) -> dict[str, Any]:
    """The field ``mirror`` of the status."""
    report: dict[str, Any] = vm.status()["mirror"]
    return report


@pytest.mark.fault("M08")
def test_a_lost_store_continues_in_its_mirror(
    new_vm: Any, mirror: dict[str, str], witness: str
) -> None:
    """Train with S3, lose it, promote the mirror on GCS, and resume from its newest commit."""
    with EmulatorProcess("testkit.emulators.s3_strict", "--port", "0", "--bucket", "ckpt") as s3:
        store = Bucket(s3.url, "lost").store
        first = vm_with(new_vm, "first", store, mirror)
        daemon = first.start_daemon()
        first.start_trainer("--every-steps", "20", script=witness)
        step = daemon.lines.wait(event="mirrored")["step"]
        assert mirror_of(first)["newest"]["step"] >= step
        assert "mirror" in first.status_words()
        drill = answer(first, "drill", "--restore")
        assert drill["step"] >= step
        assert drill["skipped"] == []
        assert drill["size_bytes"] > 3000
        first.power_off()
    second = vm_with(new_vm, "second", store, mirror)
    restored = second.swansong("restore", "--to", str(second.disk / "here"))
    assert restored.returncode == 0, restored.stderr
    assert f"restoring from the mirror {mirror['url']}" in restored.stderr
    promotion = answer(second, "mirror", "--promote")
    assert promotion["promoted_generation"] == 1002
    third: Vm = new_vm("third", mirror)
    daemon = third.start_daemon()
    trainer = third.start_trainer("--every-steps", "20", script=witness)
    resumed = daemon.lines.wait(event="resume")
    assert (resumed["step"], resumed["generation"]) == (promotion["newest"]["step"], 1)
    trainer.lines.wait(step=resumed["step"] + 1)
    assert daemon.lines.wait(event="committed")["generation"] == 1003


@pytest.mark.fault("M08")
def test_a_run_returns_to_the_store_that_it_left(
    bucket: Bucket, new_vm: Any, mirror: dict[str, str], witness: str
) -> None:
    """Each VM trains in the place that was promoted last, and the other place gets its commits."""
    places, step = [bucket.store, mirror], 0
    for number in range(3):
        here, there = places[number % 2], places[(number + 1) % 2]
        if number:
            operator = vm_with(new_vm, f"operator-{number}", there, here)
            answer(operator, "mirror", "--promote")
        vm = vm_with(new_vm, f"vm-{number}", here, there)
        daemon = vm.start_daemon()
        steps = ("--every-steps", "20", "--steps", str(step + 45))
        assert vm.start_trainer(*steps, script=witness).wait() == 0
        assert max(0, daemon.lines.wait(event="resume")["step"]) == step
        step += 40  # the last commit of this training
        daemon.lines.wait(event="mirrored", step=step)
        copy: Vm = new_vm(f"copy-{number}", there)
        assert copy.commits()[0]["step"] == step
        assert copy.swansong("verify").returncode == 0
        vm.power_off()


@pytest.mark.fault("M06")
def test_a_zombie_of_the_old_region_adds_nothing_to_the_promoted_mirror(
    bucket: Bucket, new_vm: Any, mirror: dict[str, str], witness: str
) -> None:
    """The run forks: a VM that does not reach the mirror commits into the store, another one into the mirror.

    The first one finds the foreign claim as soon as it reaches the mirror, and ends with code 14.
    """
    with FaultProxy(mirror["endpoint"]) as link:
        vm = vm_with(new_vm, "vm", bucket.store, {**mirror, "endpoint": link.url})
        daemon = vm.start_daemon()
        vm.start_trainer("--every-steps", "20", script=witness)
        daemon.lines.wait(event="mirrored")
        link.stall("up", 0)
        operator = vm_with(new_vm, "operator", bucket.store, mirror)
        promoted = answer(operator, "mirror", "--promote", "--force")["promoted_generation"]
        other: Vm = new_vm("other", mirror)
        trainer = other.start_daemon()
        other.start_trainer("--every-steps", "20", script=witness)
        trainer.lines.wait(event="committed", generation=promoted + 1)
        known = bucket.manifests()[0]["step"]
        until(lambda: bucket.manifests()[0]["step"] > known, what="a commit of the zombie")
        link.forward()
        assert daemon.wait() == EXIT_FENCED
    assert daemon.lines.all(event="mirror_promoted")
    other.power_off()
    commits = new_vm("reader", mirror).commits()
    assert commits[0]["generation"] == promoted + 1
    of_store = [each["step"] for each in commits if each["generation"] <= promoted]
    # A VM of the old configuration, and an operator with it, copy nothing either.
    assert operator.swansong("mirror").returncode == EXIT_FENCED
    assert operator.start_daemon(ready=False).wait() == EXIT_FENCED
    again = new_vm("another", mirror).commits()
    assert [each["step"] for each in again if each["generation"] <= promoted] == of_store


@pytest.mark.fault("M03")
def test_a_link_that_is_slower_than_the_run_still_carries_a_commit(
    bucket: Bucket, new_vm: Any, mirror: dict[str, str], witness: str
) -> None:
    """A chunk alone takes longer than the mirror may fail for, and newer commits come meanwhile."""
    size_bytes = 4 * 2**20
    with FaultProxy(mirror["endpoint"]) as link:
        link.pace(2e6)
        to_mirror = {**mirror, "endpoint": link.url}
        vm: Vm = new_vm(
            "vm",
            bucket.store,
            settings={"mirror": to_mirror, "flush": {"chunk_bytes": "5MiB"}},
            constants=SOON,
        )
        daemon = vm.start_daemon()
        arguments = ("--every-steps", "50", "--size-bytes", str(size_bytes))
        trainer = vm.start_trainer(*arguments, script=witness)
        step = daemon.lines.wait(60, event="mirrored")["step"]
        assert vm.status()["mirror"]["lag"]["commits"] >= 2
        trainer.kill()
    copy: Vm = new_vm("copy", mirror)
    assert step in [each["step"] for each in copy.commits()]
    assert (
        copy.swansong("restore", "--step", str(step), "--to", str(copy.disk / "c")).returncode == 0
    )


@pytest.mark.fault("M02", "M04")
def test_a_killed_copy_is_finished_by_the_next_daemon(
    bucket: Bucket, new_vm: Any, mirror: dict[str, str], witness: str
) -> None:
    """The mirror hangs: commits continue, and the lag is shown.  After SIGKILL the copy starts again."""
    control(mirror["endpoint"], "stall?match=data&times=1000")
    vm = vm_with(new_vm, "vm", bucket.store, mirror)
    daemon = vm.start_daemon()
    trainer = vm.start_trainer("--every-steps", "20", script=witness)
    until(lambda: len(daemon.lines.all(event="committed")) >= 3, what="three commits")
    report = vm.status()
    assert report["store"]["health"] == "ok"
    assert report["mirror"]["state"] in ("copying", "failing", "paused")
    assert report["mirror"]["lag"]["commits"] >= 2
    assert report["mirror"]["lag"]["seconds"] > 0
    trainer.kill()
    daemon.kill()
    control(mirror["endpoint"], "clear")
    newest = bucket.manifests()[0]["step"]
    vm.start_daemon().lines.wait(event="mirrored", step=newest)
    copy: Vm = new_vm("copy", mirror)
    assert copy.swansong("verify").returncode == 0
    assert answer(vm, "mirror")["failed"] == []
    of_store = {(each["generation"], each["step"]) for each in vm.commits()}
    assert {(each["generation"], each["step"]) for each in copy.commits()} == of_store
    assert copy.swansong("verify").returncode == 0


@pytest.mark.fault("M01")
def test_a_command_ends_when_the_store_hangs(
    bucket: Bucket, new_vm: Any, mirror: dict[str, str], witness: str
) -> None:
    """A store that stops in the middle of its answers costs the command the time of one request."""
    store = mirror  # this emulator can hang
    first: Vm = new_vm("first", store)
    daemon = first.start_daemon()
    first.start_trainer("--every-steps", "20", script=witness)
    daemon.lines.wait(event="committed")
    first.power_off()
    vm = vm_with(new_vm, "vm", store, bucket.store)
    control(store["endpoint"], "stall?match=/data/&times=100000")
    began_s = time.monotonic()
    done = vm.swansong("mirror")
    took_s = time.monotonic() - began_s
    assert done.returncode == EXIT_STORE, done.stderr
    assert took_s < 45
    control(store["endpoint"], "clear")
    assert len(answer(vm, "mirror")["copied"]) >= 1


@pytest.mark.fault("M01", "M03")
def test_a_mirror_that_fails_costs_nothing(
    bucket: Bucket, new_vm: Any, mirror: dict[str, str], witness: str
) -> None:
    """The store alone decides verdict and health."""
    control(mirror["endpoint"], "answer?status=503&match=ckpt&times=100000")
    vm = vm_with(new_vm, "vm", bucket.store, mirror)
    daemon = vm.start_daemon()
    trainer = vm.start_trainer("--every-steps", "20", script=witness)
    daemon.lines.wait(event="committed")
    assert vm.swansong("drill", "--in", "20s", "--wait").returncode == 0
    report = vm.status()
    assert (report["verdict"], report["store"]["health"]) == ("SAFE", "ok")
    trainer.kill()  # its commits cost processor time
    until(lambda: mirror_of(vm)["state"] == "failing", every_s=0.2, what="a failing mirror")
    assert mirror_of(vm)["lag"]["commits"] >= 1


@pytest.mark.fault("M09", "M05")
def test_a_damaged_object_comes_from_the_mirror(
    bucket: Bucket, new_vm: Any, mirror: dict[str, str], witness: str
) -> None:
    """The next VM resumes from the newest commit although the store has damaged it; status shows it."""
    vm = vm_with(new_vm, "vm", bucket.store, mirror)
    daemon = vm.start_daemon()
    trainer = vm.start_trainer("--every-steps", "20", "--steps", "65", script=witness)
    assert trainer.wait() == 0
    step = 60  # the last one of this training
    daemon.lines.wait(event="mirrored", step=step)
    vm.power_off()
    bucket.damage(bucket.manifests()[0]["shards"][0])
    following = vm_with(new_vm, "following", bucket.store, mirror)
    daemon = following.start_daemon()
    following.start_trainer("--every-steps", "20", script=witness)
    assert daemon.lines.wait(event="resume")["step"] == step
    assert daemon.lines.all(event="read_from_mirror")
    assert mirror_of(following)["objects_taken"] >= 1
    # A command without a daemon does the same, and an empty mirror gets no damaged byte.
    empty = {**mirror, "url": f"{mirror['url']}-new"}
    other = vm_with(new_vm, "other", bucket.store, empty)
    failed = answer(other, "mirror", code=8)["failed"]
    assert step in [each["step"] for each in failed]
    assert step not in [each["step"] for each in answer(new_vm("fresh", empty), "ls")]
