# SPDX-License-Identifier: Apache-2.0
"""Records of the bucket with other fields than a writer gives them, a key, and rules of retention."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from swansong_bucket.config.sections import RetentionConfig
from swansong_bucket.format import farewell as farewells
from swansong_bucket.format.farewell import Farewell
from swansong_bucket.loss_records import EvacuationRecord
from swansong_bucket.model import CommitRef, Verdict
from swansong_bucket.runs.signing import SigningKey
from swansongd.core.events import Conclude

KEY = SigningKey(b"k" * 32)
NO_RULE = RetentionConfig(
    keep_last=0,
    keep_starts_s=0.0,
    keep_hourly=0,
    keep_daily=0,
    keep_weekly=0,
    keep_monthly=0,
    keep_best=0,
)
"""Prune keeps only what no configuration gives up."""


def record_of(body: Mapping[str, object]) -> bytes:
    """The bytes of a record with these fields, with the digest that matches them."""
    fields = {name: value for name, value in body.items() if name != "digest"}
    digest = hashlib.sha256(_canonical(fields)).hexdigest()
    return _canonical({**fields, "digest": f"sha256:{digest}"})


def changed(data: bytes, **changes: object) -> bytes:
    """A record with other values of these fields."""
    return record_of(json.loads(data) | changes)


def farewell(
    verdict: Verdict = Verdict.LOST,
    commit: CommitRef | None = None,
    *,
    generation: int = 1,
    written: str = "2030-01-01T00:00:00Z",
) -> bytes:
    """A farewell of the run ``r``."""
    made = Farewell(
        run="r",
        generation=generation,
        conclusion=Conclude("e", verdict, "", commit, 0.0),
        evacuation=EvacuationRecord(opened_wall_s=0.0),
        written=written,
    )
    return farewells.encode(made)


def _canonical(body: Mapping[str, object]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
