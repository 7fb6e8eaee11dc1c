# SPDX-License-Identifier: Apache-2.0
"""Trainers under torchrun: which processes connect, signals, elastic jobs, and workers of a loader."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from swansong._ranks.agreement import Ranks
from swansong._ranks.job_store import warn_about_shared_store
from swansong.protocol import Begin, Hello, Sealed

from testkit.fake_daemon import FakeDaemon
from testkit.python_process import run_python
from testkit.waiting import is_running, until

SHUTDOWN_S = 3
TRAINER = """
import json, os, signal, sys, threading, swansong

where = {"step": 0}
def save(directory):
    (directory / "step").write_text(str(where["step"]))
def load(directory):
    where["step"] = int((directory / "step").read_text())

if len(sys.argv) > 2:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
guard = swansong.attach(save=save, load=load)
guard.restore()
print(json.dumps({"pid": os.getpid(), "rank": os.environ["RANK"]}) + "\\n", end="", flush=True)
pause = threading.Event()
while True:
    pause.wait(0.01)
    where["step"] += 1
    guard.step(where["step"])
    if os.path.exists(sys.argv[1]) and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        sys.exit(3)
"""


class Torchrun:
    """``torchrun``, and the JSON objects that its ranks print.

    torchrun starts Python unbuffered, so a rank must write its line and the line's end at once.
    """

    def __init__(
        self, python: str, daemon: FakeDaemon, *arguments: object, **variables: str
    ) -> None:
        self.popen = subprocess.Popen(
            [python, "-m", "torch.distributed.run", *map(str, arguments)],
            env={
                **os.environ,
                "SWANSONG_SOCKET": daemon.path,
                "OMP_NUM_THREADS": "1",
                **variables,
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self.starts: list[dict[str, int]] = []
        """The output of each start of a rank."""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        with self.popen.stdout as lines:
            for line in lines:
                if line.startswith("{"):
                    self.starts.append(json.loads(line))

    @property
    def pids(self) -> list[int]:
        return [start["pid"] for start in self.starts]

    def wait_ranks(self, count: int = 2) -> None:
        until(lambda: len(self.starts) >= count, timeout_s=60, what=f"{count} ranks")

    def wait_world(self, size: int, after: int = 0) -> int:
        """Wait for a start with this number of ranks; returns the number of starts so far."""
        until(
            lambda: any(start["world"] == size for start in self.starts[after:]),
            timeout_s=90,
            what=f"a start with {size} ranks",
        )
        return len(self.starts)

    def kill(self) -> None:
        """Kill all processes, as a power cut does."""
        for pid in (self.popen.pid, *self.pids):
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
        self.popen.wait(60)
        self._reader.join(60)


def two_ranks(python: str, daemon: FakeDaemon, directory: Path, *arguments: str) -> Torchrun:
    """Start two ranks of a trainer that does not use torch itself; the file ``crash`` ends them."""
    script = directory / "train.py"
    script.write_text(TRAINER)
    return Torchrun(
        python,
        daemon,
        *("--standalone", "--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.2"),
        *(f"--shutdown-timeout={SHUTDOWN_S}", script, directory / "crash", *arguments),
    )


@pytest.fixture
def torchrun(daemon: FakeDaemon, tmp_path: Path, warm_python: str) -> Iterator[Torchrun]:
    job = two_ranks(warm_python, daemon, tmp_path)
    yield job
    job.kill()


@pytest.mark.fault("T12")
def test_ranks_send_hello_and_again_after_a_restart(
    daemon: FakeDaemon, torchrun: Torchrun, tmp_path: Path
) -> None:
    """Both ranks connect, the launcher does not; a restart of the ranks is another start."""
    torchrun.wait_ranks()
    daemon.wait_connected(2)
    daemon.request("r1")
    daemon.wait_for(Sealed)
    first = daemon.all_of(Hello)
    assert {(h.rank, h.local_rank) for h in first} == {(0, 0), (1, 1)}
    assert {(h.world_size, h.local_world_size, h.node, h.nodes) for h in first} == {(2, 2, 0, 1)}
    assert [h.rank for h in first if h.start_id] == [0]
    (tmp_path / "crash").touch()
    torchrun.wait_ranks(4)
    until(lambda: len(daemon.all_of(Hello)) == 4)
    drawn = {h.start_id for h in daemon.all_of(Hello)} - {""}
    assert len(drawn) == 2
    daemon.request("r2")
    until(lambda: [s for s in daemon.all_of(Sealed) if s.request_id == "r2"])


@pytest.mark.fault("OE10")
def test_sigterm_to_torchrun_ends_the_workers(torchrun: Torchrun) -> None:
    """It passes the signal on, and the hooks do not block it."""
    torchrun.wait_ranks()
    torchrun.popen.send_signal(signal.SIGTERM)
    assert torchrun.popen.wait(60) != 0
    until(lambda: not any(is_running(pid) for pid in torchrun.pids), what="the workers' end")


@pytest.mark.fault("OE10")
def test_torchrun_kills_after_its_shutdown_timeout(
    daemon: FakeDaemon, tmp_path: Path, warm_python: str
) -> None:
    """A rank that ignores SIGTERM may step and save until that timeout."""
    job = two_ranks(warm_python, daemon, tmp_path, "ignore SIGTERM")
    try:
        job.wait_ranks()
        daemon.wait_connected(2)
        begun_s = time.monotonic()
        job.popen.send_signal(signal.SIGTERM)
        daemon.request("late")
        daemon.wait_for(Sealed)
        assert all(is_running(pid) for pid in job.pids)
        until(lambda: not any(is_running(pid) for pid in job.pids), timeout_s=60, what="their end")
        assert time.monotonic() - begun_s >= SHUTDOWN_S
        assert job.popen.wait(60) != 0
    finally:
        job.kill()


ELASTIC = """
import json, os, swansong, threading
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
guard = swansong.attach(save=lambda d: (d / "x").write_text("x"), load=lambda d: None)
guard.restore()
print(json.dumps({"pid": os.getpid(), "world": dist.get_world_size()}) + "\\n", end="", flush=True)
value, step, pause = torch.zeros(1), 0, threading.Event()
while True:
    pause.wait(0.02)  # without a pause the ranks take all cores, and torchrun loses agents that are slow
    dist.all_reduce(value)
    step += 1
    guard.step(step)
