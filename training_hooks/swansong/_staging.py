# SPDX-License-Identifier: Apache-2.0
"""Writes one checkpoint into staging: partial directory, files, rank manifest, rename.

A set has its sealed name only when every rank of this node has put its manifest there, and a rank puts
its manifest there only when all its files are written.  A process may die between any two system calls.

A rank writes below ``rank-00000.writing/``, and a file moves to ``rank-00000/`` once it is complete: at
the end of the save, or when :func:`finish` says so before.  What lies there is final, and the daemon
may store it while the rest is still being written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shutil
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swansong import protocol
from swansong.protocol import FileEntry, RankManifest, rank_directory

__all__ = [
    "Written",
    "finish",
    "health_of",
    "rank_directory",
    "remove_leftovers",
    "write_checkpoint",
]


@dataclass(frozen=True)
class Written:
    """What became of one rank's part of a checkpoint."""

    directory: str
    """The sealed name, relative to the staging directory of the run."""
    size_bytes: int
    """Of this rank's files."""
    is_sealed: bool
    """Whether the set has its sealed name; else other ranks of this node are still writing."""


def health_of(loss: Any, metrics: Mapping[str, Any]) -> dict[str, float]:
    """The finite ones among loss and metrics, and whether the loss is (``loss_is_finite``, 0 or 1)."""
    health: dict[str, float] = {}
    for name, value in {**metrics, "loss": loss}.items():
        try:
            # A loss that still has its graph would be warned of, and the warning may be an error.
            number = float(value.detach() if hasattr(value, "detach") else value)
        except Exception:  # noqa: S112 - no metric must cost a checkpoint
            continue
        if math.isfinite(number):
            health[name] = number
        if name == "loss":
            health["loss_is_finite"] = float(math.isfinite(number))
    return health


def write_checkpoint(
    staging: str,
    nonce: str,
    manifest: RankManifest,
    save: Callable[[Path], object],
    *,
    durable: bool,
) -> Written:
    """Write this rank's part of a checkpoint, and seal the set if it is the last one.

    Args:
        staging: staging directory of the run; must exist.
        nonce: the same for all ranks of this node that save this set.
        manifest: all but ``files``, which are found.
        save: writes the rank's files into the directory that it is given, and may :func:`finish` them
            one by one.
        durable: whether the set must outlive a crash of the operating system (fsync).

    Raises:
        OSError: the file system refused.
        Exception: whatever ``save`` raised.  In either case the partial directory is gone.
    """
    name = protocol.sealed_name(manifest.step, nonce)
    sealed = os.path.join(staging, name)
    partial = sealed + protocol.PARTIAL_SUFFIX
    if os.path.isdir(sealed):
        return Written(name, _size_bytes(sealed, manifest.rank), is_sealed=True)
    try:
        with contextlib.suppress(FileExistsError):  # another rank was faster
            os.mkdir(partial)
        own = os.path.join(partial, rank_directory(manifest.rank))
        writing = own + protocol.WRITING_SUFFIX
        _begin(partial, own, manifest)
        save(Path(writing))
        for directory, _, names in os.walk(writing):
            for file_name in names:
                finish(os.path.join(directory, file_name))
        shutil.rmtree(writing)
        files = _close_files(partial, own, durable=durable)
        manifest = dataclasses.replace(manifest, files=files)
        os.unlink(own + protocol.BEGUN_SUFFIX)
        _put_manifest(partial, manifest, durable=durable)
        is_sealed = _seal(partial, sealed, manifest.local_world_size, durable=durable)
    except BaseException:
        # Without this rank's files the set can never be whole: make room, whoever else still writes.
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return Written(name, sum(file.size_bytes for file in files), is_sealed)


def remove_leftovers(staging: str, rank: int) -> None:
    """Remove what this rank left in partial directories when it last died.

    To be called by a new process before its first save: a manifest that an earlier incarnation put into
    a set of the same name must not help to seal that set.
    """
    for entry in os.listdir(staging):
        name = entry.removesuffix(protocol.PARTIAL_SUFFIX)
        if entry == name or protocol.parse_sealed_name(name) is None:
            continue
        partial = os.path.join(staging, entry)
        own = os.path.join(partial, rank_directory(rank))
        for file in (
            os.path.join(partial, protocol.rank_manifest_name(rank)),
            own + protocol.BEGUN_SUFFIX,
        ):
            with contextlib.suppress(OSError):
                os.unlink(file)
        for directory in (own, own + protocol.WRITING_SUFFIX):
            shutil.rmtree(directory, ignore_errors=True)
        with contextlib.suppress(OSError):  # other ranks' files are theirs to remove
            os.rmdir(partial)


