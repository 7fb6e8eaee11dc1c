# SPDX-License-Identifier: Apache-2.0
"""The simulators by name.  Each one runs a seed, and returns the problems that it has found.

Nothing here imports production code before a simulator is loaded: its mutant, and the threads on the
simulated clock, come first.
"""

from __future__ import annotations

import faulthandler
import importlib
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from testkit.forked import forked
from testkit.simulation import schedule
from testkit.simulation.core_mutants import Finder, Mutant

Result = dict[str, Any]
"""The seed, its problems, and how often each event happened."""
SEED_LIMIT_S = 300.0
"""Real time after which a seed counts as a hang.  The slowest ones need a few seconds of an idle CPU."""


class Simulator(NamedTuple):
    """The world of a simulator, if it runs production code with its threads."""

    seeds: int
    """Number of seeds that take some seconds."""
    module: str = ""
    world: str = ""


SIMULATORS = {
    "live": Simulator(50),
    "honest": Simulator(50),
    "fits": Simulator(50),
    "reconnects": Simulator(50),
    "gpu": Simulator(50),
    "fleet": Simulator(10),
    "retention": Simulator(50),
    "production": Simulator(4, "production", "World"),
    "jobs": Simulator(3, "production_job", "JobWorld"),
    "adversary": Simulator(3, "adversary", "HostileWorld"),
}
"""Those without a world are one of :data:`~testkit.simulation.histories.HISTORIES`."""
MUTANTS = {
    "core": ("core_mutants", {"live": 1, "honest": 1, "reconnects": 2, "fleet": 4}),
    "production": ("production_mutants", {"production": 1}),
    "jobs": ("job_mutants", {"jobs": 1}),
    "adversary": ("adversary_mutants", {"adversary": 1}),
}
"""The module of some mutants, and the simulators that must find them: each one runs a share of the seeds."""


def mutants_of(name: str) -> Any:
    """The module with the mutants of this name."""
    return importlib.import_module(f"testkit.simulation.{MUTANTS[name][0]}")


def known_mutants(name: str) -> tuple[Mutant, ...]:
    """The mutants of this name, and after them those that no run has found."""
    found = mutants_of(name)
    return (*found.MUTANTS, *getattr(found, "NOT_FOUND", ()))


def mutate(mutant: str) -> None:
    """Break the production code that is imported from now on, by the number of a mutant, as ``jobs:3``."""
    name, _, number = mutant.partition(":")
    sys.meta_path.insert(0, Finder(known_mutants(name)[int(number)]))


def load(name: str) -> Callable[[int], Result]:
    """The function that runs one seed in this process, from which threads may remain."""
    if name in SIMULATORS and (module := SIMULATORS[name].module):
        schedule.install()
        world = getattr(
            importlib.import_module(f"testkit.simulation.{module}"), SIMULATORS[name].world
        )
        production = importlib.import_module("testkit.simulation.production")
        return partial(production.simulate, kind=world)
    from testkit.simulation import histories

    histories.silence()

    def run(seed: int) -> Result:
        failure = histories.failure_of(name, seed)
        return {"seed": seed, "problems": [failure] if failure else [], "counts": {}}

    return run


def isolated(seed: int, run: Callable[[int], Result]) -> Result:
    """Run a seed in a fork, from which nothing remains."""

    def limited() -> Result:
        faulthandler.register(signal.SIGALRM)  # a watchdog of the parent would not end in a fork
        signal.alarm(int(SEED_LIMIT_S) - 5)
        return run(seed)

    try:
        result: Result = forked(limited, SEED_LIMIT_S)
    except AssertionError as error:
        return {"seed": seed, "problems": [str(error)], "counts": {}}
    return result
