# SPDX-License-Identifier: Apache-2.0
"""The workloads, their files, and the cases that are measured."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3
from swansong_bucket.format import manifest
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.format.manifest import Manifest
from swansong_bucket.model import CheckpointKind, Chunk, CommitRef, Extent, StagedFile, StoredShard
from swansongd.config.config import FlushConfig
from swansongd.flush.cutting import ChunkLayout, Pieces

from bench.transfer.contestants import BUCKET, CONTESTANTS, OURS, PREFIX, REFERENCE, RUN
from bench.transfer.sink import (
    DIRECT,
    FAULTY,
    HASHING,
    LINK,
    PACED,
    PATTERN_BYTES,
    TAIL,
    Object,
    Profile,
)

CHUNK_BYTES = FlushConfig().chunk_bytes
FAULT_TIMES_S = (25.0, 110.0)
QUICK_FAULT_TIMES_S = (2.0, 6.0)
_BLOCK_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class Workload:
    """``count`` files of one size."""

    name: str
    count: int
    size_bytes: int
    is_sparse: bool = False
    """Only the start of each chunk has data: for cases that the network limits, not the memory."""

    @property
    def files(self) -> list[tuple[str, int]]:
        return [(f"shard-{number:05d}.bin", self.size_bytes) for number in range(self.count)]

    @property
    def total_bytes(self) -> int:
        return self.count * self.size_bytes

    def __str__(self) -> str:
        big = self.size_bytes >= 2**30
        unit, size = ("GiB", self.size_bytes / 2**30) if big else ("MiB", self.size_bytes / 2**20)
        if self.size_bytes < 2**20:
            unit, size = "KiB", self.size_bytes / 2**10
        return f"{self.count:,} x {size:g} {unit}"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One operation on one workload under one profile, with these contestants."""

    operation: str
    workload: Workload
    profile: Profile
    contestants: Sequence[str]
    repeats_max: int = 99
    repeats_min: int = 0

    @property
    def name(self) -> str:
        return f"{self.operation}-{self.workload.name}-{self.profile.name}"


def cases(*, is_quick: bool) -> list[Case]:
    """All cases, the most informative first."""
    if is_quick:
        large = Workload(name="large", count=1, size_bytes=128 * 2**20)
        small = Workload(name="small", count=100, size_bytes=256 * 2**10)
        faulty = Workload(name="faulty", count=16, size_bytes=64 * 2**20, is_sparse=True)
        gigabyte = Workload(name="gigabyte", count=1, size_bytes=64 * 2**20)
        medium = gigabyte
    else:
        large = Workload(name="large", count=1, size_bytes=4 * 2**30)
        gigabyte = Workload(name="gigabyte", count=1, size_bytes=2**30)
        medium = Workload(name="medium", count=1, size_bytes=2**28)
        small = Workload(name="small", count=2000, size_bytes=256 * 2**10)
        faulty = Workload(name="faulty", count=80, size_bytes=256 * 2**20, is_sparse=True)
    wide = f"{REFERENCE} x 32"
    to_gcs = f"{OURS} to GCS"
    peers = [one.name for one in CONTESTANTS.values() if one.is_peer and one.name != "obstore x 32"]
    every = [REFERENCE, OURS, *peers]
    # rclone is slow with its defaults and has a tuned sibling: one case is enough.
    most = [name for name in every if name != "rclone"]
    paced = [wide, OURS, "obstore x 32"]
    paced += [name for name in most if name not in (REFERENCE, OURS, "obstore", "obstore tuned")]
    paced = [name for name in paced if name not in ("boto3 tuned", "s3torchconnector")]
    faulty_lane = [one.name for one in CONTESTANTS.values() if one.is_for_faults]
    return [
        Case(operation="upload", workload=large, profile=DIRECT, contestants=every),
        Case(operation="upload", workload=small, profile=DIRECT, contestants=most),
        Case(operation="download", workload=large, profile=DIRECT, contestants=most),
        Case(
            operation="upload",
            workload=large,
            profile=HASHING,
            contestants=[REFERENCE, to_gcs, "gcs transfer_manager"],
        ),
        Case(operation="upload", workload=large, profile=PACED, contestants=paced, repeats_max=2),
        Case(operation="upload", workload=gigabyte, profile=PACED, contestants=paced[:3]),
        Case(operation="download", workload=small, profile=DIRECT, contestants=most, repeats_max=1),
        Case(operation="upload", workload=small, profile=LINK, contestants=[wide, OURS]),
        Case(
            operation="upload",
            workload=medium,
            profile=TAIL,
            contestants=[wide, OURS, "obstore x 32"],
            repeats_min=1 if is_quick else 100,
        ),
        Case(
            operation="upload",
            workload=faulty,
            profile=FAULTY,
            contestants=faulty_lane,
            repeats_max=1,
        ),
    ]


