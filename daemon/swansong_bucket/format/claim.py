# SPDX-License-Identifier: Apache-2.0
"""The claim: the object that gives a generation of a run to one start of the training.

docs/format.md describes the bytes.  Every writer of the bucket can write a claim, so ``decode``
checks every field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from swansong import bounds

from swansong_bucket.errors import CorruptError
from swansong_bucket.format import record
from swansong_bucket.util.forms import ID, Form, Kind, text, whole

FORMAT = "swansong-claim"
BYTES_MAX = 64 * 2**10
_IDENTITY_MAX = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimObject:
    """Content of a claim."""

    run: str
    generation: int
    start: str
    """Id of the start.  It is drawn at random, so equal ids have the same owner."""
    identity: Mapping[str, str] = field(default_factory=dict)
    """Boot id, host name and time of the claim; informational."""

    def is_shared_with(self, other: ClaimObject) -> bool:
        """Whether both give the same generation to the same start."""
        return (self.generation, self.start) == (other.generation, other.start)


def _identity(value: object, name: str) -> dict[str, str]:
    identity = bounds.mapping(value, name, _IDENTITY_MAX)
    return {
        bounds.text(key, f"a key of the {name}", bounds.ID_CHARS_MAX): bounds.text(
            each, f"{key[:40]!r} of the {name}"
        )
        for key, each in identity.items()
    }


_CLAIM = Form(
    ClaimObject,
    run=text(bounds.ID_CHARS_MAX),
    generation=whole(1, bounds.GENERATION_MAX),
    start=ID,
    identity=Kind(_identity, dict),
)


def encode(claim: ClaimObject) -> bytes:
    """The claim as the bytes of its object."""
    return record.encode(FORMAT, _CLAIM.write(claim))


def decode(data: bytes) -> ClaimObject:
    """Parse and check the bytes of a claim.

    Raises:
        CorruptError: a field is missing or out of bounds.
    """
    claim = record.read(data, FORMAT, BYTES_MAX, _CLAIM)
    if not claim.start:
        raise CorruptError("the claim names no start of the training")
    return claim
