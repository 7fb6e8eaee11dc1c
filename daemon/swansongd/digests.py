# SPDX-License-Identifier: Apache-2.0
"""The digests of a shard: the BLAKE3 of each of its parts.

Each part has ``part_size_bytes``; the last one may be shorter, and an empty shard has one empty part.  A
thread hashes each part while it uploads or downloads it, so no byte is read twice.
"""

from __future__ import annotations

DIGEST_BYTES = 32
PART_SIZE_BYTES_MAX = 2**30
"""Limit of the format, so that a reader can hold a part in memory."""


def part_count(size_bytes: int, part_size_bytes: int) -> int:
    """Number of parts of a shard; an empty shard has one."""
    return max(1, -(-size_bytes // part_size_bytes))


def part_digest(part_digests: bytes, index: int) -> bytes:
    """The digest of part ``index`` (from 0) among concatenated ones."""
    return part_digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
