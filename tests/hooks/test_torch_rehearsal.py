# SPDX-License-Identifier: Apache-2.0
"""Mistakes that attach() or the first step finds, before a checkpoint matters."""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from swansong._torch.change_counts import count_of
from swansong._torch.order import STEPS_MAX
from swansong.torch import ResumableLoader, TrainingState
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from testkit.training_parts import Attach, save_part


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each for each in caplog.messages if not each.startswith("no swansongd at")]


class Stateful:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        if isinstance(self.state, Exception):
            raise self.state
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class RenamesOnSave(nn.Linear):
    """A module that does not accept the names that it returns."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self._register_state_dict_hook(
            lambda _module, state, prefix, _meta: state.update(renamed=state.pop(prefix + "bias"))
        )


class ForgetsToSet(nn.Linear):
    def get_extra_state(self) -> Any:
        return 1


def of_another() -> dict[str, Any]:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)
    return {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "meta": (lambda: {"model": nn.Linear(1, 1, device="meta")}, "save model.* meta device"),
    "lazy": (lambda: {"model": nn.LazyLinear(1)}, "save model, a LazyLinear.*first batch"),
    "renamed": (lambda: {"model": RenamesOnSave()}, "load model, a RenamesOnSave.*renamed"),
    "extra": (lambda: {"model": ForgetsToSet(1, 1)}, "load model, a ForgetsToSet: .*_extra_state"),
    "value": (lambda: {"netG": Stateful({"when": object()})}, r"save netG.*netG\['when'\].*object"),
    "raises": (
        lambda: {"ema": Stateful(RuntimeError("no"))},
        "save ema, a Stateful: RuntimeError: no",
    ),
    "scheduler": (of_another, "scheduler belongs to an optimizer that is not in the state"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_state_that_cannot_be_restored_is_refused_at_attach(attach: Attach, case: str) -> None:
    """Without a daemon too, the error names the object and the reason."""
    make, words = REFUSED[case]
    with pytest.raises((TypeError, ValueError), match=words):
        attach(TrainingState(**{"model": nn.Linear(1, 1), **make()}))


def test_objects_by_name_are_tried_at_attach(attach: Attach) -> None:
    """The same for a dictionary of objects; functions cannot be tried."""
    with pytest.raises(TypeError, match=r"save agent, a Stateful.*state\['agent'\]\['when'\]"):
        attach({"agent": Stateful({"when": object()})})
    attach(save=lambda _directory: 1 / 0, load=lambda _directory: 1 / 0)


def test_the_rehearsal_changes_nothing_and_copies_nothing(
    attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No memory is allocated for the copy, and parameters, optimizer and generators stay as they are."""
    monkeypatch.setattr("swansong._torch.arena.Arena", None)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    before = {key: value.clone() for key, value in model.state_dict().items()}
    memory = [param.data_ptr() for param in model.parameters()]
    generator = torch.get_rng_state()
    guard = attach(TrainingState(model, optimizer, ema=AveragedModel(model)))
    guard.step(1)
    assert [param.data_ptr() for param in model.parameters()] == memory
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), generator)


def test_state_that_appears_in_the_first_step_is_tried_there(attach: Attach) -> None:
    """An optimizer has its state only after a step; a mistake there raises once, from guard.step()."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    guard = attach(TrainingState(model, optimizer))
    optimizer.state[model.weight]["odd"] = torch.eye(2).to_sparse()
    with pytest.raises(TypeError, match=r"save optimizer, a SGD.*state\.0\['odd'\].*sparse"):
        guard.step(1)
    guard.step(2)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.usefixtures("process_group")
def test_an_optimizer_created_before_sharding_is_refused(attach: Attach) -> None:
    """Its parameters are not those that the sharded model trains."""
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fully_shard(model)
    with pytest.raises(ValueError, match=r"create the optimizer after fully_shard\(\)"):
        attach(TrainingState(model, optimizer))
    later = torch.optim.SGD(model.parameters(), 0.1)
    attach(TrainingState(model, later))


def test_trained_parameters_outside_of_the_state_cause_a_warning(
    attach: Attach, caplog: pytest.LogCaptureFixture
) -> None:
    """Their values would be lost in a resume."""
    model, head = nn.Linear(2, 2), nn.Linear(2, 3)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], 0.1)
    attach(TrainingState(model, optimizer, head=head))
    assert not warnings_of(caplog)
    attach(TrainingState(model, optimizer))
    (message,) = warnings_of(caplog)
    assert "optimizer trains 2 parameters" in message
    assert "(3, 2)" in message


def test_names_of_objects() -> None:
    """Names that scripts use are allowed; names that cannot become file names are refused with the rule."""
    for name in ("netD", "Critic", "_ema", "D2"):
        TrainingState(nn.Linear(1, 1), **{name: nn.Linear(1, 1)})
    for name, words in {
        "2d": "letters, digits and underscores",
        "a-b": "letters, digits and underscores",
        "../x": "letters, digits and underscores",
        "Others": "reserved",
        "Model": "differ only in case",
    }.items():
        with pytest.raises(ValueError, match=words):
            TrainingState(nn.Linear(1, 1), **{name: nn.Linear(1, 1)})
    model = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="'model' and 'ema' are the same object"):
        TrainingState(model, ema=nn.DataParallel(model))


class Container(torch.optim.Optimizer):
    """An optimizer whose state has names instead of numbers, as torchtitan's ``OptimizersContainer``."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.inner = torch.optim.AdamW(model.parameters(), lr=0.1)
        super().__init__(list(model.parameters()), {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            get_optimizer_state_dict,
        )

        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        return dict(get_optimizer_state_dict(self.model, self.inner, options=flat))

    def load_state_dict(self, state: Any) -> None:
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            set_optimizer_state_dict,
        )

        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        set_optimizer_state_dict(self.model, self.inner, state, options=flat)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("is_sharded", [False, True])
