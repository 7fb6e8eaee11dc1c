# SPDX-License-Identifier: Apache-2.0
"""A resumed loop sees the batches, indices and generators of the uninterrupted one."""

from __future__ import annotations

import copy
import functools
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from swansong.rank_files import decode_tree, encode_tree, set_generators, take_generators
from swansong.torch import ResumableLoader, TrainingState, seed_all
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from testkit.training_parts import save_part

EPOCHS, SAMPLES = 3, 10


class Augmented(Dataset[Any]):
    """Draws from every global generator, and from one of its own."""

    def __init__(self, seed: int = 5) -> None:
        self.own = {"noise": np.random.default_rng(seed)}

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, place: int) -> Any:
        drawn = [
            torch.rand(1).item(),
            random.random(),
            np.random.rand(),
            self.own["noise"].random(),
        ]
        return torch.tensor([float(place), *drawn], dtype=torch.float64)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        order = list(range(SAMPLES))
        random.shuffle(order)
        yield from (torch.tensor([place + torch.rand(1).item()]) for place in order)


class Shuffled:
    """A sampler that draws from the generators of Python."""

    def __init__(self, seed: int) -> None:
        self.own = random.Random(seed)

    def __iter__(self) -> Iterator[int]:
        order = list(range(SAMPLES))
        random.shuffle(order)
        yield from (
            place if self.own.random() < 0.5 else self.own.randrange(SAMPLES) for place in order
        )

    def __len__(self) -> int:
        return SAMPLES


