# SPDX-License-Identifier: Apache-2.0
"""The command of all simulators.

python -m testkit.simulation play production 0 20        # seeds 0 to 19, one line of JSON for each
python -m testkit.simulation play production 0 20 --stop --mutant production:3
python -m testkit.simulation shrink production 17 > script.json
python -m testkit.simulation replay script.json
python -m testkit.simulation mutants production 20       # up to 20 seeds against each mutant
python -m testkit.simulation many 10000                  # each simulator, on all cores; again: continue
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from functools import partial
from pathlib import Path

from testkit.simulation import schedule
from testkit.simulation.simulators import MUTANTS, SIMULATORS, isolated, load, mutate

# A lock of a module that is imported before the schedule is no choice of a simulation: so few as possible.

Given = argparse.Namespace
CPUS = len(os.sched_getaffinity(0))


def _play(given: Given) -> int:
    run, found = load(given.simulator), 0
    if SIMULATORS[given.simulator].world:  # its threads remain
        run = partial(isolated, run=run)
    for seed in range(given.first, given.first + given.count):
        result = run(seed)
        print(json.dumps(result), flush=True)
        found += bool(result["problems"])
        if found and given.stop:
            break
    return 1 if found else 0


def _shrink(given: Given) -> int:
    from testkit.simulation.shrink import shrunk

    script = shrunk(load(given.simulator), given.seed, lambda line: print(line, file=sys.stderr))
    head = json.dumps({"simulator": given.simulator, "seed": given.seed, "mutant": given.mutant})
    rows = ",\n".join(f"  {json.dumps([*choice, value])}" for choice, value in script.items())
    print(f'{head[:-1]}, "choices": [\n{rows}\n]}}')
    return 0


def _replay(given: Given) -> int:
    from testkit.simulation.shrink import replayed

    saved = json.loads(given.script.read_text())
    if saved["mutant"]:
        mutate(saved["mutant"])
    script = {(who, place, n): value for who, place, n, value in saved["choices"]}
    result, _ = replayed(load(saved["simulator"]), saved["seed"], script)
    print(json.dumps(result))
    return 1 if result["problems"] else 0


def _mutants(given: Given) -> int:
    from testkit.simulation.sweep import run_mutants

    return run_mutants(given.name, given.number, given.seeds, given.processes)


def _many(given: Given) -> int:
    from testkit.simulation.sweep import run

    try:
        return run(given.simulator or list(SIMULATORS), given.first, given.seeds, given.processes)
    except KeyboardInterrupt:
        print("interrupted: the same command continues", file=sys.stderr)
        return 128 + signal.SIGINT


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m testkit.simulation",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    commands = parser.add_subparsers(required=True)

    def command(name: str, run: object) -> argparse.ArgumentParser:
        made = commands.add_parser(name)
        made.set_defaults(run=run, mutant="")
        return made

    play = command("play", _play)
    play.add_argument("simulator", choices=SIMULATORS)
    play.add_argument("first", type=int)
    play.add_argument("count", type=int)
    play.add_argument("--stop", action="store_true", help="end after the first seed with a problem")
    shrink = command("shrink", _shrink)
    shrink.add_argument("simulator", choices=SIMULATORS)
    shrink.add_argument("seed", type=int)
    for each in (play, shrink):
        each.add_argument("--mutant", default="", help="name and number, such as core:3")
    command("replay", _replay).add_argument("script", type=Path)
    mutants = command("mutants", _mutants)
    mutants.add_argument("name", choices=MUTANTS)
    mutants.add_argument("seeds", type=int)
    mutants.add_argument("number", type=int, nargs="*")
    many = command("many", _many)
    many.add_argument("seeds", type=int, help="of each simulator")
    many.add_argument("simulator", nargs="*", choices=[[], *SIMULATORS])
    many.add_argument("--first", type=int, default=0)
    for each in (mutants, many):
        each.add_argument("--processes", type=int, default=CPUS)
    given = parser.parse_args()
    if given.mutant:
        mutate(given.mutant)
    code: int = given.run(given)
    return code


if __name__ == "__main__":
    schedule.fix_hashes()
    sys.exit(main())
