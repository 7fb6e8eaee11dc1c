# SPDX-License-Identifier: Apache-2.0
"""Compares ways for verified bytes from the daemon's process into tensors: ``make bench-into-tensors``.

A child process takes the daemon's part.  It writes each shard in windows of 1 MiB, and then sends a message
with the shard's number, and its descriptor where the way needs one.  This process fills its tensors from each
shard as soon as the message arrives, in blocks of 1 MiB with a checksum, as a restore does.

The tensors exist before, and their memory is touched.  The order is random within each repetition.  The time
is from the first byte that the child writes to the last byte in the tensors.  The memory is the greatest size
that the shards have besides the tensors: read shards are released, if the way allows that.
"""

from __future__ import annotations

import argparse
import array
import ctypes
import fcntl
import json
import mmap
import os
import random
import resource
import socket
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from swansong._torch.memory import Checksum, memory_of

from bench.transfer.results import write_page

NAME = "make bench-into-tensors"
WINDOW_BYTES = BLOCK_BYTES = 2**20
HUGE_BYTES = 2**21
HUGE_PAGES = Path("/proc/sys/vm/nr_hugepages")
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
MADV_HUGEPAGE = 14


@dataclass(frozen=True)
class Way:
    """How a shard gets from one process to the other."""

    name: str
    place: str = ""
    """``disk`` or ``tmpfs``; empty: a memfd, whose descriptor is sent."""
    is_mapped: bool = False
    """Whether the reader maps the shard; otherwise it calls ``preadv``."""
    pages: str = ""
    """``huge``: MFD_HUGETLB; ``transparent``: MADV_HUGEPAGE, both written through a mapping."""
    sends_fd: bool = False
    """Whether the descriptor of a file is sent, instead of its path."""


WAYS = (
    Way("file on disk, read", "disk"),
    Way("file on disk, mapped", "disk", is_mapped=True),
    Way("file on tmpfs, read", "tmpfs"),
    Way("file on tmpfs, read through a sent descriptor", "tmpfs", sends_fd=True),
    Way("file on tmpfs, mapped", "tmpfs", is_mapped=True),
    Way("sealed memfd, read"),
    Way("sealed memfd, mapped", is_mapped=True),
    Way("sealed memfd, transparent huge pages, mapped", is_mapped=True, pages="transparent"),
    Way("sealed memfd, MFD_HUGETLB, mapped", is_mapped=True, pages="huge"),
)


@dataclass
class Cost:
    """Measurements of one way."""

    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    extra_bytes: int = 0


# ---------------------------------------------------------------- the daemon's part


