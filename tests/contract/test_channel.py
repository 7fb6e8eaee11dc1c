# SPDX-License-Identifier: Apache-2.0
"""The trainer channel with well-behaved peers, and the events of their connections and processes."""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from swansong import protocol
from swansong_bucket.errors import ConfigError, SwansongError, Unreachable
from swansong_bucket.model import UNKNOWN_PARENT, Parent
from swansong_tools.commands.daemon_client import DaemonClient
from swansongd.core.events import (
    RequestAsked,
    StartBegun,
    TrainerAccepted,
    TrainerFailed,
    TrainerJoined,
    TrainerLeft,
    TrainerProgress,
    TrainerSealed,
)
from swansongd.trainers import connection
from swansongd.trainers.admission import Reply

from testkit import descriptors
from testkit.channel_peer import Client, HeldChannel, PeerProcess, RunningChannel
from testkit.waiting import until


@pytest.fixture
def running() -> Iterator[RunningChannel]:
    with RunningChannel() as running:
        yield running


def test_hello_gets_a_welcome_and_posts_the_rank(running: RunningChannel) -> None:
    """A rank gets the directory and the generation; the decision loop gets the rank."""
    with running.connect() as client:
        client.send(protocol.Hello(run="", rank=3, world_size=8, local_world_size=4, step=7))
        welcome = protocol.Welcome(
            run="r1", staging="/staging/r1", takes_digests=True, takes_request_query=True
        )
        assert client.receive() == welcome
        (joined,) = running.wait(TrainerJoined)
        assert (joined.trainer.pid, joined.trainer.rank, joined.trainer.step) == (os.getpid(), 3, 7)
        assert (joined.trainer.world_size, joined.trainer.local_world_size) == (8, 4)
    running.channel.set_generation(5)
    with running.connect() as client:
        client.send(protocol.Hello(run="r1"))
        assert client.receive() == replace(welcome, generation=5)


def test_messages_become_events(running: RunningChannel) -> None:
    """Each message of a trainer becomes an event, in order, with the number of its connection."""
    with running.joined() as client:
        client.send(protocol.Progress(4, save_s=1.5, save_bytes=10))
        client.send(protocol.Begin("a~1"))
        client.send(protocol.Progress(2, start_id="a~1", parent="a", parent_step=2))
        client.send(protocol.Accepted("q", 4))
        client.send(protocol.RequestQuery(4))
        client.send(protocol.Sealed(5, "step-5", 2.0, 11, "q"))
        client.send(protocol.Failed("q", 5, "disk full"))
        client.send(protocol.Declined("q", "busy"))
        client.send(protocol.Bye("done"))
        running.wait(TrainerLeft)
    number = client.number
    assert running.events[1:] == [
        TrainerProgress(number, 4, save_s=1.5, save_bytes=10),
        StartBegun(number, "a~1"),
        TrainerProgress(number, 2, start_id="a~1", parent=Parent("a", 2)),
        TrainerAccepted(number, "q", 4),
        RequestAsked(number, 4),
        TrainerSealed(number, "q", 5, 2.0, 11),
        TrainerFailed(number, "q", "disk full", 5),
        TrainerFailed(number, "q", "declined: busy"),
        TrainerLeft(number, exited=True, reason="done", is_goodbye=True),
    ]


def test_a_rank_learns_its_start_and_names_it_when_it_connects_again(
    running: RunningChannel,
) -> None:
    """Rank 0 names the start in its hello.  The other rank gets the message, and no other connection does."""
    of_job = {"world_size": 2, "local_world_size": 2}
    with running.joined(start_id="a", parent="b", parent_step=7, **of_job) as first:
        with running.joined(rank=1, **of_job) as second:
            views = [joined.trainer for joined in running.of(TrainerJoined)]
            assert [(view.start_id, view.parent) for view in views] == [
                ("a", Parent("b", 7)),
                ("", UNKNOWN_PARENT),
            ]
            running.channel.send((second.number,), protocol.StartDrawn("a"))
            running.channel.send(None, protocol.Committed(1, 10))
            assert second.receive() == protocol.StartDrawn("a")
            assert first.receive() == protocol.Committed(1, 10)
        running.wait(TrainerLeft)
        with running.joined(rank=1, start_id="a", **of_job):
            assert running.of(TrainerJoined)[2].trainer.start_id == "a"


