# SPDX-License-Identifier: Apache-2.0
"""The second half of a turn: orders whatever is missing between how the world is and how it should be."""

from __future__ import annotations

import hashlib

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
from swansongd.core.turn import EXIT_FENCED, EXIT_STOPPED, HOST_SOURCE, Turn
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


def advance(turn: Turn) -> None:
    if turn.state.is_leaving:
        return
    if turn.state.fenced_by is not None:
        _leave_fenced(turn, turn.state.fenced_by)
        return
    _steer_evacuation(turn)
    _steer_request(turn)
    nodes.steer(turn)
    claims.steer(turn)
    periodic.steer(turn)
    stall.steer(turn)
    advance_wire.steer_flush(turn)
    advance_wire.steer_commit(turn)
    staged_sets.reconcile(turn)
    _steer_verdict(turn)


def _leave_fenced(turn: Turn, generation: int) -> None:
    if turn.state.flight is not None:
        turn.do(CancelFlush(turn.state.flight.flush_id))
    turn.log("error", "fenced", generation=turn.state.generation, newer_generation=generation)
    turn.do(TellFenced(generation))
    turn.do(Exit(EXIT_FENCED, f"generation {generation} has taken the run over"))
    turn.set(is_leaving=True, flight=None)


def _steer_evacuation(turn: Turn) -> None:
    """Open, move, withdraw or outlive the evacuation, as the live notices have it."""
    live = turn.state.urgent_notices(turn.now)
    evacuation = turn.state.evacuation
    if not live:
        if evacuation is not None and not evacuation.is_precaution:
            _withdraw(turn, evacuation, "every notice was withdrawn")
        _steer_precaution(turn)
        return
    if evacuation is None or evacuation.is_precaution:
        _begin(turn, live)
        return
    news = _news(evacuation, live)
    # Training continued since the verdict: what is new by now is worth another checkpoint.
    admitted = notices.admitted(turn, news) if evacuation.verdict is not None else ()
    deadline = _deadline_mono_s(live)
    if admitted:
        _open(turn, admitted[0], deadline)
    elif deadline < evacuation.deadline_mono_s:
        turn.set_evacuation(deadline_mono_s=deadline)
        turn.mark("deadline_moved", seconds_left=round(turn.left_s, 2), source=live[0].source)
    elif turn.now > evacuation.deadline_mono_s + notices.OUTLIVED_S:
        turn.log("warning", "outlived_deadline", hint="the VM was not taken; watching again")
        notices.outlived(turn, live)
        _withdraw(turn, evacuation, "the VM has outlived its deadline")
        return
    is_waiting = evacuation.verdict is not None and not admitted
    _answer(turn, tuple(n for n in live if not (is_waiting and n in news)))


def _begin(turn: Turn, live: tuple[Notice, ...]) -> None:
    """Open an evacuation, in place of a precaution, unless too many were opened a moment ago."""
    admitted = notices.admitted(turn, live)
    if not admitted:
        return
    if turn.state.evacuation is not None:
        _withdraw(turn, turn.state.evacuation, "the end is near now")
    notices.extend_overdue(turn, live)
    live = turn.state.urgent_notices(turn.now)
    first = next(n for n in live if n.identity == admitted[0].identity)
    _open(turn, first, _deadline_mono_s(live))
    _answer(turn, live)


def _answer(turn: Turn, live: tuple[Notice, ...]) -> None:
    evacuation = turn.state.evacuation
    assert evacuation is not None
    turn.set_evacuation(identities=frozenset(notice.identity for notice in live))
    notices.answered_by(turn, live, evacuation.id)


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


def _steer_precaution(turn: Turn) -> None:
    """Word that may not come true, or not for long: one checkpoint more, and nobody stops for it."""
    state = turn.state
    early = [n for n in state.notices.values() if n.identity not in state.concluded]
    if state.evacuation is not None:
        if not early:
            _withdraw(turn, state.evacuation, "every notice was withdrawn")
        return
    for notice in early:
        if notice.identity in state.prepared or not state.connected:
            continue
        turn.set(prepared=(*state.prepared, notice.identity)[-PREPARED_MAX:])
        last = state.precaution_mono_s
        if last is not None and turn.now - last < PRECAUTION_EVERY_S:
            turn.log(
                "info", "precaution_skipped", source=notice.source, reason="one was just taken"
            )
            continue
        turn.set(precaution_mono_s=turn.now)
        _open(turn, notice, notice.deadline_mono_s, is_precaution=True)
        return


def _precaution_done(turn: Turn, evacuation: Evacuation, reason: str) -> None:
    turn.log("info", "precaution_done", evacuation=evacuation.id, reason=reason)
    turn.set(evacuation=None)


