# SPDX-License-Identifier: Apache-2.0
"""How much of the trainer channel one peer, or one user, can take up: others are never kept out."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest
from swansong import protocol
from swansong.protocol import Message
from swansongd.core.events import (
    JobStarted,
    PeerRequested,
    TrainerAgreed,
    TrainerJoined,
    TrainerLeft,
)
from swansongd.trainers import admission, channel
from swansongd.trainers.admission import (
    CONNECTIONS_MAX,
    CONNECTIONS_PER_USER,
    CONNECTIONS_RESERVED,
    QUERIES_MAX,
)

from testkit.channel_peer import Client, PeerProcess, RunningChannel
from testkit.waiting import until

TRAINER, OTHER_TRAINER = 65534, 65533
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="takes on other users: needs root")


def answer_status(message: Message, reply: Callable[[Message], None]) -> None:
    if isinstance(message, protocol.StatusQuery):
        reply(protocol.Status({"state": "IDLE"}))
    elif isinstance(message, (protocol.Notify, protocol.NotifyWithdrawn)):
        reply(protocol.Noted())


@pytest.fixture
def running() -> Iterator[RunningChannel]:
    uids = frozenset({0, os.geteuid(), TRAINER, OTHER_TRAINER})
    with RunningChannel(allowed_uids=uids, answer=answer_status) as running:
        yield running


def refusal(client: Client) -> str:
    answer = client.hear()
    assert isinstance(answer, protocol.Refused), answer
    assert client.hear() is None
    return answer.reason


def connected(running: RunningChannel) -> Client:
    """A client, as soon as the kernel's queue of connections has room for it."""

    def connect() -> Client | None:
        with suppress(BlockingIOError):
            return running.connect()
        return None

    client = until(connect, what="a connection")
    assert client is not None
    return client


def assert_operator_is_served(running: RunningChannel) -> None:
    """What ``swansong status`` and ``swansong notify`` do."""
    with running.connect() as client:
        client.say(protocol.StatusQuery())
        assert client.hear() == protocol.Status({"state": "IDLE"})
        client.say(protocol.Notify(nonce="n", seconds_left=9.0))
        assert client.hear() == protocol.Noted()


@contextmanager
def holding(running: RunningChannel, count: int, *, uid: int, hello: bool) -> Iterator[PeerProcess]:
    """A process of that user which holds so many connections, or as many as it gets; shows how many."""
    script = f"""
held = []
for number in range({count}):
    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    s.connect(path)
    held.append(s)
    if {hello} and "welcome" not in join_on(s):
        break
show(len(held)); wait()
"""
    before = """
def join_on(s):
    rank = {"rank": os.getuid() % 1000, "world_size": 1000}
    s.send(json.dumps({"type": "hello", "run": "r1", **rank}).encode())
    return s.recv(65536).decode()
"""
    with PeerProcess(running.path, before + script, uid=uid) as peer:
        yield peer


@as_root
@pytest.mark.fault("S8", "S12", "H07")
@pytest.mark.parametrize("hello", [True, False], ids=["joined", "silent"])
def test_a_user_who_holds_all_it_can_does_not_keep_the_operator_out(
    running: RunningChannel, hello: bool
) -> None:
    """Neither with ranks nor with connections that say nothing: status and notify answer root."""
    with holding(running, CONNECTIONS_PER_USER, uid=TRAINER, hello=hello) as peer:
        assert peer.line() == str(CONNECTIONS_PER_USER)
        assert_operator_is_served(running)
        if hello:  # one more is told so, and is not served at the cost of the others
            with PeerProcess(running.path, "s.connect(path); show(hear())", uid=TRAINER) as late:
                assert f"user id {TRAINER} has {CONNECTIONS_PER_USER} connections" in late.line()
    until(lambda: len(running.of(TrainerLeft)) >= len(running.of(TrainerJoined)))


@as_root
@pytest.mark.fault("S8", "H07")
def test_all_users_together_leave_seats_for_the_operator(running: RunningChannel) -> None:
    """Two users who hold all that they get, and the daemon's own user with as many ranks as it may."""
    left = CONNECTIONS_MAX - CONNECTIONS_RESERVED - CONNECTIONS_PER_USER
    with (
        holding(running, CONNECTIONS_PER_USER, uid=TRAINER, hello=True) as first,
        holding(running, left + 1, uid=OTHER_TRAINER, hello=True) as second,
    ):
        assert first.line() == str(CONNECTIONS_PER_USER)
        assert second.line() == str(left + 1)  # the last of them was refused
        for _ in range(3):
            assert_operator_is_served(running)
        with running.connect() as client:
            client.say(protocol.Hello("r1"))
            assert "connections already" in refusal(client)
        assert_operator_is_served(running)


