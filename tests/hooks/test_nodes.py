# SPDX-License-Identifier: Apache-2.0
"""Ranks on several VMs: all save the same step, or none does."""

from __future__ import annotations

import functools
import itertools
import random
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import swansong
from swansong._ranks import position
from swansong._ranks.agreement import Agreement, Ranks
from swansong._ranks.choice import RestoreChoice
from swansong._ranks.job_store import JobStore, open_job_store
from swansong._ranks.rendezvous import Rendezvous, _parsed, has_all_shares, report_absence
from swansong._ranks.rounds import Decision, RoundRunner, take_part
from swansong._ranks.start import TrainingStart
from swansong.protocol import (
    Agreed,
    Begin,
    Declined,
    Finish,
    Finished,
    Message,
    PeerRequest,
    Request,
    Sealed,
    Target,
    encode,
)

from testkit.job_store import MemoryJobStore
from testkit.training_parts import set_rank
from testkit.waiting import in_threads, until

TRIALS = {"memory": 500, "torch": 300}
"""Number of single rounds, in which each rank arrives at a random moment."""


class Rank:
    """One rank: its training loop, its rendezvous and rounds, and its messages to the daemon of its VM."""

    def __init__(self, ranks: Ranks, connect: Callable[[], JobStore], seed: int) -> None:
        self.ranks = ranks
        self.sent: list[Message] = []
        self.saved: list[tuple[str, int]] = []
        self.agreement = Agreement(ranks.world_size, None, self._answer)
        self.training_start = TrainingStart(ranks, self._send_daemon, "")
        self.rendezvous = Rendezvous(ranks, self._send_daemon, self.training_start.learn, connect)
        self.rounds = RoundRunner(self.rendezvous, self.agreement)
        self.choice = RestoreChoice(self.rendezvous)
        self.may_begin = threading.Event()
        """Set while the daemon has nothing of an earlier start to commit."""
        self.may_begin.set()
        self.daemon_answer: Callable[[str], Finished] = Finished
        """Returns the answer of the daemon about the sets of earlier starts, by the id of the next start."""
        self.passes_on: list[Rank] = []
        """The ranks to which its daemon passes the call of another VM on."""
        self.is_stuck = threading.Event()
        self.stop = threading.Event()
        self._random = random.Random(seed)
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._wake = threading.Event()

    def _answer(self, message: Message) -> object:
        return self.rounds.answer(message)

    def _send_daemon(self, message: Message) -> None:
        self.sent.append(message)
        if isinstance(message, PeerRequest):
            call = Request(message.request_id, message.reason, message.seconds_left)
            for rank in self.passes_on:
                rank.rounds.request(call)
        if isinstance(message, Finish) and self.may_begin.is_set():
            self.rendezvous.finished(self.daemon_answer(message.start_id))

    def start(self) -> None:
        self.rounds.start()
        self._thread.start()

    def all_of(self, kind: type[Message], request_id: str) -> list[Message]:
        return [m for m in self.sent if isinstance(m, kind) and _id(m) == request_id]

    def is_in_round_of(self, request_id: str) -> bool:
        """Whether the rank is still in the round that answers this request."""
        call = self.rounds._in_progress
        return call is not None and request_id in (call.id, *self.rounds._aliases_of(call.id))

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
                agreement.done(due.request_id, step, answer)


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
                    local_rank=rank % local,
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
        """Send a request of the daemon of one VM to its ranks, after their rendezvous."""
        for rank in self.on(node):
            # A request itself waits at most 5 s, too short for a loaded machine.
            rank.rendezvous.wait(60.0)
        for rank in self.on(node):
            rank.rounds.request(Request(request_id, "test", seconds_left, urgency))

    def wait_sealed(self, request_id: str, node: int = 0, timeout_s: float = 60.0) -> int:
        """Wait until all ranks of the VM have saved and left the round, and return the step.

        A request during a round that is about to end would be answered by it, and call no round.
        """
        until(
            lambda: all(
                rank.all_of(Sealed, request_id) and not rank.is_in_round_of(request_id)
                for rank in self.on(node)
            ),
            timeout_s=timeout_s,
            what=f"{request_id} sealed on node {node}",
        )
        steps = {m.step for rank in self.on(node) for m in rank.all_of(Sealed, request_id)}  # type: ignore[attr-defined]
        assert len(steps) == 1, steps
        return int(steps.pop())

    def assert_together(self) -> int:
        """Check that all ranks have saved the same steps and left their round; return the number of steps."""
        until(
            lambda: (
                len({len(rank.saved) for rank in self.ranks}) == 1
                and not any(rank.rounds._in_progress for rank in self.ranks)
            ),
            what="all ranks have saved",
        )
        saved = {tuple(rank.saved) for rank in self.ranks}
        assert len(saved) == 1, saved
        return len(self.ranks[0].saved)


