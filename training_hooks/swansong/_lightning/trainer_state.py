# SPDX-License-Identifier: Apache-2.0
"""The state of a ``Trainer`` between two batches: that of Lightning's own checkpoints, and more.

A checkpoint belongs to the moment after a batch and before the validation that may follow it.  A resumed run
continues at this moment: it repeats the validation from its start, and the work at the end of the epoch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from swansong._lightning import pl
from swansong._lightning.logged import set_logged, take_logged
from swansong._torch.digests import sum_of_bits
from swansong._torch.sharding import local
from swansong.rank_files import set_generators, take_generators
from swansong.torch import ResumableLoader, TrainingState

_SWA = "StochasticWeightAveraging"


@dataclass(frozen=True)
class StateBeforeValidation:
    """Facts after a batch that the validation after it changes."""

    progress: dict[str, Any]
    generators: dict[str, Any]
    weights: list[int]


class LightningState(TrainingState):
    """State of a trainer in ``fit``.

    Args:
        trainer: after the setup of its strategy.
    """

    owns_loop = False

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self.extras = _Extras(trainer)
        # The callbacks first: BaseFinetuning adds the groups of parameters that the optimizer's state has.
        optimizers = {f"optimizer_{place}": each for place, each in enumerate(trainer.optimizers)}
        super().__init__(trainer.strategy.model, lightning=self.extras, **optimizers)

    # ------------------------------------------------------------ saving

    @contextlib.contextmanager
    def between_batches(self, *, is_before_validation: bool) -> Iterator[None]:
        """A checkpoint that is taken in this block belongs to the moment of its start."""
        self.extras.is_between_batches = True
        if is_before_validation:
            weights = _checksums(self._trainer.lightning_module)
            self.extras.moment = StateBeforeValidation(
                self.extras.take_progress(), take_generators(), weights
            )
        try:
            yield
        finally:
            self.extras.moment = None
            self.extras.is_between_batches = False

    def can_save(self) -> bool:
        """Whether the weights are those of the training, or can be exchanged for them."""
        with self._moved_back() as has_trained_weights:
            return has_trained_weights

    def snapshot(self) -> Callable[[Path], object]:
        """Copy the state of the moment after the last batch.

        Raises:
            RuntimeError: the weights are not those of the training.
            TypeError: a value cannot be written; names it.
        """
        with self._moved_back() as has_trained_weights:
            if not has_trained_weights:
                raise RuntimeError("a callback has changed the weights for the validation")
            return super().snapshot()

    @contextlib.contextmanager
    def _moved_back(self) -> Iterator[bool]:
        """Undo the changes of a validation in progress, and redo them at the end of the block."""
        moment, module = self.extras.moment, self._trainer.lightning_module
        if moment is None:
            yield True
            return
        has_trained_weights = _checksums(module) == moment.weights
        averages = [] if has_trained_weights else _averages(self._trainer)
        now = take_generators()
        for each in averages:
            each._swap_models(module)  # noqa: SLF001 - it has no public name
        set_generators(moment.generators)
        try:
            yield has_trained_weights or _checksums(module) == moment.weights
        finally:
            set_generators(now)
            for each in averages:
                each._swap_models(module)  # noqa: SLF001

    # ------------------------------------------------------------ loading

    def load(self, directory: Path) -> None:
        """Load all but the parts that :meth:`resume` sets at the start of the training."""
        super().load(directory)
        self._generators = take_generators()

    def resume(self) -> None:
        """Continue between two batches; call it immediately before the work after a batch."""
        self.extras.resume()
        set_generators(self._generators)


class _Extras:
    """State of a trainer, but for the tensors of its model and its optimizers."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self.is_between_batches = False
        """Whether the trainer is in the block of :meth:`LightningState.between_batches`."""
        self.moment: StateBeforeValidation | None = None
        """Facts from before the validation that is in progress."""
        self.restored: dict[str, Any] | None = None
        """The state in the checkpoint that was loaded, until :meth:`resume`; None without one.

        A checkpoint of the end of ``fit`` is not between batches.
        """

    # ------------------------------------------------------------ saving

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        hooked, known = self._dump()
        known_by_id = {id(value): key for key, value in known.items()}
        return {
            "is_between_batches": self.is_between_batches,
            "checkpoint": {
                key: value for key, value in hooked.items() if id(value) not in known_by_id
            },
            "known": {
                key: known_by_id[id(value)]
                for key, value in hooked.items()
                if id(value) in known_by_id
            },
            "progress": self.moment.progress if self.moment else self.take_progress(),
            "logged": take_logged(trainer),
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "reloaded": [getattr(loop, name) for loop, name in self._reloads()],
            "frozen": [name for name, each in self._parameters() if not each.requires_grad],
            "gradients": self._gradients(),
            "saved_at": {
                each.state_key: each._last_global_step_saved  # noqa: SLF001
                for each in trainer.checkpoint_callbacks
                if hasattr(each, "_last_global_step_saved")
            },
        }

    def take_progress(self) -> dict[str, Any]:
        """Return the part of the state that a validation changes."""
        trainer = self._trainer
        connector = trainer._logger_connector  # noqa: SLF001
        return {
            "fit_loop": trainer.fit_loop.state_dict(),
            "should_stop": trainer.should_stop,
            "evaluating": [
                name for name, each in trainer.lightning_module.named_modules() if not each.training
            ],
            "logging": [connector._first_loop_iter, connector._current_fx],  # noqa: SLF001
        }

    def _known(self) -> dict[str, Any]:
        """Return values of Lightning's checkpoint that the :class:`TrainingState` or the script has."""
        trainer = self._trainer
        known = {
            "state_dict": trainer.lightning_module.state_dict(),
            "optimizer_states": [each.state_dict() for each in trainer.optimizers],
        }
        for each in (trainer.lightning_module, trainer.datamodule):
            if each is not None and each.hparams:
                known[each.CHECKPOINT_HYPER_PARAMS_KEY] = dict(each.hparams)
        return known

    def _dump(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the checkpoint that Lightning would write, and the values that need no second copy."""
        trainer, module = self._trainer, self._trainer.lightning_module
        known = self._known()
        checkpoint = {
            **known,
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "pytorch-lightning_version": pl.__version__,
            "loops": {"fit_loop": {}},
            "callbacks": {
                each.state_key: state for each in trainer.callbacks if (state := each.state_dict())
            },
            "lr_schedulers": [each.scheduler.state_dict() for each in trainer.lr_scheduler_configs],
        }
        for each in (trainer.precision_plugin, trainer.datamodule):
            if each is not None and (state := each.state_dict()):
                checkpoint[type(each).__qualname__] = state
        trainer.precision_plugin.on_save_checkpoint(checkpoint)
        for each in trainer.callbacks:
            each.on_save_checkpoint(trainer, module, checkpoint)
        module.on_save_checkpoint(checkpoint)
        return checkpoint, known

    def _gradients(self) -> dict[str, torch.Tensor]:
        # With manual optimization, only the module knows which gradients it will use again.
        is_automatic = self._trainer.lightning_module.automatic_optimization
        if not self.is_between_batches or (
            is_automatic and not self._trainer.fit_loop._should_accumulate()  # noqa: SLF001
        ):
            return {}
        return {
            name: local(each.grad) for name, each in self._parameters() if each.grad is not None
        }

    def _parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        return list(self._trainer.lightning_module.named_parameters())

    def _reloads(self) -> list[tuple[Any, str]]:
        """Return the attributes with the epochs in which the loaders were created."""
        fit_loop = self._trainer.fit_loop
        return [
            (fit_loop, "_last_train_dl_reload_epoch"),
            (fit_loop.epoch_loop.val_loop, "_last_val_dl_reload_epoch"),
        ]

    # ------------------------------------------------------------ loading

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore in Lightning's order: module, data, callbacks, precision, loops, schedulers.

        Not with Lightning's own functions for loops and schedulers, which do not expect the end of ``fit``.
        """
        trainer, module = self._trainer, self._trainer.lightning_module
        known = self._known()
        checkpoint = {
            **{key: known[name] for key, name in state["known"].items() if name in known},
            **state["checkpoint"],
        }
        fit_loop = state["progress"]["fit_loop"]
        checkpoint["loops"] = {"fit_loop": fit_loop}
        module.on_load_checkpoint(checkpoint)
        connector = trainer._checkpoint_connector  # noqa: SLF001 - it has no public name
        of_script, connector._loaded_checkpoint = connector._loaded_checkpoint, checkpoint  # noqa: SLF001
        try:
            connector.restore_datamodule()
            connector.restore_callbacks()
            for each in trainer.callbacks:
                if isinstance(each, pl.callbacks.BaseFinetuning):
                    each.on_fit_start(trainer, module)
            connector.restore_precision_plugin_state()
        finally:
            connector._loaded_checkpoint = of_script  # noqa: SLF001
        trainer.fit_loop.load_state_dict(checkpoint["loops"]["fit_loop"])
        self._load_schedulers(checkpoint["lr_schedulers"])
        frozen = set(state["frozen"])
        for name, parameter in self._parameters():
            parameter.requires_grad_(name not in frozen)
        set_logged(trainer, {**state["logged"], "epoch": []})
        self.restored = state

    def _load_schedulers(self, states: list[dict[str, Any]]) -> None:
        configs = self._trainer.lr_scheduler_configs
        if any(getattr(each, "_scheduler_state", None) for each in _of_kind(self._trainer, _SWA)):
            return  # the callback creates its scheduler later, and loads its state
        if len(configs) != len(states):
            raise ValueError(
                f"the checkpoint contains {len(states)} learning rate schedulers, and this job has"
                f" {len(configs)}"
            )
        for config, state in zip(configs, states, strict=True):
            config.scheduler.load_state_dict(state)

    def resume(self) -> None:
        """Set the parts of the state that the start of the training changes."""
        state, trainer = self.restored, self._trainer
        assert state is not None
        self.restored = None
        progress = state["progress"]
        trainer.should_stop = progress["should_stop"]
        trainer.accumulate_grad_batches = state["accumulate_grad_batches"]
        for (loop, name), epoch in zip(self._reloads(), state["reloaded"], strict=True):
            setattr(loop, name, epoch)
        for loader in trainer.fit_loop._combined_loader.flattened:  # noqa: SLF001
            if isinstance(loader, ResumableLoader):
                loader.set_generators()  # now, because a validation may come before the next batch
        evaluating = set(progress["evaluating"])
        for name, each in trainer.lightning_module.named_modules():
            each.training = name not in evaluating
        for name, each in self._parameters():
            if name in state["gradients"]:
                each.grad = _like(state["gradients"][name], each)
        for each in trainer.checkpoint_callbacks:
            if each.state_key in state["saved_at"]:
                each._last_global_step_saved = state["saved_at"][each.state_key]  # noqa: SLF001
        set_logged(trainer, state["logged"])
        connector = trainer._logger_connector  # noqa: SLF001
        connector._first_loop_iter, connector._current_fx = progress["logging"]  # noqa: SLF001
        for each in _of_kind(trainer, _SWA):
            _start_averaging_again(trainer, each)


def _averages(trainer: pl.Trainer) -> list[Any]:
    """Return the callbacks that exchange the weights for averages during a validation."""
    return _of_kind(trainer, "WeightAveraging")  # since Lightning 2.6


def _of_kind(trainer: pl.Trainer, name: str) -> list[Any]:
    kind = getattr(pl.callbacks, name, ())
    return [each for each in trainer.callbacks if isinstance(each, kind)]


def _start_averaging_again(trainer: pl.Trainer, swa: Any) -> None:
    """Create the scheduler, which the callback itself creates only at the start of an epoch."""
    if swa._scheduler_state is None or swa._initialized:  # noqa: SLF001
        return
    groups = trainer.optimizers[0].param_groups
    before = [{**group, "params": None} for group in groups]
    swa.on_train_epoch_start(trainer, trainer.lightning_module)
    for group, values in zip(groups, before, strict=True):  # a new scheduler sets the learning rate
        group.update({key: value for key, value in values.items() if key != "params"})


def _checksums(module: torch.nn.Module) -> list[int]:
    """Return a checksum of each parameter and buffer, in the part that this rank holds."""
    tensors = (*module.parameters(), *module.buffers())
    sums = [sum_of_bits(local(each.detach())) for each in tensors]
    return [int(each) for each in sums]


def _like(local: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return the gradient of this parameter, on its device and in its layout."""
    if not isinstance(parameter, DTensor):
        return local.to(parameter.device)
    return DTensor.from_local(
        local.to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
