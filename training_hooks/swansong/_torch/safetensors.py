# SPDX-License-Identifier: Apache-2.0
"""Tensors as files: copied into host memory that is laid out as the files will be, then written from there.

The files are in safetensors format: eight bytes of header size, a JSON header with the type, shape and
place of each tensor, and the tensors' bytes.  Nothing in them can run code.  Checksums of the tensors are
returned when they are written and wanted when they are read; where they are kept is the caller's business.
"""

from __future__ import annotations

import ctypes
import io
import json
import math
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from swansong._checkpoint.staging import finish

FILE_BYTES = 2**29
"""The tensors of a file take at most so much, unless it is one alone: so the first files can be on their
way while the last are written.  A power of two, since torch rounds pinned memory up to the next one."""
WRITE_BYTES = 2**24
HEADER_MAX_BYTES = 100 * 10**6
_ALIGNED = 64
_PAGE_BYTES = 4096
_SUMMED_BYTES = 2**20
"""At a time, so that the products stay in the processor's cache."""

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool,
    "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Piece:
    """A tensor, or this rank's part of one, that is to be saved.

    Raises:
        TypeError: it is of a kind that cannot be written.
    """

    group: str
    """Files are named for it."""
    key: str
    tensor: torch.Tensor

    def __post_init__(self) -> None:
        tensor = self.tensor
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.dtype not in _NAMES:
            raise TypeError(
                f"{self.group}: {self.key} is a {tensor.layout} tensor of {tensor.dtype},"
                " which cannot be written"
            )


Signature = tuple[tuple[str, str, torch.dtype, torch.Size], ...]


def signature_of(pieces: Sequence[Piece]) -> Signature:
    """Equal for pieces that fit into the same arena."""
    return tuple((each.group, each.key, each.tensor.dtype, each.tensor.shape) for each in pieces)


