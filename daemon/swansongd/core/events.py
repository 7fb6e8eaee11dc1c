# SPDX-License-Identifier: Apache-2.0
"""What happens to the decision loop (events), and what it orders done (actions).

Frozen values only.  Threads post events to the inbox; :func:`swansongd.core.machine.step` turns each
into a new state and a list of actions; :mod:`swansongd.service` carries the actions out.
"""

from __future__ import annotations

from dataclasses import dataclass

from swansongd.model import (
    CheckpointId,
    CommitRef,
    Notice,
    SourceStatus,
    Staged,
    StoredShard,
    TrainerView,
    Verdict,
    VmPart,
)

# ---------------------------------------------------------------- events: sources


@dataclass(frozen=True, slots=True)
class NoticeRaised:
    notice: Notice


@dataclass(frozen=True, slots=True)
class NoticeWithdrawn:
    source: str
    reason: str


@dataclass(frozen=True, slots=True)
class SourceChanged:
    status: SourceStatus


# ---------------------------------------------------------------- events: trainers


@dataclass(frozen=True, slots=True)
class TrainerJoined:
    trainer: TrainerView


@dataclass(frozen=True, slots=True)
class TrainerRefused:
    """A process said hello as a rank that another living process has."""

    pid: int
    reason: str


@dataclass(frozen=True, slots=True)
class TrainerLeft:
    """A rank's connection ended.  ``exited``: its process is known to be gone, it will not reconnect."""

    connection: int
    exited: bool
    reason: str


@dataclass(frozen=True, slots=True)
class TrainerProgress:
    connection: int
    step: int
    save_s: float | None = None
    save_bytes: int | None = None
    snapshot_s: float | None = None
    step_s: float | None = None
    loss: float | None = None
    loss_is_finite: bool | None = None
    start_id: str = ""
    """Not empty: training starts, or starts again, from ``step``."""


@dataclass(frozen=True, slots=True)
class RolledBack:
    """The trainer goes back to this step, and was told from where."""

    step: int


@dataclass(frozen=True, slots=True)
class TrainerAccepted:
    connection: int
    request_id: str
    step: int


@dataclass(frozen=True, slots=True)
class TrainerAgreed:
    """The ranks of all VMs of the job have agreed on the step at which they save."""

    request_id: str
    step: int


@dataclass(frozen=True, slots=True)
class PeerRequested:
    """The daemon of another VM of the job has asked for a checkpoint: that VM goes away."""

    request_id: str
    reason: str
    seconds_left: float


@dataclass(frozen=True, slots=True)
class FinishAsked:
    """The trainers are of this start of a job over several VMs, which is about to begin."""

    job_start_id: str


@dataclass(frozen=True, slots=True)
class JobStarted:
    """This start of the job begins: no VM has anything of an earlier one to commit."""

    job_start_id: str


@dataclass(frozen=True, slots=True)
class TrainerSealed:
    """A rank says that a checkpoint has its sealed name.  Only the scan that follows is believed."""

    connection: int
    request_id: str
    step: int
    save_s: float
    size_bytes: int


@dataclass(frozen=True, slots=True)
class TrainerFailed:
    """A rank failed at a checkpoint, or declined the request for one."""

    connection: int
    request_id: str
    """Empty for a checkpoint that the trainer planned itself."""
    reason: str
    failed_step: int | None = None
    """None when the request was declined."""


@dataclass(frozen=True, slots=True)
class SignalSent:
    """The configured signal was delivered to a process that catches it."""

    request_id: str
    pid: int


@dataclass(frozen=True, slots=True)
class SignalRefused:
    """The signal was not sent: no such process, or it would die of it."""

    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class SignalledExited:
    """The process that got the signal is gone."""

    request_id: str
    pid: int


# ---------------------------------------------------------------- events: staging, flush, commit


@dataclass(frozen=True, slots=True)
class Scanned:
    """One walk over staging: all sealed sets that are there and sound."""

    started_mono_s: float
    staged: tuple[Staged, ...]
    pending: tuple[str, ...] = ()
    """Directories that are being written, or have not settled yet."""
    growing: tuple[Staged, ...] = ()
    """Sets of our hooks that are being written: each with those of its files that are final."""
    rejected: tuple[tuple[str, str], ...] = ()
    """(directory, reason) of what claims to be a checkpoint and is not sound."""


