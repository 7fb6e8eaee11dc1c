# SPDX-License-Identifier: Apache-2.0
"""A PyTorch trainer without Swansong: on SIGTERM it saves in the format of its framework, and continues.

SIGUSR1 ends it.

signalled_torch.py LAYOUT DIRECTORY PID_FILE; LAYOUT is ``dcp`` or ``ckpt``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp


def main() -> None:
    layout, directory, pid_file = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    wanted: list[int] = []
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit("SIGUSR1 is for the framework"))
    signal.signal(signal.SIGTERM, lambda number, _: wanted.append(number))
    temporary = pid_file.with_suffix(".tmp")
    temporary.write_text(f"{os.getpid()}\n")
    temporary.replace(pid_file)
    weights = torch.zeros(100)
    for step in range(1, 1_000_000):
        weights += 1
        time.sleep(0.01)
        print(json.dumps({"step": step}), flush=True)
        if wanted:
            wanted.clear()
            if layout == "dcp":
                dcp.save(
                    {"weights": weights}, checkpoint_id=directory / f"save-{step}", no_dist=True
                )
            else:
                torch.save({"weights": weights}, directory / f"epoch=0-step={step}.ckpt")


if __name__ == "__main__":
    main()
