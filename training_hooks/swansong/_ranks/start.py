# SPDX-License-Identifier: Apache-2.0
"""The start of the training that this rank belongs to.

A start is one launch of all ranks of the job.  Rank 0 draws its id.  The others learn it in the job's own
store: on one VM as they attach, over several VMs in the rendezvous.  Without a process group on one VM they
learn it from the daemon.  A rollback, a second restore and a script that loads an older state by itself begin
further starts in the same processes: ``<first id>~<n>``.
"""

from __future__ import annotations

import dataclasses
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from swansong._ranks.agreement import Ranks
from swansong.layout import RankManifest
from swansong.protocol import PARENT_NONE, PARENT_UNKNOWN, Begin, Message, Progress


@dataclass(frozen=True)
class Loaded:
    """The state that a start has loaded, as the fields of a message."""

    parent: str = PARENT_UNKNOWN
    parent_step: int = -1

    @classmethod
    def of(cls, manifest: RankManifest | None) -> Loaded:
        """Return the state of a checkpoint; None: the run is fresh."""
        if manifest is None:
            return cls(PARENT_NONE, 0)
        return cls(manifest.start_id, manifest.step) if manifest.start_id else cls()


class TrainingStart:
    """The id of the start, and what the start has loaded.

    Args:
        ranks: position of this process in the job.
        send: sends a message to the daemon, without blocking.
        path: of the daemon's socket, for errors.
    """

    def __init__(self, ranks: Ranks, send: Callable[[Message], object], path: str) -> None:
        self._nodes = ranks.nodes
        self._send = send
        self._path = path
        self._changed = threading.Condition()
        is_drawn_here = ranks.rank == 0 and ranks.nodes == 1
        self._first_id = ranks.start_id or (secrets.token_hex(8) if is_drawn_here else "")
        self._counted = self._number = 0
        self._begins_over = False
        self._loaded = Loaded()
        self.refusal = ""
        """Reason of the daemon's last refusal; empty after a welcome."""

    @property
    def id(self) -> str:
        """Id of the start, the same for all ranks; empty while this rank does not know it."""
        first, number = self._first_id, self._number
        return f"{first}~{number}" if first and number else first

    def fields(self) -> dict[str, Any]:
        """Return ``start_id``, ``parent`` and ``parent_step`` of a message."""
        with self._changed:
            return {"start_id": self.id, **dataclasses.asdict(self._loaded)}

    def report(self, step: int) -> Progress | None:
        """Return the report that this start trains from ``step``; None while its id is unknown."""
        fields = self.fields()
        return Progress(step, **fields) if fields["start_id"] else None

    # ------------------------------------------------------------ the id

    def learn(self, start_id: str) -> None:
        """Take the id that rank 0 has drawn; a rank keeps the first id that it has."""
        with self._changed:
            if self._first_id:
                return
            self._first_id = start_id.partition("~")[0]
            self._changed.notify_all()
        self.resend()

    def refused(self, reason: str) -> None:
        """Record why the daemon refuses this rank, which then learns no id; empty after a welcome."""
        with self._changed:
            self.refusal = reason
            self._changed.notify_all()

    def wait(self, limit_s: float) -> None:
        """Wait until the id is known.

        Raises:
            TimeoutError: the limit passed, or the daemon refuses this rank; contains cause and fix.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._first_id or self.refusal, limit_s)
            if self._first_id:
                return
            if self.refusal:
                raise TimeoutError(f"the daemon refuses this process: {self.refusal}")
            raise TimeoutError(
                f"rank 0 of this job has not connected to the daemon at {self._path} within {limit_s:.0f} s:"
                " call swansong.attach() on every rank"
            )

    # ------------------------------------------------------------ further starts

    def count(self) -> int:
        """Return the number of the next start of this process.

        A rollback that fails counts, too, so that all ranks give the same number to the next one.
        """
        self._counted += 1
        return self._counted

    def begin_next(self) -> None:
        """Begin the next start of this process."""
        self.begin(self.count())

    def begin(self, number: int) -> None:
        """Begin a further start, which has loaded nothing yet."""
        with self._changed:
            self._number, self._loaded = number, Loaded()
        self.resend()

    def loaded(self, loaded: Loaded) -> None:
        """Record what the start has loaded."""
        with self._changed:
            self._loaded = loaded

    def load_failed(self) -> None:
        """Begin over: the checkpoint that this start has asked for is not loaded, and may never be."""
        self._begins_over = True
        self.resend()

    def resend(self) -> None:
        """Send the daemon :class:`Begin`, also after a reconnect.

        On one VM the first start begins with the Hello of its ranks.
        """
        if self.id and (self._nodes > 1 or self._number or self._begins_over):
            self._send(Begin(self.id))
