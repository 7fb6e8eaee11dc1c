# SPDX-License-Identifier: Apache-2.0
"""The first half of a turn: writes down what an event says, and orders no more than its own echo."""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from swansong import protocol

from swansongd.core import absorb_stored as stored
from swansongd.core import lineage, nodes, notices, periodic, stall
from swansongd.core.cadence import History
from swansongd.core.events import (
    AskTrainers,
    CancelFlush,
    CheckFence,
    CommitDone,
    CommitFailed,
    Event,
    Exit,
    FenceFound,
    FinishAsked,
    Flushed,
    FlushFailed,
    FlushProgress,
    GenerationClaimed,
    HistoryRead,
    IncarnationBegun,
    NewestDated,
    NoticeRaised,
    NoticeWithdrawn,
    PartsCounted,
    PeerRequested,
    Rescan,
    RolledBack,
    Scanned,
    SendTarget,
    SignalledExited,
    SignalRefused,
    SignalSent,
    SourceChanged,
    StopRequested,
    TellCommitted,
    Tick,
    TrainerAccepted,
    TrainerAgreed,
    TrainerFailed,
    TrainerJoined,
    TrainerLeft,
    TrainerProgress,
    TrainerRefused,
    TrainerSealed,
    WokeUp,
)
from swansongd.core.state import Ask, FailedSaves
from swansongd.core.transition import EXIT_STOPPED, Transition
from swansongd.model import (
    CheckpointId,
    Health,
    Staged,
)


def absorb(transition: Transition, event: Event) -> None:  # noqa: PLR0915 - one case for each event
    state = transition.state
    match event:
        case NoticeRaised(notice):
            notices.raised(transition, notice)
        case NoticeWithdrawn(source, reason):
            notices.withdrawn(transition, source, reason)
        case SourceChanged(status):
            transition.state = replace(
                transition.state, sources={**state.sources, status.source: status}
            )
            level = "info" if status.health in (Health.OK, Health.UNSUPPORTED) else "warning"
            transition.log(
                level,
                "health",
                source=status.source,
                health=status.health.value,
                reason=status.reason,
            )
        case TrainerJoined(trainer):
            others = tuple(t for t in state.trainers if t.pid != trainer.pid)
            known = next((t for t in state.trainers if t.pid == trainer.pid), None)
            if known is not None:
                trainer = replace(trainer, start_step=known.start_step)
            lineage.noted(transition, trainer.start_id)
            if not state.connected:
                transition.state = replace(transition.state, joined_mono_s=transition.now)
            transition.state = replace(transition.state, trainers=(*others, trainer))
            if state.last_complete is not None:  # made while it was away, perhaps
                transition.do(TellCommitted(state.last_complete, (trainer.connection,)))
            nodes.joined(transition, trainer)
            _ask_late(transition, trainer.connection, trainer.rank)
            periodic.joined(transition, trainer.connection)
        case TrainerRefused(_, reason):
            transition.state = replace(
                transition.state,
                ranks_refused=state.ranks_refused + 1,
                refused_why=reason,
                refused_mono_s=transition.now,
            )
        case TrainerLeft():
            _trainer_left(transition, event)
        case TrainerProgress():
            _placed(transition, event)
            _trainer_progress(transition, event)
        case TrainerAccepted(connection, request_id, at_step):
            _trainer_accepted(transition, connection, request_id, at_step)
            periodic.accepted(transition, connection, request_id, at_step)
        case TrainerAgreed(request_id, at_step):
            nodes.agreed(transition, request_id, at_step)
        case PeerRequested(request_id, reason, seconds_left):
            peers = nodes.peer_notice(transition, request_id, reason, seconds_left)
            if peers is not None:
                notices.raised(transition, peers)
        case FinishAsked(incarnation):
            nodes.finish(transition, incarnation)
        case IncarnationBegun(incarnation):
            nodes.incarnation(transition, incarnation)
        case TrainerSealed(_, request_id, at_step, save_s, size_bytes):
            _claimed(transition, request_id, at_step)
            _trainer_progress(
                transition,
                TrainerProgress(event.connection, at_step, save_s=save_s, save_bytes=size_bytes),
            )
            transition.do(Rescan())
        case TrainerFailed(_, request_id, reason):
            _save_failed(transition, event)
            if transition.ask_if_waiting(request_id):
                transition.fail_ask(reason)
            periodic.failed(transition, request_id, reason)
        case RolledBack(to_step):
            lineage.rolled_back(transition, to_step)
        case NewestDated(ref, age_s):
            transition.state = replace(
                transition.state, found_commit=ref, found_commit_mono_s=transition.now - age_s
            )
        case HistoryRead(observed_s, uncovered):
            transition.state = replace(transition.state, history=History(observed_s, uncovered))
        case SignalSent(request_id, pid):
            if transition.ask_if_waiting(request_id):
                transition.mark("accepted", pid=pid)
        case SignalRefused(request_id, reason):
            if transition.ask_if_waiting(request_id):
                transition.fail_ask(reason)
        case SignalledExited(request_id, _):
            if transition.ask_if_waiting(request_id):
                transition.ask = replace(transition.ask, lost_mono_s=transition.now)
                transition.do(Rescan())
        case Scanned():
            _scanned(transition, event)
        case GenerationClaimed(generation, newest, is_rollback):
            transition.state = replace(
                transition.state,
                generation=generation,
                last_commit=newest,
                last_commit_mono_s=state.last_commit_mono_s
                if newest == state.last_commit
                else None,
                last_complete=newest,
                last_commit_seen_mono_s=None,
                overtaken_by=None,
            )
            if newest is not None:
                transition.do(TellCommitted(newest))
            if state.must_claim:
                lineage.claim_again(transition, generation)
            elif not is_rollback:
                lineage.claimed(transition)
        case FlushProgress():
            stored.flush_progress(transition, event)
        case Flushed():
            stored.flushed(transition, event)
        case FlushFailed():
            stored.flush_failed(transition, event)
        case CommitDone(flush_id, ref):
            stored.commit_done(transition, flush_id, ref)
        case PartsCounted():
            nodes.counted(transition, event)
        case CommitFailed():
            stored.commit_failed(transition, event)
        case FenceFound(generation) if state.settings.several_vms:
            nodes.fenced(transition, generation)
        case FenceFound(generation):
            if state.fenced_by is None and generation > (state.generation or 0):
                transition.state = replace(transition.state, fenced_by=generation)
        case WokeUp(slept_s):
            transition.log("warning", "woke_up", slept_s=round(slept_s, 1))
            transition.do(CheckFence())  # another VM may have taken the run over meanwhile
        case StopRequested(reason):
            transition.state = replace(transition.state, is_leaving=True)
            transition.do(Exit(EXIT_STOPPED, reason))
        case Tick():
            stored.sample_bandwidth(transition)
        case _ as unreachable:
            assert_never(unreachable)


