# SPDX-License-Identifier: Apache-2.0
"""Tensors as files: copied into host memory that is laid out as the files will be, then written from there.

The files are in safetensors format: eight bytes of header size, a JSON header with the type, shape and
place of each tensor, and the tensors' bytes.  Nothing in them can run code.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

FILE_BYTES = 2**29
"""A file holds about so much, so that the first ones can be on their way while the last are written."""
WRITE_BYTES = 2**24
HEADER_MAX_BYTES = 100 * 10**6
_ALIGNED = 64

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
    """Host memory for one copy of the pieces, pinned if any of them is on a GPU.

    Args:
        pieces: those of the first copy; later ones have the same signature.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.signature = signature_of(pieces)
        self.files: dict[str, tuple[int, int]] = {}  # name -> begin and end in memory
        self.homes: list[str] = [""] * len(pieces)
        """For each piece, the file that it is in."""
        headers: list[tuple[int, bytes]] = []
        begins = [0] * len(pieces)
        end = 0
        for name, places in _files(pieces):
            header, offsets = _header([pieces[place] for place in places])
            begin = -(-end // _ALIGNED) * _ALIGNED
            headers.append((begin, header))
            end = begin + len(header)
            for place, offset in zip(places, offsets, strict=True):
                begins[place] = begin + len(header) + offset
                self.homes[place] = name
            end = begins[places[-1]] + pieces[places[-1]].tensor.nbytes
            self.files[name] = (begin, end)
        is_pinned = any(piece.tensor.is_cuda for piece in pieces)
        self._bytes = torch.empty(max(1, end), dtype=torch.uint8, pin_memory=is_pinned)
        for begin, header in headers:
            self._memory[begin : begin + len(header)] = header
        self._views = [
            self._bytes[begin : begin + piece.tensor.nbytes]
            .view(piece.tensor.dtype)
            .view(piece.tensor.shape)
            for begin, piece in zip(begins, pieces, strict=True)
        ]

    def fill(self, pieces: Sequence[Piece]) -> None:
        """Copy the pieces, and return when they are copied."""
        devices = set()
        with torch.no_grad():
            for view, piece in zip(self._views, pieces, strict=True):
                view.copy_(piece.tensor, non_blocking=True)
                if piece.tensor.is_cuda:
                    devices.add(piece.tensor.device)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()

    def write(self, directory: Path) -> None:
        """Write all files; makes no copy of the memory.

        Raises:
            OSError: the file system refused.
        """
        memory = self._memory
        for name, (begin, end) in self.files.items():
            with open(directory / name, "wb", buffering=0) as file:
                done = begin
                while done < end:
                    done += file.write(memory[done : min(end, done + WRITE_BYTES)])

    @property
    def _memory(self) -> memoryview:
        return _memory_of(self._bytes)


def _files(pieces: Sequence[Piece]) -> list[tuple[str, list[int]]]:
    """Names of files, and which pieces go into each, the most strictly aligned ones first."""
    groups: dict[str, list[list[int]]] = {}
    sizes: dict[str, int] = {}
    for place, piece in enumerate(pieces):
        files = groups.setdefault(piece.group, [])
        if not files or sizes[piece.group] >= FILE_BYTES:
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


def _header(pieces: Sequence[Piece]) -> tuple[bytes, list[int]]:
    """The header of a file of these pieces, and where after it each piece begins."""
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
    text += b" " * (-(8 + len(text)) % _ALIGNED)  # the data is then aligned in memory as well
    return struct.pack("<Q", len(text)) + text, offsets


@dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    path: str
    begin: int
    """Where its bytes begin in the file."""
    dtype: torch.dtype
    shape: torch.Size

    def read(self) -> torch.Tensor:
        """The tensor, in host memory.

        Raises:
            OSError: the file cannot be read, or ends too soon.
        """
        tensor = torch.empty(self.shape, dtype=self.dtype)
        self.read_into(tensor)
        return tensor

    def read_into(self, tensor: torch.Tensor) -> None:
        """Fill a contiguous tensor of this type and shape in host memory.

        Raises:
            OSError: the file cannot be read, or ends too soon.
        """
        if not tensor.nbytes:
            return
        memory = _memory_of(tensor)
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self.begin)
            done = 0
            while done < tensor.nbytes:
                got = file.readinto(memory[done : done + WRITE_BYTES])
                if not got:
                    raise OSError(f"{self.path} ends too soon")
                done += got


def read_header(path: str) -> dict[str, Stored]:
    """The tensors of a file.

    Raises:
        ValueError: it is no safetensors file, or is cut off.
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
        found[key] = Stored(path, 8 + length + begin, dtype, shape)
    return found


def _memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory; the caller keeps the tensor alive."""
    array = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")