class OneAhead:
    """Fetches one batch ahead, as the loaders of accelerate and timm do."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        held = next(batches)
        for batch in batches:
            yield held
            held = batch
        yield held

    def __len__(self) -> int:
        return len(self.loader)


DATA = TensorDataset(torch.arange(float(SAMPLES)))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


KINDS: dict[str, Callable[[int], Any]] = {
    "in order": lambda seed: DataLoader(DATA, 3),
    "shuffled": lambda seed: DataLoader(DATA, 3, shuffle=True, drop_last=True),
    "own generator": lambda seed: DataLoader(DATA, 3, shuffle=True, generator=generator(seed)),
    "generator of the sampler": lambda seed: DataLoader(
        DATA, 3, sampler=RandomSampler(DATA, replacement=True, generator=generator(seed))
    ),
    "weighted": lambda seed: DataLoader(DATA, 3, sampler=WeightedRandomSampler([1.0] * 10, 9)),
    "python's generators": lambda seed: DataLoader(DATA, 3, sampler=Shuffled(seed)),
    "batch sampler": lambda seed: DataLoader(
        DATA, batch_sampler=BatchSampler(DistributedSampler(DATA, 2, 1), 2, drop_last=False)
    ),
    "no batches": lambda seed: DataLoader(Subset(DATA, [1, 5, 7]), batch_size=None, shuffle=True),
    "augmented": lambda seed: DataLoader(Augmented(seed), 3, shuffle=True),
    "stream": lambda seed: DataLoader(Stream(), 3),
    "one ahead": lambda seed: OneAhead(DataLoader(Augmented(seed), 3, shuffle=True)),
    "workers": lambda seed: DataLoader(Augmented(), 3, shuffle=True, num_workers=2),
    "persistent workers": lambda seed: DataLoader(
        Augmented(), 3, shuffle=True, num_workers=2, persistent_workers=True, prefetch_factor=4
    ),
}
WORKERS = [name for name in KINDS if "workers" in name]


class Preempted(Exception):
    pass


class Run:
    """A training script: epochs of steps, each with a validation at its end, that draw random numbers.

    Args:
        kind: of the loader.
        seed: of the generators of the process.
        stop_at: number of the poll at which the run is preempted.
    """

    def __init__(self, kind: str, seed: int = 0, stop_at: int = -1, **options: Any) -> None:
        seed_all(seed)
        self.loader = ResumableLoader(KINDS[kind](seed), **options)
        self.validation = DataLoader(DATA, 5)
        self.trace: list[Any] = []
        self.polls: list[int] = []
        """Length of the trace at each poll, or at the start of the validation that polls."""
        self.stop_at = stop_at
        self.saved: Any = None

    def poll(self, mark: int) -> None:
        if len(self.polls) == self.stop_at:
            state = {"loader": self.loader.state_dict(), "generators": take_generators()}
            tensors: dict[str, Any] = {}
            self.saved = encode_tree(state, "", lambda value, key: put(tensors, value, key))
            self.saved = decode_tree(copy.deepcopy(self.saved), lambda _, key: tensors[key])
            raise Preempted
        self.polls.append(mark)

    def restore(self, saved: Any) -> None:
        self.loader.load_state_dict(saved["loader"])
        set_generators(saved["generators"])
        list(
            self.validation
        )  # a script may draw random numbers at its start, such as for a look at the data

    def train(self) -> list[Any]:
        for epoch in range(self.loader.epoch, EPOCHS):
            for number, batch in self.loader.enumerate():
                values = batch[0] if isinstance(batch, list | tuple) else batch
                drawn = (torch.rand(1).item(), random.random(), np.random.rand())
                self.trace.append((epoch, number, values.tolist(), drawn))
                self.poll(len(self.trace))
            begin = len(self.trace)
            for (_,) in self.validation:
                self.trace.append((epoch, torch.rand(1).item(), np.random.rand()))
                self.poll(begin)
            self.trace.append(f"end of {epoch}")
        return self.trace


def put(tensors: dict[str, Any], value: Any, key: str) -> Any:
    tensors[key] = copy.deepcopy(value)
    return {"tensor": key}


def resumed(kind: str, stop_at: int, **options: Any) -> tuple[list[Any], Run]:
    """Preempt a run at a poll; return what follows in another process, and the run that follows."""
    first = Run(kind, stop_at=stop_at, **options)
    with pytest.raises(Preempted):
        first.train()
    after = Run(kind, seed=99, **options)
    after.restore(first.saved)
    return after.train(), after


@pytest.mark.parametrize("kind", [name for name in KINDS if name not in WORKERS])
def test_a_run_resumes_at_each_poll(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """In the loop, in the validation and between: the same batches, indices and random numbers follow."""
    whole = Run(kind)
    wanted = whole.train()
    for stop_at, mark in enumerate(whole.polls):
        trace, _ = resumed(kind, stop_at)
        assert trace == wanted[mark:], stop_at
    assert not [message for message in caplog.messages if "other contents" in message]


@pytest.mark.parametrize("kind", WORKERS)
def test_a_run_with_workers_resumes(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """In the second epoch, for which persistent workers would keep their generators, and its validation."""
    whole = Run(kind)
    wanted = whole.train()
    for stop_at in (7, 11):
        trace, _ = resumed(kind, stop_at)
        assert trace == wanted[whole.polls[stop_at] :]
    assert not [message for message in caplog.messages if "other contents" in message]


class Noise:
    def __init__(self, own: random.Random) -> None:
        self.own = own

    def add(self, batch: Any) -> Any:
        return batch, self.own.random()


@pytest.mark.parametrize(
    "make",
    [
        lambda own: functools.partial(lambda own, batch: (batch, own.random()), own),
        lambda own: Noise(own).add,
        lambda own: lambda batch: (batch, own.random()),
    ],
    ids=["partial", "method", "closure"],
)
def test_a_generator_of_a_function_resumes(make: Callable[[random.Random], Any]) -> None:
    """The loader may keep it in an argument, in the object of a method, or in a variable of a closure."""
    first, after = (
        ResumableLoader(DataLoader(DATA, 2, collate_fn=make(random.Random(seed))))
        for seed in (1, 2)
    )
    batches = iter(first)
    for _ in range(2):
        next(batches)
    after.load_state_dict(first.state_dict())
    assert next(iter(after))[1] == next(batches)[1]


def test_an_index_that_restarts_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    """Plain ``enumerate`` counts from 0 after a resume.  A script that reads the index sees no message."""
    first = Run("shuffled", stop_at=1)
    with pytest.raises(Preempted):
        first.train()
    plain, counted = Run("shuffled"), Run("shuffled")
    counted.restore(first.saved)
    assert [number for number, _ in enumerate(counted.loader, counted.loader.batches)] == [2]
    assert not caplog.messages
    plain.restore(first.saved)
    assert [number for number, _ in enumerate(plain.loader)] == [0]
    assert [number for number, _ in enumerate(plain.loader)] == [0, 1, 2]
    (message,) = caplog.messages
    assert "loader.enumerate()" in message


def test_a_script_without_an_index_sees_no_message(caplog: pytest.LogCaptureFixture) -> None:
    """No function that is being called uses ``enumerate``."""
    first, plain = Run("shuffled", stop_at=1), Run("shuffled")
    with pytest.raises(Preempted):
        first.train()
    plain.restore(first.saved)
    batches: list[Any] = []
    # In a thread, because pytest itself uses it.
    thread = threading.Thread(target=lambda: batches.extend(plain.loader))
    thread.start()
    thread.join()
    assert len(batches) == 1
    assert not caplog.messages


def test_the_end_of_an_epoch_is_repeated_unless_the_script_ends_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The state after the loop resumes there; after ``end_epoch()`` it resumes in the next epoch."""
    loader = ResumableLoader(DataLoader(DATA, 5))
    assert len(list(loader)) == 2
    assert (loader.epoch, loader.batches) == (1, 0)
    repeated, over = ResumableLoader(DataLoader(DATA, 5)), ResumableLoader(DataLoader(DATA, 5))
    repeated.load_state_dict(loader.state_dict())
    assert repeated.epoch == 0
    assert not list(repeated)
    assert "end of the epoch is repeated" in caplog.text
    assert (repeated.epoch, len(list(repeated)), repeated.epoch) == (1, 2, 2)
    loader.end_epoch()
    over.load_state_dict(loader.state_dict())
    assert (over.epoch, len(list(over))) == (1, 2)


