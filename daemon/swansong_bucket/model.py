# SPDX-License-Identifier: Apache-2.0
"""The value types that all modules share.

Frozen dataclasses and enums, standard library only, no IO.  Instants called ``*_mono_s`` are seconds
of CLOCK_MONOTONIC; wall-clock values are informational and never order anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum, StrEnum
from functools import cached_property, total_ordering
from typing import Any, NamedTuple

from swansong.fields import PROCESS_PREFIX


class Severity(IntEnum):
    """How certain and how near the termination is; the most severe notice in force counts."""

    ADVISORY = 1
    """May not happen (rebalance recommendation): take a checkpoint, do not stop."""
    SCHEDULED = 2
    """Will happen, hours or days ahead."""
    IMMINENT = 3
    """The VM will be terminated within the grace period."""
    SHUTTING_DOWN = 4
    """The OS is already shutting down."""


class Health(StrEnum):
    """Whether a notice would be seen now.  *Unknown* is never *ok*."""

    OK = "ok"
    DEGRADED = "degraded"
    """Some polls fail; notices may be late."""
    BLIND = "blind"
    """No response for so long that a notice would be missed."""
    UNSUPPORTED = "unsupported"
    """This VM has no such source."""


class DeadlineQuality(StrEnum):
    """The origin of a notice's deadline."""

    STATED = "stated"
    DERIVED = "derived"
    ASSUMED = "assumed"


class Verdict(StrEnum):
    """The outcome of an evacuation, see :mod:`swansongd.core.proof`."""

    SAFE = "SAFE"
    """The next VM resumes from the position of the training at the request, or a later one."""
    PARTIAL = "PARTIAL"
    """An older whole commit exists, or may exist: the store could not be read since the daemon's start."""
    LOST = "LOST"
    """The run has no whole commit."""
    NO_TRAINING = "NO_TRAINING"
    """No training was seen on this VM since it booted: nothing is claimed."""


DRILL = "drill"
"""Source of the notices of ``swansong drill``."""
DRILL_ID = f"{DRILL}-"
"""Start of the id of an evacuation that a drill opens.  Other VMs know only this id of its request."""
PEER_SOURCE = "peer"
"""Source of the notices that follow from the requests of other VMs of the job."""


def is_drill(identities: frozenset[str]) -> bool:
    """Whether all notices with these identities belong to drills, of this VM or of others."""
    return bool(identities) and all(each.startswith((f"{DRILL}:", DRILL_ID)) for each in identities)


@dataclass(frozen=True, slots=True)
class Position:
    """The start of the training at a request, and its last completed step."""

    start_id: str
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A source's message that the VM will be terminated."""

    source: str
    """Glossary name, for example ``aws.spot`` or ``gcp.preempted``."""
    kind: str
    """``reclaim``, ``stop``, ``hibernate``, ``rebalance``, ``os-shutdown``, ``manual``, ``drill`` ..."""
    identity: str
    """The same for every sighting of the same notice.  It contains no time that can move: neither the time of
    the poll nor the stated one."""
    severity: Severity
    deadline_mono_s: float
    """When the power is cut, to the best of our knowledge."""
    deadline_quality: DeadlineQuality
    detail: str = ""
    """The source's message, shortened, for logs and the farewell."""
    later_mono_s: float | None = None
    """A later deadline that the source named since; it counts once the VM has outlived the earlier one."""
    is_overdue: bool = False
    """The source named a time in the past, and the VM runs: the deadline is an assumed one."""
    evacuation_id: str = ""
    """The newest evacuation that answers this notice.  A restarted daemon resumes it under the same id."""
    safe_at: Position | None = None
    """The position for which that evacuation has got SAFE, for a restarted daemon."""
    repeats: tuple[str, ...] = ()
    """Identities of later notices by hand with the same deadline, which count as this notice."""
    is_prepared: bool = False
    """A precaution was taken for it, or was not worth it."""
    is_outlived: bool = False
    """The VM has outlived its deadline: it has no further effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeKind:
    """A kind of notice that this VM may get."""

    source: str
    grace_s: float
    """Time between the notice and the end of the VM, as far as it is known before the notice."""
    is_scheduled: bool = False
    """The end is known in advance, and the evacuation begins as early as the checkpoint needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceStatus:
    """The health of one source, the reason in words, and its beginning."""

    source: str
    health: Health
    reason: str
    since_mono_s: float


class GpuHealth(StrEnum):
    """Whether training may use a GPU."""

    OK = "ok"
    DEGRADED = "degraded"
    """It works, and may fail: take a precautionary checkpoint."""
    DYING = "dying"
    """Its state may be wrong: request no checkpoint from training that used it."""
    LOST = "lost"
    """It has fallen off the bus."""

    @property
    def has_failed(self) -> bool:
        return self in (GpuHealth.DYING, GpuHealth.LOST)


