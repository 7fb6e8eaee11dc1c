# SPDX-License-Identifier: Apache-2.0
"""Lightning: a run that is preempted and resumed is equal to an uninterrupted run, in all that Lightning holds.

Each run is a ``Trainer.fit`` in this process.  A preempted run ends with an exception right after its
checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
)
from swansong._lightning.state import LightningState
from swansong.lightning import SwansongCallback
from swansong.torch import ResumableLoader, seed_all
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from testkit.fake_daemon import FakeDaemon

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
        assert checkpoint["epoch"] == epoch and "lr_schedulers" in checkpoint


class Preempted(Exception):
    """The VM is terminated."""


class Notice(pl.Callback):
    """Asks for a checkpoint at one event, and ends the run as soon as a checkpoint is saved.

    Args:
        daemon: that sends the request.
        hook: name of the event.
        count: its number, counted from 1.
    """

    def __init__(self, daemon: FakeDaemon, own: SwansongCallback, hook: str, count: int) -> None:
        self._daemon, self._own, self._left = daemon, own, count
        setattr(self, hook, self._event)
        for name in ("on_validation_batch_end", "on_train_batch_start", "on_validation_end"):
            if name != hook:
                setattr(self, name, self._look)

    def _event(self, trainer: Any, *_: Any, **__: Any) -> None:
        self._look()
        self._left -= not trainer.sanity_checking
        if self._left == 0:
            self._daemon.request()
            from testkit.waiting import until

            until(lambda: self._own.guard is None or self._own.guard.request is not None)

    def _look(self, *_: Any, **__: Any) -> None:
        if self._left <= 0 and self._own.guard is not None and self._own.guard.request is None:
            assert self._own.guard.wait_saved()
            raise Preempted


Make = Callable[[], tuple[Model, list[Any]]]


def fit(
    tmp_path: Path,
    make: Make,
    own: SwansongCallback,
    notice: Notice | None = None,
    **options: Any,
) -> tuple[Model, pl.Trainer]:
    seed_all(5)
    model, callbacks = make()
    options = {"max_epochs": 4, **options}
    data = TensorDataset(torch.randn(8 * BATCHES, 4), torch.randn(8 * BATCHES, 1))
    train = ResumableLoader(DataLoader(data, 8, shuffle=True))
    trainer = pl.Trainer(
        callbacks=[*callbacks, own, *([notice] if notice else [])],
        logger=False,
        enable_checkpointing=any(
            isinstance(each, pl.callbacks.ModelCheckpoint) for each in callbacks
        ),
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
        default_root_dir=tmp_path,
        **options,
    )
    trainer.fit(model, train, DataLoader(data, 16))
    return model, trainer


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
        assert one == other or one != one, f"{place}: {one!r} is not {other!r}"


@pytest.fixture
def compare(tmp_path: Path) -> Iterator[Callable[..., LightningState]]:
    daemons = []

    def compare(make: Make, hook: str, count: int, **options: Any) -> None:
        """Preempt a run at this event, resume it, and compare it with an uninterrupted run."""
        (tmp_path / "reference").mkdir()
        reference, of_reference = fit(
            tmp_path / "reference", make, SwansongCallback(socket=tmp_path / "none"), **options
        )
        expected = final(of_reference)
        (tmp_path / "run").mkdir()
        daemon = FakeDaemon(tmp_path / "run")
        daemons.append(daemon)
        own = SwansongCallback(socket=daemon.path)
        with pytest.raises(Preempted):
            fit(tmp_path / "reference", make, own, Notice(daemon, own, hook, count), **options)
        (saved,) = daemon.wait_sealed(1)
        daemon.restorable = lambda: (saved, int(saved.name.split("-")[1].split(".")[0]))
        resumed, of_resumed = fit(
            tmp_path / "reference", make, SwansongCallback(socket=daemon.path), **options
        )
        assert resumed.story == reference.story[-len(resumed.story) :]
        assert 0 < len(resumed.story) < len(reference.story)
        assert resumed.extra == reference.extra
        assert_same(final(of_resumed), expected)

    yield compare
    for daemon in daemons:
        daemon.stop()


@pytest.mark.parametrize(
    ("hook", "count"),
    [("on_train_batch_start", 10), ("on_validation_batch_end", 6), ("on_train_epoch_end", 2)],
)
def test_callbacks_with_state(compare: Callable[..., None], hook: str, count: int) -> None:
    """In an epoch, in a validation and after it: EMA, early stopping, and a user's hooks."""

    def make() -> tuple[Model, list[Any]]:
        return Model(), [
            EMAWeightAveraging(decay=0.7),
            EarlyStopping("validation", patience=9),
            Hooks(),
        ]

    compare(make, hook, count, val_check_interval=3)


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


MEAN = {"monitor": "train_epoch", "patience": 1, "min_delta": 0.5}


@pytest.mark.parametrize(
    ("kind", "hook", "count", "options"),
    [
        ("accumulate", "on_validation_batch_end", 6, {"val_check_interval": 3}),
        ("accumulate", "on_train_batch_start", 9, {}),
        ("scheduled", "on_train_batch_start", 11, {}),
        ("train-plateau", "on_train_batch_start", 11, {}),
        ("plateau", "on_validation_batch_end", 2, {"check_val_every_n_epoch": 2}),
        ("plateau", "on_train_batch_start", 17, {"check_val_every_n_epoch": 2}),
        ("gan", "on_train_batch_start", 10, {}),
        ("freezing", "on_train_batch_start", 11, {}),
        ("swa", "on_train_batch_start", 17, {}),
        ("early", "on_validation_batch_end", 2, {}),
        ("checkpoint", "on_validation_batch_end", 6, {"val_check_interval": 3}),
        ("max-steps", "on_validation_batch_end", 6, {"max_steps": 9, "val_check_interval": 3}),
        (
            "limits",
            "on_validation_batch_end",
            3,
            {"limit_val_batches": 2, "limit_train_batches": 5},
        ),
    ],
)
def test_kinds(
    compare: Callable[..., None],
    tmp_path: Path,
    kind: str,
    hook: str,
    count: int,
    options: dict[str, Any],
) -> None:
    """Accumulation, metrics of the epoch, schedulers, callbacks that change the training by epoch."""

    def make() -> tuple[Model, list[Any]]:
        match kind:
            case "scheduled":
                return Model(), [pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 3})]
            case "train-plateau":
                return Model(schedule="train_epoch"), [EarlyStopping(**MEAN)]
            case "plateau":
                return Model(schedule="validation"), []
            case "gan":
                return Gan(), []
            case "freezing":
                return Thawing(), [Freezing()]
            case "swa":
                return Model(), [
                    pl.callbacks.StochasticWeightAveraging(0.01, 2, annealing_epochs=2)
                ]
            case "early":
                return Model(), [EarlyStopping("validation", patience=1, min_delta=9.0)]
            case "checkpoint":
                files = pl.callbacks.ModelCheckpoint(
                    tmp_path / "files",
                    monitor="validation",
                    save_top_k=2,
                    enable_version_counter=False,
                )
                return Model(), [files, pl.callbacks.WeightAveraging()]
        return Model(), []

    if kind == "accumulate":
        options["accumulate_grad_batches"] = 2
    compare(make, hook, count, **options)
