# SPDX-License-Identifier: Apache-2.0
"""A GAN: two models with an optimizer each, and noise from torch's generator."""

import json

import swansong
import torch
from swansong.torch import ResumableLoader, TrainingState, seed_all
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as judge
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
seed_all(1)
data = TensorDataset(torch.arange(20), torch.randn(20, 4) + 2)
loader = ResumableLoader(DataLoader(data, batch_size=4, shuffle=True))
netD = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
netG = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 4))
optimizer_d = torch.optim.Adam(netD.parameters(), lr=0.02, betas=(0.5, 0.999))
optimizer_g = torch.optim.Adam(netG.parameters(), lr=0.02, betas=(0.5, 0.999))
state = TrainingState(
    netD, optimizer_d, loader=loader, generator_model=netG, optimizer_g=optimizer_g
)
guard = swansong.attach(state)
step = guard.restore()
for _ in range(loader.epoch, 2):
    for i, (ids, real) in enumerate(loader, loader.batches):
        fake = netG(torch.randn(len(real), 2))
        optimizer_d.zero_grad()
        loss_d = judge(netD(real), torch.ones(len(real), 1))
        loss_d = loss_d + judge(netD(fake.detach()), torch.zeros(len(real), 1))
        loss_d.backward()
        optimizer_d.step()
        optimizer_g.zero_grad()
        loss_g = judge(netD(fake), torch.ones(len(real), 1))
        loss_g.backward()
        optimizer_g.step()
        step += 1
        facts = {
            "step": step,
            "loss": loss_d.item(),
            "loss_g": loss_g.item(),
            "batch": ids.tolist(),
        }
        if i % 3 == 0:
            facts["sample"] = fake.mean().item()
        print(json.dumps(facts), flush=True)
        guard.step(step, loss=loss_d.item())
guard.close()
