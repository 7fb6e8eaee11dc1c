# SPDX-License-Identifier: Apache-2.0
"""The upload journal: whatever a crash leaves of it, what is read is what was once true."""

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
from swansongd.flush.journal import (
    FILE_NAME,
    SETS_MAX,
    Contents,
    ShardRecord,
    UploadJournal,
    UploadRecord,
    replay,
)
from swansongd.model import StagedFile, StoredShard
from swansongd.stores.base import PartReceipt, Upload

from testkit.flush_rig import PART, Flush, staged_set

FILE = StagedFile(path="d/a", size_bytes=2500, mtime_ns=17, inode=4)
HEADER = {"is": "journal", "version": 1, "run": "r", "store": "s3://b"}
UPLOAD = Upload("k", "u1", 2500, 1000)


def a_shard(path: str, key: str = "k") -> ShardRecord:
    file = StagedFile(path=path, size_bytes=2500, mtime_ns=1, inode=2)
    shard = StoredShard(
        path=path,
        size_bytes=2500,
        digest="blake3-parts:" + "0" * 64,
        key=key,
        part_size_bytes=1000,
        crc32c=7,
    )
    return ShardRecord(file, shard, (b"a" * 32, b"b" * 32, b"c" * 32))


def opened(directory: Path, *, run: str = "r", store_url: str = "s3://b") -> UploadJournal:
    return UploadJournal(directory, run=run, store_url=store_url)


def facts(contents: Contents) -> list[object]:
    """What the contents say, comparable."""
    return list(contents.entries())


def written(directory: Path, seed: int) -> list[list[object]]:
    """Write a journal at random; what it said after each record, beginning with nothing."""
    choose = random.Random(seed)
    journal = opened(directory)
    said = [facts(journal._contents)]
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
                name, held = choose.choice(uploads)
                receipt = PartReceipt(
                    choose.randrange(1, 4), f"e{next(keys)}", choose.getrandbits(32)
                )
                journal.part_stored(name, held, receipt, choose.randbytes(32))
            case 3:
                journal.shard_stored(name, a_shard(path, f"k{next(keys)}"))
            case _:
                held_now = journal.records_of(name).values()
                shards = [held.shard for held in held_now if isinstance(held, ShardRecord)]
                journal.committed(name, shards[: choose.randrange(3)])
        said.append(facts(copy.deepcopy(journal._contents)))
    return said


damages = st.sampled_from(["cut", "hole", "noise", "twice", "swapped", "flipped"])


