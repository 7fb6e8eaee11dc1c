# SPDX-License-Identifier: Apache-2.0
"""A trainer without the hooks, whose process the daemon knows; prints JSON lines.

    python without_hooks.py --checkpoints DIR --pid-file FILE --save-when FILE

It saves ``checkpoint-N`` when the file of ``--save-when`` appears.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path


def emit(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoints", type=Path, required=True, help="place of checkpoint-N/")
    parser.add_argument("--pid-file", type=Path, required=True)
    parser.add_argument("--save-when", type=Path, required=True, help="file that requests a save")
    options = parser.parse_args()
    options.pid_file.write_text(f"{os.getpid()}\n")
    step = 0
    while True:
        time.sleep(0.01)
        step += 1
        emit(step=step)
        if options.save_when.exists():
            options.save_when.unlink()
            directory = options.checkpoints / f"checkpoint-{step}"
            directory.mkdir()
            (directory / "step.json").write_text(json.dumps(step))
            emit(event="saved", step=step)


if __name__ == "__main__":
    main()