@dataclass(frozen=True, slots=True)
class GpuFault:
    """One reason why a GPU is not healthy."""

    cause: str
    """Kind of the reason, such as ``xid`` or ``lost``; a GPU has one fault of each kind at most."""
    health: GpuHealth
    reason: str
    since_mono_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuStatus:
    """The health of one GPU.  Its texts are short and printable."""

    pci: str
    """Address on the bus, such as ``0000:3b:00``: the key of the GPU."""
    index: int
    """As in ``nvidia-smi``; -1 if the driver does not list the GPU."""
    uuid: str = ""
    name: str = ""
    health: GpuHealth
    reason: str
    since_mono_s: float
    xids: Mapping[str, int] = field(default_factory=dict)
    """Number of Xid messages since the daemon's start, by their class: ``application``, ``degraded``,
    ``dying``."""
    faults: tuple[GpuFault, ...] = ()
    """All of its faults; health and reason are those of the worst one."""


@dataclass(frozen=True, slots=True)
class Parent:
    """The state that a start of the training has loaded."""

    start_id: str | None = None
    """The start that wrote the state; empty for a fresh run; None if it is unknown."""
    step: int = -1
    """The step of that state; 0 for a fresh run."""

    @property
    def is_known(self) -> bool:
        return self.start_id is not None


UNKNOWN_PARENT = Parent()


def first_start(start_id: str) -> str:
    """Id of the start that the processes of this one began with: each rollback adds ``~NUMBER`` to it."""
    return start_id.partition("~")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of the training: all ranks, on all VMs, that were launched together."""

    id: str
    nodes: int = 1
    """Number of VMs of the job."""
    generation: int | None = None
    """None until it is claimed."""
    parents: Mapping[int, Parent] = field(default_factory=dict)
    """The state that each rank of this VM has loaded."""
    ranks: int = 1
    """Number of its ranks on this VM."""
    members: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """Process (pid, start) of each rank that connected to this life of the daemon."""
    ended: Mapping[int, int] = field(default_factory=dict)
    """Last step of each rank that has said goodbye."""
    is_restoring: bool = False
    """It waits for the answer to its restore query, or loads the checkpoint: it has trained nothing."""
    process_ns: int = 0
    """For a trainer without hooks: none of its sets was written earlier, by the clock of file times."""
    began_ticks: int = 0
    """When the first of its ranks here began, in clock ticks since the boot; 0 if unknown."""
    is_of_boot: bool = True
    """Seen since the VM booted."""
    is_open: bool = True
    """Its sets may be committed: not those of an earlier boot if another VM has taken the run over since, and
    not those of an earlier start over several VMs, because the next start has chosen without them."""
    is_live: bool = False
    """A process of it was seen by this life of the daemon, while no newer launch was connected."""

    @property
    def parent(self) -> Parent:
        """The state that the start has loaded; unknown if its ranks contradict each other."""
        reported = set(self.parents.values())
        return reported.pop() if len(reported) == 1 else UNKNOWN_PARENT

    @property
    def has_hooks(self) -> bool:
        return not self.id.startswith(PROCESS_PREFIX)

    @property
    def is_placed(self) -> bool:
        """Whether its place among the starts is known: its claim, its process or the boot tells it.

        Otherwise it is known from its sets only.
        """
        has_process = self.is_live or self.began_ticks > 0 or self.process_ns > 0
        return self.generation is not None or has_process or not self.is_of_boot


class CheckpointKind(StrEnum):
    """Why a checkpoint was taken."""

    PERIODIC = "periodic"
    EMERGENCY = "emergency"
    FINAL = "final"


GPU_IS_SOUND = "gpu_is_sound"
"""In the health of a checkpoint: 0 if a GPU of the VM had failed before the checkpoint was sealed."""
REDONE_TO = "redone_to"
"""In the health of a checkpoint: the last step that a resumed rank has compared with the interrupted run."""
_LEAST = ("loss_is_finite", "loss_is_usual", GPU_IS_SOUND, REDONE_TO)


def is_sound(health: Mapping[str, float]) -> bool:
    """False if a GPU of the VM had failed before the checkpoint was sealed."""
    return health.get(GPU_IS_SOUND) != 0.0


def is_healthy(health: Mapping[str, float]) -> bool | None:
    """Whether the loss of a checkpoint is finite and usual, and no GPU had failed; None without a loss."""
    if not is_sound(health) or health.get("loss_is_usual") == 0.0:
        return False
    is_finite = health.get("loss_is_finite")
    return None if is_finite is None else is_finite != 0.0


def merged_health(healths: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The health of a checkpoint from the health of its ranks, or of its nodes.

    Values are averaged over the ranks that report them.  One loss that is not finite or usual makes the
    checkpoint unhealthy, and so does one GPU that had failed.  Of compared steps the first one of any rank
    counts.
    """
    merged = {}
    for name in sorted({name for health in healths for name in health}):
        values = [float(health[name]) for health in healths if name in health]
        merged[name] = min(values) if name in _LEAST else sum(values) / len(values)
    return merged


