# SPDX-License-Identifier: Apache-2.0
"""A Lightning callback that saves the trainer's state at a notice, and restores it at the start of ``fit``.

::

    from swansong.lightning import SwansongCallback

    trainer = Trainer(callbacks=[SwansongCallback()], ...)
    trainer.fit(model, ResumableLoader(DataLoader(...)))

A checkpoint contains the same state as :class:`swansong.torch.TrainingState`, and the state of Lightning's
loops and of all callbacks.  Swansong writes no Lightning checkpoint, gathers nothing and unpickles nothing.
"""

from __future__ import annotations

import os
from typing import Any

import swansong
from swansong._torch.parts import Parts
from swansong.torch import TrainingState

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import (
        DDPStrategy,
        ModelParallelStrategy,
        SingleDeviceStrategy,
    )
except ImportError:  # the older name of the package
    from pytorch_lightning import Callback, LightningModule, Trainer
    from pytorch_lightning.strategies import (
        DDPStrategy,
        ModelParallelStrategy,
        SingleDeviceStrategy,
    )

__all__ = ["SwansongCallback"]


class SwansongCallback(Callback):  # type: ignore[misc]
    """Attaches and restores at the start of ``fit``, and reports each optimizer step.

    Call ``fit`` without ``ckpt_path``.  The training loader must have a ``state_dict()``, such as
    :class:`swansong.torch.ResumableLoader`.  Otherwise an interrupted epoch begins again.

    Args:
        options: of :func:`swansong.attach`, such as ``every_steps``.

    Raises:
        swansong.RestoreError: in ``fit``: a checkpoint exists but cannot be restored.
        TypeError: in ``fit``: the state of the trainer's strategy cannot be saved by rank.
    """

    def __init__(self, **options: Any) -> None:
        self.guard: swansong.Guard | None = None
        self._options = options
        self._loss: Any = None
        self._reported_step = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, SingleDeviceStrategy | DDPStrategy | ModelParallelStrategy):
            raise TypeError(
                f"the state of {type(strategy).__name__} cannot be saved by rank; SwansongCallback supports"
                " one device, DDP and ModelParallelStrategy (FSDP2)"
            )
        # Lightning's own launcher sets fewer variables than torchrun.
        ranks = {
            "RANK": trainer.global_rank,
            "LOCAL_RANK": trainer.local_rank,
            "WORLD_SIZE": trainer.world_size,
            "LOCAL_WORLD_SIZE": trainer.num_devices,
            "GROUP_RANK": trainer.node_rank,
        }
        if trainer.world_size > 1:
            os.environ.update({name: str(number) for name, number in ranks.items()})
        first, *more = trainer.optimizers or [None]
        state = TrainingState(
            strategy.model,
            first,
            scheduler=Parts(_schedulers(trainer)),
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            lightning=_Loops(trainer, pl_module, self),
            **{f"optimizer_{number}": optimizer for number, optimizer in enumerate(more, 1)},
        )
        self.guard = swansong.attach(state, **self._options)
        self._reported_step = self.guard.restore()

    def on_train_batch_end(
        self, trainer: Trainer, _module: LightningModule, outputs: Any, *_: Any
    ) -> None:
        self._loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        # on_train_epoch_end reports the last batch, after the validation: a resume would skip it otherwise.
        if not _is_last_batch(trainer):
            self._step(trainer)

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self.guard is not None and not trainer.sanity_checking:
            if self.guard.request is not None:
                self._step(trainer)  # a run that resumes here skips the rest of the validation
            self.guard.poll()

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            # Otherwise ReduceLROnPlateau would miss this validation in a resumed epoch.
            trainer.fit_loop.restarting = False

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        if _is_last_batch(trainer):
            # Lightning does not call next() after the last batch, so the loader does not see the end.
            for loader in _loaders(trainer):
                if hasattr(loader, "end_epoch"):
                    loader.end_epoch()
        self._step(trainer)

    def on_fit_end(self, *_: Any) -> None:
        if self.guard is not None:
            self.guard.close()

    def on_exception(
        self, _trainer: Trainer, _module: LightningModule, exception: BaseException
    ) -> None:
        if self.guard is not None:
            self.guard.__exit__(type(exception), exception, None)

    def _step(self, trainer: Trainer) -> None:
        if self.guard is not None and trainer.global_step > self._reported_step:
            self._reported_step = trainer.global_step
            self.guard.step(trainer.global_step, loss=self._loss)
            if self.guard.should_stop:
                trainer.should_stop = True


class _Loops:
    """Progress of Lightning's loops, and the state of the callbacks and of the module's hooks."""

    def __init__(self, trainer: Trainer, module: LightningModule, own: Callback) -> None:
        self._trainer, self._module = trainer, module
        self._callbacks = [each for each in trainer.callbacks if each is not own]

    def state_dict(self) -> dict[str, Any]:
        of_module: dict[str, Any] = {}
        self._module.on_save_checkpoint(of_module)
        return {
            "fit_loop": self._trainer.fit_loop.state_dict(),
            "callbacks": {each.state_key: each.state_dict() for each in self._callbacks},
            "module": of_module,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._trainer.fit_loop.load_state_dict(state["fit_loop"])
        for each in self._callbacks:
            if state["callbacks"].get(each.state_key):
                each.load_state_dict(state["callbacks"][each.state_key])
        self._module.on_load_checkpoint(state["module"])


def _schedulers(trainer: Trainer) -> list[Any]:
    return [config.scheduler for config in trainer.lr_scheduler_configs]


def _is_last_batch(trainer: Trainer) -> bool:
    return bool(trainer.fit_loop.epoch_loop.batch_progress.is_last_batch)


def _loaders(trainer: Trainer) -> list[Any]:
    loader = trainer.fit_loop._combined_loader  # noqa: SLF001 - the public one is not always flat
    return [] if loader is None else list(loader.flattened)
