# SPDX-License-Identifier: Apache-2.0
"""The agreement of the living ranks, and the return to the last step."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from swansong._ranks import survivors
from swansong._ranks.agreement import Ranks
from swansong._ranks.job_store import JobStore, open_vm_store
from swansong._ranks.survivors import Survivors, agree, is_loss_of_a_peer, named

from testkit.job_store import MemoryJobStore
from testkit.python_process import output_of, run_python
from testkit.waiting import Clock, in_threads

torch = pytest.importorskip("torch")
KEY = "start/survivors"


def ranks_of(rank: int, world_size: int, local: int = 2) -> Ranks:
    return Ranks(
        rank=rank,
        local_rank=rank % local,
        world_size=world_size,
        local_world_size=local,
        node=rank // local,
        nodes=world_size // local,
    )


def stores(kind: str, directory: Path, count: int) -> list[JobStore]:
    """Connections to one store."""
    if kind == "memory":
        return [MemoryJobStore(0.002).connect()] * count
    return [open_vm_store(str(directory), ".survivors.x", 5.0) for _ in range(count)]


def agreed(
    connections: list[JobStore], steps: dict[int, int], world_size: int
) -> list[Survivors | None]:
    """The results of ranks that agree at the same time, by their steps."""
    alive = list(steps)

    def take_part(number: int) -> Survivors | None:
        ranks = ranks_of(alive[number], world_size)
        return agree(connections[number], KEY, ranks, steps[ranks.rank])

    return in_threads(len(alive), take_part)


@pytest.mark.parametrize("kind", ["memory", "directory"])
def test_all_survivors_read_one_decision_of_the_greatest_step(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever ranks answer, and in whatever order, exactly those at the greatest step are named."""
    monkeypatch.setattr(survivors, "QUIET_S", 0.3)
    for seed in range(3 if kind == "directory" else 8):
        chosen = random.Random(seed)
        steps = {rank: chosen.choice([7, 8]) for rank in range(8) if rank not in (2, 5)}
        place = tmp_path / str(seed)
        place.mkdir()
        found = agreed(stores(kind, place, 6), steps, 8)
        greatest = max(steps.values())
        nodes = {rank: rank // 2 for rank, step in steps.items() if step == greatest}
        assert found == [Survivors(greatest, nodes)] * len(steps)


def test_a_job_without_a_dead_rank_has_no_survivors(tmp_path: Path) -> None:
    """When all ranks answer, none is lost, and none saves."""
    connections = stores("directory", tmp_path, 4)
    assert agreed(connections, dict.fromkeys(range(4), 7), 4) == [None] * 4


def test_a_rank_that_returns_finds_the_decision_and_is_not_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A hung rank that comes back changes nothing, also if it is a step ahead."""
    monkeypatch.setattr(survivors, "QUIET_S", 0.05)
    store = MemoryJobStore()
    first = agree(store, KEY, ranks_of(0, 2), 7)
    late = agree(store, KEY, ranks_of(1, 2), 8)
    assert first == late == Survivors(7, {0: 0})


def test_a_pause_of_the_vm_is_not_the_silence_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that runs first after the pause waits for the answers of the others."""
    store, clock = MemoryJobStore(), Clock()

    def answer() -> None:
        store.set(f"{KEY}/answer/2", "[7, 1]")
        store.add(f"{KEY}/answers", 1)

    during = iter([lambda: clock.advance(60.0), answer])

    def sleep(seconds: float) -> None:
        clock.advance(seconds)
        next(during, lambda: None)()

    monkeypatch.setattr(survivors, "time", SimpleNamespace(monotonic=clock.monotonic, sleep=sleep))
    assert agree(store, KEY, ranks_of(0, 4), 7) == Survivors(7, {0: 0, 2: 1})


def test_survivors_are_counted_without_gaps() -> None:
    """Ranks and VMs of the smaller job are numbered from 0, each VM with its own number of ranks."""
    found = Survivors(7, {0: 0, 2: 1, 6: 3, 7: 3})
    places = list(Ranks.among(found.nodes).values())
    assert [(p.rank, p.local_rank, p.local_world_size, p.node) for p in places] == [
        (0, 0, 1, 0), (1, 0, 1, 1), (2, 0, 2, 2), (3, 1, 2, 2),
    ]  # fmt: skip
    assert {(p.world_size, p.nodes) for p in places} == {(4, 3)}
    assert named(found.without(8)) == "1, 3-5"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[/build/gloo/transport/tcp/pair.cc:553] Connection closed by peer"), True),
        (RuntimeError("Application timeout caused pair closure"), True),
        (RuntimeError("Connection reset by peer"), False),
        (torch.distributed.DistBackendError("NCCL communicator was aborted"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("Connection closed by peer"), False),
        (None, False),
    ],
)
def test_only_a_failed_collective_is_a_loss(error: BaseException | None, expected: bool) -> None:
    """A mistake of the script never leads to a checkpoint without the other ranks."""
    assert is_loss_of_a_peer(error) is expected


