# SPDX-License-Identifier: Apache-2.0
"""The claim record: the file in staging with the starts of the training that this disk has seen."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

from swansong import bounds, openat
from swansong.bounds import BoundsError
from swansong_bucket.model import Start
from swansong_bucket.stores.base import ObjectStore
from swansong_bucket.stores.file.store import FileStore
from swansong_bucket.util.forms import ID, Form, Kind, or_else, several, text, whole

STARTS_MAX = 64
_FILE_NAME = "claim.json"
_BYTES_MAX = 64 * 2**10


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


def _start_id(value: object, name: str) -> str:
    found = bounds.identifier(value, name)
    if not found:
        raise BoundsError("a start has no id")
    return found


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
        data = json.dumps(_RECORD.write(self)).encode()
        with openat.held(openat.open_directory(own_directory, owners={os.geteuid()})) as own_fd:
            openat.replace_file(_FILE_NAME, data, dir_fd=own_fd)

    @classmethod
    def load(cls, own_directory: Path, *, is_of_any: bool = False) -> ClaimRecord | None:
        """The record; None if this user has written none, or a field is out of bounds.

        Args:
            is_of_any: accept the record of another user: root reads the daemon's record.
        """
        owners = None if is_of_any else {os.geteuid()}
        try:
            with openat.held(openat.open_directory(own_directory, owners=owners)) as own_fd:
                data = openat.read_file(
                    _FILE_NAME, dir_fd=own_fd, max_bytes=_BYTES_MAX, owners=owners
                )
            body = bounds.json_object(data, _FILE_NAME, _BYTES_MAX)
            return _RECORD.read(body, _FILE_NAME)
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


_START = Form(
    RecordedStart,
    id=Kind(_start_id),
    boot_id=text(bounds.ID_CHARS_MAX),
    generation=whole(0, bounds.GENERATION_MAX),
    nodes=whole(1, bounds.NODES_MAX),
    process_ns=whole(0, 2**63 - 1),
    began_ticks=whole(0, 2**63 - 1),
)
_RECORD = Form(
    ClaimRecord,
    run=text(bounds.ID_CHARS_MAX),
    store_url=text(),
    store_id=or_else(ID, ""),
    starts=several(_START.kind, STARTS_MAX),
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
