# SPDX-License-Identifier: Apache-2.0
"""The state machine: ``step(state, event, now) -> (new state, actions)``.

Every turn has two halves.  *Absorb* writes down what the event says, and nothing more.  *Advance*
looks at all the facts and orders whatever is missing between how the world is and how it should be,
so the same facts lead to the same orders in whatever sequence they came, and a daemon that was
restarted in the middle goes on where it was.

Pure: no clock, disk, socket, thread or environment.  Bad luck arrives as an event and is never raised.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import assert_never

from swansong import protocol

from swansongd.core import planner
from swansongd.core.events import (
    Action,
    AskTrainers,
    CancelFlush,
    CommitDone,
    CommitFailed,
    CommitManifest,
    Conclude,
    Event,
    Exit,
    FenceFound,
    Flushed,
    FlushFailed,
    FlushProgress,
    GenerationClaimed,
    Log,
    Mark,
    NoticeRaised,
    NoticeWithdrawn,
    Prune,
    Rescan,
    Scanned,
    SendTarget,
    SignalledExited,
    SignalRefused,
    SignalSent,
    SignalTrainer,
    SourceChanged,
    StartFlush,
    StopRequested,
    TellCommitted,
    TellFenced,
    Tick,
    TrainerAccepted,
    TrainerFailed,
    TrainerJoined,
    TrainerLeft,
    TrainerProgress,
    TrainerSealed,
    WithdrawRequest,
)
from swansongd.core.planner import Plan, PlanKind
from swansongd.core.state import Ask, Evacuation, Flight, State, Stored
from swansongd.model import CheckpointId, CommitRef, Health, Notice, Staged, Verdict

AGREEMENT_LIMIT_S = 5.0
"""Ranks that have not all answered by then, or in a tenth of the time left, do not agree."""
SAMPLE_S = 1.0
"""So often the speed of a flush under way goes into the bandwidth."""
OUTLIVED_S = 10.0
"""A VM that still runs this long after its deadline was not taken: go back to watching."""
CONCLUDED_MAX = 64
RETRY_S_MAX = 30.0
RETRY_URGENT_S = 0.5
HOST_SOURCE = "host"
"""Source of the notice that the service itself raises when the host's SIGTERM reaches it."""

EXIT_STOPPED = 0
EXIT_FENCED = 4


def step(state: State, event: Event, now_mono_s: float) -> tuple[State, tuple[Action, ...]]:
    """One turn of the decision loop."""
    turn = _Turn(state, now_mono_s)
    if not state.is_leaving:
        _absorb(turn, event)
        _advance(turn)
    return turn.state, tuple(turn.actions)


def evacuation_id(notice: Notice) -> str:
    """The same for the same notice after a restart of the daemon; also the id of its request."""
    return hashlib.sha256(notice.identity.encode()).hexdigest()[:12]


class _Turn:
    """The state as it becomes, and what was ordered, within one turn."""

    def __init__(self, state: State, now: float) -> None:
        self.state = state
        self.now = now
        self.actions: list[Action] = []

    def set(self, **changes: object) -> None:
        self.state = replace(self.state, **changes)  # type: ignore[arg-type]

    def set_evacuation(self, **changes: object) -> None:
        assert self.state.evacuation is not None
        self.set(evacuation=replace(self.state.evacuation, **changes))  # type: ignore[arg-type]

    def set_ask(self, **changes: object) -> None:
        assert self.state.evacuation is not None
        assert self.state.evacuation.ask is not None
        self.set_evacuation(ask=replace(self.state.evacuation.ask, **changes))  # type: ignore[arg-type]

    def do(self, action: Action) -> None:
        self.actions.append(action)

    def log(self, level: str, event: str, **facts: object) -> None:
        self.do(Log(level, event, tuple(facts.items())))

    def mark(self, phase: str, **facts: object) -> None:
        """A line of the evacuation's timeline, if there is an evacuation."""
        if self.state.evacuation is not None:
            self.do(Mark(self.state.evacuation.id, phase, tuple(facts.items())))

    def ask_if_waiting(self, request_id: str) -> Ask | None:
        evacuation = self.state.evacuation
        if evacuation is None or evacuation.ask is None:
            return None
        ask = evacuation.ask
        return ask if ask.request_id == request_id and ask.is_waiting else None

    @property
    def left_s(self) -> float:
        assert self.state.evacuation is not None
        return self.state.evacuation.deadline_mono_s - self.now


