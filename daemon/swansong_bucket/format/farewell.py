# SPDX-License-Identifier: Apache-2.0
"""The farewell: the object that records an evacuation and its verdict.

docs/format.md describes the bytes.  No commit depends on a farewell.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from swansong import bounds
from swansong.bounds import BoundsError

from swansong_bucket.errors import CorruptError
from swansong_bucket.format import record, wall
from swansong_bucket.loss_records import Conclusion, EvacuationRecord, LastReport, NoticeRecord
from swansong_bucket.model import CommitRef, Verdict, VmPart
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
    conclusion, evacuation = farewell.conclusion, farewell.evacuation
    commit, part = conclusion.commit, conclusion.part
    body: dict[str, object] = {
        "run": farewell.run,
        "generation": farewell.generation,
        "evacuation": conclusion.evacuation_id,
        "node": evacuation.node,
        "notices": [asdict(notice) for notice in evacuation.notices],
        "opened": wall.text(evacuation.opened_wall_s),
        "deadline_s": evacuation.deadline_s,
        "verdict": conclusion.verdict.value,
        "reason": conclusion.reason,
        "commit": commit and {"generation": commit.generation, "step": commit.step},
        "complete": part is None,
        "slack_s": conclusion.slack_s,
        "expected_s": conclusion.expected_s,
        "took_s": conclusion.took_s,
        "timeline": list(evacuation.timeline),
        "samples": list(evacuation.samples),
        "written": farewell.written,
    }
    if part is not None:
        body["part"] = part.facts()
    if evacuation.left_out:
        body["left_out"] = evacuation.left_out
    if farewell.training is not None:
        body["training"] = _training(farewell.training)
    if farewell.digests:
        body["digests"] = {str(rank): list(each) for rank, each in farewell.digests.items()}
    return record.encode(FORMAT, body)


def _training(report: LastReport) -> dict[str, object]:
    return {
        "step": report.step,
        "at": wall.text(report.wall_s),
        "step_s": report.step_s,
        "ranks": report.ranks,
        "saves_s": round(report.saves_s, 3),
        "stall_s": round(report.stall_s, 3),
        "over": report.is_over,
        "deadline": wall.text(report.deadline_wall_s),
    }


# ---------------------------------------------------------------- reading


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """An entry of the timeline."""

    phase: str
    at_s: float
    """Seconds since the evacuation opened; never less than that of the entry before."""
    facts: Mapping[str, Fact]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedEvacuation:
    """A farewell as it was read.  Its texts are printable, and its numbers are within bounds."""

    run: str
    generation: int
    evacuation_id: str
    node: int
    notices: tuple[NoticeRecord, ...]
    """The most severe first."""
    opened_wall_s: float
    deadline_s: float | None
    """Seconds after the opening, as are all times without ``wall`` in their name; None if unknown."""
    verdict: Verdict
    reason: str
    commit: CommitRef | None
    part: VmPart | None
    slack_s: float
    """Seconds before the deadline at which the farewell was written."""
    expected_s: float | None
    took_s: float | None
    timeline: tuple[TimelineEntry, ...]
    left_out: int
    samples: tuple[tuple[float, int], ...]
    """Time, and the bytes that flushes have sent by then; both ascend."""
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
    def bytes_sent(self) -> int:
        """Bytes that flushes have sent since the opening."""
        return self.samples[-1][1] if self.samples else 0


def decode(data: bytes) -> RecordedEvacuation:
    """Parse and check the bytes of a farewell.

    Raises:
        CorruptError: a field is missing or out of bounds.
    """
    body = record.decode(data, FORMAT, BYTES_MAX)
    try:
        return _recorded(body)
    except BoundsError as error:
        raise CorruptError(str(error)) from None


def _recorded(body: Mapping[str, object]) -> RecordedEvacuation:
    deadline_s = body.get("deadline_s")
    commit, part, report = body.get("commit"), body.get("part"), body.get("training")
    verdict = _text(body.get("verdict"), "verdict", bounds.ID_CHARS_MAX)
    if verdict not in tuple(Verdict):
        raise CorruptError(f"the farewell has the verdict {bounds.shown(verdict)}")
    return RecordedEvacuation(
        run=bounds.text(body.get("run"), "run of the farewell", bounds.ID_CHARS_MAX),
        generation=_count(body, "generation", 0, bounds.GENERATION_MAX),
        evacuation_id=bounds.identifier(body.get("evacuation"), "evacuation of the farewell"),
        node=_count(body, "node", 0, bounds.NODES_MAX),
        notices=_notices(body.get("notices")),
        opened_wall_s=wall.required_s(body.get("opened"), "opened of the farewell"),
        deadline_s=None if deadline_s is None else _seconds(deadline_s, "deadline_s"),
        verdict=Verdict(verdict),
        reason=_text(body.get("reason"), "reason"),
        commit=None if commit is None else _ref(commit, "commit"),
        part=None if part is None else _part(part),
        slack_s=_seconds(body.get("slack_s"), "slack_s"),
        expected_s=wall.optional(body.get("expected_s"), "expected_s of the farewell"),
        took_s=wall.optional(body.get("took_s"), "took_s of the farewell"),
        timeline=_timeline(body.get("timeline")),
        left_out=bounds.integer(body.get("left_out", 0), "left_out", 0, bounds.STEP_MAX),
        samples=_samples(body.get("samples")),
        training=None if report is None else _last_report(report),
        written_wall_s=wall.required_s(body.get("written"), "time of the farewell"),
        digests=_digests(body.get("digests", {})),
    )


def _notices(value: object) -> tuple[NoticeRecord, ...]:
    found = []
    for item in bounds.items(value, "notices of the farewell", NOTICES_MAX):
        notice = bounds.mapping(item, "notice of the farewell", bounds.FACTS_MAX)
        found.append(
            NoticeRecord(
                _text(notice.get("source"), "source", bounds.ID_CHARS_MAX),
                _text(notice.get("kind"), "kind", bounds.ID_CHARS_MAX),
            )
        )
    return tuple(found)


def _timeline(value: object) -> tuple[TimelineEntry, ...]:
    entries: list[TimelineEntry] = []
    for item in bounds.items(value, "timeline of the farewell", ENTRIES_MAX):
        entry = bounds.mapping(item, "entry of the timeline", bounds.FACTS_MAX)
        after_s = entries[-1].at_s if entries else 0.0
        entries.append(
            TimelineEntry(
                phase=_text(entry.get("phase"), "phase", bounds.ID_CHARS_MAX),
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


def _samples(value: object) -> tuple[tuple[float, int], ...]:
    samples: list[tuple[float, int]] = []
    at_s, sent_bytes = 0.0, 0
    for item in bounds.items(value, "samples of the farewell", SAMPLES_MAX):
        pair = bounds.items(item, "sample", 2)
        if len(pair) != 2:
            raise CorruptError(f"a sample of the farewell has {len(pair)} values instead of 2")
        at_s = bounds.number(pair[0], "time of a sample", at_s, bounds.SECONDS_MAX)
        sent_bytes = bounds.integer(pair[1], "bytes of a sample", sent_bytes, bounds.BYTES_MAX)
        samples.append((at_s, sent_bytes))
    return tuple(samples)


def _digests(value: object) -> Mapping[int, tuple[str, ...]]:
    found: dict[int, tuple[str, ...]] = {}
    for name, each in bounds.mapping(
        value, "digests of the farewell", bounds.FAREWELL_DIGESTS_MAX
    ).items():
        if not _RANK.fullmatch(name):
            raise CorruptError(f"the farewell has digests of rank {bounds.shown(name)}")
        found[int(name)] = tuple(
            bounds.step_digest(text, "digest of the farewell")
            for text in bounds.items(each, "digests of a rank", bounds.DIGESTS_MAX)
        )
    return found


def _ref(value: object, field: str) -> CommitRef:
    body = bounds.mapping(value, f"{field} of the farewell", bounds.FACTS_MAX)
    return CommitRef(
        _count(body, "generation", 0, bounds.GENERATION_MAX),
        _count(body, "step", 0, bounds.STEP_MAX),
    )


def _part(value: object) -> VmPart:
    body = bounds.mapping(value, "part of the farewell", bounds.FACTS_MAX)
    return VmPart(
        _ref(body, "part"),
        _count(body, "nodes", 1, bounds.NODES_MAX),
        _count(body, "nodes_committed", 0, bounds.NODES_MAX),
    )


def _text(value: object, field: str, max_chars: int = bounds.TEXT_CHARS_MAX) -> str:
    return str(printable(bounds.text(value, f"{field} of the farewell", max_chars)))


def _seconds(value: object, field: str) -> float:
    """A number of seconds, which may be negative."""
    return bounds.number(value, f"{field} of the farewell", -bounds.SECONDS_MAX, bounds.SECONDS_MAX)


def _count(body: Mapping[str, object], name: str, low: int, high: int) -> int:
    return bounds.integer(body.get(name), f"{name} of the farewell", low, high)


def _last_report(value: object) -> LastReport:
    body = bounds.mapping(value, "training of the farewell", bounds.FACTS_MAX)
    return LastReport(
        step=bounds.integer(body.get("step"), "last step", 0, bounds.STEP_MAX),
        wall_s=wall.required_s(body.get("at"), "time of the last step"),
        step_s=wall.optional(body.get("step_s"), "step_s of the farewell"),
        ranks=bounds.integer(body.get("ranks"), "ranks", 1, bounds.RANKS_MAX),
        saves_s=bounds.number(body.get("saves_s"), "saves_s", 0.0, bounds.SECONDS_MAX),
        stall_s=bounds.number(body.get("stall_s"), "stall_s", 0.0, bounds.SECONDS_MAX),
        is_over=bounds.boolean(body.get("over"), "over"),
        deadline_wall_s=wall.optional_s(body.get("deadline"), "deadline of the farewell"),
    )
