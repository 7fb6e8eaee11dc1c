# SPDX-License-Identifier: Apache-2.0
"""The GPUs of this VM, and the checkpoints that a failed one makes doubtful.

A GPU that is dying or lost can no longer give a correct state.  Training that was connected when it failed is
suspect: evacuations do not ask it for a checkpoint, and its later sets count as unhealthy.  They are
committed nevertheless: the report of the failure may be wrong.  A start of the training after the failure is
not suspect, because it got working GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from swansong import bounds

from swansongd.core import request
from swansongd.core.state import State
from swansongd.core.transition import Transition
from swansongd.model import GPU_IS_SOUND, CheckpointId, GpuHealth, GpuStatus, Staged

SOURCE = "gpu"


def record_read(transition: Transition, gpus: Sequence[GpuStatus]) -> None:
    """The health of a GPU changed."""
    before = transition.state.gpus
    transition.state = replace(transition.state, gpus={gpu.pci: gpu for gpu in gpus})
    for gpu in gpus:
        known = before.get(gpu.pci)
        was = GpuHealth.OK if known is None else known.health
        if gpu.health is not was:
            _log(transition, gpu)
        if gpu.health.has_failed and not was.has_failed:
            _record_failed(transition, gpu)


def objection(state: State, now_mono_s: float) -> str:
    """Why training cannot be asked for a checkpoint; empty if it can."""
    for notice in state.urgent_notices(now_mono_s):
        if notice.source == SOURCE:
            return notice.detail or "a GPU failed"
    if any(trainer.start_id in state.suspect_starts for trainer in state.connected):
        return "a GPU failed during this start of the training"
    if state.connected and all(trainer.start_id for trainer in state.connected):
        return ""
    return next((describe(gpu) for gpu in state.gpus.values() if gpu.health.has_failed), "")


def doubt(state: State) -> str:
    """Why the newest commit may be wrong; empty if it is sound.

    A commit that the claim found is older than this daemon, and so older than the failure.
    """
    last, sound = state.last_complete, state.healthy_commit
    if not state.suspect_starts or last is None or state.last_commit_mono_s is None:
        return ""
    if sound is not None and sound >= last:
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


def doubtful(state: State, found: Sequence[Staged]) -> frozenset[CheckpointId]:
    """Those of the sets that a scan just found which suspect training has sealed."""
    has_failed = any(gpu.health.has_failed for gpu in state.gpus.values())
    return frozenset(
        staged.id
        for staged in found
        if (staged.starts & state.suspect_starts if staged.starts else has_failed)
    )


def marked(staged: Staged) -> Staged:
    """The set with the mark of suspect training, which enters its manifest in place of the last metric."""
    names = sorted(staged.health, key=lambda name: not name.startswith("loss"))
    kept = {name: staged.health[name] for name in names[: bounds.METRICS_MAX - 1]}
    return replace(staged, health={**kept, GPU_IS_SOUND: 0.0})


def _record_failed(transition: Transition, gpu: GpuStatus) -> None:
    state = transition.state
    starts = {trainer.start_id for trainer in state.trainers if trainer.start_id}
    transition.state = replace(state, suspect_starts=state.suspect_starts | starts)
    for waiting in transition.waiting_requests:
        if not waiting.is_periodic:
            request.fail(transition, waiting, describe(gpu))


def _log(transition: Transition, gpu: GpuStatus) -> None:
    transition.log(
        "info" if gpu.health is GpuHealth.OK else "warning",
        "gpu_health",
        source=gpu.pci,
        gpu=gpu.index,
        health=gpu.health.value,
        reason=gpu.reason,
    )
