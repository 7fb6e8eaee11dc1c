# SPDX-License-Identifier: Apache-2.0
"""The figures of the daemon at one moment, from which the status and the metrics are made.

The service fills a snapshot in the thread that asks for it.  Everything in it is immutable or a copy, so the
decision loop never waits for a reader.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from swansongd.core.state import State
from swansongd.observe.accounting import Training
from swansongd.observe.facts import StepsCompared
from swansongd.observe.status import (
    MetricsStatus,
    MirrorStatus,
    NotificationsStatus,
    PrefetchStatus,
    PruneStatus,
    StagingStatus,
)
from swansongd.observe.tally import Figures


@dataclass(frozen=True, slots=True, kw_only=True)
class LossFigures:
    """The resumptions that this daemon recorded since its start, and their cost."""

    resumptions: int = 0
    gpu_s: Mapping[str, float] = field(default_factory=dict)
    """GPU seconds by part of the preemption loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The daemon at one moment."""

    run: str
    version: str
    pid: int
    born_mono_s: float
    """When the daemon started."""
    now_mono_s: float
    now_wall_s: float
    """The same moment by the wall clock, in seconds since 1970."""
    state: State
    training: Training = field(default_factory=Training)
    tally: Figures = field(default_factory=Figures)
    compared: Mapping[int, StepsCompared] = field(default_factory=dict)
    """By rank: the comparison of redone steps."""
    decision_faults: int = 0
    last_fault: str | None = None
    sources: tuple[str, ...] = ()
    """Names of all sources that run, whether they have answered or not."""
    staging: StagingStatus | None = None
    bytes_referenced: int = 0
    """Bytes that were not sent since the daemon's start, because an earlier commit has stored them."""
    store_answered_mono_s: float | None = None
    """When the store answered last."""
    store_errors: Mapping[str, int] = field(default_factory=dict)
    """Attempts at requests that failed since the daemon's start, by kind."""
    prefetch: PrefetchStatus | None = None
    mirror: MirrorStatus | None = None
    mirror_objects_taken: int = 0
    """Objects that a restore took from the mirror."""
    prune: PruneStatus | None = None
    """None: the daemon does not prune.  The report adds the age."""
    pruned_mono_s: float | None = None
    """When the last prune succeeded; None before the first."""
    loss: LossFigures = LossFigures()
    log_lines_dropped: int = 0
    notifications: NotificationsStatus | None = None
    metrics: MetricsStatus | None = None

    def wall_s(self, mono_s: float) -> float:
        """An instant of the monotonic clock by the wall clock."""
        return self.now_wall_s - (self.now_mono_s - mono_s)