@pytest.mark.parametrize("has_steps", [True, False])
def test_a_step_after_the_loop_ends_the_epoch_of_a_script_with_one_step_an_epoch(
    has_steps: bool,
) -> None:
    """A script that also reports steps in the loop has work left at the end of its epoch."""
    loader = ResumableLoader(DataLoader(DATA, 5))
    steps = 0
    loader.completed_steps = lambda: steps
    for _ in loader:
        steps += has_steps
    assert loader.state_dict()["epoch"] == 0
    steps += 1
    after = ResumableLoader(DataLoader(DATA, 5))
    after.load_state_dict(loader.state_dict())
    assert (after.epoch, len(list(after))) == ((0, 0) if has_steps else (1, 2))


def test_an_epoch_that_has_not_begun_sets_no_global_generator() -> None:
    """Lightning ends an epoch before its validation, which draws random numbers after the resume."""
    first, after = (
        ResumableLoader(DataLoader(DATA, 5, generator=generator(seed))) for seed in (1, 2)
    )
    list(first)
    first.end_epoch()
    after.load_state_dict(first.state_dict())
    seed_all(5)
    wanted = torch.get_rng_state()
    next(iter(after))
    next(iter(first))
    assert torch.equal(torch.get_rng_state(), wanted)
    assert torch.equal(after.generator.get_state(), first.generator.get_state())


def test_two_loops_at_the_same_time_are_refused() -> None:
    """Their positions differ.  Two loaders in one ``zip`` are not refused."""
    loader, other = (ResumableLoader(DataLoader(DATA, 5)) for _ in range(2))
    assert len(list(zip(loader, other, strict=True))) == 2
    with pytest.raises(RuntimeError, match=r"two loops.*loader\.loader"):
        list(zip(loader, loader, strict=True))


