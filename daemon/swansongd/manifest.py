# SPDX-License-Identifier: Apache-2.0
"""The manifest: what one VM committed at one step.  docs/format.md describes the bytes.

Canonical JSON with its own digest.  ``decode`` believes nothing: whoever can write to the bucket can
write a manifest, and a restore acts on what it says.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from swansong.protocol import is_safe_path

from swansongd.digests import ALGORITHM, PART_SIZE_BYTES_MAX, part_count
from swansongd.errors import CorruptError
from swansongd.keys import RunKeys
from swansongd.model import CheckpointKind, CommitRef, StoredShard

FORMAT = "swansong-manifest"
VERSION = 1

_DIGEST = re.compile(rf"{ALGORITHM}:[0-9a-f]{{64}}")
_CRC32C = re.compile(r"[0-9a-f]{8}")
_KEY = re.compile(r"[A-Za-z0-9_+=@,. -]+(/[A-Za-z0-9_+=@,. -]+)*")
_INT_MAX = 2**63 - 1
_PARTS_MAX = 1_000_000

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """An immutable list of shards with sizes and digests; its existence is the commit."""

    run: str
    generation: int
    step: int
    kind: CheckpointKind
    node: int
    nodes: int
    nonce: str
    """Tells our own commit from somebody else's after a lost reply."""
    shards: tuple[StoredShard, ...]
    parent: CommitRef | None = None
    """The commit that this one goes on from."""
    framework: str = "swansong"
    health: Mapping[str, float] = field(default_factory=dict)
    trainer: Mapping[str, object] = field(default_factory=dict)
    created: str = ""
    """UTC, informational; nothing is ordered by it."""

    @property
    def ref(self) -> CommitRef:
        return CommitRef(self.generation, self.step)

    @property
    def size_bytes(self) -> int:
        return sum(shard.size_bytes for shard in self.shards)


def encode(manifest: Manifest) -> bytes:
    """The manifest as the bytes of its object.

    Raises:
        ValueError: it holds a number that is not finite, or a value that JSON does not have.
    """
    body: dict[str, Any] = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(manifest)}
    for shard in body["shards"]:
        shard["crc32c"] = f"{shard['crc32c']:08x}"
    return _canonical({**body, "digest": _own_digest(body)})


def decode(data: bytes) -> Manifest:
    """Parse and check the bytes of a manifest.

    Raises:
        CorruptError: they are not exactly what ``encode`` made, or say what no manifest may say.
    """
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"the manifest is not JSON: {error!s:.120}") from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise CorruptError("the object is not a manifest")
    version = _field(body, "version", int)
    if version != VERSION:
        raise CorruptError(
            f"the manifest has format version {version}; this swansong knows {VERSION}",
            hint="upgrade swansong to read it" if version > VERSION else "",
        )
    claimed = body.pop("digest", None)
    try:
        intact = claimed == _own_digest(body) and data == _canonical({**body, "digest": claimed})
    except (ValueError, RecursionError):
        intact = False
    if not intact:
        raise CorruptError("the manifest does not match its own digest")
    return _manifest(body)


def _canonical(body: Mapping[str, object]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _own_digest(body: Mapping[str, object]) -> str:
    return f"sha256:{hashlib.sha256(_canonical(body)).hexdigest()}"


def _manifest(body: dict[str, Any]) -> Manifest:
    try:
        kind = CheckpointKind(_field(body, "kind", str))
    except ValueError:
        raise CorruptError(f"the manifest has the kind {body['kind']!r:.60}") from None
    manifest = Manifest(
        run=_field(body, "run", str),
        generation=_count(body, "generation"),
        step=_count(body, "step"),
        kind=kind,
        node=_count(body, "node"),
        nodes=_count(body, "nodes"),
        nonce=_field(body, "nonce", str),
        shards=tuple(_shard(item) for item in _field(body, "shards", list)),
        parent=_parent(body.get("parent")),
        framework=_field(body, "framework", str),
        health=_field(body, "health", dict),
        trainer=_field(body, "trainer", dict),
        created=_field(body, "created", str),
    )
    if not all(type(value) in (int, float) for value in manifest.health.values()):
        raise CorruptError("the manifest has a health value that is no number")
    if manifest.node >= manifest.nodes:
        raise CorruptError(f"the manifest is of node {manifest.node} of {manifest.nodes}")
    data_prefix = RunKeys(manifest.run).data
    for shard in manifest.shards:
        relative = shard.key.removeprefix(data_prefix)
        parts = relative.split("/")
        if relative == shard.key or ".." in parts or "." in parts or not _KEY.fullmatch(relative):
            raise CorruptError(f"the manifest names the key {shard.key!r:.100}, not of this run")
    check_paths([shard.path for shard in manifest.shards])
    return manifest


def check_paths(paths: Sequence[str]) -> None:
    """Whether files of these names can lie in one directory, each once.

    Raises:
        CorruptError: one is unsafe, occurs twice, or is a directory on the way to another.
    """
    seen: set[str] = set()
    directories: set[str] = set()
    for path in paths:
        if not is_safe_path(path):
            raise CorruptError(f"the manifest names the path {path!r:.100}, which is not safe")
        if path in seen:
            raise CorruptError(f"the manifest names the path {path!r:.100} twice")
        seen.add(path)
        parts = path.split("/")
        directories.update("/".join(parts[:depth]) for depth in range(1, len(parts)))
    if clash := sorted(seen & directories):
        raise CorruptError(f"the manifest has {clash[0]!r:.100} as a file and as a directory")


def _shard(item: Any) -> StoredShard:
    if not isinstance(item, dict):
        raise CorruptError("the manifest has a shard that is no object")
    crc32c = _field(item, "crc32c", str)
    if not _CRC32C.fullmatch(crc32c):
        raise CorruptError(f"the manifest has the CRC32C {crc32c!r:.40}, not of 8 hex digits")
    shard = StoredShard(
        path=_field(item, "path", str),
        size_bytes=_count(item, "size_bytes"),
        digest=_field(item, "digest", str),
        key=_field(item, "key", str),
        part_size_bytes=_count(item, "part_size_bytes"),
        crc32c=int(crc32c, 16),
    )
    is_legal = 1 <= shard.part_size_bytes <= PART_SIZE_BYTES_MAX
    if not is_legal or part_count(shard.size_bytes, shard.part_size_bytes) > _PARTS_MAX:
        raise CorruptError(f"the manifest has a part size of {shard.part_size_bytes} bytes")
    if not _DIGEST.fullmatch(shard.digest):
        raise CorruptError(
            f"the manifest has the digest {shard.digest!r:.80}, which this swansong does not know"
        )
    return shard


def _parent(item: Any) -> CommitRef | None:
    if item is None:
        return None
    if not isinstance(item, dict):
        raise CorruptError("the manifest has a parent that is no object")
    return CommitRef(_count(item, "generation"), _count(item, "step"))


def _field(body: Mapping[str, Any], name: str, kind: type[T]) -> T:
    value = body.get(name)
    if type(value) is not kind:  # exactly: a bool is an int as well
        raise CorruptError(f"the manifest has no proper {name!r} (got {value!r:.60})")
    return value


def _count(body: Mapping[str, Any], name: str) -> int:
    value = _field(body, name, int)
    if not 0 <= value <= _INT_MAX:
        raise CorruptError(f"the manifest has {value} for {name!r}")
    return value
