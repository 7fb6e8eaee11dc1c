# SPDX-License-Identifier: Apache-2.0
"""The chunks that a set may name instead of sending them.

- Those of the newest commit, by digest, if this VM has made it or fetched it.  Prune may delete the chunks of
  an older commit at any time.
- Those that this VM has created and no commit names yet: of a set that was interrupted, of one that is still
  written, and of an earlier life of the daemon.  After a restart each of them counts only once the store has
  confirmed its size and its age.

A file in the daemon's own directory holds the keys of both, so that a restarted daemon sends none of them
again, also before it has read the newest manifest.

A chunk that another writer has created is never named because of its key alone: any role that may create
objects could have put other bytes under a digest that can be predicted.

Small files share chunks, so those of the newest commit of this VM are known by their own digests, too.  No
record in the bucket has these digests: a claim about a part of a chunk could not be verified by its reader.
Their own digests cost a sixth of the processor time of a flush.  So only a file that seems unchanged by its
size and its CRC32C gets one: it is sent twice, and named from then on.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import structlog
from blake3 import blake3
from swansong import openat
from swansong_bucket.config.sections import ORPHANS_AFTER_S_MIN
from swansong_bucket.model import CHUNK_BYTES_MAX, Chunk, CommitRef, Extent, StoredShard

from swansongd.util import boot

FILE_NAME = "chunks"
_TEMPORARY = f".{FILE_NAME}.new"
CREATED_MAX = 400_000
"""Chunks without a commit that are remembered, and chunks of a commit: as many as a manifest can name."""
FILE_BYTES_MAX = 128 * 2**20
CREATED_S_MAX = 12 * 3600.0
"""A chunk without a commit counts up to this age when a flush begins.  Prune may delete it after a day
(:data:`ORPHANS_AFTER_S_MIN`), and the flush needs time, too."""
PRUNE_MARGIN_S = 3600.0
"""A manifest names no chunk that prune may delete within this time."""

_SIZE = re.compile(r"0|[1-9][0-9]{0,9}")
_NEWEST = re.compile(r"newest ([0-9]{1,8}) ([0-9]{1,12}) ([01])")
_NAMED = "named "

_log = structlog.get_logger(__name__)


class Found(NamedTuple):
    """Stored bytes with the wanted digest."""

    extent: Extent
    is_confirmed: bool
    """No commit names the chunk, and this life of the daemon has created or confirmed it."""


class SmallSums(NamedTuple):
    """Sums of a small file."""

    crc32c: int
    digest: bytes
    """Empty unless it seemed unchanged."""


class KnownChunks:
    """Known chunks of one run and one store.  Thread-safe.

    Args:
        directory: the daemon's own directory in staging.
        run, store_url: a file of another run or store is ignored.
        is_data: whether a key is that of a chunk of the run.
        orphans_after_s: age at which prune may delete a chunk that no commit names, on any machine.
        boottime: the clock, which includes the time of a suspension.
    """

    def __init__(
        self,
        directory: Path,
        *,
        run: str,
        store_url: str,
        is_data: Callable[[str], bool],
        orphans_after_s: float = ORPHANS_AFTER_S_MIN,
        boottime: Callable[[], float] = boot.boottime_s,
    ) -> None:
        self._directory = directory
        self._header = f"swansong-chunks-1 {run} {store_url}"
        self._is_data = is_data
        self._orphans_after_s = orphans_after_s
        self._boottime = boottime
        self._lock = threading.Lock()
        self._newest: CommitRef | None = None
        self._named: dict[bytes, Chunk] = {}
        self._created_boot_s: dict[Chunk, float] = {}
        """When the store got a chunk that no commit names yet; unknown until the store confirms it."""
        self._small: dict[bytes, Extent] = {}
        """By digest."""
        self._seen: dict[int, Extent] = {}
        """Small files by their CRC32C, which proves nothing."""
        self._fd = -1
        self._created = {chunk.digest: chunk for chunk in self._read()}
        with self._lock:
            self._rewrite()

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    # ------------------------------------------------------------------ what a set may name

    def has_seen(self, crc32c: int, size_bytes: int) -> bool:
        """Whether a shared chunk has a small file of this checksum and size: probably the same."""
        with self._lock:
            extent = self._seen.get(crc32c)
            return (
                extent is not None and extent.size_bytes == size_bytes and self._holds(extent.chunk)
            )

    def find(self, digest: bytes) -> Found | None:
        """The chunk with this digest, or the place of a small file with this digest in a shared chunk."""
        with self._lock:
            chunk = self._named.get(digest) or self._created.get(digest)
            extent = self._small.get(digest) if chunk is None else Extent.whole(chunk)
            if extent is None or not self._holds(extent.chunk):
                return None
            return Found(extent, is_confirmed=extent.chunk in self._created_boot_s)

    def holds(self, chunks: Iterable[Chunk]) -> bool:
        """Whether a manifest may name all these chunks now."""
        with self._lock:
            return all(self._holds(chunk) for chunk in chunks)

    def names(self, chunk: Chunk) -> bool:
        """Whether the newest commit names this chunk."""
        with self._lock:
            return self._named.get(chunk.digest) == chunk

    def age_s(self, chunk: Chunk) -> float | None:
        """Since the store got a chunk that no commit names; None: unknown."""
        with self._lock:
            created_boot_s = self._created_boot_s.get(chunk)
            return None if created_boot_s is None else self._boottime() - created_boot_s

    def _holds(self, chunk: Chunk) -> bool:
        digest = chunk.digest
        return self._named.get(digest) == chunk or self._created.get(digest) == chunk

    # ------------------------------------------------------------------ what happened

    def created(self, chunk: Chunk, small: Mapping[Extent, SmallSums]) -> Chunk:
        """Note a chunk that this daemon has created.

        Args:
            small: the small files in it.

        Returns:
            The chunk to name: another one if two workers have created the same bytes at the same time.
        """
        with self._lock:
            first = self._created.get(chunk.digest)
            if first is not None and first in self._created_boot_s:
                return first
            if len(self._created) >= CREATED_MAX:
                self._forget(list(self._created.values())[: CREATED_MAX // 10])
                self._rewrite()
            self._created[chunk.digest] = chunk
            self._created_boot_s[chunk] = self._boottime()
            self._seen.update((sums.crc32c, extent) for extent, sums in small.items())
            self._small.update(
                (sums.digest, extent) for extent, sums in small.items() if sums.digest
            )
            self._append(_line(f"{chunk.key} {chunk.size_bytes}"))
            return chunk

    def confirmed(self, chunk: Chunk, age_s: float | None) -> bool:
        """The store has this chunk.  Returns whether a manifest may name it: not if it is old or forgotten.

        Args:
            age_s: as the store reports it; None: unknown.
        """
        with self._lock:
            if self._named.get(chunk.digest) == chunk:
                return True
            if not self._holds(chunk):
                return False  # forgotten while the request was in flight
            self._created_boot_s[chunk] = self._boottime() - (age_s or 0.0)
            return (age_s or 0.0) < CREATED_S_MAX

    def forget_old(self) -> None:
        """Forget chunks without a commit that are too old.  Called when a flush begins, not during one.

        Otherwise a flush of more than 12 h would never end: it would send its oldest chunks again and again.
        """
        self._forget_older(CREATED_S_MAX)

    def forget_prunable(self) -> None:
        """Forget chunks without a commit that prune may delete soon: a manifest may wait for days."""
        self._forget_older(self._orphans_after_s - PRUNE_MARGIN_S)

    def _forget_older(self, age_s: float) -> None:
        with self._lock:
            before_boot_s = self._boottime() - age_s
            self._forget(
                [c for c, created in self._created_boot_s.items() if created < before_boot_s]
            )

    def is_gone(self, chunk: Chunk) -> None:
        """The store has lost a chunk, or it is too old to be named."""
        with self._lock:
            if self._named.get(chunk.digest) == chunk:
                del self._named[chunk.digest]
            if self._created.get(chunk.digest) == chunk:
                self._forget([chunk])
                self._append(_line(f"{chunk.key} 0"))

    def distrust(self) -> None:
        """The store has lost a chunk that it had acknowledged: all bytes without a commit are sent again."""
        with self._lock:
            self._forget(self._created.values())
            self._rewrite()

    def committed(self, shards: Sequence[StoredShard], ref: CommitRef) -> None:
        """A set of this VM is committed as these shards."""
        with self._lock:
            named = _by_digest(shards)
            if self._newest is None or self._newest <= ref:
                self._newest, self._named = ref, named
            self._forget(named.values())
            self._rewrite()

    def superseded(self, ref: CommitRef) -> None:
        """This is the newest commit of the run: no set may name chunks of an older one."""
        with self._lock:
            if self._newest is None or self._newest < ref:
                self._newest, self._named = ref, {}
                self._rewrite()

    def seed(self, ref: CommitRef, shards: Sequence[StoredShard]) -> None:
        """Note the chunks of the newest commit, made by another VM or life, unless a newer one is known.

        Args:
            shards: their bytes were read from the store, and match the names of the chunks.
        """
        self.superseded(ref)
        with self._lock:
            if self._newest == ref and not self._named:
                self._named = _by_digest(shards)
                self._rewrite()

    def _forget(self, chunks: Iterable[Chunk]) -> None:
        doomed = list(chunks)
        for chunk in doomed:
            if self._created.get(chunk.digest) == chunk:
                del self._created[chunk.digest]
                self._created_boot_s.pop(chunk, None)
        if doomed:
            self._small = {d: e for d, e in self._small.items() if self._holds(e.chunk)}
            self._seen = {c: e for c, e in self._seen.items() if self._holds(e.chunk)}

    # ------------------------------------------------------------------ the file, under the lock

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        with openat.held(openat.open_directory(self._directory, owners={os.geteuid()})) as own_fd:
            yield own_fd

    def _read(self) -> list[Chunk]:
        try:
            with self._opened() as own_fd:
                data = openat.read_file(
                    FILE_NAME, dir_fd=own_fd, max_bytes=FILE_BYTES_MAX, owners={os.geteuid()}
                )
        except FileNotFoundError:
            return []
        except OSError as error:
            _log.warning(
                "known_chunks_not_read",
                error=str(error),
                hint="What an earlier daemon has sent without a commit is sent again",
            )
            return []
        lines = io.BytesIO(data)  # splits one line at a time: a hostile file has 100 million
        if _text(lines.readline()) != self._header:
            return []
        found: dict[str, Chunk] = {}
        for line in lines:
            text = _text(line)
            if match := _NEWEST.fullmatch(text):
                generation, step, is_final = (int(word) for word in match.groups())
                self._newest = CommitRef(generation, step, bool(is_final))
            elif (chunk := self._chunk(text.removeprefix(_NAMED))) is None:
                continue
            elif text.startswith(_NAMED):
                if len(self._named) < CREATED_MAX:
                    self._named[chunk.digest] = chunk
            else:
                found[chunk.key] = chunk
                if len(found) > CREATED_MAX:
                    del found[next(iter(found))]
        if self._newest is None:
            self._named = {}
        return [chunk for chunk in found.values() if chunk.size_bytes]

    def _chunk(self, text: str) -> Chunk | None:
        key, _, size = text.rpartition(" ")
        if not self._is_data(key) or not _SIZE.fullmatch(size):
            return None
        return Chunk(key, int(size)) if int(size) <= CHUNK_BYTES_MAX else None

    def _append(self, line: bytes) -> None:
        if self._fd >= 0:
            try:
                openat.write_all(self._fd, line)
            except OSError as error:
                self._stop_writing(error)

    def _rewrite(self) -> None:
        """Replace the file by the shortest one with the same content.

        It is never synced: after SIGKILL the kernel still has all of it.
        """
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        lines = [_line(self._header)]
        if self._newest is not None:
            ref = self._newest
            lines.append(_line(f"newest {ref.generation} {ref.step} {int(ref.is_final)}"))
            named = self._named.values()
            lines += [_line(f"{_NAMED}{chunk.key} {chunk.size_bytes}") for chunk in named]
        lines += [_line(f"{chunk.key} {chunk.size_bytes}") for chunk in self._created.values()]
        try:
            with self._opened() as own_fd:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(_TEMPORARY, dir_fd=own_fd)  # a daemon was killed before the rename
                flags = os.O_WRONLY | os.O_APPEND
                self._fd = openat.create_file(_TEMPORARY, dir_fd=own_fd, flags=flags)
                openat.write_all(self._fd, b"".join(lines))
                os.rename(_TEMPORARY, FILE_NAME, src_dir_fd=own_fd, dst_dir_fd=own_fd)
        except OSError as error:
            self._stop_writing(error)

    def _stop_writing(self, error: OSError) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        _log.warning(
            "known_chunks_not_written",
            error=str(error),
            hint="Free space in staging; a daemon that restarts now sends stored bytes again",
        )


def _by_digest(shards: Sequence[StoredShard]) -> dict[bytes, Chunk]:
    return {extent.chunk.digest: extent.chunk for shard in shards for extent in shard.extents}


def _line(text: str) -> bytes:
    """A line with its own checksum, so that a damaged line is skipped."""
    return f"{blake3(text.encode()).hexdigest(8)} {text}\n".encode()


def _text(line: bytes) -> str:
    """The text of a line; empty if the line is damaged."""
    check, _, text = line.rstrip(b"\n").partition(b" ")
    is_whole = check == blake3(text).hexdigest(8).encode()
    return text.decode(errors="replace") if is_whole else ""
