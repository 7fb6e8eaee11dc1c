# SPDX-License-Identifier: Apache-2.0
"""Runs a trainer that saves at every step and in every pause, and resumes it from each of these checkpoints.

    python drive.py SCRIPT DIRECTORY STAGING

The environment names the socket of a daemon.  Each start is a fork of this process, which has imported all
that a trainer imports; its output goes to a file in DIRECTORY.  Lines of JSON with ``saved`` or ``final``
name checkpoints, between the lines that the trainer prints.

``reference`` is the uninterrupted run, and ``from-N`` is resumed from its checkpoint N.  ``once`` is resumed
and saves again, and ``twice`` is resumed from one of its checkpoints.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import runpy
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import swansong.torch  # noqa: F401 - for the forks
import torch
from swansong._ranks.agreement import Due
from swansong.guard import RESTORE_ENV, Guard
from torch.utils.data import DataLoader

sys.path.insert(1, str(Path(__file__).parents[3]))
from testkit.waiting import until

_originals = {name: getattr(Guard, name) for name in ("step", "poll", "close")}


def save(guard: Guard, word: str) -> None:
    """Take a checkpoint as a request would, and print its name."""
    until(lambda: guard._session.staging, what="the daemon's welcome")
    staging = Path(guard._session.staging)
    before = set(os.listdir(staging))
    guard._saver._last = None  # so that a pause has a set of its own beside that of the step
    assert guard._write(Due("emergency", "zoo"), int(guard._agreement.step))
    assert guard.wait_saved()
    (name,) = [name for name in os.listdir(staging) if name not in before]
    print(json.dumps({word: name}), flush=True)


def patch(*, saves: bool) -> None:
    """Save at the end of ``step`` and in ``poll``, where a request is answered, and before ``close``."""

    def step(guard: Guard, *args: Any, **options: Any) -> None:
        _originals["step"](guard, *args, **options)
        if saves:
            save(guard, "saved")

    def poll(guard: Guard) -> Any:
        if saves and not guard._critical_depth:
            save(guard, "saved")
        return _originals["poll"](guard)

    def close(guard: Guard, **options: Any) -> None:
        nonlocal saves
        if not guard._closed:
            save(guard, "final")
        saves = False  # close() polls
        _originals["close"](guard, **options)

    for wrapper in (step, poll, close):
        setattr(Guard, wrapper.__name__, wrapper)


def start(script: str, output: Path, restore: str | None, *, saves: bool) -> list[str]:
    """Run the script in a fork, and return the names of the checkpoints that it saved."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            with output.open("wb") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            os.environ.pop(RESTORE_ENV, None)
            if restore is not None:
                os.environ[RESTORE_ENV] = restore
            random.seed()
            np.random.seed()
            torch.default_generator.seed()
            patch(saves=saves)
            sys.argv = [script]
            runpy.run_path(script, run_name="__main__")
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    if status:
        sys.exit(f"{output} ended with {os.waitstatus_to_exitcode(status)}:\n{output.read_text()}")
    events = [json.loads(line) for line in output.read_text().splitlines() if line[:1] == "{"]
    return [name for event in events for word in ("saved", "final") if (name := event.get(word))]


def main() -> None:
    script, directory, staging = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    assert list(DataLoader([0])) == [0]  # the first batch imports a module
    *saved, _ = start(script, directory / "reference", None, saves=True)
    for number, name in enumerate(saved):
        start(script, directory / f"from-{number}", str(staging / name), saves=False)
    *later, _ = start(script, directory / "once", str(staging / saved[2]), saves=True)
    start(script, directory / "twice", str(staging / later[4]), saves=False)


if __name__ == "__main__":
    main()
