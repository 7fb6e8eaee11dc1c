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


def own_part(tensor: Any) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return the part of a tensor on this rank, which shares its memory, and the offsets of this part.

    Args:
        tensor: a DTensor, or a plain tensor, whose part is the whole.
    """
    if not is_sharded(tensor):
        return tensor.detach(), (0,) * tensor.dim()
    (chunk,) = tensor.__create_chunk_list__()
    return tensor.detach().to_local(), tuple(chunk.offsets)


def is_written_here(tensor: Any) -> bool:
    """Whether this rank writes its part of a DTensor: of equal parts, the first rank writes one."""
    coordinate = tensor.device_mesh.get_coordinate()
    return coordinate is not None and all(
        place == 0 or not placement.is_replicate()
        for placement, place in zip(tensor.placements, coordinate, strict=True)
    )


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
