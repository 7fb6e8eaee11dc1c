# SPDX-License-Identifier: Apache-2.0
"""The trainer channel: what well-behaved peers see of it, and how the ends of their lives are told."""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from swansong import protocol
from swansongd.core.events import (
    TrainerAccepted,
    TrainerFailed,
    TrainerJoined,
    TrainerLeft,
    TrainerProgress,
    TrainerSealed,
)
from swansongd.errors import SwansongError
from swansongd.trainers import connection

from testkit.channel_peer import Client, HeldChannel, PeerProcess, RunningChannel
from testkit.waiting import until


@pytest.fixture
def running() -> Iterator[RunningChannel]:
    with RunningChannel() as running:
        yield running


def test_hello_is_welcomed_and_told(running: RunningChannel) -> None:
    """A rank learns where to write and which generation it is; the decision loop learns of the rank."""
    with running.connect() as client:
        client.say(protocol.Hello(run="", rank=3, world_size=8, local_world_size=4, step=7))
        assert client.hear() == protocol.Welcome(run="r1", staging="/staging/r1")
        (joined,) = running.wait(TrainerJoined)
        assert (joined.trainer.pid, joined.trainer.rank, joined.trainer.step) == (os.getpid(), 3, 7)
        assert (joined.trainer.world_size, joined.trainer.local_world_size) == (8, 4)
    running.channel.set_generation(5)
    with running.connect() as client:
        client.say(protocol.Hello(run="r1"))
        assert client.hear() == protocol.Welcome(run="r1", staging="/staging/r1", generation=5)


def test_messages_become_events(running: RunningChannel) -> None:
    """Each message of a trainer becomes its event, in order and with the number of its connection."""
    with running.joined() as client:
        client.say(protocol.Progress(4, save_s=1.5, save_bytes=10))
        client.say(protocol.Accepted("q", 4))
        client.say(protocol.Sealed(5, "step-5", 2.0, 11, "q"))
        client.say(protocol.Failed("q", 5, "disk full"))
        client.say(protocol.Declined("q", "busy"))
        client.say(protocol.Bye("done"))
        running.wait(TrainerLeft)
    number = client.number
    assert running.events[1:] == [
        TrainerProgress(number, 4, 1.5, 10),
        TrainerAccepted(number, "q", 4),
        TrainerSealed(number, "q", 5, 2.0, 11),
        TrainerFailed(number, "q", "disk full", 5),
        TrainerFailed(number, "q", "declined: busy"),
        TrainerLeft(number, exited=True, reason="done"),
    ]


def test_send_reaches_whom_it_is_for(running: RunningChannel) -> None:
    """None means all that said hello; numbers mean those, and unknown ones are no error."""
    with running.joined() as first, running.joined() as second, running.connect() as silent:
        running.channel.send(None, protocol.Committed(1, 10))
        running.channel.send((second.number, 99), protocol.Target("q", 11))
        assert first.hear() == protocol.Committed(1, 10)
        assert [second.hear(), second.hear()] == [
            protocol.Committed(1, 10),
            protocol.Target("q", 11),
        ]
        silent.socket.settimeout(0.05)
        with pytest.raises(TimeoutError):
            silent.hear()


@pytest.mark.fault("S9")
@pytest.mark.parametrize(
    ("hello", "words"),
    [
        (protocol.Hello(run="other"), ["'other'", "'r1'"]),
        (protocol.Hello(run="r1", version=99), ["version 99", "matching versions"]),
        (protocol.Hello(run="r1", rank=2, world_size=2), ["rank 2 of 2"]),
        (protocol.Hello(run="r1", local_world_size=2), ["LOCAL_WORLD_SIZE"]),
        (protocol.Hello(run="r1", local_world_size=0), ["hello: local_world_size is 0"]),
    ],
)
def test_an_impossible_hello_is_refused(
    running: RunningChannel, hello: protocol.Hello, words: list[str]
) -> None:
    """Another run, version or arithmetic is refused in words, and the connection ends."""
    with running.connect() as client:
        client.say(hello)
        answer = client.hear()
        assert isinstance(answer, protocol.Refused)
        assert all(word in answer.reason for word in words)
        assert client.hear() is None
    assert running.events == []
    assert len(running.lines) == 1


def test_hello_comes_first(running: RunningChannel) -> None:
    """Whoever has not said hello, or speaks with the daemon's words, is refused."""
    for message in (protocol.Progress(1), protocol.RestoreQuery("x"), protocol.Fenced(2)):
        with running.connect() as client:
            client.say(message)
            assert isinstance(client.hear(), protocol.Refused)
    assert running.events == []
    with running.joined() as client:
        client.say(protocol.Fenced(2))
        assert client.hear() == protocol.Refused("fenced is not for the daemon")


