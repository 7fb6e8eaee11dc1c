# SPDX-License-Identifier: Apache-2.0
"""Prune against a store in memory: pins, locks, signed runs, refusals, and what the report says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swansong_bucket.errors import CorruptError, Locked, Permanent, Transient
from swansong_bucket.format import claim as claims
from swansong_bucket.format import manifest
from swansong_bucket.format.claim import ClaimObject
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.format.manifest import Manifest
from swansong_bucket.model import CommitRef
from swansong_bucket.retention import prune as module
from swansong_bucket.retention.prune import PruneReport, prune
from swansong_bucket.runs import pins
from swansong_bucket.runs.pins import Pin
from swansong_bucket.runs.signing import signed
from swansong_bucket.stores.base import ObjectStore

from testkit.committed import chunk_of, commit
from testkit.memory_store import MemoryStore
from testkit.records import KEY, NO_RULE

KEYS = RunKeys("r")
DAY_S = 86400.0
NOW_S = 1_800_000_000.0
RULES = replace(NO_RULE, keep_last=1)


class Clocked(MemoryStore):
    """A store whose clock a test sets."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = NOW_S
        self.clock = lambda: self.now_s

    def commit(self, step: int, age_s: float, path: str = "own") -> Manifest:
        """A commit of this age, with one shard that no other commit has."""
        self.now_s = NOW_S - age_s
        try:
            return commit(self, {path: f"{path}{step}".encode()}, step=step, nonce=f"u{step}")
        finally:
            self.now_s = NOW_S

    def orphan(self, age_s: float) -> None:
        self.now_s = NOW_S - age_s
        self.put(chunk_of(b"orphan", nonce=f"u{len(self.objects)}").key, b"orphan")
        self.now_s = NOW_S

    def steps(self) -> set[int]:
        """Steps of the manifests that are left."""
        parsed = [KEYS.parse_commit(key) for key in self.objects]
        return {found.ref.step for found in parsed if found is not None}

    def data(self) -> set[str]:
        return {key for key in self.objects if key.startswith(KEYS.data)}


def run(store: ObjectStore, keys: RunKeys = KEYS, **more: Any) -> PruneReport:
    return prune(store, keys, more.pop("rules", RULES), now_wall_s=NOW_S, **more)


def sharing(store: Clocked, made: Manifest, step: int, age_s: float) -> Manifest:
    """A later commit of the same shards, and one of its own."""
    own = store.commit(step, age_s, "more")
    again = replace(own, shards=made.shards + own.shards)
    store.now_s = NOW_S - age_s
    store.put(KEYS.commit(own.ref, 0, 1), manifest.encode(again))
    store.now_s = NOW_S
    return again


def pinned(store: MemoryStore, step: int, name: str = "paper") -> None:
    pins.create(store, KEYS, Pin(run="r", name=name, ref=CommitRef(1, step)))


@pytest.fixture
def store() -> Clocked:
    """Old commits 1 to 4, where 3 shares the shard of 2; the new commit 5."""
    made = Clocked()
    made.commit(1, 40 * DAY_S)
    sharing(made, made.commit(2, 30 * DAY_S), 3, 20 * DAY_S)
    made.commit(4, 10 * DAY_S)
    made.commit(5, 3600.0)
    return made


def test_what_no_rule_keeps_is_deleted(store: Clocked) -> None:
    """Manifests and objects of the old commits go; those of the newest, and of the last one before, stay."""
    report = run(store)
    assert store.steps() == {4, 5}
    assert len(store.data()) == 2
    assert [(v.ref.step, v.freed_bytes, bool(v.reasons)) for v in report.decisions] == [
        (5, 0, True),
        (4, 0, True),
        (3, 5, False),
        (2, 4, False),
        (1, 4, False),
    ]
    assert (report.objects, report.freed_bytes, report.kept_bytes) == (3, 13, 8)
    assert store.count("delete_many") == 1


