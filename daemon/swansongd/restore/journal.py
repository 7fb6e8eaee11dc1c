# SPDX-License-Identifier: Apache-2.0
"""The journal of a restore: the parts that it wrote, so that the next restore does not fetch them again.

A line for each part is appended once its bytes are in their file.  Neither the journal nor the files are
synced, so both are verified before use: a part counts only if its bytes, read back, match the digest in the
journal.  The whole shard must match its manifest in the end, as without a journal.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from swansongd.digests import part_count
from swansongd.model import CommitRef, StoredShard

_LINE = re.compile(r"([0-9]{1,10}) ([0-9]{1,10}) ([0-9a-f]{64})")
_VERSION = "swansong-restore-1"
_SPARE_BYTES = 4096

Noted = dict[tuple[int, int], bytes]
"""Digest by the number of the shard and the index of the part."""


def identity_of(run: str, ref: CommitRef, shards: Sequence[StoredShard]) -> str:
    """The first line of the journal: equal if and only if the same files are restored.

    All other lines identify a shard by its index in ``shards``.
    """
    facts = [
        [shard.path, shard.size_bytes, shard.part_size_bytes, shard.part_digests]
        for shard in shards
    ]
    return f"{_VERSION} {hashlib.sha256(repr((run, ref, facts)).encode()).hexdigest()}"


def line(shard_number: int, part_index: int, digest: bytes) -> bytes:
    """The line for a part whose bytes are in their file.  It replaces earlier lines for that part."""
    return f"{shard_number} {part_index} {digest.hex()}\n".encode()


def first_line(identity: str) -> bytes:
    return f"{identity}\n".encode()


def parse(data: bytes, identity: str, shards: Sequence[StoredShard]) -> Noted | None:
    """The parts in the journal; None if it belongs to another restore, or is not a journal.

    Lines that a crash tore or filled with other bytes are skipped.
    """
    first, *rest = data.decode("ascii", "replace").split("\n")
    if first != identity:
        return None
    noted: Noted = {}
    for text in rest[:-1]:  # after the last line break comes nothing, or a torn line
        match = _LINE.fullmatch(text)
        if match is None:
            continue
        number, index = int(match[1]), int(match[2])
        if number < len(shards):
            shard = shards[number]
            if index < part_count(shard.size_bytes, shard.part_size_bytes):
                noted[number, index] = bytes.fromhex(match[3])
    return noted


def max_bytes(shards: Sequence[StoredShard]) -> int:
    """The size of the journal after a few restores of these shards; a larger one is not read."""
    parts = sum(part_count(shard.size_bytes, shard.part_size_bytes) for shard in shards)
    return _SPARE_BYTES + 4 * parts * len(line(10**9, 10**9, bytes(32)))
