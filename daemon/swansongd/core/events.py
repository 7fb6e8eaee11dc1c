# SPDX-License-Identifier: Apache-2.0
"""The input of the decision loop (events) and its output (actions).

Frozen values only.  Threads post events to the inbox.  :func:`swansongd.core.machine.step` turns each into a
new state and a list of actions.  :mod:`swansongd.service.service` executes the actions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from swansong.protocol import FromDaemon
from swansong_bucket.errors import SwansongError
from swansong_bucket.loss_records import Conclusion
from swansong_bucket.model import (
    UNKNOWN_PARENT,
    CommitRef,
    GpuStatus,
    Measures,
    Notice,
    Parent,
    SourceStatus,
    Staged,
    StoredShard,
    TrainerView,
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


@dataclass(frozen=True, slots=True)
class GpusRead:
    """The health of all GPUs of this VM.  Posted when it changes."""

    gpus: tuple[GpuStatus, ...]
    log_number: int | None = None
    """Number of the last record of the kernel log that they contain; None if it is not read."""


# ---------------------------------------------------------------- events: trainers


class FromTrainer:
    """A message of a trainer, or the end of its connection: unlimited in number, and untrusted."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class TrainerJoined(FromTrainer):
    trainer: TrainerView


@dataclass(frozen=True, slots=True)
class TrainerLeft(FromTrainer):
    """A rank's connection ended.  ``exited``: its process has ended too, and will not reconnect."""

    connection: int
    exited: bool
    reason: str
    is_goodbye: bool = False
    """The rank said goodbye: the step that it has reported is its last one."""


@dataclass(frozen=True, slots=True)
class TrainerProgress(FromTrainer, Measures):
    connection: int
    step: int
    start_id: str = ""
    """Not empty when training starts, or starts again, from ``step``."""
    parent: Parent = UNKNOWN_PARENT
    """With ``start_id``: what this start has loaded."""


@dataclass(frozen=True, slots=True)
class StartBegun(FromTrainer):
    """A rank belongs to this start, which begins now, or begins over after a checkpoint that could not be
    loaded."""

    connection: int
    start_id: str


@dataclass(frozen=True, slots=True)
class ProcessFound:
    """The process of a trainer without hooks; each process is a start of its own.  Posted when it changes."""

    start_id: str
    """Empty while no process runs."""
    pid: int = 0
    started_wall_ns: int = 0
    """Start of the process, by the clock of file times."""


@dataclass(frozen=True, slots=True)
class RolledBack:
    """The trainer rolls back to this checkpoint of the newest start: its later sets are not healthy."""

    step: int


@dataclass(frozen=True, slots=True)
class CommitSkipped:
    """A restore on this VM could not use this commit: it is damaged, for example."""

    ref: CommitRef


@dataclass(frozen=True, slots=True)
class RestoreAsked(FromTrainer):
    """A rank, or ``swansong restore``, asked for the checkpoint to resume from."""

    start_id: str = ""
    """The start of the rank, which loads nothing and trains nothing before it has the answer."""


@dataclass(frozen=True, slots=True)
class TrainerAccepted(FromTrainer):
    connection: int
    request_id: str
    step: int


@dataclass(frozen=True, slots=True)
class TrainerAgreed(FromTrainer):
    """The ranks of all VMs of the job have agreed on the step at which they save."""

    request_id: str
    step: int


@dataclass(frozen=True, slots=True)
class PeerRequested(FromTrainer):
    """The daemon of another VM of the job requested a checkpoint: that VM will be terminated."""

    request_id: str
    reason: str
    seconds_left: float


@dataclass(frozen=True, slots=True)
class RequestAsked(FromTrainer):
    """A rank got SIGTERM after this step, and asks for a last checkpoint."""

    connection: int
    at_step: int


@dataclass(frozen=True, slots=True)
class FinishAsked(FromTrainer):
    """This start of a job over several VMs is about to begin, and waits for the commits of earlier ones."""

    start_id: str
    connection: int = 0
    """The rank that asks; 0 if it is unknown."""


@dataclass(frozen=True, slots=True)
class TrainerSealed(FromTrainer):
    """A rank reports that a checkpoint has its sealed name.  The scan that follows decides."""

    connection: int
    request_id: str
    step: int
    save_s: float
    size_bytes: int


@dataclass(frozen=True, slots=True)
class TrainerFailed(FromTrainer):
    """A rank failed at a checkpoint, or declined the request for one."""

    connection: int
    request_id: str
    """Empty for a checkpoint of the trainer's own schedule."""
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
    """The signal was not sent: the process does not exist, or the signal would kill it."""

    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class SignalledExited:
    """The process that got the signal has ended."""

    request_id: str
    pid: int


# ---------------------------------------------------------------- events: staging, flush, commit