# ------------------------------------------------------------------------------------- absorb


def _absorb(turn: _Turn, event: Event) -> None:  # noqa: PLR0915 - one case for each event
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
            turn.set(trainers=(*others, trainer))
            if state.last_commit is not None:  # made while it was away, perhaps
                turn.do(TellCommitted(state.last_commit))
            _ask_late(turn, trainer.connection, trainer.rank)
        case TrainerLeft():
            _trainer_left(turn, event)
        case TrainerProgress():
            _trainer_progress(turn, event)
        case TrainerAccepted(connection, request_id, at_step):
            _trainer_accepted(turn, connection, request_id, at_step)
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
                _ask_failed(turn, reason)
        case SignalSent(request_id, pid):
            if turn.ask_if_waiting(request_id):
                turn.mark("accepted", pid=pid)
        case SignalRefused(request_id, reason):
            if turn.ask_if_waiting(request_id):
                _ask_failed(turn, reason)
        case SignalledExited(request_id, _):
            if turn.ask_if_waiting(request_id):
                turn.set_ask(lost_mono_s=turn.now)
                turn.do(Rescan())
        case Scanned():
            _scanned(turn, event)
        case GenerationClaimed(generation, newest):
            inherited = frozenset(staged.id for staged in state.staged)
            turn.set(generation=generation, last_commit=newest, inherited=inherited)
            if newest is not None:
                turn.do(TellCommitted(newest))
        case FlushProgress(flush_id, bytes_stored):
            if state.flight is not None and state.flight.flush_id == flush_id:
                turn.set(flight=replace(state.flight, bytes_stored=bytes_stored))
                if turn.now - state.flight.sampled_mono_s >= SAMPLE_S:
                    _sample_bandwidth(turn)
        case Flushed():
            _flushed(turn, event)
        case FlushFailed():
            _flush_failed(turn, event)
        case CommitDone(flush_id, ref):
            _commit_done(turn, flush_id, ref)
        case CommitFailed():
            _commit_failed(turn, event)
        case FenceFound(generation):
            if state.fenced_by is None:
                turn.set(fenced_by=generation)
        case StopRequested(reason):
            turn.set(is_leaving=True)
            turn.do(Exit(EXIT_STOPPED, reason))
        case Tick():
            pass
        case _ as unreachable:
            assert_never(unreachable)


def _notice_raised(turn: _Turn, notice: Notice) -> None:
    known = turn.state.notices.get(notice.source)
    if known is not None and known.identity == notice.identity:
        # Seen before: it may come nearer or become more severe, and never recedes.
        notice = replace(
            notice,
            severity=max(known.severity, notice.severity),
            deadline_mono_s=min(known.deadline_mono_s, notice.deadline_mono_s),
        )
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


def _trainer_left(turn: _Turn, event: TrainerLeft) -> None:
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


def _trainer_progress(turn: _Turn, event: TrainerProgress) -> None:
    def updated() -> object:
        for trainer in turn.state.trainers:
            if trainer.connection != event.connection:
                yield trainer
            else:
                yield replace(
                    trainer,
                    step=max(trainer.step, event.step),
                    save_s=trainer.save_s if event.save_s is None else event.save_s,
                    save_bytes=trainer.save_bytes if event.save_bytes is None else event.save_bytes,
                    reported_mono_s=turn.now,
                )

    turn.set(trainers=tuple(updated()))  # type: ignore[arg-type]


def _trainer_accepted(turn: _Turn, connection: int, request_id: str, at_step: int) -> None:
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


def _ask_late(turn: _Turn, connection: int, rank: int) -> None:
    """A rank came (back) while a request is out: it is asked like the others."""
    evacuation = turn.state.evacuation
    if evacuation is None or evacuation.ask is None or evacuation.ask.by_signal:
        return
    ask = evacuation.ask
    if ask.is_waiting and (ask.target is None or rank in ask.ranks):
        turn.set_ask(ranks=ask.ranks | {rank})
        turn.do(
            AskTrainers(
                ask.request_id, evacuation.reason, evacuation.deadline_mono_s, (connection,)
            )
        )