def test_an_optimizer_with_another_layout_is_restored(
    tmp_path: Path, attach: Attach, is_sharded: bool
) -> None:
    """Its state, plain or sharded, goes through its own methods; attach() does not initialise it."""
    from torch.distributed.fsdp import fully_shard

    def trainer(seed: int) -> tuple[nn.Module, Container, TrainingState]:
        torch.manual_seed(seed)
        model = nn.Linear(3, 2)
        if is_sharded:
            fully_shard(model)
        optimizer = Container(model)
        return model, optimizer, TrainingState(model, optimizer)

    def steps(model: nn.Module, optimizer: Container) -> list[float]:
        losses = []
        for _ in range(2):
            loss = model(torch.ones(2, 3)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    model, optimizer, state = trainer(1)
    guard = attach(state)
    assert not optimizer.inner.state
    steps(model, optimizer)
    guard.step(2)
    directory = save_part(state, tmp_path)
    wanted = steps(model, optimizer)
    again, other, loaded = trainer(2)
    loaded.load(directory)
    assert steps(again, other) == wanted


# ---------------------------------------------------------------- the order of calls


class Loop:
    """A training loop, with lines before and after ``guard.step()``."""

    def __init__(self, attach: Attach, **options: Any) -> None:
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.other = nn.Linear(1, 1)
        self.second = torch.optim.SGD(self.other.parameters(), 0.1)
        self.ema = AveragedModel(self.model)
        self.average = nn.Linear(1, 1).requires_grad_(False)
        self.loader = ResumableLoader(torch.utils.data.DataLoader(list(range(4)), 4))
        self.state = TrainingState(
            self.model,
            self.optimizer,
            scheduler=self.scheduler,
            ema=self.ema,
            average=self.average,
            other=self.other,
            second=self.second,
            **options,
        )
        self.guard = attach(self.state)
        self.guard.restore()

    def lines(self) -> dict[str, Callable[[], object]]:
        return {
            "scheduler": self.scheduler.step,
            "ema": functools.partial(self.ema.update_parameters, self.model),
            "average": lambda: self.average.weight.lerp_(self.model.weight.detach(), 0.1),
            "second": self.second.step,
            "optimizer": self.optimizer.step,
        }

    def run(self, steps: int, order: str) -> None:
        lines = self.lines()
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.ones(1, 1)).sum().backward()
            for word in order.split():
                lines[word]() if word != "guard" else self.guard.step()


@pytest.mark.parametrize("late", ["scheduler", "ema", "average", "second"])
def test_a_change_after_the_report_of_a_step_causes_one_warning(
    attach: Attach, caplog: pytest.LogCaptureFixture, late: str
) -> None:
    """The warning comes within three steps, and names the object and the fix."""
    loop = Loop(attach)
    loop.run(3, f"optimizer guard {late}")
    (message,) = warnings_of(caplog)
    assert message.startswith(f"{late} changed after guard.step()")
    assert "last in the loop body" in message
    loop.run(STEPS_MAX, f"optimizer guard {late}")
    assert len(warnings_of(caplog)) == 1
    assert not loop.optimizer._optimizer_step_pre_hooks


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, about the last order
@pytest.mark.parametrize(
    "order",
    [
        "optimizer scheduler ema average second guard",
        "second optimizer scheduler guard",
        "scheduler ema optimizer guard",
    ],
)
def test_the_right_order_causes_no_warning(
    attach: Attach, caplog: pytest.LogCaptureFixture, order: str
) -> None:
    """A resume repeats the start of the loop body, so changes there are right too."""
    loop = Loop(attach)
    loop.run(STEPS_MAX + 2, order)
    assert not warnings_of(caplog)
    assert not loop.optimizer._optimizer_step_pre_hooks


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.usefixtures("process_group")
def test_a_sharded_model_causes_no_warning(
    attach: Attach, caplog: pytest.LogCaptureFixture
) -> None:
    """FSDP2 gathers and frees parameters between two steps, which is no change of the state."""
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    fully_shard(model[0])
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    guard = attach(TrainingState(model, optimizer, scheduler=scheduler))
    for step in range(1, 6):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        guard.step(step)
    assert not warnings_of(caplog)


