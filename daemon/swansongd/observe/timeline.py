# SPDX-License-Identifier: Apache-2.0
"""The timeline of one evacuation: logged entry by entry, then stored in the farewell."""

from __future__ import annotations

from dataclasses import dataclass, field

from swansongd.core.events import Mark

ENTRIES_MAX = 500
"""Entries of a timeline: a flood of messages from a trainer must not make the farewell grow without limit."""


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
