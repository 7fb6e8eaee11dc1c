# SPDX-License-Identifier: Apache-2.0
"""Files on this machine that may have the bytes of a shard: they are copied, and need not be fetched.

Candidates are the sealed sets in staging, those that were set aside, and earlier downloads.  A candidate has
the same path and size; one in a set of the same step is preferred.

A candidate is only a hint.  Its owner may change it at any time, so its bytes are copied, or cloned where the
file system can, and the digest of the copied chunk decides.  There are no hard links: through its own name, a
trainer could change bytes that were verified.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from swansong import openat
from swansong.layout import RESTORED_DIRECTORY, parse_sealed_name, rank_of_directory
from swansong_bucket.errors import StagingError
from swansong_bucket.model import CommitRef, StagedFile, StoredShard
from swansong_bucket.transfer.reader import OpenLocal

from swansongd.core.state import State
from swansongd.staging import scan
from swansongd.staging.prepare import RunDirectory


@dataclass(frozen=True, slots=True)
class LocalSet:
    """A directory with candidates."""

    parent_fd: int
    name: str
    step: int
    files: Mapping[str, StagedFile]

    def find(self, path: str, size_bytes: int) -> StagedFile | None:
        """The file with this path, if it has this size."""
        file = self.files.get(path)
        return file if file is not None and file.size_bytes == size_bytes else None

    def open(self, file: StagedFile) -> int:
        """A descriptor of a file; raises StagingError if it was changed or removed."""
        return scan.open_file(self.parent_fd, self.name, file)


class LocalFiles:
    """Finds candidates in the staging directory of a run.

    Args:
        run: staging directory of the run.
        state: returns the newest state of the decision loop.
    """

    def __init__(self, run: RunDirectory, state: Callable[[], State]) -> None:
        self._run = run
        self._state = state

    @contextmanager
    def of(
        self, ref: CommitRef, shards: Sequence[StoredShard]
    ) -> Iterator[Mapping[str, OpenLocal]]:
        """Functions that open a candidate, by the path of the shard, while the context is open."""
        with ExitStack() as stack:
            found: dict[str, OpenLocal] = {}
            for each in sorted(self._sets(stack), key=lambda each: each.step != ref.step):
                wanted = {
                    shard.path: file
                    for shard in shards
                    if shard.path not in found
                    and (file := each.find(shard.path, shard.size_bytes)) is not None
                }
                with suppress(StagingError):
                    if wanted:
                        directory = scan.SetDirectory(each.parent_fd, each.name)
                        stack.callback(directory.close)
                        found |= {path: partial(directory.open, wanted[path]) for path in wanted}
            yield found

    def rank_directories(self) -> frozenset[str]:
        """The directories of the ranks in the newest set of this VM, each with a slash at its end."""
        aside = _listed(self._run.own_fd, scan.sets_aside(self._run.own_fd))
        sets = [(s.id.step, {file.path for file in s.files}) for s in self._state().staging.staged]
        sets += [(each.step, set(each.files)) for each in aside]
        _, newest = max(sets, key=lambda each: each[0], default=(0, set[str]()))
        first = (path.split("/", 1)[0] for path in newest if "/" in path)
        return frozenset(f"{name}/" for name in first if rank_of_directory(name) >= 0)

    def _sets(self, stack: ExitStack) -> Iterator[LocalSet]:
        """All sets; first those in staging, which may be set aside meanwhile."""
        for staged in self._state().staging.staged:
            files = {file.path: file for file in staged.files}
            yield LocalSet(self._run.fd, staged.directory, staged.id.step, files)
        yield from _listed(self._run.own_fd, scan.sets_aside(self._run.own_fd))
        yield from _restored(self._run.fd, stack)


@contextmanager
def sets_in(run_directory: Path) -> Iterator[Sequence[LocalSet]]:
    """The sealed sets and the downloads of a run without the daemon, while the context is open."""
    with ExitStack() as stack:
        sets: list[LocalSet] = []
        with suppress(OSError):
            run_fd = openat.open_directory(run_directory)
            stack.callback(os.close, run_fd)
            sets += _listed(run_fd, {name: name for name in os.listdir(run_fd)})
            sets += _restored(run_fd, stack)
        yield sets


def _restored(run_fd: int, stack: ExitStack) -> Iterator[LocalSet]:
    """The downloads of a run, while ``stack`` is open."""
    with suppress(OSError):
        restored_fd = openat.open_directory(RESTORED_DIRECTORY, dir_fd=run_fd)
        stack.callback(os.close, restored_fd)
        yield from _listed(restored_fd, {name: name for name in os.listdir(restored_fd)})


def _listed(parent_fd: int, names: Mapping[str, str]) -> Iterator[LocalSet]:
    """Sets by the name of their directory; the value has the form of a sealed name."""
    for name, sealed in names.items():
        parsed = parse_sealed_name(sealed)
        if parsed is not None:
            with suppress(StagingError):
                files = {file.path: file for file in scan.listing(parent_fd, name)}
                yield LocalSet(parent_fd, name, parsed[0], files)
