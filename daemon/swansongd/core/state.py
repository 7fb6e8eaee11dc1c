# SPDX-License-Identifier: Apache-2.0
"""All that the decision loop knows.  One frozen value; :mod:`swansongd.core.machine` replaces it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from swansongd.core.cadence import History
from swansongd.core.events import ClaimGeneration, JoinGeneration
from swansongd.core.planner import Candidate, Measured, Plan, take_s
from swansongd.model import (
    CheckpointId,
    CommitRef,
    Notice,
    Part,
    Severity,
    SourceStatus,
    Staged,
    StoredShard,
    TrainerView,
    Verdict,
    is_healthy,
)

SCHEDULED_LEAD_S = 120.0
"""An end that is scheduled is evacuated from so long before it, or earlier if that takes longer."""


class Phase(StrEnum):
    """Where the daemon stands; a verdict takes the place of the last ones."""

    IDLE = "IDLE"
    ARMED = "ARMED"
    CHECKPOINTING = "CHECKPOINTING"
    FLUSHING = "FLUSHING"
    COMMITTING = "COMMITTING"
    WAITING_FOR_PEERS = "WAITING_FOR_PEERS"
    """This VM's part is committed, and not all other VMs have committed theirs."""
    FENCED = "FENCED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The part of the configuration that decisions need."""

    reserve_s: float
    signals_trainer: bool
    """A signal and a process to send it to are configured."""
    background_limit_bytes_per_s: float | None = None
    """A flush with no notice about is held down to this."""
    checkpoint_interval_s: float | None = None
    """Of periodic checkpoints; None: as the cost of a save and the interruptions have it."""
    several_vms: bool = False
    """The job may run on several VMs, which have one generation in common."""
    vm: str = ""
    """Tells this VM, as of this boot, from others."""
    resumed_job_start_id: str = ""
    """The job start that an earlier life of this daemon, on this boot, was part of."""
    sealed_under: int | None = None
    """Generation of the sets that earlier lives of this daemon left in staging; None if unknown."""
    booted_wall_ns: int = 0
    """When the VM was booted, as the times of files count: before that, the power may have been cut."""
    mtbf_s: float = 4 * 3600.0
    """Mean time between interruptions that is assumed until the run knows better."""
    assumed_grace_s: float = 25.0
    """Time left when a source names a time that has passed."""
    stall_steps: float = 20.0
    stall_min_s: float = 60.0
    """A trainer that reports nothing for so many of its usual steps, and so long, has come to a halt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """The flush under way."""

    flush_id: str
    staged: Staged
    is_sealed: bool = True
    """False: early shards of a set that is still being written."""
    started_mono_s: float
    bytes_before: int = 0
    """Of the set, that this flush need not send: stored earlier, or referenced."""
    bytes_sent: int = 0
    sampled_mono_s: float
    """Until when, and up to which byte sent, its speed has gone into the bandwidth."""
    sampled_bytes: int = 0
    is_sampled: bool = False

    @property
    def bytes_unsent(self) -> int:
        """What the wire still has to do."""
        return max(0, self.staged.size_bytes - self.bytes_before - self.bytes_sent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A set whose shards are all stored, and whose manifest is not known to be."""

    flush_id: str
    staged: Staged
    shards: tuple[StoredShard, ...]
    is_asked: bool
    """A CommitManifest is out and has not been answered."""


@dataclass(frozen=True, slots=True)
class Incomplete:
    """This VM's parts of checkpoints are committed, those of other VMs are not known to be."""

    refs: tuple[CommitRef, ...]
    """Newest first; the other VMs may skip some of them."""
    nodes: int
    look_mono_s: float
    """Not to be looked for before."""
    wait_s: float
    committed: int = 1
    """Number of VMs whose part of the newest one is committed."""
    is_asked: bool = False
    """A CheckComplete is out and has not been answered."""


@dataclass(frozen=True, slots=True)
class Finishing:
    """Another start of the job is about to begin; first, what was sealed by then is committed."""

    job_start_id: str
    asked_mono_s: float
    by_mono_s: float
    """Not waited for any longer."""
    known: frozenset[CheckpointId] | None = None
    """Sets that the first scan since has found; None before it.  Others are of the new start."""
    is_done: bool = False