def test_another_loop_may_begin_after_the_last_batch() -> None:
    """ignite evaluates there, and asks its own loop for one more batch only in the next epoch."""
    loader = ResumableLoader(DataLoader(DATA, 5))
    running = iter(loader)
    batches = list(itertools.islice(running, len(loader)))
    assert len(list(loader)) == len(batches)
    assert list(running) == []
    assert len(list(loader)) == len(batches)


@pytest.mark.parametrize("stop_at", range(5))
def test_two_loaders_of_different_length(stop_at: int) -> None:
    """The longer one is abandoned when the shorter one ends, also in a resumed epoch."""

    def loaders(seed: int) -> list[ResumableLoader]:
        seed_all(seed)
        return [ResumableLoader(DataLoader(DATA, size, shuffle=True)) for size in (5, 2)]

    def pairs(short: ResumableLoader, long: ResumableLoader) -> Iterator[Any]:
        while short.epoch < 2:
            yield from zip(
                (b[0].tolist() for b in short), (b[0].tolist() for b in long), strict=False
            )
            yield None

    first = loaders(0)
    running = pairs(*first)
    for _ in range(stop_at):
        next(running)
    states = copy.deepcopy([loader.state_dict() for loader in first])
    generators = take_generators()
    wanted = list(running)
    after = loaders(99)
    for loader, state in zip(after, states, strict=True):
        loader.load_state_dict(state)
    set_generators(generators)
    assert list(pairs(*after)) == (wanted if stop_at != 3 else [None, *wanted])


def test_an_iterator_that_is_not_used_is_not_an_epoch() -> None:
    """Lightning creates two iterators before it asks for the first batch of a resumed epoch."""
    first = Run("shuffled", stop_at=4)
    with pytest.raises(Preempted):
        first.train()
    after = Run("shuffled")
    after.restore(first.saved)
    iter(after.loader)
    assert (after.loader.epoch, after.loader.batches, len(list(after.loader))) == (0, 3, 0)
    iter(after.loader)
    assert (after.loader.epoch, after.loader.batches, len(list(after.loader))) == (1, 0, 3)


def test_epochs_of_fewer_batches(caplog: pytest.LogCaptureFixture) -> None:
    """``batches_per_epoch`` ends an epoch; a ``break`` does not, so a resume reports it."""
    kind = {"batches_per_epoch": 2}
    whole = Run("shuffled", **kind)
    wanted = whole.train()
    assert len(whole.loader) == 2
    for stop_at, mark in enumerate(whole.polls):
        trace, _ = resumed("shuffled", stop_at, **kind)
        assert trace == wanted[mark:]
    assert "was left" not in caplog.text
    first, after = Run("shuffled"), Run("shuffled", seed=99)
    for _ in first.loader:
        break
    assert (first.loader.epoch, first.loader.batches) == (1, 0)
    after.loader.load_state_dict(first.loader.state_dict())
    assert (after.loader.epoch, len(list(after.loader))) == (0, 2)
    assert "the loop over epoch 0 was left after batch 1" in caplog.text


@pytest.mark.parametrize("kind", ["shuffled", "augmented", "workers"])
def test_other_data_are_reported(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """The last batch before the checkpoint shows that the data set differs in the resumed run."""
    first, after = Run(kind), Run(kind, seed=99)
    batches = iter(first.loader)
    batch = next(batches)
    after.restore({"loader": first.loader.state_dict(), "generators": take_generators()})
    tensor = batch[0] if isinstance(batch, list) else batch
    after.loader.load_state_dict({**first.loader.state_dict(), "checksum": 1})
    next(iter(after.loader))
    assert "batch 1 of epoch 0 has other contents" in caplog.text
    tensor += 1  # a script may change its batch: then nothing is compared
    assert first.loader.state_dict()["checksum"] is None


class Reshuffled:
    """Shuffles the order of the epoch before, as ``MPerClassSampler`` of pytorch-metric-learning does."""

    def __init__(self) -> None:
        self.order = list(range(SAMPLES))

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.order)
        return iter(self.order)

    def __len__(self) -> int:
        return SAMPLES