def _scanned(turn: _Turn, event: Scanned) -> None:
    before = {staged.id for staged in turn.state.staged}
    for directory, reason in event.rejected:
        if (directory, reason) not in turn.state.rejected:
            turn.log("error", "sealed_set_rejected", directory=directory, reason=reason)
    turn.set(staged=event.staged, pending=event.pending, rejected=frozenset(event.rejected))
    for staged in event.staged:
        if staged.id not in before:
            turn.log(
                "info",
                "sealed_set_found",
                step=staged.id.step,
                directory=staged.directory,
                size_bytes=staged.size_bytes,
                kind=staged.kind.value,
            )
    present = frozenset(staged.id for staged in event.staged)
    turn.set(unusable=turn.state.unusable & present)
    if turn.state.scanned_mono_s is None:
        _first_look(turn, present)
    turn.set(scanned_mono_s=event.started_mono_s)
    if turn.state.evacuation is not None:
        seen = (turn.state.evacuation.newest, *present)
        turn.set_evacuation(newest=max((i for i in seen if i is not None), default=None))
    flight = turn.state.flight
    if flight is not None and flight.staged.id not in present:
        turn.do(CancelFlush(flight.flush_id))
        turn.set(flight=None)
    ask = turn.state.evacuation.ask if turn.state.evacuation else None
    if ask is None or not ask.is_waiting:
        return
    answer = next((s for s in event.staged if _answers(s, ask)), None)
    bad = next((r for r in event.rejected if _is_claimed(r[0], ask)), None)
    last = turn.state.last_commit
    if answer is not None:
        turn.set_ask(sealed=answer.id)
        turn.mark("sealed", step=answer.id.step, size_bytes=answer.size_bytes)
    elif (
        ask.claimed_step is not None
        and last is not None
        and last.generation == turn.state.generation
        and last.step >= ask.claimed_step
    ):  # committed and pruned before this daemon was restarted
        turn.set_ask(sealed=CheckpointId(ask.claimed_step, ""))
    elif bad is not None:
        _ask_failed(turn, f"what the trainer sealed is not sound: {bad[1]}")
    elif (
        ask.lost_mono_s is not None
        and event.started_mono_s >= ask.lost_mono_s
        and not (ask.by_signal and event.pending)  # its last files may still have to settle
    ):
        _ask_failed(turn, "the trainer's process ended before it had sealed a checkpoint")


def _first_look(turn: _Turn, present: frozenset[CheckpointId]) -> None:
    """What lies in staging at the start is old, although a claim or a notice came before the scan."""
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


def _flushed(turn: _Turn, event: Flushed) -> None:
    flight = turn.state.flight
    if flight is None or flight.flush_id != event.flush_id:
        return
    size_bytes = flight.staged.size_bytes
    turn.set(flight=replace(flight, bytes_stored=size_bytes))
    _sample_bandwidth(turn)
    turn.set(
        flight=None,
        failures=0,
        stored=(
            *turn.state.stored,
            Stored(
                flush_id=event.flush_id, staged=flight.staged, shards=event.shards, is_asked=False
            ),
        ),
    )
    turn.mark("flushed", step=flight.staged.id.step, size_bytes=size_bytes)


def _sample_bandwidth(turn: _Turn) -> None:
    """Learn from what the flush has moved since the last sample, if that is enough to tell."""
    flight = turn.state.flight
    assert flight is not None
    size_bytes = flight.bytes_stored - flight.sampled_bytes
    if size_bytes < planner.BANDWIDTH_SAMPLE_MIN_BYTES:
        return
    turn.set(
        bandwidth_bytes_per_s=planner.updated_bandwidth(
            turn.state.bandwidth_bytes_per_s, size_bytes, turn.now - flight.sampled_mono_s
        ),
        flight=replace(flight, sampled_mono_s=turn.now, sampled_bytes=flight.bytes_stored),
    )


def _flush_failed(turn: _Turn, event: FlushFailed) -> None:
    flight = turn.state.flight
    if flight is None or flight.flush_id != event.flush_id:
        return
    turn.set(flight=None)
    turn.log(
        "error", "flush_failed", step=flight.staged.id.step, reason=event.reason, void=event.void
    )
    if event.void:
        turn.set(unusable=turn.state.unusable | {flight.staged.id})
    else:
        _back_off(turn)


