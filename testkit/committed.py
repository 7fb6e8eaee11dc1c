# SPDX-License-Identifier: Apache-2.0
"""Creates commits for tests: shards and manifests with the keys that the daemon uses."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from blake3 import blake3
from swansongd.bucket import manifest
from swansongd.bucket.keys import RunKeys
from swansongd.bucket.manifest import Manifest
from swansongd.digests import DIGEST_BYTES, part_count
from swansongd.model import CheckpointId, CheckpointKind, Extent, StoredObject, StoredShard
from swansongd.stores.base import ObjectStore
from swansongd.stores.checksums import crc32c
from swansongd.stores.file.store import FileStore

from testkit.memory_store import MemoryStore

PART_SIZE_BYTES = 1000
"""Small: a few kilobytes have many parts."""


Store = TypeVar("Store", bound=FileStore)


def file_store(directory: Path, kind: type[Store] = FileStore) -> Store:  # type: ignore[assignment]
    """A store in its own directory, which is created if it does not exist."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    store = kind(f"file://{directory}")
    store.check()
    return store


def part_digest(data: bytes) -> bytes:
    """Digest of one part: 32 bytes."""
    return blake3(data).digest()


def digests_of(data: bytes, part_size_bytes: int = PART_SIZE_BYTES) -> bytes:
    """The digests of all parts."""
    return b"".join(
        part_digest(data[index * part_size_bytes : (index + 1) * part_size_bytes])
        for index in range(part_count(len(data), part_size_bytes))
    )


def named_shard(
    path: str,
    size_bytes: int,
    key: str,
    *,
    part_size_bytes: int = PART_SIZE_BYTES,
    digest: bytes = b"d",
) -> StoredShard:
    """A shard whose bytes do not matter: all parts have the same digest, one byte repeated."""
    return StoredShard.of_object(
        key,
        path=path,
        size_bytes=size_bytes,
        part_size_bytes=part_size_bytes,
        part_digests=digest * DIGEST_BYTES * part_count(size_bytes, part_size_bytes),
        crc32c=7,
    )


def commit(
    store: ObjectStore,
    files: Mapping[str, bytes],
    *,
    run: str = "r",
    generation: int = 1,
    step: int = 100,
    node: int = 0,
    nodes: int = 1,
    upload_nonce: str = "a1",
    loss: float = 2.5,
    health: Mapping[str, float] | None = None,
    kind: CheckpointKind = CheckpointKind.PERIODIC,
    part_size_bytes: int = PART_SIZE_BYTES,
    is_packed: bool = False,
    pace: Mapping[str, float] | None = None,
    created: str = "2030-01-01T00:00:00Z",
) -> Manifest:
    """Store the files as one node's part of a checkpoint, and commit the part.

    Args:
        is_packed: all files share one object.
    """
    keys = RunKeys(run)
    checkpoint = CheckpointId(step, "abc")
    shards = []
    pack = b"".join(files.values()) if is_packed else b""
    pack_key = keys.pack(generation, checkpoint, upload_nonce, node, 1)
    if pack:
        store.put(pack_key, pack)
    offset = 0
    for path, data in files.items():
        key = keys.shard(generation, checkpoint, upload_nonce, node, path)
        if is_packed and data:
            extent = Extent(StoredObject(pack_key, len(pack)), offset, len(data))
            offset += len(data)
            shards.append(
                StoredShard(
                    path=path,
                    size_bytes=len(data),
                    part_digests=digests_of(data, part_size_bytes),
                    part_size_bytes=part_size_bytes,
                    crc32c=crc32c(data),
                    extents=(extent,),
                )
            )
            continue
        if data:
            store.put(key, data)
        shards.append(
            StoredShard.of_object(
                key,
                path=path,
                size_bytes=len(data),
                part_digests=digests_of(data, part_size_bytes),
                part_size_bytes=part_size_bytes,
                crc32c=crc32c(data),
            )
        )
    made = Manifest(
        run=run,
        generation=generation,
        step=step,
        kind=kind,
        node=node,
        nodes=nodes,
        nonce=f"{upload_nonce}{node}",
        shards=tuple(shards),
        health={"loss": loss} if health is None else health,
        pace={} if pace is None else pace,
        created=created,
    )
    store.put(keys.commit(made.ref, node, nodes), manifest.encode(made))
    return made


def stored_bytes(store: MemoryStore, shard: StoredShard) -> bytes:
    """The bytes of a shard, from its extents."""
    return b"".join(
        store.objects[each.object.key][each.offset_bytes : each.offset_bytes + each.size_bytes]
        for each in shard.extents
    )


def object_path(directory: Path, key: str) -> Path:
    """The file in which a file store keeps an object, for tests that damage it."""
    return directory / key


def flip_bit(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def tree(directory: Path) -> dict[str, bytes]:
    """All files below a directory, by relative path."""
    found = {}
    for parent, _, names in os.walk(directory):
        for name in names:
            path = Path(parent, name)
            found[str(path.relative_to(directory))] = path.read_bytes()
    return found