def _trainer_left(transition: Transition, event: TrainerLeft) -> None:
    state = transition.state
    gone = next((t for t in state.trainers if t.connection == event.connection), None)
    if gone is None:
        return
    others = tuple(t for t in state.trainers if t.connection != event.connection)
    if not event.exited:
        transition.state = replace(
            transition.state, trainers=(*others, replace(gone, is_connected=False))
        )
        return
    transition.state = replace(transition.state, trainers=others)
    ask = state.evacuation.ask if state.evacuation else None
    if ask is not None and ask.is_waiting and gone.rank in ask.ranks:
        # It may have sealed with its last breath: a scan that begins now will tell.
        transition.ask = replace(transition.ask, lost_mono_s=transition.now)
        transition.do(Rescan())


def _placed(transition: Transition, event: TrainerProgress) -> None:
    """The first report of a connection, and each report of another start, says where training begins."""
    trainer = next((t for t in transition.state.trainers if t.connection == event.connection), None)
    is_placed = trainer is not None and trainer.start_step >= 0
    if trainer is None or event.step < 0 or (is_placed and not event.start_id):
        return
    placed = replace(trainer, start_step=event.step, step=max(trainer.step, event.step))
    if event.start_id:
        placed = replace(placed, start_id=event.start_id, step=event.step)
        lineage.noted(transition, event.start_id)
    others = (t for t in transition.state.trainers if t is not trainer)
    transition.state = replace(transition.state, trainers=(*others, placed))
    before_mono_s = transition.now if is_placed else trainer.greeted_mono_s
    lineage.started(transition, placed, before_mono_s=before_mono_s)


def _trainer_progress(transition: Transition, event: TrainerProgress) -> None:
    def updated() -> object:
        for trainer in transition.state.trainers:
            if trainer.connection != event.connection:
                yield trainer
            else:
                said = trainer if event.loss_is_finite is None else event
                yield replace(
                    trainer,
                    step=max(trainer.step, event.step),
                    save_s=trainer.save_s if event.save_s is None else event.save_s,
                    save_bytes=trainer.save_bytes if event.save_bytes is None else event.save_bytes,
                    snapshot_s=trainer.snapshot_s if event.snapshot_s is None else event.snapshot_s,
                    step_s=stall.usual_step_s(trainer.step_s, event.step_s),
                    loss=said.loss,
                    loss_is_finite=said.loss_is_finite,
                    reported_mono_s=transition.now,
                )
                if event.loss_is_finite is False and trainer.loss_is_finite is not False:
                    transition.log("warning", "loss_not_finite", rank=trainer.rank, step=event.step)

    transition.state = replace(transition.state, trainers=tuple(updated()))  # type: ignore[arg-type]


