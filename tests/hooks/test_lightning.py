# SPDX-License-Identifier: Apache-2.0
"""Lightning: a preempted and resumed run is equal to an uninterrupted run in all that Lightning holds.

Each run is a ``Trainer.fit`` in this process.  A preempted run ends with an exception right after its
checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
)
from swansong import RestoreError, layout
from swansong.lightning import SwansongCallback
from swansong.torch import ResumableLoader, seed_all
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from testkit.fake_daemon import FakeDaemon
from testkit.waiting import until

pytestmark = pytest.mark.filterwarnings("ignore")
BATCHES = 7


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Lightning logs a page for each trainer."""
    logger = logging.getLogger("lightning.pytorch")
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)


class Model(pl.LightningModule):
    """Dropout, a batch norm, and a metric that is averaged over the epoch."""

    def __init__(self, *, schedule: str = "step") -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 1)
        )
        self.metric = MeanMetric()
        self.schedule = schedule
        self.story: list[tuple[Any, ...]] = []
        self.extra = 0
        self.lr = 0.1

    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_index: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.metric(loss.detach())
        self.log("train", loss, on_step=True, on_epoch=True)
        self.log("mean", self.metric, on_epoch=True)
        rates = [group["lr"] for each in self.trainer.optimizers for group in each.param_groups]
        self.story.append((self.current_epoch, batch_index, loss.item(), *rates))
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.extra += 1  # after all hooks of the callbacks

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("validation", self.loss(batch) + torch.rand(()))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["extra"] = self.extra

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.extra = checkpoint["extra"]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-2)
        rates = torch.optim.lr_scheduler
        if self.schedule == "step":
            return [optimizer], [
                {"scheduler": rates.StepLR(optimizer, 1, 0.9), "interval": "step"},
            ]
        plateau = rates.ReduceLROnPlateau(optimizer, patience=0, threshold=0.3)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "monitor": self.schedule, "strict": False},
        }


class Hooks(pl.Callback):
    """A user's callback with state in each of the ways that Lightning offers."""

    def __init__(self) -> None:
        self.batches, self.saved, self.notes = 0, 0, [""]

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1
        self.notes = [f"batch {self.batches}"]

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = state["batches"]

    def on_save_checkpoint(self, trainer: Any, _: Any, checkpoint: dict[str, Any]) -> None:
        assert checkpoint["global_step"] == trainer.global_step
        assert set(checkpoint) >= {"epoch", "state_dict", "loops", "callbacks", "optimizer_states"}
        checkpoint["notes"] = (self.notes, checkpoint["epoch"])

    def on_load_checkpoint(self, _trainer: Any, _: Any, checkpoint: dict[str, Any]) -> None:
        self.notes, epoch = checkpoint["notes"]
        assert checkpoint["epoch"] == epoch
        assert "lr_schedulers" in checkpoint


class Preempted(Exception):
    """The VM is terminated."""


class Notice(pl.Callback):
    """Asks for a checkpoint at one event, and ends the run as soon as a checkpoint is saved.

    Args:
        daemon: that sends the request.
        case: with the event.
    """

    def __init__(self, daemon: FakeDaemon, own: SwansongCallback, case: Case) -> None:
        self._daemon, self._own, self._left, hook = daemon, own, case.count, case.hook
        setattr(self, hook, self._event)
        for name in ("on_validation_batch_end", "on_train_batch_start", "on_validation_end"):
            if name != hook:
                setattr(self, name, self._look)

    def _event(self, trainer: Any, *_: Any, **__: Any) -> None:
        self._look()
        self._left -= not trainer.sanity_checking
        if self._left == 0:
            self._daemon.request()
            until(lambda: self._own.guard is None or self._own.guard.request is not None)

    def _look(self, *_: Any, **__: Any) -> None:
        if self._left <= 0 and self._own.guard is not None and self._own.guard.request is None:
            assert self._own.guard.wait_saved()
            raise Preempted


