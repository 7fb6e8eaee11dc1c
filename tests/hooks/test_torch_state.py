# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of PyTorch objects: content, copy, restore, and damage."""

from __future__ import annotations

import ast
import copy
import functools
import random
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import swansong
import torch
import torch.distributed as dist
from swansong._checkpoint.load import RestoreError
from swansong._checkpoint.training_health import health_of
from swansong._ranks.agreement import Ranks
from swansong._torch import arena, loader
from swansong._torch.arena import Arena
from swansong._torch.checkpoint_set import CheckpointSet
from swansong._torch.collector import Collector
from swansong._torch.index import FORMAT, INDEX, encode_index
from swansong._torch.memory import BLOCK_BYTES, checksum
from swansong.dcp import DcpState
from swansong.protocol import Failed, Progress, Sealed
from swansong.torch import ResumableLoader, TrainingState, load_weights, seed_all
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from testkit.fake_daemon import FakeDaemon
from testkit.python_process import output_of
from testkit.training_parts import DEVICE, Attach, save_part, set_rank
from testkit.waiting import in_threads, until


class Trainer:
    """A small trainer with all that is hard to resume: tied and frozen weights, buffers, dropout,
    shuffling."""

    def __init__(self, seed: int, width: int = 8) -> None:
        seed_all(0)
        data = torch.utils.data.TensorDataset(torch.randn(24, width))
        seed_all(seed)
        body, head = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        head.weight = body.weight
        frozen = nn.Linear(width, width)
        frozen.requires_grad_(False)
        self.model = nn.Sequential(body, nn.BatchNorm1d(width), frozen, nn.Dropout(0.2), head)
        self.model.to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.1, total_steps=100)
        self.loader = ResumableLoader(torch.utils.data.DataLoader(data, 4, shuffle=True))
        self.noise = torch.Generator(DEVICE).manual_seed(seed)
        self.numpy = np.random.default_rng(seed)
        self.state = TrainingState(
            self.model,
            self.optimizer,
            scheduler=self.scheduler,
            loader=self.loader,
            noise=self.noise,
            numpy=self.numpy,
        )
        self.batches = self._batches()

    def _batches(self) -> Iterator[torch.Tensor]:
        while True:
            for (batch,) in self.loader:
                yield batch

    def reported(self, guard: swansong.Guard) -> float:
        """The loss of one step, which the guard knows."""
        (loss,) = self.steps(1)
        guard.step()
        return loss

    def steps(self, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            noise = torch.randn(1, generator=self.noise, device=DEVICE)
            batch = next(self.batches).to(DEVICE) + noise
            self.optimizer.zero_grad()
            loss = (self.model(batch) * self.numpy.normal() + np.random.rand()).square().mean()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            losses.append(loss.item())
        return losses


@pytest.mark.parametrize("at", [3, 6, 13])
def test_all_state_is_restored(tmp_path: Path, at: int) -> None:
    """In the middle of an epoch and at its end, the steps after a restore are the same, bit by bit."""
    before = Trainer(1)
    before.steps(at)
    before.state.values["best"] = (0.5, {"epoch": 2})
    directory = save_part(before.state, tmp_path)
    wanted = before.steps(15)
    after = Trainer(2)
    after.state.load(directory)
    assert after.state.values == {"best": (0.5, {"epoch": 2})}
    assert after.steps(15) == wanted
    assert before.model[4].weight is before.model[0].weight
    names = {path.suffix for path in (directory / "rank-00000").iterdir()}
    assert names == {".json", ".safetensors"}


@pytest.mark.filterwarnings("ignore:.*lr_scheduler:UserWarning", "ignore:The epoch parameter")
def test_an_object_gets_its_dicts_back_in_their_types(tmp_path: Path) -> None:
    """A restored scheduler can compute the rate of any epoch, also one in another scheduler."""

    def script() -> tuple[TrainingState, Any, Any]:
        optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 1.0)
        single = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2])
        parts = [torch.optim.lr_scheduler.MultiStepLR(optimizer, [1]) for _ in range(2)]
        whole = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [3])
        state = TrainingState(optimizer=optimizer, scheduler=single, whole=whole)
        state.values["seen"] = Counter("ab")
        return state, single, parts[0]

    before, after = script(), script()
    before[0].values["seen"]["a"] += 3
    after[0].load(save_part(before[0], tmp_path))
    assert after[0].values["seen"].most_common(1) == [("a", 4)]
    for scheduler in after[1:]:
        assert type(scheduler.milestones) is Counter
    after[1].step(2)
    assert after[1].get_last_lr() == pytest.approx([0.01])


