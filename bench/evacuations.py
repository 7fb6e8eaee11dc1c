# SPDX-License-Identifier: Apache-2.0
"""Training that is repeated after a preemption, over many simulated evacuations.

    python -m bench.evacuations --count 100000
    python -m bench.evacuations --floors --count 10000
    python -m bench.evacuations --missed --count 1500

It uses the forecasts and the schedule of the daemon on a virtual clock.  Each evacuation draws the end of its
VM and the time of each checkpoint.  The forecasts know only the checkpoints of the VM so far.

``--floors`` shows the mean loss if the schedule allowed for at least some relative spread of the times.
``--missed`` shows the mean loss if it assumed that one in four last follow-ups is too late.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass, replace
from unittest import mock

from swansongd.core import pace, planner, schedule
from swansongd.core.pace import Pace, updated
from swansongd.core.planner import Forecast, Measurements
from swansongd.core.schedule import Ending, FollowUpCost, next_start_s

RESERVE_S = 3.0
MTBF_S = 4 * 3600.0
LATENCY_S = 0.5
SIGMA = 0.18
"""Spread of the logarithm of a checkpoint's time: nine in ten take at most a quarter longer."""
SPREADS = (0.02, 0.05, 0.1, 0.18, 0.3)
FLOORS = (0.0, 0.1, 0.25)
MISSED = (schedule.MISSED_SHARE, 0.25)
_SIZE_BYTES = 10**9


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
    is_saved: bool = True
    """False if no checkpoint after the notice was in time."""


class Vm:
    """The checkpoints of a VM, and the forecast that they allow."""

    def __init__(self, job: Job, source: random.Random, sigma: float) -> None:
        self._job = job
        self._source = source
        self._sigma = sigma
        self._pace = pace.UNKNOWN
        self.forecast: Forecast
        self._forecast()

    def _forecast(self) -> None:
        known = Measurements(save_s=self._job.save_s, save_bytes=_SIZE_BYTES, pace=self._pace)
        self.forecast = planner.forecast(known)

    def checkpoint(self) -> float:
        """Time from the state of a checkpoint to its last stored byte."""
        factor = self._source.lognormvariate(0.0, self._sigma)
        save_s, send_s = factor * self._job.save_s, factor * self._job.send_s
        error = (save_s + send_s) / self.forecast.data_s - 1
        known: Pace = self._pace
        self._pace = replace(
            known,
            urgent_save_s=updated(known.urgent_save_s, save_s),
            send_s_per_byte=updated(known.send_s_per_byte, send_s / _SIZE_BYTES),
        )
        if known.send_s_per_byte is not None:
            square = min(max(error * error, 1e-4), 1.0)
            self._pace = replace(self._pace, error_square=updated(known.error_square, square))
        self._forecast()
        return save_s + send_s


def evacuate(
    job: Job,
    notice: Notice,
    source: random.Random,
    *,
    follow_ups: bool,
    sigma: float = SIGMA,
    floor: float = 0.0,
) -> Outcome:
    """One evacuation, from the notice to the end of the VM, after one periodic checkpoint.

    Args:
        job: the trainer and its store.
        notice: the knowledge of the end.
        source: of all random numbers.
        follow_ups: whether there are any.
        sigma: spread of the logarithm of a checkpoint's time.
        floor: the schedule allows for at least this relative spread.
    """
    end_s = notice.deadline_s
    if source.random() < notice.real_early_share:
        end_s *= source.random()
    vm = Vm(job, source, sigma)
    vm.checkpoint()
    captured_s = source.uniform(0, job.step_s)
    done_s = captured_s + vm.checkpoint()
    if done_s > min(end_s, notice.deadline_s):
        return Outcome(end_s, 0.0, 0, is_saved=False)
    stall_s, count, newest_s, now_s = 0.0, 0, captured_s, done_s
    rate = 1 / MTBF_S + notice.early_share / notice.deadline_s
    while follow_ups:
        made = vm.forecast
        spread_s = max(made.spread_s, floor * made.data_s)
        wait_s = next_start_s(
            Ending(left_s=notice.deadline_s - now_s, early_per_s=rate),
            FollowUpCost(
                data_s=made.data_s + spread_s,
                commit_s=made.expected_s + spread_s,
                stall_s=job.stall_s,
                step_s=job.step_s + LATENCY_S,
            ),
            reserve_s=RESERVE_S,
            age_s=now_s - newest_s,
        )
        if wait_s is None:
            break
        captured_s = (
            now_s + wait_s + source.uniform(0, job.step_s) + source.uniform(0, LATENCY_S / 2)
        )
        if captured_s >= end_s:
            break
        count, stall_s = count + 1, stall_s + job.stall_s
        now_s = captured_s + vm.checkpoint()
        if now_s > end_s:
            break
        if now_s <= notice.deadline_s - RESERVE_S:
            newest_s = captured_s
    return Outcome(end_s - newest_s, stall_s, count)


