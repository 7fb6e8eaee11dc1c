# SPDX-License-Identifier: Apache-2.0
"""The limits of one peer and of one user of the trainer channel: the others can always connect."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest
from swansong import protocol
from swansong.protocol import Message
from swansongd.core.events import (
    FinishAsked,
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

from testkit.as_user import as_user
from testkit.channel_peer import Client, PeerProcess, RunningChannel
from testkit.other_users import needs_root
from testkit.waiting import Clock, until

TRAINER, OTHER_TRAINER = 65534, 65533


def answer_status(message: Message, reply: Callable[[Message], None]) -> None:
    if isinstance(message, protocol.StatusQuery):
        reply(protocol.Status({"state": "IDLE"}))
    elif isinstance(message, (protocol.Notify, protocol.NotifyWithdrawn)):
        reply(protocol.Noted())


class Restores:
    """Holds restore queries until the test answers them."""

    def __init__(self) -> None:
        self.asked: dict[str, Callable[[Message], None]] = {}

    def __call__(self, message: Message, reply: Callable[[Message], None]) -> None:
        if isinstance(message, protocol.RestoreQuery):
            self.asked[message.query_id] = reply
        else:
            answer_status(message, reply)


@pytest.fixture
def running() -> Iterator[RunningChannel]:
    uids = frozenset({0, os.geteuid(), TRAINER, OTHER_TRAINER})
    with RunningChannel(allowed_uids=uids, answer=answer_status) as running:
        yield running


def connected(running: RunningChannel) -> Client:
    """A client, as soon as the backlog of the socket has room for it."""

    def connect() -> Client | None:
        with suppress(BlockingIOError):
            return running.connect()
        return None

    client = until(connect, what="a connection")
    assert client is not None
    return client


def assert_operator_is_served(running: RunningChannel) -> None:
    """Do the same as ``swansong status`` and ``swansong notify``."""
    with running.connect() as client:
        client.send(protocol.StatusQuery())
        assert client.receive() == protocol.Status({"state": "IDLE"})
        client.send(protocol.Notify(nonce="n", seconds_left=9.0))
        assert client.receive() == protocol.Noted()


@contextmanager
def holding(running: RunningChannel, count: int, *, uid: int, hello: bool) -> Iterator[PeerProcess]:
    """A process of that user that holds this many connections, or as many as it gets; prints the number."""
    script = f"""
def join_on(s):
    rank = {{"rank": os.getuid() % 1000, "world_size": 1000}}
    s.send(json.dumps({{"type": "hello", "run": "r1", **rank}}).encode())
    return s.recv(65536).decode()
held = []
for number in range({count}):
    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    s.connect(path)
    held.append(s)
    if {hello} and "welcome" not in join_on(s):
        break
show(len(held)); wait()
"""
    with PeerProcess(running.path, script, uid=uid) as peer:
        yield peer


@needs_root
@pytest.mark.fault("S8", "S12", "H07")
@pytest.mark.parametrize("hello", [True, False], ids=["joined", "silent"])
def test_a_user_with_all_its_connections_does_not_lock_the_operator_out(
    running: RunningChannel, hello: bool
) -> None:
    """Neither with ranks nor with silent connections: status and notify still work for root."""
    with holding(running, CONNECTIONS_PER_USER, uid=TRAINER, hello=hello) as peer:
        assert peer.line() == str(CONNECTIONS_PER_USER)
        assert_operator_is_served(running)
        if hello:  # one more is refused, and closes no other connection
            with PeerProcess(running.path, "s.connect(path); show(receive())", uid=TRAINER) as late:
                assert f"user id {TRAINER} has {CONNECTIONS_PER_USER} connections" in late.line()
    until(lambda: len(running.of(TrainerLeft)) >= len(running.of(TrainerJoined)))


@needs_root
@pytest.mark.fault("S8", "H07")
def test_all_users_together_leave_seats_for_the_operator(running: RunningChannel) -> None:
    """Two users with all their connections, and the daemon's own user with all its ranks."""
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
            client.send(protocol.Hello("r1"))
            assert "connections already" in client.refusal()
        assert_operator_is_served(running)


@pytest.mark.fault("S12", "H07")
def test_ranks_of_one_user_are_bounded(running: RunningChannel) -> None:
    """One more is refused with the fix; after one has left there is room again."""
    with ExitStack() as clients:
        joined = [clients.enter_context(running.joined()) for _ in range(CONNECTIONS_PER_USER)]
        with running.connect() as client:
            client.send(protocol.Hello("r1"))
            assert "one per rank is enough" in client.refusal()
        assert_operator_is_served(running)
        joined[0].close()
        running.wait(TrainerLeft)
        running.joined().close()


