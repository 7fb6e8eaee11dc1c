# SPDX-License-Identifier: Apache-2.0
"""Reading the manifests of many commits: in parallel, and in bounded memory."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from swansong_bucket.errors import CorruptError, Transient
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.format.manifest import Manifest
from swansong_bucket.runs import catalog
from swansong_bucket.runs.catalog import Commit
from swansong_tools.commands import ls
from swansong_tools.commands.bucket_command import Opened

from testkit.committed import commit
from testkit.memory_store import MemoryStore
from testkit.waiting import until

KEYS = RunKeys("r")


class Held:
    """Blocks reads of manifests until a number of them are in flight, or until the end."""

    def __init__(self, store: MemoryStore) -> None:
        self.changed = threading.Condition()
        self.under_way = self.most = 0
        self.is_open = False
        store.before = self.before

    def before(self, what: str, _key: str) -> None:
        if what != "get":
            return
        with self.changed:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            assert self.changed.wait_for(lambda: self.is_open, 20)
            self.under_way -= 1

    def release(self) -> None:
        with self.changed:
            self.is_open = True
            self.changed.notify_all()


def loading(store: MemoryStore, commits: list[Commit]) -> tuple[threading.Thread, list[Any]]:
    taken: list[Any] = []

    def take(found: Commit, loaded: tuple[Manifest, ...] | CorruptError) -> None:
        taken.append((found.ref, loaded))

    thread = threading.Thread(target=catalog.load_each, args=(store, KEYS, commits, take))
    thread.start()
    return thread, taken


def many(store: MemoryStore, count: int) -> list[Commit]:
    for step in range(count):
        commit(store, {"f": b"x"}, step=step, generation=2)
    return [found for found in catalog.list_commits(store, KEYS) if found.ref.generation == 2]


def test_ls_reads_in_parallel_and_no_more_manifests_than_it_shows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The newest come first, in any order of the replies; a few of thousands cost a few requests."""
    store = MemoryStore()
    commits = many(store, 2 * catalog.READS)
    config: Any = None
    here = Opened(config, store, KEYS, threading.Event(), connections=1)
    held = Held(store)
    rows: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: rows.extend(ls.rows_of(here, None, is_quiet=True)))
    thread.start()
    until(lambda: held.under_way == catalog.READS, what="parallel reads")
    held.release()
    thread.join(60)
    assert held.most == catalog.READS
    assert [row["step"] for row in rows] == [found.ref.step for found in commits]
    assert all(row["complete"] for row in rows)
    store.requests.clear()
    assert ls.rows_of(here, 3, is_quiet=True) == rows[:3]
    assert store.count("get") == 4
    assert capsys.readouterr() == ("", "")


def test_the_manifests_in_memory_are_bounded_by_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few large commits are read at the same time; one above the limit is read alone."""
    store = MemoryStore()
    commits = many(store, 12)
    size_bytes = max(found.size_bytes for found in commits)
    monkeypatch.setattr(catalog, "IN_MEMORY_BYTES", 3 * size_bytes)
    held = Held(store)
    thread, taken = loading(store, commits)
    until(lambda: held.under_way == 3, what="as many reads as fit")
    held.release()
    thread.join(60)
    assert held.most == 3
    assert len(taken) == 12
    monkeypatch.setattr(catalog, "IN_MEMORY_BYTES", 1)
    held = Held(store)
    held.release()
    thread, taken = loading(store, commits)
    thread.join(60)
    assert held.most == 1
    assert len(taken) == 12


def test_an_error_of_the_store_ends_all_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that wait for memory end as well."""
    store = MemoryStore()
    commits = many(store, 12)
    monkeypatch.setattr(catalog, "IN_MEMORY_BYTES", 1)

    def before(_what: str, _key: str) -> None:
        raise Transient("connection reset")

    store.before = before
    with pytest.raises(Transient):
        catalog.load_each(store, KEYS, commits, lambda _commit, _loaded: None)