@dataclass(frozen=True, slots=True)
class Scanned:
    """One scan of staging: all sealed sets that are sound."""

    started_mono_s: float
    staged: tuple[Staged, ...]
    pending: tuple[str, ...] = ()
    """Directories of sets that are being written or have not settled yet."""
    growing: tuple[Staged, ...] = ()
    """Sets of our hooks that are being written, each with its final files."""
    rejected: tuple[tuple[str, str], ...] = ()
    """(directory, reason) of sealed sets that are not sound."""


@dataclass(frozen=True, slots=True)
class RunRead:
    """The newest whole commit in the store, as this daemon found it at its start."""

    newest: CommitRef | None
    newest_start: str = ""
    """Id of the start that owns the generation of ``newest``; empty if its claim cannot be read."""
    is_sound: bool = True
    """False if a GPU of one of several VMs had failed before ``newest`` was sealed there."""


@dataclass(frozen=True, slots=True)
class PredecessorFound:
    """A look at the bucket: another VM that holds the newest generation may still train."""

    looked_mono_s: float
    """When the look began."""
    generation: int = 0
    """0 if there is no such VM, if it has ended, or if nothing is known of its end."""
    left_s: float = 0.0
    """For this long at most."""
    is_leaving: bool = True
    """False if its notice was withdrawn."""
    newest: CommitRef | None = None
    """The newest whole commit."""


@dataclass(frozen=True, slots=True)
class PredecessorDenied:
    """No other VM is awaited any more."""

    reason: str


@dataclass(frozen=True, slots=True)
class GenerationClaimed:
    """This start has a generation, claimed now or earlier by any of its VMs."""

    start_id: str
    generation: int
    newest: CommitRef | None
    """Newest whole commit in the store, of any generation, listed after the claim."""
    newest_start: str = ""
    """See RunRead."""
    is_sound: bool = True
    """See RunRead."""
    is_found: bool = False
    """It was claimed before this VM asked: a start without a generation may be newer."""


@dataclass(frozen=True, slots=True)
class PaceRead:
    """The figures of :class:`swansongd.core.pace.Pace` in the newest commit of the run, from its manifest."""

    figures: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class HistoryRead:
    """The interruptions of the run's earlier VMs, from the bucket."""

    observed_s: float
    uncovered: int


@dataclass(frozen=True, slots=True)
class FlushProgress:
    flush_id: str
    bytes_stored: int
    """Bytes of the set that need not be sent any more: stored by any flush, or referenced."""
    bytes_sent: int = 0
    """Bytes of this flush, which measure the bandwidth.  They count window by window as they are sent, and
    are subtracted when they must be sent again.  Whole chunks would be too coarse: parallel chunks
    finish in bursts, and seconds without a finished chunk would look like an idle link."""
    bytes_compared: int = 0
    """Bytes that were only read: the store has them already."""


@dataclass(frozen=True, slots=True)
class Flushed:
    """All shards of the set are stored, and its files did not change meanwhile."""

    flush_id: str
    shards: tuple[StoredShard, ...]
    bytes_referenced: int = 0
    """Bytes that were not sent because an earlier set has stored them under the same path."""
    bytes_sent: int | None = None
    """Bytes of this flush; None: all that were not known to be stored before."""


@dataclass(frozen=True, slots=True)
class FlushFailed:
    """``void``: the set itself is unusable (a file changed, disappeared, is unreadable).

    ``kind``: of the error; unlike the reason, it contains no key of an object.
    """

    flush_id: str
    reason: str
    void: bool
    kind: str = SwansongError.kind


@dataclass(frozen=True, slots=True)
class CommitDone:
    flush_id: str
    ref: CommitRef


@dataclass(frozen=True, slots=True)
class PartsCounted:
    """The answer to CheckComplete, also when the store could not be read."""

    newest: CommitRef
    """That of the question."""
    committed: int
    """Number of VMs whose part of ``newest`` is committed; 0 if unknown."""
    whole: CommitRef | None
    """The newest checkpoint of which all VMs have committed their parts."""
    is_sound: bool = True
    """False if a GPU of one of these VMs had failed before ``whole`` was sealed there."""


@dataclass(frozen=True, slots=True)
class CommitFailed:
    """``conflict``: a retry is useless.  Another set is committed under this generation and step, or no
    reader would accept a manifest of this set.  ``is_obsolete``: the set references objects of a commit that
    is not the newest one any more, and must be flushed again.  ``kind``: of the error."""

    flush_id: str
    reason: str
    conflict: bool
    is_obsolete: bool = False
    kind: str = SwansongError.kind


@dataclass(frozen=True, slots=True)
class FenceFound:
    """The store shows that another VM has taken the run over."""

    generation: int
    """Newer than ours, or the same number; any number with ``in_mirror``."""
    is_same_number: bool = False
    """Our claim was deleted, and another VM has claimed its number."""
    in_mirror: bool = False
    """The mirror has this claim, and the store does not: an operator promoted the mirror."""
    start_id: str = ""
    """The start whose claim was refused for it; empty if it was found otherwise."""

    def is_news(self, newest_known: int) -> bool:
        """Whether it fences a VM whose newest known generation is this one."""
        return self.in_mirror or self.generation >= newest_known + (not self.is_same_number)


