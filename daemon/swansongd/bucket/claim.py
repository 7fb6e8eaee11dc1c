# SPDX-License-Identifier: Apache-2.0
"""The claim: the object that gives a generation of a run to one VM, or to one start of a job.

docs/format-objects.md describes the bytes.  Every writer of the bucket can write a claim, so ``decode``
checks every field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from swansong import bounds
from swansong.bounds import BoundsError

from swansongd.bucket.signing import Signer
from swansongd.errors import CorruptError

FORMAT = "swansong-claim"
VERSION = 1
BYTES_MAX = 64 * 2**10
_IDENTITY_MAX = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimObject:
    """Content of a claim."""

    run: str
    generation: int
    nonce: str
    """Distinguishes this claim from all others."""
    job_start_id: str = ""
    """Identifies one start of a job over several VMs, which share the generation; else empty."""
    identity: Mapping[str, str] = field(default_factory=dict)
    """Boot id, host name and time of the claim; informational."""

    def is_shared_with(self, other: ClaimObject) -> bool:
        """Whether both give the same generation to the same VM, or to the same start of a job."""
        is_same_start = bool(self.job_start_id) and self.job_start_id == other.job_start_id
        return self.generation == other.generation and (self.nonce == other.nonce or is_same_start)


def encode(claim: ClaimObject, signer: Signer | None = None) -> bytes:
    """The claim as the bytes of its object, signed if there is a ``signer``."""
    body: dict[str, object] = {
        "version": VERSION,
        "run": claim.run,
        "generation": claim.generation,
        "nonce": claim.nonce,
        "identity": dict(claim.identity),
    }
    if claim.job_start_id:
        body["job_start_id"] = claim.job_start_id
    if signer is not None:
        body = signer.signed(FORMAT, body)
    return json.dumps(body, sort_keys=True).encode()


def decode(data: bytes, signer: Signer | None = None) -> ClaimObject:
    """Parse and check the bytes of a claim.

    Raises:
        CorruptError: a field is missing or out of bounds, or ``signer`` did not sign it.
    """
    try:
        body = bounds.json_object(data, "the claim", BYTES_MAX)
        bounds.integer(body.get("version"), "version of the claim", VERSION, VERSION)
        identity = bounds.mapping(body.get("identity"), "identity of the claim", _IDENTITY_MAX)
        claim = ClaimObject(
            run=bounds.text(body.get("run"), "run of the claim", bounds.ID_CHARS_MAX),
            generation=bounds.integer(
                body.get("generation"), "generation of the claim", 1, bounds.GENERATION_MAX
            ),
            nonce=bounds.identifier(body.get("nonce"), "nonce of the claim"),
            job_start_id=bounds.text(
                body.get("job_start_id", ""), "job_start_id of the claim", bounds.ID_CHARS_MAX
            ),
            identity={
                bounds.text(name, "a key of the identity", bounds.ID_CHARS_MAX): bounds.text(
                    value, f"{name[:40]!r} of the identity"
                )
                for name, value in identity.items()
            },
        )
    except BoundsError as error:
        raise CorruptError(str(error)) from None
    if signer is not None and not signer.is_valid(FORMAT, body):
        raise CorruptError("the claim has no signature of this key")
    return claim
