# SPDX-License-Identifier: Apache-2.0
"""The safetensors format: its header, and tensors read from a file.

A file is eight bytes of header size, a JSON header with type, shape and place of each tensor, and the bytes
of the tensors.  Nothing in a file can run code.  The format has no checksums, so the caller keeps them
elsewhere.

Source: https://github.com/huggingface/safetensors (section "Format").
"""

from __future__ import annotations

import io
import json
import math
import os
import struct
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from swansong._torch.memory import BLOCK_BYTES, Checksum, bytes_of, memory_of

HEADER_MAX_BYTES = 100 * 10**6
_ALIGNED = 64
_BUFFERS = 2
"""Blocks of host memory for a tensor that is copied to a GPU while the file is read."""

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool,
    "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def encode_header(tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, list[int], int]:
    """Lay out a file of these tensors.

    Returns:
        The header; the offset of each tensor in bytes after the header; the offset of the end of the last.
    """
    entries: dict[str, Any] = {}
    offsets, offset = [], 0
    for key, tensor in tensors.items():
        entries[key] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offsets.append(offset)
        offset += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNED)
    return struct.pack("<Q", len(text)) + text, offsets, offset


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file."""

    path: str
    begin: int
    """Offset of its first byte in the file."""
    dtype: torch.dtype
    shape: torch.Size
    checksum: int

    @property
    def size_bytes(self) -> int:
        """Size of its bytes in the file."""
        return int(math.prod(self.shape) * self.dtype.itemsize)

    def read(self) -> torch.Tensor:
        """Return the tensor in host memory.

        Raises:
            OSError: the file cannot be read, or is truncated.
            ValueError: the checksum differs from that of the bytes written.
        """
        tensor = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.read_into(tensor)
        return tensor

    def read_into(self, tensor: torch.Tensor) -> None:
        """Fill a contiguous tensor of this type and shape, in host memory or on a GPU.

        Raises:
            OSError: the file cannot be read, or is truncated.
            ValueError: the checksum differs from that of the bytes written.
        """
        data = bytes_of(tensor)
        found = Checksum(data.nbytes)
        upload = _Upload(data) if tensor.is_cuda else None
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self.begin)
            # Block by block, so that the checksum finds the bytes in the processor's cache.
            for begin in range(0, data.nbytes, BLOCK_BYTES):
                block = data[begin : begin + BLOCK_BYTES]
                host = block if upload is None else upload.buffer_for(block)
                _read(file, memory_of(host))
                found.update(host)
                if upload is not None:
                    upload.copy(host, block)
        if upload is not None:
            upload.wait()
        if found.value != self.checksum:
            raise ValueError(
                f"{self.path}: the bytes of the tensor at offset {self.begin} differ from those written"
            )


class _Upload:
    """Copies blocks to a GPU while the next ones are read.

    Args:
        target: all bytes, on the GPU.
    """

    def __init__(self, target: torch.Tensor) -> None:
        shape = _BUFFERS, min(target.nbytes, BLOCK_BYTES)
        try:
            buffers = torch.empty(
                shape, dtype=torch.uint8, device="cpu", pin_memory=target.nbytes > 0
            )
        except RuntimeError:  # CUDA refuses: the copies are only slower
            buffers = torch.empty(shape, dtype=torch.uint8, device="cpu")
        self._buffers = deque((each, torch.cuda.Event()) for each in buffers)
        """Those in the order of their use, each with the end of its last copy."""
        self._stream = torch.cuda.current_stream(target.device)

    def buffer_for(self, block: torch.Tensor) -> torch.Tensor:
        buffer, copied = self._buffers[0]
        copied.synchronize()
        return buffer[: block.nbytes]

    def copy(self, host: torch.Tensor, block: torch.Tensor) -> None:
        block.copy_(host, non_blocking=True)
        self._buffers[0][1].record(self._stream)
        self._buffers.rotate(-1)

    def wait(self) -> None:
        for _, copied in self._buffers:
            copied.synchronize()


def _read(file: io.FileIO, memory: memoryview) -> None:
    done = 0
    while done < len(memory):
        got = file.readinto(memory[done:])
        if not got:
            raise OSError(f"{file.name!s} is truncated")
        done += got


def read_header(path: str, checksums: Mapping[str, int]) -> dict[str, StoredTensor]:
    """Return the tensors of a file by key.

    Args:
        path: of the file.
        checksums: by key, for exactly the tensors that the file must contain.

    Raises:
        ValueError: the file is not a safetensors file, is truncated, or contains other tensors.
        OSError: the file cannot be read.
    """
    size_bytes = os.stat(path).st_size
    with open(path, "rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size_bytes
        if length > min(size_bytes - 8, HEADER_MAX_BYTES):
            raise ValueError(f"{path} is not a safetensors file, or is truncated")
        entries = json.loads(file.read(length))
    if not isinstance(entries, dict):
        raise ValueError(f"{path}: the header is not a JSON object")  # noqa: TRY004 - a broken file
    found: dict[str, StoredTensor] = {}
    for key, entry in entries.items():
        if key == "__metadata__":
            continue
        try:
            dtype, shape = DTYPES[entry["dtype"]], torch.Size(entry["shape"])
            begin, end = entry["data_offsets"]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: the entry of {key!r:.100} is invalid: {error}") from None
        is_whole = begin >= 0 and 8 + length + end <= size_bytes
        if min(shape, default=0) < 0 or end - begin != math.prod(shape) * dtype.itemsize:
            is_whole = False
        if not is_whole:
            raise ValueError(
                f"{path}: the entry of {key!r:.100} is invalid, or its bytes are truncated"
            )
        if key not in checksums:
            raise ValueError(f"{path} contains {key!r:.100}, which the index does not list")
        found[key] = StoredTensor(path, 8 + length + begin, dtype, shape, checksums[key])
    if len(found) != len(checksums):
        raise ValueError(f"{path} lacks {min(checksums.keys() - found.keys())!r:.100}")
    return found