@dataclass(frozen=True, slots=True)
class LinkShared:
    """Another daemon of this VM started or stopped sending bytes that its verdict waits for."""

    is_needed: bool


@dataclass(frozen=True, slots=True)
class WokeUp:
    """The VM was suspended for ``slept_s``, while the monotonic clock stood still."""

    slept_s: float


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The daemon is to stop or restart: it ends quickly, without effect on the trainer."""

    reason: str
    code: int = 0
    """The exit code."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    NoticeRaised | NoticeWithdrawn | SourceChanged | GpusRead
    | TrainerJoined | TrainerLeft | TrainerProgress | TrainerAccepted | TrainerAgreed
    | TrainerSealed | TrainerFailed | PeerRequested | RequestAsked | FinishAsked | StartBegun | ProcessFound
    | RestoreAsked | CommitSkipped | RolledBack | RunRead | PredecessorFound | PredecessorDenied
    | PaceRead | HistoryRead
    | SignalSent | SignalRefused | SignalledExited
    | Scanned | GenerationClaimed | FlushProgress | Flushed | FlushFailed
    | CommitDone | PartsCounted | CommitFailed | FenceFound | LinkShared | WokeUp | StopRequested
    | Tick
)  # fmt: skip

# ---------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class Send:
    """Send this message to trainers."""

    message: FromDaemon
    connections: tuple[int, ...] | None = None
    """None: all."""


@dataclass(frozen=True, slots=True)
class SignalTrainer:
    """Send the configured signal to the trainer process, if the process catches the signal."""

    request_id: str


@dataclass(frozen=True, slots=True)
class StartFlush:
    """Store the set's shards.  Replaces the flush in flight.

    Bytes of the set that an earlier flush has stored are not sent again.
    """

    flush_id: str
    staged: Staged
    generation: int
    is_sealed: bool = True
    """False: the set is still being written.  The named files are final, and more will follow: store them and
    report progress, without Flushed at the end."""


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
    pace: Mapping[str, float] = field(default_factory=dict)
    """Figures for the first plan of the next VM; see :mod:`swansongd.core.pace`."""


@dataclass(frozen=True, slots=True)
class ClaimGeneration:
    """Claim the next generation for this start, or share the one that it has already."""

    start_id: str
    nodes: int = 1
    """Number of VMs of the job."""
    process_ns: int = 0
    """For the record, as ``began_ticks``; see :class:`~swansong_bucket.model.Start`."""
    began_ticks: int = 0
    is_live: bool = True
    """False for a start that is known from its sets only: it may have claimed long ago."""
    later: tuple[str, ...] = ()
    """For such a start: the starts that follow it on this VM.  One that holds a claim has overtaken it."""


@dataclass(frozen=True, slots=True)
class WithdrawClaim:
    """End the retries of the last ClaimGeneration."""


@dataclass(frozen=True, slots=True)
class CheckComplete:
    """Count the VMs whose parts are committed; always answered with PartsCounted."""

    newest: CommitRef
    """The newest checkpoint of which this VM's part is committed."""
    nodes: int
    after: CommitRef | None = None
    """The newest checkpoint that is known to be whole."""


@dataclass(frozen=True, slots=True)
class CheckFence:
    """Check whether a newer generation has been claimed."""


@dataclass(frozen=True, slots=True)
class Rescan:
    """Scan staging now."""


@dataclass(frozen=True, slots=True)
class SetAside:
    """Hide local sets of an abandoned line from trainers; the next Prune deletes them."""

    directories: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Prune:
    """Delete local sets that a commit made dispensable, and those that were set aside."""

    directories: tuple[str, ...]
    keeps_aside: bool = False
    """Keep the sets that were set aside: no commit has replaced them."""


@dataclass(frozen=True, slots=True)
class Mark:
    """One line of an evacuation's timeline and of the log."""

    evacuation_id: str
    phase: str
    """``notice``, ``request``, ``accepted``, ``sealed``, ``flush``, ``flushed``, ``committed`` ..."""
    facts: tuple[tuple[str, object], ...] = ()


@dataclass(frozen=True, slots=True)
class Conclude(Conclusion):
    """The evacuation has a verdict: write the farewell and log it."""

    is_final: bool = True
    """False while other VMs may still commit their parts in time: only the farewell is written."""
    mono_s: float = 0.0
    notices: frozenset[str] = frozenset()
    """Identities of the notices that a final verdict answers, repeated ones included."""


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
    Send | SignalTrainer
    | StartFlush | CancelFlush | CommitManifest | ClaimGeneration | WithdrawClaim
    | CheckComplete | CheckFence | Rescan
    | SetAside | Prune | Mark | Conclude | Log | Exit
)  # fmt: skip
