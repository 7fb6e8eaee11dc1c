# SPDX-License-Identifier: Apache-2.0
"""Writes the resumption of a generation to the store, in a thread of its own.

The record is informational.  It waits for the verdict of an open evacuation, so that it takes no connection
and no processor time from a commit, and it is dropped once another VM has taken the run over.  When the
daemon ends, it is written without any wait.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import structlog
from swansong_bucket.errors import Exists, SwansongError
from swansong_bucket.format import resumption as resumptions
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.loss_records import Resumption, ended_by, lost_gpu_s
from swansong_bucket.runs import lives
from swansong_bucket.stores.base import ObjectStore
from swansong_bucket.util.threads import Worker

from swansongd.observe.accounting import MeasuredResume
from swansongd.observe.snapshot import LossFigures
from swansongd.util import boot

YIELD_S = 20.0
"""A VM that has trained before waits this long: a VM that was booted for this start has more to record."""
RETRY_S = 5.0
RETRY_S_MAX = 300.0
RETRIES_MAX = 20
RECORDS_MAX = 8
_URGENT_S = 1.0

_log = structlog.get_logger(__name__)


class Ledger:
    """Records resumes, each once.

    Args:
        store: retries failed requests.
        keys: of the run.
        is_urgent: whether an evacuation has no verdict yet.
        is_fenced: whether another VM has taken the run over.
        wall_s: wall clock in seconds since 1970.
        yield_s: see YIELD_S.
    """

    def __init__(
        self,
        store: ObjectStore,
        keys: RunKeys,
        *,
        is_urgent: Callable[[], bool],
        is_fenced: Callable[[], bool],
        wall_s: Callable[[], float] = time.time,
        yield_s: float = YIELD_S,
    ) -> None:
        self._store = store
        self._keys = keys
        self._is_urgent = is_urgent
        self._is_fenced = is_fenced
        self._is_ending = threading.Event()
        self._wall_s = wall_s
        self._yield_s = yield_s
        self._has_trained = False
        self.figures = LossFigures()
        """Replaced after each record."""
        self._worker = Worker("ledger", tasks_max=RECORDS_MAX)

    def start(self) -> None:
        """Start the thread."""
        self._worker.start()

    def record(self, measured: MeasuredResume, *, vm: str, daemon_mono_s: float) -> None:
        """Write the record as soon as nothing more important is in progress.  Returns immediately.

        Args:
            vm: identifies this VM and its boot.
            daemon_mono_s: when the daemon started.
        """
        resumption = self._resumption(measured, vm, daemon_mono_s)
        wait_s = self._yield_s if self._has_trained and resumption.nodes > 1 else 0.0
        self._has_trained = True
        if not self._worker.submit(partial(self._write, resumption, wait_s)):
            _log.warning("resumption_not_recorded", reason="too many records wait")

    def finish(self, limit_s: float) -> None:
        """The daemon ends: make one attempt for each record that waits, and block at most this long."""
        self._is_ending.set()
        done = threading.Event()
        if not self._worker.submit(done.set) or not done.wait(limit_s):
            _log.warning(
                "resumption_not_recorded", reason="the daemon ends before the store answers"
            )

    def _resumption(self, measured: MeasuredResume, vm: str, daemon_mono_s: float) -> Resumption:
        """All times by one reading of the wall clock: it may have been set since the boot."""
        made, training = measured.milestones, measured.training
        offset_s = self._wall_s() - time.monotonic()

        def perhaps(mono_s: float | None) -> float | None:
            return None if mono_s is None else mono_s + offset_s

        assert made.started_mono_s is not None
        assert made.first_step_mono_s is not None
        return Resumption(
            run=self._keys.run,
            generation=measured.generation,
            vm=vm,
            ranks=training.ranks,
            node=training.node,
            nodes=training.nodes,
            booted_wall_s=self._wall_s() - boot.boottime_s(),
            daemon_wall_s=daemon_mono_s + offset_s,
            download_began_wall_s=perhaps(made.download_began_mono_s),
            download_ended_wall_s=perhaps(made.download_ended_mono_s),
            bytes_fetched=made.bytes_fetched,
            bytes_linked=made.bytes_linked,
            asked_wall_s=perhaps(made.asked_mono_s),
            answered_wall_s=perhaps(made.answered_mono_s),
            started_wall_s=made.started_mono_s + offset_s,
            first_step_wall_s=made.first_step_mono_s + offset_s,
            start_step=made.start_step,
            first_step=made.first_step,
            restored=made.restored,
            earlier=None,
        )

    def _write(self, resumption: Resumption, wait_s: float) -> None:
        for _ in range(RETRIES_MAX):
            is_last = self._is_ending.wait(wait_s)
            if not self._is_quiet():
                return
            try:
                self._put(resumption)
            except Exists:
                return  # another VM of the job, or an earlier life of this daemon
            except SwansongError as error:
                if is_last:
                    _log.warning("resumption_not_recorded", reason=error.line())
                    return
                _log.info("resumption_delayed", reason=error.line())
                wait_s = min(max(RETRY_S, 2 * wait_s), RETRY_S_MAX)
            else:
                return
        _log.warning("resumption_not_recorded", reason=f"the store failed {RETRIES_MAX} times")

    def _is_quiet(self) -> bool:
        """Wait for the end of an evacuation, or of the daemon; False if the daemon is fenced."""
        while self._is_urgent() and not self._is_fenced() and not self._is_ending.wait(_URGENT_S):
            pass
        return not self._is_fenced()

    def _put(self, resumption: Resumption) -> None:
        earlier = lives.earlier_ending(
            self._store,
            self._keys,
            resumption.generation,
            ended_by_s=ended_by(resumption),
        )
        resumption = replace(resumption, earlier=earlier)
        data = resumptions.encode(resumption)
        resumptions.decode(data)  # fails before a record that no reader would accept
        self._store.put(self._keys.resumption(resumption.generation), data, if_absent=True)
        self._count(resumption)
        _log.info(
            "resumption_recorded",
            generation=resumption.generation,
            start_step=resumption.start_step,
            first_step=resumption.first_step,
        )

    def _count(self, resumption: Resumption) -> None:
        before, lost = self.figures, lost_gpu_s(resumption)
        self.figures = LossFigures(
            resumptions=before.resumptions + 1,
            gpu_s={part: before.gpu_s.get(part, 0.0) + gpu_s for part, gpu_s in lost.items()},
        )
