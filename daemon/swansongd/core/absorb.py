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
from swansongd.core.turn import EXIT_STOPPED, Turn
from swansongd.model import (
    CheckpointId,
    Health,
    Staged,
)


def absorb(turn: Turn, event: Event) -> None:  # noqa: PLR0915 - one case for each event
    state = turn.state
    match event:
        case NoticeRaised(notice):
            notices.raised(turn, notice)
        case NoticeWithdrawn(source, reason):
            notices.withdrawn(turn, source, reason)
        case SourceChanged(status):
            turn.set(sources={**state.sources, status.source: status})
            level = "info" if status.health in (Health.OK, Health.UNSUPPORTED) else "warning"
            turn.log(
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
            lineage.noted(turn, trainer.start_id)
            if not state.connected:
                turn.set(joined_mono_s=turn.now)
            turn.set(trainers=(*others, trainer))
            if state.last_complete is not None:  # made while it was away, perhaps
                turn.do(TellCommitted(state.last_complete, (trainer.connection,)))
            nodes.joined(turn, trainer)
            _ask_late(turn, trainer.connection, trainer.rank)
            periodic.joined(turn, trainer.connection)
        case TrainerRefused(_, reason):
            turn.set(
                ranks_refused=state.ranks_refused + 1, refused_why=reason, refused_mono_s=turn.now
            )
        case TrainerLeft():
            _trainer_left(turn, event)
        case TrainerProgress():
            _placed(turn, event)
            _trainer_progress(turn, event)
        case TrainerAccepted(connection, request_id, at_step):
            _trainer_accepted(turn, connection, request_id, at_step)
            periodic.accepted(turn, connection, request_id, at_step)
        case TrainerAgreed(request_id, at_step):
            nodes.agreed(turn, request_id, at_step)
        case PeerRequested(request_id, reason, seconds_left):
            peers = nodes.peer_notice(turn, request_id, reason, seconds_left)
            if peers is not None:
                notices.raised(turn, peers)
        case FinishAsked(incarnation):
            nodes.finish(turn, incarnation)
        case IncarnationBegun(incarnation):
            nodes.incarnation(turn, incarnation)
        case TrainerSealed(_, request_id, at_step, save_s, size_bytes):
            _claimed(turn, request_id, at_step)
            _trainer_progress(
                turn,
                TrainerProgress(event.connection, at_step, save_s=save_s, save_bytes=size_bytes),
            )
            turn.do(Rescan())
        case TrainerFailed(_, request_id, reason):
            _save_failed(turn, event)
            if turn.ask_if_waiting(request_id):
                turn.fail_ask(reason)
            periodic.failed(turn, request_id, reason)
        case RolledBack(to_step):
            lineage.rolled_back(turn, to_step)
        case NewestDated(ref, age_s):
            turn.set(found_commit=ref, found_commit_mono_s=turn.now - age_s)
        case HistoryRead(observed_s, uncovered):
            turn.set(history=History(observed_s, uncovered))
        case SignalSent(request_id, pid):
            if turn.ask_if_waiting(request_id):
                turn.mark("accepted", pid=pid)
        case SignalRefused(request_id, reason):
            if turn.ask_if_waiting(request_id):
                turn.fail_ask(reason)
        case SignalledExited(request_id, _):
            if turn.ask_if_waiting(request_id):
                turn.set_ask(lost_mono_s=turn.now)
                turn.do(Rescan())
        case Scanned():
            _scanned(turn, event)
        case GenerationClaimed(generation, newest, is_rollback):
            turn.set(
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
                turn.do(TellCommitted(newest))
            if state.must_claim:
                lineage.claim_again(turn, generation)
            elif not is_rollback:
                lineage.claimed(turn)
        case FlushProgress():
            stored.flush_progress(turn, event)
        case Flushed():
            stored.flushed(turn, event)
        case FlushFailed():
            stored.flush_failed(turn, event)
        case CommitDone(flush_id, ref):
            stored.commit_done(turn, flush_id, ref)
        case PartsCounted():
            nodes.counted(turn, event)
        case CommitFailed():
            stored.commit_failed(turn, event)
        case FenceFound() if state.settings.several_vms:
            nodes.fenced(turn, event)
        case FenceFound(generation):
            if state.fenced_by is None and event.is_news(state.generation or 0):
                turn.set(fenced_by=generation)
        case WokeUp(slept_s):
            turn.log("warning", "woke_up", slept_s=round(slept_s, 1))
            turn.do(CheckFence())  # another VM may have taken the run over meanwhile
        case StopRequested(reason):
            turn.set(is_leaving=True)
            turn.do(Exit(EXIT_STOPPED, reason))
        case Tick():
            stored.sample_bandwidth(turn)
        case _ as unreachable:
            assert_never(unreachable)


def _trainer_left(turn: Turn, event: TrainerLeft) -> None:
    state = turn.state
    gone = next((t for t in state.trainers if t.connection == event.connection), None)
    if gone is None:
        return
    others = tuple(t for t in state.trainers if t.connection != event.connection)
    if not event.exited:
        turn.set(trainers=(*others, replace(gone, is_connected=False)))
        return
    turn.set(trainers=others)
    ask = state.evacuation.ask if state.evacuation else None
    if ask is not None and ask.is_waiting and gone.rank in ask.ranks:
        # It may have sealed with its last breath: a scan that begins now will tell.
        turn.set_ask(lost_mono_s=turn.now)
        turn.do(Rescan())


def _placed(turn: Turn, event: TrainerProgress) -> None:
    """The first report of a connection, and each report of another start, says where training begins."""
    trainer = next((t for t in turn.state.trainers if t.connection == event.connection), None)
    is_placed = trainer is not None and trainer.start_step >= 0
    if trainer is None or event.step < 0 or (is_placed and not event.start_id):
        return
    placed = replace(trainer, start_step=event.step, step=max(trainer.step, event.step))
    if event.start_id:
        placed = replace(placed, start_id=event.start_id, step=event.step)
        lineage.noted(turn, event.start_id)
    others = (t for t in turn.state.trainers if t is not trainer)
    turn.set(trainers=(*others, placed))
    before_mono_s = turn.now if is_placed else trainer.greeted_mono_s
    lineage.started(turn, placed, before_mono_s=before_mono_s)


def _trainer_progress(turn: Turn, event: TrainerProgress) -> None:
    def updated() -> object:
        for trainer in turn.state.trainers:
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
                    reported_mono_s=turn.now,
                )
                if event.loss_is_finite is False and trainer.loss_is_finite is not False:
                    turn.log("warning", "loss_not_finite", rank=trainer.rank, step=event.step)

    turn.set(trainers=tuple(updated()))  # type: ignore[arg-type]


def _save_failed(turn: Turn, event: TrainerFailed) -> None:
    """Count and log a checkpoint that failed, once although each of its ranks reports it."""
    if event.failed_step is None:
        return
    before = turn.state.failed_saves
    rank = next((t.rank for t in turn.state.trainers if t.connection == event.connection), None)
    failed = FailedSaves(
        before.count + 1, event.request_id, event.failed_step, rank, event.reason, turn.now
    )
    if (failed.request_id, failed.step) == (before.request_id, before.step):
        return
    turn.set(failed_saves=failed)
    turn.log(
        "warning",
        "save_failed",
        rank=rank,
        step=failed.step,
        reason=failed.reason,
        failed_saves=failed.count,
    )


def _trainer_accepted(turn: Turn, connection: int, request_id: str, at_step: int) -> None:
    trainer = next((t for t in turn.state.trainers if t.connection == connection), None)
    ask = turn.ask_if_waiting(request_id)
    if trainer is None or ask is None:
        return
    if ask.target is not None:  # a rank that reconnected: the decision stands
        turn.do(SendTarget(request_id, ask.target, (connection,)))
    elif trainer.rank in ask.ranks:
        if trainer.rank not in ask.accepted:
            turn.mark("accepted", rank=trainer.rank, step=at_step)
        turn.set_ask(accepted={**ask.accepted, trainer.rank: at_step})


def _ask_late(turn: Turn, connection: int, rank: int) -> None:
    """A rank came (back) while a request is out: it is asked like the others."""
    evacuation = turn.state.evacuation
    if evacuation is None or evacuation.ask is None or evacuation.ask.by_signal:
        return
    ask = evacuation.ask
    if ask.is_waiting and (ask.target is None or rank in ask.ranks):
        turn.set_ask(ranks=ask.ranks | {rank})
        turn.do(
            AskTrainers(
                ask.request_id,
                evacuation.reason,
                evacuation.deadline_mono_s,
                (connection,),
                is_urgent=not evacuation.is_precaution,
            )
        )


def _scanned(turn: Turn, event: Scanned) -> None:
    before = {staged.id for staged in turn.state.staged}
    is_first = turn.state.first_scan_mono_s is None
    if is_first:
        turn.set(first_scan_mono_s=event.started_mono_s)
    seen = dict(turn.state.seen)
    for staged in event.staged:
        first_mono_s = event.started_mono_s if staged.seen_mono_s is None else staged.seen_mono_s
        seen.setdefault(staged.id, first_mono_s)
    for directory, reason in event.rejected:
        if (directory, reason) not in turn.state.rejected:
            turn.log("error", "sealed_set_rejected", directory=directory, reason=reason)
    turn.set(
        staged=event.staged,
        pending=event.pending,
        growing=event.growing,
        rejected=frozenset(event.rejected),
    )
    for staged in event.staged:
        if staged.id not in before:
            turn.set(saved_mono_s=turn.now)
            turn.log(
                "info",
                "sealed_set_found",
                step=staged.id.step,
                directory=staged.directory,
                size_bytes=staged.size_bytes,
                kind=staged.kind.value,
            )
    present = frozenset(staged.id for staged in event.staged)
    written = {staged.id for staged in event.growing}
    kept = {id_: size for id_, size in turn.state.kept.items() if id_ in present | written}
    # A set that was there and is gone is forgotten: another one may get its name.
    abandoned = turn.state.abandoned - (before - present)
    unusable = (turn.state.unusable | abandoned) & present
    seen = {id_: seen_mono_s for id_, seen_mono_s in seen.items() if id_ in present}
    turn.set(unusable=unusable, abandoned=abandoned, kept=kept, seen=seen)
    lineage.found(turn, [s for s in event.staged if s.id not in before], is_first=is_first)
    if is_first:
        _first_look(turn, event.staged)
    turn.set(scanned_mono_s=event.started_mono_s)
    if turn.state.evacuation is not None:
        usable = present - turn.state.unusable
        known = (turn.state.evacuation.newest, *usable)
        turn.set_evacuation(newest=max((i for i in known if i is not None), default=None))
    flight = turn.state.flight
    if flight is not None and flight.is_sealed and flight.staged.id not in present:
        turn.do(CancelFlush(flight.flush_id))
        turn.set(flight=None)
    _look_for_answer(turn, event)


def _look_for_answer(turn: Turn, event: Scanned) -> None:
    """Whether a set answers the request that is out, or none ever will."""
    ask = turn.state.evacuation.ask if turn.state.evacuation else None
    if ask is not None and ask.newer is None:
        present = frozenset(staged.id for staged in event.staged)
        usable = present - ask.known - turn.state.inherited - turn.state.unusable
        turn.set_ask(newer=min((id_ for id_ in usable if id_.step > ask.at_step), default=None))
    if ask is None or not ask.is_waiting:
        return
    of_line = (s for s in event.staged if s.id not in turn.state.abandoned)
    answer = next((s for s in of_line if _answers(s, ask)), None)
    bad = next((r for r in event.rejected if _is_claimed(r[0], ask)), None)
    last = turn.state.last_commit
    if answer is not None:
        turn.set_ask(sealed=answer.id)
        if ask.by_signal:
            turn.set(signal_save_s=turn.now - ask.asked_mono_s)
        turn.mark("sealed", step=answer.id.step, size_bytes=answer.size_bytes)
    elif (
        ask.claimed_step is not None
        and last is not None
        and last.generation == turn.state.generation
        and last.step >= ask.claimed_step
    ):  # committed and pruned before this daemon was restarted
        turn.set_ask(sealed=CheckpointId(ask.claimed_step, ""))
    elif bad is not None:
        turn.fail_ask(f"what the trainer sealed is not sound: {bad[1]}")
    elif (
        ask.lost_mono_s is not None
        and event.started_mono_s >= ask.lost_mono_s
        and not (ask.by_signal and event.pending)  # its last files may still have to settle
    ):
        turn.fail_ask("the trainer's process ended before it had sealed a checkpoint")


def _first_look(turn: Turn, present: tuple[Staged, ...]) -> None:
    """What lies in staging at the start is old, although a claim or a notice came before the scan."""
    nodes.first_look(turn)
    evacuation = turn.state.evacuation
    if evacuation is not None and evacuation.ask is not None and evacuation.ask.by_signal:
        turn.set_ask(known=frozenset(staged.id for staged in present))


def _answers(staged: Staged, ask: Ask) -> bool:
    if ask.by_signal:
        return staged.id not in ask.known
    # A set that was there already, of the very step that the trainer is at, is as good as a new one.
    return staged.request_id == ask.request_id or (
        staged.framework == "swansong" and staged.id.step == ask.claimed_step
    )


def _claimed(turn: Turn, request_id: str, step: int) -> None:
    """A rank has answered; a step that it had left behind when it was asked is no answer to this request."""
    ask = turn.ask_if_waiting(request_id)
    if ask is None:
        return
    stood_at = max(ask.accepted.values(), default=ask.from_step)
    if step < stood_at:
        turn.fail_ask(f"the trainer answered with step {step}, and was asked after step {stood_at}")
    else:
        turn.set_ask(claimed_step=step)


def _is_claimed(directory: str, ask: Ask) -> bool:
    """Whether this is the set that the trainer says answers the request."""
    name = protocol.parse_sealed_name(directory)
    return name is not None and name[0] == ask.claimed_step
