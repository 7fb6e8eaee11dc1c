# SPDX-License-Identifier: Apache-2.0
"""The request for an emergency checkpoint: to whom it goes, the agreement on a step, and its answer."""

from __future__ import annotations

from dataclasses import replace

from swansong import protocol

from swansongd.core import nodes, planner
from swansongd.core.events import (
    AskTrainers,
    Rescan,
    Scanned,
    SendTarget,
    SignalTrainer,
)
from swansongd.core.planner import Plan, PlanKind
from swansongd.core.state import (
    Ask,
)
from swansongd.core.transition import Transition
from swansongd.model import (
    CheckpointId,
    Staged,
)

AGREEMENT_LIMIT_S = 5.0
"""Ranks that have not all answered by then, or in a tenth of the time left, do not agree."""
HOPELESS_S = 2.0
"""A save is given up when it has been too late for so long; the wire may just have held its breath."""
EARLY_SCAN_S = 0.2
"""While the trainer saves what it was asked for, staging is looked through so often."""


def planned(transition: Transition, *, left_s: float) -> Plan:
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


def make(transition: Transition) -> None:
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


def reconcile(transition: Transition) -> None:
    """Bring the ranks to one step, and know when it is too late to wait for them."""
    evacuation = transition.state.evacuation
    # A trainer that came after the notice, or came back after a restart of the daemon.
    is_new = evacuation is not None and evacuation.ask is None and bool(transition.state.connected)
    if evacuation is not None and (is_new or _asks_again(transition)):
        plan = planned(transition, left_s=transition.left_s)
        is_worth_it = plan.fits or (
            evacuation.verdict is None and evacuation.plan.kind is PlanKind.NONE
        )
        if plan.kind is PlanKind.TAKE and is_worth_it:
            transition.evacuation = replace(transition.evacuation, plan=plan, verdict=None)
            make(transition)
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
        and will_ask_again(transition)
        and transition.now >= nodes.ask_again_mono_s(evacuation)
    )


