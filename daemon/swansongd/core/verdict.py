# SPDX-License-Identifier: Apache-2.0
"""When a verdict is announced: SAFE as soon as it is proved, any other once nothing can improve it in time.

:mod:`swansongd.core.proof` decides which verdict holds.
"""

from __future__ import annotations

from swansong_bucket.model import Position, Verdict

from swansongd.core import arrival, course, emergency, notices, planner, proof
from swansongd.core.events import Conclude
from swansongd.core.state import Evacuation, State
from swansongd.core.transition import EXIT_STOPPED, HOST_SOURCE, Transition

SETTLE_S = 10.0
"""A verdict waits this long for sets that still settle: five times the default of ``trainer.settle_s``."""
_MERIT = {Verdict.NO_TRAINING: -1, Verdict.LOST: 0, Verdict.PARTIAL: 1, Verdict.SAFE: 2}


def record_fence(transition: Transition) -> None:
    """A fence that ends the daemon ends the open evacuation: with a farewell, and exit code 14."""
    state = transition.state
    if state.course.is_leaving and state.is_deciding:
        verdict, reason = proof.prove(state)
        write_farewell(transition, verdict, reason, is_foretold=False)


def reconcile(transition: Transition) -> None:
    """Conclude the evacuation as soon as its outcome is known, and again if the outcome improves."""
    evacuation = transition.state.evacuation
    if evacuation is None:
        return
    verdict, reason = proof.prove(transition.state)
    is_open = Verdict.SAFE not in (verdict, evacuation.verdict) and transition.left_s > 0
    if evacuation.is_precaution:
        if not (transition.left_s > 0 and _may_improve(transition, evacuation)):
            transition.log("info", "precaution_done", evacuation=evacuation.id, reason=reason)
            course.end(transition)
    elif is_open and _may_improve(transition, evacuation):
        if _is_told_ahead(transition.state) or _awaits_peers(transition.state, evacuation):
            _foretell(transition, evacuation, verdict, reason)
    elif is_open and (left_s := arrival.wait_s(transition.state, transition.now)) is not None:
        if evacuation.foretold is None:
            plan = evacuation.plan.kind.value
            transition.mark("waiting_for_trainer", seconds_left=round(left_s, 2), plan=plan)
        reason = f"{reason}; waiting for a trainer to connect"
        _foretell(transition, evacuation, verdict, reason)
    else:
        verdict, reason = proof.prove(transition.state, is_final=True)
        _conclude(transition, evacuation, verdict, _explained(transition, verdict, reason))
        _leave_host(transition)


def _may_improve(transition: Transition, evacuation: Evacuation) -> bool:
    """Whether the trainer may still seal a set, or sealed sets may still become commits."""
    state, request = transition.state, evacuation.request
    if state.starts.fenced_by is not None:
        return False
    return (
        (request is not None and request.is_waiting)
        or emergency.will_repeat(transition)
        or not state.is_scanned
        or bool(state.uncommitted)
        or bool(state.commits.stored)
        or _settles(state, evacuation, transition.now)
        or _claims(state)
        or (state.part is not None and not evacuation.is_precaution)
    )


def _settles(state: State, evacuation: Evacuation, now_mono_s: float) -> bool:
    """Whether a set of a trainer without hooks may settle soon; one that is torn never does."""
    return now_mono_s < evacuation.opened_mono_s + SETTLE_S and state.staging.is_settling


def _claims(state: State) -> bool:
    """Whether the newest commit is not known yet, or the start that runs waits for its generation."""
    start = state.running
    return not state.commits.is_run_read or (start is not None and start.generation is None)


def _explained(transition: Transition, verdict: Verdict, reason: str) -> str:
    """The reason, with the cause that kept a checkpoint from being taken."""
    evacuation = transition.evacuation
    request = evacuation.request
    if verdict is Verdict.SAFE or (verdict is Verdict.NO_TRAINING and request is None):
        return reason
    causes = [evacuation.plan.reason if request is None else request.failure]
    if transition.left_s <= 0:
        causes.append("the time ran out")
    return "; ".join([*(cause for cause in causes if cause and cause not in reason), reason])


