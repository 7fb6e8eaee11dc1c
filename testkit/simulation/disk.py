# SPDX-License-Identifier: Apache-2.0
"""The staging disk of a simulated VM, and the state that a power cut leaves it in.

The files are real.  Beside them, a model has the state that is certain to survive: the content of each file
at its last fsync, and the entries of each directory at the last fsync of that directory.  A power cut keeps,
loses or reorders each later change of an entry, and tears each file that was written later: its content may
be old, a prefix, or have blocks of zeroes.  Like POSIX, an fsync of a file does not sync the entry of the
file.  A rename is atomic.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

_BLOCK_BYTES = 512
_ENTRY_CALLS = {"open", "mkdir", "rename", "unlink", "rmdir"}
OWN = ".swansongd"
"""The daemon's own directory; its files are not synced, or a hint, or replaced atomically."""


@dataclass(eq=False)
class _Node:
    """A file or a directory."""

    inode: int
    mode: int
    place: _Place | None = None
    """The place that survives a power cut for certain; None: it may be lost."""
    synced: bytes | None = None
    """Content at the last fsync."""
    last: bytes = b""
    """Content of a file when it was removed."""

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.mode)


_Place = tuple[_Node, str]
_Change = dict[_Node, _Place | None]
"""New places, None for a removal: both happen, or neither."""


def _inode(path: Any) -> int:
    try:
        return os.stat(path, follow_symlinks=False).st_ino
    except OSError:
        return 0


def _content(path: Any, dir_fd: int | None = None) -> bytes:
    """The bytes of a file; none of any other entry: a hostile user makes pipes, sockets and links."""
    if not stat.S_ISREG(os.stat(path, dir_fd=dir_fd, follow_symlinks=False).st_mode):
        return b""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=dir_fd)
    try:
        return os.pread(fd, 2**24, 0)
    finally:
        os.close(fd)