def _commit_done(turn: _Turn, flush_id: str, ref: CommitRef) -> None:
    done = next((item for item in turn.state.stored if item.flush_id == flush_id), None)
    newest = turn.state.last_commit
    turn.set(
        stored=tuple(item for item in turn.state.stored if item.flush_id != flush_id), failures=0
    )
    if newest is None or ref > newest:
        turn.set(last_commit=ref, last_commit_mono_s=turn.now)
    turn.mark("committed", generation=ref.generation, step=ref.step)
    turn.log(
        "info",
        "committed",
        generation=ref.generation,
        step=ref.step,
        size_bytes=done.staged.size_bytes if done else None,
    )
    turn.do(TellCommitted(ref))
    # Only what our hooks wrote is ours to delete; the newest committed set stays for a quick restore.
    dispensable = tuple(
        staged.directory
        for staged in turn.state.staged
        if staged.framework == "swansong"
        and staged.id.step < ref.step
        and (done is None or staged.id < done.staged.id)
    )
    if dispensable:
        turn.do(Prune(dispensable))


def _commit_failed(turn: _Turn, event: CommitFailed) -> None:
    failed = next((item for item in turn.state.stored if item.flush_id == event.flush_id), None)
    if failed is None:
        return
    turn.log("error", "commit_failed", step=failed.staged.id.step, reason=event.reason)
    others = tuple(item for item in turn.state.stored if item.flush_id != event.flush_id)
    if event.conflict:
        turn.set(stored=others, unusable=turn.state.unusable | {failed.staged.id})
    else:
        turn.set(stored=(*others, replace(failed, is_asked=False)))
        _back_off(turn)


def _back_off(turn: _Turn) -> None:
    """Try again later; at once, nearly, when the end is near."""
    failures = turn.state.failures + 1
    wait_s = min(RETRY_S_MAX, 2.0 ** min(failures, 10) / 2)
    if turn.state.evacuation is not None:
        wait_s = RETRY_URGENT_S
    turn.set(failures=failures, retry_mono_s=turn.now + wait_s)


# ------------------------------------------------------------------------------------ advance


def _advance(turn: _Turn) -> None:
    if turn.state.is_leaving:
        return
    if turn.state.fenced_by is not None:
        _leave_fenced(turn, turn.state.fenced_by)
        return
    _steer_evacuation(turn)
    _steer_request(turn)
    _steer_flush(turn)
    _steer_commit(turn)
    _steer_verdict(turn)


def _leave_fenced(turn: _Turn, generation: int) -> None:
    if turn.state.flight is not None:
        turn.do(CancelFlush(turn.state.flight.flush_id))
    turn.log("error", "fenced", generation=turn.state.generation, newer_generation=generation)
    turn.do(TellFenced(generation))
    turn.do(Exit(EXIT_FENCED, f"generation {generation} has taken the run over"))
    turn.set(is_leaving=True, flight=None)


def _steer_evacuation(turn: _Turn) -> None:
    """Open, move, withdraw or outlive the evacuation, as the live notices have it."""
    live = turn.state.urgent_notices
    evacuation = turn.state.evacuation
    if not live:
        if evacuation is not None:
            _withdraw(turn, evacuation, "every notice was withdrawn")
        return
    notice = live[0]
    deadline = min(n.deadline_mono_s for n in live)
    if evacuation is None:
        _open(turn, notice, deadline)
    elif deadline < evacuation.deadline_mono_s:
        turn.set_evacuation(deadline_mono_s=deadline)
        turn.mark("deadline_moved", seconds_left=round(turn.left_s, 2), source=notice.source)
    elif turn.now > evacuation.deadline_mono_s + OUTLIVED_S:
        turn.log("warning", "outlived_deadline", hint="the VM was not taken; watching again")
        # A notice whose own time is still to come opens the next evacuation.
        identities = tuple(n.identity for n in live if turn.now > n.deadline_mono_s + OUTLIVED_S)
        turn.set(concluded=(*turn.state.concluded, *identities)[-CONCLUDED_MAX:])
        _withdraw(turn, evacuation, "the VM has outlived its deadline")


