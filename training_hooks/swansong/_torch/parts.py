# SPDX-License-Identifier: Apache-2.0
"""Parts of the adapters to frameworks: several objects as one, and one directory of all ranks' files."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from swansong import layout
from swansong.rank_files import Snapshots


class Parts:
    """Several objects with ``state_dict()`` as one object, by their order."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = list(parts)

    def state_dict(self) -> dict[str, Any]:
        return {str(number): part.state_dict() for number, part in enumerate(self.parts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if len(state) != len(self.parts):
            raise ValueError(f"{len(state)} objects were saved, and this job has {len(self.parts)}")
        for number, part in enumerate(self.parts):
            part.load_state_dict(state[str(number)])


class JointDirectory(Snapshots):
    """A state that a framework saves and loads as one directory of all ranks.

    Each rank writes into a separate directory.  For loading, one temporary directory has links to all files.

    Args:
        save: writes this rank's files into a directory; it may use collectives.
        load: reads from the directory with the files of all ranks, which exists until the process ends.
    """

    reads_whole_set = True

    def __init__(self, save: Callable[[Path], object], load: Callable[[Path], object]) -> None:
        self._save, self._load = save, load

    def snapshot(self) -> Callable[[Path], object]:
        """Return the save function: nothing is copied."""
        return self._save

    def load(self, directory: Path) -> None:
        """Load the files of all ranks.

        Raises:
            OSError: the links cannot be created.
        """
        joint = tempfile.mkdtemp(prefix="swansong-")
        weakref.finalize(self, shutil.rmtree, joint, ignore_errors=True)
        for own in sorted(directory.iterdir()):
            if layout.rank_of_directory(own.name) < 0:
                continue
            for parent, _, names in os.walk(own):
                place = Path(joint, os.path.relpath(parent, own))
                place.mkdir(parents=True, exist_ok=True)
                for name in names:
                    if not (place / name).is_symlink():
                        (place / name).symlink_to(os.path.abspath(os.path.join(parent, name)))
        self._load(Path(joint))
