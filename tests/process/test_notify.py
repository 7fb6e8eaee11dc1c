# SPDX-License-Identifier: Apache-2.0
"""Manual notices, drills, planned ends and host shutdowns: the daemon as a process."""

from __future__ import annotations

import json
import signal
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from swansong import protocol

from testkit.channel_peer import PeerProcess, RunningChannel
from testkit.clouds import Bucket
from testkit.emulators.process import EmulatorProcess
from testkit.other_users import needs_root
from testkit.rig import Vm, control
from testkit.waiting import until


@pytest.fixture
def vm(bucket: Bucket, new_vm: Any, witness: str) -> Vm:
    """A VM with a daemon and a running trainer."""
    made: Vm = new_vm("vm", bucket.store)
    made.start_daemon()
    trainer = made.start_trainer(script=witness)
    trainer.lines.wait(step=5)
    return made


def test_a_drill_is_marked_and_each_drill_is_a_new_notice(vm: Vm) -> None:
    """The source is ``drill``; a second drill is evacuated as well."""
    for count in (1, 2):
        done = vm.swansong("drill", "--in", "30", "--wait")
        assert (done.returncode, done.stdout[:5]) == (0, "SAFE:"), done.stderr
        assert vm.daemon is not None
        assert len(vm.daemon.lines.all(event="notice", source="drill", kind="drill")) == count
        if count == 1:
            assert vm.swansong("notify", "--withdraw").returncode == 0
    assert vm.swansong("drill", "--in", "60").returncode == 0
    vm.daemon.lines.wait(event="notice", source="drill")
    until(lambda: len(vm.daemon.lines.all(event="notice", source="drill")) == 3)


def test_each_call_waits_for_its_own_verdict(vm: Vm, bucket: Bucket) -> None:
    """Sequential calls without a withdrawal: each verdict belongs to an evacuation after its call.

    ``--wait`` returns the verdict; a checkpoint newer than the notice is committed.
    """
    assert vm.daemon is not None
    assert vm.trainer is not None
    for number in range(3):
        step_before = vm.trainer.lines.all()[-1].get("step", 0)
        end = f"{100 + number}s"  # two notices with the same end are one notice
        done = vm.swansong("notify", "--in", end, "--reason", "EventBridge", "--wait", "--json")
        assert done.returncode == 0, done.stderr
        shown = json.loads(done.stdout)
        assert shown["verdict"] == "SAFE"
        assert shown["last_commit"]["step"] > step_before
        if not number:
            (notice,) = shown["notices"]
            assert (notice["source"], notice["severity"]) == ("manual", "imminent")
            line = vm.daemon.lines.wait(event="notice", source="manual")
            assert (line["detail"], line["deadline_quality"]) == ("EventBridge", "stated")
            (manifest,) = bucket.manifests()
            assert manifest["kind"] == "emergency"
    ids = {line["id"] for line in vm.daemon.lines.all(event="evacuation", phase="notice")}
    assert len(ids) == 3


def test_a_notice_of_an_hour_starts_no_evacuation(vm: Vm) -> None:
    """The daemon takes a checkpoint immediately; training and periodic checkpoints continue."""
    assert vm.daemon is not None
    done = vm.swansong("notify", "--in", "1h", "--json")
    assert done.returncode == 0, done.stderr
    (notice,) = json.loads(done.stdout)["notices"]
    assert notice["severity"] == "scheduled"
    vm.daemon.lines.wait(event="precaution_done")
    status = vm.status()
    assert (status["state"], status["evacuation"]) == ("ARMED", None)


@pytest.mark.fault("N09")
def test_a_restarted_daemon_remembers_a_manual_notice(vm: Vm, bucket: Bucket) -> None:
    """After a crash the notice is in force with the same deadline and the same evacuation id.

    The trainer saves no second checkpoint, and the verdict is about the first one.
    Without ``--wait`` the command returns at once, and status has the notice.
    """
    assert vm.daemon is not None
    assert vm.swansong("notify", "--in", "110s").returncode == 0
    assert vm.status()["notices"][0]["source"] == "manual"
    before = vm.daemon.lines.wait(event="evacuation", phase="notice")
    verdict = vm.daemon.lines.wait(event="verdict", verdict="SAFE")
    vm.daemon.kill()
    restarted = vm.start_daemon()
    after = restarted.lines.wait(event="evacuation", phase="notice")
    assert after["id"] == before["id"]
    assert after["seconds_left"] < before["seconds_left"]
    again = restarted.lines.wait(event="verdict", verdict="SAFE")
    assert (again["generation"], again["step"]) == (1, verdict["step"])
    assert [manifest["step"] for manifest in bucket.manifests()] == [verdict["step"]]
    assert vm.status()["notices"][0]["source"] == "manual"


