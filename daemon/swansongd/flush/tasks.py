# SPDX-License-Identifier: Apache-2.0
"""The tasks of the flush workers."""

from __future__ import annotations

from dataclasses import dataclass

from swansongd.flush.layout import Pieces


@dataclass(frozen=True, slots=True)
class FindWork:
    """Find the work that is left of the set."""


@dataclass(frozen=True, slots=True)
class StoreChunk:
    """Read the pieces of a chunk, and name a stored chunk with these bytes, or create one."""

    pieces: Pieces
    begun_mono_s: float


@dataclass(frozen=True, slots=True)
class FinishSet:
    """Check that the set did not change, and report it as stored."""


Task = FindWork | StoreChunk | FinishSet
