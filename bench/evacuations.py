# SPDX-License-Identifier: Apache-2.0
"""Training that is repeated after a preemption, over many simulated evacuations.

    python -m bench.evacuations --count 100000

It uses the schedule of the daemon on a virtual clock.  Each evacuation draws the end of its VM and the time
of each checkpoint; the schedule knows only the expected time and that of nine in ten checkpoints.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from swansongd.core.schedule import Ending, FollowUpCost, next_start_s

RESERVE_S = 3.0
MTBF_S = 4 * 3600.0
LATENCY_S = 0.5
SIGMA = 0.18
"""Spread of the logarithm of a checkpoint's time: nine in ten take at most a quarter longer."""
_PESSIMISTIC = 1.25


@dataclass(frozen=True)
class Job:
    """A trainer and its store."""

    name: str
    save_s: float
    send_s: float
    stall_s: float
    step_s: float


JOBS = (
    Job("32 MB", save_s=0.1, send_s=0.2, stall_s=0.02, step_s=0.2),
    Job("4 GB", save_s=2.0, send_s=4.0, stall_s=0.4, step_s=0.5),
    Job("100 GB", save_s=15.0, send_s=25.0, stall_s=3.0, step_s=5.0),
    Job("4 GB, blocking save", save_s=10.0, send_s=4.0, stall_s=10.0, step_s=0.5),
)


@dataclass(frozen=True)
class Notice:
    """The knowledge of the end, and how VMs with this notice really end."""

    name: str
    deadline_s: float
    early_share: float
    """As the daemon assumes it."""
    real_early_share: float
    """Part of the VMs that end before the deadline, at any moment."""


NOTICES = (
    Notice("AWS, or GCP with 120 s", 120.0, 0.05, 0.05),
    Notice("GCP, assumed 25 s", 25.0, 0.5, 0.33),
    Notice("operator, 120 s", 120.0, 0.0, 0.0),
)


@dataclass(frozen=True)
class Outcome:
    redone_s: float
    """Training between the newest committed state and the end."""
    stall_s: float
    """Time for which follow-ups blocked training."""
    follow_ups: int


def evacuate(job: Job, notice: Notice, source: random.Random, *, follow_ups: bool) -> Outcome:
    """One evacuation, from the notice to the end of the VM."""
    end_s = notice.deadline_s
    if source.random() < notice.real_early_share:
        end_s *= source.random()
    now_s = source.uniform(0, job.step_s)
    captured_s, done_s = _checkpoint(now_s, job, source)
    if done_s > min(end_s, notice.deadline_s):
        return Outcome(end_s, 0.0, 0)  # nothing is committed in time, with or without follow-ups
    stall_s, count, newest_s, now_s = 0.0, 0, captured_s, done_s
    data_s = job.save_s + job.send_s
    cost = FollowUpCost(
        data_s=_PESSIMISTIC * data_s,
        commit_s=_PESSIMISTIC * data_s,
        stall_s=job.stall_s,
        step_s=job.step_s + LATENCY_S,
    )
    rate = 1 / MTBF_S + notice.early_share / notice.deadline_s
    while follow_ups:
        wait_s = next_start_s(
            Ending(left_s=notice.deadline_s - now_s, early_per_s=rate),
            cost,
            reserve_s=RESERVE_S,
            age_s=now_s - newest_s,
        )
        if wait_s is None:
            break
        boundary_s = (
            now_s + wait_s + source.uniform(0, job.step_s) + source.uniform(0, LATENCY_S / 2)
        )
        if boundary_s >= end_s:
            break
        count, stall_s = count + 1, stall_s + job.stall_s
        captured_s, now_s = _checkpoint(boundary_s, job, source)
        if now_s > end_s:
            break
        if now_s <= notice.deadline_s - RESERVE_S:
            newest_s = captured_s
    return Outcome(end_s - newest_s, stall_s, count)


def _checkpoint(boundary_s: float, job: Job, source: random.Random) -> tuple[float, float]:
    """The instant of the state, and the one at which its last byte is stored."""
    return boundary_s, boundary_s + (job.save_s + job.send_s) * source.lognormvariate(0.0, SIGMA)


def simulate(
    job: Job, notice: Notice, count: int, *, follow_ups: bool, seed: int = 1
) -> list[Outcome]:
    """This number of evacuations; the same seed gives the same ends."""
    return [
        evacuate(job, notice, random.Random(f"{seed} {number}"), follow_ups=follow_ups)
        for number in range(count)
    ]


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which this share of the sorted values lies."""
    return values[min(len(values) - 1, math.floor(share * len(values)))]


def row(job: Job, notice: Notice, count: int) -> str:
    """One row of the table: redone training before and after, as a distribution."""
    cells = [notice.name, job.name]
    for follow_ups in (False, True):
        done = simulate(job, notice, count, follow_ups=follow_ups)
        redone = sorted(outcome.redone_s for outcome in done)
        shown = [percentile(redone, share) for share in (0.5, 0.9, 0.99)] + [redone[-1]]
        cells.append(" / ".join(f"{value:.1f}" for value in shown))
        cells.append(f"{sum(redone) / count:.1f}")
    cells.append(f"{sum(outcome.follow_ups for outcome in done) / count:.1f}")
    cells.append(f"{sum(outcome.stall_s for outcome in done) / count:.2f}")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000, help="evacuations for each row")
    options = parser.parse_args()
    print("| notice | state | before | mean | with follow-ups | mean | follow-ups | stall, s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for notice in NOTICES:
        for job in JOBS:
            print(row(job, notice, options.count), flush=True)


if __name__ == "__main__":
    main()
