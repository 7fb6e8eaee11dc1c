# SPDX-License-Identifier: Apache-2.0
"""Packs: small files of a set that share one object, and the body of the request that stores a pack."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from blake3 import blake3

from swansongd.errors import StagingError
from swansongd.flush.body import Cancelled, within_means
from swansongd.flush.known_parts import HEAD_BYTES, head_digest, head_of
from swansongd.model import StagedFile
from swansongd.staging import scan
from swansongd.stores.checksums import crc32c

SMALL_BYTES_MAX = 4 * 2**20
"""Largest file that goes into a pack.  docs/performance/transfer.md has the measurement."""
PACK_FILES_MAX = 5000
"""Limits the work that one failed request repeats."""


class HasFile(Protocol):
    """An item of a pack."""

    @property
    def file(self) -> StagedFile: ...


Item = TypeVar("Item", bound=HasFile)


@dataclass(frozen=True, slots=True)
class Packing:
    """Decides which files share an object.

    Args:
        file_bytes_max: size of the largest file in a pack; 0 makes no packs.
        pack_bytes: size of a pack, which its last file may exceed.
        connections: parallel requests, which should all have work.
    """

    file_bytes_max: int
    pack_bytes: int
    connections: int

    @classmethod
    def for_parts(cls, part_size_bytes: int, connections: int) -> Packing:
        """Packs as large as parts: a request of this size saturates a connection."""
        return cls(min(part_size_bytes // 4, SMALL_BYTES_MAX), part_size_bytes, connections)

    def is_small(self, size_bytes: int) -> bool:
        """Whether a file of this size goes into a pack.  An empty file needs no object."""
        return 0 < size_bytes <= self.file_bytes_max

    def groups(self, items: Sequence[Item], *, is_sealed: bool) -> list[list[Item]]:
        """The items of each pack, in their order, so that a restore joins neighbours.

        Items of a set that still grows stay out until a quarter of a pack waits.
        """
        total_bytes = sum(item.file.size_bytes for item in items)
        wanted_bytes = self._wanted_bytes(total_bytes) if is_sealed else self.pack_bytes // 4
        groups: list[list[Item]] = []
        group: list[Item] = []
        group_bytes = 0
        for item in items:
            group.append(item)
            group_bytes += item.file.size_bytes
            if group_bytes >= wanted_bytes or len(group) == PACK_FILES_MAX:
                groups.append(group)
                group, group_bytes = [], 0
        if group and is_sealed:
            groups.append(group)
        return groups

    def _wanted_bytes(self, total_bytes: int) -> int:
        """The size of each pack of a sealed set."""
        share_bytes = -(-total_bytes // self.connections)
        wanted_bytes = max(1, self.pack_bytes // 8, min(self.pack_bytes, share_bytes))
        # Packs of one size: a small last pack would cost a request of its own.
        packs = max(1, -(-total_bytes // wanted_bytes))
        return -(-total_bytes // packs)


NO_PACKS = Packing(file_bytes_max=0, pack_bytes=1, connections=1)
"""Each file is an object of its own."""


@dataclass(frozen=True, slots=True)
class PackedFile:
    """A file as the body of a pack contained it."""

    offset_bytes: int
    """Within the pack."""
    digest: bytes
    """BLAKE3."""
    head: bytes
    """See :func:`~swansongd.flush.known_parts.head_digest`."""
    crc32c: int


class PackBody:
    """Files, one after another, as the body of a request; each file has its own digest and checksum.

    A file is open while its bytes are read.  It must be unchanged since the scan before and after.

    Args:
        directory: of the set.
        files: none is empty.
        is_unwanted: takes the index of a file; if it returns True, reading raises Cancelled.
        moved: called with the length of each window, and with a negative number of bytes after a rewind.
    """

    def __init__(
        self,
        directory: scan.SetDirectory,
        files: Sequence[StagedFile],
        *,
        is_unwanted: Callable[[int], bool],
        moved: Callable[[int], None],
    ) -> None:
        self.size_bytes = sum(file.size_bytes for file in files)
        self._directory = directory
        self._files = files
        self._is_unwanted = is_unwanted
        self._moved = moved
        self._fd = -1
        self._done_bytes = 0
        self.rewind()

    def rewind(self) -> None:
        self.close()
        if self._done_bytes:
            self._moved(-self._done_bytes)
        self._done_bytes = 0
        self._packed: list[PackedFile] = []
        self._begin_file(0)

    def _begin_file(self, offset_bytes: int) -> None:
        self._file_offset_bytes = offset_bytes
        self._file_done_bytes = 0
        self._hash = blake3()
        self._head = b""
        self._crc32c = 0

    def close(self) -> None:
        """Close the open file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def read_into(self, window: memoryview) -> None:
        """Fill the window with the next bytes.

        Raises:
            StagingError: a file changed, or cannot be read.
            Transient: no file descriptor or no memory is left.
            Cancelled: a file of the pack is not needed any more.
        """
        filled = 0
        while filled < len(window):
            file = self._files[len(self._packed)]
            if self._is_unwanted(len(self._packed)):
                raise Cancelled
            if self._fd < 0:
                self._fd = within_means(partial(self._directory.open, file))
            filled += self._read(file, window[filled:])
        self._done_bytes += filled
        self._moved(filled)

    def _read(self, file: StagedFile, window: memoryview) -> int:
        """Read the next bytes of the open file, and close it after the last one."""
        window = window[: file.size_bytes - self._file_done_bytes]
        try:
            count = os.preadv(self._fd, [window], self._file_done_bytes)
        except OSError as error:
            raise StagingError(f"{file.path} cannot be read: {error.strerror}") from error
        if not count:
            raise StagingError(f"{file.path} ends early: it was truncated after it was sealed")
        window = window[:count]
        if not self._file_done_bytes:
            is_short = count < min(HEAD_BYTES, file.size_bytes)
            self._head = head_digest(self._fd, 0, file.size_bytes) if is_short else head_of(window)
        self._hash.update(window)
        self._crc32c = crc32c(window, self._crc32c)
        self._file_done_bytes += count
        if self._file_done_bytes == file.size_bytes:
            if not scan.unchanged(self._fd, file):
                raise StagingError(f"{file.path} changed while it was read")
            self.close()
            self._packed.append(
                PackedFile(self._file_offset_bytes, self._hash.digest(), self._head, self._crc32c)
            )
            self._begin_file(self._file_offset_bytes + file.size_bytes)
        return count

    @property
    def packed(self) -> list[PackedFile]:
        """Each file of the body; valid once all bytes have been read since the last rewind."""
        assert len(self._packed) == len(self._files), (
            "the store acknowledged a body that it had not read"
        )
        return self._packed
