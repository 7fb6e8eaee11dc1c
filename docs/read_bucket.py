#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Restores the newest whole commit of a run from a copy of the bucket in a directory.

Written from docs/format.md alone.  It shares no code with Swansong, and needs
Python 3.10 and the package blake3.  Copy the bucket first, with ``aws s3 sync`` for example.

    python read_bucket.py BUCKET_DIRECTORY RUN TARGET_DIRECTORY
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

from blake3 import blake3

MANIFEST = re.compile(
    r"([0-9]{8})/([0-9]{12})(-final)?/([0-9]{5})-of-([0-9]{5})(?:\.[0-9a-f]{32})?\.json"
)
CHUNK = re.compile(r"[0-9]{8}/([0-9a-f]{64})-[0-9a-z]{1,32}")
NAME = re.compile(r"[A-Za-z0-9 _+=@,.-]{1,200}")
MANIFEST_BYTES_MAX = 48 * 2**20
CHUNK_BYTES_MAX = 2**28


class Damaged(Exception):
    """The commit cannot be restored."""


def check(is_true: bool, what: str) -> None:
    if not is_true:
        raise Damaged(what)


def commits(bucket: Path, run: str) -> list[tuple[tuple[int, int, bool, int], dict[int, Path]]]:
    """The manifests of each checkpoint by node, the newest checkpoint first."""
    found: dict[tuple[int, int, bool, int], dict[int, Path]] = {}
    top = bucket / run / "commits"
    for path in sorted(top.rglob("*.json")):
        match = MANIFEST.fullmatch(path.relative_to(top).as_posix())
        if match is None:
            raise SystemExit(f"{path} has a key that no writer of this version makes")
        generation, step, node, nodes = (int(match[group]) for group in (1, 2, 4, 5))
        found.setdefault((generation, step, match[3] is not None, nodes), {})[node] = path
    return sorted(found.items(), reverse=True)


def manifest(path: Path) -> dict:
    """The content of a manifest that matches its own digest."""
    check(path.stat().st_size <= MANIFEST_BYTES_MAX, f"{path.name} is too large")
    data = path.read_bytes().split(b"\n")[0]  # without a signature, which needs the key
    body = json.loads(data)
    check(body.get("format") == "swansong-manifest" and body.get("version") == 1, "unknown format")
    digest = body.pop("digest")
    check(digest == "sha256:" + hashlib.sha256(canonical(body)).hexdigest(), "a wrong digest")
    check(data == canonical(body | {"digest": digest}), "not canonical JSON")
    return body


def canonical(body: dict) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def check_path(path: str) -> None:
    names = path.split("/")
    is_safe = all(NAME.fullmatch(name) and name not in (".", "..") for name in names)
    check(is_safe and len(path) <= 1024 and len(names) <= 16, f"the path {path!r} is not safe")


def chunk(bucket: Path, run: str, name: str, size: int) -> bytes:
    """The bytes of a chunk, which match its name."""
    match = CHUNK.fullmatch(name)
    check(match is not None and 1 <= size <= CHUNK_BYTES_MAX, f"the chunk {name!r}")
    path = bucket / run / "data" / name
    check(path.is_file() and path.stat().st_size == size, f"{path} is missing, or has another size")
    data = path.read_bytes()
    check(blake3(data).hexdigest() == match[1], f"{path} does not match its name")
    return data


def restore_shard(bucket: Path, run: str, chunks: list, shard: dict, target: Path) -> None:
    """Join the extents of a shard."""
    check_path(shard["path"])
    to = target / shard["path"]
    to.parent.mkdir(parents=True, exist_ok=True)
    last, data, written = -1, b"", 0
    with to.open("xb") as out:
        for extent in shard["extents"]:
            number, *part = [extent] if isinstance(extent, int) else extent
            check(0 <= number < len(chunks), f"an extent of {to}")
            if number != last:
                last, data = number, chunk(bucket, run, *chunks[number])
            offset, size = part or (0, len(data))
            check(0 <= offset < offset + size <= len(data), f"an extent of {to}")
            out.write(data[offset : offset + size])
            written += size
    check(written == shard["size_bytes"], f"the size of {to}")


def content_of(shard: dict, chunks: list) -> tuple:
    """Equal for two shards with the same bytes in the same chunks."""
    extents = [[each] if isinstance(each, int) else each for each in shard["extents"]]
    return shard["size_bytes"], [(chunks[first][0][9:73], rest) for first, *rest in extents]


def restore_commit(bucket: Path, run: str, place: tuple, paths: dict[int, Path], to: Path) -> None:
    generation, step, is_final, nodes = place
    check(len(paths) == nodes, f"{len(paths)} of {nodes} nodes have committed it")
    written: dict[str, tuple] = {}
    for node, path in sorted(paths.items()):
        body = manifest(path)
        names = ("run", "generation", "step", "node", "nodes")
        own = (run, generation, step, node, nodes)
        check(tuple(body[name] for name in names) == own, f"{path} is the manifest of another key")
        check((body["kind"] == "final") == is_final, f"{path} has the wrong kind")
        for shard in body["shards"]:
            content = content_of(shard, body["chunks"])
            if written.setdefault(shard["path"], content) != content:
                raise Damaged(f"two nodes have different files called {shard['path']}")
            if not (to / shard["path"]).exists():  # nodes may share a file
                restore_shard(bucket, run, body["chunks"], shard, to)


def main(bucket: Path, run: str, target: Path) -> None:
    for place, paths in commits(bucket, run):
        partial = target.with_name(f"{target.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            restore_commit(bucket, run, place, paths, partial)
        except (Damaged, ValueError, KeyError, TypeError, IndexError, OSError) as error:
            print(f"skipped generation {place[0]} step {place[1]}: {error}", file=sys.stderr)
            continue
        partial.rename(target)
        print(f"generation {place[0]} step {place[1]}")
        return
    raise SystemExit(f"run {run} has no whole commit in {bucket}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
