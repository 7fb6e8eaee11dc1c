# SPDX-License-Identifier: Apache-2.0
"""PyTorch-Ignite: a run that resumes at any iteration does the same as an uninterrupted one."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from swansong.protocol import Sealed
from swansong.torch import ResumableLoader
from torch.utils.data import DataLoader, TensorDataset

from testkit.fake_daemon import FakeDaemon
from testkit.training_parts import Restore

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # ignite imports a module of torch that is deprecated
    import swansong.ignite
    from ignite.engine import DeterministicEngine, Engine, Events
    from ignite.handlers import EarlyStopping, LRScheduler
    from ignite.metrics import RunningAverage

EPOCHS, EPOCH_LENGTH = 2, 4


class Run:
    """A start of a run as ignite's example dcgan.py: handlers read the last batch and its output."""

    def __init__(
        self,
        attach: dict[str, Any],
        *,
        epoch_length: int = EPOCH_LENGTH,
        max_epochs: int = EPOCHS,
        max_iters: int | None = None,
        accumulation: int = 1,
        patience: int = 9,
        evaluates_on_loader: bool = False,
        terminates_at: int | None = None,
    ) -> None:
        torch.manual_seed(7)
        data = TensorDataset(torch.randn(4 * EPOCH_LENGTH, 4), torch.randn(4 * EPOCH_LENGTH, 1))
        models = {"netG": torch.nn.Linear(4, 4), "model": torch.nn.Linear(4, 1)}
        optimizers = {
            f"{name}_optimizer": torch.optim.Adam(model.parameters(), lr=0.05)
            for name, model in models.items()
        }
        scheduler = torch.optim.lr_scheduler.StepLR(optimizers["model_optimizer"], 1, 0.5)
        self.losses: list[float] = []
        self.calls: list[tuple[str, int, Any]] = []

        def train_step(engine: Engine, batch: Any) -> dict[str, float]:
            fake = models["netG"](torch.randn(4, 4))
            loss = (models["model"](batch[0]) - models["model"](fake)).square().mean()
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
        evaluator = Engine(lambda _engine, batch: models["model"](batch[0]).sum().item())
        # No epoch is better than the first one.
        stopping = EarlyStopping(patience, lambda _evaluator: 0.0, trainer)
        evaluator.add_event_handler(Events.COMPLETED, stopping)
        loader = ResumableLoader(DataLoader(data, 4, shuffle=True))
        others = {"average": average, "scheduler": scheduler, "stopping": stopping}
        self.guard = swansong.ignite.attach(
            trainer,
            {**models, **optimizers, **others, "trainer": trainer},
            loader=loader,
            accumulation=accumulation,
            **attach,
        )

        @trainer.on(Events.EPOCH_COMPLETED)
        def evaluate(engine: Engine) -> None:
            images, _ = engine.state.batch
            seen = images.tolist(), engine.state.output["loss"], torch.randn(1).item()
            self.calls.append(("epoch completed", engine.state.iteration, seen))
            # Without the trainer's loader, it draws from the global generator.
            evaluator.run(loader if evaluates_on_loader else DataLoader(data, 4, shuffle=True))
            scheduler.step()

        @trainer.on(Events.COMPLETED)
        def complete(engine: Engine) -> None:
            self.calls.append(("completed", engine.state.iteration, None))

        @trainer.on(Events.ITERATION_COMPLETED)
        def terminate(engine: Engine) -> None:
            if engine.state.iteration == terminates_at:
                engine.terminate()

        self.guard.restore()
        limit = {"max_epochs": max_epochs} if max_iters is None else {"max_iters": max_iters}
        trainer.run(loader, epoch_length=epoch_length, **limit)
        self.iteration = trainer.state.iteration
        self.weights = [each.tolist() for model in models.values() for each in model.parameters()]
        self.rate = scheduler.get_last_lr()


NOWHERE = {"socket": "/nonexistent/swansong.sock"}


def periodic_sets(daemon: FakeDaemon) -> dict[int, Path]:
    """The sets by step, without that of the end of the run."""
    sealed = reversed(daemon.all_of(Sealed))
    return {each.step: daemon.staging / each.directory for each in sealed}


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
    whole = Run({"every_steps": 1, "socket": daemon.path}, **options)
    last = whole.iteration
    assert last == EPOCHS * EPOCH_LENGTH
    directory = daemon.staging / daemon.all_of(Sealed)[-1].directory
    restore_from(directory if is_end else periodic_sets(daemon)[last])
    again = Run(NOWHERE, **options)
    assert again.losses == []
    assert again.weights == whole.weights
    assert again.iteration == last
    assert len([line for line in caplog.messages if "the run finished at" in line]) == 1
    if patience == 9:
        longer = Run(NOWHERE, max_epochs=EPOCHS + 1)
        assert len(longer.losses) == EPOCH_LENGTH


# torch warns if the first epoch after a resume ends before the first optimizer step.
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
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
        {"patience": 1, "max_epochs": 3},
    ],
    ids=lambda options: "-".join(f"{name}={value}" for name, value in options.items()) or "plain",
)
def test_a_run_resumes_at_every_iteration(
    daemon: FakeDaemon,
    restore_from: Restore,
    caplog: pytest.LogCaptureFixture,
    options: dict[str, Any],
) -> None:
    """Losses, weights and rate are equal, and each EPOCH_COMPLETED is fired once, with batch and output.

    A checkpoint contains no gradients, so none is taken between the iterations of one optimizer step.
    """
    whole = Run({"every_steps": 1, "socket": daemon.path}, **options)
    found = periodic_sets(daemon)
    assert len([line for line in caplog.messages if "resets the metric average" in line]) == 1
    accumulation = options.get("accumulation", 1)
    assert set(found) == set(range(accumulation, whole.iteration + 1, accumulation))
    for iteration, directory in found.items():
        restore_from(directory)
        again = Run(NOWHERE, **options)
        assert again.losses == whole.losses[iteration:], f"resumed from iteration {iteration}"
        # The checkpoint of an epoch's last iteration lies after EPOCH_COMPLETED, and before COMPLETED.
        kept = [call for call in whole.calls if call[1] > iteration or call[0] == "completed"]
        assert again.calls == kept
        assert again.weights == whole.weights
        assert again.rate == whole.rate
        assert again.iteration == whole.iteration


def test_misuse_is_refused_before_the_first_iteration() -> None:
    """Data without a position, and a scheduler that a resumed epoch would step twice, are named."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Any] = []
    trainer = Engine(lambda _engine, batch: seen.append(batch))
    attached = swansong.ignite.attach(trainer, {"net": model}, **NOWHERE)
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
