# SPDX-License-Identifier: Apache-2.0
"""The timeline of one evacuation: kept while it lasts, logged line by line, left in the store as farewell."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from swansongd.core.events import Conclude, Mark

ENTRIES_MAX = 500
"""Entries of a timeline: a trainer that keeps answering must not make the farewell grow without limit."""


@dataclass
class Timeline:
    """What happened when, in seconds since the notice was acted on."""

    evacuation_id: str
    opened_mono_s: float
    entries: list[dict[str, object]] = field(default_factory=list)
    left_out: int = 0
    """Entries that were removed again, from the middle."""

    def add(self, mark: Mark, now_mono_s: float) -> dict[str, object]:
        """Note one moment; returns it as the facts of a log line."""
        at_s = round(now_mono_s - self.opened_mono_s, 3)
        entry: dict[str, object] = {"phase": mark.phase, "at_s": at_s, **dict(mark.facts)}
        self.entries.append(entry)
        if len(self.entries) > ENTRIES_MAX:
            del self.entries[ENTRIES_MAX // 2]
            self.left_out += 1
        return entry

    def farewell(
        self, conclusion: Conclude, *, run: str, generation: int | None, written: str
    ) -> bytes:
        """The farewell object.

        Args:
            written: wall-clock time in UTC, informational.
        """
        commit, part = conclusion.commit, conclusion.part
        body = {
            "format": "swansong-farewell",
            "version": 1,
            "run": run,
            "generation": generation,
            "evacuation": self.evacuation_id,
            "verdict": conclusion.verdict.value,
            "reason": conclusion.reason,
            "commit": None
            if commit is None
            else {"generation": commit.generation, "step": commit.step},
            "complete": part is None,
            **({} if part is None else {"part": part.facts()}),
            "slack_s": conclusion.slack_s,
            "timeline": self.entries,
            **({"left_out": self.left_out} if self.left_out else {}),
            "written": written,
        }
        return json.dumps(body, indent=1, sort_keys=True).encode()
