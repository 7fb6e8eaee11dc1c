# SPDX-License-Identifier: Apache-2.0
"""Several ranks on one VM."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from swansong import layout
from swansong._ranks.agreement import Agreement, Due, Ranks
from swansong.layout import RankManifest
from swansong.protocol import Accepted, Declined, Failed, Message, Request, Sealed, Target

from testkit.fake_daemon import FakeDaemon
from testkit.training_parts import Attach, Counter, set_rank
from testkit.waiting import in_threads, until

RANKS = 4


class Job:
    """Four ranks as threads, which only the hooks synchronise."""

    def __init__(self, attach: Attach, monkeypatch: pytest.MonkeyPatch, **options: int) -> None:
        self.stop = threading.Event()
        self.counters = [Counter() for _ in range(RANKS)]
        self.guards = []
        for rank, counter in enumerate(self.counters):
            set_rank(monkeypatch, rank, RANKS, RANKS)
            self.guards.append(attach({"counter": counter}, **options))

    def train(self, rank: int, seed: int, steps: int = 10**9) -> None:
        delays, guard, counter = random.Random(seed), self.guards[rank], self.counters[rank]
        while not self.stop.is_set() and counter.value < steps:
            self.stop.wait(delays.choice([0.0, 0.0, 0.0001, 0.002]))
            counter.value += 1
            guard.step(counter.value, loss=1.0)

    def start(self, seed: int, steps: int = 10**9) -> list[threading.Thread]:
        threads = [
            threading.Thread(
                target=self.train, args=(rank, seed * RANKS + rank, steps), daemon=True
            )
            for rank in range(RANKS)
        ]
        for thread in threads:
            thread.start()
        return threads


@pytest.mark.fault("T12", "N09")
def test_all_ranks_save_the_same_step(
    daemon: FakeDaemon, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any pace of the ranks, each request ends in one sealed set with the same step of every rank."""
    job = Job(attach, monkeypatch)
    daemon.wait_connected(RANKS)
    for guard in job.guards:
        guard.restore()
    seed = random.randrange(2**32)
    threads = job.start(seed)
    rounds = 12
    for number in range(1, rounds + 1):
        daemon.request(f"r{number}")
        assert len(daemon.wait_sealed(number)) == number, seed
    job.stop.set()
    for thread in threads:
        thread.join(60)
    assert daemon.partial() == []
    assert daemon.all_of(Failed) == []
    assert daemon.all_of(Declined) == []
    for directory in daemon.sealed():
        step, _ = layout.parse_sealed_name(directory.name) or (-1, "")
        for rank in range(RANKS):
            manifest = RankManifest.decode((directory / f"rank-{rank:05d}.json").read_bytes())
            assert manifest.step == step, seed
            assert all(entry.path.startswith(f"rank-{rank:05d}/") for entry in manifest.files)
    until(lambda: len(daemon.all_of(Sealed)) >= rounds)


