# SPDX-License-Identifier: Apache-2.0
"""The status of the daemon, for ``swansong status`` and all other readers.

Each field is declared here once: docs/reference/status.md is made of these records and their texts.  A field
that may be unknown has a default, so that a command can read the status of an older daemon.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from swansong import bounds
from swansong.bounds import BoundsError
from swansong_bucket.model import CommitRef, GpuHealth, Health, Measures, Verdict
from swansong_bucket.util.printable import escaped

STORE_HEALTH = "store"
"""Name of the store among the sources of the state."""
TRAINERS_MAX = 100
"""Trainers in one status: it must fit into one message of the channel."""
_ITEMS_MAX = 1000
_TEXT_CHARS_MAX = 2**16
_INTEGER_MAX = 2**63 - 1
_NUMBER_MAX = bounds.METRIC_MAX


class MirrorState(StrEnum):
    """The state of the mirror."""

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


class PrefetchState(StrEnum):
    """The state of the prefetch."""

    OFF = "off"
    WAITING = "waiting"
    """For the store, for the first scan of staging, for the end of an evacuation, or for a trainer that names
    its shards."""
    FETCHING = "fetching"
    READY = "ready"
    """The directory is complete."""
    ANSWERED = "answered"
    """A trainer got its answer."""
    NOT_NEEDED = "not_needed"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictStatus:
    verdict: Verdict
    reason: str
    generation: int | None = None
    step: int | None = None
    age_s: float
    evacuation: str
    """Id of the evacuation."""
    notices: tuple[str, ...]
    """Identities of the notices that the verdict answers."""
    expected_s: float | None = None
    """Planned time from the checkpoint request to the commit."""
    took_s: float | None = None
    """Time from the checkpoint request to the commit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthStatus:
    name: str
    health: Health
    """`ok`, `degraded`, `blind` or `unsupported`: see docs/operations/notices.md#health-of-a-source."""
    reason: str
    for_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuHealthStatus:
    index: int
    """As in `nvidia-smi`; -1 if the driver does not list the GPU."""
    uuid: str
    name: str
    pci: str
    health: GpuHealth
    """`ok`, `degraded`, `dying` or `lost`."""
    reason: str
    for_s: float
    xids: Mapping[str, int] = field(default_factory=dict)
    """Number of Xid messages of each class since the daemon's start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitStatus:
    generation: int
    step: int
    is_final: bool = False
    """The commit is the end of the run."""
    age_s: float | None = None
    """For a commit from before the daemon's start: `null` until its manifest is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LagStatus:
    steps: int = 0
    seconds: float | None = None
    bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PartStatus:
    generation: int
    step: int
    nodes: int
    nodes_committed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeStatus:
    source: str
    kind: str
    severity: str
    """One of the severities below."""
    seconds_left: float
    identities: tuple[str, ...]
    """Several if `swansong notify` was repeated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowUpsStatus:
    count: int = 0
    """Number so far."""
    under_way: bool = False
    next_in_s: float | None = None
    """Time until the next one by the figures of this moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvacuationStatus:
    id: str
    reason: str
    seconds_left: float
    plan: str
    """One of the plans below."""
    why: str
    """The figures behind the plan."""
    phase: str
    """One of the states below."""
    trainer_wait_s: float | None = None
    """How long the verdict still waits for a trainer to connect; `null` if it does not wait."""
    follow_ups: FollowUpsStatus = FollowUpsStatus()
    """The follow-up checkpoints."""
    expected_s: float | None = None
    """Planned time from the request to the commit, on average."""
    pessimistic_s: float | None = None
    """Planned time from the request to the commit, for nine of ten checkpoints."""
    took_s: float | None = None
    """Time from the request to the commit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Margin:
    source: str
    grace_s: float
    """Time to the end of the VM."""
    spare_s: float | None = None
    """Time left after the commit, in nine of ten cases, reserve included.  Negative: the commit comes too
    late.  `null`: save or bandwidth are not measured; checkpoints below 4 MiB measure no bandwidth."""
    fits: bool | None = None
    """Whether a notice right now would end with SAFE; `null` if it is unknown.  Over several VMs the other
    VMs must fit, too."""
    problem: str | None = None
    """Why it would not, whatever time is left."""
    lost_since_step: int | None = None
    """If the commit comes too late: the step that the next VM resumes from; `null` without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerStatus(Measures):
    pid: int
    rank: int
    world_size: int
    step: int
    connected: bool
    slower: float | None = None
    """If the rank is slow: `own_s` divided by the median of the other ranks on this VM."""
    stalled_s: float | None = None
    """Time since the last report of a rank that is stalled."""
    redone: str | None = None
    """Result of the comparison of the rank's repeated steps with the interrupted run; `null` before it is
    known."""
    redone_differs: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedStatus:
    count: int = 0
    last: str | None = None
    """The newest reason."""
    age_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedSaveStatus:
    step: int | None = None
    rank: int | None = None
    reason: str
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedSavesStatus:
    count: int = 0
    last: FailedSaveStatus | None = None
    """The newest one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushStatus:
    step: int
    size_bytes: int
    stored_bytes: int
    for_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedStatus:
    count: int = 0
    step: int | None = None
    age_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsentStatus:
    sets: int = 0
    bytes: int = 0
    """Bytes of these sets that the store does not have."""
    failures: int = 0
    """Failed attempts in a row."""
    retry_in_s: float | None = None
    dropped: DroppedStatus = DroppedStatus()
    """Sets that newer ones superseded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingStatus:
    size_bytes: int
    free_bytes: int
    """Bytes that the daemon's user can still write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchStatus:
    state: PrefetchState
    reason: str
    generation: int | None = None
    step: int | None = None
    bytes_done: int
    bytes_total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorLagStatus:
    commits: int = 0
    """Manifests of this VM, and those that it found at its start, that wait for their copy."""
    seconds: float = 0.0
    """Age of the oldest commit that is newer than the newest one in the mirror; 0 without one."""
    bytes: int = 0
    """Bytes that these commits have and the mirror lacks, as far as it is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorStatus:
    url: str
    state: MirrorState
    reason: str
    lag: MirrorLagStatus
    """Distance from the newest commit to the mirror."""
    newest: CommitRef | None = None
    """The newest commit that is known to be in the mirror."""
    copied_commits: int
    """Commits that were copied since the daemon's start."""
    copied_bytes: int
    damaged: int
    """Commits that were not copied, because their stored bytes do not match their digests."""
    objects_taken: int = 0
    """Objects that a restore took from the mirror."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneStatus:
    age_s: float | None = None
    """Time since the newest prune that succeeded."""
    commits: int
    """Commits that were deleted."""
    freed_bytes: int
    kept_bytes: int | None = None
    failures: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderStatus:
    queued: int
    sent: int
    failed: int
    dropped: int
    last_error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatStatus:
    sent: int
    failed: int
    silent: str | None = None
    """The reason against a call."""
    last_error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NotificationsStatus:
    webhook: SenderStatus | None = None
    exec: SenderStatus | None = None
    heartbeat: HeartbeatStatus | None = None
    limited: int = 0
    """Notifications above the rate limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsStatus:
    address: str
    failure: str | None = None
    """Why the daemon does not serve it: see docs/operations/monitoring.md."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultsStatus:
    count: int = 0
    last: str | None = None
    """The newest one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonStatus:
    """The status of the whole daemon, in the order of its JSON."""

    state: str
    """One of the states below."""
    verdict: Verdict | None = None
    """How the last evacuation ended: SAFE, PARTIAL, LOST or NO_TRAINING; `null` before the first one, and
    during an evacuation without a verdict."""
    last_verdict: VerdictStatus | None = None
    """The newest verdict, also after its notice was withdrawn or outlived."""
    sources: tuple[HealthStatus, ...] = ()
    """The sources of notices."""
    gpus: tuple[GpuHealthStatus, ...] = ()
    """The GPUs (docs/operations/gpu-health.md)."""
    store: HealthStatus | None = None
    """The store: it becomes unhealthy when requests fail for two seconds, or an operation was given up, and
    `blind` after a minute; `null` until the first request."""
    store_answer_age_s: float | None = None
    """Time since the store answered.  An idle daemon sends a request each minute, so `ok` can be that old."""
    last_commit: CommitStatus | None = None
    """The newest whole commit.  A power cut now costs the training since then."""
    replication_lag: LagStatus = LagStatus()
    """Distance from the newest whole commit to the trainer."""
    run: str
    """Name of the run."""
    generation: int | None = None
    """The generation that this VM has claimed; `null` until the store was reached."""
    newer_generation: int | None = None
    """In state FENCED: the generation that has taken the run over."""
    part: PartStatus | None = None
    """Over several VMs: a newer checkpoint of which this VM has committed its part, and that is not whole."""
    notices: tuple[NoticeStatus, ...] = ()
    """The notices in force."""
    evacuation: EvacuationStatus | None = None
    """The open evacuation."""
    margins: tuple[Margin, ...] = ()
    """The result of a notice right now, for each kind of notice of this VM."""
    trainers: tuple[TrainerStatus, ...] = ()
    """The first 100 ranks."""
    trainers_not_shown: int = 0
    """Number of further ranks."""
    trainers_refused: RefusedStatus = RefusedStatus()
    """Processes that were refused because another process has their rank."""
    failed_saves: FailedSavesStatus = FailedSavesStatus()
    """Checkpoints that the trainer could not write since the daemon's start."""
    checkpoint_interval_s: float | None = None
    """Training time between two periodic checkpoints, where the trainer leaves them to the daemon."""
    flush: FlushStatus | None = None
    """The set in flight."""
    pending_bytes: int = 0
    """Bytes that are staged and not stored, of the sets that may be sent next."""
    unsent: UnsentStatus = UnsentStatus()
    """Sealed sets without a commit."""
    staging: StagingStatus | None = None
    """Space on the file system of staging."""
    prefetch: PrefetchStatus | None = None
    """The prefetch (docs/operations/restore.md#prefetch)."""
    mirror: MirrorStatus | None = None
    """The mirror (docs/operations/mirror.md#watch-the-lag); `null` without one."""
    prune: PruneStatus | None = None
    """Prunes by the daemon since its start (docs/operations/retention.md); `null` unless it prunes."""
    notifications: NotificationsStatus | None = None
    """The notifications (docs/operations/notifications.md); `null` without `[notify]`."""
    metrics: MetricsStatus | None = None
    """The service of `metrics.listen`; `null` without it."""
    bandwidth_bytes_per_s: float | None = None
    """Bandwidth to the store, as measured by recent flushes."""
    store_errors: Mapping[str, int] = field(default_factory=dict)
    """Requests to the store that failed since the daemon's start, by kind: see
    docs/reference/metrics.md#flush-and-store."""
    bytes_referenced: int = 0
    """Bytes not sent since the daemon's start, because an earlier commit has the same bytes under the
    same path."""
    decision_faults: FaultsStatus = FaultsStatus()
    """Faults of the daemon itself since its start; each cost one event; please report them."""
    version: str
    """Version of the daemon."""
    pid: int
    """Process id of the daemon."""
    uptime_s: float
    """Time since the start of the daemon."""


