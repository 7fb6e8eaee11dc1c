# SPDX-License-Identifier: Apache-2.0
"""Files on this machine that may have the bytes of a shard: they are copied, and need not be fetched.

Candidates are the sealed sets in staging, those that were set aside, and earlier downloads.  A file of the
same path and size counts if the upload journal knows its digest, or if its set is of the same step.

A candidate is only a hint.  Its owner may change it at any time, so its bytes are copied, or cloned where the
file system can, and the digest of the copy decides.  There are no hard links: through its own name, a trainer
could change bytes that were verified.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from swansong import openat
from swansong.protocol import RESTORED_DIRECTORY, is_rank_directory, parse_sealed_name

from swansongd.core.state import State
from swansongd.errors import StagingError
from swansongd.model import CommitRef, StagedFile, StoredShard
from swansongd.restore.reader import OpenLocal
from swansongd.staging import scan
from swansongd.staging.prepare import RunDirectory

LocalCopies = Callable[[str, int], Iterator[OpenLocal]]
"""Functions that open the files on this machine with this path in a checkpoint and this size."""


@dataclass(frozen=True, slots=True)
class _Set:
    """A directory with candidates."""

    parent_fd: int
    name: str
    step: int
    files: Mapping[str, StagedFile]


class LocalFiles:
    """Finds candidates in the staging directory of a run.

    Args:
        run: staging directory of the run.
        state: returns the newest state of the decision loop.
        shard_of: returns the shard with the bytes of a file in staging; None if it is unknown.
    """

    def __init__(
        self,
        run: RunDirectory,
        state: Callable[[], State],
        shard_of: Callable[[StagedFile], StoredShard | None] = lambda _file: None,
    ) -> None:
        self._run = run
        self._state = state
        self._shard_of = shard_of

    @contextmanager
    def of(
        self, ref: CommitRef, shards: Mapping[int, StoredShard]
    ) -> Iterator[Mapping[int, OpenLocal]]:
        """Functions that open a candidate, by the number of the shard, while the context is open."""
        with ExitStack() as stack:
            found: dict[int, OpenLocal] = {}
            for each in self._sets(stack):
                wanted = {
                    number: each.files[shard.path]
                    for number, shard in shards.items()
                    if number not in found and self._fits(each, shard, ref)
                }
                with suppress(StagingError):
                    if wanted:
                        directory = scan.SetDirectory(each.parent_fd, each.name)
                        stack.callback(directory.close)
                        opening = {n: partial(directory.open, file) for n, file in wanted.items()}
                        found.update(opening)
            yield found

    def rank_directories(self) -> frozenset[str]:
        """The directories of the ranks in the newest set of this VM, each with a slash at its end."""
        aside = _listed(self._run.own_fd, scan.sets_aside(self._run.own_fd))
        sets = [(s.id.step, {file.path for file in s.files}) for s in self._state().staging.staged]
        sets += [(each.step, set(each.files)) for each in aside]
        _, newest = max(sets, key=lambda each: each[0], default=(0, set[str]()))
        first = (path.split("/", 1)[0] for path in newest if "/" in path)
        return frozenset(f"{name}/" for name in first if is_rank_directory(name))

    def _fits(self, candidates: _Set, shard: StoredShard, ref: CommitRef) -> bool:
        file = candidates.files.get(shard.path)
        if file is None or file.size_bytes != shard.size_bytes:
            return False
        known = self._shard_of(file)
        if known is None or known.part_size_bytes != shard.part_size_bytes:
            return candidates.step == ref.step
        return known.part_digests == shard.part_digests

    def _sets(self, stack: ExitStack) -> Iterator[_Set]:
        """All sets; first those in staging, which may be set aside meanwhile."""
        for staged in self._state().staging.staged:
            files = {file.path: file for file in staged.files}
            yield _Set(self._run.fd, staged.directory, staged.id.step, files)
        yield from _listed(self._run.own_fd, scan.sets_aside(self._run.own_fd))
        yield from _restored(self._run.fd, stack)


@contextmanager
def copies_in(run_directory: Path) -> Iterator[LocalCopies]:
    """Finds candidates without the daemon: in sealed sets and in downloads, while the context is open."""
    with ExitStack() as stack:
        sets: list[_Set] = []
        with suppress(OSError):
            run_fd = openat.open_directory(run_directory)
            stack.callback(os.close, run_fd)
            sets += _listed(run_fd, {name: name for name in os.listdir(run_fd)})
            sets += _restored(run_fd, stack)

        def find(path: str, size_bytes: int) -> Iterator[OpenLocal]:
            for each in sets:
                file = each.files.get(path)
                if file is not None and file.size_bytes == size_bytes:
                    yield partial(scan.open_file, each.parent_fd, each.name, file)

        yield find


def _restored(run_fd: int, stack: ExitStack) -> Iterator[_Set]:
    """The downloads of a run, while ``stack`` is open."""
    with suppress(OSError):
        restored_fd = openat.open_directory(RESTORED_DIRECTORY, dir_fd=run_fd)
        stack.callback(os.close, restored_fd)
        yield from _listed(restored_fd, {name: name for name in os.listdir(restored_fd)})


def _listed(parent_fd: int, names: Mapping[str, str]) -> Iterator[_Set]:
    """Sets by the name of their directory; the value has the form of a sealed name."""
    for name, sealed in names.items():
        parsed = parse_sealed_name(sealed)
        if parsed is not None:
            with suppress(StagingError):
                files = {file.path: file for file in scan.listing(parent_fd, name)}
                yield _Set(parent_fd, name, parsed[0], files)
