# SPDX-License-Identifier: Apache-2.0
"""Rank 0 chooses the checkpoint that all ranks load, and publishes its choice in the job's store."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

from swansong._ranks.job_store import POLL_S, JobStore, wait_for_key
from swansong._ranks.rendezvous import FINISH_LIMIT_S, Rendezvous

RENDEZVOUS_LIMIT_S = 120.0
"""Longest wait of a restore for the ranks of the other VMs, and for a heartbeat of rank 0."""
ROLLBACK_LIMIT_S = 60.0
"""Longest wait of rank 0 for another rank to call ``rollback()``.  Each rank has completed the same step."""
_HEARTBEAT_S = 1.0


class RestoreChoice:
    """One rank's part in choosing a checkpoint for all ranks.

    A choice is a JSON object: generation and step of a commit, or ``error``.

    Args:
        rendezvous: of this rank.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous
        self._restores = 0

    def for_resume(self, choose: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
        """Return the checkpoint that rank 0 has chosen to resume from.

        Args:
            choose: called at rank 0 only, with the id of the job start.

        Raises:
            TimeoutError: the other ranks did not come to the rendezvous, or rank 0 sends no heartbeat.
            Exception: the store failed.
        """
        rendezvous_id = self._rendezvous.wait(RENDEZVOUS_LIMIT_S, FINISH_LIMIT_S)
        self._restores += 1
        key = f"{rendezvous_id}/restore/{self._restores}"
        return self._agree(key, lambda _: choose(rendezvous_id))

    def for_rollback(
        self,
        number: int,
        at_step: int,
        before_step: int,
        choose: Callable[[int], dict[str, Any]],
    ) -> dict[str, Any]:
        """Return the checkpoint that rank 0 has chosen for a rollback.  The new job start has not begun yet.

        Args:
            number: rollbacks of this process so far, including this one.
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
        return self._agree(key, lambda store: self._roll_back(store, all_steps, at_step, choose))

    def begin_rollback(self, number: int) -> str:
        """Begin the job start that follows the rollback; see :meth:`Rendezvous.begin_rollback`."""
        return self._rendezvous.begin_rollback(number)

    def _roll_back(
        self,
        store: JobStore,
        all_steps: list[str],
        at_step: int,
        choose: Callable[[int], dict[str, Any]],
    ) -> dict[str, Any]:
        stop = self._rendezvous.closed
        for rank, key in enumerate(all_steps):
            if not wait_for_key(store, key, stop, every_s=POLL_S, limit_s=ROLLBACK_LIMIT_S):
                return {"error": f"rank {rank} has not called rollback() after step {at_step}"}
        reported = [json.loads(value) for value in store.multi_get(all_steps)]
        if len({step for step, _ in reported}) > 1:
            steps = ", ".join(str(step) for step, _ in reported)
            return {"error": f"the ranks have called rollback() after different steps: {steps}"}
        return choose(min(before for _, before in reported))

    def _agree(self, key: str, choose: Callable[[JobStore], dict[str, Any]]) -> dict[str, Any]:
        """Rank 0 chooses and publishes; the other ranks wait for as long as rank 0 sends heartbeats."""
        store = self._rendezvous.open_store()
        if self._rendezvous.ranks.rank == 0:
            return self._publish(store, key, choose)
        beaten_mono_s, beats = time.monotonic(), -1
        stop = self._rendezvous.closed
        while not wait_for_key(store, key, stop, every_s=POLL_S, limit_s=_HEARTBEAT_S):
            new_beats = store.add(f"{key}/beats", 0)
            if new_beats != beats:
                beaten_mono_s, beats = time.monotonic(), new_beats
            elif time.monotonic() - beaten_mono_s > RENDEZVOUS_LIMIT_S:
                raise TimeoutError(f"rank 0 sent no heartbeat for {RENDEZVOUS_LIMIT_S:.0f} s")
        choice: dict[str, Any] = json.loads(store.get(key))
        return choice

    def _publish(
        self, store: JobStore, key: str, choose: Callable[[JobStore], dict[str, Any]]
    ) -> dict[str, Any]:
        is_chosen = threading.Event()

        def send_heartbeats() -> None:
            own = self._rendezvous.open_store()
            while not is_chosen.wait(_HEARTBEAT_S):
                own.add(f"{key}/beats", 1)

        threading.Thread(target=send_heartbeats, name="swansong-heartbeat", daemon=True).start()
        try:
            choice = choose(store)
        finally:
            is_chosen.set()
        store.set(key, json.dumps(choice))
        return choice
