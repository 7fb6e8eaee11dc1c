# SPDX-License-Identifier: Apache-2.0
"""Evacuations and precautions: they open, get an earlier deadline, and end as the notices require."""

from __future__ import annotations

import hashlib

from swansong_bucket.model import DRILL, DRILL_ID, PEER_SOURCE, Notice, Verdict

from swansongd.core import course, emergency, flight, notices, proof, request, verdict
from swansongd.core.events import CheckFence, Rescan
from swansongd.core.planner import Plan, PlanKind
from swansongd.core.state import Evacuation, State
from swansongd.core.transition import HOST_SOURCE, Transition


def evacuation_id(notice: Notice, state: State, now_mono_s: float) -> str:
    """The id of the evacuation that opens now, which is also the id of its request to the trainer.

    Hooks repeat their answer to an id that they have answered before.  No id may therefore return within a
    boot: the monotonic time is part of it.  The exception is the evacuation that an earlier life of the
    daemon had open for this notice.  VMs with identical notices have different ids.  The first evacuation for
    the request of another VM has the id of that request.
    """
    if notice.source == PEER_SOURCE and notice.identity not in state.course.opened:
        return notice.identity
    if notice.evacuation_id and notice.evacuation_id not in state.course.opened:
        return notice.evacuation_id
    facts = f"{notice.identity} {state.settings.vm} {now_mono_s!r} {len(state.course.opened)}"
    prefix = DRILL_ID if notice.source == DRILL else ""
    return prefix + hashlib.sha256(facts.encode()).hexdigest()[:16]


def reconcile(transition: Transition) -> None:
    """Open, move, withdraw or outlive the evacuation, as the live notices require."""
    live = transition.state.urgent_notices(transition.now)
    evacuation = transition.state.evacuation
    if not live:
        early = transition.state.notices.in_force
        if evacuation is not None and not (evacuation.is_precaution and early):
            _withdraw(transition, "every notice was withdrawn")
        if transition.state.evacuation is None:
            _take_precaution(transition, early)
        return
    if evacuation is None or evacuation.is_precaution:
        _begin(transition, live)
        return
    news = _news(evacuation, live)
    # Training continued since the verdict: a new notice is worth another checkpoint.
    admitted = notices.admitted(transition, news) if evacuation.verdict is not None else ()
    deadline = _deadline_mono_s(live)
    if admitted:
        _open_for(transition, admitted[0])
        return
    if deadline < evacuation.deadline_mono_s:
        course.record(transition, deadline_mono_s=deadline)
        transition.mark(
            "deadline_moved", seconds_left=round(transition.left_s, 2), source=live[0].source
        )
    elif transition.now > evacuation.deadline_mono_s + notices.OUTLIVED_S:
        transition.log("warning", "outlived_deadline", hint="the VM was not taken; watching again")
        notices.record_outlived(transition, live)
        _withdraw(transition, "the VM has outlived its deadline")
        return
    is_waiting = evacuation.verdict is not None
    _answer(transition, tuple(n for n in live if not (is_waiting and n in news)))


def _begin(transition: Transition, live: tuple[Notice, ...]) -> None:
    """Open an evacuation, in place of a precaution, unless too many were opened recently."""
    admitted = notices.admitted(transition, live)
    if not admitted:
        return
    if transition.state.evacuation is not None:
        _withdraw(transition, "a notice with a deadline replaces the precaution")
    _open_for(transition, admitted[0])


def _open_for(transition: Transition, cause: Notice) -> None:
    """Open an evacuation because of this notice, which also answers notices whose deadline has passed."""
    notices.extend_overdue(transition, transition.state.urgent_notices(transition.now))
    live = transition.state.urgent_notices(transition.now)
    first = next(notice for notice in live if notice.identity == cause.identity)
    _open(transition, first, _deadline_mono_s(live))
    _answer(transition, live)


def _answer(transition: Transition, live: tuple[Notice, ...]) -> None:
    course.record(transition, identities=frozenset(notice.identity for notice in live))
    notices.record_answered(transition, live, transition.evacuation.id)


def _news(evacuation: Evacuation, live: tuple[Notice, ...]) -> tuple[Notice, ...]:
    """Notices that this evacuation does not answer yet.  An overdue one adds nothing after SAFE."""
    return tuple(
        notice
        for notice in live
        if notice.identity not in evacuation.identities
        and notice.source != HOST_SOURCE
        and not (notice.is_overdue and evacuation.verdict is Verdict.SAFE)
    )


def _deadline_mono_s(live: tuple[Notice, ...]) -> float:
    """The earliest deadline; that of another VM or of an overdue notice only without any other."""
    own = [n for n in live if n.source != PEER_SOURCE] or live
    timely = [n for n in own if not n.is_overdue] or own
    return min(notice.deadline_mono_s for notice in timely)


def _take_precaution(transition: Transition, early: tuple[Notice, ...]) -> None:
    """Advisory notices: take one more checkpoint while training continues."""
    for notice in early if transition.state.connected else ():
        if not notice.is_prepared and notices.admits_precaution(transition, notice):
            _open(transition, notice, notice.deadline_mono_s, is_precaution=True)
            return


def _open(
    transition: Transition, notice: Notice, deadline_mono_s: float, *, is_precaution: bool = False
) -> None:
    plan = emergency.planned(transition, left_s=deadline_mono_s - transition.now)
    id_ = evacuation_id(notice, transition.state, transition.now)
    if not is_precaution:
        notices.record_opened(transition, notice.source)
    follow_up = transition.state.follow_up
    if follow_up is not None and follow_up.is_waiting:
        request.withdraw(transition, follow_up, "another notice needs a checkpoint at once")
    is_resumed = id_ == notice.evacuation_id
    evacuation = Evacuation(
        id=id_,
        reason=f"{notice.source}: {notice.kind}",
        opened_mono_s=transition.now,
        deadline_mono_s=deadline_mono_s,
        plan=plan,
        is_precaution=is_precaution,
        is_resumed=is_resumed,
        safe_at=notice.safe_at if is_resumed else None,
        identities=frozenset({notice.identity}),
    )
    course.begin(transition, evacuation)
    flight.cut_backoff(transition)
    transition.mark(
        "precaution" if is_precaution else "notice",
        source=notice.source,
        kind=notice.kind,
        seconds_left=round(transition.left_s, 2),
        plan=plan.kind.value,
        why=plan.reason,
        **_foreseen(plan, transition.state),
    )
    transition.do(Rescan())
    if transition.state.commits.last_complete is None:
        # A VM that has taken the run over may have committed: that is not LOST.
        transition.do(CheckFence())
    if plan.kind is PlanKind.TAKE:
        emergency.make(transition)


def _foreseen(plan: Plan, state: State) -> dict[str, object]:
    """The forecast of the checkpoint that is about to be requested, for the timeline."""
    made = state.forecast
    if plan.kind is not PlanKind.TAKE or not made.is_measured:
        return {}
    return {"expected_s": round(made.expected_s, 2), "pessimistic_s": round(made.pessimistic_s, 2)}


def _withdraw(transition: Transition, reason: str) -> None:
    transition.mark("withdrawn", reason=reason)
    for made in transition.state.requests_made:
        request.withdraw(transition, made, reason)
    evacuation = transition.evacuation
    if transition.state.settings.handover and not evacuation.is_precaution:
        # After the end it has no deadline: the next VM, if there is one already, stands by.
        found = evacuation.verdict or proof.prove(transition.state)[0]
        verdict.write_farewell(transition, found, reason, is_foretold=evacuation.verdict is None)
    course.end(transition)