"""


def agent(python: str, daemon: FakeDaemon, script: Path, port: int, *, is_host: bool) -> Torchrun:
    """Start the torchrun of one VM of an elastic job, with one rank."""
    settings = {
        "is_host": int(is_host),
        "last_call_timeout": 5,
        "keep_alive_interval": 1,
        "keep_alive_max_attempt": 8,  # as in testkit/netns/cluster.py
    }
    rendezvous = ",".join(f"{name}={value}" for name, value in settings.items())
    return Torchrun(
        python,
        daemon,
        *("--nproc-per-node=1", "--nnodes=1:2", "--max-restarts=3", "--rdzv-backend=c10d"),
        *("--rdzv-id=job", f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf={rendezvous}"),
        *("--local-addr=127.0.0.1", "--monitor-interval=0.2", script),
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
    )


@pytest.mark.timeout(300)
@pytest.mark.fault("T12")
def test_a_live_job_shrinks_and_grows_again(tmp_path: Path, warm_python: str) -> None:
    """A VM is lost and another one joins: the survivor's torchrun continues, and all ranks save together."""
    script = tmp_path / "train.py"
    script.write_text(ELASTIC)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ExitStack() as opened:
        daemons = []
        for name in ("a", "b", "c"):
            (tmp_path / name).mkdir()
            daemons.append(opened.enter_context(FakeDaemon(tmp_path / name)))

        def start(daemon: FakeDaemon, *, is_host: bool = False) -> Torchrun:
            started = agent(warm_python, daemon, script, port, is_host=is_host)
            opened.callback(started.kill)
            return started

        def save(name: str, *asked: FakeDaemon) -> None:
            asked[0].request(name)
            until(
                lambda: all(any(s.request_id == name for s in d.all_of(Sealed)) for d in asked),
                timeout_s=60,
                what=f"{name} saved on {len(asked)} VMs",
            )

        staying, lost = start(daemons[0], is_host=True), start(daemons[1])
        lost.wait_world(2)
        starts = staying.wait_world(2)
        save("r1", daemons[0], daemons[1])
        lost.kill()
        starts = staying.wait_world(1, after=starts)
        new = start(daemons[2])
        new.wait_world(2)
        staying.wait_world(2, after=starts)
        assert staying.popen.poll() is None
        save("r2", daemons[2], daemons[0])
        sessions = [{m.start_id for m in d.all_of(Begin)} for d in (daemons[0], daemons[2])]
        assert len(sessions[0]) == 2
        assert sessions[1] < sessions[0]


