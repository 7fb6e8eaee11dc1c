# SPDX-License-Identifier: Apache-2.0
"""All commits, pins and data objects of a run, for the decision which of them to delete.

A survey is complete or fails.  A manifest or a key that cannot be read could name any object, so there is no
survey of a run that has one.  A pin that cannot be read keeps all commits that are older than the pin.  Ages
are those of the store's clock.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import gt

from swansong_bucket.errors import CorruptError, MissingError, Transient
from swansong_bucket.format.keys import UNSIGNED, RunKeys
from swansong_bucket.format.manifest import Manifest
from swansong_bucket.model import Chunk, merged_health
from swansong_bucket.retention.rules import CommitFacts, CommitKey
from swansong_bucket.runs import catalog
from swansong_bucket.runs.catalog import Commit
from swansong_bucket.runs.pins import Pins, StoredPin
from swansong_bucket.stores.base import ObjectInfo, ObjectStore, stored_objects

Progress = Callable[[int, int], None]

_ATTEMPTS = 3
"""Listings that are read again because a manifest was deleted between listing and reading."""
_SHOWN_MAX = 5


class Chunks:
    """The chunks that manifests name, each with a number: a reference costs four bytes.

    A key that manifests name with different sizes has a number for each size.  Only the size of the listing
    makes a chunk stored, so a manifest with a wrong size affects no other commit.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._other_sizes: dict[tuple[str, int], int] = {}
        self._sizes_bytes = array("Q")
        self._stored = bytearray()

    def __len__(self) -> int:
        return len(self._sizes_bytes)

    def __contains__(self, key: str) -> bool:
        return key in self._numbers

    def number_of(self, chunk: Chunk) -> int:
        key, size_bytes = chunk.key, chunk.size_bytes
        number = self._numbers.setdefault(key, len(self))
        if number < len(self) and self._sizes_bytes[number] != size_bytes:
            number = self._other_sizes.setdefault((key, size_bytes), len(self))
        if number == len(self):
            self._sizes_bytes.append(size_bytes)
            self._stored.append(False)
        return number

    def found(self, info: ObjectInfo) -> bool:
        """Note an object of the listing; False if no manifest names it."""
        number = self._numbers.get(info.key)
        if number is None:
            return False
        if self._sizes_bytes[number] == info.size_bytes:
            self._stored[number] = True
        elif (info.key, info.size_bytes) in self._other_sizes:
            self._stored[self._other_sizes[info.key, info.size_bytes]] = True
        return True

    def are_stored(self, numbers: array[int]) -> bool:
        """Whether the listing had all these chunks, with the sizes of the manifests."""
        return all(self._stored[number] for number in numbers)

    def stored_bytes(self, numbers: Iterable[int]) -> int:
        """Size of the stored chunks."""
        return sum(self._sizes_bytes[number] for number in numbers if self._stored[number])

    def count_except(self, named: bytearray) -> int:
        """The number of :meth:`stored_except`."""
        return sum(map(gt, self._stored, named))

    def stored_except(self, named: bytearray) -> Iterator[ObjectInfo]:
        """The stored chunks whose number has no mark."""
        others = ((key, number) for (key, _), number in self._other_sizes.items())
        for key, number in chain(self._numbers.items(), others):
            if self._stored[number] and not named[number]:
                yield ObjectInfo(key, self._sizes_bytes[number])


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadCommit:
    """A commit, and what its manifests contain."""

    commit: Commit
    chunks: array[int]
    """Numbers of the chunks that its manifests name, each once."""
    health: Mapping[str, float]

    @property
    def key(self) -> CommitKey:
        return self.commit.key


@dataclass(slots=True)
class Survey:
    """The content of a run at one moment."""

    commits: list[ReadCommit]
    """Newest first."""
    pins: list[StoredPin]
    claims: dict[int, float | None]
    """Age of each claim that counts, by generation."""
    chunks: Chunks
    orphans: list[ObjectInfo] = field(default_factory=list)
    """Objects that no manifest names, older than any flush can last."""
    young_bytes: int = 0
    """Size of the younger objects that no manifest names: a flush may be about to commit them."""

    def commit_facts(self) -> list[CommitFacts]:
        """The commits, as the rules see them."""
        return [
            CommitFacts(
                ref=read.commit.ref,
                nodes=read.commit.nodes,
                age_s=read.commit.age_s,
                is_whole=read.commit.is_complete and self.chunks.are_stored(read.chunks),
                health=read.health,
                pins=[
                    pin.name
                    for pin in self.pins
                    if pin.may_mean(read.commit.ref, read.commit.age_s)
                ],
            )
            for read in self.commits
        ]


