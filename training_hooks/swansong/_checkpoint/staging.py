# SPDX-License-Identifier: Apache-2.0
"""Writes one checkpoint into staging: partial directory, files, rank manifest, rename.

A rank writes its manifest after all its files.  The set gets its sealed name after the manifests of all ranks
of this VM.  A process may die between any two system calls, and the daemon still never takes half a set.

A rank writes below ``rank-00000.writing/``.  A complete file moves to ``rank-00000/``: at the end of the
save, or earlier by :func:`finish`.  Files there are final, and the daemon may upload them before the set is
sealed.

Other members of the group may write to the staging directory of the run.  Therefore each name is opened
relative to the descriptor of its directory, no link is followed, and entries of other users are left
alone.  A set is writable for its own user and, through the default ACL of the staging directory, for the
daemon, which removes it later.  With that ACL the group has no access to a set; without ACLs it may read
one.  Therefore all ranks of one VM must run as one user.  The paths that a save function gets are safe,
because no other user can create an entry below the partial directory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from swansong import bounds, layout, openat
from swansong._log import log
from swansong._ranks.job_store import STORE_PREFIX
from swansong.layout import FileEntry, RankManifest
from swansong.openat import UnsafeFileError, closed_on_error, held

_FILE_MODE = 0o640
_DIRECTORY_MODE = stat.S_ISGID | 0o750
_WRITING_MODE = stat.S_ISGID | 0o700
"""Mode of a writing directory.  Its files keep the mode of the trainer's umask until they are finished."""
_MODE_WITH_ACL = stat.S_ISGID | 0o770
"""With an ACL the group bits are its mask.  The daemon has ``rwx`` by its own entry, and the group
nothing."""


@dataclass(frozen=True)
class Written:
    """The result of writing one rank's part of a checkpoint."""

    directory: str
    """The sealed name, relative to the staging directory of the run."""
    size_bytes: int
    """Total size of this rank's files."""
    is_sealed: bool
    """Whether the set has its sealed name.  If not, other ranks of this VM are still writing."""


def write_checkpoint(
    staging: str, nonce: str, manifest: RankManifest, save: Callable[[Path], object]
) -> Written:
    """Write this rank's part of a checkpoint, and seal the set if it is the last one.

    Args:
        staging: staging directory of the run; must exist.
        nonce: the same for all ranks that save this set.
        manifest: all of the rank manifest but ``files``.  A set survives a crash of the operating system
            (fsync), but for an emergency: the VM is terminated.
        save: writes the rank's files into a given directory, and may :func:`finish` them one by one.

    Raises:
        OSError: the file system returned an error.
        Exception: ``save`` raised it.  In both cases the partial directory is removed.
    """
    name = layout.sealed_name(manifest.step, nonce)
    partial, durable = layout.partial_name(name), manifest.kind != "emergency"
    with held(openat.open_directory(staging)) as run_fd:
        size_bytes = _sealed_size_bytes(name, run_fd, manifest.rank)
        if size_bytes is not None:
            return Written(name, size_bytes, is_sealed=True)
        try:
            with held(_partial_directory(partial, run_fd)) as partial_fd:
                place = Path(staging, partial)
                files = _write_part(partial_fd, place, manifest, save, durable=durable)
                sealed = _seal(run_fd, partial_fd, name, manifest.local_world_size, durable=durable)
        except BaseException:
            # Without this rank's files the set can never be complete: free the space.
            _remove_own(partial, run_fd)
            raise
    size_bytes = sum(file.size_bytes for file in files)
    return Written(sealed or name, size_bytes, is_sealed=sealed is not None)


def remove_leftovers(staging: str, rank: int) -> None:
    """Remove the files that an earlier process of this rank left in partial directories.

    A new process calls it before its first save.  Otherwise a manifest that the earlier process left in a set
    of the same name could seal that set too early.  Directories of other users are left alone.

    Raises:
        OSError: the staging directory cannot be read.
    """
    with held(openat.open_directory(staging)) as run_fd:
        for partial in os.listdir(run_fd):
            if partial.startswith(STORE_PREFIX):
                _remove_own(partial, run_fd)
            if layout.parse_partial_name(partial) is None:
                continue
            with contextlib.suppress(OSError):  # of another user, or already removed
                with held(_open_own(partial, run_fd)) as partial_fd:
                    own = [each for each in os.listdir(partial_fd) if layout.is_of_rank(each, rank)]
                    # Manifests first: another rank may seal the set while files are being removed.
                    for each in sorted(own, key=layout.is_rank_manifest, reverse=True):
                        with contextlib.suppress(OSError):
                            openat.remove_tree(each, dir_fd=partial_fd)
                os.rmdir(partial, dir_fd=run_fd)  # refused while other ranks' files are there