def test_questions_are_answered_later_and_from_other_threads() -> None:
    """A status needs no hello; a reply may come at any time from any thread, to the one who asked."""

    def answer(message: protocol.Message, reply: object) -> None:
        assert callable(reply)
        if isinstance(message, protocol.StatusQuery):
            threading.Timer(0.01, reply, [protocol.Status({"state": "idle"})]).start()
        elif isinstance(message, protocol.RestoreQuery):
            reply(protocol.Restored(message.query_id, path="/x"))

    with RunningChannel(answer=answer) as running:
        with running.connect() as client, running.joined() as other:
            client.say(protocol.StatusQuery())
            assert client.hear() == protocol.Status({"state": "idle"})
            other.say(protocol.RestoreQuery("k"))
            assert other.hear() == protocol.Restored("k", path="/x")
        assert running.lines == []


def test_an_error_in_the_answer_costs_one_connection() -> None:
    """When the daemon fails at a message, the others are served on."""

    def answer(message: protocol.Message, reply: object) -> None:
        raise RuntimeError("broken")

    with RunningChannel(answer=answer) as running, running.joined() as other:
        with running.connect() as client:
            client.say(protocol.StatusQuery())
            assert client.hear() is None
        other.say(protocol.Progress(1))
        running.wait(TrainerProgress)


def test_a_closed_connection_of_a_living_process_is_no_exit(running: RunningChannel) -> None:
    """A lost connection is told once, as one that may come back."""
    running.joined().close()
    (left,) = running.wait(TrainerLeft)
    assert not left.exited


@pytest.mark.fault("T02")
def test_the_end_of_a_process_is_told_after_the_loss_of_its_connection(
    running: RunningChannel,
) -> None:
    """First the connection is lost, then, when the process has ended, its exit is told; each once."""
    with PeerProcess(running.path, "join(); s.close(); wait(); os._exit(0)") as peer:
        (left,) = running.wait(TrainerLeft)
        assert not left.exited
        peer.go_on()
        _, gone = running.wait(TrainerLeft, 2)
        assert gone.exited
        assert gone.connection == left.connection
    assert len(running.of(TrainerLeft)) == 2


@pytest.mark.fault("T02", "S10")
def test_a_killed_process_is_told_of_as_gone(running: RunningChannel) -> None:
    """SIGKILL leaves no chance to say goodbye; the pidfd tells."""
    with PeerProcess(running.path, "join(); show('in'); wait()") as peer:
        assert peer.line() == "in"
        peer.process.kill()
        until(lambda: any(left.exited for left in running.of(TrainerLeft)), what="the exit")
    exits = [left.exited for left in running.of(TrainerLeft)]
    assert exits in ([False, True], [True])


def test_last_words_come_before_the_exit(running: RunningChannel) -> None:
    """What a process said just before it ended is heard before its end is told."""
    script = """
join()
for step in range(40):
    say(type="progress", step=step)
say(type="sealed", step=9, directory="d", save_s=1, size_bytes=1)
os._exit(0)
"""
    with PeerProcess(running.path, script):
        until(lambda: any(left.exited for left in running.of(TrainerLeft)), what="the exit")
    kinds = [type(event) for event in running.events]
    assert kinds.count(TrainerProgress) == 40
    assert kinds.index(TrainerSealed) < kinds.index(TrainerLeft)


def test_goodbye_is_the_last_word(running: RunningChannel) -> None:
    """After a goodbye the end of the process is no news."""
    with PeerProcess(running.path, "join(); say(type='bye'); wait(); os._exit(0)") as peer:
        running.wait(TrainerLeft)
        peer.go_on()
        peer.process.wait()
    running.joined().close()  # served after whatever the exit may have caused
    running.wait(TrainerLeft, 2)
    assert [left.exited for left in running.of(TrainerLeft)] == [True, False]


