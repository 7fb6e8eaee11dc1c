# SPDX-License-Identifier: Apache-2.0
"""Objects that training uses and no checkpoint contains are named, before a preemption where possible."""

from __future__ import annotations

import copy
import functools
import itertools
import weakref
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from swansong._differences import likely_cause
from swansong.torch import ResumableLoader, TrainingState
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, LinearLR, SequentialLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from testkit.fake_daemon import FakeDaemon
from testkit.training_parts import Attach, save_part
from testkit.waiting import until

DATA = TensorDataset(torch.randn(20, 2))
STEPS = 6


@pytest.fixture(autouse=True)
def _no_loaders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the loaders of other tests, which may be in a loop, and a warning about them."""
    monkeypatch.setattr(ResumableLoader, "saved", weakref.WeakSet())
    monkeypatch.setattr(ResumableLoader, "_warned_of_foreign", False)


def plain() -> DataLoader[Any]:
    return DataLoader(DATA, batch_size=2)


def cycle(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


class Counting(nn.Module):
    """Has a buffer that training changes, and no state_dict() contains."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 1)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inner(inputs) * self.calls


class Around(torch.optim.Optimizer):
    """An optimizer around another one, without hooks, as in some versions of Lookahead."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.state, self.param_groups = inner, inner.state, inner.param_groups

    def step(self) -> None:  # type: ignore[override]
        self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)


class Run:
    """A training loop; each of its parts may be replaced, and may be left out of the state."""

    def __init__(self, model: nn.Module | None = None, **state: Any) -> None:
        self.model = nn.Linear(2, 1) if model is None else model
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters())
        self.loader: Any = ResumableLoader(plain())
        self.state = state
        self.batches: Any = None
        self.after_step: Callable[[], object] = lambda: None
        self.after_save: Callable[[], object] = lambda: None
        self.saves_at: Collection[int] = ()

    def train(self, attach: Attach, steps: int = STEPS) -> None:
        parts = {"loader": self.loader, **self.state}
        guard = attach(TrainingState(self.model, self.optimizer, **parts))
        first = guard.restore() + 1
        batches = cycle(self.loader) if self.batches is None else self.batches
        for step, (batch,) in zip(range(first, first + steps), batches, strict=False):
            self.model(batch).sum().backward()
            self.optimizer.step()
            self.after_step()
            guard.step(step)
            if step in self.saves_at:
                until(functools.partial(guard.save, step), what="the welcome")
                assert guard.wait_saved()
                self.after_save()


def another_loader() -> Run:
    run = Run()
    run.batches = iter(plain())
    return run


def another_optimizer() -> Run:
    head = nn.Linear(1, 1)
    run = Run(head=head, replay=list(range(5000)))
    second = torch.optim.SGD(head.parameters(), 0.1)
    run.after_step = second.step
    return run


def optimizer_in_another_one() -> Run:
    class Wrapping(torch.optim.SGD):
        """As SAM: its state_dict() does not contain the state of the inner one."""

    run = Run()
    inner = run.optimizer
    outer = Wrapping(run.model.parameters(), 0.1)
    outer.inner = inner
    run.optimizer, run.after_step = outer, inner.step
    return run


def scheduler() -> Run:
    run = Run()
    run.after_step = LinearLR(run.optimizer).step
    return run


def teacher() -> Run:
    run = Run()
    average = copy.deepcopy(run.model)

    def update() -> None:
        with torch.no_grad():
            average.weight.lerp_(run.model.weight, 0.1)

    run.after_step = update
    return run


def teacher_through_data() -> Run:
    run = Run()
    average = copy.deepcopy(run.model)
    run.after_step = lambda: average.weight.data.mul_(0.9)
    return run


class Centred(nn.Module):
    """A loss without parameters, as in DINO: each step replaces its buffers, of which one is a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(1))
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def update(self) -> None:
        self.center, self.cache = self.center * 0.9 + 1, self.cache + 1


def centre_of_a_loss() -> Run:
    run = Run()
    run.after_step = Centred().update
    return run


