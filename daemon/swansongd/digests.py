# SPDX-License-Identifier: Apache-2.0
"""The strong digest of a shard: two levels of BLAKE3, so that parts can be hashed in any order.

``digest = "blake3-parts:" + BLAKE3(BLAKE3(part 0) || BLAKE3(part 1) || ...)`` in lower-case hex, where
the parts are the shard cut every ``part_size_bytes`` (the last one shorter; an empty shard has one
empty part).  Threads that upload or download different parts of one shard each hash what passes
through their hands, and nobody reads a byte twice.
"""

from __future__ import annotations

from collections.abc import Sequence

from blake3 import blake3

ALGORITHM = "blake3-parts"
PART_SIZE_BYTES_MAX = 2**30
"""A part is held in memory while it moves."""


def part_digest(data: bytes | bytearray | memoryview) -> bytes:
    """Digest of one part: 32 bytes."""
    return blake3(data).digest()


def shard_digest(part_digests: Sequence[bytes]) -> str:
    """Digest of a shard from the digests of all its parts, in order of their offset."""
    return f"{ALGORITHM}:{blake3(b''.join(part_digests)).hexdigest()}"


def part_count(size_bytes: int, part_size_bytes: int) -> int:
    """Into how many parts a shard is cut; an empty shard has one."""
    return max(1, -(-size_bytes // part_size_bytes))
