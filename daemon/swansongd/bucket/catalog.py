# SPDX-License-Identifier: Apache-2.0
"""The commits and generations of a run, as the listing of the bucket shows them.

Two rules keep a foreign object from being taken for an empty run.  A key below ``commits/`` or
``generations/`` that no writer formats is an error that names the object to delete.  With a signing key
only signed claims and manifests count, so that such an object is logged and passed over instead.

One rule separates an object that cannot be read from a store that cannot be read (:func:`refused`).  Readers
pass over the commit of such an object, as over a damaged one, and end with an error of the store.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from heapq import nlargest
from itertools import islice
from operator import attrgetter, itemgetter
from typing import TypeVar

import structlog

from swansongd.bucket import claim as claims
from swansongd.bucket import farewell as farewells
from swansongd.bucket.claim import ClaimObject
from swansongd.bucket.keys import RunKeys
from swansongd.bucket.manifest import BYTES_MAX as MANIFEST_BYTES_MAX
from swansongd.bucket.manifest import Manifest, decode
from swansongd.core.cadence import History
from swansongd.errors import CorruptError, NotFound, Permanent, TooLarge, UnreadableError
from swansongd.model import CheckpointKind, CommitRef, Verdict
from swansongd.stores.base import ObjectStore
from swansongd.util.threads import parallel

LISTED_MAX = 200_000
"""Claims, or manifests, that a reader holds; of more, only the newest."""
COMMIT_BYTES_MAX = 256 * 2**20
"""Manifests of one commit, over all nodes."""
IN_MEMORY_BYTES = 64 * 2**20
"""Size of the manifests that :func:`load_each` holds at once, or one commit of more; decoded, about twice."""
READS = 16
"""Commits that :func:`load_each` reads at once."""
EXAMINE_CPU_S = 60.0
"""Processor time for the manifests of one commit, over all nodes.  Waiting for the store does not count."""
WITNESSES_MAX = 5
"""Claims that :func:`refused` asks for, besides that of the generation itself."""
HISTORY_MAX = 8
"""Earlier generations that the history covers."""
HISTORY_CLAIMS_MAX = 40
"""Newest claims that the history examines to find the ones that count."""
FENCE_CLAIMS_MAX = 20
"""Newest claims whose signature the fence checks.  Safety does not depend on the fence."""
_LIFE_S_MAX = 366 * 24 * 3600.0
"""Longest life of a VM that counts: the times in claims may be wrong or forged."""
_FAREWELLS_MAX = 100
"""Farewells of one generation that are read."""

_decoding = threading.Lock()
"""One manifest at a time, however many threads read some: the bound on memory is that of one."""

T = TypeVar("T")

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """The manifests of one (generation, step); a checkpoint once all its nodes have committed."""

    ref: CommitRef
    nodes: int
    manifest_keys: Mapping[int, str]
    """By node."""
    size_bytes: int = 0
    """Of all these manifests, by the listing."""

    @property
    def is_complete(self) -> bool:
        return len(self.manifest_keys) == self.nodes  # keys of nodes beyond that are not parsed


def list_commits(store: ObjectStore, keys: RunKeys, ref: CommitRef | None = None) -> list[Commit]:
    """The commits of the run, complete or not, newest first by (generation, step).

    Args:
        ref: only this one; costs one small request.

    Raises:
        CorruptError: an object has a key that no writer formats; names it.
        StoreError: the listing failed.
    """
    prefix = keys.commits if ref is None else keys.parts(ref)
    found, foreign = _listed(store, prefix, keys.parse_commit)
    if foreign:
        if keys.signer is None or not found:
            raise _foreign(store, foreign)
        _log.error("foreign_objects_ignored", first=foreign[0], count=len(foreign))
    manifest_keys: defaultdict[tuple[CommitRef, int], dict[int, str]] = defaultdict(dict)
    sizes_bytes: defaultdict[tuple[CommitRef, int], int] = defaultdict(int)
    for key, size_bytes, parsed in found:
        manifest_keys[parsed.ref, parsed.nodes][parsed.node] = key
        sizes_bytes[parsed.ref, parsed.nodes] += size_bytes
    return [
        Commit(
            ref=ref,
            nodes=nodes,
            manifest_keys=manifest_keys[ref, nodes],
            size_bytes=sizes_bytes[ref, nodes],
        )
        for ref, nodes in sorted(manifest_keys, reverse=True)
    ]


def load(store: ObjectStore, keys: RunKeys, commit: Commit) -> tuple[Manifest, ...]:
    """The manifests of the commit that are there, by node.

    Raises:
        UnreadableError: the store refuses one, and returns other objects.
        CorruptError: one is damaged, gone, not signed, or does not match its key; or together
            they are larger than any honest ones, or cost more processor time.
        StoreError: the store could not be asked.
    """
    limit_bytes = min(COMMIT_BYTES_MAX, commit.nodes * MANIFEST_BYTES_MAX)
    if commit.size_bytes > limit_bytes:
        raise CorruptError(
            f"its manifests have {commit.size_bytes} bytes; the limit is {limit_bytes}"
        )
    began_s = time.thread_time()
    manifests = []
    for node in sorted(commit.manifest_keys):
        manifests.append(load_node(store, keys, commit, node))
        if time.thread_time() - began_s > EXAMINE_CPU_S:
            raise CorruptError(
                f"its manifests cost more than {EXAMINE_CPU_S:g} s of processor time"
            )
    return tuple(manifests)


def load_node(store: ObjectStore, keys: RunKeys, commit: Commit, node: int) -> Manifest:
    """The manifest of one node of the commit.

    Raises:
        CorruptError, StoreError: as for :func:`load`.
    """
    what = f"the manifest of node {node}"
    try:
        data = _content(store, commit.manifest_keys[node], what)
    except Permanent as error:
        raise refused(store, keys, commit.ref.generation, what, error) from error
    with _decoding:
        manifest = decode(data, keys.signer)
    said = (manifest.run, manifest.ref, manifest.node, manifest.nodes)
    if said != (keys.run, commit.ref, node, commit.nodes):
        raise CorruptError(
            f"the manifest of node {node} is that of run {manifest.run!r:.100} {manifest.ref} "
            f"node {manifest.node} of {manifest.nodes}"
        )
    return manifest


def load_each(
    store: ObjectStore,
    keys: RunKeys,
    commits: Sequence[Commit],
    take: Callable[[Commit, tuple[Manifest, ...] | CorruptError], None],
    *,
    progress: Callable[[int, int], None] | None = None,
    stop: threading.Event | None = None,
) -> None:
    """Load many commits, several at a time, and hand each to ``take``: manifests, or why they do not count.

    Memory is bounded by :data:`IN_MEMORY_BYTES`, whatever the number of commits, if ``take`` keeps none.

    Args:
        take: called from any thread, one call at a time, in any order.
        progress: told the commits done and the commits in all, in the same way.

    Raises:
        StoreError: the store could not be asked.
        Stopped: ``stop`` was set.
    """
    room = _Room(IN_MEMORY_BYTES)
    taking = threading.Lock()
    done = 0

    def one(commit: Commit) -> None:
        nonlocal done
        with room.of(commit.size_bytes):
            loaded: tuple[Manifest, ...] | CorruptError
            try:
                loaded = load(store, keys, commit)
            except CorruptError as error:
                loaded = error
            with taking:
                take(commit, loaded)
                done += 1
                if progress is not None:
                    progress(done, len(commits))

    parallel(commits, one, threads=min(READS, len(commits)), stop=stop)


class _Room:
    """Bounds the sum of what several threads hold; what is larger than all of it is held alone."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._held_bytes = 0
        self._holders = 0
        self._changed = threading.Condition()

    @contextmanager
    def of(self, size_bytes: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(
                lambda: not self._holders or self._held_bytes + size_bytes <= self._size_bytes
            )
            self._holders += 1
            self._held_bytes += size_bytes
        try:
            yield
        finally:
            with self._changed:
                self._holders -= 1
                self._held_bytes -= size_bytes
                self._changed.notify_all()


# ---------------------------------------------------------------- claims


def claimed(store: ObjectStore, keys: RunKeys) -> list[int]:
    """The numbers of all claims, ascending, signed or not.

    Raises:
        CorruptError: an object has a key that no writer formats; names it.
        StoreError: the listing failed.
    """
    found, foreign = _listed(store, keys.generations, keys.parse_generation)
    if foreign:
        if keys.signer is None:
            raise _foreign(store, foreign)
        _log.error("foreign_objects_ignored", first=foreign[0], count=len(foreign))
    return sorted(number for _, _, number in found)


def claim_of(store: ObjectStore, keys: RunKeys, generation: int) -> ClaimObject | None:
    """The claim of a generation; None when it is gone, not signed, not of this run, or makes no sense.

    Raises:
        StoreError: the store could not be asked.
    """
    key = keys.generation(generation)
    try:
        claim = claims.decode(_content(store, key, "the claim"), keys.signer)
    except CorruptError:
        return None
    return claim if (claim.run, claim.generation) == (keys.run, generation) else None


def counting_claims(
    store: ObjectStore,
    keys: RunKeys,
    numbers: Sequence[int],
    *,
    enough: int,
    examined_max: int = LISTED_MAX,
) -> list[tuple[int, ClaimObject | None]]:
    """The newest ``enough`` claims that count, newest first: with a signing key, those that it has signed.

    Args:
        numbers: the claims to choose from, ascending.
        examined_max: claims that are read at most.

    Raises:
        StoreError: the store could not be asked.
    """
    counting: list[tuple[int, ClaimObject | None]] = []
    is_logged = False
    for number in islice(reversed(numbers), examined_max):
        claim = claim_of(store, keys, number)
        if claim is not None or keys.signer is None:
            counting.append((number, claim))
            if len(counting) == enough:
                break
        elif not is_logged:
            is_logged = True  # the newest one stands for all: there may be thousands
            _log.error(
                "unsigned_claim_ignored",
                claim=f"{store.url}/{keys.generation(number)}",
                hint="Find out who wrote it, then delete it; its number is not used again meanwhile",
            )
    return counting


def newest_generation(store: ObjectStore, keys: RunKeys, *, above: int = 0) -> int:
    """The highest generation that anybody has claimed; ``above`` when there is no higher one.

    Raises:
        CorruptError, StoreError: as for :func:`claimed`.
    """
    newer = [number for number in claimed(store, keys) if number > above]
    if keys.signer is not None:
        signed = counting_claims(store, keys, newer, enough=1, examined_max=FENCE_CLAIMS_MAX)
        newer = [number for number, _ in signed]
    return max(newer, default=above)


# ---------------------------------------------------------------- history


def history(
    store: ObjectStore,
    keys: RunKeys,
    generation: int,
    *,
    gives_up: Callable[[], bool] = lambda: False,
) -> History:
    """How long the run's earlier VMs lived, and how many went without a SAFE farewell.

    Wall clocks are compared here: what comes of it is an estimate, and orders nothing.

    Args:
        generation: our own; the newest ones before it are looked at.
        gives_up: asked between requests; once it returns True, the history is empty.

    Raises:
        CorruptError, StoreError: as for :func:`claimed` and :func:`list_commits`.
    """
    numbers = [number for number in claimed(store, keys) if number < generation]
    # A bucket writer can plant any number of claims.
    earlier = counting_claims(
        store, keys, numbers, enough=HISTORY_MAX, examined_max=HISTORY_CLAIMS_MAX
    )
    if not earlier:
        return History()
    newest: dict[int, Commit] = {}
    for commit in list_commits(store, keys):
        newest.setdefault(commit.ref.generation, commit)
    next_boot = _identity(claim_of(store, keys, generation)).get("boot_id")
    observed_s, uncovered = 0.0, 0
    for number, claim in earlier:
        identity = _identity(claim)
        verdicts = _verdicts(store, keys, number, gives_up)
        if gives_up():
            return History()
        last, kind = _last_commit(store, keys, newest.get(number))
        ends = [instant_s(last), *(instant_s(written) for _, written in verdicts)]
        begun_s = instant_s(identity.get("claimed", ""))
        ended_s = max((end for end in ends if end is not None), default=None)
        if begun_s is not None and ended_s is not None:
            observed_s += min(max(0.0, ended_s - begun_s), _LIFE_S_MAX)
        is_covered = any(verdict == Verdict.SAFE for verdict, _ in verdicts)
        # The same boot twice is a rollback, or a daemon that has lost its claim; a final commit, the end.
        is_same_vm = next_boot is not None and identity.get("boot_id") == next_boot
        if not (is_covered or is_same_vm or kind is CheckpointKind.FINAL):
            uncovered += 1
        next_boot = identity.get("boot_id")
    return History(observed_s, uncovered)


def _identity(claim: ClaimObject | None) -> Mapping[str, str]:
    return {} if claim is None else claim.identity


def _verdicts(
    store: ObjectStore, keys: RunKeys, generation: int, gives_up: Callable[[], bool]
) -> list[tuple[str, str]]:
    """Verdict and time of the farewells of a generation; those that make no sense are left out."""
    found = []
    for info in islice(store.list(keys.farewell_prefix(generation)), _FAREWELLS_MAX):
        if gives_up():
            break
        try:
            found.append(farewells.verdict_and_time(_content(store, info.key, "the farewell")))
        except CorruptError:
            continue
    return found


def farewell_with_commit(store: ObjectStore, keys: RunKeys) -> str | None:
    """Key of a farewell that names a commit of the run; None if the newest farewells name none.

    Once a run has a commit, each later farewell names one.
    """
    newest = nlargest(_FAREWELLS_MAX, store.list(keys.farewells), key=attrgetter("key"))
    for info in newest:
        try:
            if farewells.names_commit(_content(store, info.key, "the farewell")):
                return info.key
        except CorruptError:
            continue
    return None


def _last_commit(
    store: ObjectStore, keys: RunKeys, commit: Commit | None
) -> tuple[str, CheckpointKind | None]:
    try:
        manifests = load(store, keys, commit) if commit is not None else ()
    except CorruptError:
        manifests = ()
    return (manifests[0].created, manifests[0].kind) if manifests else ("", None)


def instant_s(text: str) -> float | None:
    """Seconds since 1970 of a wall-clock time as text; None if the text is not a time."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


# ---------------------------------------------------------------- objects and listings


def refused(
    store: ObjectStore, keys: RunKeys, generation: int, what: str, error: Permanent
) -> UnreadableError:
    """The error of a single object, which the store refuses while it returns a claim of the run.

    Lost rights and wrong settings concern the claims as well: then ``error`` is that of the store.  An object
    alone has reasons of its own: another owner, another encryption key, moved to an archive.

    Args:
        generation: whose claim is asked for first; should it be gone, some of the newest ones.

    Raises:
        StoreError: ``error`` itself, or the store could not be asked for a claim.
    """
    if not _is_returned(store, keys, generation):
        try:
            newest = claimed(store, keys)[-WITNESSES_MAX:]
        except CorruptError:
            newest = []
        if not any(_is_returned(store, keys, number) for number in reversed(newest)):
            raise error
    return UnreadableError(f"{what} cannot be read: {error}", hint=error.hint)


def _is_returned(store: ObjectStore, keys: RunKeys, generation: int) -> bool:
    try:
        store.get(keys.generation(generation))
    except TooLarge:
        return True  # whether it makes sense is not the question
    except Permanent:
        return False
    return True


def _content(store: ObjectStore, key: str, what: str) -> bytes:
    """The bytes of a small object; what is wrong with the object itself is a CorruptError."""
    try:
        return store.get(key)
    except NotFound:
        raise CorruptError(f"{what} is gone") from None
    except TooLarge as error:
        raise CorruptError(f"{what} is too large: {error}") from None


def _listed(
    store: ObjectStore, prefix: str, parse: Callable[[str], T | None]
) -> tuple[list[tuple[str, int, T]], list[str]]:
    """Key, size and parsed key of the newest objects below ``prefix``, and the keys that do not parse.

    Consoles create empty objects whose key ends in a slash, to show a folder: those are neither.
    """
    foreign: list[str] = []

    def ours() -> Iterator[tuple[str, int, T]]:
        for info in store.list(prefix):
            parsed = parse(info.key)
            if parsed is not None:
                yield info.key, info.size_bytes, parsed
            elif not (info.key.endswith("/") and not info.size_bytes) and len(foreign) < LISTED_MAX:
                foreign.append(info.key)

    # By key, in which numbers have a fixed width: a listing comes in any order.
    newest = nlargest(LISTED_MAX, ours(), key=itemgetter(0))
    return newest, foreign


def _foreign(store: ObjectStore, keys: Sequence[str]) -> CorruptError:
    more = f", and {len(keys) - 1} more," if len(keys) > 1 else ""
    return CorruptError(
        f"the object {f'{store.url}/{keys[0]}'!r:.1500}{more} has a key that no swansong of this version "
        "writes",
        hint="Upgrade swansong if a newer one wrote it; else delete it",
    )
