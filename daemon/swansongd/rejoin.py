# SPDX-License-Identifier: Apache-2.0
"""Answers a trainer that asks where to go on: with a local directory, whatever it takes to have one.

The newest of two is taken: the newest sealed set that still lies in staging (the trainer crashed, the
VM lives), or the newest whole commit in the store, downloaded and verified.
"""

from __future__ import annotations

import secrets
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import structlog
from swansong.protocol import RESTORED_DIRECTORY, Message, Restored, Restoring

from swansongd import commit
from swansongd.core.state import State
from swansongd.errors import NothingToRestore, SwansongError
from swansongd.keys import RunKeys
from swansongd.model import CommitRef, Staged
from swansongd.restore import restore
from swansongd.stores.base import ObjectStore
from swansongd.stores.retry import Retrying

BUDGET_S = 100.0
"""How long the store is asked the same again before the trainer is told that it cannot be reached."""
_PROGRESS_INTERVAL_S = 0.5

_log = structlog.get_logger(__name__)

Reply = Callable[[Message], None]


class Rejoin:
    """Each question is answered in a thread of its own.

    Args:
        store: the backend; retries are added here.
        keys: of the run.
        run_directory: staging directory of the run.
        state: reads the newest state of the decision loop.
        stop: ends it all.
    """

    def __init__(
        self,
        store: ObjectStore,
        keys: RunKeys,
        run_directory: Path,
        state: Callable[[], State],
        stop: threading.Event,
    ) -> None:
        self._backend = store
        self._keys = keys
        self._run_directory = run_directory
        self._state = state
        self._stop = stop
        self._one_at_a_time = threading.Lock()

    def start(self, query_id: str, reply: Reply) -> None:
        """Answer with Restored in the end, with Restoring on the way; returns at once."""
        threading.Thread(
            target=self._run, args=(query_id, reply), name="rejoin", daemon=True
        ).start()

    def _run(self, query_id: str, reply: Reply) -> None:
        with self._one_at_a_time:
            try:
                answer = self._answer(query_id, reply)
            except SwansongError as error:
                answer = Restored(query_id, error=error.line())
            except Exception as error:
                _log.exception("rejoin_fault")
                answer = Restored(query_id, error=f"{type(error).__name__}: {error}")
        _log.info(
            "rejoin",
            step=answer.step,
            generation=answer.generation,
            path=answer.path,
            error=answer.error,
        )
        reply(answer)

    def _answer(self, query_id: str, reply: Reply) -> Restored:
        store = Retrying(
            self._backend, give_up_mono_s=lambda: None, budget_s=BUDGET_S, stop=self._stop
        )
        newest = commit.newest_whole_commit(store, self._keys)
        state = self._state()
        local = _newest_local(state, newest)
        if local is not None:
            return Restored(
                query_id,
                path=str(self._run_directory / local.directory),
                step=local.id.step,
                generation=state.generation if state.generation is not None else -1,
            )
        last_mono_s = time.monotonic()

        def progress(done_bytes: int, total_bytes: int) -> None:
            nonlocal last_mono_s
            if time.monotonic() - last_mono_s >= _PROGRESS_INTERVAL_S:
                last_mono_s = time.monotonic()
                reply(Restoring(query_id, done_bytes, total_bytes))

        parent = self._run_directory / RESTORED_DIRECTORY
        parent.mkdir(exist_ok=True)
        before = list(parent.iterdir())
        destination = parent.resolve() / f"{secrets.token_hex(4)}"
        try:
            restored = restore(
                store,
                self._keys,
                destination,
                progress=progress,
                skipped=lambda ref, why: _log.error("commit_skipped", commit=str(ref), reason=why),
                stop=self._stop,
            )
        except NothingToRestore:
            if newest is None:
                return Restored(query_id)  # a fresh run
            raise
        for path in before:  # of earlier trainers on this VM
            shutil.rmtree(path, ignore_errors=True)
        return Restored(
            query_id,
            path=str(destination),
            step=restored.ref.step,
            generation=restored.ref.generation,
        )


def _newest_local(state: State, newest: CommitRef | None) -> Staged | None:
    """A set in staging that is as good as, or better than, the newest commit."""
    local = state.newest_staged
    if local is None or local.id in state.inherited:
        return None  # of another boot, perhaps torn: what is committed of it was read back whole
    if (
        newest is not None
        and newest.generation != state.generation
        and newest.step >= local.id.step
    ):
        return None
    if newest is not None and newest.step > local.id.step:
        return None
    return local