TERMINATION = """
import os, signal, threading
from swansong._ranks import termination

def user(*_):
    print("user", flush=True)
    if {chained}:
        former(signal.SIGTERM, None)
    os._exit(3)

def answer():
    print("answered while the loop", "trains" if trains(60) else "stands", flush=True)
    if {closes}:
        closing.set()
        closed.wait()

def leave():
    print("left while the loop", "trains" if trains(0.5) else "stands", flush=True)
    if {hangs}:
        threading.Event().wait()

def trains(limit_s):
    stepped.clear()
    return stepped.wait(limit_s)

termination.SIGTERM_LIMIT_S = 5.0 if not {hangs} else 2.0
closing, closed, stepped = threading.Event(), threading.Event(), threading.Event()
last = termination.Termination(answer, leave, is_last={is_last})
if {before}:
    signal.signal(signal.SIGTERM, user)
last.start()
former = signal.getsignal(signal.SIGTERM)
if {after}:
    signal.signal(signal.SIGTERM, user)
os.kill(os.getpid(), signal.SIGTERM)
while not closing.wait(0.001):
    stepped.set()
last.close()
closed.set()
threading.Event().wait(0.3)  # in which a wrong end would come first
os._exit(75)
"""
ANSWERED, LEFT = "answered while the loop trains", "left while the loop stands"


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, (-signal.SIGTERM, [ANSWERED, LEFT])),
        ({"hangs": True}, (143, [ANSWERED, LEFT])),
        ({"closes": True}, (75, [ANSWERED])),
        ({"before": True}, (3, ["user"])),
        ({"after": True}, (3, ["user"])),
        ({"after": True, "chained": True}, (3, ["user"])),
        ({"after": True, "chained": True, "is_last": True}, (-signal.SIGTERM, ["user", LEFT])),
    ],
)
def test_sigterm_ends_the_process_after_an_answer(
    facts: dict[str, bool], expected: tuple[int, list[str]]
) -> None:
    """The loop may answer and end by itself; a script's handler decides, unless peers may be lost.

    A function that hangs does not keep the process.
    """
    names = ("chained", "closes", "hangs", "is_last", "before", "after")
    found = run_python("-c", TERMINATION.format(**dict.fromkeys(names, False) | facts))
    assert (found.returncode, found.stdout.splitlines()) == expected


SUBGROUPS = """
import sys, torch, torch.distributed as dist
from swansong._ranks.agreement import Ranks
from swansong.torch import TrainingState
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

class Fails(nn.Module):
    def forward(self, _input):
        raise RuntimeError("a collective has failed")

dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
model = nn.Sequential(nn.Linear(4, 4), Fails())
{wrap}
state = TrainingState(model)
state.ranks = Ranks(rank=0, world_size=4)
state.rehearse()
state.note_boundary()
try:
    model(torch.ones(2, 4))
except RuntimeError as error:
    print(error, file=sys.stderr)
_, missing = state.snapshot_without([2, 3], Ranks(rank=0, world_size=2))
print(*missing, sep="\\n")
"""


@pytest.mark.parametrize(
    ("wrap", "is_whole"),
    [
        ("model = DistributedDataParallel(model)", True),
        ("model = DistributedDataParallel(model, process_group=dist.new_group([0, 1]))", False),
        ("fully_shard(model, mesh=DeviceMesh('cpu', [0, 1]))", False),
        (
            "fully_shard(model, mesh=init_device_mesh('cpu', (2, 2), mesh_dim_names=('copy', 'shard')))",
            True,
        ),
    ],
)
def test_a_model_on_some_ranks_of_the_job_is_refused(
    warm_python: str, wrap: str, is_whole: bool
) -> None:
    """The lost ranks of a pipeline hold a stage that the living ranks do not know.

    A failure in the forward pass leaves the parameters of ``fully_shard`` gathered, and changes nothing.
    """
    found = run_python("-c", SUBGROUPS.format(wrap=wrap), python=warm_python)
    assert not found.returncode, found.stderr
    assert "a collective has failed" in found.stderr
    assert ("the counterpart of model" in found.stdout) is not is_whole
    assert bool(found.stdout.strip()) is not is_whole


STILL_TRAINS = """
import torch, torch.distributed as dist
from swansong._ranks.agreement import Ranks
from swansong.torch import TrainingState
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
model = nn.Sequential(nn.Linear(4, 4))
fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "shard")))
state = TrainingState(model)
state.ranks = Ranks(rank=0, world_size=4)
state.rehearse()
state.note_boundary()
calls, state_dict = [], model.state_dict

def followed_by_a_forward_pass(*arguments, **options):
    found = state_dict(*arguments, **options)
    calls.append(0)
    if len(calls) == {after}:
        model.unshard()
    return found

model.state_dict = followed_by_a_forward_pass
_, missing = state.snapshot_without([2, 3], Ranks(rank=0, world_size=2))
print(len(calls), *missing, sep="\\n")
"""


@pytest.mark.fault("N12")
@pytest.mark.parametrize("after", [1, 2, 0])
def test_a_loop_that_gathers_parameters_meanwhile_does_not_prevent_the_save(
    warm_python: str, after: int
) -> None:
    """The loop of a rank may not have met the lost rank yet, while another thread saves."""
    found = output_of("-c", STILL_TRAINS.format(after=after), python=warm_python)
    calls, *missing = found.split()
    assert (int(calls), missing) == (4 if after else 2, [])