def _leave_host(transition: Transition) -> None:
    """The host shuts down: end the daemon, unless a newer set can still become a commit in time."""
    if HOST_SOURCE not in transition.state.notices.live or _still_saves(transition):
        return
    verdict = transition.evacuation.verdict
    reason = f"the host shuts down; {verdict.value if verdict else ''}"
    course.leave(transition, EXIT_STOPPED, reason)


def _still_saves(transition: Transition) -> bool:
    """Whether a newer checkpoint may still be stored in time."""
    state, request = transition.state, transition.evacuation.request
    if transition.left_s <= 0:
        return False
    data_left_s = transition.left_s - state.settings.reserve_s
    bandwidth = state.learned.bandwidth_bytes_per_s
    return (
        bool(state.commits.stored)
        or (request is not None and request.is_waiting)
        or any(planner.fits(candidate, data_left_s, bandwidth) for candidate in state.candidates)
    )


def _conclude(
    transition: Transition, evacuation: Evacuation, verdict: Verdict, reason: str
) -> None:
    """Announce a verdict that is new and not worse than the last one."""
    state, before = transition.state, evacuation.verdict
    commit, last = state.commits.last_complete, state.course.last_verdict
    is_worse = before is not None and _MERIT[verdict] < _MERIT[before]
    if is_worse or (last is not None and verdict is before and commit == last.commit):
        return
    expected_s, took_s = _times(state)
    conclusion = Conclude(
        evacuation.id,
        verdict,
        reason,
        commit,
        round(transition.left_s, 2),
        state.part,
        expected_s=expected_s,
        took_s=took_s,
        mono_s=transition.now,
        notices=notices.identities(state, evacuation.identities),
    )
    course.record_verdict(transition, conclusion)
    position = proof.position_of(state)
    if verdict is Verdict.SAFE and isinstance(position, Position):
        notices.record_safe(transition, position)
    transition.do(conclusion)


def _times(state: State) -> tuple[float | None, float | None]:
    """Forecast of the newest request whose checkpoint is committed, and the time that it took."""
    made = state.requests_made
    committed = [request for request in made if request.took_s is not None]
    request = max(committed or made, key=lambda each: each.asked_mono_s, default=None)
    if request is None:
        return None, None
    times_s = request.expected_s, request.took_s
    expected_s, took_s = (None if each is None else round(each, 2) for each in times_s)
    return expected_s, took_s


def _awaits_peers(state: State, evacuation: Evacuation) -> bool:
    """Whether this VM has committed its part, and other VMs have not."""
    is_committed = all(state.is_covered(answer) for answer in state.answers)
    return state.part is not None and is_committed and evacuation.verdict is None


def _is_told_ahead(state: State) -> bool:
    """Whether the next VM of a handover may read of the notice, in the generation of this one."""
    return state.settings.handover and state.newest_generation is not None


def _foretell(
    transition: Transition, evacuation: Evacuation, verdict: Verdict, reason: str
) -> None:
    """Write a farewell before the verdict.

    The power may be cut during a wait for a trainer or for other VMs, and the next VM of a handover must not
    take the run over meanwhile.
    """
    commit, part = transition.state.commits.last_complete, transition.state.part
    foretold = verdict, commit, None if part is None else part.ref
    if evacuation.foretold == foretold:
        return
    course.record(transition, foretold=foretold)
    if part is not None:
        transition.mark(
            "waiting_for_peers",
            generation=part.ref.generation,
            step=part.ref.step,
            vms_committed=part.committed,
            vms=part.nodes,
        )
    write_farewell(transition, verdict, reason, is_foretold=True)


def write_farewell(
    transition: Transition, verdict: Verdict, reason: str, *, is_foretold: bool
) -> None:
    """Write a farewell without an announcement.

    Args:
        is_foretold: the evacuation has no verdict yet.
    """
    evacuation, state = transition.evacuation, transition.state
    told = Conclude(
        evacuation.id,
        verdict,
        reason,
        state.commits.last_complete,
        round(transition.left_s, 2),
        state.part,
        is_foretold=is_foretold,
        is_final=False,
    )
    transition.do(told)
