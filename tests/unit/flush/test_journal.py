# SPDX-License-Identifier: Apache-2.0
"""The upload journal: after any damage, reading returns an earlier state of the journal."""

from __future__ import annotations

import copy
import json
import os
import random
import tempfile
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from swansong import openat
from swansongd.core.events import Flushed, FlushFailed
from swansongd.errors import Transient
from swansongd.flush import journal as journals
from swansongd.flush.journal import FILE_NAME, SETS_MAX, Contents, UploadJournal, replay
from swansongd.flush.records import PartRecord, ShardRecord, UploadRecord
from swansongd.model import CommitRef, StagedFile
from swansongd.stores.base import PartReceipt, Upload

from testkit.committed import named_shard
from testkit.flush_rig import PART, FlushRig, staged_set

FILE = StagedFile(path="d/a", size_bytes=2500, mtime_ns=17, inode=4)
HEADER = {"is": "journal", "version": 2, "run": "r", "store": "s3://b"}
UPLOAD = Upload("k", "u1", 2500, 1000)


def a_shard(path: str, key: str = "k") -> ShardRecord:
    file = StagedFile(path=path, size_bytes=2500, mtime_ns=1, inode=2)
    return ShardRecord(file, named_shard(path, 2500, key))


def opened(directory: Path, *, run: str = "r", store_url: str = "s3://b") -> UploadJournal:
    return UploadJournal(directory, run=run, store_url=store_url)


def known(journal: UploadJournal) -> dict[str, ShardRecord]:
    """The shards of the newest commit, by path."""
    return dict(journal._contents.known)


def facts(contents: Contents) -> list[object]:
    """The contents in a comparable form."""
    return list(contents.entries())


def written(directory: Path, seed: int) -> list[list[object]]:
    """Write random entries; returns the contents before the first entry and after each one."""
    choose = random.Random(seed)
    journal = opened(directory)
    states = [facts(journal._contents)]
    uploads: list[tuple[str, UploadRecord]] = []
    keys = count()
    for _ in range(choose.randrange(1, 25)):
        name = f"{choose.randrange(6)}.n"
        path = f"f{choose.randrange(3)}"
        match choose.randrange(5):
            case 0:
                upload = replace(UPLOAD, key=f"k{next(keys)}", upload_id=f"u{next(keys)}")
                uploads.append((name, journal.upload_begun(name, replace(FILE, path=path), upload)))
            case 1 | 2 if uploads:
                name, record = choose.choice(uploads)
                receipt = PartReceipt(
                    choose.randrange(1, 4), f"e{next(keys)}", choose.getrandbits(32)
                )
                journal.part_stored(name, record, PartRecord(receipt, choose.randbytes(32)))
            case 3:
                journal.shard_stored(name, a_shard(path, f"k{next(keys)}"))
            case _:
                records = journal.records_of(name).values()
                shards = [record.shard for record in records if isinstance(record, ShardRecord)]
                ref = CommitRef(1, choose.randrange(4))
                journal.committed(name, shards[: choose.randrange(3)], ref)
        states.append(facts(copy.deepcopy(journal._contents)))
    return states


damages = st.sampled_from(["cut", "hole", "noise", "twice", "swapped", "flipped"])


