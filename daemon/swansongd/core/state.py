# SPDX-License-Identifier: Apache-2.0
"""All that the decision loop knows.  One frozen value; :mod:`swansongd.core.machine` replaces it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from swansongd.core.planner import Candidate, Measured, Plan, take_s
from swansongd.model import (
    CheckpointId,
    CommitRef,
    Notice,
    Severity,
    SourceStatus,
    Staged,
    StoredShard,
    TrainerView,
    Verdict,
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
    FENCED = "FENCED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The part of the configuration that decisions need."""

    reserve_s: float
    signals_trainer: bool
    """A signal and a process to send it to are configured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """The flush under way."""

    flush_id: str
    staged: Staged
    started_mono_s: float
    bytes_stored: int = 0
    sampled_mono_s: float
    """Until when, and up to which byte, its speed has gone into the bandwidth."""
    sampled_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A set whose shards are all stored, and whose manifest is not known to be."""

    flush_id: str
    staged: Staged
    shards: tuple[StoredShard, ...]
    is_asked: bool
    """A CommitManifest is out and has not been answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A checkpoint request to the trainer, and how far it has come."""

    request_id: str
    by_signal: bool
    asked_mono_s: float
    agree_by_mono_s: float
    known: frozenset[CheckpointId]
    """Sets that were sealed before the request: none of them answers it."""
    ranks: frozenset[int] = frozenset()
    accepted: Mapping[int, int] = field(default_factory=dict)
    """Rank to the last step that it had completed."""
    target: int | None = None
    claimed_step: int | None = None
    """A rank says that it has sealed this step for the request."""
    sealed: CheckpointId | None = None
    """The scan has seen it."""
    lost_mono_s: float | None = None
    """When a rank was seen to be gone; a scan that began later decides whether it had sealed."""
    failure: str = ""

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
    identities: frozenset[str] = frozenset()
    """Of the notices that it answers."""
    newest: CheckpointId | None = None
    """Newest sealed set that was seen since, or at, the opening, whatever became of it."""
    ask: Ask | None = None
    verdict: Verdict | None = None
    verdict_commit: CommitRef | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    settings: Settings
    sources: Mapping[str, SourceStatus] = field(default_factory=dict)
    notices: Mapping[str, Notice] = field(default_factory=dict)
    """Live notices by their source."""
    concluded: tuple[str, ...] = ()
    """Identities of notices that the VM has outlived; they start nothing any more."""
    prepared: tuple[str, ...] = ()
    """Identities of notices for which a precaution was taken, or was not worth it."""
    precaution_mono_s: float | None = None
    """When the last one was."""
    trainers: tuple[TrainerView, ...] = ()
    generation: int | None = None
    fenced_by: int | None = None
    scanned_mono_s: float | None = None
    """When the newest walk over staging began; None before the first."""
    staged: tuple[Staged, ...] = ()
    pending: tuple[str, ...] = ()
    rejected: frozenset[tuple[str, str]] = frozenset()
    """(directory, reason) of what claims to be sealed and is not sound; each is logged once."""
    inherited: frozenset[CheckpointId] = frozenset()
    """Sets that lay in staging before the generation was claimed, or at the first look into it:
    perhaps of an older lineage."""
    unusable: frozenset[CheckpointId] = frozenset()
    """Sets that changed, could not be read, or lost a conflict."""
    flight: Flight | None = None
    stored: tuple[Stored, ...] = ()
    last_commit: CommitRef | None = None
    """Newest commit of the run that this daemon knows of, of whatever generation."""
    last_commit_mono_s: float | None = None
    """When this daemon committed it; None for one that it found."""
    retry_mono_s: float = 0.0
    """After a failure of the store: not before this instant."""
    failures: int = 0
    flushes: int = 0
    bandwidth_bytes_per_s: float | None = None
    signal_save_s: float | None = None
    """From the last signal to the sealed set that it led to, settling included."""
    evacuation: Evacuation | None = None
    opened: tuple[str, ...] = ()
    """Notices, by the id that they give, for which evacuations were opened so far."""
    is_leaving: bool = False

    @property
    def phase(self) -> Phase | Verdict:
        """Derived, so that it cannot disagree with the facts."""
        if self.fenced_by is not None:
            return Phase.FENCED
        evacuation = self.evacuation
        if evacuation is None or evacuation.is_precaution:
            is_armed = any(n.identity not in self.concluded for n in self.notices.values())
            return Phase.ARMED if is_armed else Phase.IDLE
        if evacuation.ask is not None and evacuation.ask.is_waiting and evacuation.verdict is None:
            return Phase.CHECKPOINTING
        if self.flight is not None:
            return Phase.FLUSHING
        if self.stored:
            return Phase.COMMITTING
        return evacuation.verdict or Phase.FLUSHING

    @property
    def connected(self) -> tuple[TrainerView, ...]:
        return tuple(trainer for trainer in self.trainers if trainer.is_connected)

    @property
    def newest_staged(self) -> Staged | None:
        """Newest sealed set that can be used, committed or not."""
        usable = [staged for staged in self.staged if staged.id not in self.unusable]
        return max(usable, key=lambda staged: staged.id, default=None)

    @property
    def uncommitted(self) -> tuple[Staged, ...]:
        """Sealed sets that a commit should still come of, newest first."""
        wanted = (s for s in self.staged if s.id not in self.unusable and not self.is_covered(s.id))
        return tuple(sorted(wanted, key=lambda staged: staged.id, reverse=True))

    def is_covered(self, checkpoint: CheckpointId) -> bool:
        """Whether a commit as new, or newer, of the same lineage stands."""
        last = self.last_commit
        if last is None:
            return False
        same_lineage = last.generation == self.generation or checkpoint in self.inherited
        return same_lineage and checkpoint.step <= last.step

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Sealed sets with bytes that are still worth storing: none that is older than a stored one."""
        newest_stored = max((item.staged.id for item in self.stored), default=None)
        result = []
        for staged in self.uncommitted:
            if newest_stored is None or staged.id > newest_stored:
                in_flight = self.flight is not None and self.flight.staged.id == staged.id
                done = self.flight.bytes_stored if self.flight is not None and in_flight else 0
                result.append(Candidate(id=staged.id, bytes_left=staged.size_bytes - done))
        return tuple(result)

    @property
    def answer(self) -> CheckpointId | None:
        """The set that answers the request of this evacuation, once it is sealed and while it is sound."""
        ask = self.evacuation.ask if self.evacuation is not None else None
        return None if ask is None or ask.sealed in self.unusable else ask.sealed

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

    def urgent_notices(self, now_mono_s: float) -> tuple[Notice, ...]:
        """Live notices that call for an evacuation: the most severe first, of equals the earliest.

        One that is scheduled calls for it when its time comes near, and goes on to: what was measured
        may shorten the lead meanwhile.
        """
        evacuation = self.evacuation
        is_open = evacuation is not None and not evacuation.is_precaution
        answered = evacuation.identities if evacuation is not None and is_open else frozenset()
        lead_s = max(SCHEDULED_LEAD_S, 2 * take_s(self.measured) + self.settings.reserve_s)

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
