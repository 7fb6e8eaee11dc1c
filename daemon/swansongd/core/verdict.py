# SPDX-License-Identifier: Apache-2.0
"""The verdict: how an evacuation ends, reported as soon as it is known, and again if it gets better."""

from __future__ import annotations

from dataclasses import replace

from swansongd.core import emergency, notices
from swansongd.core.events import (
    Conclude,
    Exit,
)
from swansongd.core.state import (
    Concluded,
    Evacuation,
    State,
)
from swansongd.core.transition import EXIT_STOPPED, HOST_SOURCE, Transition
from swansongd.model import (
    Verdict,
)

_MERIT = {Verdict.LOST: 0, Verdict.PARTIAL: 1, Verdict.SAFE: 2}


def reconcile(transition: Transition) -> None:
    """Say how the evacuation ended, as soon as that is known; say it again if it got better."""
    state = transition.state
    evacuation = state.evacuation
    if evacuation is None:
        return
    request = evacuation.request
    is_waiting = (request is not None and request.is_waiting) or emergency.will_repeat(transition)
    has_looked = (
        state.scanned_mono_s is not None and state.scanned_mono_s >= evacuation.opened_mono_s
    )
    is_answered = state.is_answered
    is_fenced = state.overtaken_by is not None
    is_waiting = is_waiting and not is_fenced
    is_busy = not (is_answered or is_fenced) and (
        not has_looked
        or bool(state.uncommitted)
        or bool(state.stored)
        or state.generation is None
        or (state.part is not None and not evacuation.is_precaution)
    )
    is_waiting = is_waiting and not is_answered
    out_of_time = transition.left_s <= 0
    if (is_waiting or is_busy) and not out_of_time:
        if not is_waiting:
            _report_part(transition, evacuation)
        return
    verdict, reason = _judge(state, out_of_time=out_of_time and (is_waiting or is_busy))
    before = evacuation.verdict
    is_worse = before is not None and _MERIT[verdict] < _MERIT[before]
    commit = state.last_complete
    is_news = verdict is not before or commit != evacuation.verdict_commit
    if evacuation.is_precaution:
        _precaution_done(transition, evacuation, reason)
        return
    if is_news and not is_worse:
        transition.evacuation = replace(
            transition.evacuation, verdict=verdict, verdict_commit=commit
        )
        slack_s = round(transition.left_s, 2)
        transition.do(Conclude(evacuation.id, verdict, reason, commit, slack_s, state.part))
        transition.state = replace(
            transition.state,
            last_verdict=Concluded(
                evacuation_id=evacuation.id,
                verdict=verdict,
                reason=reason,
                commit=commit,
                mono_s=transition.now,
                notices=notices.identities(state, evacuation.identities),
            ),
        )
    if HOST_SOURCE in state.notices:
        transition.state = replace(transition.state, is_leaving=True)
        transition.do(Exit(EXIT_STOPPED, f"the host shuts down; {verdict.value}"))


def _report_part(transition: Transition, evacuation: Evacuation) -> None:
    """Leave a farewell that names this VM's part: the power may go before the other VMs have committed."""
    state, part = transition.state, transition.state.part
    is_wanted = state.answer is None or state.is_covered(state.answer)
    if part is None or not is_wanted or evacuation.is_precaution or evacuation.verdict is not None:
        return
    if evacuation.part_reported == part.ref:
        return
    transition.evacuation = replace(transition.evacuation, part_reported=part.ref)
    transition.mark(
        "waiting_for_peers",
        generation=part.ref.generation,
        step=part.ref.step,
        vms_committed=part.committed,
        vms=part.nodes,
    )
    last = state.last_complete
    verdict = Verdict.LOST if last is None else Verdict.PARTIAL
    reason = f"{part}; {_what_stands(state)}"
    slack_s = round(transition.left_s, 2)
    transition.do(
        Conclude(evacuation.id, verdict, reason, state.last_complete, slack_s, part, is_final=False)
    )


def _what_stands(state: State) -> str:
    last = state.last_complete
    return "no checkpoint of the run is whole" if last is None else f"{last} stands"


def _judge(state: State, *, out_of_time: bool) -> tuple[Verdict, str]:
    evacuation, part = state.evacuation, state.part
    assert evacuation is not None
    request = evacuation.request
    if state.is_answered and state.answer is not None and state.is_whole(state.answer):
        return (
            Verdict.SAFE,
            f"the checkpoint that was asked for is committed: {state.last_complete}",
        )
    if state.is_answered:
        return (
            Verdict.SAFE,
            f"a checkpoint from after the notice is committed: {state.last_complete}",
        )
    if state.overtaken_by is not None:
        verdict = Verdict.LOST if state.last_complete is None else Verdict.PARTIAL
        return verdict, f"the run continues on other VMs as generation {state.overtaken_by}"
    if state.last_complete is None:
        if part is not None:
            return Verdict.LOST, f"{part}; {_what_stands(state)}"
        if out_of_time:
            return Verdict.LOST, "the time ran out before anything was committed"
        if request is not None and request.failure:
            return Verdict.LOST, f"nothing is committed: {request.failure}"
        return Verdict.LOST, "nothing was staged, so nothing is committed"
    stands = _what_stands(state)
    if part is not None:
        stands = f"{part}; {stands}"
    if out_of_time:
        return Verdict.PARTIAL, f"the time ran out; {stands}"
    if request is not None and request.failure:
        return Verdict.PARTIAL, f"{request.failure}; {stands}"
    if request is not None and state.answer is not None and state.is_covered(state.answer):
        reason = f"a commit of before the notice stands ahead of step {state.answer.step}"
        return Verdict.PARTIAL, f"{reason}; {stands}"
    if state.owes_checkpoint:
        return Verdict.PARTIAL, f"training started behind the newest commit; {stands}"
    if evacuation.newest is not None and not state.is_covered(evacuation.newest):
        return Verdict.PARTIAL, f"the newest sealed set could not be used; {stands}"
    ahead = max((trainer.step for trainer in state.trainers), default=-1)
    if request is None and ahead > state.last_complete.step:
        return Verdict.PARTIAL, f"{evacuation.plan.reason}; {stands}, training was at step {ahead}"
    if part is not None:
        return Verdict.PARTIAL, stands
    return Verdict.SAFE, f"the newest sealed state is committed: {state.last_complete}"


def _precaution_done(transition: Transition, evacuation: Evacuation, reason: str) -> None:
    transition.log("info", "precaution_done", evacuation=evacuation.id, reason=reason)
    transition.state = replace(transition.state, evacuation=None)
