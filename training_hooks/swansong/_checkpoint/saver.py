# SPDX-License-Identifier: Apache-2.0
"""Takes this rank's checkpoints: copies the state between two steps, writes the copy behind the loop.

A state that cannot be copied is written in the training loop's own thread instead.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from swansong._checkpoint.staging import write_checkpoint
from swansong._ranks.agreement import Agreement, Due
from swansong.protocol import Failed, RankManifest, Sealed

COPIES = 2
"""So many copies of the state exist at most; a third save waits for the first to be written."""
COPY_PATIENCE_S = 60.0
"""Longest wait for that; the save has failed then."""
CLOSE_PATIENCE_S = 60.0
"""How long the end of the trainer waits for what is still being written."""
_HARMLESS = (KeyboardInterrupt, SystemExit, GeneratorExit)

log = logging.getLogger("swansong")


@dataclass
class _Save:
    agreement: Agreement
    staging: str
    nonce: str
    manifest: RankManifest
    request_ids: list[str]
    begun_mono_s: float
    snapshot_s: float = 0.0
    outcome: Sealed | Failed | None = None
    """None also when this rank's part is written and another rank will seal the set."""
    is_over: bool = False


@dataclass
class SaveCost:
    """What the last save cost.  Written here, read by whoever reports it."""

    save_s: float | None = None
    """From the step boundary until this rank's part was in staging."""
    snapshot_s: float | None = None
    """The part of it for which the training loop stood still."""
    size_bytes: int | None = None
    blocked_s: float = 0.0
    """How long all saves together have held up the training loop."""
    saved_mono_s: float = field(default_factory=time.monotonic)


class Saver:
    """Between the training loop, which takes copies, and one thread, which writes them in order.

    Args:
        take: copies the state and returns what writes the copy into a directory; or, if not
            ``in_background``, returns what writes the live state.  May use its last but one copy's
            memory again: that one is written, or given up, before ``take`` is called.
        in_background: whether the loop may go on before the state is written.
    """

    def __init__(
        self, take: Callable[[], Callable[[Path], object]], *, in_background: bool
    ) -> None:
        self.cost = SaveCost()
        self._take = take
        self._in_background = in_background
        self._changed = threading.Condition()
        self._last: _Save | None = None
        self._outstanding = 0
        self._queue: queue.SimpleQueue[tuple[_Save, Callable[[Path], object]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def save(
        self, agreement: Agreement, staging: str, nonce: str, due: Due, manifest: RankManifest
    ) -> bool:
        """Take a checkpoint of the state as it is now, and tell ``agreement`` what became of it.

        Returns:
            False when it failed already; True when it is in staging, or on its way there.
        """
        if self._is_there(agreement, staging, due, manifest.step):
            return True
        begun_mono_s = time.monotonic()
        ids = [due.request_id] if due.request_id else []
        save = _Save(agreement, staging, nonce, manifest, ids, begun_mono_s)
        try:
            self._wait_for_memory()
            write = self._take()
        except _HARMLESS:
            raise
        except BaseException as error:  # some frameworks' errors are no Exception
            self._fail(save, error)
        else:
            if self._in_background:
                self._put(save, write, due)
                return True
            self._write(save, write)
        save.is_over = True
        self._last = None if isinstance(save.outcome, Failed) else save
        self._blocked(save)
        agreement.done(due, manifest.step, save.outcome)
        return not isinstance(save.outcome, Failed)

    def wait(self, limit_s: float) -> bool:
        """Wait until all copies are written; whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: self._outstanding == 0, limit_s)

    def forget(self) -> None:
        """What was saved so far answers no request any more: training goes back to before it."""
        with self._changed:
            self._last = None

    def _is_there(self, agreement: Agreement, staging: str, due: Due, step: int) -> bool:
        # A set of that step that is in staging, or on its way there, answers the request.
        with self._changed:
            last = self._last
            if last is None or (last.staging, last.manifest.step) != (staging, step):
                return False
            answer = None
            if due.request_id and not last.is_over:
                last.request_ids.append(due.request_id)
            elif due.request_id and isinstance(last.outcome, Sealed):
                answer = dataclasses.replace(last.outcome, request_id=due.request_id)
            agreement.done(due, step, answer)
            return True

    def _wait_for_memory(self) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._outstanding < COPIES, COPY_PATIENCE_S):
                raise TimeoutError(
                    f"the last {COPIES} checkpoints are not written after {COPY_PATIENCE_S:.0f} s"
                )

    def _put(self, save: _Save, write: Callable[[Path], object], due: Due) -> None:
        with self._changed:
            self._last = save
            self._outstanding += 1
        self._blocked(save)
        save.agreement.done(due, save.manifest.step, None)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="swansong-save", daemon=True)
            self._thread.start()
        self._queue.put((save, write))

    def _blocked(self, save: _Save) -> None:
        self.cost.saved_mono_s = time.monotonic()
        save.snapshot_s = self.cost.saved_mono_s - save.begun_mono_s
        self.cost.snapshot_s = save.snapshot_s
        self.cost.blocked_s += save.snapshot_s

    def _run(self) -> None:
        while True:
            save, write = self._queue.get()
            self._write(save, write)
            with self._changed:
                save.is_over = True
                if isinstance(save.outcome, Failed) and self._last is save:
                    self._last = None
            for answer in _answers(save):
                save.agreement.report(answer)
            del write
            with self._changed:
                self._outstanding -= 1
                self._changed.notify_all()

    def _write(self, save: _Save, write: Callable[[Path], object]) -> None:
        manifest = save.manifest
        try:
            written = write_checkpoint(
                save.staging, save.nonce, manifest, write, durable=manifest.kind != "emergency"
            )
        except _HARMLESS:
            raise
        except BaseException as error:
            self._fail(save, error)
            return
        save_s = time.monotonic() - save.begun_mono_s
        self.cost.save_s, self.cost.size_bytes = save_s, written.size_bytes
        if written.is_sealed:
            save.outcome = Sealed(
                step=manifest.step,
                directory=written.directory,
                save_s=save_s,
                size_bytes=written.size_bytes,
                request_id=manifest.request_id,
            )

    def _fail(self, save: _Save, error: BaseException) -> None:
        step, reason = save.manifest.step, f"{type(error).__name__}: {error}"[:500]
        log.warning("the checkpoint of step %s in %s failed: %s", step, save.staging, reason)
        save.outcome = Failed(save.manifest.request_id, step, reason)


def _answers(save: _Save) -> list[Sealed | Failed]:
    """One for each request that waits for this save; one without a request id when none does."""
    outcome = save.outcome
    if outcome is None:
        return []
    if save.request_ids:
        return [dataclasses.replace(outcome, request_id=each) for each in save.request_ids]
    return [outcome]
