# SPDX-License-Identifier: Apache-2.0
"""The verdict of an evacuation, reported as soon as it is known, and again if it improves."""

from __future__ import annotations

from dataclasses import replace

from swansong import protocol

from swansongd.core import arrival, emergency, gpus, notices
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

SETTLE_S = 10.0
"""A verdict waits this long for sets that still settle: five times the default of ``trainer.settle_s``."""
_MERIT = {Verdict.LOST: 0, Verdict.PARTIAL: 1, Verdict.SAFE: 2}


def reconcile(transition: Transition) -> None:
    """Conclude the evacuation as soon as its outcome is known, and again if the outcome improves."""
    if transition.state.evacuation is None:
        return
    evacuation = _remember_ahead(transition)
    is_waiting = _is_waiting(transition, evacuation)
    is_undecided = is_waiting or _is_busy(transition.state, evacuation, transition.now)
    is_out_of_time = transition.left_s <= 0
    if is_undecided and not is_out_of_time:
        if not is_waiting:
            _report_part(transition, evacuation)
        return
    verdict, reason = _judge(transition.state, transition.now, out_of_time=is_undecided)
    if arrival.wait_s(transition.state, transition.now) is not None:
        _foretell(transition, evacuation, verdict, reason)
        return
    if evacuation.is_precaution:
        _end_precaution(transition, evacuation, reason)
        return
    _conclude(transition, evacuation, verdict, reason)
    if HOST_SOURCE in transition.state.notices and not _still_saves(transition):
        transition.state = replace(transition.state, is_leaving=True)
        transition.do(Exit(EXIT_STOPPED, f"the host shuts down; {verdict.value}"))


def _still_saves(transition: Transition) -> bool:
    """Whether a newer set may still become a commit while the host shuts down."""
    state = transition.state
    return transition.left_s > 0 and bool(state.flight or state.stored or state.uncommitted)


def _remember_ahead(transition: Transition) -> Evacuation:
    """Note the newest step of the trainers: its state stays lost when their processes end."""
    ahead = max((trainer.step for trainer in transition.state.trainers), default=-1)
    if ahead > transition.evacuation.ahead:
        transition.evacuation = replace(transition.evacuation, ahead=ahead)
    return transition.evacuation


def _is_waiting(transition: Transition, evacuation: Evacuation) -> bool:
    """Whether the trainer may still seal a set that answers the request."""
    state, request = transition.state, evacuation.request
    if state.is_answered or state.overtaken_by is not None:
        return False
    return (request is not None and request.is_waiting) or emergency.will_repeat(transition)


def _settles(state: State, evacuation: Evacuation, now_mono_s: float) -> bool:
    """Whether a set of a trainer without hooks may settle soon; one that is torn never does."""
    is_new = now_mono_s < evacuation.opened_mono_s + SETTLE_S
    return is_new and any(protocol.parse_partial_name(name) is None for name in state.pending)


def _is_busy(state: State, evacuation: Evacuation, now_mono_s: float) -> bool:
    """Whether sealed sets may still become commits."""
    if state.is_answered or state.overtaken_by is not None:
        return False
    has_scanned = (
        state.scanned_mono_s is not None and state.scanned_mono_s >= evacuation.opened_mono_s
    )
    return (
        not has_scanned
        or bool(state.uncommitted)
        or bool(state.stored)
        or _settles(state, evacuation, now_mono_s)
        or state.generation is None
        or (state.part is not None and not evacuation.is_precaution)
    )


def _conclude(
    transition: Transition, evacuation: Evacuation, verdict: Verdict, reason: str
) -> None:
    """Announce a verdict that is new and not worse than the last one."""
    state, before = transition.state, evacuation.verdict
    commit = state.last_complete
    is_worse = before is not None and _MERIT[verdict] < _MERIT[before]
    if is_worse or (verdict is before and commit == evacuation.verdict_commit):
        return
    transition.evacuation = replace(transition.evacuation, verdict=verdict, verdict_commit=commit)
    slack_s = round(transition.left_s, 2)
    expected_s, took_s = _times(evacuation)
    transition.do(
        Conclude(
            evacuation.id,
            verdict,
            reason,
            commit,
            slack_s,
            state.part,
            expected_s=expected_s,
            took_s=took_s,
        )
    )
    transition.state = replace(
        transition.state,
        last_verdict=Concluded(
            evacuation_id=evacuation.id,
            verdict=verdict,
            reason=reason,
            commit=commit,
            mono_s=transition.now,
            notices=notices.identities(state, evacuation.identities),
            expected_s=expected_s,
            took_s=took_s,
        ),
    )


def _times(evacuation: Evacuation) -> tuple[float | None, float | None]:
    """Forecast of the newest request whose checkpoint is committed, and the time that it took."""
    made = evacuation.requests_made
    committed = [request for request in made if request.took_s is not None]
    request = max(committed or made, key=lambda each: each.asked_mono_s, default=None)
    if request is None:
        return None, None
    expected_s, took_s = request.expected_s, request.took_s
    return (
        None if expected_s is None else round(expected_s, 2),
        None if took_s is None else round(took_s, 2),
    )