def survey(
    store: ObjectStore,
    keys: RunKeys,
    pins: Pins,
    *,
    orphans_after_s: float,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> Survey:
    """Read all pins and commits, then list all data objects.

    In this order, a pin is not older than a commit that it may mean, and the list of objects has those of all
    commits.

    Raises:
        CorruptError: a manifest or a key is not valid.
        StoreError: the store failed, or the commits changed all the time.
        Stopped: ``stop`` was set.
    """
    chunks, stored_pins = Chunks(), pins.now()
    commits = read_commits(store, keys, chunks, progress=progress, stop=stop)
    claims, unsigned = claim_ages(store, keys)
    found = Survey(commits, stored_pins, claims, chunks)
    for info in stored_objects(store, keys.data):
        if chunks.found(info):
            continue
        generation = keys.parse_chunk(info.key)
        if generation is None:
            continue  # no writer formats this key: nothing deletes the object
        if generation in unsigned and not _is_younger(info.age_s, claims.get(generation)):
            continue  # the run began without the signing key
        if info.age_s is None or info.age_s < orphans_after_s:
            found.young_bytes += info.size_bytes
        else:
            found.orphans.append(info)
    return found


def claim_ages(store: ObjectStore, keys: RunKeys) -> tuple[dict[int, float | None], set[int]]:
    """The age of each claim by generation, and the generations with a claim that is not signed.

    Raises:
        StoreError: the listing failed.
    """
    ages_s: dict[int, float | None] = {}
    unsigned: set[int] = set()
    for info in store.list(keys.generations):
        number = keys.parse_generation(info.key.removesuffix(UNSIGNED))
        if number is not None and info.key.endswith(UNSIGNED):
            unsigned.add(number)
        elif number is not None:
            ages_s[number] = info.age_s
    return ages_s, unsigned


def _is_younger(age_s: float | None, than_s: float | None) -> bool:
    return age_s is not None and than_s is not None and age_s <= than_s


def read_commits(
    store: ObjectStore,
    keys: RunKeys,
    chunks: Chunks,
    known: Sequence[ReadCommit] = (),
    *,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> list[ReadCommit]:
    """List the commits, and read those that are not ``known``, newest first.

    Args:
        chunks: takes the chunks that their manifests name.

    Raises:
        CorruptError, StoreError, Stopped: as :func:`survey`.
    """
    have: dict[object, ReadCommit] = {read.commit.identity: read for read in known}
    for _ in range(_ATTEMPTS):
        manifests = catalog.listing(store, keys.commits, keys.parse_commit, is_whole=True)
        commits = catalog.grouped(manifests.expect_own(store))
        listed = {found.identity: found for found in commits}
        fresh = [found for identity, found in listed.items() if identity not in have]
        read, failed = _read(store, keys, chunks, fresh, progress=progress, stop=stop)
        have |= read
        if not failed:
            return [have[identity] for identity in listed]
        if not any(isinstance(error, MissingError) for _, error in failed):
            raise _unreadable(
                store, [f"the commit {commit.ref} is damaged: {why}" for commit, why in failed]
            )
    raise Transient("the commits of the run change while they are read")


def _read(
    store: ObjectStore,
    keys: RunKeys,
    chunks: Chunks,
    commits: Sequence[Commit],
    *,
    progress: Progress | None,
    stop: threading.Event | None,
) -> tuple[dict[object, ReadCommit], list[tuple[Commit, CorruptError]]]:
    """The commits by identity, and those that cannot be read."""
    done: dict[object, ReadCommit] = {}
    failed: list[tuple[Commit, CorruptError]] = []

    def take(commit: Commit, loaded: tuple[Manifest, ...] | CorruptError) -> None:
        if isinstance(loaded, CorruptError):
            failed.append((commit, loaded))
            return
        numbers = {chunks.number_of(chunk) for manifest in loaded for chunk in manifest.chunks}
        done[commit.identity] = ReadCommit(
            commit=commit,
            chunks=array("I", sorted(numbers)),
            health=merged_health([manifest.health for manifest in loaded]),
        )

    catalog.load_each(store, keys, commits, take, progress=progress, stop=stop)
    return done, failed


def _unreadable(store: ObjectStore, problems: Sequence[str]) -> CorruptError:
    more = f" (and {len(problems) - _SHOWN_MAX} more)" if len(problems) > _SHOWN_MAX else ""
    return CorruptError(
        f"no object of {store.url} is deleted, because a manifest that cannot be read may name any object: "
        + "; ".join(problems[:_SHOWN_MAX])
        + more,
        hint="Upgrade swansong if a newer version wrote it; else restore the object, or delete it",
    )
