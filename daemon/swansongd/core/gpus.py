# SPDX-License-Identifier: Apache-2.0
"""The GPUs of this VM, and the checkpoints that a failed one makes doubtful.

A GPU that is dying or lost can no longer give a correct state.  Training that was connected when it failed is
suspect: evacuations do not ask it for a checkpoint, and its later sets count as unhealthy.  They are
committed nevertheless: the report of the failure may be wrong.  A start of the training after the failure is
not suspect, because it got working GPUs.

The suspicion outlasts a restart of the daemon: :func:`record_of` is stored after each decision, and
:func:`resumed` continues from it.  Trainers are known by the ids of their starts, not by times: the kernel
log has a clock of its own.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

from swansong_bucket.model import (
    CheckpointId,
    GpuHealth,
    GpuRecord,
    GpuStatus,
    Staged,
    first_start,
)

from swansongd.core import commits, flight, request, staged_sets
from swansongd.core.events import GpusRead
from swansongd.core.state import GpuState, State
from swansongd.core.transition import Transition

SOURCE = "gpu"
KNOWN_MAX = 256
"""Bound of each list in a record."""


def resumed(state: State, record: GpuRecord) -> State:
    """The first state of a daemon whose previous life, in this boot, left this record."""
    gpus = GpuState(
        status={gpu.pci: gpu for gpu in record.gpus},
        log_number=record.log_number,
        suspect_starts=frozenset(record.suspect_starts),
        before=record,
    )
    return replace(state, gpus=gpus)


def forget(transition: Transition) -> None:
    """Forget the sets, and continue from the record as a restarted daemon does."""
    record = record_of(transition.state)
    if record is not None:
        transition.state = resumed(transition.state, record)


def record_of(state: State) -> GpuRecord | None:
    """The record for the next life of the daemon; None without a GPU."""
    if not state.gpus.status:
        return None
    before = state.gpus.before
    suspect = state.staging.suspect
    sound = [staged.id for staged in state.staging.staged if staged.id not in suspect]
    if state.staging.first_scan_mono_s is None and before is not None:
        sound = list(before.sound_sets)
    return GpuRecord(
        gpus=tuple(state.gpus.status.values()),
        log_number=state.gpus.log_number,
        suspect_starts=tuple(sorted(state.gpus.suspect_starts)),
        known_starts=tuple(_may_train(state))[-KNOWN_MAX:],
        sound_sets=frozenset(sorted(sound)[-KNOWN_MAX:]),
    )


def _may_train(state: State) -> dict[str, None]:
    """The processes that may train here now, the newest last, by the id of their first start.

    Those without a connection may come back: from a reset, or from the previous life of the daemon.
    """
    away = () if state.gpus.before is None else state.gpus.before.known_starts
    ranks = (first_start(t.start_id) for t in state.ranks.processes if t.start_id)
    return dict.fromkeys((*away, *ranks, *_running(state)))


def record_read(transition: Transition, event: GpusRead) -> None:
    """The health of a GPU changed."""
    before = transition.state.gpus.status
    status = {gpu.pci: gpu for gpu in event.gpus}
    _put(transition, replace(transition.state.gpus, status=status, log_number=event.log_number))
    for gpu in event.gpus:
        known = before.get(gpu.pci)
        was = GpuHealth.OK if known is None else known.health
        if gpu.health is not was:
            transition.log(
                "info" if gpu.health is GpuHealth.OK else "warning",
                "gpu_health",
                source=gpu.pci,
                gpu=gpu.index,
                health=gpu.health.value,
                reason=gpu.reason,
            )
        if gpu.health.has_failed and not was.has_failed:
            _record_failed(transition, gpu)


def objection(state: State, now_mono_s: float) -> str:
    """Why training cannot be asked for a checkpoint; empty if it can."""
    running = _running(state)
    if not state.gpus.suspect_starts.isdisjoint(running):
        failed = (describe(gpu) for gpu in state.gpus.status.values() if gpu.health.has_failed)
        return next(failed, "a GPU failed during this start of the training")
    if running and all(trainer.start_id for trainer in state.connected):
        return ""
    notice = next((n for n in state.urgent_notices(now_mono_s) if n.source == SOURCE), None)
    if notice is not None:
        return notice.detail or "a GPU failed"
    return next((describe(gpu) for gpu in state.gpus.status.values() if gpu.health.has_failed), "")


def _running(state: State) -> frozenset[str]:
    """The processes that train here now, by the id of the start that they began with.

    The later starts of a process use the same GPUs.
    """
    connected = {first_start(trainer.start_id) for trainer in state.connected if trainer.start_id}
    return frozenset(connected or {first_start(state.starts.process)} - {""})


def doubt(state: State) -> str:
    """Why the newest commit may be wrong; empty if it is sound."""
    last, sound = state.commits.last_complete, state.commits.healthy
    if last is None:
        return ""
    suspect = {(id_.start, id_.step, id_.is_final) for id_ in state.staging.suspect}
    is_marked = (state.owner_of(last), last.step, last.is_final) in suspect
    is_skipped = last == state.commits.skipped
    if state.commits.is_sound and not is_marked and not is_skipped:
        return ""
    known = (
        "no sound commit of this generation"
        if sound is None
        else f"{sound} is the newest sound one"
    )
    if is_skipped:
        return f"a restore could not use {last}; {known}"
    if is_marked:
        return f"a GPU had failed before {last} was sealed; {known}"
    return (
        f"a GPU of one of its VMs had failed before {last} was sealed, "
        f"or one of its manifests is damaged; {known}"
    )


def describe(gpu: GpuStatus) -> str:
    """The GPU, its health and the reason, in one line."""
    name = f"GPU {gpu.index}" if gpu.index >= 0 else f"GPU at {gpu.pci}"
    return f"{name} is {gpu.health.value}: {gpu.reason}"


def record_found(transition: Transition, new: Sequence[Staged], *, is_first: bool) -> None:
    """A scan found these sets: those of suspect training get its mark."""
    staging, gpus = transition.state.staging, transition.state.gpus
    staged_sets.mark_suspect(transition, doubtful(transition.state, new, is_first=is_first))
    inherited = {staged.id for staged in new if is_first or staging.predates(staged)}
    present = {staged.id for staged in staging.staged}
    _put(transition, replace(gpus, inherited=(gpus.inherited | inherited) & present))


def doubtful(
    state: State, found: Sequence[Staged], *, is_first: bool = False
) -> frozenset[CheckpointId]:
    """Those of the sets that a scan just found which suspect training has sealed.

    Sets of the first scan predate this life of the daemon: only the record of the previous life can show
    which of them are from after a failure.
    """
    before = state.gpus.before
    if is_first and before is None:
        return frozenset()
    sound = before.sound_sets if is_first and before is not None else frozenset()
    has_failed = any(gpu.health.has_failed for gpu in state.gpus.status.values())
    return frozenset(
        staged.id
        for staged in found
        if staged.id not in sound
        and (
            first_start(staged.id.start) in state.gpus.suspect_starts
            if staged.framework == "swansong" or state.starts.process
            else has_failed  # of a process that is not known
        )
    )


def _record_failed(transition: Transition, gpu: GpuStatus) -> None:
    _suspect(transition, _may_train(transition.state).keys())
    _doubt_inherited(transition)
    for waiting in transition.waiting_requests:
        if not waiting.is_periodic:
            request.fail(transition, waiting, describe(gpu))


def _suspect(transition: Transition, starts: Set[str]) -> None:
    """Remember that these starts are suspect.

    A process may begin any number of starts.  The oldest ones are forgotten, but none of a trainer that is
    still there.
    """
    state = transition.state
    present = {first_start(each.start_id) for each in state.ranks.processes} | _running(state)
    known = sorted(state.gpus.suspect_starts | starts, key=lambda start: (start in present, start))
    _put(transition, replace(state.gpus, suspect_starts=frozenset(known[-KNOWN_MAX:])))


def _doubt_inherited(transition: Transition) -> None:
    """A failure of the time without a daemon, which is read after the first scan: sets of that time."""
    state = transition.state
    if state.gpus.before is None:
        return
    inherited = [s for s in state.uncommitted if s.id in state.gpus.inherited]
    found = doubtful(state, inherited, is_first=True) - state.staging.suspect
    staged_sets.mark_suspect(transition, found)
    # A manifest that is being written already keeps no mark, but its set in staging does.
    commits.mark_suspect(transition, found)
    flight.mark_suspect(transition, found)


def _put(transition: Transition, gpus: GpuState) -> None:
    transition.state = replace(transition.state, gpus=gpus)
