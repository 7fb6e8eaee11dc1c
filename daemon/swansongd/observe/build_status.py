# SPDX-License-Identifier: Apache-2.0
"""The status of the daemon, made of a snapshot of its figures."""

from __future__ import annotations

from dataclasses import replace

from swansong_bucket.model import (
    GpuStatus,
    Health,
    Notice,
    SourceStatus,
    TrainerView,
    Verdict,
    VmPart,
    measures_of,
)

from swansongd.core import arrival, followup, periodic, resume
from swansongd.core.state import State
from swansongd.observe.facts import StepsCompared
from swansongd.observe.margin import margins, problem_of
from swansongd.observe.phase import is_follow_up_under_way, phase_of
from swansongd.observe.slow import slow_ranks
from swansongd.observe.snapshot import Snapshot
from swansongd.observe.stall import stalled
from swansongd.observe.status import (
    STORE_HEALTH,
    TRAINERS_MAX,
    CommitStatus,
    DaemonStatus,
    EvacuationStatus,
    FailedSavesStatus,
    FaultsStatus,
    FlushStatus,
    FollowUpsStatus,
    GpuHealthStatus,
    HealthStatus,
    LagStatus,
    NoticeStatus,
    PartStatus,
    TrainerStatus,
    UnsentStatus,
    VerdictStatus,
)
from swansongd.observe.tally import Figures


def status_of(snapshot: Snapshot) -> DaemonStatus:
    """The status of the daemon at the moment of the snapshot."""
    state, tally, now_mono_s = snapshot.state, snapshot.tally, snapshot.now_mono_s
    sources = {
        name: _health(name, status, now_mono_s) for name, status in state.notices.sources.items()
    }
    store = sources.pop(STORE_HEALTH, None)
    age_s = _age(tally.committed_mono_s, now_mono_s)
    mirror, prune = snapshot.mirror, snapshot.prune
    silent, slow = stalled(state, now_mono_s), slow_ranks(state)
    return DaemonStatus(
        state=phase_of(state).value,
        verdict=_verdict(state),
        last_verdict=_last_verdict(state, now_mono_s),
        sources=tuple(sources.values()),
        gpus=tuple(_gpu(gpu, now_mono_s) for gpu in state.gpus.status.values()),
        store=store,
        store_answer_age_s=_age(snapshot.store_answered_mono_s, now_mono_s),
        last_commit=_last_commit(state, age_s),
        replication_lag=LagStatus(
            steps=_lag_steps(state), seconds=age_s, bytes=_pending_bytes(state)
        ),
        run=snapshot.run,
        generation=state.generation,
        newer_generation=state.starts.fenced_by,
        part=_part(state.part),
        notices=tuple(_notice(notice, now_mono_s) for notice in state.notices.live.values()),
        evacuation=_evacuation(state, now_mono_s),
        margins=margins(state, problem_of(state, now_mono_s, tally, snapshot.staging)),
        trainers=tuple(
            _trainer(
                trainer,
                now_mono_s,
                is_stalled=trainer in silent,
                slower=slow.get(trainer.connection),
                compared=snapshot.compared.get(trainer.rank),
            )
            for trainer in state.ranks.trainers[:TRAINERS_MAX]
        ),
        trainers_not_shown=max(0, len(state.ranks.trainers) - TRAINERS_MAX),
        trainers_refused=replace(tally.refused, age_s=_age(tally.refused_mono_s, now_mono_s)),
        failed_saves=_failed_saves(tally, now_mono_s),
        checkpoint_interval_s=round(periodic.interval_s(state), 1),
        flush=_flush(state, now_mono_s),
        pending_bytes=_pending_bytes(state),
        unsent=_unsent(state, tally, now_mono_s),
        staging=snapshot.staging,
        prefetch=snapshot.prefetch,
        mirror=mirror and replace(mirror, objects_taken=snapshot.mirror_objects_taken),
        prune=prune and replace(prune, age_s=_age(snapshot.pruned_mono_s, now_mono_s)),
        notifications=snapshot.notifications,
        metrics=snapshot.metrics,
        bandwidth_bytes_per_s=state.learned.bandwidth_bytes_per_s,
        store_errors=dict(snapshot.store_errors),
        bytes_referenced=snapshot.bytes_referenced,
        decision_faults=FaultsStatus(count=snapshot.decision_faults, last=snapshot.last_fault),
        version=snapshot.version,
        pid=snapshot.pid,
        uptime_s=round(now_mono_s - snapshot.born_mono_s, 1),
    )


