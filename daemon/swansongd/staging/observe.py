# SPDX-License-Identifier: Apache-2.0
"""Watches the staging directory of a run: inotify triggers a scan, and there is a periodic scan as well.

inotify can lose events silently, and its instances are limited, so only the latency depends on inotify.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from swansong_bucket.util.threads import lasting_thread

from swansongd.core.events import Event, Scanned
from swansongd.staging.seal import Scanner

CLOSE_TIMEOUT_S = 1.0
_GAP_MIN_S = 0.02
_INTERVAL_MIN_S = 0.05


class StagingObserver:
    """Scans in a thread, and posts Scanned after a change or on request.

    Args:
        scanner: does the scan.
        post: takes the events.
        log: a structlog logger.
        interval_s: interval of the periodic scans.
        before: called before each result is posted: who wrote the sets must be known first.
        replaced: called after each scan while the path leads to another directory than the open one.
    """

    def __init__(
        self,
        scanner: Scanner,
        post: Callable[[Event], None],
        log: Any,
        *,
        interval_s: float = 1.0,
        before: Callable[[], object] = lambda: None,
        replaced: Callable[[], object] = lambda: None,
    ) -> None:
        self._scanner = scanner
        self._post = post
        self._log = log
        self._interval_s = interval_s
        self._before = before
        self._replaced = replaced
        self._wake = threading.Event()
        self._requested = threading.Event()
        self._stop = threading.Event()
        self._last: Scanned | None = None
        self._trouble = ""
        self._is_replaced = False
        self._thread = lasting_thread("staging-observer", self._run)

    def start(self) -> None:
        """Start the thread, which begins with a scan."""
        self._thread.start()

    def rescan(self) -> None:
        """Post the result of a scan that begins after this call, even without a change."""
        self._requested.set()
        self._wake.set()

    def close(self) -> None:
        """End the thread; a thread that hangs on a broken file system is abandoned."""
        self._stop.set()
        self._wake.set()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        self._scan()  # before the watch: a trainer may wait for the result
        observer = self._watch()
        try:
            while not self._stop.is_set():
                self._wake.clear()
                began_mono_s = time.monotonic()
                self._scan()
                # Even with permanent changes, scans take at most half of the time.
                self._stop.wait(max(_GAP_MIN_S, time.monotonic() - began_mono_s))
                self._wake.wait(self._pause_s())
        finally:
            if observer is not None:
                observer.stop()
                observer.join(CLOSE_TIMEOUT_S)

    def _pause_s(self) -> float:
        if not self._scanner.is_settling:
            return self._interval_s
        return min(self._interval_s, max(_INTERVAL_MIN_S, self._scanner.settle_s / 4))

    def _scan(self) -> None:
        # Read before the scan begins: a request during this scan gets the next one.
        is_requested = self._requested.is_set()
        if is_requested:
            self._requested.clear()
        try:
            scanned = self._scanner.scan()
        except Exception as error:  # the thread must survive any state of the disk
            if is_requested:
                self._requested.set()
            if str(error) != self._trouble:
                self._trouble = str(error)
                self._log.error("staging_scan_failed", error=self._trouble)
            return
        self._trouble = ""
        was_replaced, self._is_replaced = self._is_replaced, self._scanner.is_replaced
        if self._is_replaced and not was_replaced:
            self._log.error("staging_replaced", directory=str(self._scanner.run_directory))
        if self._is_replaced:
            self._replaced()
        if is_requested or self._last is None or _content(scanned) != _content(self._last):
            known = () if self._last is None else self._last.rejected
            for directory, reason in scanned.rejected:
                if (directory, reason) not in known:
                    self._log.error("sealed_set_rejected", directory=directory, reason=reason)
            self._last = scanned
            self._before()
            self._post(scanned)

    def _watch(self) -> Any:
        try:
            return self._started_watch()
        except Exception as error:  # any failure: the periodic scan is enough
            self._log.warning("staging_watch_failed", error=str(error), fallback="periodic scan")
            return None

    def _started_watch(self) -> Any:
        # Slow to import, and a start must not wait for it.
        from watchdog import events  # noqa: PLC0415
        from watchdog.observers import Observer  # noqa: PLC0415

        # Without opening and reading, which the daemon itself does.
        kinds = [
            events.DirCreatedEvent,
            events.DirDeletedEvent,
            events.DirMovedEvent,
            events.FileClosedEvent,
            events.FileDeletedEvent,
            events.FileMovedEvent,
        ]
        handler = events.FileSystemEventHandler()
        handler.on_any_event = lambda _: self._wake.set()
        observer = Observer()
        # Not recursive: a seal is a rename in this directory, and adopted sets must settle anyway.
        observer.schedule(
            handler, str(self._scanner.run_directory), recursive=False, event_filter=kinds
        )
        observer.start()
        return observer


def _content(scanned: Scanned) -> tuple[object, ...]:
    return scanned.staged, scanned.pending, scanned.growing, scanned.rejected
