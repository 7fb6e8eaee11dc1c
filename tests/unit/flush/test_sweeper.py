# SPDX-License-Identifier: Apache-2.0
"""The sweeper aborts abandoned uploads, and no others."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from swansongd.bucket.keys import RunKeys
from swansongd.errors import Transient
from swansongd.flush.sweeper import Sweeper

from testkit.memory_store import MemoryStore
from testkit.waiting import until

KEYS = RunKeys("r")


def sweeper(
    store: MemoryStore,
    *,
    after_s: float = 3600.0,
    holds: Callable[[str], bool] = lambda _: False,
    is_urgent: Callable[[], bool] = lambda: False,
    stop: threading.Event | None = None,
) -> Sweeper:
    return Sweeper(
        store,
        KEYS,
        holds=holds,
        is_urgent=is_urgent,
        after_s=after_s,
        stop=stop or threading.Event(),
        interval_s=3600.0,
        retry_s=0.01,
    )


@pytest.fixture
def store() -> MemoryStore:
    """Three uploads of this run, one of its doctor and one of another run; all are one hour old."""
    made = MemoryStore()
    for key in (
        "r/data/1/a",
        "r/data/1/b",
        "r/data/2/c",
        "r/probes/doctor-1/data/1/e",
        "other/data/1/d",
    ):
        made.begin(key, 10, 5)
    return made


@pytest.mark.fault("O19")
def test_old_uploads_of_this_run_are_aborted(store: MemoryStore) -> None:
    """Uploads of other runs and uploads in the journal are not aborted."""
    (mine,) = [i for i, known in store.open.items() if known.upload.key.endswith("b")]
    assert sweeper(store, holds=lambda upload_id: upload_id == mine).sweep()
    assert [known.upload.key for known in store.open.values()] == ["r/data/1/b", "other/data/1/d"]


def test_recent_uploads_are_not_aborted(store: MemoryStore) -> None:
    """Another VM may still use an upload that is younger than configured."""
    assert sweeper(store, after_s=3601.0).sweep()
    assert len(store.open) == 5


def test_an_evacuation_interrupts_the_sweep(store: MemoryStore) -> None:
    """The evacuation gets the full bandwidth."""
    assert not sweeper(store, is_urgent=lambda: len(store.open) == 3).sweep()
    assert len(store.open) == 3


def test_it_sweeps_at_the_start_and_retries_after_a_failure(store: MemoryStore) -> None:
    failures = iter([Transient("503"), ZeroDivisionError("a fault of the daemon")])

    def before(what: str, key: str) -> None:
        if what == "uploads" and (error := next(failures, None)) is not None:
            raise error

    store.before = before
    stop = threading.Event()
    sweeper(store, stop=stop).start()
    until(lambda: len(store.open) == 1, what="the uploads to be aborted")
    stop.set()
    assert store.count("uploads") == 4, "two failures, then data and probes"
