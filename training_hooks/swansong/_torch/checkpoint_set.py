# SPDX-License-Identifier: Apache-2.0
"""Reads the tensors that all ranks wrote, for any number of ranks."""

from __future__ import annotations

import functools
import math
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from swansong._checkpoint.restore_query import REPORT_EVERY_S
from swansong._log import log
from swansong._torch.index import INDEX, decode_index
from swansong._torch.parallel import run
from swansong._torch.safetensors import DTYPES, StoredTensor, read_header
from swansong._torch.sharding import own_part
from swansong.layout import rank_directory, rank_of_directory

TENSOR_FILE = re.compile(r"[A-Za-z0-9_]{1,64}-[0-9]{5,9}\.safetensors")
_Chunk = tuple[int, torch.Size, StoredTensor]
"""A part of a tensor: the rank that wrote it, its offsets and its place."""
_Part = tuple[torch.Tensor, Sequence[int], Sequence[int], StoredTensor]
"""Memory of this rank to fill, its offsets in the whole tensor, and the offsets of the stored part."""


class CheckpointSet:
    """The tensors and indexes that all ranks wrote, or some of them.

    Args:
        directory: contains a directory for each rank.
        reads: the only ranks whose directories are read; empty: all ranks, whose directories must exist.

    Raises:
        ValueError: a file is malformed, or parts of a tensor are missing.
        OSError: a file is missing or cannot be read.
    """

    def __init__(self, directory: Path, *, reads: Collection[int] = ()) -> None:
        begun_mono_s = self._reported_mono_s = time.monotonic()
        self.directory = directory
        self.indexes = {rank: self._read_index(rank) for rank in sorted(reads) or (0,)}
        """By rank."""
        first = next(iter(self.indexes.values()))
        self.world_size = int(first["world_size"])
        self.lost = frozenset(map(int, first.get("without_ranks", ())))
        """Ranks of the job that took no part: the others are counted from 0, without gaps."""
        self.job_size = self.world_size + len(self.lost)
        """Number of ranks of the job."""
        if not reads:
            self._read_other_indexes()
        self._stored = {rank: self._headers(rank) for rank in self.indexes}
        self._size_bytes = sum(
            each.size_bytes for stored in self._stored.values() for each in stored.values()
        )
        self._read_bytes = 0
        self.read_s = time.monotonic() - begun_mono_s
        """Time of all reads, with the checksums."""

    def source_of(self, rank: int) -> int:
        """Return the number of the rank whose state a rank of the job loads."""
        took_part = [each for each in range(self.job_size) if each not in self.lost]
        rank %= self.job_size
        return took_part.index(rank) if rank in took_part else 0

    def load(
        self,
        source_rank: int,
        targets: dict[tuple[str, str], torch.Tensor],
        filled: Mapping[tuple[str, str], Collection[int]],
    ) -> None:
        """Fill tensors in place.

        Args:
            source_rank: rank whose tensors to load where the ranks hold different ones.
            targets: tensors by object and key: plain ones, or DTensors as this job shards them.
            filled: by object and key, the ranks whose parts the tensor has already.

        Raises:
            ValueError, OSError: a tensor is missing, has another type or shape, or cannot be read.
        """
        parts: list[_Part] = []
        for (group, key), target in targets.items():
            name = f"{group}.{key}"
            shape, chunks = self._find(source_rank, group, key)
            if shape != target.shape:
                raise ValueError(
                    f"{name} has the shape {tuple(target.shape)}, but was saved in the shape {tuple(shape)}"
                )
            own, begin = own_part(target)
            _check_covered(name, begin, own.shape, chunks)
            for rank, offsets, stored in chunks:
                if stored.dtype != target.dtype:
                    raise ValueError(f"{name} is {target.dtype}, but was saved as {stored.dtype}")
                if rank not in filled.get((group, key), ()):
                    parts.append((own, begin, offsets, stored))
        begun_mono_s = time.monotonic()
        read_parts(parts, self._read)
        self.read_s += time.monotonic() - begun_mono_s

    def shape_and_dtype(
        self, source_rank: int, group: str, key: str
    ) -> tuple[torch.Size, torch.dtype]:
        """Return shape and type of a whole tensor.

        Raises:
            ValueError: all parts of the tensor are missing.
        """
        shape, chunks = self._find(source_rank, group, key)
        if chunks:
            return shape, chunks[0][2].dtype
        dtype = DTYPES.get(self.indexes[source_rank]["tensors"][group][key].get("dtype"))
        if dtype is None:
            raise ValueError(f"parts of {group}.{key} are missing")
        return shape, dtype

    def check_parts(
        self,
        source_rank: int,
        group: str,
        key: str,
        begin: Sequence[int],
        shape: Sequence[int],
    ) -> None:
        """Check that :meth:`load` finds a region of a tensor in the directories that are read.

        Raises:
            ValueError: parts of the region are missing.
        """
        _check_covered(f"{group}.{key}", begin, shape, self._find(source_rank, group, key)[1])

    def _find(self, source_rank: int, group: str, key: str) -> tuple[torch.Size, list[_Chunk]]:
        """Return the shape of a whole tensor, and its parts in the directories that are read."""
        entry = self.indexes[source_rank]["tensors"][group].get(key)
        if entry is None:
            raise ValueError(f"the checkpoint has no tensor {key!r} of {group}")
        if "shape" not in entry:
            stored = self._stored[source_rank][group, key]
            return stored.shape, [(source_rank, torch.Size([0] * len(stored.shape)), stored)]
        shape = torch.Size(entry["shape"])
        chunks = []
        for rank, index in self.indexes.items():
            part = index["tensors"].get(group, {}).get(key, {})
            if "offsets" in part:
                stored = self._stored[rank][group, key]
                chunks.append((rank, torch.Size(part["offsets"]), stored))
        return shape, chunks

    def _read(self, stored: StoredTensor, target: torch.Tensor, theirs: tuple[slice, ...]) -> None:
        _read_region(stored, target, theirs)
        self._read_bytes += stored.size_bytes
        now_mono_s = time.monotonic()
        if now_mono_s - self._reported_mono_s >= REPORT_EVERY_S:
            self._reported_mono_s = now_mono_s
            log.info(
                "restoring: read %.1f of %.1f GB from the disk",
                self._read_bytes / 1e9,
                self._size_bytes / 1e9,
            )

    def _read_other_indexes(self) -> None:
        found = sum(rank_of_directory(path.name) >= 0 for path in self.directory.iterdir())
        if found != self.world_size:
            raise ValueError(
                f"{INDEX} of rank 0 is of a job of {self.world_size} ranks, but {found} ranks wrote the"
                " checkpoint"
            )
        self.indexes.update((rank, self._read_index(rank)) for rank in range(1, self.world_size))

    def _read_index(self, rank: int) -> dict[str, Any]:
        path = self.directory / rank_directory(rank) / INDEX
        try:
            index = decode_index(path.read_bytes())
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        if index["rank"] != rank:
            raise ValueError(f"{path} is of rank {index['rank']}")
        return index

    def _headers(self, rank: int) -> dict[tuple[str, str], StoredTensor]:
        directory = self.directory / rank_directory(rank)
        found = {}
        for name, file in self.indexes[rank]["files"].items():
            if not TENSOR_FILE.fullmatch(name):
                raise ValueError(f"{INDEX} names the file {name!r:.100}")
            for key, stored in read_header(str(directory / name), file["checksums"]).items():
                found[file["group"], key] = stored
        return found


