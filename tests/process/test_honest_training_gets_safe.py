# SPDX-License-Identifier: Apache-2.0
"""Training that can be saved in time gets SAFE, whatever happened to it before the notice.

The oracle is the trainer: its state names the step and the training that made it, and it prints both.  So
SAFE is checked against what the next VM would resume from, and against what was trained.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from testkit import TRAINERS
from testkit.clouds import Aws, Bucket
from testkit.fake_nvml import FakeNvml
from testkit.rig import Process, Vm
from testkit.waiting import until
from tests.process.conftest import NewVm

HONEST = str(TRAINERS / "honest.py")
RANKS = 4
RECONNECT = {"swansongd.core.arrival.RECONNECT_S": 2.0}
"""The daemon expects its trainers back within this time of its start; without this constant within 10 s."""
not_under_systemd = pytest.mark.skipif(
    Path("/run/systemd/system").is_dir(),
    reason="does not apply: under systemd the daemon distinguishes a stop from a shutdown",
)


def train(vm: Vm, *arguments: str, **env: str) -> Process:
    """Start a trainer with the hooks."""
    command = [sys.executable, "-u", HONEST, *arguments]
    return vm.spawn(command, lines_on="stdout", SWANSONG_SOCKET=str(vm.socket), **env)


def train_ranks(vm: Vm) -> list[Process]:
    """Start a trainer of four ranks on one VM, which are never more than a step apart."""
    abreast = vm.disk / "abreast"
    abreast.mkdir()

    def start(rank: int) -> Process:
        return train(
            vm,
            *("--every-steps", "20", "--abreast", str(abreast)),
            **{name: str(rank) for name in ("RANK", "LOCAL_RANK")},
            **{name: str(RANKS) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")},
        )

    return [start(rank) for rank in range(RANKS)]


def restored(bucket: Bucket, new_vm: NewVm) -> list[dict[str, Any]]:
    """The states, rank by rank, that the next VM resumes from."""
    vm = new_vm("next", bucket.store)
    place = vm.disk / "restored"
    answer = vm.swansong("restore", "--to", str(place))
    assert answer.returncode == 0, answer.stderr
    return [json.loads(path.read_text()) for path in sorted(place.glob("rank-*/state.json"))]


def trained(trainer: Process) -> list[dict[str, Any]]:
    """All steps that the trainer has completed, with the line of each."""
    return [line for line in trainer.lines.all() if "step" in line and "event" not in line]


def verdicts(daemon: Process) -> list[dict[str, Any]]:
    """All verdicts of this process of the daemon."""
    return daemon.lines.all(event="verdict")


def safe(daemon: Process, *, after: int = 0, timeout_s: float = 60.0) -> dict[str, Any]:
    """The first verdict after this number of verdicts, which must be SAFE."""
    until(lambda: len(verdicts(daemon)) > after, timeout_s=timeout_s, what="a verdict")
    verdict = verdicts(daemon)[after]
    assert verdict["verdict"] == "SAFE", json.dumps(verdict)
    return verdict


def has_passed(seconds: float, since_mono_s: float) -> None:
    """Wait until this long after an instant."""
    until(lambda: time.monotonic() >= since_mono_s + seconds, timeout_s=seconds + 30)


# ---------------------------------------------------------------- ranks that answer late


@pytest.mark.fault("T04")
def test_a_rank_that_hangs_for_a_while_is_asked_again(
    aws: Aws, bucket: Bucket, new_vm: NewVm
) -> None:
    """One of four ranks stands still for the first 8 s of 120: the checkpoint is requested again at once."""
    vm = new_vm("vm", bucket.store, metadata=aws.metadata)
    daemon = vm.start_daemon()
    ranks = train_ranks(vm)
    daemon.lines.wait(event="committed", step=20)
    ranks[2].kill(signal.SIGSTOP)
    noticed_mono_s = time.monotonic()
    aws.notice(in_s=120)
    has_passed(8, since_mono_s=noticed_mono_s)
    before = trained(ranks[2])[-1]["step"]
    ranks[2].kill(signal.SIGCONT)
    is_safe_with_all_ranks(safe(daemon), bucket, new_vm, ranks, after=before)


@pytest.mark.fault("T09", "T12", "H01")
def test_a_rank_that_reconnects_late_is_asked_again(
    aws: Aws, bucket: Bucket, new_vm: NewVm
) -> None:
    """The daemon was killed, and one of four ranks reconnects too late after the notice of 120 s."""
    vm = new_vm("vm", bucket.store, metadata=aws.metadata, constants=RECONNECT)
    daemon = vm.start_daemon()
    ranks = train_ranks(vm)
    daemon.lines.wait(event="committed", step=20)
    ranks[2].kill(signal.SIGSTOP)
    daemon.kill()
    daemon = vm.start_daemon()
    noticed_mono_s = time.monotonic()
    aws.notice(in_s=120)
    has_passed(4, since_mono_s=noticed_mono_s)
    before = trained(ranks[2])[-1]["step"]
    ranks[2].kill(signal.SIGCONT)
    is_safe_with_all_ranks(safe(daemon), bucket, new_vm, ranks, after=before)


def is_safe_with_all_ranks(
    verdict: dict[str, Any], bucket: Bucket, new_vm: NewVm, ranks: list[Process], *, after: int
) -> None:
    """The verdict came long before the deadline, and its set has the later state of each rank."""
    assert verdict["slack_s"] > 75, "the next request came much later"
    states = restored(bucket, new_vm)
    (newest,) = {state["step"] for state in states}  # training continued, so it may be a later step
    assert len(states) == RANKS
    assert newest >= verdict["step"] >= after
    for state, rank in zip(states, ranks, strict=True):
        assert state in trained(rank)


# ---------------------------------------------------------------- a process without hooks


@pytest.mark.fault("T12")
@pytest.mark.parametrize("overwrites", [False, True])
def test_a_process_without_hooks_that_starts_from_an_older_state(
    aws: Aws, bucket: Bucket, new_vm: NewVm, tmp_path: Path, *, overwrites: bool
) -> None:
    """It wrote step 100 before, and starts again from step 20, perhaps writing ``checkpoint-40`` again.

    The set that answers the signal is SAFE, and the next VM resumes from that set, not from step 100.
    """
    pid_file = tmp_path / "vm" / "trainer.pid"
    settings = {"trainer": {"signal": "SIGUSR1", "pid_file": str(pid_file), "settle_s": 0.3}}
    vm = new_vm("vm", bucket.store, metadata=aws.metadata, settings=settings)
    daemon = vm.start_daemon()
    first = start_signalled(vm, pid_file, "--every-steps", "20", "--step-delay-s", "0.02")
    daemon.lines.wait(event="committed", step=100)
    first.kill()
    older = ("--resume", str(vm.run_directory / "checkpoint-20"))
    every = ("--every-steps", "20") if overwrites else ()
    second = start_signalled(vm, pid_file, *older, *every, "--step-delay-s", "0.1")
    second.lines.wait(step=43 if overwrites else 23)
    aws.notice(in_s=60)
    verdict = safe(daemon)
    step = verdict["step"]
    assert 20 < step < 100, "the test is too slow: the second start has caught up"
    assert step in [line["step"] for line in trained(second)]
    elsewhere = new_vm("next", bucket.store)
    place = elsewhere.disk / "restored"
    done = elsewhere.swansong("restore", "--to", str(place), "--json")
    assert done.returncode == 0, done.stderr
    newest = json.loads(done.stdout)["step"]  # training continued
    assert step <= newest < 100
    second.kill()
    for path in (vm.run_directory / f"checkpoint-{newest}").iterdir():
        assert (place / path.name).read_bytes() == path.read_bytes()


def start_signalled(vm: Vm, pid_file: Path, *arguments: str) -> Process:
    """Start a trainer without hooks, which saves on a signal."""
    return vm.start_trainer(
        *("--checkpoints", str(vm.run_directory), "--pid-file", str(pid_file)),
        *("--steps", "100000", "--file-delay-s", "0.02", *arguments),
        script="usr1_trainer.py",
    )


# ---------------------------------------------------------------- a start after a failed GPU


@pytest.mark.fault("X01")
def test_training_that_was_restarted_without_the_failed_gpu_is_asked(
    nvml: FakeNvml, aws: Aws, bucket: Bucket, new_vm: NewVm
) -> None:
    """A new start uses the other GPU, so it is not suspect: a notice asks it at once, and it gets SAFE."""
    vm = new_vm("vm", bucket.store, metadata=aws.metadata)
    daemon = vm.start_daemon(ready=True, **nvml.environment)
    first = train(vm, "--every-steps", "20")
    daemon.lines.wait(event="committed")
    until(lambda: len(vm.status()["gpus"]) == 2, what="two GPUs in the status")
    nvml.xid(79, gpu=1)
    daemon.lines.wait(event="verdict")
    first.kill()
    second = train(vm)
    line = second.lines.wait(event="resumed")["line"]
    until(lambda: len(trained(second)) > 20, what="steps of the new start")
    known, step = len(daemon.lines.all(event="verdict")), trained(second)[-1]["step"]
    aws.notice(in_s=60)
    verdict = safe(daemon, after=known, timeout_s=20)
    assert verdict["step"] >= step
    assert verdict["slack_s"] > 45
    (state,) = restored(bucket, new_vm)
    assert state == {"step": verdict["step"], "line": line}
    assert state in trained(second)


# ---------------------------------------------------------------- many starts


@pytest.mark.fault("T12")
def test_an_evacuation_does_not_wait_for_the_limit_of_claims(
    aws: Aws, bucket: Bucket, new_vm: NewVm
) -> None:
    """Six rollbacks within seconds, then a notice of 30 s: the last line of training is SAFE in time."""
    vm = new_vm("vm", bucket.store, metadata=aws.metadata)
    daemon = vm.start_daemon()
    trainer = train(vm, "--every-steps", "5", "--step-delay-s", "0.05", "--rollbacks", "6")
    last = trainer.lines.wait(event="rolled_back", number=6)
    until(lambda: trained(trainer)[-1]["line"] == last["line"], what="a step of the last line")
    aws.notice(in_s=30)
    verdict = safe(daemon)
    assert verdict["slack_s"] > 10
    (state,) = restored(bucket, new_vm)
    assert state["line"] == last["line"], "the next VM resumes from a line that was left"
    assert state["step"] >= verdict["step"]
    assert state in trained(trainer)


# ---------------------------------------------------------------- a finished run


FINISHES = ("--steps", "30", "--every-steps", "10", "--at-end", "finish")


@pytest.mark.fault("T18")
@pytest.mark.parametrize("at_end", ["exit", "sit"])
def test_a_finished_run_that_is_started_by_mistake_stays_safe(
    aws: Aws, bucket: Bucket, new_vm: NewVm, at_end: str
) -> None:
    """The second start restores the end and trains nothing: SAFE at once, whether its process ends or not."""
    vm = new_vm("vm", bucket.store, metadata=aws.metadata)
    daemon = vm.start_daemon()
    first = train(vm, *FINISHES)
    assert first.wait() == 0
    assert first.lines.wait(event="finished")["committed"] is True
    again = train(vm, "--steps", "30", "--at-end", at_end)
    assert again.lines.wait(event="resumed")["finished"] is True
    again.lines.wait(event="ended")
    if at_end == "exit":
        assert again.wait() == 0
    aws.notice(in_s=20)
    verdict = safe(daemon)
    assert verdict["step"] == 30
    assert verdict["slack_s"] > 10
    (state,) = restored(bucket, new_vm)
    assert state == trained(first)[-1]


@not_under_systemd
@pytest.mark.fault("T18", "H02", "H03")
@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_a_shutdown_soon_after_an_upgrade_of_the_daemon_finds_a_finished_run_safe(
    bucket: Bucket, new_vm: NewVm, how: str
) -> None:
    """The run has finished, and the daemon is restarted: a shutdown in its first seconds is SAFE."""
    vm = new_vm("vm", bucket.store)
    daemon = vm.start_daemon()
    trainer = train(vm, *FINISHES)
    assert trainer.wait() == 0
    daemon.kill(signal.SIGINT if how == "stopped" else signal.SIGKILL)
    daemon.wait()
    daemon = vm.start_daemon()
    daemon.lines.wait(event="health", source="store", health="ok")
    daemon.kill(signal.SIGTERM)
    assert daemon.wait(40) == 0
    verdict = safe(daemon)
    assert verdict["step"] == 30
    assert {farewell["verdict"] for farewell in bucket.farewells()} == {"SAFE"}
    (state,) = restored(bucket, new_vm)
    assert state == trained(trainer)[-1]


# ---------------------------------------------------------------- the end of the host


@not_under_systemd
@pytest.mark.fault("H03", "O03")
def test_after_safe_a_shutdown_waits_for_no_set_that_cannot_fit(
    aws: Aws, bucket: Bucket, new_vm: NewVm
) -> None:
    """SAFE was reported, and the next periodic set needs twice the grace period: the daemon exits at once.

    The daemon has measured the rate of the store by then.
    """
    bucket.order("pace", total_bytes_per_s=1_000_000)
    vm = new_vm("vm", bucket.store, metadata=aws.metadata)
    daemon = vm.start_daemon()
    small = train(vm)
    until(lambda: len(trained(small)) > 3, what="steps")
    aws.notice(in_s=120)
    stood = safe(daemon)
    small.kill()
    large = train(vm, "--every-steps", "10", "--padding-bytes", "75000000")
    large.lines.wait(event="resumed", from_step=stood["step"])
    until(lambda: daemon.lines.all(event="sealed_set_found")[-1]["step"] > stood["step"])
    large.kill()
    until(lambda: vm.status()["bandwidth_bytes_per_s"], what="a measured bandwidth")
    ended_mono_s = time.monotonic()
    daemon.kill(signal.SIGTERM)
    assert daemon.wait(40) == 0
    took_s = time.monotonic() - ended_mono_s
    assert {verdict["verdict"] for verdict in verdicts(daemon)} == {"SAFE"}
    assert took_s < 5, f"the daemon waited {took_s:.1f} s for a set that cannot fit"


# ---------------------------------------------------------------- restarts of the daemon


@pytest.mark.fault("T12", "H02")
def test_a_new_start_that_reconnects_late_is_safe_by_its_own_commit_only(
    aws: Aws, bucket: Bucket, new_vm: NewVm, tmp_path: Path
) -> None:
    """A start from step 20, behind the commit of step 60, reconnects too late after the daemon was restarted.

    Until then no verdict is SAFE: the commits are of the line that was left.  Then its own checkpoint is.
    """
    vm = new_vm("vm", bucket.store, metadata=aws.metadata, constants=RECONNECT)
    daemon = vm.start_daemon()
    first = train(vm, "--every-steps", "20", "--steps", "60")
    assert first.wait() == 0
    daemon.lines.wait(event="committed", step=60)
    chosen = tmp_path / "chosen"
    assert vm.swansong("restore", "--step", "20", "--to", str(chosen)).returncode == 0
    bucket.order("answer", status=503, method="PUT", match="/data/", times=1_000_000)
    second = train(vm, "--step-delay-s", "0.1", SWANSONG_RESTORE=str(chosen))
    until(lambda: len(trained(second)) > 5, what="steps of the second start")
    second.kill(signal.SIGSTOP)
    daemon.kill(signal.SIGINT)
    assert daemon.wait() == 0
    stood_at = trained(second)[-1]
    bucket.order("clear")
    daemon = vm.start_daemon()
    aws.notice(in_s=60)
    has_passed(4, since_mono_s=time.monotonic())
    assert not [line for line in verdicts(daemon) if line["verdict"] == "SAFE"]
    second.kill(signal.SIGCONT)
    verdict = daemon.lines.wait(event="verdict", verdict="SAFE", timeout_s=20)
    (state,) = restored(bucket, new_vm)
    assert state == {"step": verdict["step"], "line": stood_at["line"]}
    assert state in trained(second)
    assert state["step"] >= stood_at["step"]


@pytest.mark.fault("H01", "T19")
@pytest.mark.parametrize(
    ("further", "follow_ups"),
    [("none", False), ("refused by the store", False), ("committed", True)],
)
def test_safe_is_not_lowered_by_a_restart_while_training_continues(
    aws: Aws, bucket: Bucket, new_vm: NewVm, further: str, follow_ups: bool
) -> None:
    """The daemon is killed after SAFE: log and status stay at SAFE, or return to it.

    That is so without further checkpoints, with them, and if the store refuses their data.
    """
    vm, trainer, daemon, before = restarted_after_safe(
        aws, bucket, new_vm, follow_ups=follow_ups, further=further
    )
    until(lambda: shown_verdict(vm), timeout_s=40, what="a verdict in the status")
    trainer.lines.wait(step=trained(trainer)[-1]["step"] + 20)
    assert shown_verdict(vm) == "SAFE"
    assert {verdict["verdict"] for verdict in verdicts(daemon)} <= {"SAFE"}
    bucket.order("clear")
    (state,) = restored(bucket, new_vm)
    assert state in trained(trainer)
    assert state["step"] >= before["step"]


def restarted_after_safe(
    aws: Aws,
    bucket: Bucket,
    new_vm: NewVm,
    *,
    follow_ups: bool = False,
    further: str,
) -> tuple[Vm, Process, Process, dict[str, Any]]:
    """A VM whose trainer made 25 steps after SAFE, and whose daemon was killed then and started again.

    Returns the VM, its trainer, its new daemon, and the verdict before, with its ``mono_s``.
    """
    vm = new_vm("vm", bucket.store, metadata=aws.metadata, follow_ups=follow_ups)
    daemon = vm.start_daemon()
    every_steps = "1000000000" if further == "none" else "10"
    trainer = train(vm, "--every-steps", every_steps, "--step-delay-s", "0.05")
    until(lambda: len(trained(trainer)) > 15, what="steps")
    aws.notice(in_s=15)
    before = {**safe(daemon), "mono_s": time.monotonic()}
    if further == "refused by the store":
        bucket.order("answer", status=503, method="PUT", match="/data/", times=1_000_000)
    trainer.lines.wait(step=before["step"] + 25)
    daemon.kill()
    daemon = vm.start_daemon()
    daemon.lines.wait(event="evacuation", phase="notice")
    return vm, trainer, daemon, before


def shown_verdict(vm: Vm) -> str:
    """The verdict in the status, which is never lower than SAFE; empty while there is none."""
    report = vm.status()
    assert report["verdict"] in (None, "SAFE"), report["verdict"]
    return report["verdict"] or ""
