# SPDX-License-Identifier: Apache-2.0
"""The bytes of tensors in host memory, and their checksums."""

from __future__ import annotations

import ctypes
import zlib

import torch

_PAGE_BYTES = 4096
BLOCK_BYTES = 2**21
"""Bytes that one step of the checksum covers, so that the products stay in the processor's cache."""


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in host memory.  The caller must keep the tensor alive."""
    array = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")


class Checksum:
    """A 32-bit checksum of bytes in host memory, at twice the speed of a CRC.

    The checksum is the CRC-32 of one sum for each page of 4 KiB, and of the bytes after the last whole page.
    A sum multiplies each 64-bit word by an odd weight for its place.  It therefore detects words that have
    changed places, and changes that would cancel each other out.

    Source: multilinear hashing, Carter and Wegman, "Universal classes of hash functions", 1979, section 3.

    Args:
        size_bytes: number of bytes that :meth:`update` will add.
    """

    def __init__(self, size_bytes: int) -> None:
        self.value = 0
        self._weighted = torch.empty(
            min(size_bytes, BLOCK_BYTES) // 8, dtype=torch.int64, device="cpu"
        )

    def update(self, block: torch.Tensor) -> None:
        """Add the next bytes.

        Args:
            block: of type ``uint8``, with :data:`BLOCK_BYTES` bytes; only the last block may have fewer.
        """
        in_pages = block.nbytes - block.nbytes % _PAGE_BYTES
        if in_pages:
            pages = block[:in_pages]
            if pages.storage_offset() % 8:
                pages = pages.clone()
            words = pages.view(torch.int64).view(-1, _PAGE_BYTES // 8)
            products = self._weighted[: words.numel()].view_as(words)
            torch.mul(words, _WEIGHTS, out=products)
            sums = products.sum(1)
            self.value = zlib.crc32(memory_of(sums), self.value)
        if in_pages < block.nbytes:  # at the empty address of an empty tensor, zlib begins again
            self.value = zlib.crc32(memory_of(block[in_pages:]), self.value)


def checksum(tensor: torch.Tensor) -> int:
    """Return the :class:`Checksum` of a contiguous tensor in host memory."""
    data = bytes_of(tensor)
    found = Checksum(data.nbytes)
    for begin in range(0, data.nbytes, BLOCK_BYTES):
        found.update(data[begin : begin + BLOCK_BYTES])
    return found.value


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as ``uint8``, in the same memory."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def _weights() -> torch.Tensor:
    """Return an odd weight for each word of a page: SplitMix64 (Steele et al., 2014) from seed 0."""
    found = []
    for place in range(1, _PAGE_BYTES // 8 + 1):
        word = place * 0x9E3779B97F4A7C15 % 2**64
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
        found.append(word ^ word >> 31 | 1)
    signed = [word - 2**64 if word >= 2**63 else word for word in found]
    return torch.tensor(signed, device="cpu")


_WEIGHTS = _weights()