def test_send_reaches_its_connections(running: RunningChannel) -> None:
    """None means all that have joined; unknown numbers are not an error."""
    with running.joined() as first, running.joined() as second, running.connect() as silent:
        running.channel.send(None, protocol.Committed(1, 10))
        running.channel.send((second.number, 99), protocol.Target("q", 11))
        assert first.receive() == protocol.Committed(1, 10)
        assert [second.receive(), second.receive()] == [
            protocol.Committed(1, 10),
            protocol.Target("q", 11),
        ]
        silent.socket.settimeout(0.05)
        with pytest.raises(TimeoutError):
            silent.receive()


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
    """Another run or version, or impossible numbers: the peer gets the reason, and the connection ends."""
    with running.connect() as client:
        client.send(hello)
        reason = client.refusal()
        assert all(word in reason for word in words)
    assert running.events == []
    assert len(running.lines) == 1


def test_hello_comes_first(running: RunningChannel) -> None:
    """A peer without a hello, or with a message that only the daemon sends, is refused."""
    for message in (protocol.Progress(1), protocol.Fenced(2)):
        with running.connect() as client:
            client.send(message)
            assert isinstance(client.receive(), protocol.Refused)
    assert running.events == []
    with running.joined() as client:
        client.send(protocol.Fenced(2))
        assert client.receive() == protocol.Refused("fenced is not a message for the daemon")


def test_queries_are_answered_later_and_from_other_threads() -> None:
    """A status query needs no hello; the peer that asked may get its reply later, from any thread."""

    def answer(message: protocol.Message, reply: object) -> None:
        assert callable(reply)
        if isinstance(message, protocol.StatusQuery):
            threading.Timer(0.01, reply, [protocol.Status({"state": "idle"})]).start()
        elif isinstance(message, protocol.RestoreQuery):
            reply(protocol.Restored(message.query_id, path="/x"))

    with RunningChannel(answer=answer) as running:
        with running.connect() as client, running.joined() as other:
            client.send(protocol.StatusQuery())
            assert client.receive() == protocol.Status({"state": "idle"})
            other.send(protocol.RestoreQuery("k"))
            assert other.receive() == protocol.Restored("k", path="/x")
        assert running.lines == []


def test_a_reply_may_carry_a_descriptor(tmp_path: Path) -> None:
    """The peer gets the open file, its confirmation comes with the same reply, and nothing stays open."""
    (tmp_path / "file").write_bytes(b"content")
    replies: list[object] = []

    def answer(message: protocol.Message, reply: Reply) -> None:
        replies.append(reply)
        if isinstance(message, protocol.RestoreQuery):
            fd = os.open(tmp_path / "file", os.O_RDONLY)
            reply(protocol.ShardVerified(message.query_id, "d", "file"), fd)

    with RunningChannel(answer=answer) as running, running.joined() as client:
        client.send(protocol.RestoreQuery("k", takes_shards=True))
        data, fds, _, _ = socket.recv_fds(client.socket, 4096, 2)
        assert protocol.decode(data) == protocol.ShardVerified("k", "d", "file")
        with open(*fds, "rb") as file:
            assert file.read() == b"content"
        client.send(protocol.ShardsTaken("k", "d", 1))
        client.send(protocol.ShardsTaken("unknown", "d", 1))
        until(lambda: len(replies) == 2, what="the confirmation")
        assert replies[0] is replies[1]
        until(lambda: descriptors.on(tmp_path / "file") == 0, what="the closed file")
        running.channel.send((99,), protocol.Fenced(1), os.open(tmp_path / "file", os.O_RDONLY))
        until(lambda: descriptors.on(tmp_path / "file") == 0, what="the closed file")


