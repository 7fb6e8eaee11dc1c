# SPDX-License-Identifier: Apache-2.0
"""The commit that the ranks of a job over several VMs refuse, because it is damaged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import structlog
from swansong_bucket.model import CommitRef

from swansongd.core.state import State

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A damaged commit.  This start of the training loads neither this commit nor a newer one."""

    start_id: str
    ref: CommitRef
    reason: str


class Refusals:
    """The refusal of the newest start of the training.

    The next start tries the commit again, because an operator may have repaired it.

    Args:
        state: returns the newest state of the decision loop.
    """

    def __init__(self, state: Callable[[], State]) -> None:
        self._state = state
        self._last: Refusal | None = None

    def current(self) -> Refusal | None:
        """The refusal of the oldest commit in this start."""
        last = self._last
        return last if last is None or last.start_id == self._start_id() else None

    def add(self, ref: CommitRef, reason: str) -> bool:
        """Refuse this commit and newer ones; returns whether that is new."""
        earlier = self.current()
        if earlier is not None and earlier.ref <= ref:
            return False
        self._last = Refusal(start_id=self._start_id(), ref=ref, reason=reason)
        _log.error("commit_refused", commit=str(ref), reason=reason)
        return True

    def _start_id(self) -> str:
        start = self._state().start
        return "" if start is None else start.id