def simulate(
    job: Job,
    notice: Notice,
    count: int,
    *,
    follow_ups: bool,
    sigma: float = SIGMA,
    floor: float = 0.0,
) -> list[Outcome]:
    """This number of evacuations; their ends are the same in each call."""
    return [
        evacuate(
            job,
            notice,
            random.Random(f"1 {number}"),
            follow_ups=follow_ups,
            sigma=sigma,
            floor=floor,
        )
        for number in range(count)
    ]


def mean_loss_s(job: Job, sigma: float, floor: float, count: int) -> float:
    """Redone training and stall, for a notice of 120 s."""
    done = simulate(job, NOTICES[0], count, follow_ups=True, sigma=sigma, floor=floor)
    return sum(outcome.redone_s + outcome.stall_s for outcome in done) / count


def print_floors(count: int) -> None:
    """The mean loss by state, real spread and floor."""
    print(f"| state | spread | {' | '.join(f'floor {floor:.0%}' for floor in FLOORS)} |")
    print(f"| --- | --- |{' --- |' * len(FLOORS)}")
    for job in JOBS[:3]:
        for sigma in SPREADS:
            cells = [f"{mean_loss_s(job, sigma, floor, count):.1f}" for floor in FLOORS]
            print(f"| {job.name} | {sigma:.0%} | {' | '.join(cells)} |", flush=True)


def print_missed(count: int) -> None:
    """The mean loss by state, real spread and assumed share of last follow-ups that are too late."""
    print(f"| state | spread | {' | '.join(f'share {share:.0%}' for share in MISSED)} |")
    print(f"| --- | --- |{' --- |' * len(MISSED)}")
    for job in JOBS[1:]:
        for sigma in SPREADS:
            cells = []
            for share in MISSED:
                with mock.patch.object(schedule, "MISSED_SHARE", share):
                    cells.append(f"{mean_loss_s(job, sigma, 0.0, count):.1f}")
            print(f"| {job.name} | {sigma:.0%} | {' | '.join(cells)} |", flush=True)


def row(job: Job, notice: Notice, count: int) -> str:
    """One row of the table: mean redone training without and with follow-ups, their number and stall."""
    cells = [notice.name, job.name]
    for follow_ups in (False, True):
        done = simulate(job, notice, count, follow_ups=follow_ups)
        cells.append(f"{sum(outcome.redone_s for outcome in done) / count:.1f}")
    cells.append(f"{sum(outcome.follow_ups for outcome in done) / count:.1f}")
    cells.append(f"{sum(outcome.stall_s for outcome in done) / count:.2f}")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000, help="evacuations for each row")
    parser.add_argument("--floors", action="store_true", help="mean loss by least spread")
    parser.add_argument(
        "--missed", action="store_true", help="mean loss by assumed share of misses"
    )
    options = parser.parse_args()
    if options.missed:
        print_missed(options.count)
        return
    if options.floors:
        print_floors(options.count)
        return
    print("| notice | state | repeated without | with follow-ups | follow-ups | stall, s |")
    print("| --- | --- | --- | --- | --- | --- |")
    for notice in NOTICES:
        for job in JOBS:
            print(row(job, notice, options.count), flush=True)


if __name__ == "__main__":
    main()