def test_an_error_in_the_answer_costs_one_connection() -> None:
    """If the daemon fails to handle a message, the other peers are still served."""

    def answer(message: protocol.Message, reply: object) -> None:
        raise RuntimeError("broken")

    with RunningChannel(answer=answer) as running, running.joined() as other:
        with running.connect() as client:
            client.send(protocol.StatusQuery())
            assert client.receive() is None
        other.send(protocol.Progress(1))
        running.wait(TrainerProgress)


def test_all_ranks_of_a_user_get_one_secret_for_the_names_of_sets() -> None:
    """Also if a disk error changed it meanwhile: otherwise each rank would write another set."""
    results = iter(["", "key"])
    with RunningChannel(naming_secret=lambda _: next(results)) as running:
        for _ in range(2):
            with running.connect() as client:
                client.send(protocol.Hello(run=""))
                welcome = client.receive()
                assert isinstance(welcome, protocol.Welcome)
                assert welcome.naming_secret == ""


@pytest.mark.fault("T02")
def test_the_exit_is_posted_after_the_loss_of_the_connection(
    running: RunningChannel,
) -> None:
    """First the lost connection, then the exit of the process; each once."""
    with PeerProcess(running.path, "join(); s.close(); wait(); os._exit(0)") as peer:
        (left,) = running.wait(TrainerLeft)
        assert not left.exited
        peer.resume()
        _, gone = running.wait(TrainerLeft, 2)
        assert gone.exited
        assert gone.connection == left.connection
    assert len(running.of(TrainerLeft)) == 2


@pytest.mark.fault("T02", "S10")
def test_a_killed_process_is_posted_as_exited(running: RunningChannel) -> None:
    """SIGKILL leaves no time for a goodbye; the pidfd shows the exit."""
    with PeerProcess(running.path, "join(); show('in'); wait()") as peer:
        assert peer.line() == "in"
        peer.process.kill()
        running.wait_for_exit()
    exits = [left.exited for left in running.of(TrainerLeft)]
    assert exits in ([False, True], [True])


def test_last_messages_come_before_the_exit(running: RunningChannel) -> None:
    """The last messages of a process are handled before its exit."""
    script = """
join()
for step in range(40):
    send(type="progress", step=step)
send(type="sealed", step=9, directory="d", save_s=1, size_bytes=1)
os._exit(0)
"""
    with PeerProcess(running.path, script):
        running.wait_for_exit()
    kinds = [type(event) for event in running.events]
    assert kinds.count(TrainerProgress) == 40
    assert kinds.index(TrainerSealed) < kinds.index(TrainerLeft)


def test_goodbye_is_the_last_event(running: RunningChannel) -> None:
    """After a goodbye the exit of the process is not posted."""
    with PeerProcess(running.path, "join(); send(type='bye'); wait(); os._exit(0)") as peer:
        running.wait(TrainerLeft)
        peer.resume()
        peer.process.wait()
    running.joined().close()  # served after any event of the exit
    running.wait(TrainerLeft, 2)
    assert [left.exited for left in running.of(TrainerLeft)] == [True, False]


def test_last_messages_arrive_though_the_process_left_some_unread(running: RunningChannel) -> None:
    """A goodbye is no crash because a message of the daemon was not read."""
    script = """
join()
s.recv(1, socket.MSG_PEEK)
send(type="progress", step=100)
send(type="bye")
s.close()
"""
    with PeerProcess(running.path, script):
        (joined,) = running.wait(TrainerJoined)
        running.channel.send((joined.trainer.connection,), protocol.Committed(2, 90))
        assert running.wait(TrainerLeft)[0].is_goodbye
    assert [event.step for event in running.of(TrainerProgress)] == [100]


def test_last_messages_arrive_though_a_message_found_the_end_closed() -> None:
    """A message to a process that has just closed its end does not cost its goodbye."""
    with HeldChannel() as running, running.connect() as other:
        trainer = running.joined()
        running.hold(other)
        running.channel.send((trainer.number,), protocol.Committed(2, 90))  # is handled first
        trainer.send(protocol.Progress(step=100))
        trainer.send(protocol.Bye())
        trainer.close()
        running.release()
        assert running.wait(TrainerLeft)[0].is_goodbye
        assert [event.step for event in running.of(TrainerProgress)] == [100]


