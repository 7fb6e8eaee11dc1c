# SPDX-License-Identifier: Apache-2.0
"""A Lightning callback: the trainer's state is saved at a notice, and found again at the start of ``fit``.

::

    from swansong.lightning import SwansongCallback

    trainer = Trainer(callbacks=[SwansongCallback()], ...)
    trainer.fit(model, ResumableLoader(DataLoader(...)))

Saved is what :class:`swansong.torch.TrainingState` saves, and with it Lightning's loops and the state of
all callbacks.  No file of Lightning's own is written, nothing is gathered, and nothing is unpickled.
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
except ImportError:  # the same under its older name
    from pytorch_lightning import Callback, LightningModule, Trainer
    from pytorch_lightning.strategies import (
        DDPStrategy,
        ModelParallelStrategy,
        SingleDeviceStrategy,
    )

__all__ = ["SwansongCallback"]


class SwansongCallback(Callback):  # type: ignore[misc]
    """Attaches at the start of ``fit``, restores, and counts optimizer steps.

    Args:
        options: of :func:`swansong.attach`, such as ``every_steps``.

    Give ``fit`` no ``ckpt_path``.  The training loader must have a ``state_dict``, such as
    :class:`swansong.torch.ResumableLoader`, or an epoch that was interrupted begins anew.

    Raises:
        swansong.RestoreError: in ``fit``: there is a checkpoint, but it cannot be restored.
        TypeError: in ``fit``: a strategy whose state cannot be saved by rank.
    """

    def __init__(self, **options: Any) -> None:
        self.guard: swansong.Guard | None = None
        self._options = options
        self._loss: Any = None
        self._said_step = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, SingleDeviceStrategy | DDPStrategy | ModelParallelStrategy):
            raise TypeError(
                f"{type(strategy).__name__} keeps its state in a way of its own; SwansongCallback works with"
                " one device, DDP and ModelParallelStrategy (FSDP2)"
            )
        # Lightning's own launcher tells less than torchrun does.
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
        self._said_step = self.guard.restore()

    def on_train_batch_end(
        self, trainer: Trainer, _module: LightningModule, outputs: Any, *_: Any
    ) -> None:
        self._loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        # Of the last batch the epoch's end tells, after the validation: else that would be skipped on resume.
        if not _is_last_batch(trainer):
            self._step(trainer)

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self.guard is not None and not trainer.sanity_checking:
            if self.guard.request is not None:
                self._step(trainer)  # now or never: a run that resumes here leaves the rest out
            self.guard.poll()

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            # Else ReduceLROnPlateau would not hear of this validation, in an epoch that was resumed.
            trainer.fit_loop.restarting = False

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        if _is_last_batch(trainer):
            # Lightning does not ask for the batch after the last one, by which a loader sees an epoch end.
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
        if self.guard is not None and trainer.global_step > self._said_step:
            self._said_step = trainer.global_step
            self.guard.step(trainer.global_step, loss=self._loss)
            if self.guard.should_stop:
                trainer.should_stop = True


class _Loops:
    """Lightning's place in the run, and what its callbacks and the module keep beside the weights."""

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