@pytest.mark.fault("D05", "D06", "H01")
@settings(max_examples=150)
@given(seed=st.integers(0, 2**32), damage=damages, at=st.floats(0, 1), length=st.integers(1, 400))
def test_a_damaged_tail_says_what_was_true_once(
    seed: int, damage: str, at: float, length: int
) -> None:
    """Cut, zeroed, overwritten, doubled, reordered: what is read is the journal after some whole line."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        said = written(directory, seed)
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
        # A commit is several lines, so that there are states in between: none of them says more.
        whole = [facts(replay(b"".join(lines[:n]), HEADER)) for n in range(len(lines) + 1)]
        assert read in whole
        assert facts(replay(data, HEADER)) == said[-1]
        # The next life writes on, and a third one reads it all.
        (directory / FILE_NAME).write_bytes(damaged)
        second = opened(directory)
        second.shard_stored("9.n", a_shard("z"))
        assert facts(opened(directory)._contents) == facts(second._contents)


@settings(max_examples=25)
@given(cut=st.floats(0, 1), failing=st.integers(1, 20), seed=st.integers(0, 2**32))
def test_from_any_tail_the_set_arrives_whole(cut: float, failing: int, seed: int) -> None:
    """A flush is cut off, then its journal: the next life stores the set, whole, whatever is left."""
    with tempfile.TemporaryDirectory() as name:
        flush = Flush(Path(name))
        content = random.Random(seed).randbytes(9 * PART + 5)
        staged = staged_set(flush.run_directory, {"a": content, "b": content[:PART], "c": b""})
        numbers = count(1)

        def before(what: str, key: str) -> None:
            if next(numbers) >= failing:
                raise Transient("over")

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


def test_all_of_it_is_there_in_the_next_life(tmp_path: Path) -> None:
    """Uploads with their parts, shards, and what is known of the newest commit."""
    first = opened(tmp_path)
    held = first.upload_begun("1.a", FILE, UPLOAD)
    first.part_stored("1.a", held, PartReceipt(2, '"e;%"', 5), b"d" * 32)
    first.shard_stored("1.a", a_shard("x"))
    first.shard_stored("0.a", a_shard("y"))
    first.committed("0.a", [a_shard("y").shard])
    second = opened(tmp_path)
    assert second.records_of("1.a")["x"] == a_shard("x")
    upload = second.records_of("1.a")["d/a"]
    assert isinstance(upload, UploadRecord)
    assert (upload.file, upload.upload) == (FILE, UPLOAD)
    (part,) = upload.parts.values()
    assert (part.receipt.number, part.receipt.etag, part.receipt.crc32c) == (2, '"e;%"', 5)
    assert part.digest == b"d" * 32
    assert second.known("y") == a_shard("y")
    assert second.holds_upload("u1")
    assert second.records_of("0.a") == {}


@pytest.mark.parametrize("other", [{"run": "another"}, {"store_url": "s3://another"}])
def test_the_journal_of_another_run_or_store_is_not_believed(
    tmp_path: Path, other: dict[str, str]
) -> None:
    """Whoever points staging at another bucket begins anew."""
    opened(tmp_path).shard_stored("1.a", a_shard("x"))
    assert opened(tmp_path, **other).records_of("1.a") == {}


def test_only_what_the_manifest_names_is_known(tmp_path: Path) -> None:
    """A shard that was stored and then not committed may be deleted by anybody."""
    journal = opened(tmp_path)
    journal.shard_stored("1.a", a_shard("x", "k1"))
    journal.shard_stored("1.a", a_shard("y", "k2"))
    journal.committed("1.a", [a_shard("x", "k1").shard, a_shard("y", "other").shard])
    for one in (journal, opened(tmp_path)):
        assert one.known("x") is not None
        assert one.known("y") is None


def test_a_seed_is_for_who_knows_nothing(tmp_path: Path) -> None:
    """What this VM has committed itself counts more than what it has read."""
    journal = opened(tmp_path)
    journal.seed([a_shard("x", "old").shard])
    known = journal.known("x")
    assert known is not None
    assert known.part_digests == ()
    journal.shard_stored("1.a", a_shard("x", "new"))
    journal.committed("1.a", [a_shard("x", "new").shard])
    journal.seed([a_shard("x", "old").shard])
    known = opened(tmp_path).known("x")
    assert known is not None
    assert known.shard.key == "new"


def test_a_few_sets_are_remembered(tmp_path: Path) -> None:
    """The oldest one goes when there are too many."""
    journal = opened(tmp_path)
    for number in range(SETS_MAX + 3):
        journal.shard_stored(f"{number}.a", a_shard("x"))
    for one in (journal, opened(tmp_path)):
        held = [number for number in range(SETS_MAX + 3) if one.records_of(f"{number}.a")]
        assert held == list(range(3, SETS_MAX + 3))


def test_the_file_does_not_grow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written anew when most of it is past; nothing is lost by that."""
    monkeypatch.setattr(journals, "_COMPACT_OVER_BYTES", 5_000)
    journal = opened(tmp_path)
    for number in range(500):
        journal.shard_stored("1.a", a_shard(f"f{number % 3}", f"k{number}"))
        assert (tmp_path / FILE_NAME).stat().st_size < 12_000
    assert opened(tmp_path).records_of("1.a") == journal.records_of("1.a")
    assert len(list(tmp_path.iterdir())) == 1, "no temporary file stays"