def reference_of(case: Case) -> str:
    """The contestant that is 1.00 in the ratios of a case."""
    return next(name for name in case.contestants if name.startswith(REFERENCE))


def make_files(workload: Workload, directory: Path) -> None:
    """Write the files with different blocks; a sparse file has data only at the start of each chunk."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    space = os.statvfs(directory)
    if workload.total_bytes > space.f_bavail * space.f_frsize and not workload.is_sparse:
        raise SystemExit(
            f"{directory} has no room for {workload}; name another directory with --data"
        )
    block = bytearray(os.urandom(_BLOCK_BYTES))
    for number, (name, size_bytes) in enumerate(workload.files):
        with open(directory / name, "wb") as file:
            if workload.is_sparse:
                for offset in range(0, size_bytes, CHUNK_BYTES):
                    file.seek(offset)
                    file.write(os.urandom(4096))
                file.truncate(size_bytes)
                continue
            for offset in range(0, size_bytes, _BLOCK_BYTES):
                block[:16] = number.to_bytes(8) + offset.to_bytes(8)
                file.write(memoryview(block)[: min(_BLOCK_BYTES, size_bytes - offset)])


def sink_objects(workload: Workload, directory: Path) -> list[Object]:
    """The objects that the sink must have so that every contestant can download the workload.

    All objects contain the sink's pattern.  Swansong also needs a commit with a valid manifest.
    """
    pattern = directory / "pattern"
    if not pattern.exists():
        pattern.write_bytes(os.urandom(PATTERN_BYTES))
    keys = RunKeys(RUN)
    shards = _shards(workload, keys, pattern.read_bytes())
    stored = dict.fromkeys(extent.chunk for shard in shards for extent in shard.extents)
    objects = [Object(f"{BUCKET}/{each.key}", each.size_bytes) for each in stored]
    objects += [Object(f"{BUCKET}/{PREFIX}/{name}", size) for name, size in workload.files]
    commit = manifest.encode(
        Manifest(
            run=RUN,
            generation=1,
            step=1,
            kind=CheckpointKind.PERIODIC,
            node=0,
            nodes=1,
            nonce="bench",
            shards=shards,
        )
    )
    path = directory / "manifest.json"
    path.write_bytes(commit)
    name = keys.commit(CommitRef(1, 1), 0, 1)
    objects.append(Object(f"{BUCKET}/{name}", len(commit), path))
    return objects


def _shards(workload: Workload, keys: RunKeys, pattern: bytes) -> tuple[StoredShard, ...]:
    """The shards of the workload, with the chunks of the flush engine."""
    layout = ChunkLayout(CHUNK_BYTES, FlushConfig().connections)
    files = [
        StagedFile(path=name, size_bytes=size_bytes, mtime_ns=0, inode=0)
        for name, size_bytes in workload.files
    ]
    pieces = [piece for file in files for piece in layout.cut(file)]
    groups: list[Pieces] = [(piece,) for piece in pieces]
    if all(map(layout.is_small, files)):
        groups = layout.packed(pieces, is_sealed=True)
    digests: dict[int, bytes] = {}
    extents: dict[str, list[Extent]] = {file.path: [] for file in files}
    for number, group in enumerate(groups):
        size_bytes = sum(piece.size_bytes for piece in group)
        if size_bytes not in digests:
            repeated = pattern * (size_bytes // PATTERN_BYTES + 1)
            digests[size_bytes] = blake3(memoryview(repeated)[:size_bytes]).digest()
        # The bytes of all chunks are equal: their names differ, so that each is fetched.
        chunk = Chunk(keys.chunk(1, digests[size_bytes], f"{number}"), size_bytes)
        offset = 0
        for piece in group:
            extents[piece.file.path].append(Extent(chunk, offset, piece.size_bytes))
            offset += piece.size_bytes
    return tuple(
        StoredShard(path=file.path, size_bytes=file.size_bytes, extents=tuple(extents[file.path]))
        for file in files
    )
