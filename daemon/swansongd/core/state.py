# SPDX-License-Identifier: Apache-2.0
"""The state of the decision loop: one frozen value, which :mod:`swansongd.core.machine` replaces."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from swansong import layout
from swansong_bucket.loss_records import History
from swansong_bucket.model import (
    CheckpointId,
    CommitRef,
    GpuRecord,
    GpuStatus,
    Notice,
    NoticeKind,
    Position,
    Severity,
    SourceStatus,
    Staged,
    Start,
    StoredShard,
    TrainerView,
    Verdict,
    VmPart,
    is_healthy,
    is_sound,
)

from swansongd.core.events import Conclude
from swansongd.core.pace import UNKNOWN, Pace
from swansongd.core.planner import Candidate, Forecast, Measurements, Plan, forecast
from swansongd.core.request_ids import are_of_one

SCHEDULED_LEAD_S = 120.0
"""A scheduled end is evacuated this long before, or earlier if the checkpoint takes longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings that decisions need: of the configuration, of the VM and of earlier lives."""

    reserve_s: float
    signals_trainer: bool
    """A signal and a process that gets it are configured."""
    background_limit_bytes_per_s: float | None = None
    """Bandwidth limit of a flush while no notice is in force."""
    checkpoint_interval_s: float | None = None
    """Interval of periodic checkpoints; None: computed, see :mod:`swansongd.core.cadence`."""
    vm: str = ""
    """Identifies this VM and boot."""
    boot_id: str = ""
    """This boot of the kernel; empty: unknown."""
    booted_wall_ns: int = 0
    """When the VM was booted, by the clock of file times: before that, the power may have been cut."""
    ticks_per_s: int = 100
    """The unit in which the kernel states when a process began."""
    mtbf_s: float = 4 * 3600.0
    """Mean time between interruptions that is assumed before any was observed."""
    assumed_grace_s: float = 25.0
    """Assumed time left when a source names a time in the past."""
    handover: bool = False
    """The next VM starts before this one ends."""
    follow_ups: bool = True
    """After the verdict, further checkpoints follow while the VM runs and another one fits."""
    notice_kinds: tuple[NoticeKind, ...] = ()
    """The notices that this VM may get, for the margin in the status."""
    stall_steps: float = 20.0
    stall_min_s: float = 60.0
    """A trainer is stalled without a report for ``stall_steps`` usual steps and at least ``stall_min_s``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """The flush in flight."""

    flush_id: str
    staged: Staged
    is_sealed: bool = True
    """False: early shards of a set that is still being written."""
    started_mono_s: float
    bytes_before: int = 0
    """Bytes of the set that this flush need not send: stored earlier, or referenced."""
    bytes_sent: int = 0
    bytes_compared: int = 0
    """Bytes that were only read: they say nothing about the bandwidth."""
    sending_mono_s: float | None = None
    """The last instant at which it had read known bytes and had sent nothing."""
    sampled_mono_s: float
    """Instant and ``bytes_sent`` of the last bandwidth sample."""
    sampled_bytes: int = 0
    is_sampled: bool = False
    has_begun: bool = False
    """Whether the store has received a byte, in this flush or in one of the same set that it continues."""
    first_started_mono_s: float
    """Start of this flush, or of the first of those that it continues."""
    bytes_sent_before: int = 0
    """Bytes that those flushes sent, also if they still lie in the buffers of the kernel."""

    @property
    def bytes_unsent(self) -> int:
        """Bytes that are still to be sent."""
        return max(0, self.staged.size_bytes - self.bytes_before - self.bytes_sent)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSet:
    """A set with all shards stored, whose manifest is not known to be written."""

    flush_id: str
    staged: Staged
    shards: tuple[StoredShard, ...]
    asked_mono_s: float | None = None
    """When the CommitManifest in progress was ordered; None without one."""

    @property
    def is_asked(self) -> bool:
        return self.asked_mono_s is not None