@pytest.mark.fault("D02")
def test_a_torn_write_ends_the_journal_and_not_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk was full in mid-line: nothing more is appended, for it would not be read; memory goes on."""
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


def a_journal(*records: object) -> bytes:
    """A file whose chain is right, whatever its records contain."""
    data, chain = b"", ""
    for record in (HEADER, *records):
        body = record if isinstance(record, bytes) else json.dumps(record).encode()
        line, chain = journals._line(body, chain)
        data += line
    return data


UPLOADED = {
    "is": "upload", "set": "1.a", "file": ["d/a", 2500, 17, 4], "upload": ["k", "u1", 2500, 1000],
}  # fmt: skip
PART_OF_IT = {
    "is": "part", "set": "1.a", "path": "d/a", "receipt": [1, "e", 5], "digest": "00" * 32,
}  # fmt: skip
STORED = {
    "is": "shard", "set": "1.a", "file": ["x", 2500, 1, 2], "shard": ["blake3-parts:0", "k", 1000, 7],
    "parts": ["00" * 32] * 3, "is_referenced": False,
}  # fmt: skip
numbers = st.integers() | st.floats() | st.just(10**400)
anything = st.recursive(
    st.none() | st.booleans() | numbers | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)
fields = st.sampled_from(
    ["is", "set", "file", "upload", "path", "receipt", "digest", "shard", "parts"]
)


@pytest.mark.fault("S13")
@given(
    record=st.sampled_from([UPLOADED, PART_OF_IT, STORED]),
    changes=st.dictionaries(fields, anything),
    raw=st.none() | st.binary(max_size=50),
)
def test_no_record_raises_or_is_taken_over_unchecked(
    record: dict[str, object], changes: dict[str, object], raw: bytes | None
) -> None:
    """With a right chain any record may follow: reading ends there, or what is read can be used."""
    bad = record | changes if raw is None else raw.replace(b"\n", b" ")
    contents = replay(a_journal(UPLOADED, bad), HEADER)
    for held in contents.sets.get("1.a", {}).values():
        if isinstance(held, UploadRecord):
            assert not held.is_whole
            assert all(held.upload.part_length_bytes(number) > 0 for number in held.parts)
        else:
            assert len(held.part_digests) in (0, 3)
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
        STORED | {"is_referenced": 1},
        {"is": "shard"},
        {"is": ["shard"]},
    ],
)
def test_reading_ends_at_a_record_that_no_daemon_writes(bad: object) -> None:
    """What stood before it counts."""
    contents = replay(a_journal(UPLOADED, PART_OF_IT, bad, STORED), HEADER)
    assert facts(contents) == facts(replay(a_journal(UPLOADED, PART_OF_IT), HEADER))
    assert len(facts(contents)) == 2


@pytest.mark.fault("S1", "S3", "S7")
@pytest.mark.parametrize("plant", ["link", "hard link", "directory", "fifo", "2 TiB of nothing"])
def test_a_file_that_this_daemon_did_not_write_is_no_journal(tmp_path: Path, plant: str) -> None:
    """It is neither followed, nor read, nor waited for; the new journal takes its place where it can."""
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
def test_a_link_in_the_place_of_the_new_file_is_not_written_through(tmp_path: Path) -> None:
    """As a daemon that was killed, or another process, may have left it."""
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / f".{FILE_NAME}.new").symlink_to(tmp_path / "secret")
    opened(tmp_path / "own").shard_stored("1.a", a_shard("x"))
    assert (tmp_path / "secret").read_text() == "secret"
    assert set(opened(tmp_path / "own").records_of("1.a")) == {"x"}


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
def test_a_journal_of_another_user_is_not_believed(tmp_path: Path) -> None:
    """Nor is anything read or written in a directory of another user."""
    opened(tmp_path).shard_stored("1.a", a_shard("x"))
    os.chown(tmp_path / FILE_NAME, 65534, 65534)
    assert opened(tmp_path).records_of("1.a") == {}
    before = (tmp_path / FILE_NAME).read_bytes()
    os.chown(tmp_path, 65534, 65534)
    journal = opened(tmp_path)
    journal.shard_stored("1.a", a_shard("y"))
    assert set(journal.records_of("1.a")) == {"y"}, "memory is kept"
    assert (tmp_path / FILE_NAME).read_bytes() == before


def test_nobody_else_may_read_it(tmp_path: Path) -> None:
    """Upload ids are for the daemon alone."""
    opened(tmp_path)
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o077 == 0
