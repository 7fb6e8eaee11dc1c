# SPDX-License-Identifier: Apache-2.0
"""The resumption: the object that records how long a resume took, and where the VM before it ended.

docs/format.md describes the bytes.  No commit and no restore depends on it.  Every writer of the
bucket can write one, so ``decode`` checks every field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swansong import bounds
from swansong.bounds import BoundsError

from swansong_bucket.errors import CorruptError
from swansong_bucket.format import record, wall
from swansong_bucket.loss_records import GenerationEnd, Resumption
from swansong_bucket.model import CommitRef

FORMAT = "swansong-resumption"
BYTES_MAX = 64 * 2**10


def encode(resumption: Resumption) -> bytes:
    """The resumption as the bytes of its object."""
    restored = resumption.restored
    body = {
        "run": resumption.run,
        "generation": resumption.generation,
        "vm": resumption.vm,
        "ranks": resumption.ranks,
        "node": resumption.node,
        "nodes": resumption.nodes,
        "booted": wall.text(resumption.booted_wall_s),
        "daemon_started": wall.text(resumption.daemon_wall_s),
        "download_began": wall.text(resumption.download_began_wall_s),
        "download_ended": wall.text(resumption.download_ended_wall_s),
        "bytes_fetched": resumption.bytes_fetched,
        "bytes_linked": resumption.bytes_linked,
        "asked": wall.text(resumption.asked_wall_s),
        "answered": wall.text(resumption.answered_wall_s),
        "training_started": wall.text(resumption.started_wall_s),
        "first_step_ended": wall.text(resumption.first_step_wall_s),
        "start_step": resumption.start_step,
        "first_step": resumption.first_step,
        "restored": restored and {"generation": restored.generation, "step": restored.step},
        "earlier": resumption.earlier and _ending(resumption.earlier),
    }
    return record.encode(FORMAT, body)


def _ending(ending: GenerationEnd) -> dict[str, object]:
    return {
        "generation": ending.generation,
        "step": ending.step,
        "at": wall.text(ending.wall_s),
        "estimated": ending.is_estimated,
        "step_s": ending.step_s,
        "ranks": ending.ranks,
        "saves_s": ending.saves_s,
        "stall_s": ending.stall_s,
    }


def decode(data: bytes) -> Resumption:
    """Parse and check the bytes of a resumption.

    Raises:
        CorruptError: a field is missing or out of bounds.
    """
    body = record.decode(data, FORMAT, BYTES_MAX)
    try:
        resumption = _resumption(body)
    except BoundsError as error:
        raise CorruptError(str(error)) from None
    return resumption


def _resumption(body: Mapping[str, Any]) -> Resumption:
    def count(name: str, low: int, high: int) -> int:
        return bounds.integer(body.get(name), f"{name} of the resumption", low, high)

    def at_s(name: str) -> float:
        return wall.required_s(body.get(name), f"{name} of the resumption")

    def perhaps_at_s(name: str) -> float | None:
        return wall.optional_s(body.get(name), f"{name} of the resumption")

    return Resumption(
        run=bounds.text(body.get("run"), "run of the resumption", bounds.ID_CHARS_MAX),
        generation=count("generation", 1, bounds.GENERATION_MAX),
        vm=bounds.identifier(body.get("vm"), "vm of the resumption"),
        ranks=count("ranks", 1, bounds.RANKS_MAX),
        node=count("node", 0, bounds.NODES_MAX),
        nodes=count("nodes", 1, bounds.NODES_MAX),
        booted_wall_s=at_s("booted"),
        daemon_wall_s=at_s("daemon_started"),
        download_began_wall_s=perhaps_at_s("download_began"),
        download_ended_wall_s=perhaps_at_s("download_ended"),
        bytes_fetched=count("bytes_fetched", 0, bounds.BYTES_MAX),
        bytes_linked=count("bytes_linked", 0, bounds.BYTES_MAX),
        asked_wall_s=perhaps_at_s("asked"),
        answered_wall_s=perhaps_at_s("answered"),
        started_wall_s=at_s("training_started"),
        first_step_wall_s=at_s("first_step_ended"),
        start_step=count("start_step", 0, bounds.STEP_MAX),
        first_step=count("first_step", 0, bounds.STEP_MAX),
        restored=_restored(body.get("restored")),
        earlier=_earlier(body.get("earlier")),
    )


def _restored(value: object) -> CommitRef | None:
    if value is None:
        return None
    body = bounds.mapping(value, "restored of the resumption", bounds.FACTS_MAX)
    return CommitRef(
        bounds.integer(body.get("generation"), "restored generation", 0, bounds.GENERATION_MAX),
        bounds.integer(body.get("step"), "restored step", 0, bounds.STEP_MAX),
    )


def _earlier(value: object) -> GenerationEnd | None:
    if value is None:
        return None
    body = bounds.mapping(value, "earlier of the resumption", bounds.FACTS_MAX)
    ranks = body.get("ranks")
    return GenerationEnd(
        generation=bounds.integer(
            body.get("generation"), "earlier generation", 1, bounds.GENERATION_MAX
        ),
        step=bounds.integer(body.get("step"), "earlier step", 0, bounds.STEP_MAX),
        wall_s=wall.required_s(body.get("at"), "time of the earlier step"),
        is_estimated=bounds.boolean(body.get("estimated"), "estimated"),
        step_s=wall.optional(body.get("step_s"), "earlier step_s"),
        ranks=None if ranks is None else bounds.integer(ranks, "ranks", 1, bounds.RANKS_MAX),
        saves_s=wall.optional(body.get("saves_s"), "earlier saves_s"),
        stall_s=wall.optional(body.get("stall_s"), "earlier stall_s"),
    )