def test_moments_have_the_order_in_memory_of_their_parameters(tmp_path: Path) -> None:
    """A fused optimizer reads parameters and moments side by side: the next step is the same, bit by bit."""

    def trainer(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Conv2d(3, 4, 3).to(DEVICE, memory_format=torch.channels_last)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)

    inputs = torch.randn(2, 3, 8, 8).to(DEVICE)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(inputs).square().sum().backward()
        optimizer.step()

    before, after = trainer(1), trainer(2)
    step(*before)
    directory = save_part(TrainingState(*before), tmp_path)
    TrainingState(*after).load(directory)
    step(*before)
    step(*after)
    assert torch.equal(after[0].weight, before[0].weight)


def test_another_default_device_changes_nothing(tmp_path: Path) -> None:
    """A script may set a device for its new tensors: those of a save and a restore stay in host memory."""
    model = nn.Linear(3, 2)
    state = TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    model(torch.ones(1, 3)).sum().backward()
    wanted = model.weight.detach().clone()
    torch.set_default_device("meta")
    try:
        directory = save_part(state, tmp_path)
        with torch.no_grad():
            model.weight.zero_()
        state.load(directory)
    finally:
        torch.set_default_device(None)
    assert torch.equal(model.weight, wanted)


def test_each_new_tensor_of_the_hooks_names_its_device() -> None:
    """Without one it would be on the default device of the script."""
    makers = {
        "arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn",
        "randperm", "tensor", "zeros",
    }  # fmt: skip
    nodes = [
        (path.name, node)
        for path in Path(swansong.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    ]
    made = {
        (name, node.lineno): "device" in {keyword.arg for keyword in node.keywords}
        for name, node in nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "torch"
        and node.func.attr in makers
    }
    assert made
    assert [place for place, names_device in made.items() if not names_device] == []


def test_copies_share_their_memory_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is one arena, and a second one if two copies exist at a time; a failed write frees its own."""
    made: list[arena.Arena] = []

    class Counted(arena.Arena):
        def __init__(self, pieces: Sequence[arena.TensorPiece]) -> None:
            super().__init__(pieces)
            made.append(self)

    monkeypatch.setattr(arena, "Arena", Counted)
    trainer = Trainer(1)
    for name in "abc":
        trainer.steps(1)
        save_part(trainer.state, tmp_path / name)
    trainer.state.snapshot()
    with pytest.raises(FileNotFoundError):
        trainer.state.snapshot()(tmp_path / "absent")
    assert len(made) == 1
    first, second = trainer.state.snapshot(), trainer.state.snapshot()
    del first, second
    for _ in range(3):
        first, second = trainer.state.snapshot(), trainer.state.snapshot()
        del first, second
    assert len(made) == 2


def test_common_tensors_of_all_ranks_are_written_once(tmp_path: Path) -> None:
    """Without communication the ranks' parts cover every tensor once, large ones in equal parts."""
    whole = {"large": torch.randn(700, 500), "small": torch.randn(3), "number": torch.tensor(4)}
    world_size, sizes = 3, []
    for rank in range(world_size):
        collector = Collector(
            "model", Ranks(rank, world_size=world_size), is_common=lambda _key, _tensor: True
        )
        nodes = {key: collector.encode(value, key) for key, value in whole.items()}
        own = tmp_path / f"rank-{rank:05d}"
        own.mkdir()
        arena = Arena(collector.pieces)
        arena.fill(collector.pieces)
        files = {
            name: {"group": "model", "checksums": checksums}
            for name, checksums in arena.write(own).items()
        }
        index = {
            "format": FORMAT,
            "rank": rank,
            "world_size": world_size,
            "objects": {"model": nodes},
            "tensors": {"model": collector.entries},
            "files": files,
        }
        (own / INDEX).write_bytes(encode_index(index))
        sizes.append(sum(path.stat().st_size for path in own.glob("*.safetensors")))
    found = load_weights(tmp_path)
    assert all(torch.equal(found[key], whole[key]) for key in whole)
    assert max(sizes) - min(sizes) < 4096
    (tmp_path / "rank-00001" / "model-00000.safetensors").unlink()
    with pytest.raises(OSError, match="model-00000"):
        CheckpointSet(tmp_path)


def test_a_sharded_tensor_of_a_larger_job_is_refused() -> None:
    """The guard has found one rank, and the parameter is spread over two: the save fails."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        tensor = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    finally:
        dist.destroy_process_group()
    Collector("model", Ranks(world_size=2)).encode(tensor, "weight")
    with pytest.raises(ValueError, match=r"weight is sharded over 2 ranks, .* found 1"):
        Collector("model", Ranks()).encode(tensor, "weight")


def test_dcp_does_not_save_one_rank_as_the_whole_job(tmp_path: Path) -> None:
    """The process group is destroyed already: the save fails with the fix."""
    state = DcpState({"app": {"weight": torch.ones(2)}})
    state.ranks = Ranks(rank=1, world_size=2, local_world_size=2)
    with pytest.raises(RuntimeError, match="close the guard before destroy_process_group"):
        state.snapshot()(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_dcp_saves_and_loads_in_the_given_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors in host memory need one with gloo, next to the group of the training."""
    groups: list[object] = []
    for name in ("save", "load"):
        monkeypatch.setattr(
            f"swansong.dcp.dcp.{name}", lambda _, **options: groups.append(options["process_group"])
        )
    group = object()
    state = DcpState({}, process_group=group)
    save_part(state, tmp_path)
    state.load(tmp_path)
    assert groups == [group, group]


def test_an_index_of_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    """Each of two ranks took itself for the whole job: neither state is loaded as if it were that of both."""
    trainer = Trainer(1)
    for rank in range(2):
        save_part(trainer.state, tmp_path, rank)
    with pytest.raises(ValueError, match="rank 0 is of a job of 1 ranks, but 2 ranks wrote"):
        trainer.state.load(tmp_path)
    trainer.state.ranks = Ranks(rank=0, world_size=2, local_world_size=2)
    for rank in range(2):
        save_part(trainer.state, tmp_path, rank)
    with pytest.raises(ValueError, match=r"rank-00001/state.json is of rank 0"):
        trainer.state.load(tmp_path)


@pytest.mark.fault("T06")
@pytest.mark.parametrize("damage", ["truncated", "missing", "no index", "no header", "other index"])
def test_a_broken_checkpoint_is_refused(tmp_path: Path, damage: str) -> None:
    """A truncated, missing or wrong part is an error that names it."""
    trainer = Trainer(1)
    trainer.steps(1)
    directory = save_part(trainer.state, tmp_path)
    own = directory / "rank-00000"
    victim = own / "optimizer-00000.safetensors"
    data = victim.read_bytes()
    if damage == "truncated":
        victim.write_bytes(data[:-1])
    elif damage == "missing":
        victim.unlink()
    elif damage == "no index":
        (own / INDEX).unlink()
    elif damage == "no header":
        victim.write_bytes(b"\xff" * 8 + data[8:])
    else:
        (own / INDEX).write_bytes(encode_index({"format": "another"}))
    with pytest.raises((ValueError, OSError), match=r"optimizer|state\.json"):
        Trainer(2).state.load(directory)


@pytest.mark.filterwarnings("error")
def test_a_flipped_bit_is_detected_anywhere(tmp_path: Path) -> None:
    """A flipped bit in each file, at a fixed interval of bytes, is refused or has no effect."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = TrainingState(model, optimizer)
    directory = save_part(state, tmp_path)
    wanted = [value.clone() for value in model.state_dict().values()]
    refused = 0
    for file in sorted((directory / "rank-00000").iterdir()):
        data = file.read_bytes()
        for place in range(0, len(data), max(1, len(data) // 150)):
            flipped = bytearray(data)
            flipped[place] ^= 1 << place % 8
            file.write_bytes(flipped)
            try:
                state.load(directory)
            except (ValueError, KeyError, OSError):
                refused += 1
            else:
                assert data[place : place + 1] == b" ", f"{file.name}, byte {place}"
                assert all(
                    torch.equal(*pair)
                    for pair in zip(wanted, model.state_dict().values(), strict=True)
                )
        file.write_bytes(data)
    state.load(directory)
    assert refused > 400


def test_changes_that_the_checksum_detects() -> None:
    """Every bit, swapped pages or words, changes that cancel each other out, and a lost page; but not the
    address of the tensor."""
    memory = torch.randint(256, (3 * 4096 + 9,), dtype=torch.uint8)
    at_home = checksum(memory)
    for place in (0, 7, 4095, 4096, 3 * 4096 - 1, 3 * 4096, 3 * 4096 + 8):
        for bit in range(8):
            memory[place] ^= 1 << bit
            assert checksum(memory) != at_home
            memory[place] ^= 1 << bit
    exchanged = torch.cat([memory[4096:8192], memory[:4096], memory[8192:]])
    assert checksum(exchanged) != at_home
    words = memory[:4096].view(torch.int64)
    turned = torch.cat([words.flip(0).view(torch.uint8), memory[4096:]])
    assert checksum(turned) != at_home
    one_up_one_down = words.clone()
    one_up_one_down[3] += 1
    one_up_one_down[200] -= 1
    assert checksum(torch.cat([one_up_one_down.view(torch.uint8), memory[4096:]])) != at_home
    lost = memory.clone()
    lost[4096:8192] = 0
    assert checksum(lost) != at_home
    moved = torch.cat([torch.zeros(3, dtype=torch.uint8), memory])[3:]
    assert checksum(moved) == at_home
    assert checksum(torch.empty(0)) == 0


@pytest.mark.parametrize("tail_bytes", [0, 4096, 9])
def test_the_checksum_covers_all_blocks(tail_bytes: int) -> None:
    """A bit of any block, and two blocks that have changed places; also of whole blocks only."""
    memory = torch.randint(256, (2 * BLOCK_BYTES + tail_bytes,), dtype=torch.uint8)
    at_home = checksum(memory)
    for place in (0, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES - 1, memory.nbytes - 1):
        memory[place] ^= 1
        assert checksum(memory) != at_home
        memory[place] ^= 1
    assert checksum(memory) == at_home
    first, second, rest = memory.split([BLOCK_BYTES, BLOCK_BYTES, tail_bytes])
    assert checksum(torch.cat([second, first, rest])) != at_home


def test_another_model_is_refused(tmp_path: Path) -> None:
    """Other shapes, types and names raise an error before any training."""
    directory = save_part(Trainer(1).state, tmp_path)
    with pytest.raises(ValueError, match=r"has the shape .* was saved in the shape"):
        Trainer(1, width=9).state.load(directory)
    other = Trainer(1)
    other.model.double()
    with pytest.raises(ValueError, match="float64"):
        other.state.load(directory)
    with pytest.raises(ValueError, match="entries, such as"):
        TrainingState(nn.Linear(8, 8)).load(directory)


def test_values_that_cannot_be_saved_are_named() -> None:
    """A wrong object is refused by the constructor, a wrong value by the copy."""
    engine = type("DeepSpeedEngine", (nn.Linear,), {"__module__": "deepspeed.runtime.engine"})
    with pytest.raises(TypeError, match="of DeepSpeed"):
        TrainingState(engine(2, 2))
    zero = type("ZeroRedundancyOptimizer", (torch.optim.SGD,), {})
    with pytest.raises(TypeError, match="only all ranks together can save"):
        TrainingState(nn.Linear(1, 1), zero(engine(2, 2).parameters()))
    with pytest.raises(TypeError, match="without state_dict"):
        TrainingState(nn.Linear(1, 1), loader=[1, 2])
    with pytest.raises(ValueError, match="not a valid name of an object"):
        TrainingState(nn.Linear(1, 1), values=nn.Linear(1, 1))
    state = TrainingState(nn.Linear(1, 1))
    state.values["when"] = object()
    with pytest.raises(TypeError, match=r"values\['when'\]"):
        state.snapshot()
    state.values["when"] = np.ma.masked_array([1, 2], mask=[True, False])
    with pytest.raises(TypeError, match=r"values\['when'\] is a numpy.ma.MaskedArray"):
        state.snapshot()


def test_numbers_of_numpy_are_keys(tmp_path: Path) -> None:
    """A table by state and action, with a value of any kind for each key, is restored."""
    table = {(np.int64(n), np.int64(n % 2)): np.full(2, n) for n in range(3)}
    state = TrainingState(nn.Linear(1, 1), table=table)
    state.rehearse()
    directory = save_part(state, tmp_path)
    expected = {key: value.tolist() for key, value in table.items()}
    table.clear()
    state.load(directory)
    assert {key: value.tolist() for key, value in table.items()} == expected
    assert {type(part) for key in table for part in key} == {np.int64}


class Held:
    """Blocks every write until it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.released, self.error = threading.Event(), threading.Event(), None
        write = Arena.write

        def held(arena: Arena, directory: Path) -> Any:
            self.begun.set()
            assert self.released.wait(60)
            if self.error is not None:
                raise self.error
            return write(arena, directory)

        monkeypatch.setattr(Arena, "write", held)


@pytest.mark.fault("T07", "T16")
def test_training_continues_while_the_copy_is_written(
    daemon: FakeDaemon, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request is answered when the set is sealed; steps in the meantime do not change the set."""
    held, trainer = Held(monkeypatch), Trainer(1)
    guard = attach(trainer.state)
    assert guard.restore() == 0
    trainer.steps(1)
    guard.step(1)
    daemon.request()
    step = 1
    while not held.begun.is_set():
        trainer.steps(1)
        step += 1
        guard.step(step)
    for _ in range(5):
        trainer.steps(1)
        step += 1
        guard.step(step)
    assert daemon.all_of(Sealed) == []
    daemon.request("again")  # the second copy
    until(lambda: guard._agreement.current is not None or guard._saver._outstanding == 2)
    while guard._saver._outstanding < 2:
        trainer.steps(1)
        step += 1
        guard.step(step)
    daemon.request("same")  # at the step that is already copied
    until(lambda: guard.request is not None)
    guard.poll()
    assert guard.request is None
    held.released.set()
    sealed = [daemon.wait_for(Sealed, count) for count in (1, 2, 3)]
    assert {each.request_id for each in sealed} == {"r1", "again", "same"}
    assert sealed[1].step == sealed[2].step == step
    wanted = [trainer.reported(guard) for _ in range(8)]
    daemon.restorable = lambda: (daemon.staging / sealed[1].directory, step)
    again = Trainer(7)
    other = attach(again.state)
    assert other.restore() == step
    assert [again.reported(other) for _ in range(8)] == wanted


@pytest.mark.fault("D01")
def test_a_failed_write_is_reported_and_training_continues(
    daemon: FakeDaemon, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full during a background write: the daemon gets Failed, and the next save works.

    Also for a checkpoint that the trainer scheduled itself.
    """
    held, trainer = Held(monkeypatch), Trainer(1)
    held.error = OSError(28, "No space left on device")
    held.released.set()
    guard = attach(trainer.state)
    guard.restore()
    guard.step(1)
    daemon.request()
    until(lambda: guard.request is not None)
    guard.step(2)
    assert "No space left" in daemon.wait_for(Failed).reason
    assert daemon.sealed() == []
    until(lambda: daemon.partial() == [])
    assert guard.save(2)
    failed = daemon.wait_for(Failed, 2)
    assert (failed.request_id, failed.step) == ("", 2)
    assert guard.wait_saved(10)
    held.error = None
    assert guard.save(2)
    assert guard.wait_saved(10)
    assert len(daemon.sealed()) == 1


def test_close_waits_for_the_copy_and_reports_its_cost(
    daemon: FakeDaemon, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """close() returns when all is in staging; the daemon gets the time of the copy and of the whole save."""
    held, trainer = Held(monkeypatch), Trainer(1)
    guard = attach(trainer.state)
    guard.restore()
    guard.step(1)
    assert guard.save(1)
    assert held.begun.wait(60)
    threading.Timer(0.2, held.released.set).start()
    assert guard.wait_saved(10)
    guard.step(2)
    told = until(lambda: [each for each in daemon.all_of(Progress) if each.save_s], what="progress")
    assert 0 < told[-1].snapshot_s < told[-1].save_s
    assert guard.save(2)
    guard.close()
    assert len(daemon.sealed()) == 2


def evaluate() -> None:
    """Draws from all global generators, as a plain loader and a model in training mode may."""
    data = torch.utils.data.TensorDataset(torch.ones(4, 1))
    assert len(list(torch.utils.data.DataLoader(data, 1, shuffle=True))) == 4
    assert torch.rand(1) < 1
    assert np.random.rand() + random.random() < 2


@pytest.mark.parametrize("is_saved_before", [True, False])
def test_random_numbers_of_an_evaluation_do_not_count(
    daemon: FakeDaemon, attach: Attach, tmp_path: Path, *, is_saved_before: bool
) -> None:
    """A run with an evaluation in an epoch continues as one without it, and so does one that resumes from
    before it or from its middle."""
    expected = Trainer(1).steps(6)
    trainer = Trainer(1)
    guard = attach(trainer.state)
    guard.restore()
    losses = [trainer.reported(guard) for _ in range(3)]
    until(lambda: guard._session.staging, what="the welcome")
    if is_saved_before:
        assert guard.save(3)
    with guard.evaluation():
        evaluate()
        with guard.evaluation():
            evaluate()
        evaluate()
        if not is_saved_before:
            assert guard.save(3)
    losses += [trainer.reported(guard) for _ in range(3)]
    assert losses == expected
    guard.close()
    (checkpoint,) = daemon.sealed()
    resumed = Trainer(2)
    resumed.state.load(checkpoint)
    assert resumed.steps(3) == expected[3:]


def test_an_evaluation_that_fails_ends_too(attach: Attach) -> None:
    trainer = Trainer(1)
    guard = attach(trainer.state)
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), guard.evaluation():
        _ = torch.rand(1) / (1 // 0)
    assert torch.equal(torch.get_rng_state(), before)
    evaluate()
    assert not torch.equal(torch.get_rng_state(), before)


def test_a_rollback_can_skip_the_batches_since_the_checkpoint(
    daemon: FakeDaemon, attach: Attach
) -> None:
    """The weights return and the loop over the loader continues; a resume continues the same loop."""

    def parts() -> tuple[nn.Linear, ResumableLoader, TrainingState]:
        model = nn.Linear(1, 1)
        data = torch.utils.data.TensorDataset(torch.arange(12.0).unsqueeze(1))
        loader = ResumableLoader(torch.utils.data.DataLoader(data, shuffle=True))
        return model, loader, TrainingState(model, loader=loader)

    model, loader, state = parts()
    guard = attach(state)
    guard.restore()
    seen, saved = [], []
    for (batch,) in loader:
        seen.append(batch.item())
        with torch.no_grad():
            model.bias += 1
        guard.step(loss=float("nan") if len(seen) == 6 else 1.0)
        if len(seen) == 4:
            saved.append(model.bias.item())
            assert until(lambda: guard.save(4), what="the welcome")
            assert guard.wait_saved()
            (found,) = daemon.wait_sealed(1)
            daemon.restorable = lambda found=found: (found, 4)
        if not guard.healthy:
            assert guard.rollback(skip_batches=True) == 4
            assert not state.keeps_loaders, "a later load restores them"
            assert [model.bias.item()] == saved
        if len(seen) == 8:
            assert guard.save(6)
            assert guard.wait_saved()
    assert sorted(seen) == list(range(12))
    guard.close()
    (after,) = [path for path in daemon.sealed() if "006." in path.name]
    _, resumed, state = parts()
    state.load(after)
    assert [batch.item() for (batch,) in resumed] == seen[8:]


# Two ranks of FSDP: read what one process wrote, and write what one process will read.
RANKS = """
import os, sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from swansong._ranks.agreement import Ranks
from swansong.torch import TrainingState, seed_all

root = Path(sys.argv[1])
torch.set_num_threads(1)
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=rank, world_size=2)
seed_all(9)
model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3), nn.Linear(3, 1))
mesh = init_device_mesh("cpu", (2,))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
state = TrainingState(model, optimizer)
state.ranks = Ranks(rank=rank, world_size=2, local_world_size=2)
if rank == 1:  # all its files arrive early, the index last
    early = state.arrivals()
    assert early.reads == {1}
    early.read_all()  # one rank saved it
    for path in sorted((root / "one").glob("*/*")):
        early.take(str(path.relative_to(root / "one")), os.open(path, os.O_RDONLY))
state.load(root / "one")
for name, value in model.state_dict().items():
    wanted = torch.load(root / "one.pt", weights_only=True)[name]
    assert torch.equal(value.full_tensor(), wanted), name
model(torch.ones(2, 7)).sum().backward()
optimizer.step()
write = state.snapshot()
own = root / "two" / f"rank-{rank:05d}"
own.mkdir(parents=True)
write(own)
full = {name: value.full_tensor() for name, value in model.state_dict().items()}
moments = [state["exp_avg"].full_tensor() for state in optimizer.state.values()]
if rank == 0:
    torch.save([full, moments], root / "two.pt")
dist.barrier()
os._exit(0)  # gloo's threads sometimes abort a process that exits normally
"""


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_another_number_of_ranks(tmp_path: Path, warm_python: str) -> None:
    """Two ranks of FSDP resume the checkpoint of one process, and one process theirs; nothing is gathered."""
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3), nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 7)).sum().backward()
    optimizer.step()
    save_part(TrainingState(model, optimizer), tmp_path / "one")
    torch.save(model.state_dict(), tmp_path / "one.pt")
    run = functools.partial(output_of, "-c", RANKS, tmp_path, python=warm_python)
    in_threads(2, lambda rank: run(RANK=str(rank)))
    full, moments = torch.load(tmp_path / "two.pt", weights_only=True)
    for parameter in model.parameters():
        parameter.data.zero_()
    state = TrainingState(model, optimizer)
    state.load(tmp_path / "two")
    assert all(torch.equal(value, full[name]) for name, value in model.state_dict().items())
    got = [values["exp_avg"] for values in optimizer.state.values()]
    assert all(torch.equal(one, other) for one, other in zip(got, moments, strict=True))
    largest = max(path.stat().st_size for path in (tmp_path / "two").rglob("model-*.safetensors"))
    whole = sum(value.nbytes for value in full.values())
    assert largest < 0.75 * whole + 1024


