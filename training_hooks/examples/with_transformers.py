# SPDX-License-Identifier: Apache-2.0
"""Hugging Face ``Trainer``: a small GPT-2 that learns the sonnets and survives the loss of its VM.

    python with_transformers.py
    torchrun --standalone --nproc-per-node=2 with_transformers.py

The same command line starts and resumes the run.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from swansong.transformers import SwansongCallback  # Swansong
from torch.utils.data import Dataset
from torch_ddp import read_text
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

CONTEXT = 32


class Windows(Dataset[dict[str, torch.Tensor]]):
    """Windows of the text."""

    def __init__(self, codes: torch.Tensor, count: int) -> None:
        self.codes, self.count = codes, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        window = self.codes[place * 5 : place * 5 + CONTEXT]
        return {"input_ids": window, "labels": window}


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn the sonnets with the Hugging Face Trainer.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--windows", type=int, default=1024, help="per epoch")
    parser.add_argument("--output", default="output", help="directory for the finished model")
    options = parser.parse_args()

    codes, vocabulary = read_text()
    config = GPT2Config(
        vocab_size=vocabulary, n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=2,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if "RANK" not in os.environ:  # one process without torchrun has no group
        backend = None
    args = TrainingArguments(
        output_dir=options.output,
        num_train_epochs=options.epochs,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        warmup_steps=20,
        eval_strategy="steps",
        eval_steps=3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        ddp_backend=backend,
        seed=1609,
    )

    def model() -> Any:  # the Trainer calls it after it has set the seeds
        return GPT2LMHeadModel(config)

    trainer = Trainer(
        args=args,
        model_init=model,
        train_dataset=Windows(codes, options.windows),
        eval_dataset=Windows(codes, 64),
    )
    guard = SwansongCallback(trainer)  # Swansong
    trainer.train(resume_from_checkpoint=guard.restore())  # Swansong
    trainer.save_model(str(Path(options.output)))


if __name__ == "__main__":
    main()
