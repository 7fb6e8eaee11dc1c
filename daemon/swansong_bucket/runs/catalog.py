# SPDX-License-Identifier: Apache-2.0
"""The commits and generations of a run, from listings of the bucket.

A key below ``commits/`` or ``generations/`` that no writer formats is an error, which names the object to
delete: a foreign object never makes a run look empty.  With a signing key, an object that no holder of the
key has created is logged and passed over, at the price of the listing.

An object that cannot be read differs from a store that cannot be read, see :func:`refused`.  Readers skip the
commit of such an object, as a damaged one, and fail on an error of the store.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from heapq import nlargest
from itertools import islice
from typing import Generic, Protocol, TypeVar

import structlog
from swansong.bounds import GENERATION_MAX

from swansong_bucket.errors import (
    CorruptError,
    MissingError,
    NotFound,
    NothingToRestore,
    Permanent,
    TooLarge,
    UnreadableError,
)
from swansong_bucket.format import claim as claims
from swansong_bucket.format import farewell as farewells
from swansong_bucket.format import wall
from swansong_bucket.format.claim import ClaimObject
from swansong_bucket.format.farewell import RecordedEvacuation
from swansong_bucket.format.keys import SIGNED, UNSIGNED, ManifestPlace, RunKeys
from swansong_bucket.format.manifest import BYTES_MAX as MANIFEST_BYTES_MAX
from swansong_bucket.format.manifest import Manifest, decode
from swansong_bucket.loss_records import History
from swansong_bucket.model import CheckpointKind, CommitRef, Verdict
from swansong_bucket.stores.base import ObjectInfo, ObjectStore, all_pages
from swansong_bucket.util.threads import parallel

LISTED_MAX = 200_000
"""Limit of the claims, and of the manifests, that a reader holds: the newest ones."""
COMMIT_BYTES_MAX = 256 * 2**20
"""Size limit of the manifests of one commit, over all nodes."""
IN_MEMORY_BYTES = 64 * 2**20
"""Size limit of the manifests that :func:`load_each` holds at the same time, except for one larger commit.
Decoded manifests take about twice this size."""
READS = 16
"""Number of commits that :func:`load_each` reads in parallel."""
MANIFEST_READS = 8
"""Number of manifests of one commit that are read in parallel."""
EXAMINE_CPU_S = 60.0
"""Limit of the processor time for the manifests of one commit, without the time of requests."""
WITNESSES_MAX = 5
"""Number of claims that :func:`refused` reads, besides that of the generation itself."""
HISTORY_MAX = 8
"""Number of earlier VMs in the history."""
HISTORY_LISTED_MAX = 40
"""Number of newest generations whose claims the history lists; older ones are read by their number."""
HISTORY_CLAIMS_MAX = 100
"""Number of claims that the history reads, besides our own."""
_LIFE_S_MAX = 366 * 24 * 3600.0
"""Limit of the lifetime of a VM in the history: times in claims may be wrong or forged."""
_VM_IDS = ("vm", "boot_id")
"""The fields of a claim that identify a VM; older claims have only the boot."""
_FAREWELLS_MAX = 100
"""Limit of the farewells of one generation that are read: its newest ones."""
FRESH_FAREWELLS_MAX = 1000
"""A run with more farewells is not fresh."""

_FURTHER_BACK = 8
"""Each further listing of :func:`newest_commits` goes back this many times as far."""

_decoding = threading.Lock()
"""Threads decode one manifest at a time, which limits the memory."""

T = TypeVar("T")


class Record(Protocol):
    """A record that names its run and its generation."""

    @property
    def run(self) -> str: ...
    @property
    def generation(self) -> int: ...


R = TypeVar("R", bound=Record)

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """The manifests of one (generation, step); a checkpoint if all its nodes have committed."""

    ref: CommitRef
    nodes: int
    manifests: Mapping[int, ObjectInfo]
    """By node, as the listing has them."""

    @property
    def key(self) -> tuple[CommitRef, int]:
        """Two jobs of different size can commit one step."""
        return self.ref, self.nodes

    def place(self, node: int) -> ManifestPlace:
        """The place of the manifest of a node."""
        return ManifestPlace(self.ref, node, self.nodes)

    @property
    def manifest_keys(self) -> dict[int, str]:
        return {node: info.key for node, info in self.manifests.items()}

    @property
    def size_bytes(self) -> int:
        """Size of all these manifests."""
        return sum(info.size_bytes for info in self.manifests.values())

    @property
    def is_complete(self) -> bool:
        return len(self.manifests) == self.nodes  # a key with a greater node does not parse

    @property
    def age_s(self) -> float | None:
        """Age of its newest manifest by the store's clock; None if the store does not return it."""
        ages_s = [info.age_s for info in self.manifests.values()]
        return None if None in ages_s else min(age_s for age_s in ages_s if age_s is not None)

    @property
    def identity(self) -> tuple[object, ...]:
        """The same for the same manifests with the same bytes."""
        return tuple(info.identity for _, info in sorted(self.manifests.items()))


