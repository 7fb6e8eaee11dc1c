# SPDX-License-Identifier: Apache-2.0
"""The timeline of one evacuation: logged entry by entry, then stored in the farewell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from swansong_bucket.loss_records import EvacuationRecord, NoticeRecord
from swansong_bucket.model import DeadlineQuality, Notice

from swansongd.core.events import Mark
from swansongd.core.state import State

ENTRIES_MAX = 500
"""Entries of a timeline: a flood of messages from a trainer must not make the farewell grow without limit."""
NOTICES_MAX = 10
"""Notices that a farewell lists."""


@dataclass
class Timeline:
    """The events of an evacuation, in seconds since it began."""

    evacuation_id: str
    opened_mono_s: float
    entries: list[dict[str, object]] = field(default_factory=list)
    left_out: int = 0
    """Entries that were removed from the middle, to stay within the limit."""

    def add(self, mark: Mark, now_mono_s: float) -> dict[str, object]:
        """Append an entry, and return it for the log line."""
        at_s = round(now_mono_s - self.opened_mono_s, 3)
        entry: dict[str, object] = {"phase": mark.phase, "at_s": at_s, **dict(mark.facts)}
        self.entries.append(entry)
        if len(self.entries) > ENTRIES_MAX:
            del self.entries[ENTRIES_MAX // 2]
            self.left_out += 1
        return entry


def recorded(
    timeline: Timeline,
    state: State,
    samples: Sequence[tuple[float, int]],
    *,
    node: int,
    offset_s: float,
    is_over: bool = False,
) -> EvacuationRecord:
    """The course of the evacuation for a farewell.

    Args:
        node: of this VM, in a job over several VMs.
        offset_s: difference between the wall clock and the monotonic clock.
        is_over: the training on this VM.
    """
    evacuation = state.evacuation
    deadline_s, answered = None, frozenset[str]()
    if evacuation is not None and evacuation.id == timeline.evacuation_id:
        deadline_s = round(evacuation.deadline_mono_s - timeline.opened_mono_s, 3)
        answered = evacuation.identities
    notices = [notice for notice in state.notices.live.values() if notice.identity in answered]
    return EvacuationRecord(
        opened_wall_s=timeline.opened_mono_s + offset_s,
        deadline_s=deadline_s,
        is_assumed=bool(notices)
        and all(each.deadline_quality is DeadlineQuality.ASSUMED for each in notices),
        is_ended=is_over and is_settled(state),
        node=node,
        notices=tuple(
            NoticeRecord(notice.source, notice.kind)
            for notice in sorted(notices, key=_urgency)[:NOTICES_MAX]
        ),
        timeline=tuple(timeline.entries),
        left_out=timeline.left_out,
        samples=samples,
    )


def is_settled(state: State) -> bool:
    """Whether the evacuation has a verdict, and nothing is left that may still be committed."""
    has_verdict = state.evacuation is not None and state.evacuation.verdict is not None
    return has_verdict and not state.uncommitted


def _urgency(notice: Notice) -> tuple[int, float]:
    return -notice.severity, notice.deadline_mono_s
