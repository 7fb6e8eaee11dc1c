# SPDX-License-Identifier: Apache-2.0
"""The farewell: the object that records an evacuation and its verdict.

docs/format-objects.md describes the bytes.  Farewells are not signed, and no commit depends on one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swansong import bounds
from swansong.bounds import BoundsError

from swansongd.bucket import wall
from swansongd.core.events import Conclude
from swansongd.core.ledger import LastReport
from swansongd.errors import CorruptError

FORMAT = "swansong-farewell"
VERSION = 1
BYTES_MAX = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Farewell:
    """Content of a farewell."""

    run: str
    generation: int
    conclusion: Conclude
    timeline: Sequence[Mapping[str, object]]
    """One entry for each log line of the evacuation, oldest first."""
    left_out: int = 0
    """Entries that the timeline had no room for."""
    training: LastReport | None = None
    """The last step; None if no trainer reported one."""
    written: str
    """UTC, informational."""


def encode(farewell: Farewell) -> bytes:
    """The farewell as the bytes of its object."""
    conclusion = farewell.conclusion
    commit, part = conclusion.commit, conclusion.part
    body: dict[str, object] = {
        "format": FORMAT,
        "version": VERSION,
        "run": farewell.run,
        "generation": farewell.generation,
        "evacuation": conclusion.evacuation_id,
        "verdict": conclusion.verdict.value,
        "reason": conclusion.reason,
        "commit": commit and {"generation": commit.generation, "step": commit.step},
        "complete": part is None,
        "slack_s": conclusion.slack_s,
        "expected_s": conclusion.expected_s,
        "took_s": conclusion.took_s,
        "timeline": list(farewell.timeline),
        "written": farewell.written,
    }
    if part is not None:
        body["part"] = part.facts()
    if farewell.left_out:
        body["left_out"] = farewell.left_out
    if farewell.training is not None:
        body["training"] = _training(farewell.training)
    return json.dumps(body, indent=1, sort_keys=True).encode()


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


def training(data: bytes) -> LastReport | None:
    """The training of a farewell; None if it has none.

    Raises:
        CorruptError: a field is missing or out of bounds.
    """
    found = _body(data).get("training")
    if found is None:
        return None
    try:
        body = bounds.mapping(found, "training of the farewell", bounds.FACTS_MAX)
        at_wall_s = wall.required_s(body.get("at"), "time of the last step")
        return LastReport(
            step=bounds.integer(body.get("step"), "last step", 0, bounds.STEP_MAX),
            wall_s=at_wall_s,
            step_s=wall.optional(body.get("step_s"), "step_s of the farewell"),
            ranks=bounds.integer(body.get("ranks"), "ranks", 1, bounds.RANKS_MAX),
            saves_s=bounds.number(body.get("saves_s"), "saves_s", 0.0, bounds.SECONDS_MAX),
            stall_s=bounds.number(body.get("stall_s"), "stall_s", 0.0, bounds.SECONDS_MAX),
            is_over=bounds.boolean(body.get("over"), "over"),
            deadline_wall_s=wall.optional_s(body.get("deadline"), "deadline of the farewell"),
        )
    except BoundsError as error:
        raise CorruptError(str(error)) from None


def verdict_and_time(data: bytes) -> tuple[str, str]:
    """The verdict of a farewell, and the wall-clock time at which it was written.

    Raises:
        CorruptError: a field is missing or out of bounds.
    """
    body = _body(data)
    try:
        return (
            bounds.text(body.get("verdict"), "verdict of the farewell", bounds.ID_CHARS_MAX),
            bounds.text(body.get("written"), "time of the farewell", bounds.ID_CHARS_MAX),
        )
    except BoundsError as error:
        raise CorruptError(str(error)) from None


def names_commit(data: bytes) -> bool:
    """Whether the run had a commit when the farewell was written; raises CorruptError."""
    return _body(data).get("commit") is not None


def _body(data: bytes) -> Mapping[str, object]:
    try:
        return bounds.json_object(data, "the farewell", BYTES_MAX)
    except BoundsError as error:
        raise CorruptError(str(error)) from None