@pytest.mark.parametrize(("shares", "restarts"), [("True", "3"), ("False", "3"), ("True", "0")])
def test_a_torchrun_that_cannot_grow_causes_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, shares: str, restarts: str
) -> None:
    """One warning for each VM, and only for a job that may change its size."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", shares)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    for local_rank in (0, 1):
        warn_about_shared_store(Ranks(local_rank=local_rank, world_size=4, nodes=2))
    warn_about_shared_store(Ranks(world_size=2, nodes=1))
    warned = [r for r in caplog.records if "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in r.getMessage()]
    assert len(warned) == (1 if (shares, restarts) == ("True", "3") else 0)


LOADING = """
import multiprocessing, os, signal, sys, swansong
from torch.utils.data import DataLoader, _utils
from swansong.torch import shield_worker

_utils.worker.MP_STATUS_CHECK_INTERVAL = 0.2  # a worker looks for its parent at this interval

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a trainer that finishes its step first
guard = swansong.attach(save=lambda d: None, load=lambda d: None)
guard.restore()
init = None if sys.argv[1] == "bare" else shield_worker
loader = DataLoader(list(range(10000)), num_workers=2, worker_init_fn=init)
for step, _ in enumerate(loader, 1):
    guard.step(step)
    if step == 10 and sys.argv[1] == "killed":
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if step == 10:
        os.killpg(0, signal.SIGTERM)
    if step == 1000:
        print("continued", flush=True)
        break
guard.close()
"""


@pytest.mark.fault("S26")
@pytest.mark.parametrize(("how", "survives"), [("shielded", True), ("bare", False)])
def test_a_shield_keeps_the_workers_of_a_loader_alive(
    daemon: FakeDaemon, warm_python: str, how: str, survives: Any
) -> None:
    """SIGTERM to the process group kills unshielded workers, and so the loop; no worker connects."""
    done = load(warm_python, daemon, how)
    assert ("continued" in done.stdout) is survives, done.stderr[-2000:]
    assert len(daemon.all_of(Hello)) == 1


@pytest.mark.fault("S26")
def test_shielded_workers_do_not_outlive_their_trainer(
    daemon: FakeDaemon, warm_python: str
) -> None:
    """They ignore the signals, and detect by themselves that the trainer has ended."""
    done = load(warm_python, daemon, "killed")
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    workers = [int(pid) for pid in done.stdout.split()]
    assert len(workers) == 2
    until(
        lambda: not any(is_running(pid) for pid in workers), timeout_s=60, what="the workers' end"
    )
    assert len(daemon.all_of(Hello)) == 1


def load(python: str, daemon: FakeDaemon, how: str) -> subprocess.CompletedProcess[str]:
    """Run a trainer with two loader workers, which may hold its standard error open after its end."""
    settings = {"SWANSONG_SOCKET": daemon.path, "OMP_NUM_THREADS": "1"}
    return run_python("-c", LOADING, how, python=python, **settings)
