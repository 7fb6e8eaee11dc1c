# SPDX-License-Identifier: Apache-2.0
"""The journal of a restore: its whole lines are read, also after a crash damaged its end."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swansong import openat
from swansong_bucket.format.manifest import chunks_of
from swansong_bucket.model import Chunk, CommitRef
from swansong_bucket.transfer import journal, target

from testkit.committed import named_shard

SHARDS = tuple(
    named_shard(path, size, chunk_bytes=10) for path, size in (("a", 35), ("b/c", 0), ("d", 10))
)
"""They have four chunks, none, and one."""
CHUNKS = chunks_of(SHARDS)
REF = CommitRef(3, 70)
IDENTITY = journal.identity_of("r", REF, 2)
HEAD = journal.first_line(IDENTITY)

notes = st.lists(st.integers(0, len(CHUNKS) - 1), max_size=12)


def of_store(noted: list[int]) -> dict[Chunk, bool]:
    """These chunks; every other one came from the store."""
    return {CHUNKS[number]: number % 2 == 0 for number in noted}


def written(noted: list[int]) -> bytes:
    lines = (
        journal.line(chunk, is_of_store=each)
        for n in noted
        for chunk, each in of_store([n]).items()
    )
    return HEAD + b"".join(lines)


@given(notes, st.data())
def test_a_torn_end_costs_only_the_torn_line(noted: list[int], data: st.DataObject) -> None:
    """Truncated anywhere after the first line: the whole lines before the cut are read."""
    whole = written(noted)
    end = data.draw(st.integers(len(HEAD), len(whole)))
    count = whole[:end].count(b"\n") - 1
    found = journal.parse(whole[:end], IDENTITY, CHUNKS)
    assert found == of_store(noted[:count])


def test_only_the_same_commit_has_the_same_identity() -> None:
    """Run, generation, step and number of VMs matter."""
    different = [
        journal.identity_of("q", REF, 2),
        journal.identity_of("r", CommitRef(3, 71), 2),
        journal.identity_of("r", CommitRef(4, 70), 2),
        journal.identity_of("r", replace(REF, is_final=True), 2),
        journal.identity_of("r", REF, 3),
    ]
    assert len({IDENTITY, *different}) == 1 + len(different)


def test_a_journal_names_the_chunks_of_another_choice_of_files() -> None:
    """A restore of fewer files reads the journal of a restore of all files, and the other way round."""
    data = written(list(range(len(CHUNKS))))
    assert journal.parse(data, IDENTITY, CHUNKS[2:]) == of_store([2, 3, 4])
    assert journal.parse(written([3, 4]), IDENTITY, CHUNKS) == of_store([3, 4])


@pytest.mark.fault("S1")
@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_other_users_could_write_continues_no_restore(
    tmp_path: Path, mode: int
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "file").chmod(mode)
    with openat.held(openat.open_directory(tmp_path)) as fd, pytest.raises(openat.UnsafeFileError):
        target._open_own("file", os.O_RDONLY, dir_fd=fd)
