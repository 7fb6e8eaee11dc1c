# SPDX-License-Identifier: Apache-2.0
"""A PyTorch trainer that dies during a save, before each file operation, and the restore after it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import swansong
import torch
from swansong._checkpoint.load import RestoreError, load_checkpoint
from swansong._ranks.agreement import Ranks
from swansong.torch import TrainingState
from swansong_bucket.model import Staged
from swansongd.staging.seal import Scanner
from torch import nn

from testkit.fake_daemon import FakeDaemon

Attach = Callable[..., swansong.Guard]

HOOKS = Path(swansong.__file__).parents[1]

# For n = 1, 2, ... until it survives: a child with step 1 in staging saves step 2, and kills itself before
# its n-th file operation, or in the middle of a write.  The other one of two ranks survives.  The parameters
# are in DDP, without gradients: the ranks split their common tensors without communication, as in a real job.
HARNESS = """
import builtins, io, os, signal, sys
import torch
from torch import nn
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from swansong._torch import index
from swansong._checkpoint.staging import write_checkpoint
from swansong._ranks.agreement import Ranks
from swansong.layout import RankManifest
from swansong.torch import TrainingState

COUNTED = {
    "open", "os.mkdir", "os.rename", "os.chmod", "os.listdir", "os.scandir", "os.remove", "os.rmdir",
    "os.truncate", "os.link",
}
left = 0

def one_more():
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

def audit(event, arguments):
    if left > 0 and event in COUNTED:
        one_more()

class Torn:
    def __init__(self, file):
        self.file = file

    def write(self, data):
        one_more()
        done = self.file.write(memoryview(data)[: len(data) // 2])
        self.file.flush()
        one_more()
        return done + self.file.write(memoryview(data)[done:])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def __getattr__(self, name):
        return getattr(self.file, name)

def opens_torn(path, mode="r", *rest, **options):
    file = real_open(path, mode, *rest, **options)
    return Torn(file) if "w" in mode else file

def writes_torn(descriptor, data):
    one_more()
    done = real_write(descriptor, data[: len(data) // 2])
    one_more()
    return done + real_write(descriptor, data[done:])

def syncs(descriptor):
    one_more()
    real_fsync(descriptor)

real_open, real_write, real_fsync = builtins.open, os.write, os.fsync

def in_child(work):
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            sys.stderr.write(f"{error!r}\\n")
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

torch.set_num_threads(1)
index.SPLIT_BYTES = 64
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
sys.addaudithook(audit)

def copies(model, optimizer, states, value):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
            optimizer.state[parameter] = {
                "step": torch.tensor(value),
                "exp_avg": torch.full_like(parameter, value),
                "exp_avg_sq": torch.full_like(parameter, value),
            }
    return [state.snapshot() for state in states]

def lives_of(root, ranks, doomed):
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    if ranks > 1:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    states = []
    for rank in range(ranks):
        states.append(TrainingState(model, optimizer))
        states[-1].ranks = Ranks(rank=rank, world_size=ranks, local_world_size=ranks)
    old, new = (copies(model, optimizer, states, value) for value in (1.0, 2.0))
    n = 0
    while True:
        n += 1
        staging = f"{root}/{n:04d}/r"
        os.makedirs(staging)

        def save(step, nonce, write, rank):
            manifest = RankManifest(
                run="r", step=step, kind="final", files=[], rank=rank, start_id="a",
                world_size=ranks, local_world_size=ranks,
            )
            write_checkpoint(staging, nonce, manifest, write, durable=True)

        def dies():
            global left
            builtins.open = io.open = opens_torn
            os.write, os.fsync = writes_torn, syncs
            left = n
            save(2, "new", new[doomed], doomed)

        for rank in range(ranks):
            save(1, "old", old[rank], rank)
        end = None
        for rank in range(ranks):
            if rank == doomed:
                end = in_child(dies)
            else:
                save(2, "new", new[rank], rank)
        if end not in (0, -signal.SIGKILL):
            raise SystemExit(f"{root}, {n}: {end}")
        if end == 0:
            return

lives_of(f"{sys.argv[1]}/alone", 1, 0)
lives_of(f"{sys.argv[1]}/first", 2, 0)
lives_of(f"{sys.argv[1]}/second", 2, 1)
os._exit(0)
"""


def live_and_die(root: Path, python: str) -> None:
    """Create staging directories as each child left them: one rank, the first of two, the second of two."""
    done = subprocess.run(
        [python, "-c", HARNESS, str(root)],
        env={**os.environ, "PYTHONPATH": str(HOOKS), "OMP_NUM_THREADS": "1"},
        timeout=200,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def candidates(staging: Path) -> list[Staged]:
    """Return the sealed sets that the daemon finds in a staging directory, newest first."""
    found = Scanner(
        staging, allowed_uids=frozenset({os.geteuid()}), settle_s=0.0, monotonic=lambda: 0.0
    ).scan()
    return sorted(found.staged, key=lambda each: -each.id.step)


class Trainer:
    """The trainer of the harness, with other values, which the restore overwrites."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.3)
        self.state = TrainingState(self.model, self.optimizer)

    def values(self) -> set[float]:
        """Return all values of the parameters and of the optimizer's moments."""
        found = [parameter.detach() for parameter in self.model.parameters()]
        found += [each for moments in self.optimizer.state.values() for each in moments.values()]
        return {value for tensor in found for value in tensor.flatten().tolist()}


@pytest.mark.fault("T03", "D05")
@pytest.mark.timeout(300)
def test_whenever_it_dies_the_old_or_the_new_comes_back(tmp_path: Path, warm_python: str) -> None:
    """After a kill before each file operation, or within a write, each set that the daemon finds loads.

    The newest set that it finds is the old one until the very rename, and from then on the new one.
    Alone, and as the first and as the second of two ranks.
    """
    live_and_die(tmp_path, warm_python)
    for case, ranks in {"alone": 1, "first": 2, "second": 2}.items():
        trainer, of_job = Trainer(), Ranks(world_size=ranks, local_world_size=ranks)
        trainer.state.ranks = of_job
        steps = []
        for staging in sorted((tmp_path / case).glob("*/r")):
            newest = candidates(staging)[0]
            step = load_checkpoint(str(staging / newest.directory), of_job, trainer.state).step
            assert trainer.values() == {float(step)}, str(staging)
            steps.append(step)
        assert len(steps) > 50
        assert steps == sorted(steps)
        assert set(steps) == {1, 2}


@pytest.mark.fault("T06")
@pytest.mark.parametrize("damage", ["bit", "short", "file", "marker", "index"])
def test_a_damaged_checkpoint_is_refused_by_name(
    tmp_path: Path, daemon: FakeDaemon, attach: Attach, damage: str
) -> None:
    """A flipped bit, a truncated file, a missing file, marker or index: the error of restore() names it."""
    guard = attach(Trainer().state)
    guard.restore()
    assert guard.save(3)
    assert guard.wait_saved(10)
    (sealed,) = daemon.sealed()
    name = {"marker": "rank-00000.json", "index": "rank-00000/state.json"}.get(
        damage, "rank-00000/model-00000.safetensors"
    )
    victim = sealed / name
    data = victim.read_bytes()
    victim.unlink()
    if damage == "bit":
        victim.write_bytes(data[:-2] + bytes([data[-2] ^ 4]) + data[-1:])
    elif damage == "short":
        victim.write_bytes(data[:-1])
    daemon.restorable = lambda: (sealed, 3)
    with pytest.raises(RestoreError, match=victim.name):
        attach(Trainer().state).restore()
    victim.write_bytes(data)
    assert attach(Trainer().state).restore() == 3
