# SPDX-License-Identifier: Apache-2.0
"""What happens to the decision loop (events), and what it orders done (actions).

Frozen values only.  Threads post events to the inbox; :func:`swansongd.core.machine.step` turns each
into a new state and a list of actions; :mod:`swansongd.service` carries the actions out.
"""

from __future__ import annotations

from dataclasses import dataclass

from swansongd.model import (
    CommitRef,
    Notice,
    SourceStatus,
    Staged,
    StoredShard,
    TrainerView,
    Verdict,
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


@dataclass(frozen=True, slots=True)
class TrainerAccepted:
    connection: int
    request_id: str
    step: int


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
    """A rank failed at, or declined, the request."""

    connection: int
    request_id: str
    reason: str


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
    rejected: tuple[tuple[str, str], ...] = ()
    """(directory, reason) of what claims to be a checkpoint and is not sound."""


@dataclass(frozen=True, slots=True)
class GenerationClaimed:
    generation: int
    newest: CommitRef | None
    """Newest whole commit in the store, of whatever generation."""


@dataclass(frozen=True, slots=True)
class FlushProgress:
    flush_id: str
    bytes_stored: int


@dataclass(frozen=True, slots=True)
class Flushed:
    """All shards of the set are stored, and none of its files changed meanwhile."""

    flush_id: str
    shards: tuple[StoredShard, ...]


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
class CommitFailed:
    """``conflict``: another set is committed under this generation and step."""

    flush_id: str
    reason: str
    conflict: bool


@dataclass(frozen=True, slots=True)
class FenceFound:
    """The store shows a newer generation than ours."""

    generation: int


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
    | TrainerJoined | TrainerLeft | TrainerProgress | TrainerAccepted | TrainerSealed | TrainerFailed
    | SignalSent | SignalRefused | SignalledExited
    | Scanned | GenerationClaimed | FlushProgress | Flushed | FlushFailed
    | CommitDone | CommitFailed | FenceFound | WokeUp | StopRequested | Tick
)  # fmt: skip


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


@dataclass(frozen=True, slots=True)
class TellFenced:
    generation: int


@dataclass(frozen=True, slots=True)
class StartFlush:
    """Store the set's shards.  Replaces whatever flush is under way."""

    flush_id: str
    staged: Staged
    generation: int


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
class CheckFence:
    """Look whether a newer generation has been claimed."""


@dataclass(frozen=True, slots=True)
class Rescan:
    """Walk over staging now."""


@dataclass(frozen=True, slots=True)
class Prune:
    """Delete local sets that a commit has made dispensable."""

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
    """The evacuation has a verdict: write the farewell, log it, tell whoever watches."""

    evacuation_id: str
    verdict: Verdict
    reason: str
    commit: CommitRef | None
    slack_s: float


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
    AskTrainers | SendTarget | SignalTrainer | WithdrawRequest | TellCommitted | TellFenced
    | StartFlush | CancelFlush | CommitManifest | CheckFence | Rescan
    | Prune | Mark | Conclude | Log | Exit
)  # fmt: skip
