# SPDX-License-Identifier: Apache-2.0
"""The writer of resumptions: once, and never in the way of a commit."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs
from swansong_bucket.errors import Transient
from swansong_bucket.format import resumption
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.loss_records import Resumption, lost_gpu_s
from swansongd.flush import ledger as ledgers
from swansongd.flush.ledger import Ledger
from swansongd.observe.accounting import MeasuredResume, Milestones, Training

from testkit import committed
from testkit.memory_store import MemoryStore
from testkit.waiting import until

KEYS = RunKeys("r")
WALL_S = 1_800_000_000.0


def a_record(generation: int = 2, *, nodes: int = 1) -> MeasuredResume:
    now = time.monotonic()
    made = Milestones(
        asked_mono_s=now - 4.0,
        answered_mono_s=now - 3.0,
        started_mono_s=now - 2.0,
        first_step_mono_s=now - 1.0,
        start_step=40,
        first_step=41,
    )
    return MeasuredResume(generation, made, Training(step=41, ranks=4, nodes=nodes))


class Rig:
    """A ledger over a store in memory, with an evacuation and a fence that a test switches."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.ledgers: list[Ledger] = []
        self.urgent, self.fenced = False, False

    def ledger(self, **options: Any) -> Ledger:
        made = Ledger(
            self.store,
            KEYS,
            is_urgent=lambda: self.urgent,
            is_fenced=lambda: self.fenced,
            wall_s=lambda: WALL_S,
            **options,
        )
        made.start()
        self.ledgers.append(made)
        return made

    def written(self, generation: int = 2) -> Resumption | None:
        data = self.store.objects.get(KEYS.resumption(generation))
        return None if data is None else resumption.decode(data)

    def record(self, ledger: Ledger, measured: MeasuredResume | None = None) -> None:
        ledger.record(measured or a_record(), vm="vm", daemon_mono_s=time.monotonic() - 9.0)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(ledgers, "RETRY_S", 0.01)
    monkeypatch.setattr(ledgers, "_URGENT_S", 0.01)
    made = Rig()
    yield made
    for ledger in made.ledgers:
        ledger.finish(0.0)


def test_a_record_has_wall_clock_times_and_the_end_before_it(rig: Rig) -> None:
    """All times are dated by one reading of the clock."""
    rig.store.put(KEYS.generation(1), b"{}")
    committed.commit(rig.store, {"a": b"1"}, generation=1, step=40)
    ledger = rig.ledger()
    rig.record(ledger)
    until(lambda: ledger.figures.resumptions, what="the record")
    found = rig.written()
    assert found is not None
    assert ledger.figures.gpu_s == lost_gpu_s(found)
    assert found.first_step_wall_s == pytest.approx(WALL_S - 1.0, abs=0.5)
    assert found.daemon_wall_s == pytest.approx(WALL_S - 9.0, abs=0.5)
    assert found.booted_wall_s < found.daemon_wall_s
    assert (found.generation, found.vm, found.ranks) == (2, "vm", 4)
    assert found.earlier is not None
    assert (found.earlier.generation, found.earlier.step) == (1, 40)


def test_the_first_record_of_a_generation_stands(rig: Rig) -> None:
    """Another VM of the job, or an earlier life of the daemon, has written it."""
    rig.store.put(KEYS.resumption(2), b"first")
    ledger = rig.ledger()
    rig.record(ledger)
    rig.record(ledger, a_record(3))
    until(lambda: rig.written(3), what="the next record")
    assert rig.store.objects[KEYS.resumption(2)] == b"first"
    until(lambda: ledger.figures.resumptions == 1, what="only the record of this daemon counts")


def test_a_record_waits_for_the_verdict(rig: Rig) -> None:
    """While an evacuation is open, the store gets no request for it."""
    rig.urgent = True
    asked = threading.Event()
    ledger = rig.ledger()
    ledger._is_urgent = lambda: asked.set() or rig.urgent  # type: ignore[func-returns-value]
    rig.record(ledger)
    assert asked.wait(60)
    assert not rig.store.requests
    rig.urgent = False
    assert until(rig.written, what="the record")


def test_a_record_is_dropped_when_fenced(rig: Rig) -> None:
    """The generation belongs to a VM that no longer owns the run; the thread takes the next record."""
    rig.fenced = True
    ledger = rig.ledger()
    rig.record(ledger)
    done = threading.Event()
    assert ledger._worker.submit(done.set)
    assert done.wait(60)
    assert not rig.store.requests


@pytest.mark.fault("O24")
def test_a_record_is_retried(rig: Rig) -> None:
    """The store is away at first."""
    left = [3]

    def before(what: str, _key: str) -> None:
        if what == "put" and left[0]:
            left[0] -= 1
            raise Transient("503")

    rig.store.before = before
    rig.record(rig.ledger())
    assert until(rig.written, what="the record")


def test_the_record_of_a_vm_that_was_booted_for_the_start_is_preferred(rig: Rig) -> None:
    """A VM of a job that trained before waits first; alone, or at its first start, it does not."""
    ledger = rig.ledger(yield_s=600.0)
    rig.record(ledger, a_record(2, nodes=4))
    until(lambda: rig.written(2), what="the first record")
    rig.record(ledger, a_record(3, nodes=1))
    until(lambda: rig.written(3), what="the record of a job on one VM")
    rig.record(ledger, a_record(4, nodes=4))
    assert rig.written(4) is None


def test_a_damaged_bucket_costs_no_thread(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A foreign object below commits/: the record is given up, and the next one is tried."""
    monkeypatch.setattr(ledgers, "RETRIES_MAX", 2)
    foreign = f"{KEYS.commits}foreign"
    rig.store.put(foreign, b"x")
    ledger = rig.ledger()
    rig.record(ledger)
    done = threading.Event()
    assert ledger._worker.submit(done.set)
    assert done.wait(60)
    assert rig.written() is None
    del rig.store.objects[foreign]
    rig.record(ledger, a_record(3))
    assert until(lambda: rig.written(3), what="the next record")


@pytest.mark.parametrize("is_urgent", [False, True])
def test_the_end_of_the_daemon_cuts_each_wait_short(rig: Rig, is_urgent: bool) -> None:
    """A record that waits for other VMs, or for a verdict, is written before the process ends."""
    ledger = rig.ledger(yield_s=600.0)
    rig.record(ledger, a_record(2, nodes=4))
    until(lambda: rig.written(2), what="the first record")
    rig.urgent = is_urgent
    rig.record(ledger, a_record(3, nodes=4))
    ledger.finish(20.0)
    assert rig.written(3)


def test_the_end_of_the_daemon_tries_a_failed_record_once_more(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backoff ends, and a store that still fails is not asked again."""
    monkeypatch.setattr(ledgers, "RETRY_S", 600.0)
    asked: list[str] = []

    def before(what: str, key: str) -> None:
        if what == "put":
            asked.append(key)
            raise Transient("503")

    rig.store.before = before
    ledger = rig.ledger()
    rig.record(ledger)
    until(lambda: asked, what="the first attempt")
    with capture_logs() as logs:
        ledger.finish(20.0)
    assert len(asked) == 2
    assert "resumption_not_recorded" in [line["event"] for line in logs]


def test_the_end_of_the_daemon_is_bounded(rig: Rig) -> None:
    """The store never answers: the daemon ends without the record."""
    release = threading.Event()
    rig.store.before = lambda _what, _key: release.wait(60)
    ledger = rig.ledger()
    rig.record(ledger)
    ledger.finish(0.05)
    assert rig.written() is None
    release.set()