def _age(at_mono_s: float | None, now_mono_s: float) -> float | None:
    return None if at_mono_s is None else round(now_mono_s - at_mono_s, 1)


def _last_commit(state: State, age_s: float | None) -> CommitStatus | None:
    last = resume.newest_known(state, state.commits.last_complete)
    if last is None:
        return None
    return CommitStatus(
        generation=last.generation, step=last.step, is_final=last.is_final, age_s=age_s
    )


def _part(part: VmPart | None) -> PartStatus | None:
    if part is None:
        return None
    return PartStatus(
        generation=part.ref.generation,
        step=part.ref.step,
        nodes=part.nodes,
        nodes_committed=part.committed,
    )


def _health(name: str, status: SourceStatus, now_mono_s: float) -> HealthStatus:
    return HealthStatus(
        name=name,
        health=status.health,
        reason=status.reason,
        for_s=round(now_mono_s - status.since_mono_s, 1),
    )


def _gpu(gpu: GpuStatus, now_mono_s: float) -> GpuHealthStatus:
    return GpuHealthStatus(
        index=gpu.index,
        uuid=gpu.uuid,
        name=gpu.name,
        pci=gpu.pci,
        health=gpu.health,
        reason=gpu.reason,
        for_s=round(now_mono_s - gpu.since_mono_s, 1),
        xids=dict(gpu.xids),
    )


def _notice(notice: Notice, now_mono_s: float) -> NoticeStatus:
    return NoticeStatus(
        source=notice.source,
        kind=notice.kind,
        severity=notice.severity.name.lower(),
        seconds_left=round(notice.deadline_mono_s - now_mono_s, 1),
        identities=(notice.identity, *notice.repeats),
    )


def _trainer(
    trainer: TrainerView,
    now_mono_s: float,
    *,
    is_stalled: bool,
    slower: float | None,
    compared: StepsCompared | None,
) -> TrainerStatus:
    return TrainerStatus(
        pid=trainer.pid,
        rank=trainer.rank,
        world_size=trainer.world_size,
        step=trainer.step,
        connected=trainer.is_connected,
        slower=_rounded(slower, 2),
        stalled_s=_age(trainer.reported_mono_s, now_mono_s) if is_stalled else None,
        redone=None if compared is None else compared.text,
        redone_differs=None if compared is None else compared.differs,
        **measures_of(trainer),
    )


def _evacuation(state: State, now_mono_s: float) -> EvacuationStatus | None:
    evacuation = state.evacuation
    if evacuation is None:
        return None
    request = max(state.requests_made, key=lambda each: each.asked_mono_s, default=None)
    return EvacuationStatus(
        id=evacuation.id,
        reason=evacuation.reason,
        seconds_left=round(evacuation.deadline_mono_s - now_mono_s, 1),
        plan=evacuation.plan.kind.value,
        why=evacuation.plan.reason,
        phase=phase_of(state).value,
        trainer_wait_s=_rounded(arrival.wait_s(state, now_mono_s), 1),
        follow_ups=FollowUpsStatus(
            count=evacuation.follow_ups,
            under_way=is_follow_up_under_way(state),
            next_in_s=_rounded(followup.wait_s(state, now_mono_s), 1),
        ),
        expected_s=_rounded(request.expected_s if request else None, 2),
        pessimistic_s=_rounded(request.pessimistic_s if request else None, 2),
        took_s=_rounded(request.took_s if request else None, 2),
    )


def _rounded(seconds: float | None, digits: int) -> float | None:
    return None if seconds is None else round(seconds, digits)