@dataclass(frozen=True, slots=True)
class GenerationClaimed:
    generation: int
    newest: CommitRef | None
    """Newest whole commit in the store, of whatever generation."""
    is_rollback: bool = False
    """It answers ClaimGeneration or JoinGeneration."""


@dataclass(frozen=True, slots=True)
class NewestDated:
    """The manifest of the newest commit that the claim found says when it was created."""

    ref: CommitRef
    age_s: float
    """By the wall clocks of two VMs."""


@dataclass(frozen=True, slots=True)
class HistoryRead:
    """What the bucket tells of the run's earlier VMs."""

    observed_s: float
    uncovered: int


@dataclass(frozen=True, slots=True)
class FlushProgress:
    flush_id: str
    bytes_stored: int
    """Of the set, in this flush or an earlier one, or referenced: what need not be sent any more."""
    bytes_sent: int = 0
    """In this flush: what the bandwidth is measured by.  To be counted as the bytes leave, window by
    window, and taken back when they must be sent again: parts that travel side by side end in bursts,
    and seconds without a finished part would look like a wire that stands still."""


@dataclass(frozen=True, slots=True)
class Flushed:
    """All shards of the set are stored, and none of its files changed meanwhile."""

    flush_id: str
    shards: tuple[StoredShard, ...]
    bytes_referenced: int = 0
    """Not sent: an earlier set has stored the same bytes under the same path."""
    bytes_sent: int | None = None
    """In this flush; None: whatever is not known to have been stored before."""


@dataclass(frozen=True, slots=True)
class FlushFailed:
    """``void``: the set itself is unusable (a file changed, vanished, cannot be read)."""

    flush_id: str
    reason: str
    void: bool


@dataclass(frozen=True, slots=True)
class CommitDone:
    flush_id: str
    ref: CommitRef


@dataclass(frozen=True, slots=True)
class PartsCounted:
    """It answers CheckComplete, also when the store could not be asked."""

    newest: CommitRef
    """First of the refs that were asked about."""
    committed: int
    """Number of VMs whose part of ``newest`` is committed; 0: not known."""
    whole: CommitRef | None
    """Newest of the refs of which all VMs have committed their parts."""


@dataclass(frozen=True, slots=True)
class CommitFailed:
    """``conflict``: trying again is useless.  Another set is committed under this generation and step, or no
    reader would accept a manifest of this set."""

    flush_id: str
    reason: str
    conflict: bool


@dataclass(frozen=True, slots=True)
class FenceFound:
    """The store shows that another VM has taken the run over."""

    generation: int
    """Newer than ours, or the same number."""
    is_same_number: bool = False
    """Our claim was deleted, and another VM has claimed its number."""

    def is_news(self, newest_known: int) -> bool:
        """Whether a VM that knows of this generation is fenced by it."""
        return self.generation >= newest_known + (not self.is_same_number)


@dataclass(frozen=True, slots=True)
class WokeUp:
    """The VM was suspended for so long; the monotonic clock did not run meanwhile."""

    slept_s: float


@dataclass(frozen=True, slots=True)
class StopRequested:
    """An operator stops or restarts the daemon: end quickly, disturb nobody."""

    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    NoticeRaised | NoticeWithdrawn | SourceChanged
    | TrainerJoined | TrainerRefused | TrainerLeft | TrainerProgress | TrainerAccepted | TrainerAgreed
    | TrainerSealed | TrainerFailed | PeerRequested | FinishAsked | JobStarted
    | RolledBack | NewestDated | HistoryRead | SignalSent | SignalRefused | SignalledExited
    | Scanned | GenerationClaimed | FlushProgress | Flushed | FlushFailed
    | CommitDone | PartsCounted | CommitFailed | FenceFound | WokeUp | StopRequested | Tick
)  # fmt: skip

CAUSED_BY_TRAINERS = (
    TrainerJoined, TrainerRefused, TrainerLeft, TrainerProgress, TrainerAccepted, TrainerAgreed,
    TrainerSealed, TrainerFailed, PeerRequested, FinishAsked, JobStarted,
)  # fmt: skip
"""Messages of trainers, and the ends of their connections: unlimited in number, and untrusted."""


