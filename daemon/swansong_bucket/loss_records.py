# SPDX-License-Identifier: Apache-2.0
"""The records of the preemption loss: resumes, the course of evacuations, and the end of a training.

Pure.  :mod:`swansongd.observe.accounting` collects the facts, and :mod:`swansong_tools.economics.loss` adds
them up.
Times called ``*_wall_s`` are wall-clock seconds since 1970, which several VMs do not share exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swansong import bounds

from swansong_bucket.model import CommitRef, Verdict, VmPart

STEP_S_MIN = 1e-6
"""No step is faster: a shorter one is forged."""
PARTS = ("cloud", "boot", "start", "fetch", "load", "warm_up")
"""The parts of *down*, in the order in which they happen."""
LOST = ("stall", "redone", *PARTS)
"""The parts of the preemption loss."""
TRAINED = ("stall", "redone")
"""The parts that passed on the GPUs before the interruption; the others are of the GPUs after it."""


# ---------------------------------------------------------------- the records in the store


@dataclass(frozen=True, slots=True, kw_only=True)
class LastReport:
    """The training as a farewell has it."""

    step: int
    wall_s: float
    """When this step was completed."""
    step_s: float | None
    ranks: int
    saves_s: float
    stall_s: float
    is_over: bool
    """No further step follows."""
    deadline_wall_s: float | None = None


@dataclass(frozen=True, slots=True)
class NoticeRecord:
    """A notice that an evacuation answers."""

    source: str
    kind: str


@dataclass(frozen=True)
class Conclusion:
    """The verdict of an evacuation, with what led to it."""

    evacuation_id: str
    verdict: Verdict
    reason: str
    commit: CommitRef | None
    """The newest whole commit: the parts of all VMs are committed."""
    slack_s: float
    """Seconds before the deadline at which the farewell was written."""
    part: VmPart | None = None
    """This VM's part of a checkpoint that is newer than ``commit`` and not whole."""
    expected_s: float | None = None
    """Forecast of the newest request: time from the request to its commit; None without a forecast."""
    took_s: float | None = None
    """That time as it was; None while its checkpoint is not committed."""
    is_foretold: bool = False
    """No verdict was announced so far: this one holds if the power is cut now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvacuationRecord:
    """The course of an evacuation so far, for its farewell.  Times are seconds since it opened."""

    opened_wall_s: float
    deadline_s: float | None = None
    """None once the evacuation has ended."""
    is_assumed: bool = False
    """No notice has stated the deadline: the VM may train on after it."""
    is_ended: bool = False
    """The training on this VM is over, and everything that it has sealed is committed."""
    node: int = 0
    notices: tuple[NoticeRecord, ...] = ()
    """The most severe first."""
    timeline: Sequence[object] = ()
    """One JSON object for each log line of the evacuation, oldest first."""
    left_out: int = 0
    """Entries that the timeline had no room for."""
    samples: Sequence[tuple[float, int]] = ()
    """Time, and the bytes that flushes have sent by then; both ascend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationEnd:
    """The last step that a generation is known to have completed."""

    generation: int
    step: int
    wall_s: float
    is_estimated: bool
    step_s: float | None = None
    ranks: int | None = None
    saves_s: float | None = None
    """Time for which training stood still for checkpoints before the last evacuation; None if unknown."""
    stall_s: float | None = None
    """The same for the last evacuation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """A resume as it is recorded in the store."""

    run: str
    generation: int
    vm: str
    """Identifies the VM and its boot."""
    ranks: int
    node: int
    nodes: int
    booted_wall_s: float
    daemon_wall_s: float
    """When the daemon started."""
    download_began_wall_s: float | None
    download_ended_wall_s: float | None
    bytes_fetched: int
    bytes_linked: int
    asked_wall_s: float | None
    answered_wall_s: float | None
    started_wall_s: float
    """When training started: the checkpoint is loaded."""
    first_step_wall_s: float
    """When the first new step was completed."""
    start_step: int
    """The step of the restored state; 0 for a fresh run."""
    first_step: int
    restored: CommitRef | None
    earlier: GenerationEnd | None
    """The end of the generation that trained before; None for the first one of the run."""


@dataclass(frozen=True, slots=True)
class History:
    """Interruptions of the run's earlier VMs, from the claims and farewells in the bucket."""

    observed_s: float = 0.0
    """Time for which these VMs lived."""
    uncovered: int = 0
    """Interruptions in that time without a SAFE farewell."""


# ---------------------------------------------------------------- the end of a generation


@dataclass(frozen=True, slots=True)
class Point:
    """A step that was completed by this time."""

    step: int
    wall_s: float


