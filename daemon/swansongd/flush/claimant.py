# SPDX-License-Identifier: Apache-2.0
"""Claims generations of the run for this boot, and records them in staging."""

from __future__ import annotations

import platform
import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import structlog

from swansongd.bucket import catalog, commit
from swansongd.bucket.claim import ClaimObject
from swansongd.bucket.keys import RunKeys
from swansongd.errors import FencedError
from swansongd.flush.claim_record import ABANDONED_MAX, ClaimRecord, read_record
from swansongd.model import CheckpointId
from swansongd.stores.base import ObjectStore

_log = structlog.get_logger(__name__)


class Claimant:
    """Claims generations of one run.  Not thread-safe: only the committer's thread claims.

    All methods that ask the store raise FencedError, CorruptError and StoreError as
    :func:`swansongd.bucket.commit.claim_generation` does.

    Args:
        store: retries failed requests.
        keys: of the run.
        own_directory: the daemon's own directory in staging; holds the record.
        boot_id: of this boot of the kernel.
        wall: wall clock in UTC, as text; for people.
        several_vms: whether a generation belongs to one start of a job over several VMs.
        store_id: returns the id of a file store, which is recorded with the claim.
    """

    def __init__(
        self,
        store: ObjectStore,
        keys: RunKeys,
        own_directory: Path,
        *,
        boot_id: str,
        wall: Callable[[], str],
        several_vms: bool = False,
        store_id: Callable[[], str] = lambda: "",
    ) -> None:
        self._store = store
        self._keys = keys
        self._own_directory = own_directory
        self._boot_id = boot_id
        self._wall = wall
        self._store_id = store_id
        self.several_vms = several_vms
        record = read_record(own_directory, keys.run, store.url)
        self.sealed_under = record.generation or None
        """Generation of the sets that earlier daemons left in staging; None if unknown."""
        self.abandoned = frozenset(record.abandoned)
        """Sets that earlier daemons left in staging and that belong to an abandoned line of states."""
        if record.boot_id != boot_id or bool(record.job_start_id) != several_vms:
            # Another boot is another VM.  The sets in staging still belong to the recorded generation.
            record = replace(record, boot_id=boot_id, nonce="", job_start_id="", next_nonce="")
        self._record = record

    @property
    def job_start_id(self) -> str:
        """The job start that this boot has joined last; empty before the first."""
        return self._record.job_start_id

    @property
    def recorded_generation(self) -> int:
        """The newest generation that this disk has a record of; 0 without one."""
        return self._record.generation

    def resume(self) -> ClaimObject:
        """The recorded claim, if the store has it and no other VM has taken the run over; or a new claim."""
        record = self._record
        if record.next_nonce:
            return self._resume_requested(record)
        if not record.nonce:
            return self.claim_new(record.job_start_id)
        claim = catalog.claim_of(self._store, self._keys, record.generation)
        if claim is None or not record.is_of_claim(claim):
            _log.warning(
                "claim_record_refused",
                generation=record.generation,
                claim=f"{self._store.url}/{self._keys.generation(record.generation)}",
                hint="The store has no such claim, or the claim of another VM; a new one is made",
            )
            return self.claim_new(record.job_start_id)
        # A restarted daemon continues under its generation, unless another VM has taken over.
        commit.ensure_not_fenced(self._store, self._keys, claim)
        return claim

    def claim_new(self, job_start_id: str = "") -> ClaimObject:
        """Claim the next generation, or share the one of this job start."""
        if not self._record.next_nonce:
            self._save(replace(self._record, next_nonce=secrets.token_hex(16)))
        nonce = self._record.next_nonce
        identity = {"boot_id": self._boot_id, "host": platform.node(), "claimed": self._wall()}
        claim = commit.claim_generation(
            self._store, self._keys, identity=identity, nonce=nonce, job_start_id=job_start_id
        )
        if not claim.honours_if_absent:
            _log.error(
                "store_ignores_create_if_absent",
                url=self._store.url,
                hint="Two VMs with this run could overwrite each other's commits; use another store",
            )
        record = replace(
            self._record,
            generation=claim.generation,
            nonce=nonce,
            job_start_id=job_start_id,
            next_nonce="",
        )
        self._save(record)
        return claim.content

    def record_request(self, abandoned: tuple[CheckpointId, ...], job_start_id: str = "") -> None:
        """Record, before a claim, that a generation without these sets begins."""
        self._save(
            replace(
                self._record,
                job_start_id=job_start_id,
                next_nonce=secrets.token_hex(16),
                abandoned=abandoned[-ABANDONED_MAX:],
            )
        )

    def record_store(self) -> None:
        """Record the id of the store, before the first claim in it."""
        if self._record.store_id != self._store_id():
            self._save(replace(self._record, store_id=self._store_id()))

    def _resume_requested(self, record: ClaimRecord) -> ClaimObject:
        """The claim that was requested before a failure or a restart, whether or not it was made by then."""
        if not self.several_vms:
            newest = catalog.newest_generation(self._store, self._keys, above=record.generation)
            is_newer = newest > record.generation
            claim = catalog.claim_of(self._store, self._keys, newest) if is_newer else None
            if claim is not None and claim.nonce == record.next_nonce:
                self._save(replace(record, generation=newest, nonce=claim.nonce, next_nonce=""))
                return claim
            if record.nonce and is_newer:
                raise FencedError(record.generation, newest)
        return self.claim_new(record.job_start_id)

    def _save(self, record: ClaimRecord) -> None:
        self._record = record
        try:
            record.save(self._own_directory)
        except OSError as error:
            _log.warning(
                "claim_not_recorded",
                error=str(error),
                hint="A restarted daemon claims another generation, which is harmless",
            )