@pytest.mark.parametrize("is_set_back", [True, False])
def test_a_sampler_that_shuffles_its_own_list_is_named_or_set_back(
    caplog: pytest.LogCaptureFixture, *, is_set_back: bool
) -> None:
    """In a later epoch a resume lacks the shuffles before it, unless the script sorts the list first."""
    seed_all(0)
    samplers = [Reshuffled(), Reshuffled()]
    first, after = (ResumableLoader(DataLoader(DATA, 3, sampler=each)) for each in samplers)
    list(first)
    if is_set_back:
        samplers[0].order.sort()
    batches = iter(first)
    next(batches)
    after.load_state_dict(first.state_dict())
    wanted = next(batches)[0].tolist()
    assert (next(iter(after))[0].tolist() == wanted) == is_set_back
    assert ("an earlier epoch has changed" in caplog.text) != is_set_back


class Counted(Dataset[Any]):
    """Counts the loaded samples, in all processes."""

    def __init__(self, *, depends_on_order: bool = False) -> None:
        self.count = torch.zeros((), dtype=torch.int64).share_memory_()
        self.depends_on_order = depends_on_order

    def __len__(self) -> int:
        return 80

    def __getitem__(self, place: int) -> Any:
        self.count += 1
        return torch.tensor([place, int(self.count) if self.depends_on_order else 0])


def loaded_samples(data: Counted, after: Counted, **options: Any) -> tuple[int, Any, Any]:
    """Resume after 60 samples; return the number that was loaded for it, and the next batch in both runs."""
    is_fixed = options.pop("fixed_samples", None)
    loaders = [
        ResumableLoader(DataLoader(each, 4, shuffle=True, **options), fixed_samples=is_fixed)
        for each in (data, after)
    ]
    first, second = loaders
    batches = iter(first)
    for _ in range(15):
        next(batches)
    second.load_state_dict(first.state_dict())
    batch = next(iter(second)).tolist()
    return int(after.count), next(batches).tolist(), batch


@pytest.mark.parametrize(
    ("options", "is_skipped"),
    [({}, True), ({"num_workers": 1}, False), ({"num_workers": 1, "fixed_samples": True}, True)],
)
def test_skipped_samples_are_not_loaded(options: dict[str, Any], is_skipped: bool) -> None:
    """Only those that the comparison needs, if the generators of workers cannot differ after it."""
    count, wanted, batch = loaded_samples(Counted(), Counted(), **options)
    assert batch == wanted
    assert (count < 30) == is_skipped


@pytest.mark.parametrize("fixed_samples", [None, True, False])
def test_samples_that_depend_on_earlier_ones(
    fixed_samples: bool | None, caplog: pytest.LogCaptureFixture
) -> None:
    """If they are not loaded again, the last batch shows it, and a message names the option."""
    data = [Counted(depends_on_order=True) for _ in range(2)]
    _, wanted, batch = loaded_samples(*data, fixed_samples=fixed_samples)
    is_reported = any("fixed_samples=False is needed" in message for message in caplog.messages)
    assert (batch == wanted, is_reported) == (
        (True, False) if fixed_samples is False else (False, True)
    )


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"num_workers": 1, "in_order": False}, "in_order"), ({}, "one iterator for all epochs")],
)
def test_a_loader_that_no_resume_can_repeat_is_refused(
    options: dict[str, Any], reason: str
) -> None:
    """At construction, with the reason."""
    loader = DataLoader(DATA, 5, **options)
    if not options:
        loader.iterator = iter(loader)
    with pytest.raises(ValueError, match=reason):
        ResumableLoader(loader)


