# SPDX-License-Identifier: Apache-2.0
"""Rank 0 chooses the checkpoint that all ranks load, and publishes its choice in the job's store.

A VM finds damage only in the shards that its ranks read.  So after the fetch the ranks agree once more.  If
the checkpoint is damaged for one of them, rank 0 chooses an older one, and no rank loads the damaged one.

Only the first decision counts, by compare-and-set, and all ranks obey it.  Each rank sends heartbeats until
then.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from swansong._log import log
from swansong._ranks.job_store import POLL_S, JobStore, first_line, wait_for_key
from swansong._ranks.rendezvous import FINISH_LIMIT_S, Rendezvous

RENDEZVOUS_LIMIT_S = 120.0
"""Longest wait of a restore for the ranks of the other VMs, and for a heartbeat of each rank."""
ROLLBACK_LIMIT_S = 60.0
"""Longest wait of rank 0 for another rank to call ``rollback()``.  Each rank has completed the same step."""
_HEARTBEAT_S = 1.0
_CHOICES_MAX = 100
"""Checkpoints that are tried before a restore fails.  Each one costs a download."""


Choice = dict[str, Any]
"""A JSON object: ``generation`` and ``step`` of a commit, or ``error``."""

Outcome = dict[str, str]
"""A JSON object: empty, or why a rank cannot load the choice, as ``damaged`` or as another ``error``."""


class RestoreChoice:
    """One rank's part in choosing a checkpoint for all ranks.

    Args:
        rendezvous: of this rank.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous
        self._restores = 0

    def for_resume(
        self,
        choose: Callable[[Choice | None], Choice],
        fetch: Callable[[Choice], Outcome],
    ) -> Choice:
        """Return the newest checkpoint that all ranks can load, or ``error``.

        Args:
            choose: called at rank 0 only, with None.  After a choice that is damaged, it is called again
                with that choice and, as ``refused``, the reason.
            fetch: fetches a choice for this rank.

        Raises:
            TimeoutError: the other ranks did not come to the rendezvous, or a rank sends no heartbeat.
            Exception: the store failed.
        """
        rendezvous_id = self._rendezvous.wait(RENDEZVOUS_LIMIT_S, FINISH_LIMIT_S)
        self._restores += 1
        job = f"{rendezvous_id}/restore/{self._restores}"
        refused: Choice | None = None
        with self._heartbeats(job):
            for number in range(_CHOICES_MAX):
                key = f"{job}/{number}"
                choice = self._agree(job, key, partial(choose, refused))
                if "error" in choice or choice["generation"] < 0:
                    return choice
                outcome = self._decided(job, f"{key}/fetched", fetch(choice))
                if "damaged" not in outcome:
                    return {**choice, **outcome}
                refused = {**choice, "refused": outcome["damaged"]}
                log.error(
                    "the checkpoint of step %s is damaged, and all ranks take an older one: %s",
                    choice["step"],
                    outcome["damaged"],
                )
        return {"error": f"the newest {_CHOICES_MAX} checkpoints are damaged: {outcome['damaged']}"}

    def for_rollback(
        self,
        number: int,
        at_step: int,
        before_step: int,
        choose: Callable[[int], Choice],
    ) -> Choice:
        """Return the checkpoint that rank 0 has chosen for a rollback.  The new start has not begun yet.

        Args:
            number: of the new start, the same at all ranks.
            at_step: last step of this rank; must be the same at all ranks.
            before_step: first step that this rank does not trust.
            choose: called at rank 0 only, with the least ``before_step`` of all ranks.

        Raises:
            TimeoutError: the other ranks did not come to the rendezvous, or rank 0 sends no heartbeat.
            Exception: the store failed.
        """
        key = f"{self._rendezvous.wait(RENDEZVOUS_LIMIT_S)}/back/{number}"
        ranks = self._rendezvous.ranks
        all_steps = [f"{key}/at/{rank}" for rank in range(ranks.world_size)]
        own = json.dumps([at_step, before_step])
        self._rendezvous.open_store().set(all_steps[ranks.rank], own)
        with self._heartbeats(key):
            return self._agree(key, key, partial(self._roll_back, all_steps, at_step, choose))

    def _roll_back(
        self,
        all_steps: list[str],
        at_step: int,
        choose: Callable[[int], Choice],
    ) -> Choice:
        store, stop = self._rendezvous.open_store(), self._rendezvous.closed
        for rank, key in enumerate(all_steps):
            if not wait_for_key(store, key, stop, every_s=POLL_S, limit_s=ROLLBACK_LIMIT_S):
                return {"error": f"rank {rank} has not called rollback() after step {at_step}"}
        reported = [json.loads(value) for value in store.multi_get(all_steps)]
        if len({step for step, _ in reported}) > 1:
            steps = ", ".join(str(step) for step, _ in reported)
            return {"error": f"the ranks have called rollback() after different steps: {steps}"}
        return choose(min(before for _, before in reported))

    def _agree(self, job: str, key: str, choose: Callable[[], Choice]) -> Choice:
        """Rank 0 chooses and publishes; the other ranks wait for as long as rank 0 sends heartbeats."""
        if self._rendezvous.ranks.rank == 0:
            choice = choose()
            self._rendezvous.open_store().set(key, json.dumps(choice))
            return choice
        store = self._rendezvous.open_store()
        if silent := self._wait(store, job, key, [0]):
            raise TimeoutError(silent)
        found: Choice = json.loads(store.get(key))
        return found

    def _decided(self, job: str, key: str, outcome: Outcome) -> Outcome:
        """Return the same outcome at all ranks: empty once all of them can load the choice."""
        store, ranks = self._rendezvous.open_store(), self._rendezvous.ranks
        is_last = not outcome and store.add(f"{key}/done", 1) == ranks.world_size
        if outcome or is_last:
            named = {kind: f"rank {ranks.rank}: {reason}" for kind, reason in outcome.items()}
            store.compare_set(key, "", json.dumps(named))
        watched = range(ranks.world_size) if ranks.rank == 0 else [0]
        if silent := self._wait(store, job, key, watched):
            store.compare_set(key, "", json.dumps({"error": silent}))
        decided: Outcome = json.loads(store.get(key))
        return decided

    def _wait(self, store: JobStore, job: str, key: str, watched: Iterable[int]) -> str:
        """Wait for a key; returns the reason if a watched rank is silent for too long, else an empty text.

        Silence is counted in looks, not by a clock: during a pause of the VM its ranks send no heartbeats.
        """
        stop, poll_s = self._rendezvous.closed, self._rendezvous.poll_s
        look_s = max(_HEARTBEAT_S, 20 * poll_s)
        beats = dict.fromkeys(watched, (-1, 0.0))
        while not wait_for_key(store, key, stop, every_s=poll_s, limit_s=look_s):
            if stop.is_set():
                raise TimeoutError("this rank has left the job")
            for rank, (count, silent_s) in beats.items():
                new_count = store.add(_beats(job, rank), 0)
                beats[rank] = (new_count, silent_s + look_s if new_count == count else 0.0)
                if beats[rank][1] > RENDEZVOUS_LIMIT_S:
                    return f"rank {rank} sent no heartbeat for {RENDEZVOUS_LIMIT_S:.0f} s"
        return ""

    @contextlib.contextmanager
    def _heartbeats(self, job: str) -> Iterator[None]:
        """Send heartbeats of this rank during the block."""
        is_over = threading.Event()

        def send() -> None:
            try:
                own, key = self._rendezvous.open_store(), _beats(job, self._rendezvous.ranks.rank)
                while not is_over.wait(_HEARTBEAT_S):
                    own.add(key, 1)
            except Exception as error:  # this rank's own wait fails at the same store
                log.info("cannot send heartbeats to the other ranks: %s", first_line(error))

        threading.Thread(target=send, name="swansong-heartbeat", daemon=True).start()
        try:
            yield
        finally:
            is_over.set()


def _beats(job: str, rank: int) -> str:
    return f"{job}/beats/{rank}"