@pytest.mark.fault("D05", "D06", "H01")
@settings(max_examples=150)
@given(seed=st.integers(0, 2**32), damage=damages, at=st.floats(0, 1), length=st.integers(1, 400))
def test_a_damaged_journal_is_read_up_to_a_whole_line(
    seed: int, damage: str, at: float, length: int
) -> None:
    """The file is truncated, zeroed, overwritten, doubled or reordered."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        states = written(directory, seed)
        data = (directory / FILE_NAME).read_bytes()
        lines = data.splitlines(keepends=True)
        cut = int(at * len(data))
        line = min(int(at * len(lines)), len(lines) - 1)
        damaged = {
            "cut": data[:cut],
            "hole": data[:cut] + bytes(length) + data[cut + length :],
            "noise": data[:cut] + random.Random(seed).randbytes(length),
            "twice": b"".join([*lines[: line + 1], *lines[line:]]),
            "swapped": b"".join(
                [*lines[:line], *reversed(lines[line : line + 2]), *lines[line + 2 :]]
            ),
            "flipped": data[:cut] + bytes([data[cut] ^ 4]) + data[cut + 1 :]
            if cut < len(data)
            else data,
        }[damage]
        read = facts(replay(damaged, HEADER))
        # A commit is several lines, so also the states between them are valid.
        whole = [facts(replay(b"".join(lines[:n]), HEADER)) for n in range(len(lines) + 1)]
        assert read in whole
        assert facts(replay(data, HEADER)) == states[-1]
        # The next daemon appends, and a third one reads everything.
        (directory / FILE_NAME).write_bytes(damaged)
        second = opened(directory)
        second.shard_stored("9.n", a_shard("z"))
        assert facts(opened(directory)._contents) == facts(second._contents)


@settings(max_examples=25)
@given(cut=st.floats(0, 1), failing=st.integers(1, 20), seed=st.integers(0, 2**32))
def test_a_set_arrives_whole_whatever_the_journal_lost(cut: float, failing: int, seed: int) -> None:
    """A flush fails and its journal is truncated; the next daemon stores the set completely."""
    with tempfile.TemporaryDirectory() as name:
        flush = FlushRig(Path(name))
        content = random.Random(seed).randbytes(9 * PART + 5)
        staged = staged_set(flush.run_directory, {"a": content, "b": content[:PART], "c": b""})
        numbers = count(1)

        def before(what: str, key: str) -> None:
            if next(numbers) >= failing:
                raise Transient("503")

        flush.store.before = before
        flush.engine.start("f", staged, 1)
        assert isinstance(flush.outcome(), FlushFailed | Flushed)
        flush.store.before = lambda *_: None
        path = flush.own_directory / FILE_NAME
        data = path.read_bytes()
        path.write_bytes(data[: int(cut * len(data))])
        flush.start_daemon()
        flush.flushed(staged)
        assert not flush.store.overwritten


def test_the_next_daemon_reads_all_records(tmp_path: Path) -> None:
    """Uploads with their parts, shards, and the shards of the newest commit."""
    first = opened(tmp_path)
    record = first.upload_begun("1.a", FILE, UPLOAD)
    stored = PartRecord(PartReceipt(2, '"e;%"', 5), b"d" * 32, b"h" * 8)
    first.part_stored("1.a", record, stored)
    first.shard_stored("1.a", a_shard("x"))
    first.shard_stored("0.a", a_shard("y"))
    first.committed("0.a", [a_shard("y").shard], CommitRef(1, 0))
    second = opened(tmp_path)
    assert second.records_of("1.a")["x"] == a_shard("x")
    upload = second.records_of("1.a")["d/a"]
    assert isinstance(upload, UploadRecord)
    assert (upload.file, upload.upload) == (FILE, UPLOAD)
    assert upload.parts == {2: stored}
    assert upload.parts[2].crc32c == 5
    assert known(second) == {"y": a_shard("y")}
    assert second.holds_upload("u1")
    assert second.records_of("0.a") == {}


@pytest.mark.parametrize("other", [{"run": "another"}, {"store_url": "s3://another"}])
def test_the_journal_of_another_run_or_store_is_ignored(
    tmp_path: Path, other: dict[str, str]
) -> None:
    opened(tmp_path).shard_stored("1.a", a_shard("x"))
    assert opened(tmp_path, **other).records_of("1.a") == {}


def test_only_shards_in_the_manifest_are_known(tmp_path: Path) -> None:
    """A shard that was stored but not committed may be deleted, so no set may reference it."""
    journal = opened(tmp_path)
    journal.shard_stored("1.a", a_shard("x", "k1"))
    journal.shard_stored("1.a", a_shard("y", "k2"))
    shards = [a_shard("x", "k1").shard, a_shard("y", "other").shard]
    journal.committed("1.a", shards, CommitRef(1, 1))
    for one in (journal, opened(tmp_path)):
        assert known(one).keys() == {"x"}


@pytest.mark.parametrize(("other", "newest"), [(1, "new"), (2, "new"), (3, "other")])
def test_the_shards_of_the_newest_commit_are_known(tmp_path: Path, other: int, newest: str) -> None:
    """This VM has made a commit, and reads the newest one of the run, which another VM may have made."""
    journal = opened(tmp_path)
    journal.seed(CommitRef(1, 1), [a_shard("x", "old").shard])
    assert known(journal)["x"].shard == a_shard("x", "old").shard
    journal.shard_stored("1.a", a_shard("x", "new"))
    journal.committed("1.a", [a_shard("x", "new").shard], CommitRef(1, 2))
    journal.superseded(CommitRef(1, other))
    assert known(journal).keys() == ({"x"} if newest == "new" else set())
    journal.seed(CommitRef(1, other), [a_shard("x", "other").shard])
    for one in (journal, opened(tmp_path)):
        assert known(one)["x"].shard == a_shard("x", newest).shard


def test_the_shards_of_another_vm_have_a_limited_number_of_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index of a job over many VMs must fit into the memory of each daemon."""
    monkeypatch.setattr(journals, "SEED_PARTS_MAX", 2)
    journal = opened(tmp_path)
    shards = [a_shard(name, name).shard for name in "abc"]
    journal.seed(CommitRef(1, 1), shards)
    parts = -(-shards[0].size_bytes // shards[0].part_size_bytes)
    assert len(known(journal)) == 2 // parts


def test_an_older_commit_does_not_replace_the_newest_one(tmp_path: Path) -> None:
    """Its objects may be deleted at any time."""
    journal = opened(tmp_path)
    for name, step in (("2.a", 2), ("1.a", 1)):
        journal.shard_stored(name, a_shard("x", name))
        journal.committed(name, [a_shard("x", name).shard], CommitRef(1, step))
    for one in (journal, opened(tmp_path)):
        assert known(one)["x"].shard == a_shard("x", "2.a").shard
        assert not one.records_of("1.a")


def test_the_number_of_sets_is_limited(tmp_path: Path) -> None:
    """A further set replaces the oldest one."""
    journal = opened(tmp_path)
    for number in range(SETS_MAX + 3):
        journal.shard_stored(f"{number}.a", a_shard("x"))
    for one in (journal, opened(tmp_path)):
        sets = [number for number in range(SETS_MAX + 3) if one.records_of(f"{number}.a")]
        assert sets == list(range(3, SETS_MAX + 3))


def test_the_size_of_the_file_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is compacted when most entries are obsolete, and loses nothing."""
    monkeypatch.setattr(journals, "_COMPACT_OVER_BYTES", 5_000)
    journal = opened(tmp_path)
    for number in range(500):
        journal.shard_stored("1.a", a_shard(f"f{number % 3}", f"k{number}"))
        assert (tmp_path / FILE_NAME).stat().st_size < 12_000
    assert opened(tmp_path).records_of("1.a") == journal.records_of("1.a")
    assert len(list(tmp_path.iterdir())) == 1, "no temporary file is left"


@pytest.mark.fault("D02")
def test_after_a_torn_write_only_memory_is_updated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk was full: lines after a torn line would not be read, so none is appended."""
    journal = opened(tmp_path)
    journal.shard_stored("1.a", a_shard("x"))

    def half(fd: int, data: bytes) -> None:
        real(fd, data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    real = openat.write_all
    monkeypatch.setattr(openat, "write_all", half)
    journal.shard_stored("1.a", a_shard("y"))
    monkeypatch.undo()
    journal.shard_stored("1.a", a_shard("z"))
    assert set(journal.records_of("1.a")) == {"x", "y", "z"}
    assert set(opened(tmp_path).records_of("1.a")) == {"x"}


def a_journal(*entries: object) -> bytes:
    """A file with valid digests and these entries, valid or not."""
    data, chain = b"", ""
    for entry in (HEADER, *entries):
        body = entry if isinstance(entry, bytes) else json.dumps(entry).encode()
        line, chain = journals._line(body, chain)
        data += line
    return data


UPLOADED = {
    "is": "upload", "set": "1.a", "file": ["d/a", 2500, 17, 4], "upload": ["k", "u1", 2500, 1000],
}  # fmt: skip
PART_OF_IT = {
    "is": "part", "set": "1.a", "path": "d/a", "receipt": [1, "e", 5], "digest": "00" * 32,
    "head": "00" * 8,
}  # fmt: skip
UPLOADED_IN_PART = {
    "is": "upload", "set": "1.a", "file": ["d/a", 2500, 17, 4], "upload": ["k", "u1", 1500, 1000],
    "equal": [1], "digests": "00" * 32, "heads": "00" * 8, "crc32c": [7],
    "objects": [["l", 3000]], "extents": [[0, 0, 400], [0, 1000, 600]],
}  # fmt: skip
STORED = {
    "is": "shard", "set": "1.a", "file": ["x", 2500, 1, 2], "shard": [1000, 7], "parts": "00" * 96,
    "heads": "", "sent": "k", "objects": [["k", 1500], ["l", 3000]],
    "extents": [[0, 0, 1500], [1, 2000, 1000]],
}  # fmt: skip
numbers = st.integers() | st.floats() | st.just(10**400)
anything = st.recursive(
    st.none() | st.booleans() | numbers | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)
fields = st.sampled_from(sorted({*UPLOADED, *UPLOADED_IN_PART, *PART_OF_IT, *STORED}))


@pytest.mark.fault("S13")
@given(
    entry=st.sampled_from([UPLOADED, UPLOADED_IN_PART, PART_OF_IT, STORED]),
    changes=st.dictionaries(fields, anything),
    raw=st.none() | st.binary(max_size=50),
)
def test_no_entry_raises_or_is_applied_unchecked(
    entry: dict[str, object], changes: dict[str, object], raw: bytes | None
) -> None:
    """After an invalid entry with a valid digest, reading ends, or the records are usable."""
    bad = entry | changes if raw is None else raw.replace(b"\n", b" ")
    contents = replay(a_journal(UPLOADED, bad), HEADER)
    for record in contents.sets.get("1.a", {}).values():
        if isinstance(record, UploadRecord):
            assert not record.is_whole
            assert all(record.upload.part_length_bytes(number) > 0 for number in record.parts)
            equal = [e for part in record.equal.values() for e in part.extents]
            equal_bytes = sum(extent.size_bytes for extent in equal)
            assert record.upload.size_bytes + equal_bytes == record.file.size_bytes
            assert len(record.indices) == record.parts_max
        else:
            assert len(record.shard.part_digests) % 32 == 0
            assert sum(e.size_bytes for e in record.shard.extents) == record.shard.size_bytes
    assert facts(contents) == facts(replay(a_journal(*contents.entries()), HEADER))


@pytest.mark.parametrize(
    "bad",
    [
        b"[" * 100_000,
        b"[1]",
        b"",
        b'{"is": "upload", "is": "upload"}',
        UPLOADED | {"upload": ["k", "u1", 2500, 0]},
        UPLOADED | {"upload": ["k", "u1", -1, 1000]},
        UPLOADED | {"file": ["d/a", 2500, 17]},
        PART_OF_IT | {"receipt": [4, "e", 5]},
        PART_OF_IT | {"receipt": [0, "e", 5]},
        PART_OF_IT | {"digest": "xx"},
        STORED | {"parts": ["00" * 32] * 2},
        STORED | {"sent": 1},
        STORED | {"heads": "00" * 8},
        STORED | {"extents": [[0, 0, 1500], [1, 2500, 1000]]},
        UPLOADED_IN_PART | {"equal": [3]},
        UPLOADED_IN_PART | {"equal": [2]},
        UPLOADED_IN_PART | {"equal": [1, 1]},
        UPLOADED_IN_PART | {"upload": ["k", "u1", 2500, 1000]},
        UPLOADED_IN_PART | {"upload": ["k", "u1", 1500, 0]},
        UPLOADED_IN_PART | {"crc32c": []},
        {"is": "shard"},
        {"is": ["shard"]},
    ],
)
def test_reading_ends_at_an_invalid_entry(bad: object) -> None:
    """The entries before it are valid."""
    contents = replay(a_journal(UPLOADED, PART_OF_IT, bad, STORED), HEADER)
    assert facts(contents) == facts(replay(a_journal(UPLOADED, PART_OF_IT), HEADER))
    assert len(facts(contents)) == 2


@pytest.mark.fault("S1", "S3", "S7")
@pytest.mark.parametrize("plant", ["link", "hard link", "directory", "fifo", "2 TiB hole"])
def test_a_file_that_this_daemon_did_not_write_is_ignored(tmp_path: Path, plant: str) -> None:
    """Links are not followed, a FIFO does not block, and a new journal replaces the file if possible."""
    own, elsewhere = tmp_path / "own", tmp_path / "elsewhere"
    own.mkdir()
    opened(own).shard_stored("1.a", a_shard("x"))
    os.rename(own / FILE_NAME, elsewhere)
    before = elsewhere.read_bytes()
    path = own / FILE_NAME
    match plant:
        case "link":
            path.symlink_to(elsewhere)
        case "hard link":
            os.link(elsewhere, path)
        case "directory":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case _:
            path.touch()
            os.truncate(path, 2**41)
    with capture_logs() as logs:
        journal = opened(own)
    assert logs[0]["event"] == "journal_not_read"
    assert journal.records_of("1.a") == {}
    journal.shard_stored("1.a", a_shard("y"))
    assert elsewhere.read_bytes() == before
    if plant != "directory":
        assert set(opened(own).records_of("1.a")) == {"y"}


@pytest.mark.fault("S1")
def test_a_link_with_the_name_of_the_temporary_file_is_not_followed(tmp_path: Path) -> None:
    """Another process may have created it."""
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / f".{FILE_NAME}.new").symlink_to(tmp_path / "secret")
    opened(tmp_path / "own").shard_stored("1.a", a_shard("x"))
    assert (tmp_path / "secret").read_text() == "secret"
    assert set(opened(tmp_path / "own").records_of("1.a")) == {"x"}


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
def test_a_journal_of_another_user_is_ignored(tmp_path: Path) -> None:
    """In a directory of another user, nothing is read or written."""
    opened(tmp_path).shard_stored("1.a", a_shard("x"))
    os.chown(tmp_path / FILE_NAME, 65534, 65534)
    assert opened(tmp_path).records_of("1.a") == {}
    before = (tmp_path / FILE_NAME).read_bytes()
    os.chown(tmp_path, 65534, 65534)
    journal = opened(tmp_path)
    journal.shard_stored("1.a", a_shard("y"))
    assert set(journal.records_of("1.a")) == {"y"}, "the records in memory remain"
    assert (tmp_path / FILE_NAME).read_bytes() == before


def test_only_the_daemon_may_read_the_journal(tmp_path: Path) -> None:
    """It contains upload ids."""
    opened(tmp_path)
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o077 == 0