@dataclass(frozen=True, slots=True)
class FailedSaves:
    """Checkpoints that the trainer could not write since the daemon started: how many, and the last one."""

    count: int = 0
    request_id: str = ""
    """Empty for a checkpoint that the trainer planned itself."""
    step: int | None = None
    rank: int | None = None
    """The first that reported it."""
    reason: str = ""
    mono_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DroppedSets:
    """Sealed sets that were deleted unsent since the daemon started, because newer ones supersede them."""

    count: int = 0
    step: int | None = None
    """Of the newest one."""
    mono_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRequest:
    """A checkpoint request to the trainer, of an evacuation or periodic, and how far it has come."""

    request_id: str
    reason: str
    is_periodic: bool = False
    by_signal: bool = False
    is_urgent: bool = True
    """False for a precaution and a periodic checkpoint: training does not stop for them."""
    asked_mono_s: float
    agree_by_mono_s: float
    """Ranks that have not all accepted by then do not agree.  A periodic request ends then."""
    ranks: frozenset[int] = frozenset()
    """Ranks that got the request."""
    accepted: Mapping[int, int] = field(default_factory=dict)
    """Rank to the last step that it had completed."""
    target: int | None = None
    known: frozenset[CheckpointId] = frozenset()
    """Sets that were sealed before the request: none of them answers it."""
    from_step: int = -1
    """Newest step that the ranks had reported when they were asked: an older one is no answer.  -1 for a
    request of an earlier life of the daemon, whose answer they may repeat."""
    at_step: int = -1
    """Newest step that any rank had reported by then."""
    reported_step: int | None = None
    """A rank reported that it sealed this step for the request."""
    sealed: CheckpointId | None = None
    """The set that answers the request, once a scan has found it."""
    newer: CheckpointId | None = None
    """Oldest set of a step after the request, whether it answers the request or not."""
    lost_mono_s: float | None = None
    """When a rank's process ended; a scan that began later decides whether it had sealed."""
    failure: str = ""
    failed_mono_s: float = 0.0
    rescan_mono_s: float = 0.0
    """When the last scan for early shards was ordered."""
    too_late_mono_s: float | None = None
    """Since when, without a break, the set could not be stored in time by the numbers."""

    @property
    def is_waiting(self) -> bool:
        return self.sealed is None and not self.failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Evacuation:
    """What happens between a notice and its verdict."""

    id: str
    reason: str
    opened_mono_s: float
    deadline_mono_s: float
    """Only ever moves earlier, but for what a source had to assume and has learned."""
    plan: Plan
    is_precaution: bool = False
    """Because of word that may not come true, or not for long: a checkpoint more, and no verdict."""
    is_resumed: bool = False
    """An earlier life of the daemon had it open: the trainer may have answered its request already."""
    identities: frozenset[str] = frozenset()
    """Of the notices that it answers."""
    newest: CheckpointId | None = None
    """Newest sealed set that was seen since, or at, the opening, whatever became of it."""
    request: CheckpointRequest | None = None
    """The newest one."""
    requests: int = 0
    """Number of requests so far; each has another id."""
    verdict: Verdict | None = None
    verdict_commit: CommitRef | None = None
    part_reported: CommitRef | None = None
    """A farewell names this VM's part of that checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Concluded:
    """The newest verdict, which is remembered after its evacuation has ended."""

    evacuation_id: str
    verdict: Verdict
    reason: str
    commit: CommitRef | None
    mono_s: float
    notices: frozenset[str]
    """Identities of the notices that it answers, repeated ones included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    settings: Settings
    sources: Mapping[str, SourceStatus] = field(default_factory=dict)
    notices: Mapping[str, Notice] = field(default_factory=dict)
    """Live notices: by their source, which shows one at a time, or by identity if given by hand."""
    rates_mono_s: Mapping[str, float] = field(default_factory=dict)
    """By source: until when its evacuations so far use up its rate; see :mod:`swansongd.core.notices`."""
    held: frozenset[str] = frozenset()
    """Sources whose next evacuation waits for that rate."""
    concluded: tuple[str, ...] = ()
    """Identities of notices that the VM has outlived; they start nothing any more."""
    prepared: tuple[str, ...] = ()
    """Identities of notices for which a precaution was taken, or was not worth it."""
    precaution_mono_s: float | None = None
    """When the last one was."""
    trainers: tuple[TrainerView, ...] = ()
    ranks_refused: int = 0
    """How often a process was turned away because another one has its rank."""
    refused_why: str = ""
    """The last reason."""
    refused_mono_s: float = 0.0
    """When that was."""
    generation: int | None = None
    fenced_by: int | None = None
    first_scan_mono_s: float | None = None
    """When the first scan of this life began; None before."""
    scanned_mono_s: float | None = None
    """When the newest walk over staging began; None before the first."""
    staged: tuple[Staged, ...] = ()
    pending: tuple[str, ...] = ()
    growing: tuple[Staged, ...] = ()
    """Sets that are being written, with the files in them that are final."""
    stored_bytes: Mapping[CheckpointId, int] = field(default_factory=dict)
    """How many bytes of a set are stored, by this flush or an earlier one."""
    rejected: frozenset[tuple[str, str]] = frozenset()
    """(directory, reason) of what claims to be sealed and is not sound; each is logged once."""
    inherited: frozenset[CheckpointId] = frozenset()
    """Sets that were in staging at the first scan, settled or not: sealed under ``settings.sealed_under``."""
    seen: Mapping[CheckpointId, float] = field(default_factory=dict)
    """When the scan began that first found each set."""
    unusable: frozenset[CheckpointId] = frozenset()
    """Sets that changed, could not be read, lost a conflict, were dropped, or are of an abandoned line."""
    dropped: DroppedSets = DroppedSets()
    abandoned: frozenset[CheckpointId] = frozenset()
    """Sets of states from which training did not continue: never committed, never resumed from."""
    starts: tuple[str, ...] = ()
    """Starts of trainers that joined, the newest last."""
    closed_starts: tuple[str, ...] = ()
    """Those whose line was left: what they seal is abandoned."""
    has_aside: bool = False
    """Sets were moved aside, for the next commit to delete."""
    must_claim: bool = False
    """Training left the line of states before a generation was claimed: the claim needs a successor."""
    owes_checkpoint: bool = False
    """Training started behind the newest commit: only a commit of this generation takes its place."""
    flight: Flight | None = None
    stored: tuple[Stored, ...] = ()
    last_commit: CommitRef | None = None
    """Newest commit of the run that this daemon knows of, of whatever generation.  Over several VMs
    perhaps this VM's part of it only."""
    last_complete: CommitRef | None = None
    """Newest one that is whole: all its VMs have committed their parts."""
    incomplete: Incomplete | None = None
    job_start_id: str = ""
    """Which start of a job over several VMs the trainers are of."""
    finishing: Finishing | None = None
    """The start that comes next."""
    overtaken_by: int | None = None
    """Over several VMs: the newer generation that the run continues under, while this VM has none."""
    last_commit_mono_s: float | None = None
    """When ``last_complete`` was seen to be whole; None for one that this daemon found at its start."""
    last_commit_seen_mono_s: float | None = None
    """When the scan began that first found its set; None for one that an earlier life committed."""
    found_commit: CommitRef | None = None
    """Newest commit that a claim found, once its manifest was read."""
    found_commit_mono_s: float = 0.0
    """When it was created, by the wall clocks of two VMs: for status only."""
    retry_mono_s: float = 0.0
    """After a failure of the store: not before this instant."""
    failures: int = 0
    flushes: int = 0
    bandwidth_bytes_per_s: float | None = None
    signal_save_s: float | None = None
    """From the last signal to the sealed set that it led to, settling included."""
    history: History = field(default_factory=History)
    periodic: CheckpointRequest | None = None
    """The periodic request that is not answered yet."""
    periodic_mono_s: float | None = None
    """When one was last asked for."""
    saved_mono_s: float | None = None
    """When a set was last seen to be sealed, of whatever kind."""
    joined_mono_s: float | None = None
    """When the first of the ranks that are here came."""
    failed_saves: FailedSaves = FailedSaves()
    stalled: frozenset[int] = frozenset()
    """Connections of ranks that have come to a halt."""
    healthy_commit: CommitRef | None = None
    """Newest commit of this generation whose loss is finite."""
    evacuation: Evacuation | None = None
    claim_due: ClaimGeneration | JoinGeneration | None = None
    """A claim that is to be made as soon as the rate of claims allows."""
    claims_mono_s: tuple[float, ...] = ()
    """When the last claims were ordered."""
    peers_mono_s: tuple[float, ...] = ()
    """When the last requests of other VMs were taken for notices."""
    opened: tuple[str, ...] = ()
    """Ids of the last evacuations."""
    evacuations: int = 0
    """How many were opened so far."""
    last_verdict: Concluded | None = None
    is_leaving: bool = False

    @property
    def phase(self) -> Phase | Verdict:
        """Derived, so that it cannot disagree with the facts."""
        if self.newer_generation is not None:
            return Phase.FENCED
        evacuation = self.evacuation
        if evacuation is None or evacuation.is_precaution:
            is_armed = any(n.identity not in self.concluded for n in self.notices.values())
            return Phase.ARMED if is_armed else Phase.IDLE
        request = evacuation.request
        if request is not None and request.is_waiting and evacuation.verdict is None:
            return Phase.CHECKPOINTING
        if self.flight is not None:
            return Phase.FLUSHING
        if self.stored:
            return Phase.COMMITTING
        if evacuation.verdict is None and self.incomplete is not None:
            return Phase.WAITING_FOR_PEERS
        return evacuation.verdict or Phase.FLUSHING

    @property
    def newer_generation(self) -> int | None:
        """The generation that has taken the run over, while this VM is fenced."""
        return self.fenced_by if self.fenced_by is not None else self.overtaken_by

    @property
    def connected(self) -> tuple[TrainerView, ...]:
        return tuple(trainer for trainer in self.trainers if trainer.is_connected)

    @property
    def pinned(self) -> Staged | None:
        """The newest healthy set, while all newer ones are not: it is committed, and kept, all the same."""
        usable = (s for s in self.staged if s.id not in self.unusable | self.inherited)
        newest_first = sorted(usable, key=lambda staged: staged.id, reverse=True)
        if not newest_first or is_healthy(newest_first[0].health) is not False:
            return None
        return next((s for s in newest_first if is_healthy(s.health)), None)

    @property
    def uncommitted(self) -> tuple[Staged, ...]:
        """Sealed sets that a commit should still come of, newest first."""
        pinned = self.pinned
        kept = (
            pinned.id
            if pinned is not None
            and (self.healthy_commit is None or self.healthy_commit.step < pinned.id.step)
            else None
        )
        wanted = (
            s
            for s in self.staged
            if s.id not in self.unusable and (s.id == kept or not self.is_covered(s.id))
        )
        return tuple(sorted(wanted, key=lambda staged: staged.id, reverse=True))

    def is_covered(self, checkpoint: CheckpointId) -> bool:
        """Whether a commit as new, or newer, stands in the order of readers; this VM's part is enough."""
        return self._covers(self.last_commit, checkpoint)

    def is_whole(self, checkpoint: CheckpointId) -> bool:
        """Whether a commit as new, or newer, stands in the order of readers, with the parts of all VMs."""
        return self._covers(self.last_complete, checkpoint)

    def _covers(self, last: CommitRef | None, checkpoint: CheckpointId) -> bool:
        if last is None:
            return False
        ref = self.ref_of(checkpoint)
        return ref is not None and ref <= last

    def ref_of(self, checkpoint: CheckpointId) -> CommitRef | None:
        """Where a set in staging stands in the line of states; None before a generation is claimed.

        A set of an earlier life whose generation is unknown is compared with commits by its step alone.
        """
        generation = self.generation
        if checkpoint in self.inherited:
            generation = self.settings.sealed_under
            if generation is None and self.last_commit is not None:
                generation = self.last_commit.generation
        return None if generation is None else CommitRef(generation, checkpoint.step)

    @property
    def part(self) -> Part | None:
        """The newest checkpoint of which this VM's part is committed, as long as it is not whole."""
        incomplete = self.incomplete
        if incomplete is None:
            return None
        return Part(incomplete.refs[0], incomplete.nodes, incomplete.committed)

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Sealed sets with bytes that are still worth storing: none that is older than a stored one."""
        newest_stored = max((item.staged.id for item in self.stored), default=None)
        result = []
        pinned, stored = self.pinned, {item.staged.id for item in self.stored}
        for staged in self.uncommitted:
            is_pinned = staged == pinned and staged.id not in stored
            if newest_stored is None or staged.id > newest_stored or is_pinned:
                left = max(0, staged.size_bytes - self.stored_bytes.get(staged.id, 0))
                result.append(Candidate(id=staged.id, bytes_left=left))
        return tuple(result)

    @property
    def early(self) -> Staged | None:
        """The growing set that answers an urgent request, once a file of it is final."""
        evacuation = self.evacuation
        request = None if evacuation is None or evacuation.is_precaution else evacuation.request
        if request is None or not request.is_waiting:
            return None
        answering = (
            staged
            for staged in self.growing
            if (staged.request_id == request.request_id or staged.id.step == request.target)
            and staged.files
        )
        return max(answering, key=lambda staged: staged.id, default=None)

    @property
    def bytes_to_come(self) -> int:
        """How much must still be sent of the set that is waited for; 0 when nobody knows its size."""
        size_bytes = self.measured.save_bytes or 0
        early = self.early
        if early is None:
            return size_bytes
        return max(0, max(size_bytes, early.size_bytes) - self.stored_bytes.get(early.id, 0))

    @property
    def answer(self) -> CheckpointId | None:
        """The set that answers the request of this evacuation, once it is sealed and while it is sound."""
        request = self.evacuation.request if self.evacuation is not None else None
        return None if request is None or request.sealed in self.unusable else request.sealed

    @property
    def newer(self) -> CheckpointId | None:
        """Over several VMs: a set of a step after a request that failed is as good as its answer."""
        request = self.evacuation.request if self.evacuation is not None else None
        if request is None or not (request.failure and self.settings.several_vms):
            return None
        return None if request.newer in self.unusable else request.newer

    @property
    def is_answered(self) -> bool:
        """Whether a checkpoint that was taken after the request stands, with the parts of all VMs.

        On one VM, a commit of a later step from before the request is one of another line.
        """
        evacuation, last = self.evacuation, self.last_complete
        if evacuation is None or evacuation.request is None or last is None:
            return False
        answers = [id_ for id_ in (self.answer, self.newer) if id_ is not None]
        if self.settings.several_vms:  # each start of the job has a generation of its own
            return any(self.is_whole(id_) for id_ in answers)
        seen_mono_s = self.last_commit_seen_mono_s
        is_newer = seen_mono_s is not None and seen_mono_s >= evacuation.request.asked_mono_s
        return any(self.is_whole(id_) and (is_newer or last.step == id_.step) for id_ in answers)

    @property
    def spans_vms(self) -> bool:
        """Whether the trainers have ranks on other VMs, with whom they agree by themselves."""
        return any(trainer.nodes > 1 for trainer in self.trainers)

    @property
    def local_world_size(self) -> int:
        """How many ranks this VM has, connected or not, as they say themselves."""
        return max((trainer.local_world_size for trainer in self.trainers), default=1)

    @property
    def measured(self) -> Measured:
        """The slowest rank decides how long a save takes; the newest set tells how large one is."""
        save_s = [t.save_s for t in self.trainers if t.save_s is not None]
        if not self.trainers and self.signal_save_s is not None:
            save_s = [self.signal_save_s]
        newest = max((s for s in self.staged), key=lambda s: s.id, default=None)
        reported = [t.save_bytes for t in self.connected if t.save_bytes is not None]
        return Measured(
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s,
            save_s=max(save_s, default=None),
            save_bytes=newest.size_bytes if newest else (sum(reported) if reported else None),
        )

    @property
    def lead_s(self) -> float:
        """How long before a known end the last checkpoint is taken."""
        return max(SCHEDULED_LEAD_S, 2 * take_s(self.measured) + self.settings.reserve_s)

    def urgent_notices(self, now_mono_s: float) -> tuple[Notice, ...]:
        """Live notices that call for an evacuation: the most severe first, of equals the earliest.

        One that is scheduled calls for it when its time comes near, and goes on to: what was measured
        may shorten the lead meanwhile.
        """
        evacuation = self.evacuation
        is_open = evacuation is not None and not evacuation.is_precaution
        answered = evacuation.identities if evacuation is not None and is_open else frozenset()
        lead_s = self.lead_s

        def is_urgent(notice: Notice) -> bool:
            if notice.severity is Severity.SCHEDULED:
                is_near = notice.deadline_mono_s - now_mono_s <= lead_s
                return is_near or notice.identity in answered
            return notice.severity >= Severity.IMMINENT

        live = (
            notice
            for notice in self.notices.values()
            if notice.identity not in self.concluded and is_urgent(notice)
        )
        return tuple(sorted(live, key=lambda n: (-n.severity, n.deadline_mono_s)))
