# SPDX-License-Identifier: Apache-2.0
"""For JAX with Orbax: a save decision policy that says yes when the daemon wants a checkpoint.

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

Orbax copies and writes as it always does, into its own directory, and has finished when it renames the
directory of the step.  From there the files are copied to staging; where both are on one XFS or Btrfs, the
copies share the blocks.  One process for all devices of one VM; several are refused.
"""

from __future__ import annotations

import logging
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

__all__ = ["SavePolicy"]

FINISH_LIMIT_S = 600.0
"""Longest wait for Orbax to finish a step that it was told to save."""
_POLL_S = 0.02
_COPY_BYTES = 2**30
_STEP_NAME = re.compile(r"(?:[^.]*_)?([0-9]+)")

log = logging.getLogger("swansong")


class SavePolicy:
    """A ``SaveDecisionPolicy``: call ``manager.save()`` after every step, it saves when one is due.

    Args:
        options: of :func:`swansong.attach`, such as ``every_steps``.
    """

    in_background = True
    reads_whole_set = False

    def __init__(self, **options: Any) -> None:
        self._manager: Any = None
        self._step: int | None = None
        self._is_due = False
        self.guard = swansong.attach(self, **options)

    def restore(self, manager: Any) -> int:
        """Put the newest whole checkpoint of the run into the manager's directory.

        What lies there of that step or later ones, and never got as far as the daemon, is removed.

        Returns:
            Its step, for ``manager.restore()``; that of the newest one in the directory if the daemon knows
            none, or is not there; 0 if there is none at all.

        Raises:
            swansong.RestoreError: there is one, but it cannot be fetched.
            ValueError: there are several processes.
        """
        if jax.process_count() > 1:
            raise ValueError(
                "one process for all devices of one VM is supported, and there are more"
            )
        self._manager = manager
        return self.guard.restore() or manager.latest_step() or 0

    def should_save(self, step: Any, previous_steps: Sequence[Any], *, context: Any) -> bool:  # noqa: ARG002
        """Whether a checkpoint of this step is due; asked by the manager."""
        self._is_due = False
        self._step = int(step.step)
        self.guard.step(self._step)
        self._step = None
        return self._is_due

    def close(self) -> None:
        """Wait for what is being saved, and take leave of the daemon."""
        self.guard.close()

    # ------------------------------------------------------------ for the guard

    def snapshot(self) -> Callable[[Path], object]:
        """Has the manager save, and returns what waits for that and brings the files to staging."""
        step = self._step
        if step is None or self._manager is None:
            raise RuntimeError(
                "Orbax saves within manager.save() after policy.restore(), and only there"
            )
        self._is_due = True
        directory = Path(self._manager.directory)
        return lambda target: _bring(directory, step, target)

    def load(self, directory: Path) -> None:
        """Put the one step that lies there into the manager's directory."""
        (found,) = directory.iterdir()
        self._manager.wait_until_finished()
        home = Path(self._manager.directory)
        step = _step_of(found.name)
        if step is None:
            raise ValueError(f"{found.name!r:.100} is no step of Orbax")
        for path in home.iterdir():
            other = _step_of(path.name)
            if other is not None and other >= step:
                log.warning("%s goes: training goes on from step %s", path, step)
                shutil.rmtree(path)
        temporary = home / f".{found.name}.restoring"
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.copytree(found, temporary)
        temporary.rename(home / found.name)
        self._manager.reload()


def _step_of(name: str) -> int | None:
    match = _STEP_NAME.fullmatch(name)
    return int(match[1]) if match else None


def _bring(directory: Path, step: int, target: Path) -> None:
    give_up_mono_s = time.monotonic() + FINISH_LIMIT_S
    pause = threading.Event()
    while True:
        # Until it is finished it has another name.
        found = next((path for path in directory.iterdir() if _step_of(path.name) == step), None)
        if found is not None:
            break
        if time.monotonic() > give_up_mono_s:
            raise TimeoutError(f"Orbax has not finished step {step} after {FINISH_LIMIT_S:.0f} s")
        pause.wait(_POLL_S)
    shutil.copytree(found, target / found.name, copy_function=_copy)


def _copy(source: str, target: str) -> None:
    """Copy a file; file systems that can, such as XFS and Btrfs, share its blocks.

    Not a hard link: a file with two names can be changed under the other one, and is not uploaded.
    """
    try:
        with open(source, "rb") as read, open(target, "xb") as written:
            while os.copy_file_range(read.fileno(), written.fileno(), _COPY_BYTES):
                pass
    except OSError:  # two file systems, or one that cannot do that
        shutil.copyfile(source, target)