def fill(way: Way, path: Path, size_bytes: int) -> int:
    """Write one shard; returns its descriptor."""
    window = memoryview(os.urandom(WINDOW_BYTES))
    if way.place:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    else:
        huge = os.MFD_HUGETLB if way.pages == "huge" else 0
        fd = os.memfd_create("shard", os.MFD_ALLOW_SEALING | huge)
    allocated = -(-size_bytes // HUGE_BYTES) * HUGE_BYTES if way.pages == "huge" else size_bytes
    os.ftruncate(fd, allocated)
    if way.pages:
        with mmap.mmap(fd, allocated) as mapped:
            if way.pages == "transparent":
                mapped.madvise(MADV_HUGEPAGE)
            for begin in range(0, size_bytes, WINDOW_BYTES):
                part = window[: size_bytes - begin]
                mapped[begin : begin + len(part)] = part
    else:
        for begin in range(0, size_bytes, WINDOW_BYTES):
            os.pwrite(fd, window[: size_bytes - begin], begin)
    if way.place == "disk":
        os.fsync(fd)
    if not way.place:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    return fd


def daemon(connection: socket.socket, roots: dict[str, Path]) -> None:
    """Serve one case after another until the connection ends."""
    while order := connection.recv(4096):
        name, *sizes_bytes = json.loads(order)
        way = next(each for each in WAYS if each.name == name)
        before_s = cpu_s()
        greatest_bytes = send_shards(connection, way, roots.get(way.place, Path()), sizes_bytes)
        connection.send(json.dumps([greatest_bytes, cpu_s() - before_s]).encode())


def send_shards(connection: socket.socket, way: Way, root: Path, sizes_bytes: list[int]) -> int:
    """Write all shards, announce each one, and release those that the reader has read.

    Returns:
        The greatest size of all shards that were held at one time.
    """
    held: dict[int, int] = {}
    greatest_bytes = 0

    def release(*, wait: bool) -> None:
        with suppress(BlockingIOError):
            while held:
                number = json.loads(connection.recv(64, 0 if wait else socket.MSG_DONTWAIT))
                os.close(held.pop(number))
                with suppress(FileNotFoundError):
                    os.unlink(root / str(number))

    for number, size_bytes in enumerate(sizes_bytes):
        fd = held[number] = fill(way, root / str(number), size_bytes)
        held_bytes = sum(os.fstat(each).st_blocks for each in held.values()) * 512
        greatest_bytes = max(greatest_bytes, held_bytes)
        rights = array.array("i", [fd])
        is_sent = way.sends_fd or not way.place
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if is_sent else []
        connection.sendmsg([json.dumps(number).encode()], ancillary)
        release(wait=False)
    release(wait=True)
    return greatest_bytes


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


# ---------------------------------------------------------------- the trainer's part


@contextmanager
def blocks(
    way: Way, fd: int, size_bytes: int
) -> Iterator[Iterator[tuple[int, torch.Tensor | None]]]:
    """The blocks of a shard: offset, and the bytes where the shard is mapped."""
    offsets = range(0, size_bytes, BLOCK_BYTES)
    if not way.is_mapped:
        yield ((begin, None) for begin in offsets)
        return
    length = os.fstat(fd).st_size
    # torch.frombuffer() needs a writable buffer, so the address of the mapping is used.
    address = LIBC.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "mmap")
    if way.pages == "transparent":
        LIBC.madvise(address, length, MADV_HUGEPAGE)
    source = torch.frombuffer((ctypes.c_char * size_bytes).from_address(address), dtype=torch.uint8)
    try:
        yield ((begin, source[begin : begin + BLOCK_BYTES]) for begin in offsets)
    finally:
        LIBC.munmap(address, length)


LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def load(way: Way, fd: int, tensor: torch.Tensor, *, has_checksum: bool) -> None:
    """Fill the tensor from a shard."""
    found = Checksum(tensor.nbytes)
    with blocks(way, fd, tensor.nbytes) as parts:
        for begin, source in parts:
            block = tensor[begin : begin + BLOCK_BYTES]
            if source is not None:
                block.copy_(source)
            else:
                done = 0
                while done < block.nbytes:
                    done += os.preadv(fd, [memory_of(block)[done:]], begin + done)
            if has_checksum:
                found.update(block)


def measure(
    connection: socket.socket,
    way: Way,
    roots: dict[str, Path],
    tensors: list[torch.Tensor],
    cost: Cost,
    *,
    has_checksum: bool,
) -> None:
    before_s = cpu_s()
    begun_mono_s = time.monotonic()
    connection.send(json.dumps([way.name, *(tensor.nbytes for tensor in tensors)]).encode())
    for _ in tensors:
        data, ancillary, _, _ = connection.recvmsg(64, socket.CMSG_SPACE(4))
        number = json.loads(data)
        if ancillary:
            fd = array.array("i", ancillary[0][2])[0]
        else:
            fd = os.open(roots[way.place] / str(number), os.O_RDONLY)
        load(way, fd, tensors[number], has_checksum=has_checksum)
        os.close(fd)
        if number == len(tensors) - 1:
            cost.seconds.append(time.monotonic() - begun_mono_s)
        connection.send(data)
    own_s = cpu_s() - before_s
    extra_bytes, daemon_s = json.loads(connection.recv(256))
    cost.cpu_s.append(own_s + daemon_s)
    cost.extra_bytes = max(cost.extra_bytes, extra_bytes)


