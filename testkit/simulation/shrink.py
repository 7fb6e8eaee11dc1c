# SPDX-License-Identifier: Apache-2.0
"""Shrinks a failing seed to the few choices that it needs.

The result is a script: ``python -m testkit.simulation replay`` runs it, and the tests run all scripts in
``tests/simulation/scripts``.
"""

from __future__ import annotations

import re
from collections import defaultdict
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

    def drop(dropped: set[Choice]) -> bool:
        nonlocal choices, runs
        if not dropped or runs >= RUNS_MAX:
            return False
        runs += 1
        kept = {choice: value for choice, value in choices.items() if choice not in dropped}
        found, made = replayed(run, seed, kept)
        if kind not in map(_kind, found["problems"]):
            return False
        # A script may contain choices that its run no longer makes.
        choices = {choice: value for choice, value in kept.items() if choice in made}
        return True

    def drop_each(groups: list[list[Choice]], size: int) -> None:
        """Leave out groups, first this number of them at once, and then fewer."""
        while size:
            for first in range(0, len(groups), size):
                if drop(choices.keys() & set().union(*groups[first : first + size])):
                    groups[first : first + size] = [[]] * len(groups[first : first + size])
            groups = [group for group in groups if choices.keys() & set(group)]
            report(f"{len(choices)} choices after {runs} runs")
            size = min(size, len(groups)) // 2

    # Most functions and most threads make no choice that matters.
    for part in (1, 0):
        drop_each(_grouped(choices, part), len(choices))
    before = len(choices) + 1
    while len(choices) < before:
        before = len(choices)
        drop_each([[choice] for choice in choices], before)
    return choices


def _grouped(choices: Iterable[Choice], part: int) -> list[list[Choice]]:
    """The choices of each thread, or of each function; the largest group first."""
    groups: defaultdict[object, list[Choice]] = defaultdict(list)
    for choice in choices:
        groups[choice[part]].append(choice)
    return sorted(groups.values(), key=len, reverse=True)


def _kind(problem: str) -> str:
    """The property that is violated, without steps and names."""
    lines = problem.strip().splitlines()
    return re.sub(r"None|\S*[^A-Za-z\s]\S*", "", lines[-1]) if lines else ""
