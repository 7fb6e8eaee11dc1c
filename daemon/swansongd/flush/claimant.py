# SPDX-License-Identifier: Apache-2.0
"""Claims generations for the starts of the training on this VM, and records them in staging."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import structlog
from swansong_bucket.errors import FencedError
from swansong_bucket.format.claim import ClaimObject
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.model import Start
from swansong_bucket.runs import catalog, commit
from swansong_bucket.stores.base import ObjectStore

from swansongd.core.events import ClaimGeneration, FenceFound
from swansongd.flush.claim_record import STARTS_MAX, ClaimRecord, RecordedStart, read_record

_log = structlog.get_logger(__name__)


def fence_of(error: FencedError, start_id: str = "") -> FenceFound:
    """The event for the decision loop.

    Args:
        error: of a claim, a commit or a check.
        start_id: the start whose claim was refused.
    """
    is_same_number = error.newer == error.own
    return FenceFound(error.newer, is_same_number=is_same_number, start_id=start_id)


class Claimant:
    """Claims generations of one run.  Not thread-safe: only the committer's thread claims.

    All methods that ask the store raise FencedError, CorruptError and StoreError as
    :func:`swansong_bucket.runs.commit.claim_generation` does.

    Args:
        store: retries failed requests.
        keys: of the run.
        own_directory: the daemon's own directory in staging; holds the record.
        boot_id: of this boot of the kernel.
        vm: id of this VM and boot, see :meth:`~swansongd.staging.prepare.RunDirectory.vm`.
        wall: wall clock in UTC, as text; for people.
        store_id: returns the id of a file store, which is recorded with the claim.
    """

    def __init__(
        self,
        store: ObjectStore,
        keys: RunKeys,
        own_directory: Path,
        *,
        boot_id: str,
        vm: str,
        wall: Callable[[], str],
        store_id: Callable[[], str] = lambda: "",
    ) -> None:
        self._store = store
        self._keys = keys
        self._own_directory = own_directory
        self._boot_id = boot_id
        self.vm = vm
        self._wall = wall
        self._store_id = store_id
        self._record = read_record(own_directory, keys.run, store.url)
        self.newest: ClaimObject | None = None
        """The newest claim that this life of the daemon has made or found, as it is in the store."""

    @property
    def starts(self) -> tuple[Start, ...]:
        """The recorded starts, the newest last."""
        return self._record.known_starts(self._boot_id)

    def owns(self, claim: ClaimObject) -> bool:
        """Whether a start of this VM holds this claim.

        This VM made the claim since it booted, or its start is recorded: then another VM of the job made it,
        or this VM before it booted.
        """
        is_recorded = any(each.id == claim.start for each in self._record.starts)
        return is_recorded or claim.identity.get("vm") == self.vm

    @property
    def recorded_generation(self) -> int:
        """The newest generation that this disk has a record of; 0 without one."""
        return max((each.generation for each in self._record.starts), default=0)

    @property
    def boot_generation(self) -> int:
        """The newest generation that this boot has claimed; 0 without one."""
        of_boot = (each for each in self._record.starts if each.boot_id == self._boot_id)
        return max((each.generation for each in of_boot), default=0)

    def fence_by_other(self, error: FencedError) -> FenceFound | None:
        """The event if another VM has the run; None if a later start of this VM has it."""
        found = fence_of(error)
        return found if found.is_news(self.recorded_generation) else None

    def resume(self) -> commit.Claim | None:
        """The claim of the newest recorded start, if its sets may still be committed; None without one.

        A claim that was only requested is left to the ranks of its start.

        Raises:
            FencedError: another VM has taken the run over since this boot claimed it.
        """
        last = self._newest_claimed()
        if last is None:
            return None
        is_of_boot = last.boot_id == self._boot_id
        claim = catalog.claim_of(self._store, self._keys, last.generation)
        if claim is None or claim.start != last.id:
            _log.warning(
                "claim_record_refused",
                generation=last.generation,
                claim=f"{self._store.url}/{self._keys.generation(last.generation)}",
                hint="The store has no such claim, or the claim of another VM",
            )
            self._forget_generations()
            again = ClaimGeneration(last.id, last.nodes, last.process_ns, last.began_ticks)
            return self.claim(again) if is_of_boot else None
        try:
            commit.ensure_not_fenced(self._store, self._keys, claim, owns=self.owns)
        except FencedError:
            if is_of_boot:
                raise
            return None  # another VM has continued the run since this disk was used
        self.newest = claim
        return commit.Claim(claim, honours_if_absent=True)

    def _newest_claimed(self) -> RecordedStart | None:
        for each in reversed(self._record.starts):
            if each.generation:
                return each
            if each.nodes > 1:
                return None  # it may have begun on other VMs: the sets of earlier starts are over
        return None

    def claim(
        self, request: ClaimGeneration, is_wanted: Callable[[], bool] = lambda: True
    ) -> commit.Claim:
        """Claim the next generation for a start, or find the claim that it has.

        A start over several VMs takes the run over, and so does the next one on this VM: the launcher of the
        job decides who trains.  A start on one VM does not take the run back from another VM after an earlier
        one on this VM alone: a trainer in a crash loop would do so without end.

        Args:
            is_wanted: False once the request is withdrawn, or a newer one is made.

        Raises:
            Stopped: the claim was not wanted any more, and was not made.
        """
        start_id, nodes = request.start_id, request.nodes
        held = self._ensure_not_overtaken(start_id) if nodes == 1 else 0
        start = RecordedStart(
            start_id,
            self._boot_id,
            nodes=nodes,
            process_ns=request.process_ns,
            began_ticks=request.began_ticks,
        )
        is_recorded = any(each.id == start_id for each in self._record.starts)
        self._note(start)
        identity = {
            "vm": self.vm,
            "boot_id": self._boot_id,
            "host": platform.node(),
            "claimed": self._wall(),
        }
        claim = commit.claim_generation(
            self._store,
            self._keys,
            start_id=start_id,
            identity=identity,
            owns=self.owns,
            later=request.later,
            held=held,
            # With the record lost, an early start of this boot would get a second generation.
            look_back=commit.LOOK_BACK if request.is_live else STARTS_MAX,
            is_wanted=is_wanted,
        )
        if not claim.honours_if_absent:
            _log.error(
                "store_ignores_create_if_absent",
                url=self._store.url,
                hint="Two VMs with this run could overwrite each other's commits; use another store",
            )
        self._note(replace(start, generation=claim.generation))
        if self.newest is None or self.newest.generation < claim.generation:
            self.newest = claim.content
        # After a lost reply the next attempt finds its own claim, which is no earlier one.
        return replace(claim, is_found=claim.is_found and not is_recorded)

    def _ensure_not_overtaken(self, start_id: str) -> int:
        """Check that no other VM has taken the run over from an earlier start of this boot.

        Returns:
            The generation of that start; 0 without one.
        """
        held = self._newest_claimed()
        claim = None if held is None else self.claim_of(held.generation)
        if held is None or claim is None or held.id == start_id:
            return 0
        if held.boot_id != self._boot_id or held.nodes != 1:
            return 0
        commit.ensure_not_fenced(self._store, self._keys, claim, owns=self.owns)
        return held.generation

    def claim_of(self, generation: int) -> ClaimObject | None:
        """The claim of a generation that a recorded start holds; None if there is none."""
        if self.newest is not None and self.newest.generation == generation:
            return self.newest  # byte for byte, because a mirror compares the newest claim
        for each in self._record.starts:
            if 0 < each.generation == generation:  # 0: requested only
                return ClaimObject(run=self._keys.run, generation=generation, start=each.id)
        return None

    def record_store(self) -> None:
        """Record the id of the store, before the first claim in it."""
        if self._record.store_id != self._store_id():
            self._save(replace(self._record, store_id=self._store_id()))

    def _note(self, start: RecordedStart) -> None:
        """Record this start before those with a greater generation, unless its own is recorded already."""
        starts = self._record.starts
        if any(each.id == start.id and each.generation for each in starts):
            return
        others = [each for each in starts if each.id != start.id]
        later = (n for n, each in enumerate(others) if 0 < start.generation < each.generation)
        others.insert(next(later, len(others)), start)
        self._save(replace(self._record, starts=tuple(others[-STARTS_MAX:])))

    def _forget_generations(self) -> None:
        starts = tuple(replace(each, generation=0) for each in self._record.starts)
        self._save(replace(self._record, starts=starts))

    def _save(self, record: ClaimRecord) -> None:
        self._record = record
        try:
            record.save(self._own_directory)
        except OSError as error:
            _log.warning(
                "claim_not_recorded",
                error=str(error),
                hint="A restarted daemon finds the claim when its ranks name their start",
            )
