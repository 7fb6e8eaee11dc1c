# SPDX-License-Identifier: Apache-2.0
"""The claim record: the file in staging with the starts of the training that this disk has seen."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from swansong import bounds, openat
from swansong.bounds import BoundsError
from swansong_bucket.model import Start
from swansong_bucket.stores.base import ObjectStore
from swansong_bucket.stores.file.store import FileStore

STARTS_MAX = 64
_FILE_NAME = "claim.json"
_BYTES_MAX = 64 * 2**10
_KEYS_MAX = 16


@dataclass(frozen=True, slots=True)
class RecordedStart:
    """A start whose generation was claimed, or was about to be."""

    id: str
    boot_id: str
    generation: int = 0
    """0 before the claim."""
    nodes: int = 1
    """Number of VMs of the job."""
    process_ns: int = 0
    """See :class:`~swansong_bucket.model.Start`, as for the next one."""
    began_ticks: int = 0


@dataclass(frozen=True, slots=True)
class ClaimRecord:
    """The starts of the training in the order of their generations, the newest last.

    The record alone proves nothing: a generation counts if the claim in the store names the same start.  A
    start is recorded before its claim and after it, so a daemon that was killed in between finds the claim.
    """

    run: str
    store_url: str
    starts: tuple[RecordedStart, ...] = ()
    store_id: str = ""
    """Of a file store: the id in its marker, see :mod:`swansong_bucket.stores.file.tree`."""

    def save(self, own_directory: Path) -> None:
        """Replace the record in staging.

        Raises:
            OSError: the file could not be written; the earlier record remains.
        """
        body = {
            "run": self.run,
            "store_url": self.store_url,
            "store_id": self.store_id,
            "starts": [asdict(each) for each in self.starts],
        }
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
                starts=tuple(
                    _start(each) for each in bounds.items(body.get("starts"), "starts", STARTS_MAX)
                ),
                store_id=bounds.identifier(body.get("store_id", ""), "store_id"),
            )
        except (OSError, BoundsError):
            return None

    def is_of(self, run: str, store_url: str) -> bool:
        """Whether the record belongs to this run and this store."""
        return (self.run, self.store_url) == (run, store_url)

    def known_starts(self, boot_id: str) -> tuple[Start, ...]:
        """The starts for the decision loop.

        Sets of other boots are committed only if no other VM has taken the run over since, and those of an
        earlier start over several VMs never.  A start without a generation gets none if a later one has one.

        Args:
            boot_id: of this boot.
        """
        last = self.starts[-1].id if self.starts else ""
        newest = max((each.generation for each in self.starts), default=0)
        overtaken = takewhile(lambda each: each.generation < newest, self.starts)
        unclaimed = {each.id for each in overtaken if not each.generation}
        return tuple(
            Start(
                id=each.id,
                nodes=each.nodes,
                generation=each.generation or None,
                process_ns=each.process_ns,
                began_ticks=each.began_ticks if each.boot_id == boot_id else 0,
                is_of_boot=each.boot_id == boot_id,
                is_open=each.boot_id == boot_id
                and each.id not in unclaimed
                and (each.nodes == 1 or each.id == last),
            )
            for each in self.starts
        )


def _start(value: Any) -> RecordedStart:
    facts = bounds.mapping(value, "a start", _KEYS_MAX)
    start_id = bounds.identifier(facts.get("id"), "id of a start")
    if not start_id:
        raise BoundsError("a start has no id")
    return RecordedStart(
        id=start_id,
        boot_id=bounds.text(facts.get("boot_id"), "boot_id of a start", bounds.ID_CHARS_MAX),
        generation=bounds.integer(
            facts.get("generation"), "generation of a start", 0, bounds.GENERATION_MAX
        ),
        nodes=bounds.integer(facts.get("nodes"), "nodes of a start", 1, bounds.NODES_MAX),
        process_ns=bounds.integer(facts.get("process_ns"), "process_ns of a start", 0, 2**63 - 1),
        began_ticks=bounds.integer(
            facts.get("began_ticks"), "began_ticks of a start", 0, 2**63 - 1
        ),
    )


def read_record(
    own_directory: Path, run: str, store_url: str, *, is_of_any: bool = False
) -> ClaimRecord:
    """The record of this run and store; an empty record if there is none."""
    record = ClaimRecord.load(own_directory, is_of_any=is_of_any)
    if record is None or not record.is_of(run, store_url):
        return ClaimRecord(run, store_url)
    return record


def record_end_of_starts(own_directory: Path) -> None:
    """Treat the recorded starts as starts of an earlier boot, because all their processes have ended.

    A later start may then take the run back from another VM.

    Raises:
        OSError: the file could not be written.
    """
    record = ClaimRecord.load(own_directory)
    if record is not None:
        ended = tuple(replace(each, boot_id="") for each in record.starts)
        replace(record, starts=ended).save(own_directory)


def expect_recorded_store(store: ObjectStore, own_directory: Path, run: str) -> None:
    """Make a file store compare its id with the id that the daemon of this VM has recorded, if any.

    Root reads the daemon's record; other users can read only their own.
    """
    if isinstance(store, FileStore):
        record = read_record(own_directory, run, store.url, is_of_any=os.geteuid() == 0)
        store.expect(record.store_id)
