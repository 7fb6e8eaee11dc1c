# SPDX-License-Identifier: Apache-2.0
"""Prune: deletes the commits that no rule keeps, then the objects that no remaining manifest names.

It may crash at any request, run twice at once, and run beside a flush.  The order of the steps makes it safe:

1. Survey the run, and decide.
2. For each commit that goes: read the pins again, then delete its manifests.
3. List the commits again.
4. Delete the objects that no manifest of that list names, if a deleted manifest named them, or if they are
   older than any flush can last.

An object that a deleted manifest named belongs to no flush, because writers reference only objects of commits
that stay: see :mod:`swansong_bucket.retention.rules`.  After a crash between 2 and 4 such objects wait
until they are old.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import chain, islice

import structlog

from swansong_bucket.config.sections import RetentionConfig
from swansong_bucket.errors import Changed, Locked
from swansong_bucket.format import wall
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.model import CommitRef
from swansong_bucket.retention.rules import CommitFacts, CommitKey, reasons_to_keep
from swansong_bucket.retention.survey import Progress, ReadCommit, Survey, read_commits, survey
from swansong_bucket.runs.pins import Pins
from swansong_bucket.stores.base import DELETED_MAX, ObjectInfo, ObjectStore
from swansong_bucket.util.threads import parallel

THREADS = 16
"""Requests in flight."""
REASONS_MAX = 100
"""Objects that remain, each with its reason, in the report."""

Deleted = Callable[[int, int, int], None]
"""Takes the number of objects that were deleted, the number of all that go, and the deleted bytes."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneDecision:
    """The decision on one commit."""

    ref: CommitRef
    nodes: int
    age_s: float | None
    is_whole: bool
    size_bytes: int
    """Size of all objects that it names."""
    reasons: tuple[str, ...]
    """Why it stays; empty if it goes."""
    freed_bytes: int = 0
    """Size of the objects that go with it.  An object of several such commits counts for the oldest one."""
    remains: str = ""
    """Why its manifests could not be deleted."""

    @property
    def goes(self) -> bool:
        """Whether the commit is deleted, or would be in a dry run."""
        return not (self.reasons or self.remains)


@dataclass(slots=True)
class PruneReport:
    """The result of a prune, or of a dry run."""

    decisions: list[PruneDecision]
    """Newest first."""
    kept_bytes: int
    """Size of the objects that the kept commits name."""
    young_bytes: int
    """Size of objects that no manifest names yet, too young to delete."""
    objects: int = 0
    """Objects that go, orphans included."""
    freed_bytes: int = 0
    """Their size."""
    orphans: int = 0
    """Objects without a manifest that go: left by crashed flushes, and by a prune that was interrupted."""
    orphan_bytes: int = 0
    remain: dict[str, str] = field(default_factory=dict)
    """Objects that could not be deleted, each with the reason; at most :data:`REASONS_MAX`."""
    remain_count: int = 0


def prune(
    store: ObjectStore,
    keys: RunKeys,
    rules: RetentionConfig,
    *,
    now_wall_s: float,
    is_dry_run: bool = False,
    progress: Progress | None = None,
    deleted: Deleted = lambda _objects, _total, _size_bytes: None,
    stop: threading.Event | None = None,
) -> PruneReport:
    """Delete what no rule keeps, or with ``is_dry_run`` only report it.

    Args:
        now_wall_s: only cuts time into hours, days, weeks and months.
        progress: called with the number of commits that were read, and of all.
        deleted: called after each request that deleted objects, one call at a time.
        stop: checked before each request that deletes.

    Raises:
        CorruptError: a manifest or a key cannot be read; no object was deleted.
        StoreError: the store failed, or the role may not delete.
        Stopped: ``stop`` was set.
    """
    pins = Pins(store, keys)
    found = survey(
        store,
        keys,
        pins,
        orphans_after_s=rules.orphans_after_s,
        progress=progress,
        stop=stop,
    )
    run = _Run(store, keys, rules, pins, found, now_wall_s=now_wall_s, stop=stop)
    if not is_dry_run:
        run.delete_commits()
        run.delete_objects(deleted)
    return run.report


