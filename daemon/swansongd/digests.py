# SPDX-License-Identifier: Apache-2.0
"""The digest of a shard: two levels of BLAKE3, so that parts can be hashed in any order.

``digest = "blake3-parts:" + BLAKE3(BLAKE3(part 0) || BLAKE3(part 1) || ...)`` in lower-case hex.  Each part
has ``part_size_bytes``; the last one may be shorter, and an empty shard has one empty part.  A thread hashes
each part while it uploads or downloads it, so no byte is read twice.
"""

from __future__ import annotations

from collections.abc import Sequence

from blake3 import blake3

ALGORITHM = "blake3-parts"
PART_SIZE_BYTES_MAX = 2**30
"""Limit of the format, so that a reader can hold a part in memory."""


def shard_digest(part_digests: Sequence[bytes]) -> str:
    """Digest of a shard.

    Args:
        part_digests: BLAKE3 of every part, in the order of their offsets.
    """
    return f"{ALGORITHM}:{blake3(b''.join(part_digests)).hexdigest()}"


def part_count(size_bytes: int, part_size_bytes: int) -> int:
    """Number of parts of a shard; an empty shard has one."""
    return max(1, -(-size_bytes // part_size_bytes))
