# SPDX-License-Identifier: Apache-2.0
"""The interface for training scripts: :func:`attach` once, :meth:`Guard.step` once per optimizer step.

:meth:`Guard.step` copies the state between two steps, in the thread that calls it; a background thread writes
the copy.  A state that cannot be copied is written in :meth:`Guard.step`.  Another background thread
answers the daemon.  Only :class:`RestoreError`, and invalid arguments, raise an exception into the training
loop.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from swansong._checkpoint.first_check import check_command
from swansong._checkpoint.load import RestoreError, load_checkpoint
from swansong._checkpoint.saver import CLOSE_PATIENCE_S, Saver
from swansong._checkpoint.survivor_checkpoint import (
    Divisible,
    agree_to_wait,
    save_without_lost_ranks,
)
from swansong._checkpoint.training_health import MIN, SPIKE, LossMonitor
from swansong._daemon.daemon_channel import HAS_DAEMON, TICK_S, WATCHFUL_TICK_S, socket_path
from swansong._daemon.progress_reports import PauseWatch, Reporter
from swansong._daemon.session import DaemonSession, GuardOptions
from swansong._log import log
from swansong._ranks.agreement import UNASKED_S, Due, Ranks, SaveRequest
from swansong._ranks.environment import PositionError
from swansong._ranks.job_store import warn_about_shared_store
from swansong._ranks.position import check_ranks, find_ranks, own_process
from swansong._ranks.start import Loaded
from swansong._ranks.survivors import is_loss_of_a_peer
from swansong._ranks.termination import Termination
from swansong.layout import RankManifest
from swansong.protocol import SIGTERM_LIMIT_S, Committed, Restored
from swansong.rank_files import Snapshots, holding_generators, state_of

RESTORE_ENV = "SWANSONG_RESTORE"
"""Environment variable with a directory to restore from.  It overrides the daemon."""
FINISH_PATIENCE_S = 300.0
"""Longest wait of :meth:`Guard.finish` for the commit of the last state."""
LEAVE_PATIENCE_S = 10.0
"""Longest wait for earlier copies before a save without lost ranks; torchrun sends SIGKILL after 30 s."""
_LOOK_S = 0.05
ROLLBACKS = 3
"""Default number of rollbacks in a row that return to no newer step."""
_REPEATS = 3
"""Repeated steps after which a warning is logged."""


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
    spike: float | None = SPIKE,
) -> Guard:
    """Connect this process to the daemon of its VM.  Without a daemon, the guard does nothing.

    Args:
        state: the state that a checkpoint contains.  Either objects by name, with ``state_dict()`` and
            ``load_state_dict()``, or numpy Generators.  Or a ``swansong.torch.TrainingState``.
        run: name of the run; empty takes the name from the daemon.
        save: instead of ``state``, a function that writes this rank's state into a given directory.
        load: reads the files that ``save`` wrote.  The global generators of ``random`` and, if they are in
            use, numpy, torch and CUDA are saved without these functions.
        every_steps: interval of periodic checkpoints, in optimizer steps.
        every_s: interval of periodic checkpoints, in seconds.  For one rank only, because several ranks
            cannot agree on a moment.  Without ``every_steps`` and ``every_s`` the daemon requests periodic
            checkpoints, at the interval of its configuration.
        socket: path of the daemon's socket; default: ``SWANSONG_SOCKET``, then
            ``/run/swansong/trainer.sock``.
        stop_after_save: set :attr:`Guard.should_stop` after an emergency checkpoint.  The trainer should then
            close the guard and exit with :data:`EXIT_SAVED`.
        spike: the fifth loss in a row that is this number of deviations above the median of the last losses
            is unhealthy, see :attr:`Guard.healthy`.  None: each finite loss is healthy.

    Raises:
        ValueError: an argument, or an environment variable of the launcher, has an invalid value; or the
            position of this process in the job is unknown.
        TypeError: ``state`` contains an object that cannot be saved or loaded.  Both are tried here, without
            a copy; two functions cannot be tried.
        RuntimeError: this process has an open guard already.
    """
    if (every_steps is not None and every_steps < 1) or (every_s is not None and every_s <= 0):
        raise ValueError("every_steps= and every_s= must be positive")
    if spike is not None and not spike > 0:
        raise ValueError(f"spike={spike!r} must be positive, or None")
    path, _ = socket_path(socket)
    ranks = find_ranks(path)
    if any(guard._is_of(path, ranks) for guard in _guards):  # noqa: SLF001
        raise RuntimeError(
            "attach() failed: this process has an open guard already, and the daemon would save the state of"
            " only one of them; pass all objects in one state, or close() the first guard"
        )
    warn_about_shared_store(ranks)
    if every_s is not None and ranks.world_size > 1:
        raise ValueError("several ranks cannot agree on every_s=; use every_steps=")
    options = GuardOptions(run, every_steps, every_s, socket, stop_after_save, spike)
    return Guard(ranks, state_of(state, save, load), options)


class Guard:
    """A trainer's connection to the daemon of its VM.  Create it with :func:`attach`.

    As a context manager it is closed at the end of the block.  If the block raises, the state may be torn, so
    nothing is saved.  One thread, that of the training loop, may call the methods.
    """

    def __init__(self, ranks: Ranks, state: Snapshots, options: GuardOptions) -> None:
        self._ranks = ranks
        self._options = options
        state.ranks = ranks
        state.rehearse()
        self._state = state
        self._saver = Saver(self._snapshot, in_background=state.in_background)
        self._health = LossMonitor(options.spike)
        self._rollbacks: list[int] = []
        """Steps of the last rollbacks; no later one returned to a newer step than the first."""
        self._critical_depth = 0
        self._owes_save = False
        self._is_whole_after_block = True
        """Whether the state is that of the last step again at the end of the critical block."""
        self._should_stop = False
        self._finished_at: int | None = None
        """Step of the end of the run that was restored or saved."""
        self._polls = 0
        self._has_polled_early = False
        self._repeats = 0
        """Calls of :meth:`step` with the step of the one before."""
        self._closed = False
        self._is_inherited = False
        """Whether this process is a fork of the one that has attached."""
        self._is_opening = True
        self._is_prepared = False
        """Whether the state has prepared for copies."""
        self._use(DaemonSession(ranks, options, self._tick))
        self._reports = 0
        """Number of calls of :meth:`step`: its step number may stay the same."""
        state.count_steps_with(lambda: self._reports)
        self._pauses = PauseWatch()
        self._session.channel.start()
        self._answered: threading.Event | None = None
        """Exists since SIGTERM; set when the last checkpoint is taken, with which the process ends."""
        self._has_left = False
        self._leaving = threading.Lock()
        """Held during the only save without lost ranks: both the loop and SIGTERM may begin it."""
        self._termination: Termination | None = None
        if HAS_DAEMON:
            is_last = self._can_lose_ranks
            self._termination = Termination(self._answer, self._terminated, is_last=is_last)
            self._termination.start()
        _guards.add(self)
        atexit.register(self._exit)

    def _use(self, session: DaemonSession) -> None:
        """Take a session that is not connected yet."""
        self._session = session
        self._agreement = session.agreement
        self._reporter = Reporter(
            session.channel.send, session.start, self._health, self._saver.cost, self._state.own_s
        )

    # ------------------------------------------------------------ the training loop

    def step(self, step: int | None = None, loss: Any = None, **metrics: Any) -> None:
        """Report that ``step`` optimizer steps are complete, and save if a checkpoint is due.

        Call it once per optimizer step, last in the loop body: after the scheduler, the gradient scaler and
        averaged weights have stepped too.  A checkpoint contains the state at this call.  During a checkpoint
        request it blocks until the ranks have agreed on a step: for at most 5 s, or a tenth of the time left
        if that is shorter.

        Args:
            step: number of completed optimizer steps; default: one more than the last, counted from the
                result of :meth:`restore`.
            loss: of that step, for the manifest and :attr:`healthy`.  With a daemon, a plain number is
                checked immediately.  A tensor is read only when a checkpoint is taken, because reading it
                blocks on the device.
            metrics: further numbers for the manifest, by name.

        Raises:
            ValueError: at the first step only: ``torch.distributed`` contradicts the position that
                :func:`attach` found.
            TypeError: at the first step only: an object cannot be saved; names it.
        """
        agreement = self._agreement
        if step is None:
            step = max(0, agreement.step) + 1
        if self._is_opening:
            self._observe_step()
            if agreement.step < 0:
                self._started_alone(max(0, int(step) - 1))
        if step <= agreement.step:
            self._did_not_advance(int(step))
        health = self._health
        health.loss = loss
        health.metrics = metrics
        agreement.step = step
        self._reports += 1
        if self._session.welcome.staging:
            self._record(step, loss)
        if step >= agreement.attend_at:
            self._boundary(int(step))

    def _record(self, step: int, loss: Any) -> None:
        """Note what only a daemon needs: for checkpoints, and for its reports."""
        self._state.note_boundary()
        health = self._health
        # A comparison with NaN is false.
        if isinstance(loss, float) and (step >= health.judge_at or not MIN <= loss <= health.limit):
            health.judge(step, loss)
        if step >= self._session.redone.next_step:
            self._session.redone.note(int(step), loss, self._state)

    def poll(self) -> SaveRequest | None:
        """Serve a checkpoint request during evaluation, warm-up and other long pauses.

        A job of one rank saves here, if the state is still that of the last :meth:`step`.  After a change,
        such as another batch or an optimizer step, the save waits for the next :meth:`step`, with a warning.
        With several ranks, end the pause soon if a request is returned: they save at a later step.

        Returns:
            The checkpoint request in progress; None without one.
        """
        self._polls += 1
        step = int(self._agreement.step)
        due = self._agreement.between_steps() if step >= 0 else None
        if due is not None and self._is_between_steps():
            self._write_when_whole(due, step)
        return self._agreement.current

    def save(self, step: int) -> bool:
        """Save the state of this rank now; the last checkpoint of a run is that of :meth:`finish`.

        Args:
            step: number of completed optimizer steps.

        Returns:
            True if this rank's part is in staging, or copied (see :meth:`wait_saved`).  False if the save
            failed, or without a daemon.
        """
        return self._write(Due("periodic"), int(step))

    def wait_saved(self, limit_s: float = CLOSE_PATIENCE_S) -> bool:
        """Wait until all copies are in staging, as :meth:`close` does.

        Args:
            limit_s: longest wait, in seconds.

        Returns:
            False if the limit passed first.
        """
        return self._saver.wait(limit_s)

    @contextlib.contextmanager
    def critical(self) -> Iterator[None]:
        """Postpone saves while the state is torn; the end of the block takes a checkpoint that is due.

        With several ranks, the block must end in the step in which it began.
        """
        if self._critical_depth == 0:
            self._is_whole_after_block = self._state.is_at_boundary()
        self._critical_depth += 1
        try:
            yield
        finally:
            self._critical_depth -= 1
        if self._critical_depth == 0 and self._is_whole_after_block:
            self._state.note_boundary()  # the block has undone its changes
        if self._owes_save and self._critical_depth == 0:
            self._owes_save = False
            self._boundary(int(self._agreement.step))
            self.poll()  # a request during the block, whose target is the next step

    def evaluation(self) -> contextlib.AbstractContextManager[None]:
        """Wrap an evaluation, whose random numbers then do not count for the training.

        A resume does not repeat an evaluation within an epoch.  The end of the block sets the global
        generators of ``random``, numpy and torch back, so the training continues as without the evaluation.
        :meth:`poll` saves in the block as well.
        """
        return holding_generators()

    def restore(self, from_directory: str | os.PathLike[str] | None = None) -> int:
        """Load the newest whole checkpoint of the run.

        Call it once on every rank: after all objects are created and wrapped, and before the first step, the
        first ``iter(loader)`` and the first random number of the training.

        Args:
            from_directory: directory of a checkpoint to load instead.  The environment variable
                ``SWANSONG_RESTORE`` overrides it.

        Returns:
            Number of completed optimizer steps; 0 for a fresh run, or without a daemon.

        Raises:
            RestoreError: a checkpoint exists but cannot be fetched or loaded, the daemon refuses this
                process, or rank 0 is not connected to it.  The state may be half loaded: end the process.
        """
        try:
            check_ranks(self._ranks)
        except PositionError as error:
            raise RestoreError(f"restore failed: {error}") from error
        if self._agreement.step >= 0:
            log.warning(
                "restore() is called after step %s; call it once, before the first step, and use rollback()"
                " to return to a checkpoint",
                self._agreement.step,
            )
            self._session.start.begin_next()
        else:
            self._state.before_restore()
        chosen = os.environ.get(RESTORE_ENV) or from_directory
        manifest, generation = None, -1
        if chosen is not None:
            # The daemon has not verified its signature, so code in it is not used.
            self._state.takes_code = False
            manifest = load_checkpoint(os.fspath(chosen), self._ranks, self._state)
        elif not self._closed and self._session.channel.has_connected():
            with self._loading():
                manifest, generation = self._load_newest()
        elif not self._closed:
            log.log(
                self._session.channel.absence_level,
                "no swansongd at %s answers, so training starts from step 0; if the run has a"
                " checkpoint, end this process, and start swansongd first",
                self._session.channel.path,
            )
            if self._session.rendezvous is not None:
                self._session.rendezvous.announce_absence()
        elif self._is_inherited:
            self._warn_of_fork("restore")
        if manifest is None and self._agreement.step < 0:
            self._check_resume()
        step = self._loaded(manifest)
        if manifest is not None and manifest.world_size == self._ranks.world_size:
            self._session.redone.ask(manifest.start_id, generation)
        return step

    def rollback(self, *, skip_batches: bool = False, tries: int = ROLLBACKS) -> int:
        """Load the newest healthy checkpoint in this process, to train from it again.

        A checkpoint is healthy if the losses of its step and of the next step are finite and usual.  The run
        continues as a new start, under a new generation.  With several ranks, all of
        them must call it after the same step.  So decide by a loss that all ranks have in common, such as
        the mean over all ranks.

        Args:
            skip_batches: keep the position of each ``ResumableLoader``, and train from the checkpoint with
                the batches that follow: the loop over the loader just continues.
            tries: rollbacks in a row that return to no newer step; a further one raises an error.

        Returns:
            Number of completed optimizer steps; continue the loop from there.

        Raises:
            ValueError: ``skip_batches`` is set, and the state contains no ``ResumableLoader``.
            RestoreError: no checkpoint is healthy, no daemon answers, the ranks of the other VMs did not
                call it, the tries are used up, or the checkpoint cannot be loaded.  In the last two cases the
                state may be half loaded: end the process.
        """
        at_step = int(self._agreement.step)
        if self._closed or not self._session.channel.has_connected():
            raise RestoreError("rollback failed: this process has no daemon")
        if not self._saver.wait(CLOSE_PATIENCE_S):
            raise RestoreError("rollback failed: the last checkpoint is still being written")
        if skip_batches and not self._state.has_loaders:
            raise ValueError(
                "skip_batches=True needs a swansong.torch.TrainingState with a ResumableLoader"
            )
        begun_mono_s = time.monotonic()
        with self._loading():
            answer = self._session.restore.find_healthy(
                at_step=at_step, before_step=self._health.suspect_from(at_step)
            )
            self._count_rollback(answer.step, tries)
            self._state.keeps_loaders = skip_batches
            manifest = self._load(answer, time.monotonic() - begun_mono_s)
        log.warning("rolled back from step %s to step %s", at_step, manifest.step)
        self._health.reset()
        step = self._loaded(manifest)
        self._session.rolled_back()
        return step

    def _count_rollback(self, step: int, tries: int) -> None:
        if self._rollbacks and step > self._rollbacks[0]:
            self._rollbacks.clear()
        self._rollbacks.append(step)
        if len(self._rollbacks) > tries:
            raise RestoreError(
                f"rollback failed: {tries} rollbacks to step {self._rollbacks[0]} or before it led to no"
                " newer healthy checkpoint; the cause is in the state or the data of that step"
            )

    def finish(self, limit_s: float = FINISH_PATIENCE_S, *, at: int | None = None) -> bool:
        """Save the last state as the end of the run, wait for its commit, and close.

        Call it on every rank when training is complete.  A later start of the script then has
        :attr:`finished` set after :meth:`restore`.  If :attr:`should_stop` is set, the run continues on
        another VM, and this only closes.

        Args:
            limit_s: longest wait for the commit, in seconds.
            at: the step at which training is complete.  At an earlier step, this only closes.

        Returns:
            True if the end of the run is committed.  False without a daemon, if the save failed, at a step
            before ``at``, and if the limit passed first: the daemon then commits it without the trainer.
        """
        step = int(self._agreement.step)
        is_committed = False
        if self._closed:
            pass
        elif self._should_stop:
            log.warning("the run stops at step %s for another VM to continue: not finished", step)
        elif at is not None and step < at:
            log.error("the run ended at step %s instead of %s: not finished", step, at)
        elif self.finished:
            is_committed = True  # nothing was trained since the end that restore() loaded
        elif step >= 0:
            is_committed = self._save_end(step, time.monotonic() + limit_s, at)
        self._end("finished")
        return is_committed

    def close(self) -> None:
        """Disconnect from the daemon, which commits what is in staging without the trainer.

        The run is not finished: see :meth:`finish`.
        """
        if not self._closed:
            self.poll()
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
        else:
            self._leave(error)
            self._end(kind.__name__)

    @property
    def run(self) -> str:
        """Name of the run: that of :func:`attach`, or else the daemon's; empty if neither is known."""
        return self._session.welcome.run

    @property
    def rank(self) -> int:
        """Rank of this process in the job."""
        return self._ranks.rank

    @property
    def request(self) -> SaveRequest | None:
        """The checkpoint request in progress; None without one."""
        return self._agreement.current

    @property
    def preempting(self) -> bool:
        """Whether an emergency request has arrived in this process: the VM is about to be terminated.

        It stays set after the checkpoint, and after the notice was withdrawn.
        """
        return self._agreement.had_emergency

    @property
    def should_stop(self) -> bool:
        """Whether an emergency checkpoint was saved and ``stop_after_save`` is set."""
        return self._should_stop

    @property
    def finished(self) -> bool:
        """Whether the run has ended: :meth:`restore` loaded its end, or :meth:`finish` saved it.

        A further :meth:`step` resets it, because the script trains on.
        """
        step = int(self._agreement.step)
        return self._finished_at is not None and step in (self._finished_at, -1)

    @property
    def healthy(self) -> bool:
        """Whether the loss of the last step is usual or unknown; reading a tensor blocks on its device.

        It is not usual if it is NaN or infinite, or the fifth in a row above the limit that ``spike`` of
        :func:`attach` sets.  A loss that is a tensor counts if it is read here or for a checkpoint, and
        without a daemon each loss only if it is read here.
        """
        found = self._health.evaluate(int(self._agreement.step))
        return "loss_is_finite" not in found or self._health.is_healthy

    @property
    def fenced(self) -> bool:
        """Whether another VM has taken the run over, so that nothing from this VM is committed any more."""
        return self._session.is_fenced

    @property
    def last_committed(self) -> Committed | None:
        """Generation and step of the newest committed checkpoint that the daemon has reported."""
        return self._session.last_committed

    # ------------------------------------------------------------ saving

    def _observe_step(self) -> None:
        """Check what only shows in the first steps: in the first one a mistake still raises."""
        self._is_opening = False  # a mistake raises once
        if self._is_inherited:
            self._warn_of_fork("step")
        if not self._closed:
            check_ranks(self._ranks)
            self._is_opening = self._state.observe_step()
            if self._session.staging is not None and not self._is_prepared:
                self._is_prepared = True
                self._state.prepare_copy()

    def _is_between_steps(self) -> bool:
        is_in_block = self._critical_depth > 0
        is_between = self._is_whole_after_block if is_in_block else self._state.is_at_boundary()
        if not is_between and not self._has_polled_early:
            self._has_polled_early = True
            log.warning(
                "guard.poll() saves nothing here: a batch was drawn, or the weights changed, since the last"
                " guard.step(), so the checkpoint waits for the next one; call poll() right after step()"
            )
        return is_between

    def _snapshot(self) -> Callable[[Path], object]:
        # Otherwise the daemon would take one rank's part for the whole state.
        check_ranks(self._ranks)
        self._state.takes_code = self._session.welcome.is_signed
        return self._state.snapshot()

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
        staging, start_id = self._session.staging, self._session.start.id
        is_fenced = self._session.is_fenced and not due.request_id
        if staging is None or not start_id or is_fenced:
            self._agreement.plan_periodic(step)
            return False
        purpose = due.request_id or due.kind
        nonce = self._ranks.nonce(start_id, step, purpose, self._session.welcome.naming_secret)
        manifest = self._manifest(due, step, start_id)
        is_taken = self._saver.save(self._agreement, staging, nonce, manifest)
        if is_taken:
            self._session.redone.saved(step)
        is_end = self._finished_at == step
        is_emergency = due.kind == "emergency" and not is_end
        self._should_stop |= is_taken and self._options.stop_after_save and is_emergency
        if self._answered is not None and is_taken and due.request_id:
            self._answered.set()
            while not self._should_stop:
                time.sleep(_LOOK_S)  # SIGTERM ends the process here, where it holds no lock
        return is_taken

    @contextlib.contextmanager
    def _loading(self) -> Iterator[None]:
        """Tell the daemon if nothing is loaded: the script may continue from a state of its own choice."""
        try:
            yield
        except BaseException:
            self._session.start.load_failed()
            raise

    def _load_newest(self) -> tuple[RankManifest | None, int]:
        """Load the newest checkpoint of the run, None if it is fresh, and return its generation."""
        begun_mono_s = time.monotonic()
        arrivals = self._state.arrivals()
        answer = self._session.restore.find_newest(arrivals, self._session.channel.trusted_uids)
        if not answer.path:
            return None, -1
        reads = () if arrivals is None else arrivals.reads
        return self._load(answer, time.monotonic() - begun_mono_s, reads), answer.generation

    def _load(self, answer: Restored, fetch_s: float, reads: Collection[int] = ()) -> RankManifest:
        self._state.takes_code = self._session.welcome.is_signed
        return load_checkpoint(
            answer.path,
            self._ranks,
            self._state,
            wanted_step=answer.step,
            owners=self._session.channel.trusted_uids,
            reads=reads,
            fetch_s=fetch_s,
            age_s=answer.age_s,
        )

    def _loaded(self, manifest: RankManifest | None) -> int:
        """Train from the state that was loaded, or from step 0 of a fresh run; returns the step."""
        step = 0 if manifest is None else manifest.step
        self._health.resume({} if manifest is None else manifest.health)
        self._finished_at = None
        if manifest is not None and manifest.kind == "final":
            self._finished_at = manifest.step
            log.warning(
                "the run finished at step %s: guard.finished is set, and nothing is left to train",
                manifest.step,
            )
        self._started(step, Loaded.of(manifest))
        self._agreement.plan_periodic(step)
        self._saver.cost.saved_mono_s = time.monotonic()
        return step

    def _save_end(self, step: int, until_mono_s: float, at: int | None) -> bool:
        """Save the end of the run and wait for its commit; returns whether it is committed."""
        before = self._session.last_committed
        is_idle = step == self._reporter.started_at and not self._state.has_continued()
        self._state.before_end()
        due = self._agreement.between_steps()
        if not self._write(Due("final", due.request_id if due is not None else ""), step):
            return False
        if is_idle and at is None:
            log.warning(
                "finish() marks the run as finished at step %s, and this start has trained no step: if the"
                " run is longer, its loop did not continue, for example because it counts epochs from"
                " restore(), which returns steps; finish(at=STEPS) marks no earlier end",
                step,
            )
        if not self._saver.wait(until_mono_s - time.monotonic()) or not self._saver.has_saved:
            return False
        self._finished_at = step
        while time.monotonic() < until_mono_s:
            last = self._session.last_committed
            if last is not None and last != before and last.is_final and last.step == step:
                return True
            if self.fenced:
                return False
            self.poll()  # a request is answered with this checkpoint
            time.sleep(_LOOK_S)
        log.warning(
            "the end of the run at step %s is in staging and not committed yet; the daemon commits it"
            " without the trainer while this VM runs: see swansong status",
            step,
        )
        return False

    def _did_not_advance(self, step: int) -> None:
        if step < self._agreement.step:
            self._started_alone(max(0, step - 1))
            return
        self._repeats += 1
        # The first one may be a script that counts from the step that it has resumed.
        if self._repeats == _REPEATS:
            log.warning(
                "guard.step() was called again with step %d: a checkpoint request waits for a greater step;"
                " call it once per optimizer step, without a number or with that of completed steps",
                step,
            )

    def _started_alone(self, step: int) -> None:
        """Train from a state that the script has created or loaded itself."""
        if self._agreement.step >= 0:
            self._session.start.begin_next()
            self._agreement.plan_periodic(step)
        else:
            self._check_resume()
        self._started(step, Loaded())

    def _check_resume(self) -> None:
        """A run begins: check first that it can be resumed, if the environment asks for it."""
        if not self._ranks.rank and not self._closed:
            check_command(self._ranks.world_size, lambda: self.preempting)

    def _started(self, step: int, loaded: Loaded) -> None:
        """Report what the start of the training has loaded, and from which step it trains."""
        with self._reporter.lock:
            self._session.start.loaded(loaded)
            self._agreement.begin(step)
            self._session.redone.begin(step)
            self._reporter.started(step)

    def _manifest(self, due: Due, step: int, start_id: str) -> RankManifest:
        return RankManifest(
            run=self._session.welcome.run,
            step=step,
            kind=due.kind,
            files=[],
            request_id=due.request_id,
            start_id=start_id,
            health={**self._health.evaluate(step), **self._session.redone.facts},
            **self._ranks.in_manifest(),
            **own_process(),
        )

    # ------------------------------------------------------------ background thread

    def _tick(self) -> None:
        every_s = self._options.every_s
        if every_s is not None and time.monotonic() - self._saver.cost.saved_mono_s >= every_s:
            self._agreement.periodic_is_due()
        with self._reporter.lock:
            step = int(self._agreement.step)
            self._reporter.tick(step, self._polls)
        self._session.redone.tick()
        self._pauses.tick(step, self._polls, self._session.welcome.grace_s)
        # The daemon records a resume with its first new step, and the power may be cut right after it.
        is_watchful = self._reporter.awaits_step
        self._session.channel.tick_s = WATCHFUL_TICK_S if is_watchful else TICK_S

    # ------------------------------------------------------------ the end

    @property
    def _can_lose_ranks(self) -> bool:
        """Whether the other ranks can save a last checkpoint without one of them."""
        return self._ranks.world_size > 1 and isinstance(self._state, Divisible)

    def _exit(self) -> None:
        self._leave(getattr(sys, "last_value", None))
        self._end("exit")

    def _leave(self, error: BaseException | None) -> None:
        """Save the last step if the loop has lost a peer; after another error the state may be torn."""
        termination = self._termination if self._can_lose_ranks else None
        if not self._closed and termination is not None and is_loss_of_a_peer(error):
            with termination.held():
                self._save_last_step()

    def _answer(self) -> None:
        """After SIGTERM, let the training loop save what the daemon requests."""
        if self._session.staging is None:
            return
        self._answered = answered = threading.Event()
        if not self._should_stop and self._is_request_taken():
            self._has_left = True
            answered.wait(SIGTERM_LIMIT_S)
            self._saver.wait(SIGTERM_LIMIT_S)
        while self._should_stop and not self._closed:
            time.sleep(_LOOK_S)  # the script ends by itself, with its exit code

    def _is_request_taken(self) -> bool:
        """Wait for a request, and then for its checkpoint; returns whether this rank has taken it."""
        agreement, session = self._agreement, self._session
        ended_id = agreement.ended_id
        # The other half is for a save without lost ranks, of which a checkpoint of all ranks never comes.
        limit_s = SIGTERM_LIMIT_S / 2 if self._can_lose_ranks else SIGTERM_LIMIT_S
        request_id = self._next_request(limit_s, ended_id=ended_id)
        if self._can_lose_ranks:
            waits = agree_to_wait(
                self._ranks, session.start.id, session.welcome, is_requested=bool(request_id)
            )
            if not waits:
                return False
            request_id = request_id or agreement.wait_requested(limit_s, ended_id=ended_id)
        if request_id:
            log.warning(
                "SIGTERM: this process ends after a last checkpoint, in at most %.0f s", limit_s
            )
        while request_id and not agreement.wait_taken(request_id, limit_s):
            if not agreement.is_withdrawn(request_id):
                return False
            # A notice withdraws it, and requests another one.
            request_id = self._next_request(limit_s, ended_id=request_id)
        return request_id != ""

    def _next_request(self, limit_s: float, *, ended_id: str) -> str:
        if self._session.welcome.takes_request_query:
            return self._agreement.ask_for_request(limit_s, ended_id=ended_id)
        return self._agreement.wait_requested(UNASKED_S, ended_id=ended_id)

    def _terminated(self) -> None:
        if not self._closed:
            if self._can_lose_ranks:
                self._save_last_step()
            self._end("SIGTERM")

    def _save_last_step(self) -> None:
        """Save the last step without the ranks that are lost; they do not answer any more."""
        session, step = self._session, int(self._agreement.step)
        start_id = session.start.id
        if session.staging is None or not start_id or step < 0 or session.is_fenced:
            return
        with self._leaving:
            if self._has_left:
                return
            self._has_left = True
            self._saver.wait(LEAVE_PATIENCE_S)
            due = Due("emergency")  # a checkpoint without a rank answers no request
            if isinstance(self._state, Divisible):
                save_without_lost_ranks(
                    self._state,
                    self._ranks,
                    self._manifest(due, step, start_id),
                    self._agreement,
                    session.welcome,
                )

    def _end(self, reason: str) -> None:
        if not self._closed:
            self._closed = True
            if self._termination is not None:
                self._termination.close()
            if not self._saver.wait(CLOSE_PATIENCE_S):
                log.warning(
                    "a checkpoint is not written after %.0f s; it is lost", CLOSE_PATIENCE_S
                )
            self._reporter.ended(int(self._agreement.step))
            self._session.end(reason)
            self._agreement = self._session.agreement
            atexit.unregister(self._exit)

    def _warn_of_fork(self, method: str) -> None:
        log.log(
            self._session.channel.absence_level,
            "guard.%s() saves and restores nothing here: this process is a fork of the one that called"
            " swansong.attach(); call attach() in the process that trains",
            method,
        )

    def _is_of(self, socket_path: str, ranks: Ranks) -> bool:
        """Whether this guard is open, and the daemon would take another one of ``ranks`` for the same."""
        is_same = (socket_path, ranks.rank) == (self._session.channel.path, self._ranks.rank)
        return is_same and not self._closed

    def _forked(self) -> None:
        # A child, such as a data loader's worker, is not a rank: it must not use the connection.
        self._is_inherited |= not self._closed
        self._is_opening = self._closed = True
        if self._termination is not None:
            self._termination.forked()
        self._session.channel.close_in_child()
        # At the fork, a thread that is lost now may have held the locks of the old one.
        options = dataclasses.replace(self._options, run=self._session.welcome.run)
        self._use(DaemonSession(self._ranks, options, self._tick))


_guards: weakref.WeakSet[Guard] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for guard in list(_guards):
        guard._forked()  # noqa: SLF001


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_after_fork_in_child)
