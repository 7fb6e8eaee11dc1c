# SPDX-License-Identifier: Apache-2.0
"""Number of pieces of a size."""


def part_count(size_bytes: int, part_size_bytes: int) -> int:
    """Number of parts; an empty size has one."""
    return max(1, -(-size_bytes // part_size_bytes))
