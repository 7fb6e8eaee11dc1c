# SPDX-License-Identifier: Apache-2.0
"""A trainer whose loader is torchdata's: random samples, two workers, dropout; run by the resume test."""

from __future__ import annotations

import json
from typing import Any

import swansong
import torch
from swansong.torch import TrainingState, seed_all, shield_worker
from torch.utils.data import Dataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader


class Noise(Dataset[torch.Tensor]):
    """Draws from one generator for each worker, whose state torchdata saves."""

    def __init__(self) -> None:
        self.generator = torch.Generator()
        self.is_seeded = False

    def __len__(self) -> int:
        return 48

    def __getitem__(self, place: int) -> torch.Tensor:
        worker = get_worker_info()
        if not self.is_seeded and worker is not None:
            self.generator.manual_seed(worker.id)
            self.is_seeded = True
        noise = torch.randn(7, generator=self.generator)
        return torch.cat([torch.tensor([float(place)]), noise])

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state(), "is_seeded": self.is_seeded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])
        self.is_seeded = state["is_seeded"]


def main() -> None:
    torch.set_num_threads(1)
    seed_all(3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = StatefulDataLoader(
        Noise(),
        batch_size=4,
        shuffle=True,
        num_workers=2,
        worker_init_fn=shield_worker,
        # A separate generator: creating an iterator draws from it, so torch's would be ahead after a resume.
        generator=torch.Generator().manual_seed(3),
    )
    state = TrainingState(model, optimizer, loader=loader)
    guard = swansong.attach(state)
    step = guard.restore()
    while True:
        for batch in loader:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            step += 1
            print(json.dumps({"step": step, "loss": loss.item()}), flush=True)
            guard.step(step, loss=loss.item())


if __name__ == "__main__":
    main()