def status_line(state: State, now_mono_s: float) -> str:
    """A summary in one line, for ``systemctl status``."""
    last = (
        f"last commit {state.commits.last_complete}"
        if state.commits.last_complete
        else "nothing committed yet"
    )
    if state.part is not None:
        last += f"; {state.part}"
    if state.starts.fenced_by is not None:
        last += f"; generation {state.starts.fenced_by} has taken the run over"
    if stalled(state, now_mono_s):
        last += "; the trainer is stalled"
    store = state.notices.sources.get(STORE_HEALTH)
    if store is not None and store.health is not Health.OK:
        last += f"; the store is {store.health.value}: {store.reason:.200}"
    if state.evacuation is None:
        return f"{phase_of(state).value}; {last}"
    left_s = state.evacuation.deadline_mono_s - now_mono_s
    wait_s = arrival.wait_s(state, now_mono_s)
    if is_follow_up_under_way(state):
        last = f"a follow-up checkpoint is under way; {last}"
    if wait_s is not None:
        last = f"waiting for a trainer to connect, {wait_s:.0f} s left; {last}"
    return f"{phase_of(state).value}; {left_s:.0f} s left; {last}"


def _verdict(state: State) -> Verdict | None:
    """The verdict of the open evacuation, None while it is undecided; otherwise the last verdict."""
    decided = state.evacuation or state.course.last_verdict
    if state.evacuation is not None and state.evacuation.is_precaution:
        decided = state.course.last_verdict
    return None if decided is None else decided.verdict


def _last_verdict(state: State, now_mono_s: float) -> VerdictStatus | None:
    last = state.course.last_verdict
    if last is None:
        return None
    return VerdictStatus(
        verdict=last.verdict,
        reason=last.reason,
        generation=None if last.commit is None else last.commit.generation,
        step=None if last.commit is None else last.commit.step,
        age_s=round(now_mono_s - last.mono_s, 1),
        evacuation=last.evacuation_id,
        notices=tuple(sorted(last.notices)),
        expected_s=last.expected_s,
        took_s=last.took_s,
    )


def _flush(state: State, now_mono_s: float) -> FlushStatus | None:
    """The set that is being sent."""
    flight = state.flush.flight
    if flight is None:
        return None
    return FlushStatus(
        step=flight.staged.id.step,
        size_bytes=flight.staged.size_bytes,
        stored_bytes=state.flush.stored_bytes.get(flight.staged.id, 0),
        for_s=round(now_mono_s - flight.started_mono_s, 1),
    )


def _unsent(state: State, tally: Figures, now_mono_s: float) -> UnsentStatus:
    """Sealed sets that wait for their upload, and the number of those that newer sets replaced."""
    waiting, stored = state.uncommitted, state.flush.stored_bytes
    is_retried = bool(state.flush.failures) and state.flush.flight is None
    return UnsentStatus(
        sets=len(waiting),
        bytes=sum(max(0, s.size_bytes - stored.get(s.id, 0)) for s in waiting),
        failures=state.flush.failures,
        retry_in_s=round(max(0.0, state.flush.retry_mono_s - now_mono_s), 1)
        if is_retried
        else None,
        dropped=replace(tally.dropped, age_s=_age(tally.dropped_mono_s, now_mono_s)),
    )


def _failed_saves(tally: Figures, now_mono_s: float) -> FailedSavesStatus:
    failed, age_s = tally.failed_saves, round(now_mono_s - tally.failed_mono_s, 1)
    return replace(failed, last=failed.last and replace(failed.last, age_s=age_s))


def _lag_steps(state: State) -> int:
    """Steps that a power cut would lose now."""
    committed = _kept_step(state)
    ahead = max((trainer.step for trainer in state.ranks.trainers), default=committed)
    newest = max((staged.id.step for staged in state.uncommitted), default=committed)
    if state.part is not None:
        newest = max(newest, state.part.ref.step)
    return max(ahead, newest, committed) - committed


def _kept_step(state: State) -> int:
    """The step of this start that a power cut leaves: of its commit, or else of the state that it loaded."""
    start, last = state.start, state.commits.last_complete
    if start is None or last is None or last.generation == start.generation:
        return 0 if last is None else last.step
    return start.parent.step if start.parent.is_known else last.step


def _pending_bytes(state: State) -> int:
    """Bytes that are staged and not stored, of the sets that may be sent next."""
    return sum(candidate.bytes_left for candidate in state.candidates)