class Arena:
    """Host memory for one copy of the pieces; that of a file with a piece on a GPU is pinned.

    Args:
        pieces: those of the first copy; later ones have the same signature.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.signature = signature_of(pieces)
        self.homes: list[str] = [""] * len(pieces)
        """For each piece, the file that it is in."""
        self._keys = [piece.key for piece in pieces]
        self._files: dict[str, tuple[bytes, torch.Tensor, list[int]]] = {}
        """By name: header, memory for what follows it, and which pieces that is."""
        views = [torch.empty(0)] * len(pieces)
        for name, places in _files(pieces):
            header, offsets, size_bytes = _header([pieces[place] for place in places])
            is_pinned = any(pieces[place].tensor.is_cuda for place in places)
            memory = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=is_pinned)
            self._files[name] = (header, memory, places)
            for place, offset in zip(places, offsets, strict=True):
                tensor = pieces[place].tensor
                flat = memory[offset : offset + tensor.nbytes]
                views[place] = flat.view(tensor.dtype).view(tensor.shape)
                self.homes[place] = name
        self._views = views

    def fill(self, pieces: Sequence[Piece]) -> None:
        """Copy the pieces, and return when they are copied."""
        devices = set()
        with torch.no_grad():
            for view, piece in zip(self._views, pieces, strict=True):
                is_on_gpu = piece.tensor.is_cuda
                view.copy_(piece.tensor, non_blocking=is_on_gpu)
                if is_on_gpu:
                    devices.add(piece.tensor.device)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()

    def write(self, directory: Path) -> dict[str, dict[str, int]]:
        """Write all files, and finish each; makes no copy of the memory.

        Returns:
            By file and key, the checksums of the pieces in memory.

        Raises:
            OSError: the file system refused.
        """
        checksums: dict[str, dict[str, int]] = {}
        for name, (header, memory, places) in self._files.items():
            checksums[name] = {self._keys[place]: checksum(self._views[place]) for place in places}
            with open(directory / name, "wb", buffering=0) as file:
                _write(file, memoryview(header))
                _write(file, _memory_of(memory))
            finish(directory / name)
        return checksums


def _write(file: io.FileIO, data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += file.write(data[done : done + WRITE_BYTES])


def checksum(tensor: torch.Tensor) -> int:
    """Of the bytes of a contiguous tensor in host memory, at more than twice the speed of a CRC of them.

    The CRC-32 of a sum for each page, and of what is left after the last whole page.  The sum is that of
    its 64-bit words, each times an odd weight of its place, so that words that change places, or changes
    that would cancel out, are seen (multilinear hashing: Carter and Wegman, "Universal classes of hash
    functions", 1979, section 3).
    """
    data = tensor.detach().reshape(-1).view(torch.uint8)
    in_pages = data.nbytes - data.nbytes % _PAGE_BYTES
    found = 0
    weighted = torch.empty(min(in_pages, _SUMMED_BYTES) // 8, dtype=torch.int64)
    for begin in range(0, in_pages, _SUMMED_BYTES):
        pages = data[begin : min(begin + _SUMMED_BYTES, in_pages)]
        if pages.storage_offset() % 8:
            pages = pages.clone()
        words = pages.view(torch.int64).view(-1, _PAGE_BYTES // 8)
        products = weighted[: words.numel()].view_as(words)
        torch.mul(words, _WEIGHTS, out=products)
        sums = products.sum(1)
        found = zlib.crc32(_memory_of(sums), found)
    return zlib.crc32(_memory_of(data[in_pages:]), found)


def _weights() -> torch.Tensor:
    """An odd number for each word of a page, the same for ever: SplitMix64 (Steele et al., 2014) from 0."""
    found = []
    for place in range(1, _PAGE_BYTES // 8 + 1):
        word = place * 0x9E3779B97F4A7C15 % 2**64
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
        found.append(word ^ word >> 31 | 1)
    return torch.tensor([word - 2**64 if word >= 2**63 else word for word in found])


_WEIGHTS = _weights()


def _files(pieces: Sequence[Piece]) -> list[tuple[str, list[int]]]:
    """Names of files, and which pieces go into each, the most strictly aligned ones first."""
    groups: dict[str, list[list[int]]] = {}
    sizes: dict[str, int] = {}
    for place, piece in enumerate(pieces):
        files = groups.setdefault(piece.group, [])
        if not files or sizes[piece.group] + piece.tensor.nbytes > FILE_BYTES:
            files.append([])
            sizes[piece.group] = 0
        files[-1].append(place)
        sizes[piece.group] += piece.tensor.nbytes
    return [
        (
            f"{group}-{number:05d}.safetensors",
            sorted(places, key=lambda place: -pieces[place].tensor.dtype.itemsize),
        )
        for group, files in groups.items()
        for number, places in enumerate(files)
    ]


def _header(pieces: Sequence[Piece]) -> tuple[bytes, list[int], int]:
    """The header of a file of these pieces, where after it each piece begins, and where the last ends."""
    entries: dict[str, Any] = {}
    offsets, offset = [], 0
    for piece in pieces:
        tensor = piece.tensor
        entries[piece.key] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offsets.append(offset)
        offset += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNED)
    return struct.pack("<Q", len(text)) + text, offsets, offset


@dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    path: str
    begin: int
    """Where its bytes begin in the file."""
    dtype: torch.dtype
    shape: torch.Size
    checksum: int

    def read(self) -> torch.Tensor:
        """The tensor, in host memory.

        Raises:
            OSError: the file cannot be read, or ends too soon.
            ValueError: these are not the bytes that were written.
        """
        tensor = torch.empty(self.shape, dtype=self.dtype)
        self.read_into(tensor)
        return tensor

    def read_into(self, tensor: torch.Tensor) -> None:
        """Fill a contiguous tensor of this type and shape in host memory.

        Raises:
            OSError: the file cannot be read, or ends too soon.
            ValueError: these are not the bytes that were written.
        """
        memory = _memory_of(tensor)
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self.begin)
            done = 0
            while done < tensor.nbytes:
                got = file.readinto(memory[done : done + WRITE_BYTES])
                if not got:
                    raise OSError(f"{self.path} ends too soon")
                done += got
        if checksum(tensor) != self.checksum:
            raise ValueError(f"{self.path}, from byte {self.begin} on, is not what was written")


def read_header(path: str, checksums: Mapping[str, int]) -> dict[str, Stored]:
    """The tensors of a file.

    Args:
        path: of the file.
        checksums: of its tensors.

    Raises:
        ValueError: it is no safetensors file, is cut off, or holds other tensors than those.
        OSError: it cannot be read.
    """
    size_bytes = os.stat(path).st_size
    with open(path, "rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size_bytes
        if length > min(size_bytes - 8, HEADER_MAX_BYTES):
            raise ValueError(f"{path} is no safetensors file, or is cut off")
        entries = json.loads(file.read(length))
    if not isinstance(entries, dict):
        raise ValueError(f"{path} has no header of tensors")  # noqa: TRY004 - a broken file
    found: dict[str, Stored] = {}
    for key, entry in entries.items():
        if key == "__metadata__":
            continue
        try:
            dtype, shape = DTYPES[entry["dtype"]], torch.Size(entry["shape"])
            begin, end = entry["data_offsets"]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: {key!r:.100} is not described well: {error}") from None
        is_whole = begin >= 0 and 8 + length + end <= size_bytes
        if min(shape, default=0) < 0 or end - begin != math.prod(shape) * dtype.itemsize:
            is_whole = False
        if not is_whole:
            raise ValueError(f"{path}: {key!r:.100} is cut off, or not described well")
        if key not in checksums:
            raise ValueError(f"{path} holds {key!r:.100}, of which nothing is known")
        found[key] = Stored(path, 8 + length + begin, dtype, shape, checksums[key])
    if len(found) != len(checksums):
        raise ValueError(f"{path} lacks {min(checksums.keys() - found.keys())!r:.100}")
    return found


def _memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory; the caller keeps the tensor alive."""
    array = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")
