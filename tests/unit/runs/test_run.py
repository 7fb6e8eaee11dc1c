# SPDX-License-Identifier: Apache-2.0
"""One bucket gives one answer in every view: ``ls``, ``report``, ``loss`` and the exporter."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from swansong_bucket.errors import Permanent
from swansong_bucket.model import CommitRef
from swansong_bucket.runs import history
from swansong_bucket.runs.lives import lives_of
from swansong_bucket.runs.run import Run
from swansong_tools.commands import ls
from swansong_tools.commands.bucket_command import Opened
from swansong_tools.economics import loss as losses
from swansong_tools.economics.loss import Loss
from swansong_tools.exporter.figures import RunFigures
from swansong_tools.exporter.run_figures import RunReader

from testkit import committed
from testkit.lost_vms import BEGUN_S, KEYS, a_run, claim, farewell
from testkit.memory_store import MemoryStore
from testkit.records import changed

NOW_S = BEGUN_S + 50_000
PLANTED = {
    "commit": KEYS.commit(CommitRef(4, 610), 0, 1),
    "farewell": KEYS.farewell(2, "t"),
    "resumption": KEYS.resumption(3),
    "claim": KEYS.generation(4),
}
SOURCE = {
    "commit": KEYS.commit(CommitRef(1, 140), 0, 1),
    "farewell": KEYS.farewell(1, "t2"),
    "resumption": KEYS.resumption(2),
    "claim": KEYS.generation(1),
}
"""Records of another generation, and of the same kind."""


def a_store(*, without: str = "") -> MemoryStore:
    """A run with four VMs; the newest one left a claim, a farewell and two commits, and no resumption."""
    store = MemoryStore()
    a_run(store)
    farewell(store, 2, 160, BEGUN_S + 500, over=False)
    committed.commit(store, {"a": b"12345"}, generation=3, step=500)
    claim(store, 4, BEGUN_S + 2000)
    for step in (600, 610):
        committed.commit(store, {"a": b"12345", "b": b"6"}, generation=4, step=step)
    farewell(store, 4, 620, BEGUN_S + 3000, over=True)
    store.objects.pop(without, None)
    return store


# ---------------------------------------------------------------- damage


def garbled(store: MemoryStore, kind: str) -> None:
    store.objects[PLANTED[kind]] = b"\xff"


def too_large(store: MemoryStore, kind: str) -> None:
    store.objects[PLANTED[kind]] = b" " * (17 * 2**20)


def of_another_run(store: MemoryStore, kind: str) -> None:
    store.objects[PLANTED[kind]] = changed(store.objects[PLANTED[kind]], run="other")


def of_another_generation(store: MemoryStore, kind: str) -> None:
    store.objects[PLANTED[kind]] = store.objects[SOURCE[kind]]


def refused(store: MemoryStore, kind: str) -> None:
    def before(what: str, key: str) -> None:
        if (what, key) == ("get", PLANTED[kind]):
            raise Permanent("the key of its encryption is missing")

    store.before = before


def deleted(store: MemoryStore, kind: str) -> None:
    """Between the listing and the reading."""

    def before(what: str, key: str) -> None:
        if (what, key) == ("get", PLANTED[kind]):
            store.objects.pop(key, None)

    store.before = before


def sound(_store: MemoryStore, _kind: str) -> None:
    pass


DAMAGES = (garbled, too_large, of_another_run, of_another_generation, refused)


# ---------------------------------------------------------------- views


@dataclass(frozen=True)
class Answer:
    """The content of a run, according to one view."""

    newest: int
    """Step of the newest whole commit."""
    whole: int
    damaged_commits: int
    evacuations: int = 0
    damaged_farewells: int = 0
    loss: Loss | None = None


def of_ls(store: MemoryStore) -> Answer:
    config: Any = None
    here = Opened(config, store, KEYS, threading.Event(), connections=1)
    rows = ls.rows_of(here, None, is_quiet=True)
    whole = [row["step"] for row in rows if row["complete"]]
    return Answer(whole[0], len(whole), sum(row["problem"] is not None for row in rows))


def of_report(store: MemoryStore) -> Answer:
    found = history.read(Run.listed(store, KEYS))
    commits, evacuated = found.commits.commits, found.evacuations
    newest = found.commits.newest_whole
    assert newest is not None
    return Answer(
        newest.ref.step,
        sum(commit.is_whole for commit in commits),
        sum(commit.kind is None for commit in commits),
        len(evacuated.evacuations),
        len(evacuated.damaged),
        total(losses.loss(found.lives.lives)),
    )


def of_exporter(store: MemoryStore) -> Answer:
    figures = exported(store)
    assert figures.newest is not None
    return Answer(
        figures.newest.ref.step,
        sum(figures.commits.values()),
        figures.damaged["commit"],
        sum(figures.evacuations.settled.values()),
        figures.damaged["farewell"],
        figures.losses.loss,
    )


def exported(store: MemoryStore) -> RunFigures:
    reader = RunReader(store, KEYS, None, stop=threading.Event(), monotonic=time.monotonic)
    reader.run.refresh(NOW_S)
    return reader.read(NOW_S)


def total(loss: Loss | None) -> Loss | None:
    """The exporter keeps no single interruption."""
    return None if loss is None else replace(loss, interruptions=())


def answer(make: Callable[[], MemoryStore]) -> Answer:
    """The answer of all views, which must agree."""
    found = of_report(make())
    assert of_exporter(make()) == found
    assert of_ls(make()) == replace(found, evacuations=0, damaged_farewells=0, loss=None)
    assert total(losses.loss(lives_of(Run.listed(make(), KEYS)).lives)) == found.loss
    return found


def made(spoil: Callable[[MemoryStore, str], None], kind: str) -> Callable[[], MemoryStore]:
    def make() -> MemoryStore:
        store = a_store()
        spoil(store, kind)
        return store

    return make


# ---------------------------------------------------------------- tests


def test_an_honest_run_has_one_answer() -> None:
    """Four commits, an evacuation of each VM but the third, and a loss."""
    found = answer(a_store)
    assert (found.whole, found.damaged_commits) == (4, 0)
    assert (found.evacuations, found.damaged_farewells) == (3, 0)
    assert found.loss is not None


@pytest.mark.fault("S25")
@pytest.mark.parametrize("kind", PLANTED)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_object_is_one_without_facts(
    kind: str, damage: Callable[[MemoryStore, str], None]
) -> None:
    """All views count it, and their other figures are those of a run without the object."""
    found = answer(made(damage, kind))
    counts = {"commit": found.damaged_commits, "farewell": found.damaged_farewells}
    assert counts == {each: int(each == kind) for each in counts}
    damaged = exported(made(damage, kind)()).damaged
    assert damaged == dict.fromkeys(damaged, 0) | {kind: 1}
    if kind != "claim":  # a claim that cannot be read still names its generation
        absent = answer(lambda: a_store(without=PLANTED[kind]))
        assert replace(found, damaged_commits=0, damaged_farewells=0) == absent


@pytest.mark.parametrize("kind", PLANTED)
def test_an_object_that_was_deleted_since_the_listing_is_not_damaged(kind: str) -> None:
    """Prune, or a person, deletes it while a view is computed."""
    found = answer(made(deleted, kind))
    assert (found.damaged_commits, found.damaged_farewells) == (0, 0)
    assert not any(exported(made(deleted, kind)()).damaged.values())


def test_one_reading_gets_each_object_once() -> None:
    """The views of a command share the facts of an object."""
    store = a_store()
    store.requests.clear()
    history.read(Run.listed(store, KEYS))
    gets = Counter(key for what, key in store.requests if what == "get")
    assert max(gets.values()) == 1
    assert len(gets) == 4 + 4 + 3 + 1  # commits, farewells, resumptions, and the claim without one