def fit(
    case: Case,
    own: SwansongCallback,
    notice: Notice | None = None,
    wrap: Callable[[Any], Any] = ResumableLoader,
) -> tuple[Model, pl.Trainer]:
    seed_all(5)
    model, callbacks = case.model(), case.callbacks()
    data = TensorDataset(torch.randn(8 * BATCHES, 4), torch.randn(8 * BATCHES, 1))
    trainer = pl.Trainer(
        callbacks=[*callbacks, own, *([notice] if notice else [])],
        logger=False,
        enable_checkpointing=any(isinstance(each, pl.callbacks.Checkpoint) for each in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
        **{"max_epochs": 4, **case.options},
    )
    trainer.fit(model, wrap(DataLoader(data, 8, shuffle=True)), DataLoader(data, 16))
    return model, trainer


def restore_newest(daemon: FakeDaemon) -> None:
    """Let the daemon answer the next query with the newest set."""
    found = {layout.parse_sealed_name(path.name)[0]: path for path in daemon.wait_sealed(1)}
    step = max(found)
    daemon.restorable = lambda: (found[step], step)


def final(trainer: pl.Trainer) -> dict[str, Any]:
    """All that Lightning itself would save."""
    state = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    state["metrics"] = dict(trainer.callback_metrics)
    state["generators"] = torch.get_rng_state()
    return state


def assert_same(one: Any, other: Any, place: str = "state") -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys(), place
        for key in one:
            assert_same(one[key], other[key], f"{place}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), place
        for number, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_same(left, right, f"{place}[{number}]")
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other), f"{place}: {one} is not {other}"
    else:
        assert repr(one) == repr(other), f"{place}: {one!r} is not {other!r}"


class Gan(Model):
    """Two optimizers; one accumulates over two batches, and its gradients live in between."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_index: int) -> torch.Tensor:
        one, other = self.optimizers()
        loss = super().training_step(batch, batch_index)
        one.zero_grad()
        (loss + self.other(loss.detach()[None]).square().mean()).backward()
        one.step()
        if batch_index % 2:
            other.step()
            other.zero_grad()
        return loss

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.AdamW(self.layers.parameters(), lr=3e-2),
            torch.optim.SGD(self.other.parameters(), lr=0.1, momentum=0.9),
        ]


class Freezing(pl.callbacks.BaseFinetuning):
    """Trains the first layer from the second epoch on, in a group of parameters of its own."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.layers[0])

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.layers[0], optimizer, lr=1e-2)


class Thawing(Model):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(
            [each for each in self.parameters() if each.requires_grad], lr=0.03, momentum=0.9
        )


class Swapping(pl.Callback):
    """A user's average of weights, of which Swansong knows nothing."""

    def on_validation_epoch_start(self, _trainer: Any, module: Any) -> None:
        self.weights = [each.detach().clone() for each in module.parameters()]
        for each in module.parameters():
            each.data.mul_(0.5)

    def on_validation_epoch_end(self, _trainer: Any, module: Any) -> None:
        for each, weights in zip(module.parameters(), self.weights, strict=True):
            each.data.copy_(weights)


@dataclass(frozen=True)
class Case:
    """A run that is preempted at an event: the hook is called for the ``count``-th time."""

    hook: str
    count: int
    model: Callable[[], Model] = Model
    callbacks: Callable[[], list[Any]] = list
    options: dict[str, Any] = field(default_factory=dict)


def averages() -> list[Any]:
    return [EMAWeightAveraging(decay=0.7), EarlyStopping("validation", patience=9), Hooks()]


def files() -> list[Any]:
    best = {"monitor": "validation", "save_top_k": 2, "enable_version_counter": False}
    return [pl.callbacks.ModelCheckpoint("files", **best), pl.callbacks.WeightAveraging()]


