# SPDX-License-Identifier: Apache-2.0
"""``manual`` and ``drill``: notices of ``swansong notify`` and ``swansong drill``."""

from __future__ import annotations

from swansong import protocol
from swansong_bucket.model import DRILL, DeadlineQuality, Notice, Severity

from swansongd.sources.metadata import shortened

MANUAL = "manual"
SOON_S = 120.0
"""A notice with more time is scheduled: a checkpoint now, and the evacuation when the deadline is near."""


def identity_of(nonce: str, *, drill: bool) -> str:
    """The identity of a notice with this nonce."""
    return f"{DRILL if drill else MANUAL}:{shortened(nonce, 32)}"


def notice_of(message: protocol.Notify, *, now_mono_s: float) -> Notice:
    """The notice in an operator's message."""
    source = DRILL if message.drill else MANUAL
    return Notice(
        source=source,
        kind=source,
        identity=identity_of(message.nonce, drill=message.drill),
        severity=Severity.IMMINENT if message.seconds_left <= SOON_S else Severity.SCHEDULED,
        deadline_mono_s=now_mono_s + max(0.0, message.seconds_left),
        deadline_quality=DeadlineQuality.STATED,
        detail=shortened(message.reason),
    )
