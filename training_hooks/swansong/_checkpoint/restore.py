# SPDX-License-Identifier: Apache-2.0
"""Asks the daemon for a checkpoint, and loads this rank's part of it."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from swansong import openat, protocol
from swansong._ranks.agreement import Ranks
from swansong._ranks.choice import RestoreChoice
from swansong.protocol import (
    Message,
    RankManifest,
    Refused,
    Restored,
    RestoreQuery,
    Restoring,
    ShardsTaken,
    ShardVerified,
)
from swansong.state import Arrivals, Snapshots

PATIENCE_S = 120.0
"""Longest time of a restore without any progress."""

CONFIRM_EVERY_S = 0.02
"""Shortest time between two confirmations of shards; the daemon refuses peers that send too many messages."""

REPORT_EVERY_S = 5.0
"""Time between two lines about the progress of a restore."""

log = logging.getLogger("swansong")


class RestoreError(Exception):
    """A checkpoint exists but cannot be restored.  Training must not start from step 0 instead."""


class RestoreClient:
    """Asks the daemon for one checkpoint at a time: the training loop waits, the channel's thread answers.

    Args:
        send: sends a message to the daemon, without blocking.
        choice: of the ranks of a job over several VMs, which all load what rank 0 has chosen; None on one VM.
    """

    def __init__(
        self, send: Callable[[Message], object], choice: RestoreChoice | None = None
    ) -> None:
        self._send = send
        self._choice = choice
        self._changed = threading.Condition()
        self._query: RestoreQuery | None = None
        self._answer: Restored | None = None
        self._bytes_done = -1
        self._progress_mono_s = self._reported_mono_s = 0.0
        self._arrived: deque[tuple[ShardVerified, int]] = deque()

    def find_newest(
        self, arrivals: Arrivals | None = None, owners: Collection[int] | None = None
    ) -> Restored:
        """Return the newest whole checkpoint; its ``path`` is empty for a fresh run.

        A job over several VMs gets the files that its VM reads.  If that is not enough, for example because
        another number of ranks saved the checkpoint, this asks again, for all files of the same checkpoint.

        Args:
            arrivals: loads files of the checkpoint while the daemon fetches the others.
            owners: user ids that the directory and its files may belong to.

        Raises:
            RestoreError: the ranks cannot agree, or the daemon cannot restore, refuses or makes no progress.
        """
        answer = self._chosen(arrivals)
        if arrivals is None or not answer.path or not _lacks(answer, arrivals, owners):
            return answer
        is_whole = self._choice is None or not arrivals.prefixes
        arrivals.read_all()
        if is_whole:
            return answer
        log.info("restoring: this rank reads the files of all ranks")
        return self._ask(generation=answer.generation, step=answer.step, arrivals=arrivals)

    def _chosen(self, arrivals: Arrivals | None) -> Restored:
        if self._choice is None:
            return self._ask(arrivals=arrivals)
        chosen: list[Restored] = []

        def choose(job_start_id: str) -> dict[str, Any]:
            try:
                chosen.append(self._ask(job_start_id=job_start_id, arrivals=arrivals))
            except RestoreError as error:
                return {"error": f"rank 0: {error}"}
            return {"generation": chosen[0].generation, "step": chosen[0].step}

        with _agreement():
            choice = self._choice.for_resume(choose)
        _check_choice(choice)
        if chosen:
            return chosen[0]
        if choice["generation"] < 0:
            return Restored("")  # a fresh run
        return self._ask(generation=choice["generation"], step=choice["step"], arrivals=arrivals)

    def find_healthy(self, *, number: int, at_step: int, before_step: int) -> Restored:
        """Return the newest healthy checkpoint, and begin a rollback to it.

        Args:
            number: rollbacks of this process so far, including this one.
            at_step: last step of this rank.
            before_step: first step that this rank does not trust.

        Raises:
            RestoreError: no checkpoint is healthy, or as for :meth:`find_newest`.
        """
        if self._choice is None:
            return _healthy(self._ask(rollback=number, before_step=before_step))

        def choose(before_step: int) -> dict[str, Any]:
            try:
                found = _healthy(self._ask(rollback=number, before_step=before_step))
            except RestoreError as error:
                return {"error": f"rank 0: {error}"}
            return {"generation": found.generation, "step": found.step}

        with _agreement():
            choice = self._choice.for_rollback(number, at_step, before_step, choose)
        _check_choice(choice)
        # Each daemon drops its work on the abandoned steps before it answers for the new job start.
        job_start_id = self._choice.begin_rollback(number)
        answer = self._ask(
            generation=choice["generation"], step=choice["step"], job_start_id=job_start_id
        )
        return _healthy(answer)

    def resend(self) -> None:
        """Repeat the query after a reconnect."""
        with self._changed:
            if self._query is not None:
                self._send(self._query)

    def receive(self, message: Restoring | Restored | Refused) -> None:
        """Take an answer, or a report of progress, from the daemon."""
        with self._changed:
            if self._query is None:
                return
            if isinstance(message, Refused):
                self._answer = Restored(self._query.query_id, error=message.reason)
            elif message.query_id != self._query.query_id:
                return
            elif isinstance(message, Restored):
                self._answer = message
            elif message.bytes_done != self._bytes_done:
                self._bytes_done = message.bytes_done
                self._progress_mono_s = time.monotonic()
                self._report(message)
            self._changed.notify_all()

    def receive_shard(self, message: ShardVerified, fd: int) -> None:
        """Take a file that the daemon has verified, and its descriptor; the training loop loads it."""
        with self._changed:
            if self._query is not None and message.query_id == self._query.query_id:
                self._arrived.append((message, fd))
                self._progress_mono_s = time.monotonic()
                self._changed.notify_all()
            elif fd >= 0:
                os.close(fd)

    def _report(self, message: Restoring) -> None:
        if self._progress_mono_s - self._reported_mono_s >= REPORT_EVERY_S:
            self._reported_mono_s = self._progress_mono_s
            log.info(
                "restoring: the daemon has fetched %.1f of %.1f GB",
                message.bytes_done / 1e9,
                message.bytes_total / 1e9,
            )

    def _ask(
        self,
        *,
        rollback: int = 0,
        before_step: int = -1,
        generation: int = -1,
        step: int = -1,
        job_start_id: str = "",
        arrivals: Arrivals | None = None,
    ) -> Restored:
        """Send a :class:`swansong.protocol.RestoreQuery` with these fields, and wait for the answer."""
        query = RestoreQuery(
            secrets.token_hex(8),
            rollback,
            before_step,
            generation,
            step,
            job_start_id,
            prefixes=[] if arrivals is None or self._choice is None else list(arrivals.prefixes),
            takes_shards=arrivals is not None,
        )
        with self._changed:
            self._answer = None
            self._query = query
            self._progress_mono_s = self._reported_mono_s = time.monotonic()
            self._send(query)
        try:
            answer, download = self._wait(query.query_id, arrivals)
        finally:
            with self._changed:
                self._query = None
            while self._arrived:
                _, fd = self._arrived.popleft()
                if fd >= 0:
                    os.close(fd)
        if answer.error:
            raise RestoreError(f"the daemon cannot restore: {answer.error}")
        if arrivals is not None and download and answer.download != download:
            arrivals.clear()
            if not answer.path:
                raise RestoreError(
                    "restore failed: the daemon reports a fresh run after it has sent a checkpoint"
                )
        return answer

    def _wait(self, query_id: str, arrivals: Arrivals | None) -> tuple[Restored, str]:
        """Return the answer, and the download whose files were loaded meanwhile; empty without one."""
        download, taken, confirmed_mono_s = "", 0, 0.0
        while True:
            with self._changed:
                if self._answer is not None:
                    return self._answer, download
                if not self._arrived:
                    self._wait_for_news()
                    continue
            while self._arrived and self._answer is None and arrivals is not None:
                message, fd = self._arrived.popleft()
                if message.download != download:
                    if download:
                        arrivals.clear()
                    download, taken = message.download, 0
                arrivals.take(message.path, fd)
                taken += 1
            time.sleep(max(0.0, confirmed_mono_s + CONFIRM_EVERY_S - time.monotonic()))
            confirmed_mono_s = time.monotonic()
            self._send(ShardsTaken(query_id, download, taken))

    def _wait_for_news(self) -> None:
        left_s = self._progress_mono_s + PATIENCE_S - time.monotonic()
        if left_s <= 0:
            raise RestoreError(
                f"restore failed: the daemon made no progress for {PATIENCE_S:.0f} s; see"
                " swansong status"
            )
        self._changed.wait(left_s)


def _healthy(answer: Restored) -> Restored:
    if not answer.path:
        raise RestoreError("rollback failed: the run has no healthy checkpoint")
    return answer


@contextlib.contextmanager
def _agreement() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the job's store raises errors of many types
        raise RestoreError(f"the ranks cannot agree on a checkpoint: {error}") from error


def _check_choice(choice: dict[str, Any]) -> None:
    if "error" in choice:
        raise RestoreError(choice["error"])


def load_checkpoint(
    directory: str,
    ranks: Ranks,
    state: Snapshots,
    *,
    wanted_step: int | None = None,
    owners: Collection[int] | None = None,
    reads: Collection[int] = (),
    fetch_s: float = 0.0,
) -> RankManifest:
    """Load this rank's part of a checkpoint.

    Args:
        directory: of the checkpoint, with a rank manifest for each rank.
        ranks: position of this process.  The job must have as many ranks as the one that saved, unless
            ``state`` reads whole sets.
        state: the objects to load.
        wanted_step: step that the checkpoint must have; None accepts any step.
        owners: user ids that the directory and its files may belong to; links are refused.  None for a
            directory that the trainer's user named, without these checks.
        reads: the only ranks whose files ``state`` reads; empty: all, if it reads whole sets.
        fetch_s: time that the daemon took to provide the directory, for the log.

    Returns:
        Manifest of one of the parts that were read.

    Raises:
        RestoreError: the checkpoint is incomplete, does not fit, or cannot be read; names the directory.
    """
    begun_mono_s = time.monotonic()
    try:
        with _opened(directory, owners) as directory_fd:
            if state.reads_whole_set:
                first, *others = sorted(reads) or [0]
                manifest = _check_part(directory_fd, first, wanted_step, owners)
                for rank in others if reads else range(1, manifest.world_size):
                    _check_part(directory_fd, rank, manifest.step, owners)
                part = Path(directory)
            else:
                manifest = _check_part(directory_fd, ranks.rank, wanted_step, owners)
                if manifest.world_size != ranks.world_size:
                    raise ValueError(
                        f"{manifest.world_size} ranks saved it, and this job has {ranks.world_size}"
                    )
                part = Path(directory, protocol.rank_directory(ranks.rank))
        state.load(part)
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"
        raise RestoreError(
            f"cannot restore rank {ranks.rank} from {directory}: {reason}"
        ) from error
    load_s = time.monotonic() - begun_mono_s
    read_s = min(state.read_s, load_s)
    shares = [("fetch", fetch_s), ("read and verify", read_s), ("load", load_s - read_s)]
    age_s = _age_s()
    log.info(
        "restored step %s from %s in %.1f s: %s%s",
        manifest.step,
        directory,
        fetch_s + load_s,
        ", ".join(f"{name} {seconds:.1f} s" for name, seconds in shares if seconds),
        "" if age_s is None else f"; this process started {age_s:.1f} s ago",
    )
    return manifest


def _age_s() -> float | None:
    """Return the time since this process started; None if the system does not report it."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
    except (OSError, AttributeError, ValueError, IndexError):
        return None


