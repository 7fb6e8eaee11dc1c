# SPDX-License-Identifier: Apache-2.0
"""The trainer channel under hostile, broken and careless peers: no peer harms the others."""

from __future__ import annotations

import array
import errno
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from swansong import protocol
from swansongd.core.events import TrainerJoined, TrainerLeft, TrainerProgress
from swansongd.trainers import connection, peers

from testkit import descriptors
from testkit.channel_peer import Client, HeldChannel, PeerProcess, RunningChannel
from testkit.other_users import needs_root
from testkit.strategies import json_values
from testkit.waiting import until

NOBODY = 65534


@pytest.fixture(scope="module")
def running() -> Iterator[RunningChannel]:
    """One channel for all tests: after each test it must still work for the next."""
    with RunningChannel() as running:
        yield running


def assert_serves(running: RunningChannel) -> None:
    before = len(running.of(TrainerProgress))
    with running.joined() as client:
        client.send(protocol.Progress(1))
        running.wait(TrainerProgress, before + 1)


@needs_root
@pytest.mark.fault("S8")
def test_another_user_cannot_even_connect(running: RunningChannel) -> None:
    """The mode of the socket excludes users outside the group."""
    script = """
try: s.connect(path)
except PermissionError: show("refused")
"""
    with PeerProcess(running.path, script, uid=NOBODY, gid=NOBODY) as peer:
        assert peer.line() == "refused"


@needs_root
@pytest.mark.fault("S8", "T13")
def test_another_user_in_the_group_is_refused_by_its_credentials(running: RunningChannel) -> None:
    """A member of the group that is not configured gets the fix; the log names it once."""
    for _ in range(2):
        with PeerProcess(running.path, "s.connect(path); show(receive())", uid=NOBODY) as peer:
            reason = json.loads(peer.line())["reason"]
            assert "65534" in reason
            assert "trainer.users" in reason
    assert len([line for line in running.lines if "65534" in line]) == 1


@needs_root
def test_a_configured_user_is_served() -> None:
    """The configured users decide, and not only the daemon's own user."""
    with (
        RunningChannel(allowed_uids=frozenset({NOBODY})) as running,
        PeerProcess(running.path, "show(join())", uid=NOBODY) as peer,
    ):
        assert '"welcome"' in peer.line()


@pytest.mark.fault("S12")
def test_an_oversized_message_ends_the_connection(running: RunningChannel) -> None:
    """A message over the limit is refused with the fix; no part of it is used."""
    with running.joined() as client:
        client.send(
            b'{"type":"progress","step":7,"x":"' + b"x" * protocol.MAX_MESSAGE_BYTES + b'"}'
        )
        assert "65536 bytes" in client.refusal()
    with running.connect() as client, pytest.raises(OSError, match=os.strerror(errno.EMSGSIZE)):
        client.send(b"x" * 2**20)  # the kernel's own limit
    assert not any(event.step == 7 for event in running.of(TrainerProgress))
    assert_serves(running)


def test_the_reason_reaches_a_peer_that_still_sends() -> None:
    """Unread messages of a refused peer do not turn the reason into a connection reset."""
    with HeldChannel() as running, running.connect() as client, running.connect() as bad:
        running.hold(client)
        for message in (b"broken", b"more", b"and more"):
            bad.send(message)
        running.release()
        assert "not JSON" in bad.refusal()


def test_the_largest_message_passes(running: RunningChannel) -> None:
    """A message of exactly the limit is accepted."""
    with running.joined() as client:
        head, tail = b'{"type":"progress","step":8,"x":"', b'"}'
        client.send(head + b"x" * (protocol.MAX_MESSAGE_BYTES - len(head) - len(tail)) + tail)
        until(lambda: any(event.step == 8 for event in running.of(TrainerProgress)))


looks_right = st.builds(
    lambda kind, rest: json.dumps({**rest, "type": kind.TYPE}).encode(),
    st.sampled_from([*protocol.FROM_TRAINER, *protocol.FROM_DAEMON]),
    st.dictionaries(
        st.sampled_from(["step", "run", "rank", "reason", "request_id", "version"]), json_values
    ),
)


@pytest.mark.fault("S12", "S13")
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.binary(min_size=1, max_size=200) | looks_right, min_size=1, max_size=4))
def test_the_others_are_served_after_any_message(
    running: RunningChannel, messages: list[bytes]
) -> None:
    """Bytes, broken JSON and impossible values are refused or ignored, and harm no other peer."""
    with running.connect() as client:
        for message in messages:
            try:
                client.send(message)
            except (BrokenPipeError, ConnectionResetError):
                break
    assert_serves(running)


@pytest.mark.fault("S13")
def test_a_message_that_cannot_be_decoded_is_refused(running: RunningChannel) -> None:
    """The peer gets the reason.  tests/hooks/test_protocol.py has the tricks that decode() refuses."""
    with running.joined() as client:
        client.send(b"[" * 60000)
        assert client.refusal()


@pytest.mark.fault("S12")
def test_a_peer_that_does_not_read_is_dropped(running: RunningChannel) -> None:
    """Its queue is bounded, sending never blocks, and the other peers get all messages."""
    with running.joined() as slow, running.joined() as quick:
        numbers = (slow.number, quick.number)
        left = 0
        for step in range(3000):
            running.channel.send(numbers, protocol.Withdrawn(str(step), "x" * 2000))
            received = quick.receive()
            assert isinstance(received, protocol.Withdrawn)
            assert received.request_id == str(step)
            left = sum(event.connection == numbers[0] for event in running.of(TrainerLeft))
            if left:
                break
        assert left == 1
        assert "does not read" in running.of(TrainerLeft)[-1].reason
        slow.close()