def test_prune_reports_the_objects_and_bytes_that_it_has_deleted(store: Clocked) -> None:
    """After each request; the total is known from the first one on."""
    seen: list[tuple[int, int, int]] = []
    report = run(store, deleted=lambda *counts: seen.append(counts))
    assert seen == [(3, 3, 13)]
    assert (report.objects, report.freed_bytes) == (3, 13)
    run(store, is_dry_run=True, deleted=lambda *counts: seen.append(counts))
    assert len(seen) == 1


def test_a_dry_run_deletes_nothing_and_foretells_the_prune(store: Clocked) -> None:
    """Its report is that of the prune which follows."""
    store.orphan(8 * DAY_S)
    store.orphan(6 * DAY_S)
    before = dict(store.objects)
    foretold = run(store, is_dry_run=True)
    assert store.objects == before
    report = run(store)
    assert report == foretold
    assert (report.orphans, report.orphan_bytes, report.young_bytes) == (1, 6, 6)


def test_an_object_that_gets_a_commit_during_the_prune_is_no_orphan(store: Clocked) -> None:
    """An upload of a week ends: its old objects stay, although no manifest named them at the survey."""
    before = set(store.objects)
    store.commit(6, 8 * DAY_S)
    (name,) = (key for key in set(store.objects) - before if key.startswith(KEYS.commits))
    committed = store.objects.pop(name)
    store.before = lambda what, _: what == "delete" and store.objects.setdefault(name, committed)
    report = run(store)
    assert store.steps() == {4, 5, 6}
    whole(store)
    assert report.orphans == 0


def whole(store: MemoryStore) -> None:
    """Assert that each manifest finds its objects."""
    for key, data in store.objects.items():
        if key.startswith(KEYS.commits):
            found = manifest.decode(data)
            assert {chunk.key for chunk in found.chunks} <= store.objects.keys()


