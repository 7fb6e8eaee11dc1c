# SPDX-License-Identifier: Apache-2.0
"""Host memory for copies of tensors, prepared in the background, and pinned for copies from a GPU.

The kernel clears each page at its first use, which takes longer than the copy.
torch's own pinned memory rounds each block up to a power of two, and keeps freed blocks.  It also pins pages
that the kernel must clear first, which blocks all CUDA calls of the process for half a second per GB.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import threading
import weakref
from collections.abc import Iterator

import torch

from swansong._log import log
from swansong._torch.parallel import run

TOUCH_BYTES = 2**24
"""Bytes that one thread touches at a time."""
_PORTABLE = 1
"""``cudaHostRegisterPortable``: pinned for all GPUs of the process."""
_CAPTURE_RELAXED = 2
"""``CU_STREAM_CAPTURE_MODE_RELAXED``"""


class HostMemory:
    """Memory from the kernel, which takes it back as soon as this object and its tensor are dropped.

    Args:
        size_bytes: of the tensor.
        device: the GPU to pin the memory for; None for pageable memory.

    Raises:
        OSError: the kernel refused.
    """

    def __init__(self, size_bytes: int, device: torch.device | None) -> None:
        self._memory = mmap.mmap(
            -1, max(1, size_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        # A copy would write to pages that it shares with each fork, such as a data loader's worker.
        self._advise("MADV_DONTFORK")
        if device is not None:
            self._advise("MADV_HUGEPAGE")
        self.tensor = torch.frombuffer(self._memory, dtype=torch.uint8)[:size_bytes]
        """The memory as ``uint8``."""
        self._device = device
        self._lock = threading.Lock()
        self._is_prepared = not size_bytes
        self._is_urgent = False
        """Whether a copy waits."""

    def prepare(self, *, is_urgent: bool) -> None:
        """Touch and pin the memory, unless that is done.  If CUDA refuses, the memory stays pageable.

        Args:
            is_urgent: a copy waits.  Memory that is not pinned is then touched by the copy itself.
        """
        self._is_urgent |= is_urgent
        with self._lock:
            if self._is_prepared:
                return
            self._is_prepared = True
            if self._device is None and not is_urgent:
                # They are cleared faster, but the kernel may have to move other pages first.
                self._advise("MADV_HUGEPAGE")
            # To pin pages that exist takes a tenth of the time, and only that blocks the CUDA calls.
            touches = [
                functools.partial(self._touch, at)
                for at in range(0, self.tensor.nbytes, TOUCH_BYTES)
            ]
            run(touches, threads_max=None if is_urgent else 1)
            if self._device is None:
                return
            # CUDA keeps the last error of each thread: the thread of the training loop would raise it.
            thread = threading.Thread(target=self._pin, name="swansong-pin", daemon=True)
            thread.start()
            thread.join()

    def _touch(self, at: int) -> None:
        if not (self._is_urgent and self._device is None):
            size_bytes = min(TOUCH_BYTES, self.tensor.nbytes - at)
            ctypes.memset(self.tensor.data_ptr() + at, 0, size_bytes)

    def _advise(self, name: str) -> None:
        with contextlib.suppress(AttributeError, OSError):
            self._memory.madvise(getattr(mmap, name))

    def _pin(self) -> None:
        begin, size_bytes = self.tensor.data_ptr(), self.tensor.nbytes
        try:
            with torch.cuda.device(self._device), _during_capture():
                error = int(torch.cuda.cudart().cudaHostRegister(begin, size_bytes, _PORTABLE))
        except Exception as raised:
            log.warning("%s bytes of host memory cannot be pinned: %s", size_bytes, raised)
            return
        if error:
            log.warning(
                "%s bytes of host memory cannot be pinned, so saves block longer: CUDA error %s",
                size_bytes,
                error,
            )
            return
        # Before the kernel takes the memory back; at the end of the process CUDA is gone already.
        weakref.finalize(self, _unpin, begin, os.getpid()).atexit = False


def _unpin(begin: int, pid: int) -> None:
    if os.getpid() == pid:
        with _during_capture():
            torch.cuda.cudart().cudaHostUnregister(begin)


@contextlib.contextmanager
def _during_capture() -> Iterator[None]:
    """Let this thread pin memory while another one captures a CUDA graph, which would fail otherwise."""
    try:
        exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):  # a GPU of another vendor
        yield
        return
    mode = ctypes.c_int(_CAPTURE_RELAXED)
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


def available_bytes() -> tuple[int, int]:
    """Return the host memory that is available to this process, and the whole of it.

    The limits of control groups (version 2) count, too.

    Raises:
        OSError: the kernel does not report it.
    """
    facts = _numbers("/proc/meminfo")
    found = [(facts.get("MemAvailable", 0) * 1024, facts["MemTotal"] * 1024)]
    with contextlib.suppress(OSError), open("/proc/self/cgroup", encoding="ascii") as file:
        group = next((line[3:].strip() for line in file if line.startswith("0::/")), "/")
        while True:
            with contextlib.suppress(OSError, ValueError):
                found.append(_left_in(f"/sys/fs/cgroup{group}"))
            if group == "/":
                break
            group = os.path.dirname(group)
    return min(found)


def _left_in(directory: str) -> tuple[int, int]:
    with open(f"{directory}/memory.max", encoding="ascii") as file:
        limit_bytes = int(file.read())  # ValueError: "max"
    with open(f"{directory}/memory.current", encoding="ascii") as file:
        used_bytes = int(file.read())
    cached_bytes = _numbers(f"{directory}/memory.stat").get("inactive_file", 0)
    return limit_bytes - used_bytes + cached_bytes, limit_bytes


def _numbers(path: str) -> dict[str, int]:
    with open(path, encoding="ascii") as file:
        words = [line.replace(":", "").split() for line in file]
    return {each[0]: int(each[1]) for each in words}
