# SPDX-License-Identifier: Apache-2.0
"""Reads the tensors of a checkpoint file by file, while the daemon fetches further files.

Only tensors are read early: those of modules into their place, all others into new memory.  Everything else
follows in :meth:`swansong.torch.TrainingState.load`, when the whole checkpoint is verified.  That method also
reads each tensor that did not arrive early.  So a load has the same result with and without early files.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from swansong._log import log
from swansong._ranks.agreement import Ranks
from swansong._torch.checkpoint_set import TENSOR_FILE, CheckpointSet, read_parts
from swansong._torch.index import INDEX, decode_index
from swansong._torch.objects import OTHERS, Targets
from swansong._torch.safetensors import read_header
from swansong._torch.sharding import own_part
from swansong.layout import rank_of_directory

WAITING_MAX = 64
"""Open files that wait for the index of their rank; the directory has any others."""


class ArrivedTensors:
    """The tensors that arrived early.

    Args:
        objects: of the training state, by name.
        ranks: position of this process.
        reads: see :class:`swansong.rank_files.Arrivals`.
        prefixes: see :class:`swansong.rank_files.Arrivals`.
    """

    def __init__(
        self,
        objects: Mapping[str, Any],
        ranks: Ranks,
        *,
        reads: Collection[int] = (),
        prefixes: Sequence[str] = (),
    ) -> None:
        self.reads = reads
        self.prefixes = prefixes
        self._objects = objects
        self._rank = ranks.rank
        self._world_size = ranks.world_size
        self._checked: CheckpointSet | None = None
        self.read_s = 0.0
        """Time of all reads, with the checksums."""
        self.targets = Targets(objects)
        self._indexes: dict[int, dict[str, Any]] = {}
        self._waiting: dict[str, int] = {}

    def take(self, path: str, fd: int) -> None:
        """Read the tensors of a file into place; see :class:`swansong.rank_files.Arrivals`."""
        directory, _, name = path.partition("/")
        rank = rank_of_directory(directory)
        is_read = fd >= 0 and (not self.reads or rank in self.reads)
        is_named = rank >= 0 and (name == INDEX or TENSOR_FILE.fullmatch(name))
        if not (is_read and is_named) or len(self._waiting) >= WAITING_MAX:
            _close(fd)
            return
        if name == INDEX:
            self._trying(path, fd, lambda: self._read_index(rank, fd))
            waiting, self._waiting = self._waiting, {}
            for other, other_fd in waiting.items():
                self.take(other, other_fd)
        elif rank not in self._indexes:
            _close(self._waiting.pop(path, -1))
            self._waiting[path] = fd
        else:
            self._trying(path, fd, lambda: self._read_file(rank, name, fd))

    def clear(self) -> None:
        """Forget all files: the next ones are of another checkpoint."""
        self.close()
        self.targets = Targets(self._objects)
        self._indexes.clear()

    def close(self) -> None:
        """Close the files that wait for an index which did not arrive early."""
        while self._waiting:
            _close(self._waiting.popitem()[1])

    def read_all(self) -> None:
        """See :class:`swansong.rank_files.Arrivals`."""
        self.reads, self.prefixes, self._checked = (), (), None

    def lacks(self, directory: Path) -> bool:
        """See :class:`swansong.rank_files.Arrivals`."""
        found = CheckpointSet(directory, reads=self.reads)
        if found.lost or found.world_size != self._world_size:
            return True
        self._check_parts(found)
        self._checked = found
        return False

    def checked(self, directory: Path) -> CheckpointSet | None:
        """Return the files of a directory that does not lack any; None if it was not checked."""
        found = self._checked
        return found if found is not None and found.directory == directory else None

    def _check_parts(self, found: CheckpointSet) -> None:
        """Raise an error if the directories that are read lack a part of what this rank loads."""
        tensors = found.indexes[self._rank]["tensors"]
        for group in tensors.keys() & {OTHERS, *self._objects}:
            for key in (key for key, entry in tensors[group].items() if "shape" in entry):
                shape, dtype = found.shape_and_dtype(self._rank, group, key)
                begin: tuple[int, ...] = (0,) * len(shape)
                if self._has_place(group, is_sharded=True):
                    own, begin = own_part(self.targets.of(group, key, shape, dtype))
                    shape = own.shape
                found.check_parts(self._rank, group, key, begin, shape)

    def _trying(self, path: str, fd: int, read: Callable[[], object]) -> None:
        begun_mono_s = time.monotonic()
        try:
            read()
        except Exception as error:  # the load from the directory finds it again, and raises it
            log.debug("%s was not read early: %s: %s", path, type(error).__name__, error)
        finally:
            self.read_s += time.monotonic() - begun_mono_s
            os.close(fd)

    def _read_index(self, rank: int, fd: int) -> None:
        with open(_again(fd), "rb") as file:
            self._indexes[rank] = decode_index(file.read())

    def _read_file(self, rank: int, name: str, fd: int) -> None:
        index = self._indexes[rank]
        facts = index["files"][name]
        group = facts["group"]
        source = self._rank % int(index["world_size"])
        parts, filled = [], list[set[int]]()
        for key, stored in read_header(_again(fd), facts["checksums"]).items():
            entry = index["tensors"][group][key]
            if "shape" not in entry and rank != source:
                continue
            shape = torch.Size(entry.get("shape", stored.shape))
            if not self._has_place(group, is_sharded="shape" in entry):
                continue
            target = self.targets.of(group, key, shape, stored.dtype)
            if (target.shape, target.dtype) != (shape, stored.dtype):
                continue
            own, begin = own_part(target)
            offsets = entry.get("offsets", [0] * len(shape))
            parts.append((own, begin, offsets, stored))
            filled.append(self.targets.filled.setdefault((group, key), set()))
            filled[-1].discard(rank)
        read_parts(parts)
        for ranks in filled:
            ranks.add(rank)

    def _has_place(self, group: str, *, is_sharded: bool) -> bool:
        """Whether the place of a tensor is known before the load from the directory."""
        if group == OTHERS:
            return not is_sharded
        return isinstance(self._objects.get(group), torch.nn.Module | torch.optim.Optimizer)


def _again(fd: int) -> str:
    """The path of an open file, which each reading thread opens again, at an offset of its own."""
    return f"/proc/self/fd/{fd}"


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)
