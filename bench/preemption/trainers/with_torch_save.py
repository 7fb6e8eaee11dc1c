# SPDX-License-Identifier: Apache-2.0
"""A script with ``torch.save`` at a fixed interval, and a loop that uploads the file.

The script saves into a temporary file and renames it, so the loop uploads no torn file.
See "Saving & Loading a General Checkpoint" in
https://docs.pytorch.org/tutorials/beginner/saving_loading_models.html.
"""

from __future__ import annotations

import itertools
import os

import torch
import work


def main() -> None:
    options = work.options()
    model = work.Model(options.size_bytes, options.step_s)
    optimizer = work.Optimizer(model)
    witness = work.Witness(options.witness)
    start = 0
    newest = os.path.join(options.out, "latest.pt")
    if os.path.exists(newest):
        state = torch.load(newest, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]
        del state
    witness.restored(start, work.step_of(model, optimizer))
    timer = work.Timer(options.first_save_s, options.save_every_s)
    for step in itertools.count(start + 1):
        model()["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        witness.step(step)
        if timer.is_due():
            state = {
                "step": step,
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
            }
            torch.save(state, newest + ".tmp")
            os.replace(newest + ".tmp", newest)
            del state


if __name__ == "__main__":
    main()
