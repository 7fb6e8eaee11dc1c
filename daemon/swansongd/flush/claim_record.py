# SPDX-License-Identifier: Apache-2.0
"""The claim record: the file in staging that tells a restarted daemon which generation it has claimed."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from swansong import bounds, openat
from swansong.bounds import BoundsError

from swansongd.bucket.claim import ClaimObject
from swansongd.model import CheckpointId
from swansongd.stores.base import ObjectStore
from swansongd.stores.file.store import FileStore

ABANDONED_MAX = 1000
"""Twice the number of sets that a scan reports."""
_FILE_NAME = "claim.json"
_BYTES_MAX = 256 * 2**10


@dataclass(frozen=True, slots=True)
class ClaimRecord:
    """The generation that this boot has claimed.

    The record alone proves nothing.  It counts if the claim object in the store has its nonce or its job
    start.  The record is written before and after each claim, so a daemon that was killed in between
    recognises its own claim.
    """

    run: str
    store_url: str
    boot_id: str
    generation: int
    """0 before the first claim."""
    nonce: str
    job_start_id: str = ""
    """Of a job over several VMs, see :mod:`swansongd.core.nodes`."""
    next_nonce: str = ""
    """Of a requested claim, which may exist already; empty if none was requested."""
    abandoned: tuple[CheckpointId, ...] = ()
    """Sets in staging that belong to an abandoned line of states, see :mod:`swansongd.core.lineage`."""
    store_id: str = ""
    """Of a file store: the id in its marker, see :mod:`swansongd.stores.file.tree`."""

    def save(self, own_directory: Path) -> None:
        """Replace the record in staging.

        Raises:
            OSError: the file could not be written; the earlier record remains.
        """
        body = {name: getattr(self, name) for name in self.__slots__}
        body["abandoned"] = [str(abandoned) for abandoned in self.abandoned]
        own_fd = openat.open_directory(own_directory, owners={os.geteuid()})
        try:
            openat.replace_file(_FILE_NAME, json.dumps(body).encode(), dir_fd=own_fd)
        finally:
            os.close(own_fd)

    @classmethod
    def load(cls, own_directory: Path, *, is_of_any: bool = False) -> ClaimRecord | None:
        """The record; None if this user has written none, or a field is out of bounds.

        Args:
            is_of_any: accept the record of another user: root reads the daemon's record.
        """
        owners = None if is_of_any else {os.geteuid()}
        try:
            own_fd = openat.open_directory(own_directory, owners=owners)
            try:
                data = openat.read_file(
                    _FILE_NAME, dir_fd=own_fd, max_bytes=_BYTES_MAX, owners=owners
                )
            finally:
                os.close(own_fd)
            body = bounds.json_object(data, "the claim record", _BYTES_MAX)
            return cls(
                run=bounds.text(body.get("run"), "run", bounds.ID_CHARS_MAX),
                store_url=bounds.text(body.get("store_url"), "store_url"),
                boot_id=bounds.text(body.get("boot_id"), "boot_id", bounds.ID_CHARS_MAX),
                generation=bounds.integer(
                    body.get("generation"), "generation", 0, bounds.GENERATION_MAX
                ),
                nonce=bounds.text(body.get("nonce"), "nonce", bounds.ID_CHARS_MAX),
                job_start_id=bounds.text(
                    body.get("job_start_id"), "job_start_id", bounds.ID_CHARS_MAX
                ),
                next_nonce=bounds.text(
                    body.get("next_nonce", ""), "next_nonce", bounds.ID_CHARS_MAX
                ),
                abandoned=tuple(
                    _checkpoint_id(each)
                    for each in bounds.items(body.get("abandoned", []), "abandoned", ABANDONED_MAX)
                ),
                store_id=bounds.identifier(body.get("store_id", ""), "store_id"),
            )
        except (OSError, BoundsError):
            return None

    def is_of(self, run: str, store_url: str) -> bool:
        """Whether the record belongs to this run and this store."""
        return (self.run, self.store_url) == (run, store_url)

    def is_of_claim(self, claim: ClaimObject) -> bool:
        """Whether the record describes this claim."""
        own = ClaimObject(
            run=self.run,
            generation=self.generation,
            nonce=self.nonce,
            job_start_id=self.job_start_id,
        )
        return bool(self.nonce) and own.is_shared_with(claim)


def read_record(
    own_directory: Path, run: str, store_url: str, *, is_of_any: bool = False
) -> ClaimRecord:
    """The record of this run and store; an empty record if there is none."""
    record = ClaimRecord.load(own_directory, is_of_any=is_of_any)
    if record is None or not record.is_of(run, store_url):
        return ClaimRecord(run, store_url, "", 0, "")
    return record


def expect_recorded_store(store: ObjectStore, own_directory: Path, run: str) -> None:
    """Make a file store compare its id with the id that the daemon of this VM has recorded, if any.

    Root reads the daemon's record; other users can read only their own.
    """
    if isinstance(store, FileStore):
        record = read_record(own_directory, run, store.url, is_of_any=os.geteuid() == 0)
        store.expect(record.store_id)


def _checkpoint_id(value: object) -> CheckpointId:
    """The inverse of ``str(CheckpointId)``.

    Raises:
        BoundsError: the value is not a checkpoint id.
    """
    step, dot, nonce = bounds.text(value, "abandoned", bounds.ID_CHARS_MAX + 20).partition(".")
    if not (dot and step.isascii() and step.isdigit() and len(step) <= len(str(bounds.STEP_MAX))):
        raise BoundsError(f"abandoned contains {bounds.shown(value)}, which is not a set")
    return CheckpointId(int(step), nonce)
