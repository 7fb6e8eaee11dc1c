# SPDX-License-Identifier: Apache-2.0
"""Fetches the newest whole commit before a trainer asks, and each newer one until a start begins here.

:mod:`swansongd.core.resume` has the rules when there is nothing to fetch, and when newer commits count.
A trainer that asks gets the finished directory, or joins the download, see
:mod:`swansongd.restore.downloads`.  The thread ends with the first answer to a trainer, or once training has
begun without one.  It then deletes what no trainer got.

The prefetch only reads the bucket.  It therefore needs no generation, and begins before the claim.

Over several VMs the daemon does not know yet which shards its ranks will read.  It fetches those of the ranks
that this VM had, and then all others if there is room.
"""

from __future__ import annotations

import threading
from dataclasses import replace

import structlog
from swansong_bucket.errors import Stopped, StoreError, SwansongError
from swansong_bucket.model import CommitRef
from swansong_bucket.runs import commit
from swansong_bucket.transfer.target import NoRoom
from swansong_bucket.util.threads import lasting_thread

from swansongd.core import resume
from swansongd.observe.status import PrefetchState, PrefetchStatus
from swansongd.restore.context import RestoreContext
from swansongd.restore.downloads import Downloads
from swansongd.restore.wish import Download, Wish
from swansongd.staging.prepare import explained
from swansongd.util.unix import SHORT_OF_RESOURCES

_LOOK_INTERVAL_S = 0.2
_LIST_S_FIRST = 2.0
"""Between listings while another VM may commit: less than a rendezvous of torchrun takes ..."""
_LIST_S_MAX = 15.0
"""... and, doubled after each listing without news, at most this: a day costs 6,000 listings."""
_RETRY_S_FIRST = 0.5
_RETRY_S_MAX = 15.0
NO_ROOM_FOR_ALL = "staging has no room for the shards of all VMs"
"""The reason in the status.  It is no failure: the ranks may read the shards of one VM only."""

_log = structlog.get_logger(__name__)