def ending(
    generation: int,
    *,
    report: LastReport | None,
    points: Sequence[Point],
    ended_by_s: Sequence[float],
) -> GenerationEnd | None:
    """The last step of a generation, from everything that its VM has left behind; None without a trace.

    Training continues after the last farewell until the deadline, at the usual pace.  A VM without a farewell
    died at an unknown moment before its next commit, on average half an interval after the last one.  The
    error moves time between *redone* and *down*, and leaves their sum as it is.

    Args:
        report: of the newest farewell.
        points: the first new step and the newest commits, in any order.
        ended_by_s: times at which the next generation existed already; the earliest one after the last trace
            counts.  Empty: the generation may still train, and nothing is estimated.
    """
    known = sorted(points, key=lambda point: (point.wall_s, point.step))
    pace_s = _pace_s(known) if report is None or report.step_s is None else report.step_s
    newest = known[-1] if known else None
    if report is not None and (newest is None or newest.step <= report.step):
        last, end_s = Point(report.step, report.wall_s), report.deadline_wall_s
    elif newest is not None:
        last, end_s = newest, None
        if len(known) > 1:
            end_s = last.wall_s + (last.wall_s - known[-2].wall_s) / 2
    else:
        return None
    is_exact = report is not None and report.is_over and last.step == report.step
    by_wall_s = min((at_s for at_s in ended_by_s if at_s > last.wall_s), default=last.wall_s)
    if end_s is not None and not is_exact:
        last = _further(last, min(end_s, by_wall_s), pace_s)
    return GenerationEnd(
        generation=generation,
        step=last.step,
        wall_s=last.wall_s,
        is_estimated=not is_exact,
        step_s=pace_s,
        ranks=None if report is None else report.ranks,
        saves_s=None if report is None else report.saves_s,
        stall_s=None if report is None else report.stall_s,
    )


def ended_by(following: Resumption) -> tuple[float, ...]:
    """Times at which this generation existed: the earlier one had ended by then, if they come after it."""
    asked_s = following.asked_wall_s
    return (
        following.booted_wall_s,
        following.daemon_wall_s,
        *(() if asked_s is None else (asked_s,)),
        following.started_wall_s,
    )


def _further(last: Point, until_wall_s: float, pace_s: float | None) -> Point:
    """The last step that was completed by then, at this pace."""
    if pace_s is None or pace_s < STEP_S_MIN or until_wall_s <= last.wall_s:
        return last
    steps = min(int((until_wall_s - last.wall_s) / pace_s), bounds.STEP_MAX - last.step)
    return Point(last.step + steps, last.wall_s + steps * pace_s)


def _pace_s(known: Sequence[Point]) -> float | None:
    """Time of a step between the first and the last of these points."""
    if not known or known[-1].step <= known[0].step or known[-1].wall_s <= known[0].wall_s:
        return None
    return (known[-1].wall_s - known[0].wall_s) / (known[-1].step - known[0].step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One generation that trained, from its first new step to its last known one."""

    generation: int
    claimed_wall_s: float | None
    resumption: Resumption | None
    """None: it was not recorded."""
    start_step: int
    """The step of the state that it continued from; without a record, of the newest commit before it."""
    ending: GenerationEnd


# ---------------------------------------------------------------- the loss before a resumption


def down_parts(
    resumption: Resumption | None, from_s: float, first_s: float
) -> dict[str, float | None]:
    """The parts of the time between two instants; their sum is its length."""
    if resumption is None:
        return {"unknown": first_s - from_s}
    is_new = resumption.booted_wall_s >= from_s
    has_asked = resumption.asked_wall_s is not None and resumption.answered_wall_s is not None
    # A machine that was up before, such as the host of a container: the time without a daemon is the cloud's.
    ends = {
        "cloud": resumption.booted_wall_s if is_new else resumption.daemon_wall_s,
        "boot": resumption.daemon_wall_s if is_new else None,
        "start": resumption.asked_wall_s if has_asked else resumption.started_wall_s,
        "fetch": resumption.answered_wall_s if has_asked else None,
        "load": resumption.started_wall_s if has_asked else None,
        "warm_up": first_s,
    }
    parts: dict[str, float | None] = {}
    cursor_s = from_s
    for name in PARTS:
        end_s = ends[name]
        if end_s is None:
            parts[name] = None
            continue
        end_s = min(max(end_s, cursor_s), first_s)
        parts[name] = end_s - cursor_s
        cursor_s = end_s
    return parts


def lost_gpu_s(resumption: Resumption) -> dict[str, float]:
    """GPU seconds of the interruption before this resumption, by part; for metrics.

    The part ``redone`` contains only steps of the generation before; the loss of the run has all of them.
    """
    parts_s = dict.fromkeys(LOST, 0.0)
    last = resumption.earlier
    if last is not None:
        first_s = max(last.wall_s, resumption.first_step_wall_s)
        down = down_parts(resumption, last.wall_s, first_s)
        parts_s |= {part: seconds or 0.0 for part, seconds in down.items()}
        parts_s["redone"] = max(0, last.step - resumption.start_step) * (last.step_s or 0.0)
        parts_s["stall"] = last.stall_s or 0.0
    before = resumption.ranks if last is None else last.ranks or resumption.ranks
    return {
        part: seconds * (before if part in TRAINED else resumption.ranks)
        for part, seconds in parts_s.items()
    }