BATCH, VALIDATION, EPOCH = "on_train_batch_start", "on_validation_batch_end", "on_train_epoch_end"
CASES = {
    "in an epoch": Case(BATCH, 10, callbacks=averages),
    "in a validation": Case(VALIDATION, 6, Model, averages, {"val_check_interval": 3}),
    "at the end of an epoch": Case(EPOCH, 2, callbacks=averages),
    "validation in accumulation": Case(
        VALIDATION, 2, options={"val_check_interval": 3, "accumulate_grad_batches": 2}
    ),
    "accumulation": Case(BATCH, 9, options={"accumulate_grad_batches": 2}),
    "accumulation by epoch": Case(
        BATCH, 11, callbacks=lambda: [pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 3})]
    ),
    "metric of the epoch": Case(
        BATCH,
        11,
        lambda: Model(schedule="train_epoch"),
        lambda: [EarlyStopping("train_epoch", patience=1, min_delta=0.5)],
    ),
    "plateau in a validation": Case(
        VALIDATION, 2, lambda: Model(schedule="validation"), options={"check_val_every_n_epoch": 2}
    ),
    "plateau with the metric of the last epoch": Case(
        BATCH, 17, lambda: Model(schedule="validation"), options={"check_val_every_n_epoch": 2}
    ),
    "two optimizers": Case(BATCH, 10, Gan),
    "layers that are frozen by epoch": Case(BATCH, 11, Thawing, lambda: [Freezing()]),
    "stochastic averages": Case(
        BATCH,
        17,
        callbacks=lambda: [pl.callbacks.StochasticWeightAveraging(0.01, 2, annealing_epochs=2)],
    ),
    "early end in a validation": Case(
        VALIDATION, 2, callbacks=lambda: [EarlyStopping("validation", patience=1, min_delta=9.0)]
    ),
    "best checkpoints": Case(VALIDATION, 6, Model, files, {"val_check_interval": 3}),
    "validation after the last step": Case(
        VALIDATION, 6, options={"max_steps": 9, "val_check_interval": 3}
    ),
    "limits of batches": Case(
        VALIDATION, 3, options={"limit_val_batches": 2, "limit_train_batches": 5}
    ),
    "unknown averages": Case(VALIDATION, 6, callbacks=lambda: [Swapping()]),
}


@pytest.fixture(autouse=True)
def in_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_resumed_run_is_equal(
    daemon: FakeDaemon, case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    """Losses, rates, weights, averages, optimizer, callbacks, metrics, counters and generators are equal.

    For a save in a validation, Lightning's averages are exchanged.  Weights that another callback has changed
    postpone it, with one line.
    """
    reference, trainer = fit(case, SwansongCallback(socket="none"))
    expected = final(trainer)
    own = SwansongCallback(socket=daemon.path)
    with pytest.raises(Preempted):
        fit(case, own, Notice(daemon, own, case))
    is_postponed = case is CASES["unknown averages"]
    assert caplog.text.count("the checkpoint is postponed") == is_postponed
    restore_newest(daemon)
    resumed, trainer = fit(case, SwansongCallback(socket=daemon.path))
    assert len(resumed.story) < len(reference.story)
    assert resumed.story == reference.story[len(reference.story) - len(resumed.story) :]
    assert resumed.extra == reference.extra
    assert_same(final(trainer), expected)
    assert "guard.step() last" not in caplog.text
    assert "enumerate" not in caplog.text, "Lightning counts the batches"


def test_a_restore_that_fails_leaves_no_checkpoint_in_lightning(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next ``fit`` of the trainer would load the rest of it."""
    case, own = CASES["in an epoch"], SwansongCallback(socket=daemon.path)
    with pytest.raises(Preempted):
        fit(case, own, Notice(daemon, own, case))
    restore_newest(daemon)
    monkeypatch.setattr(EarlyStopping, "load_state_dict", dict.__getitem__)
    again = SwansongCallback(socket=daemon.path)
    with pytest.raises(RestoreError):
        fit(case, again)
    assert again._state is not None
    assert not again._state.extras._trainer._checkpoint_connector._loaded_checkpoint


def test_a_finished_fit_does_not_train_again(daemon: FakeDaemon) -> None:
    """Also a fit that stopped early; the model has the final weights, which are the averages."""

    def callbacks() -> list[Any]:
        return [EMAWeightAveraging(), EarlyStopping("validation", patience=1, min_delta=9.0)]

    case = Case("", 0, Model, callbacks)
    first, _ = fit(case, SwansongCallback(socket=daemon.path))
    restore_newest(daemon)
    again = SwansongCallback(socket=daemon.path)
    second, _ = fit(case, again)
    assert again.guard is not None
    assert again.guard.finished
    assert 0 < len(first.story) < 4 * BATCHES
    assert second.story == []
    assert_same(second.state_dict(), first.state_dict())


def test_a_run_that_will_differ_is_reported_at_its_start(
    daemon: FakeDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    """A tuner, a validation by time, and a training loader without state."""
    case = Case(
        "",
        0,
        Model,
        lambda: [pl.callbacks.LearningRateFinder(num_training_steps=2)],
        {"max_steps": 1, "val_check_interval": "00:00:01:00"},
    )
    fit(case, SwansongCallback(socket=daemon.path), wrap=lambda loader: loader)
    for text in (
        "LearningRateFinder runs again",
        "val_check_interval is a time",
        "has no state_dict()",
    ):
        assert caplog.text.count(text) == 1
