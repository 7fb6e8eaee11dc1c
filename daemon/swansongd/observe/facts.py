# SPDX-License-Identifier: Apache-2.0
"""Events that no decision reads.

Threads post them to the inbox of the decision loop, and observers see them in the order of all events.
"""

from __future__ import annotations

from dataclasses import dataclass

from swansong_bucket.model import CommitRef

from swansongd.core.events import Event, FromTrainer


@dataclass(frozen=True, slots=True)
class TrainerRefused(FromTrainer):
    """A process sent a hello with the rank of another living process."""

    pid: int
    reason: str


@dataclass(frozen=True, slots=True)
class DownloadStarted(FromTrainer):
    """The download of a checkpoint began: a prefetch, or the answer to a trainer."""


@dataclass(frozen=True, slots=True)
class DownloadEnded(FromTrainer):
    """The download ended; the checkpoint lies in a directory, unless there is an error."""

    bytes_fetched: int = 0
    """Bytes that came from the store."""
    bytes_linked: int = 0
    """Bytes that this machine already had."""
    error: str = ""


@dataclass(frozen=True, slots=True)
class RestoreAnswered(FromTrainer):
    """The answer was sent."""

    step: int = -1
    """-1: there is no checkpoint, the run is fresh."""
    generation: int = -1
    """Generation of the checkpoint; -1 if it is a set in staging without one."""
    error: str = ""


@dataclass(frozen=True, slots=True)
class NewestDated:
    """The age of the newest commit that the claim found, from its manifest."""

    ref: CommitRef
    age_s: float
    """By the wall clocks of two VMs."""


@dataclass(frozen=True, slots=True)
class StepsDigested(FromTrainer):
    """A rank has digested steps."""

    connection: int
    digests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StepsCompared(FromTrainer):
    """A rank has compared the steps that it repeats with the interrupted start."""

    connection: int
    differs: bool
    text: str


Fact = (
    TrainerRefused
    | DownloadStarted
    | DownloadEnded
    | RestoreAnswered
    | NewestDated
    | StepsDigested
    | StepsCompared
)
Observed = Event | Fact
