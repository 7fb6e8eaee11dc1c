# SPDX-License-Identifier: Apache-2.0
"""TRL: supervised fine-tuning of a small GPT-2 that survives the loss of its VM.

    python with_trl.py

The same command line starts and resumes the run.  Every trainer of TRL is a Hugging Face ``Trainer``.
"""

from __future__ import annotations

import argparse

import torch
from datasets import Dataset
from swansong.transformers import SwansongCallback  # Swansong
from tokenizers import Tokenizer, models, pre_tokenizers
from torch_ddp import read_text
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

CONTEXT = 48
PADDING = "<pad>"


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune a small GPT-2 on the sonnets with TRL.")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--windows", type=int, default=256, help="per epoch")
    parser.add_argument("--output", default="output", help="directory for the finished model")
    options = parser.parse_args()

    codes, vocabulary = read_text()
    words = {f"c{code}": code for code in range(vocabulary)} | {PADDING: vocabulary}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=PADDING))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    windows = [codes[place * 5 : place * 5 + CONTEXT].tolist() for place in range(options.windows)]
    set_seed(1609)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocabulary + 1, n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=2,
            bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip
    trainer = SFTTrainer(
        model,
        args=SFTConfig(
            options.output,
            num_train_epochs=options.epochs,
            per_device_train_batch_size=16,
            learning_rate=3e-3,
            max_length=CONTEXT,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=3,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=not torch.cuda.is_available(),
            seed=1609,
        ),
        train_dataset=Dataset.from_dict({"input_ids": windows}),
        eval_dataset=Dataset.from_dict({"input_ids": windows[:32]}),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token=PADDING, eos_token=PADDING
        ),
    )
    guard = SwansongCallback(trainer)  # Swansong
    trainer.train(resume_from_checkpoint=guard.restore())  # Swansong


if __name__ == "__main__":
    main()
