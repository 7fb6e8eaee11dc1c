# SPDX-License-Identifier: Apache-2.0
"""``swansong run``: real daemons and trainers, started, restarted and ended by one command."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import swansong
from swansong_bucket.errors import Unreachable
from swansong_bucket.model import Verdict
from swansong_tools.commands import main, run
from swansong_tools.commands.daemon_client import DaemonClient
from swansong_tools.commands.notify import EXIT_BY_VERDICT
from swansong_tools.commands.run_supervisor import EXIT_SAVED
from swansongd.observe.status import DaemonStatus

from testkit.clouds import Aws, Bucket
from testkit.rig import BIN, CREDENTIALS, WITH_CONSTANTS, Process
from testkit.waiting import is_running, until

TRAINER = """
import json, os, signal, subprocess, sys, threading
import swansong
if "ranks" in sys.argv:
    rank = 0 if os.fork() else 1
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    signal.signal(signal.SIGINT, lambda *_: os.write(1, b"signalled\\n"))
step = 0
def save(directory):
    (directory / "step").write_text(str(step))
def load(directory):
    global step
    step = int((directory / "step").read_text())
print(json.dumps({"pids": [os.getpid(), subprocess.Popen(["sleep", "600"], start_new_session=True).pid]}))
sys.stdout.flush()
if "imports" in sys.argv:
    signal.pause()
guard = swansong.attach(save=save, load=load, stop_after_save="stop" in sys.argv)
resumed = {"resumed": guard.restore(), "hash_seed": os.environ.get("PYTHONHASHSEED")}
print(json.dumps(resumed), flush=True)
if "fail" in sys.argv:
    sys.exit(3)
pause = threading.Event()
while not guard.should_stop:
    pause.wait(0.01)
    step += 1
    guard.step(step)
    if step % 10 == 0:
        print(json.dumps({"step": step}), flush=True)
guard.close()
sys.exit(1 if "torchrun" in sys.argv else swansong.EXIT_SAVED)
"""
"""Starts a process in a session of its own, as torchrun starts its workers."""

SOON = {
    "swansong_tools.commands.run_supervisor._HANG_LIMIT_S": 1.0,
    "swansong_tools.commands.daemon_client.TIMEOUT_S": 1.0,
}
"""Limits for a daemon that hangs."""
SELDOM = {"swansong_tools.commands.run_supervisor._LOOK_S": 600.0}
"""Time between two looks at the status while the trainer trains."""


REFUSED = """
import sys
from swansong_bucket.errors import Unreachable
from swansong_tools.commands import main, run_supervisor
def tell(*_):
    raise Unreachable("only root and the daemon's own user may send notices")
