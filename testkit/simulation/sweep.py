# SPDX-License-Identifier: Apache-2.0
"""Many seeds of several simulators, or of several mutants, on all cores.

A sweep that was interrupted continues.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from testkit.simulation.core_mutants import Mutant
from testkit.simulation.simulators import MUTANTS, SIMULATORS, Result, known_mutants, mutants_of

ROOT = Path(__file__).parents[2]
DONE = ROOT / "build" / "simulation.jsonl"
"""The code that was run, then one line for each unit."""
PLAY = (sys.executable, "-m", "testkit.simulation", "play")
PROGRESS_S = 10.0


class Unit(NamedTuple):
    """Some seeds of a simulator, for one process."""

    simulator: str
    first: int
    count: int


def headline(result: Result) -> str:
    """The last line of the first problem."""
    return str(result["problems"][0].strip().splitlines()[-1][:200])


def code() -> str:
    """A digest of the commit, and of all changes since."""
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()
    state = subprocess.check_output([*git, "diff", "HEAD"])
    names = subprocess.check_output([*git, "ls-files", "--others", "--exclude-standard"], text=True)
    for name in names.splitlines():
        state += name.encode() + (ROOT / name).read_bytes()
    return f"{commit} {hashlib.sha256(state).hexdigest()}"


def units(simulators: list[str], first: int, seeds: int) -> list[Unit]:
    """All seeds; the lowest ones of each simulator come first."""
    made = [
        Unit(name, start, min(SIMULATORS[name].seeds, first + seeds - start))
        for name in simulators
        for start in range(first, first + seeds, SIMULATORS[name].seeds)
    ]
    return sorted(made, key=lambda unit: (unit.first - first) / SIMULATORS[unit.simulator].seeds)


def played(unit: Unit, *options: str) -> list[Result]:
    """The results with a problem."""
    command = [*PLAY, unit.simulator, str(unit.first), str(unit.count), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    results: list[Result] = [json.loads(line) for line in done.stdout.splitlines()]
    failed = [result for result in results if result["problems"]]
    if len(results) < unit.count and not failed:
        seed = unit.first + len(results)
        failed.append({"seed": seed, "problems": [f"the process ended: {done.stderr}"]})
    return failed


def earlier(file: Path, digest: str) -> dict[Unit, list[Result]]:
    """The failures of the units that were run with this code; starts the file for other code."""
    lines = file.read_text().splitlines() if file.exists() else []
    if lines[:1] == [digest]:
        return {Unit(*unit): found for unit, found in map(_row, lines[1:]) if unit}
    file.parent.mkdir(exist_ok=True)
    file.write_text(digest)
    return {}


def _row(line: str) -> tuple[list[Any], list[Result]]:
    try:
        unit, found = json.loads(line)
    except ValueError:
        return [], []  # cut off, when the sweep was interrupted
    return unit, found


def run(simulators: list[str], first: int, seeds: int, processes: int, file: Path = DONE) -> int:
    """Run these seeds of each simulator; returns 1 if one fails.

    Args:
        file: of the results; units that it has for the same code are not run again.
    """
    wanted = units(simulators, first, seeds)
    known = earlier(file, code())
    left = [unit for unit in wanted if unit not in known]
    failures = 0
    if len(left) < len(wanted):
        print(f"{len(wanted) - len(left)} of {len(wanted)} units are in {file} already", flush=True)
    for unit in wanted:
        failures += _report(unit, known.get(unit, []))
    begun_s = told_s = time.monotonic()
    for number, (unit, found) in enumerate(_results(left, processes), 1):
        with file.open("a") as log:
            log.write(f"\n{json.dumps([unit, found])}")
        failures += _report(unit, found)
        now_s = time.monotonic()
        if now_s - told_s >= PROGRESS_S or number == len(left):
            told_s = now_s
            left_s = (now_s - begun_s) / number * (len(left) - number)
            share = f"{len(wanted) - len(left) + number} of {len(wanted)} units"
            print(f"{share}, {failures} failures, {left_s / 60:.0f} min left", flush=True)
    return 1 if failures else 0


def _results(left: list[Unit], processes: int) -> Iterator[tuple[Unit, list[Result]]]:
    # After an interrupt only this process reports it.
    silent = (signal.SIGINT, signal.SIG_DFL)
    with ProcessPoolExecutor(processes, None, signal.signal, silent) as pool:
        running = {pool.submit(played, unit): unit for unit in left}
        try:
            for done in as_completed(running):
                yield running[done], done.result()
        finally:
            pool.shutdown(cancel_futures=True)  # after an interrupt


def repeated(unit: Unit, result: Result) -> str:
    """The commands that repeat a failure, and that shrink it."""
    command = "python -m testkit.simulation"
    place = f"{unit.simulator} {result['seed']}"
    return f"    {command} play {place} 1\n    {command} shrink {place} > build/script.json"


def _report(unit: Unit, found: list[Result]) -> int:
    for result in found:
        print(f"{unit.simulator} seed {result['seed']}: {headline(result)}")
        print(repeated(unit, result), flush=True)
    return len(found)


# ---------------------------------------------------------------- mutants


def run_mutants(name: str, numbers: list[int], seeds: int, processes: int) -> int:
    """Run seeds against each mutant until one finds it; returns 1 if some mutant survives."""
    known = known_mutants(name)
    numbers = numbers or list(range(len(mutants_of(name).MUTANTS)))
    for number in numbers:
        applied(known[number])  # one that does not fit its module would count as found
    kills: list[int] = []
    with ProcessPoolExecutor(processes) as pool:
        finds = pool.map(partial(_finds, seeds, name), numbers)
        for number, (count, found) in zip(numbers, finds, strict=True):
            kills += [count] if found else []
            mutant = f"{number} {known[number].module}: {known[number].before.strip()[:50]!r}"
            print(f"{mutant}: {found or 'survives'}", flush=True)
    print(f"{len(kills)} of {len(numbers)} were found")
    if kills:
        print(f"seeds to kill: {statistics.median(kills):g} in the median, {max(kills)} at most")
    return 0 if len(kills) == len(numbers) else 1


def applied(mutant: Mutant) -> str:
    """The source of the module with this mutant; see :meth:`Mutant.changed`."""
    spec = importlib.util.find_spec(mutant.name)
    assert spec is not None
    assert spec.origin is not None
    return mutant.changed(Path(spec.origin))


def _finds(seeds: int, name: str, number: int) -> tuple[int, str]:
    """The number of seeds until one finds this mutant, and the problem; empty if no seed finds it."""
    count = 0
    for simulator, every in MUTANTS[name][1].items():
        unit = Unit(simulator, 0, -(-seeds // every))
        for result in played(unit, "--stop", "--mutant", f"{name}:{number}"):
            count += result["seed"] + 1
            return count, f"{simulator} seed {result['seed']}: {headline(result)}"
        count += unit.count
    return count, ""
