# SPDX-License-Identifier: Apache-2.0
"""Takes this rank's checkpoints: copies the state between two steps, and writes the copy in the background.

A state that cannot be copied is written in the thread of the training loop instead.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from swansong._checkpoint.staging import write_checkpoint
from swansong._log import log
from swansong._ranks.agreement import Agreement
from swansong.layout import RankManifest
from swansong.protocol import Failed, Sealed

COPIES = 2
"""Largest number of copies of the state.  A third save waits until the first copy is written."""
COPY_PATIENCE_S = 60.0
"""Longest wait for a free copy, after which the save fails."""
CLOSE_PATIENCE_S = 60.0
"""Longest wait of a trainer that ends for its copies to be written."""
_HARMLESS = (KeyboardInterrupt, SystemExit, GeneratorExit)


@dataclass
class _Save:
    agreement: Agreement
    staging: str
    nonce: str
    manifest: RankManifest
    begun_mono_s: float = field(default_factory=time.monotonic)
    more_requests: list[str] = field(default_factory=list)
    """Ids of further requests that this save answers."""
    outcome: Sealed | Failed | None = None
    """None until the save is over, and also if another rank will seal the set."""
    is_over: bool = False

    def taken(self, answer: Sealed | Failed | None) -> None:
        """Record in the agreement that the checkpoint is taken; see :meth:`Agreement.done`."""
        manifest = self.manifest
        self.agreement.done(manifest.request_id, manifest.step, answer)


@dataclass
class SaveCost:
    """Time and size of the last save."""

    save_s: float | None = None
    """Time from the step boundary until this rank's part was in staging."""
    snapshot_s: float | None = None
    """Time for which that save blocked the training loop."""
    size_bytes: int | None = None
    blocked_s: float = 0.0
    """Time for which all saves together have blocked the training loop."""
    saved_mono_s: float = field(default_factory=time.monotonic)


class Saver:
    """Copies in the thread of the training loop, and writes the copies, in order, in another thread.

    Args:
        take: copies the state and returns a function that writes the copy into a directory.  It may reuse the
            memory of a copy whose function does not exist any more; there are at most COPIES functions at a
            time.  Without ``in_background`` the returned function writes the live state.
        in_background: whether training may continue before the state is written.
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

    def save(self, agreement: Agreement, staging: str, nonce: str, manifest: RankManifest) -> bool:
        """Take a checkpoint of the current state, and report the result to ``agreement``.

        Args:
            agreement: of this rank.
            staging: staging directory of the run.
            nonce: for the name of the set, the same for all ranks that save it.
            manifest: all of the rank manifest but ``files``.

        Returns:
            True if this rank's part is in staging or copied; False if the save failed.
        """
        save = _Save(agreement, staging, nonce, manifest)
        if self._is_saved(save):
            return True
        try:
            self._wait_for_memory()
            write = self._take()
        except _HARMLESS:
            raise
        except BaseException as error:  # some frameworks raise errors that are not an Exception
            self._fail(save, error)
        else:
            if self._in_background:
                self._put(save, write)
                return True
            self._write(save, write)
        save.is_over = True
        self._last = None if isinstance(save.outcome, Failed) else save
        self._blocked(save)
        save.taken(save.outcome)
        return not isinstance(save.outcome, Failed)

    def wait(self, limit_s: float) -> bool:
        """Wait until all copies are written; returns False if the limit passed first."""
        with self._changed:
            return self._changed.wait_for(lambda: self._outstanding == 0, limit_s)

    @property
    def has_saved(self) -> bool:
        """Whether the last save did not fail."""
        with self._changed:
            return self._last is not None

    def _is_saved(self, save: _Save) -> bool:
        # A set of the same step that is in staging, or being written, answers the request.
        new, request_id = save.manifest, save.manifest.request_id
        with self._changed:
            last = self._last
            if last is None or last.staging != save.staging:
                return False
            if (last.manifest.step, last.manifest.start_id) != (new.step, new.start_id):
                return False  # a step that is trained again gives another state than the first time
            if new.kind == "final" and last.manifest.kind != "final":
                return False  # only a set of this kind marks the end of the run
            answer = None
            if request_id and not last.is_over:
                last.more_requests.append(request_id)
            elif request_id and isinstance(last.outcome, Sealed):
                answer = dataclasses.replace(last.outcome, request_id=request_id)
            save.taken(answer)
            return True

    def _wait_for_memory(self) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._outstanding < COPIES, COPY_PATIENCE_S):
                raise TimeoutError(
                    f"the last {COPIES} checkpoints are not written after {COPY_PATIENCE_S:.0f} s"
                )

    def _put(self, save: _Save, write: Callable[[Path], object]) -> None:
        with self._changed:
            self._last = save
            self._outstanding += 1
        self._blocked(save)
        save.taken(None)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="swansong-save", daemon=True)
            self._thread.start()
        self._queue.put((save, write))

    def _blocked(self, save: _Save) -> None:
        self.cost.saved_mono_s = time.monotonic()
        self.cost.snapshot_s = self.cost.saved_mono_s - save.begun_mono_s
        self.cost.blocked_s += self.cost.snapshot_s

    def _run(self) -> None:
        while True:
            save, write = self._queue.get()
            self._write(save, write)
            with self._changed:
                save.is_over = True
                if isinstance(save.outcome, Failed) and self._last is save:
                    self._last = None
            if save.outcome is not None:
                ids = filter(None, (save.manifest.request_id, *save.more_requests))
                for request_id in list(ids) or [""]:
                    save.agreement.report(dataclasses.replace(save.outcome, request_id=request_id))
            del write
            with self._changed:
                self._outstanding -= 1
                self._changed.notify_all()

    def _write(self, save: _Save, write: Callable[[Path], object]) -> None:
        manifest = save.manifest
        try:
            written = write_checkpoint(save.staging, save.nonce, manifest, write)
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