@dataclass(frozen=True, slots=True)
class Incomplete:
    """Checkpoints of which this VM's part is committed, and not yet the parts of all other VMs."""

    part: VmPart
    """That of the newest one.  A slower VM may skip it, and commit its part of an older one later."""
    look_mono_s: float
    """The next look for the other parts is not before this instant."""
    wait_s: float
    is_asked: bool = False
    """A CheckComplete is in progress."""


@dataclass(frozen=True, slots=True)
class Finishing:
    """A start over several VMs is about to begin, after the sets that are sealed by then are committed."""

    start_id: str
    connections: frozenset[int]
    """The ranks of this start that have asked."""
    asked_mono_s: float
    by_mono_s: float
    """The start begins at this instant at the latest."""
    waits: bool | None = None
    """The last answer to its ranks: whether shares of other VMs are missing; None before the first."""

    @property
    def is_done(self) -> bool:
        return self.waits is False


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRequest:
    """A checkpoint request to the trainer, and how far it has come."""

    request_id: str
    reason: str
    start_id: str = ""
    """The newest start of the training when the request was made."""
    is_periodic: bool = False
    """Made without an evacuation, also for a rank that got SIGTERM."""
    is_follow_up: bool = False
    by_signal: bool = False
    is_urgent: bool = True
    """False for a precaution and a periodic checkpoint: training does not stop for them."""
    asked_mono_s: float
    agree_by_mono_s: float
    """Ranks that have not all accepted by then do not agree.  A periodic request ends then."""
    ranks: frozenset[int] = frozenset()
    """Ranks that got the request."""
    accepted: Mapping[int, int] = field(default_factory=dict)
    """Each rank that has accepted, with the last step that it had completed."""
    target: int | None = None
    known: frozenset[CheckpointId] = frozenset()
    """Sets that were sealed before the request: none of them answers it."""
    from_step: int = -1
    """Newest step that the ranks had reported before the request: an older one does not answer it.  -1 for
    the request of an earlier life of the daemon, whose answer the ranks may repeat."""
    at_step: int = -1
    """Newest step that any rank had reported by then."""
    reported_step: int | None = None
    """A rank reported that it sealed this step for the request."""
    sealed: CheckpointId | None = None
    """The set that answers the request, once a scan has found it."""
    lost_mono_s: float | None = None
    """When a rank's process ended; a scan that began later decides whether it had sealed."""
    settling: frozenset[str] | None = None
    """Sets without hooks that the first scan after that found settling, and that have not settled since."""
    failure: str = ""
    is_unsent: bool = False
    """The signal was refused: no process got the request."""
    failed_mono_s: float = 0.0
    rescan_mono_s: float = 0.0
    """When the last scan for early shards was ordered."""
    too_late_mono_s: float | None = None
    """Since when, without a break, the set could not be stored in time by the numbers."""
    expected_s: float | None = None
    """Forecast at the request: time to the end of the commit; None while something was not measured."""
    pessimistic_s: float | None = None
    """The same for nine of ten checkpoints."""
    sealed_mono_s: float | None = None
    """When the scan found ``sealed``."""
    took_s: float | None = None
    """Time from the request to the end of the commit."""

    @property
    def is_waiting(self) -> bool:
        return self.sealed is None and not self.failure

    @property
    def answer(self) -> CheckpointId | None:
        """The set that answers it: usable, or committed."""
        return None if self.failure else self.sealed