def _lacks(answer: Restored, arrivals: Arrivals, owners: Collection[int] | None) -> bool:
    """Whether a rank must read files of other ranks than it has named."""
    if not arrivals.reads:
        return False
    try:
        with _opened(answer.path, owners) as directory_fd:
            for rank in arrivals.reads:
                _check_part(directory_fd, rank, answer.step, owners)
    except (OSError, ValueError):
        return True  # the load from all files raises it again
    return arrivals.lacks(Path(answer.path))


def _check_part(
    directory_fd: int, rank: int, wanted_step: int | None, owners: Collection[int] | None
) -> RankManifest:
    name = protocol.rank_manifest_name(rank)
    with _opened_file(directory_fd, name, owners) as file:
        manifest = RankManifest.decode(file.read(protocol.RANK_MANIFEST_MAX_BYTES + 1))
    if manifest.rank != rank:
        raise ValueError(f"{name} is of rank {manifest.rank}")
    if wanted_step not in (None, manifest.step):
        raise ValueError(f"{name} is of step {manifest.step}, not of step {wanted_step}")
    for entry in manifest.files:
        with _opened_file(directory_fd, entry.path, owners) as file:
            size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes != entry.size_bytes:
            raise ValueError(f"{entry.path} has {size_bytes} bytes, not {entry.size_bytes}")
    return manifest


@contextlib.contextmanager
def _opened(directory: str, owners: Collection[int] | None) -> Iterator[int]:
    if owners is None:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    else:
        fd = openat.open_absolute(directory, owners=owners)
    try:
        yield fd
    finally:
        os.close(fd)


def _opened_file(directory_fd: int, path: str, owners: Collection[int] | None) -> BinaryIO:
    """Open a file of a checkpoint; with ``owners`` component by component, without following links."""
    if owners is None:
        fd = os.open(path, openat.FILE & ~os.O_NOFOLLOW, dir_fd=directory_fd)
        return os.fdopen(fd, "rb")
    *parents, name = path.split("/")
    with contextlib.ExitStack() as stack:
        for parent in parents:
            directory_fd = openat.open_directory(parent, dir_fd=directory_fd, owners=owners)
            stack.callback(os.close, directory_fd)
        return os.fdopen(openat.open_file(name, dir_fd=directory_fd, owners=owners), "rb")
