# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint a trainer resumes from: one rule, for the hooks and for the restore unit.

Sealed sets in staging and commits are ordered alike, by generation and step.  A set in staging has the
generation under which it was, or will be, committed.
"""

from __future__ import annotations

from collections.abc import Iterable

from swansongd.core.state import State
from swansongd.model import CommitRef, Staged, is_healthy


def newest_local(state: State, newest: CommitRef | None) -> Staged | None:
    """The newest usable set in staging; None without one, and if the newest commit is newer."""
    return _newest(state, (s for s in state.staged if s.id not in state.unusable), newest)


def newest_healthy_local(state: State, before_step: int, newest: CommitRef | None) -> Staged | None:
    """The newest healthy set of an earlier step; None without one, and if that commit is newer."""
    healthy = (
        s
        for s in state.staged
        if s.id not in state.unusable and s.id.step < before_step and is_healthy(s.health)
    )
    return _newest(state, healthy, newest)


def _newest(state: State, sets: Iterable[Staged], newest: CommitRef | None) -> Staged | None:
    def place(staged: Staged) -> CommitRef:
        ref = state.ref_of(staged.id)
        if ref is None:  # its generation is unknown: compare by step
            return CommitRef(newest.generation if newest is not None else 0, staged.id.step)
        return ref

    best = max(sets, key=lambda staged: (place(staged), staged.id), default=None)
    return None if best is None or (newest is not None and place(best) < newest) else best
