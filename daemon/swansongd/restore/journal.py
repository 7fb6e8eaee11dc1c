# SPDX-License-Identifier: Apache-2.0
"""What a restore has written so far, so that the next one need not fetch it again.

One line for each part, appended once its bytes are in their file.  Nothing here is believed: neither the
journal nor the files are synced, so a part counts only if its bytes, read back, still have the digest
noted for it, and the whole shard must match its manifest in the end, as without a journal.
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
    """The first line of the journal: the same exactly when the same files are to be restored.

    Shards are told apart by their place in ``shards`` afterwards.
    """
    said = [[shard.path, shard.size_bytes, shard.part_size_bytes, shard.digest] for shard in shards]
    return f"{_VERSION} {hashlib.sha256(repr((run, ref, said)).encode()).hexdigest()}"


def line(shard_number: int, part_index: int, digest: bytes) -> bytes:
    """A part that is in its file now.  It replaces what was noted of that part before."""
    return f"{shard_number} {part_index} {digest.hex()}\n".encode()


def first_line(identity: str) -> bytes:
    return f"{identity}\n".encode()


def parse(data: bytes, identity: str, shards: Sequence[StoredShard]) -> Noted | None:
    """The parts that are noted, or None when the journal is of another restore, or of none.

    Lines that a crash left torn, or filled with anything, are passed over.
    """
    first, *rest = data.decode("ascii", "replace").split("\n")
    if first != identity:
        return None
    noted: Noted = {}
    for text in rest[:-1]:  # behind the last line break is nothing, or a torn line
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
    """The longest journal that a few restores of these shards can have written; a longer one is not read."""
    parts = sum(part_count(shard.size_bytes, shard.part_size_bytes) for shard in shards)
    return _SPARE_BYTES + 4 * parts * len(line(10**9, 10**9, bytes(32)))
