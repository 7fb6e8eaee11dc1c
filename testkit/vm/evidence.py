# SPDX-License-Identifier: Apache-2.0
"""The events of one boot, from the journal on the disk of a VM that is off."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Entry:
    """One line of the journal."""

    boot: str
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
        unit=record.get("UNIT") or record.get("_SYSTEMD_UNIT") or "",
        text=text,
        facts=facts,
    )
