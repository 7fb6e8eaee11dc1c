# SPDX-License-Identifier: Apache-2.0
"""For JAX with Orbax: a save decision policy that saves when the daemon requests a checkpoint.

::

    from swansong.orbax import SavePolicy

    policy = SavePolicy()
    options = ocp.CheckpointManagerOptions(save_decision_policy=policy)
    with ocp.CheckpointManager(directory, options=options) as manager:
        step = policy.restore(manager)
        if step:
            state = manager.restore(step, args=ocp.args.StandardRestore(state))
        ...
            manager.save(step, args=ocp.args.StandardSave(state))  # after every step
    policy.close()

Orbax copies and writes as usual, into its own directory, and finally renames the directory of the step.  A
background thread then copies the files to staging.  On one XFS or Btrfs file system the copies share their
blocks.  The job must have one process for all devices of one VM; several processes are refused.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

import swansong
from swansong._log import log
from swansong.rank_files import Snapshots

__all__ = ["SavePolicy"]

FINISH_LIMIT_S = 600.0
"""Longest wait for Orbax to finish saving a step."""
_POLL_S = 0.02
_COPY_BYTES = 2**30
_STEP_NAME = re.compile(r"(?:[^.]*_)?([0-9]+)")


class SavePolicy(Snapshots):
    """A ``SaveDecisionPolicy`` with which ``manager.save()``, after every step, saves if a checkpoint is due.

    Args:
        options: of :func:`swansong.attach`, such as ``every_steps``.
    """

    in_background = True

    def __init__(self, **options: Any) -> None:
        self._manager: Any = None
        self._step: int | None = None
        self._is_due = False
        self.guard = swansong.attach(self, **options)

    def restore(self, manager: Any) -> int:
        """Copy the newest whole checkpoint of the run to the manager's directory.

        Checkpoints there of the same step, or of later ones, are removed: the daemon has none of them.

        Args:
            manager: an Orbax ``CheckpointManager``.

        Returns:
            The step, for ``manager.restore()``.  Without a daemon, or without a checkpoint at the daemon, the
            newest step in the manager's directory; 0 without any.

        Raises:
            swansong.RestoreError: a checkpoint exists but cannot be fetched.
            ValueError: the job has several processes.
        """
        processes = jax.process_count()
        if processes > 1:
            raise ValueError(
                f"the job has {processes} processes; SavePolicy supports one, for all devices of one VM"
            )
        self._manager = manager
        return self.guard.restore() or manager.latest_step() or 0

    def should_save(self, step: Any, previous_steps: Sequence[Any], *, context: Any) -> bool:  # noqa: ARG002
        """Whether a checkpoint of this step is due; called by the manager."""
        self._is_due = False
        self._step = int(step.step)
        self.guard.step(self._step)
        self._step = None
        return self._is_due

    def close(self) -> None:
        """Wait for saves in progress, and disconnect from the daemon."""
        self.guard.close()

    # ------------------------------------------------------------ for the guard

    def snapshot(self) -> Callable[[Path], object]:
        """Make the manager save, and return a function that waits for it and copies the files to staging."""
        step = self._step
        if step is None or self._manager is None:
            raise RuntimeError("Orbax can save only in manager.save(), and after policy.restore()")
        self._is_due = True
        directory = Path(self._manager.directory)
        return lambda target: _copy_step(directory, step, target)

    def load(self, directory: Path) -> None:
        """Copy the step in ``directory`` to the manager's directory."""
        (found,) = directory.iterdir()
        self._manager.wait_until_finished()
        home = Path(self._manager.directory)
        step = _step_of(found.name)
        if step is None:
            raise ValueError(f"{found.name!r:.100} is not the name of an Orbax step")
        for path in home.iterdir():
            other = _step_of(path.name)
            if other is not None and other >= step:
                log.warning("removing %s: training continues from step %s", path, step)
                shutil.rmtree(path)
        temporary = home / f".{found.name}.restoring"
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.copytree(found, temporary)
        temporary.rename(home / found.name)
        self._manager.reload()


def _step_of(name: str) -> int | None:
    match = _STEP_NAME.fullmatch(name)
    return int(match[1]) if match else None


def _copy_step(directory: Path, step: int, target: Path) -> None:
    give_up_mono_s = time.monotonic() + FINISH_LIMIT_S
    pause = threading.Event()
    while True:
        # Orbax renames the directory to this name when it has finished.
        found = next((path for path in directory.iterdir() if _step_of(path.name) == step), None)
        if found is not None:
            break
        if time.monotonic() > give_up_mono_s:
            raise TimeoutError(f"Orbax has not finished step {step} after {FINISH_LIMIT_S:.0f} s")
        pause.wait(_POLL_S)
    shutil.copytree(found, target / found.name, copy_function=_copy)


def _copy(source: str, target: str) -> None:
    """Copy a file, on XFS and Btrfs with shared blocks.

    Not a hard link: a file with two names could be changed under the other name, so it is not uploaded.
    """
    try:
        with open(source, "rb") as read, open(target, "xb") as written:
            while os.copy_file_range(read.fileno(), written.fileno(), _COPY_BYTES):
                pass
    except OSError:  # two file systems, or one without copy_file_range()
        shutil.copyfile(source, target)
