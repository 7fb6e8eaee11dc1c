# SPDX-License-Identifier: Apache-2.0
"""Prunes the run in the daemon, if ``retention.in_daemon`` is set; otherwise ``swansong prune`` does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import structlog
from swansong_bucket.config.sections import RetentionConfig
from swansong_bucket.errors import Stopped, SwansongError
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.retention.prune import PruneReport, prune
from swansong_bucket.util.threads import lasting_thread

from swansongd.flush.background import Background
from swansongd.observe.status import PruneStatus

_log = structlog.get_logger(__name__)


class Pruner:
    """Prunes at long intervals, in a thread of its own; a notice cancels a prune before its next request.

    Args:
        store: ends a prune when a notice arrives.
        may_prune: whether this VM is the one that prunes; asked before each prune.
        stop: ends the thread.
        first_s: time from the start of the daemon to the first prune.
        interval_s: time between two prunes.
        retry_s: the same after a failure or a notice.
    """

    def __init__(
        self,
        store: Background,
        keys: RunKeys,
        rules: RetentionConfig,
        *,
        may_prune: Callable[[], bool],
        stop: threading.Event,
        first_s: float = 600.0,
        interval_s: float = 6 * 3600.0,
        retry_s: float = 1800.0,
    ) -> None:
        self._store = store
        self._keys = keys
        self._rules = rules
        self._may_prune = may_prune
        self._stop = stop
        self._first_s = first_s
        self._interval_s = interval_s
        self._retry_s = retry_s
        self.figures = PruneStatus(commits=0, freed_bytes=0, failures=0)
        """Without the age; replaced after each prune."""
        self.succeeded_mono_s: float | None = None
        """When the last prune succeeded; None before the first."""

    def start(self) -> None:
        """Start the thread; returns immediately."""
        lasting_thread("pruner", self._run).start()

    def _run(self) -> None:
        wait_s = self._first_s
        while not self._stop.wait(wait_s):
            wait_s = self._interval_s
            if not self._may_prune():
                continue
            try:
                report = self.prune()
            except Stopped:
                wait_s = self._retry_s
            except SwansongError as error:
                wait_s = self._retry_s
                self._count_failure()
                _log.error("prune_failed", kind=error.kind, error=error.line())
            except Exception:
                wait_s = self._retry_s
                self._count_failure()
                _log.exception("prune_fault")
            else:
                self._count(report)
                _log.info(
                    "bucket_pruned",
                    objects=report.objects,
                    freed_bytes=report.freed_bytes,
                    kept_bytes=report.kept_bytes,
                    objects_not_deleted=report.remain_count,
                )

    def _count_failure(self) -> None:
        self.figures = replace(self.figures, failures=self.figures.failures + 1)

    def _count(self, report: PruneReport) -> None:
        before, self.succeeded_mono_s = self.figures, time.monotonic()
        self.figures = replace(
            before,
            commits=before.commits + sum(each.goes for each in report.decisions),
            freed_bytes=before.freed_bytes + report.freed_bytes,
            kept_bytes=report.kept_bytes,
        )

    def prune(self) -> PruneReport:
        """Prune once.

        Raises:
            Stopped: the daemon stops, or an evacuation began.
            SwansongError: see :func:`swansong_bucket.retention.prune.prune`.
        """
        return prune(self._store, self._keys, self._rules, now_wall_s=time.time(), stop=self._stop)