class Epochs:
    """A script with a scheduler by epoch, whose order of scheduler, validation and step is an argument.

    Args:
        work: the work at the end of each epoch: letters for scheduler, validation, best metric, a step, a
            step of a fused optimizer, a look at the training data.
        stop_at: number of the snapshot at which it is preempted.
    """

    def __init__(
        self, work: str, seed: int = 0, stop_at: int = -1, directory: Path | None = None
    ) -> None:
        seed_all(seed)
        self.work, self.stop_at, self.directory = work, stop_at, directory
        self.model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Dropout(0.5))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.loader = ResumableLoader(DataLoader(DATA, 4, shuffle=True))
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        self.state = TrainingState(
            self.model,
            self.optimizer,
            scheduler=self.scheduler,
            loader=self.loader,
            average=self.average,
        )
        self.state.values["best"] = 0.0
        self.steps = 0
        self.state.count_steps_with(lambda: self.steps)
        self.trace: list[Any] = []
        self.snapshots = 0

    def snapshot(self) -> None:
        if self.directory is not None and self.snapshots == self.stop_at:
            save_part(self.state, self.directory)
            raise Preempted
        self.snapshots += 1

    def train(self, epochs: int = EPOCHS) -> list[Any]:
        for epoch in range(self.loader.epoch, epochs):
            for (batch,) in self.loader:
                loss = self.model(batch[:, None]).square().mean()
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                if "g" not in self.work:
                    self.steps += 1
                self.snapshot()
            for part in self.work:
                if part == "s":
                    self.scheduler.step()
                elif part == "b":
                    self.state.values["best"] += self.optimizer.param_groups[0]["lr"]
                elif part == "g":
                    self.steps = epoch + 1
                elif part == "a":
                    self.average.update_parameters(self.model)
                elif part == "f":
                    self.optimizer.param_groups[0]["fused"] = True
                    self.optimizer.step()
                elif part == "e":
                    self.loader.end_epoch()
                elif part == "l":
                    assert len(list(self.loader)) > 1
                else:
                    torch.rand(1)  # a validation that draws random numbers
                self.snapshot()
            rate = self.optimizer.param_groups[0]["lr"]
            weights = [each.tolist() for each in self.model.parameters()]
            best = self.state.values["best"]
            count = int(self.average.n_averaged)
            generator = torch.get_rng_state().tolist()
            self.trace.append((epoch, rate, best, count, generator, weights))
        return self.trace


@pytest.mark.filterwarnings(
    "ignore:Detected call of `lr_scheduler.step"
)  # torch does not know the resume
@pytest.mark.parametrize("work", ["vbs", "svb", "vsvb", "vbsg", "ae"])
def test_the_work_at_the_end_of_an_epoch_has_its_effect_once(work: str, tmp_path: Path) -> None:
    """In any order, and at each point of it: the scheduler, the best metric and all weights are the same.

    The states are those from before that work, unless a step or ``end_epoch()`` ends the epoch.
    """
    whole = Epochs(work)
    wanted = whole.train()
    for stop_at in range(whole.snapshots):
        if work == "ae" and stop_at % 5 == 3:
            continue  # between the change of a model and end_epoch(): see the next test
        directory = tmp_path / str(stop_at)
        first = Epochs(work, stop_at=stop_at, directory=directory)
        with pytest.raises(Preempted):
            first.train()
        after = Epochs(work, seed=99)
        after.state.load(directory)
        assert after.train() == wanted[len(wanted) - len(after.trace) :], stop_at
        assert after.trace or stop_at == whole.snapshots - 1


@pytest.mark.parametrize("work", ["svbl", "lsb", "vls"])
def test_a_finished_run_with_a_look_at_its_data_trains_all_further_epochs(
    work: str, tmp_path: Path
) -> None:
    """Such as ``update_bn`` or the training error: a later start with more epochs loses none of them."""
    wanted = Epochs(work).train()
    first = Epochs(work)
    first.train(EPOCHS - 1)
    first.state.before_end()
    save_part(first.state, tmp_path)
    generators = take_generators()
    after = Epochs(work, seed=99)
    after.state.load(tmp_path)
    set_generators(generators)
    assert after.train() == wanted[EPOCHS - 1 :]


