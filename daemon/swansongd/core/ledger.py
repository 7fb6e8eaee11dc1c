# SPDX-License-Identifier: Apache-2.0
"""The values behind the preemption loss: the milestones of a resume, and the end of the training before it.

Pure.  :mod:`swansongd.core.resumption` collects them, and :mod:`swansongd.observe.loss` adds them up.
Instants called ``*_mono_s`` are of this VM's monotonic clock.  Those called ``*_wall_s`` are wall-clock
seconds since 1970, which several VMs do not share exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

from swansongd.model import CommitRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Milestones:
    """How far this VM has come from its start to the first new step; None: not reached, or not seen."""

    download_began_mono_s: float | None = None
    download_ended_mono_s: float | None = None
    bytes_fetched: int = 0
    bytes_linked: int = 0
    """Bytes of the checkpoint that this machine already had."""
    asked_mono_s: float | None = None
    answered_mono_s: float | None = None
    restored: CommitRef | None = None
    """The answer's checkpoint; None for a fresh run, and for a set in staging without a generation."""
    started_mono_s: float | None = None
    """When the training reported its start; the checkpoint is loaded by then."""
    start_step: int = -1
    first_step: int = -1
    """The first step that was reported after the start."""
    first_step_mono_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The progress of the training on this VM; it outlasts the trainers' processes."""

    step: int = -1
    """Newest completed step that a rank reported; -1 before the first."""
    mono_s: float = 0.0
    """When that was."""
    step_s: float | None = None
    """Usual duration of a step."""
    ranks: int = 1
    """World size of the job, which counts as its number of GPUs."""
    node: int = 0
    nodes: int = 1
    saves_s: float = 0.0
    """Time for which training stood still for checkpoints, without those of the newest evacuation."""
    stall_s: float = 0.0
    """Time for which training stood still for the checkpoints of the newest evacuation."""
    evacuation_id: str = ""
    """That evacuation."""
    waiting: tuple[str, float] | None = None
    """Request whose target the ranks wait for, and since when."""
    is_saving: bool = False
    """A rank has sealed, and its next report has the time for which it stood still."""
    is_over: bool = False
    """All ranks have ended."""