class Disk:
    """Records what production code changes below a directory.  All methods need real system calls.

    Args:
        root: the directory.  Everything in it is synced.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._root = _Node(_inode(root), stat.S_IFDIR)
        self._nodes = {self._root.inode: self._root}
        """By inode, those that exist now."""
        self._durable: dict[_Place, _Node] = {}
        """The entries that are certain to survive."""
        self._changes: list[tuple[set[_Node], _Change]] = []
        """Changes of entries since the last fsync of their directories, with these directories."""
        self.sync_all()

    def carry_out(
        self, call: str, real: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        """Call a function of :mod:`os`, and record its effect."""
        if call == "fsync":
            self._sync(args[0])  # a real fsync is slow
            return None
        source_fd = options.get("dir_fd", options.get("src_dir_fd"))
        source = self._place(args[0], source_fd) if call in _ENTRY_CALLS else None
        if source is None:
            return real(*args, **options)
        if call in {"open", "mkdir"}:
            result = real(*args, **options)
            self._seen(source, args[0], source_fd)
            return result
        gone, moved, target = self._seen(source, args[0], source_fd), None, source
        if call == "rename":
            target_fd = options.get("dst_dir_fd")
            moved, target = gone, self._place(args[1], target_fd) or source
            gone = self._seen(target, args[1], target_fd)
        content = _content(args[-1], target_fd if moved else source_fd) if gone else b""
        result = real(*args, **options)
        change: _Change = {}
        if gone is not None:
            del self._nodes[gone.inode]
            gone.last, change[gone] = content, None
        if moved is not None:
            change[moved] = target
        self._changes.append(({source[0], target[0]}, change))
        return result

    def _place(self, path: Any, dir_fd: int | None) -> _Place | None:
        """The place of a path; None outside of this disk."""
        parent, name = os.path.split(os.fspath(path))
        inode = _inode(parent) if parent or dir_fd is None else os.fstat(dir_fd).st_ino
        node = self._nodes.get(inode)
        return None if node is None else (node, name)

    def _seen(self, place: _Place, path: Any, dir_fd: int | None) -> _Node | None:
        """The entry of this name; a new one may have been created by the builtin ``open``."""
        try:
            facts = os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
        except FileNotFoundError:
            return None
        node = self._nodes.get(facts.st_ino)
        if node is None:
            node = self._nodes[facts.st_ino] = _Node(facts.st_ino, facts.st_mode)
            self._changes.append(({place[0]}, {node: place}))
        return node

    def _sync(self, fd: int) -> None:
        node = self._nodes.get(os.fstat(fd).st_ino)
        if node is None:
            return
        if not node.is_directory:
            node.synced = _content(os.readlink(f"/proc/self/fd/{fd}"))
            return
        for name in sorted(os.listdir(fd)):
            self._seen((node, name), name, fd)
        for change in [each for each in self._changes if node in each[0]]:
            self._settle(*change)

    def _see_all(self) -> None:
        for path in sorted(self.root.rglob("*")):  # parents first
            self._seen((self._nodes[_inode(path.parent)], path.name), path, None)

    def sync_all(self) -> None:
        """As syncfs."""
        self._see_all()
        for path in sorted(self.root.rglob("*")):
            self._nodes[_inode(path)].synced = _content(path)
        for change in self._changes[:]:
            self._settle(*change)

    def _settle(self, directories: set[_Node], change: _Change) -> None:
        """Make a change durable.  It replaces earlier changes of the same files."""
        place = self._changes.index((directories, change))
        for _, earlier in self._changes[:place]:
            for node in change:
                earlier.pop(node, None)
        del self._changes[place]
        for node, target in change.items():
            if node.place is not None:
                del self._durable[node.place]
            if target is not None and target in self._durable:
                self._durable[target].place = None
            node.place = target
            if target is not None:
                self._durable[target] = node

    # ------------------------------------------------------------ the power cut

    def at_risk(self, path: Path) -> list[str]:
        """The parts of this directory, with its parents, that a power cut may lose or tear now."""
        inner = [] if not path.is_dir() else path.rglob("*")
        found = []
        for each in [*path.relative_to(self.root).parents, path, *inner]:
            own = self.root / each
            node, parent = self._nodes.get(_inode(own)), self._nodes.get(_inode(own.parent))
            is_placed = node is self._root or (
                node is not None and node.place == (parent, own.name)
            )
            is_synced = node is not None and (node.is_directory or node.synced == _content(own))
            if not (is_placed and is_synced):
                found.append(str(own))
        return found

    def cut(self, random: Random, wall_s: float) -> None:
        """Put the directory into a state that a power cut could leave.

        Args:
            random: decides.
            wall_s: the time; no file is newer.
        """
        self._see_all()
        changes = self._changes[:]
        if random.random() < 0.5:  # a journal that keeps the order
            del changes[random.randint(0, len(changes)) :]
        else:
            share = random.choice([0.0, 0.5, 0.9])
            changes = [each for each in changes if random.random() < share]
        for change in changes:
            self._settle(*change)
        before = self.root.rename(self.root.with_name("before"))
        self.root.mkdir()
        paths = {_inode(path): path for path in before.rglob("*")}
        alive = {node: paths[inode] for inode, node in self._nodes.items() if inode in paths}
        self._write(self._root, self.root, alive, random)
        shutil.rmtree(before)
        for path in self.root.rglob("*"):
            os.utime(path, (min(path.stat().st_mtime, wall_s),) * 2)
        Disk.__init__(self, self.root)

    def _write(
        self, directory: _Node, path: Path, alive: dict[_Node, Path], random: Random
    ) -> None:
        for (parent, name), node in self._durable.items():
            if parent is not directory:
                continue
            target, source = path / name, alive.get(node)
            if source is not None and not (source.is_dir() or source.is_file()):
                continue  # a pipe, a socket, or a link without a target
            if node.is_directory:
                target.mkdir()
                self._write(node, target, alive, random)
            else:
                written = node.last if source is None else _content(source)
                target.write_bytes(_torn(written, node.synced, random))
            if source is None:
                target.chmod(node.mode & 0o7777)
            else:
                facts = source.stat()
                target.chmod(facts.st_mode & 0o7777)
                os.utime(target, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def _torn(written: bytes, synced: bytes | None, random: Random) -> bytes:
    """A content that a file may have if it was synced before it was ``written``."""
    if written == synced:
        return written
    old = (synced or b"").ljust(len(written), b"\0")
    how = random.choice(["whole", "old", "prefix", "zeroes", "blocks"])
    if how == "whole":
        return written
    if how == "old":
        return synced or b""
    if how == "prefix":
        return written[: random.randint(0, len(written))]
    zeroes = bytes(len(written))
    if how == "zeroes":
        return zeroes
    starts = range(0, len(written), _BLOCK_BYTES)
    choices = [random.choice([written, old, zeroes])[i : i + _BLOCK_BYTES] for i in starts]
    return b"".join(choices)[: len(written)]


def spoil_own_files(root: Path, random: Random) -> None:
    """Fill some files of the daemon, which are hints or can be replaced, with any bytes."""
    for path in sorted(root.rglob("*")):
        is_own = OWN in path.parts or path.name == "journal"
        if is_own and path.is_file() and random.random() < 0.5:
            size_bytes = random.choice([0, 1, 32, 5000])
            path.write_bytes(random.choice([bytes(size_bytes), random.randbytes(size_bytes)]))
