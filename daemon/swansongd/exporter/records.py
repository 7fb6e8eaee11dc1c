# SPDX-License-Identifier: Apache-2.0
"""The objects of a run, each read once: their bytes never change, so small facts are remembered instead.

An object that is not valid is counted and skipped.  The number of remembered objects is limited.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import structlog

from swansongd.bucket import catalog, lives
from swansongd.bucket import claim as claims
from swansongd.bucket import farewell as farewells
from swansongd.bucket import resumption as resumptions
from swansongd.bucket.catalog import Commit
from swansongd.bucket.farewell import RecordedEvacuation
from swansongd.bucket.keys import RunKeys
from swansongd.bucket.manifest import Manifest
from swansongd.core.evacuation import DRILL, is_drill
from swansongd.core.transition import PEER_SOURCE
from swansongd.errors import CorruptError, NotFound, Permanent, TooLarge
from swansongd.exporter.figures import CommitFacts, FarewellFacts
from swansongd.exporter.listing import Listing
from swansongd.loss_records import LastReport, Resumption
from swansongd.stores.base import ObjectInfo, ObjectStore
from swansongd.util.threads import parallel

RECORDS_MAX = 20_000
"""Limit of the remembered objects of one kind: the newest commits, and the oldest records, because a counter
must not fall."""
READS = 16
"""Objects that are read in parallel."""
_log = structlog.get_logger(__name__)

AGAIN_AFTER_S = 3600.0
"""An object that is not valid is read again after this time: a right may have been missing."""

CLOCKS_DIFFER_S = 3600.0
"""A farewell with a time further in the future is not valid: it is unsigned, and clocks of VMs differ."""

Facts = TypeVar("Facts")


# ---------------------------------------------------------------- the memory


class Memory(Generic[Facts]):
    """The facts of objects that were read, by identity.  Several threads may add facts at the same time."""

    def __init__(self) -> None:
        self.left_out = 0
        """Objects beyond the limit."""
        self._facts: dict[Hashable, Facts] = {}
        self._invalid: dict[Hashable, float] = {}
        """When each invalid object is read again, on the monotonic clock."""

    def begin(self, wanted: Collection[Hashable], now_mono_s: float) -> set[Hashable]:
        """Forget all other objects, and return those that must be read."""
        self._facts = {each: facts for each, facts in self._facts.items() if each in wanted}
        self._invalid = {
            each: again_s
            for each, again_s in self._invalid.items()
            if each in wanted and again_s > now_mono_s
        }
        return {each for each in wanted if each not in self._facts and each not in self._invalid}

    def add(self, identity: Hashable, facts: Facts) -> None:
        self._facts[identity] = facts

    def add_invalid(self, identity: Hashable, now_mono_s: float) -> None:
        self._invalid[identity] = now_mono_s + AGAIN_AFTER_S

    def get(self, identity: Hashable) -> Facts | None:
        """The facts of an object; None if it is not valid or was not read."""
        return self._facts.get(identity)

    def has(self, identity: Hashable) -> bool:
        return identity in self._facts

    @property
    def facts(self) -> Collection[Facts]:
        return self._facts.values()

    @property
    def invalid(self) -> int:
        """Number of objects that are not valid."""
        return len(self._invalid)


def identity_of(info: ObjectInfo) -> Hashable:
    """The same for the same bytes under the same key."""
    return info.key, info.size_bytes, info.tag


# ---------------------------------------------------------------- the records of a run


class RunRecords:
    """The facts of the objects of one run; also the :class:`~swansongd.bucket.lives.Records` of its lives.

    Args:
        stop: ends the reading.
        monotonic: the clock.
    """

    def __init__(
        self,
        store: ObjectStore,
        keys: RunKeys,
        *,
        stop: threading.Event,
        monotonic: Callable[[], float],
    ) -> None:
        self._store = store
        self._keys = keys
        self._stop = stop
        self._monotonic = monotonic
        self._listing = Listing()
        self._now_wall_s = 0.0
        self._commits: Memory[CommitFacts] = Memory()
        self._farewells: Memory[FarewellFacts] = Memory()
        self._resumptions: Memory[Resumption] = Memory()
        self._claims: Memory[float | None] = Memory()
        self._reports: dict[int, LastReport] = {}

    def refresh(self, listing: Listing, now_wall_s: float) -> None:
        """Read the objects of the listing that were not read before.

        Raises:
            StoreError: a request to the store failed.
            Stopped: ``stop`` was set.
        """
        self._listing, self._now_wall_s = listing, now_wall_s
        self._refresh_commits([commit for commit in listing.commits if commit.is_complete])
        self._refresh(self._farewells, listing.farewells, farewells.BYTES_MAX, self._farewell)
        self._refresh(
            self._resumptions, listing.resumptions, resumptions.BYTES_MAX, self._resumption
        )
        self._refresh(self._claims, self._wanted_claims(), claims.BYTES_MAX, self._claim)
        self._reports = self._newest_reports()

    # ------------------------------------------------------------ the facts

    @property
    def whole(self) -> list[CommitFacts]:
        """The whole commits, newest first."""
        found = [self._commits.get(commit.identity) for commit in self._listing.commits]
        return [facts for facts in found if facts is not None]

    @property
    def farewells(self) -> Collection[FarewellFacts]:
        return self._farewells.facts

    @property
    def resumptions(self) -> dict[int, Resumption]:
        """The valid resumptions, by generation."""
        return {each.generation: each for each in self._resumptions.facts}

    @property
    def generation(self) -> int:
        """The highest claimed generation, 0 without a claim."""
        return max(self._listing.claims, default=0)

    @property
    def damaged(self) -> dict[str, int]:
        """Number of objects that are not valid, by kind."""
        return {name: memory.invalid for name, memory in self._memories.items()}

    @property
    def left_out(self) -> dict[str, int]:
        """Number of objects beyond the limits, by kind."""
        return {name: memory.left_out for name, memory in self._memories.items()}

    @property
    def _memories(self) -> dict[str, Memory[Any]]:
        return {
            "commit": self._commits,
            "farewell": self._farewells,
            "resumption": self._resumptions,
            "claim": self._claims,
        }

    def resumption(self, generation: int) -> Resumption | None:
        info = self._listing.resumptions.get(generation)
        return None if info is None else self._resumptions.get(identity_of(info))

    def report(self, generation: int) -> LastReport | None:
        return self._reports.get(generation)

    def created_wall_s(self, commit: Commit) -> float | None:
        facts = self._commits.get(commit.identity)
        return None if facts is None else facts.created_wall_s

    def claimed_wall_s(self, generation: int) -> float | None:
        info = self._listing.claims.get(generation)
        return None if info is None else self._claims.get(identity_of(info))

    # ------------------------------------------------------------ reading

    def _refresh_commits(self, whole: Sequence[Commit]) -> None:
        now_s = self._monotonic()
        kept = whole[:RECORDS_MAX]
        self._commits.left_out = len(whole) - len(kept)
        fresh = self._commits.begin({commit.identity for commit in kept}, now_s)
        failed: list[tuple[Commit, CorruptError]] = []

        def take(commit: Commit, loaded: tuple[Manifest, ...] | CorruptError) -> None:
            if isinstance(loaded, CorruptError):
                failed.append((commit, loaded))
            else:
                self._commits.add(commit.identity, _facts_of(commit, loaded))

        wanted = [commit for commit in kept if commit.identity in fresh]
        catalog.load_each(self._store, self._keys, wanted, take, stop=self._stop)
        for commit, error in failed:
            # Prune may have deleted a manifest since the listing.
            if all(self._store.head(key) is not None for key in commit.manifest_keys.values()):
                self._commits.add_invalid(commit.identity, now_s)
                self._log_damaged(next(iter(commit.manifest_keys.values())), error)

    def _log_damaged(self, key: str, error: CorruptError) -> None:
        """Name the object, at each attempt to read it: at most once in :data:`AGAIN_AFTER_S`."""
        _log.warning(
            "damaged_object",
            store=self._store.url,
            run=self._keys.run,
            key=key,
            reason=error.line(),
        )

    def _refresh(
        self,
        memory: Memory[Facts],
        infos: Mapping[Any, ObjectInfo],
        bytes_max: int,
        decode: Callable[[str, bytes], Facts],
    ) -> None:
        now_s = self._monotonic()
        kept = {identity_of(infos[name]): infos[name] for name in sorted(infos)[:RECORDS_MAX]}
        memory.left_out = len(infos) - len(kept)

        def one(identity: Hashable) -> None:
            info = kept[identity]
            try:
                if info.size_bytes > bytes_max:
                    raise CorruptError(f"{info.key} has more than {bytes_max} bytes")
                memory.add(identity, decode(info.key, self._content(info.key)))
            except NotFound:
                pass  # it was deleted since the listing
            except CorruptError as error:
                memory.add_invalid(identity, now_s)
                self._log_damaged(info.key, error)

        fresh = memory.begin(kept, now_s)
        parallel(fresh, one, threads=min(READS, len(fresh)), stop=self._stop)

    def _content(self, key: str) -> bytes:
        try:
            return self._store.get(key)
        except NotFound:
            raise
        except TooLarge as error:
            raise CorruptError(str(error)) from None
        except Permanent as error:
            newest = max(self._listing.claims, default=0)
            raise catalog.refused(self._store, self._keys, newest, key, error) from error

    def _farewell(self, key: str, data: bytes) -> FarewellFacts:
        found = farewells.decode(data)
        if (found.run, found.generation) != (self._keys.run, self._keys.parse_farewell(key)):
            raise CorruptError(f"{key} is the farewell of another generation")
        stepped_wall_s = 0.0 if found.training is None else found.training.wall_s
        if max(found.written_wall_s, stepped_wall_s) > self._now_wall_s + CLOCKS_DIFFER_S:
            raise CorruptError(f"{key} has a time in the future")
        return FarewellFacts(
            generation=found.generation,
            evacuation_id=found.evacuation_id,
            is_drill=_is_drill(found),
            verdict=found.verdict,
            written_wall_s=found.written_wall_s,
            deadline_wall_s=(
                None if found.deadline_s is None else found.opened_wall_s + found.deadline_s
            ),
            training=found.training,
        )

    def _resumption(self, key: str, data: bytes) -> Resumption:
        found = resumptions.decode(data)
        if (found.run, found.generation) != (self._keys.run, self._keys.parse_resumption(key)):
            raise CorruptError(f"{key} is the resumption of another generation")
        return found

    def _claim(self, key: str, data: bytes) -> float | None:
        found = claims.decode(data)
        if (found.run, found.generation) != (self._keys.run, self._keys.parse_generation(key)):
            raise CorruptError(f"{key} is the claim of another generation")
        return lives.instant_s(found.identity.get("claimed", ""))

    def _wanted_claims(self) -> dict[int, ObjectInfo]:
        """The claims of generations without a resumption, for their times."""
        recorded = self.resumptions
        traces = {commit.ref.generation for commit in self._listing.commits}
        traces |= {each.generation for each in self._farewells.facts}
        unrecorded = sorted(traces.difference(recorded))[-lives.LIVES_MAX :]
        named = {each.earlier.generation for each in recorded.values() if each.earlier is not None}
        wanted = {*unrecorded, *named.difference(recorded)}
        return {n: self._listing.claims[n] for n in wanted if n in self._listing.claims}

    def _newest_reports(self) -> dict[int, LastReport]:
        """The newest report of each generation, as :mod:`swansongd.bucket.lives` chooses it."""
        by_generation: defaultdict[int, list[LastReport | None]] = defaultdict(list)
        for key in sorted(self._listing.farewells, reverse=True):
            facts = self._farewells.get(identity_of(self._listing.farewells[key]))
            if facts is not None and len(by_generation[facts.generation]) < lives.FAREWELLS_MAX:
                by_generation[facts.generation].append(facts.training)
        found = {number: lives.newest_report(each) for number, each in by_generation.items()}
        return {number: report for number, report in found.items() if report is not None}


def _is_drill(found: RecordedEvacuation) -> bool:
    """Whether the evacuation is a drill, of this VM or of the one whose request it answers."""
    id_ = found.evacuation_id
    return found.source == DRILL or (found.source == PEER_SOURCE and is_drill(frozenset({id_})))


def _facts_of(commit: Commit, manifests: Sequence[Manifest]) -> CommitFacts:
    return CommitFacts(
        ref=commit.ref,
        kind=manifests[0].kind,
        size_bytes=sum(manifest.size_bytes for manifest in manifests),
        created_wall_s=lives.whole_since_s(manifests),
    )