@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning")
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (another_loader, "a DataLoader without a position yields batches"),
        (another_optimizer, "an optimizer outside of the state steps (SGD)"),
        (optimizer_in_another_one, "an optimizer outside of the state steps (AdamW)"),
        (scheduler, "a scheduler of an optimizer of the state is not in the state (LinearLR)"),
        (teacher, "1 tensors of modules change, and are not in the state, such as Linear.weight"),
        (centre_of_a_loss, "1 tensors of modules change, and are not in the state, such as Centr"),
        (teacher_through_data, "1 tensors of modules change, and are not in the state, such as L"),
        (
            lambda: Run(Counting()),
            "1 tensors of modules change, and are not in the state, such as Cou",
        ),
    ],
)
def test_what_changes_outside_of_the_state_is_named(
    attach: Attach, caplog: pytest.LogCaptureFixture, make: Callable[[], Run], text: str
) -> None:
    """In the first steps of a run without a preemption, with the fix, and once."""
    make().train(attach)
    (message,) = [each for each in caplog.messages if not each.startswith("no swansongd at")]
    assert message.startswith(text)
    assert likely_cause([], message) == message, "a check of the resume quotes it"


def replaced() -> Run:
    """Continues with another optimizer; evaluations have one of their own for each time."""
    run = Run()
    run.after_step = lambda: torch.optim.Adam(nn.Linear(1, 1).parameters()).step()
    calls = itertools.count()

    def at_save() -> None:
        if next(calls) == 0:
            run.optimizer = torch.optim.ASGD(run.model.parameters())

    run.after_save = at_save
    return run


def started_later() -> Run:
    """Collects episodes first; a target network keeps an optimizer that is idle."""
    run = another_optimizer()
    run.state["target"] = target = nn.Linear(2, 1)
    target.optimizer = torch.optim.Adam(target.parameters())
    second, run.after_step = run.after_step, lambda: None
    run.after_save = lambda: setattr(run, "after_step", second)
    return run


@pytest.mark.parametrize(
    ("make", "saves_at"),
    [
        (replaced, range(STEPS - 2, 2 * STEPS)),
        (started_later, range(STEPS - 2, 2 * STEPS)),
        (another_optimizer, range(2, 3)),
    ],
)
def test_an_optimizer_that_steps_is_named_at_a_save(
    attach: Attach,
    daemon: FakeDaemon,
    caplog: pytest.LogCaptureFixture,
    make: Callable[[], Run],
    saves_at: range,
) -> None:
    """Once, whatever number of saves follows; in the first steps, too."""
    run = make()
    run.saves_at = saves_at
    run.train(attach, saves_at[-1])
    (message,) = caplog.messages
    kind = "ASGD" if make is replaced else "SGD"
    assert message.startswith(f"an optimizer outside of the state steps ({kind})")
    assert daemon.sealed()


def evaluating() -> Run:
    """Looks at other data, with a frozen model, after each step."""
    run = Run()
    frozen = copy.deepcopy(run.model)
    run.after_step = lambda: [frozen(batch) for (batch,) in plain()]
    return run


def averaging() -> Run:
    run = Run()
    run.state["average"] = average = AveragedModel(run.model)
    run.after_step = lambda: average.update_parameters(run.model)
    return run


def centring() -> Run:
    run = Run()
    run.state["loss"] = loss = Centred()
    run.after_step = loss.update
    return run


def scheduling_in_parts() -> Run:
    run = Run()
    parts = [ConstantLR(run.optimizer), LinearLR(run.optimizer)]
    run.state["scheduler"] = whole = SequentialLR(run.optimizer, parts, [3])
    run.after_step = whole.step
    return run


def plain_tensors() -> Run:
    """Tensors of no module, in the state, with their optimizer."""
    run = Run()
    alphas = [torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True)]
    run.state["alphas"], run.state["single"] = alphas, torch.zeros(1, requires_grad=True)
    run.state["second"] = second = torch.optim.Adam([*alphas, run.state["single"]])
    run.after_step = second.step
    return run


def wrapped() -> Run:
    run = Run()
    run.optimizer = Around(run.optimizer)
    return run


def stateful() -> Run:
    run = Run()
    run.loader = StatefulDataLoader(DATA, batch_size=2, generator=torch.Generator())
    return run


def shuffled() -> Run:
    run = Run()
    run.loader = ResumableLoader(DataLoader(DATA, batch_size=2, shuffle=True))
    return run


def one_by_one() -> Run:
    run = Run()
    run.loader = ResumableLoader(DataLoader(DATA, batch_size=None))
    return run


