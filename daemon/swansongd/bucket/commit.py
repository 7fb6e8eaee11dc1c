# SPDX-License-Identifier: Apache-2.0
"""The durability point: claiming a generation, and creating manifests.

Three rules make two VMs with one run harmless to each other, whatever their clocks say.  A generation
is claimed by create-if-absent and never given back; each commit compares the claim in the store with the
one that its writer made.  Every key carries the generation.  A manifest is
created and never replaced, and a refused create is settled by reading back: the same nonce means that
it was our own, a reply lost on the way.

A commit is reported only after the listing that readers use contains its manifest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import structlog
from swansong import bounds
from swansong.bounds import BoundsError

from swansongd.bucket import catalog
from swansongd.bucket import claim as claims
from swansongd.bucket import manifest as manifests
from swansongd.bucket.claim import ClaimObject
from swansongd.bucket.keys import RunKeys
from swansongd.bucket.manifest import Manifest
from swansongd.errors import (
    CorruptError,
    Exists,
    FencedError,
    StoreError,
    TooLarge,
    UnreadableError,
)
from swansongd.model import CommitRef
from swansongd.stores.base import ObjectStore

_CLAIM_ATTEMPTS_MAX = 100
_LOOK_BACK = 5
"""The claim of a job start is among this many newest ones."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Claim:
    """A generation that is ours."""

    content: ClaimObject
    """Of the claim in the store; over several VMs another VM may have made it."""
    honours_if_absent: bool
    """Whether the store refused to create the claim a second time, as it must."""

    @property
    def generation(self) -> int:
        return self.content.generation


def claim_generation(
    store: ObjectStore,
    keys: RunKeys,
    *,
    identity: Mapping[str, str],
    nonce: str,
    job_start_id: str = "",
) -> Claim:
    """Claim the next generation of the run; whoever loses the race for a number takes a later one.

    The claim is then created once more: a store that lets that happen ignores create-if-absent.  The
    bytes are the same, so nothing is damaged by asking.

    With a ``job_start_id``, VMs that name the same one share a generation: the first claims it.

    Args:
        identity: who claims: instance, boot, host name; for people.
        nonce: tells this claim from everybody else's.
        job_start_id: names one start of a job over several VMs; empty for a run on one VM.

    Raises:
        FencedError: the job start has a generation, and another one has taken the run over since.
        CorruptError: the format has no further number, the listing contains an object that no swansong
            wrote, or a field of the claim is out of bounds; nothing was claimed.
        StoreError: the store failed, or the race was lost too often.
    """
    numbers = catalog.claimed(store, keys)
    recent = catalog.counting_claims(store, keys, numbers, enough=_LOOK_BACK if job_start_id else 1)
    newest = recent[0][0] if recent else 0
    for number, found in recent if job_start_id else ():
        if found is not None and found.job_start_id == job_start_id:
            if number < newest:
                raise FencedError(number, newest)
            return Claim(found, honours_if_absent=True)
    taken = set(numbers)
    generation = newest
    for _ in range(_CLAIM_ATTEMPTS_MAX):
        generation += 1
        while generation in taken:  # by unsigned claims above the newest signed one
            generation += 1
        if generation > bounds.GENERATION_MAX:
            raise _no_number_left(store, keys, generation - 1)
        key = keys.generation(generation)
        claim = ClaimObject(
            run=keys.run,
            generation=generation,
            nonce=nonce,
            job_start_id=job_start_id,
            identity=identity,
        )
        data = claims.encode(claim, keys.signer)
        claims.decode(data, keys.signer)  # what no other VM could read must not be claimed
        try:
            store.put(key, data, if_absent=True)
        except Exists:
            winner = catalog.claim_of(store, keys, generation)
            if winner is not None and job_start_id and winner.job_start_id == job_start_id:
                return Claim(winner, honours_if_absent=True)
            if winner is None or winner.nonce != nonce:
                continue
        try:
            store.put(key, data, if_absent=True)
        except Exists:
            return Claim(claim, honours_if_absent=True)
        return Claim(claim, honours_if_absent=False)
    raise StoreError(f"lost the race for {_CLAIM_ATTEMPTS_MAX} generations of run {keys.run}")


def _no_number_left(store: ObjectStore, keys: RunKeys, newest: int) -> CorruptError:
    return CorruptError(
        f"run {keys.run} cannot claim generation {newest + 1}: the last number of the format, "
        f"{newest}, is taken",
        hint=f"Delete {store.url}/{keys.generation(newest)} if no VM of this run wrote it, "
        "else continue under another run.name",
    )


def newest_whole_commit(store: ObjectStore, keys: RunKeys) -> CommitRef | None:
    """The newest commit that all its nodes have made; with a signing key, the newest signed one.

    Its shards are not looked at.

    Raises:
        CorruptError: the listing contains an object that no swansong wrote, or the store refuses to
            return the only commits that might count.
        StoreError: the store could not be asked.
    """
    unread: UnreadableError | None = None
    for found in catalog.list_commits(store, keys):
        try:
            if found.is_complete and (keys.signer is None or _is_signed(store, keys, found)):
                return found.ref
        except UnreadableError as error:
            _log.error("commit_skipped", commit=str(found.ref), reason=error.line())
            unread = unread or error
    if unread is not None:
        raise unread
    return None


