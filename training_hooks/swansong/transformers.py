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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

import swansong
from swansong._torch.parts import JointDirectory

__all__ = ["SwansongCallback"]


class SwansongCallback(TrainerCallback):  # type: ignore[misc]
    """Saves and restores a trainer, to which it adds itself.

    Args:
        trainer: the trainer to save.
        options: of :func:`swansong.attach`, such as ``every_steps``.
    """

    def __init__(self, trainer: Trainer, **options: Any) -> None:
        self._trainer = trainer
        self._restored: Path | None = None
        self.guard = swansong.attach(JointDirectory(self._save, self._load), **options)
        trainer.add_callback(self)

    def restore(self) -> str | None:
        """Return the directory of the newest whole checkpoint; None for a fresh run.

        Pass it to ``train(resume_from_checkpoint=...)``.

        Raises:
            swansong.RestoreError: a checkpoint exists but cannot be fetched.
        """
        self.guard.restore()
        return None if self._restored is None else str(self._restored)

    def on_step_end(
        self, _args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.guard.step(state.global_step)
        if self.guard.should_stop:
            control.should_training_stop = True

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        self.guard.poll()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.guard.close()

    def _save(self, directory: Path) -> None:
        trainer = self._trainer
        with _changed(
            trainer.args, output_dir=str(directory), push_to_hub=False, save_total_limit=None
        ):
            trainer._save_checkpoint(trainer.model, trial=None)  # noqa: SLF001 - it has no public name

    def _load(self, directory: Path) -> None:
        (self._restored,) = directory.glob("checkpoint-*")


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