def _check_covered(
    name: str, begin: Sequence[int], shape: Sequence[int], chunks: Sequence[_Chunk]
) -> None:
    """Raise ValueError if the parts do not have all elements of a region."""
    found = 0
    for _, offsets, stored in chunks:
        if (both := _overlap(begin, shape, offsets, stored.shape)) is not None:
            found += math.prod(each.stop - each.start for each in both[0])
    if found != math.prod(shape):
        raise ValueError(f"parts of {name} are missing")


def _read_region(stored: StoredTensor, target: torch.Tensor, theirs: tuple[slice, ...]) -> None:
    """Read a region of a stored tensor into a tensor of this shape."""
    is_whole = target.shape == stored.shape
    if is_whole and target.device.type in ("cpu", "cuda"):
        whole = target
        if not target.is_contiguous():
            whole = torch.empty_like(target, memory_format=torch.contiguous_format)
        stored.read_into(whole)
        if whole is not target:
            _copy(whole, target)
    else:
        _copy(stored.read()[theirs], target)


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a tensor, also into an expanded one, whose elements share memory: they must get equal values."""
    once = tuple(slice(0, None if stride else 1) for stride in target.stride())
    target[once].copy_(source[once])
    if target[once].shape != target.shape and not torch.equal(target, source.to(target.device)):
        raise ValueError(f"an expanded tensor of the shape {tuple(target.shape)} has other values")


def read_parts(
    parts: Sequence[_Part],
    read: Callable[[StoredTensor, torch.Tensor, tuple[slice, ...]], None] = _read_region,
) -> None:
    """Fill memory of this rank from the stored parts that overlap with it, in several threads.

    Raises:
        ValueError, OSError: a part is damaged, or cannot be read.
    """
    devices = {own.device for own, *_ in parts if own.is_cuda}
    reads = [
        functools.partial(read, stored, own[both[0]], both[1])
        for own, begin, offsets, stored in parts
        if (both := _overlap(begin, own.shape, offsets, stored.shape)) is not None
    ]
    _wait_for_kernels(devices)  # which use the tensors that other threads fill
    run(reads)
    _wait_for_kernels(devices)


def _wait_for_kernels(devices: Iterable[torch.device]) -> None:
    for device in devices:
        torch.cuda.synchronize(device)


def _overlap(
    begin: Sequence[int],
    shape: Sequence[int],
    stored_begin: Sequence[int],
    stored_shape: Sequence[int],
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return the region that two parts of a tensor have in common, as slices of each; None if it is empty."""
    ours, theirs = [], []
    for own, size, other, other_size in zip(begin, shape, stored_begin, stored_shape, strict=True):
        low, high = max(own, other), min(own + size, other + other_size)
        if low >= high:
            return None
        ours.append(slice(low - own, high - own))
        theirs.append(slice(low - other, high - other))
    return tuple(ours), tuple(theirs)