def _open(turn: _Turn, notice: Notice, deadline_mono_s: float) -> None:
    plan = _plan(turn, left_s=deadline_mono_s - turn.now)
    # Its own id when the same notice is acted on again: the old answer must not do for the new request.
    id_ = evacuation_id(notice)
    again = turn.state.opened.count(id_)
    turn.set(opened=(*turn.state.opened, id_)[-CONCLUDED_MAX:])
    evacuation = Evacuation(
        id=f"{id_}-{again}" if again else id_,
        reason=f"{notice.source}: {notice.kind}",
        opened_mono_s=turn.now,
        deadline_mono_s=deadline_mono_s,
        plan=plan,
        newest=max((staged.id for staged in turn.state.staged), default=None),
    )
    # What failed a minute ago is worth another try now.
    turn.set(evacuation=evacuation, retry_mono_s=turn.now)
    turn.mark(
        "notice",
        source=notice.source,
        kind=notice.kind,
        seconds_left=round(turn.left_s, 2),
        plan=plan.kind.value,
        why=plan.reason,
    )
    turn.do(Rescan())
    if plan.kind is PlanKind.TAKE:
        _ask(turn)


def _plan(turn: _Turn, *, left_s: float) -> Plan:
    state = turn.state
    return planner.decide(
        left_s=left_s,
        reserve_s=state.settings.reserve_s,
        measured=state.measured,
        has_trainer=bool(state.connected) or state.settings.signals_trainer,
        candidates=state.candidates,
        is_committing=bool(state.stored),
    )


def _ask(turn: _Turn) -> None:
    """Over the socket if anyone is there; the signal is for trainers without our hooks."""
    evacuation = turn.state.evacuation
    assert evacuation is not None
    connected = turn.state.connected
    by_signal = not connected
    ask = Ask(
        request_id=evacuation.id,
        by_signal=by_signal,
        agree_by_mono_s=turn.now + min(AGREEMENT_LIMIT_S, turn.left_s / 10),
        known=frozenset(staged.id for staged in turn.state.staged),
        ranks=frozenset() if by_signal else frozenset(t.rank for t in connected),
    )
    turn.set_evacuation(ask=ask)
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
            )
        )


def _withdraw(turn: _Turn, evacuation: Evacuation, reason: str) -> None:
    turn.mark("withdrawn", reason=reason)
    if evacuation.ask is not None:
        turn.do(WithdrawRequest(evacuation.ask.request_id, reason))
    turn.set(evacuation=None)


def _ask_failed(turn: _Turn, reason: str) -> None:
    turn.mark("request_failed", reason=reason)
    turn.set_ask(failure=reason)
    evacuation = turn.state.evacuation
    assert evacuation is not None
    assert evacuation.ask is not None
    if not evacuation.ask.by_signal:
        turn.do(WithdrawRequest(evacuation.ask.request_id, reason))


def _steer_request(turn: _Turn) -> None:
    """Bring the ranks to one step, and know when it is too late to wait for them."""
    evacuation = turn.state.evacuation
    if evacuation is not None and evacuation.ask is None and turn.state.connected:
        # A trainer that came after the notice, or came back after a restart of the daemon.
        plan = _plan(turn, left_s=turn.left_s)
        if plan.kind is PlanKind.TAKE:
            turn.set_evacuation(plan=plan, verdict=None)
            _ask(turn)
            turn.do(Rescan())
        evacuation = turn.state.evacuation
    if evacuation is None or evacuation.ask is None or not evacuation.ask.is_waiting:
        return
    ask = evacuation.ask
    if not ask.by_signal and ask.target is None:
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
            _ask_failed(
                turn,
                f"ranks {missing} did not answer in time"
                + (f", and {absent} of {expected} never came" if absent else ""),
            )
            return
    measured = turn.state.measured
    flush_s = planner.seconds_to_store(measured.save_bytes or 0, measured.bandwidth_bytes_per_s)
    if turn.left_s < turn.state.settings.reserve_s + flush_s:
        _ask_failed(turn, "no time is left to flush what the trainer has not sealed yet")


def _steer_flush(turn: _Turn) -> None:
    """Have the right set in flight."""
    state = turn.state
    if state.generation is None or turn.now < state.retry_mono_s:
        return
    flight = state.flight
    if flight is not None and state.evacuation is None:
        return  # in the background what is begun is finished first
    candidates = state.candidates
    if state.evacuation is not None:
        data_left_s = turn.left_s - state.settings.reserve_s
        if data_left_s <= 0:
            return  # the reserve is for the commit
        answer = state.answer
        if answer is not None and state.evacuation.verdict is None:
            # A trainer that trains on may seal newer ones: they wait until this one is safe.
            candidates = tuple(c for c in candidates if c.id <= answer)
        wanted = planner.choose(
            candidates,
            left_s=data_left_s,
            bandwidth_bytes_per_s=state.bandwidth_bytes_per_s,
        )
    else:
        wanted = max((candidate.id for candidate in candidates), default=None)
    if wanted is None or (flight is not None and flight.staged.id == wanted):
        return
    _start_flush(turn, wanted)


