# SPDX-License-Identifier: Apache-2.0
"""Reads the tensors that all ranks wrote, for any number of ranks.

``torch.distributed.checkpoint`` fits the stored parts to the shards of this job.
"""

from __future__ import annotations

import math
import os
import warnings
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
from torch.futures import Future

from swansong._torch.index import INDEX, decode_index
from swansong._torch.safetensors import StoredTensor, read_header
from swansong.protocol import is_rank_directory, rank_directory


class CheckpointSet:
    """The tensors and indexes that all ranks wrote.

    Args:
        directory: contains a directory for each rank.

    Raises:
        ValueError: a file is malformed, or parts of a tensor are missing.
        OSError: a file is missing or cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        first = self._read_index(0)
        self.world_size = int(first["world_size"])
        found = sum(is_rank_directory(path.name) for path in directory.iterdir())
        if found != self.world_size:
            raise ValueError(
                f"{INDEX} of rank 0 is of a job of {self.world_size} ranks, but {found} ranks wrote the"
                " checkpoint"
            )
        self.indexes = [first, *(self._read_index(rank) for rank in range(1, self.world_size))]
        self._stored = [self._headers(rank) for rank in range(self.world_size)]

    def load(self, source_rank: int, targets: dict[tuple[str, str], torch.Tensor]) -> None:
        """Fill tensors in place.

        Args:
            source_rank: rank whose tensors to load where the ranks hold different ones.
            targets: tensors by object and key: plain ones, or DTensors as this job shards them.

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
                    raise ValueError(f"{name} is {target.dtype}, but was saved as {stored.dtype}")
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
            # DCP warns that it does not communicate.  Each rank finds all that it needs in the files.
            warnings.simplefilter("ignore")
            planner = DefaultLoadPlanner(flatten_state_dict=False)
            load(wanted, storage_reader=reader, planner=planner, no_dist=True)

    def shape_and_dtype(
        self, source_rank: int, group: str, key: str
    ) -> tuple[torch.Size, torch.dtype]:
        """Return shape and type of a whole tensor."""
        shape, chunks = self._find(source_rank, group, key)
        return shape, chunks[0][1].dtype

    def _find(
        self, source_rank: int, group: str, key: str
    ) -> tuple[torch.Size, list[tuple[torch.Size, StoredTensor]]]:
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
            index = decode_index(path.read_bytes())
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        if index["rank"] != rank:
            raise ValueError(f"{path} is of rank {index['rank']}")
        return index

    def _headers(self, rank: int) -> dict[tuple[str, str], StoredTensor]:
        directory = self._directory / rank_directory(rank)
        found = {}
        for name, file in self.indexes[rank]["files"].items():
            if os.path.basename(name) != name:
                raise ValueError(f"{INDEX} names the file {name!r:.100}")
            for key, stored in read_header(str(directory / name), file["checksums"]).items():
                found[file["group"], key] = stored
        return found


class _Reader(StorageReader):  # type: ignore[misc]
    """Reads the parts of tensors that ``torch.distributed.checkpoint`` plans."""

    def __init__(self) -> None:
        self.metadata = Metadata(state_dict_metadata={})
        self.stored: dict[MetadataIndex, StoredTensor] = {}

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