def to_json(status: DaemonStatus) -> dict[str, Any]:
    """The status as plain JSON values."""
    return dataclasses.asdict(status)


# ---------------------------------------------------------------- reading

_hints = cache(get_type_hints)


def from_json(report: object) -> DaemonStatus:
    """The status that a daemon has sent, which may be of another version, or hostile.

    Unknown fields are ignored, numbers are finite, and texts have no control characters.

    Raises:
        BoundsError: a field is missing or has a wrong type or value; the text names the field.
    """
    status: DaemonStatus = _record(DaemonStatus, report, "status")
    return status


def _record(kind: Any, value: object, name: str) -> Any:
    body, kinds = bounds.mapping(value, name, _ITEMS_MAX), _hints(kind)
    for item in dataclasses.fields(kind):
        is_needed = item.default is item.default_factory is dataclasses.MISSING
        if is_needed and item.name not in body:
            raise BoundsError(f"{name}.{item.name} is missing")
    known = body.keys() & kinds
    return kind(**{each: _value(kinds[each], body[each], f"{name}.{each}") for each in known})


def _value(kind: Any, value: object, name: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType:
        (kind,) = (each for each in arguments if each is not NoneType)
        return None if value is None else _value(kind, value, name)
    if origin is tuple:
        items = enumerate(bounds.items(value, name, _ITEMS_MAX))
        return tuple(_value(arguments[0], each, f"{name}[{place}]") for place, each in items)
    if origin is Mapping:
        body = bounds.mapping(value, name, _ITEMS_MAX)
        return {
            _value(str, key, name): _value(arguments[1], each, f"{name}[{key[:40]!r}]")
            for key, each in body.items()
        }
    if kind is bool:
        return bounds.boolean(value, name)
    if kind is int:
        return bounds.integer(value, name, -_INTEGER_MAX, _INTEGER_MAX)
    if kind is float:
        return bounds.number(value, name, -_NUMBER_MAX, _NUMBER_MAX)
    if kind is str:
        return escaped(bounds.text(value, name, _TEXT_CHARS_MAX))
    if issubclass(kind, StrEnum):
        if value not in (known := list(kind)):
            raise BoundsError(f"{name} is {bounds.shown(value)}, not one of {', '.join(known)}")
        return kind(value)
    return _record(kind, value, name)
