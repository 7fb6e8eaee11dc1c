# SPDX-License-Identifier: Apache-2.0
"""Shrinks a failing history to the few choices that it needs.

``python -m testkit.simulation.shrink live 120`` prints a script, to be pasted into a regression test, which
calls :func:`replayed`.  A choice is one draw of a random generator, as a number from 0 to 1.  All choices
outside of the script are calm: no fault happens, delays are the longest, and the first alternative is taken.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from unittest import mock

import structlog

from testkit.simulation.histories import HISTORIES, failure_of

Choice = tuple[str, str, int]
"""A generator, by its seed; the fault, or the function that draws; and the number of its draw."""
Script = Mapping[Choice, float]
"""The choices that are not calm, with their values."""
RUNS_MAX = 4000
"""Number of runs after which the shortest script so far stands."""
_CALM = 1 - 2**-53
_HELPERS = frozenset({"chance", "delay_s", "at", "post", "<setcomp>"})
_ID_BITS = 32
"""Draws of this size are identifiers, which must differ."""


class _Draws(random.Random):
    """A generator that notes its draws, or takes them from a script."""

    script: Script | None = None
    made: dict[Choice, float]

    def __init__(self, seed: int | str) -> None:
        super().__init__(seed)
        self._name = str(seed)
        self._counts: Counter[str] = Counter()

    def _next(self, drawn: float, calm: float) -> float:
        place = _place(sys._getframe(2))
        self._counts[place] += 1
        choice = self._name, place, self._counts[place]
        if self.script is not None:
            drawn = self.script.get(choice, calm)
        if drawn != calm:
            self.made[choice] = drawn
        return drawn

    def random(self) -> float:
        return self._next(super().random(), _CALM)

    def getrandbits(self, k: int) -> int:
        drawn = super().getrandbits(k)
        if k >= _ID_BITS:
            return drawn
        return int(self._next(drawn / 2**k, 0.0) * 2**k)


def _place(frame: FrameType) -> str:
    """The fault, or the function outside of the helpers, for which a number is drawn."""
    while frame.f_globals is vars(random) or frame.f_code.co_name in _HELPERS:
        if "fault" in frame.f_locals:
            return str(frame.f_locals["fault"])
        assert frame.f_back is not None
        frame = frame.f_back
    return frame.f_code.co_name


@contextlib.contextmanager
def _drawing(script: Script | None) -> Iterator[dict[Choice, float]]:
    made: dict[Choice, float] = {}
    kind = type("Draws", (_Draws,), {"script": script, "made": made})
    with mock.patch.object(random, "Random", kind):
        yield made


def replayed(name: str, seed: int, script: Script) -> str:
    """The violation of this history with the choices of a script; empty if it has none."""
    with _drawing(script):
        return failure_of(name, seed)


def shrunk(name: str, seed: int, report: Callable[[str], None] = lambda _: None) -> Script:
    """A script with which the history of a failing seed fails in the same way; each of its choices matters.

    Args:
        name: of the history, one of :data:`~testkit.simulation.histories.HISTORIES`.
        seed: the seed that fails.
        report: called with lines about the progress.

    Raises:
        ValueError: the seed does not fail.
    """
    with _drawing(None) as made:
        failure = failure_of(name, seed)
    if not failure:
        raise ValueError(f"{name} seed {seed} does not fail")
    choices, runs = dict(made), 0

    def fails(kept: Script) -> bool:
        nonlocal runs
        runs += 1
        return _kind(replayed(name, seed, kept)) == _kind(failure)

    size = len(choices)
    while size and runs < RUNS_MAX:
        keys = list(choices)
        before = len(keys)
        for first in range(0, before, size):
            chunk = keys[first : first + size]
            kept = {key: value for key, value in choices.items() if key not in chunk}
            if len(kept) < len(choices) and runs < RUNS_MAX and fails(kept):
                choices = kept
        report(f"{len(choices)} choices after {runs} runs")
        if size > 1:
            size = max(1, min(size, len(choices)) // 2)
        elif len(choices) == before:
            break
    return choices


def _kind(failure: str) -> str:
    """The property that is violated, without steps and names."""
    return re.sub(r"[^A-Za-z ]*[0-9][^ ]*", "", failure.partition(": ")[2] or failure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("history", choices=HISTORIES)
    parser.add_argument("seed", type=int)
    given = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    script = shrunk(given.history, given.seed, lambda line: print(line, file=sys.stderr))
    print(f"# {replayed(given.history, given.seed, script)}")
    choices = "".join(f"    {choice}: {value!r},\n" for choice, value in script.items())
    print(f"assert not replayed({given.history!r}, {given.seed}, {{\n{choices}}})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
