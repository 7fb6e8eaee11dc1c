# SPDX-License-Identifier: Apache-2.0
"""Two ranks of DDP that ``mp.spawn`` starts, without a launcher's environment variables."""

import json
import os
import socket

import swansong
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from swansong.torch import ResumableLoader, TrainingState, seed_all
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train(rank, ranks, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    seed_all(7)
    data = TensorDataset(torch.arange(24), torch.randn(24, 4), torch.randn(24, 1))
    loader = ResumableLoader(DataLoader(data, batch_size=4, sampler=DistributedSampler(data)))
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    seed_all(70 + rank)
    guard = swansong.attach(TrainingState(model, optimizer, loader=loader))
    step = guard.restore()
    for _ in range(loader.epoch, 3):
        for _, x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            step += 1
            if rank == 0:
                print(json.dumps({"step": step, "loss": loss.item()}), flush=True)
            guard.step(step, loss=loss.item())
    guard.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(train, (2, port), nprocs=2)
