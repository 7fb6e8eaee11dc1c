# SPDX-License-Identifier: Apache-2.0
"""What the journal on a dead disk tells of one boot."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

PHASES = ("request", "accepted", "sealed", "flush", "flushed", "committed")
COLUMNS = ("scenario", "plan", *PHASES, "verdict", "last word", "off", "restored", "lost")
"""Of the table: phases, verdict and the journal's last line in seconds since the notice, as the VM saw it;
when it was off, in seconds since the button or the notice was given, as seen from outside; the step that
the next VM went on from, and how many steps it did again."""


@dataclass(frozen=True)
class Entry:
    """One line of the journal."""

    boot: str
    mono_s: float
    """Seconds since the kernel started."""
    unit: str
    """Who wrote it, or whom systemd writes about."""
    text: str
    facts: dict[str, Any]
    """What stands in a line of JSON."""


@dataclass(frozen=True)
class Story:
    entries: list[Entry]

    def lines(self, **facts: object) -> list[Entry]:
        """Those in which these facts stand."""
        return [entry for entry in self.entries if facts.items() <= entry.facts.items()]

    def first(self, **facts: object) -> Entry:
        found = self.lines(**facts)
        assert found, f"nothing of {facts}:\n" + "\n".join(
            entry.text for entry in self.entries[-60:]
        )
        return found[0]

    def says(self, text: str) -> bool:
        return any(text in entry.text for entry in self.entries)

    @property
    def verdicts(self) -> list[tuple[str, int]]:
        """Each with the step that it is about."""
        return [(e.facts["verdict"], e.facts["step"]) for e in self.lines(event="verdict")]

    @property
    def steps(self) -> list[int]:
        """Steps that a trainer has done, in order."""
        return [
            e.facts["step"] for e in self.entries if "loss" in e.facts and "event" not in e.facts
        ]

    @property
    def weights(self) -> list[str]:
        """Digests of final weights."""
        return [e.facts["weights_sha256"] for e in self.entries if "weights_sha256" in e.facts]

    def phases(self) -> Iterator[str]:
        """The cells of the table from the plan to the last word."""
        notices = self.lines(event="evacuation", phase="notice")
        if not notices:
            yield from ["-"] * (len(PHASES) + 3)
            return
        began = notices[0].mono_s
        yield notices[0].facts["plan"]
        for phase in PHASES:
            found = self.lines(event="evacuation", phase=phase)
            yield f"{found[0].mono_s - began:.2f}" if found else "-"
        verdicts = self.lines(event="verdict")
        yield (
            f"{verdicts[0].mono_s - began:.2f} {verdicts[0].facts['verdict']}"
            if verdicts
            else "none"
        )
        yield f"{self.entries[-1].mono_s - began:.2f}"


def stories(lines: Iterable[str]) -> list[Story]:
    """From what ``journalctl --output=json`` prints: one for each boot, the oldest first."""
    boots: dict[str, list[Entry]] = {}
    for line in lines:
        entry = _entry(json.loads(line))
        boots.setdefault(entry.boot, []).append(entry)
    return [Story(entries) for entries in boots.values()]


def _entry(record: dict[str, Any]) -> Entry:
    text = record.get("MESSAGE") or ""
    if isinstance(text, list):  # not all of it printable
        text = bytes(text).decode(errors="replace")
    facts: Any = {}
    if text.startswith("{"):
        with suppress(ValueError):
            facts = json.loads(text)
    return Entry(
        boot=record["_BOOT_ID"],
        mono_s=int(record["__MONOTONIC_TIMESTAMP"]) / 1e6,
        unit=record.get("UNIT") or record.get("_SYSTEMD_UNIT") or "",
        text=text,
        facts=facts,
    )
