# SPDX-License-Identifier: Apache-2.0
"""Advice for a run: changes that save GPU time, each with its computed saving and its formula.

Pure.  docs/operations/loss.md has the model.  Each proposal is a changed :class:`Job`, and its saving is
the difference of the two expected losses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from swansong_tools.economics.expected import (
    Expected,
    ExpectedMargin,
    InterruptionKind,
    Interval,
    Job,
    best_interval,
    covered_redone_s,
    expected,
    margin,
    scaled,
)
from swansong_tools.units import human_s

SAVED_GPU_S_MIN = 1.0
"""A proposal that saves less in a day is not listed."""
LONG_NOTICE_S = 115.0
"""A preemption notice of 120 s on GCP, less the margin of its source."""
SHORT_NOTICE_S = 60.0
_RESERVE_S_MIN = 1.0
_COMMITS_IN_RESERVE = 4
_EVEN_SHARE = 0.8
"""Saves count as even if the busiest rank has at most 1/0.8 of an even share."""
_ROUNDED_UP_S = 5
_KEY_MARGIN_S = 1.0
"""The daemon wants to be done this long before a shutdown continues."""
_GRACES = {
    "logind": ("grace_logind", "deadline.shutdown_delay_s"),
    "host": ("grace_host", "deadline.sigterm_grace_s"),
    "aws.asg": ("grace_aws_asg", "sources.asg_grace_s"),
}
"""Proposal and key for the grace period of a source; the host must grant the time as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Facts about a run that only proposals need."""

    ranks: int = 1
    """Of one VM."""
    busiest_share: float | None = None
    """Share of the bytes of one VM that its busiest rank saves; None: unknown."""
    has_prefetch: bool = True
    configured_interval_s: float | None = None
    """None: the daemon computes the interval."""
    orders_vm: bool = False
    """A program orders the next VM at the notice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A change and its saving."""

    name: str
    title: str
    change: str
    """The key to set, or the work to do."""
    formula: str
    """With the numbers put in."""
    job: Job
    """The job with the change."""
    saved_gpu_s: float = 0.0
    """In a day; 0 until :func:`proposals` has computed it."""

    @property
    def after(self) -> Expected:
        """The expected loss with the change."""
        return expected(self.job)


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The expected loss of a run, and the proposals in the order of their savings."""

    expected: Expected
    interval: Interval
    margins: tuple[ExpectedMargin, ...]
    """The shortest notice first; empty while save, size or bandwidth are not measured."""
    proposals: tuple[Proposal, ...]


def advise(job: Job, setup: Setup, notices: tuple[tuple[str, float], ...]) -> Advice:
    """Advice for a job.

    Args:
        notices: source and grace period of each notice whose margin is of interest.
    """
    return Advice(
        expected=expected(job),
        interval=best_interval(job),
        margins=tuple(
            margin(job, source, grace_s)
            for source, grace_s in sorted(notices, key=lambda each: (each[1], each[0]))
            if job.forecast.is_measured
        ),
        proposals=proposals(job, setup),
    )


def proposals(job: Job, setup: Setup) -> tuple[Proposal, ...]:
    """All changes that save GPU time, the best one first."""
    before_s = expected(job).total_s
    found = []
    for proposal in _changes(job, setup):
        saved_gpu_s = (before_s - proposal.after.total_s) * job.gpus
        if saved_gpu_s >= SAVED_GPU_S_MIN:
            found.append(replace(proposal, saved_gpu_s=saved_gpu_s))
    return tuple(sorted(found, key=lambda proposal: -proposal.saved_gpu_s))


def _changes(job: Job, setup: Setup) -> Iterator[Proposal]:
    yield from _interval(job, setup)
    yield from _even_saves(job, setup)
    yield _smaller_state(job)
    yield _faster_store(job)
    yield from _no_limit(job)
    yield from _shorter_reserve(job)
    yield from _follow_ups(job)
    yield from _restore(job, setup)
    yield from _replacement(job, setup)
    yield from _longer_notice(job)
    yield from _longer_grace(job)


