# SPDX-License-Identifier: Apache-2.0
"""The download in progress, which several askers join, and the directory of the last one.

One download runs at a time, in the thread of the asker that began it.  The prefetch and the restore queries
of trainers are such askers.  An asker that wants the same commit joins the download in progress.  One that
wants another commit cancels a prefetch; the chunks that were fetched stay on the disk.

Downloads go to a directory that only the daemon can write, so trainers can neither redirect them nor change
verified bytes.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import structlog
from swansong import openat
from swansong.layout import RESTORED_DIRECTORY, sealed_name
from swansong_bucket.errors import Stopped
from swansong_bucket.model import CommitRef, StoredShard
from swansong_bucket.stores.base import ObjectStore
from swansong_bucket.stores.wrappers.retry import Retrying
from swansong_bucket.transfer.reader import ReadOptions
from swansong_bucket.transfer.restore import RestoreResult, restore
from swansong_bucket.transfer.target import Access, RestoreTarget, interrupted

from swansongd.core import resume
from swansongd.core.events import CommitSkipped
from swansongd.observe.facts import DownloadEnded, DownloadStarted
from swansongd.restore.context import RestoreContext
from swansongd.restore.local_files import LocalFiles
from swansongd.restore.verified import VerifiedShards
from swansongd.restore.wish import Download, Wish
from swansongd.staging.prepare import RunDirectory, explained, open_restored

BUDGET_S = 100.0
"""Time for retries of the store before a download fails."""
PREFETCH_BUDGET_S = 10.0
"""The same for a prefetch, which is repeated: a trainer that joins it then still has the whole budget."""
RESTORED_FILE_MODE = 0o640
SPARE_SETS = 2
"""A prefetch leaves room for this number of further checkpoints of this VM, as doctor demands it."""
_LOOK_INTERVAL_S = 0.05

_log = structlog.get_logger(__name__)

Listener = Callable[[int, int], None]
"""Takes the bytes done and the total of the download in progress."""


class Downloads:
    """Downloads commits to ``<run>/restored/``, one at a time.

    Args:
        context: of the run.
    """

    def __init__(self, context: RestoreContext) -> None:
        self._context = context
        self._run = context.run
        self._stop = context.stop
        self._local = LocalFiles(context.run, context.state)
        self.from_mirror = 0
        """Manifests and files with bytes that the mirror had, and the store did not."""
        self._changed = threading.Condition()
        self._running: Download | None = None
        self._last: Download | None = None
        self.verified = VerifiedShards()
        """Passes the files of the download in progress to the trainers that wait for it."""
        self.listener: Listener = lambda _done_bytes, _total_bytes: None
        """Called in the thread of the download."""

    def fetch(self, wish: Wish) -> Download:
        """The finished download of a commit, perhaps one that another asker began.

        Raises:
            NothingToRestore, CorruptError, StagingError, StoreError: see :func:`restore`.
            Stopped: the daemon stops, or an asker with another wish cancelled this prefetch.
        """
        download = self._finished_or_begun(wish)
        if download.result is not None:
            if not wish.is_prefetch:
                self._remove_others(download)
            return download
        self._context.post(DownloadStarted())
        before = self._last
        try:
            download.result = result = self._restored(download)
        except Exception as error:
            self._context.post(DownloadEnded(error=str(error) or type(error).__name__))
            raise
        finally:
            self._end(download)
        self.from_mirror += len(result.from_mirror)
        if result.is_of_store:  # else the store may have other bytes
            self._context.fetched(result.ref, download.shards)
        here_bytes = result.reused_bytes + result.local_bytes
        self._context.post(DownloadEnded(result.size_bytes - here_bytes, here_bytes))
        if download.is_asked:
            self._remove_others(download)
        elif before is not None and download.base is None and not before.is_asked:
            with openat.held(_opened_restored(self._run)) as parent_fd:
                _remove([before.name], parent_fd)  # the prefetch of an older commit
        return download

    def _end(self, download: Download | None) -> None:
        with self._changed:
            self._running = None
            if download is not None and download.result is not None:
                self._last = download
            self._changed.notify_all()

    @property
    def current(self) -> Download | None:
        """The download in progress."""
        return self._running

    def own_prefixes(self) -> frozenset[str]:
        """The directories of the ranks that this VM had, by its newest set; empty without a set."""
        return self._local.rank_directories()

    def remove_unasked(self) -> None:
        """Delete the prefetch, finished or not, unless a trainer got it or waits for it."""
        with self._changed:
            if self._running is not None or (self._last is not None and self._last.is_asked):
                return
            name = None if self._last is None else self._last.name
            # A new download must wait: it would reuse the chunks that are deleted here.
            self._running = Download(wish=Wish(ref=None), is_asked=True, is_cancelled=True)
        try:
            with openat.held(_opened_restored(self._run)) as parent_fd:
                # Whole directories of an earlier life of the daemon stay: a trainer may still read one.
                unfinished = [each for each in os.listdir(parent_fd) if each.startswith(".")]
                _remove(unfinished if name is None else [*unfinished, name], parent_fd)
            self._last = None
        finally:
            self._end(None)

    def _finished_or_begun(self, wish: Wish) -> Download:
        """A finished download that serves the wish, or a new one, which the caller must run."""
        with self._changed:
            while not self._stop.is_set():
                last, running = self._last, self._running
                if wish.is_prefetch and (wish.is_over() or (last is not None and last.is_asked)):
                    break
                if last is not None and not (last.is_of(wish) and _is_there(last)):
                    last = None
                if running is None:
                    if last is None or not last.serves(wish):
                        last = self._running = Download(wish=wish, base=last)
                    last.is_asked |= not wish.is_prefetch
                    return last
                if not running.is_asked and not wish.is_prefetch:
                    is_other = last is not None and running.base is not last
                    has_not_begun = running.is_paused and not running.shards
                    is_unfit = not running.serves(wish) or running.exceeds(wish)
                    if is_other or is_unfit or has_not_begun:
                        running.cancel()  # its chunks stay
                    elif running.shards:
                        running.is_asked = True
                self._changed.wait(_LOOK_INTERVAL_S)
        raise Stopped("the daemon stops, or a trainer has its checkpoint")

    def _restored(self, download: Download) -> RestoreResult:
        parent_fd = _opened_restored(self._run)
        try:
            while True:
                self._await_link(download)
                try:
                    result = self._attempt(download, parent_fd)
                    download.id = self.verified.end()
                    return result
                except Stopped:
                    if download.is_cancelled or self._stop.is_set():
                        raise
                    download.halt.clear()  # it was paused
        finally:
            self.verified.end()
            os.close(parent_fd)

    def _remove_others(self, download: Download) -> None:
        """Delete the downloads for earlier trainers on this VM: a trainer has its answer."""
        with openat.held(_opened_restored(self._run)) as parent_fd:
            names = [name for name in os.listdir(parent_fd) if name != download.name]
            _remove(names, parent_fd)

    def _await_link(self, download: Download) -> None:
        """Block while an evacuation needs the link; raises Stopped if the download is cancelled."""
        while not self._may_run(download):
            if not download.is_paused:
                _log.info("download_paused", commit=str(download.ref or download.wish.ref))
            download.is_paused = True
            if self._is_useless(download) or self._stop.wait(_LOOK_INTERVAL_S):
                raise Stopped("stopped before it was done")
        download.is_paused = False
        if self._is_useless(download):
            raise Stopped("stopped before it was done")

    def _may_run(self, download: Download) -> bool:
        return resume.may_download(self._context.state(), is_asked=download.is_asked)

    def _is_useless(self, download: Download) -> bool:
        if not download.is_asked and download.wish.is_over():
            download.cancel()
        return download.is_cancelled

    def _attempt(self, download: Download, parent_fd: int) -> RestoreResult:
        """Restore into a directory below the open one; continues an interrupted download."""
        step = 0 if download.wish.ref is None else download.wish.ref.step
        # A restarted daemon knows the step of an earlier download by its name.
        prefix = sealed_name(step, "")
        name = interrupted(parent_fd, prefix) or sealed_name(step, secrets.token_hex(4))
        if download.base is not None:
            name = download.base.name
        target = RestoreTarget(
            self._run.path / RESTORED_DIRECTORY / name,
            parent_fd=parent_fd,
            access=Access(RESTORED_FILE_MODE, gid=os.fstat(self._run.fd).st_gid),
            extends=download.base is not None,
            spare_sets=0 if download.is_asked else SPARE_SETS,
        )
        budget_s = BUDGET_S if download.is_asked else PREFETCH_BUDGET_S

        def retrying(store: ObjectStore) -> Retrying:
            return Retrying(store, budget_s=budget_s, stop=download.halt)

        options = ReadOptions(
            progress=self._progress(download),
            stop=download.halt,
            local=self._local.of,
            verified=self.verified.add,
        )

        def chosen(ref: CommitRef, shards: Sequence[StoredShard]) -> None:
            self.verified.end()  # those of a damaged commit
            download.begin(ref, shards)

        selection = replace(download.selection(), chosen=chosen, skipped=self._skipped)
        context = self._context
        mirror = None if context.mirror is None else retrying(context.mirror)
        store = retrying(context.store)
        return restore(store, context.keys, target, selection, options, mirror=mirror)

    def _skipped(self, ref: CommitRef, why: str) -> None:
        _log.error("commit_skipped", commit=str(ref), reason=why)
        self._context.post(CommitSkipped(ref))

    def _progress(self, download: Download) -> Listener:
        looked_mono_s = self._context.monotonic()

        def progress(done_bytes: int, total_bytes: int) -> None:
            nonlocal looked_mono_s
            download.done_bytes, download.total_bytes = done_bytes, total_bytes
            if self._context.monotonic() - looked_mono_s >= _LOOK_INTERVAL_S:
                looked_mono_s = self._context.monotonic()
                # Only bytes that flow need the link: a look for each window is enough.
                if self._stop.is_set() or self._is_useless(download) or not self._may_run(download):
                    download.halt.set()
            self.listener(done_bytes, total_bytes)

        return progress


def _is_there(download: Download) -> bool:
    return download.result is not None and download.result.path.is_dir()


def _opened_restored(run: RunDirectory) -> int:
    hint = "restart the daemon if it is missing, or let its user own the directory of the run"
    with explained(run.path / RESTORED_DIRECTORY, hint):
        return open_restored(run.fd)


def _remove(names: Sequence[str], parent_fd: int) -> None:
    for name in names:
        try:
            openat.remove_tree(name, dir_fd=parent_fd)
        except OSError as error:
            _log.warning("not_removed", directory=name, error=error.strerror)