@pytest.mark.fault("T09")
def test_a_process_that_reconnects_is_one_process(running: RunningChannel) -> None:
    """After a reconnect only the newest connection posts the exit of the process."""
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
        peer.resume()
        running.wait_for_exit()
    running.joined().close()  # served after all events of the exit
    assert TrainerLeft(first, exited=False, reason="connection closed") in running.events
    assert {left.connection for left in running.of(TrainerLeft) if left.exited} == {second}


@pytest.mark.fault("S26")
def test_messages_of_forked_children_are_ignored(running: RunningChannel) -> None:
    """Only the process that sent the hello counts, and not a child that inherits the socket."""
    script = """
join()
if os.fork() == 0:
    send(type="progress", step=666)
    os._exit(0)
os.wait()
send(type="progress", step=1)
show("done"); wait()
"""
    with PeerProcess(running.path, script) as peer:
        assert peer.line() == "done"
        assert [event.step for event in running.wait(TrainerProgress)] == [1]
    assert "forked_child_ignored" in running.lines[0]


@pytest.mark.fault("S26")
def test_a_child_that_holds_the_socket_does_not_hide_the_exit_of_its_parent(
    running: RunningChannel,
) -> None:
    """A data-loader worker that survives the trainer keeps the connection open; the exit is still posted."""
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
    """With any umask the socket has mode 0660, and never had a wider one."""
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
    """A daemon replaces the socket of a dead daemon, and refuses the path of a running one."""
    stale = running.directory / "stale"
    connection.listen(stale).close()
    with RunningChannel(path=stale) as successor:
        successor.joined().close()
    with pytest.raises(ConfigError, match="another process listens"):
        connection.listen(running.path)
    running.joined().close()


def test_a_file_that_is_not_a_socket_is_left_alone(tmp_path: Path) -> None:
    """A wrong path in the configuration deletes no file."""
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(ConfigError, match="not a socket"):
        connection.listen(path)
    assert path.read_text() == "data"


def test_close_removes_its_own_socket_only(tmp_path: Path) -> None:
    """The daemon unlinks its socket, unless another daemon has taken the path."""
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


def test_messages_sent_before_the_close_arrive() -> None:
    """The last message of a daemon reaches the trainers, even if its thread is busy."""
    with HeldChannel() as running, running.joined() as client:
        running.hold(client)
        running.channel.send(None, protocol.Fenced(9))
        closer = threading.Thread(target=running.channel.close, daemon=True)
        closer.start()
        until(lambda: running.channel._is_closing)
        running.release()
        assert client.receive() == protocol.Fenced(9)
        assert client.receive() is None


def test_the_status_of_the_end_reaches_a_command_that_asks_later(running: RunningChannel) -> None:
    """A command that polls gets the last status of a daemon that has ended meanwhile; a trainer does not."""
    ended = protocol.Status({"state": "FENCED"})
    with DaemonClient(running.path) as command, running.joined() as trainer:
        running.channel.close(ended)
        assert command.request(protocol.StatusQuery(), protocol.Status) == ended
        with pytest.raises(Unreachable, match="closed the connection"):
            command.request(protocol.StatusQuery(), protocol.Status)
        assert trainer.receive() is None


def test_a_socket_from_systemd_is_used_unchanged(tmp_path: Path) -> None:
    """The passed socket is served, and its file is left to systemd."""
    listener = connection.listen(tmp_path / "s")
    with RunningChannel(path=tmp_path / "s", listener_fd=listener.detach()) as running:
        running.joined().close()
    assert (tmp_path / "s").exists()


def test_a_socket_of_the_wrong_type_is_refused_with_the_fix(tmp_path: Path) -> None:
    """For a unit with ListenStream= the error names the right setting."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as wrong:
        running = RunningChannel(path=tmp_path / "s", listener_fd=os.dup(wrong.fileno()))
        with pytest.raises(SwansongError) as caught:
            running.channel.start()
    assert "ListenSequentialPacket" in caught.value.hint
    running.directory.rmdir()