@pytest.mark.fault("G42")
def test_a_pin_is_read_directly_before_each_delete(
    store: Clocked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pin that another command creates between decision and delete still counts."""
    monkeypatch.setattr(module, "THREADS", 1)
    deleted = 0

    def after(what: str, _key: str) -> None:
        nonlocal deleted
        deleted += what == "delete"
        if what == "delete" and deleted == 1:
            store.after = lambda *_: None
            for step in store.steps():
                pinned(store, step, f"p{step}")

    store.after = after
    report = run(store)
    assert len(store.steps()) == 4
    assert [v.remains for v in report.decisions if v.remains] == ["pin p3", "pin p2"]
    whole(store)


@pytest.mark.fault("G44")
@pytest.mark.parametrize("is_known", [True, False])
def test_a_damaged_pin_keeps_what_it_may_have_meant(store: Clocked, is_known: bool) -> None:
    """All commits from before it; one that is damaged during the prune keeps all commits that are left."""
    store.now_s = NOW_S - 25 * DAY_S
    pinned(store, 1)
    store.now_s = NOW_S
    key = KEYS.pin("paper")

    def damage(*_: str) -> None:
        store.objects[key] = b"x" + store.objects[key][1:]

    if is_known:
        damage()
        run(store)
        assert store.steps() == {1, 2, 4, 5}, "3 is younger than the pin"
        return
    store.after = lambda what, _: damage() if what == "page" else None
    store.before = lambda what, wanted: damage() if wanted.startswith(KEYS.data) else None
    report = run(store)
    assert store.steps() == {1, 2, 3, 4, 5}
    assert {v.remains for v in report.decisions if v.remains} == {"pin paper"}


@pytest.mark.fault("G42")
def test_a_pin_that_replaces_a_damaged_one_counts(store: Clocked) -> None:
    """The name of a damaged pin is given to another commit while prune decides."""
    store.put(KEYS.pin("paper"), b"damaged")
    store.written_unix_s[KEYS.pin("paper")] = NOW_S - 45 * DAY_S

    def replaced(what: str, wanted: str) -> None:
        if wanted.startswith(KEYS.data) and KEYS.pin("paper") in store.objects:
            store.before = lambda *_: None
            del store.objects[KEYS.pin("paper")]
            pinned(store, 3)

    store.before = replaced
    run(store)
    assert store.steps() == {3, 4, 5}


@pytest.mark.fault("G41")
@pytest.mark.parametrize(
    ("key", "content", "error"),
    [
        ("r/commits/00000001/junk.json", b"{}", r"junk\.json"),
        ("r/pins/a b.json", b"{}", r"a b\.json"),
        (
            KEYS.commit(CommitRef(1, 1), 0, 1),
            b'{"format": "swansong-manifest"}',
            "generation 1 step 1 is damaged",
        ),
    ],
    ids=["unknown commit", "unknown pin", "damaged manifest"],
)
def test_an_object_that_cannot_be_understood_stops_prune(
    store: Clocked, key: str, content: bytes, error: str
) -> None:
    """It may be a commit, or a pin, of a newer version, and a manifest may name any object.

    Nothing is deleted, and the error names the object.
    """
    store.objects[key] = content
    before = dict(store.objects)
    with pytest.raises(CorruptError, match=error):
        run(store)
    assert store.objects == before


STEPS = st.lists(
    st.tuples(st.integers(1, 3), st.integers(1, 6)), min_size=1, max_size=6, unique=True
)


@pytest.mark.fault("S25", "G44")
@given(
    steps=STEPS,
    ages_days=st.lists(st.integers(0, 40), min_size=6, max_size=6),
    pinned_step=st.integers(0, 5),
    planted=st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 4), st.integers(1, 9), st.integers(0, 3)),
        max_size=5,
    ),
    flood=st.sampled_from([1, 100]),
)
def test_with_a_key_prune_decides_as_without_the_other_writer(
    steps: list[tuple[int, int]],
    ages_days: list[int],
    pinned_step: int,
    planted: list[tuple[int, int, int, int]],
    flood: int,
) -> None:
    """The other writer creates claims, pins, whole commits, unknown keys and copies, one or many."""
    honest, attacked = Clocked(), Clocked()
    for store in (honest, attacked):
        view = signed(store, KEY)
        for (generation, step), age_days in zip(
            sorted(steps), sorted(ages_days)[::-1], strict=False
        ):
            store.now_s = NOW_S - age_days * DAY_S
            if view.head(KEYS.generation(generation)) is None:
                claim = ClaimObject(run="r", generation=generation, start=f"s{generation}")
                view.put(KEYS.generation(generation), claims.encode(claim))
            files = {"own": f"{generation}-{step}".encode(), "same": b"same"}
            commit(view, files, generation=generation, step=step, nonce=f"u{step}")
        store.now_s = NOW_S
        generation, step = steps[pinned_step % len(steps)]
        pins.create(view, KEYS, Pin(run="r", name="paper", ref=CommitRef(generation, step)))
    own = dict(attacked.objects)
    for source, generation, step, kind in planted:
        name, data = sorted(own.items())[source % len(own)]
        tag = name.split(".")[-2] if name.endswith(".json") else "0" * 32
        if kind == 0:
            for more in range(flood):
                copy = KEYS.commit(CommitRef(generation, step + more), 0, 1)
                attacked.objects.setdefault(f"{copy[:-5]}.{tag}.json", data)
        elif kind == 1:
            commit(attacked, {"x": b"planted"}, generation=generation, step=step, nonce="planted")
            attacked.objects.setdefault(KEYS.generation(generation + 5), data)
        elif kind == 2:
            for place in (KEYS.commits, KEYS.generations, KEYS.pins):
                attacked.objects.setdefault(f"{place}{generation:08d}/junk.json", data)
        else:
            for more in range(flood):
                attacked.objects.setdefault(KEYS.pin(f"p{step + more}"), data)
    for store in (honest, attacked):
        prune(signed(store, KEY), KEYS, RULES, now_wall_s=NOW_S)
    assert {key: data for key, data in attacked.objects.items() if key in own} == honest.objects


@pytest.mark.fault("S25")
def test_the_commits_from_before_the_key_stay(store: Clocked) -> None:
    """A run that begins to sign: its earlier commits do not count, and none of their bytes are deleted."""
    before = dict(store.objects) | {KEYS.generation(1): b"{}"}
    store.objects = dict(before)
    view = signed(store, KEY)
    claim = ClaimObject(run="r", generation=1, start="s")
    view.put(KEYS.generation(1), claims.encode(claim))
    store.now_s = NOW_S + 100 * DAY_S
    commit(view, {"own": b"new"}, step=9, nonce="new")
    report = run(view)
    assert [decision.ref.step for decision in report.decisions] == [9]
    assert store.objects.items() >= before.items()


def test_commits_that_change_all_the_time_fail_the_prune(store: Clocked) -> None:
    """After three attempts, with an error that a retry may help."""

    def before(what: str, wanted: str) -> None:
        if what == "get" and wanted.startswith(KEYS.commits):
            store.objects.pop(wanted, None)
            store.commit(int(max(store.steps(), default=5)) + 1, 0.0)

    store.before = before
    with pytest.raises(Transient, match="change"):
        run(store)


@pytest.mark.fault("G43")
def test_a_locked_commit_stays_until_its_date(store: Clocked) -> None:
    """The report says until when; the objects of a commit that is locked stay as well."""
    store.locked_until_unix_s[KEYS.commit(CommitRef(1, 1), 0, 1)] = NOW_S + DAY_S
    (held,) = (key for key in store.data() if key.endswith("-u2"))
    store.locked_until_unix_s[held] = NOW_S + DAY_S
    report = run(store)
    assert store.steps() == {1, 4, 5}
    assert report.decisions[-1].remains == "locked until 2027-01-16T08:00:00.000Z"
    assert list(report.remain) == [held]
    assert report.remain_count == 1
    whole(store)


def test_a_manifest_that_was_replaced_stays(store: Clocked) -> None:
    """Prune deletes only the object that it has read."""

    def before(what: str, key: str) -> None:
        if what == "delete" and key.endswith("000000000001/00000-of-00001.json"):
            store.objects[key] = store.objects[key] + b" "

    store.before = before
    with pytest.raises(CorruptError):
        run(store)  # the new object is read before any object goes
    assert 1 in store.steps()


@pytest.mark.fault("G43")
def test_without_the_right_to_delete_prune_fails_with_the_reason(store: Clocked) -> None:
    """The store's refusal of the first manifest ends it."""

    def before(what: str, _key: str) -> None:
        if what == "delete":
            raise Permanent("delete: access denied")

    store.before = before
    with pytest.raises(Permanent, match="access denied"):
        run(store)
    assert len(store.steps()) == 5


def test_a_report_of_locked_commits_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each commit that cannot be deleted costs the same, for any number of them."""

    def comparisons(commits: int) -> int:
        store = Clocked()
        for step in range(commits):
            store.commit(step, (commits - step + 1) * DAY_S)
        store.delete = _refuse  # type: ignore[method-assign]
        count = 0
        equal = CommitRef.__eq__

        def counted(self: CommitRef, other: object) -> bool:
            nonlocal count
            count += 1
            return equal(self, other)

        with monkeypatch.context() as patch:
            patch.setattr(CommitRef, "__eq__", counted)
            report = run(store)
        assert sum(bool(decision.remains) for decision in report.decisions) == commits - 1
        return count

    assert comparisons(40) < 3 * comparisons(20)


def _refuse(key: str, *, if_tag: str = "") -> None:
    del if_tag
    raise Locked(key, until_unix_s=NOW_S + DAY_S)
