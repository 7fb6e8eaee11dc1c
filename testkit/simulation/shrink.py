# SPDX-License-Identifier: Apache-2.0
"""Shrinks a failing seed to the few choices that it needs.

The result is a script: ``python -m testkit.simulation replay`` runs it, and the tests run all scripts in
``tests/simulation/scripts``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable

from testkit.simulation.choices import Choice, Choices, Script, Value, noted
from testkit.simulation.simulators import Result, isolated

RUNS_MAX = 4000
"""Number of runs after which the shortest script so far stands."""
Run = Callable[[int], Result]


def replayed(run: Run, seed: int, script: Script | None) -> tuple[Result, dict[Choice, Value]]:
    """The result of a seed with the choices of a script, or with its own, and those that were not calm."""

    def noting(seed: int) -> Result:
        choices = Choices(script)
        with noted(choices):
            result = run(seed)
        return result | {"choices": [[*choice, value] for choice, value in choices.made.items()]}

    result = isolated(seed, noting)
    return result, {(who, place, n): value for who, place, n, value in result.pop("choices", [])}


def shrunk(run: Run, seed: int, report: Callable[[str], None] = lambda _: None) -> Script:
    """A script with which a failing seed fails in the same way; each of its choices matters.

    Args:
        run: of a simulator.
        seed: the seed that fails.
        report: called with lines about the progress.

    Raises:
        ValueError: the seed does not fail, or in another way with its own choices.
    """
    result, choices = replayed(run, seed, None)
    if not result["problems"]:
        raise ValueError(f"seed {seed} does not fail")
    kind, runs = _kind(result["problems"][0]), 0
    report(f"{len(choices)} choices: {result['problems'][0].strip().splitlines()[-1]}")

    def drop(group: Iterable[Choice]) -> None:
        nonlocal choices, runs
        dropped = choices.keys() & set(group)
        if dropped and runs < RUNS_MAX:
            runs += 1
            kept = {choice: value for choice, value in choices.items() if choice not in dropped}
            found, made = replayed(run, seed, kept)
            if kind in map(_kind, found["problems"]):
                # A script may contain choices that its run no longer makes.
                choices = {choice: value for choice, value in kept.items() if choice in made}

    drop(choices)
    # Most functions and most threads make no choice that matters.
    for part in (1, 0):
        for name, _ in Counter(choice[part] for choice in choices).most_common():
            drop([choice for choice in choices if choice[part] == name])
        report(f"{len(choices)} choices after {runs} runs")
    size = len(choices)
    while size and runs < RUNS_MAX:
        keys = list(choices)
        for first in range(0, len(keys), size):
            drop(keys[first : first + size])
        report(f"{len(choices)} choices after {runs} runs")
        if size > 1:
            size = max(1, min(size, len(choices)) // 2)
        elif len(choices) == len(keys):
            break
    return choices


def _kind(problem: str) -> str:
    """The property that is violated, without steps and names."""
    lines = problem.strip().splitlines()
    return re.sub(r"None|\S*[^A-Za-z\s]\S*", "", lines[-1]) if lines else ""