@total_ordering
@dataclass(frozen=True, slots=True)
class CheckpointId:
    """One sealed set in staging: its step, and a nonce that differs between sets of one step.

    Only ids of one start have an order by themselves, see :meth:`swansongd.core.state.State.order`.
    """

    step: int
    nonce: str
    is_final: bool = field(default=False, compare=False)
    """The end of the run, which comes after all other sets of its step."""
    start: str = field(default="", compare=False)
    """The start of the training that sealed it; empty if it is unknown."""

    def __lt__(self, other: CheckpointId) -> bool:
        return self._place < other._place

    @property
    def _place(self) -> tuple[int, bool, str]:
        return self.step, self.is_final, self.nonce

    def __str__(self) -> str:
        return f"{self.step}.{self.nonce}"


class StagedFile(NamedTuple):
    """One file of a sealed set at the time of the scan.  Any later difference voids the set.

    A tuple: a set has thousands, which are hashed and compared often.
    """

    path: str
    """Relative to the directory of the set, with ``/``."""
    size_bytes: int
    mtime_ns: int
    inode: int


@dataclass(frozen=True, kw_only=True)
class Staged:
    """A sealed checkpoint in staging."""

    id: CheckpointId
    directory: str
    """Relative to the staging directory of the run."""
    kind: CheckpointKind
    files: tuple[StagedFile, ...]
    markers: frozenset[str] = frozenset()
    """Paths that mark completeness for a framework; stored after all data that they cover."""
    framework: str = "swansong"
    """The layout that recognised it: ``swansong`` for our hooks, else the name of the adopted rule."""
    node: int = 0
    nodes: int = 1
    request_id: str = ""
    """The checkpoint request that it answers; empty for a periodic or an adopted one."""
    begun_mono_s: float | None = None
    """When the first file of an adopted set was created, or an earlier scan that found these files."""
    boot_id: str = ""
    """Boot of the kernel in which it was sealed, as reported by the hooks; empty: unknown."""
    began_ticks: int = 0
    """When the first process of its ranks here began, in clock ticks since that boot; 0: unknown."""
    health: Mapping[str, float] = field(default_factory=dict)
    """Loss and metrics, as reported by the trainer."""
    trainer: Mapping[str, object] = field(default_factory=dict)
    """World size and other facts for the restore."""

    @property
    def lost_ranks(self) -> dict[str, object]:
        """``without_ranks``, if ranks of the job took no part."""
        return {name: value for name, value in self.trainer.items() if name == "without_ranks"}

    @cached_property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @cached_property
    def begun_ns(self) -> int:
        """When its oldest file was written, by the clock of file times."""
        return min((file.mtime_ns for file in self.files), default=0)

    @cached_property
    def written_ns(self) -> int:
        """When its newest file was written."""
        return max((file.mtime_ns for file in self.files), default=0)

    @cached_property
    def last_share(self) -> float:
        """See :func:`last_share`."""
        return last_share(self.framework, ((file.path, file.size_bytes) for file in self.files))


def last_share(framework: str, files: Iterable[tuple[str, int]]) -> float:
    """Share of the largest file of each rank: no byte of a rank's last file is sent during the save.

    Args:
        files: path and size of each file of a set.
    """
    sizes = list(files)
    size_bytes = sum(size for _, size in sizes)
    if framework != "swansong" or not size_bytes:
        return 1.0
    largest: dict[str, int] = {}
    for path, size in sizes:
        rank = path.partition("/")[0]
        largest[rank] = max(largest.get(rank, 0), size)
    return min(1.0, sum(largest.values()) / size_bytes)


DIGEST_BYTES = 32
CHUNK_BYTES_MAX = 2**28
"""Largest chunk of the format: a reader can hold one in memory."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One data object.  Its name contains the digest of its bytes, so each reader verifies it."""

    key: str
    """See :meth:`swansong_bucket.format.keys.RunKeys.chunk`."""
    size_bytes: int

    @property
    def digest(self) -> bytes:
        """BLAKE3 of its bytes."""
        name = self.key.rpartition("/")[2]
        return bytes.fromhex(name[: 2 * DIGEST_BYTES])