def list_commits(
    store: ObjectStore,
    keys: RunKeys,
    ref: CommitRef | None = None,
    *,
    since: int = 0,
    since_step: CommitRef | None = None,
) -> list[Commit]:
    """The commits of the run, complete or not, newest first by (generation, step).

    Args:
        ref: only this one; costs one small request.
        since: only those of this generation and of newer ones; older ones cost no request.
        since_step: only those of this commit's step and of later ones; earlier ones cost no request.

    Raises:
        CorruptError: a listed object has a key that no writer formats; the message names it.
        StoreError: the listing failed.
    """
    prefix = keys.commits if ref is None else keys.parts(ref)
    after = keys.commits_before(since) if since_step is None else keys.parts_before(since_step)
    listed = listing(store, prefix, keys.parse_commit, after=after).expect_own(store)
    return grouped((info, parsed) for info, parsed in listed if parsed.ref.generation >= since)


def grouped(manifests: Iterable[tuple[ObjectInfo, ManifestPlace]]) -> list[Commit]:
    """The commits of these manifests, newest first."""
    by_commit: defaultdict[tuple[CommitRef, int], dict[int, ObjectInfo]] = defaultdict(dict)
    for info, parsed in manifests:
        by_commit[parsed.ref, parsed.nodes][parsed.node] = info
    return [
        Commit(ref=ref, nodes=nodes, manifests=by_commit[ref, nodes])
        for ref, nodes in sorted(by_commit, reverse=True)
    ]


def newest_commits(store: ObjectStore, keys: RunKeys, *, near: int = 0) -> Iterator[Commit]:
    """The commits of the run, complete or not, newest first, listed only as far back as they are read.

    The commits of the newest generations cost one request, for any number of older commits.

    Args:
        near: a generation near the newest one.  0: it is looked up among the claims.

    Raises:
        CorruptError, StoreError: as for :func:`list_commits`.
    """
    try:
        near = near or max(claimed(store, keys), default=0)
    except CorruptError:
        near = 0  # a foreign object among the claims damages no commit: list them all
    above, back = GENERATION_MAX + 1, 1
    while above:
        since = max(0, near - back)
        for commit in list_commits(store, keys, since=since):
            if commit.ref.generation < above:
                yield commit
        above, back = since, back * _FURTHER_BACK


def load(store: ObjectStore, keys: RunKeys, commit: Commit) -> tuple[Manifest, ...]:
    """Read the manifests of the commit, by node; raises as :func:`each_manifest`."""
    return tuple(each_manifest(store, keys, commit))


def each_manifest(store: ObjectStore, keys: RunKeys, commit: Commit) -> Iterator[Manifest]:
    """Read the manifests of the commit, by node.

    A few are read in parallel, and only :data:`IN_MEMORY_BYTES` of them: many VMs have hundreds of megabytes.

    Raises:
        UnreadableError: the store refuses a manifest, and returns other objects.
        MissingError: a manifest was deleted since the listing.
        CorruptError: a manifest is damaged or does not match its key; or all of them exceed the limit of
            size or processor time.
        StoreError: a request to the store failed.
    """
    limit_bytes = min(COMMIT_BYTES_MAX, commit.nodes * MANIFEST_BYTES_MAX)
    if commit.size_bytes > limit_bytes:
        raise CorruptError(
            f"its manifests have {commit.size_bytes} bytes; the limit is {limit_bytes}"
        )
    began_s = time.thread_time()
    for nodes in _batches(commit):
        for node, data in _bytes_of(store, keys, commit, nodes).items():
            yield decoded(keys, commit.place(node), data)
            if time.thread_time() - began_s > EXAMINE_CPU_S:
                raise CorruptError(
                    f"its manifests cost more than {EXAMINE_CPU_S:g} s of processor time"
                )