def _foretell(
    transition: Transition, evacuation: Evacuation, verdict: Verdict, reason: str
) -> None:
    """Write a farewell for the case that the power is cut during the wait for a trainer.

    It is never SAFE: after a restart of the daemon a trainer that has not reconnected may be ahead of every
    commit, or in another line.
    """
    if verdict is Verdict.SAFE:
        verdict = Verdict.PARTIAL
    commit = transition.state.last_complete
    if evacuation.foretold == (verdict, commit):
        return
    transition.evacuation = replace(transition.evacuation, foretold=(verdict, commit))
    slack_s = round(transition.left_s, 2)
    reason = f"{reason}; waiting for a trainer to connect, whose step is unknown"
    transition.do(Conclude(evacuation.id, verdict, reason, commit, slack_s, is_final=False))


def _report_part(transition: Transition, evacuation: Evacuation) -> None:
    """Write a farewell with this VM's part: the power may be cut before the other VMs have committed."""
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


def _judge(state: State, now_mono_s: float, *, out_of_time: bool) -> tuple[Verdict, str]:
    verdict, reason = _by_commits(state, out_of_time=out_of_time)
    evacuation = state.evacuation
    assert evacuation is not None
    is_settled = state.is_answered or arrival.was_answered(state)
    is_unknown = evacuation.has_unknown or arrival.is_unknown(state, now_mono_s)
    if verdict is Verdict.SAFE and not is_settled and is_unknown:
        return Verdict.PARTIAL, f"{_what_stands(state)}; the step of the trainer is not known yet"
    doubt = gpus.doubt(state)
    return (Verdict.PARTIAL, doubt) if doubt and verdict is Verdict.SAFE else (verdict, reason)


def _by_commits(state: State, *, out_of_time: bool) -> tuple[Verdict, str]:
    evacuation, part = state.evacuation, state.part
    assert evacuation is not None
    request = evacuation.request
    if state.is_answered and state.answer is not None and state.is_whole(state.answer):
        return (
            Verdict.SAFE,
            f"the requested checkpoint is committed: {state.last_complete}",
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
        return Verdict.LOST, "no set was sealed, so nothing is committed"
    stands = _what_stands(state)
    if part is not None:
        stands = f"{part}; {stands}"
    if _is_over(state):
        return Verdict.SAFE, f"the run is finished: {state.last_complete}"
    if _has_not_begun(state):
        return Verdict.SAFE, f"the trainer has begun no step yet: {state.last_complete}"
    if out_of_time:
        return Verdict.PARTIAL, f"the time ran out; {stands}"
    if request is not None and request.failure:
        return Verdict.PARTIAL, f"{request.failure}; {stands}"
    if request is not None and state.answer is not None and state.is_covered(state.answer):
        reason = f"a commit from before the notice is ahead of step {state.answer.step}"
        return Verdict.PARTIAL, f"{reason}; {stands}"
    if state.owes_checkpoint:
        return Verdict.PARTIAL, f"training started before the newest commit; {stands}"
    if evacuation.newest is not None and not state.is_covered(evacuation.newest):
        return Verdict.PARTIAL, f"the newest sealed set could not be used; {stands}"
    is_behind = evacuation.ahead > state.last_complete.step and not arrival.has_stored_answer(state)
    if request is None and is_behind:
        training = f"training was at step {evacuation.ahead}"
        return Verdict.PARTIAL, f"{evacuation.plan.reason}; {stands}, {training}"
    if part is not None:
        return Verdict.PARTIAL, stands
    return Verdict.SAFE, f"the newest sealed state is committed: {state.last_complete}"


def _is_over(state: State) -> bool:
    """Whether the end of the run is committed, and nothing was trained since."""
    evacuation, last = state.evacuation, state.last_complete
    assert evacuation is not None
    request = evacuation.request
    return (
        last is not None
        and last.is_final
        and state.is_finished
        and not state.owes_checkpoint
        and evacuation.ahead <= last.step
        and (request is None or request.at_step <= last.step)
    )


def _has_not_begun(state: State) -> bool:
    """Whether all trainers still restore: each of them reports the step at which it begins to train."""
    evacuation = state.evacuation
    assert evacuation is not None
    newest, request = evacuation.newest, evacuation.request
    return (
        bool(state.trainers)
        and state.generation is not None
        and state.last_complete is not None
        and evacuation.ahead <= state.last_complete.step
        and all(t.is_connected and t.step < 0 and t.start_step < 0 for t in state.trainers)
        and (request is None or max((request.at_step, *request.accepted.values())) < 0)
        and (newest is None or state.is_whole(newest))
        and not state.owes_checkpoint
        and not state.uncommitted
        and not state.stored
    )


def _end_precaution(transition: Transition, evacuation: Evacuation, reason: str) -> None:
    transition.log("info", "precaution_done", evacuation=evacuation.id, reason=reason)
    transition.state = replace(transition.state, evacuation=None)
