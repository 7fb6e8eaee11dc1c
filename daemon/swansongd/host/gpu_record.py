# SPDX-License-Identifier: Apache-2.0
"""The record of the GPUs as JSON, for the next life of the daemon in this boot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from swansong import bounds
from swansong_bucket.model import CheckpointId, GpuFault, GpuHealth, GpuRecord, GpuStatus
from swansong_bucket.util.printable import printable

from swansongd.core.gpus import KNOWN_MAX

BYTES_MAX = 2**18
_GPUS_MAX = 64
_FAULTS_MAX = 16
_STEPS_MAX = 2**63
_FACTS_MAX = 16
_TEXT_MAX = 200


def facts_of(record: GpuRecord) -> dict[str, Any]:
    """The JSON object."""
    return {
        "gpus": [asdict(gpu) for gpu in record.gpus],
        "log_number": record.log_number,
        "suspect_starts": list(record.suspect_starts),
        "known_starts": list(record.known_starts),
        "sound_sets": [[each.step, each.nonce] for each in sorted(record.sound_sets)],
    }


def parse(facts: Mapping[str, Any]) -> GpuRecord:
    """The record of a JSON object.

    Raises:
        ValueError: a value has the wrong type or is out of range.
        KeyError: a value is missing.
    """
    number = facts["log_number"]
    return GpuRecord(
        gpus=tuple(_gpu(each) for each in bounds.items(facts["gpus"], "gpus", _GPUS_MAX)),
        log_number=None if number is None else bounds.integer(number, "log_number", 0, 2**63),
        suspect_starts=tuple(_names(facts, "suspect_starts")),
        known_starts=tuple(_names(facts, "known_starts")),
        sound_sets=frozenset(
            _set(each) for each in bounds.items(facts["sound_sets"], "sound_sets", KNOWN_MAX)
        ),
    )


def _gpu(value: Any) -> GpuStatus:
    facts = bounds.mapping(value, "a GPU", _FACTS_MAX)
    faults = tuple(_fault(f) for f in bounds.items(facts["faults"], "faults", _FAULTS_MAX))
    return GpuStatus(
        pci=_text(facts, "pci"),
        index=bounds.integer(facts["index"], "index", -1, 10**6),
        uuid=_text(facts, "uuid"),
        name=_text(facts, "name"),
        health=GpuHealth(facts["health"]),
        reason=_text(facts, "reason"),
        since_mono_s=_instant(facts["since_mono_s"]),
        faults=faults,
    )


def _fault(value: Any) -> GpuFault:
    facts = bounds.mapping(value, "a fault", _FACTS_MAX)
    return GpuFault(
        _text(facts, "cause"),
        GpuHealth(facts["health"]),
        _text(facts, "reason"),
        _instant(facts["since_mono_s"]),
    )


def _set(value: Any) -> CheckpointId:
    pair = bounds.items(value, "a set", 2)
    if len(pair) != 2:
        raise bounds.BoundsError("a set has no nonce")
    step = bounds.integer(pair[0], "step", 0, _STEPS_MAX)
    return CheckpointId(step, bounds.text(pair[1], "nonce"))


def _names(facts: Mapping[str, Any], field: str) -> list[str]:
    return [bounds.identifier(each, field) for each in bounds.items(facts[field], field, KNOWN_MAX)]


def _text(facts: Mapping[str, Any], field: str) -> str:
    return str(printable(bounds.text(facts[field], field, _TEXT_MAX)))


def _instant(value: Any) -> float:
    return bounds.number(value, "since_mono_s", -bounds.SECONDS_MAX, bounds.SECONDS_MAX)
