# SPDX-License-Identifier: Apache-2.0
"""Seeded runs of the production daemon and the production hooks on a simulated clock.

``make simulate`` runs more of them.  A failure names its seed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from testkit.simulation.sweep import PLAY, ROOT

WANTED = {
    *("SAFE", "resumed", "daemon killed", "trainer killed", "reply lost", "VM frozen"),
    *("daemon ended", "power cut", "metadata fault"),
}
JOB_WANTED = {
    *("SAFE", "resumed", "power off", "launcher started the job again", "disturbed"),
    "replaced before its end",
}
KINDS = {"signed", "unsigned", "user", "both"}


def run(
    simulator: str, first: int, count: int, cwd: Path | None = None, *, hash_seed: str = "0"
) -> list[str]:
    """The lines of the command of a simulator, one for each seed."""
    done = subprocess.run(
        [*PLAY, simulator, str(first), str(count)],
        cwd=cwd,
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120 + 20 * count,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == count, done.stderr
    return lines


def happened_in(lines: list[str]) -> set[str]:
    """The events of all seeds; fails with the problems of the first seed that has some."""
    happened: set[str] = set()
    for line in lines:
        result = json.loads(line)
        assert not result["problems"], f"seed {result['seed']}:\n" + "\n".join(result["problems"])
        happened |= {name.partition(":")[0] for name in result["counts"]}
    return happened


def expect(simulator: str, wanted: set[str], seeds: range) -> str:
    """Run seeds, and more of them until all these events have happened: a change of code draws others.

    Returns the line of the first of these seeds.
    """
    lines = run(simulator, seeds.start, len(seeds))
    happened = happened_in(lines)
    for more in range(seeds.stop, seeds.stop + 3 * len(seeds)):
        if happened >= wanted:
            break
        happened |= happened_in(run(simulator, more, 1))
    assert happened >= wanted, f"never happened: {wanted - happened}"
    return lines[0]


def expect_again(line: str, simulator: str, seed: int, cwd: Path) -> None:
    """Another process, with another hash seed and in another directory, prints the same line for a seed."""
    assert run(simulator, seed, 1, cwd, hash_seed="random") == [line]


@pytest.mark.fault("G03", "G05", "N12", "O11", "T15", "T22")
def test_no_schedule_of_the_production_code_breaks_a_promise(tmp_path: Path) -> None:
    """SAFE is true in the store, a resume never loses it, and a calm VM ends SAFE after all faults.

    No power cut lets a torn set count or loses a sealed one.  Each notice of the metadata service arrives in
    time, and none that it did not show.  Claims grow and stay, no turn of a decision loop blocks, and a
    daemon that is stopped ends in time.  A seed repeats exactly.
    """
    line = expect("production", WANTED, range(36, 39))
    expect_again(line, "production", 36, tmp_path)


@pytest.mark.fault("S25")
def test_no_adversary_exceeds_its_rights() -> None:
    """Each fourth seed has a bucket writer and a key, one without a key, a hostile user, or two of them."""
    expect("adversary", KINDS, range(1, 5))


def test_no_schedule_of_a_job_over_several_vms_breaks_a_promise(tmp_path: Path) -> None:
    """SAFE holds for all ranks, no rank loads a mixed checkpoint, and a calm job ends SAFE on each VM.

    A seed repeats exactly.
    """
    line = expect("jobs", JOB_WANTED, range(2, 5))
    expect_again(line, "jobs", 2, tmp_path)


LOST_TURN = """
from testkit.simulation import schedule
schedule.install()
import threading
world = schedule.Schedule(0)
threading.Thread(target=lambda: world.wait(lambda: 1 / 0, None), daemon=True).start()
world.sleep(60)
"""


def test_an_error_in_the_choice_of_a_thread_ends_the_run() -> None:
    """The main thread raises the error; no thread waits for a turn that is lost."""
    done = subprocess.run(
        [sys.executable, "-c", LOST_TURN], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr


KILLED_IN_ITS_TURN = """
import _thread, os
from testkit.simulation import schedule
schedule.install()
world = schedule.Schedule(0)
is_killed, waits = _thread.allocate_lock(), _thread.allocate_lock()
is_killed.acquire(), waits.acquire()

class Turn:
    def __init__(self, task):
        self.task, self.real = task, task.turn
    def acquire(self):
        if self.task.has_ended:
            waits.release()
        self.real.acquire()
    def release(self):
        self.real.release()
        if self.task is main:
            is_killed.acquire()

def run():
    world.sleep(9)
    os._exit(1)

main = world.current
main.turn = Turn(main)
killed = world.start(run, group="process")
killed.turn = Turn(killed)
world.sleep(1)
world.kill("process")
is_killed.release()
waits.acquire()
"""


def test_a_thread_that_is_killed_while_it_passes_its_turn_on_never_runs_again() -> None:
    """The killer runs before the killed thread returns from the release of the killer's lock."""
    done = subprocess.run([sys.executable, "-c", KILLED_IN_ITS_TURN], timeout=60, check=False)
    assert done.returncode == 0


def test_production_code_cannot_keep_a_real_clock() -> None:
    """A default value such as ``clock=time.monotonic`` is taken at the import: the schedule comes first."""
    code = "import swansong\nfrom testkit.simulation import schedule\nschedule.install()"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "RuntimeError: install() failed: imported before it: swansong" in done.stderr
