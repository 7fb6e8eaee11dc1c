# SPDX-License-Identifier: Apache-2.0
"""A Lightning callback that saves the trainer's state at a notice, and restores it at the start of ``fit``.

::

    from swansong.lightning import SwansongCallback

    trainer = Trainer(callbacks=[SwansongCallback()], ...)
    trainer.fit(model, ResumableLoader(DataLoader(...)))

A checkpoint contains the state that Lightning's own checkpoints contain, and what they leave out: generators,
logged values, accumulated gradients.  Swansong writes no Lightning checkpoint, gathers nothing and unpickles
nothing.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import swansong
from swansong._lightning import pl
from swansong._lightning.trainer_state import LightningState
from swansong._log import log

__all__ = ["SwansongCallback"]

_STRATEGIES = (
    pl.strategies.SingleDeviceStrategy,
    pl.strategies.DDPStrategy,
    pl.strategies.ModelParallelStrategy,
)
_TUNERS = (pl.callbacks.BatchSizeFinder, pl.callbacks.LearningRateFinder)


class SwansongCallback(pl.Callback):  # type: ignore[misc]
    """Attaches and restores at the start of ``fit``, and reports each optimizer step.

    A checkpoint belongs to the end of a batch: after all hooks ``on_train_batch_end``, before a validation.
    The training loader must have a ``state_dict()``, such as :class:`swansong.torch.ResumableLoader`.

    Args:
        options: of :func:`swansong.attach`, such as ``every_steps``.

    Raises:
        swansong.RestoreError: in ``fit``: a checkpoint exists but cannot be restored.
        TypeError: in ``fit``: the state of the trainer's strategy cannot be saved by rank.
        ValueError: in ``fit``: ``ckpt_path`` would replace the restored state.
    """

    def __init__(self, **options: Any) -> None:
        self.guard: swansong.Guard | None = None
        self._options = options
        self._state: LightningState | None = None
        self._reported_step = 0
        self._loss: Any = None
        self._is_postponed = False
        self._is_resumed = False
        self._stepped_mono_s = 0.0
        self._step_s = 0.0
        """Duration of the last step, with all its batches."""

    # ------------------------------------------------------------ the start

    def setup(self, trainer: pl.Trainer, _module: pl.LightningModule, stage: str) -> None:
        """Restore before the other callbacks' ``on_fit_start``, as Lightning restores its checkpoints."""
        if stage == "fit":
            others = [each for each in trainer.callbacks if each is not self]
            tuners = [each for each in others if isinstance(each, _TUNERS)]
            trainer.callbacks = [*tuners, self, *(each for each in others if each not in tuners)]

    def on_fit_start(self, trainer: pl.Trainer, _module: pl.LightningModule) -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, _STRATEGIES):
            raise TypeError(
                f"the state of {type(strategy).__name__} cannot be saved by rank; SwansongCallback supports"
                " one device, DDP and ModelParallelStrategy (FSDP2)"
            )
        _warn_at_start(trainer)
        self._state = LightningState(trainer)
        self._is_postponed = False
        self.guard = swansong.attach(self._state, **self._options)
        self._reported_step = self.guard.restore()
        self._stepped_mono_s = time.monotonic()
        epoch_loop = trainer.fit_loop.epoch_loop
        self._advance_end = epoch_loop.on_advance_end
        epoch_loop.on_advance_end = lambda *fetcher: self._between_batches(trainer, *fetcher)
        if self._state.extras.restored is not None:
            self._restored(trainer, self._state, self._state.extras.restored)

    def _restored(
        self, trainer: pl.Trainer, state: LightningState, restored: dict[str, Any]
    ) -> None:
        """Let the training continue after the restored batch: none of Lightning's own restarts fits."""
        connector = trainer._checkpoint_connector  # noqa: SLF001 - here and below: it has no public name
        if connector._loaded_checkpoint:  # noqa: SLF001
            if trainer.strategy.restore_checkpoint_after_setup:
                raise ValueError(
                    "fit(ckpt_path=...) would replace the state that Swansong has restored; call fit without"
                    " ckpt_path"
                )
            log.warning(
                "fit(ckpt_path=...) is ignored: Swansong has restored a newer state of the run"
            )
            connector._loaded_checkpoint = {}  # noqa: SLF001
        _warn_of_missing_files(trainer)
        if not restored["is_between_batches"]:
            trainer.should_stop = restored["progress"]["should_stop"]
            log.warning(
                "the restored checkpoint is that of the end of fit; see max_epochs and max_steps"
            )
            return
        fit_loop = trainer.fit_loop
        epoch_loop = fit_loop.epoch_loop
        advance, max_steps = epoch_loop.advance, epoch_loop.max_steps
        if 0 <= max_steps <= trainer.global_step:
            epoch_loop.max_steps = (
                trainer.global_step + 1
            )  # the work after the last step is not done yet

        def resume(*_: Any) -> None:
            epoch_loop.advance, epoch_loop.max_steps = advance, max_steps
            for loop in (fit_loop, epoch_loop, epoch_loop.val_loop):
                loop._restarting = False  # noqa: SLF001
            state.resume()
            self._is_resumed = True

        epoch_loop.advance = resume

    def on_train_start(self, trainer: pl.Trainer, _module: pl.LightningModule) -> None:
        for loader in _loaders(trainer):
            if not hasattr(loader, "state_dict"):
                log.warning(
                    "the training loader %s has no state_dict(), so a resumed run begins its epoch again;"
                    " wrap it in swansong.torch.ResumableLoader",
                    type(loader).__qualname__,
                )
            elif trainer.num_training_batches == float("inf"):
                log.warning(
                    "the training loader %s has no length, so Lightning loads one batch ahead, and a resumed"
                    " run does not train on that batch; give the data set a __len__()",
                    type(loader).__qualname__,
                )

    # ------------------------------------------------------------ the training loop

    def on_train_batch_end(
        self, _trainer: pl.Trainer, _module: pl.LightningModule, outputs: Any, *_: Any
    ) -> None:
        self._loss = outputs.get("loss") if isinstance(outputs, dict) else outputs

    def _between_batches(self, trainer: pl.Trainer, *fetcher: Any) -> None:
        """Save after a batch, if a checkpoint is due, and then do Lightning's work after the batch."""
        state, guard = self._state, self.guard
        assert state is not None
        assert guard is not None
        fit_loop = trainer.fit_loop
        epoch_loop = fit_loop.epoch_loop
        is_resumed, self._is_resumed = self._is_resumed, False
        if epoch_loop.batch_progress.is_last_batch and not is_resumed:
            # Lightning does not call next() after the last batch, so the loader does not see the end.
            for loader in _loaders(trainer):
                if hasattr(loader, "end_epoch"):
                    loader.end_epoch()
        if fit_loop._skip_backward:  # noqa: SLF001
            # The epoch for batch norms of StochasticWeightAveraging can only be repeated as a whole.
            self._advance_end(*fetcher)
            return
        is_validating = epoch_loop._should_check_val_fx(*fetcher)  # noqa: SLF001
        with state.between_batches(is_before_validation=is_validating):
            if trainer.global_step > self._reported_step:
                self._reported_step = trainer.global_step
                self._step_s = time.monotonic() - self._stepped_mono_s
                self._stepped_mono_s += self._step_s
                guard.step(trainer.global_step, loss=self._loss)
            elif self._is_step_too_long():
                guard.poll()
            if guard.should_stop:
                trainer.should_stop = True  # and no validation: the VM will be terminated
            else:
                self._advance_end(*fetcher)

    def _is_step_too_long(self) -> bool:
        """Whether the VM may be terminated before the gradients of this step are complete."""
        assert self.guard is not None
        request = self.guard.request
        return request is not None and time.monotonic() + 2 * self._step_s > request.deadline_mono_s

    def on_validation_batch_end(self, *_: Any) -> None:
        state, guard = self._state, self.guard
        if state is None or guard is None or not state.extras.is_between_batches:
            return
        if guard.request is None or state.can_save():
            guard.poll()
        elif not self._is_postponed:
            self._is_postponed = True
            log.warning(
                "a callback has changed the weights for the validation: the checkpoint is postponed to the"
                " end of the validation"
            )

    # ------------------------------------------------------------ the end

    def on_fit_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._detach(trainer)
        if self.guard is not None:
            self.guard.finish()

    def on_exception(
        self, trainer: pl.Trainer, _module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._detach(trainer)
        if self.guard is not None:
            self.guard.__exit__(type(exception), exception, None)

    def _detach(self, trainer: pl.Trainer) -> None:
        for name in ("advance", "on_advance_end"):
            vars(trainer.fit_loop.epoch_loop).pop(name, None)


def _warn_at_start(trainer: pl.Trainer) -> None:
    for each in trainer.callbacks:
        if isinstance(each, _TUNERS):
            log.warning(
                "%s runs again in each resumed run, and its result may differ on another VM; run it once, and"
                " set the value that it finds",
                type(each).__name__,
            )
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        log.warning(
            "val_check_interval is a time, so a resumed run validates after other batches than an"
            " uninterrupted run; set a number of batches"
        )


def _warn_of_missing_files(trainer: pl.Trainer) -> None:
    for each in trainer.checkpoint_callbacks:
        path = getattr(each, "best_model_path", "")
        if path and "://" not in path and not Path(path).exists():
            log.warning(
                "the best checkpoint of %s, %s, does not exist on this VM; put its dirpath on shared storage",
                type(each).__name__,
                path,
            )


def _loaders(trainer: pl.Trainer) -> list[Any]:
    loader = trainer.fit_loop._combined_loader  # noqa: SLF001 - the public one is not always flat
    return [] if loader is None else list(loader.flattened)