def _id(message: Message) -> str:
    return str(getattr(message, "request_id", ""))


@pytest.fixture
def store() -> MemoryJobStore:
    return MemoryJobStore()


ALL_STORES = pytest.mark.parametrize("connect", ["memory", "torch"], indirect=True)
"""For what depends on the times of the store.  :func:`test_the_stores_have_one_contract` has the rest."""


@pytest.fixture
def connect(request: pytest.FixtureRequest) -> Iterator[Callable[[], JobStore]]:
    """Function that opens a connection to the store: a model of it, or torch's."""
    if getattr(request, "param", "memory") == "memory":
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


@ALL_STORES
def test_the_stores_have_one_contract(connect: Callable[[], JobStore]) -> None:
    """The model of torch's store answers like it, for all that Swansong asks."""
    one, other = connect(), connect()
    one.set("key", "value")
    assert (other.get("key"), other.check(["key"])) == (b"value", True)
    assert not other.check(["key", "absent"])
    amounts = [(one, 0), (other, 1), (one, 1), (other, 1), (one, 0)]
    assert [store.add("count", amount) for store, amount in amounts] == [0, 1, 2, 3, 3]
    assert other.multi_get(["count", "key"]) == [b"3", b"value"]
    assert one.compare_set("decision", "", "first") == b"first"
    assert other.compare_set("decision", "", "second") == b"first"
    assert other.compare_set("decision", "first", "third") == b"third"
    assert one.get("decision") == b"third"
    assert one.compare_set("never", "something", "else") == b"something"
    assert not other.check(["never"])


@pytest.mark.fault("T12")
def test_in_a_large_job_one_rank_of_each_vm_looks_for_calls(store: MemoryJobStore) -> None:
    """Its daemon passes an urgent call on to the other ranks, so they take part at once."""
    job = Job(store.connect, nodes=3, local=3)
    for rank in job.ranks:
        if rank.ranks.local_rank:
            rank.rendezvous.call_poll_s = 1000.0
        else:
            rank.passes_on = job.on(rank.ranks.node)
    with job:
        job.request("a")
        job.wait_sealed("a")
        assert job.assert_together() == 1


def test_the_polls_of_a_large_job_fit_its_store_and_the_time() -> None:
    """1,000 VMs with 8 ranks each find a call within 0.5 s, and poll less than 4,000 times a second."""
    at = [Ranks(local, local, 8000, 8, 0, 1000) for local in range(8)]
    every_s = [Rendezvous(ranks, print, print).call_poll_s for ranks in at]
    assert every_s[0] <= 0.5
    assert 1000 * sum(1 / each_s for each_s in every_s) < 4000