# ---------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class AskTrainers:
    """Send the checkpoint request to these connections (idempotent by id)."""

    request_id: str
    reason: str
    deadline_mono_s: float
    connections: tuple[int, ...]
    is_urgent: bool = True
    """False for a precaution: nobody stops training for it."""


@dataclass(frozen=True, slots=True)
class SendTarget:
    request_id: str
    step: int
    connections: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SignalTrainer:
    """Signal the configured trainer process, if it catches the signal."""

    request_id: str


@dataclass(frozen=True, slots=True)
class WithdrawRequest:
    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class TellCommitted:
    ref: CommitRef
    connections: tuple[int, ...] | None = None
    """None: all."""


@dataclass(frozen=True, slots=True)
class TellFenced:
    generation: int


@dataclass(frozen=True, slots=True)
class TellFinished:
    """Nothing of earlier starts of the job is left to commit: this one may begin."""

    job_start_id: str


@dataclass(frozen=True, slots=True)
class StartFlush:
    """Store the set's shards.  Replaces whatever flush is under way.

    What was stored of the set before, under an earlier flush id, is not sent again.
    """

    flush_id: str
    staged: Staged
    generation: int
    is_sealed: bool = True
    """False: the set is still being written.  The files named here are final, more will come: store
    them, report progress, and say nothing at the end."""


@dataclass(frozen=True, slots=True)
class CancelFlush:
    flush_id: str


@dataclass(frozen=True, slots=True)
class CommitManifest:
    flush_id: str
    staged: Staged
    shards: tuple[StoredShard, ...]
    generation: int
    parent: CommitRef | None


@dataclass(frozen=True, slots=True)
class ClaimGeneration:
    """Claim the next generation for this daemon itself, unless another VM has done so."""

    after: int
    """Our generation so far."""
    abandoned: tuple[CheckpointId, ...] = ()
    """Sets in staging that are not of the new generation's line; recorded before the claim."""


@dataclass(frozen=True, slots=True)
class JoinGeneration:
    """Claim a generation for this start of the job, or take part in the one that another VM has claimed."""

    job_start_id: str
    abandoned: tuple[CheckpointId, ...] = ()
    """See ClaimGeneration."""


@dataclass(frozen=True, slots=True)
class CheckComplete:
    """Count the VMs whose parts are committed; always answered with PartsCounted."""

    refs: tuple[CommitRef, ...]
    """Newest first."""
    nodes: int


@dataclass(frozen=True, slots=True)
class CheckFence:
    """Look whether a newer generation has been claimed."""


@dataclass(frozen=True, slots=True)
class Rescan:
    """Walk over staging now."""


@dataclass(frozen=True, slots=True)
class SetAside:
    """Take local sets of an abandoned line out of the trainers' sight; the next Prune deletes them."""

    directories: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Prune:
    """Delete local sets that a commit has made dispensable, and those that were set aside."""

    directories: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Mark:
    """One line of an evacuation's timeline; also the log line of that moment."""

    evacuation_id: str
    phase: str
    """``notice``, ``request``, ``accepted``, ``sealed``, ``flush``, ``flushed``, ``committed`` ..."""
    facts: tuple[tuple[str, object], ...] = ()


@dataclass(frozen=True, slots=True)
class Conclude:
    """The evacuation has a verdict: write the farewell and log it."""

    evacuation_id: str
    verdict: Verdict
    reason: str
    commit: CommitRef | None
    """Whole: the parts of all VMs are committed."""
    slack_s: float
    part: VmPart | None = None
    """Committed by this VM, newer than ``commit``, and not whole."""
    is_final: bool = True
    """False: the other VMs may still commit their parts in time; only the farewell is written."""


@dataclass(frozen=True, slots=True)
class Log:
    """One structured log line that belongs to no evacuation."""

    level: str
    event: str
    facts: tuple[tuple[str, object], ...] = ()


@dataclass(frozen=True, slots=True)
class Exit:
    code: int
    reason: str


Action = (
    AskTrainers | SendTarget | SignalTrainer | WithdrawRequest | TellCommitted | TellFenced | TellFinished
    | StartFlush | CancelFlush | CommitManifest | ClaimGeneration | JoinGeneration
    | CheckComplete | CheckFence | Rescan
    | SetAside | Prune | Mark | Conclude | Log | Exit
)  # fmt: skip