def will_ask_again(transition: Transition) -> bool:
    return (
        nodes.may_ask_again(transition.state)
        and transition.left_s > 0
        and not transition.state.is_answered
        and planned(transition, left_s=transition.left_s).kind is PlanKind.TAKE
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


def record_accepted(transition: Transition, connection: int, request_id: str, at_step: int) -> None:
    trainer = next((t for t in transition.state.trainers if t.connection == connection), None)
    ask = transition.ask_if_waiting(request_id)
    if trainer is None or ask is None:
        return
    if ask.target is not None:  # a rank that reconnected: the decision stands
        transition.do(SendTarget(request_id, ask.target, (connection,)))
    elif trainer.rank in ask.ranks:
        if trainer.rank not in ask.accepted:
            transition.mark("accepted", rank=trainer.rank, step=at_step)
        transition.ask = replace(transition.ask, accepted={**ask.accepted, trainer.rank: at_step})


def record_joined(transition: Transition, connection: int, rank: int) -> None:
    """A rank came (back) while a request is out: it is asked like the others."""
    evacuation = transition.state.evacuation
    if evacuation is None or evacuation.ask is None or evacuation.ask.by_signal:
        return
    ask = evacuation.ask
    if ask.is_waiting and (ask.target is None or rank in ask.ranks):
        transition.ask = replace(transition.ask, ranks=ask.ranks | {rank})
        transition.do(
            AskTrainers(
                ask.request_id,
                evacuation.reason,
                evacuation.deadline_mono_s,
                (connection,),
                is_urgent=not evacuation.is_precaution,
            )
        )


def _record_claimed_step(transition: Transition, request_id: str, step: int) -> None:
    """A rank has answered; a step that it had left behind when it was asked is no answer to this request."""
    ask = transition.ask_if_waiting(request_id)
    if ask is None:
        return
    stood_at = max(ask.accepted.values(), default=ask.from_step)
    if step < stood_at:
        transition.fail_ask(
            f"the trainer answered with step {step}, and was asked after step {stood_at}"
        )
    else:
        transition.ask = replace(transition.ask, claimed_step=step)


def record_sealed(transition: Transition, request_id: str, step: int) -> None:
    """A rank reports that it has sealed its part: a scan will find the set."""
    _record_claimed_step(transition, request_id, step)
    transition.do(Rescan())


def record_failed(transition: Transition, request_id: str, reason: str) -> None:
    """A rank, or the signal, reports that no checkpoint will come."""
    if transition.ask_if_waiting(request_id):
        transition.fail_ask(reason)


def record_signalled(transition: Transition, request_id: str, pid: int) -> None:
    """The signal was sent."""
    if transition.ask_if_waiting(request_id):
        transition.mark("accepted", pid=pid)


def record_process_ended(transition: Transition, request_id: str) -> None:
    """The process that got the signal ended: a scan that begins now decides whether it had sealed."""
    if transition.ask_if_waiting(request_id):
        transition.ask = replace(transition.ask, lost_mono_s=transition.now)
        transition.do(Rescan())


def record_rank_ended(transition: Transition, rank: int) -> None:
    """A rank's process ended.  It may have sealed with its last breath: a scan that begins now decides."""
    evacuation = transition.state.evacuation
    ask = evacuation.ask if evacuation is not None else None
    if ask is not None and ask.is_waiting and rank in ask.ranks:
        transition.ask = replace(ask, lost_mono_s=transition.now)
        transition.do(Rescan())


def record_scan(transition: Transition, event: Scanned) -> None:
    """Whether a set answers the request that is out, or none ever will."""
    ask = transition.state.evacuation.ask if transition.state.evacuation else None
    if ask is not None and ask.newer is None:
        present = frozenset(staged.id for staged in event.staged)
        usable = present - ask.known - transition.state.inherited - transition.state.unusable
        transition.ask = replace(
            transition.ask,
            newer=min((id_ for id_ in usable if id_.step > ask.at_step), default=None),
        )
    if ask is None or not ask.is_waiting:
        return
    of_line = (s for s in event.staged if s.id not in transition.state.abandoned)
    answer = next((s for s in of_line if _answers(s, ask)), None)
    bad = next((r for r in event.rejected if _is_claimed(r[0], ask)), None)
    last = transition.state.last_commit
    if answer is not None:
        transition.ask = replace(transition.ask, sealed=answer.id)
        if ask.by_signal:
            transition.state = replace(
                transition.state, signal_save_s=transition.now - ask.asked_mono_s
            )
        transition.mark("sealed", step=answer.id.step, size_bytes=answer.size_bytes)
    elif (
        ask.claimed_step is not None
        and last is not None
        and last.generation == transition.state.generation
        and last.step >= ask.claimed_step
    ):  # committed and pruned before this daemon was restarted
        transition.ask = replace(transition.ask, sealed=CheckpointId(ask.claimed_step, ""))
    elif bad is not None:
        transition.fail_ask(f"what the trainer sealed is not sound: {bad[1]}")
    elif (
        ask.lost_mono_s is not None
        and event.started_mono_s >= ask.lost_mono_s
        and not (ask.by_signal and event.pending)  # its last files may still have to settle
    ):
        transition.fail_ask("the trainer's process ended before it had sealed a checkpoint")


def _answers(staged: Staged, ask: Ask) -> bool:
    if ask.by_signal:
        return staged.id not in ask.known
    # A set that was there already, of the very step that the trainer is at, is as good as a new one.
    return staged.request_id == ask.request_id or (
        staged.framework == "swansong" and staged.id.step == ask.claimed_step
    )


def _is_claimed(directory: str, ask: Ask) -> bool:
    """Whether this is the set that the trainer says answers the request."""
    name = protocol.parse_sealed_name(directory)
    return name is not None and name[0] == ask.claimed_step
