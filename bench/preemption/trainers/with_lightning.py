# SPDX-License-Identifier: Apache-2.0
"""Lightning with its plugin for SLURM: a checkpoint on SIGUSR1, and a resume from it.

See "Enable auto wall-time resubmissions" in
https://lightning.ai/docs/pytorch/stable/clouds/cluster_advanced.html.
The plugin saves in the signal handler, calls ``scontrol requeue``, and training continues until the end.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import lightning
import torch
import work
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch.utils.data import DataLoader, TensorDataset


class Module(lightning.LightningModule):
    def __init__(self, options: Any, witness: work.Witness) -> None:
        super().__init__()
        self.work = work.Model(options.size_bytes, options.step_s)
        self._options, self._witness = options, witness
        self._timer = work.Timer(options.first_save_s, options.save_every_s)

    def training_step(self, *_: Any) -> torch.Tensor:
        return self.work()["loss"]

    def configure_optimizers(self) -> Any:
        return work.Optimizer(self.work)

    def on_train_start(self) -> None:
        found = work.step_of(self.work, self.optimizers().optimizer)
        self._witness.restored(self.global_step, found)

    def on_train_batch_end(self, *_: Any) -> None:
        self._witness.step(self.global_step)
        if self._timer.is_due():
            newest = os.path.join(self._options.out, "last.ckpt")
            self.trainer.save_checkpoint(newest + ".tmp")
            os.replace(newest + ".tmp", newest)


def main() -> None:
    options = work.options()
    witness = work.Witness(options.witness)
    trainer = lightning.Trainer(
        max_steps=99_999,
        default_root_dir=options.out,
        plugins=[SLURMEnvironment(requeue_signal=signal.SIGUSR1)],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module(options, witness)
    # The plugin's own checkpoint is the newest one, and ``fit`` finds it alone.
    has_own = any(work.checkpoints(options.out, "hpc_ckpt_"))
    last = os.path.join(options.out, "last.ckpt")
    path = last if os.path.exists(last) and not has_own else None
    trainer.fit(module, DataLoader(TensorDataset(torch.zeros(100_000))), ckpt_path=path)


if __name__ == "__main__":
    main()