def _start_flush(turn: _Turn, wanted: CheckpointId) -> None:
    state = turn.state
    assert state.generation is not None
    staged = next(item for item in state.staged if item.id == wanted)
    flush_id = f"{wanted}.{state.flushes + 1}"
    turn.set(
        flushes=state.flushes + 1,
        flight=Flight(
            flush_id=flush_id,
            staged=staged,
            started_mono_s=turn.now,
            sampled_mono_s=turn.now,
        ),
    )
    turn.mark("flush", step=wanted.step, size_bytes=staged.size_bytes)
    turn.do(StartFlush(flush_id, staged, state.generation))


def _steer_commit(turn: _Turn) -> None:
    state = turn.state
    if turn.now < state.retry_mono_s:
        return
    for item in state.stored:
        if not item.is_asked:
            asked = replace(item, is_asked=True)
            turn.set(stored=tuple(asked if i is item else i for i in turn.state.stored))
            assert state.generation is not None
            turn.do(
                CommitManifest(
                    item.flush_id, item.staged, item.shards, state.generation, state.last_commit
                )
            )


def _steer_verdict(turn: _Turn) -> None:
    """Say how the evacuation ended, as soon as that is known; say it again if it got better."""
    state = turn.state
    evacuation = state.evacuation
    if evacuation is None:
        return
    ask = evacuation.ask
    is_waiting = ask is not None and ask.is_waiting
    has_looked = (
        state.scanned_mono_s is not None and state.scanned_mono_s >= evacuation.opened_mono_s
    )
    is_answered = state.answer is not None and state.is_covered(state.answer)
    is_busy = not is_answered and (
        not has_looked or bool(state.uncommitted) or bool(state.stored) or state.generation is None
    )
    out_of_time = turn.left_s <= 0
    if (is_waiting or is_busy) and not out_of_time:
        return
    verdict, reason = _judge(state, out_of_time=out_of_time and (is_waiting or is_busy))
    if verdict is not evacuation.verdict or state.last_commit != evacuation.verdict_commit:
        turn.set_evacuation(verdict=verdict, verdict_commit=state.last_commit)
        turn.do(Conclude(evacuation.id, verdict, reason, state.last_commit, round(turn.left_s, 2)))
    if HOST_SOURCE in state.notices:
        turn.set(is_leaving=True)
        turn.do(Exit(EXIT_STOPPED, f"the host shuts down; {verdict.value}"))


def _judge(state: State, *, out_of_time: bool) -> tuple[Verdict, str]:
    evacuation = state.evacuation
    assert evacuation is not None
    if state.last_commit is None:
        if out_of_time:
            return Verdict.LOST, "the time ran out before anything was committed"
        if evacuation.ask is not None and evacuation.ask.failure:
            return Verdict.LOST, f"nothing is committed: {evacuation.ask.failure}"
        return Verdict.LOST, "nothing was staged, so nothing is committed"
    stands = f"{state.last_commit} stands"
    if state.answer is not None and state.is_covered(state.answer):
        return Verdict.SAFE, f"the checkpoint that was asked for is committed: {state.last_commit}"
    if out_of_time:
        return Verdict.PARTIAL, f"the time ran out; {stands}"
    ask = evacuation.ask
    if ask is not None and ask.failure:
        return Verdict.PARTIAL, f"{ask.failure}; {stands}"
    if evacuation.newest is not None and not state.is_covered(evacuation.newest):
        return Verdict.PARTIAL, f"the newest sealed set could not be used; {stands}"
    ahead = max((trainer.step for trainer in state.trainers), default=-1)
    if ask is None and ahead > state.last_commit.step:
        return Verdict.PARTIAL, f"{evacuation.plan.reason}; {stands}, training was at step {ahead}"
    return Verdict.SAFE, f"the newest sealed state is committed: {state.last_commit}"
