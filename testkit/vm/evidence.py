# SPDX-License-Identifier: Apache-2.0
"""The events of one boot, from the journal on the disk of a VM that is off."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

PHASES = ("request", "accepted", "sealed", "flush", "flushed", "committed")
BOOT = ("daemon", "fetched", "first step")
COLUMNS = ("scenario", "plan", *PHASES, "verdict", "last entry", "off", "restored", "lost", *BOOT)
"""Columns of the table.  Phases, verdict and the journal's last entry are in seconds since the notice, by the
VM's clock; "off" is in seconds since the button or the notice, by the host's clock; "restored" is the step
that the next VM resumed from, and "lost" the number of steps that it repeated.  The last three are of the
next VM, in seconds since its kernel started: the daemon runs, the checkpoint is fetched, the first new step
is done."""


@dataclass(frozen=True)
class Entry:
    """One line of the journal."""

    boot: str
    mono_s: float
    """Seconds since the kernel started."""
    unit: str
    """The unit that wrote the entry, or that systemd reports on."""
    text: str
    facts: dict[str, Any]
    """The fields of a line of JSON."""


@dataclass(frozen=True)
class Story:
    entries: list[Entry]

    def lines(self, **facts: object) -> list[Entry]:
        """The entries with these facts."""
        return [entry for entry in self.entries if facts.items() <= entry.facts.items()]

    def first(self, **facts: object) -> Entry:
        found = self.lines(**facts)
        assert found, f"no entry with {facts}:\n" + "\n".join(
            entry.text for entry in self.entries[-60:]
        )
        return found[0]

    def contains(self, text: str) -> bool:
        return any(text in entry.text for entry in self.entries)

    @property
    def verdicts(self) -> list[tuple[str, int]]:
        """Each verdict with its step."""
        return [(e.facts["verdict"], e.facts["step"]) for e in self.lines(event="verdict")]

    @property
    def steps(self) -> list[int]:
        """Steps that the trainer has done, in order."""
        return [
            e.facts["step"] for e in self.entries if "loss" in e.facts and "event" not in e.facts
        ]

    @property
    def weights(self) -> list[str]:
        """Digests of final weights."""
        return [e.facts["weights_sha256"] for e in self.entries if "weights_sha256" in e.facts]

    def phases(self) -> Iterator[str]:
        """The cells of the table from the plan to the last entry."""
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

    def boot_times(self) -> Iterator[str]:
        """The cells of BOOT."""
        started, fetched = self.lines(event="started"), self.lines(event="prefetched")
        steps = [e for e in self.entries if "loss" in e.facts and "event" not in e.facts]
        for found in (started, fetched, steps):
            yield f"{found[0].mono_s:.1f}" if found else "-"


def stories(lines: Iterable[str]) -> list[Story]:
    """Read the output of ``journalctl --output=json``: one story for each boot, the oldest first."""
    boots: dict[str, list[Entry]] = {}
    for line in lines:
        entry = _entry(json.loads(line))
        boots.setdefault(entry.boot, []).append(entry)
    return [Story(entries) for entries in boots.values()]


def _entry(record: dict[str, Any]) -> Entry:
    text = record.get("MESSAGE") or ""
    if isinstance(text, list):  # it contains unprintable bytes
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
