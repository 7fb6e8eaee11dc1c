# SPDX-License-Identifier: Apache-2.0
"""The resumption: the object that records how long a resume took, and where the VM before it ended.

docs/format.md describes the bytes.  No commit and no restore depends on it.  Every writer of the
bucket can write one, so ``decode`` checks every field.
"""

from __future__ import annotations

from swansong import bounds

from swansong_bucket.format import record
from swansong_bucket.format.wall import INSTANT
from swansong_bucket.loss_records import GenerationEnd, Resumption
from swansong_bucket.util.forms import FLAG, ID, Form, Named, optional, seconds, text, whole

FORMAT = "swansong-resumption"
BYTES_MAX = 64 * 2**10

_STEP = whole(0, bounds.STEP_MAX)
_RANKS = whole(1, bounds.RANKS_MAX)
_ENDING = Form(
    GenerationEnd,
    generation=whole(1, bounds.GENERATION_MAX),
    step=_STEP,
    at=Named("wall_s", INSTANT),
    estimated=Named("is_estimated", FLAG),
    step_s=optional(seconds(0.0)),
    ranks=optional(_RANKS),
    saves_s=optional(seconds(0.0)),
    stall_s=optional(seconds(0.0)),
)
_RESUMPTION = Form(
    Resumption,
    run=text(bounds.ID_CHARS_MAX),
    generation=whole(1, bounds.GENERATION_MAX),
    vm=ID,
    ranks=_RANKS,
    node=whole(0, bounds.NODES_MAX),
    nodes=whole(1, bounds.NODES_MAX),
    booted=Named("booted_wall_s", INSTANT),
    daemon_started=Named("daemon_wall_s", INSTANT),
    download_began=Named("download_began_wall_s", optional(INSTANT)),
    download_ended=Named("download_ended_wall_s", optional(INSTANT)),
    bytes_fetched=whole(0, bounds.BYTES_MAX),
    bytes_linked=whole(0, bounds.BYTES_MAX),
    asked=Named("asked_wall_s", optional(INSTANT)),
    answered=Named("answered_wall_s", optional(INSTANT)),
    training_started=Named("started_wall_s", INSTANT),
    first_step_ended=Named("first_step_wall_s", INSTANT),
    start_step=_STEP,
    first_step=_STEP,
    restored=optional(record.REF),
    earlier=optional(_ENDING.kind),
)


def encode(resumption: Resumption) -> bytes:
    """The resumption as the bytes of its object."""
    return record.encode(FORMAT, _RESUMPTION.write(resumption))


def decode(data: bytes) -> Resumption:
    """Parse and check the bytes of a resumption.

    Raises:
        CorruptError: a field is missing or out of bounds.
    """
    return record.read(data, FORMAT, BYTES_MAX, _RESUMPTION)
