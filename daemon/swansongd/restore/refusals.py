# SPDX-License-Identifier: Apache-2.0
"""The commits that the ranks of a job over several VMs refuse, because one of them is damaged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import structlog

from swansongd.core.state import State
from swansongd.model import CommitRef

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A damaged commit.  The job start loads neither this commit nor a newer one."""

    job_start_id: str
    ref: CommitRef
    reason: str


class Refusals:
    """The refusal of the present job start.

    The next job start tries the commit again, because an operator may have repaired it.

    Args:
        state: returns the newest state of the decision loop.
    """

    def __init__(self, state: Callable[[], State]) -> None:
        self._state = state
        self._last: Refusal | None = None

    def current(self) -> Refusal | None:
        """The refusal of the oldest commit in this job start."""
        last = self._last
        return last if last is None or last.job_start_id == self._state().job_start_id else None

    def add(self, ref: CommitRef, reason: str) -> bool:
        """Refuse this commit and newer ones; returns whether that is new."""
        earlier = self.current()
        if earlier is not None and earlier.ref <= ref:
            return False
        self._last = Refusal(job_start_id=self._state().job_start_id, ref=ref, reason=reason)
        _log.error("commit_refused", commit=str(ref), reason=reason)
        return True
