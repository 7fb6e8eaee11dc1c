# SPDX-License-Identifier: Apache-2.0
"""The value types that every other module speaks in.

Frozen dataclasses and enums, standard library only, no IO.  Instants called ``*_mono_s`` are seconds
of CLOCK_MONOTONIC; wall-clock values are informational and never order anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum


class Severity(IntEnum):
    """How sure and how near the end is; the most severe live notice wins."""

    ADVISORY = 1
    """May not come true (rebalance recommendation): stage, do not stop."""
    SCHEDULED = 2
    """Will come true, hours or days ahead."""
    IMMINENT = 3
    """The VM goes away within the grace period."""
    SHUTTING_DOWN = 4
    """The OS is already on its way down."""


class Health(StrEnum):
    """Whether a source could tell us of the end if it came.  *Unknown* is never *ok*."""

    OK = "ok"
    DEGRADED = "degraded"
    """Some polls fail; notices may be late."""
    BLIND = "blind"
    """No answer for long enough that a notice would be missed."""
    UNSUPPORTED = "unsupported"
    """This VM has no such source."""


class DeadlineQuality(StrEnum):
    """Where the deadline of a notice comes from."""

    STATED = "stated"
    DERIVED = "derived"
    ASSUMED = "assumed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A source's word that the VM will go away."""

    source: str
    """Glossary name, for example ``aws.spot`` or ``gcp.preempted``."""
    kind: str
    """``reclaim``, ``stop``, ``hibernate``, ``rebalance``, ``os-shutdown``, ``manual``, ``drill`` ..."""
    identity: str
    """The same for every sighting of the same notice.  Contains no time that can move: neither that of the
    poll nor the one that the source states."""
    severity: Severity
    deadline_mono_s: float
    """When the power goes, as far as anyone knows."""
    deadline_quality: DeadlineQuality
    detail: str = ""
    """What the source said, shortened, for logs and the farewell."""
    later_mono_s: float | None = None
    """The source has named this later deadline since; it counts once the VM has outlived the earlier one."""
    is_overdue: bool = False
    """The source named a time that had passed, and the VM is alive: the deadline is an assumed one."""
    evacuation_id: str = ""
    """The newest evacuation that answers this notice.  A restarted daemon resumes it under the same id."""
    repeats: tuple[str, ...] = ()
    """Identities of later notices by hand with the same end: they are this notice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceStatus:
    """The health of one source, in words, and since when."""

    source: str
    health: Health
    reason: str
    since_mono_s: float


class CheckpointKind(StrEnum):
    """Why a checkpoint was taken."""

    PERIODIC = "periodic"
    EMERGENCY = "emergency"
    FINAL = "final"


def is_healthy(health: Mapping[str, float]) -> bool | None:
    """Whether the loss with which a checkpoint was taken is finite; None where the trainer gave none."""
    is_finite = health.get("loss_is_finite")
    return None if is_finite is None else is_finite != 0.0


def merged_health(healths: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The health of a checkpoint from that of its ranks, or of its nodes.

    Values are averaged over those that have them; one loss that is not finite makes the whole unhealthy.
    """
    merged = {}
    for name in sorted({name for health in healths for name in health}):
        values = [float(health[name]) for health in healths if name in health]
        merged[name] = min(values) if name == "loss_is_finite" else sum(values) / len(values)
    return merged


class Verdict(StrEnum):
    """How an evacuation ended."""

    SAFE = "SAFE"
    """The newest sealed state, taken after the notice where a trainer lived, is committed."""
    PARTIAL = "PARTIAL"
    """An older commit stands."""
    LOST = "LOST"
    """Nothing of this run is committed."""


@dataclass(frozen=True, slots=True, order=True)
class CheckpointId:
    """One sealed set in staging: its step, and a nonce that tells two sets of one step apart."""

    step: int
    nonce: str

    def __str__(self) -> str:
        return f"{self.step}.{self.nonce}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedFile:
    """One file of a sealed set, as the scan saw it.  Any later difference voids the set."""

    path: str
    """Relative to the directory of the set, with ``/``."""
    size_bytes: int
    mtime_ns: int
    inode: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A sealed checkpoint in staging."""

    id: CheckpointId
    directory: str
    """Relative to the staging directory of the run."""
    kind: CheckpointKind
    files: tuple[StagedFile, ...]
    markers: frozenset[str] = frozenset()
    """Paths that say "complete" to a framework; stored after all the data that they cover."""
    framework: str = "swansong"
    """Layout by which it was recognised: ``swansong`` for our hooks, else the adopted rule's name."""
    node: int = 0
    nodes: int = 1
    request_id: str = ""
    """The checkpoint request that it answers; empty for a periodic or an adopted one."""
    seen_mono_s: float | None = None
    """When the scan began that first found these files of an adopted set; it has to settle after that."""
    starts: frozenset[str] = frozenset()
    """The starts of the training that wrote it, one for each rank of this VM."""
    health: Mapping[str, float] = field(default_factory=dict)
    """Loss and metrics as the trainer reported them."""
    trainer: Mapping[str, object] = field(default_factory=dict)
    """World size and other facts for whoever restores."""

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredShard:
    """One shard, durably in the object store."""

    path: str
    size_bytes: int
    digest: str
    """See :mod:`swansongd.digests`."""
    key: str
    part_size_bytes: int
    """The digest is a two-level one over parts of this size."""
    crc32c: int
    """Of all its bytes; what the store itself has checked, where it can."""


@dataclass(frozen=True, slots=True, order=True)
class CommitRef:
    """Where a commit stands in the lineage of a run.  Readers order by exactly this."""

    generation: int
    step: int

    def __str__(self) -> str:
        return f"generation {self.generation} step {self.step}"


@dataclass(frozen=True, slots=True)
class VmPart:
    """This VM's part of a checkpoint is committed, and the checkpoint is not whole yet."""

    ref: CommitRef
    nodes: int
    """Number of VMs of the job."""
    committed: int = 1
    """Number of VMs whose part is known to be committed, this one included."""

    def facts(self) -> dict[str, object]:
        """As the farewell and the status show it."""
        return {
            "generation": self.ref.generation,
            "step": self.ref.step,
            "nodes": self.nodes,
            "nodes_committed": self.committed,
        }

    def __str__(self) -> str:
        return f"this VM's part of {self.ref} is committed ({self.committed} of {self.nodes} VMs)"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerView:
    """What the daemon knows of one connected rank."""

    connection: int
    """Number of the connection, unique for the life of the daemon."""
    pid: int
    rank: int
    world_size: int
    local_world_size: int
    nodes: int = 1
    """How many VMs the job has."""
    step: int = -1
    """Last step that it reported as done; -1 before the first."""
    save_s: float | None = None
    """How long its last save took."""
    save_bytes: int | None = None
    snapshot_s: float | None = None
    """For how long of it training stood still."""
    step_s: float | None = None
    """Its usual time for a step."""
    loss: float | None = None
    loss_is_finite: bool | None = None
    takes_periodic: bool = False
    """It leaves it to the daemon to say when a periodic checkpoint is due."""
    reported_mono_s: float | None = None
    greeted_mono_s: float = 0.0
    """When its hello arrived."""
    start_id: str = ""
    """Of the start of its training; its sets carry it."""
    start_step: int = -1
    """The first step that it reported on this connection, or of its last start; -1 before."""
    is_connected: bool = True
    """False when the connection is gone but the process may still live, and come back."""
