# SPDX-License-Identifier: Apache-2.0
"""Host memory for copies of tensors, laid out as the files that are written from it."""

from __future__ import annotations

import contextlib
import functools
import io
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from swansong._checkpoint.staging import finish
from swansong._log import log
from swansong._torch.host_memory import HostMemory, available_bytes
from swansong._torch.memory import checksum, memory_of
from swansong._torch.safetensors import DTYPE_NAMES, HEADER_MAX_BYTES, encode_header

FILE_BYTES = 2**29
"""Largest size of a file with several tensors, so that the first files can be uploaded while the last ones
are written."""
WRITE_BYTES = 2**24
"""Longest single write."""
MOST_SHARE = 0.5
"""Largest share of the available host memory that all ranks of a VM prepare before their first copies."""
SHORT_SHARE = 0.05
"""Idle memory is given back while less than this share of the host memory is available."""
LOOK_S = 5.0
_WAY_OUT = "convert it to a dense tensor, or keep it out of state_dict()"


@dataclass(frozen=True)
class TensorPiece:
    """A tensor to save, or this rank's part of one.

    Raises:
        TypeError: the tensor has a layout or type that cannot be written.
    """

    group: str
    """Name of the object.  The file names begin with it."""
    key: str
    tensor: torch.Tensor

    def __post_init__(self) -> None:
        if reason := _reason_to_refuse(self.tensor):
            raise TypeError(f"{self.group}: {self.key} is {reason}")


def _reason_to_refuse(tensor: torch.Tensor) -> str:
    if torch.nn.parameter.is_lazy(tensor):
        return "not initialised yet: run the first batch through the model before attach()"
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"a {type(tensor).__qualname__}, which cannot be written: {_WAY_OUT}"
    if tensor.device.type == "meta":
        return "on the meta device, without data: create the model's tensors before attach()"
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.dtype not in DTYPE_NAMES:
        return f"a {tensor.layout} tensor of {tensor.dtype}, which cannot be written: {_WAY_OUT}"
    return ""


def check_headers(pieces: Sequence[TensorPiece]) -> None:
    """Raise ValueError if a file of these pieces would have a header that no restore accepts."""
    for name, places in _files(pieces):
        header, _, _ = encode_header({pieces[place].key: pieces[place].tensor for place in places})
        if len(header) > HEADER_MAX_BYTES:
            raise ValueError(
                f"the header of {name} has {len(header)} bytes, and the limit is {HEADER_MAX_BYTES}: the"
                " object has too many tensors"
            )


Signature = tuple[tuple[str, str, torch.dtype, torch.Size], ...]


def signature_of(pieces: Sequence[TensorPiece]) -> Signature:
    """Return keys, types and shapes: equal for pieces that fit into the same arena."""
    return tuple((each.group, each.key, each.tensor.dtype, each.tensor.shape) for each in pieces)


class Arena:
    """Host memory for one copy of the pieces.  It is pinned where a file has a piece on a GPU.

    Args:
        pieces: of the first copy.  Later copies must have the same signature.
    """

    def __init__(self, pieces: Sequence[TensorPiece]) -> None:
        self.signature = signature_of(pieces)
        self.homes: list[str] = [""] * len(pieces)
        """For each piece, the name of its file."""
        self._keys = [piece.key for piece in pieces]
        self._files: dict[str, tuple[bytes, HostMemory, list[int]]] = {}
        """By name: header, memory of the tensors, and the numbers of the pieces."""
        views = [torch.empty(0, device="cpu")] * len(pieces)
        for name, places in _files(pieces):
            tensors = {pieces[place].key: pieces[place].tensor for place in places}
            header, offsets, size_bytes = encode_header(tensors)
            gpus = [tensor.device for tensor in tensors.values() if tensor.is_cuda]
            memory = HostMemory(size_bytes, gpus[0] if gpus else None)
            self._files[name] = (header, memory, places)
            for place, offset in zip(places, offsets, strict=True):
                tensor = pieces[place].tensor
                flat = memory.tensor[offset : offset + tensor.nbytes]
                views[place] = flat.view(tensor.dtype).view(tensor.shape)
                self.homes[place] = name
        self._views = views

    def prepare(self) -> None:
        """Touch and pin all memory, which :meth:`fill` does otherwise."""
        for _, memory, _ in self._files.values():
            memory.prepare(is_urgent=False)

    def fill(self, pieces: Sequence[TensorPiece]) -> None:
        """Copy the pieces; returns when the copies are complete."""
        devices = set()
        with torch.no_grad():
            for _, memory, places in self._files.values():
                memory.prepare(is_urgent=True)
                for place in places:
                    tensor = pieces[place].tensor
                    self._views[place].copy_(tensor, non_blocking=tensor.is_cuda)
                    if tensor.is_cuda:
                        devices.add(tensor.device)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()

    def write(self, directory: Path) -> dict[str, dict[str, int]]:
        """Write and finish all files, without another copy in memory.

        Returns:
            Checksums of the pieces in memory, by file and key.

        Raises:
            OSError: the file system refused.
        """
        checksums: dict[str, dict[str, int]] = {}
        for name, (header, memory, places) in self._files.items():
            checksums[name] = {self._keys[place]: checksum(self._views[place]) for place in places}
            with open(directory / name, "wb", buffering=0) as file:
                _write(file, memoryview(header))
                _write(file, memory_of(memory.tensor))
            finish(directory / name)
        return checksums


