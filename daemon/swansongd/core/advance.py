# SPDX-License-Identifier: Apache-2.0
"""The second half of a turn: orders whatever is missing between how the world is and how it should be."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from swansongd.core import (
    advance_wire,
    claims,
    nodes,
    notices,
    periodic,
    planner,
    staged_sets,
    stall,
)
from swansongd.core.events import (
    AskTrainers,
    CancelFlush,
    Conclude,
    Exit,
    Rescan,
    SendTarget,
    SignalTrainer,
    TellFenced,
    WithdrawRequest,
)
from swansongd.core.planner import Plan, PlanKind
from swansongd.core.state import Ask, Concluded, Evacuation, State
from swansongd.core.transition import EXIT_FENCED, EXIT_STOPPED, HOST_SOURCE, Transition
from swansongd.model import (
    Notice,
    Verdict,
)

AGREEMENT_LIMIT_S = 5.0
"""Ranks that have not all answered by then, or in a tenth of the time left, do not agree."""
PRECAUTION_EVERY_S = 600.0
"""Advisory notices can come in storms; so often at most one costs a checkpoint."""
HOPELESS_S = 2.0
"""A save is given up when it has been too late for so long; the wire may just have held its breath."""
EARLY_SCAN_S = 0.2
"""While the trainer saves what it was asked for, staging is looked through so often."""
PREPARED_MAX = 64
OPENED_MAX = 64
_MERIT = {Verdict.LOST: 0, Verdict.PARTIAL: 1, Verdict.SAFE: 2}


def evacuation_id(notice: Notice, state: State, now_mono_s: float) -> str:
    """The id of the evacuation that opens now, which is also the id of its request to the trainer.

    Hooks repeat their answer to an id that they have answered before.  So no id comes back within a boot: the
    monotonic time is part of it.  The exception is the evacuation that an earlier life of the daemon had
    open for this notice.  VMs that get the same words in a notice have different ids.
    """
    if notice.source == nodes.PEER_SOURCE:
        return notice.identity  # the request of that VM
    if notice.evacuation_id and notice.evacuation_id not in state.opened:
        return notice.evacuation_id
    facts = f"{notice.identity} {state.settings.vm} {now_mono_s!r} {state.evacuations}"
    return hashlib.sha256(facts.encode()).hexdigest()[:16]


def advance(transition: Transition) -> None:
    if transition.state.is_leaving:
        return
    if transition.state.fenced_by is not None:
        _leave_fenced(transition, transition.state.fenced_by)
        return
    _steer_evacuation(transition)
    _steer_request(transition)
    nodes.steer(transition)
    claims.steer(transition)
    periodic.steer(transition)
    stall.steer(transition)
    advance_wire.steer_flush(transition)
    advance_wire.steer_commit(transition)
    staged_sets.reconcile(transition)
    _steer_verdict(transition)


def _leave_fenced(transition: Transition, generation: int) -> None:
    if transition.state.flight is not None:
        transition.do(CancelFlush(transition.state.flight.flush_id))
    transition.log(
        "error", "fenced", generation=transition.state.generation, newer_generation=generation
    )
    transition.do(TellFenced(generation))
    transition.do(Exit(EXIT_FENCED, f"generation {generation} has taken the run over"))
    transition.state = replace(transition.state, is_leaving=True, flight=None)


def _steer_evacuation(transition: Transition) -> None:
    """Open, move, withdraw or outlive the evacuation, as the live notices have it."""
    live = transition.state.urgent_notices(transition.now)
    evacuation = transition.state.evacuation
    if not live:
        if evacuation is not None and not evacuation.is_precaution:
            _withdraw(transition, evacuation, "every notice was withdrawn")
        _steer_precaution(transition)
        return
    if evacuation is None or evacuation.is_precaution:
        _begin(transition, live)
        return
    news = _news(evacuation, live)
    # Training continued since the verdict: what is new by now is worth another checkpoint.
    admitted = notices.admitted(transition, news) if evacuation.verdict is not None else ()
    deadline = _deadline_mono_s(live)
    if admitted:
        _open(transition, admitted[0], deadline)
    elif deadline < evacuation.deadline_mono_s:
        transition.evacuation = replace(transition.evacuation, deadline_mono_s=deadline)
        transition.mark(
            "deadline_moved", seconds_left=round(transition.left_s, 2), source=live[0].source
        )
    elif transition.now > evacuation.deadline_mono_s + notices.OUTLIVED_S:
        transition.log("warning", "outlived_deadline", hint="the VM was not taken; watching again")
        notices.outlived(transition, live)
        _withdraw(transition, evacuation, "the VM has outlived its deadline")
        return
    is_waiting = evacuation.verdict is not None and not admitted
    _answer(transition, tuple(n for n in live if not (is_waiting and n in news)))


def _begin(transition: Transition, live: tuple[Notice, ...]) -> None:
    """Open an evacuation, in place of a precaution, unless too many were opened a moment ago."""
    admitted = notices.admitted(transition, live)
    if not admitted:
        return
    if transition.state.evacuation is not None:
        _withdraw(transition, transition.state.evacuation, "the end is near now")
    notices.extend_overdue(transition, live)
    live = transition.state.urgent_notices(transition.now)
    first = next(n for n in live if n.identity == admitted[0].identity)
    _open(transition, first, _deadline_mono_s(live))
    _answer(transition, live)


def _answer(transition: Transition, live: tuple[Notice, ...]) -> None:
    evacuation = transition.state.evacuation
    assert evacuation is not None
    transition.evacuation = replace(
        transition.evacuation, identities=frozenset(notice.identity for notice in live)
    )
    notices.answered_by(transition, live, evacuation.id)


def _news(evacuation: Evacuation, live: tuple[Notice, ...]) -> tuple[Notice, ...]:
    """What this evacuation does not answer yet.  A time that has passed adds nothing to a standing SAFE."""
    return tuple(
        notice
        for notice in live
        if notice.identity not in evacuation.identities
        and notice.source != HOST_SOURCE
        and not (notice.is_overdue and evacuation.verdict is Verdict.SAFE)
    )


def _deadline_mono_s(live: tuple[Notice, ...]) -> float:
    """The earliest deadline; those of other VMs, and assumed ones of overdue notices, give way to our own."""
    own = [n for n in live if n.source != nodes.PEER_SOURCE] or live
    timely = [n for n in own if not n.is_overdue] or own
    return min(notice.deadline_mono_s for notice in timely)


def _steer_precaution(transition: Transition) -> None:
    """Word that may not come true, or not for long: one checkpoint more, and nobody stops for it."""
    state = transition.state
    early = [n for n in state.notices.values() if n.identity not in state.concluded]
    if state.evacuation is not None:
        if not early:
            _withdraw(transition, state.evacuation, "every notice was withdrawn")
        return
    for notice in early:
        if notice.identity in state.prepared or not state.connected:
            continue
        transition.state = replace(
            transition.state, prepared=(*state.prepared, notice.identity)[-PREPARED_MAX:]
        )
        last = state.precaution_mono_s
        if last is not None and transition.now - last < PRECAUTION_EVERY_S:
            transition.log(
                "info", "precaution_skipped", source=notice.source, reason="one was just taken"
            )
            continue
        transition.state = replace(transition.state, precaution_mono_s=transition.now)
        _open(transition, notice, notice.deadline_mono_s, is_precaution=True)
        return


def _precaution_done(transition: Transition, evacuation: Evacuation, reason: str) -> None:
    transition.log("info", "precaution_done", evacuation=evacuation.id, reason=reason)
    transition.state = replace(transition.state, evacuation=None)


def _open(
    transition: Transition, notice: Notice, deadline_mono_s: float, *, is_precaution: bool = False
) -> None:
    plan = _plan(transition, left_s=deadline_mono_s - transition.now)
    id_ = evacuation_id(notice, transition.state, transition.now)
    transition.state = replace(
        transition.state,
        opened=(*transition.state.opened, id_)[-OPENED_MAX:],
        evacuations=transition.state.evacuations + 1,
    )
    if not is_precaution:
        notices.count(transition, notice.source)
    evacuation = Evacuation(
        id=id_,
        reason=f"{notice.source}: {notice.kind}",
        opened_mono_s=transition.now,
        deadline_mono_s=deadline_mono_s,
        plan=plan,
        is_precaution=is_precaution,
        is_resumed=id_ == notice.evacuation_id,
        identities=frozenset({notice.identity}),
        newest=max((staged.id for staged in transition.state.staged), default=None),
    )
    # What failed a minute ago is worth another try now.
    transition.state = replace(transition.state, evacuation=evacuation, retry_mono_s=transition.now)
    transition.mark(
        "precaution" if is_precaution else "notice",
        source=notice.source,
        kind=notice.kind,
        seconds_left=round(transition.left_s, 2),
        plan=plan.kind.value,
        why=plan.reason,
    )
    stall.mark(transition)
    transition.do(Rescan())
    if plan.kind is PlanKind.TAKE:
        _ask(transition)


def _plan(transition: Transition, *, left_s: float) -> Plan:
    state = transition.state
    return planner.decide(
        left_s=left_s,
        reserve_s=state.settings.reserve_s,
        measured=state.measured,
        has_trainer=(bool(state.connected) or state.settings.signals_trainer)
        and state.overtaken_by is None,
        candidates=state.candidates,
        is_committing=bool(state.stored),
    )


def _ask(transition: Transition) -> None:
    """Over the socket if anyone is there; the signal is for trainers without our hooks."""
    evacuation = transition.state.evacuation
    assert evacuation is not None
    connected = transition.state.connected
    by_signal = not connected
    again = f"{nodes.AGAIN}{evacuation.asks}" if evacuation.asks else ""
    ask = Ask(
        request_id=f"{evacuation.id}{again}",
        by_signal=by_signal,
        asked_mono_s=transition.now,
        agree_by_mono_s=transition.now + min(AGREEMENT_LIMIT_S, transition.left_s / 10),
        known=frozenset(staged.id for staged in transition.state.staged),
        from_step=(
            -1
            if evacuation.is_resumed
            else max((trainer.step for trainer in connected), default=-1)
        ),
        at_step=max((trainer.step for trainer in transition.state.trainers), default=-1),
        ranks=frozenset() if by_signal else frozenset(t.rank for t in connected),
    )
    transition.evacuation = replace(transition.evacuation, ask=ask, asks=evacuation.asks + 1)
    if by_signal:
        transition.mark("signal")
        transition.do(SignalTrainer(ask.request_id))
    else:
        transition.mark("request", ranks=len(connected))
        transition.do(
            AskTrainers(
                ask.request_id,
                evacuation.reason,
                evacuation.deadline_mono_s,
                tuple(t.connection for t in connected),
                is_urgent=not evacuation.is_precaution,
            )
        )


def _withdraw(transition: Transition, evacuation: Evacuation, reason: str) -> None:
    transition.mark("withdrawn", reason=reason)
    if evacuation.ask is not None:
        transition.do(WithdrawRequest(evacuation.ask.request_id, reason))
    transition.state = replace(transition.state, evacuation=None)


def _steer_request(transition: Transition) -> None:
    """Bring the ranks to one step, and know when it is too late to wait for them."""
    evacuation = transition.state.evacuation
    # A trainer that came after the notice, or came back after a restart of the daemon.
    is_new = evacuation is not None and evacuation.ask is None and bool(transition.state.connected)
    if evacuation is not None and (is_new or _asks_again(transition)):
        plan = _plan(transition, left_s=transition.left_s)
        is_worth_it = plan.fits or (
            evacuation.verdict is None and evacuation.plan.kind is PlanKind.NONE
        )
        if plan.kind is PlanKind.TAKE and is_worth_it:
            transition.evacuation = replace(transition.evacuation, plan=plan, verdict=None)
            _ask(transition)
            transition.do(Rescan())
    evacuation = transition.state.evacuation
    if evacuation is None or evacuation.ask is None or not evacuation.ask.is_waiting:
        return
    ask = evacuation.ask
    if transition.state.spans_vms:
        if not nodes.steer_agreement(transition, ask):
            return
    elif not ask.by_signal and ask.target is None:
        # After a restart the ranks come back one by one: a step that all can reach needs all of them.
        expected = max(len(ask.ranks), transition.state.local_world_size)
        if len(ask.accepted) >= expected:
            # Ranks stand still between accepting and the target, so max + 1 lies ahead of them all.
            target = max(ask.accepted.values()) + 1
            transition.ask = replace(transition.ask, target=target)
            transition.mark("target", step=target)
            connections = tuple(
                t.connection for t in transition.state.connected if t.rank in ask.ranks
            )
            transition.do(SendTarget(ask.request_id, target, connections))
        elif expected > 1 and transition.now >= ask.agree_by_mono_s:
            missing = sorted(ask.ranks - ask.accepted.keys())
            absent = expected - len(ask.ranks)
            transition.fail_ask(
                f"ranks {missing} did not answer in time"
                + (f", and {absent} of {expected} never came" if absent else ""),
            )
            return
    if evacuation.plan.fits:
        _give_up_in_time(transition, ask)
    _look_for_early_shards(transition)


def _asks_again(transition: Transition) -> bool:
    """Whether a request that failed is due again, because a new one would still fit."""
    evacuation = transition.state.evacuation
    return (
        evacuation is not None
        and _will_ask_again(transition)
        and transition.now >= nodes.ask_again_mono_s(evacuation)
    )


def _will_ask_again(transition: Transition) -> bool:
    return (
        nodes.may_ask_again(transition.state)
        and transition.left_s > 0
        and not transition.state.is_answered
        and _plan(transition, left_s=transition.left_s).kind is PlanKind.TAKE
    )


def _give_up_in_time(transition: Transition, ask: Ask) -> None:
    """Stop to wait for a set that could not be stored any more if it were sealed now."""
    state = transition.state
    flush_s = planner.seconds_to_store(state.bytes_to_come, state.bandwidth_bytes_per_s)
    data_left_s = transition.left_s - state.settings.reserve_s
    if flush_s <= data_left_s:
        if ask.hopeless_mono_s is not None:
            transition.ask = replace(transition.ask, hopeless_mono_s=None)
    elif data_left_s <= 0 or (
        ask.hopeless_mono_s is not None and transition.now - ask.hopeless_mono_s >= HOPELESS_S
    ):
        transition.fail_ask("no time is left to flush what the trainer has not sealed yet")
    elif ask.hopeless_mono_s is None:
        transition.ask = replace(transition.ask, hopeless_mono_s=transition.now)


def _look_for_early_shards(transition: Transition) -> None:
    evacuation = transition.state.evacuation
    assert evacuation is not None
    ask = evacuation.ask
    if ask is None or not ask.is_waiting or ask.target is None or evacuation.is_precaution:
        return
    if transition.now - ask.looked_mono_s >= EARLY_SCAN_S:
        transition.ask = replace(transition.ask, looked_mono_s=transition.now)
        transition.do(Rescan())


def _steer_verdict(transition: Transition) -> None:
    """Say how the evacuation ended, as soon as that is known; say it again if it got better."""
    state = transition.state
    evacuation = state.evacuation
    if evacuation is None:
        return
    ask = evacuation.ask
    is_waiting = (ask is not None and ask.is_waiting) or _will_ask_again(transition)
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
        if evacuation.ask is not None and evacuation.ask.failure:
            return Verdict.LOST, f"nothing is committed: {evacuation.ask.failure}"
        return Verdict.LOST, "nothing was staged, so nothing is committed"
    stands = _what_stands(state)
    if part is not None:
        stands = f"{part}; {stands}"
    if out_of_time:
        return Verdict.PARTIAL, f"the time ran out; {stands}"
    ask = evacuation.ask
    if ask is not None and ask.failure:
        return Verdict.PARTIAL, f"{ask.failure}; {stands}"
    if ask is not None and state.answer is not None and state.is_covered(state.answer):
        reason = f"a commit of before the notice stands ahead of step {state.answer.step}"
        return Verdict.PARTIAL, f"{reason}; {stands}"
    if state.owes_checkpoint:
        return Verdict.PARTIAL, f"training started behind the newest commit; {stands}"
    if evacuation.newest is not None and not state.is_covered(evacuation.newest):
        return Verdict.PARTIAL, f"the newest sealed set could not be used; {stands}"
    ahead = max((trainer.step for trainer in state.trainers), default=-1)
    if ask is None and ahead > state.last_complete.step:
        return Verdict.PARTIAL, f"{evacuation.plan.reason}; {stands}, training was at step {ahead}"
    if part is not None:
        return Verdict.PARTIAL, stands
    return Verdict.SAFE, f"the newest sealed state is committed: {state.last_complete}"
