# SPDX-License-Identifier: Apache-2.0
"""Hugging Face ``Trainer`` with its just-in-time checkpoint on SIGTERM.

See ``enable_jit_checkpoint`` and ``resume_from_checkpoint`` in
https://huggingface.co/docs/transformers/main_classes/trainer.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import work
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

_WHOLE = ("model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json")


class Numbers(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        return {"labels": torch.tensor(place)}


class Steps(TrainerCallback):
    """Reports each step, and asks for the periodic saves."""

    def __init__(self, witness: work.Witness, timer: work.Timer) -> None:
        self._witness, self._timer = witness, timer

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **facts: Any) -> None:
        optimizer = facts["optimizer"]
        found = work.step_of(facts["model"], getattr(optimizer, "optimizer", optimizer))
        self._witness.restored(state.global_step, found)

    def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        self._witness.step(state.global_step)
        if self._timer.is_due():
            control.should_save = True


def main() -> None:
    options = work.options()
    model = work.Model(options.size_bytes, options.step_s)
    optimizer = work.Optimizer(model)
    witness = work.Witness(options.witness)
    args = TrainingArguments(
        options.out,
        max_steps=99_999,
        per_device_train_batch_size=1,
        logging_strategy="no",
        save_strategy="no",
        save_total_limit=2,
        enable_jit_checkpoint=True,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    timer = work.Timer(options.first_save_s, options.save_every_s)
    trainer = Trainer(
        model,
        args,
        train_dataset=Numbers(),
        optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer)),
        callbacks=[Steps(witness, timer)],
    )
    whole = (
        path
        for _, path in work.checkpoints(options.out, "checkpoint-")
        if all(os.path.exists(os.path.join(path, name)) for name in _WHOLE)
        and not os.path.exists(os.path.join(path, "checkpoint-is-incomplete.txt"))
    )
    trainer.train(resume_from_checkpoint=next(whole, None))


if __name__ == "__main__":
    main()
