# SPDX-License-Identifier: Apache-2.0
"""Creates commits for tests: shards and manifests with the keys that the daemon uses."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from blake3 import blake3
from swansong_bucket.format import manifest
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.format.manifest import Manifest
from swansong_bucket.model import CheckpointKind, Chunk, Extent, StoredShard
from swansong_bucket.stores.base import ObjectStore
from swansong_bucket.stores.file.store import FileStore

from testkit.memory_store import MemoryStore

CHUNK_BYTES = 1000
"""Small: a few kilobytes have many chunks."""


Store = TypeVar("Store", bound=FileStore)


def file_store(directory: Path, kind: type[Store] = FileStore) -> Store:  # type: ignore[assignment]
    """A store in its own directory, which is created if it does not exist."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    store = kind(f"file://{directory}")
    store.check()
    return store


def configuration(
    directory: Path, url: str = "", *, run: str = "r", mirror: str = "", more: str = ""
) -> Path:
    """A configuration file of this store, or of the store "bucket" in the directory; ``more`` follows."""
    file = directory / "swansong.toml"
    tables = {"run": f'name = "{run}"', "staging": f'path = "{directory}/staging"'}
    tables["store"] = f'url = "{url or (directory / "bucket").as_uri()}"'
    if mirror:
        tables["mirror"] = f'url = "{mirror}"'
    file.write_text("".join(f"[{name}]\n{line}\n" for name, line in tables.items()) + more)
    return file


def chunk_of(
    data: bytes, *, run: str = "r", generation: int = 1, nonce: str = "a1", size_bytes: int = 0
) -> Chunk:
    """The chunk with these bytes; with ``size_bytes``, one that claims to have this size."""
    key = RunKeys(run).chunk(generation, blake3(data).digest(), nonce)
    return Chunk(key, size_bytes or len(data))


def whole_shard(path: str, *chunks: Chunk) -> StoredShard:
    """A shard that consists of whole chunks."""
    extents = tuple(Extent.whole(chunk) for chunk in chunks)
    size_bytes = sum(chunk.size_bytes for chunk in chunks)
    return StoredShard(path=path, size_bytes=size_bytes, extents=extents)


def named_shard(
    path: str,
    size_bytes: int,
    content: str = "",
    *,
    run: str = "r",
    generation: int = 1,
    chunk_bytes: int = CHUNK_BYTES,
) -> StoredShard:
    """A shard whose bytes do not matter; equal ``content`` and size are the same chunks."""
    chunks = []
    for offset in range(0, size_bytes, chunk_bytes):
        length = min(chunk_bytes, size_bytes - offset)
        name = f"{content or path} {offset} {length}".encode()
        chunks.append(chunk_of(name, run=run, generation=generation, size_bytes=length))
    return whole_shard(path, *chunks)


def manifest_of(*shards: StoredShard, **fields: Any) -> Manifest:
    """A manifest of the run ``r`` with these shards and fields; the others have usual values."""
    usual: dict[str, Any] = {"run": "r", "generation": 1, "step": 100, "node": 0, "nodes": 1}
    usual |= {"kind": CheckpointKind.PERIODIC, "nonce": "a1", "created": "2030-01-01T00:00:00Z"}
    return Manifest(shards=shards, **(usual | fields))


def commit(
    store: ObjectStore,
    files: Mapping[str, bytes],
    *,
    run: str = "r",
    generation: int = 1,
    step: int = 100,
    node: int = 0,
    nodes: int = 1,
    nonce: str = "a1",
    loss: float = 2.5,
    health: Mapping[str, float] | None = None,
    kind: CheckpointKind = CheckpointKind.PERIODIC,
    chunk_bytes: int = CHUNK_BYTES,
    is_packed: bool = False,
    pace: Mapping[str, float] | None = None,
    created: str = "2030-01-01T00:00:00Z",
) -> Manifest:
    """Store the files as one node's part of a checkpoint, and commit the part.

    Args:
        nonce: of the chunks and of the set.
        is_packed: all files share one chunk.
    """

    def stored(data: bytes) -> Chunk:
        chunk = chunk_of(data, run=run, generation=generation, nonce=nonce)
        store.put(chunk.key, data)
        return chunk

    keys = RunKeys(run)
    joined = b"".join(files.values())
    pack = stored(joined) if is_packed and joined else None
    shards, offset = [], 0
    for path, data in files.items():
        if pack is not None:
            extents = (Extent(pack, offset, len(data)),) if data else ()
            shards.append(StoredShard(path=path, size_bytes=len(data), extents=extents))
            offset += len(data)
        else:
            starts = range(0, len(data), chunk_bytes)
            chunks = [stored(data[start : start + chunk_bytes]) for start in starts]
            shards.append(whole_shard(path, *chunks))
    made = manifest_of(
        *shards,
        run=run,
        generation=generation,
        step=step,
        kind=kind,
        node=node,
        nodes=nodes,
        nonce=f"{nonce}{node}",
        health={"loss": loss} if health is None else health,
        pace={} if pace is None else pace,
        created=created,
    )
    store.put(keys.commit(made.ref, node, nodes), manifest.encode(made))
    return made


def first_places(made: Manifest) -> dict[str, tuple[str, int]]:
    """Path and offset of the first use of each chunk, by its key."""
    found: dict[str, tuple[str, int]] = {}
    for shard in made.shards:
        offset = 0
        for extent in shard.extents:
            found.setdefault(extent.chunk.key, (shard.path, offset))
            offset += extent.size_bytes
    return found


def stored_bytes(store: MemoryStore, shard: StoredShard) -> bytes:
    """The bytes of a shard, from its extents."""
    return b"".join(
        store.objects[each.chunk.key][each.offset_bytes : each.offset_bytes + each.size_bytes]
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
