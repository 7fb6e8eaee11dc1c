# SPDX-License-Identifier: Apache-2.0
"""Notices by word of mouth: what ``swansong notify`` hands in, in earnest or as a drill."""

from __future__ import annotations

from swansong import protocol

from swansongd.model import DeadlineQuality, Notice, Severity
from swansongd.sources.metadata import shortened

MANUAL = "manual"
DRILL = "drill"


def notice_of(message: protocol.Notify, *, now_mono_s: float) -> Notice:
    """The notice that an operator's message is."""
    source = DRILL if message.drill else MANUAL
    return Notice(
        source=source,
        kind=source,
        identity=f"{source}:{shortened(message.nonce, 64)}",
        severity=Severity.IMMINENT,
        deadline_mono_s=now_mono_s + max(0.0, message.seconds_left),
        deadline_quality=DeadlineQuality.STATED,
        detail=shortened(message.reason),
    )