def with_a_worker() -> Run:
    run = Run()
    run.loader = ResumableLoader(DataLoader(DATA, batch_size=2, num_workers=1))
    return run


@pytest.mark.filterwarnings("ignore:'set_vital':UserWarning", "ignore:Detected call of:UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        *(
            Run,
            evaluating,
            averaging,
            centring,
            scheduling_in_parts,
            plain_tensors,
            wrapped,
            stateful,
        ),
        *(shuffled, one_by_one, with_a_worker),
    ],
)
def test_what_a_resume_repeats_or_loads_is_not_named(
    attach: Attach,
    daemon: FakeDaemon,
    caplog: pytest.LogCaptureFixture,
    make: Callable[[], Run],
) -> None:
    """An evaluation, a frozen model, and objects in objects of the state; also after a resume in an epoch.

    The resumed iterator starts after the batches that were yielded, and belongs to the loader of the state.
    """
    run = make()
    run.saves_at = [STEPS - 1]
    run.train(attach)
    assert caplog.messages == []
    (checkpoint,) = daemon.sealed()
    daemon.restorable = lambda: (checkpoint, STEPS - 1)
    caplog.clear()
    make().train(attach)
    expected = ("restored step 5 ", "resumed after batch 5 ")
    assert [each for each in caplog.messages if not each.startswith(expected)] == []


# ---------------------------------------------------------------- loaders


def test_a_loader_that_is_created_again_for_an_epoch_is_named(
    attach: Attach, caplog: pytest.LogCaptureFixture
) -> None:
    """The state has the first one, whose position does not move any more; one warning for all epochs."""
    earlier = ResumableLoader(plain())
    TrainingState(nn.Linear(2, 1), loader=earlier).count_steps_with(lambda: 50)
    loader = ResumableLoader(plain())
    guard = attach(TrainingState(nn.Linear(2, 1), loader=loader))
    guard.restore()
    for epoch in range(3):
        if epoch:
            loader = ResumableLoader(plain())
        for _ in loader:
            guard.step()
    found = [each for each in caplog.messages if "a ResumableLoader that no Train" in each]
    assert len(found) == 1


def test_an_evaluation_after_each_step_is_not_named(
    attach: Attach, caplog: pytest.LogCaptureFixture
) -> None:
    """It loops over a ResumableLoader for itself, and reports no step in that loop."""
    loader, evaluation = ResumableLoader(plain()), ResumableLoader(plain())
    guard = attach(TrainingState(nn.Linear(2, 1), loader=loader))
    guard.restore()
    for _ in loader:
        guard.step()
        assert len(list(evaluation)) == 10
    assert "ResumableLoader" not in caplog.text


def test_a_second_stage_with_another_loader_is_not_named(
    attach: Attach, caplog: pytest.LogCaptureFixture
) -> None:
    """The first loader is at its end, and the second one has a position."""
    first, second = ResumableLoader(plain()), ResumableLoader(plain())
    guard = attach(TrainingState(nn.Linear(2, 1), loader=first, second=second))
    guard.restore()
    for loader in (first, second):
        for _ in loader:
            guard.step()
            first.state_dict()
    assert "after the last loop" not in caplog.text


def test_batches_that_itertools_repeats_are_named_at_the_save(
    attach: Attach, caplog: pytest.LogCaptureFixture
) -> None:
    """The loader is at the end of its first epoch, whatever the run trains."""
    loader = ResumableLoader(plain())
    state = TrainingState(nn.Linear(2, 1), loader=loader)
    guard = attach(state)
    guard.restore()
    for step, _ in zip(range(1, 15), itertools.cycle(loader), strict=False):
        guard.step(step)
        loader.state_dict()
    found = [each for each in caplog.messages if "itertools.cycle" in each]
    assert len(found) == 1
    assert found[0].startswith("2 steps were reported after the last loop over the loader")


def test_an_iterator_of_a_constructor_is_refused_in_a_resumed_run() -> None:
    """The error says so, instead of two loops that use the loader."""
    loader, resumed = ResumableLoader(plain()), ResumableLoader(plain())
    next(iter(loader))
    early = iter(resumed)
    resumed.load_state_dict(loader.state_dict())
    with pytest.raises(RuntimeError, match=r"created before guard.restore\(\)"):
        next(early)