@pytest.mark.fault("T09")
def test_a_process_that_reconnects_is_one_process(running: RunningChannel) -> None:
    """After a reconnect only the newest connection is told of when the process ends."""
    script = """
join(); s.close()
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
join(); show("again"); wait()
if os.fork() == 0:  # holds the connection open, so that only the end of the process is seen
    sys.stdin.read(); os._exit(0)
os._exit(0)
"""
    with PeerProcess(running.path, script) as peer:
        assert peer.line() == "again"
        first, second = (joined.trainer.connection for joined in running.wait(TrainerJoined, 2))
        running.wait(TrainerLeft)
        peer.go_on()
        until(lambda: any(left.exited for left in running.of(TrainerLeft)), what="the exit")
    running.joined().close()  # served after all that the exit has caused
    assert TrainerLeft(first, exited=False, reason="connection closed") in running.events
    assert {left.connection for left in running.of(TrainerLeft) if left.exited} == {second}


@pytest.mark.fault("S26")
def test_forked_children_have_no_say(running: RunningChannel) -> None:
    """Only the process that said hello may go on; a child that inherits the socket is not heard."""
    script = """
join()
if os.fork() == 0:
    say(type="progress", step=666)
    os._exit(0)
os.wait()
say(type="progress", step=1)
show("done"); wait()
"""
    with PeerProcess(running.path, script) as peer:
        assert peer.line() == "done"
        assert [event.step for event in running.wait(TrainerProgress)] == [1]
    assert "forked_child_ignored" in running.lines[0]


@pytest.mark.fault("S26")
def test_a_child_that_holds_the_socket_does_not_keep_its_parent_alive(
    running: RunningChannel,
) -> None:
    """A data-loader worker that outlives the trainer keeps the connection open; the exit is told."""
    script = """
join()
if os.fork() == 0:
    wait(); os._exit(0)
os._exit(0)
"""
    with PeerProcess(running.path, script):
        assert running.wait(TrainerLeft)[0].exited


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
@pytest.mark.fault("S8")
def test_the_socket_is_for_owner_and_group(umask: int, tmp_path: Path) -> None:
    """Whatever the umask, the socket has mode 0660, and had no wider one before."""
    before = os.umask(umask)
    path = tmp_path / "s"
    modes: list[int] = []

    def chmod(target: Path, mode: int) -> None:
        modes.append(stat.S_IMODE(os.stat(target).st_mode))
        real_chmod(target, mode)

    real_chmod = os.chmod
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "chmod", chmod)
            connection.listen(path).close()
    finally:
        assert os.umask(before) == umask
    assert modes == [0o660 & ~umask]
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o660


def test_a_stale_socket_is_replaced_and_a_live_one_is_not(running: RunningChannel) -> None:
    """The file of a daemon that died is in nobody's way; a daemon that answers keeps its socket."""
    stale = running.directory / "stale"
    connection.listen(stale).close()
    with RunningChannel(path=stale) as successor:
        successor.joined().close()
    with pytest.raises(SwansongError, match="another process answers"):
        connection.listen(running.path)
    running.joined().close()


def test_what_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    """A wrong path in the configuration costs no file."""
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(SwansongError, match="not a socket"):
        connection.listen(path)
    assert path.read_text() == "data"


def test_close_removes_its_own_socket_only(tmp_path: Path) -> None:
    """The socket goes with the daemon, unless another has taken the path over."""
    with RunningChannel() as running:
        path = running.path
        assert path.exists()
    assert not path.exists()
    with RunningChannel() as running:
        running.path.unlink()
        successor = connection.listen(running.path)
        running.channel.close()
        with Client(running.path):
            pass
        successor.close()


def test_what_was_sent_before_the_close_arrives() -> None:
    """The last message of a daemon that ends reaches the trainers, however busy its thread is."""
    with HeldChannel() as running, running.joined() as client:
        running.hold(client)
        running.channel.send(None, protocol.Fenced(9))
        closer = threading.Thread(target=running.channel.close, daemon=True)
        closer.start()
        until(lambda: running.channel._is_closing)
        running.release()
        assert client.hear() == protocol.Fenced(9)
        assert client.hear() is None


def test_a_socket_from_systemd_is_used_as_it_is(tmp_path: Path) -> None:
    """A listening socket handed over is served, and its file is left to systemd."""
    listener = connection.listen(tmp_path / "s")
    with RunningChannel(path=tmp_path / "s", listener_fd=listener.detach()) as running:
        running.joined().close()
    assert (tmp_path / "s").exists()


def test_a_socket_of_the_wrong_type_is_named(tmp_path: Path) -> None:
    """A unit with ListenStream= is told what to write instead."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as wrong:
        running = RunningChannel(path=tmp_path / "s", listener_fd=os.dup(wrong.fileno()))
        with pytest.raises(SwansongError) as caught:
            running.channel.start()
    assert "ListenSequentialPacket" in caught.value.hint
    running.directory.rmdir()
