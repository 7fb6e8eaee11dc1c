# SPDX-License-Identifier: Apache-2.0
"""Tensors are loaded while the daemon still fetches further files."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest
import swansong
import torch
import torch.distributed as dist
from swansong._checkpoint.load import RestoreError
from swansong._ranks.agreement import Ranks
from swansong._torch import arena
from swansong._torch.checkpoint_set import CheckpointSet
from swansong.protocol import Restored, RestoreQuery, ShardsTaken
from swansong.torch import TrainingState
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from testkit import descriptors
from testkit.fake_daemon import FakeDaemon
from testkit.training_parts import DEVICE, Attach, Counter, save_part
from testkit.waiting import until


class Job:
    """A model with its optimizer, and a state that differs at each seed."""

    def __init__(self, seed: int, ranks: Ranks | None = None) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 4)).to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.counter = Counter(seed)
        self.noise = torch.Generator().manual_seed(seed)
        self.state = TrainingState(
            self.model,
            self.optimizer,
            counter=self.counter,
            noise=self.noise,
            resize=lambda _, states: states[0],
        )
        self.state.ranks = ranks or Ranks()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(5, 6, generator=self.noise).to(DEVICE)).square().sum().backward()
        self.optimizer.step()

    def facts(self) -> list[torch.Tensor]:
        moments = [value for each in self.optimizer.state.values() for value in each.values()]
        extra = [self.noise.get_state(), torch.get_rng_state(), torch.tensor(self.counter.value)]
        return [*(each.clone() for each in [*self.model.state_dict().values(), *moments]), *extra]


def are_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several files for each object."""
    monkeypatch.setattr(arena, "FILE_BYTES", 300)


def saved(directory: Path, seed: int, world_size: int = 1) -> Path:
    """A checkpoint of some ranks after a step; the ranks differ."""
    for rank in range(world_size):
        job = Job(seed + rank, Ranks(rank=rank, world_size=world_size))
        job.step()
        save_part(job.state, directory, rank)
    return directory


def files(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.glob("*/*"))


def loaded(directory: Path, ranks: Ranks, early: list[str]) -> list[torch.Tensor]:
    """The state after a load for which these files arrived early."""
    job = Job(99, ranks)
    arrivals = job.state.arrivals()
    arrivals.read_all()
    for path in early:
        arrivals.take(path, os.open(directory / path, os.O_RDONLY))
    job.state.load(directory)
    return job.facts()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("world_size", [1, 2])
def test_files_that_arrive_early_change_no_result(
    tmp_path: Path, seed: int, world_size: int
) -> None:
    """Any of the files in any order, for the same and for another number of ranks."""
    draw = random.Random(seed)
    directory = saved(tmp_path, 1, world_size)
    early = [path for path in files(directory) if draw.random() < 0.8]
    draw.shuffle(early)
    ranks = Ranks(rank=draw.randrange(2), world_size=2)
    assert are_equal(loaded(directory, ranks, early), loaded(directory, ranks, []))


class Pair:
    def __init__(self, one: torch.Tensor, other: torch.Tensor) -> None:
        self.tensors = {"one": one, "other": other}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.tensors

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.tensors = state


def test_a_tensor_that_is_sharded_since_the_save_is_read_from_the_directory(tmp_path: Path) -> None:
    """Early it was read as the plain tensor that was saved, which has no place in the sharded one."""

    def sharded(value: float) -> torch.Tensor:
        return DTensor.from_local(torch.full((4,), value), mesh, [Shard(0)])

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        own = tmp_path / "rank-00000"
        own.mkdir()
        TrainingState(nn.Linear(1, 1), pair=Pair(sharded(1), torch.full((4,), 2.0))).snapshot()(own)
        pair = Pair(sharded(3), sharded(4))
        state = TrainingState(nn.Linear(1, 1), pair=pair)
        arrivals = state.arrivals()
        for path in reversed(files(tmp_path)):
            arrivals.take(path, os.open(tmp_path / path, os.O_RDONLY))
        state.load(tmp_path)
        assert [each.to_local().tolist() for each in pair.tensors.values()] == [[1] * 4, [2] * 4]
    finally:
        dist.destroy_process_group()


@pytest.mark.fault("G26")
def test_files_of_another_checkpoint_leave_nothing(tmp_path: Path) -> None:
    """After the files of a commit that turns out damaged, the load of an older one is that of a new process.

    The older checkpoint has no state of the optimizer.
    """
    directory = save_part(Job(3).state, tmp_path / "older")
    damaged = saved(tmp_path / "damaged", 4)
    wanted = loaded(directory, Ranks(), [])
    job = Job(99)
    arrivals = job.state.arrivals()
    for path in files(damaged):
        arrivals.take(path, os.open(damaged / path, os.O_RDONLY))
    arrivals.clear()
    job.state.load(directory)
    assert are_equal(job.facts(), wanted)
    assert not job.optimizer.state


@pytest.mark.parametrize("damage", ["flipped", "short", "other model"])
def test_a_file_that_does_not_fit_is_left_to_the_load(tmp_path: Path, damage: str) -> None:
    """It raises nothing early, its descriptor is closed, and the load raises as without it."""
    directory = saved(tmp_path, 1)
    (path,) = [each for each in files(directory) if "model-00000" in each]
    data = bytearray((directory / path).read_bytes())
    job = Job(2)
    if damage == "other model":
        job.model[0] = nn.Linear(6, 10)
    elif damage == "flipped":
        data[-1] ^= 1
    (directory / path).write_bytes(data[: -1 if damage == "short" else None])
    arrivals = job.state.arrivals()
    for each in files(directory):
        arrivals.take(each, os.open(directory / each, os.O_RDONLY))
    assert descriptors.on(*(directory / each for each in files(directory))) == 0
    with pytest.raises(ValueError, match=r"differ|truncated|shape|lacks"):
        job.state.load(directory)