run_supervisor.Supervisor._tell = tell
sys.exit(main.main())
"""
"""The command of a user whose notices the daemon refuses."""


def with_constants(constants: dict[str, float]) -> tuple[str, ...]:
    """The program with other values of these constants."""
    return (sys.executable, str(WITH_CONSTANTS), json.dumps(constants), str(BIN / "swansong"))


class Command:
    """``swansong run`` with the trainer above, and all that it prints."""

    def __init__(
        self,
        state: Path,
        warm: str,
        *words: str,
        options: tuple[str, ...] = ("run", "--run", "r"),
        program: tuple[str, ...] = (str(BIN / "swansong"),),
    ) -> None:
        self.socket = state / "swansong" / "r" / "trainer.sock"
        self.process = Process(
            [*program, *options, "--", sys.executable, "-c", TRAINER, *words],
            lines_on="both",
            warm=warm,
            XDG_STATE_HOME=str(state),
            **CREDENTIALS,
        )
        self.lines = self.process.lines

    def status(self) -> DaemonStatus | None:
        with suppress(Unreachable), DaemonClient(self.socket) as daemon:
            return daemon.status()
        return None

    def training(self) -> list[int]:
        """All processes of the command, once it trains with a daemon: itself last."""
        self.lines.wait(step=10)
        status = until(self.status, what="the daemon")
        assert status is not None
        pids: list[int] = self.lines.all()[0]["pids"]
        supervisor = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [*pids, status.pid, int(supervisor), self.process.pid]

    def said(self, pattern: str) -> re.Match[str]:
        found = until(lambda: re.search(pattern, "\n".join(self.lines.raw)), what=pattern)
        assert found is not None
        return found


Start = Callable[..., Command]


@pytest.fixture
def start(tmp_path: Path, warm_python: str) -> Iterator[Start]:
    started: list[Command] = []

    def make(*words: str, **options: Any) -> Command:
        started.append(Command(tmp_path / "state", warm_python, *words, **options))
        return started[-1]

    yield make
    for command in started:
        command.process.kill()


@pytest.mark.fault("OE03")
def test_a_notice_ends_safe_and_the_next_start_resumes(
    aws: Aws, bucket: Bucket, new_vm: Any, start: Start
) -> None:
    """The verdict is printed, the exit code is 75, and the same command line resumes from that step.

    torchrun shows the exit code 75 of its ranks as 1, also if no restart is left.  All starts hash strings
    alike.
    """
    assert EXIT_SAVED == swansong.EXIT_SAVED
    vm = new_vm("vm", bucket.store, metadata=aws.metadata)
    options = ("--config", str(vm.config), "run", "--restarts", "0")
    first = start("stop", "torchrun", options=options)
    first.lines.wait(step=10)
    aws.notice(in_s=30)
    assert first.process.wait() == EXIT_SAVED
    first.said(r"notice from aws\.spot: \S+, [0-9.]+ s left")
    step = int(first.said(r"SAFE: generation 1 step (\d+) is committed")[1])
    assert [manifest["step"] for manifest in bucket.manifests()] == [step]
    aws.withdraw()
    second = start("stop", options=options)
    second.lines.wait(resumed=step, hash_seed="0")
    aws.notice(in_s=30)
    assert second.process.wait() == EXIT_SAVED


def test_ctrl_c_saves_and_a_failed_daemon_is_started_again(start: Start) -> None:
    """SAFE also after a hang of the daemon, which is killed, and nothing is left.

    A second start is refused meanwhile.
    """
    command = start(program=with_constants(SOON))
    *_, daemon, _, pid = pids = command.training()
    os.kill(daemon, signal.SIGSTOP)
    restarted = until(
        lambda: (
            (status := command.status())
            and status.pid != daemon
            and bool(status.trainers)
            and status
        ),
        what="the restarted daemon, with the trainer",
    )
    second = start()
    assert second.process.wait() == 15
    second.said(f"process {pid} already runs it")
    command.process.kill(signal.SIGINT)
    assert command.process.wait() == EXIT_SAVED
    command.said("the daemon was ended by SIGKILL; starting it again")
    step = int(command.said(r"SAFE: generation \d+ step (\d+) is committed")[1])
    assert step >= 10
    assert not any(map(is_running, [*pids, restarted.pid]))
    start().lines.wait(resumed=step)


def test_a_longer_grace_period_is_that_of_the_notice(start: Start) -> None:
    """The daemon that the command starts plans with it.  The command looks for the verdict more often."""
    command = start(
        options=("run", "--run", "r", "--grace", "100s"), program=with_constants(SELDOM)
    )
    command.training()
    command.process.kill(signal.SIGTERM)
    assert command.process.wait() == EXIT_SAVED
    log = (command.socket.parent / "swansongd.log").read_text()
    (left_s,) = re.findall(r"evacuation .*phase=notice.* seconds_left=([0-9.]+)", log)
    assert 90 < float(left_s) <= 100


@pytest.mark.fault("OE08")
def test_sigterm_before_the_trainer_has_connected_ends_it_without_a_verdict(start: Start) -> None:
    """The exit code names the signal, because no checkpoint was requested."""
    command = start("imports")
    (pid, *_) = until(command.lines.all, what="the trainer")[0]["pids"]
    command.process.kill(signal.SIGTERM)
    assert command.process.wait() == 128 + signal.SIGTERM
    command.said(
        "SIGTERM: the trainer is not connected to the daemon, and ends without a checkpoint"
    )
    assert not is_running(pid)


@pytest.mark.fault("OE11")
@pytest.mark.parametrize("words", [(), ("stop",)])
def test_a_trainer_that_ends_at_sigterm_first_gets_a_verdict(
    start: Start, words: tuple[str, ...]
) -> None:
    """A scheduler signals all processes at once, and the trainer may have saved before the command acts."""
    module = "swansong_tools.commands.run_supervisor"
    constants = {f"{module}._RESTART_S": 60.0, f"{module}._LOOK_S": 0.0}
    command = start(*words, program=with_constants(constants))
    trainer, *_ = command.training()
    command.lines.wait(step=100)  # the command has seen the trainer's connection
    os.kill(trainer, signal.SIGTERM)
    until(lambda: not is_running(trainer), what="the end of the trainer")
    command.process.kill(signal.SIGTERM)
    assert command.process.wait() == EXIT_SAVED
    command.said("SAFE: generation 1 step")


def test_without_the_right_to_send_a_notice_the_trainer_saves_by_itself(
    bucket: Bucket, new_vm: Any, start: Start
) -> None:
    """After Ctrl-C, too: it gets SIGTERM, and the next start resumes from its last checkpoint."""
    vm = new_vm("vm", bucket.store)
    daemon = vm.start_daemon()
    options = ("--config", str(vm.config), "run")
    command = start(options=options, program=(sys.executable, "-c", REFUSED))
    command.lines.wait(step=10)
    until(lambda: vm.status()["trainers"], what="the trainer")
    command.process.kill(signal.SIGINT)
    assert command.process.wait() == 128 + signal.SIGTERM
    command.said("the trainer saves a checkpoint, and there is no verdict")
    step = daemon.lines.wait(event="committed")["step"]
    start(options=options).lines.wait(resumed=step)


@pytest.mark.fault("OE08")
def test_a_trainer_that_does_not_answer_ends_with_the_grace_period(start: Start) -> None:
    """The verdict and the exit code are LOST, and no process is left for the scheduler to kill."""
    constants = {"swansong_tools.commands.run_supervisor._STOP_LIMIT_S": 1.0}
    command = start(
        options=("run", "--run", "r", "--grace", "5s"), program=with_constants(constants)
    )
    pids = command.training()
    os.kill(pids[0], signal.SIGSTOP)
    command.process.kill(signal.SIGTERM)
    assert command.process.wait() == EXIT_BY_VERDICT[Verdict.LOST]
    command.said("LOST: ")
    assert not any(map(is_running, pids))


def test_several_ranks_get_no_signal_after_safe(start: Start) -> None:
    """A signal would make each of them save without the others, and the next start resume from that."""
    command = start("ranks")
    command.training()
    command.process.kill(signal.SIGINT)
    assert command.process.wait() == EXIT_SAVED
    step = int(command.said(r"SAFE: generation 1 step (\d+) is committed")[1])
    assert "signalled" not in command.lines.raw
    start("ranks").lines.wait(resumed=step)


@pytest.mark.parametrize("killed", ["command", "supervisor", "ctrl-c twice"])
def test_a_killed_command_leaves_no_process(start: Start, killed: str) -> None:
    """Neither trainer nor daemon, nor a process that the trainer has started in its own session."""
    command = start()
    pids = command.training()
    if killed == "ctrl-c twice":
        os.kill(pids[0], signal.SIGSTOP)  # no verdict
        command.process.kill(signal.SIGINT)
        command.said("saving a checkpoint")
        command.process.kill(signal.SIGINT)
        assert command.process.wait() == 130
    else:
        os.kill(pids[-1 if killed == "command" else -2], signal.SIGKILL)
        command.process.wait()
    until(lambda: not any(map(is_running, pids)), what="the end of all processes")


def test_a_failed_trainer_is_restarted_and_its_exit_code_returned(start: Start) -> None:
    """As often as --restarts allows without a commit between the failures."""
    command = start("fail", options=("run", "--run", "r", "--restarts", "1"))

    def pids() -> list[list[int]]:
        return [line["pids"] for line in command.lines.all() if "pids" in line]

    until(lambda: len(pids()) == 2, what="the restart")
    assert not any(map(is_running, pids()[0]))  # what the first start had started, too
    assert command.process.wait() == 3
    assert len(command.lines.all(resumed=0)) == 2
    assert not any(map(is_running, pids()[1]))


def test_a_daemon_that_runs_already_serves_the_trainer(
    bucket: Bucket, new_vm: Any, start: Start, tmp_path: Path
) -> None:
    """No second daemon is started; the first one saves at SIGTERM, and lives on."""
    vm = new_vm("vm", bucket.store)
    daemon = vm.start_daemon()
    command = start(options=("--config", str(vm.config), "run"))
    command.lines.wait(step=10)
    until(lambda: vm.status()["trainers"], what="the trainer")
    command.process.kill(signal.SIGTERM)
    assert command.process.wait() == EXIT_SAVED
    command.said("SAFE: generation 1 step")
    assert vm.status()["pid"] == daemon.pid
    assert vm.status()["notices"] == []
    assert not list(tmp_path.rglob("swansongd.log"))


def test_a_configuration_has_the_grace_period(
    bucket: Bucket, new_vm: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its daemon may run already, so the option would change nothing."""
    config = new_vm("vm", bucket.store).config
    assert main.main(["--config", str(config), "run", "--grace", "100s", "--", "false"]) == 2
    assert f"remove it, and set deadline.sigterm_grace_s in {config}" in capsys.readouterr().err


