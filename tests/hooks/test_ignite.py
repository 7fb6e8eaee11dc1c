# SPDX-License-Identifier: Apache-2.0
"""PyTorch-Ignite: a run that resumes at any iteration does the same as an uninterrupted one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from swansong.protocol import Sealed
from swansong.torch import ResumableLoader
from torch.utils.data import DataLoader, TensorDataset

from testkit.fake_daemon import FakeDaemon

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # ignite imports a module of torch that is deprecated
    import swansong.ignite
    from ignite.engine import DeterministicEngine, Engine, Events, create_supervised_evaluator
    from ignite.handlers import EarlyStopping, LRScheduler
    from ignite.metrics import Loss, RunningAverage

EPOCHS, EPOCH_LENGTH = 2, 4
Calls = list[tuple[str, int]]


class Run:
    """A start of the training, in this process."""

    def __init__(
        self,
        *,
        attach: dict[str, Any],
        max_epochs: int = EPOCHS,
        patience: int = 9,
    ) -> None:
        torch.manual_seed(7)
        data = TensorDataset(torch.randn(4 * EPOCH_LENGTH, 4), torch.randn(4 * EPOCH_LENGTH, 1))
        model = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        self.losses: list[float] = []
        self.calls: Calls = []

        def train_step(engine: Engine, batch: Any) -> float:
            model.train()
            loss = torch.nn.functional.mse_loss(model(batch[0]), batch[1])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            self.losses.append(loss.item())
            return loss.item()

        trainer = Engine(train_step)
        evaluator = create_supervised_evaluator(model, {"loss": Loss(torch.nn.MSELoss())})
        stopping = EarlyStopping(
            patience,
            lambda engine: -engine.state.metrics["loss"],
            trainer,
            threshold=99.0,  # no epoch is better than the first one
        )
        to_save = {
            "model": model,
            "optimizer": optimizer,
            "scheduler": scheduler,
            "stopping": stopping,
            "trainer": trainer,
        }
        loader = ResumableLoader(DataLoader(data, 4, shuffle=True))
        self.guard = swansong.ignite.attach(
            trainer,
            to_save,
            loader=loader,
            **attach,
        )

        @trainer.on(Events.EPOCH_COMPLETED)
        def evaluate(engine: Engine) -> None:
            self.calls.append(("epoch completed", engine.state.iteration))
            evaluator.run(DataLoader(data, 4, shuffle=True))  # draws from the global generator
            scheduler.step()

        @trainer.on(Events.COMPLETED)
        def complete(engine: Engine) -> None:
            self.calls.append(("completed", engine.state.iteration))

        evaluator.add_event_handler(Events.COMPLETED, stopping)
        self.guard.restore()
        trainer.run(loader, max_epochs=max_epochs)
        self.state = trainer.state
        self.weights = torch.cat([each.detach().ravel() for each in model.parameters()]).tolist()
        self.rate = scheduler.get_last_lr()


Restore = Callable[[Path], None]
NOWHERE = {"socket": "/nonexistent/swansong.sock"}


@pytest.fixture
def restore_from(monkeypatch: pytest.MonkeyPatch) -> Restore:
    """Makes the next starts restore this set."""
    return lambda directory: monkeypatch.setenv("SWANSONG_RESTORE", str(directory))


def periodic_sets(daemon: FakeDaemon) -> dict[int, Path]:
    """The sets by step, without that of the end of the run."""
    sealed = reversed(daemon.all_of(Sealed))
    return {each.step: daemon.staging / each.directory for each in sealed}


def test_a_run_resumes_at_every_iteration(daemon: FakeDaemon, restore_from: Restore) -> None:
    """Losses, weights and rate are equal, and each end of an epoch is handled once."""
    whole = Run(attach={"every_steps": 1, "socket": daemon.path})
    found = periodic_sets(daemon)
    assert len(found) == EPOCHS * EPOCH_LENGTH
    for iteration, directory in found.items():
        restore_from(directory)
        again = Run(attach=NOWHERE)
        assert again.losses == whole.losses[iteration:], f"resumed from iteration {iteration}"
        assert again.weights == whole.weights
        assert again.rate == whole.rate
        # The checkpoint of an epoch's last iteration lies after EPOCH_COMPLETED, and before COMPLETED.
        kept = [
            call for call in whole.calls if call[1] > iteration or call == ("completed", iteration)
        ]
        assert again.calls == kept


@pytest.mark.parametrize("patience", [1, 9], ids=["stopped-early", "complete"])
@pytest.mark.parametrize("is_end", [False, True], ids=["killed-after-its-last-step", "ended"])
def test_a_finished_run_does_not_train_again(
    daemon: FakeDaemon,
    restore_from: Restore,
    caplog: pytest.LogCaptureFixture,
    patience: int,
    is_end: bool,
) -> None:
    """ignite itself would train from iteration 0 with the trained weights."""
    options = {"patience": patience, "max_epochs": EPOCHS + (patience == 1)}
    whole = Run(attach={"every_steps": 1, "socket": daemon.path}, **options)
    last = whole.state.iteration
    assert last == EPOCHS * EPOCH_LENGTH
    directory = daemon.staging / daemon.all_of(Sealed)[-1].directory
    restore_from(directory if is_end else periodic_sets(daemon)[last])
    again = Run(attach=NOWHERE, **options)
    assert again.losses == []
    assert again.weights == whole.weights
    assert again.state.iteration == last
    assert len([line for line in caplog.messages if "the run finished at" in line]) == 1
    if patience == 9:
        longer = Run(attach=NOWHERE, max_epochs=EPOCHS + 1)
        assert len(longer.losses) == EPOCH_LENGTH


class GanRun:
    """A start of a run as ignite's example dcgan.py: handlers read the last batch and its output."""

    def __init__(
        self,
        attach: dict[str, Any],
        *,
        epoch_length: int | None = None,
        max_iters: int | None = None,
        accumulation: int = 1,
        evaluates_on_loader: bool = False,
        terminates_at: int | None = None,
    ) -> None:
        torch.manual_seed(7)
        data = TensorDataset(torch.randn(4 * EPOCH_LENGTH, 4), torch.randn(4 * EPOCH_LENGTH, 1))
        models = {"netG": torch.nn.Linear(4, 4), "netD": torch.nn.Linear(4, 1)}
        optimizers = {
            f"optimizer{name[-1]}": torch.optim.Adam(model.parameters(), lr=0.05)
            for name, model in models.items()
        }
        self.losses: list[float] = []
        self.seen: list[tuple[int, Any]] = []

        def train_step(engine: Engine, batch: Any) -> dict[str, float]:
            fake = models["netG"](torch.randn(4, 4))
            loss = (models["netD"](batch[0]) - models["netD"](fake)).square().mean()
            loss.backward()
            if engine.state.iteration % accumulation == 0:
                for optimizer in optimizers.values():
                    optimizer.step()
                    optimizer.zero_grad()
            self.losses.append(loss.item())
            return {"loss": loss.item()}

        trainer = Engine(train_step)
        average = RunningAverage(output_transform=lambda output: output["loss"])
        average.attach(trainer, "average")
        loader = ResumableLoader(DataLoader(data, 4, shuffle=True))
        to_save = {**models, **optimizers, "average": average}
        self.guard = swansong.ignite.attach(
            trainer, to_save, loader=loader, accumulation=accumulation, **attach
        )
        evaluator = Engine(lambda _engine, batch: models["netD"](batch[0]).sum().item())

        @trainer.on(Events.EPOCH_COMPLETED)
        def look(engine: Engine) -> None:
            images, _ = engine.state.batch
            noise = torch.randn(1).item()
            self.seen.append(
                (engine.state.iteration, (images.tolist(), engine.state.output["loss"], noise))
            )
            if evaluates_on_loader:
                evaluator.run(loader)

        @trainer.on(Events.ITERATION_COMPLETED)
        def terminate(engine: Engine) -> None:
            if engine.state.iteration == terminates_at:
                engine.terminate()

        self.guard.restore()
        length = epoch_length or EPOCH_LENGTH
        if max_iters is None:
            trainer.run(loader, max_epochs=EPOCHS, epoch_length=length)
        else:
            trainer.run(loader, max_iters=max_iters, epoch_length=length)
        self.iteration = trainer.state.iteration
        self.weights = [each.tolist() for model in models.values() for each in model.parameters()]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulation": 3},
        {"epoch_length": 3},
        {"epoch_length": 6},
        {"max_iters": 6},
        {"max_iters": 4},
        {"evaluates_on_loader": True},
        {"terminates_at": 4},
    ],
    ids=lambda options: "-".join(f"{name}={value}" for name, value in options.items()) or "plain",
)
def test_handlers_of_epoch_completed_see_the_last_batch(
    daemon: FakeDaemon,
    restore_from: Restore,
    caplog: pytest.LogCaptureFixture,
    options: dict[str, Any],
) -> None:
    """A run that is preempted at any iteration fires each EPOCH_COMPLETED once, with batch and output.

    A checkpoint contains no gradients, so none is taken between the iterations of one optimizer step.
    """
    whole = GanRun({"every_steps": 1, "socket": daemon.path}, **options)
    found = periodic_sets(daemon)
    assert len([line for line in caplog.messages if "resets the metric average" in line]) == 1
    accumulation = options.get("accumulation", 1)
    assert set(found) == set(range(accumulation, whole.iteration + 1, accumulation))
    for iteration, directory in found.items():
        restore_from(directory)
        again = GanRun(NOWHERE, **options)
        assert again.losses == whole.losses[iteration:], f"resumed from iteration {iteration}"
        assert again.seen == [each for each in whole.seen if each[0] > iteration]
        assert again.weights == whole.weights
        assert again.iteration == whole.iteration


def test_misuse_is_refused_before_the_first_iteration() -> None:
    """Data without a position, and a scheduler that a resumed epoch would step twice, are named."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Any] = []
    trainer = Engine(lambda _engine, batch: seen.append(batch))
    attached = swansong.ignite.attach(trainer, {"model": model}, **NOWHERE)
    with attached, pytest.raises(ValueError, match="same ResumableLoader"):
        trainer.run([1, 2])
    trainer = Engine(lambda _engine, batch: seen.append(batch))
    attached = swansong.ignite.attach(trainer, {"model": model}, **NOWHERE)
    rates = LRScheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1))
    trainer.add_event_handler(Events.EPOCH_STARTED, rates)
    with attached, pytest.raises(ValueError, match="EPOCH_STARTED"):
        trainer.run(epoch_length=2)
    with pytest.raises(TypeError, match="use an Engine"):
        swansong.ignite.attach(DeterministicEngine(print), {"model": model}, **NOWHERE)
    with pytest.raises(TypeError, match="engine first"):
        swansong.ignite.attach(model, {"model": model}, **NOWHERE)
    assert seen == []