def test_files_without_an_index_are_bounded(tmp_path: Path) -> None:
    """A daemon that never sends an index does not use up the descriptors of the trainer."""
    (tmp_path / "file").write_bytes(b"")
    arrivals = Job(1).state.arrivals()
    for number in range(200):
        fd = os.open(tmp_path / "file", os.O_RDONLY)
        arrivals.take(f"rank-00000/model-{number:05d}.safetensors", fd)
    assert descriptors.on(tmp_path / "file") <= 64
    arrivals.clear()
    assert descriptors.on(tmp_path / "file") == 0


def memory_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


@pytest.mark.parametrize("is_early", [True, False])
def test_a_load_needs_the_memory_of_the_state_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_early: bool
) -> None:
    """Its peak is at most the new tensors, the largest file and a constant; the model exists before."""
    weight_bytes, weights, constant_bytes = 2**23, 4, 2**24
    monkeypatch.setattr(arena, "FILE_BYTES", 2 * weight_bytes + 2**20)

    def job() -> TrainingState:
        layers = [nn.Linear(2**11, weight_bytes // 2**13, bias=False) for _ in range(weights)]
        model = nn.Sequential(*layers)
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)
        if not (tmp_path / "rank-00000").exists():
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            save_part(TrainingState(model, optimizer), tmp_path)
        return TrainingState(model, optimizer)

    job()
    largest_bytes = max(path.stat().st_size for path in tmp_path.glob("*/*.safetensors"))
    assert largest_bytes > 2 * weight_bytes
    state = job()
    arrivals = state.arrivals()
    before_bytes = memory_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    for path in files(tmp_path) if is_early else []:
        arrivals.take(path, os.open(tmp_path / path, os.O_RDONLY))
    state.load(tmp_path)
    grown_bytes = memory_bytes("VmHWM") - before_bytes
    moments_bytes = 2 * weights * weight_bytes
    assert grown_bytes <= moments_bytes + largest_bytes + constant_bytes


# ---------------------------------------------------------------- with a daemon


class Restore:
    """A ``guard.restore()`` in a thread; ``query`` is its query."""

    def __init__(self, daemon: FakeDaemon, guard: swansong.Guard) -> None:
        daemon.on_query = lambda _: None
        self.result: list[object] = []
        self.query = ""

        def restore() -> None:
            try:
                self.result.append(guard.restore())
            except RestoreError as error:
                self.result.append(error)

        self._thread = threading.Thread(target=restore)
        self._thread.start()
        query = daemon.wait_for(RestoreQuery)
        assert (query.takes_shards, query.prefixes) == (True, [])
        self.query, self._daemon = query.query_id, daemon

    def send(self, download: str, directory: Path, count: int | None = None) -> None:
        """Send the first files, or all, and wait until the trainer has confirmed them."""
        names = files(directory)[:count]
        for path in names:
            self._daemon.send_shard(self.query, download, directory, path)
        wanted = ShardsTaken(self.query, download, len(names))
        until(lambda: wanted in self._daemon.all_of(ShardsTaken), what="all files")

    def answer(self, **fields: object) -> object:
        self._daemon.send(Restored(self.query, **fields))  # type: ignore[arg-type]
        self._thread.join(60)
        return self.result[0]


def checkpoint(daemon: FakeDaemon, attach: Attach, step: int) -> Path:
    """A sealed set of a step."""
    job = Job(step)
    job.step()
    with attach(job.state) as guard:
        guard.restore()
        guard.step(step)
        assert guard.save(step)
        assert guard.wait_saved(10)
    daemon.received.clear()
    return next(each for each in daemon.sealed() if f"{step:012d}" in each.name)


def test_tensors_are_loaded_before_the_answer(
    daemon: FakeDaemon, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are in place when the daemon has sent the files and not yet the answer."""
    directory = checkpoint(daemon, attach, 7)
    wanted = loaded(directory, Ranks(), [])
    job = Job(50)
    restore = Restore(daemon, attach(job.state))
    restore.send("d1", directory)
    weights = list(job.model.state_dict().values())
    assert are_equal(weights, wanted[: len(weights)])
    assert restore.result == []
    monkeypatch.setattr(CheckpointSet, "_read", None)  # no tensor is read again
    assert restore.answer(path=str(directory), step=7, generation=1, download="d1") == 7
    assert are_equal(job.facts(), wanted)


@pytest.mark.parametrize("answered", ["d2", ""])
def test_another_download_than_the_first_one(
    daemon: FakeDaemon, attach: Attach, answered: str
) -> None:
    """Files of a damaged commit are replaced by those of an older one, sent early or not."""
    older, damaged = checkpoint(daemon, attach, 5), checkpoint(daemon, attach, 8)
    wanted = loaded(older, Ranks(), [])
    job = Job(50)
    restore = Restore(daemon, attach(job.state))
    restore.send("d1", damaged)
    if answered:
        restore.send("d2", older, count=2)
    assert restore.answer(path=str(older), step=5, generation=1, download=answered) == 5
    assert are_equal(job.facts(), wanted)


def test_no_training_begins_with_the_weights_of_a_damaged_commit(
    daemon: FakeDaemon, attach: Attach
) -> None:
    """After files of a checkpoint, a fresh run is an error: the weights are no longer those of the script."""
    directory = checkpoint(daemon, attach, 7)
    restore = Restore(daemon, attach(Job(50).state))
    restore.send("d1", directory)
    assert isinstance(restore.answer(), RestoreError)