class Arenas:
    """The host memory for the copies of one state.

    A copy uses the memory of an earlier one that is not needed any more, so there is one arena, and a second
    one only if a copy is taken while the last one is still being written.  New memory is slow: the kernel
    clears each page at its first use, and a GPU needs it pinned.
    """

    def __init__(self) -> None:
        self._idle: deque[Arena] = deque()
        """The last one that became idle is at the end; other threads append."""
        self._unused: list[Arena] = []
        """Not freed, because that could block."""

    def prepare(self, pieces: Sequence[TensorPiece], ranks: int) -> None:
        """Prepare the memory of the first copy in the background.

        Memory that becomes idle is given back while the VM is short of memory.

        Args:
            pieces: of the first copy.
            ranks: number of processes on this VM that do the same.
        """
        if self._idle:
            return
        size_bytes = sum(piece.tensor.nbytes for piece in pieces)
        with contextlib.suppress(OSError, RuntimeError):  # no memory, no thread
            if ranks * size_bytes <= MOST_SHARE * available_bytes()[0]:
                self._idle.append(Arena(pieces))
                work = functools.partial(_prepare, weakref.ref(self))
                threading.Thread(target=work, name="swansong-memory", daemon=True).start()

    def take(self, pieces: Sequence[TensorPiece], *, may_wait: bool = True) -> Arena:
        """Return memory for a copy of the pieces, which no other copy uses.

        Args:
            pieces: of the copy.
            may_wait: whether memory of another layout is freed.  CUDA first waits for all kernels.
        """
        signature = signature_of(pieces)
        arena: Arena | None = None
        with contextlib.suppress(IndexError):  # another thread may free the idle memory
            while True:
                arena = self._idle.pop()
                if arena.signature == signature:
                    return arena
                if not may_wait:
                    self._unused.append(arena)
        arena = None  # frees the memory of another layout before the new one is allocated
        return Arena(pieces)

    def prepare_idle(self) -> None:
        """Touch and pin the idle memory.  A copy that takes it meanwhile does the rest."""
        for arena in list(self._idle):
            arena.prepare()

    def give_back(self) -> None:
        """Free the idle memory if the VM is short of memory."""
        available, total = available_bytes()
        if available < SHORT_SHARE * total:
            log.info("memory is short: %.1f of %.1f GB are available", available / 1e9, total / 1e9)
            self._idle.clear()

    def keep_while(self, user: object, arena: Arena) -> None:
        """Let no other copy use the memory as long as ``user`` exists."""
        weakref.finalize(user, self._idle.append, arena).atexit = False


def _prepare(arenas: weakref.ref[Arenas]) -> None:
    never = threading.Event()
    if (found := arenas()) is not None:
        found.prepare_idle()
    while found is not None:
        found = None
        never.wait(LOOK_S)
        if (found := arenas()) is not None:
            with contextlib.suppress(OSError):
                found.give_back()


def _write(file: io.FileIO, data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += file.write(data[done : done + WRITE_BYTES])


def _files(pieces: Sequence[TensorPiece]) -> list[tuple[str, list[int]]]:
    """Return names of files and the numbers of their pieces, those with the largest alignment first."""
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
