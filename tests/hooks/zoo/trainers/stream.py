# SPDX-License-Identifier: Apache-2.0
"""A stream of samples with a position, in torchdata's loader; there are no epochs."""

import json

import swansong
import torch
from swansong.torch import TrainingState, seed_all
from torch import nn
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader


class Stream(IterableDataset):
    def __init__(self):
        self.place = 0

    def __iter__(self):
        while True:
            self.place += 1
            yield self.place, torch.tensor([self.place % 5, self.place % 7], dtype=torch.float32)

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


torch.set_num_threads(1)
seed_all(9)
# Each new iterator draws from the loader's generator.
loader = StatefulDataLoader(Stream(), batch_size=3, generator=torch.Generator())
model = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.2), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
guard = swansong.attach(TrainingState(model, optimizer, loader=loader))
step = guard.restore()
while step < 9:
    for ids, x in loader:
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        step += 1
        print(json.dumps({"step": step, "loss": loss.item(), "batch": ids.tolist()}), flush=True)
        guard.step(step, loss=loss.item())
        if step == 9:
            break
guard.close()