def parts_committed(store: ObjectStore, keys: RunKeys, ref: CommitRef, nodes: int) -> int:
    """The number of nodes that have committed their parts of this checkpoint; ``nodes`` when it is whole.

    With a signing key, a checkpoint with an unsigned part is not whole: no reader would take it.

    Raises:
        CorruptError: the listing contains an object that no swansong wrote, or the store refuses to
            return a part.
        StoreError: the store could not be asked.
    """
    for found in catalog.list_commits(store, keys, ref):
        if found.nodes != nodes:
            continue
        is_sound = not found.is_complete or keys.signer is None or _is_signed(store, keys, found)
        return len(found.manifest_keys) if is_sound else nodes - 1
    return 0


def _is_signed(store: ObjectStore, keys: RunKeys, found: catalog.Commit) -> bool:
    try:
        catalog.load(store, keys, found)
    except UnreadableError:
        raise  # perhaps it is signed
    except CorruptError as error:
        _log.error("commit_skipped", commit=str(found.ref), reason=error.line())
        return False
    return True


def ensure_not_fenced(store: ObjectStore, keys: RunKeys, claim: ClaimObject) -> None:
    """Look whether another VM has taken the run over; costs a small listing and a small GET.

    No VM deletes claims, but an operator may empty the prefix while VMs run.  The claim is then made again
    by create-if-absent, so that of all VMs at most one continues under the number.

    Args:
        claim: of the generation that this VM holds.

    Raises:
        FencedError: a newer generation is claimed, or another VM has claimed this one; ``newer`` says which.
        CorruptError: the listing contains an object that no swansong wrote, or the claim makes no sense.
        StoreError: the store could not be asked.
    """
    newest = catalog.newest_generation(store, keys, above=claim.generation)
    if newest > claim.generation:
        raise FencedError(claim.generation, newest)
    found = catalog.claim_of(store, keys, claim.generation) or _claimed_again(store, keys, claim)
    if not found.is_shared_with(claim):
        raise FencedError(claim.generation, claim.generation)


def _claimed_again(store: ObjectStore, keys: RunKeys, claim: ClaimObject) -> ClaimObject:
    """Make the claim again where it is gone; returns the claim that is there then."""
    key = keys.generation(claim.generation)
    try:
        store.put(key, claims.encode(claim, keys.signer), if_absent=True)
    except Exists:
        try:
            return claims.decode(store.get(key), keys.signer)
        except CorruptError as error:
            if keys.signer is not None:
                return claim  # no VM with the key takes a number that an unsigned object has
            raise CorruptError(
                f"{store.url}/{key} is not the claim that this VM made: {error}",
                hint="Delete it if no VM of this run wrote it",
            ) from None
    _log.warning(
        "claim_made_again",
        generation=claim.generation,
        claim=f"{store.url}/{key}",
        hint="The claim of this VM was deleted: do not empty the prefix of a run that is training",
    )
    return claim


def commit(
    store: ObjectStore,
    keys: RunKeys,
    manifest: Manifest,
    claim: ClaimObject,
    *,
    reads_back: bool = False,
) -> None:
    """Create the manifest.  When this returns, the checkpoint exists, and readers find it.

    Args:
        claim: of the generation that this VM holds.
        reads_back: read the manifest back as a reader does, and compare.

    Raises:
        BoundsError: no reader would accept the manifest; nothing was written, and never can be.
        FencedError: another VM has taken the run over; no manifest was written.
        Exists: another set is committed under this generation and step; it stands.
        CorruptError: the store returns another manifest than was written, or the listing contains an
            object that no swansong wrote.
        StoreError: the store failed, or its listing does not contain the manifest; it may exist or not,
            and trying again is safe.
    """
    data = manifests.encode(manifest, keys.signer)
    try:
        written = manifests.decode(data, keys.signer)
    except CorruptError as error:
        raise BoundsError(str(error)) from None
    if manifest.generation != claim.generation:
        raise FencedError(manifest.generation, claim.generation)  # by this VM, after a rollback
    ensure_not_fenced(store, keys, claim)
    key = keys.commit(manifest.ref, manifest.node, manifest.nodes)
    is_new = True
    try:
        store.put(key, data, if_absent=True)
    except Exists:
        if not _is_ours(store, keys, key, manifest):
            raise
        is_new = False  # by an attempt whose reply was lost, perhaps of an earlier life: read back just now
    found = next(
        (
            found
            for found in catalog.list_commits(store, keys, manifest.ref)
            if key in found.manifest_keys.values()
        ),
        None,
    )
    if found is None:
        raise StoreError(
            f"{store.url}/{key} was created, and the listing of the store does not contain it",
            hint="No reader would find this commit; see whether the store lists what it has",
        )
    if reads_back and is_new and catalog.load_node(store, keys, found, manifest.node) != written:
        raise CorruptError(f"{store.url}/{key} contains another manifest than was written")


def _is_ours(store: ObjectStore, keys: RunKeys, key: str, manifest: Manifest) -> bool:
    """Whether the object is a manifest of the same set for the same key.

    The nonce alone does not tell: a signed manifest of the set can be copied from another generation.
    """
    try:
        found = manifests.decode(store.get(key), keys.signer)
    except (CorruptError, TooLarge):
        return False
    return _names(found) == _names(manifest)


def _names(manifest: Manifest) -> tuple[object, ...]:
    return manifest.nonce, manifest.run, manifest.ref, manifest.node, manifest.nodes
