# SPDX-License-Identifier: Apache-2.0
"""The report of ``check_resume``: in any order of output, answer and exit code, and of a mismatch."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from swansong import _stand_in as stand_in
from swansong import protocol, testing
from swansong._checkpoint.first_check import check_command
from swansong.testing import ResumeMismatchError, TrainerFailedError, check_resume

from testkit.fake_daemon import FakeDaemon
from testkit.python_process import ENVIRONMENT, run_python
from testkit.training_parts import Attach
from testkit.waiting import until

STEPS, KILL_AT = 6, 3

TRAINER = """
import json, sys
import swansong

total = {"total": 0}

def save(directory):
    if sys.argv[1] == "broken" or sys.argv[1] == "falters" and total["total"] == 1:
        raise RuntimeError("no save today")
    (directory / "total").write_text(json.dumps(total))

def load(directory):
    total.update(json.loads((directory / "total").read_text()))

guard = swansong.attach(save=save, load=load, stop_after_save=True)
for step in range(guard.restore() + 1, 1000):
    total["total"] += step
    print(json.dumps({"step": step, "loss": total["total"]}), flush=True)
    guard.step(step)
    if sys.argv[1] == "polls":
        guard.poll()
    if sys.argv[1] == "falters" and step == 1:
        assert not guard.save(1)
    if sys.argv[1] == "leaves" and guard.should_stop or sys.argv[1] == "broken" and step == 900:
        guard.close()
        sys.exit(75)
