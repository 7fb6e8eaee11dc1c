# SPDX-License-Identifier: Apache-2.0
"""What a training script uses: :func:`attach` once, :meth:`Guard.step` once per optimizer step.

The state is copied, or written if it cannot be copied, in the thread that calls :meth:`Guard.step`,
between two steps, where it is whole.  A background thread listens to the daemon and answers it at once.
Nothing here raises into the training loop except :class:`RestoreError`, and wrong arguments to
:func:`attach`.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import math
import os
import secrets
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from swansong._checkpoint.health import LossMonitor
from swansong._checkpoint.restore import RestoreError, load_checkpoint
from swansong._checkpoint.saver import CLOSE_PATIENCE_S, Saver
from swansong._daemon.progress import PauseWatch, Reporter
from swansong._daemon.session import DaemonSession
from swansong._ranks.agreement import CheckpointRequest, Due, Ranks
from swansong._ranks.job_store import warn_about_shared_store
from swansong.protocol import Committed, RankManifest, Restored
from swansong.state import Snapshots, state_of

RESTORE_ENV = "SWANSONG_RESTORE"
"""Environment variable that names a directory to restore from, whatever the daemon says."""
KINDS = ("periodic", "emergency", "final")
EXIT_SAVED = 75
"""Exit code for a trainer that ends because :attr:`Guard.should_stop` says so: saved, start me again
elsewhere.  The code that sysexits.h calls a temporary failure; torchrun and schedulers see no success."""


log = logging.getLogger("swansong")


def attach(
    state: Mapping[str, Any] | Snapshots | None = None,
    *,
    run: str = "",
    save: Callable[[Path], object] | None = None,
    load: Callable[[Path], object] | None = None,
    every_steps: int | None = None,
    every_s: float | None = None,
    socket: str | os.PathLike[str] | None = None,
    stop_after_save: bool = False,
) -> Guard:
    """Connect this process to the daemon of its VM.  Without one, everything below does nothing.

    Args:
        state: what a checkpoint holds: by name, objects with ``state_dict()`` and
            ``load_state_dict()``, or numpy Generators.  The global generators of ``random`` and
            numpy are saved along with them.  Or a ``swansong.torch.TrainingState``.
        run: name of the run; empty takes the daemon's.
        save: instead of ``state``: writes the state of this rank into the directory given.
        load: reads what ``save`` wrote.
        every_steps: take a periodic checkpoint at each multiple of this step.
        every_s: take one when so many seconds have passed since the last; for one rank only, since
            several could not agree when that is.  With neither, the daemon asks for periodic
            checkpoints, at the interval of its configuration.
        socket: where the daemon listens; else ``SWANSONG_SOCKET``, else the usual place.
        stop_after_save: let :attr:`Guard.should_stop` ask for an end after an emergency checkpoint;
            the trainer then closes the guard and exits with :data:`EXIT_SAVED`.

    Raises:
        ValueError, TypeError: the arguments, or torchrun's environment variables, make no sense.
    """
    if (every_steps is not None and every_steps < 1) or (every_s is not None and every_s <= 0):
        raise ValueError("every_steps= and every_s= are positive")
    ranks = Ranks.from_environment()
    warn_about_shared_store(ranks)
    if every_s is not None and ranks.world_size > 1:
        raise ValueError("several ranks cannot agree on every_s=; use every_steps=")
    return Guard(
        ranks=ranks,
        run=run,
        state=state_of(state, save, load),
        every_steps=every_steps,
        every_s=every_s,
        socket=socket,
        stop_after_save=stop_after_save,
    )


class Guard:
    """The trainer's side of Swansong, made by :func:`attach`.  Also a context manager."""

    def __init__(
        self,
        *,
        ranks: Ranks,
        run: str,
        state: Snapshots,
        every_steps: int | None,
        every_s: float | None,
        socket: str | os.PathLike[str] | None,
        stop_after_save: bool,
    ) -> None:
        self._ranks = ranks
        self._state = state
        self._saver = Saver(state.snapshot, in_background=state.in_background)
        self._every_s = every_s
        self._stop_after_save = stop_after_save
        self._health = LossMonitor()
        self._critical_depth = 0
        self._owes_save = False
        self._should_stop = False
        self._rollbacks = 0
        self._polls = 0
        self._closed = False
        self._session = DaemonSession(
            ranks,
            run=run,
            every_steps=every_steps,
            plans_periodic=every_steps is not None or every_s is not None,
            socket=socket,
            tick=self._tick,
        )
        self._agreement = self._session.agreement
        self._reporter = Reporter(self._session.channel.send)
        self._pauses = PauseWatch()
        self._session.channel.start()
        _guards.add(self)
        atexit.register(self._end, "exit")

    # ------------------------------------------------------------ the training loop

    def step(self, step: int | None = None, loss: Any = None, **metrics: Any) -> None:
        """Say that ``step`` optimizer steps are complete; saves here when a checkpoint is due.

        Call it once after each optimizer step, with the whole state as of that step: with gradient
        accumulation not once for each micro-batch.  When a request is under way it waits, at most 5 s
        or a tenth of the time left, for the ranks to agree.

        Args:
            step: how many; else they are counted, from where :meth:`restore` went on.
            loss: of that step, for the manifest and :attr:`healthy`; a plain number is looked at right
                here, anything else (a tensor, for which to wait) when a checkpoint is taken.
            metrics: more of the kind, by name.
        """
        agreement = self._agreement
        if step is None:
            step = max(0, agreement.step) + 1
        if agreement.step < 0:
            self._started(max(0, int(step) - 1))  # nothing was restored
        health = self._health
        health.loss = loss
        health.metrics = metrics
        agreement.step = step
        # What is not finite, less itself, is NaN: the cheapest way to ask, and this is asked at every step.
        if isinstance(loss, float) and (loss - loss != 0.0 or health.unhealthy_since is not None):
            health.judge(step, is_finite=math.isfinite(loss))
        if step >= agreement.attend_at:
            self._boundary(int(step))

    def poll(self) -> CheckpointRequest | None:
        """The request that is under way, if any: for evaluation, warm-up and other long pauses.

        Call it only where the state is still that of the last completed step.  A lone rank then saves
        right here; with several ranks, leave the pause early, so that the next step comes soon.
        """
        self._polls += 1
        step = int(self._agreement.step)
        due = self._agreement.between_steps() if step >= 0 else None
        if due is not None:
            self._write_when_whole(due, step)
        return self._agreement.current

    def save(self, step: int, kind: str = "periodic") -> bool:
        """Save now.  ``step`` is the number of completed steps, ``kind`` one of :data:`KINDS`.

        Returns:
            Whether this rank's part is in staging, or copied and on its way there (see
            :meth:`wait_saved`); False also without a daemon.
        """
        if kind not in KINDS:
            raise ValueError(f"kind={kind!r} is none of {KINDS}")
        return self._write(Due(kind), int(step))

    def wait_saved(self, limit_s: float = CLOSE_PATIENCE_S) -> bool:
        """Wait until all that was copied is in staging; whether it is.  :meth:`close` does so too."""
        return self._saver.wait(limit_s)

    @contextlib.contextmanager
    def critical(self) -> Iterator[None]:
        """While inside, the state is torn and nothing is saved; what is due is saved on leaving.

        With several ranks, leave it in the step in which it was entered.
        """
        self._critical_depth += 1
        try:
            yield
        finally:
            self._critical_depth -= 1
        if self._owes_save and self._critical_depth == 0:
            self._owes_save = False
            self._boundary(int(self._agreement.step))

    def restore(self, from_directory: str | os.PathLike[str] | None = None) -> int:
        """Load the newest whole checkpoint of the run.  Call it once, before the first step.

        Args:
            from_directory: load this one; the environment variable ``SWANSONG_RESTORE`` goes before.

        Returns:
            Number of completed steps; 0 for a fresh run, or without a daemon.

        Raises:
            RestoreError: there is a checkpoint but it cannot be fetched or loaded, or the daemon refuses this
                process.  The state may be half loaded: end the process.
        """
        chosen = os.environ.get(RESTORE_ENV) or from_directory
        step = 0
        if chosen is not None:
            step = load_checkpoint(os.fspath(chosen), self._ranks, self._state)
        elif not self._closed and self._session.channel.is_connected():
            answer = self._session.restore.find_newest()
            if answer.path:
                step = self._load(answer)
        elif self._session.refusal:
            # There may be a checkpoint, and another process that trains on from it.
            raise RestoreError(f"the daemon refuses this process: {self._session.refusal}")
        elif not self._closed and self._session.rendezvous is not None:
            self._session.rendezvous.announce_absence()
        self._agreement.step = step
        self._started(step)
        self._agreement.plan_periodic(step)
        self._saver.cost.saved_mono_s = time.monotonic()
        return step

    def rollback(self) -> int:
        """Go back, in this process, to the newest checkpoint whose loss was finite, and so was the next.

        What was saved after it counts no more: the run goes on under a new generation.  With several
        ranks all of them call it after the same step: give :meth:`step` a loss that they have in
        common, such as the mean over all ranks.

        Returns:
            Number of completed steps, from which the loop goes on.

        Raises:
            RestoreError: there is no such checkpoint, no daemon, the ranks of the other VMs do not come
                along, or it cannot be loaded.  In the last case the state may be half loaded: end
                the process.
        """
        at_step = int(self._agreement.step)
        if self._closed or not self._session.channel.is_connected():
            raise RestoreError("there is no daemon to ask for a healthy checkpoint")
        if not self._saver.wait(CLOSE_PATIENCE_S):
            raise RestoreError("the last checkpoint is still being written")
        self._rollbacks += 1
        answer = self._session.restore.find_healthy(
            number=self._rollbacks,
            at_step=at_step,
            before_step=self._health.suspect_from(at_step),
        )
        step = self._load(answer)
        log.warning("went back from step %s to step %s", at_step, step)
        # A set of a step that is done anew is another one than that of the first time.
        self._saver.forget()
        restart_id = f"{self._ranks.restart_id}~{self._rollbacks}"
        self._ranks = dataclasses.replace(self._ranks, restart_id=restart_id)
        self._health.reset()
        self._agreement.step = step
        self._started(step)
        self._saver.cost.saved_mono_s = time.monotonic()
        self._session.rolled_back(self._ranks)
        return step

    def close(self, *, final: bool = False) -> None:
        """Take leave of the daemon, which finishes alone what is in staging.

        Args:
            final: save the state of the last step first.
        """
        if not self._closed:
            self.poll()
            if final and self._agreement.step >= 0:
                self.save(int(self._agreement.step), "final")
        self._end("finished")

    def __enter__(self) -> Guard:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:  # the state may be torn: save nothing
            self._end(kind.__name__)

    @property
    def request(self) -> CheckpointRequest | None:
        """The checkpoint request that is under way."""
        return self._agreement.current

    @property
    def should_stop(self) -> bool:
        """True after an emergency checkpoint if ``stop_after_save`` was given."""
        return self._should_stop

    @property
    def healthy(self) -> bool:
        """Whether the loss of the last step is finite, or not known; a tensor is waited for here."""
        return self._health.evaluate(int(self._agreement.step)).get("loss_is_finite") != 0.0

    @property
    def fenced(self) -> bool:
        """Another VM has taken the run over: nothing from here will be committed any more."""
        return self._session.is_fenced

    @property
    def last_committed(self) -> Committed | None:
        """Generation and step of the newest checkpoint known to be in the object store."""
        return self._session.last_committed

    # ------------------------------------------------------------ saving

    def _boundary(self, step: int) -> None:
        due = self._agreement.decide(step)
        if due is not None:
            self._write_when_whole(due, step)

    def _write_when_whole(self, due: Due, step: int) -> None:
        if self._critical_depth:
            self._owes_save = True
        else:
            self._write(due, step)

    def _write(self, due: Due, step: int) -> bool:
        staging = self._session.staging
        if staging is None or (self._session.is_fenced and not due.request_id):
            self._agreement.plan_periodic(step)
            return False
        nonce = self._ranks.nonce(step, due.request_id, self._session.naming_secret)
        is_taken = self._saver.save(self._agreement, staging, nonce, due, self._manifest(due, step))
        self._should_stop |= is_taken and self._stop_after_save and due.kind == "emergency"
        return is_taken

    def _load(self, answer: Restored) -> int:
        return load_checkpoint(
            answer.path,
            self._ranks,
            self._state,
            wanted_step=answer.step,
            owners=self._session.channel.trusted_uids,
        )

    def _started(self, step: int) -> None:
        """From here on the checkpoints are of another start."""
        self._session.start_id = secrets.token_hex(8)
        self._reporter.started(step, self._session.start_id)

    def _manifest(self, due: Due, step: int) -> RankManifest:
        return RankManifest(
            run=self._session.run,
            step=step,
            kind=due.kind,
            files=[],
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
            local_world_size=self._ranks.local_world_size,
            node=self._ranks.node,
            nodes=self._ranks.nodes,
            request_id=due.request_id,
            start_id=self._session.start_id,
            health=self._health.evaluate(step),
        )

    # ------------------------------------------------------------ background thread

    def _tick(self) -> None:
        cost = self._saver.cost
        if self._every_s is not None and time.monotonic() - cost.saved_mono_s >= self._every_s:
            self._agreement.periodic_is_due()
        step = int(self._agreement.step)
        if self._reporter.is_behind(step):
            self._started(step)
        self._reporter.tick(step, self._health.loss, cost, self._polls)
        self._pauses.tick(step, self._polls, self._session.grace_s)

    # ------------------------------------------------------------ the end

    def _end(self, reason: str) -> None:
        if not self._closed:
            self._closed = True
            if not self._saver.wait(CLOSE_PATIENCE_S):
                log.warning("a checkpoint is still not written; it is lost")
            self._session.end(reason)
            self._agreement = self._session.agreement
            atexit.unregister(self._end)

    def _forked(self) -> None:
        # A child, such as a data loader's worker, is no rank: it does nothing, and holds no connection.
        self._closed = True
        self._session.forked()
        self._agreement = self._session.agreement


_guards: weakref.WeakSet[Guard] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for guard in list(_guards):
        guard._forked()  # noqa: SLF001


os.register_at_fork(after_in_child=_after_fork_in_child)