@dataclass(frozen=True, slots=True)
class Extent:
    """A range of a chunk that holds bytes of a shard."""

    chunk: Chunk
    offset_bytes: int
    size_bytes: int

    @classmethod
    def whole(cls, chunk: Chunk) -> Extent:
        return cls(chunk, 0, chunk.size_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredShard:
    """One shard that is durable in the object store."""

    path: str
    size_bytes: int
    extents: tuple[Extent, ...]
    """Its bytes, from the first to the last.  An empty shard has none."""

    def __hash__(self) -> int:
        return hash((self.path, self.size_bytes))  # a large shard has thousands of extents


@dataclass(frozen=True, slots=True, order=True)
class CommitRef:
    """The place of a commit in the lineage of a run.  Readers order commits by this value."""

    generation: int
    step: int
    is_final: bool = False
    """The end of the run, which comes after another commit of its step."""

    def __str__(self) -> str:
        return f"generation {self.generation} step {self.step}{' (final)' * self.is_final}"


@dataclass(frozen=True, slots=True)
class VmPart:
    """This VM's part of a checkpoint, committed before the checkpoint is whole."""

    ref: CommitRef
    nodes: int
    """Number of VMs of the job."""
    committed: int = 1
    """Number of VMs whose part is known to be committed, this one included."""

    def facts(self) -> dict[str, object]:
        """The JSON fields of the farewell and the status."""
        return {
            "generation": self.ref.generation,
            "step": self.ref.step,
            "nodes": self.nodes,
            "nodes_committed": self.committed,
        }

    def __str__(self) -> str:
        return f"this VM's part of {self.ref} is committed ({self.committed} of {self.nodes} VMs)"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRecord:
    """The knowledge of a restarted daemon: the GPUs of this boot, and the training that used them."""

    gpus: tuple[GpuStatus, ...]
    log_number: int | None
    """Number of the last record of the kernel log that these statuses contain; None if it is not read."""
    suspect_starts: tuple[str, ...]
    """Starts of trainers that were connected when a GPU failed, the newest last."""
    known_starts: tuple[str, ...]
    """Starts of trainers that are suspect if a GPU fails before they connect again; the newest last."""
    sound_sets: frozenset[CheckpointId]
    """Sets in staging from before a failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """Measurements of one rank; each is `null`, or None, while it is unknown."""

    save_s: float | None = None
    """Duration of the last save."""
    save_bytes: int | None = None
    """Bytes of the last save."""
    snapshot_s: float | None = None
    """Time of the last save for which training stood still."""
    step_s: float | None = None
    """Usual duration of a step."""
    own_s: float | None = None
    """Part of a step in which the rank waits for no other: from a step to the end of the forward pass."""
    loss: float | None = None
    """The last loss that was reported."""
    loss_is_finite: bool | None = None
    loss_is_usual: bool | None = None
    """`false` while the losses are not finite or, several in a row, far above those before."""


MEASURES = tuple(each.name for each in fields(Measures))


def measures_of(source: object) -> dict[str, Any]:
    """The measurements in an object that has them all, by name."""
    return {name: getattr(source, name) for name in MEASURES}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerView(Measures):
    """The daemon's knowledge of one rank."""

    connection: int
    """Number of the connection, unique for the life of the daemon."""
    pid: int
    rank: int
    world_size: int
    local_world_size: int
    node: int = 0
    """Number of this VM in the job."""
    nodes: int = 1
    """Number of VMs of the job."""
    step: int = -1
    """Last step that it reported as completed; -1 before the first."""
    takes_periodic: bool = False
    """The daemon decides when its periodic checkpoints are due."""
    takes_follow_ups: bool = False
    """It trains on after an emergency checkpoint, and takes further ones."""
    reported_mono_s: float | None = None
    greeted_mono_s: float = 0.0
    """When its hello arrived."""
    start_id: str = ""
    """The start of the training to which it belongs; empty while it is not known."""
    parent: Parent = UNKNOWN_PARENT
    """The state that this start has loaded."""
    start_step: int = -1
    """The first step that it reported on this connection, or of its last start; -1 before."""
    is_connected: bool = True
    """False after the connection ended, while the process may still reconnect."""
    asks_for_request: bool = False
    """It got SIGTERM, and waits for the request of a last checkpoint, or to know that none will come."""
    process_start: int = 0
    """Start of its process, in clock ticks since the boot; 0 if it could not be read."""

    @property
    def process(self) -> tuple[int, int]:
        """Pid and start of its process, which together are unique in a boot."""
        return self.pid, self.process_start
