# SPDX-License-Identifier: Apache-2.0
"""The ranks of a job over several VMs agree which checkpoint all of them can load, or on one error."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import cast

import pytest
from swansong._ranks import choice as choices
from swansong._ranks import job_store
from swansong._ranks.agreement import Ranks
from swansong._ranks.choice import Choice, Outcome, RestoreChoice
from swansong._ranks.job_store import wait_for_key
from swansong._ranks.rendezvous import Rendezvous

from testkit.job_store import MemoryJobStore
from testkit.waiting import Clock, in_threads

WORLD_SIZE = 4
NEWEST = 40
Fate = Callable[[int], Outcome]
"""The outcome of a rank's fetch, by step of the checkpoint; a rank that dies raises SystemExit."""


def at_all_ranks(value: object) -> dict[int, object]:
    return dict.fromkeys(range(WORLD_SIZE), value)


def resumed(
    fates: dict[int, Fate], store: MemoryJobStore
) -> tuple[dict[int, Choice], dict[int, list[int]]]:
    """The decision of each rank that lives, and the steps that each rank has fetched.

    A rank without a fate can load every checkpoint.
    """
    decided: dict[int, Choice] = {}
    fetched: dict[int, list[int]] = {rank: [] for rank in range(WORLD_SIZE)}

    def choose(refused: Choice | None) -> Choice:
        if refused is None:
            return {"generation": 1, "step": NEWEST}
        assert refused["refused"].startswith("rank ")
        if refused["step"] == 10:
            return {"error": "rank 0: no older checkpoint"}
        return {"generation": 1, "step": refused["step"] - 10}

    def run(rank: int) -> None:
        rendezvous = SimpleNamespace(
            wait=lambda *_: "start",
            ranks=Ranks(rank=rank, world_size=WORLD_SIZE, node=rank, nodes=WORLD_SIZE),
            open_store=store.connect,
            closed=threading.Event(),
            poll_s=0.002,
        )

        def fetch(choice: Choice) -> Outcome:
            fetched[rank].append(choice["step"])
            return fates.get(rank, lambda _: {})(choice["step"])

        with suppress(SystemExit):  # the rank has died
            decided[rank] = RestoreChoice(cast("Rendezvous", rendezvous)).for_resume(choose, fetch)

    in_threads(WORLD_SIZE, run)
    return decided, fetched


@pytest.mark.fault("G30")
def test_all_ranks_take_the_newest_checkpoint_that_is_damaged_for_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each rank falls back by the same steps, and its log names the rank and the reason."""
    fates: dict[int, Fate] = {
        2: lambda step: {"damaged": "no digest"} if step == 40 else {},
        3: lambda step: {"damaged": "no digest"} if step == 30 else {},
    }
    decided, fetched = resumed(fates, MemoryJobStore(delay_s=0.002))
    assert decided == at_all_ranks({"generation": 1, "step": 20})
    assert fetched == at_all_ranks([40, 30, 20])
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 * WORLD_SIZE
    assert "checkpoint of step 40 is damaged" in lines[0]
    assert "rank 2: no digest" in lines[0]


def test_an_error_of_one_rank_is_the_error_of_all() -> None:
    """No rank resumes, and none falls back: an older checkpoint would not help."""
    decided, fetched = resumed({1: lambda _: {"error": "the disk is full"}}, MemoryJobStore())
    assert {each["error"] for each in decided.values()} == {"rank 1: the disk is full"}
    assert len(decided) == WORLD_SIZE
    assert fetched == at_all_ranks([40])


def test_without_an_older_checkpoint_all_ranks_fail() -> None:
    decided, fetched = resumed({3: lambda _: {"damaged": "no digest"}}, MemoryJobStore())
    assert [each["error"] for each in decided.values()] == ["rank 0: no older checkpoint"] * 4
    assert fetched == at_all_ranks([40, 30, 20, 10])


@pytest.mark.fault("G31")
@pytest.mark.parametrize("dead", [0, 2])
@pytest.mark.parametrize("at_step", [40, 30])
def test_a_rank_that_dies_in_its_fetch_ends_the_restore_of_all(
    monkeypatch: pytest.MonkeyPatch, dead: int, at_step: int
) -> None:
    """The other ranks miss its heartbeats, also after a fallback, and all get the same error."""
    monkeypatch.setattr(choices, "RENDEZVOUS_LIMIT_S", 0.5)
    monkeypatch.setattr(choices, "_HEARTBEAT_S", 0.02)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    def die(step: int) -> Outcome:
        if step == at_step:
            raise SystemExit
        return {}

    fates: dict[int, Fate] = {1: lambda step: {"damaged": "no digest"} if step == 40 else {}}
    if at_step == 40:
        fates = {}
    decided, _ = resumed({**fates, dead: die}, MemoryJobStore())
    assert set(decided) == set(range(WORLD_SIZE)) - {dead}
    assert {each.get("error") for each in decided.values()} == {
        f"rank {dead} sent no heartbeat for 0 s"
    }


def test_a_pause_of_the_vm_is_not_the_silence_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that was paused with this one can send its next heartbeat first."""
    store, clock = MemoryJobStore(), Clock()
    monkeypatch.setattr(choices, "time", clock, raising=False)
    looks = iter(
        [
            lambda: None,
            lambda: clock.advance(10 * choices.RENDEZVOUS_LIMIT_S),
            lambda: store.add(choices._beats("start", 1), 1),
        ]
    )

    def waits(*_: object, **__: object) -> bool:
        look = next(looks, None)
        if look is not None:
            look()
        return look is None

    monkeypatch.setattr(choices, "wait_for_key", waits)
    rendezvous = SimpleNamespace(closed=threading.Event(), poll_s=0.002)
    choice = RestoreChoice(cast("Rendezvous", rendezvous))
    assert choice._wait(store, "start", "key", [1]) == ""


def test_a_key_that_appears_in_the_last_poll_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process did not run between the poll and the look at the clock, until the limit had passed."""
    store, clock = MemoryJobStore(), Clock()
    monkeypatch.setattr(job_store, "time", clock)
    check = store.check

    def check_then_pause(keys: list[str]) -> bool:
        found = check(keys)
        clock.advance(60.0)
        store.set("key", "there")
        return found

    monkeypatch.setattr(store, "check", check_then_pause)
    assert wait_for_key(store, "key", threading.Event(), every_s=0.001, limit_s=10.0)


def test_no_two_ranks_ever_load_different_checkpoints() -> None:
    """Random outcomes, in random order, over a slow store: one decision, which no rank contradicts."""
    chance = random.Random(16)
    steps: set[int] = set()
    for seed in range(20):
        table = {
            (rank, step): chance.choices(
                [{}, {"damaged": "flipped"}, {"error": "full"}], (77, 20, 3)
            )[0]
            for rank in range(WORLD_SIZE)
            for step in (40, 30, 20, 10)
        }
        fates: dict[int, Fate] = {
            rank: partial(lambda table, rank, step: table[rank, step], table, rank)
            for rank in range(WORLD_SIZE)
        }
        decided, _ = resumed(fates, MemoryJobStore(delay_s=0.001, seed=seed))
        assert decided == at_all_ranks(decided[0])
        if "error" not in decided[0]:
            steps.add(decided[0]["step"])
            assert not any(table[rank, decided[0]["step"]] for rank in range(WORLD_SIZE))
    assert steps >= {40, 30, 20}