def _interval(job: Job, setup: Setup) -> Iterator[Proposal]:
    best = best_interval(job)
    to_auto = setup.configured_interval_s is not None
    yield Proposal(
        name="interval",
        title=f"a checkpoint every {human_s(best.best_s)} instead of {human_s(job.interval_s)}",
        change=(
            'run.checkpoint_interval_s = "auto"'
            if to_auto
            else f"remove the trainer's own interval, or run.checkpoint_interval_s = {best.best_s:.0f}"
        ),
        formula=(
            f"a stall of {human_s(job.save_cost_s)} in each interval, and half an interval for each of "
            f"{job.uncovered_per_day:.2g} uncovered interruptions a day"
        ),
        job=replace(job, interval_s=best.best_s),
    )


def _even_saves(job: Job, setup: Setup) -> Iterator[Proposal]:
    share, even = setup.busiest_share, 1 / setup.ranks
    if share is None or even >= share * _EVEN_SHARE:
        return
    factor = even / share
    yield Proposal(
        name="even_saves",
        title=f"all {setup.ranks} ranks of a VM save an equal share",
        change="shard the state, for example with fully_shard, so that no rank saves most of it",
        formula=(
            f"save and stall x {100 * even:.0f} / {100 * share:.0f}: the busiest rank saves "
            f"{100 * share:.0f} % of the bytes"
        ),
        job=_with_save(job, factor),
    )


def _smaller_state(job: Job) -> Proposal:
    down_s = {**job.down_s}
    for part in ("fetch", "load"):
        down_s[part] = down_s.get(part, 0.0) / 2
    smaller = replace(
        _with_save(job, 0.5), measured=scaled(job.measured, save=0.5, size=0.5), down_s=down_s
    )
    return Proposal(
        name="smaller_state",
        title="a state of half the size",
        change="save optimizer moments in 8 or 16 bits, and no copy of frozen weights",
        formula=f"half of stall, save, send and restore: {_times(job)}",
        job=smaller,
    )


def _with_save(job: Job, factor: float) -> Job:
    return replace(
        job,
        measured=scaled(job.measured, save=factor),
        save_cost_s=job.save_cost_s * factor,
        stall_s=job.stall_s * factor,
    )


def _times(job: Job) -> str:
    made = job.forecast
    fetched_s = job.down_s.get("fetch", 0.0) + job.down_s.get("load", 0.0)
    return (
        f"{human_s(job.save_cost_s)}, {human_s(made.save_s)}, {human_s(made.send_s)}, "
        f"{human_s(fetched_s)}"
    )


def _faster_store(job: Job) -> Proposal:
    made = job.forecast
    return Proposal(
        name="faster_store",
        title="twice the bandwidth to the store",
        change="more flush.connections, a VM with a faster network, or a bucket in its region",
        formula=f"half of the {human_s(made.send_s)} to send; saving takes {human_s(made.save_s)}",
        job=replace(job, measured=scaled(job.measured, send=0.5)),
    )


def _no_limit(job: Job) -> Iterator[Proposal]:
    if job.background_bytes_per_s is None:
        return
    free = replace(job, background_bytes_per_s=None)
    yield Proposal(
        name="no_background_limit",
        title="periodic checkpoints at full speed",
        change="remove flush.background_bytes_per_s",
        formula=(
            f"{job.uncovered_per_day:.2g} uncovered interruptions x a lag of {human_s(free.lag_s)} "
            f"instead of {human_s(job.lag_s)}"
        ),
        job=free,
    )


def _shorter_reserve(job: Job) -> Iterator[Proposal]:
    commit = job.measured.pace.commit_s
    if commit is None:
        return
    reserve_s = float(math.ceil(max(_RESERVE_S_MIN, _COMMITS_IN_RESERVE * commit.mean)))
    if reserve_s < job.reserve_s:
        yield Proposal(
            name="reserve",
            title=f"a reserve of {human_s(reserve_s)} instead of {human_s(job.reserve_s)}",
            change=f"deadline.reserve_s = {reserve_s:g}",
            formula=f"four commits of {human_s(commit.mean)}, at least 1 s",
            job=replace(job, reserve_s=reserve_s),
        )


def _follow_ups(job: Job) -> Iterator[Proposal]:
    if job.follow_ups:
        return
    more = replace(job, follow_ups=True)
    longest = max(job.kinds, key=lambda kind: kind.grace_s, default=None)
    if longest is None:
        return
    yield Proposal(
        name="follow_ups",
        title="follow-up checkpoints until the end of the VM",
        change="trainer.follow_ups = true",
        formula=(
            f"the last one starts {human_s(covered_redone_s(more, longest))} before the end, "
            f"instead of {human_s(covered_redone_s(job, longest))}"
        ),
        job=more,
    )


