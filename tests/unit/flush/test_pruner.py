# SPDX-License-Identifier: Apache-2.0
"""Prune in the daemon: on request, at intervals, and never during an evacuation."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from swansong_bucket.errors import Permanent, Stopped
from swansong_bucket.format.keys import RunKeys
from swansongd.flush.background import Background
from swansongd.flush.pruner import Pruner

from testkit.committed import commit
from testkit.memory_store import MemoryStore
from testkit.records import NO_RULE
from testkit.waiting import until

KEYS = RunKeys("r")
RULES = replace(NO_RULE, keep_last=1, in_daemon=True)
DAY_S = 86400.0


def pruner(
    store: MemoryStore, *, is_urgent: Callable[[], bool] = lambda: False, **more: Any
) -> Pruner:
    return Pruner(
        Background(store, is_urgent),
        KEYS,
        RULES,
        may_prune=more.pop("may_prune", lambda: True),
        stop=more.pop("stop", threading.Event()),
        first_s=0.01,
        interval_s=0.01,
        retry_s=0.01,
    )


@pytest.fixture
def store() -> MemoryStore:
    """Commits of 30, 20 and 10 days; prune deletes the first two."""
    made = MemoryStore()
    now_s = made.clock()
    for step, age_s in ((1, 30 * DAY_S), (2, 20 * DAY_S), (3, 10 * DAY_S)):
        made.clock = lambda at_s=now_s - age_s: at_s  # type: ignore[misc]
        commit(made, {"f": b"x"}, step=step, nonce=f"u{step}")
    made.clock = lambda: now_s
    made.requests.clear()
    return made


def test_the_daemon_prunes_at_intervals(store: MemoryStore) -> None:
    """A failure is retried; the thread ends with the daemon."""
    stop = threading.Event()
    failures = 3

    def before(what: str, _key: str) -> None:
        nonlocal failures
        if what == "delete" and failures:
            failures -= 1
            raise Permanent("access denied")

    store.before = before
    under_test = pruner(store, stop=stop)
    under_test.start()
    until(lambda: under_test.figures.commits, what="the prune")
    stop.set()
    assert not failures
    figures = under_test.figures
    assert len(store.objects) == 2
    assert under_test.succeeded_mono_s is not None
    assert (figures.freed_bytes > 0, figures.kept_bytes) == (True, 1)


@pytest.mark.fault("G46")
def test_a_notice_cancels_a_prune(store: MemoryStore) -> None:
    """After the request in flight; no prune begins during an evacuation."""
    urgent = threading.Event()
    store.before = lambda what, _key: urgent.set() if what == "delete" else None
    under_test = pruner(store, is_urgent=urgent.is_set)
    with pytest.raises(Stopped):
        under_test.prune()
    assert store.count("delete_many") == 0
    store.requests.clear()
    with pytest.raises(Stopped):
        under_test.prune()
    assert {what for what, _ in store.requests} <= {"list"}


def test_only_a_chosen_vm_prunes(store: MemoryStore) -> None:
    """One of several VMs is enough, and a fenced VM must not write."""
    asked = threading.Event()

    def may_prune() -> bool:
        asked.set()
        return False

    stop = threading.Event()
    pruner(store, may_prune=may_prune, stop=stop).start()
    assert asked.wait(60)
    stop.set()
    assert not store.requests
