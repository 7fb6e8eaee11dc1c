# SPDX-License-Identifier: Apache-2.0
"""The record of the training as JSON, for the next life of the daemon in this boot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, astuple
from typing import Any

from swansong import bounds

from swansongd.core.restart import KNOWN_MAX
from swansongd.model import Ahead, CheckpointId, CommitRef, TrainerView, TrainingRecord

BYTES_MAX = 2**18
_FACTS_MAX = 16
_PID_MAX = 2**22
"""The kernel's own limit."""
_FIELDS = ("pid", "process_start", "rank", "world_size", "local_world_size", "node", "nodes")


def facts_of(record: TrainingRecord) -> dict[str, Any]:
    """The JSON object."""
    return {
        "trainers": [
            {"start_id": view.start_id, **{name: getattr(view, name) for name in _FIELDS}}
            for view in record.trainers
        ],
        "starts": list(record.starts),
        "closed_starts": list(record.closed_starts),
        "retained": [[each.step, each.nonce, each.is_final] for each in record.retained],
        "must_claim": record.must_claim,
        "owes_checkpoint": record.owes_checkpoint,
        "owed_above": astuple(record.owed_above),
        "ahead": None if record.ahead is None else asdict(record.ahead),
    }


def parse(facts: Mapping[str, Any]) -> TrainingRecord:
    """The record of a JSON object.

    Raises:
        ValueError: a value has the wrong type or is out of range.
        KeyError: a value is missing.
    """
    found = bounds.items(facts["trainers"], "trainers", KNOWN_MAX)
    return TrainingRecord(
        trainers=tuple(_trainer(each, -number) for number, each in enumerate(found, 1)),
        starts=_names(facts, "starts"),
        closed_starts=_names(facts, "closed_starts"),
        retained=tuple(_set(each) for each in bounds.items(facts["retained"], "sets", KNOWN_MAX)),
        must_claim=bounds.boolean(facts["must_claim"], "must_claim"),
        owes_checkpoint=bounds.boolean(facts["owes_checkpoint"], "owes_checkpoint"),
        owed_above=_commit(facts["owed_above"]),
        ahead=_ahead(facts["ahead"]),
    )


def _set(value: Any) -> CheckpointId:
    fields = bounds.items(value, "a set", 3)
    if len(fields) != 3:
        raise bounds.BoundsError("a set has no nonce, or does not say whether it is final")
    return CheckpointId(
        bounds.integer(fields[0], "step", 0, bounds.STEP_MAX),
        bounds.identifier(fields[1], "nonce"),
        bounds.boolean(fields[2], "is_final"),
    )


def _commit(value: Any) -> CommitRef:
    fields = bounds.items(value, "a commit", 3)
    if len(fields) != 3:
        raise bounds.BoundsError("a commit has no step, or does not say whether it is final")
    return CommitRef(
        bounds.integer(fields[0], "generation", 0, bounds.GENERATION_MAX),
        bounds.integer(fields[1], "step", 0, bounds.STEP_MAX),
        bounds.boolean(fields[2], "is_final"),
    )


def _ahead(value: Any) -> Ahead | None:
    if value is None:
        return None
    facts = bounds.mapping(value, "ahead", _FACTS_MAX)
    return Ahead(
        bounds.identifier(facts["evacuation_id"], "evacuation_id"),
        bounds.integer(facts["step"], "step", -1, bounds.STEP_MAX),
        bounds.boolean(facts["is_unknown"], "is_unknown"),
    )


def _trainer(value: Any, connection: int) -> TrainerView:
    facts = bounds.mapping(value, "a trainer", _FACTS_MAX)
    world_size = bounds.integer(facts["world_size"], "world_size", 1, bounds.RANKS_MAX)
    nodes = bounds.integer(facts["nodes"], "nodes", 1, bounds.NODES_MAX)
    return TrainerView(
        connection=connection,
        pid=bounds.integer(facts["pid"], "pid", 1, _PID_MAX),
        process_start=bounds.integer(facts["process_start"], "process_start", 1, 2**63),
        rank=bounds.integer(facts["rank"], "rank", 0, world_size - 1),
        world_size=world_size,
        local_world_size=bounds.integer(
            facts["local_world_size"], "local_world_size", 1, world_size
        ),
        node=bounds.integer(facts["node"], "node", 0, nodes - 1),
        nodes=nodes,
        start_id=bounds.identifier(facts["start_id"], "start_id"),
        is_connected=False,
    )


def _names(facts: Mapping[str, Any], field: str) -> tuple[str, ...]:
    found = bounds.items(facts[field], field, KNOWN_MAX)
    return tuple(bounds.identifier(each, field) for each in found)
