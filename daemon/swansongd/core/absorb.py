# SPDX-License-Identifier: Apache-2.0
"""The first half of a turn: writes down what an event says, and orders no more than its own echo."""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from swansong import protocol

from swansongd.core import absorb_stored as stored
from swansongd.core import nodes, periodic, rollback, stall
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
    TrainerSealed,
    WokeUp,
)
from swansongd.core.state import Ask, State
from swansongd.core.turn import EXIT_STOPPED, HOST_SOURCE, LOGIND_SOURCE, Turn
from swansongd.model import (
    CheckpointId,
    DeadlineQuality,
    Health,
    Notice,
    Staged,
)


def absorb(turn: Turn, event: Event) -> None:  # noqa: PLR0915 - one case for each event
    state = turn.state
    match event:
        case NoticeRaised(notice):
            _notice_raised(turn, notice)
        case NoticeWithdrawn(source, reason):
            if source in state.notices:
                kept = {name: n for name, n in state.notices.items() if name != source}
                # Should it come back under the same identity, then it is news.
                gone = state.notices[source].identity
                turn.set(notices=kept, concluded=tuple(i for i in state.concluded if i != gone))
                turn.log("warning", "notice_withdrawn", source=source, reason=reason)
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
            if not state.connected:
                turn.set(joined_mono_s=turn.now)
            turn.set(trainers=(*others, trainer))
            if state.last_complete is not None:  # made while it was away, perhaps
                turn.do(TellCommitted(state.last_complete, (trainer.connection,)))
            nodes.joined(turn, trainer)
            _ask_late(turn, trainer.connection, trainer.rank)
            periodic.joined(turn, trainer.connection)
        case TrainerLeft():
            _trainer_left(turn, event)
        case TrainerProgress():
            _trainer_progress(turn, event)
        case TrainerAccepted(connection, request_id, at_step):
            _trainer_accepted(turn, connection, request_id, at_step)
            periodic.accepted(turn, connection, request_id, at_step)
        case TrainerAgreed(request_id, at_step):
            nodes.agreed(turn, request_id, at_step)
        case PeerRequested(request_id, reason, seconds_left):
            peers = nodes.peer_notice(turn, request_id, reason, seconds_left)
            if peers is not None:
                _notice_raised(turn, peers)
        case FinishAsked(incarnation):
            nodes.finish(turn, incarnation)
        case IncarnationBegun(incarnation):
            nodes.incarnation(turn, incarnation)
        case TrainerSealed(_, request_id, at_step, save_s, size_bytes):
            if turn.ask_if_waiting(request_id):
                turn.set_ask(claimed_step=at_step)
            _trainer_progress(
                turn,
                TrainerProgress(event.connection, at_step, save_s=save_s, save_bytes=size_bytes),
            )
            turn.do(Rescan())
        case TrainerFailed(_, request_id, reason):
            if turn.ask_if_waiting(request_id):
                turn.fail_ask(reason)
            periodic.failed(turn, request_id, reason)
        case RolledBack(to_step):
            rollback.rolled_back(turn, to_step)
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
            inherited = frozenset(staged.id for staged in state.staged)
            if is_rollback:  # what was sealed since is of the new lineage
                inherited = state.inherited
            turn.set(
                generation=generation,
                last_commit=newest,
                last_complete=newest,
                inherited=inherited,
                overtaken_by=None,
            )
            if newest is not None:
                turn.do(TellCommitted(newest))
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
        case FenceFound(generation) if state.settings.several_vms:
            nodes.fenced(turn, generation)
        case FenceFound(generation):
            if state.fenced_by is None and generation > (state.generation or 0):
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


def _notice_raised(turn: Turn, notice: Notice) -> None:
    known = turn.state.notices.get(notice.source)
    if known is not None and known.identity == notice.identity:
        # Seen before: it may come nearer or become more severe, and never recedes, unless the source
        # has learned what it had to assume.
        nearest = min(known.deadline_mono_s, notice.deadline_mono_s)
        is_learned = _is_learned(turn.state, known, notice)
        notice = replace(
            notice,
            severity=max(known.severity, notice.severity),
            deadline_mono_s=notice.deadline_mono_s if is_learned else nearest,
            deadline_quality=notice.deadline_quality if is_learned else known.deadline_quality,
        )
        evacuation = turn.state.evacuation
        if is_learned and evacuation is not None and notice.identity in evacuation.identities:
            turn.set(notices={**turn.state.notices, notice.source: notice})
            live = turn.state.urgent_notices(turn.now) or (notice,)
            turn.set_evacuation(deadline_mono_s=min(n.deadline_mono_s for n in live))
            turn.mark("deadline_learned", seconds_left=round(turn.left_s, 2), source=notice.source)
    elif notice.identity not in turn.state.concluded:
        turn.log(
            "warning",
            "notice",
            source=notice.source,
            kind=notice.kind,
            severity=notice.severity.name.lower(),
            seconds_left=round(notice.deadline_mono_s - turn.now, 2),
            deadline_quality=notice.deadline_quality.value,
            detail=notice.detail,
        )
    turn.set(notices={**turn.state.notices, notice.source: notice})


def _is_learned(state: State, known: Notice, notice: Notice) -> bool:
    """Whether a later deadline is to be believed.

    Compute Engine does not tell how long before the soft-off its notice comes.  When the soft-off has
    not come after a while the long notice applies; that proves something only while logind would have
    told us of it.
    """
    logind = state.sources.get(LOGIND_SOURCE)
    return (
        known.deadline_quality is DeadlineQuality.ASSUMED
        and notice.deadline_quality is DeadlineQuality.DERIVED
        and notice.deadline_mono_s > known.deadline_mono_s
        and logind is not None
        and logind.health is Health.OK
        and not state.notices.keys() & {LOGIND_SOURCE, HOST_SOURCE}
    )


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
    turn.set(unusable=turn.state.unusable & present, kept=kept)
    if turn.state.scanned_mono_s is None:
        _first_look(turn, present)
    turn.set(scanned_mono_s=event.started_mono_s)
    if turn.state.evacuation is not None:
        seen = (turn.state.evacuation.newest, *present)
        turn.set_evacuation(newest=max((i for i in seen if i is not None), default=None))
    flight = turn.state.flight
    if flight is not None and flight.is_sealed and flight.staged.id not in present:
        turn.do(CancelFlush(flight.flush_id))
        turn.set(flight=None)
    ask = turn.state.evacuation.ask if turn.state.evacuation else None
    if ask is not None and ask.newer is None:
        usable = present - ask.known - turn.state.inherited - turn.state.unusable
        turn.set_ask(newer=min((id_ for id_ in usable if id_.step > ask.at_step), default=None))
    if ask is None or not ask.is_waiting:
        return
    answer = next((s for s in event.staged if _answers(s, ask)), None)
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


def _first_look(turn: Turn, present: frozenset[CheckpointId]) -> None:
    """What lies in staging at the start is old, although a claim or a notice came before the scan."""
    nodes.first_look(turn)
    if turn.state.generation is not None:
        turn.set(inherited=turn.state.inherited | present)
    evacuation = turn.state.evacuation
    if evacuation is not None and evacuation.ask is not None and evacuation.ask.by_signal:
        turn.set_ask(known=present)


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