def test_a_loop_that_repeats_the_end_of_its_epoch_has_continued(tmp_path: Path) -> None:
    """A run that finishes there has not missed its loop, as one without an epoch left would have."""
    first = Epochs("v", stop_at=0, directory=tmp_path)
    list(first.loader)
    save_part(first.state, tmp_path)
    after = Epochs("v", seed=99)
    after.state.load(tmp_path)
    assert not after.state.has_continued()
    assert list(after.loader) == []
    assert after.state.has_continued()


class Looking:
    """A script that also loops over its training loader for other purposes than a step.

    Args:
        look: when it does so: at the start, or after each epoch; entirely, or for one batch.
        per_step: number of batches that one step takes; the epoch has five.
    """

    def __init__(self, look: str, per_step: int, seed: int = 0, stop_at: int = -1) -> None:
        seed_all(seed)
        self.loader = ResumableLoader(DataLoader(DATA, 2, shuffle=True))
        self.look, self.per_step, self.stop_at = look, per_step, stop_at
        self.steps = 0
        self.loader.completed_steps = lambda: self.steps
        self.trace: list[Any] = []
        self.saved: Any = None

    def train(self, saved: Any = None) -> list[Any]:
        if saved is not None:
            self.steps = saved["steps"]
            self.loader.load_state_dict(saved["loader"])
            set_generators(saved["generators"])
        if self.look == "count at the start":
            assert len(list(self.loader)) == (
                5 if saved is None else 5 - saved["loader"]["batches"]
            )
        elif self.look == "batch at the start":
            next(iter(self.loader), None)
        while self.loader.epoch < EPOCHS:
            taken: list[Any] = []
            for number, (batch,) in self.loader.enumerate():
                taken.append((self.loader.epoch, number, batch.tolist()))
                if len(taken) == self.per_step:
                    self.trace.append((taken, torch.rand(1).item()))
                    taken = []
                    self._step()
            if self.look == "evaluation":
                assert len(list(self.loader)) == 5
        return self.trace

    def _step(self) -> None:
        self.steps += 1
        if self.steps == self.stop_at:
            loader = copy.deepcopy(self.loader.state_dict())
            self.saved = {"steps": self.steps, "loader": loader, "generators": take_generators()}
            raise Preempted


@pytest.mark.parametrize("per_step", [1, 2, 5])
@pytest.mark.parametrize(
    "look", ["nothing", "count at the start", "batch at the start", "evaluation"]
)
def test_a_loop_without_a_step_is_no_epoch(look: str, per_step: int) -> None:
    """The run takes as many steps as without it, and resumes with the batches that follow each step."""
    whole = Looking(look, per_step)
    wanted = whole.train()
    assert [taken[0][0] for taken, _ in wanted] == sorted([*range(EPOCHS)] * (5 // per_step))
    for stop_at in range(1, whole.steps + 1):
        first = Looking(look, per_step, stop_at=stop_at)
        with pytest.raises(Preempted):
            first.train()
        after = Looking(look, per_step, seed=99)
        assert after.train(first.saved) == wanted[stop_at:], stop_at


def test_a_loop_without_a_step_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    """The message names the call for a loop that is an epoch nevertheless, and that call counts it."""
    run = Looking("nothing", 1)
    for _ in range(3):
        list(run.loader)
    assert run.loader.epoch == 0
    (message,) = caplog.messages
    assert "epoch 0, batches: 5" in message
    assert "loader.end_epoch()" in message
    run.loader.end_epoch()
    assert run.loader.epoch == 1


@pytest.mark.parametrize(("work", "name"), [("a", "average"), ("f", "model")])
def test_a_model_that_changes_at_the_end_of_an_epoch_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, work: str, name: str
) -> None:
    """Its change would be repeated, so a message names the model and the way out."""
    first = Epochs(work, stop_at=3, directory=tmp_path)
    with pytest.raises(Preempted):
        first.train()
    assert f"{name} was changed after the last batch of the epoch" in caplog.text
    assert "loader.end_epoch()" in caplog.text
