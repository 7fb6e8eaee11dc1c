# SPDX-License-Identifier: Apache-2.0
"""Lightning: the model of ``torch_ddp.py``, in a ``Trainer`` that survives the loss of its VM.

    python with_lightning.py
    torchrun --standalone --nproc-per-node=2 with_lightning.py --devices 2

The same command line starts and resumes the run.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import lightning
import torch
from swansong.lightning import SwansongCallback  # Swansong
from swansong.torch import ResumableLoader, seed_all, shield_worker  # Swansong
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torch_ddp import CONTEXT, Transformer, Windows, loss_of, read_text


class Model(lightning.LightningModule):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.transformer = Transformer(vocabulary)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss = loss_of(self.transformer, *batch)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, _: Any, batch_idx: int) -> None:
        if self.global_rank == 0 and batch_idx % 2:  # an optimizer step has two batches
            print(
                json.dumps({"step": self.global_step, "loss": float(outputs["loss"])}), flush=True
            )

    def validation_step(self, batch: Any, _: int) -> None:
        if self.global_rank == 0 and not self.trainer.sanity_checking:
            print("evaluating", flush=True)
        self.log("validation", loss_of(self.transformer, *batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        warmup = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / 20)
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": warmup, "interval": "step"},
        }


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn the sonnets with Lightning.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--windows", type=int, default=1024, help="per epoch")
    parser.add_argument("--devices", type=int, default=1, help="ranks on this VM")
    options = parser.parse_args()

    codes, vocabulary = read_text()
    seed_all(1609)
    windows = Windows(codes, options.windows)
    # Lightning adds its distributed sampler only to a plain DataLoader.
    sampler = None
    if options.devices > 1:
        rank = lightning.fabric.plugins.environments.TorchElasticEnvironment().global_rank()
        sampler = DistributedSampler(windows, options.devices, rank)
    loader = ResumableLoader(  # Swansong
        DataLoader(
            windows, 16, shuffle=sampler is None, sampler=sampler, worker_init_fn=shield_worker
        )
    )
    trainer = lightning.Trainer(
        max_epochs=options.epochs,
        accumulate_grad_batches=2,
        devices=options.devices,
        strategy="ddp" if options.devices > 1 else "auto",
        callbacks=[SwansongCallback()],  # Swansong
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
    )
    held_out = codes[: 64 * (CONTEXT + 1)].view(64, CONTEXT + 1)
    validation = TensorDataset(held_out[:, :-1], held_out[:, 1:])
    model = Model(vocabulary)
    trainer.fit(model, loader, DataLoader(validation, 16))


if __name__ == "__main__":
    main()
