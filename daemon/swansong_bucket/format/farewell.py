# SPDX-License-Identifier: Apache-2.0
"""The farewell: the object that records an evacuation and its verdict.

docs/format.md describes the bytes.  No commit depends on a farewell.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from swansong import bounds

from swansong_bucket.errors import CorruptError
from swansong_bucket.format import record
from swansong_bucket.format.wall import INSTANT
from swansong_bucket.loss_records import Conclusion, EvacuationRecord, LastReport, NoticeRecord
from swansong_bucket.model import Verdict, VmPart
from swansong_bucket.util.forms import (
    FLAG,
    ID,
    Form,
    Kind,
    Named,
    one_of,
    optional,
    or_else,
    seconds,
    several,
    text,
    whole,
)
from swansong_bucket.util.printable import printable

FORMAT = "swansong-farewell"
BYTES_MAX = 2**20
NOTICES_MAX = 100
ENTRIES_MAX = 1000
SAMPLES_MAX = 1000
"""Limits of a reader, above those of every writer."""

Fact = str | int | float | bool

_RANK = re.compile(r"0|[1-9][0-9]{0,4}")
_FACT_MAX = {
    "step": bounds.STEP_MAX,
    "_bytes": bounds.BYTES_MAX,
    "_s": bounds.SECONDS_MAX,
    "seconds_left": bounds.SECONDS_MAX,
}
"""Largest absolute value of a number among the facts, by the end of its name.  Reports draw these numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Farewell:
    """Content of a farewell."""

    run: str
    generation: int
    conclusion: Conclusion
    evacuation: EvacuationRecord
    training: LastReport | None = None
    """The last step; None if no trainer reported one."""
    digests: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """By rank: digests of the newest steps, see :mod:`swansong._checkpoint.redone`."""
    written: str
    """UTC, informational."""


def encode(farewell: Farewell) -> bytes:
    """The farewell as the bytes of its object."""
    body = (
        Form(Farewell, **_FAREWELL).write(farewell)
        | Form(Conclusion, **_CONCLUSION).write(farewell.conclusion)
        | Form(EvacuationRecord, **_EVACUATION).write(farewell.evacuation)
        | {"complete": farewell.conclusion.part is None, "written": farewell.written}
    )
    present = {key: value for key, value in body.items() if value or key not in _LEFT_OUT}
    return record.encode(FORMAT, present)


def _text(value: object, field: str, max_chars: int = bounds.TEXT_CHARS_MAX) -> str:
    return str(printable(bounds.text(value, field, max_chars)))


_WORD = Kind(partial(_text, max_chars=bounds.ID_CHARS_MAX))
_NOTICE = Form(NoticeRecord, source=_WORD, kind=_WORD)
_MILLISECONDS = Kind(seconds(0.0).read, lambda value: round(value, 3))
_TRAINING = Form(
    LastReport,
    step=whole(0, bounds.STEP_MAX),
    at=Named("wall_s", INSTANT),
    step_s=optional(seconds(0.0)),
    ranks=whole(1, bounds.RANKS_MAX),
    saves_s=_MILLISECONDS,
    stall_s=_MILLISECONDS,
    over=Named("is_over", FLAG),
    deadline=Named("deadline_wall_s", optional(INSTANT)),
)


# ---------------------------------------------------------------- reading


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """An entry of the timeline."""

    phase: str
    at_s: float
    """Seconds since the evacuation opened; never less than that of the entry before."""
    facts: Mapping[str, Fact]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedEvacuation(Conclusion, EvacuationRecord):
    """A farewell as it was read.  Its texts are printable, and its numbers are within bounds."""

    run: str
    generation: int
    timeline: tuple[TimelineEntry, ...]
    training: LastReport | None
    written_wall_s: float
    digests: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    @property
    def source(self) -> str:
        """The source of the most severe notice; empty if it is unknown."""
        return self.notices[0].source if self.notices else ""

    @property
    def kind(self) -> str:
        """The kind of the most severe notice; empty if it is unknown."""
        return self.notices[0].kind if self.notices else ""

    @property
    def is_void(self) -> bool:
        """Whether the notice was withdrawn before a verdict was announced."""
        return self.is_foretold and self.deadline_s is None

    @property
    def bytes_sent(self) -> int:
        """Bytes that flushes have sent since the opening."""
        return self.samples[-1][1] if self.samples else 0


def decode(data: bytes) -> RecordedEvacuation:
    """Parse and check the bytes of a farewell.

    Raises:
        CorruptError: a field is missing or out of bounds.
    """
    return record.read(data, FORMAT, BYTES_MAX, _RECORDED)