def finish(path: str | os.PathLike[str]) -> None:
    """Declare a file complete that a save function has written, so that the daemon may upload it early.

    The file moves to its final directory, and must not change any more.  For a file that is not part of a
    save this does nothing.

    Raises:
        ValueError: it is not a regular file with a single name, or the name is not allowed.
        OSError: the file system returned an error.
    """
    parts = Path(path).absolute().parts
    for place in range(1, len(parts) - 1):
        partial, writing = parts[place - 1 : place + 1]
        rank = layout.rank_of_writing_directory(writing)
        if rank >= 0 and layout.parse_partial_name(partial) is not None:
            with held(openat.open_directory(Path(*parts[:place]), owners=_us())) as partial_fd:
                _finish(partial_fd, rank, parts[place + 1 :])
            return


# ---------------------------------------------------------------- files


def _write_part(
    partial_fd: int,
    partial: Path,
    manifest: RankManifest,
    save: Callable[[Path], object],
    *,
    durable: bool,
) -> list[FileEntry]:
    """Write a rank's files and then its manifest."""
    rank = manifest.rank
    own, writing = layout.rank_directory(rank), layout.writing_directory(rank)
    begun = layout.rank_begun_name(rank)
    for name, mode in ((own, _DIRECTORY_MODE), (writing, _WRITING_MODE)):
        os.close(_own_directory(name, partial_fd, mode, is_new=True))
    _put(begun, manifest, partial_fd, durable=False)
    save(partial / writing)
    with held(_open_own(writing, partial_fd)) as writing_fd:
        found = [(*path, name) for _, path, names in _walk(writing_fd, (own,)) for name in names]
    for path in found:
        _finish(partial_fd, rank, path[1:])
    openat.remove_tree(writing, dir_fd=partial_fd)
    with held(_open_own(own, partial_fd)) as own_fd:
        files = sorted(_entries(own_fd, own, durable=durable), key=lambda file: file.path)
    os.unlink(begun, dir_fd=partial_fd)
    manifest = dataclasses.replace(manifest, files=files)
    _put(layout.rank_manifest_name(rank), manifest, partial_fd, durable=durable)
    return files


def _put(name: str, manifest: RankManifest, partial_fd: int, *, durable: bool) -> None:
    data = manifest.encode()
    openat.replace_file(name, data, dir_fd=partial_fd, mode=_FILE_MODE, durable=durable)


def _finish(partial_fd: int, rank: int, path: Sequence[str]) -> None:
    """Move a complete file from a rank's writing directory to its final one.

    Args:
        partial_fd: the partial directory.
        rank: of the directories.
        path: names from those directories to the file.
    """
    *parents, name = path
    own = layout.rank_directory(rank)
    relative = bounds.path("/".join((own, *path)), "the file name")
    with _below(partial_fd, (layout.writing_directory(rank), *parents)) as source_fd:
        try:
            fd = openat.open_file(name, dir_fd=source_fd, owners=_us())
        except OSError as error:
            if isinstance(error, UnsafeFileError) or error.errno in (errno.ELOOP, errno.ENXIO):
                raise ValueError(
                    f"{relative} is not a regular file of this user with a single name, which alone can be"
                    " uploaded"
                ) from error
            raise
        with held(fd):
            _give_to_group(fd, partial_fd)
            os.fchmod(fd, _FILE_MODE)
        with _below(partial_fd, (own, *parents), make=True) as target_fd:
            os.rename(name, name, src_dir_fd=source_fd, dst_dir_fd=target_fd)


def _entries(own_fd: int, own: str, *, durable: bool) -> Iterator[FileEntry]:
    """Yield the final files of a rank; ``durable`` calls fsync for the files and their directories."""
    for directory_fd, path, names in _walk(own_fd, (own,)):
        for name in names:
            with held(openat.open_file(name, dir_fd=directory_fd, owners=_us())) as fd:
                if durable:
                    os.fsync(fd)
                yield FileEntry("/".join((*path, name)), os.fstat(fd).st_size)
        if durable:
            os.fsync(directory_fd)


def _walk(
    directory_fd: int, path: tuple[str, ...]
) -> Iterator[tuple[int, tuple[str, ...], list[str]]]:
    """Walk a tree bottom-up; yield the descriptor, path and file names of each directory.

    Raises:
        ValueError: a name is not allowed, or the tree is too deep.
    """
    files = []
    for name in os.listdir(directory_fd):
        if stat.S_ISDIR(os.stat(name, dir_fd=directory_fd, follow_symlinks=False).st_mode):
            inner = (*path, name)
            bounds.path("/".join(inner), "the file name")  # limits the depth too
            with held(_open_own(name, directory_fd)) as inner_fd:
                yield from _walk(inner_fd, inner)
        else:
            files.append(name)
    yield directory_fd, path, files


def _sealed_size_bytes(name: str, run_fd: int, rank: int) -> int | None:
    """Return the size of one rank's files in a sealed set: 0 without that rank, None without the set.

    A directory of another user under that name does not count as the set.
    """
    manifest = layout.rank_manifest_name(rank)
    limit = layout.RANK_MANIFEST_MAX_BYTES
    try:
        sealed_fd = _open_own(name, run_fd)
    except OSError:
        return None
    with held(sealed_fd):
        try:
            data = openat.read_file(manifest, dir_fd=sealed_fd, max_bytes=limit, owners=_us())
            files = RankManifest.decode(data).files
        except (OSError, ValueError):
            return 0
    return sum(entry.size_bytes for entry in files)