def test_a_peer_that_reads_late_misses_nothing(running: RunningChannel) -> None:
    """Messages that do not fit into the socket are queued, in order, until the peer reads."""
    with running.joined() as client:
        count = connection.OUTGOING_MESSAGES_MAX  # more than fit into the socket
        for step in range(count):
            running.channel.send((client.number,), protocol.Withdrawn(str(step), "x" * 4000))
        received = [client.receive() for _ in range(count)]
        assert received == [protocol.Withdrawn(str(step), "x" * 4000) for step in range(count)]


@pytest.mark.fault("S12")
def test_the_queue_of_one_peer_is_bounded_in_bytes(running: RunningChannel) -> None:
    """A few hundred peers that query the status and do not read must not fill the memory."""
    with running.joined() as slow:
        large = protocol.Status({"x": "x" * 60_000})
        waiting = connection.OUTGOING_BYTES_MAX // 60_000
        in_socket = 8  # more than the usual socket buffer
        for _ in range(waiting + in_socket):
            running.channel.send((slow.number,), large)
        until(
            lambda: any(event.connection == slow.number for event in running.of(TrainerLeft)),
            what="the end of the connection",
        )


@pytest.mark.fault("S12")
def test_a_flood_ends_the_connection(running: RunningChannel) -> None:
    """A peer that sends without a pause is dropped at the rate limit, with a reason."""
    before = len(running.of(TrainerProgress))
    with running.joined() as client:
        sent_all = False
        with suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(100_000):
                client.send(protocol.Progress(1))
            sent_all = True
        assert not sent_all
        answer = until(client.receive)
        assert isinstance(answer, protocol.Refused)
        assert "messages per second" in answer.reason
    assert len(running.of(TrainerProgress)) - before < 2000
    assert_serves(running)


def test_descriptors_that_a_peer_passes_are_not_taken(
    running: RunningChannel, tmp_path: Path
) -> None:
    """A peer cannot fill the daemon's descriptor table by passing descriptors."""
    passed = tmp_path / "passed"
    with running.joined() as client, open(passed, "wb") as file:
        for step in range(50):
            client.socket.sendmsg(
                [protocol.encode(protocol.Progress(1000 + step))],
                [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file.fileno()] * 3))],
            )
        until(lambda: any(event.step == 1049 for event in running.of(TrainerProgress)))
        assert descriptors.on(passed) == 1


@pytest.mark.fault("H07")
@pytest.mark.parametrize("watched", ["the connection", "its process"])
def test_a_peer_that_the_kernel_does_not_watch_is_turned_away(
    running: RunningChannel, monkeypatch: pytest.MonkeyPatch, watched: str
) -> None:
    """A user may watch a limited number of descriptors.  Others are served, and so is its next attempt."""
    selector = running.channel._selector
    real, failures = selector.register, []

    def register(fileobj: Any, *arguments: Any) -> Any:
        if isinstance(fileobj, int) is (watched == "its process") and not failures:
            failures.append(fileobj)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fileobj, *arguments)

    monkeypatch.setattr(selector, "register", register)
    with running.connect() as client:
        if watched == "its process":
            client.send(protocol.Hello(""))
        while client.receive() is not None:
            pass
    assert failures
    assert_serves(running)


@pytest.mark.fault("H07")
def test_without_descriptors_connected_peers_are_served_and_nothing_spins() -> None:
    """Without free descriptors the daemon accepts no peer, serves the connected ones, and does not spin."""
    script = """
import resource, sys, time
from testkit.channel_peer import RunningChannel
from swansongd.core.events import TrainerProgress
with RunningChannel() as running:
    resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))
    print(running.path, flush=True)
    sys.stdin.readline()
    running.wait(TrainerProgress)
    before = time.process_time()
    sys.stdin.readline()
    print(time.process_time() - before, "trainer_not_accepted" in str(running.lines), flush=True)
    sys.stdin.readline()
"""
    path = os.pathsep.join(map(os.path.abspath, ("tests", *filter(None, sys.path))))
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        socket_path = Path(process.stdout.readline().strip())
        first = Client(socket_path)
        first.send(protocol.Hello(run="r1"))
        assert isinstance(first.receive(), protocol.Welcome)
        others = [Client(socket_path) for _ in range(20)]  # more than the free descriptors
        process.stdin.write("\n")
        first.send(protocol.Progress(1))
        assert select.select([first.socket], [], [], 0.3)[0] == []  # enough time to spin
        process.stdin.write("\n")
        busy_s, is_logged = process.stdout.readline().split()
        assert float(busy_s) < 0.15
        assert is_logged == "True"
        for other in others:
            other.close()
        with Client(socket_path) as late:
            late.send(protocol.Hello(run="r1"))
            assert isinstance(late.receive(), protocol.Welcome)
        first.close()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.fault("S10")
def test_peers_are_known_on_kernels_without_a_peer_pidfd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Linux 6.5 the pidfd comes from the pid, and only while the connection is open."""
    monkeypatch.setattr(peers, "SO_PEERPIDFD", 9999)
    with RunningChannel() as running:
        assert_serves(running)
        with PeerProcess(running.path, "join(); wait(); os._exit(0)") as peer:
            running.wait(TrainerJoined, 2)
            peer.resume()
            running.wait_for_exit()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.close()
    with ours, pytest.raises(ProcessLookupError):
        peers.identify(ours)
