# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of PyTorch objects in staging: what each rank writes, and reading all ranks' parts again.

Every rank writes files of tensors and, last, an index in JSON.  It writes without a word to the others:
which tensors all ranks have in common is known beforehand, and who writes which part of them follows from
rank and number of ranks.  Reading goes through ``torch.distributed.checkpoint``, which fits the parts to
the shards that this job has, however many ranks saved them.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    LoadPlan,
    LoadPlanner,
    Metadata,
    StorageReader,
    load,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor
from torch.futures import Future

from swansong._checkpoint.staging import rank_directory
from swansong._torch.safetensors import Piece, Stored, read_header
from swansong.state import encode_tree

FORMAT = "swansong.torch/1"
INDEX = "state.json"
_INDEX_FILE = re.compile(rb'\{"crc32":"([0-9a-f]{8})","index":(.*)\}', re.DOTALL)
SPLIT_BYTES = 2**20
"""Tensors that all ranks have in common are split among them from this size on."""


class Collector:
    """Gathers the tensors of one object, and what the index says of them.

    Args:
        group: name of the object.
        rank: this one.
        world_size: of how many.
        is_common: whether all ranks hold the same values in this plain tensor.
        may_be_sharded: whether DTensors can be loaded again, which takes a model or an optimizer.
    """

    def __init__(
        self,
        group: str,
        rank: int,
        world_size: int,
        *,
        is_common: Callable[[str, torch.Tensor], bool] = lambda _key, _tensor: False,
        may_be_sharded: bool = False,
    ) -> None:
        self.pieces: list[Piece] = []
        self.entries: dict[str, dict[str, Any]] = {}
        """By key: ``shape`` if it is common to all ranks, ``offsets`` of the part that lies here, if any."""
        self.group = group
        self._rank = rank
        self._world_size = world_size
        self._is_common = is_common
        self._may_be_sharded = may_be_sharded
        self._seen: dict[tuple[Any, ...], str] = {}

    def encode(self, value: Any, path: str) -> Any:
        """What stands for ``value`` in the index; see :func:`swansong.state.encode_tree`."""
        return encode_tree(value, path, self._put)

    def _put(self, value: Any, key: str) -> Any:
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
            is_array = isinstance(value, numpy.ndarray)
            self._keep(key, torch.from_numpy(numpy.array(value)))
            return {"array" if is_array else "scalar": key}
        if isinstance(value, DTensor):
            if not self._may_be_sharded:
                raise TypeError(f"{key} is a sharded tensor outside of a model or an optimizer")
            self._keep_shard(key, value)
            return {"tensor": key}
        if not isinstance(value, torch.Tensor):
            return None
        if value.numel() and value.layout == torch.strided:
            # Tied tensors, which are the same memory under two names, are kept once.
            place = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
            known = self._seen.setdefault(place, key)
            if known != key:
                return {"tensor": known}
        if self._world_size > 1 and self._is_common(key, value):
            self._keep_share(key, value)
        else:
            self._keep(key, value)
        return {"tensor": key}

    def _keep(self, key: str, tensor: torch.Tensor) -> None:
        self.entries[key] = {}
        self.pieces.append(Piece(self.group, key, tensor))

    def _keep_share(self, key: str, tensor: torch.Tensor) -> None:
        # No rank asks another: rows are split evenly, and small tensors go by their name.
        entry = self.entries[key] = {"shape": list(tensor.shape)}
        rows = tensor.shape[0] if tensor.dim() else 0
        if rows >= self._world_size and tensor.nbytes >= SPLIT_BYTES:
            begin = rows * self._rank // self._world_size
            end = rows * (self._rank + 1) // self._world_size
            entry["offsets"] = [begin] + [0] * (tensor.dim() - 1)
            self.pieces.append(Piece(self.group, key, tensor[begin:end]))
        elif zlib.crc32(key.encode()) % self._world_size == self._rank:
            entry["offsets"] = [0] * tensor.dim()
            self.pieces.append(Piece(self.group, key, tensor))

    def _keep_shard(self, key: str, tensor: Any) -> None:
        entry = self.entries[key] = {"shape": list(tensor.shape)}
        coordinate = tensor.device_mesh.get_coordinate()
        if coordinate is None or any(
            placement.is_replicate() and place != 0
            for placement, place in zip(tensor.placements, coordinate, strict=True)
        ):
            return  # not here, or another rank writes the same
        (chunk,) = tensor.__create_chunk_list__()
        if math.prod(chunk.sizes):
            entry["offsets"] = list(chunk.offsets)
            self.pieces.append(Piece(self.group, key, tensor.to_local()))


def encode_index(index: dict[str, Any]) -> bytes:
    """The content of an index file, with a checksum.

    Raises:
        ValueError, TypeError: JSON has no words for it.
    """
    text = json.dumps(index, allow_nan=False, separators=(",", ":")).encode()
    return b'{"crc32":"%08x","index":%s}' % (zlib.crc32(text), text)