def _batches(commit: Commit) -> Iterator[list[int]]:
    """The nodes whose manifests are read at the same time."""
    batch: list[int] = []
    batch_bytes = 0
    for node, info in sorted(commit.manifests.items()):
        is_full = len(batch) == MANIFEST_READS or batch_bytes + info.size_bytes > IN_MEMORY_BYTES
        if batch and is_full:
            yield batch
            batch, batch_bytes = [], 0
        batch.append(node)
        batch_bytes += info.size_bytes
    yield batch


def _bytes_of(
    store: ObjectStore, keys: RunKeys, commit: Commit, nodes: Sequence[int]
) -> dict[int, bytes]:
    """The bytes of the manifests of some nodes, by node."""
    found = dict.fromkeys(nodes, b"")

    def read(node: int) -> None:
        found[node] = _read(store, keys, commit, node)

    parallel(nodes, read, threads=len(nodes))
    return found


def load_node(store: ObjectStore, keys: RunKeys, commit: Commit, node: int) -> Manifest:
    """The manifest of one node of the commit.

    Raises:
        CorruptError, StoreError: as for :func:`load`.
    """
    return decoded(keys, commit.place(node), _read(store, keys, commit, node))


def _read(store: ObjectStore, keys: RunKeys, commit: Commit, node: int) -> bytes:
    what = f"the manifest of node {node}"
    try:
        return content(store, commit.manifests[node].key, what)
    except Permanent as error:
        raise refused(store, keys, commit.ref.generation, what, error) from error


