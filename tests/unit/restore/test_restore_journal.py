# SPDX-License-Identifier: Apache-2.0
"""The journal of a restore: its whole lines are read, also after a crash damaged its end."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swansongd.model import CommitRef
from swansongd.restore import journal

from testkit.committed import named_shard

SHARDS = tuple(
    named_shard(path, size, f"k/{path}", part_size_bytes=10)
    for path, size in (("a", 35), ("b/c", 0), ("d", 10))
)
"""They have four parts, one, and one."""
REF = CommitRef(3, 70)
IDENTITY = journal.identity_of("r", REF, SHARDS)
HEAD = journal.first_line(IDENTITY)

parts = st.sampled_from([(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (2, 0)])
notes = st.lists(st.tuples(parts, st.binary(min_size=32, max_size=32)), max_size=12)


def written(noted: list[tuple[tuple[int, int], bytes]]) -> bytes:
    return HEAD + b"".join(journal.line(*part, digest) for part, digest in noted)


@given(notes)
def test_written_lines_are_read(noted: list[tuple[tuple[int, int], bytes]]) -> None:
    """The last line of each part counts."""
    assert journal.parse(written(noted), IDENTITY, SHARDS) == dict(noted)


@given(notes, st.data())
def test_a_torn_end_costs_only_the_torn_line(
    noted: list[tuple[tuple[int, int], bytes]], data: st.DataObject
) -> None:
    """Truncated anywhere after the first line: the whole lines before the cut are read."""
    whole = written(noted)
    end = data.draw(st.integers(len(HEAD), len(whole)))
    count = whole[:end].count(b"\n") - 1
    assert journal.parse(whole[:end], IDENTITY, SHARDS) == dict(noted[:count])


@given(notes, st.binary(max_size=80))
def test_garbage_at_the_end_is_skipped(
    noted: list[tuple[tuple[int, int], bytes]], garbage: bytes
) -> None:
    """Zeros or other bytes that a power cut left: no error, and no part that does not exist."""
    got = journal.parse(written(noted) + garbage + b"\n", IDENTITY, SHARDS)
    assert got is not None
    assert got.items() >= dict(noted).items() or b" " in garbage
    assert set(got) <= {(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (2, 0)}


@given(st.binary(max_size=200))
def test_other_bytes_are_not_a_journal(data: bytes) -> None:
    """Without the first line no part is read."""
    assert journal.parse(data, IDENTITY, SHARDS) is None
    assert journal.parse(HEAD[: len(data) % len(HEAD)], IDENTITY, SHARDS) is None


@pytest.mark.parametrize(
    "part", ["0 4", "1 1", "2 1", "3 0", "-1 0", "0 -1", "00000000000 0", "x 0", "0", ""]
)
def test_a_part_that_does_not_exist_is_skipped(part: str) -> None:
    """A number beyond the shards, an index beyond the parts, and text that is not a number."""
    data = HEAD + f"{part} {'ab' * 32}\n".encode() + journal.line(2, 0, b"x" * 32)
    assert journal.parse(data, IDENTITY, SHARDS) == {(2, 0): b"x" * 32}


def test_only_the_same_files_of_the_same_commit_have_the_same_identity() -> None:
    """Run, commit, names, order, sizes, part sizes and digests matter; keys of objects do not."""
    first, *others = SHARDS
    elsewhere = [named_shard("a", 35, "r/data/other", part_size_bytes=10), *others]
    assert journal.identity_of("r", REF, elsewhere) == IDENTITY
    different = [
        journal.identity_of("q", REF, SHARDS),
        journal.identity_of("r", CommitRef(3, 71), SHARDS),
        journal.identity_of("r", CommitRef(4, 70), SHARDS),
        journal.identity_of("r", REF, others),
        journal.identity_of("r", REF, [*others, first]),
        *(
            journal.identity_of("r", REF, [replace(first, **change), *others])
            for change in (
                {"path": "z"}, {"size_bytes": 36}, {"part_size_bytes": 11}, {"part_digests": b"e" * 128}
            )
        ),
    ]  # fmt: skip
    assert len({IDENTITY, *different}) == 1 + len(different)