@dataclass(eq=False, repr=False)
class _Run:
    """One prune: the survey, the decisions, and the report."""

    store: ObjectStore
    keys: RunKeys
    rules: RetentionConfig
    pins: Pins
    found: Survey
    _: KW_ONLY
    now_wall_s: float
    stop: threading.Event | None

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        facts = self.found.commit_facts()
        kept = reasons_to_keep(facts, self.found.claims, self.rules, self.now_wall_s)
        self._doomed = [read for read in self.found.commits if read.key not in kept]
        self._place = {read.key: place for place, read in enumerate(self.found.commits)}
        """Index of the decision of each commit."""
        self.report = _planned(self.found, facts, kept)

    def delete_commits(self) -> None:
        """Delete the manifests of all commits that go, the oldest first."""
        parallel(self._doomed[::-1], self._delete_commit, threads=THREADS, stop=self.stop)

    def _delete_commit(self, read: ReadCommit) -> None:
        ref = read.commit.ref
        known = {pin.key for pin in self.found.pins if pin.pin is None}
        names = [
            pin.name
            for pin in self.pins.now()
            if (pin.key not in known if pin.pin is None else pin.pin.ref == ref)
        ]
        if names:
            self._remains(read, f"pin {names[0]}")
            return
        for _, info in sorted(read.commit.manifests.items()):
            try:
                self.store.delete(info.key, if_tag=info.tag)
            except Locked as error:
                until = wall.text(error.until_unix_s)
                self._remains(read, f"locked until {until}" if until else "locked")
                return
            except Changed:
                self._remains(read, "its manifest was replaced")
                return
        _log.info("commit_pruned", commit=str(ref))

    def delete_objects(self, deleted: Deleted) -> None:
        """Delete the objects that no manifest names now."""
        found, report = self.found, self.report
        remaining = read_commits(self.store, self.keys, found.chunks, found.commits, stop=self.stop)
        named = _marked(found, remaining)
        orphans = [info for info in found.orphans if info.key not in found.chunks]
        report.objects = report.freed_bytes = 0
        report.orphans, report.orphan_bytes = len(orphans), sum(i.size_bytes for i in orphans)
        total = found.chunks.count_except(named) + len(orphans)
        batches = _batches(chain(found.chunks.stored_except(named), orphans))
        parallel(
            batches,
            lambda batch: self._delete_batch(batch, total, deleted),
            threads=min(THREADS, -(-total // DELETED_MAX)),
            stop=self.stop,
        )

    def _delete_batch(self, infos: Sequence[ObjectInfo], total: int, deleted: Deleted) -> None:
        remain = self.store.delete_many(infos)
        gone = [info.size_bytes for info in infos if info.key not in remain]
        with self._lock:
            report = self.report
            report.objects += len(gone)
            report.freed_bytes += sum(gone)
            report.remain_count += len(remain)
            for key, reason in remain.items():
                if len(report.remain) < REASONS_MAX:
                    report.remain[key] = reason
            deleted(report.objects, total, report.freed_bytes)

    def _remains(self, read: ReadCommit, reason: str) -> None:
        decisions, place = self.report.decisions, self._place[read.key]
        decisions[place] = replace(decisions[place], remains=reason, freed_bytes=0)


def _planned(
    found: Survey, facts: Sequence[CommitFacts], kept: Mapping[CommitKey, Sequence[str]]
) -> PruneReport:
    """The report before the first delete."""
    chunks = found.chunks
    named = _marked(found, (read for read in found.commits if read.key in kept))
    report = PruneReport(
        decisions=[],
        kept_bytes=chunks.stored_bytes(number for number, mark in enumerate(named) if mark),
        young_bytes=found.young_bytes,
        orphans=len(found.orphans),
        orphan_bytes=sum(info.size_bytes for info in found.orphans),
    )
    report.objects, report.freed_bytes = report.orphans, report.orphan_bytes
    for read, commit in zip(reversed(found.commits), reversed(facts), strict=True):
        own: list[int] = []
        if read.key not in kept:
            own = [number for number in read.chunks if not named[number]]
            for number in own:
                named[number] = True
        freed_bytes = chunks.stored_bytes(own)
        report.objects += len(own)
        report.freed_bytes += freed_bytes
        report.decisions.append(
            PruneDecision(
                ref=commit.ref,
                nodes=commit.nodes,
                age_s=commit.age_s,
                is_whole=commit.is_whole,
                size_bytes=chunks.stored_bytes(read.chunks),
                reasons=tuple(kept.get(read.key, ())),
                freed_bytes=freed_bytes,
            )
        )
    report.decisions.reverse()
    return report


def _marked(found: Survey, commits: Iterable[ReadCommit]) -> bytearray:
    """A mark for the number of each chunk that one of the commits names."""
    named = bytearray(len(found.chunks))
    for read in commits:
        for number in read.chunks:
            named[number] = True
    return named


def _batches(infos: Iterator[ObjectInfo]) -> Iterator[list[ObjectInfo]]:
    while batch := list(islice(infos, DELETED_MAX)):
        yield batch
