# SPDX-License-Identifier: Apache-2.0
"""The records of a run: its keys, and the facts of each object, read once.

Commands list a run once, and the exporter lists it again at an interval.  All of their figures are views of a
:class:`Run`, so the same rules apply to all of them:

- An object is identified by its key, size and tag, so its facts are read once.
- An object is *damaged* if it is too large, is not valid, belongs to another run or generation, or if the
  store refuses it and returns others.  It has no facts.
- An object that was deleted since the listing is not damaged.  It counts no more.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from heapq import nlargest
from typing import Any, Generic, TypeVar

from swansong_bucket.errors import CorruptError, MissingError, Permanent
from swansong_bucket.format import claim as claims
from swansong_bucket.format import farewell as farewells
from swansong_bucket.format import resumption as resumptions
from swansong_bucket.format import wall
from swansong_bucket.format.claim import ClaimObject
from swansong_bucket.format.farewell import RecordedEvacuation
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.format.manifest import Manifest
from swansong_bucket.loss_records import LastReport, Resumption
from swansong_bucket.model import (
    DRILL,
    PEER_SOURCE,
    CheckpointKind,
    CommitRef,
    Verdict,
    is_drill,
    merged_health,
)
from swansong_bucket.runs import catalog
from swansong_bucket.runs.catalog import Commit, Record
from swansong_bucket.stores.base import ObjectInfo, ObjectStore
from swansong_bucket.util.threads import parallel

READS = 16
"""Objects that are read in parallel."""
REPORTS_MAX = 5
"""Number of newest farewells of a generation that are read for its last step: the keys of one second have no
order."""
AGAIN_AFTER_S = 3600.0
"""A damaged object is read again after this time: a right may have been missing."""
CLOCKS_DIFFER_S = 3600.0
"""A farewell with a time further in the future is damaged: it is unsigned, and clocks of VMs differ."""

Progress = Callable[[int, int], None]
Take = Callable[[Commit, tuple[Manifest, ...] | CorruptError], None]

Name = TypeVar("Name", int, str)
Content = TypeVar("Content", bound=Record)
Facts = TypeVar("Facts")


# ---------------------------------------------------------------- facts


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCommit:
    """The facts of the manifests of one commit."""

    ref: CommitRef
    kind: CheckpointKind | None
    """None: a manifest is damaged, so all facts from manifests are missing."""
    created_wall_s: float | None
    """When the last VM wrote its manifest; None if no manifest has a valid time."""
    size_bytes: int
    """Over all nodes.  A chunk that several commits share counts in each of them."""
    bytes_sent: int = 0
    """Size of the chunks that no older commit names; 0 unless the commits were compared."""
    health: Mapping[str, float] = field(default_factory=dict)
    """Of all ranks, such as the loss; see :func:`~swansong_bucket.model.merged_health`."""
    nodes: int
    is_whole: bool
    """All VMs have committed their parts, and no manifest is damaged."""

    @property
    def loss(self) -> float | None:
        return self.health.get("loss")

    @property
    def bytes_referenced(self) -> int:
        return max(0, self.size_bytes - self.bytes_sent)


@dataclass(frozen=True, slots=True, kw_only=True)
class FarewellFacts:
    """A farewell, without the course of its evacuation: a reader can hold thousands of them."""

    generation: int
    evacuation_id: str
    is_drill: bool
    verdict: Verdict
    written_wall_s: float
    deadline_wall_s: float | None
    training: LastReport | None
    is_foretold: bool = False
    is_void: bool = False
    """As of :class:`~swansong_bucket.format.farewell.RecordedEvacuation`."""


class _Memory(Generic[Facts]):
    """The facts of objects that were read, by identity.  Several threads may add facts at the same time."""

    def __init__(self) -> None:
        self.facts: dict[Hashable, Facts] = {}
        self.damaged: dict[Hashable, float] = {}
        """When each damaged object was read, on the monotonic clock."""

    def keep(self, listed: Collection[Hashable], now_mono_s: float) -> None:
        """Forget the objects that are not listed any more, and damaged ones that must be read again."""
        self.facts = {each: facts for each, facts in self.facts.items() if each in listed}
        self.damaged = {
            each: read_mono_s
            for each, read_mono_s in self.damaged.items()
            if each in listed and now_mono_s < read_mono_s + AGAIN_AFTER_S
        }

    def has(self, identity: Hashable) -> bool:
        """Whether the object was read."""
        return identity in self.facts or identity in self.damaged


# ---------------------------------------------------------------- records of one kind


@dataclass(eq=False, repr=False)
class Records(Generic[Name, Content, Facts]):
    """The small records of one kind, by generation or key.

    Args:
        run: the run of the records.
        bytes_max: a larger object is damaged.
        decode: the content of an object.
        generation_of: the generation in a key.
        facts_of: what is remembered of a content; raises CorruptError.
    """

    run: Run
    bytes_max: int
    decode: Callable[[bytes], Content]
    generation_of: Callable[[str], int | None]
    facts_of: Callable[[Content], Facts]

    def __post_init__(self) -> None:
        self.infos: dict[Name, ObjectInfo] = {}
        """The objects of the listing, without those that were deleted since."""
        self.left_out = 0
        """Newer objects of the listing, beyond the limit."""
        self._memory: _Memory[Facts] = _Memory()

    def relist(self, infos: Mapping[Name, ObjectInfo], count_max: int | None) -> None:
        """Replace the listing, and keep the facts of objects that it has as well."""
        self.infos = {name: infos[name] for name in sorted(infos)[:count_max]}
        self.left_out = len(infos) - len(self.infos)
        listed = {info.identity for info in self.infos.values()}
        self._memory.keep(listed, self.run.monotonic())

    def read(self, names: Iterable[Name], progress: Progress | None = None) -> None:
        """Read these records, unless they were read before.

        Raises:
            StoreError: a request to the store failed.
            Stopped: the run's ``stop`` was set.
        """
        self._read([name for name in names if not self._is_known(name)], progress)

    def contents(self, names: Sequence[Name]) -> list[Content]:
        """Read these records, whether or not they were read before; raises as :meth:`read`."""
        found = self._read([name for name in names if name in self.infos])
        return [found[name] for name in names if name in found]

    def get(self, name: Name) -> Facts | None:
        """The facts of a record, which is read if necessary; None if it is missing or damaged."""
        if not self._is_known(name):
            self._read([name])
        info = self.infos.get(name)
        return None if info is None else self._memory.facts.get(info.identity)

    @property
    def facts(self) -> Collection[Facts]:
        """The facts of all records that were read."""
        return self._memory.facts.values()

    @property
    def damaged(self) -> tuple[str, ...]:
        """Keys of the damaged records among those that were read."""
        infos = self.infos.values()
        return tuple(info.key for info in infos if info.identity in self._memory.damaged)

    def _is_known(self, name: Name) -> bool:
        info = self.infos.get(name)
        return info is None or self._memory.has(info.identity)

    def _read(self, names: Sequence[Name], progress: Progress | None = None) -> dict[Name, Content]:
        found: dict[Name, Content] = {}

        def one(name: Name) -> None:
            info = self.infos[name]
            try:
                content = self._content(info)
                self._memory.facts[info.identity] = self.facts_of(content)
                found[name] = content
            except MissingError:
                del self.infos[name]
            except CorruptError as error:
                self._memory.damaged[info.identity] = self.run.monotonic()
                self.run.on_damaged(info.key, error)

        parallel(names, one, threads=READS, stop=self.run.stop, progress=progress)
        return found

    def _content(self, info: ObjectInfo) -> Content:
        if info.size_bytes > self.bytes_max:
            raise CorruptError(f"{info.key} has more than {self.bytes_max} bytes")
        store, keys = self.run.store, self.run.keys
        generation = self.generation_of(info.key) or 0
        try:
            return catalog.own_record(store, info.key, (keys.run, generation), self.decode)
        except Permanent as error:
            raise catalog.refused(store, keys, generation, info.key, error) from error


# ---------------------------------------------------------------- the run


@dataclass(eq=False, repr=False)
class Run:
    """The records of one run.

    Args:
        records_max: limit of the objects of one kind: the newest commits, and the oldest records, because a
            counter of them must not fall.  None: only the listing has limits.
        on_damaged: called for each damaged object with its key, from any thread.
        stop: ends the reading.
        monotonic: the clock.
    """

    store: ObjectStore
    keys: RunKeys
    _: KW_ONLY
    records_max: int | None = None
    on_damaged: Callable[[str, CorruptError], None] = lambda _key, _error: None
    stop: threading.Event | None = None
    monotonic: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.commits: list[Commit] = []
        """Newest first, complete or not."""
        self.claims: Records[int, ClaimObject, float | None] = Records(
            self, claims.BYTES_MAX, claims.decode, self.keys.parse_generation, _claimed_wall_s
        )
        """The facts are the times of the claims."""
        self.farewells: Records[str, RecordedEvacuation, FarewellFacts] = Records(
            self, farewells.BYTES_MAX, farewells.decode, self.keys.parse_farewell, self._farewell
        )
        self.resumptions: Records[int, Resumption, Resumption] = Records(
            self,
            resumptions.BYTES_MAX,
            resumptions.decode,
            self.keys.parse_resumption,
            lambda own: own,
        )
        self.pins = 0
        """Number of pins as of the last :meth:`refresh`."""
        self.foreign = 0
        """The same of keys that no swansong of this version writes, and of objects without a signature."""
        self.newest_age_s: float | None = None
        """Age of the newest object then; None if the store returns no ages."""
        self._latest_wall_s: float | None = None
        self._commits: _Memory[RecordedCommit] = _Memory()
        self._commits_left_out = 0
        self._farewells_of: Mapping[int, list[str]] = {}

    # ------------------------------------------------------------ listing

    @classmethod
    def listed(
        cls,
        store: ObjectStore,
        keys: RunKeys,
        *,
        since: int = 0,
        stop: threading.Event | None = None,
    ) -> Run:
        """The run as commands read it, from a listing of each folder with records.

        Args:
            since: only the records of this generation and of newer ones; older ones cost no request.
                Resumptions are not listed then: each of them is read by its key, if at all.

        Raises:
            CorruptError: a commit or a claim has a key that no writer formats; the message names it.
            StoreError: a listing failed.
        """
        run = cls(store, keys, stop=stop)
        claimed = catalog.claimed(store, keys, since=since)
        resumptions = {each: ObjectInfo(keys.resumption(each), 0) for each in claimed}
        if not since:
            listed = catalog.listing(store, keys.resumptions, keys.parse_resumption).newest
            resumptions = {generation: info for info, generation in listed}
        after = keys.farewell_prefix(since) if since else ""
        said = catalog.listing(store, keys.farewells, keys.parse_farewell, after=after).newest
        run._relist(
            catalog.list_commits(store, keys, since=since),
            claims={each: ObjectInfo(keys.generation(each), 0) for each in claimed},
            farewells={info.key: info for info, _ in said},
            resumptions=resumptions,
        )
        return run

    def refresh(self, now_wall_s: float) -> None:
        """List the run again, with two requests, or one for each further 1,000 keys.

        Args:
            now_wall_s: a farewell of a later time is damaged.

        Raises:
            Permanent: the run has too many records.
            StoreError: a listing failed.
        """
        keys = self.keys
        manifests = catalog.listing(self.store, keys.commits, keys.parse_commit)
        # All records have greater keys than the data, so one listing after the data has all of them.
        after_data = f"{keys.data.removesuffix('/')}0"
        records = catalog.listing(self.store, f"{keys.run}/", self._place, after=after_data)
        if len(records.newest) == catalog.LISTED_MAX:
            raise Permanent(
                f"list {keys.run}/: {catalog.LISTED_MAX} records or more",
                hint="Find the writer of these objects, and delete what no VM of the run wrote",
            )
        found: defaultdict[str, dict[Any, ObjectInfo]] = defaultdict(dict)
        for info, (kind, name) in records.newest:
            found[kind][name] = info
        self._latest_wall_s = now_wall_s + CLOCKS_DIFFER_S
        self._relist(
            catalog.grouped(manifests.newest),
            claims=found["claim"],
            farewells=found["farewell"],
            resumptions=found["resumption"],
        )
        self.pins = len(found["pin"])
        self.foreign = sum(len(each.foreign) + len(each.unsigned) for each in (manifests, records))
        infos = [info for kind in found if kind != "probe" for info in found[kind].values()]
        self.newest_age_s = _newest_age_s([*infos, *(info for info, _ in manifests.newest)])

    def _relist(
        self,
        commits: Sequence[Commit],
        *,
        claims: Mapping[int, ObjectInfo],
        farewells: Mapping[str, ObjectInfo],
        resumptions: Mapping[int, ObjectInfo],
    ) -> None:
        self.commits = [*commits[: self.records_max]]
        self._commits_left_out = len(commits) - len(self.commits)
        self._commits.keep({commit.identity for commit in self.commits}, self.monotonic())
        self.claims.relist(claims, None)
        self.farewells.relist(farewells, self.records_max)
        self.resumptions.relist(resumptions, self.records_max)
        of_generations = defaultdict[int, list[str]](list)
        for key in self.farewells.infos:
            of_generations[self.keys.parse_farewell(key) or 0].append(key)
        self._farewells_of = of_generations

    def _place(self, key: str) -> tuple[str, int | str] | None:
        """The kind and the name of a record; None if the key is not one of a record."""
        for kind, parse in (
            ("claim", self.keys.parse_generation),
            ("resumption", self.keys.parse_resumption),
            ("pin", self.keys.parse_pin),
        ):
            name = parse(key)
            if name is not None:
                return kind, name
        if self.keys.parse_farewell(key) is not None:
            return "farewell", key
        return ("probe", key) if key.startswith(self.keys.probes) else None

    # ------------------------------------------------------------ commits

    def read_commits(
        self,
        commits: Iterable[Commit],
        *,
        take: Take | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Read these commits, unless they were read before.

        Args:
            take: called as by :func:`swansong_bucket.runs.catalog.load_each`, for each of these commits,
                except for those that were deleted since the listing.

        Raises:
            StoreError: a request to the store failed.
            Stopped: ``stop`` was set.
        """

        def one(commit: Commit, loaded: tuple[Manifest, ...] | CorruptError) -> None:
            if isinstance(loaded, MissingError):
                return
            if isinstance(loaded, CorruptError):
                self._add_damaged(commit, loaded)
            else:
                self._commits.facts[commit.identity] = _facts_of(commit, loaded)
            if take is not None:
                take(commit, loaded)

        wanted = [
            commit
            for commit in commits
            if take is not None or not self._commits.has(commit.identity)
        ]
        catalog.load_each(self.store, self.keys, wanted, one, progress=progress, stop=self.stop)

    def recorded(self, commits: Iterable[Commit]) -> Iterable[RecordedCommit]:
        """The facts of these commits, as far as they were read.

        Of a damaged one only the key is known.  One that was deleted since the listing is left out.
        """
        for commit in commits:
            facts = self._commits.facts.get(commit.identity)
            if facts is not None:
                yield facts
            elif commit.identity in self._commits.damaged:
                yield RecordedCommit(
                    ref=commit.ref,
                    kind=None,
                    created_wall_s=None,
                    size_bytes=0,
                    nodes=commit.nodes,
                    is_whole=False,
                )

    def created_wall_s(self, commit: Commit) -> float | None:
        """When the commit became whole; it is read if necessary, with one manifest in memory at a time."""
        if not self._commits.has(commit.identity):
            try:
                manifests = catalog.each_manifest(self.store, self.keys, commit)
                self._commits.facts[commit.identity] = _facts_of(commit, manifests)
            except MissingError:
                return None
            except CorruptError as error:
                self._add_damaged(commit, error)
        facts = self._commits.facts.get(commit.identity)
        return None if facts is None else facts.created_wall_s

    def _add_damaged(self, commit: Commit, error: CorruptError) -> None:
        self._commits.damaged[commit.identity] = self.monotonic()
        self.on_damaged(next(iter(commit.manifest_keys.values())), error)

    # ------------------------------------------------------------ views

    @property
    def generation(self) -> int:
        """The highest claimed generation, 0 without a claim."""
        return max(self.claims.infos, default=0)

    @property
    def damaged(self) -> dict[str, int]:
        """Number of damaged objects among those that were read, by kind."""
        return {
            "commit": len(self._commits.damaged),
            **{kind: len(records.damaged) for kind, records in self._kinds.items()},
        }

    @property
    def left_out(self) -> dict[str, int]:
        """Number of objects beyond the limit, by kind."""
        return {
            "commit": self._commits_left_out,
            **{kind: records.left_out for kind, records in self._kinds.items()},
        }

    @property
    def _kinds(self) -> dict[str, Records[Any, Any, Any]]:
        return {
            "farewell": self.farewells,
            "resumption": self.resumptions,
            "claim": self.claims,
        }

    @property
    def trained(self) -> set[int]:
        """The generations with a farewell or a resumption in the listing."""
        return {*self._farewells_of, *self.resumptions.infos}

    def report(self, generation: int) -> LastReport | None:
        """The newest report of the training in a farewell of a generation, which is read if necessary."""
        newest = nlargest(REPORTS_MAX, self._farewells_of.get(generation, ()))
        self.farewells.read(newest)
        found = [self.farewells.get(key) for key in newest]
        reports = [facts.training for facts in found if facts is not None and facts.training]
        return max(reports, key=lambda report: (report.wall_s, report.is_over), default=None)

    def _farewell(self, found: RecordedEvacuation) -> FarewellFacts:
        stepped_wall_s = 0.0 if found.training is None else found.training.wall_s
        newest_wall_s = max(found.written_wall_s, stepped_wall_s)
        if self._latest_wall_s is not None and newest_wall_s > self._latest_wall_s:
            raise CorruptError("the farewell has a time in the future")
        deadline_s, id_ = found.deadline_s, found.evacuation_id
        is_drill_of_peer = found.source == PEER_SOURCE and is_drill(frozenset({id_}))
        return FarewellFacts(
            generation=found.generation,
            evacuation_id=id_,
            is_drill=found.source == DRILL or is_drill_of_peer,
            verdict=found.verdict,
            written_wall_s=found.written_wall_s,
            deadline_wall_s=None if deadline_s is None else found.opened_wall_s + deadline_s,
            training=found.training,
            is_foretold=found.is_foretold,
            is_void=found.is_void,
        )


def _facts_of(commit: Commit, manifests: Iterable[Manifest]) -> RecordedCommit:
    """The facts of a commit; holds one manifest at a time."""
    kinds, sizes_bytes, created, healths = zip(
        *((each.kind, each.size_bytes, each.created, each.health) for each in manifests),
        strict=True,
    )
    created_s = [wall.instant_s(text) for text in created]
    return RecordedCommit(
        ref=commit.ref,
        kind=kinds[0],
        created_wall_s=max((at_s for at_s in created_s if at_s is not None), default=None),
        size_bytes=sum(sizes_bytes),
        health=merged_health(healths),
        nodes=commit.nodes,
        is_whole=commit.is_complete,
    )


def _claimed_wall_s(claim: ClaimObject) -> float | None:
    return wall.instant_s(claim.identity.get("claimed", ""))


def _newest_age_s(infos: Iterable[ObjectInfo]) -> float | None:
    ages_s = [info.age_s for info in infos]
    known_s = [age_s for age_s in ages_s if age_s is not None]
    return min(known_s, default=None) if len(known_s) == len(ages_s) else None