"""
# Starts the trainer as torchrun does, in a new session, and another process that holds the pipe open.
LAUNCHER = """
import subprocess, sys
holder = subprocess.Popen(
    [sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True
)
with open(sys.argv[1], "a") as file:
    print(holder.pid, file=file)
trainer = subprocess.Popen([sys.executable, *sys.argv[2:]], start_new_session=True)
sys.exit(trainer.wait())
"""


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Function that names a method that comes after all others, once the trainer steps."""

    held_events: list[selectors.SelectorKey] = []

    def held(name: str) -> None:
        class Selector(selectors.DefaultSelector):
            def select(
                self, timeout: float | None = None
            ) -> list[tuple[selectors.SelectorKey, int]]:
                later = [key for key in self.get_map().values() if timeout and is_held(key)]
                held_events.extend(later)
                for key in later:
                    self.unregister(key.fileobj)
                try:
                    return super().select(timeout)
                finally:
                    for key in later:
                        self.register(key.fileobj, key.events, key.data)

        def is_held(key: selectors.SelectorKey) -> bool:
            method = getattr(key.data, "func", key.data)
            has_begun = name == "_read_lines" or method.__self__._unfinished_lines
            return method.__name__ == name and has_begun

        monkeypatch.setattr(stand_in.selectors, "DefaultSelector", Selector)

    yield held
    assert held_events, "no event was held"


@pytest.fixture
def holders(tmp_path: Path) -> Iterator[Path]:
    """A file of process ids; those processes are killed after the test."""
    path = tmp_path / "holders"
    path.touch()
    yield path
    for line in path.read_text().splitlines():
        os.kill(int(line), signal.SIGKILL)


def check(
    directory: Path, *command: str, kill_at: Sequence[int] = (KILL_AT,), **options: Any
) -> testing.ResumeReport:
    return check_resume(
        [sys.executable, "-c", *command],
        steps=STEPS,
        kill_at=kill_at,
        directory=directory / "check",
        environment=ENVIRONMENT,
        limit_s=200,
        **options,
    )


@pytest.mark.parametrize(("late", "end"), [("_read_lines", "stays"), ("_receive", "leaves")])
def test_every_loss_and_the_saved_checkpoint_count(
    tmp_path: Path, held: Callable[[str], None], late: str, end: str
) -> None:
    """The checkpoint is sealed before any line of output is read.

    Or the trainer saves and exits, and the exit code is read before the answer on the socket.
    """
    held(late)
    report = check(tmp_path, TRAINER, end)
    assert report.saved_steps == [KILL_AT]
    assert report.losses == STEPS


def test_a_trainer_may_be_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new Python imports it by its module and name."""
    module = (
        f"import sys\ndef train():\n    sys.argv.append('stays')\n    exec({TRAINER!r}, {{}})\n"
    )
    (tmp_path / "trained.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    report = check_resume(
        importlib.import_module("trained").train,
        steps=STEPS,
        kill_at=[KILL_AT],
        environment={"PYTHONPATH": os.pathsep.join([ENVIRONMENT["PYTHONPATH"], str(tmp_path)])},
        limit_s=200,
    )
    assert (report.saved_steps, report.losses) == ([KILL_AT], STEPS)


def test_a_process_that_survives_the_kill_does_not_block_the_check(
    tmp_path: Path, held: Callable[[str], None], holders: Path
) -> None:
    """A child of the launcher holds the pipe open: all losses count, and the check ends."""
    held("_read_lines")
    report = check(tmp_path, LAUNCHER, str(holders), "-c", TRAINER, "stays", has_launcher=True)
    assert report.losses == STEPS
    assert len(holders.read_text().splitlines()) == 3


def test_the_reason_of_a_failed_save_is_reported(
    tmp_path: Path, held: Callable[[str], None]
) -> None:
    """The exit code is read before the answer on the socket: the error names the trainer's reason."""
    held("_receive")
    with pytest.raises(TrainerFailedError, match=r"the trainer did not save: .*no save today"):
        check(tmp_path, TRAINER, "broken")


def test_a_failed_save_without_a_request_is_not_an_answer(tmp_path: Path) -> None:
    """A failed checkpoint that the trainer scheduled itself does not end the check."""
    report = check(tmp_path, TRAINER, "falters")
    assert report.saved_steps == [KILL_AT]
    assert report.losses == STEPS


def test_a_moment_may_be_in_a_progress_bar(tmp_path: Path) -> None:
    """Such a bar ends its lines with a carriage return, and a line may arrive in two pieces."""
    seen: list[str] = []

    def loss_of(line: str) -> None:
        seen.append(line)

    trainer = stand_in.CheckedTrainer([], 1, False, {}, loss_of, 60.0)
    reads, writes = os.pipe()
    with (
        contextlib.closing(
            stand_in.CheckedStart(trainer, stand_in.CheckedRun(tmp_path), "^bar 3 ")
        ) as start,
        open(reads, "rb", buffering=0) as output,
        open(writes, "wb", buffering=0) as trainers,
    ):
        for piece in (b"bar 1 |\rbar 2 ", b"|\rbar 3 |\r", b"done\r\n"):
            assert not start._is_requested or piece == b"done\r\n"
            trainers.write(piece)
            start._read_lines(1, output)
        assert start._is_requested
    assert seen == ["bar 1 |\n", "bar 2 |\n", "bar 3 |\n", "done\n"]


def test_a_number_is_the_end_of_that_step(tmp_path: Path) -> None:
    """A script that polls between its steps is not saved and killed at an earlier step."""
    report = check(tmp_path, TRAINER, "polls", kill_at=[KILL_AT, KILL_AT + 1])
    assert report.saved_steps == [KILL_AT, KILL_AT + 1]
    assert list(tmp_path.glob(f"check/resumed/staging/step-{STEPS:012}.*"))


MEETING = """
import os, sys
import swansong

mine, theirs = os.pipe(), os.pipe()
if os.fork() == 0:
    mine, theirs = theirs, mine
guard = swansong.attach(save=lambda directory: None, load=lambda directory: None)
os.write(theirs[1], b".")
os.read(mine[0], 1)
for step in range(guard.restore() + 1, 1000):
    guard.step(step)
"""


def test_two_processes_of_one_rank_are_refused(tmp_path: Path) -> None:
    """Ranks that do not see each other would save one rank's state for all."""
    with pytest.raises(
        TrainerFailedError, match=r"2 processes say that they are rank 0 of 1: .*init_process"
    ):
        check(tmp_path, MEETING)


def test_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    """One process that knows of no other rank cannot be one of two."""
    with pytest.raises(
        TrainerFailedError, match=r"rank 0 of 1, and check_resume\(\) expects ranks=2"
    ):
        check(tmp_path, TRAINER, "stays", ranks=2, has_launcher=True)


FORGETS = """
import json, random, sys
import swansong

total = {"total": 0.0}
first = min(range(999), key=lambda number: hash(str(number)))  # as the first element of a set of strings

class Total:
    def state_dict(self):
        return total

    def load_state_dict(self, state):
        total.update(state)

random.seed(1 if sys.argv[1] == "hidden" else None)
hidden = random.Random(2)
guard = swansong.attach({"total": Total()})
for step in range(guard.restore() + 1, 1000):
    if sys.argv[1] == "counts":
        random.random()
        total["total"] += 1
    elif sys.argv[1] == "sets":
        total["total"] += first
    else:
        total["total"] += hidden.random() if sys.argv[1] != "random" else random.random()
    if sys.argv[2] == "loud":
        print(json.dumps({"step": step, "loss": total["total"]}), flush=True)
    guard.step(step)
"""


@pytest.mark.parametrize(
    ("kind", "output", "lines"),
    [
        (
            "hidden",
            "loud",
            [
                r"step 4 is the first whose loss differs: 2\.\d+ instead of 2\.\d+",
                r"the checkpoints of step 4 differ:",
                r"  total: 'total' is 2\.\d+ instead of 2\.\d+",
            ],
        ),
        ("hidden", "quiet", [r"the checkpoints of step 5 differ:", r"  total: 'total' is .*"]),
        (
            "unseeded",
            "quiet",
            [
                r"the checkpoints of step 5 differ:",
                r"  total: 'total' is .*",
                r"likely cause: a value is not restored.*",
            ],
        ),
        ("random", "quiet", [r"  generators\.python differs", r"likely cause: .*not determin.*"]),
        (
            "random",
            "loud",
            [
                r"step 1 is the first whose loss differs: .*",
                r"  generators\.python differs",
                r"likely cause: the trainer is not deterministic: .*",
            ],
        ),
        ("sets", "loud", [r"likely cause: .* set PYTHONHASHSEED=0, .*"]),
    ],
)
def test_the_first_difference_is_reported(
    tmp_path: Path, kind: str, output: str, lines: list[str]
) -> None:
    """The first step is found by the losses or, without them, by the checkpoints of the kills.

    A value that follows from the hashes of strings, as the order of a set does, is another one at each start.
    """
    with pytest.raises(ResumeMismatchError) as raised:
        check(tmp_path, FORGETS, kind, output, kill_at=[KILL_AT, 5])
    text = str(raised.value).splitlines()
    for line in lines:
        assert any(re.fullmatch(line, each) for each in text), raised.value
    assert text[-1].startswith("likely cause: ")


def test_an_unseeded_generator_without_effect_is_reported(tmp_path: Path) -> None:
    """It differs between any two starts, so it shows nothing about the resume."""
    report = check(tmp_path, FORGETS, "counts", "loud")
    assert report.unseeded == ["generators.python"]
    assert report.losses == STEPS


ENDS = """
import json, random, sys
import swansong

kind = sys.argv[1]
values = {"sum": 0.0}
hidden = random.Random(2)

def save(directory):
    (directory / "values").write_text(json.dumps(values))

def load(directory):
    values.update(json.loads((directory / "values").read_text()))

guard = swansong.attach(save=save, load=load, socket="/nowhere/trainer.sock")
start = guard.restore()
for step in range(start + 1, 7 - (kind == "miscounts" and start > 0)):
    values["sum"] += hidden.random() if kind == "hidden" else step
    guard.step(step)
    print("trained", step, flush=True)
if kind == "closes":
    guard.close()
guard.finish()
"""


def check_ends(directory: Path, kind: str, kill_at: int | str = KILL_AT) -> testing.ResumeReport:
    return check_resume(
        [sys.executable, "-c", ENDS, kind],
        kill_at=[kill_at],
        directory=directory / "check",
        environment=ENVIRONMENT,
        limit_s=200,
    )


def test_the_ends_of_both_runs_are_compared(tmp_path: Path) -> None:
    """Without a last step both runs train to their ends; a resumed run that ends earlier is not equal."""
    assert check_ends(tmp_path / "right", "trains").last_step == STEPS
    with pytest.raises(ResumeMismatchError, match="ends at step 5, and the uninterrupted one at"):
        check_ends(tmp_path / "wrong", "miscounts")


def test_a_start_after_the_end_finds_a_finished_run(tmp_path: Path) -> None:
    """It has nothing to train and saves nothing: guard.finish() answered the request of the last kill."""
    command = [sys.executable, "-c", ENDS, "trains"]
    trainer = stand_in.CheckedTrainer(command, 1, False, ENVIRONMENT, lambda _: None, 60)
    run = stand_in.CheckedRun(tmp_path)
    end = trainer.until_saved(run, None)
    assert trainer.until_saved(run, None) == end


def test_nothing_after_the_checkpoint_survives_the_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short run may save its end before the kill: the next start would find it finished."""
    kill = stand_in.CheckedStart._kill

    def late(start: stand_in.CheckedStart) -> None:
        if start._run.directory.name == "resumed" and start._run.starts == 1:
            until(lambda: list(start._run.staging.glob(f"step-{STEPS:012}.*")))
        kill(start)

    monkeypatch.setattr(stand_in.CheckedStart, "_kill", late)
    assert check_ends(tmp_path, "trains").last_step == STEPS


def test_a_run_whose_end_is_unknown_cannot_be_compared(tmp_path: Path) -> None:
    """A script that ends without guard.finish() has no last checkpoint."""
    with pytest.raises(TrainerFailedError, match=r"waiting for guard.finish\(\): .* ended with 0"):
        check_ends(tmp_path, "closes")


FORGETS_RESTORE = """
import itertools
import swansong

guard = swansong.attach(save=lambda directory: None, load=lambda directory: None)
for step in itertools.count(1):
    guard.step(step)
"""


def test_a_script_that_trains_from_scratch_again_is_refused(tmp_path: Path) -> None:
    """Its second run has equal checkpoints, and every preemption would cost it all steps."""
    with pytest.raises(TrainerFailedError, match=r"has not called guard.restore\(\)"):
        check(tmp_path, FORGETS_RESTORE)


def run_script(kind: str, check: str, **variables: str) -> tuple[list[str], str]:
    """Start the script with SWANSONG_CHECK; returns its output and what it logs."""
    done = run_python("-c", ENDS, kind, **{protocol.CHECK_ENV: check}, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


@pytest.mark.parametrize(
    ("kind", "result"),
    [
        ("trains", "killed and resumed at step 2, the run is equal to the bit at step 4"),
        ("hidden", "the checkpoints of step 4 differ"),
    ],
)
def test_a_fresh_run_checks_itself_and_trains_on(kind: str, result: str) -> None:
    """SWANSONG_CHECK starts the same command, with a stand-in for the daemon instead of the named socket.

    The launcher's port is in use by this process.
    """
    output, log = run_script(kind, "2", MASTER_PORT="1")
    assert result in log
    assert output == [f"trained {step}" for step in range(1, STEPS + 1)]


def test_a_run_that_does_not_begin_checks_nothing(tmp_path: Path) -> None:
    """A run that continues from a checkpoint trains at once: the VM before has paid for the check."""
    report = check_ends(tmp_path, "trains")
    chosen = next((tmp_path / "check/resumed/staging").glob(f"step-{report.last_step:012}.*"))
    output, log = run_script("trains", "2", SWANSONG_RESTORE=str(chosen))
    assert (output, protocol.CHECK_ENV in log) == ([], False)


def test_a_notice_ends_the_check_of_a_fresh_run(
    daemon: FakeDaemon,
    attach: Attach,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The daemon sends it to a trainer that has not trained a step; the trainer then answers it.

    Trainers often ignore SIGTERM, and their children inherit this.
    """
    started = tmp_path / "started"
    command = f"import signal; open({str(started)!r}, 'w'); signal.pause()"
    monkeypatch.setattr(sys, "orig_argv", ["", "-c", command])
    monkeypatch.setenv(protocol.CHECK_ENV, "1")
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        guard = attach(save=lambda place: (place / "t").write_text("1"), load=lambda _: None)
        restoring = threading.Thread(target=guard.restore)
        restoring.start()
        until(started.exists)
        daemon.request(seconds_left=100.0)
        restoring.join(60)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not restoring.is_alive()
    assert "the check was ended" in caplog.text
    guard.step(1)
    daemon.wait_for(protocol.Sealed)


@pytest.mark.parametrize(
    ("value", "ranks", "fix"),
    [
        *((value, 1, "set it to 1") for value in ("yes", "0", "-3", "9" * 5000)),
        ("1", 4, "python -m swansong.testing --ranks 4 --kill-at 5 --steps 10 -- torchrun"),
    ],
)
def test_what_cannot_be_checked_is_named(
    value: str,
    ranks: int,
    fix: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log has variable, value and fix, and training begins."""
    monkeypatch.setenv(protocol.CHECK_ENV, value)
    check_command(ranks, lambda: False)
    assert f"SWANSONG_CHECK={value}: not checked" in caplog.text
    assert fix in caplog.text


def test_the_check_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    """It exits with 1 if the runs differ, and says where."""
    command = ["--kill-at", "3", "--limit-s", "60", "--", sys.executable, "-c", ENDS]
    assert testing.main([*command, "trains"]) == 0
    out, err = capsys.readouterr()
    assert out == "killed and resumed at step 3, the run is equal to the bit at step 6\n"
    assert err.splitlines() == [
        "reference: start 1, until its end",
        "resumed: start 1, until 3",
        "resumed: start 2, until its end",
    ]
    assert testing.main([*command, "miscounts"]) == 1
    assert "ends at step 5" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_end_of_the_command_is_the_end_of_its_trainers(
    tmp_path: Path, number: signal.Signals
) -> None:
    """The signal does not reach them, and they would continue to train."""
    path = str(tmp_path / "pid")
    script = f"import os, signal; open({path!r}, 'w').write(str(os.getpid())); signal.pause()"
    command = [sys.executable, "-m", "swansong.testing", "--kill-at", "3", "--"]
    before = signal.signal(number, signal.SIG_DFL)  # a terminal or a CI may ignore it
    try:
        checking = subprocess.Popen(
            [*command, sys.executable, "-c", script], env={**os.environ, **ENVIRONMENT}
        )
    finally:
        signal.signal(number, before)
    with checking:
        until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        trainer = os.pidfd_open(int((tmp_path / "pid").read_text()))
        checking.send_signal(number)
        assert checking.wait(60) != 0
    with os.fdopen(trainer):
        assert stand_in.has_ended(trainer)
