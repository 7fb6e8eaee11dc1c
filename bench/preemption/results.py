# SPDX-License-Identifier: Apache-2.0
"""The results file of ``make bench-preemption``, and the tables made from it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.preemption.contestants import CONTESTANTS, OURS
from bench.transfer.results import by_contestant, median_and_spread, repeats

PARTS = ("stall_s", "redone_s", "down_s")


@dataclass(frozen=True, kw_only=True)
class Result:
    """One preemption of one contestant."""

    contestant: str
    size: str
    repeat: int
    notice_s: float
    pause_s: float
    load: float
    """Load average of the machine at the start of the run."""
    problem: str = ""
    """Why the run does not count; empty if it does."""
    stall_s: float = 0.0
    redone_s: float = 0.0
    down_s: float = 0.0
    step_s: float = 0.0
    last_step: int = 0
    restored_step: int = 0
    imported_s: float | None = None
    """From the start of the second VM to the end of the trainer's imports."""
    restored_s: float | None = None
    """From the start of the second VM to the restored state."""
    bound_s: float | None = None
    """Only of Swansong."""
    bound_parts: Mapping[str, float] | None = None

    @property
    def total_s(self) -> float:
        return self.stall_s + self.redone_s + self.down_s


def of_size(results: Sequence[Result], size: str) -> dict[str, list[Result]]:
    """Valid runs by contestant, the least loss first."""
    found: dict[str, list[Result]] = {}
    for result in results:
        if result.size == size and not result.problem:
            found.setdefault(result.contestant, []).append(result)
    return dict(sorted(found.items(), key=lambda item: _median(item[1])))


def _median(runs: Sequence[Result]) -> float:
    return statistics.median(run.total_s for run in runs)


def markdown(results: Sequence[Result]) -> str:
    """The losses by size, with their parts for the first one, and the two ratios of the goal."""
    columns: dict[str, dict[str, str]] = {}
    lines: list[str] = []
    for size in dict.fromkeys(result.size for result in results):
        runs = of_size(results, size)
        title = f"{size[:-2]} {size[-2:]}"
        parts = () if columns else PARTS
        columns[f"loss with {title}, s ({repeats(runs)})"] = {
            name: median_and_spread([run.total_s for run in of_one], ".1f")
            for name, of_one in runs.items()
        }
        for part in parts:
            columns[f"{part.removesuffix('_s')}, s"] = {
                name: f"{statistics.median(getattr(run, part) for run in of_one):.1f}"
                for name, of_one in runs.items()
            }
        lines += _goal(title, runs)
    failed = [r for r in results if r.problem]
    lines += [f"{r.contestant}, {r.size}, run {r.repeat + 1} failed: {r.problem}\n" for r in failed]
    return "\n".join([*by_contestant(columns), *lines, ""])


def _goal(title: str, runs: Mapping[str, Sequence[Result]]) -> list[str]:
    """The sentences that compare Swansong with its bound and with the best contestant."""
    ours = [run for run in runs.get(OURS, ()) if run.bound_s]
    if not ours:
        return []
    bounds = [run.bound_s or 0.0 for run in ours]
    ratios = [run.total_s / bound for run, bound in zip(ours, bounds, strict=True)]
    parts = {
        name: statistics.median((run.bound_parts or {})[name] for run in ours)
        for name in ours[0].bound_parts or {}
    }
    shown = ", ".join(f"{name} {value:.1f}" for name, value in parts.items())
    line = (
        f"- {title}: the bound is {median_and_spread(bounds, '.1f')} s ({shown}).\n"
        f"  The loss is {median_and_spread(ratios, '.2f')} of the bound of the same run"
    )
    others = {
        name: _median(of_one) for name, of_one in runs.items() if not CONTESTANTS[name].is_ours
    }
    if others:
        best = min(others, key=lambda name: others[name])
        line += f", and {_median(ours) / others[best]:.2f} times the loss of {best}"
    return [f"{line}."]
