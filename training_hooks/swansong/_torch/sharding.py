# SPDX-License-Identifier: Apache-2.0
"""DTensors, without an import of ``torch.distributed.tensor`` in a job that has none.

That import costs almost a second.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

import torch


def is_sharded(value: Any) -> bool:
    """Whether ``value`` is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local(tensor: Any) -> torch.Tensor:
    """Return the part of a tensor that is in the memory of this rank: of a plain tensor, the whole."""
    held: torch.Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return held


def own_part(tensor: Any) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return the part of a tensor on this rank, which shares its memory, and the offsets of this part.

    Args:
        tensor: a DTensor, or a plain tensor, whose part is the whole.
    """
    if not is_sharded(tensor):
        return tensor.detach(), (0,) * tensor.dim()
    (chunk,) = tensor.__create_chunk_list__()
    return tensor.detach().to_local(), tuple(chunk.offsets)


def is_written_here(tensor: Any, lost: Collection[int] = ()) -> bool:
    """Whether this rank writes its part of a DTensor: of equal parts, the first living rank writes one.

    Args:
        tensor: the DTensor.
        lost: ranks of the job that write nothing.
    """
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    each = list(zip(tensor.placements, coordinate, strict=True))
    if not lost:
        return all(place == 0 or not placement.is_replicate() for placement, place in each)
    here = int(mesh.mesh[tuple(coordinate)])
    equal = mesh.mesh[tuple(slice(None) if p.is_replicate() else at for p, at in each)]
    return here == next((rank for rank in equal.flatten().tolist() if rank not in lost), None)


def ranks_of_lost_parts(tensor: Any, lost: Collection[int]) -> list[int]:
    """Return those of the ``lost`` ranks whose part of a DTensor no other rank holds."""
    ranks = tensor.device_mesh.mesh
    is_lost = torch.isin(ranks, torch.tensor(sorted(lost), dtype=ranks.dtype, device=ranks.device))
    for dimension, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            is_lost = is_lost.all(dim=dimension, keepdim=True)
    return [int(rank) for rank in ranks[is_lost.expand(ranks.shape)].tolist()]


def writers(mesh: Any, placements: Collection[Any], ranks: Collection[int]) -> set[int]:
    """Return the ranks that write the parts of a DTensor that ``ranks`` hold.

    Args:
        mesh: its ``DeviceMesh``, of ranks of the job.
        placements: one for each dimension of the mesh.
        ranks: ranks of the job; those outside of the mesh hold no part.
    """
    found = set()
    for rank in ranks:
        for place in (mesh.mesh == rank).nonzero().tolist():
            each = zip(placements, place, strict=True)
            first = tuple(0 if placement.is_replicate() else at for placement, at in each)
            found.add(int(mesh.mesh[first]))
    return found