def _restore(job: Job, setup: Setup) -> Iterator[Proposal]:
    fetch_s, start_s = (job.down_s.get(part, 0.0) for part in ("fetch", "start"))
    if not setup.has_prefetch:
        yield Proposal(
            name="prefetch",
            title="the next VM fetches before the trainer asks",
            change="restore.prefetch = true",
            formula=f"fetch {human_s(fetch_s)} in parallel with start {human_s(start_s)}",
            job=replace(job, down_s={**job.down_s, "fetch": max(0.0, fetch_s - start_s)}),
        )
    yield Proposal(
        name="faster_fetch",
        title="a fetch at twice the rate",
        change="staging.path on local NVMe or tmpfs, or a VM with a faster network",
        formula=f"{job.per_day:.2g} interruptions a day x half of {human_s(fetch_s)}",
        job=replace(job, down_s={**job.down_s, "fetch": fetch_s / 2}),
    )


def _replacement(job: Job, setup: Setup) -> Iterator[Proposal]:
    """The next VM starts while the old one trains."""
    cloud_s, boot_s = (job.down_s.get(part, 0.0) for part in ("cloud", "boot"))
    overlap_s = sum(kind.per_day * min(kind.grace_s, cloud_s + boot_s) for kind in job.kinds)
    if setup.orders_vm or not overlap_s:
        return
    mean_s = overlap_s / job.per_day
    sooner = {"cloud": max(0.0, cloud_s - mean_s), "boot": boot_s - max(0.0, mean_s - cloud_s)}
    yield Proposal(
        name="replacement",
        title="the next VM is ordered at the notice",
        change="run.handover = true, notify.exec = a program that orders a VM",
        formula=(
            f"{human_s(cloud_s + boot_s)} without a VM and in its boot, in parallel with the notice"
        ),
        job=replace(
            job,
            down_s={**job.down_s, **sooner},
            doubled_s=job.doubled_s + boot_s - sooner["boot"],
        ),
    )


def _longer_notice(job: Job) -> Iterator[Proposal]:
    """GCP gives 120 s on request."""

    def is_short(kind: InterruptionKind) -> bool:
        return kind.source in ("gcp.preempted", "preemption") and 0 < kind.grace_s < SHORT_NOTICE_S

    short = [kind for kind in job.kinds if is_short(kind)]
    if not short:
        return
    longer = replace(
        job,
        kinds=tuple(
            replace(kind, grace_s=LONG_NOTICE_S) if is_short(kind) else kind for kind in job.kinds
        ),
    )
    per_day = sum(kind.per_day for kind in short)
    chances = job.chance(short[0]), longer.chance(replace(short[0], grace_s=LONG_NOTICE_S))
    yield Proposal(
        name="notice_120",
        title="a notice of 120 s on GCP",
        change="create the VM with a preemption notice; sources.gcp_preemption_notice_s = 120",
        formula=(
            f"{per_day:.2g} notices a day: a commit in time with probability {chances[1]:.2f} instead of "
            f"{chances[0]:.2f}"
        ),
        job=longer,
    )


def _longer_grace(job: Job) -> Iterator[Proposal]:
    """The operator decides how long the end of a VM waits for the verdict."""
    for kind in job.kinds:
        found = margin(job, kind.source, kind.grace_s)
        if kind.source not in _GRACES or found.spare_s >= 0:
            continue
        name, key = _GRACES[kind.source]
        set_s = math.ceil((found.needed_s + _KEY_MARGIN_S) / _ROUNDED_UP_S) * float(_ROUNDED_UP_S)
        longer = replace(kind, grace_s=set_s - _KEY_MARGIN_S)
        others = tuple(each for each in job.kinds if each is not kind)
        yield Proposal(
            name=name,
            title=f"{human_s(longer.grace_s)} of grace for {kind.source}",
            change=f"{key} = {set_s:g}, and the same limit of the host",
            formula=f"{human_s(found.needed_s)} are needed, {human_s(kind.grace_s)} are given",
            job=replace(job, kinds=(*others, longer)),
        )
