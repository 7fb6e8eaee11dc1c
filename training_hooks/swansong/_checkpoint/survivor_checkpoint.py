# SPDX-License-Identifier: Apache-2.0
"""The last checkpoint of a job that has lost ranks, written by the others.

The daemons, the bucket and a restore see the set of a smaller job: its ranks and VMs are counted without
gaps, and it is whole when they have all written.  The field ``without_ranks`` names the missing ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from pathlib import Path

from swansong._checkpoint.saver import Saver
from swansong._log import log
from swansong._ranks.agreement import Agreement, Ranks
from swansong._ranks.job_store import (
    STORE_PREFIX,
    JobStore,
    first_line,
    open_job_store,
    open_vm_store,
)
from swansong._ranks.survivors import Survivors, agree, named
from swansong.layout import RankManifest
from swansong.protocol import Failed, Welcome
from swansong.rank_files import Snapshots

CONNECT_LIMIT_S = 5.0
"""Longest wait for the job's store, which may have ended with a lost VM."""
_NAMES_MAX = 5


class Divisible(Snapshots):
    """A state whose tensors some of the ranks can save for all."""

    def return_to_boundary(self) -> None:
        """Return to the state of the last step; RuntimeError: it does not exist any more."""
        raise NotImplementedError

    def snapshot_without(
        self, lost: Collection[int], ranks: Ranks
    ) -> tuple[Callable[[Path], object], list[str]]:
        """Return a function that writes this rank's part, and the names of the tensors that no rank holds."""
        raise NotImplementedError


def save_without_lost_ranks(
    state: Divisible,
    ranks: Ranks,
    manifest: RankManifest,
    agreement: Agreement,
    welcome: Welcome,
) -> bool:
    """Save the state of the last step together with all other living ranks; raises nothing.

    Args:
        state: of this rank.
        ranks: position of this process in the job.
        manifest: all of the rank manifest but ``files``, as for a save with all ranks.
        agreement: of this rank; gets the result.
        welcome: of the daemon, with the staging directory of the run.

    Returns:
        True if this rank's part is in staging.
    """
    step, start_id = manifest.step, manifest.start_id
    try:
        state.return_to_boundary()
        found = _agree(ranks, start_id, step, welcome)
        if found is None or ranks.rank not in found.nodes:
            why = "all ranks are alive" if found is None else "the others have decided without it"
            log.info("rank %s does not save its last step %s: %s", ranks.rank, step, why)
            return False
        lost = found.without(ranks.world_size)
        place = Ranks.among(found.nodes)[ranks.rank]
        write, missing = state.snapshot_without(lost, place)
        if missing:
            raise RuntimeError(_refusal(lost, missing))
    except Exception as error:
        reason = f"no checkpoint without the lost ranks: {first_line(error)}"
        log.warning("step %s: %s", step, reason)
        request_id = manifest.request_id
        agreement.done(request_id, step, Failed(request_id, step, reason))
        return False
    log.warning("saving step %s without rank %s", step, named(lost))
    manifest = dataclasses.replace(manifest, **place.in_manifest(), without_ranks=named(lost))
    nonce = ranks.nonce(start_id, step, f"without {named(lost)}", welcome.naming_secret)
    saver = Saver(lambda: write, in_background=False)
    return saver.save(agreement, welcome.staging, nonce, manifest)


def agree_to_wait(ranks: Ranks, start_id: str, welcome: Welcome, *, is_requested: bool) -> bool:
    """Whether the ranks of this VM that got SIGTERM wait for a request; raises nothing.

    One of them may get the request a little too late.  The first rank decides for all, by whether it has one.
    """
    try:
        store = _store_of_vm(ranks, start_id, welcome)
        return store.compare_set("waits", "", str(is_requested)) == str(True).encode()
    except Exception as error:
        log.info("this rank decides alone about its end: %s", first_line(error))
        return is_requested


def _agree(ranks: Ranks, start_id: str, step: int, welcome: Welcome) -> Survivors | None:
    """Agree with the living ranks of all VMs or, if the job's store is lost, with those of this VM."""
    if ranks.nodes > 1:
        try:
            store = open_job_store(CONNECT_LIMIT_S)
            return agree(store, f"{start_id}/survivors", ranks, step)
        except Exception as error:
            log.warning(
                "the store of the job is lost, too: %s; only the ranks of this VM agree",
                first_line(error),
            )
    return agree(_store_of_vm(ranks, start_id, welcome), "survivors", ranks, step)


def _store_of_vm(ranks: Ranks, start_id: str, welcome: Welcome) -> JobStore:
    nonce = ranks.nonce(start_id, 0, "survivors", welcome.naming_secret)
    return open_vm_store(welcome.staging, f"{STORE_PREFIX}{nonce}", CONNECT_LIMIT_S)


def _refusal(lost: list[int], missing: list[str]) -> str:
    shown = ", ".join(missing[:_NAMES_MAX])
    more = f" and {len(missing) - _NAMES_MAX} more" if len(missing) > _NAMES_MAX else ""
    return f"only the lost rank {named(lost)} held parts of the state: {shown}{more}"