@pytest.mark.fault("S12", "H07")
def test_a_connection_without_hello_makes_room(running: RunningChannel) -> None:
    """If all connections are in use, the oldest one without a hello is closed, and no other."""
    with running.joined() as rank, ExitStack() as clients:
        silent = [clients.enter_context(connected(running)) for _ in range(CONNECTIONS_MAX - 1)]
        assert_operator_is_served(running)
        assert "make room" in silent[0].refusal()
        silent[1].send(protocol.StatusQuery())
        assert isinstance(silent[1].receive(), protocol.Status)
        running.channel.send((rank.number,), protocol.Committed(1, 2))
        assert rank.receive() == protocol.Committed(1, 2)


@pytest.mark.fault("S12")
def test_a_silent_connection_is_closed_and_a_querying_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A hello has a time limit; ``swansong notify --wait`` queries on one connection for a long time."""
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

        def received() -> bytes:
            nonlocal asked_mono_s
            if time.monotonic() - asked_mono_s > 0.1:
                asked_mono_s = time.monotonic()
                asking.send(protocol.StatusQuery())
                assert isinstance(asking.receive(), protocol.Status)
            with suppress(BlockingIOError):
                return silent.socket.recv(65536)
            return b""

        assert b"no hello within" in until(received, what="the end of the silent connection")
        assert time.monotonic() - began_mono_s >= 2.5
        running.channel.send((rank.number,), protocol.Committed(1, 2))
        assert rank.receive() == protocol.Committed(1, 2)  # a rank may be silent forever


@pytest.mark.fault("S12")
def test_a_hello_that_the_daemon_reads_late_was_sent_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread does not run for a minute: its time does not count as the silence of a peer."""
    clock = Clock()
    monkeypatch.setattr(channel, "time", clock)
    monkeypatch.setattr(channel, "_SWEEP_S", 0.05)
    with RunningChannel(answer=answer_status) as running, running.connect() as client:
        client.send(protocol.StatusQuery())
        client.receive()
        select = running.channel._selector.select
        has_paused = threading.Event()

        def select_then_pause(timeout_s: float | None) -> Any:
            ready = select(timeout_s)
            if not ready and not has_paused.is_set():
                client.send(protocol.Hello("r1"))
                clock.advance(60.0)
                has_paused.set()
            return ready

        monkeypatch.setattr(running.channel._selector, "select", select_then_pause)
        assert isinstance(client.receive(), protocol.Welcome)
        assert has_paused.is_set()