def test_the_positions_of_a_large_job_cost_each_rank_a_few_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """attach() fetches no list of all ranks, which all ranks together would fetch as its square."""
    monkeypatch.setattr(position, "_exchanges", itertools.repeat(1))
    vms, fetched = 20, Counter[str]()

    class Counted(MemoryJobStore):
        def get(self, key: str) -> bytes:
            found = super().get(key)
            fetched[threading.current_thread().name] += len(found)
            return found

    store = Counted()

    def attach(rank: int) -> Ranks:
        threading.current_thread().name = str(rank)
        return position._exchange(store, rank, 2 * vms, ["boot", rank // 2])

    found = in_threads(2 * vms, attach)
    assert found == [Ranks(r, r % 2, 2 * vms, 2, r // 2, vms) for r in range(2 * vms)]
    assert max(fetched[str(rank)] for rank in range(1, 2 * vms)) < 200


@ALL_STORES
@pytest.mark.fault("T12")
def test_no_position_of_an_earlier_start_is_found_in_a_store_that_outlives_it(
    connect: Callable[[], JobStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun keeps its store over a restart, after which the ranks are on other VMs, or are fewer."""
    monkeypatch.setattr(position, "_exchanges", itertools.repeat(1))
    monkeypatch.setattr(position, "ATTACH_LIMIT_S", 60.0)
    for vms in ("aabb", "aa", "ab", "abbb", "aaab", "aaaa"):

        def attach(rank: int, vms: str = vms) -> Ranks:
            return position._exchange(connect(), rank, len(vms), ["boot", vms[rank]])

        found = in_threads(len(vms), attach)
        expected = Ranks.among(dict(enumerate(vms)))
        assert [each.position() for each in found] == [p.position() for p in expected.values()]


@ALL_STORES
@pytest.mark.fault("T12")
def test_all_ranks_of_a_round_read_the_same_decision(
    connect: Callable[[], JobStore], request: pytest.FixtureRequest
) -> None:
    """In hundreds of rounds, ranks arrive late, near the limit of the others, or never."""
    seed = random.randrange(2**32)
    choice = random.Random(seed)
    outcomes = {"target": 0, "abort": 0}
    trials = TRIALS[request.node.callspec.params["connect"]]
    limit_s = 0.005
    for trial in range(trials // 100):
        if outcomes["target"] < outcomes["abort"] / 10:  # a slow machine
            limit_s *= 2
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
                    "r",
                    rank=rank,
                    world_size=world,  # noqa: B023
                    step=steps[rank],
                    limit_s=limit_s,  # noqa: B023
                    stop=never,  # noqa: B023
                )
                decisions[number].append(decision)  # noqa: B023

        in_threads(world, play)
        for (_, steps, _, dead), made in zip(plans, decisions, strict=True):
            assert len(made) == world - len(dead), (seed, trial)
            assert len(set(made)) <= 1, (seed, trial, made)
            if made and isinstance(made[0], Target):
                assert not dead, (seed, trial)
                assert made[0].step == max(steps) + 1, (seed, trial)
            if made:
                outcomes["target" if isinstance(made[0], Target) else "abort"] += 1
    assert min(outcomes.values()) > trials / 20, outcomes


@ALL_STORES
@pytest.mark.fault("T12", "N09")
def test_a_notice_at_any_vm_is_a_checkpoint_of_the_whole_job(
    connect: Callable[[], JobStore],
) -> None:
    """All ranks save one step, and the daemons of the other VMs get the request immediately."""
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
                # A rank of that VM may get the call from another rank before its daemon's request.
                assert len(peers) == 1 or rank.ranks.node == node, (seed, rank.ranks)
                assert [m.step for m in rank.all_of(Agreed, f"r{number}")] == [step]  # type: ignore[attr-defined]
        assert len({m.start_id for r in job.ranks for m in r.sent if isinstance(m, Begin)}) == 1


@pytest.mark.fault("T12", "N09")
def test_two_notices_at_the_same_time(connect: Callable[[], JobStore]) -> None:
    """Both VMs get a checkpoint that all ranks have: the same one, or two in turn."""
    seed = random.randrange(2**32)
    with Job(connect, nodes=2, local=2, seed=seed) as job:
        for number in range(15):
            in_threads(2, lambda node: job.request(f"r{number}.{node}", node))  # noqa: B023
            for node in (0, 1):
                step = job.wait_sealed(f"r{number}.{node}", node)
                job.assert_together()
                assert step in {s for _, s in job.ranks[0].saved}, seed
        assert 15 <= job.assert_together() <= 30


@pytest.mark.fault("T04", "T12")
def test_a_dead_rank_costs_the_others_a_tenth_of_the_time_at_most(store: MemoryJobStore) -> None:
    """No rank saves, every daemon receives Declined, and training continues."""
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
            what="further steps",
        )


@pytest.mark.fault("T04", "T12")
def test_a_stuck_rank_does_not_split_the_others(connect: Callable[[], JobStore]) -> None:
    """Its thread answers while its loop hangs: the others save, and it saves the same step later."""
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
    """The next request has another id, and so another round, in which all ranks save."""
    moves = threading.Event()
    moves.set()

    class Slow:
        def __getattr__(self, name: str) -> object:
            moves.wait(60)
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
def test_a_lost_store_declines_the_request(store: MemoryJobStore) -> None:
    """The daemon gets the reason within a tenth of the time left, and training is blocked no longer."""
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


def test_an_emergency_does_not_wait_for_a_drain(store: MemoryJobStore) -> None:
    """All ranks take both checkpoints: the one of the drain, and the one of the emergency."""
    with Job(store.connect, nodes=2, local=2) as job:
        for number in range(20):
            job.request(f"drain{number}", node=0, urgency="drain")
            job.request(f"urgent{number}", node=1)
            job.wait_sealed(f"urgent{number}", node=1)
            job.wait_sealed(f"drain{number}", node=0)
        job.assert_together()
        urgent = [m for m in job.ranks[0].sent if isinstance(m, PeerRequest)]
        assert {m.request_id for m in urgent} == {f"urgent{n}" for n in range(20)}
        assert not [m for m in job.ranks[2].sent if isinstance(m, PeerRequest)]


@pytest.mark.fault("T09")
def test_messages_are_repeated_to_a_restarted_daemon(store: MemoryJobStore) -> None:
    """It gets the request of the other VM and, for its own request, the answer."""
    with Job(store.connect, nodes=2, local=1) as job:
        job.request("r1")
        step = job.wait_sealed("r1")
        job.assert_together()
        other = job.ranks[1]
        other.sent.clear()
        other.rounds.resend()
        assert [type(m) for m in other.sent] == [PeerRequest]
        other.rounds.request(Request("r1", "again", 50.0))
        until(lambda: other.all_of(Sealed, "r1"))
        assert other.all_of(Sealed, "r1")[0].step == step  # type: ignore[attr-defined]
        assert job.assert_together() == 1


def test_keys_of_an_earlier_start_are_ignored(connect: Callable[[], JobStore]) -> None:
    """Starts of one job in one store have different rendezvous ids, and so different rounds."""
    starts = []
    for start in range(3):
        with Job(connect, nodes=2, local=1, seed=start) as job:
            job.request("r1")
            job.wait_sealed("r1")
            assert job.assert_together() == 1
            starts.append({m.start_id for r in job.ranks for m in r.sent if isinstance(m, Begin)})
    assert [len(ids) for ids in starts] == [1, 1, 1]
    assert len(set.union(*starts)) == 3


def test_rank_0_chooses_the_checkpoint_for_all(connect: Callable[[], JobStore]) -> None:
    """All ranks get the choice of rank 0, in any order of arrival, and only rank 0 chooses."""
    with Job(connect, nodes=2, local=2) as job:

        def ask(number: int) -> object:
            def decide(_refused: object) -> dict[str, object]:
                assert number == 0
                assert Begin(job.ranks[0].training_start.id) in job.ranks[0].sent
                return {"generation": 3, "step": 40}

            return job.ranks[number].choice.for_resume(decide, lambda _: {})

        assert in_threads(4, ask) == [{"generation": 3, "step": 40}] * 4


def test_a_start_begins_when_no_daemon_has_anything_to_finish(
    connect: Callable[[], JobStore],
) -> None:
    """Begin waits for Finished of the last daemon, whichever start its other answers are about.

    A restarted daemon gets Finish again.
    """
    with Job(connect, nodes=3, local=1) as job:
        busy = job.ranks[2]
        busy.may_begin.clear()

        def begun() -> list[Message]:
            return [m for rank in job.ranks for m in rank.sent if isinstance(m, Begin)]

        until(lambda: all(any(isinstance(m, Finish) for m in r.sent) for r in job.ranks))
        (rendezvous_id,) = {m.start_id for r in job.ranks for m in r.sent if isinstance(m, Finish)}
        busy.sent.clear()
        busy.rounds.resend()
        assert busy.sent == [Finish(rendezvous_id)]
        assert not begun()
        busy.rendezvous.finished(Finished("another start"))
        assert not begun()
        with busy.rendezvous._changed:  # the rank looks after both
            busy.rendezvous.finished(Finished(rendezvous_id))
            busy.rendezvous.finished(Finished("another start"))
        until(lambda: len(begun()) == 3)
        assert set(begun()) == {Begin(rendezvous_id)}
        job.request("r1")
        job.wait_sealed("r1")


@pytest.mark.parametrize("is_left", [False, True])
def test_a_start_waits_only_for_the_share_of_a_vm_that_left_the_job(
    connect: Callable[[], JobStore], is_left: bool
) -> None:
    """If all VMs of the earlier start have answered, no share is missing; an absent VM may still send one."""
    job = Job(connect, nodes=2, local=2)
    for rank in job.ranks:
        node = rank.ranks.node
        rank.daemon_answer = functools.partial(
            Finished,
            earlier="first",
            first_rank=2 * node,
            nodes=3 if is_left else 2,
            waits=node == 0,
        )
    with job:
        if is_left:
            store = connect()
            until(lambda: all(rank.rendezvous._answer is not None for rank in job.ranks))
            met_id = str(job.ranks[0].rendezvous._met_id)
            answers = [f"{met_id}/answer/{rank.ranks.rank}" for rank in job.ranks]
            until(lambda: store.check(answers))
            assert not any(rank.training_start.id for rank in job.ranks)
            for rank in job.ranks:
                rank.rendezvous.finished(Finished(met_id))
        until(lambda: all(rank.training_start.id for rank in job.ranks))


def test_an_invalid_answer_proves_no_absence_of_shares() -> None:
    """A start waits within its limit if a rank publishes garbage, or two VMs claim one place."""
    waiting = Finished("second", earlier="first", first_rank=0, nodes=2, waits=True)
    other = Finished("second", earlier="first", first_rank=1, nodes=2)
    assert has_all_shares([waiting, other])
    assert not has_all_shares([waiting, other, None])
    assert not has_all_shares([waiting, replace(other, first_rank=0)])
    assert not has_all_shares([waiting, replace(other, earlier="another")])
    for garbage in (b"", b"{}", encode(other).replace(b"1", b"[]"), encode(Finish("second"))):
        assert _parsed(garbage) is None


@pytest.mark.parametrize("absent", [0, 1])
def test_a_vm_without_a_daemon_is_named_soon(
    connect: Callable[[], JobStore], monkeypatch: pytest.MonkeyPatch, absent: int
) -> None:
    """Its rank would begin at step 0: the others do not wait, and the error says to start the daemon.

    With a daemon on that VM, the ranks meet.
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
            present.choice.for_resume(lambda *_: {}, lambda _: {})
        other.start()
        until(lambda: any(isinstance(m, Begin) for m in present.sent))
    finally:
        job.__exit__()


def test_the_store_of_the_process_group_serves_without_an_address(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Spawned ranks have no MASTER_ADDR; a store without an address is an error with the fix."""
    distributed = pytest.importorskip("torch.distributed")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    for method, is_reached in ((address, True), (f"file://{tmp_path}/store", False)):
        distributed.init_process_group("gloo", init_method=method, rank=0, world_size=1)
        try:
            if is_reached:
                open_job_store().set("key", "value")
                assert open_job_store().get("key") == b"value"
            else:
                with pytest.raises(ConnectionError, match="set MASTER_ADDR and MASTER_PORT"):
                    open_job_store()
        finally:
            distributed.destroy_process_group()


def test_a_restore_without_a_daemon_announces_the_absence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The rank itself begins at step 0, because without a daemon the hooks do nothing."""
    announced: list[int] = []
    monkeypatch.setattr(
        Rendezvous, "announce_absence", lambda self: announced.append(self.ranks.rank)
    )
    set_rank(monkeypatch, 1, local_world_size=1)
    with swansong.attach(
        save=lambda _: None, load=lambda _: None, socket=tmp_path / "no.sock"
    ) as guard:
        assert guard.restore() == 0
    assert announced == [1]


def test_a_report_of_absence_by_an_earlier_start_is_ignored(
    connect: Callable[[], JobStore],
) -> None:
    """The rank of a VM without a daemon is restarted with one: all ranks meet."""
    job = Job(connect, nodes=2, local=1)
    for rank in job.ranks:
        report_absence(connect(), rank.ranks.rank)
    with job:
        job.request("r1")
        job.wait_sealed("r1")


def roll_all_back(
    job: Job, steps: dict[int, tuple[int, int]], decide: Callable[[int], dict[str, object]]
) -> list[object]:
    """Roll back each rank after ``steps[rank]``: its last step, and the first that it does not trust."""
    return in_threads(
        len(steps), lambda rank: job.ranks[rank].choice.for_rollback(1, *steps[rank], decide)
    )


def test_all_ranks_roll_back_to_the_choice_of_rank_0(connect: Callable[[], JobStore]) -> None:
    """The choice is before the earliest suspect step, and the start of the ranks is still the same."""
    with Job(connect, nodes=2, local=2) as job:
        asked: list[int] = []

        def decide(before_step: int) -> dict[str, object]:
            asked.append(before_step)
            return {"generation": 1, "step": 10}

        steps = {0: (20, 20), 1: (20, 17), 2: (20, 19), 3: (20, 20)}
        assert roll_all_back(job, steps, decide) == [{"generation": 1, "step": 10}] * 4
        assert asked == [17]
        assert len({m for rank in job.ranks for m in rank.sent if isinstance(m, Begin)}) == 1
        job.request("r1")
        job.wait_sealed("r1")
        job.assert_together()


def test_ranks_that_do_not_roll_back_together_get_an_error(
    connect: Callable[[], JobStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After different steps, or with a missing rank, all callers get the reason, and nothing is chosen."""
    monkeypatch.setattr("swansong._ranks.choice.ROLLBACK_LIMIT_S", 0.5)

    def decide(_: int) -> dict[str, object]:
        raise AssertionError

    with Job(connect, nodes=2, local=1) as job:
        (first, second) = roll_all_back(job, {0: (20, 20), 1: (21, 20)}, decide)
        assert first == second
        assert "after different steps: 20, 21" in str(first)
    with Job(connect, nodes=2, local=1) as job:
        (alone,) = roll_all_back(job, {0: (20, 20)}, decide)
        assert "rank 1 has not called rollback() after step 20" in str(alone)
