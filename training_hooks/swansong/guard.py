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
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from swansong._agree import Agreement, CheckpointRequest, Due, Ranks
from swansong._agree_nodes import Assembly
from swansong._channel import Channel, socket_path
from swansong._progress import PauseWatch, Reporter
from swansong._restore import RestoreDialogue, RestoreError, load_checkpoint, where_to_go_on
from swansong._saving import CLOSE_PATIENCE_S, Saver
from swansong._staging import health_of, remove_leftovers
from swansong.protocol import (
    Bye,
    Committed,
    Declined,
    Fenced,
    Hello,
    Message,
    RankManifest,
    Refused,
    Request,
    Restored,
    Restoring,
    Target,
    Welcome,
    Withdrawn,
)
from swansong.state import Bundle, Functions, Snapshots

RESTORE_ENV = "SWANSONG_RESTORE"
"""Environment variable that names a directory to restore from, whatever the daemon says."""
KINDS = ("periodic", "emergency", "final")
EXIT_SAVED = 75
"""Exit code for a trainer that ends because :attr:`Guard.should_stop` says so: saved, start me again
elsewhere.  The code that sysexits.h calls a temporary failure; torchrun and schedulers see no success."""
_INFINITY = float("inf")

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
    if state is not None:
        if save is not None or load is not None:
            raise ValueError("attach() takes state=, or save= and load=, not both")
        if isinstance(state, Mapping):
            bundle = Bundle(state)
            state = Functions(bundle.save, bundle.load)
    elif save is not None and load is not None:
        state = Functions(save, load)
    else:
        raise ValueError("attach() needs state=, or both save= and load=")
    if (every_steps is not None and every_steps < 1) or (every_s is not None and every_s <= 0):
        raise ValueError("every_steps= and every_s= are positive")
    ranks = Ranks.from_environment()
    if every_s is not None and ranks.world_size > 1:
        raise ValueError("several ranks cannot agree on every_s=; use every_steps=")
    path, expected = socket_path(socket)
    return Guard(
        ranks=ranks,
        run=run,
        state=state,
        every_steps=every_steps,
        every_s=every_s,
        socket=path,
        socket_expected=expected,
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
        socket: str,
        socket_expected: bool,
        stop_after_save: bool,
    ) -> None:
        self._ranks = ranks
        self._run = run
        self._state = state
        self._saver = Saver(state.snapshot, in_background=state.in_background)
        self._every_s = every_s
        self._capabilities = ["periodic"] if every_steps is None and every_s is None else []
        self._stop_after_save = stop_after_save

        self._loss: Any = None
        self._metrics: dict[str, Any] = {}
        self._staging: str | None = None
        self._critical_depth = 0
        self._owes_save = False
        self._should_stop = False
        self._fenced = False
        self._last_committed: Committed | None = None
        self._unhealthy_since: int | None = None
        self._warned_of_loss = False
        self._rollbacks = 0
        self._polls = 0
        self._grace_s = 0.0
        self._closed = False

        self._channel = Channel(
            socket,
            expected=socket_expected,
            hello=self._hello,
            connected=self._connected,
            handle=self._handle,
            tick=self._tick,
        )
        self._agreement = Agreement(ranks.world_size, every_steps, self._say)
        self._assembly = (
            Assembly(ranks, self._agreement, self._channel.send) if ranks.nodes > 1 else None
        )
        self._restore = RestoreDialogue(self._channel.send)
        self._reporter = Reporter(self._channel.send)
        self._pauses = PauseWatch()
        self._channel.start()
        _guards.add(self)
        atexit.register(self._end, "exit")

    # ------------------------------------------------------------ the training loop

    def step(self, step: int, loss: Any = None, **metrics: Any) -> None:
        """Say that ``step`` optimizer steps are complete; saves here when a checkpoint is due.

        Call it once after each optimizer step, with the whole state as of that step: with gradient
        accumulation not once for each micro-batch.  When a request is under way it waits, at most 5 s
        or a tenth of the time left, for the ranks to agree.

        Args:
            loss: of that step, for the manifest and :attr:`healthy`; a plain number is looked at right
                here, anything else (a tensor, for which to wait) when a checkpoint is taken.
            metrics: more of the kind, by name.
        """
        agreement = self._agreement
        self._loss = loss
        self._metrics = metrics
        agreement.step = step
        if isinstance(loss, float) and (
            self._unhealthy_since is not None or not -_INFINITY < loss < _INFINITY
        ):
            self._judge(step, loss)
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
            RestoreError: there is a checkpoint but it cannot be fetched or loaded.  The state may be
                half loaded: end the process.
        """
        chosen = os.environ.get(RESTORE_ENV) or from_directory
        step = 0
        if chosen is not None:
            step = load_checkpoint(os.fspath(chosen), self._ranks, self._state)
        elif not self._closed and self._channel.is_connected():
            answer = where_to_go_on(self._restore, self._assembly)
            if answer.path:
                step = load_checkpoint(
                    answer.path, self._ranks, self._state, wanted_step=answer.step
                )
        self._agreement.step = step
        self._agreement.plan_periodic(step)
        self._saver.measured.saved_mono_s = time.monotonic()
        return step

    def rollback(self) -> int:
        """Go back, in this process, to the newest checkpoint whose loss was finite, and so was the next.

        What was saved after it counts no more: the run goes on under a new generation.  With several
        ranks all of them call it after the same step.

        Returns:
            Number of completed steps, from which the loop goes on.

        Raises:
            RestoreError: there is no such checkpoint, no daemon, or it cannot be loaded.  In the last
                case the state may be half loaded: end the process.
        """
        if self._assembly is not None:
            raise RestoreError("a job over several VMs goes back by starting anew")
        at_step = int(self._agreement.step)
        if self._closed or not self._channel.is_connected():
            raise RestoreError("there is no daemon to ask for a healthy checkpoint")
        if not self._saver.wait(CLOSE_PATIENCE_S):
            raise RestoreError("the last checkpoint is still being written")
        self._rollbacks += 1
        # The step whose loss was the first that is not finite began with a state that is suspect.
        suspect = at_step if self.healthy else (self._unhealthy_since or at_step) - 1
        answer = self._restore.ask(rollback=self._rollbacks, before_step=suspect)
        if not answer.path:
            raise RestoreError("the run has no healthy checkpoint to go back to")
        step = load_checkpoint(answer.path, self._ranks, self._state, wanted_step=answer.step)
        log.warning("went back from step %s to step %s", at_step, step)
        # A set of a step that is done anew is another one than that of the first time.
        self._saver.forget()
        again = f"{self._ranks.attempt}~{self._rollbacks}"
        self._ranks = dataclasses.replace(self._ranks, attempt=again)
        self._loss, self._metrics, self._unhealthy_since = None, {}, None
        self._agreement.step = step
        # The first checkpoint of the new generation: without it, what was taken back would still be the
        # newest one that is committed.
        self._agreement.periodic_is_due()
        self._saver.measured.saved_mono_s = time.monotonic()
        self._channel.send(self._hello())
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
        is_finite = health_of(self._loss, {}).get("loss_is_finite")
        if is_finite is not None:
            self._judge(int(self._agreement.step), self._loss)
        return is_finite != 0.0

    @property
    def fenced(self) -> bool:
        """Another VM has taken the run over: nothing from here will be committed any more."""
        return self._fenced

    @property
    def last_committed(self) -> Committed | None:
        """Generation and step of the newest checkpoint known to be in the object store."""
        return self._last_committed

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
        staging = self._staging
        if staging is None or (self._fenced and not due.request_id):
            self._agreement.plan_periodic(step)
            return False
        nonce = self._ranks.nonce(step, due.request_id)
        is_taken = self._saver.save(self._agreement, staging, nonce, due, self._manifest(due, step))
        self._should_stop |= is_taken and self._stop_after_save and due.kind == "emergency"
        return is_taken

    def _manifest(self, due: Due, step: int) -> RankManifest:
        health = health_of(self._loss, self._metrics)
        if "loss_is_finite" in health:
            self._judge(step, self._loss)
        return RankManifest(
            run=self._run,
            step=step,
            kind=due.kind,
            files=[],
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
            local_world_size=self._ranks.local_world_size,
            node=self._ranks.node,
            nodes=self._ranks.nodes,
            request_id=due.request_id,
            health=health,
        )

    def _judge(self, step: int, loss: Any) -> None:
        if -_INFINITY < float(loss) < _INFINITY:
            self._unhealthy_since = None
        elif self._unhealthy_since is None:
            self._unhealthy_since = step
            level = logging.INFO if self._warned_of_loss else logging.WARNING
            self._warned_of_loss = True
            log.log(
                level, "the loss of step %s is not finite; checkpoints go on, marked as such", step
            )

    # ------------------------------------------------------------ background thread

    def _hello(self) -> Message:
        step = int(self._agreement.step)
        return Hello(
            run=self._run,
            step=step,
            capabilities=list(self._capabilities),
            **dataclasses.asdict(self._ranks),
        )

    def _say(self, message: Message) -> object:
        assembly = self._assembly
        return self._channel.send(message) if assembly is None else assembly.answer(message)

    def _connected(self) -> None:
        if self._assembly is not None:
            self._assembly.connected()
        self._restore.remind()
        self._agreement.remind()

    def _handle(self, message: Message) -> None:
        if isinstance(message, Welcome):
            self._welcomed(message)
        elif isinstance(message, Request):
            if self._staging is None:
                self._channel.send(Declined(message.id, "the trainer cannot write to staging"))
            elif self._assembly is not None:
                self._assembly.asked(message)
            else:
                self._agreement.request(message)
        elif isinstance(message, Target | Withdrawn) and self._assembly is not None:
            pass  # over several VMs the ranks decide, and what they have decided stands
        elif isinstance(message, Target):
            self._agreement.target(message)
        elif isinstance(message, Withdrawn):
            self._agreement.withdraw(message.request_id)
        elif isinstance(message, Committed):
            self._last_committed = message
        elif isinstance(message, Fenced):
            if not self._fenced:
                log.warning("another VM has taken the run over (generation %s)", message.generation)
            self._fenced = True
        elif isinstance(message, (Restoring, Restored, Refused)):
            if isinstance(message, Refused):
                log.warning("the daemon at %s refuses us: %s", self._channel.path, message.reason)
            self._restore.heard(message)

    def _welcomed(self, welcome: Welcome) -> None:
        self._run = welcome.run
        self._grace_s = welcome.grace_s
        if self._assembly is not None:
            self._assembly.start()
        if self._staging == welcome.staging:
            return
        if not os.access(welcome.staging, os.R_OK | os.W_OK | os.X_OK):
            log.warning(
                "cannot write to %s: add this user to the group that owns it (see ls -ld) and log in"
                " again; training goes on without checkpoints",
                welcome.staging,
            )
            return
        remove_leftovers(welcome.staging, self._ranks.rank)
        self._staging = welcome.staging

    def _tick(self) -> None:
        measured = self._saver.measured
        if self._every_s is not None and time.monotonic() - measured.saved_mono_s >= self._every_s:
            self._agreement.periodic_is_due()
        step = int(self._agreement.step)
        self._reporter.tick(step, self._loss, measured, self._polls)
        self._pauses.tick(step, self._polls, self._grace_s)

    # ------------------------------------------------------------ the end

    def _end(self, reason: str) -> None:
        if not self._closed:
            self._closed = True
            if not self._saver.wait(CLOSE_PATIENCE_S):
                log.warning("a checkpoint is still not written; it is lost")
            self._staging = None
            if self._assembly is not None:
                self._assembly.close()
            self._agreement = Agreement(1, None, lambda _: None)
            self._channel.close(Bye(reason))
            atexit.unregister(self._end)

    def _forked(self) -> None:
        # A child, such as a data loader's worker, is no rank: it does nothing, and holds no connection.
        self._closed = True
        self._staging = None
        self._channel.forked()
        if self._assembly is not None:
            self._assembly.forked()
        self._agreement = Agreement(1, None, lambda _: None)


_guards: weakref.WeakSet[Guard] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for guard in list(_guards):
        guard._forked()  # noqa: SLF001


os.register_at_fork(after_in_child=_after_fork_in_child)
