# SPDX-License-Identifier: Apache-2.0
"""When the next follow-up checkpoint starts: arithmetic that minimises the expected loss of training.

After its first commit the VM trains on, and loses at its end the training since the newest committed state.
Let L be the time to the deadline, and h the rate at which the VM ends before its deadline.  A follow-up
blocks training for s seconds.  It is committed within c seconds in nine of ten cases, and its data is stored
d seconds after the request.  The reserve r belongs to the commit.  The request is served at the next step
boundary, up to one step g later.

**The last one.**  A start with x seconds left loses x seconds of training if it succeeds, so later is better.
If it fails, the training since the previous state is lost as well.  Let D be that training.  One more second
of lead costs one second, and gains D times the density of the duration at the end of the lead.  For a tail of
scale t, the best lead leaves a chance of t/D to fail.  With D about ten times the tail, that is one in ten.
So the last one starts with d + r left, where d is that of nine in ten cases, backed off by one step g.
With exact numbers, redone training is therefore at most save, send, reserve and one step.  Measured numbers
add the spread to d, and the latency of the decision loop to g.

**Earlier ones** count only if the VM ends early.  Between the newest state and the last start lie W seconds
of training.  n follow-ups divide them evenly, so an early end repeats W/2(n + 1) seconds on average.
The expected loss is ``n s + h W**2 / 2(n + 1)``.  The nth one pays if ``n(n + 1) < h W**2 / 2s``.
For large n this is the interval of Young, the root of ``2s / h`` (see :mod:`swansongd.core.cadence`).
An earlier one is over before the last one must start.  So none of them costs the last one.

**The one before the last** insures it.  With chance m the last one is too late, and the training since the
state before it is lost.  So that state should be new: it is over just when the last one must start.
It pays if m times the training that it saves is more than s, and if the last one still gains more than s.

**One or the other.**  If only one more fits, a start now gains the age a of the state in an early end, whose
probability is about ``h L``.  A later start gains the time that it waits.  The start is now if ``h L a`` is
more than that wait.

A follow-up that does not gain more training than it blocks does not start.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

INTERVAL_MIN_S = 5.0
"""Earlier follow-ups are at least this far apart, however little they cost: each one is a commit."""
MISSED_SHARE = 0.1
"""Chance that the last follow-up is too late: it starts with the time of nine in ten checkpoints left.

It holds once the spread is known.  After few checkpoints with a real spread of 18 % it is up to one in four.
The higher value would cost more where checkpoints take equal times (docs/design/decisions.md).
"""
LATE_S = 0.5
"""The last follow-up may start this late: the decision loop looks at the time at intervals, and an earlier
follow-up can take longer than expected.  The step of back-off, or the spread of the durations, covers it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The knowledge of the VM's end."""

    left_s: float
    """Time to the deadline."""
    early_per_s: float = 0.0
    """Probability for each second that the VM ends before its deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowUpCost:
    """The times of a follow-up checkpoint, as measured so far.  Unknown values count as zero."""

    data_s: float
    """From the request to the last stored byte, in about nine of ten cases."""
    commit_s: float
    """From the request to the end of the commit, in about nine of ten cases."""
    stall_s: float
    """Training stands still for this long."""
    step_s: float
    """Duration of a step: the longest wait for the step boundary."""


def next_start_s(
    ending: Ending, cost: FollowUpCost, *, reserve_s: float, age_s: float, tried_s: float = math.inf
) -> float | None:
    """Time until the next follow-up starts: 0 for now; None if none fits, or none pays.

    Args:
        ending: the deadline, and the chance of an earlier end.
        cost: of one follow-up.
        reserve_s: before the deadline; no data is sent in it.
        age_s: training since the newest state that is committed.
        tried_s: time since the last attempt, which may have failed.
    """
    room_s = ending.left_s - lead_s(cost, reserve_s=reserve_s)
    is_late = room_s < 0 and min(age_s, tried_s) > LATE_S
    if room_s < (-LATE_S if is_late else 0.0):
        return None
    room_s = max(0.0, room_s)
    if age_s + room_s <= cost.stall_s:
        return None
    wait_s = _earlier_start_s(ending, cost, room_s=room_s, age_s=age_s, tried_s=tried_s)
    return room_s if wait_s is None else wait_s


def lead_s(cost: FollowUpCost, *, reserve_s: float) -> float:
    """Time before the deadline at which the last follow-up starts."""
    return max(cost.data_s + reserve_s, cost.commit_s) + cost.step_s


def _earlier_start_s(
    ending: Ending, cost: FollowUpCost, *, room_s: float, age_s: float, tried_s: float
) -> float | None:
    """Time until the next follow-up before the last one; None without one."""
    busy_s = cost.commit_s + cost.step_s
    apart_s = max(INTERVAL_MIN_S, busy_s)
    since_s = min(age_s, tried_s)
    between_s = age_s + room_s
    count = earlier_count(
        between_s, early_per_s=ending.early_per_s, stall_s=cost.stall_s, apart_s=apart_s
    )
    waits_s = [max(0.0, between_s / (count + 1) - since_s)] if count else []
    if waits_s and waits_s[0] + busy_s > room_s:
        waits_s.clear()
    insuring_s = max(0.0, room_s - busy_s - LATE_S)
    is_in_time = room_s >= busy_s and since_s + insuring_s >= apart_s
    pays = MISSED_SHARE * (age_s + insuring_s) > cost.stall_s and busy_s > cost.stall_s
    if is_in_time and pays:
        waits_s.append(insuring_s)
    if waits_s:
        return min(waits_s)
    is_only_one = room_s < busy_s
    is_due = since_s >= apart_s
    if is_only_one and is_due and ending.early_per_s * ending.left_s * age_s > room_s:
        return 0.0
    return None


def earlier_count(between_s: float, *, early_per_s: float, stall_s: float, apart_s: float) -> int:
    """Number of follow-ups that divide ``between_s`` of training with the least expected loss.

    Args:
        between_s: from the newest state to the start of the last follow-up.
        early_per_s: see :class:`Ending`.
        stall_s: of each follow-up.
        apart_s: they are at least this far apart; positive.
    """
    room = max(0, math.floor(between_s / apart_s) - 1)
    gain_s = early_per_s * between_s * between_s / 2
    if gain_s <= 0.0 or room == 0:
        return 0
    if gain_s >= stall_s * room * (room + 1):
        return room
    return math.floor((math.sqrt(1 + 4 * gain_s / stall_s) - 1) / 2)