# ---------------------------------------------------------------- the table


@contextmanager
def huge_pages(size_bytes: int) -> Iterator[bool]:
    """Reserve huge pages for the benchmark; False if the kernel does not reserve them."""
    before = HUGE_PAGES.read_text()
    wanted = size_bytes // HUGE_BYTES + 64
    try:
        HUGE_PAGES.write_text(str(wanted))
    except OSError:
        yield False
        return
    try:
        yield int(HUGE_PAGES.read_text()) >= wanted
    finally:
        HUGE_PAGES.write_text(before)


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(line.partition(": ")[2] for line in lines if line.startswith("model name"))


def compared(
    connection: socket.socket,
    ways: list[Way],
    roots: dict[str, Path],
    case: tuple[int, int],
    repeats: int,
) -> list[str]:
    """The table of one case: size in bytes, and number of shards."""
    size_bytes, shards = case
    tensors = [torch.ones(size_bytes // shards, dtype=torch.uint8) for _ in range(shards)]
    costs: dict[tuple[str, bool], Cost] = defaultdict(Cost)
    for repeat in range(repeats + 1):
        cases = [(way, True) for way in ways] + [(way, False) for way in ways if way == WAYS[3]]
        for way, has_checksum in random.sample(cases, len(cases)):
            cost = (
                costs[way.name, has_checksum] if repeat else Cost()
            )  # the first round is a warm-up
            measure(connection, way, roots, tensors, cost, has_checksum=has_checksum)
            figures = f"{cost.seconds[-1]:.2f} s, {cost.cpu_s[-1]:.2f} CPU s"
            print(f"{shards} shards: {way.name}: {figures}", file=sys.stderr)
    lines = [
        f"| {size_bytes / 1e9:g} GB in {shards} shards | seconds | CPU seconds | other memory |",
        "| --- | --- | --- | --- |",
    ]
    for (name, has_checksum), cost in costs.items():
        what = name if has_checksum else f"{name}, no checksum"
        extra = "0 (page cache)" if "disk" in name else f"{cost.extra_bytes / 1e6:,.0f} MB"
        lines.append(f"| {what} | {spread(cost.seconds)} | {spread(cost.cpu_s)} | {extra} |")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(prog=NAME, description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="16 MB, once: a test of the benchmark")
    parser.add_argument("--disk", type=Path, default=Path("/var/tmp"), help="directory on a disk")
    parser.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"), help="directory on tmpfs")
    parser.add_argument(
        "--write", action="store_true", help="write the tables into docs/performance/"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = [(500_000_000, 1), (500_000_000, 16), (2_000_000_000, 16)]
    if options.quick:
        cases, options.repeats = [(16_000_000, 4)], 1
    lines: list[str] = []
    with (
        tempfile.TemporaryDirectory(dir=options.disk) as disk,
        tempfile.TemporaryDirectory(dir=options.tmpfs) as tmpfs,
        huge_pages(max(size_bytes for size_bytes, _ in cases)) as has_huge,
    ):
        ways = [way for way in WAYS if has_huge or way.pages != "huge"]
        roots = {"disk": Path(disk), "tmpfs": Path(tmpfs)}
        connection, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Before the tensors exist: a later fork would copy each of their pages at its next write.
        if os.fork() == 0:
            connection.close()
            daemon(other, roots)
            os._exit(0)
        other.close()
        for case in cases:
            lines += compared(connection, ways, roots, case, options.repeats)
            print("\n".join(lines), file=sys.stderr)
    reserved = "" if has_huge else " The kernel reserved no huge pages."
    lines.append(f"{cpu_name()}, {os.cpu_count()} cores, torch {torch.__version__}.{reserved}")
    text = "\n".join(lines)
    print(text)
    if options.write:
        write_page(NAME, text)


if __name__ == "__main__":
    main()
