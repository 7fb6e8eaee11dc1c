# SPDX-License-Identifier: Apache-2.0
"""The manifest: what one VM committed at one step.  docs/format.md describes the bytes.

Every writer of the bucket can write a manifest, and a restore
acts on its content, so ``decode`` checks every field.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from swansong import bounds
from swansong.bounds import BoundsError

from swansong_bucket.errors import CorruptError
from swansong_bucket.format import record
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.model import (
    CHUNK_BYTES_MAX,
    CheckpointKind,
    Chunk,
    CommitRef,
    Extent,
    StoredShard,
)
from swansong_bucket.util.forms import optional

FORMAT = "swansong-manifest"

BYTES_MAX = 48 * 2**20
"""Room for bounds.FILES_MAX shards with 480 bytes each, or for 400,000 chunks.  Decoding any bytes up to this
limit takes less than 10 s of processor time and 768 MiB of memory."""
VALUES_MAX = 2_000_000
"""JSON values of a manifest: 20 for each of bounds.FILES_MAX shards."""

CHUNKS_MAX = 1_000_000
EXTENTS_MAX = 1_000_000
"""Of one shard; :data:`VALUES_MAX` limits those of a manifest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """An immutable list of shards and the chunks that hold their bytes; its existence is the commit."""

    run: str
    generation: int
    step: int
    kind: CheckpointKind
    node: int
    nodes: int
    nonce: str
    """Distinguishes our own commit from another one after a lost reply."""
    shards: tuple[StoredShard, ...]
    parent: CommitRef | None = None
    """The commit from which the training continued."""
    framework: str = "swansong"
    health: Mapping[str, float] = field(default_factory=dict)
    trainer: Mapping[str, object] = field(default_factory=dict)
    pace: Mapping[str, float] = field(default_factory=dict)
    """How long checkpoints of the run took, for the first plan of the next VM.  Informational:
    :mod:`swansongd.core.pace` leaves out figures that are out of range."""
    created: str = ""
    """UTC, informational; never used for an order."""

    @property
    def ref(self) -> CommitRef:
        return CommitRef(self.generation, self.step, self.kind is CheckpointKind.FINAL)

    @property
    def size_bytes(self) -> int:
        return sum(shard.size_bytes for shard in self.shards)

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The chunks with bytes of its shards, each once."""
        return chunks_of(self.shards)


def chunks_of(shards: Iterable[StoredShard]) -> tuple[Chunk, ...]:
    """The chunks with bytes of these shards, each once, in the order of their first use."""
    return tuple(dict.fromkeys(extent.chunk for shard in shards for extent in shard.extents))


def encode(manifest: Manifest) -> bytes:
    """The manifest as the bytes of its object.

    Raises:
        BoundsError: a number is not finite, or JSON has no such value.
    """
    body = _fields(manifest)
    if manifest.parent is not None:
        body["parent"] = _fields(manifest.parent)
    prefix = len(RunKeys(manifest.run).data)
    chunks = manifest.chunks
    place = {chunk: index for index, chunk in enumerate(chunks)}
    body["chunks"] = [[chunk.key[prefix:], chunk.size_bytes] for chunk in chunks]
    body["shards"] = [
        {
            "path": shard.path,
            "size_bytes": shard.size_bytes,
            "extents": [_extent_fields(extent, place) for extent in shard.extents],
        }
        for shard in manifest.shards
    ]
    return record.encode(FORMAT, body)


def _extent_fields(extent: Extent, place: Mapping[Chunk, int]) -> int | list[int]:
    """A whole chunk is its number: a large state has many thousands."""
    number = place[extent.chunk]
    if extent.size_bytes == extent.chunk.size_bytes:
        return number
    return [number, extent.offset_bytes, extent.size_bytes]


def _fields(item: Manifest | CommitRef) -> dict[str, Any]:
    """The fields of a dataclass by name, without copies of their values: there are 20,000 shards."""
    return {name: getattr(item, name) for name in item.__dataclass_fields__}


def decode(data: bytes) -> Manifest:
    """Parse and check the bytes of a manifest.

    Raises:
        CorruptError: the bytes are not exactly those of ``encode``, or a field is out of bounds.
    """
    body = record.decode(data, FORMAT, BYTES_MAX, values_max=VALUES_MAX)
    try:
        return _manifest(body)
    except BoundsError as error:
        raise CorruptError(str(error)) from None


def _manifest(body: dict[str, Any]) -> Manifest:
    kind = _text(body, "kind")
    if kind not in tuple(CheckpointKind):
        raise CorruptError(f"the manifest has the kind {kind!r:.60}")
    run = _text(body, "run")
    chunks = _chunks(body.get("chunks"), RunKeys(run))
    shards = bounds.items(body.get("shards"), "shards of the manifest", bounds.FILES_MAX)
    manifest = Manifest(
        run=run,
        generation=_count(body, "generation", bounds.GENERATION_MAX),
        step=_count(body, "step", bounds.STEP_MAX),
        kind=CheckpointKind(kind),
        node=_count(body, "node", bounds.NODES_MAX),
        nodes=_count(body, "nodes", bounds.NODES_MAX),
        nonce=_text(body, "nonce"),
        shards=tuple(_shard(item, chunks) for item in shards),
        parent=optional(record.REF).read(body.get("parent"), "parent of the manifest"),
        framework=_text(body, "framework"),
        health=bounds.metrics(body.get("health"), "health of the manifest"),
        trainer=bounds.facts(body.get("trainer"), "trainer of the manifest"),
        pace=bounds.metrics(body.get("pace"), "pace of the manifest"),
        created=_text(body, "created"),
    )
    if manifest.node >= manifest.nodes:
        raise CorruptError(f"the manifest is of node {manifest.node} of {manifest.nodes}")
    bounds.integer(manifest.size_bytes, "size of the checkpoint", 0, bounds.BYTES_MAX)
    check_paths([shard.path for shard in manifest.shards])
    if len(manifest.chunks) != len(chunks):
        raise CorruptError("the manifest has a chunk without bytes of a shard")
    return manifest


def _chunks(items: Any, keys: RunKeys) -> list[Chunk]:
    """The chunks of the manifest, in its order."""
    chunks = []
    for item in bounds.items(items, "chunks of the manifest", CHUNKS_MAX):
        name, size = _list(item, "a chunk of the manifest", 2)
        key = keys.data + bounds.text(name, "a chunk of the manifest")
        if not keys.is_data(key):
            raise CorruptError(f"the manifest has {name!r:.100}, which is not the name of a chunk")
        size_bytes = bounds.integer(size, "size of a chunk", 1, CHUNK_BYTES_MAX)
        chunks.append(Chunk(key, size_bytes))
    if len({chunk.key for chunk in chunks}) != len(chunks):
        raise CorruptError("the manifest has a chunk twice")
    return chunks


def check_paths(paths: Sequence[str]) -> None:
    """Check that files with these paths can exist together below one directory.

    Raises:
        CorruptError: a path is unsafe, occurs twice, or is also a directory of another path.
    """
    seen: set[str] = set()
    directories: set[str] = set()
    for path in paths:
        try:
            bounds.path(path, "a path of the manifest")
        except BoundsError as error:
            raise CorruptError(f"the manifest is not safe to restore: {error}") from None
        if path in seen:
            raise CorruptError(f"the manifest has the path {path!r:.100} twice")
        seen.add(path)
        parts = path.split("/")
        directories.update("/".join(parts[:depth]) for depth in range(1, len(parts)))
    if clash := sorted(seen & directories):
        raise CorruptError(f"the manifest has {clash[0]!r:.100} as a file and as a directory")


def _shard(item: Any, chunks: Sequence[Chunk]) -> StoredShard:
    if type(item) is not dict:
        raise CorruptError("the manifest has a shard that is not a JSON object")
    extents = bounds.items(item.get("extents"), "extents of a shard", EXTENTS_MAX)
    shard = StoredShard(
        path=_text(item, "path", bounds.TEXT_CHARS_MAX),
        size_bytes=_count(item, "size_bytes", bounds.BYTES_MAX),
        extents=tuple(_extent(each, chunks) for each in extents),
    )
    if sum(extent.size_bytes for extent in shard.extents) != shard.size_bytes:
        raise CorruptError(f"the extents of {shard.path!r:.100} do not have its size")
    return shard


def _extent(item: Any, chunks: Sequence[Chunk]) -> Extent:
    if type(item) is int:
        return Extent.whole(_chunk(item, chunks))
    number, offset, size = _list(item, "an extent", 3)
    chunk = _chunk(number, chunks)
    offset_bytes = bounds.integer(offset, "offset of an extent", 0, chunk.size_bytes)
    size_bytes = bounds.integer(size, "size of an extent", 1, chunk.size_bytes - offset_bytes)
    return Extent(chunk, offset_bytes, size_bytes)


def _chunk(number: Any, chunks: Sequence[Chunk]) -> Chunk:
    return chunks[bounds.integer(number, "chunk of an extent", 0, len(chunks) - 1)]


def _list(item: Any, what: str, length: int) -> list[Any]:
    found = bounds.items(item, what, length)
    if len(found) != length:
        raise CorruptError(f"{what} has {len(found)} items instead of {length}")
    return found


def _text(body: Mapping[str, Any], name: str, max_chars: int = bounds.ID_CHARS_MAX) -> str:
    return bounds.text(body.get(name), f"{name} in the manifest", max_chars)


def _count(body: Mapping[str, Any], name: str, high: int) -> int:
    return bounds.integer(body.get(name), f"{name} in the manifest", 0, high)