def _open(
    turn: Turn, notice: Notice, deadline_mono_s: float, *, is_precaution: bool = False
) -> None:
    plan = _plan(turn, left_s=deadline_mono_s - turn.now)
    id_ = evacuation_id(notice, turn.state, turn.now)
    turn.set(opened=(*turn.state.opened, id_)[-OPENED_MAX:], evacuations=turn.state.evacuations + 1)
    if not is_precaution:
        notices.count(turn, notice.source)
    evacuation = Evacuation(
        id=id_,
        reason=f"{notice.source}: {notice.kind}",
        opened_mono_s=turn.now,
        deadline_mono_s=deadline_mono_s,
        plan=plan,
        is_precaution=is_precaution,
        is_resumed=id_ == notice.evacuation_id,
        identities=frozenset({notice.identity}),
        newest=max((staged.id for staged in turn.state.staged), default=None),
    )
    # What failed a minute ago is worth another try now.
    turn.set(evacuation=evacuation, retry_mono_s=turn.now)
    turn.mark(
        "precaution" if is_precaution else "notice",
        source=notice.source,
        kind=notice.kind,
        seconds_left=round(turn.left_s, 2),
        plan=plan.kind.value,
        why=plan.reason,
    )
    stall.mark(turn)
    turn.do(Rescan())
    if plan.kind is PlanKind.TAKE:
        _ask(turn)


def _plan(turn: Turn, *, left_s: float) -> Plan:
    state = turn.state
    return planner.decide(
        left_s=left_s,
        reserve_s=state.settings.reserve_s,
        measured=state.measured,
        has_trainer=(bool(state.connected) or state.settings.signals_trainer)
        and state.overtaken_by is None,
        candidates=state.candidates,
        is_committing=bool(state.stored),
    )


def _ask(turn: Turn) -> None:
    """Over the socket if anyone is there; the signal is for trainers without our hooks."""
    evacuation = turn.state.evacuation
    assert evacuation is not None
    connected = turn.state.connected
    by_signal = not connected
    again = f"{nodes.AGAIN}{evacuation.asks}" if evacuation.asks else ""
    ask = Ask(
        request_id=f"{evacuation.id}{again}",
        by_signal=by_signal,
        asked_mono_s=turn.now,
        agree_by_mono_s=turn.now + min(AGREEMENT_LIMIT_S, turn.left_s / 10),
        known=frozenset(staged.id for staged in turn.state.staged),
        from_step=(
            -1
            if evacuation.is_resumed
            else max((trainer.step for trainer in connected), default=-1)
        ),
        at_step=max((trainer.step for trainer in turn.state.trainers), default=-1),
        ranks=frozenset() if by_signal else frozenset(t.rank for t in connected),
    )
    turn.set_evacuation(ask=ask, asks=evacuation.asks + 1)
    if by_signal:
        turn.mark("signal")
        turn.do(SignalTrainer(ask.request_id))
    else:
        turn.mark("request", ranks=len(connected))
        turn.do(
            AskTrainers(
                ask.request_id,
                evacuation.reason,
                evacuation.deadline_mono_s,
                tuple(t.connection for t in connected),
                is_urgent=not evacuation.is_precaution,
            )
        )


def _withdraw(turn: Turn, evacuation: Evacuation, reason: str) -> None:
    turn.mark("withdrawn", reason=reason)
    if evacuation.ask is not None:
        turn.do(WithdrawRequest(evacuation.ask.request_id, reason))
    turn.set(evacuation=None)


def _steer_request(turn: Turn) -> None:
    """Bring the ranks to one step, and know when it is too late to wait for them."""
    evacuation = turn.state.evacuation
    # A trainer that came after the notice, or came back after a restart of the daemon.
    is_new = evacuation is not None and evacuation.ask is None and bool(turn.state.connected)
    if evacuation is not None and (is_new or _asks_again(turn)):
        plan = _plan(turn, left_s=turn.left_s)
        is_worth_it = plan.fits or (
            evacuation.verdict is None and evacuation.plan.kind is PlanKind.NONE
        )
        if plan.kind is PlanKind.TAKE and is_worth_it:
            turn.set_evacuation(plan=plan, verdict=None)
            _ask(turn)
            turn.do(Rescan())
    evacuation = turn.state.evacuation
    if evacuation is None or evacuation.ask is None or not evacuation.ask.is_waiting:
        return
    ask = evacuation.ask
    if turn.state.spans_vms:
        if not nodes.steer_agreement(turn, ask):
            return
    elif not ask.by_signal and ask.target is None:
        # After a restart the ranks come back one by one: a step that all can reach needs all of them.
        expected = max(len(ask.ranks), turn.state.local_world_size)
        if len(ask.accepted) >= expected:
            # Ranks stand still between accepting and the target, so max + 1 lies ahead of them all.
            target = max(ask.accepted.values()) + 1
            turn.set_ask(target=target)
            turn.mark("target", step=target)
            connections = tuple(t.connection for t in turn.state.connected if t.rank in ask.ranks)
            turn.do(SendTarget(ask.request_id, target, connections))
        elif expected > 1 and turn.now >= ask.agree_by_mono_s:
            missing = sorted(ask.ranks - ask.accepted.keys())
            absent = expected - len(ask.ranks)
            turn.fail_ask(
                f"ranks {missing} did not answer in time"
                + (f", and {absent} of {expected} never came" if absent else ""),
            )
            return
    if evacuation.plan.fits:
        _give_up_in_time(turn, ask)
    _look_for_early_shards(turn)