# ---------------------------------------------------------------- structure and modes


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda run: run.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
            "optimizer has groups of 2 and 1 parameters instead of 2;",
        ),
        (
            lambda run: nn.utils.parametrizations.weight_norm(run.model),
            "model has 'parametrizations.weight.original0' and lacks 'weight';",
        ),
    ],
)
def test_a_checkpoint_that_the_script_cannot_load_is_named_at_the_save(
    attach: Attach,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    change: Callable[[Run], object],
    text: str,
) -> None:
    """Parameters or groups that are added after restore(); the next save of the same structure is silent."""
    run = Run()
    state = TrainingState(run.model, run.optimizer)
    attach(state).restore()
    state.snapshot()
    change(run)
    caplog.clear()
    state.snapshot()
    state.snapshot()
    (message,) = caplog.messages
    assert text in message


@pytest.mark.parametrize("mode", ["requires_grad", "training"])
@pytest.mark.parametrize("sets_it_again", [True, False])
@pytest.mark.parametrize("evaluates", [True, False])
def test_a_mode_that_the_resumed_script_does_not_set_is_named(
    attach: Attach,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    mode: str,
    *,
    sets_it_again: bool,
    evaluates: bool,
) -> None:
    """Parameters that an earlier epoch froze; not the mode of an evaluation in which a save fell."""

    def freeze(model: nn.Sequential) -> None:
        if mode == "training":
            model[1].eval()
        else:
            model[0].weight.requires_grad_(False)

    def make() -> nn.Sequential:
        return nn.Sequential(nn.Linear(2, 1), nn.Dropout())

    first = make()
    freeze(first)
    if evaluates:
        first.eval()
    directory = save_part(TrainingState(first), tmp_path)

    model = make()
    state = TrainingState(model)
    guard = attach(state)
    state.load(directory)
    if sets_it_again:
        freeze(model)
    guard.step(8)
    guard.step(9)
    found = [each for each in caplog.messages if "modules in another mode" in each]
    assert len(found) == (not sets_it_again and not (evaluates and mode == "training"))
    for each in found:
        assert f"had {mode}=False when it was saved" in each


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({"lr": 0.5}, []),
        ({"weight_decay": 0.2}, ["weight_decay=0.1 of optimizer instead of 0.2"]),
        ({"betas": (0.8, 0.9), "eps": 1e-3}, ["betas=(0.9, 0.999) of", "eps=1e-08 of"]),
    ],
)
def test_an_option_of_the_script_that_a_load_replaces_is_named(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, options: dict[str, Any], texts: list[str]
) -> None:
    """Someone has changed the script between two starts; the rate belongs to the schedule."""

    def make(**more: Any) -> TrainingState:
        model = nn.Linear(2, 1)
        defaults = {"lr": 0.1, "weight_decay": 0.1}
        return TrainingState(model, torch.optim.AdamW(model.parameters(), **{**defaults, **more}))

    directory = save_part(make(), tmp_path)
    make(**options).load(directory)
    found = [each for each in caplog.messages if "has replaced options" in each]
    assert len(found) == bool(texts)
    for text in texts:
        assert text in found[0]


def test_another_version_of_a_library_is_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Equal versions are not."""
    state = TrainingState(nn.Linear(2, 1))
    directory = save_part(state, tmp_path)
    state.load(directory)
    assert "made elsewhere" not in caplog.text
    before = torch.__version__
    monkeypatch.setattr(torch, "__version__", "9.0")
    state.load(directory)
    assert caplog.messages[-1].endswith(f"bits may differ: torch 9.0 instead of '{before}'")


@pytest.mark.parametrize("value", [None, [], "x", {"model": 3}, {"model": {"training": [1]}}])
def test_modes_and_versions_of_another_writer_stop_no_training(
    attach: Attach, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: Any
) -> None:
    """The index comes from the bucket: another form is left out, at the load and at the next step."""
    state = TrainingState(nn.Linear(2, 1))
    facts = {"surroundings": value, "modes": value}
    monkeypatch.setattr("swansong._torch.structure.ScriptWatch.facts", lambda _: facts)
    directory = save_part(state, tmp_path)
    guard = attach(state)
    state.load(directory)
    guard.step(1)