def decode_index(data: bytes) -> dict[str, Any]:
    """The index that :func:`encode_index` made ``data`` of.

    Raises:
        ValueError: it is none, or not what was written.
    """
    match = _INDEX_FILE.fullmatch(data)
    if match is None or int(match[1], 16) != zlib.crc32(match[2]):
        raise ValueError("is no index, or not what was written")
    index = json.loads(match[2])
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise ValueError(f"is not an index of format {FORMAT}")
    return index


class CheckpointSet:
    """What all ranks wrote.

    Args:
        directory: with a ``rank-<n>`` directory for each rank.

    Raises:
        ValueError: a file cannot be understood, or parts of a tensor are missing.
        OSError: a file is missing or cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        first = self._read_index(0)
        self.world_size = int(first["world_size"])
        self.indexes = [first, *(self._read_index(rank) for rank in range(1, self.world_size))]
        self._stored = [self._headers(rank) for rank in range(self.world_size)]

    def load(self, source_rank: int, targets: dict[tuple[str, str], torch.Tensor]) -> None:
        """Fill tensors in place.

        Args:
            source_rank: whose own tensors to take, where they are not common to all.
            targets: by object and key; plain ones, or DTensors as this job shards them.

        Raises:
            ValueError, OSError: a tensor is missing, has another type or shape, or cannot be read.
        """
        reader, wanted = _Reader(), {}
        for (group, key), target in targets.items():
            name = f"{group}.{key}"
            wanted[name] = target.detach()
            shape, chunks = self._find(source_rank, group, key)
            for offsets, stored in chunks:
                if stored.dtype != target.dtype:
                    raise ValueError(f"{name} is {target.dtype}, and was saved as {stored.dtype}")
                reader.stored[MetadataIndex(name, offsets)] = stored
            reader.metadata.state_dict_metadata[name] = TensorStorageMetadata(
                properties=TensorProperties(dtype=target.dtype),
                size=shape,
                chunks=[
                    ChunkStorageMetadata(offsets=offsets, sizes=stored.shape)
                    for offsets, stored in chunks
                ],
            )
        with warnings.catch_warnings():
            # It warns that it does not talk to other ranks; each finds all that it needs in the files.
            warnings.simplefilter("ignore")
            planner = DefaultLoadPlanner(flatten_state_dict=False)
            load(wanted, storage_reader=reader, planner=planner, no_dist=True)

    def shape_and_dtype(
        self, source_rank: int, group: str, key: str
    ) -> tuple[torch.Size, torch.dtype]:
        """Of a whole tensor."""
        shape, chunks = self._find(source_rank, group, key)
        return shape, chunks[0][1].dtype

    def _find(
        self, source_rank: int, group: str, key: str
    ) -> tuple[torch.Size, list[tuple[torch.Size, Stored]]]:
        entry = self.indexes[source_rank]["tensors"][group].get(key)
        if entry is None:
            raise ValueError(f"the checkpoint has no tensor {key!r} of {group}")
        if "shape" not in entry:
            stored = self._stored[source_rank][group, key]
            return stored.shape, [(torch.Size([0] * len(stored.shape)), stored)]
        shape = torch.Size(entry["shape"])
        chunks = []
        for rank, index in enumerate(self.indexes):
            part = index["tensors"].get(group, {}).get(key, {})
            if "offsets" in part:
                chunks.append((torch.Size(part["offsets"]), self._stored[rank][group, key]))
        if sum(math.prod(stored.shape) for _, stored in chunks) != math.prod(shape):
            raise ValueError(f"parts of {key!r} of {group} are missing")
        return shape, chunks

    def _read_index(self, rank: int) -> dict[str, Any]:
        path = self._directory / rank_directory(rank) / INDEX
        try:
            return decode_index(path.read_bytes())
        except ValueError as error:
            raise ValueError(f"{path} {error}") from None

    def _headers(self, rank: int) -> dict[tuple[str, str], Stored]:
        directory = self._directory / rank_directory(rank)
        found = {}
        for name, file in self.indexes[rank]["files"].items():
            if os.path.basename(name) != name:
                raise ValueError(f"{INDEX} names the file {name!r:.100}")
            for key, stored in read_header(str(directory / name), file["checksums"]).items():
                found[file["group"], key] = stored
        return found


class _Reader(StorageReader):  # type: ignore[misc]
    """Gives ``torch.distributed.checkpoint`` the parts of tensors that it asks for."""

    def __init__(self) -> None:
        self.metadata = Metadata(state_dict_metadata={})
        self.stored: dict[MetadataIndex, Stored] = {}

    def reset(self, checkpoint_id: object = None) -> None:
        pass

    def read_metadata(self) -> Metadata:
        return self.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:  # noqa: ARG003
        return True

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            index = MetadataIndex(item.storage_index.fqn, item.storage_index.offset)
            stored = self.stored[index]
            target = planner.resolve_tensor(item).detach()
            is_whole = target.shape == stored.shape
            if is_whole and target.device.type == "cpu" and target.is_contiguous():
                stored.read_into(target)
            else:
                source = stored.read()
                for dim, (begin, length) in enumerate(
                    zip(item.storage_offsets, item.lengths, strict=True)
                ):
                    source = source.narrow(dim, begin, length)
                target.copy_(source)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done
