# SPDX-License-Identifier: Apache-2.0
"""A small character-level transformer in PyTorch that survives the loss of its VM.

    python torch_ddp.py
    torchrun --standalone --nproc-per-node=2 torch_ddp.py
    torchrun --standalone --nproc-per-node=2 torch_ddp.py --fsdp

The same command line starts and resumes the run.  Swansong needs the lines with the comment "Swansong".  The
rest is an ordinary training script with dropout, gradient accumulation, warm-up, evaluation and data loader
workers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from pathlib import Path

import swansong  # Swansong
import torch
import torch.distributed as dist
from swansong.torch import ResumableLoader, TrainingState, seed_all, shield_worker  # Swansong
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

CONTEXT, WIDTH, LAYERS = 32, 32, 2


class Windows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of the text with the text one character later; random characters are masked."""

    def __init__(self, codes: torch.Tensor, count: int) -> None:
        self.codes, self.count = codes, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = self.codes[place * 5 : place * 5 + CONTEXT + 1]
        masked = torch.where(torch.rand(CONTEXT) < 0.05, 0, window[:-1])
        return masked, window[1:]


class Transformer(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.position = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, dropout=0.1, batch_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        self.head.weight = self.embedding.weight  # tied

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, device=text.device)
        hidden = self.embedding(text) + self.position
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        logits: torch.Tensor = self.head(hidden)
        return logits


def loss_of(model: nn.Module, text: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(text).flatten(0, 1), target.flatten())


def read_text() -> tuple[torch.Tensor, int]:
    """The text as numbers, and the number of different characters."""
    text = Path(__file__).with_name("sonnets.txt").read_text(encoding="utf-8")
    characters = sorted(set(text))
    return torch.tensor([characters.index(character) for character in text]), len(characters)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Learn the sonnets with PyTorch.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--windows", type=int, default=1024, help="per epoch")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--accumulate", type=int, default=2, help="batches per optimizer step")
    parser.add_argument("--evaluate-every", type=int, default=50)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--every-steps", type=int, default=None, help="periodic checkpoints")
    parser.add_argument("--fsdp", action="store_true")
    return parser.parse_args()


def join() -> tuple[int, bool, torch.device]:
    """Join the process group; returns the rank, whether the job is distributed, and the device."""
    is_distributed = "WORLD_SIZE" in os.environ
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if is_distributed:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_rank() if is_distributed else 0, is_distributed, device


def main() -> None:
    options = arguments()
    rank, is_distributed, device = join()
    codes, vocabulary = read_text()

    seed_all(1609)
    module = Transformer(vocabulary).to(device)
    model: nn.Module = module
    if options.fsdp:
        for layer in module.layers:
            fully_shard(layer)
        fully_shard(module)
    elif is_distributed:
        model = DistributedDataParallel(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    windows = Windows(codes, options.windows)
    loader = ResumableLoader(  # Swansong
        DataLoader(
            windows,
            options.batch,
            shuffle=not is_distributed,
            sampler=DistributedSampler(windows) if is_distributed else None,
            num_workers=options.workers,
            worker_init_fn=shield_worker,
            drop_last=True,
        )
    )
    seed_all(1609 + rank)  # each rank has its own dropout

    state = TrainingState(model, optimizer, scheduler=scheduler, loader=loader)  # Swansong
    guard = swansong.attach(state, every_steps=options.every_steps)
    step = guard.restore()
    while loader.epoch < options.epochs:
        total = 0.0
        for number, (text_batch, target) in enumerate(loader, loader.batches + 1):
            is_last = number % options.accumulate == 0
            if isinstance(model, DistributedDataParallel) and not is_last:
                context: contextlib.AbstractContextManager[None] = model.no_sync()
            else:
                context = contextlib.nullcontext()
            with context:
                loss = loss_of(model, text_batch.to(device), target.to(device)) / options.accumulate
                loss.backward()
            total += loss.item()
            if not is_last:
                continue
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            step += 1
            if rank == 0:
                print(json.dumps({"step": step, "loss": total}), flush=True)
            guard.step(step, loss=total)  # Swansong
            total = 0.0
            if step % options.evaluate_every == 0:
                with guard.evaluation():  # Swansong
                    evaluate(model, codes, guard, rank, device)
    guard.finish()
    if is_distributed:
        dist.destroy_process_group()


def evaluate(
    model: nn.Module, codes: torch.Tensor, guard: swansong.Guard, rank: int, device: torch.device
) -> None:
    if rank == 0:
        print("evaluating", flush=True)
    model.eval()
    total = 0.0
    with torch.no_grad():
        for place in range(20):
            guard.poll()  # Swansong
            window = codes[place * 50 : place * 50 + CONTEXT + 1].to(device)[None]
            total += loss_of(model, window[:, :-1], window[:, 1:]).item()
    model.train()
    if rank == 0:
        print(json.dumps({"evaluated": total / 20}), flush=True)


if __name__ == "__main__":
    main()