def finish(path: str | os.PathLike[str]) -> None:
    """Declare a file complete that a save function has written; from here on nobody may touch it.

    It leaves its place, so a save function must not look for it again.  Outside of a save, where the
    files are nobody else's business, this does nothing.

    Raises:
        ValueError: it is no regular file, or has a name that is not allowed.
        OSError: the file system refused.
    """
    full = os.path.abspath(path)
    before, found, inner = full.partition(f"{protocol.WRITING_SUFFIX}{os.sep}")
    own = os.path.basename(before)
    partial = os.path.dirname(before)
    if not found or not partial.endswith(protocol.PARTIAL_SUFFIX):
        return
    relative = f"{own}/{inner}"
    facts = os.lstat(full)
    if not stat.S_ISREG(facts.st_mode):
        raise ValueError(f"{relative} is no regular file; links and others are not uploaded")
    if not protocol.is_safe_path(relative):
        raise ValueError(f"the file name {relative!r} has characters that are not allowed")
    group = os.stat(os.path.dirname(partial)).st_gid
    _admit_group(full, group, 0o040)
    directory = before
    for name in inner.split(os.sep)[:-1]:
        directory = os.path.join(directory, name)
        if not os.path.isdir(directory):
            with contextlib.suppress(FileExistsError):  # another thread was faster
                os.mkdir(directory)
            _admit_group(directory, group, 0o070)
    os.rename(full, os.path.join(before, inner))


def _begin(partial: str, own: str, manifest: RankManifest) -> None:
    """Make room for a rank's files, and say what they will be of."""
    group = os.stat(os.path.dirname(partial)).st_gid
    _admit_group(partial, group, 0o070)
    for directory in (own, own + protocol.WRITING_SUFFIX):
        os.mkdir(directory)
        _admit_group(directory, group, 0o070)
    begun = own + protocol.BEGUN_SUFFIX
    with open(begun, "wb") as file:
        file.write(manifest.encode())
    _admit_group(begun, group, 0o040)


def _close_files(partial: str, own: str, *, durable: bool) -> list[FileEntry]:
    """List the rank's finished files, and fsync them if asked."""
    files: list[FileEntry] = []
    for directory, _, names in os.walk(own):
        for name in names:
            full = os.path.join(directory, name)
            if durable:
                _fsync(full)
            size_bytes = os.stat(full).st_size
            files.append(FileEntry(path=os.path.relpath(full, partial), size_bytes=size_bytes))
        if durable:
            _fsync(directory)
    return sorted(files, key=lambda file: file.path)


def _put_manifest(partial: str, manifest: RankManifest, *, durable: bool) -> None:
    path = os.path.join(partial, protocol.rank_manifest_name(manifest.rank))
    temporary = f"{path}.tmp"
    with open(temporary, "wb") as file:
        file.write(manifest.encode())
    _admit_group(temporary, os.stat(os.path.dirname(partial)).st_gid, 0o040)
    if durable:
        _fsync(temporary)
    os.rename(temporary, path)
    if durable:
        _fsync(partial)


def _seal(partial: str, sealed: str, local_world_size: int, *, durable: bool) -> bool:
    try:
        names = os.listdir(partial)
        if sum(name.startswith("rank-") and name.endswith(".json") for name in names) < (
            local_world_size
        ):
            return False
        os.rename(partial, sealed)
    except OSError:
        if os.path.isdir(sealed):  # another rank found all manifests too, and was faster
            return True
        raise
    if durable:
        _fsync(os.path.dirname(sealed))
    return True


def _admit_group(path: str, group: int, bits: int) -> None:
    # Whatever umask and group the trainer has: the daemon must be able to read the set, and to prune it.
    facts = os.stat(path)
    # Not permitted: the file is of another rank's user, who sees to it, or we are not in that group.
    if facts.st_gid != group:
        with contextlib.suppress(PermissionError):
            os.chown(path, -1, group)
    if facts.st_mode & bits != bits:
        with contextlib.suppress(PermissionError):
            os.chmod(path, stat.S_IMODE(facts.st_mode) | bits)


def _fsync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _size_bytes(sealed: str, rank: int) -> int:
    """Size of one rank's files in a sealed set; 0 when it has no such rank."""
    try:
        with open(os.path.join(sealed, protocol.rank_manifest_name(rank)), "rb") as file:
            manifest = RankManifest.decode(file.read())
    except (OSError, ValueError):
        return 0
    return sum(entry.size_bytes for entry in manifest.files)
