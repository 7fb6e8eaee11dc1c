# SPDX-License-Identifier: Apache-2.0
"""Trainers as real processes: resume bit by bit, and fork."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
from swansong._daemon import daemon_channel
from swansong.protocol import Accepted, Bye, Hello, Sealed

from testkit.fake_daemon import FakeDaemon

FORKING = """
import os, socket, sys, swansong

class Counter:
    state_dict = lambda self: {}
    load_state_dict = lambda self, state: None

def sockets():
    names = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            names.add(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            pass
    return {name for name in names if name.startswith("socket:")}

guard = swansong.attach({"c": Counter()}, every_steps=1)
guard.restore()
assert guard.save(1)
guard.step(1)
connection = sockets()
assert len(connection) == 1
child = os.fork()
if child == 0:
    assert not sockets()
    guard.step(2)
    guard.step(3)
    assert guard.poll() is None and guard.request is None
    assert not guard.save(3)
    assert guard.restore() == 0
    with guard.critical():
        pass
    guard.finish()
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert sockets() == connection
guard.step(4)
print("forked", flush=True)
sys.stdin.readline()
guard.step(5)
"""


@pytest.mark.fault("S26")
def test_a_forked_child_is_not_a_rank(daemon: FakeDaemon) -> None:
    """The child has no connection and does nothing, with a warning, and the guard of the parent works on."""
    trainer = subprocess.Popen(
        [sys.executable, "-c", FORKING],
        env={**os.environ, "SWANSONG_SOCKET": daemon.path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == "forked\n"
    daemon.request()
    daemon.wait_for(Accepted)
    _, warnings = trainer.communicate("continue\n", timeout=100)
    assert trainer.returncode == 0
    advice = "call attach() in the process that trains"
    told = [line.split("(")[0] for line in warnings.splitlines() if line.endswith(advice)]
    assert told == ["guard.step", "guard.restore"], warnings
    # The last message of the connection: all messages before it have been read.
    assert [bye.reason for bye in (daemon.wait_for(Bye), *daemon.all_of(Bye)[1:])] == ["exit"]
    assert [sealed.step for sealed in daemon.all_of(Sealed)] == [1, 4, 5]
    assert len(daemon.all_of(Hello)) == 1


def test_no_process_of_the_script_inherits_a_checkpoint() -> None:
    """A descriptor of the daemon is closed when the script starts another program, in any way."""
    daemon, hooks = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with daemon, hooks, open(os.devnull, "rb") as shard:
        socket.send_fds(daemon, [b"shard"], [shard.fileno()])
        data, fd = daemon_channel._receive(hooks)
        with open(fd, "rb"):
            assert data == b"shard"
            assert not os.get_inheritable(fd)