def _asks_again(turn: Turn) -> bool:
    """Whether a request that failed is due again, because a new one would still fit."""
    evacuation = turn.state.evacuation
    return (
        evacuation is not None
        and _will_ask_again(turn)
        and turn.now >= nodes.ask_again_mono_s(evacuation)
    )


def _will_ask_again(turn: Turn) -> bool:
    return (
        nodes.may_ask_again(turn.state)
        and turn.left_s > 0
        and not turn.state.is_answered
        and _plan(turn, left_s=turn.left_s).kind is PlanKind.TAKE
    )


def _give_up_in_time(turn: Turn, ask: Ask) -> None:
    """Stop to wait for a set that could not be stored any more if it were sealed now."""
    state = turn.state
    flush_s = planner.seconds_to_store(state.bytes_to_come, state.bandwidth_bytes_per_s)
    data_left_s = turn.left_s - state.settings.reserve_s
    if flush_s <= data_left_s:
        if ask.hopeless_mono_s is not None:
            turn.set_ask(hopeless_mono_s=None)
    elif data_left_s <= 0 or (
        ask.hopeless_mono_s is not None and turn.now - ask.hopeless_mono_s >= HOPELESS_S
    ):
        turn.fail_ask("no time is left to flush what the trainer has not sealed yet")
    elif ask.hopeless_mono_s is None:
        turn.set_ask(hopeless_mono_s=turn.now)


def _look_for_early_shards(turn: Turn) -> None:
    evacuation = turn.state.evacuation
    assert evacuation is not None
    ask = evacuation.ask
    if ask is None or not ask.is_waiting or ask.target is None or evacuation.is_precaution:
        return
    if turn.now - ask.looked_mono_s >= EARLY_SCAN_S:
        turn.set_ask(looked_mono_s=turn.now)
        turn.do(Rescan())


def _steer_verdict(turn: Turn) -> None:
    """Say how the evacuation ended, as soon as that is known; say it again if it got better."""
    state = turn.state
    evacuation = state.evacuation
    if evacuation is None:
        return
    ask = evacuation.ask
    is_waiting = (ask is not None and ask.is_waiting) or _will_ask_again(turn)
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
    out_of_time = turn.left_s <= 0
    if (is_waiting or is_busy) and not out_of_time:
        if not is_waiting:
            _report_part(turn, evacuation)
        return
    verdict, reason = _judge(state, out_of_time=out_of_time and (is_waiting or is_busy))
    before = evacuation.verdict
    is_worse = before is not None and _MERIT[verdict] < _MERIT[before]
    commit = state.last_complete
    is_news = verdict is not before or commit != evacuation.verdict_commit
    if evacuation.is_precaution:
        _precaution_done(turn, evacuation, reason)
        return
    if is_news and not is_worse:
        turn.set_evacuation(verdict=verdict, verdict_commit=commit)
        slack_s = round(turn.left_s, 2)
        turn.do(Conclude(evacuation.id, verdict, reason, commit, slack_s, state.part))
        turn.set(
            last_verdict=Concluded(
                evacuation_id=evacuation.id,
                verdict=verdict,
                reason=reason,
                commit=commit,
                mono_s=turn.now,
                notices=notices.identities(state, evacuation.identities),
            )
        )
    if HOST_SOURCE in state.notices:
        turn.set(is_leaving=True)
        turn.do(Exit(EXIT_STOPPED, f"the host shuts down; {verdict.value}"))


def _report_part(turn: Turn, evacuation: Evacuation) -> None:
    """Leave a farewell that names this VM's part: the power may go before the other VMs have committed."""
    state, part = turn.state, turn.state.part
    is_wanted = state.answer is None or state.is_covered(state.answer)
    if part is None or not is_wanted or evacuation.is_precaution or evacuation.verdict is not None:
        return
    if evacuation.part_reported == part.ref:
        return
    turn.set_evacuation(part_reported=part.ref)
    turn.mark(
        "waiting_for_peers",
        generation=part.ref.generation,
        step=part.ref.step,
        vms_committed=part.committed,
        vms=part.nodes,
    )
    last = state.last_complete
    verdict = Verdict.LOST if last is None else Verdict.PARTIAL
    reason = f"{part}; {_what_stands(state)}"
    slack_s = round(turn.left_s, 2)
    turn.do(
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
