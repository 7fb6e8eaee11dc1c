# SPDX-License-Identifier: Apache-2.0
"""The claim: the object that gives a generation of a run to one start of the training.

docs/format.md describes the bytes.  Every writer of the bucket can write a claim, so ``decode``
checks every field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from swansong import bounds
from swansong.bounds import BoundsError

from swansong_bucket.errors import CorruptError
from swansong_bucket.format import record

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


def encode(claim: ClaimObject) -> bytes:
    """The claim as the bytes of its object."""
    body = {
        "run": claim.run,
        "generation": claim.generation,
        "start": claim.start,
        "identity": dict(claim.identity),
    }
    return record.encode(FORMAT, body)


def decode(data: bytes) -> ClaimObject:
    """Parse and check the bytes of a claim.

    Raises:
        CorruptError: a field is missing or out of bounds.
    """
    body = record.decode(data, FORMAT, BYTES_MAX)
    try:
        identity = bounds.mapping(body.get("identity"), "identity of the claim", _IDENTITY_MAX)
        claim = ClaimObject(
            run=bounds.text(body.get("run"), "run of the claim", bounds.ID_CHARS_MAX),
            generation=bounds.integer(
                body.get("generation"), "generation of the claim", 1, bounds.GENERATION_MAX
            ),
            start=bounds.identifier(body.get("start"), "start of the claim"),
            identity={
                bounds.text(name, "a key of the identity", bounds.ID_CHARS_MAX): bounds.text(
                    value, f"{name[:40]!r} of the identity"
                )
                for name, value in identity.items()
            },
        )
    except BoundsError as error:
        raise CorruptError(str(error)) from None
    if not claim.start:
        raise CorruptError("the claim names no start of the training")
    return claim