def test_training_continues_after_a_withdrawn_notice(vm: Vm) -> None:
    """The daemon returns to its earlier state; a command that waits for the verdict exits with 9."""
    assert vm.daemon is not None
    assert vm.trainer is not None
    vm.trainer.kill(signal.SIGSTOP)  # prevents a verdict
    waiting = vm.spawn(
        [str(Path(sys.executable).with_name("swansong")), "--config", str(vm.config),
         "notify", "--in", "60s", "--wait"],
    )  # fmt: skip
    until(lambda: "waiting for the verdict" in "".join(waiting.lines.raw), what="the notice")
    done = vm.swansong("notify", "--withdraw", "--reason", "false alarm", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["notices"] == []
    vm.daemon.lines.wait(event="notice_withdrawn", source="manual", reason="false alarm")
    assert waiting.wait() == 9
    vm.trainer.kill(signal.SIGCONT)
    assert vm.status()["state"] == "IDLE"


@pytest.mark.fault("T01")
def test_verdicts_without_training_and_without_a_commit_have_exit_codes(
    bucket: Bucket, new_vm: Any, witness: str
) -> None:
    """Without any training since the boot: NO_TRAINING, 19.  After it ended without a commit: LOST, 11."""
    vm = new_vm("vm", bucket.store)
    vm.start_daemon()
    done = vm.swansong("notify", "--in", "3s", "--wait")
    assert done.returncode == 19, done.stderr
    assert "No trainer is connected" in done.stderr
    assert done.stdout.startswith("NO_TRAINING: ")
    assert vm.swansong("notify", "--withdraw").returncode == 0
    vm.start_trainer(script=witness).lines.wait(step=5)
    vm.trainer.kill()
    until(lambda: not vm.status()["trainers"], what="the end of the trainer")
    done = vm.swansong("notify", "--in", "3s", "--wait")
    assert done.returncode == 11, done.stderr
    assert done.stdout.startswith("LOST: ")
    # The reason of the verdict: the store may have a commit if it could not be read.
    assert done.stdout.endswith("; no checkpoint of the run is whole\n")


@needs_root
@pytest.mark.parametrize("kind", ["notify", "notify_withdrawn"])
def test_trainers_may_not_give_notice(kind: str) -> None:
    """A user of ``trainer.users`` is refused; root is not."""
    answered: list[protocol.Message] = []
    uid = 65534
    script = f's.connect(path); send(type="{kind}", nonce="n", seconds_left=9); show(receive())'
    with RunningChannel(
        allowed_uids=frozenset({0, uid}), answer=lambda message, _: answered.append(message)
    ) as running:
        running.path.chmod(0o666)
        with PeerProcess(running.path, script, uid=uid, gid=uid) as peer:
            reply = peer.line()
        assert json.loads(reply)["type"] == "refused"
        assert "only root" in reply
        assert answered == []
        with running.connect() as client:
            client.send(protocol.Notify(nonce="n", seconds_left=9.0))
            until(lambda: answered)


def test_a_configured_end_is_evacuated(bucket: Bucket, new_vm: Any, witness: str) -> None:
    """The notice is scheduled at first and imminent at ``end_lead_s``; a checkpoint is committed in time."""
    end = datetime.now(UTC) + timedelta(seconds=35)
    settings = {"sources": {"end_at": end.isoformat(), "end_lead_s": "25s"}}
    vm = new_vm("vm", bucket.store, settings=settings)
    daemon = vm.start_daemon()
    notice = daemon.lines.wait(event="notice", source="deadline")
    assert (notice["kind"], notice["severity"]) == ("capacity-end", "scheduled")
    trainer = vm.start_trainer(script=witness)
    trainer.lines.wait(step=1)
    assert daemon.lines.wait(event="verdict")["verdict"] == "SAFE"


@pytest.mark.fault("H03", "N15")
def test_a_shutdown_of_the_host_waits_for_the_commit(
    bucket: Bucket, new_vm: Any, witness: str
) -> None:
    """The daemon holds the delay lock until the verdict; a second shutdown waits again."""
    with EmulatorProcess("testkit.emulators.fake_logind") as fake:
        bus = control(fake.url, "state")["bus"]
        vm = new_vm("vm", bucket.store, settings={"sources": {"system_bus": bus}})
        daemon = vm.start_daemon()
        trainer = vm.start_trainer(script=witness)
        trainer.lines.wait(step=5)
        until(lambda: control(fake.url, "state")["locks"] == 1)

        control(fake.url, "shutdown", type="poweroff")
        notice = daemon.lines.wait(event="notice", source="logind")
        assert notice["severity"] == "shutting_down"
        verdict = daemon.lines.wait(event="verdict")
        assert verdict["verdict"] == "SAFE"
        until(lambda: control(fake.url, "state")["shutdown"] == "gone")
        (manifest,) = bucket.manifests()
        assert (manifest["kind"], manifest["step"]) == ("emergency", verdict["step"])

        control(fake.url, "cancel")
        daemon.lines.wait(event="notice_withdrawn", source="logind")
        until(lambda: control(fake.url, "state")["locks"] == 1)
        trainer.lines.wait(step=verdict["step"] + 5)

        control(fake.url, "shutdown")
        until(lambda: len(daemon.lines.all(event="verdict")) == 2)
        until(lambda: control(fake.url, "state")["shutdown"] == "gone")
        daemon.kill(signal.SIGTERM)
        assert daemon.wait() == 0
