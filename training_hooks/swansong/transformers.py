# SPDX-License-Identifier: Apache-2.0
"""A callback for the Hugging Face ``Trainer``: all ranks save the same step at a notice, and resume from it.

::

    from swansong.transformers import SwansongCallback

    trainer = Trainer(model, args, train_dataset=...)
    guard = SwansongCallback(trainer)
    trainer.train(resume_from_checkpoint=guard.restore())

A checkpoint contains the ``Trainer``'s own ``checkpoint-N/``, so other tools can read it.  Training pauses
while the files are written.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import has_length

import swansong
from swansong._checkpoint.redone import digests_of_generators
from swansong._log import log
from swansong._torch.parts import JointDirectory
from swansong.rank_files import set_generators, take_generators

__all__ = ["SwansongCallback"]

_BEST = "best"
_NOTE = "swansong_{}.json"
_NOT_WEIGHTS = ("optimizer*", "scheduler*", "scaler*", "rng_state*", "global_step*")
_WATCHED_STEPS = 3
"""Number of steps after a start at which the callback checks whether the data set draws random numbers."""
_ROUNDING = 1e-9
"""Added to the Trainer's epoch, a float that is a little below a whole number where one begins."""
_REPEATED = ("grad_norm", "epoch", "ignore_keys_for_eval", "learning_rate")
"""Arguments of the Trainer's method that logs, evaluates and saves, which a resumed start needs again."""