def test_state_that_differs_between_ranks_needs_resize(
    daemon: FakeDaemon,
    attach: Attach,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two ranks refuse the loader state of one rank, unless ``resize`` converts it.

    This rank does not compare its batches with the checksum of the other one.
    """
    before = Trainer(1)
    before.steps(3)
    guard = attach(before.state)
    guard.restore()
    guard.step(3)
    assert guard.save(3)
    assert guard.wait_saved(10)
    daemon.restorable = lambda: (daemon.sealed()[0], 3)
    set_rank(monkeypatch, 1)
    with pytest.raises(
        RestoreError, match=r"it is of 1 ranks and this job has 2.* loader and noise and numpy"
    ):
        attach(Trainer(2).state).restore()
    asked: list[Any] = []

    def resize(name: str, states: list[Any]) -> Any:
        asked.append((name, len(states)))
        return states[0]

    after = Trainer(2)
    after.state._resize = resize
    assert attach(after.state).restore() == 3
    assert asked == [("loader", 1), ("noise", 1), ("numpy", 1)]
    monkeypatch.setattr(loader, "_checksum", lambda *_: 1)
    next(iter(after.loader))
    assert "other contents" not in caplog.text


def test_a_wrapped_loader_has_the_attributes_of_the_loader() -> None:
    """Scripts print ``len(loader.dataset)``; an unknown attribute is an error, also in a copy."""
    data = torch.utils.data.TensorDataset(torch.zeros(24, 1))
    loader = ResumableLoader(torch.utils.data.DataLoader(data, 4))
    assert (len(loader.dataset), loader.batch_size, len(loader)) == (24, 4, 6)
    assert copy.copy(loader).dataset is data
    with pytest.raises(AttributeError, match="nonsense"):
        loader.nonsense  # noqa: B018


def test_the_health_of_a_checkpoint_has_the_finite_numbers() -> None:
    """Others are left out.  A loss with its graph causes no warning, which may be an error, as here."""
    odd = {"accuracy": 0.5, "norm": float("inf"), "name": "x"}
    assert health_of(float("nan"), odd) == {"loss_is_finite": 0.0, "accuracy": 0.5}
    weight = torch.ones(1, requires_grad=True)
    assert health_of(weight.sum() * 2, {"norm": weight * 3}) == {
        "loss": 2.0,
        "loss_is_finite": 1.0,
        "norm": 3.0,
    }


ONE_PROCESS = """
import sys, types
from pathlib import Path
import torch
from torch import nn
from swansong.torch import TrainingState

slow = {"torch.distributed.checkpoint", "torch.distributed.tensor", "torch._dynamo", "torch.distributed.fsdp"}
after_import = slow & sys.modules.keys()
# An optimizer itself imports the compiler, for seconds.
slow.remove("torch._dynamo")
compiler = sys.modules["torch._dynamo"] = torch._dynamo = types.ModuleType("torch._dynamo")
compiler.disable = lambda function, *_, **__: function
compiler.graph_break = lambda: None
model = nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
state = TrainingState(model, optimizer)
state.rehearse()
state.observe_step()
own = Path(sys.argv[1], "rank-00000")
own.mkdir()
state.snapshot()(own)
state.load(own.parent)
print(sorted(after_import | (slow & sys.modules.keys())))
"""


def test_one_process_imports_nothing_slow(tmp_path: Path) -> None:
    """Neither the import nor a save and a restore imports DTensors, DCP or the compiler."""
    assert output_of("-c", ONE_PROCESS, tmp_path).strip() == "[]"


def test_the_log_of_a_restore_has_its_progress_and_the_time_of_each_part(
    daemon: FakeDaemon,
    attach: Attach,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The last line has the total, the parts and the age of the process."""
    monkeypatch.setattr("swansong._torch.checkpoint_set.REPORT_EVERY_S", 0.0)
    before = Trainer(1)
    before.steps(1)
    guard = attach(before.state)
    guard.restore()
    guard.step(1)
    assert guard.save(1)
    assert guard.wait_saved(10)
    daemon.restorable = lambda: (daemon.sealed()[0], 1)
    with caplog.at_level("INFO"):
        assert attach(Trainer(2).state).restore() == 1
    assert "restored step 1" in [r for r in caplog.records if r.levelname == "WARNING"][-1].message
    progress = [each for each in caplog.messages if each.startswith("restoring: read")]
    assert progress
    (line,) = [each for each in caplog.messages if each.startswith("restored step 1 (")]
    assert re.search(
        r"\(0\.\d MB\) from .* in \d+\.\d s: fetch \d+\.\d s, read and verify \d+\.\d s,"
        r" load \d+\.\d s; this process started \d+\.\d s ago$",
        line,
    )


@pytest.mark.parametrize(
    "name", ["../model-00000.safetensors", "model", "a/b-00000.safetensors", ""]
)
def test_a_file_name_of_another_form_is_refused(tmp_path: Path, name: str) -> None:
    """An index cannot make a restore open a file elsewhere."""
    index = {"format": FORMAT, "rank": 0, "world_size": 1, "objects": {}, "tensors": {}}
    own = tmp_path / "rank-00000"
    own.mkdir()
    (own / INDEX).write_bytes(encode_index({**index, "files": {name: {"checksums": {}}}}))
    with pytest.raises(ValueError, match="names the file"):
        CheckpointSet(tmp_path)


class AcceptsAnyName:
    """As ignite's metrics: each unknown attribute is a function."""

    def __init__(self) -> None:
        self.value = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_, **__: name

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


@pytest.mark.parametrize("kind", ["TrainingState", "mapping"])
def test_an_object_that_accepts_any_name_is_no_generator(tmp_path: Path, kind: str) -> None:
    """``hasattr(item, "bit_generator")`` is true for this object, and it is saved by its ``state_dict``."""

    def attach(objects: dict[str, Any]) -> swansong.Guard:
        state = TrainingState(None, **objects) if kind == "TrainingState" else objects
        return swansong.attach(state, socket="/nonexistent/swansong.sock")

    item, generator = AcceptsAnyName(), np.random.default_rng(1)
    item.value = 3
    directory = tmp_path / "rank-00000"
    directory.mkdir()
    with attach({"average": item, "generator": generator}) as guard:
        guard._state.snapshot()(directory)
        drawn = generator.integers(1000, size=4).tolist()
        item.value = 0
        guard._state.load(tmp_path if guard._state.reads_whole_set else directory)
    assert item.value == 3
    assert generator.integers(1000, size=4).tolist() == drawn