def test_periodic_checkpoints_need_no_agreement(
    daemon: FakeDaemon, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks save at the same multiples of a step, and each rank restores its own part."""
    job = Job(attach, monkeypatch, every_steps=10)
    daemon.wait_connected(RANKS)
    for guard in job.guards:
        guard.restore()
    for thread in job.start(1, steps=30):
        thread.join(60)
    assert [path.name[5:17].lstrip("0") for path in daemon.sealed()] == ["10", "20", "30"]
    daemon.restorable = lambda: (daemon.sealed()[-1], 30)
    again = Job(attach, monkeypatch)
    assert [guard.restore() for guard in again.guards] == [30] * RANKS


def test_a_failing_rank_voids_the_set(
    daemon: FakeDaemon, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If one rank cannot save, the set is not sealed, and all ranks continue to train."""
    job = Job(attach, monkeypatch)
    daemon.wait_connected(RANKS)
    for guard in job.guards:
        guard.restore()

    def fail(_: Path) -> None:
        raise OSError(28, "No space left on device")

    job.guards[2]._saver._take = lambda: fail
    threads = job.start(2)
    daemon.request()
    daemon.wait_for(Failed)
    reached = [counter.value for counter in job.counters]
    until(lambda: all(c.value > r + 3 for c, r in zip(job.counters, reached, strict=True)))
    job.stop.set()
    for thread in threads:
        thread.join(60)
    assert daemon.sealed() == []


def test_ranks_have_the_same_nonce_and_starts_another_one() -> None:
    """The nonce is the same for all ranks of one save, and new for each start, step and request."""
    first, second = (Ranks(rank=rank, world_size=2, local_world_size=2) for rank in (0, 1))
    assert first.nonce("a", 5, "r", "x") == second.nonce("a", 5, "r", "x")
    others = {
        first.nonce("a", 6, "r", "x"),
        first.nonce("a", 5, "s", "x"),
        first.nonce("a", 5, "r", "y"),
        first.nonce("a~1", 5, "r", "x"),
    }
    assert len(others | {first.nonce("a", 5, "r", "x")}) == 5
    assert Ranks().nonce("a", 5, "r", "x") != Ranks().nonce("a", 5, "r", "x")


def test_a_rank_that_has_passed_the_target_reports_a_failure() -> None:
    """It had declined; a checkpoint of another step would be useless to the other ranks."""
    said: list[Message] = []
    agreement = Agreement(2, None, said.append)
    agreement.step = 4
    agreement.request(Request("r1", "test", 0.5))
    assert agreement.decide(5) is None
    assert agreement.decide(6) is None
    agreement.target(Target("r1", 5))
    assert agreement.decide(7) is None
    assert [type(message) for message in said] == [Accepted, Declined, Failed]


@pytest.mark.parametrize("how", ["failed", "withdrawn", "timed out"])
def test_a_failed_agreement_is_repeated_under_another_id(how: str) -> None:
    """The rank accepts the further request at once, and saves at its target."""
    said: list[Message] = []
    agreement = Agreement(2, None, said.append)
    agreement.step = 4
    agreement.request(Request("r1", "test", 0.5 if how == "timed out" else 100.0))
    if how == "failed":
        agreement.target(Target("r1", 5))
        due = agreement.decide(5)
        assert due is not None
        agreement.done("r1", 5, Failed("r1", 5, "the disk is full"))
    elif how == "withdrawn":
        agreement.withdraw("r1")
    else:
        assert agreement.decide(5) is None
    agreement.step = 5
    agreement.request(Request("r1.again-1", "test", 100.0))
    assert said[-1] == Accepted("r1.again-1", 5)
    agreement.target(Target("r1.again-1", 6))
    assert agreement.decide(6) == Due("emergency", "r1.again-1")


@pytest.mark.parametrize("has_target", [True, False])
def test_a_request_during_a_rollback_is_made_again(has_target: bool) -> None:
    """Its target is a step that the start before had reached, and this start may need minutes to reach it."""
    said: list[Message] = []
    agreement = Agreement(2, None, said.append)
    agreement.step = 221
    agreement.request(Request("r1", "test", 100.0))
    if has_target:
        agreement.target(Target("r1", 222))
    agreement.begin(30)
    assert said[-1] == Declined("r1", "the training was started again")
    assert agreement.decide(31) is None
    agreement.step = 31
    agreement.request(Request("r1.again-1", "test", 100.0))
    agreement.target(Target("r1.again-1", 32))
    assert agreement.decide(32) == Due("emergency", "r1.again-1")


def test_the_wait_for_a_request_is_counted_in_looks() -> None:
    """While a C function holds the interpreter's lock, no request arrives here: the time must not count.

    A request that the training loop has answered before this thread runs again is not missed.
    """
    agreement = Agreement(2, None, lambda _message: None)
    sealed = Sealed(5, "step-5", 0.0, 1, "r1")

    class Condition(threading.Condition):
        looks = 0

        def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
            """The first look may take any time; the request is answered at the third one."""
            self.looks += 1
            if self.looks == 3:
                agreement.request(Request("r1", "test", 100.0))
                agreement.done("r1", 5, sealed)
            return predicate()

    agreement._changed = condition = Condition()
    found = agreement.wait_requested(1.0, ended_id=agreement.ended_id)
    assert (found, condition.looks) == ("r1", 3)
    assert agreement.wait_taken(found, 10.0)
    assert agreement.wait_requested(0.0, ended_id=agreement.ended_id) == "", "an earlier request"


def test_a_request_before_the_first_load_stays() -> None:
    """It was accepted before any step, so every step after the load is a later one."""
    said: list[Message] = []
    agreement = Agreement(2, None, said.append)
    agreement.request(Request("r1", "test", 100.0))
    agreement.begin(30)
    agreement.target(Target("r1", 31))
    assert said == [Accepted("r1", -1)]
    assert agreement.decide(31) == Due("emergency", "r1")


@pytest.mark.parametrize(("urgency", "expected"), [("emergency", True), ("drain", False)])
def test_an_emergency_request_is_remembered(urgency: str, expected: bool) -> None:
    """Also after it was withdrawn: the run is marked as preempting.  A precaution does not count."""
    agreement = Agreement(2, None, lambda _: None)
    agreement.request(Request(id="r", reason="x", seconds_left=60.0, urgency=urgency))
    agreement.withdraw("r")
    assert agreement.had_emergency is expected


@pytest.mark.parametrize("ranks", [1, 2])
def test_several_ranks_save_at_their_target_after_a_withdrawal(ranks: int) -> None:
    """Another rank may have saved there already, and stopped: a rank that trains on would wait for it."""
    agreement = Agreement(ranks, None, lambda _: None)
    agreement.request(Request("r1", "test", 100.0))
    agreement.target(Target("r1", 5))
    agreement.withdraw("r1")
    assert agreement.decide(5) == (Due("emergency", "r1") if ranks > 1 else None)


def test_the_first_target_is_final() -> None:
    """A second target for the same request, from a restarted daemon, is ignored."""
    agreement = Agreement(2, None, lambda _: None)
    agreement.request(Request("r1", "test", 100.0))
    agreement.target(Target("r1", 5))
    agreement.target(Target("r1", 9))
    assert agreement.decide(4) is None
    assert agreement.decide(5) == Due("emergency", "r1")


@pytest.mark.fault("T18")
def test_all_ranks_finish_one_set(
    daemon: FakeDaemon, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the run has a part of every rank, beside a periodic set of the same step."""
    job = Job(attach, monkeypatch, every_steps=5)
    for guard in job.guards:
        guard.restore()
    for thread in job.start(seed=1, steps=5):
        thread.join()
    in_threads(RANKS, lambda rank: job.guards[rank].finish())
    assert all(guard.finished for guard in job.guards)
    sets = {}
    for path in daemon.sealed():
        parts = [RankManifest.decode(file.read_bytes()) for file in path.glob("rank-*.json")]
        sets[parts[0].kind] = {(part.kind, part.step) for part in parts}
        assert len(parts) == RANKS
    assert sets == {"periodic": {("periodic", 5)}, "final": {("final", 5)}}


@pytest.mark.fault("T03", "D12")
def test_files_of_a_dead_start_do_not_help_to_seal(
    daemon: FakeDaemon, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks but one had written when the job died; after a restart all ranks must write again."""
    job = Job(attach, monkeypatch)
    daemon.wait_connected(RANKS)
    for guard in job.guards[:3]:
        guard.restore()
        assert guard.save(50)
    assert len(daemon.partial()) == 1
    for guard in job.guards:
        guard._end("died")
    again = Job(attach, monkeypatch)
    for guard in again.guards:
        guard.restore()
    assert os.listdir(daemon.staging) == []
    for rank, guard in enumerate(again.guards):
        assert daemon.sealed() == []
        assert guard.save(50), rank
    assert len(daemon.sealed()) == 1