def test_the_daemon_of_the_system_is_required(
    bucket: Bucket, new_vm: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trainer of another daemon would start from scratch, so that needs a store on the command line."""
    vm = new_vm("vm", bucket.store)
    monkeypatch.setattr(run, "DEFAULT_PATH", vm.config)
    monkeypatch.setenv("XDG_STATE_HOME", str(vm.disk / "state"))
    assert main.main(["--config", str(vm.config), "run", "--", "false"]) == 13
    assert "or name a store with --store" in capsys.readouterr().err


def test_a_daemon_that_cannot_start_names_the_fix(start: Start) -> None:
    """The command names its error; no directory is created in place of a disk that is missing."""
    command = start(options=("run", "--run", "r", "--staging", "/nonexistent"))
    assert command.process.wait() == 15
    command.said("create or mount it")


@pytest.mark.parametrize(
    ("words", "state", "code", "said"),
    [
        (["--store", "s4://x"], "good", 2, "does not start with s3://"),
        (["--store", "s3://bucket/x"], "good", 2, "--run: is missing"),
        (["--run", "r", "--grace", "soon"], "good", 2, "is not a duration"),
        (["--run", "r", "--grace", "1s"], "good", 2, "leaves no time of deadline.sigterm_grace_s"),
        (["--run", "r"], "open", 15, "chmod 700"),
        (["--run", "r"], "link", 15, "Set XDG_STATE_HOME to a directory of this user"),
    ],
)
def test_a_command_that_cannot_start_names_the_fix(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    words: list[str],
    state: str,
    code: int,
    said: str,
) -> None:
    """A wrong value, a store without a run, and a private directory that is not private."""
    base = tmp_path / "state"
    base.mkdir()
    if state == "open":
        (base / "swansong").mkdir(mode=0o755)
    elif state == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        (base / "swansong").symlink_to(tmp_path / "elsewhere")
    monkeypatch.setenv("XDG_STATE_HOME", str(base))
    try:
        found = main.main(["run", *words, "--", "false"])
    except SystemExit as usage:
        found = int(usage.code or 0)
    assert found == code
    assert said in capsys.readouterr().err
