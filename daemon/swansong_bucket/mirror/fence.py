# SPDX-License-Identifier: Apache-2.0
"""Which store continues the run: claims of a mirror that the primary store does not have.

Claims are made in one store, and copied to the other.  An operator promotes the mirror by a claim in it.  The
primary store lacks that claim, so each copier recognises it, and copies nothing more.

The newest claim of the mirror decides.  Copies are made in ascending order, by create-if-absent, and never
after a foreign claim was found: so no copy can hide a foreign claim by a higher number.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from swansong_bucket.errors import FencedError, NotFound, NothingToRestore, SwansongError
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.model import CommitRef
from swansong_bucket.runs import catalog
from swansong_bucket.runs.commit import claim_generation, newest_whole_commit
from swansong_bucket.stores.base import ObjectStore

PROMOTION_GAP = 1000
"""A promotion claims a number this far above the newest copied claim.  A VM of the lost region may have
claimed further numbers, which no reader must confuse with those of the mirror."""

_PROMOTED = "promoted"
"""Key of a claim's identity: the URL of the store that a promotion made the primary one."""
_LOOK_BACK = 20
"""Number of newest claims that are searched for an earlier promotion."""


class PromotedError(FencedError):
    """The mirror has a claim that the primary store does not have: the run continues there."""

    def __init__(self, mirror_url: str, generation: int) -> None:
        SwansongError.__init__(
            self,
            f"the mirror {mirror_url} has generation {generation}, which the store does not have",
            hint="The run continues in the mirror: set store.url to it.  If the store was emptied instead, "
            "choose another mirror.url",
        )
        self.own = 0
        self.newer = generation


def foreign_claim(primary: ObjectStore, mirror: ObjectStore, keys: RunKeys) -> int | None:
    """The number of the mirror's newest claim, if the primary store does not have that claim; else None.

    Costs a listing of each store, and a small GET of each.

    Raises:
        CorruptError: a listing contains an object that no swansong wrote.
        StoreError: a store failed.
    """
    # The mirror first: a claim that is made and copied meanwhile is in both.
    numbers = catalog.claimed(mirror, keys)
    if not numbers:
        return None
    number = numbers[-1]
    key = keys.generation(number)
    try:
        ours = primary.get(key)
    except NotFound:
        return number
    return None if mirror.get(key) == ours else number


@dataclass(frozen=True, slots=True, kw_only=True)
class Promotion:
    """A promotion of the mirror."""

    generation: int
    newest: CommitRef
    """The commit from which the run continues."""
    is_new: bool
    """False: an earlier call promoted the mirror, and no VM has continued there since."""


def promote(mirror: ObjectStore, keys: RunKeys, *, host: str, force: bool = False) -> Promotion:
    """Claim a generation in the mirror, so that the run continues there.

    Args:
        host: name of this machine, informational.
        force: promote a mirror in which the run continues already, which fences the VMs there.

    Raises:
        NothingToRestore: the mirror has no whole commit.
        PromotedError: the mirror was promoted before, and a VM has continued the run there.
        CorruptError, StoreError: as for :func:`claim_generation`.
    """
    newest = newest_whole_commit(mirror, keys)
    if newest is None:
        raise NothingToRestore(f"the mirror {mirror.url} has no whole commit of run {keys.run}")
    recent = catalog.newest_claims(mirror, keys, _LOOK_BACK)
    for number, claim in () if force else recent:
        promoted = None if claim is None else claim.identity.get(_PROMOTED)
        if promoted == mirror.url:
            if number != recent[0][0]:
                raise PromotedError(mirror.url, recent[0][0])
            return Promotion(generation=number, newest=newest, is_new=False)
        if promoted is not None:
            break  # the other store was promoted later: this one has its claims as copies
    identity = {"host": host, _PROMOTED: mirror.url}
    claim_of_run = claim_generation(
        mirror, keys, identity=identity, start_id=secrets.token_hex(16), gap=PROMOTION_GAP
    )
    return Promotion(generation=claim_of_run.generation, newest=newest, is_new=True)