@dataclass(frozen=True, slots=True, kw_only=True)
class Evacuation:
    """The work between a notice and its verdict."""

    id: str
    reason: str
    opened_mono_s: float
    deadline_mono_s: float
    """Moves earlier only, unless a source replaces an assumed time by a derived one."""
    plan: Plan
    is_precaution: bool = False
    """The notices are advisory or far ahead: take one more checkpoint, without a verdict."""
    is_resumed: bool = False
    """An earlier life of the daemon opened it: the trainer may have answered its request already."""
    identities: frozenset[str] = frozenset()
    """Identities of the notices that it answers."""
    request: CheckpointRequest | None = None
    """The newest one."""
    requests: int = 0
    """Number of requests so far; each has another id."""
    refusal: str = ""
    """Why the last signal was not sent."""
    safe_at: Position | None = None
    """The position for which an earlier life of the daemon has said SAFE."""
    foretold: tuple[Verdict, CommitRef | None, CommitRef | None] | None = None
    """Verdict, commit and this VM's part of the newest farewell before the verdict."""
    verdict: Verdict | None = None
    follow_up: CheckpointRequest | None = None
    """The newest follow-up request.  ``request`` stays, with the verdict that it led to."""
    follow_ups: int = 0
    """Number of follow-up requests so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeState:
    """The notices, and limits of what they cause; written by :mod:`~swansongd.core.notices`."""

    sources: Mapping[str, SourceStatus] = field(default_factory=dict)
    live: Mapping[str, Notice] = field(default_factory=dict)
    """Live notices: by their source, which shows one at a time, or by identity if given by hand."""
    rates_mono_s: Mapping[str, float] = field(default_factory=dict)
    """By source, or kind of effect: when its rate is unused again; see :mod:`swansongd.core.notices`."""
    peer_end_mono_s: float | None = None
    """Earliest end of another VM of this job start, as its request stated it."""

    @property
    def in_force(self) -> tuple[Notice, ...]:
        """Live notices that the VM has not outlived."""
        return tuple(notice for notice in self.live.values() if not notice.is_outlived)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """The GPUs, and what a failed one makes doubtful; written by :mod:`~swansongd.core.gpus`."""

    status: Mapping[str, GpuStatus] = field(default_factory=dict)
    """Health of the GPUs, by their address on the bus; empty without a GPU."""
    log_number: int | None = None
    """See :class:`~swansongd.core.events.GpusRead`."""
    before: GpuRecord | None = None
    """The record of the previous life of this daemon in this boot; None without one."""
    suspect_starts: frozenset[str] = frozenset()
    """Processes that trained when a GPU failed, by the id of their first start: none of them is asked for a
    checkpoint."""
    inherited: frozenset[CheckpointId] = frozenset()
    """Sets of the first scan, which predate this life of the daemon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """The ranks of the trainer on this VM; written by :mod:`~swansongd.core.ranks`."""

    trainers: tuple[TrainerView, ...] = ()
    left_behind: tuple[TrainerView, ...] = ()
    """Processes of earlier jobs that have no connection: they may hang forever, or still seal a set."""
    changed_mono_s: float = -math.inf
    """When a rank connected, its process ended, or a set proved unusable, last in an evacuation: only a later
    scan has all sets that were sealed before."""

    @property
    def processes(self) -> tuple[TrainerView, ...]:
        """All that may still train and seal sets here, also those of earlier jobs."""
        return (*self.left_behind, *self.trainers)

    def on(self, connection: int) -> TrainerView | None:
        """The rank with this connection, if it is known."""
        return next((t for t in self.trainers if t.connection == connection), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Predecessor:
    """The VM that this one replaces, as the newest look at the bucket has found it."""

    generation: int = 0
    """The newest one, which that VM holds; 0 if there is no such VM, or if it has ended."""
    by_mono_s: float = 0.0
    """It is awaited until then."""
    is_leaving: bool = True
    """False if its notice was withdrawn: this VM stands by."""
    newest: CommitRef | None = None
    """The newest whole commit."""
    looked_mono_s: float = -math.inf
    """When the look began."""
    due_mono_s: float = math.inf
    """When a claim was due first, which needs a later look; infinite before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartState:
    """The starts of the training and their claims; written by :mod:`~swansongd.core.starts`."""

    known: tuple[Start, ...] = ()
    """The starts of the training that are known here, the newest last."""
    process: str = ""
    """The start of the trainer without hooks whose process runs; empty without one."""
    claims: tuple[tuple[str, float], ...] = ()
    """The last claims that were ordered, the newest last: the start, and when."""
    retried: str = ""
    """The start whose claim is retried until it is made, refused or withdrawn; empty without one."""
    fenced_by: int | None = None
    """The generation that has taken the run over."""
    finishing: Finishing | None = None
    """The next start of a job over several VMs, while this VM still commits sets of the last one."""
    predecessor: Predecessor | None = None
    """None without ``run.handover``, and after the first claim."""

    @property
    def is_finishing(self) -> bool:
        """Whether another start waits for the commits of the last one."""
        return self.finishing is not None and not self.finishing.is_done

    @property
    def newest(self) -> Start | None:
        """The newest known start, also one of an earlier boot."""
        return self.known[-1] if self.known else None

    @property
    def claiming(self) -> str:
        """The start whose claim was ordered last, unless it is known to be made: it may be."""
        start_id = self.claims[-1][0] if self.claims else ""
        is_claimed = any(s.id == start_id and s.generation is not None for s in self.known)
        return "" if is_claimed else start_id


@dataclass(frozen=True, kw_only=True)
class StagingState:
    """The sets in staging; written by :mod:`~swansongd.core.staged_sets`."""

    staged: tuple[Staged, ...] = ()
    pending: tuple[str, ...] = ()
    growing: tuple[Staged, ...] = ()
    """Sets that are being written, with the files in them that are final."""
    first_scan_mono_s: float | None = None
    """When the first scan of this life began; None before."""
    scanned_mono_s: float = -math.inf
    """When the newest walk over staging began."""
    saved_mono_s: float | None = None
    """When a scan last found a sealed set of any kind."""
    unusable: frozenset[CheckpointId] = frozenset()
    """Sets that changed, were unreadable, lost a conflict, were dropped, or are of a start that is over."""

    @cached_property
    def usable(self) -> tuple[Staged, ...]:
        """The sealed sets of which a commit may still be made, or was made."""
        return tuple(staged for staged in self.staged if staged.id not in self.unusable)

    @property
    def is_settling(self) -> bool:
        """Whether a set of a trainer without hooks may be written whole and still settle."""
        return any(layout.parse_partial_name(name) is None for name in self.pending)

    def predates(self, staged: Staged) -> bool:
        """Whether this adopted set was begun before the first scan."""
        first_mono_s, begun_mono_s = self.first_scan_mono_s, staged.begun_mono_s
        return (
            first_mono_s is not None and begun_mono_s is not None and begun_mono_s <= first_mono_s
        )

    @property
    def suspect(self) -> frozenset[CheckpointId]:
        """Sets of suspect training that appeared after the failure of its GPU: they count as unhealthy."""
        return frozenset(s.id for s in self.staged if not is_sound(s.health))


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushState:
    """The flush in flight, and the backoff; written by :mod:`~swansongd.core.flight`."""

    flight: Flight | None = None
    flushes: int = 0
    stored_bytes: Mapping[CheckpointId, int] = field(default_factory=dict)
    """Bytes of each set that are stored, by this flush or an earlier one."""
    sent_bytes: int = 0
    """Bytes that all flushes have sent since the daemon's start."""
    failures: int = 0
    retry_mono_s: float = 0.0
    """End of the backoff after a failure of the store."""
    link_needed_until_mono_s: float = 0.0
    """When another daemon of this VM needed the link last; infinite while it does."""


@dataclass(frozen=True, kw_only=True)
class CommitState:
    """The commits of the run, and the manifests that are due; written by :mod:`~swansongd.core.commits`."""

    stored: tuple[StoredSet, ...] = ()
    last_complete: CommitRef | None = None
    """Newest whole commit of the run, of any generation: all its VMs have committed their parts."""
    is_sound: bool = True
    """False if a GPU of any VM had failed before ``last_complete`` was sealed there."""
    skipped: CommitRef | None = None
    """A commit that a restore on this VM could not use: the next VM may resume from an older one."""
    newest_start: str = ""
    """The start whose generation ``last_complete`` has, if it is not a known one."""
    is_run_read: bool = False
    """Whether the newest commit of the run is known."""
    incomplete: Incomplete | None = None
    healthy: CommitRef | None = None
    """Newest commit of this generation that is not unhealthy."""
    ordered: CommitRef | None = None
    """Newest manifest that was ordered, until one at or after its place is known to be written: whatever the
    reply was, and whether it is still wanted, it may exist.  So may a checkpoint of an earlier start over
    several VMs of which this VM's part is written."""

    @cached_property
    def last(self) -> CommitRef | None:
        """Newest commit of the run.  Over several VMs perhaps only this VM's part of it."""
        own = None if self.incomplete is None else self.incomplete.part.ref
        return max((ref for ref in (self.last_complete, own) if ref is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """Measurements and history of the run; written by :mod:`~swansongd.core.learning`."""

    bandwidth_bytes_per_s: float | None = None
    pace: Pace = UNKNOWN
    signal_save_s: float | None = None
    """From the last signal to its sealed set, settling included."""
    history: History = field(default_factory=History)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestState:
    """The periodic requests; written by :mod:`~swansongd.core.request`."""

    periodic: CheckpointRequest | None = None
    """The periodic request that is not answered yet."""
    periodic_mono_s: float | None = None
    """When the last one was requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CourseState:
    """The evacuations of this life of the daemon; written by :mod:`~swansongd.core.course`."""

    opened: tuple[str, ...] = ()
    """Ids of the last evacuations."""
    last_verdict: Conclude | None = None
    """The newest verdict, which outlasts its evacuation."""
    is_leaving: bool = False


@dataclass(frozen=True, kw_only=True)
class State:
    """The whole state; each part is written by one module of the core.

    The state does not change, so each value that is computed from it is computed once.
    """

    settings: Settings
    notices: NoticeState = NoticeState()
    gpus: GpuState = GpuState()
    ranks: RankState = RankState()
    starts: StartState = StartState()
    staging: StagingState = StagingState()
    flush: FlushState = FlushState()
    commits: CommitState = CommitState()
    learned: Learned = Learned()
    requests: RequestState = RequestState()
    course: CourseState = CourseState()
    evacuation: Evacuation | None = None
    """The open evacuation; written by :mod:`~swansongd.core.course`."""

    @cached_property
    def start(self) -> Start | None:
        """The newest start of the training since the VM booted; None before the first."""
        newest = self.starts.newest
        return newest if newest is not None and newest.is_of_boot else None

    @cached_property
    def running(self) -> Start | None:
        """The newest open start of which a process runs here, connected or not; None without one."""
        ids = {self.starts.process, *(trainer.start_id for trainer in self.ranks.trainers)}
        alive = (s for s in reversed(self.starts.known) if s.is_live and s.is_open and s.id in ids)
        return next(alive, None)

    def start_of(self, start_id: str) -> Start | None:
        """The start with this id, if it is known."""
        return next((start for start in self.starts.known if start.id == start_id), None)

    def began_ns(self, start: Start) -> int:
        """When the first process of a start began, by the clock of file times; 0 if it is unknown.

        No set of the start was written before.
        """
        if start.process_ns or not start.began_ticks:
            return start.process_ns
        began_ns = start.began_ticks * 10**9 // self.settings.ticks_per_s
        return self.settings.booted_wall_ns + began_ns

    @property
    def may_commit(self) -> bool:
        """Whether a set may become a commit: it waits, it is sent, or its manifest is due."""
        return bool(self.flush.flight or self.commits.stored or self.uncommitted)

    def names_boot(self, staged: Staged) -> bool:
        """Whether a set names this boot of the kernel as the one in which it was sealed."""
        return staged.boot_id != "" and staged.boot_id == self.settings.boot_id

    def precedes(self, staged: Staged, start: Start) -> bool:
        """Whether the start of a set is known to be an earlier one, whatever the clock of file times says.

        This start has loaded its state, its processes began earlier in this boot, or the same processes have
        begun this start since.
        """
        if staged.id.start == start.parent.start_id:
            return True
        if not self.names_boot(staged):
            return False
        first, _, number = staged.id.start.partition("~")
        own_first, _, own_number = start.id.partition("~")
        if first == own_first:
            return (len(number), number) < (len(own_number), own_number)
        return 0 < staged.began_ticks < start.began_ticks

    def owner_of(self, ref: CommitRef) -> str:
        """Id of the start that wrote this commit; empty if it is unknown."""
        own = next((s.id for s in self.starts.known if s.generation == ref.generation), "")
        return own or (self.commits.newest_start if ref == self.commits.last_complete else "")

    @property
    def generation(self) -> int | None:
        """The generation of the newest start; None until it is claimed."""
        return None if self.start is None else self.start.generation

    @cached_property
    def newest_generation(self) -> int | None:
        """The newest generation of a start since the VM booted; None before the first claim."""
        own = (start.generation for start in self.starts.known if start.is_of_boot)
        return max((each for each in own if each is not None), default=None)

    def order(self, checkpoint: CheckpointId) -> tuple[int, CheckpointId]:
        """The place of a set among all sets in staging: by start, then by step."""
        return self._numbers.get(checkpoint.start, -1), checkpoint

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {start.id: number for number, start in enumerate(self.starts.known)}

    @cached_property
    def connected(self) -> tuple[TrainerView, ...]:
        return tuple(trainer for trainer in self.ranks.trainers if trainer.is_connected)

    @cached_property
    def strangers(self) -> tuple[TrainerView, ...]:
        """Connected ranks that may train, and not as a part of the newest known start.

        Their start is unknown, or an older one while no rank of the newest one is connected.
        """
        start_id = "" if self.start is None else self.start.id
        has_own = any(trainer.start_id == start_id for trainer in self.connected)
        return tuple(
            trainer
            for trainer in self.connected
            if not trainer.start_id or not (has_own or trainer.start_id == start_id)
        )

    @property
    def asked_start(self) -> str:
        """The start whose ranks, or whose process, a request asks; empty if it is unknown."""
        newest = "" if self.start is None else self.start.id
        starts = {trainer.start_id for trainer in self.connected} or {newest}
        if newest in starts and "" not in starts:
            return newest
        return starts.pop() if len(starts) == 1 else ""

    @cached_property
    def joined_mono_s(self) -> float | None:
        """When the first of the connected ranks connected; None without any."""
        return min((trainer.greeted_mono_s for trainer in self.connected), default=None)

    @cached_property
    def pinned(self) -> Staged | None:
        """The newest set that is not unhealthy, while all newer ones are: committed and kept."""
        newest_first = [s for s in self._newest_first if s.id.start == self._last_start]
        if not newest_first or is_healthy(newest_first[0].health) is not False:
            return None
        return next((s for s in newest_first if is_healthy(s.health) is not False), None)

    @cached_property
    def _last_start(self) -> str:
        return "" if self.starts.newest is None else self.starts.newest.id

    @cached_property
    def _newest_first(self) -> list[Staged]:
        return sorted(self.staging.usable, key=lambda s: self.order(s.id), reverse=True)

    @cached_property
    def uncommitted(self) -> tuple[Staged, ...]:
        """Sealed sets that should still be committed, newest first."""
        pinned, healthy = self.pinned, self.commits.healthy
        is_due = pinned is not None and (healthy is None or healthy.step < pinned.id.step)
        open_ids = {start.id for start in self.starts.known if start.is_open}
        return tuple(
            s
            for s in self._newest_first
            if s.id.start in open_ids
            and (
                s.nodes == 1 or s.id.start == self._last_start or self.starts.finishing is not None
            )
            and ((is_due and s is pinned) or not self.is_covered(s.id))
        )

    def is_covered(self, checkpoint: CheckpointId) -> bool:
        """Whether a commit at or after this place in the order of readers exists; this VM's part suffices."""
        return self._covers(self.commits.last, checkpoint)

    def is_whole(self, checkpoint: CheckpointId) -> bool:
        """Whether a whole commit at or after this place in the order of readers exists."""
        return self._covers(self.commits.last_complete, checkpoint)

    def _covers(self, last: CommitRef | None, checkpoint: CheckpointId) -> bool:
        if last is None:
            return False
        ref = self.ref_of(checkpoint)
        return ref is not None and ref <= last

    @property
    def is_scanned(self) -> bool:
        """Whether a scan has found all sets of before the evacuation and the last change of the ranks."""
        opened_mono_s = -math.inf if self.evacuation is None else self.evacuation.opened_mono_s
        return self.staging.scanned_mono_s >= max(opened_mono_s, self.ranks.changed_mono_s)

    def ref_of(self, checkpoint: CheckpointId) -> CommitRef | None:
        """The place of a set among the commits; None before its start has a generation."""
        start = self.start_of(checkpoint.start)
        if start is None or start.generation is None:
            return None
        return CommitRef(start.generation, checkpoint.step, checkpoint.is_final)

    @property
    def part(self) -> VmPart | None:
        """The newest checkpoint of which this VM's part is committed, until it is whole."""
        return None if self.commits.incomplete is None else self.commits.incomplete.part

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """Sealed sets that are still worth storing: none older than a stored set, except the pinned one."""
        result = []
        pinned, stored = self.pinned, {item.staged.id for item in self.commits.stored}
        newest_stored = max(map(self.order, stored), default=None)
        for staged in self.uncommitted:
            is_pinned = staged == pinned and staged.id not in stored
            is_newer = newest_stored is None or self.order(staged.id) > newest_stored
            if self.ref_of(staged.id) is not None and (is_newer or is_pinned):
                left = max(0, staged.size_bytes - self.flush.stored_bytes.get(staged.id, 0))
                result.append(
                    Candidate(
                        id=staged.id,
                        order=self.order(staged.id),
                        bytes_left=left,
                        is_sound=is_sound(staged.health),
                    )
                )
        return tuple(result)

    @cached_property
    def early(self) -> Staged | None:
        """The growing set that answers an urgent request, once a file of it is final.

        Over several VMs the request of a follow-up may be that of another VM's daemon.
        """
        evacuation = self.evacuation
        if evacuation is None or evacuation.is_precaution:
            return None
        waiting = [request for request in self.requests_made if request.is_waiting]
        ids = {request.request_id for request in waiting}
        targets = {request.target for request in waiting}
        is_led = self.spans_vms and evacuation.verdict is not None
        answering = (
            staged
            for staged in self.staging.growing
            if staged.files
            and (
                staged.request_id in ids
                or staged.id.step in targets
                or (is_led and are_of_one(staged.request_id, evacuation.id))
            )
        )
        return max(answering, key=lambda staged: self.order(staged.id), default=None)

    @property
    def bytes_to_come(self) -> int:
        """Bytes still to be sent of the requested set; 0 while its size is unknown."""
        size_bytes = self.measured.send_bytes
        early = self.early
        if early is None:
            return size_bytes
        return max(0, max(size_bytes, early.size_bytes) - self.flush.stored_bytes.get(early.id, 0))

    @property
    def is_deciding(self) -> bool:
        """Whether an evacuation has no verdict yet.  A precaution has none."""
        evacuation = self.evacuation
        return (
            evacuation is not None and not evacuation.is_precaution and evacuation.verdict is None
        )

    @property
    def must_yield(self) -> bool:
        """Whether a verdict of another daemon of this VM waits for its bytes, and none of this one."""
        return self.flush.link_needed_until_mono_s == math.inf and not self.is_deciding

    @cached_property
    def requests_made(self) -> tuple[CheckpointRequest, ...]:
        """The newest request of the open evacuation, and its newest follow-up request."""
        evacuation = self.evacuation
        made = () if evacuation is None else (evacuation.request, evacuation.follow_up)
        return tuple(request for request in made if request is not None)

    @property
    def has_gone_back(self) -> bool:
        """Whether training runs that has loaded an older state than the set that has answered the request."""
        request = None if self.evacuation is None else self.evacuation.request
        start = self.start
        if request is None or request.sealed is None or start is None:
            return False
        loaded, sealed = start.parent, request.sealed
        is_newer = loaded.start_id == sealed.start and loaded.step >= sealed.step
        runs = any(trainer.start_id == start.id for trainer in self.ranks.trainers)
        return runs and start.id != sealed.start and loaded.is_known and not is_newer

    @property
    def answers(self) -> tuple[CheckpointId, ...]:
        """The sets that answer these requests."""
        return tuple(made.answer for made in self.requests_made if made.answer is not None)

    @property
    def follow_up(self) -> CheckpointRequest | None:
        """The newest follow-up request of this evacuation."""
        return None if self.evacuation is None else self.evacuation.follow_up

    @cached_property
    def is_finished(self) -> bool:
        """Whether the newest start has sealed the end of the run, or committed it."""
        start, last = self.start, self.commits.last_complete
        if start is None or self.strangers:
            return False
        usable = self.staging.usable
        is_sealed = any(s.id.is_final and s.id.start == start.id for s in usable)
        is_committed = last is not None and last.is_final and last.generation == start.generation
        return is_sealed or is_committed

    @cached_property
    def spans_vms(self) -> bool:
        """Whether the job has ranks on other VMs: the ranks then agree among themselves."""
        start = self.starts.newest
        has_others = start is not None and start.nodes > 1
        return has_others or any(t.nodes > 1 for t in self.ranks.trainers)

    @property
    def stall_s(self) -> float | None:
        """Time for which a save stops the slowest connected rank; None before the first save."""
        stalls = (t.save_s if t.snapshot_s is None else t.snapshot_s for t in self.connected)
        return max((stall for stall in stalls if stall is not None), default=None)

    @property
    def local_world_size(self) -> int:
        """Number of ranks of this VM, connected or not, as reported by the ranks."""
        return max((trainer.local_world_size for trainer in self.ranks.trainers), default=1)

    @cached_property
    def measured(self) -> Measurements:
        """Bandwidth, the save time of the slowest rank, and the size of the newest set."""
        save_s = [t.save_s for t in self.ranks.trainers if t.save_s is not None]
        if not self.ranks.trainers and self.learned.signal_save_s is not None:
            save_s = [self.learned.signal_save_s]
        steps_s = [t.step_s for t in self.connected if t.step_s is not None]
        newest = max(self.staging.staged, key=lambda s: self.order(s.id), default=None)
        reported = [t.save_bytes for t in self.connected if t.save_bytes is not None]
        save_bytes = newest.size_bytes if newest else (sum(reported) if reported else None)
        earlier = self.learned.pace  # of an earlier VM, where this one has no numbers yet
        if save_bytes is None and earlier.size_bytes is not None:
            save_bytes = round(earlier.size_bytes.mean)
        if not save_s and earlier.save_s is not None:
            save_s = [earlier.save_s.mean]
        return Measurements(
            bandwidth_bytes_per_s=self.learned.bandwidth_bytes_per_s,
            save_s=max(save_s, default=None),
            save_bytes=save_bytes,
            step_s=max(steps_s, default=0.0) if self.connected else None,
            last_share=1.0 if newest is None else newest.last_share,
            is_sending=self.flush.flight is not None or self.flush.failures > 0,
            pace=self.learned.pace,
        )

    @cached_property
    def forecast(self) -> Forecast:
        """The forecast of a checkpoint that is requested now."""
        return forecast(self.measured)

    @cached_property
    def lead_s(self) -> float:
        """Time between the last checkpoint and a scheduled end."""
        return max(SCHEDULED_LEAD_S, 2 * self.forecast.data_s + self.settings.reserve_s)

    def urgent_notices(self, now_mono_s: float) -> tuple[Notice, ...]:
        """Notices that require an evacuation: the most severe first, of equals the earliest.

        A scheduled notice does so when its time is near, and from then on, although new measurements may
        shorten the lead.
        """
        evacuation = self.evacuation
        is_open = evacuation is not None and not evacuation.is_precaution
        answered = evacuation.identities if evacuation is not None and is_open else frozenset()

        def is_urgent(notice: Notice) -> bool:
            if notice.severity is Severity.SCHEDULED:
                is_near = notice.deadline_mono_s - now_mono_s <= self.lead_s
                return is_near or notice.identity in answered
            return notice.severity >= Severity.IMMINENT

        live = filter(is_urgent, self.notices.in_force)
        return tuple(sorted(live, key=lambda n: (-n.severity, n.deadline_mono_s)))