@pytest.mark.fault("S12", "H07")
def test_ranks_of_one_user_are_bounded(running: RunningChannel) -> None:
    """One more than the limit is refused with the way out; when one has gone, there is room again."""
    with ExitStack() as clients:
        joined = [clients.enter_context(running.joined()) for _ in range(CONNECTIONS_PER_USER)]
        with running.connect() as client:
            client.say(protocol.Hello("r1"))
            assert "one per rank is enough" in refusal(client)
        assert_operator_is_served(running)
        joined[0].close()
        running.wait(TrainerLeft)
        running.joined().close()


@pytest.mark.fault("S12", "H07")
def test_who_has_not_said_hello_makes_room(running: RunningChannel) -> None:
    """When all seats are taken, the oldest connection that is silent goes, and no other."""
    with running.joined() as rank, ExitStack() as clients:
        silent = [clients.enter_context(connected(running)) for _ in range(CONNECTIONS_MAX - 1)]
        assert_operator_is_served(running)
        assert "others need" in refusal(silent[0])
        silent[1].say(protocol.StatusQuery())
        assert isinstance(silent[1].hear(), protocol.Status)
        running.channel.send((rank.number,), protocol.Committed(1, 2))
        assert rank.hear() == protocol.Committed(1, 2)


@pytest.mark.fault("S12")
def test_who_says_nothing_is_closed_and_who_asks_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hello has a time limit; ``swansong notify --wait`` asks on one connection for long."""
    monkeypatch.setattr(channel, "HELLO_LIMIT_S", 3.0)
    monkeypatch.setattr(channel, "_SWEEP_S", 0.05)
    with (
        RunningChannel(answer=answer_status) as running,
        running.joined() as rank,
        running.connect() as asking,
        running.connect() as silent,
    ):
        silent.socket.setblocking(False)
        began_mono_s = time.monotonic()

        asked_mono_s = 0.0

        def heard() -> bytes:
            nonlocal asked_mono_s
            if time.monotonic() - asked_mono_s > 0.1:
                asked_mono_s = time.monotonic()
                asking.say(protocol.StatusQuery())
                assert isinstance(asking.hear(), protocol.Status)
            with suppress(BlockingIOError):
                return silent.socket.recv(65536)
            return b""

        assert b"no hello came within" in until(heard, what="the end of the silent one")
        assert time.monotonic() - began_mono_s >= 2.5
        running.channel.send((rank.number,), protocol.Committed(1, 2))
        assert rank.hear() == protocol.Committed(1, 2)  # a rank may be silent for ever


@pytest.mark.fault("S12")
def test_a_storm_of_reconnects_costs_a_bounded_number_of_events_and_lines(
    running: RunningChannel,
) -> None:
    """A trainer connects, says hello and hangs up in a loop: the decision loop and the log hear little."""
    began_mono_s = time.monotonic()
    refused = 0
    for _ in range(1500):
        with running.connect() as client:
            client.say(protocol.Hello("r1"))
            refused += isinstance(client.hear(), protocol.Refused)
    took_s = time.monotonic() - began_mono_s
    most = admission._HELLOS_AT_ONCE + admission._HELLOS_PER_S * took_s + 1
    assert len(running.of(TrainerJoined)) <= most
    assert len(running.of(TrainerLeft)) <= most
    assert refused >= 1500 - most
    assert len(running.lines) <= 1 + took_s / channel._COMPLAINT_EVERY_S
    assert_operator_is_served(running)


@pytest.mark.fault("S12")
def test_a_flood_of_hellos_on_one_connection_ends_it(running: RunningChannel) -> None:
    """Each hello is an event and a broadcast, so they have a rate."""
    with running.joined() as client:
        with suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(150):
                client.say(protocol.Hello("r1"))
        heard = iter(client.hear, None)
        last = [message for message in heard if isinstance(message, protocol.Refused)]
        assert "one hello a second" in last[0].reason
    assert len(running.of(TrainerJoined)) < 50


@pytest.mark.fault("S9")
def test_a_connection_is_that_of_one_rank(running: RunningChannel) -> None:
    """A hello that says another rank is refused; one with another attempt, as after a rollback, is not."""
    with running.joined(rank=1, world_size=4, local_world_size=4) as client:
        again = {"rank": 1, "world_size": 4, "local_world_size": 4}
        client.say(protocol.Hello("r1", **again, restart_id="x~1", step=3))
        assert isinstance(client.hear(), protocol.Welcome)
        client.say(protocol.Hello("r1", **{**again, "rank": 2}))
        assert "rank 1 of 4, and not of rank 2 of 4" in refusal(client)


@pytest.mark.fault("S9", "S19")
@pytest.mark.parametrize(
    "message",
    [protocol.PeerRequest("q", "forged", 30.0), protocol.JobStart("i"), protocol.Agreed("q", 7)],
    ids=lambda message: message.TYPE,
)
def test_a_job_on_one_vm_has_no_peers(running: RunningChannel, message: Message) -> None:
    """What ranks of several VMs say to their daemons is refused from a rank that has no other VM."""
    with running.joined() as client:
        client.say(message)
        assert "run.several_vms" in refusal(client)
    running.wait(TrainerLeft)
    assert not running.of(PeerRequested) + running.of(JobStarted) + running.of(TrainerAgreed)


class Restores:
    """Restore queries that are answered when the test says so."""

    def __init__(self) -> None:
        self.asked: dict[str, Callable[[Message], None]] = {}

    def __call__(self, message: Message, reply: Callable[[Message], None]) -> None:
        if isinstance(message, protocol.RestoreQuery):
            self.asked[message.query_id] = reply
        else:
            answer_status(message, reply)


@pytest.mark.fault("S12", "H07")
def test_restore_queries_that_are_not_answered_are_bounded() -> None:
    """A rank has one; one more than a few is refused, and an answer makes room for the next."""
    restores = Restores()
    with RunningChannel(answer=restores) as running, running.joined() as client:
        for number in range(QUERIES_MAX):
            client.say(protocol.RestoreQuery(f"q{number}"))
        client.say(protocol.RestoreQuery("q0"))  # again: its answer is on the way
        until(lambda: len(restores.asked) == QUERIES_MAX)
        restores.asked["q1"](protocol.Restoring("q1", 1, 2))
        restores.asked["q1"](protocol.Restored("q1"))
        assert isinstance(client.hear(), protocol.Restoring)
        assert client.hear() == protocol.Restored("q1")
        for number in range(2):
            client.say(protocol.RestoreQuery(f"more{number}"))
        assert "wait for the answers" in refusal(client)
        assert set(restores.asked) == {*(f"q{n}" for n in range(QUERIES_MAX)), "more0"}


@pytest.mark.fault("S12", "S13")
def test_an_id_without_end_costs_its_sender_the_connection_and_nobody_an_answer() -> None:
    """An id is copied into each answer: one of 65,480 characters would leave no room for the rest."""
    restores = Restores()
    with RunningChannel(answer=restores) as running, running.joined() as other:
        other.say(protocol.RestoreQuery("short"))
        with running.joined() as client:
            client.say(json.dumps({"type": "restore_query", "query_id": "x" * 65_480}).encode())
            assert "restore_query: query_id has 65480 characters" in refusal(client)
        until(lambda: "short" in restores.asked)
        restores.asked["short"](protocol.Restored("short", path="/x"))
        assert other.hear() == protocol.Restored("short", path="/x")
        assert set(restores.asked) == {"short"}


@pytest.mark.fault("S12", "H07")
def test_reconnects_do_not_get_around_the_bound_on_queries() -> None:
    """Queries of a connection that was closed count on for its user, until they are answered."""
    restores = Restores()
    with RunningChannel(answer=restores) as running:
        reason = ""
        for number in range(2000):
            with running.connect() as client:
                client.say(protocol.Hello("r1"))
                if isinstance(client.hear(), protocol.Refused):
                    break  # too many hellos: then there are not more queries either
                client.say(protocol.RestoreQuery(str(number)))
                client.say(protocol.Hello("r1"))  # answered after the query was taken
                answer: Any = client.hear()
                if isinstance(answer, protocol.Refused):
                    reason = answer.reason
                    break
        assert f"{CONNECTIONS_PER_USER} of user id {os.geteuid()}" in reason
        assert len(restores.asked) == CONNECTIONS_PER_USER
        restores.asked["0"](protocol.Restored("0"))
        with running.joined() as client:
            client.say(protocol.RestoreQuery("late"))
            until(lambda: "late" in restores.asked)


def test_complaints_never_fall_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """After any number of refusals the next minute has a line again, with how many were left out."""

    class Clock:
        now = 1000.0

        def monotonic(self) -> float:
            return self.now

    clock = Clock()
    running = RunningChannel()
    monkeypatch.setattr(channel, "time", clock)
    for minute in range(1, 4):
        for number in range(5000):
            reason = f"nonsense {minute} {number}"
            running.channel._complain("trainer_refused", reason=reason, uid=1000)
        running.channel._complain("trainer_refused", reason="another user", uid=1001)
        assert len(running.lines) == 2 * minute
        clock.now += 61
    assert '"suppressed": 4999' in running.lines[-2]
    running.directory.rmdir()
