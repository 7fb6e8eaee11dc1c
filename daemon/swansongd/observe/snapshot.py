# SPDX-License-Identifier: Apache-2.0
"""The figures of the daemon at one moment, from which the status and the metrics are made.

The service fills a snapshot in the thread that asks for it.  Everything in it is immutable or a copy, so the
decision loop never waits for a reader.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from swansong_bucket.model import CommitRef

from swansongd.core.state import State
from swansongd.observe.accounting import Training
from swansongd.observe.tally import Figures


class MirrorState(StrEnum):
    """The state of the mirror, as ``swansong status`` shows it."""

    STARTING = "starting"
    """It was not reached yet."""
    OK = "ok"
    """It has all commits that this VM knows."""
    COPYING = "copying"
    PAUSED = "paused"
    """A checkpoint is sent, or a verdict is due."""
    FAILING = "failing"
    PROMOTED = "promoted"
    """The run continues in the mirror: this VM is fenced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorFigures:
    """The lag of the mirror, for status, metrics and alerts."""

    url: str
    state: MirrorState
    reason: str
    lag_commits: int
    """Manifests of this VM, and those it found at its start, that wait for their copy."""
    lag_s: float
    """Age of the oldest commit that is newer than the newest one in the mirror; 0 without one."""
    lag_bytes: int
    """Bytes that these commits have and the mirror lacks, as far as it is known."""
    newest: CommitRef | None
    """The newest commit that is known to be in the mirror."""
    copied_commits: int
    copied_bytes: int
    """Since the daemon started."""
    damaged: int
    """Commits that were not copied, because their stored bytes do not match their digests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneFigures:
    """The prunes of this daemon since its start."""

    failures: int = 0
    commits: int = 0
    """Commits that were deleted."""
    freed_bytes: int = 0
    succeeded_mono_s: float | None = None
    """When the last one succeeded; None before the first."""
    kept_bytes: int | None = None
    """Size of the commits that it kept."""


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
    decision_faults: int = 0
    last_fault: str | None = None
    sources: tuple[str, ...] = ()
    """Names of all sources that run, whether they have answered or not."""
    staging: Mapping[str, int] | None = None
    """``size_bytes`` and ``free_bytes`` of its file system; None if unknown."""
    bytes_referenced: int = 0
    """Bytes that were not sent since the daemon's start, because an earlier commit has stored them."""
    store_errors: Mapping[str, int] = field(default_factory=dict)
    """Attempts at requests that failed since the daemon's start, by kind."""
    prefetch: Mapping[str, object] = field(default_factory=dict)
    """Its fields of the status."""
    mirror: MirrorFigures | None = None
    mirror_objects_taken: int = 0
    """Objects that a restore took from the mirror."""
    prune: PruneFigures | None = None
    """None: the daemon does not prune."""
    loss: LossFigures = LossFigures()
    log_lines_dropped: int = 0
    notifications: Mapping[str, object] | None = None
    """Their fields of the status; None without any."""
    metrics: Mapping[str, object] | None = None
    """Their fields of the status; None without ``metrics.listen``."""

    def wall_s(self, mono_s: float) -> float:
        """An instant of the monotonic clock by the wall clock."""
        return self.now_wall_s - (self.now_mono_s - mono_s)