def test_a_scheduler_at_the_end_of_an_epoch_causes_no_warning(
    attach: Attach, caplog: pytest.LogCaptureFixture
) -> None:
    """A scheduler steps after an epoch of several steps, or after each epoch of one step of the loader."""
    loop = Loop(attach)
    for _ in range(4):
        loop.run(2, "optimizer guard")
        loop.scheduler.step()
    assert not warnings_of(caplog)
    data = ResumableLoader(torch.utils.data.DataLoader(list(range(4)), 4))
    loop = Loop(attach, loader=data)
    for _ in range(6):
        for _batch in data:
            loop.run(1, "optimizer guard")
        loop.scheduler.step()
    assert not warnings_of(caplog)


def test_a_scaler_that_is_updated_too_late_causes_a_warning(
    attach: Attach, caplog: pytest.LogCaptureFixture
) -> None:
    """``scaler.update()`` belongs before ``guard.step()``."""
    scaler = torch.amp.GradScaler("cpu")
    loop = Loop(attach, scaler=scaler)
    for step in range(1, 5):
        scaler.scale(loop.model(torch.ones(1, 1)).sum()).backward()
        scaler.step(loop.optimizer)
        loop.guard.step(step)
        scaler.update()
        loop.optimizer.zero_grad()
    (message,) = warnings_of(caplog)
    assert message.startswith("scaler changed")


def test_restore_after_training_has_begun_causes_a_warning(
    attach: Attach, caplog: pytest.LogCaptureFixture
) -> None:
    """The steps and batches before restore() would be lost."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = ResumableLoader(torch.utils.data.DataLoader(list(range(4)), 2))
    guard = attach(TrainingState(model, optimizer, loader=loader))
    iter(loader)
    optimizer.step()
    with caplog.at_level(logging.WARNING):
        guard.restore()
    assert "between attach() and restore()" in warnings_of(caplog)[0]
    assert "before the first iter()" in warnings_of(caplog)[1]
    guard.restore()
    assert "call it once" in warnings_of(caplog)[2]


def persistent(wrapped: bool) -> Any:
    loader = DataLoader(torch.zeros(4), num_workers=1, persistent_workers=True)
    return ResumableLoader(loader) if wrapped else loader


def test_garbage_with_persistent_workers_is_no_loader(
    attach: Attach, caplog: pytest.LogCaptureFixture
) -> None:
    """A loader that nothing uses any more, and that the garbage collection has not reached yet."""
    loader = persistent(wrapped=False)
    loader.itself = loader
    model = nn.Linear(1, 1)
    gc.disable()
    try:
        del loader
        guard = attach(TrainingState(model, torch.optim.SGD(model.parameters(), 0.1)))
        guard.step(1)
    finally:
        gc.enable()
    assert not warnings_of(caplog)


@pytest.mark.parametrize(("wrapped", "warnings"), [(False, 1), (True, 0)])
def test_an_evaluation_loader_with_persistent_workers_is_found(
    attach: Attach, caplog: pytest.LogCaptureFixture, wrapped: bool, warnings: int
) -> None:
    """A resumed run starts such workers again, with a seed from the global generator, at another moment."""
    evaluation = persistent(wrapped)
    model = nn.Linear(1, 1)
    guard = attach(TrainingState(model, torch.optim.SGD(model.parameters(), 0.1)))
    guard.step(1)
    guard.step(2)
    found = [each for each in warnings_of(caplog) if "persistent_workers=True" in each]
    assert len(found) == warnings
    del evaluation


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("generator", [None, torch.Generator()])
def test_a_stateful_loader_without_a_generator_is_found(
    attach: Attach, caplog: pytest.LogCaptureFixture, generator: torch.Generator | None
) -> None:
    """Each new iterator of torchdata's loader draws a seed, and a resume creates one more iterator."""
    loader = StatefulDataLoader(torch.zeros(4), generator=generator)
    guard = attach(TrainingState(nn.Linear(1, 1), loader=loader))
    guard.step(1)
    found = [each for each in warnings_of(caplog) if "without generator=" in each]
    assert bool(found) == (generator is None)
    assert all(each.startswith("loader is a StatefulDataLoader") for each in found)


class RaisesWhenCounted(nn.Module):
    @property
    def n_averaged(self) -> int:
        raise RuntimeError("not ready")


def test_an_object_that_raises_does_not_stop_the_training(attach: Attach) -> None:
    """The watch of the order reads counters of the script's objects, in the loop and in optimizer hooks."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    guard = attach(TrainingState(model, optimizer, average=RaisesWhenCounted()))
    for step in (1, 2, 3):
        optimizer.step()
        guard.step(step)


def test_only_attributes_are_counters() -> None:
    """A metric of ignite accepts any name in ``getattr()``, and formats the stack for each."""
    asked: list[str] = []

    class AcceptsAnyName:
        def __getattr__(self, name: str) -> None:
            asked.append(name)

    assert count_of(AcceptsAnyName()) is not None
    assert not asked