class SwansongCallback(TrainerCallback):  # type: ignore[misc]
    """Saves and restores a trainer, to which it adds itself.

    A checkpoint is taken before the log, the evaluation and the ``Trainer``'s own checkpoint of its step.
    After a resume, these three come first.

    Args:
        trainer: the trainer to save.
        options: of :func:`swansong.attach`, such as ``every_steps``.

    Raises:
        ValueError: ``enable_jit_checkpoint`` is on.
        TypeError: the trainer uses DeepSpeed.
    """

    def __init__(self, trainer: Trainer, **options: Any) -> None:
        if getattr(trainer.args, "enable_jit_checkpoint", False):
            raise ValueError(
                "enable_jit_checkpoint is on: the ranks may then save different steps; turn it off"
            )
        if getattr(trainer, "is_deepspeed_enabled", False):
            raise TypeError(
                "the Trainer uses DeepSpeed, whose state cannot be saved by rank; use DDP or FSDP"
            )
        self._trainer = trainer
        self._restores_callbacks = trainer.args.restore_callback_states_from_checkpoint
        self._restored: Path | None = None
        self._reported_step = 0
        self._arguments: dict[str, Any] | None = None
        self._is_epoch_over = False
        self._generators: dict[str, Any] | None = None
        """The states of the generators before the evaluation in progress."""
        self._last_drawn: Any = None
        self._has_ended_pass = False
        """Whether the first pass over a data set without a length is over."""
        self._steps_to_watch = _WATCHED_STEPS
        directory = JointDirectory(self._save, self._load)
        directory.owns_loop = False
        self.guard = swansong.attach(directory, **options)
        trainer.add_callback(self)
        # The Trainer calls this method after all callbacks of a step or an epoch, and no callback after it.
        self._follow = trainer._maybe_log_save_evaluate  # noqa: SLF001 - it has no public name
        self._signature = inspect.signature(self._follow)
        trainer._maybe_log_save_evaluate = self._boundary  # noqa: SLF001

    def restore(self) -> str | None:
        """Return the directory of the newest whole checkpoint; None for a fresh run.

        Pass it to ``train(resume_from_checkpoint=...)``.

        Raises:
            swansong.RestoreError: a checkpoint exists but cannot be fetched.
        """
        self.guard.restore()
        if self._restored is None:
            return None
        args = self._trainer.args
        # Otherwise EarlyStoppingCallback would count from zero again.
        args.restore_callback_states_from_checkpoint = True
        if args.ignore_data_skip:
            log.warning(
                "ignore_data_skip is on: the resumed run repeats batches, so it differs from an uninterrupted"
                " one; turn it off"
            )
        return str(self._restored)

    # ------------------------------------------------------------ callbacks

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._reported_step = state.global_step
        directory, self._restored = self._restored, None
        note = None if directory is None else self._read_note(directory)
        if directory is not None and note is not None:
            self._catch_up(directory, note)
            if control.should_training_stop:
                if not self.guard.finished:  # which has been logged already
                    log.warning(
                        "the run finished at step %s: it does not train again", state.global_step
                    )
                # The Trainer looks at should_training_stop only after one more step.
                self._trainer._run_epoch = lambda **_: None  # noqa: SLF001
        if args.dataloader_persistent_workers:
            log.warning(
                "dataloader_persistent_workers is on: a resumed run starts its workers again, and draws other"
                " random numbers in the next epochs; turn it off"
            )
        if args.eval_on_start:
            self._generators = take_generators()

    def on_epoch_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        _control: TrainerControl,
        *,
        train_dataloader: Any = None,
        **_: Any,
    ) -> None:
        sampler = train_dataloader
        while (inner := getattr(sampler, "batch_sampler", None)) is not None:
            sampler = inner  # accelerate divides the batches of several ranks
        sampler = getattr(sampler, "sampler", None)
        if isinstance(sampler, LengthGroupedSampler):
            # It draws the order of each epoch from the global generator, which a resume sets only later.
            epoch = int((state.epoch or 0.0) + _ROUNDING)
            sampler.generator = torch.Generator().manual_seed(args.seed + epoch)
        self._is_epoch_over = False
        self._generators = None
        self._last_drawn = None  # a sampler may draw at the start of an epoch

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if self._last_drawn is not None and self._last_drawn != digests_of_generators():
            self._steps_to_watch = 0
            log.warning(
                "the data set or its collator draws random numbers in the trainer's process: after a resume"
                " in the middle of an epoch, the next batch contains others; derive them from the index"
                " of the sample"
            )
        self._last_drawn = None

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._is_epoch_over = False

    def on_epoch_end(
        self,
        _args: TrainingArguments,
        _state: TrainerState,
        control: TrainerControl,
        *,
        train_dataloader: Any = None,
        **_: Any,
    ) -> None:
        self._is_epoch_over = True
        if not (
            control.should_training_stop or self._has_ended_pass or has_length(train_dataloader)
        ):
            self._has_ended_pass = True
            log.warning(
                "the data set has no length, so the Trainer does not know in which pass over it a step is: a"
                " resume after the first pass differs; give it a length, or let one pass contain max_steps"
            )
        if control.should_epoch_stop and not control.should_training_stop:
            log.warning(
                "a callback ended this epoch early: the Trainer resumes such a run at another batch, because"
                " it counts epochs by steps"
            )

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        if self._generators is not None:
            self.guard.poll()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._trainer.__dict__.pop("_run_epoch", None)
        self.guard.finish()

    # ------------------------------------------------------------ the end of a step

    def _boundary(self, *args: Any, **kwargs: Any) -> None:
        """Report the step, then log, evaluate and save as the Trainer does."""
        trainer = self._trainer
        given = self._signature.bind(*args, **kwargs).arguments
        self._arguments = {name: _plain(given[name]) for name in _REPEATED if name in given}
        if trainer.control.should_evaluate:
            self._generators = take_generators()
        if trainer.state.global_step > self._reported_step:
            self._reported_step = trainer.state.global_step
            self.guard.step(trainer.state.global_step)
        self._follow(*args, **kwargs)
        self._arguments = self._generators = None
        if self.guard.should_stop:
            trainer.control.should_training_stop = True
        if self._steps_to_watch > 0:
            self._steps_to_watch -= 1
            self._last_drawn = digests_of_generators()

    def _catch_up(self, directory: Path, note: dict[str, Any]) -> None:
        """Do what was due after the step of the checkpoint: log, evaluation, save, end of the epoch."""
        trainer = self._trainer
        state, control = trainer.state, trainer.control
        if note["world_size"] != trainer.args.world_size:
            log.warning(
                "%s ranks saved the checkpoint and this job has %s: training continues, but not bit by bit",
                *(note["world_size"], trainer.args.world_size),
            )
        is_at_end = note["max_steps"] <= state.global_step
        if note["stops"] and not (is_at_end and state.max_steps > state.global_step):
            control.should_training_stop = True
        trainer._load_rng_state(str(directory))  # noqa: SLF001 - here and below, as in train()
        trainer._tr_loss += note["loss"]  # noqa: SLF001
        trainer._total_loss_scalar -= note["loss"]  # noqa: SLF001 - the summary covers this start only
        trainer._globalstep_last_logged = note["logged_step"]  # noqa: SLF001
        if note["arguments"] is not None:
            self._is_epoch_over = note["is_epoch_over"]
            self._repeat(note["arguments"])
            is_last = float(state.epoch).is_integer() or control.should_training_stop
            if is_last and not note["is_epoch_over"]:
                trainer.callback_handler.on_epoch_end(trainer.args, state, control)
                self._repeat(note["arguments"])
        for path in directory.glob("rng_state*.pth"):  # train() loads them later
            path.unlink()
        trainer._save_rng_state(str(directory))  # noqa: SLF001

    def _repeat(self, arguments: dict[str, Any]) -> None:
        trainer = self._trainer
        self._boundary(
            tr_loss=trainer._tr_loss,  # noqa: SLF001
            model=trainer.model_wrapped,
            trial=None,
            start_time=None,
            **arguments,
        )

    # ------------------------------------------------------------ files

    def _save(self, directory: Path) -> None:
        trainer = self._trainer
        with _changed(
            trainer.args,
            output_dir=str(directory),
            push_to_hub=False,
            save_total_limit=None,
            save_only_model=False,
        ):
            trainer._save_checkpoint(trainer.model, trial=None)  # noqa: SLF001
        (own,) = directory.glob("checkpoint-*")
        if (own / TRAINING_ARGS_NAME).exists():
            with _changed(
                trainer.args, restore_callback_states_from_checkpoint=self._restores_callbacks
            ):
                torch.save(trainer.args, own / TRAINING_ARGS_NAME)
        if self._generators is not None:
            # An evaluation may draw random numbers.  A checkpoint taken in it contains the state before it.
            now = take_generators()
            try:
                set_generators(self._generators)
                trainer._save_rng_state(str(own))  # noqa: SLF001
            finally:
                set_generators(now)
        name = _NOTE.format(trainer.args.process_index)
        (own / name).write_text(json.dumps(self._note()), encoding="utf-8")
        best = trainer.state.best_model_checkpoint
        if trainer.args.load_best_model_at_end and trainer.args.should_save and best:
            # On another VM the Trainer's own checkpoints do not exist.
            ignored = shutil.ignore_patterns(*_NOT_WEIGHTS)
            shutil.copytree(best, directory / _BEST / Path(best).name, ignore=ignored)

    def _note(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "world_size": trainer.args.world_size,
            "max_steps": trainer.state.max_steps,
            "stops": trainer.control.should_training_stop,
            "loss": float(trainer._tr_loss),  # noqa: SLF001
            "logged_step": trainer._globalstep_last_logged,  # noqa: SLF001
            "is_epoch_over": self._is_epoch_over,
            "arguments": self._arguments,
        }

    def _load(self, directory: Path) -> None:
        (self._restored,) = directory.glob("checkpoint-*")
        args = self._trainer.args
        for best in (directory / _BEST).glob("checkpoint-*"):
            with args.main_process_first(local=True, desc="restore the best checkpoint"):
                if not Path(args.output_dir, best.name).exists():
                    shutil.copytree(best, Path(args.output_dir, best.name))

    def _read_note(self, directory: Path) -> dict[str, Any] | None:
        for rank in (self._trainer.args.process_index, 0):
            path = directory / _NOTE.format(rank)
            if path.exists():
                note: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
                return note
        return None


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


@contextlib.contextmanager
def _changed(args: TrainingArguments, **values: Any) -> Iterator[None]:
    before = {name: getattr(args, name) for name in values}
    for name, value in values.items():
        setattr(args, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(args, name, value)
