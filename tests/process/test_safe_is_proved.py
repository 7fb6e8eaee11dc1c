# SPDX-License-Identifier: Apache-2.0
"""SAFE is reported only if a restore on a new VM returns the newest state of the training that runs.

In most of these histories the newest commit is not that state.  Two witnesses are independent of the daemon:
the trainer prints its steps, and a restore on another VM shows the state that survives.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from testkit import TRAINERS
from testkit.clouds import Aws, Bucket
from testkit.emulators.process import EmulatorProcess
from testkit.fake_nvml import FakeNvml
from testkit.positions import Position, Witness, restored, witness
from testkit.rig import Process, Vm, control
from testkit.waiting import until
from tests.process.conftest import NewVm

OLD, NEW = "old", "new"
"""Names of two trainings: the one that was discarded, and the one that runs."""
Verdict = dict[str, Any]
RECONNECT = {"swansongd.core.arrival.RECONNECT_S": 2.0}
"""The hooks reconnect to a restarted daemon within this time; without this constant within 10 s."""


def train(vm: Vm, training: str, *arguments: str, **env: str) -> Process:
    """Start a trainer with hooks."""
    script = str(TRAINERS / "positioned.py")
    command = [sys.executable, "-u", script, "--training", training, *arguments]
    return vm.spawn(command, lines_on="stdout", **{"SWANSONG_SOCKET": str(vm.socket), **env})


def train_without_hooks(vm: Vm, *arguments: str) -> Process:
    """Start a trainer that saves after SIGUSR1."""
    script = str(TRAINERS / "signalled.py")
    command = [sys.executable, "-u", script, "--training", NEW, "--pid-file", str(vm.pid_file)]
    command += ["--checkpoints", str(vm.run_directory), "--save-when", str(vm.disk / "save")]
    return vm.spawn([*command, *arguments], lines_on="stdout")


def saved(vm: Vm, trainer: Process) -> int:
    """Let the trainer without hooks save by itself; returns the step."""
    before = len(trainer.lines.all(event="saved"))
    (vm.disk / "save").touch()
    until(lambda: len(trainer.lines.all(event="saved")) > before, what="the save")
    step: int = trainer.lines.all(event="saved")[-1]["step"]
    return step


def trained(trainer: Process, steps: int = 20) -> Witness:
    """The state of the training after this many more steps."""
    before = len(trainer.lines.all())
    until(lambda: len(trainer.lines.all()) >= before + steps, what="steps of the trainer")
    return witness(trainer, NEW)


def verdict_after(daemon: Process, **facts: Any) -> Verdict:
    """The first verdict after the first line with these fields."""
    first = daemon.lines.wait(**facts)

    def found() -> list[Verdict]:
        lines = daemon.lines.all()
        later = lines[lines.index(first) :]
        return [line for line in later if line["event"] == "verdict"]

    return until(found, what=f"a verdict after {facts}")[0]


@contextmanager
def data_refused(bucket: Bucket) -> Iterator[None]:
    """The store refuses the data of sets inside the block: their uploads do not end."""
    bucket.order("answer", status=503, method="PUT", match="/data/", times=1_000_000)
    yield
    bucket.order("clear")


@pytest.fixture
def elsewhere(bucket: Bucket, new_vm: NewVm) -> Callable[[], Position]:
    """A function that returns the position that another VM restores from the bucket."""
    vm = new_vm("elsewhere", bucket.store)
    return lambda: restored(vm, vm.disk / "restored")


@pytest.fixture
def signalling_vm(aws: Aws, bucket: Bucket, new_vm: NewVm, tmp_path: Path) -> Vm:
    """A VM whose trainer has no hooks."""
    pid_file = str(tmp_path / "vm" / "trainer.pid")
    settings = {"trainer": {"signal": "SIGUSR1", "pid_file": pid_file, "settle_s": 0.3}}
    vm: Vm = new_vm("vm", bucket.store, metadata=aws.metadata, settings=settings)
    return vm


def expect(verdict: Verdict, word: str, state: Witness, found: Position, vm: Vm) -> None:
    """Require this verdict instead of SAFE, in the log and in the status, for a state that is lost.

    Args:
        verdict: line of the log.
        word: the expected verdict.
        state: that of the training at the notice.
        found: the position that a restore on another VM returns.
        vm: its daemon runs.
    """
    facts = f"{verdict['reason']}; {state} was trained, a restore returns {found}"
    assert not state.is_kept_by(found), f"nothing is lost, so this test shows nothing: {facts}"
    assert verdict["verdict"] == word, facts
    assert vm.status()["last_verdict"]["verdict"] == word


def expect_farewell(bucket: Bucket, word: str) -> None:
    """Require that the newest farewell contains this verdict; the daemon writes it after the log."""
    until(lambda: bucket.farewells()[-1:], what="a farewell")
    until(lambda: bucket.farewells()[-1]["verdict"] == word, timeout_s=10, what=f"farewell: {word}")


@pytest.mark.fault("T05", "O04")
def test_a_set_from_before_the_notice_is_not_safe_if_a_new_one_does_not_fit(
    signalling_vm: Vm, bucket: Bucket, elsewhere: Callable[[], Position]
) -> None:
    """A set is still uploaded at the notice, and a save takes longer than the time that is left.

    The set becomes a commit, and training without hooks is at a later step that is unknown: PARTIAL.
    """
    vm = signalling_vm
    daemon = vm.start_daemon()
    trainer = train_without_hooks(vm, "--save-s", "4")
    trained(trainer)
    # A drill shows the daemon how long a save takes.
    assert vm.swansong("drill", "--in", "30s", "--wait").returncode == 0
    with data_refused(bucket):
        older = saved(vm, trainer)
        daemon.lines.wait(event="sealed_set_found", step=older)
        state = trained(trainer)
        assert vm.swansong("notify", "--in", "4s").returncode == 0
        daemon.lines.wait(event="notice", source="manual")
    verdict = verdict_after(daemon, event="notice", source="manual")
    expect(verdict, "PARTIAL", state, elsewhere(), vm)
    expect_farewell(bucket, "PARTIAL")


@pytest.mark.fault("T05", "O04")
def test_a_set_from_before_the_notice_is_not_safe_if_the_new_one_never_ends(
    signalling_vm: Vm, aws: Aws, bucket: Bucket, elsewhere: Callable[[], Position]
) -> None:
    """A set is still uploaded at the notice, and the process saves until the deadline: PARTIAL."""
    vm = signalling_vm
    daemon = vm.start_daemon()
    trainer = train_without_hooks(vm, "--save-s", "3600")
    trained(trainer)
    with data_refused(bucket):
        older = saved(vm, trainer)
        daemon.lines.wait(event="sealed_set_found", step=older)
        state = trained(trainer)
        aws.notice(in_s=5)
        trainer.lines.wait(event="signalled")
    verdict = verdict_after(daemon, event="notice")
    expect(verdict, "PARTIAL", state, elsewhere(), vm)
    expect_farewell(bucket, "PARTIAL")


@pytest.mark.fault("X01")
def test_a_trainer_that_is_not_asked_because_a_gpu_failed_is_not_safe(
    nvml: FakeNvml, signalling_vm: Vm, aws: Aws, bucket: Bucket, elsewhere: Callable[[], Position]
) -> None:
    """A trainer without hooks is beyond its commit at Xid 79; then the VM gets a notice.

    The process is never asked: each verdict is PARTIAL and names the failed GPU.
    """
    vm = signalling_vm
    daemon = vm.start_daemon(ready=True, **nvml.environment)
    until(lambda: len(vm.status()["gpus"]) == 2, what="two GPUs in the status")
    trainer = train_without_hooks(vm)
    daemon.lines.wait(event="committed", step=saved(vm, trainer))
    state = trained(trainer)
    nvml.xid(79)
    daemon.lines.wait(event="notice", source="gpu")
    aws.notice(in_s=4)
    verdict = verdict_after(daemon, event="notice", source="aws.spot")
    expect(verdict, "PARTIAL", state, elsewhere(), vm)
    expect_farewell(bucket, "PARTIAL")
    all_verdicts = daemon.lines.all(event="verdict")
    assert {line["verdict"] for line in all_verdicts} == {"PARTIAL"}
    assert all("GPU 0 is lost: Xid 79" in line["reason"] for line in all_verdicts)
    assert not trainer.lines.all(event="signalled")


@pytest.mark.fault("T01")
@pytest.mark.parametrize("source", ["aws.spot", "logind"])
def test_a_trainer_that_the_daemon_never_saw_gets_no_promise(
    aws: Aws, bucket: Bucket, new_vm: NewVm, elsewhere: Callable[[], Position], source: str
) -> None:
    """The trainer has a wrong path of the socket, and trains beyond the newest commit.

    The verdict is NO_TRAINING, and names that commit.
    """
    commit_elsewhere(bucket, new_vm, 20)
    with EmulatorProcess("testkit.emulators.fake_logind") as logind:
        bus = {"system_bus": control(logind.url, "state")["bus"]}
        settings = {"sources": bus}
        vm = new_vm(
            "vm", bucket.store, metadata=aws.metadata, settings=settings, constants=RECONNECT
        )
        chosen = vm.disk / "chosen"
        assert restored(vm, chosen) == Position(OLD, 20)
        wrong = str(vm.disk / "wrong.sock")
        trainer = train(vm, NEW, SWANSONG_SOCKET=wrong, SWANSONG_RESTORE=str(chosen))
        state = trained(trainer)
        daemon = vm.start_daemon()
        if source == "logind":
            until(lambda: control(logind.url, "state")["locks"] == 1, what="the delay lock")
            control(logind.url, "shutdown", type="poweroff")
        else:
            aws.notice(in_s=4)
        verdict = verdict_after(daemon, event="notice", source=source)
        expect(verdict, "NO_TRAINING", state, elsewhere(), vm)
    assert "SAFE" not in [farewell["verdict"] for farewell in bucket.farewells()]
    newest = vm.commits()[0]
    assert (verdict["generation"], verdict["step"]) == (newest["generation"], newest["step"])


@pytest.mark.fault("H01", "T17")
def test_training_that_was_rewound_without_the_daemon_is_not_safe(
    aws: Aws, bucket: Bucket, new_vm: NewVm, elsewhere: Callable[[], Position]
) -> None:
    """Step 60 is committed.  While the daemon is down, training is started again from step 20.

    The new process has not connected when the time is over: PARTIAL.
    """
    vm = new_vm("vm", bucket.store, metadata=aws.metadata, constants=RECONNECT)
    daemon = vm.start_daemon()
    before = train(vm, OLD, "--save-at", "20,60")
    daemon.lines.wait(event="committed", step=60)
    daemon.kill()
    before.kill()
    state = rewound(vm, 20)
    train_late(vm)
    daemon = vm.start_daemon()
    aws.notice(in_s=5)
    expect(daemon.lines.wait(event="verdict"), "PARTIAL", state, elsewhere(), vm)
    expect_farewell(bucket, "PARTIAL")


@pytest.mark.fault("H01", "T09")
def test_a_resumed_evacuation_does_not_repeat_safe_after_training_was_rewound(
    aws: Aws, bucket: Bucket, new_vm: NewVm, elsewhere: Callable[[], Position]
) -> None:
    """The verdict is SAFE.  Then the daemon is killed, and training is started again from step 20.

    The restarted daemon has no connection to that training: its verdict is PARTIAL.
    """
    vm = new_vm("vm", bucket.store, metadata=aws.metadata, constants=RECONNECT)
    safe_and_killed(vm, aws, in_s=6)
    state = rewound(vm, 20)
    train_late(vm)
    daemon = vm.start_daemon()
    expect(daemon.lines.wait(event="verdict"), "PARTIAL", state, elsewhere(), vm)
    expect_farewell(bucket, "PARTIAL")


@pytest.mark.fault("H01", "T09")
def test_a_resumed_evacuation_is_safe_again_by_a_commit_of_the_training_that_was_rewound(
    aws: Aws, bucket: Bucket, new_vm: NewVm, elsewhere: Callable[[], Position]
) -> None:
    """As before, but the training that was rewound connects: SAFE comes after its own commit."""
    vm = new_vm("vm", bucket.store, metadata=aws.metadata)
    safe_and_killed(vm, aws, in_s=30)
    rewound(vm, 20)
    trainer = train(vm, NEW, SWANSONG_RESTORE=str(vm.disk / "chosen"))
    state = trained(trainer)
    daemon = vm.start_daemon()
    verdict = daemon.lines.wait(event="verdict", verdict="SAFE")
    found = elsewhere()
    facts = f"{verdict['reason']}; {state} was trained, a restore returns {found}"
    assert state.is_kept_by(found), facts
    assert verdict["step"] <= found.step


@pytest.mark.fault("T17")
def test_a_start_that_has_not_reported_what_it_loaded_is_not_safe(
    aws: Aws, bucket: Bucket, new_vm: NewVm, elsewhere: Callable[[], Position]
) -> None:
    """The script calls attach(), loads step 20 without the guard, and needs long for its first step.

    Step 60 is the newest commit.  The position of the training is unknown: PARTIAL.
    """
    commit_elsewhere(bucket, new_vm, 20, 60)
    vm = new_vm("vm", bucket.store, metadata=aws.metadata)
    rewound(vm, 20)
    daemon = vm.start_daemon()
    load, never = str(vm.disk / "chosen"), str(vm.disk / "never")
    trainer = train(vm, NEW, "--load", load, "--train-when", never)
    trainer.lines.wait(event="ready")
    until(lambda: vm.status()["trainers"], what="the trainer in the status")
    state = witness(trainer, NEW)
    aws.notice(in_s=4)
    expect(daemon.lines.wait(event="verdict"), "PARTIAL", state, elsewhere(), vm)
    assert "SAFE" not in [farewell["verdict"] for farewell in bucket.farewells()]


@pytest.mark.fault("T17")
def test_a_start_that_has_restored_the_newest_commit_and_trained_no_step_is_safe(
    aws: Aws, bucket: Bucket, new_vm: NewVm, elsewhere: Callable[[], Position]
) -> None:
    """The script needs long for its first step after guard.restore(): nothing is lost, so it is SAFE."""
    commit_elsewhere(bucket, new_vm, 20, 60)
    vm = new_vm("vm", bucket.store, metadata=aws.metadata)
    daemon = vm.start_daemon()
    trainer = train(vm, NEW, "--train-when", str(vm.disk / "never"))
    trainer.lines.wait(event="ready")
    state = witness(trainer, NEW)
    aws.notice(in_s=4)
    verdict = daemon.lines.wait(event="verdict")
    found = elsewhere()
    assert state.is_kept_by(found)
    assert (verdict["verdict"], verdict["step"]) == ("SAFE", found.step), verdict["reason"]


def commit_elsewhere(bucket: Bucket, new_vm: NewVm, *steps: int) -> None:
    """Another VM commits these steps of the old training, and is terminated."""
    vm = new_vm("before", bucket.store)
    daemon = vm.start_daemon()
    train(vm, OLD, "--save-at", ",".join(map(str, steps)))
    for step in steps:
        daemon.lines.wait(event="committed", step=step)
    vm.power_off()


def safe_and_killed(vm: Vm, aws: Aws, *, in_s: float) -> None:
    """Train beyond step 20, which is committed, to a SAFE verdict; then kill the daemon and the trainer."""
    daemon = vm.start_daemon()
    trainer = train(vm, OLD, "--save-at", "20")
    daemon.lines.wait(event="committed", step=20)
    trainer.lines.wait(step=60)
    aws.notice(in_s=in_s)
    assert daemon.lines.wait(event="verdict")["verdict"] == "SAFE"
    daemon.kill()
    trainer.kill()


def rewound(vm: Vm, step: int) -> Witness:
    """Restore an older step of the old training to ``chosen``, for a training that starts from it."""
    return Witness(restored(vm, vm.disk / "chosen", "--step", str(step)), is_as_loaded=True)


def train_late(vm: Vm) -> Process:
    """Start the new training from ``chosen``, on a machine that never reaches its attach()."""
    chosen, never = str(vm.disk / "chosen"), str(vm.disk / "never")
    trainer = train(vm, NEW, "--attach-when", never, SWANSONG_RESTORE=chosen)
    trainer.lines.wait(event="started")
    return trainer