def _timeline(value: object, name: str) -> tuple[TimelineEntry, ...]:
    entries: list[TimelineEntry] = []
    for item in bounds.items(value, name, ENTRIES_MAX):
        entry = bounds.mapping(item, "entry of the timeline", bounds.FACTS_MAX)
        after_s = entries[-1].at_s if entries else 0.0
        entries.append(
            TimelineEntry(
                phase=_WORD.read(entry.get("phase"), "phase of the farewell"),
                at_s=bounds.number(entry.get("at_s"), "at_s", after_s, bounds.SECONDS_MAX),
                facts=_facts(entry),
            )
        )
    return tuple(entries)


def _facts(entry: Mapping[str, object]) -> Mapping[str, Fact]:
    """The facts that are numbers, texts or booleans; all others are left out.

    Raises:
        BoundsError: a number is out of the range of the unit in its name.
    """
    scalars = {
        name: value
        for name, value in entry.items()
        if name not in ("phase", "at_s") and isinstance(value, (str, bool, int, float))
    }
    found = bounds.facts(scalars, "facts of the timeline")
    return {str(printable(name)): _fact(name, value) for name, value in found.items()}


def _fact(name: str, value: Fact) -> Fact:
    if isinstance(value, str):
        return str(printable(value))
    limit = next((limit for end, limit in _FACT_MAX.items() if name.endswith(end)), None)
    if limit is not None and not isinstance(value, bool):
        bounds.number(value, f"{name[:40]!r} of the timeline", -limit, limit)
    return value


def _samples(value: object, name: str) -> tuple[tuple[float, int], ...]:
    samples: list[tuple[float, int]] = []
    at_s, sent_bytes = 0.0, 0
    for item in bounds.items(value, name, SAMPLES_MAX):
        pair = bounds.items(item, "sample", 2)
        if len(pair) != 2:
            raise CorruptError(f"a sample of the farewell has {len(pair)} values instead of 2")
        at_s = bounds.number(pair[0], "time of a sample", at_s, bounds.SECONDS_MAX)
        sent_bytes = bounds.integer(pair[1], "bytes of a sample", sent_bytes, bounds.BYTES_MAX)
        samples.append((at_s, sent_bytes))
    return tuple(samples)


def _digests(value: object, name: str) -> Mapping[int, tuple[str, ...]]:
    found: dict[int, tuple[str, ...]] = {}
    for rank, each in bounds.mapping(value, name, bounds.FAREWELL_DIGESTS_MAX).items():
        if not _RANK.fullmatch(rank):
            raise CorruptError(f"the farewell has digests of rank {bounds.shown(rank)}")
        found[int(rank)] = tuple(
            bounds.step_digest(text, "digest of the farewell")
            for text in bounds.items(each, "digests of a rank", bounds.DIGESTS_MAX)
        )
    return found


def _part(value: object, name: str) -> VmPart:
    body = bounds.mapping(value, name, bounds.FACTS_MAX)
    nodes = bounds.integer(body.get("nodes"), "nodes", 1, bounds.NODES_MAX)
    committed = bounds.integer(body.get("nodes_committed"), "nodes_committed", 0, bounds.NODES_MAX)
    return VmPart(record.REF.read(body, name), nodes, committed)


# ---------------------------------------------------------------- the fields, for both directions


_FAREWELL: dict[str, Kind | Named] = {
    "run": text(bounds.ID_CHARS_MAX),
    "generation": whole(0, bounds.GENERATION_MAX),
    "training": optional(_TRAINING.kind),
    "digests": or_else(
        Kind(_digests, lambda found: {str(rank): list(each) for rank, each in found.items()}), {}
    ),
}
_CONCLUSION: dict[str, Kind | Named] = {
    "evacuation": Named("evacuation_id", ID),
    "verdict": one_of(Verdict),
    "reason": Kind(_text),
    "commit": optional(record.REF),
    "part": optional(Kind(_part, VmPart.facts)),
    "slack_s": seconds(),
    "expected_s": optional(seconds(0.0)),
    "took_s": optional(seconds(0.0)),
    "foretold": Named("is_foretold", or_else(FLAG, False)),
}
_EVACUATION: dict[str, Kind | Named] = {
    "node": whole(0, bounds.NODES_MAX),
    "notices": several(_NOTICE.kind, NOTICES_MAX),
    "opened": Named("opened_wall_s", INSTANT),
    "deadline_s": optional(seconds()),
    "timeline": Kind(_timeline, list),
    "left_out": or_else(whole(0, bounds.STEP_MAX), 0),
    "samples": Kind(_samples, list),
    "assumed": Named("is_assumed", or_else(FLAG, False)),
    "ended": Named("is_ended", or_else(FLAG, False)),
}
_LEFT_OUT = ("training", "digests", "part", "foretold", "left_out", "assumed", "ended")
"""Keys that a farewell lacks while their value is empty, 0 or false."""
_RECORDED = Form(
    RecordedEvacuation,
    written=Named("written_wall_s", INSTANT),
    **_FAREWELL,
    **_CONCLUSION,
    **_EVACUATION,
)