def decoded(keys: RunKeys, place: ManifestPlace, data: bytes) -> Manifest:
    """The manifest with these bytes.

    Raises:
        CorruptError: it is damaged, or belongs to another place or run.
    """
    with _decoding:
        manifest = decode(data)
    own = ManifestPlace(manifest.ref, manifest.node, manifest.nodes)
    if (manifest.run, own) != (keys.run, place):
        raise CorruptError(
            f"the manifest of node {place.node} is that of run {manifest.run!r:.100} {manifest.ref} "
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
    """Read many commits in parallel, and pass each to ``take``: its manifests, or why it does not count.

    Memory is limited to :data:`IN_MEMORY_BYTES` for any number of commits, if ``take`` keeps none.

    Args:
        take: called from any thread, one call at a time, in any order.
        progress: called one call at a time, with the number of commits done and of all commits.

    Raises:
        StoreError: a request to the store failed.
        Stopped: ``stop`` was set.
    """
    room = _Room(IN_MEMORY_BYTES)
    taking = threading.Lock()

    def one(commit: Commit) -> None:
        with room.of(commit.size_bytes):
            loaded: tuple[Manifest, ...] | CorruptError
            try:
                loaded = load(store, keys, commit)
            except CorruptError as error:
                loaded = error
            with taking:
                take(commit, loaded)

    parallel(commits, one, threads=READS, stop=stop, progress=progress)


class _Room:
    """Limits the memory of several threads; a thread that needs more than the limit runs alone."""

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


def expect_run(keys: RunKeys, *stores: ObjectStore) -> None:
    """Raise NothingToRestore if none of the stores has an object of the run."""
    folder = f"{keys.run}/"  # its folders cost one request, for any number of objects
    if not any(any(all_pages(f"list {folder}", partial(s.folders, folder))) for s in stores):
        raise NothingToRestore(
            f"{' and '.join(store.url for store in stores)} has no run {keys.run}",
            hint="Check the name of the run, and the URL of the store",
        )


def expect_fresh(store: ObjectStore, keys: RunKeys) -> None:
    """Check that a run without a whole commit has lost none: a start from scratch then loses nothing.

    Once a run has a commit, each later farewell names one.  So farewells contradict an empty listing.

    Raises:
        NothingToRestore: an object may be, or may name, a commit of the run; the message names it.
        CorruptError: the listing contains an object that no swansong wrote.
        StoreError: the store failed.
    """
    listed = listing(store, keys.commits, keys.parse_commit)
    manifests, unsigned = listed.expect_own(store), listed.unsigned
    if unsigned:
        raise NothingToRestore(
            f"{store.url} has commits of run {keys.run}, and none has a name that this key signed for this "
            f"store: {f'{store.url}/{unsigned[0]}'!r:.1500}",
            hint="Check store.signing_key_file and store.url.  If the run began without this key, continue "
            "under another run.name; else find the writer of these objects, and delete them",
        )
    if len(manifests) == LISTED_MAX:
        raise NothingToRestore(
            f"run {keys.run} has {LISTED_MAX} manifests or more, and none of them belongs to a whole commit",
            hint=f"Find the writer of {store.url}/{keys.commits}, and delete what no VM of the run wrote",
        )
    named = _may_name_a_commit(store, keys)
    if named is not None:
        raise NothingToRestore(
            f"the listing of {store.url} contains no commit of run {keys.run}, but {named}",
            hint=f"If the commits were deleted on purpose, delete {store.url}/{keys.farewells} as well, or "
            "continue under another run.name",
        )


def _may_name_a_commit(store: ObjectStore, keys: RunKeys) -> str | None:
    """A farewell that names a commit, or that may name one; None without such a farewell."""
    infos = [info for info in store.list(keys.farewells) if keys.parse_farewell(info.key)]
    if len(infos) > FRESH_FAREWELLS_MAX:
        return f"it has {len(infos)} farewells, more than {FRESH_FAREWELLS_MAX}"
    found: list[str] = []

    def read(info: ObjectInfo) -> None:
        try:
            generation = keys.parse_farewell(info.key)
            farewell = own_record(store, info.key, (keys.run, generation), farewells.decode)
        except CorruptError as error:
            found.append(f"{info.key} may name one: {error}")
        else:
            if farewell.commit is not None:
                found.append(f"{info.key} names {farewell.commit}")

    parallel(infos, read, threads=READS)
    return min(found, default=None)


# ---------------------------------------------------------------- claims


def claimed(store: ObjectStore, keys: RunKeys, *, since: int = 0) -> list[int]:
    """The numbers of all claims, ascending.

    Args:
        since: only this number and higher ones; lower ones cost no request.

    Raises:
        CorruptError: an object has a key that no writer formats; the message names it.
        StoreError: the listing failed.
    """
    after = keys.claims_before(since)
    listed = listing(store, keys.generations, keys.parse_generation, after=after).expect_own(store)
    return sorted(number for _, number in listed if number >= since)


def claim_of(store: ObjectStore, keys: RunKeys, generation: int) -> ClaimObject | None:
    """The claim of a generation; None if it is missing, of another run, or damaged.

    Args:
        generation: may be the one after the last number of the format, which no claim has.

    Raises:
        StoreError: a request to the store failed.
    """
    if generation > GENERATION_MAX:
        return None
    with suppress(CorruptError):
        place = keys.run, generation
        return own_record(store, keys.generation(generation), place, claims.decode)
    return None


def newest_claims(
    store: ObjectStore, keys: RunKeys, count: int
) -> list[tuple[int, ClaimObject | None]]:
    """The newest ``count`` claims, newest first; a damaged one is None.

    Raises:
        CorruptError, StoreError: as for :func:`claimed`.
    """
    numbers = claimed(store, keys)[-count:]
    return [(number, claim_of(store, keys, number)) for number in reversed(numbers)]


def newer_claims(
    store: ObjectStore, keys: RunKeys, generation: int
) -> Iterator[tuple[int, ClaimObject | None]]:
    """The claims above a generation, newest first, each read when it is needed; a damaged one is None.

    Raises:
        CorruptError, StoreError: as for :func:`claimed`.
    """
    for number in reversed(claimed(store, keys, since=generation + 1)):
        yield number, claim_of(store, keys, number)


def newest_generation(store: ObjectStore, keys: RunKeys, *, above: int = 0) -> int:
    """The highest claimed generation; ``above`` if there is no higher one.

    Raises:
        CorruptError, StoreError: as for :func:`claimed`.
    """
    return max(claimed(store, keys, since=above + 1), default=above)


# ---------------------------------------------------------------- history


def history(store: ObjectStore, keys: RunKeys, generation: int, own_id: str = "") -> History:
    """Observed time of the run's earlier VMs, and the number of those without a SAFE farewell.

    A VM is an id in the claims, however often the training was started there.  Times are from wall clocks:
    the result is an estimate, and is never used for an order.

    Args:
        generation: our own, or the next one; the newest ones before it are read.
        own_id: of this VM, which does not count.

    Raises:
        CorruptError, StoreError: as for :func:`claimed` and :func:`list_commits`.
    """
    since = max(1, generation - HISTORY_LISTED_MAX)
    listed = [number for number in claimed(store, keys, since=since) if number < generation]
    if not listed:
        return History()
    found = _Claims(store, keys, since, listed).vms(own_id)
    vms = list(islice(found, HISTORY_MAX))
    if not vms:
        return History()
    newest: dict[int, Commit] = {}
    for commit in list_commits(store, keys, since=vms[-1].first):
        for vm in vms:
            if vm.first <= commit.ref.generation <= vm.last:
                newest.setdefault(vm.last, commit)
    observed_s, uncovered = 0.0, 0
    for vm in vms:
        said = farewells_of(store, keys, vm.last)
        last = newest.get(vm.last)
        created, kind = _last_commit(store, keys, last)
        signs = [wall.instant_s(text) for text in (vm.last_claimed, created)]
        signs += [farewell.written_wall_s for farewell in said]
        begun_s = wall.instant_s(vm.first_claimed)
        ended_s = max((sign for sign in signs if sign is not None), default=None)
        if begun_s is not None and ended_s is not None:
            observed_s += min(max(0.0, ended_s - begun_s), _LIFE_S_MAX)
        is_covered = any(farewell.verdict is Verdict.SAFE for farewell in said)
        is_of_last_start = last is not None and last.ref.generation == vm.last
        has_ended = is_of_last_start and kind is CheckpointKind.FINAL  # the end of the run
        uncovered += not (is_covered or has_ended)
    return History(observed_s, uncovered)


@dataclass(frozen=True, slots=True)
class _Vm:
    """The generations that a VM has claimed since it booted."""

    first: int
    last: int
    first_claimed: str
    last_claimed: str


class _Claims:
    """Finds the VMs of these claims with few reads: the claims of one VM are neighbours.

    The place of a claim is its index in the numbers below ``since``, some of which have no claim, followed by
    the listed numbers.

    Args:
        since: the lowest number that was listed.
        listed: numbers of the claims from there, ascending.
    """

    def __init__(
        self, store: ObjectStore, keys: RunKeys, since: int, listed: Sequence[int]
    ) -> None:
        self._store, self._keys, self._listed = store, keys, listed
        self._below = since - 1
        self._read: dict[int, ClaimObject | None] = {}

    def vms(self, own_id: str) -> Iterator[_Vm]:
        """The VMs, newest first, without our own, which has this id.

        A listed claim without an id counts as a VM.
        """
        seen = {own_id}
        place = self._below + len(self._listed) - 1
        while place >= 0 and self._may_read:
            last, vm = place, self._vm(place)
            if vm is not None:
                place = self._first(place, vm)
            is_counted = last >= self._below or self._claim(last) is not None
            if vm not in seen and is_counted:
                yield _Vm(
                    first=self._number(place),
                    last=self._number(last),
                    first_claimed=self._claimed(place),
                    last_claimed=self._claimed(last),
                )
            if vm is not None:
                seen.add(vm)
            place -= 1

    @property
    def _may_read(self) -> bool:
        # Without a signing key, a bucket writer can plant any number of claims.
        return len(self._read) < HISTORY_CLAIMS_MAX

    def _number(self, place: int) -> int:
        return place + 1 if place < self._below else self._listed[place - self._below]

    def _first(self, last: int, vm: str) -> int:
        """The place of the oldest claim of this VM: a search with doubled steps, then by halves."""
        first, step = last, 1
        while self._may_read and first >= step and self._vm(first - step) == vm:
            first, step = first - step, 2 * step
        other = max(-1, first - step)
        while self._may_read and first - other > 1:
            middle = (first + other) // 2
            first, other = (middle, other) if self._vm(middle) == vm else (first, middle)
        return first

    def _claim(self, place: int) -> ClaimObject | None:
        if place not in self._read:
            self._read[place] = claim_of(self._store, self._keys, self._number(place))
        return self._read[place]

    def _vm(self, place: int) -> str | None:
        identity = _identity(self._claim(place))
        return next((identity[name] for name in _VM_IDS if name in identity), None)

    def _claimed(self, place: int) -> str:
        return _identity(self._claim(place)).get("claimed", "")


def _identity(claim: ClaimObject | None) -> Mapping[str, str]:
    return {} if claim is None else claim.identity


def farewells_of(store: ObjectStore, keys: RunKeys, generation: int) -> list[RecordedEvacuation]:
    """The newest farewells of a generation; damaged ones are left out."""
    names = (info.key for info in store.list(keys.farewell_prefix(generation)))
    found = []
    for key in nlargest(_FAREWELLS_MAX, names):  # their names are times
        with suppress(CorruptError):
            found.append(own_record(store, key, (keys.run, generation), farewells.decode))
    return found


def _last_commit(
    store: ObjectStore, keys: RunKeys, commit: Commit | None
) -> tuple[str, CheckpointKind | None]:
    if commit is not None:
        with suppress(CorruptError):
            manifest = load_node(store, keys, commit, min(commit.manifests))  # one of thousands
            return manifest.created, manifest.kind
    return "", None


# ---------------------------------------------------------------- objects and listings


def refused(
    store: ObjectStore, keys: RunKeys, generation: int, what: str, error: Permanent
) -> UnreadableError:
    """The error for an object that the store refuses although it returns a claim of the run.

    Missing rights and wrong settings affect the claims, too: then ``error`` is an error of the store.  One
    object can have another owner or another encryption key, or be in an archive.

    Args:
        generation: its claim is read first; if it is missing, some of the newest claims are read.

    Raises:
        StoreError: ``error`` itself, or a request for a claim failed.
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
    except (CorruptError, TooLarge):
        return True  # it is readable, which is enough here
    except Permanent:
        return False
    return True


def own_record(
    store: ObjectStore, key: str, place: tuple[str, int | None], decode: Callable[[bytes], R]
) -> R:
    """A small record.

    Args:
        place: the run and the generation in the key.

    Raises:
        MissingError: it was deleted since the listing.
        CorruptError: it is damaged, too large, or the record of another run or generation.
        StoreError: the request failed.
    """
    record = decode(content(store, key, key))
    if (record.run, record.generation) != place:
        raise CorruptError(f"{key} is the record of another run or generation")
    return record


def content(store: ObjectStore, key: str, what: str) -> bytes:
    """The bytes of a small object.

    Raises:
        MissingError: it was deleted since the listing.
        CorruptError: it is too large.
        StoreError: the request failed.
    """
    try:
        return store.get(key)
    except NotFound:
        raise MissingError(f"{what} is missing") from None
    except TooLarge as error:
        raise CorruptError(f"{what} is too large: {error}") from None


@dataclass(frozen=True, slots=True)
class Listing(Generic[T]):
    """The objects below a prefix."""

    newest: list[tuple[ObjectInfo, T]]
    """Those with the greatest keys, at most :data:`LISTED_MAX`, each with its parsed key."""
    foreign: list[str]
    """Keys that no writer formats."""
    unsigned: list[str]
    """Keys of objects that no holder of the signing key has created."""

    def expect_own(self, store: ObjectStore) -> list[tuple[ObjectInfo, T]]:
        """The newest objects.

        Raises:
            CorruptError: an object has a key that no writer formats; the message names it.
        """
        if self.foreign:
            raise foreign_objects(store, self.foreign)
        if self.unsigned:
            first, count = self.unsigned[0], len(self.unsigned)
            _log.error("unsigned_objects_ignored", first=first, count=count)
        return self.newest


def listing(
    store: ObjectStore,
    prefix: str,
    parse: Callable[[str], T | None],
    *,
    after: str = "",
    is_whole: bool = False,
) -> Listing[T]:
    """List the objects whose key starts with ``prefix``.

    Empty objects whose key ends in a slash are left out: consoles create them to show folders.

    Args:
        is_whole: without the limit of :data:`LISTED_MAX`.
    """
    foreign: list[str] = []
    unsigned: list[str] = []

    def ours() -> Iterator[tuple[ObjectInfo, T]]:
        for info in store.list(prefix, after=after):
            parsed = parse(info.key)
            if parsed is not None:
                yield info, parsed
            elif info.key.endswith(UNSIGNED):
                if len(unsigned) < LISTED_MAX:
                    unsigned.append(info.key.removesuffix(UNSIGNED))
            elif not is_folder(info) and len(foreign) < LISTED_MAX:
                foreign.append(info.key)

    # A listing has any order; numbers in keys have a fixed width.
    count_max = sys.maxsize if is_whole else LISTED_MAX
    newest = nlargest(count_max, ours(), key=lambda pair: pair[0].key)
    return Listing(newest, foreign, unsigned)


def is_folder(info: ObjectInfo) -> bool:
    """Whether a console created the object to show a folder."""
    return not info.size_bytes and info.key.endswith("/")


def foreign_objects(store: ObjectStore, keys: Sequence[str]) -> CorruptError:
    """The error for objects with keys that no writer formats."""
    more = f", and {len(keys) - 1} more," if len(keys) > 1 else ""
    named = f"the object {f'{store.url}/{keys[0]}'!r:.1500}{more}"
    if SIGNED.fullmatch(keys[0]):
        return CorruptError(
            f"{named} is signed, and no key is configured",
            hint="Name the key of the run in store.signing_key_file",
        )
    return CorruptError(
        f"{named} has a key that no swansong of this version writes",
        hint="Upgrade swansong if a newer version wrote the object, else delete it",
    )