@needs_root
def test_the_restore_unit_asks_without_a_hello(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon's own user waits for an answer without a hello, longer than a silent connection may.
    Another user is refused."""
    monkeypatch.setattr(channel, "_SWEEP_S", 0.05)
    restores = Restores()

    def ask_as_a_trainer() -> str:
        with running.connect() as client:
            client.send(protocol.RestoreQuery("x"))
            return type(client.receive()).__name__

    with RunningChannel(answer=restores, allowed_uids=frozenset({0, TRAINER})) as running:
        os.chmod(running.path, 0o777)
        assert as_user(TRAINER, ask_as_a_trainer) == "Refused"
        with running.connect() as unit, running.connect() as silent:
            unit.send(protocol.RestoreQuery("k"))
            until(lambda: "k" in restores.asked, what="the query")
            monkeypatch.setattr(channel, "HELLO_LIMIT_S", 0.1)
            assert silent.refusal()  # later than the limit of the unit
            restores.asked["k"](protocol.Restored("k", path="/x"))
            assert unit.receive() == protocol.Restored("k", path="/x")


@pytest.mark.fault("S12")
def test_a_storm_of_reconnects_costs_a_bounded_number_of_events_and_lines(
    running: RunningChannel,
) -> None:
    """A trainer connects, sends hello and disconnects in a loop: few events, few lines in the log."""
    began_mono_s = time.monotonic()
    refused = 0
    for _ in range(1500):
        with running.connect() as client:
            client.send(protocol.Hello("r1"))
            refused += isinstance(client.receive(), protocol.Refused)
    took_s = time.monotonic() - began_mono_s
    most = admission._HELLOS_AT_ONCE + admission._HELLOS_PER_S * took_s + 1
    assert len(running.of(TrainerJoined)) <= most
    assert len(running.of(TrainerLeft)) <= most
    assert refused >= 1500 - most
    assert len(running.lines) <= 1 + took_s / channel._LOG_INTERVAL_S
    assert_operator_is_served(running)


@pytest.mark.fault("S12")
def test_a_flood_of_hellos_on_one_connection_ends_it(running: RunningChannel) -> None:
    """Each hello posts an event, so hellos have a rate limit."""
    with running.joined() as client:
        with suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(150):
                client.send(protocol.Hello("r1"))
        received = iter(client.receive, None)
        last = [message for message in received if isinstance(message, protocol.Refused)]
        assert "one hello per second" in last[0].reason
    assert len(running.of(TrainerJoined)) < 50


@pytest.mark.fault("S9")
def test_a_connection_belongs_to_one_rank(running: RunningChannel) -> None:
    """A hello of another rank is refused; a repeated hello, as after a rollback, is not."""
    with running.joined(rank=1, world_size=4, local_world_size=4) as client:
        again = {"rank": 1, "world_size": 4, "local_world_size": 4}
        client.send(protocol.Hello("r1", **again, start_id="x~1", step=3))
        assert isinstance(client.receive(), protocol.Welcome)
        client.send(protocol.Hello("r1", **{**again, "rank": 2}))
        assert "rank 1 of 4, not to rank 2 of 4" in client.refusal()


@pytest.mark.fault("S9", "T12")
@pytest.mark.parametrize(
    ("rank", "world_size", "reason"),
    [
        (0, 1, "rank 0 of 1 cannot join, because process {} is rank 1 of 2"),
        (0, 3, "rank 0 of 3 cannot join, because process {} is rank 1 of 2"),
        (1, 2, "rank 1 of 2 is connected already, as process {}"),
    ],
)
def test_a_process_that_does_not_fit_into_the_job_is_refused(
    running: RunningChannel, rank: int, world_size: int, reason: str
) -> None:
    """It has a rank that another running process has, or counts other ranks; its successor fits at once."""
    of_job = {"world_size": 2, "local_world_size": 2}
    script = f"""
s.connect(path)
s.send(json.dumps({{"type": "hello", "run": "r1", "rank": 1, **{of_job}}}).encode())
show(os.getpid() if "welcome" in s.recv(65536).decode() else "refused"); wait()
"""
    own = {"rank": rank, "world_size": world_size, "local_world_size": world_size}
    with PeerProcess(running.path, script) as first:
        pid = first.line()
        with running.joined(rank=0, **of_job), running.connect() as other:
            other.send(protocol.Hello("r1", **own))
            answer = other.refusal()
            assert reason.format(pid) in answer
            assert "call swansong.attach() after init_process_group()" in answer
    running.joined(**own).close()


@pytest.mark.fault("S9", "S19")
@pytest.mark.parametrize(
    "message",
    [protocol.PeerRequest("q", "forged", 30.0), protocol.Finish("i"), protocol.Agreed("q", 7)],
    ids=lambda message: message.TYPE,
)
def test_a_job_on_one_vm_has_no_peers(running: RunningChannel, message: Message) -> None:
    """Messages between ranks of several VMs are refused from a rank of a job on one VM."""
    with running.joined() as client:
        client.send(message)
        assert "set nodes in hello" in client.refusal()
    running.wait(TrainerLeft)
    assert not running.of(PeerRequested) + running.of(FinishAsked) + running.of(TrainerAgreed)


@pytest.mark.fault("S12", "H07")
def test_pending_restore_queries_are_bounded() -> None:
    """A rank has one; one more than a few is refused, and an answer makes room for the next."""
    restores = Restores()
    with RunningChannel(answer=restores) as running, running.joined() as client:
        for number in range(QUERIES_MAX):
            client.send(protocol.RestoreQuery(f"q{number}"))
        client.send(protocol.RestoreQuery("q0"))  # repeated: its answer follows
        until(lambda: len(restores.asked) == QUERIES_MAX)
        restores.asked["q1"](protocol.Restoring("q1", 1, 2))
        restores.asked["q1"](protocol.Restored("q1"))
        assert isinstance(client.receive(), protocol.Restoring)
        assert client.receive() == protocol.Restored("q1")
        for number in range(2):
            client.send(protocol.RestoreQuery(f"more{number}"))
        assert "wait for their answers" in client.refusal()
        assert set(restores.asked) == {*(f"q{n}" for n in range(QUERIES_MAX)), "more0"}


@pytest.mark.fault("S12", "H07")
def test_reconnects_do_not_bypass_the_limit_of_queries() -> None:
    """Queries of a closed connection count for its user until they are answered."""
    restores = Restores()
    with RunningChannel(answer=restores) as running:
        reason = ""
        for number in range(2000):
            with running.connect() as client:
                client.send(protocol.Hello("r1"))
                if isinstance(client.receive(), protocol.Refused):
                    break  # too many hellos: no further queries either
                client.send(protocol.RestoreQuery(str(number)))
                with suppress(BrokenPipeError):  # refused and closed already
                    client.send(protocol.Hello("r1"))  # answered after the query was handled
                answer: Any = client.receive()
                if isinstance(answer, protocol.Refused):
                    reason = answer.reason
                    break
        assert f"{CONNECTIONS_PER_USER} of user id {os.geteuid()}" in reason
        assert len(restores.asked) == CONNECTIONS_PER_USER
        restores.asked["0"](protocol.Restored("0"))
        with running.joined() as client:
            client.send(protocol.RestoreQuery("late"))
            until(lambda: "late" in restores.asked)


def test_refusals_are_always_logged_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """After any number of refusals the next minute has a line again, with the number of omitted ones."""

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
            running.channel._log_limited("trainer_refused", reason=reason, uid=1000)
        running.channel._log_limited("trainer_refused", reason="another user", uid=1001)
        assert len(running.lines) == 2 * minute
        clock.now += 61
    assert '"suppressed": 4999' in running.lines[-2]
    running.directory.rmdir()