class Prefetch:
    """Fetches the newest whole commit in a thread.

    Args:
        context: of the run.
        downloads: fetches, and knows the finished directory.
        is_enabled: False: there is no prefetch.
    """

    def __init__(
        self, context: RestoreContext, downloads: Downloads, *, is_enabled: bool = True
    ) -> None:
        self._context = context
        self._downloads = downloads
        self._state = context.state
        self._stop = context.stop
        self._listed_mono_s: float | None = None
        """When the newest listing began."""
        self._list_s = _LIST_S_FIRST
        self._newest: CommitRef | None = None
        self._fetched: Download | None = None
        """The newest finished download."""
        self._done: CommitRef | None = None
        """The commit that needs no further attempt."""
        self._is_answered = threading.Event()
        self._shown = (PrefetchState.WAITING if is_enabled else PrefetchState.OFF, "")

    def start(self) -> None:
        """Start the thread.  Returns immediately."""
        if self._shown[0] is not PrefetchState.OFF:
            lasting_thread("prefetch", self._run).start()

    def answered(self) -> None:
        """A trainer got its answer: the prefetch ends."""
        self._is_answered.set()

    def status(self) -> PrefetchStatus:
        state, reason = self._shown
        running = self._downloads.current
        if state is PrefetchState.FETCHING and running is not None and running.is_paused:
            state, reason = PrefetchState.WAITING, "an evacuation is open"
        reason = reason or resume.why_waiting(self._state(), self._context.monotonic())
        shown = running or self._fetched
        ref = self._newest if shown is None or shown.ref is None else shown.ref
        parts = [] if shown is None else _with_base(shown)
        return PrefetchStatus(
            state=state,
            reason=reason,
            generation=None if ref is None else ref.generation,
            step=None if ref is None else ref.step,
            bytes_done=sum(part.done_bytes for part in parts),
            bytes_total=sum(part.total_bytes for part in parts),
        )

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        retry_s = _RETRY_S_FIRST
        while not self._stop.is_set():
            wait_s = _LOOK_INTERVAL_S
            is_over = self._is_over()
            try:
                with explained(self._context.run.path, "check the disk of staging"):
                    if is_over:
                        self._downloads.remove_unasked()
                        return
                    self._fetch_newest()
                retry_s = _RETRY_S_FIRST
            except Stopped:
                pass  # the daemon stops, a trainer wants another commit, or the prefetch is over
            except StoreError as error:
                self._show(PrefetchState.WAITING, error.line())
                wait_s, retry_s = retry_s, min(2 * retry_s, _RETRY_S_MAX)
            except SwansongError as error:
                if is_over:
                    _log.warning("prefetch_not_removed", reason=error.line())
                else:
                    self._show(PrefetchState.FAILED, error.line())
                    cause = error.__cause__
                    if not isinstance(cause, OSError) or cause.errno not in SHORT_OF_RESOURCES:
                        return  # a trainer that asks gets the same error, or finds more room
                wait_s, retry_s = retry_s, min(2 * retry_s, _RETRY_S_MAX)
            except Exception as error:
                _log.exception("prefetch_fault")
                self._show(PrefetchState.FAILED, f"{type(error).__name__}: {error}")
                return
            self._stop.wait(wait_s)

    def _is_over(self) -> bool:
        """Whether no trainer needs the prefetch any more."""
        if self._stop.is_set():
            return True
        if self._is_answered.is_set():
            self._show(PrefetchState.ANSWERED)
            return True
        if self._listed_mono_s is None:
            return False
        reason = resume.why_no_prefetch(self._state(), self._newest)
        if reason:
            self._show(PrefetchState.NOT_NEEDED, reason)
        return bool(reason)

    def _fetch_newest(self) -> None:
        state, now_mono_s = self._state(), self._context.monotonic()
        is_due = self._listed_mono_s is None or (
            resume.may_follow(state) and now_mono_s >= self._listed_mono_s + self._list_s
        )
        if is_due:
            # Without retries: this thread repeats the listing itself.
            near = (state.generation or 0) if self._newest is None else self._newest.generation
            found = commit.newest_whole_commit(self._context.store, self._context.keys, near=near)
            is_news = found != self._newest
            self._list_s = _LIST_S_FIRST if is_news else min(2 * self._list_s, _LIST_S_MAX)
            self._newest, self._listed_mono_s = found, now_mono_s
            state = self._state()
        self._newest = resume.newest_known(state, self._newest)
        if self._newest is None or state.staging.first_scan_mono_s is None or self._is_over():
            return
        if self._done == self._newest:
            return
        self._show(PrefetchState.FETCHING)
        began_mono_s = self._context.monotonic()
        own = self._downloads.own_prefixes()
        wish = Wish(ref=self._newest, is_prefetch=True, is_over=self._is_over)
        fetched = self._downloads.fetch(replace(wish, prefixes=own)) if own else None
        reason = ""
        try:
            fetched = self._downloads.fetch(wish)
        except NoRoom as error:
            if fetched is None and self._fetched is not None:
                self._fetched = None  # it takes room, and no trainer will get it
                self._downloads.remove_unasked()
                return
            if fetched is None and not error.has_other_vms:
                raise
            reason = NO_ROOM_FOR_ALL
        self._done = self._newest
        if fetched is None:
            self._show(PrefetchState.WAITING, reason)
            return
        self._fetched = fetched
        self._show(PrefetchState.READY, reason)
        results = [part.result for part in _with_base(fetched) if part.result is not None]
        _log.info(
            "prefetched",
            generation=results[0].ref.generation,
            step=results[0].ref.step,
            size_bytes=sum(result.size_bytes for result in results),
            reused_bytes=sum(result.reused_bytes for result in results),
            local_bytes=sum(result.local_bytes for result in results),
            seconds=round(self._context.monotonic() - began_mono_s, 3),
        )

    def _show(self, state: PrefetchState, reason: str = "") -> None:
        before, self._shown = self._shown, (state, reason)
        if before == self._shown:
            return
        if state is PrefetchState.FAILED:
            _log.warning("prefetch_failed", reason=reason)
        elif state is not PrefetchState.READY:
            newest = None if self._newest is None else str(self._newest)
            _log.info("prefetch", state=state.value, reason=reason, newest=newest)


def _with_base(download: Download) -> list[Download]:
    """The download, and those whose directory it has extended."""
    found = [download]
    while (base := found[-1].base) is not None:
        found.append(base)
    return found
