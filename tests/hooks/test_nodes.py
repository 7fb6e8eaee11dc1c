# SPDX-License-Identifier: Apache-2.0
"""Ranks on several VMs: all save the same step, or none does."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import swansong
from swansong._ranks.agreement import Agreement, Ranks
from swansong._ranks.choice import RestoreChoice
from swansong._ranks.job_store import JobStore
from swansong._ranks.rendezvous import Rendezvous, report_absence
from swansong._ranks.rounds import Decision, RoundRunner, take_part
from swansong.protocol import (
    Agreed,
    Declined,
    Finish,
    JobStart,
    Message,
    PeerRequest,
    Request,
    Sealed,
)

from testkit.job_store import MemoryJobStore
from testkit.waiting import until

TRIALS = {"memory": 2000, "torch": 300}
"""Single rounds, in which every rank comes when it likes."""


class Rank:
    """One rank: its training loop, its rendezvous and rounds, and its messages to the daemon of its VM."""

    def __init__(self, ranks: Ranks, connect: Callable[[], JobStore], seed: int) -> None:
        self.ranks = ranks
        self.said: list[Message] = []
        self.saved: list[tuple[str, int]] = []
        self.agreement = Agreement(ranks.world_size, None, self._answer)
        self.rendezvous = Rendezvous(ranks, self._send_daemon, connect)
        self.rounds = RoundRunner(self.rendezvous, self.agreement)
        self.choice = RestoreChoice(self.rendezvous)
        self.may_begin = threading.Event()
        """The daemon has nothing of an earlier start to commit."""
        self.may_begin.set()
        self.is_stuck = threading.Event()
        self.stop = threading.Event()
        self._random = random.Random(seed)
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._wake = threading.Event()

    def _answer(self, message: Message) -> object:
        return self.rounds.answer(message)

    def _send_daemon(self, message: Message) -> None:
        self.said.append(message)
        if isinstance(message, Finish) and self.may_begin.is_set():
            self.rendezvous.finished(message.job_start_id)

    def start(self) -> None:
        self.rounds.start()
        self._thread.start()

    def all_of(self, kind: type[Message], request_id: str) -> list[Message]:
        return [m for m in self.said if isinstance(m, kind) and _id(m) == request_id]

    def end(self) -> None:
        self.stop.set()
        self.rendezvous.closed.set()

    def _train(self) -> None:
        agreement, step = self.agreement, 0
        while not self.stop.is_set():
            self._wake.wait(self._random.choice([0.0, 0.0005, 0.002]))
            while self.is_stuck.is_set() and not self.stop.wait(0.002):
                pass
            step += 1
            agreement.step = step
            if step < agreement.attend_at:
                continue
            due = agreement.decide(step)
            if due is not None:
                self.saved.append((due.request_id, step))
                answer = Sealed(step, f"step-{step}", 0.0, 1, due.request_id)
                agreement.done(due, step, answer)


class Job:
    """A job of ``nodes`` VMs with ``local`` ranks each."""

    def __init__(
        self, connect: Callable[[], JobStore], *, nodes: int = 2, local: int = 2, seed: int = 0
    ) -> None:
        self.local = local
        self.ranks = [
            Rank(
                Ranks(
                    rank=rank,
                    world_size=nodes * local,
                    local_world_size=local,
                    node=rank // local,
                    nodes=nodes,
                ),
                connect,
                seed * 1000 + rank,
            )
            for rank in range(nodes * local)
        ]

    def __enter__(self) -> Job:
        for rank in self.ranks:
            rank.start()
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.end()
        for rank in self.ranks:
            rank.rounds.close()

    def on(self, node: int) -> list[Rank]:
        return [rank for rank in self.ranks if rank.ranks.node == node]

    def request(
        self,
        request_id: str,
        node: int = 0,
        seconds_left: float = 60.0,
        urgency: str = "emergency",
    ) -> None:
        """The daemon of one VM asks its ranks."""
        for rank in self.on(node):
            rank.rounds.request(Request(request_id, "test", seconds_left, urgency))

    def wait_sealed(self, request_id: str, node: int = 0, timeout_s: float = 60.0) -> int:
        """The daemon of the VM hears that all its ranks have saved; returns the step."""
        until(
            lambda: all(rank.all_of(Sealed, request_id) for rank in self.on(node)),
            timeout_s=timeout_s,
            what=f"{request_id} sealed on node {node}",
        )
        steps = {m.step for rank in self.on(node) for m in rank.all_of(Sealed, request_id)}  # type: ignore[attr-defined]
        assert len(steps) == 1, steps
        return int(steps.pop())

    def assert_together(self) -> int:
        """Every step that anybody has saved, all have saved; how many there are."""
        until(
            lambda: len({len(rank.saved) for rank in self.ranks}) == 1, what="all ranks have saved"
        )
        saved = {tuple(rank.saved) for rank in self.ranks}
        assert len(saved) == 1, saved
        return len(self.ranks[0].saved)


def _id(message: Message) -> str:
    return str(getattr(message, "request_id", ""))


@pytest.fixture
def store() -> MemoryJobStore:
    return MemoryJobStore()


@pytest.fixture(params=["memory", "torch"])
def connect(request: pytest.FixtureRequest) -> Iterator[Callable[[], JobStore]]:
    """Connections to a store: the model of it, and the real one."""
    if request.param == "memory":
        yield MemoryJobStore(delay_s=0.0001, seed=random.randrange(2**32)).connect
        return
    distributed = pytest.importorskip("torch.distributed")
    server = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def connect() -> JobStore:
        client: JobStore = distributed.TCPStore(
            "127.0.0.1", server.port, is_master=False, wait_for_workers=False
        )
        return client

    yield connect


@pytest.mark.fault("T12")
def test_no_two_ranks_ever_read_another_decision(
    connect: Callable[[], JobStore], request: pytest.FixtureRequest
) -> None:
    """Thousands of rounds with ranks that come late, about when the first ones lose patience, or never."""
    seed = random.randrange(2**32)
    choice = random.Random(seed)
    outcomes = {"target": 0, "abort": 0}
    trials = TRIALS[request.node.callspec.params["connect"]]
    for trial in range(trials // 100):
        limit_s = 0.005
        world = choice.choice([2, 3, 4])
        plans = []
        for number in range(100):
            steps = [choice.randrange(50) for _ in range(world)]
            scale = choice.choice([0.2, 1.0, 1.0, 1.5])
            delays = [choice.uniform(0, scale * limit_s) for _ in range(world)]
            dead = {rank for rank in range(world) if choice.random() < 0.05}
            plans.append((number, steps, delays, dead))
        decisions: list[list[Decision]] = [[] for _ in plans]
        never = threading.Event()

        def play(rank: int) -> None:
            store = connect()
            for number, steps, delays, dead in plans:  # noqa: B023 - ended before the next trial
                if rank in dead:
                    continue
                never.wait(delays[rank])  # noqa: B023
                decision = take_part(
                    store,
                    f"{trial}/{number}",  # noqa: B023
                    rank=rank,
                    world_size=world,  # noqa: B023
                    step=steps[rank],
                    limit_s=limit_s,  # noqa: B023
                    stop=never,  # noqa: B023
                )
                decisions[number].append(decision)  # noqa: B023

        threads = [
            threading.Thread(target=play, args=(rank,), daemon=True) for rank in range(world)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        for (_, steps, _, dead), made in zip(plans, decisions, strict=True):
            assert len(made) == world - len(dead), (seed, trial)
            assert len(set(made)) <= 1, (seed, trial, made)
            if made and made[0].target is not None:
                assert not dead, (seed, trial)
                assert made[0].target == max(steps) + 1, (seed, trial)
            if made:
                outcomes["abort" if made[0].target is None else "target"] += 1
    assert min(outcomes.values()) > trials / 20, outcomes


@pytest.mark.fault("T12", "N09")
def test_a_notice_at_any_vm_is_a_checkpoint_of_the_whole_job(
    connect: Callable[[], JobStore],
) -> None:
    """Whoever asks, all ranks save one step, and the daemons of the other VMs hear at once of whom."""
    seed = random.randrange(2**32)
    rounds = 15
    with Job(connect, nodes=3, local=2, seed=seed) as job:
        for number in range(rounds):
            node = number % 3
            job.request(f"r{number}", node)
            step = job.wait_sealed(f"r{number}", node)
            assert job.assert_together() == number + 1, seed
            for rank in job.ranks:
                assert rank.saved[-1] == (f"r{number}", step), seed
                peers = rank.all_of(PeerRequest, f"r{number}")
                # A rank of that VM may hear it of another one there before its daemon asks.
                assert len(peers) == 1 or rank.ranks.node == node, (seed, rank.ranks)
                assert [m.step for m in rank.all_of(Agreed, f"r{number}")] == [step]  # type: ignore[attr-defined]
        assert len({m.id for r in job.ranks for m in r.said if isinstance(m, JobStart)}) == 1


@pytest.mark.fault("T12", "N09")
def test_two_notices_at_once(connect: Callable[[], JobStore]) -> None:
    """Both VMs get a checkpoint that all ranks have; one, or one after the other."""
    seed = random.randrange(2**32)
    with Job(connect, nodes=2, local=2, seed=seed) as job:
        for number in range(15):
            threads = [
                threading.Thread(target=job.request, args=(f"r{number}.{node}", node))
                for node in (0, 1)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for node in (0, 1):
                step = job.wait_sealed(f"r{number}.{node}", node)
                job.assert_together()
                assert step in {s for _, s in job.ranks[0].saved}, seed
        assert 15 <= job.assert_together() <= 30


@pytest.mark.fault("T04", "T12")
def test_a_dead_rank_costs_the_others_a_tenth_of_the_time_at_most(store: MemoryJobStore) -> None:
    """Nobody saves, every daemon is told, training goes on; and the next round is not spoilt."""
    with Job(store.connect, nodes=2, local=2) as job:
        job.request("first")
        job.wait_sealed("first")
        job.assert_together()
        dead = job.ranks[3]
        dead.end()
        dead.rounds.close()
        alive = job.ranks[:3]
        job.request("second", seconds_left=1.0)
        until(lambda: all(rank.all_of(Declined, "second") for rank in alive))
        assert all(rank.saved[-1][0] == "first" for rank in alive)
        reached = [rank.agreement.step for rank in alive]
        until(
            lambda: all(r.agreement.step > s for r, s in zip(alive, reached, strict=True)),
            what="training goes on",
        )


@pytest.mark.fault("T04", "T12")
def test_a_stuck_rank_does_not_split_the_others(connect: Callable[[], JobStore]) -> None:
    """Its thread answers while its loop hangs: the others save; it saves the same step when it gets there."""
    with Job(connect, nodes=2, local=1) as job:
        job.request("first")
        job.wait_sealed("first")
        job.assert_together()
        stuck, free = job.ranks[1], job.ranks[0]
        stuck.is_stuck.set()
        before = stuck.agreement.step
        until(lambda: free.agreement.step > before + 3)
        job.request("second")
        until(lambda: free.all_of(Sealed, "second") or free.all_of(Declined, "second"))
        assert not free.all_of(Declined, "second")
        assert stuck.saved[-1][0] == "first"
        stuck.is_stuck.clear()
        job.assert_together()


@pytest.mark.fault("T04", "T12")
def test_a_rank_that_hangs_for_a_moment_costs_one_round(store: MemoryJobStore) -> None:
    """The next request, under its own id, is a round of its own, and all ranks save for it."""
    moves = threading.Event()
    moves.set()

    class Slow:
        def __getattr__(self, name: str) -> object:
            moves.wait(20)
            return getattr(store, name)

    job = Job(store.connect, nodes=2, local=1)
    job.ranks[1].rendezvous.open_store = Slow  # type: ignore[assignment]
    with job:
        job.request("first")
        job.wait_sealed("first")
        moves.clear()
        job.request("e1", seconds_left=5.0)
        until(lambda: job.ranks[0].all_of(Declined, "e1"))
        moves.set()
        job.request("e1.again-1")
        step = job.wait_sealed("e1.again-1")
        job.assert_together()
        assert job.ranks[1].saved[-1] == ("e1.again-1", step)


@pytest.mark.fault("T12")
def test_a_store_that_is_gone_is_a_reason_to_decline(store: MemoryJobStore) -> None:
    """The daemon hears why within a tenth of the time left, training is held up no longer."""
    with Job(store.connect, nodes=2, local=1) as job:
        job.request("first")
        job.wait_sealed("first")
        job.assert_together()
        store.is_broken = True
        job.request("second", seconds_left=5.0)
        until(lambda: job.ranks[0].all_of(Declined, "second"))
        (declined,) = job.ranks[0].all_of(Declined, "second")
        assert "the store is gone" in declined.reason or "no store" in declined.reason  # type: ignore[attr-defined]
        store.is_broken = False
        reached = job.ranks[0].agreement.step
        until(lambda: job.ranks[0].agreement.step > reached)
        job.request("third")
        job.wait_sealed("third")
        job.assert_together()


def test_an_emergency_does_not_wait_for_what_has_time(store: MemoryJobStore) -> None:
    """A checkpoint asked for without hurry and one in an emergency are both taken by all ranks."""
    with Job(store.connect, nodes=2, local=2) as job:
        for number in range(20):
            job.request(f"drain{number}", node=0, urgency="drain")
            job.request(f"urgent{number}", node=1)
            job.wait_sealed(f"urgent{number}", node=1)
            job.wait_sealed(f"drain{number}", node=0)
        job.assert_together()
        urgent = [m for m in job.ranks[0].said if isinstance(m, PeerRequest)]
        assert {m.request_id for m in urgent} == {f"urgent{n}" for n in range(20)}
        assert not [m for m in job.ranks[2].said if isinstance(m, PeerRequest)]


@pytest.mark.fault("T09")
def test_a_daemon_that_was_restarted_hears_it_all_again(store: MemoryJobStore) -> None:
    """Which start of the job this is, whose end is near, and, when it asks, what came of the request."""
    with Job(store.connect, nodes=2, local=1) as job:
        job.request("r1")
        step = job.wait_sealed("r1")
        job.assert_together()
        other = job.ranks[1]
        other.said.clear()
        other.rounds.resend()
        assert [type(m) for m in other.said] == [JobStart, PeerRequest]
        other.rounds.request(Request("r1", "again", 50.0))
        until(lambda: other.all_of(Sealed, "r1"))
        assert other.all_of(Sealed, "r1")[0].step == step  # type: ignore[attr-defined]
        assert job.assert_together() == 1


def test_what_an_earlier_start_has_left_means_nothing(connect: Callable[[], JobStore]) -> None:
    """Two starts of one job, one after the other, in one store: other sessions, other rounds."""
    sessions = []
    for start in range(3):
        with Job(connect, nodes=2, local=1, seed=start) as job:
            job.request("r1")
            job.wait_sealed("r1")
            assert job.assert_together() == 1
            sessions.append({m.id for r in job.ranks for m in r.said if isinstance(m, JobStart)})
    assert [len(session) for session in sessions] == [1, 1, 1]
    assert len(set.union(*sessions)) == 3


def test_rank_0_chooses_the_checkpoint_for_all(connect: Callable[[], JobStore]) -> None:
    """However late each rank asks, all get what rank 0 decided, and only rank 0 decides."""
    with Job(connect, nodes=2, local=2) as job:
        got: dict[int, object] = {}

        def ask(rank: Rank) -> None:
            def decide(session: str) -> dict[str, object]:
                assert rank.ranks.rank == 0
                assert JobStart(session) in rank.said
                return {"generation": 3, "step": 40}

            got[rank.ranks.rank] = rank.choice.for_resume(decide)

        threads = [threading.Thread(target=ask, args=(rank,)) for rank in reversed(job.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert list(got.values()) == [{"generation": 3, "step": 40}] * 4


def test_a_start_begins_when_no_daemon_has_anything_to_finish(
    connect: Callable[[], JobStore],
) -> None:
    """Nothing is claimed or chosen before the last daemon says so, and one that restarts is asked again."""
    with Job(connect, nodes=3, local=1) as job:
        busy = job.ranks[2]
        busy.may_begin.clear()

        def begun() -> list[Message]:
            return [m for rank in job.ranks for m in rank.said if isinstance(m, JobStart)]

        until(lambda: all(any(isinstance(m, Finish) for m in r.said) for r in job.ranks))
        (session,) = {m.job_start_id for r in job.ranks for m in r.said if isinstance(m, Finish)}
        busy.said.clear()
        busy.rounds.resend()
        assert busy.said == [Finish(session)]
        assert not begun()
        busy.rendezvous.finished("another start")
        assert not begun()
        busy.rendezvous.finished(session)
        until(lambda: len(begun()) == 3)
        assert set(begun()) == {JobStart(session)}
        job.request("r1")
        job.wait_sealed("r1")


@pytest.mark.parametrize("absent", [0, 1])
def test_a_vm_without_a_daemon_is_named_at_once(
    connect: Callable[[], JobStore], monkeypatch: pytest.MonkeyPatch, absent: int
) -> None:
    """Its rank would begin at step 0: the others do not wait, and the advice is to start the daemon there.

    When the daemon has come all the same, they meet.
    """
    monkeypatch.setattr("swansong._ranks.rendezvous.ABSENT_S", 0.5)
    job = Job(connect, nodes=2, local=1)
    present, other = job.ranks[1 - absent], job.ranks[absent]
    try:
        other.rendezvous.announce_absence()
        present.start()
        with pytest.raises(
            TimeoutError, match=rf"ranks \[{absent}\] have no daemon .* start swansongd"
        ):
            present.choice.for_resume(lambda _: {})
        other.start()
        until(lambda: any(isinstance(m, JobStart) for m in present.said))
    finally:
        job.__exit__()


def test_a_restore_without_a_daemon_tells_the_other_vms(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It begins at step 0 all the same: without a daemon the hooks do nothing."""
    told: list[int] = []
    monkeypatch.setattr(Rendezvous, "announce_absence", lambda self: told.append(self.ranks.rank))
    environment = {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": 1}
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    with swansong.attach(
        save=lambda _: None, load=lambda _: None, socket=tmp_path / "no.sock"
    ) as guard:
        assert guard.restore() == 0
    assert told == [1]


def test_what_an_earlier_start_has_left_about_a_daemon_is_not_taken_for_this_one(
    connect: Callable[[], JobStore],
) -> None:
    """The rank of a VM without a daemon was started again, with one: nobody fails."""
    job = Job(connect, nodes=2, local=1)
    for rank in job.ranks:
        report_absence(connect(), rank.ranks.rank)
    with job:
        job.request("r1")
        job.wait_sealed("r1")


def all_go_back(
    job: Job, steps: dict[int, tuple[int, int]], decide: Callable[[int], dict[str, object]]
) -> list[object]:
    """Each rank goes back after ``steps[rank]``: its last step, and the first that it does not trust."""
    got: list[object] = []

    def go_back(rank: Rank) -> None:
        got.append(rank.choice.for_rollback(1, *steps[rank.ranks.rank], decide))

    threads = [
        threading.Thread(target=go_back, args=(rank,), daemon=True)
        for rank in reversed(job.ranks)
        if rank.ranks.rank in steps
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return got


def test_all_ranks_go_back_to_what_rank_0_chose_under_one_new_job_start(
    connect: Callable[[], JobStore],
) -> None:
    """Before the earliest step that any rank suspects; every daemon hears the same new name, also again."""
    with Job(connect, nodes=2, local=2) as job:
        asked: list[int] = []

        def decide(before_step: int) -> dict[str, object]:
            asked.append(before_step)
            return {"generation": 1, "step": 10}

        steps = {0: (20, 20), 1: (20, 17), 2: (20, 19), 3: (20, 20)}
        assert all_go_back(job, steps, decide) == [{"generation": 1, "step": 10}] * 4
        assert asked == [17]
        began = {m.id for r in job.ranks for m in r.said if isinstance(m, JobStart)}
        assert len(began) == 1, "nothing begins before it is known where"
        assert len({rank.choice.begin_rollback(1) for rank in job.ranks} - began) == 1
        job.ranks[3].rounds.resend()
        anew = [m.id for m in job.ranks[3].said if isinstance(m, JobStart)]
        assert anew[-1] == anew[-2] == job.ranks[0].said[-1].id  # type: ignore[attr-defined]
        job.request("r1")
        job.wait_sealed("r1")
        job.assert_together()


def test_ranks_that_do_not_go_back_together_do_not_go_back(
    connect: Callable[[], JobStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After different steps, or not all of them: everybody who came is told so, and nothing is chosen."""
    monkeypatch.setattr("swansong._ranks.choice.ROLLBACK_LIMIT_S", 0.5)

    def decide(_: int) -> dict[str, object]:
        raise AssertionError

    with Job(connect, nodes=2, local=1) as job:
        (first, second) = all_go_back(job, {0: (20, 20), 1: (21, 20)}, decide)
        assert first == second
        assert "after different steps: 20, 21" in str(first)
    with Job(connect, nodes=2, local=1) as job:
        (alone,) = all_go_back(job, {0: (20, 20)}, decide)
        assert "rank 1 has not called rollback() after step 20" in str(alone)


def test_how_many_vms_there_are_is_said_by_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """GROUP_RANK and GROUP_WORLD_SIZE; without them the ranks of this VM tell."""
    for name, value in {"RANK": 3, "WORLD_SIZE": 6, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("GROUP_WORLD_SIZE", raising=False)
    assert Ranks.from_environment().nodes == 3
    monkeypatch.setenv("GROUP_RANK", "1")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert replace(Ranks.from_environment(), rank=0) == Ranks(
        rank=0, world_size=6, local_world_size=2, node=1, nodes=2
    )
