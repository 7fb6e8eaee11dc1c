# SPDX-License-Identifier: Apache-2.0
"""Random histories of a bucket, with the production code of prune: one seed, no real time, no threads.

VMs claim generations, send chunks, reference those of their newest commit, and commit, alone or in jobs of
two.  They crash, are fenced with a request in flight, and return to an earlier step.  Operators pin and unpin
commits, and chunks are lost.  Planted manifests name stored chunks with wrong sizes.  Prune runs with random
rules and any wall clock.  It crashes at any request, runs within another prune, and between all its requests
the others act.

After every prune these hold:

R1  No commit went that a rule, a pin or an always-kept class protects.  ``protects`` is a second, slow
    implementation of the rules, written from their definitions.
R2  Each chunk that a remaining manifest names exists, unless the history itself has lost it.
R3  An undisturbed prune keeps exactly the protected commits.
R4  After a prune, the rules about steps and metrics still choose the same commits.
R5  After the last writer, prune leaves exactly the chunks of the protected commits, and foreign objects.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from functools import lru_cache
from types import ModuleType, SimpleNamespace
from typing import Any

from swansong_bucket.config.sections import RetentionConfig
from swansong_bucket.errors import Exists, MissingError, NotFound, Transient
from swansong_bucket.format.keys import ManifestPlace, RunKeys
from swansong_bucket.model import Chunk, CommitRef, is_healthy, merged_health
from swansong_bucket.runs import catalog, pins
from swansong_bucket.runs.catalog import Commit
from swansong_bucket.runs.pins import Pin
from swansong_bucket.stores.base import ObjectInfo, Page


class Keys(RunKeys):
    """The keys of the run; each key is parsed once."""

    def parse_commit(self, key: str) -> ManifestPlace | None:
        return _commit_of(key)

    def parse_generation(self, key: str) -> int | None:
        return _generation_of(key)


@lru_cache(maxsize=10_000)
def _commit_of(key: str) -> ManifestPlace | None:
    return RunKeys.parse_commit(KEYS, key)


@lru_cache(maxsize=10_000)
def _generation_of(key: str) -> int | None:
    return RunKeys.parse_generation(KEYS, key)


KEYS = Keys("r")
HOUR_S, DAY_S = 3600.0, 86400.0
BORN_S = 1_800_000_000.0
FOREIGN = f"{KEYS.data}notes.txt"
HISTORY_ACTIONS = 25

Mutation = tuple[str, str, str]
"""A module of the bucket, and the text in it that is replaced by another one."""


class Violation(AssertionError):
    """A history broke one of the rules above."""


class Crash(BaseException):
    """The process of the prune ends at this request."""


@dataclass(slots=True)
class Entry:
    """An object of the store."""

    key: str
    data: Any
    written_s: float
    info: ObjectInfo | None = None
    """As the listing has it at ``info_s``."""
    info_s: float = -1.0

    def info_at(self, now_s: float) -> ObjectInfo:
        if self.info is None or self.info_s != now_s:
            size_bytes = 0 if self.key.endswith("/") else len(self.key)
            self.info = ObjectInfo(
                self.key, size_bytes, now_s - self.written_s, str(self.written_s)
            )
            self.info_s = now_s
        return self.info


class Store:
    """The requests of prune and of pins, on a clock of its own."""

    url = "simulated://store"

    def __init__(self) -> None:
        self.now_s = BORN_S
        self.commits: dict[str, Entry] = {}
        self.claims: dict[str, Entry] = {}
        self.pins: dict[str, Entry] = {}
        self.data: dict[str, Entry] = {}
        self._folders = {
            KEYS.commits: self.commits,
            KEYS.generations: self.claims,
            KEYS.pins: self.pins,
            KEYS.data: self.data,
        }
        """The objects by the prefix that prune lists, so that no listing reads the others."""
        self.before: Callable[[str, str], None] = _nothing
        self.deleted_commits: list[str] = []
        self.deleted_data: list[str] = []

    def put(self, key: str, data: Any, *, if_absent: bool = False) -> None:
        folder = self._folder(key)
        if if_absent and key in folder:
            raise Exists(key)
        folder[key] = Entry(key, data, self.now_s)

    def get(self, key: str) -> Any:
        self.before("get", key)
        entry = self._folder(key).get(key)
        if entry is None:
            raise NotFound(key)
        return entry.data

    def head(self, key: str) -> ObjectInfo | None:
        self.before("head", key)
        entry = self._folder(key).get(key)
        return None if entry is None else entry.info_at(self.now_s)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        assert not after
        return iter(self.page(prefix, None).infos)

    def page(self, prefix: str, token: str | None) -> Page:
        del token  # the first page contains all
        self.before("list", prefix)
        now_s = self.now_s
        return Page([entry.info_at(now_s) for entry in self._folders[prefix].values()], None)

    def delete(self, key: str, *, if_tag: str = "") -> None:
        del if_tag  # no key is written twice with different bytes
        self.before("delete", key)
        self._remove(key)

    def delete_many(self, infos: Sequence[ObjectInfo]) -> dict[str, str]:
        for info in infos:
            self.before("delete_many", info.key)  # it may crash between two objects
            self._remove(info.key)
        return {}

    def _folder(self, key: str) -> dict[str, Entry]:
        return self._folders[key[: key.index("/", len(KEYS.run) + 1) + 1]]

    def _remove(self, key: str) -> None:
        folder = self._folder(key)
        if folder.pop(key, None) is not None:
            deleted = self.deleted_commits if folder is self.commits else self.deleted_data
            deleted.append(key)


def _nothing(_what: str, _key: str) -> None:
    """Nothing happens before a request."""


def load_each(
    store: Any,
    keys: RunKeys,
    commits: Sequence[Commit],
    take: Callable[[Commit, Any], None],
    **_: Any,
) -> None:
    """As ``catalog.load_each``, without threads and without decoding."""
    for commit in commits:
        try:
            take(commit, tuple(store.get(key) for _, key in sorted(commit.manifest_keys.items())))
        except NotFound as error:
            take(commit, MissingError(str(error)))


def code(mutation: Mutation | None = None) -> Any:
    """The function ``prune``, of modules of its own, one of them perhaps mutated."""
    below = ("runs.pins", "retention.rules", "retention.survey", "retention.prune")
    names = [f"swansong_bucket.{name}" for name in below]
    saved = {name: sys.modules[name] for name in names if name in sys.modules}
    made: dict[str, ModuleType] = {}
    try:
        for name in names:
            spec = importlib.util.find_spec(name)
            assert spec is not None
            assert spec.origin is not None
            with open(spec.origin, encoding="utf-8") as file:
                source = file.read()
            if mutation is not None and name.endswith(f".{mutation[0]}"):
                _, old, new = mutation
                assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times"
                source = source.replace(old, new)
            made[name] = sys.modules[name] = ModuleType(name)
            exec(compile(source, spec.origin, "exec"), vars(made[name]))
    finally:
        for name in names:
            del sys.modules[name]
        sys.modules.update(saved)
    own_pins, _, survey, prune = (made[name] for name in names)
    vars(own_pins)["decode"] = _pin_of
    vars(survey)["catalog"] = SimpleNamespace(
        load_each=load_each, grouped=catalog.grouped, listing=catalog.listing
    )
    vars(prune)["parallel"] = _one_by_one
    vars(prune)["_log"] = SimpleNamespace(info=lambda *_args, **_kwargs: None)
    return vars(prune)["prune"]


def _one_by_one(tasks: Sequence[Any], function: Callable[[Any], None], **_: Any) -> None:
    for task in tasks:
        function(task)


# ---------------------------------------------------------------- the rules, from their definitions


@dataclass(frozen=True, slots=True)
class Known:
    """A commit, as the rules define it."""

    ref: CommitRef
    nodes: int
    age_s: float
    is_whole: bool
    health: dict[str, float]
    is_pinned: bool

    @property
    def key(self) -> tuple[CommitRef, int]:
        return self.ref, self.nodes


def since_s(commits: Sequence[Known], claims: Mapping[int, float], rules: RetentionConfig) -> float:
    """How long ago a writer may have learned which commit is the newest one."""
    whole = [other for other in commits if other.is_whole]
    found = rules.keep_within_s
    if any(other.age_s >= rules.keep_within_s for other in whole):
        for generation, age_s in claims.items():
            has_committed = any(other.ref.generation == generation for other in whole)
            is_long_fenced = any(
                other.ref.generation > generation and other.age_s >= rules.keep_within_s
                for other in whole
            )
            if not has_committed and not is_long_fenced:
                found = max(found, age_s + rules.keep_within_s)
    return found


def choices(commits: Sequence[Known], rules: RetentionConfig) -> tuple[list[Known], list[Known]]:
    """All whole commits, and the settled ones: the rules that one commit can change choose among both."""
    whole = [other for other in commits if other.is_whole]
    return whole, [other for other in whole if other.age_s >= rules.keep_starts_s]


def is_newest_healthy(commit: Known, whole: Sequence[Known]) -> bool:
    """Whether it is the newest healthy one of these."""
    healthy = [other.key for other in whole if is_healthy(other.health)]
    return bool(healthy) and commit.key == max(healthy)


def always(
    commit: Known, commits: Sequence[Known], claims: Mapping[int, float], rules: RetentionConfig
) -> bool:
    """Whether the commit is kept under any rules."""
    while_s = since_s(commits, claims, rules)
    newer = [other for other in commits if other.is_whole and other.key > commit.key]
    return (
        commit.is_pinned
        or commit.age_s < rules.keep_within_s
        or (not commit.is_whole and commit.age_s < rules.orphans_after_s)
        or all(other.age_s < while_s for other in newer)
        or any(is_newest_healthy(commit, each) for each in choices(commits, rules))
    )


def by_rank(commit: Known, commits: Sequence[Known], rules: RetentionConfig) -> bool:
    """Whether a rule without the clock of this machine keeps it."""
    if not commit.is_whole:
        return False
    whole, settled = choices(commits, rules)
    if sum(other.key > commit.key for other in whole) < rules.keep_last:
        return True
    if commit.age_s < rules.keep_starts_s:
        start = [other.key for other in whole if other.ref.generation == commit.ref.generation]
        return commit.key == max(start) or is_chosen(commit, whole, rules)
    return (
        commit.key == max(other.key for other in settled)
        or is_chosen(commit, whole, rules)
        or is_chosen(commit, settled, rules)
    )


def is_chosen(commit: Known, whole: Sequence[Known], rules: RetentionConfig) -> bool:
    """Whether it is the first of an interval of steps, or one of the best, of these."""
    if rules.keep_every_steps is not None:

        def is_in_line(one: Known) -> bool:
            return not any(
                other.ref.generation > one.ref.generation and other.ref.step <= one.ref.step
                for other in whole
            )

        def interval(one: Known) -> int:
            return one.ref.step // (rules.keep_every_steps or 1)

        if is_in_line(commit) and not any(
            is_in_line(other) and interval(other) == interval(commit) and other.key < commit.key
            for other in whole
        ):
            return True
    sign = -1 if rules.best_is_highest else 1

    def rank(one: Known) -> tuple[float, Any] | None:
        value = one.health.get(rules.best_metric)
        return None if value is None or is_healthy(one.health) is False else (sign * value, one.key)

    own = rank(commit)
    if own is None:
        return False
    better = 0
    for other in whole:
        theirs = rank(other)
        if theirs is not None and (
            theirs[0] < own[0] or (theirs[0] == own[0] and theirs[1] > own[1])
        ):
            better += 1
    return better < rules.keep_best


def is_turn(commit: Known, commits: Sequence[Known], rules: RetentionConfig) -> bool:
    """Whether the commit shows that another one, of these whole ones, is not in the line."""
    if not commit.is_whole or rules.keep_every_steps is None:
        return False
    for whole in choices(commits, rules):
        for abandoned in whole:
            newer = [other for other in whole if other.ref.generation > abandoned.ref.generation]
            turn = min(
                newer, key=lambda one: (one.ref.step, -one.ref.generation, one.key), default=None
            )
            if turn is not None and turn.key == commit.key and turn.ref.step <= abandoned.ref.step:
                return True
    return False


def by_clock(
    commit: Known, commits: Sequence[Known], rules: RetentionConfig, now_wall_s: float
) -> bool:
    """Whether a rule about hours, days, weeks or months keeps it."""
    if not commit.is_whole:
        return False

    def day(one: Known) -> date:
        return datetime.fromtimestamp(now_wall_s - one.age_s, UTC).date()

    newer = [other for other in commits if other.is_whole and other.key > commit.key]
    start = [other for other in newer if other.ref.generation == commit.ref.generation]
    if commit.age_s < rules.keep_starts_s and day(commit) not in map(day, start):
        return True
    for count, span in (
        (rules.keep_hourly, lambda moment: (moment.date(), moment.hour)),
        (rules.keep_daily, lambda moment: moment.date()),
        (rules.keep_weekly, lambda moment: moment.isocalendar()[:2]),
        (rules.keep_monthly, lambda moment: (moment.year, moment.month)),
    ):
        if not count:
            continue
        own = span(datetime.fromtimestamp(now_wall_s - commit.age_s, UTC))
        theirs = {span(datetime.fromtimestamp(now_wall_s - other.age_s, UTC)) for other in newer}
        if own not in theirs and len(theirs) < count:
            return True
    return False


# ---------------------------------------------------------------- writers


@dataclass(frozen=True, slots=True)
class Made:
    """As much of a manifest as prune reads; real ones would take most of the time."""

    chunks: tuple[Chunk, ...]
    health: dict[str, float]


def _is_honest(chunk: Chunk) -> bool:
    """Whether a manifest names the size that the store has."""
    return chunk.size_bytes == len(chunk.key)


@dataclass(slots=True)
class Flush:
    """A set on its way into the bucket."""

    step: int
    began_s: float
    referenced: tuple[Any, ...]
    to_send: list[Any]
    sent: list[Any] = field(default_factory=list)
    checked_s: float | None = None
    """When the fence was checked; the manifest is in flight since then."""


@dataclass(slots=True)
class Writer:
    """A VM: its place in a job, and the chunks of its newest commit."""

    generation: int
    node: int
    nodes: int
    step: int
    known: tuple[Any, ...]
    flush: Flush | None = None


class World:
    """One history.

    Args:
        seed: of all choices.
        prune: the function under test.
    """

    def __init__(self, seed: int, prune: Any) -> None:
        self.random = random.Random(seed)
        self.prune = prune
        self.store = Store()
        self.store.put(FOREIGN, b"")
        self.rules = self._some_rules()
        self.generation = 0
        self.names = 0
        self.writers: list[Writer] = []
        self.lost: set[str] = set()
        self.depth = 0
        self.closed = 0
        """Number of prunes that would not see another pin in time."""
        self.prunes = 0
        self.crashes = 0

    def live(self) -> None:
        """Play the history, and end it with an undisturbed prune."""
        self._claim()
        actions = (
            (self._advance, 50),
            (self._wait, 12),
            (self._prune, 10),
            (self._pin, 5),
            (self._unpin, 2),
            (self._claim, 4),
            (self._lose, 1),
            (self._plant, 2),
        )
        kinds = [kind for kind, weight in actions for _ in range(weight)]
        for _ in range(self.random.randrange(HISTORY_ACTIONS, 3 * HISTORY_ACTIONS)):
            self.random.choice(kinds)()
        self.writers.clear()
        self.store.now_s += self.rules.orphans_after_s + self.rules.keep_within_s
        planted = {
            item.key
            for _, made in self._manifests()
            for item in made.chunks
            if not _is_honest(item)
        }
        kept = self._undisturbed()
        named = {
            item.key for _, made in self._manifests() for item in made.chunks if _is_honest(item)
        }
        needed = named - self.lost | {FOREIGN}
        left = set(self.store.data)
        # A chunk that only a planted manifest names waits for the prune after that of the manifest.
        if not needed <= left <= needed | planted:
            raise Violation(f"R5: left {sorted(left ^ needed)} beside the commits {sorted(kept)}")

    # ------------------------------------------------------------ what VMs and operators do

    def _some_rules(self) -> RetentionConfig:
        def count() -> int:
            return self.random.choice((0, 0, 0, 1, 2, 4))

        return RetentionConfig(
            keep_last=count(),
            keep_within_s=self.random.choice((HOUR_S, 6 * HOUR_S, DAY_S)),
            keep_hourly=count(),
            keep_daily=count(),
            keep_weekly=count(),
            keep_monthly=count(),
            keep_every_steps=self.random.choice((None, 20, 50)),
            keep_best=count(),
            best_is_highest=self.random.random() < 0.5,
            orphans_after_s=self.random.choice((2 * DAY_S, 7 * DAY_S)),
            keep_starts_s=self.random.choice((0.0, 2 * DAY_S, 7 * DAY_S)),
        )

    def _wait(self) -> None:
        low_s, high_s = self.random.choice(
            ((60, 900), (900, 7200), (HOUR_S, DAY_S), (DAY_S, 9 * DAY_S))
        )
        self.store.now_s += self.random.uniform(low_s, high_s)

    def _claim(self) -> None:
        """Another VM, or two, take the run over; the earlier ones keep what they have in flight."""
        self.generation += 1
        self.store.put(KEYS.generation(self.generation), b"", if_absent=True)
        nodes = self.random.choice((1, 1, 1, 2))
        newest = max(self._whole(), default=None)
        known: tuple[Any, ...] = ()
        step = 0
        if newest is not None:
            known = tuple(
                item
                for parsed, made in self._manifests()
                if (parsed.ref, parsed.nodes) == newest
                for item in made.chunks
            )
            step = max(0, newest[0].step - self.random.choice((0, 0, 0, 10, 40)))
        self.writers = [
            old for old in self.writers if old.flush and old.flush.checked_s is not None
        ]
        self.writers += [Writer(self.generation, node, nodes, step, known) for node in range(nodes)]

    def _advance(self) -> None:
        """One request of one VM."""
        if not self.writers:
            return
        writer = self.random.choice(self.writers)
        flush = writer.flush
        now_s = self.store.now_s
        if flush is None:
            if writer.generation == self.generation:
                self._begin(writer)
        elif now_s - flush.began_s >= self.rules.orphans_after_s or self.random.random() < 0.03:
            writer.flush = None  # the daemon died; its chunks are left
        elif flush.to_send:
            item = flush.to_send.pop()
            self.store.put(item.key, b"", if_absent=True)
            flush.sent.append(item)
        elif flush.checked_s is None:
            if writer.generation == self.generation:
                flush.checked_s = now_s
            else:
                writer.flush = None
        else:
            if now_s - flush.checked_s < self.rules.keep_within_s:
                self._commit(writer, flush)
            writer.flush = None

    def _begin(self, writer: Writer) -> None:
        writer.step += self.random.choice((10, 10, 20))
        fresh = []
        for _ in range(self.random.choice((1, 1, 2))):
            self.names += 1
            key = KEYS.chunk(writer.generation, self.names.to_bytes(32), "n")
            fresh.append(Chunk(key, len(key)))
        some = tuple(item for item in writer.known if self.random.random() < 0.6)
        writer.flush = Flush(writer.step, self.store.now_s, some, fresh)

    def _commit(self, writer: Writer, flush: Flush) -> None:
        health = {"loss": float(self.random.randrange(5))}
        if self.random.random() < 0.7:
            health["loss_is_finite"] = float(self.random.random() < 0.7)
        chunks = (*flush.referenced, *flush.sent)
        ref = CommitRef(writer.generation, flush.step, is_final=self.random.random() < 0.03)
        key = KEYS.commit(ref, writer.node, writer.nodes)
        try:
            self.store.put(key, Made(chunks, health), if_absent=True)
        except Exists:
            return
        writer.known = chunks

    def _pin(self) -> None:
        whole = sorted(self._whole())
        if not whole:
            return
        self.names += 1
        ref, _ = whole[int(len(whole) * self.random.random() ** 2)]  # old ones more often
        pin = Pin(run="r", name=f"p{self.names}", ref=ref)
        self.store.put(KEYS.pin(pin.name), pins.encode(pin), if_absent=True)

    def _unpin(self) -> None:
        found = list(self.store.pins)
        if found:
            del self.store.pins[self.random.choice(found)]

    def _lose(self) -> None:
        """A chunk of the bucket is lost, as by a lifecycle rule."""
        found = [key for key in self.store.data if key != FOREIGN]
        if found:
            key = self.random.choice(found)
            del self.store.data[key]
            self.lost.add(key)

    def _plant(self) -> None:
        """A manifest of a planter, newer than all others, names chunks of the run with wrong sizes."""
        stored = [key for key in self.store.data if key != FOREIGN]
        chunks = tuple(Chunk(key, len(key) + 1) for key in stored if self.random.random() < 0.8)
        if chunks:
            self.names += 1
            ref = CommitRef(self.random.choice((self.generation, 99)), 10**6 + self.names)
            made = Made(chunks, {"loss": -1.0, "loss_is_finite": 1.0})
            self.store.put(KEYS.commit(ref, 0, 1), made, if_absent=True)

    # ------------------------------------------------------------ prune

    def _prune(self) -> None:
        if self.random.random() < 0.3:
            self._undisturbed()
        else:
            self._disturbed()

    def _wall_s(self) -> float:
        """The clock of the machine that prunes: right, or wrong by years."""
        return self.store.now_s + self.random.choice((0.0, 0.0, -3e8, 3e8, 40_000.0))

    def _undisturbed(self) -> set[Any]:
        """Nothing happens beside this prune: it keeps exactly what is protected (R3)."""
        wall_s = self._wall_s()
        commits, claims = self._known(), self._claims()
        kept = {
            found.key
            for found in commits
            if always(found, commits, claims, self.rules)
            or by_rank(found, commits, self.rules)
            or is_turn(found, commits, self.rules)
            or by_clock(found, commits, self.rules, wall_s)
        }
        chosen = {found.key for found in commits if by_rank(found, commits, self.rules)}
        self.prune(self.store, KEYS, self.rules, now_wall_s=wall_s)
        self.prunes += 1
        left = {(parsed.ref, parsed.nodes) for parsed, _ in self._manifests()}
        if left != kept:
            raise Violation(f"R3: gone {sorted(kept - left)}, left {sorted(left - kept)}")
        remaining = self._known()
        still = {found.key for found in remaining if by_rank(found, remaining, self.rules)}
        if still != chosen:
            raise Violation(f"R4: chosen {sorted(chosen)}, then {sorted(still)}")
        self._check_chunks()
        return kept

    def _disturbed(self) -> None:
        """Others act between the requests of this prune, which may crash."""
        store = self.store
        before_prune, began_s = dict(store.commits), store.now_s
        commits_deleted, data_deleted = len(store.deleted_commits), len(store.deleted_data)
        crash_at = self.random.randrange(60) if self.random.random() < 0.5 else -1
        outer, self.depth = store.before, self.depth + 1
        requests = 0

        def before(what: str, key: str) -> None:
            nonlocal requests
            if requests == crash_at:
                raise Crash
            requests += 1
            if self.random.random() < 0.3:
                store.before = _nothing
                # A pin after the last listing of the pins comes too late, as the documentation says.
                is_too_late = what == "delete" or (what == "get" and key.startswith(KEYS.pins))
                self.closed += is_too_late
                try:
                    self._disturb()
                finally:
                    self.closed -= is_too_late
                store.before = before

        store.before = before
        try:
            self.prune(store, KEYS, self.rules, now_wall_s=self._wall_s())
            self.prunes += 1
        except Crash:
            self.crashes += 1
        except Transient:
            pass  # the commits changed all the time
        finally:
            store.before, self.depth = outer, self.depth - 1
        gone = store.deleted_commits[commits_deleted:]
        if gone:
            self._check_deleted(before_prune, began_s, gone, store.deleted_data[data_deleted:])
        self._check_chunks()

    def _disturb(self) -> None:
        choice = self.random.random()
        if choice < 0.6:
            self._advance()
        elif choice < 0.7:
            self.store.now_s += self.random.uniform(0, 600)
        elif choice < 0.85:
            if not self.closed:
                self._pin()
        elif choice < 0.9:
            self._claim()
        elif self.depth < 2:
            self._disturbed()

    # ------------------------------------------------------------ checks

    def _check_deleted(
        self,
        before: dict[str, Entry],
        began_s: float,
        gone: Sequence[str],
        data_gone: Sequence[str],
    ) -> None:
        """R1, for the rules that do not depend on the clock of the prune.

        A commit that became settled during the prune may have gone before.
        """
        there = self.store.commits | {key: before[key] for key in gone if key in before}
        data = self.store.data.keys() | data_gone
        refs = {(parsed.ref, parsed.nodes) for parsed in map(KEYS.parse_commit, gone) if parsed}
        protected = [
            {
                found.key
                for found in commits
                if found.key in refs and self._protects(found, commits, refs)
            }
            for commits in (
                self._known(there, data, now_s) for now_s in (began_s, self.store.now_s)
            )
        ]
        if lost := set.intersection(*protected):
            raise Violation(f"R1: {sorted(lost)} were deleted")

    def _protects(
        self, found: Known, commits: Sequence[Known], refs: Container[tuple[CommitRef, int]]
    ) -> bool:
        # An earlier prune within this one may have deleted all commits that a turn abandoned.
        rest = [other for other in commits if other.key not in refs or other is found]
        return (
            always(found, commits, self._claims(), self.rules)
            or by_rank(found, commits, self.rules)
            or is_turn(found, rest, self.rules)
        )

    def _check_chunks(self) -> None:
        data = self.store.data
        for parsed, made in self._manifests():
            for item in filter(_is_honest, made.chunks):
                if item.key not in data and item.key not in self.lost:
                    raise Violation(f"R2: {item.key} of {parsed.ref} is gone")

    def _manifests(self) -> Iterator[tuple[Any, Made]]:
        for key, entry in self.store.commits.items():
            yield KEYS.parse_commit(key), entry.data

    def _claims(self) -> dict[int, float]:
        return {
            generation: self.store.now_s - entry.written_s
            for key, entry in self.store.claims.items()
            if (generation := KEYS.parse_generation(key)) is not None
        }

    def _whole(self) -> list[tuple[CommitRef, int]]:
        """The whole commits of the store now."""
        data = self.store.data
        parts: defaultdict[tuple[CommitRef, int], int] = defaultdict(int)
        for parsed, made in self._manifests():
            if all(item.key in data and _is_honest(item) for item in made.chunks):
                parts[parsed.ref, parsed.nodes] += 1
        return [key for key, count in parts.items() if count == key[1]]

    def _known(
        self,
        manifests: Mapping[str, Entry] | None = None,
        data: Container[str] | None = None,
        now_s: float | None = None,
    ) -> list[Known]:
        """The commits of these manifests and chunks at a time; without them, those of the store now."""
        store = self.store
        now_s = store.now_s if now_s is None else now_s
        manifests = store.commits if manifests is None else manifests
        data = store.data if data is None else data
        pinned = {_pin_of(entry.data).ref for entry in store.pins.values()}
        parts: defaultdict[Any, list[Entry]] = defaultdict(list)
        for key, entry in manifests.items():
            parsed: Any = KEYS.parse_commit(key)
            parts[parsed.ref, parsed.nodes].append(entry)
        return [
            Known(
                ref=ref,
                nodes=nodes,
                age_s=now_s - max(entry.written_s for entry in entries),
                is_whole=len(entries) == nodes
                and all(
                    item.key in data and _is_honest(item)
                    for entry in entries
                    for item in entry.data.chunks
                ),
                health=merged_health([entry.data.health for entry in entries]),
                is_pinned=ref in pinned,
            )
            for (ref, nodes), entries in parts.items()
        ]


@lru_cache(maxsize=10_000)
def _pin_of(data: bytes) -> Pin:
    return pins.decode(data)


def run_history(seed: int, prune: Any) -> World:
    """Play the history of a seed.

    Raises:
        Violation: it broke a rule; the message names the seed.
    """
    world = World(seed, prune)
    try:
        world.live()
    except Violation as error:
        raise Violation(f"seed {seed}: {error}") from error
    return world
