# SPDX-License-Identifier: Apache-2.0
"""A start of the warm Python looks like one of the plain Python, to its parent and to the script."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from testkit.other_users import needs_root
from testkit.waiting import until
from testkit.warm import WarmProcess, WarmPythons, kill_tree

ASKS = """
import json, os, sys, torch
assert torch.rand(1).item() != float(os.environ["BEFORE"])
assert os.getsid(0) == os.getpid() and len(os.listdir("/proc/self/task")) == 1
print(json.dumps([sys.argv, sys.path[0], sys.stdin.read(), os.getcwd(), __name__]))
sys.exit(7)
"""


def test_arguments_streams_and_status(warm_python: str, tmp_path: Path) -> None:
    """Arguments, directory, environment, streams and status are those of a plain start; seeds differ."""
    script = tmp_path / "script.py"
    script.write_text(ASKS)
    first = subprocess.run(
        [warm_python, "-c", "import torch; print(torch.rand(1).item())"],
        capture_output=True,
        text=True,
        check=True,
    )
    done = [
        subprocess.run(
            [python, "-u", str(script), "one", "-c"],
            cwd=tmp_path,
            env={**os.environ, "BEFORE": first.stdout, "OMP_NUM_THREADS": "1"},
            input="text",
            capture_output=True,
            text=True,
            check=False,
            start_new_session=True,
        )
        for python in (warm_python, sys.executable)
    ]
    assert [(d.returncode, d.stderr) for d in done] == [(7, "")] * 2
    assert done[0].stdout == done[1].stdout


@pytest.mark.parametrize(
    ("code", "status", "error"),
    [
        ("raise ValueError('torn')", 1, "ValueError: torn"),
        ("import sys; sys.exit('no data')", 1, "no data"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGUSR1)", -signal.SIGUSR1, ""),
        ("import atexit, os; atexit.register(os.write, 2, b'at exit')", 0, "at exit"),
    ],
)
def test_ends(warm_python: str, code: str, status: int, error: str) -> None:
    """Exceptions, messages, signals and exit handlers end a script as they do in a plain start."""
    done = subprocess.run(
        [warm_python, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == status
    assert error in done.stderr


@needs_root
def test_the_network_is_that_of_the_client(warm_python: str) -> None:
    """A client in a network namespace has a process there; the next client is where the server is."""
    code = "import os; print(os.readlink('/proc/self/ns/net'))"
    script = f'readlink /proc/self/ns/net; exec "$0" -c "{code}"'
    apart, here = (
        subprocess.run(
            [*prefix, "sh", "-c", script, warm_python],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout.split()
        for prefix in (["unshare", "--net"], [])
    )
    assert apart[0] == apart[1] != here[0] == here[1]


FORKS = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
child = os.fork()
if child:
    print(os.getpid(), child, flush=True)
signal.sigwait([signal.SIGTERM])
os.write(1, b"terminated\\n")
signal.pause()
"""


def test_signals(warm_python: str) -> None:
    """SIGTERM is passed on; SIGKILL ends the process and its children."""
    process = subprocess.Popen(
        [warm_python, "-c", FORKS], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    with process:
        assert process.stdout is not None
        pids = process.stdout.readline().split()
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "terminated\n"
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
        assert process.stdout.read() == "", "the pipe is still open"
    # A zombie, which init may never reap, has no executable.
    until(lambda: not any(os.path.exists(f"/proc/{pid}/exe") for pid in pids), what="their end")


def test_a_client_that_is_killed_at_once_does_not_end_the_server(warm_python: str) -> None:
    """A client that has not read its answer resets the connection."""
    path = Path(warm_python).with_name("socket")
    for _ in range(3):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.connect(str(path))
            network = os.open("/proc/self/ns/net", os.O_RDONLY)
            asked = repr(
                (["python", "-c", "import signal; signal.pause()"], dict(os.environ), "/", [])
            )
            socket.send_fds(client, [asked.encode()], [network])
            os.close(network)
            assert select.select([client], [], [], 60)[0], "no answer"
    done = subprocess.run([warm_python, "-c", "print(7)"], capture_output=True, check=True)
    assert done.stdout == b"7\n"


REPORTS = """
import os, sys, time
os.write(1, f"{os.getpid()} {sys.argv[1:]} {dict(os.environ)}\\n".encode())
time.sleep(float(sys.argv[1]))
sys.exit(7)
"""


def test_a_process_without_a_client(warm_python: str) -> None:
    """The pid is that of the script.  poll() and wait() return its status, also that of a signal."""
    reads, writes = os.pipe()
    with open("/dev/null", "r+b") as null, open(reads) as lines:
        streams = (null.fileno(), writes, null.fileno())
        ends, stays = (
            WarmProcess(warm_python, ["-c", REPORTS, seconds], env={"A": "1"}, streams=streams)
            for seconds in ("0", "1000")
        )
        printed = [lines.readline(), lines.readline()]
        assert (ends.wait(60), ends.poll(), stays.poll()) == (7, 7, None)
        with pytest.raises(subprocess.TimeoutExpired):
            stays.wait(0.01)
        stays.send_signal(signal.SIGTERM)
        assert (stays.wait(60), stays.poll()) == (-signal.SIGTERM, -signal.SIGTERM)
        stays.send_signal(signal.SIGTERM)
        os.close(writes)
        assert lines.read() == ""
    assert sorted(printed) == sorted(
        f"{process.pid} ['{seconds}'] {{'A': '1'}}\n"
        for process, seconds in ((ends, 0), (stays, 1000))
    )


def test_a_process_may_end_before_it_is_known(
    warm_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has waited for it already: its status counts, and a signal reaches nothing else."""

    def ended(_pid: int) -> int:
        raise ProcessLookupError

    monkeypatch.setattr(os, "pidfd_open", ended)
    process = WarmProcess(warm_python, ["-c", "raise SystemExit(7)"], env={}, streams=(0, 1, 2))
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 7


def test_close_does_not_wait_for_the_server() -> None:
    """Servers that do not run end with their forks, and close() raises nothing."""
    pythons = WarmPythons()
    for server in pythons._servers:
        os.kill(server.pid, signal.SIGSTOP)
    pythons.close()
    assert {server.returncode for server in pythons._servers} == {-signal.SIGKILL}
    assert not os.path.exists(pythons.directory)
    pythons.close()


def test_a_tree_of_processes_is_killed() -> None:
    """Also a process that has its own session, and one that ignores SIGTERM."""
    code = "trap '' TERM; setsid sh -c 'sleep 1000 & echo $$ $!; wait' & wait"
    process = subprocess.Popen(["/bin/sh", "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    pids = process.stdout.readline().split()
    kill_tree(process)
    assert process.returncode == -signal.SIGKILL
    assert process.stdout.read() == b"", "the pipe is still open"
    until(
        lambda: not any(os.path.exists(f"/proc/{int(pid)}/exe") for pid in pids), what="their end"
    )
    process.stdout.close()