# ---------------------------------------------------------------- sealing


def _seal(
    run_fd: int, partial_fd: int, name: str, local_world_size: int, *, durable: bool
) -> str | None:
    """Rename the set if the manifests of all ranks of this VM are there.

    Returns:
        The sealed name; None while other ranks are still writing.
    """
    if sum(map(layout.is_rank_manifest, os.listdir(partial_fd))) < local_world_size:
        return None
    try:
        sealed = _rename(run_fd, name)
    except FileNotFoundError:  # another rank has found all manifests and renamed the set first
        found = _name_of(partial_fd, run_fd)
        if found is None:
            raise
        return found
    if durable:
        os.fsync(run_fd)
    return sealed


def _rename(run_fd: int, name: str) -> str:
    """Rename the partial directory of a set, and return the sealed name.

    Members of the group can read the name from the partial directory, and create an entry of that name first.
    Then the set gets another nonce.
    """
    partial = layout.partial_name(name)
    try:
        os.rename(partial, name, src_dir_fd=run_fd, dst_dir_fd=run_fd)
        return name
    except FileNotFoundError:
        raise
    except OSError:
        owner = _owner_of(name, run_fd)
        if owner is None:
            raise
    other = f"{name}{secrets.token_hex(8)}"
    log.warning(
        "%s already exists and belongs to user id %s; the set is sealed as %s", name, owner, other
    )
    os.rename(partial, other, src_dir_fd=run_fd, dst_dir_fd=run_fd)
    return other


def _name_of(set_fd: int, run_fd: int) -> str | None:
    """Return the sealed name that another rank has given to an open set."""
    wanted = os.fstat(set_fd)
    for name in filter(layout.parse_sealed_name, os.listdir(run_fd)):
        # Not the inode of the directory entry, which differs on overlayfs.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(name, dir_fd=run_fd, follow_symlinks=False), wanted):
                return name
    return None


# ---------------------------------------------------------------- directories


def _us() -> frozenset[int]:
    return frozenset({os.geteuid()})


def _open_own(name: str, directory_fd: int) -> int:
    return openat.open_directory(name, dir_fd=directory_fd, owners=_us())


@contextlib.contextmanager
def _below(directory_fd: int, parts: Sequence[str], *, make: bool = False) -> Iterator[int]:
    """Open a directory below, one component at a time; ``make`` creates missing ones."""
    with contextlib.ExitStack() as stack:
        for part in parts:
            inner_fd = _own_directory(part, directory_fd) if make else _open_own(part, directory_fd)
            directory_fd = stack.enter_context(held(inner_fd))
        yield directory_fd


def _partial_directory(name: str, run_fd: int) -> int:
    try:
        return _own_directory(name, run_fd)
    except OSError as error:
        owner = _owner_of(name, run_fd)
        if owner in (None, os.geteuid()):
            raise
        raise PermissionError(
            f"the partial set {name} belongs to user id {owner}; run all ranks of this VM as one user"
        ) from error


def _owner_of(name: str, directory_fd: int) -> int | None:
    """Return the user id that an entry belongs to; None if it does not exist."""
    with contextlib.suppress(FileNotFoundError):
        return os.stat(name, dir_fd=directory_fd, follow_symlinks=False).st_uid
    return None


def _own_directory(
    name: str, directory_fd: int, mode: int = _DIRECTORY_MODE, *, is_new: bool = False
) -> int:
    """Open a directory of this user, and create it if it does not exist.

    Args:
        name: of the directory.
        directory_fd: parent directory.
        mode: mode of the directory where it inherits no ACL.
        is_new: whether the directory must not exist yet.
    """
    try:
        # First for this user alone: the group must not create entries before the directory has its mode.
        os.mkdir(name, 0o700, dir_fd=directory_fd)
    except FileExistsError:
        if is_new:
            raise
    fd = _open_own(name, directory_fd)
    with closed_on_error(fd):
        _give_to_group(fd, directory_fd)
        os.fchmod(fd, _MODE_WITH_ACL if openat.has_acl(fd) else mode)
    return fd


def _give_to_group(fd: int, parent_fd: int) -> None:
    """Give a file or directory to the group of its parent, by which the daemon reads without ACLs."""
    group = os.fstat(parent_fd).st_gid
    if os.fstat(fd).st_gid != group:
        with contextlib.suppress(PermissionError):  # this user is not in that group
            os.fchown(fd, -1, group)


def _remove_own(name: str, directory_fd: int) -> None:
    """Remove a directory of this user; errors are ignored."""
    with contextlib.suppress(OSError):
        os.close(_open_own(name, directory_fd))
        openat.remove_tree(name, dir_fd=directory_fd)