def _save_failed(transition: Transition, event: TrainerFailed) -> None:
    """Count and log a checkpoint that failed, once although each of its ranks reports it."""
    if event.failed_step is None:
        return
    before = transition.state.failed_saves
    rank = next(
        (t.rank for t in transition.state.trainers if t.connection == event.connection), None
    )
    failed = FailedSaves(
        before.count + 1, event.request_id, event.failed_step, rank, event.reason, transition.now
    )
    if (failed.request_id, failed.step) == (before.request_id, before.step):
        return
    transition.state = replace(transition.state, failed_saves=failed)
    transition.log(
        "warning",
        "save_failed",
        rank=rank,
        step=failed.step,
        reason=failed.reason,
        failed_saves=failed.count,
    )


def _trainer_accepted(
    transition: Transition, connection: int, request_id: str, at_step: int
) -> None:
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


def _ask_late(transition: Transition, connection: int, rank: int) -> None:
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


def _scanned(transition: Transition, event: Scanned) -> None:
    before = {staged.id for staged in transition.state.staged}
    is_first = transition.state.first_scan_mono_s is None
    if is_first:
        transition.state = replace(transition.state, first_scan_mono_s=event.started_mono_s)
    seen = dict(transition.state.seen)
    for staged in event.staged:
        first_mono_s = event.started_mono_s if staged.seen_mono_s is None else staged.seen_mono_s
        seen.setdefault(staged.id, first_mono_s)
    for directory, reason in event.rejected:
        if (directory, reason) not in transition.state.rejected:
            transition.log("error", "sealed_set_rejected", directory=directory, reason=reason)
    transition.state = replace(
        transition.state,
        staged=event.staged,
        pending=event.pending,
        growing=event.growing,
        rejected=frozenset(event.rejected),
    )
    for staged in event.staged:
        if staged.id not in before:
            transition.state = replace(transition.state, saved_mono_s=transition.now)
            transition.log(
                "info",
                "sealed_set_found",
                step=staged.id.step,
                directory=staged.directory,
                size_bytes=staged.size_bytes,
                kind=staged.kind.value,
            )
    present = frozenset(staged.id for staged in event.staged)
    written = {staged.id for staged in event.growing}
    kept = {id_: size for id_, size in transition.state.kept.items() if id_ in present | written}
    # A set that was there and is gone is forgotten: another one may get its name.
    abandoned = transition.state.abandoned - (before - present)
    unusable = (transition.state.unusable | abandoned) & present
    seen = {id_: seen_mono_s for id_, seen_mono_s in seen.items() if id_ in present}
    transition.state = replace(
        transition.state, unusable=unusable, abandoned=abandoned, kept=kept, seen=seen
    )
    lineage.found(transition, [s for s in event.staged if s.id not in before], is_first=is_first)
    if is_first:
        _first_look(transition, event.staged)
    transition.state = replace(transition.state, scanned_mono_s=event.started_mono_s)
    if transition.state.evacuation is not None:
        usable = present - transition.state.unusable
        known = (transition.state.evacuation.newest, *usable)
        transition.evacuation = replace(
            transition.evacuation, newest=max((i for i in known if i is not None), default=None)
        )
    flight = transition.state.flight
    if flight is not None and flight.is_sealed and flight.staged.id not in present:
        transition.do(CancelFlush(flight.flush_id))
        transition.state = replace(transition.state, flight=None)
    _look_for_answer(transition, event)


def _look_for_answer(transition: Transition, event: Scanned) -> None:
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


def _first_look(transition: Transition, present: tuple[Staged, ...]) -> None:
    """What lies in staging at the start is old, although a claim or a notice came before the scan."""
    nodes.first_look(transition)
    evacuation = transition.state.evacuation
    if evacuation is not None and evacuation.ask is not None and evacuation.ask.by_signal:
        transition.ask = replace(transition.ask, known=frozenset(staged.id for staged in present))


def _answers(staged: Staged, ask: Ask) -> bool:
    if ask.by_signal:
        return staged.id not in ask.known
    # A set that was there already, of the very step that the trainer is at, is as good as a new one.
    return staged.request_id == ask.request_id or (
        staged.framework == "swansong" and staged.id.step == ask.claimed_step
    )


def _claimed(transition: Transition, request_id: str, step: int) -> None:
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


def _is_claimed(directory: str, ask: Ask) -> bool:
    """Whether this is the set that the trainer says answers the request."""
    name = protocol.parse_sealed_name(directory)
    return name is not None and name[0] == ask.claimed_step
