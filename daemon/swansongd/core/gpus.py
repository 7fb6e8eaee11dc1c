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

from swansong import bounds

from swansongd.core import request
from swansongd.core.events import GpusRead
from swansongd.core.state import State
from swansongd.core.transition import Transition
from swansongd.model import (
    GPU_IS_SOUND,
    CheckpointId,
    CommitRef,
    GpuHealth,
    GpuRecord,
    GpuStatus,
    Staged,
)

SOURCE = "gpu"
KNOWN_MAX = 256
"""Bound of each list in a record."""
DOUBTFUL_MAX = 16
"""Doubtful commits that are remembered: only the newest whole one counts."""


def resumed(state: State, record: GpuRecord) -> State:
    """The first state of a daemon whose previous life, in this boot, left this record."""
    return replace(
        state,
        gpus={gpu.pci: gpu for gpu in record.gpus},
        gpu_log_number=record.log_number,
        suspect_starts=frozenset(record.suspect_starts),
        gpus_before=record,
        doubtful_commits=() if record.doubtful_commit is None else (record.doubtful_commit,),
    )


def record_of(state: State) -> GpuRecord | None:
    """The record for the next life of the daemon; None without a GPU."""
    if not state.gpus:
        return None
    before = state.gpus_before
    sound = [staged.id for staged in state.staged if staged.id not in state.suspect]
    if state.first_scan_mono_s is None and before is not None:
        sound = list(before.sound_sets)
    known = dict.fromkeys((*_away(state), *_running(state)))
    return GpuRecord(
        gpus=tuple(state.gpus.values()),
        log_number=state.gpu_log_number,
        suspect_starts=tuple(sorted(state.suspect_starts)),
        known_starts=tuple(known)[-KNOWN_MAX:],
        sound_sets=frozenset(sorted(sound)[-KNOWN_MAX:]),
        doubtful_commit=max(state.doubtful_commits, default=None),
    )


def record_commit(transition: Transition, ref: CommitRef, staged: Staged) -> None:
    """A commit, or this VM's part of one, was written from this set."""
    state = transition.state
    if staged.id in state.suspect or GPU_IS_SOUND in staged.health:
        newest = sorted({*state.doubtful_commits, ref})[-DOUBTFUL_MAX:]
        transition.state = replace(state, doubtful_commits=tuple(newest))


def _away(state: State) -> tuple[str, ...]:
    """Starts that were connected to the previous life of the daemon, and perhaps not yet to this one."""
    return () if state.gpus_before is None else state.gpus_before.known_starts


def record_read(transition: Transition, event: GpusRead) -> None:
    """The health of a GPU changed."""
    before, gpus = transition.state.gpus, event.gpus
    transition.state = replace(
        transition.state,
        gpus={gpu.pci: gpu for gpu in gpus},
        gpu_log_number=event.log_number,
    )
    for gpu in gpus:
        known = before.get(gpu.pci)
        was = GpuHealth.OK if known is None else known.health
        if gpu.health is not was:
            _log(transition, gpu)
        if gpu.health.has_failed and not was.has_failed:
            _record_failed(transition, gpu)


def objection(state: State, now_mono_s: float) -> str:
    """Why training cannot be asked for a checkpoint; empty if it can."""
    running = _running(state)
    if not state.suspect_starts.isdisjoint(running):
        failed = (describe(gpu) for gpu in state.gpus.values() if gpu.health.has_failed)
        return next(failed, "a GPU failed during this start of the training")
    if running:
        return ""
    notice = next((n for n in state.urgent_notices(now_mono_s) if n.source == SOURCE), None)
    if notice is not None:
        return notice.detail or "a GPU failed"
    return next((describe(gpu) for gpu in state.gpus.values() if gpu.health.has_failed), "")


def _running(state: State) -> frozenset[str]:
    """The processes that train here now, by the id of the start that they began with.

    The later starts of a process use the same GPUs.
    """
    connected = {_process_of(trainer.start_id) for trainer in state.connected if trainer.start_id}
    return frozenset(connected or {_process_of(state.process)} - {""})


def _process_of(start_id: str) -> str:
    return start_id.partition("~")[0]


def doubt(state: State) -> str:
    """Why the newest commit may be wrong; empty if it is sound."""
    last, sound = state.last_complete, state.healthy_commit
    if last is None or last not in state.doubtful_commits:
        return ""
    known = (
        "no sound commit of this generation"
        if sound is None
        else f"{sound} is the newest sound one"
    )
    return f"a GPU had failed before {last} was sealed; {known}"


def describe(gpu: GpuStatus) -> str:
    """The GPU, its health and the reason, in one line."""
    name = f"GPU {gpu.index}" if gpu.index >= 0 else f"GPU at {gpu.pci}"
    return f"{name} is {gpu.health.value}: {gpu.reason}"


def doubtful(
    state: State, found: Sequence[Staged], *, is_first: bool = False
) -> frozenset[CheckpointId]:
    """Those of the sets that a scan just found which suspect training has sealed.

    Sets of the first scan predate this life of the daemon: only the record of the previous life can show
    which of them are from after a failure.
    """
    before = state.gpus_before
    if is_first and before is None:
        return frozenset()
    sound = before.sound_sets if is_first and before is not None else frozenset()
    has_failed = any(gpu.health.has_failed for gpu in state.gpus.values())
    return frozenset(
        staged.id
        for staged in found
        if staged.id not in sound
        and (
            _process_of(staged.id.start) in state.suspect_starts
            if staged.framework == "swansong" or state.process
            else has_failed  # of a process that is not known
        )
    )


def marked(staged: Staged) -> Staged:
    """The set with the mark of suspect training, which enters its manifest in place of the last metric."""
    names = sorted(staged.health, key=lambda name: not name.startswith("loss"))
    kept = {name: staged.health[name] for name in names[: bounds.METRICS_MAX - 1]}
    return replace(staged, health={**kept, GPU_IS_SOUND: 0.0})


def _record_failed(transition: Transition, gpu: GpuStatus) -> None:
    state = transition.state
    away = {_process_of(t.start_id) for t in state.trainers if t.start_id}
    _suspect(transition, away | _running(state) | {*_away(state)})
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
    present = {_process_of(trainer.start_id) for trainer in state.trainers} | _running(state)
    known = sorted(state.suspect_starts | starts, key=lambda start: (start in present, start))
    transition.state = replace(state, suspect_starts=frozenset(known[-KNOWN_MAX:]))


def _doubt_inherited(transition: Transition) -> None:
    """A failure of the time without a daemon, which is read after the first scan: sets of that time."""
    state = transition.state
    if state.gpus_before is None:
        return
    inherited = [s for s in state.uncommitted if state.seen.get(s.id) == state.first_scan_mono_s]
    found = doubtful(state, inherited, is_first=True) - state.suspect
    flight = state.flight

    def marked_if_found(staged: Staged) -> Staged:
        return marked(staged) if staged.id in found else staged

    transition.state = replace(
        state,
        suspect=state.suspect | found,
        staged=tuple(marked_if_found(s) for s in state.staged),
        # A manifest that is being written already keeps no mark, but its set counts as unhealthy here.
        stored=tuple(replace(item, staged=marked_if_found(item.staged)) for item in state.stored),
        flight=None if flight is None else replace(flight, staged=marked_if_found(flight.staged)),
    )


def _log(transition: Transition, gpu: GpuStatus) -> None:
    transition.log(
        "info" if gpu.health is GpuHealth.OK else "warning",
        "gpu_health",
        source=gpu.pci,
        gpu=gpu.index,
        health=gpu.health.value,
        reason=gpu.reason,
    )
