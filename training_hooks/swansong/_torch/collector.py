# SPDX-License-Identifier: Apache-2.0
"""Gathers the tensors that one rank writes, without communication between the ranks.

The ranks know beforehand which tensors all of them hold alike.  The rank and the number of ranks determine
which part of such a tensor a rank writes.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Collection
from typing import Any

import torch

from swansong._ranks.agreement import Ranks
from swansong._torch.arena import TensorPiece
from swansong._torch.safetensors import DTYPE_NAMES
from swansong._torch.sharding import is_sharded, is_written_here, own_part, ranks_of_lost_parts
from swansong.rank_files import encode_tree

SPLIT_BYTES = 2**20
"""Smallest tensor, of those that all ranks hold alike, that is split among the ranks."""


class Collector:
    """Gathers the tensors of one object, and their entries in the index.

    Args:
        group: name of the object.
        ranks: position of this process among the ranks that take part.
        is_common: whether all ranks hold the same values in this plain tensor.
        lost: ranks of the job that write nothing.
    """

    def __init__(
        self,
        group: str,
        ranks: Ranks,
        *,
        is_common: Callable[[str, torch.Tensor], bool] = lambda _key, _tensor: False,
        lost: Collection[int] = (),
    ) -> None:
        self.pieces: list[TensorPiece] = []
        self.missing: list[str] = []
        """Names of the tensors of which only lost ranks hold a part, with these ranks."""
        self.entries: dict[str, dict[str, Any]] = {}
        """By key: ``shape`` if all ranks hold the tensor, ``offsets`` of the part that this rank writes.

        ``dtype`` of a tensor of which this rank holds no element: the rank has no file with its type.
        """
        self.group = group
        self._rank, self._world_size = ranks.rank, ranks.world_size
        self._is_common = is_common
        self._lost = lost
        self._may_be_sharded = True
        self._seen: dict[tuple[Any, ...], str] = {}

    def encode(self, value: Any, path: str, *, may_be_sharded: bool = True) -> Any:
        """Encode ``value`` for the index; see :func:`swansong.rank_files.encode_tree`.

        Args:
            value: a tree.
            path: name of its place.
            may_be_sharded: whether an object of the job shows at a restore how a DTensor is sharded.
        """
        self._may_be_sharded = may_be_sharded
        return encode_tree(value, path, self._put)

    def _put(self, value: Any, key: str) -> Any:
        if key in self.entries:  # numbers of numpy among the keys of one dict
            key = f"{key} {len(self.entries)}"
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
            if isinstance(value, numpy.ma.MaskedArray):
                return None  # a tensor has no mask
            is_array = isinstance(value, numpy.ndarray)
            try:
                tensor = torch.from_numpy(numpy.array(value))
            except TypeError as error:
                raise TypeError(f"{key} is an array of {value.dtype}: {error}") from None
            self._add(TensorPiece(self.group, key, tensor))
            return {"array" if is_array else "scalar": key}
        if is_sharded(value):
            if not self._may_be_sharded:
                raise TypeError(
                    f"{key} is a sharded tensor, which only an object with state_dict() can hold"
                )
            self._add_shard(key, value)
            return {"tensor": key}
        if not isinstance(value, torch.Tensor):
            return None
        piece = TensorPiece(self.group, key, value)
        if value.numel():
            # Tied tensors are the same memory under two names: write it once.
            place = (
                value.device,
                value.data_ptr(),
                value.dtype,
                value.shape,
                value.stride(),
                value.is_conj(),
                value.is_neg(),
            )
            known = self._seen.setdefault(place, key)
            if known != key:
                return {"tensor": known}
        if self._world_size > 1 and self._is_common(key, value):
            self._add_share(key, value)
        else:
            self._add(piece)
        return {"tensor": key}

    def _add(self, piece: TensorPiece) -> None:
        self.entries[piece.key] = {}
        self.pieces.append(piece)

    def _add_share(self, key: str, tensor: torch.Tensor) -> None:
        # Without communication: rows are split evenly, and the name of a small tensor determines its rank.
        entry = self.entries[key] = {"shape": list(tensor.shape)}
        rows = tensor.shape[0] if tensor.dim() else 0
        if rows >= self._world_size and tensor.nbytes >= SPLIT_BYTES:
            begin = rows * self._rank // self._world_size
            end = rows * (self._rank + 1) // self._world_size
            entry["offsets"] = [begin] + [0] * (tensor.dim() - 1)
            self.pieces.append(TensorPiece(self.group, key, tensor[begin:end]))
        elif zlib.crc32(key.encode()) % self._world_size == self._rank:
            entry["offsets"] = [0] * tensor.dim()
            self.pieces.append(TensorPiece(self.group, key, tensor))

    def _add_shard(self, key: str, tensor: Any) -> None:
        shards = tensor.device_mesh.size()
        if shards > self._world_size + len(self._lost):
            raise ValueError(
                f"{key} is sharded over {shards} ranks, but swansong.attach() found {self._world_size};"
                " call it after init_process_group() and before destroy_process_group()"
            )
        entry = self.entries[key] = {"shape": list(tensor.shape)}
        if self._lost and (ranks := ranks_of_lost_parts(tensor, self._lost)):
            self.missing.append(f"{self.group}.{key} of rank {', '.join(map(str, ranks))}")
        if self._lost and shards < self._world_size + len(self._lost):
            # The lost ranks may have held tensors that no rank of this mesh knows, as in a pipeline.
            self.missing.append(
                f"the counterpart of {self.group}.{key} on the ranks outside its mesh"
            )
        if not is_written_here(tensor, self._lost):
            return  # no part is on this rank, or another rank writes the same part
        part, offsets = own_part(tensor)
        if part.numel():
            entry["offsets"] = list(offsets)
            self.pieces.append(TensorPiece(self.group, key, part))
        else:
            entry["dtype"] = DTYPE_NAMES.get(tensor.dtype, "")
