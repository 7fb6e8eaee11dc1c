# SPDX-License-Identifier: Apache-2.0
"""The file of known chunks: whatever its content, it costs only the lines that are damaged."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.model import CHUNK_BYTES_MAX, Chunk, CommitRef, Extent
from swansongd.flush import known as knowns
from swansongd.flush.known import FILE_NAME, KnownChunks

from testkit.committed import chunk_of, whole_shard
from testkit.forked import peak_bytes
from testkit.other_users import needs_root

CHUNKS = [chunk_of(bytes([number]), nonce=f"n{number}") for number in range(8)]
STORE = "s3://b"


def opened(directory: Path, *, run: str = "r", store_url: str = STORE) -> KnownChunks:
    return KnownChunks(directory, run=run, store_url=store_url, is_data=RunKeys(run).is_data)


def written(directory: Path) -> bytes:
    """The content of a file with all chunks."""
    known = opened(directory)
    for chunk in CHUNKS:
        known.created(chunk, {})
    return (directory / FILE_NAME).read_bytes()


def read(directory: Path) -> set[Chunk]:
    return set(opened(directory)._created.values())


@pytest.mark.parametrize("other", [{"run": "other"}, {"store_url": "s3://other"}])
def test_the_file_of_another_run_or_store_is_ignored(tmp_path: Path, other: dict[str, str]) -> None:
    written(tmp_path)
    assert not opened(tmp_path, **other)._created


def test_a_lost_chunk_stays_forgotten_after_a_restart(tmp_path: Path) -> None:
    """Another object of its size under its key would pass the check of a restarted daemon."""
    known = opened(tmp_path)
    chunk = chunk_of(b"a")
    known.created(chunk, {})
    known.created(chunk_of(b"b"), {})
    known.is_gone(chunk)
    after = opened(tmp_path)
    assert after.find(chunk.digest) is None
    assert after.find(chunk_of(b"b").digest) is not None


def test_committed_chunks_leave_the_file(tmp_path: Path) -> None:
    """The newest commit of the run has them, or a newer commit makes them obsolete."""
    written(tmp_path)
    known = opened(tmp_path)
    known.committed([whole_shard("a", *CHUNKS[:5])], CommitRef(1, 1))
    known.created(chunk_of(b"new"), {})
    assert read(tmp_path) == {*CHUNKS[5:], chunk_of(b"new")}


damage = st.one_of(
    st.tuples(st.just("cut"), st.integers(0, 2000), st.just(b"")),
    st.tuples(st.just("flip"), st.integers(0, 2000), st.just(b"")),
    st.tuples(st.just("insert"), st.integers(0, 2000), st.binary(max_size=40)),
    st.tuples(st.just("double"), st.integers(0, 10), st.just(b"")),
    st.tuples(st.just("swap"), st.integers(0, 10), st.just(b"")),
)


@pytest.mark.fault("D05", "D06", "H01")
@given(damages=st.lists(damage, max_size=4))
def test_damage_costs_only_the_damaged_lines(damages: list[tuple[str, int, bytes]]) -> None:
    """The file is truncated, altered, or has further bytes; its lines are doubled or change places."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        data = written(directory)
        whole = data.split(b"\n")
        for kind, place, junk in damages:
            at = min(place, max(0, len(data) - 1))
            lines = data.split(b"\n")
            if kind == "cut":
                data = data[:at]
            elif kind == "flip" and data:
                data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
            elif kind == "insert":
                data = data[:at] + junk + data[at:]
            elif kind == "double":
                data = b"\n".join(lines[: at + 1] + lines[at:])
            elif kind == "swap":
                data = b"\n".join([*lines[:1], *lines[at + 1 :], *lines[1 : at + 1]])
        (directory / FILE_NAME).write_bytes(data)
        lines = data.split(b"\n")
        intact = {chunk for chunk, line in zip(CHUNKS, whole[1:], strict=False) if line in lines}
        assert read(directory) == (intact if lines[0] == whole[0] else set())


@pytest.mark.fault("S13")
@pytest.mark.parametrize(
    "text",
    [
        "",
        CHUNKS[0].key,
        f"{CHUNKS[0].key} 01",
        f"{CHUNKS[0].key} {CHUNK_BYTES_MAX + 1}",
        f"{CHUNKS[0].key}/../x 1",
        f"other{CHUNKS[0].key} 1",
        f"r/commits/00000001/{'0' * 64}-a 1",
        "\udcff 1",
        "x" * 10_000_000,
    ],
)
def test_a_hostile_line_with_a_valid_check_is_passed_over(tmp_path: Path, text: str) -> None:
    data = written(tmp_path)
    with (tmp_path / FILE_NAME).open("ab") as file:
        raw = text.encode(errors="surrogateescape")
        file.write(blake3(raw).hexdigest(8).encode() + b" " + raw + b"\n")
        file.write(knowns._line(f"{chunk_of(b'last').key} 4"))
    assert read(tmp_path) == {*CHUNKS, chunk_of(b"last")}
    assert len((tmp_path / FILE_NAME).read_bytes()) < 2 * len(data), "it is replaced by a short one"


@pytest.mark.fault("S7", "S13")
@pytest.mark.parametrize("line", [b"\n", b"x" * 2**15 + b"\n"])
def test_the_largest_file_costs_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: bytes
) -> None:
    """Three times its size, whatever its lines are."""
    size_bytes = 2**16
    monkeypatch.setattr(knowns, "FILE_BYTES_MAX", size_bytes)
    monkeypatch.setattr(knowns, "CREATED_MAX", 2**8)
    data = written(tmp_path)
    (tmp_path / FILE_NAME).write_bytes(data + line * ((size_bytes - len(data)) // len(line)))
    assert peak_bytes(lambda: opened(tmp_path)) < 3 * size_bytes + 100 * 2**8


def test_the_number_of_chunks_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest ones are forgotten, in memory and in the file."""
    monkeypatch.setattr(knowns, "CREATED_MAX", 50)
    known = opened(tmp_path)
    chunks = [chunk_of(b"%d" % number) for number in range(500)]
    for chunk in chunks:
        known.created(chunk, {})
    assert len((tmp_path / FILE_NAME).read_bytes().splitlines()) <= 51
    assert 45 <= len(read(tmp_path)) <= 50
    assert read(tmp_path) <= set(chunks[450:])


@pytest.mark.fault("S1", "S3", "S7")
@pytest.mark.parametrize("plant", ["link", "directory", "2 TiB hole"])
def test_a_file_that_this_daemon_did_not_write_is_ignored(tmp_path: Path, plant: str) -> None:
    """A new file replaces it if possible.  ``openat.read_file`` refuses more kinds of files."""
    own, elsewhere = tmp_path / "own", tmp_path / "elsewhere"
    own.mkdir()
    before = written(own)
    os.rename(own / FILE_NAME, elsewhere)
    path = own / FILE_NAME
    if plant == "link":
        path.symlink_to(elsewhere)
    elif plant == "directory":
        path.mkdir()
    else:
        path.touch()
        os.truncate(path, 2**41)
    with capture_logs() as logs:
        known = opened(own)
    assert "known_chunks_not_read" in [line["event"] for line in logs]  # other threads may log, too
    assert not known._created
    known.created(chunk_of(b"new"), {})
    assert known.find(chunk_of(b"new").digest)
    assert elsewhere.read_bytes() == before
    if plant != "directory":
        assert read(own) == {chunk_of(b"new")}


@pytest.mark.fault("S1")
def test_a_link_with_the_name_of_the_temporary_file_is_not_followed(tmp_path: Path) -> None:
    """Another process may have created it."""
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / f".{FILE_NAME}.new").symlink_to(tmp_path / "secret")
    written(tmp_path / "own")
    assert (tmp_path / "secret").read_text() == "secret"
    assert read(tmp_path / "own") == set(CHUNKS)


@needs_root
def test_a_file_of_another_user_is_ignored(tmp_path: Path) -> None:
    """In a directory of another user, nothing is read or written."""
    data = written(tmp_path)
    os.chown(tmp_path / FILE_NAME, 65534, 65534)
    assert not read(tmp_path)
    (tmp_path / FILE_NAME).write_bytes(data)
    os.chown(tmp_path, 65534, 65534)
    known = opened(tmp_path)
    known.created(chunk_of(b"new"), {})
    assert set(known._created.values()) == {chunk_of(b"new")}, "memory is used"
    assert (tmp_path / FILE_NAME).read_bytes() == data


def test_only_the_daemon_may_read_the_file(tmp_path: Path) -> None:
    """Its nonces are not public."""
    written(tmp_path)
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o077 == 0


@pytest.mark.fault("D02")
def test_after_a_torn_write_only_memory_is_updated_until_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk was full: no line is appended to half a line.  The next commit writes the file again."""
    known = opened(tmp_path)
    known.created(CHUNKS[0], {})
    with monkeypatch.context() as patched:
        patched.setattr("swansong.openat.write_all", torn)
        known.created(CHUNKS[1], {})
    known.created(CHUNKS[2], {})
    assert all(known.find(chunk.digest) for chunk in CHUNKS[:3])
    torn_file = (tmp_path / FILE_NAME).read_bytes()
    assert read(tmp_path) == {CHUNKS[0]}
    (tmp_path / FILE_NAME).write_bytes(torn_file)
    known.committed([whole_shard("a", CHUNKS[0])], CommitRef(1, 1))
    known.created(CHUNKS[3], {})
    assert read(tmp_path) == set(CHUNKS[1:4])


def torn(fd: int, data: bytes) -> None:
    os.write(fd, data[: len(data) // 2])
    raise OSError(28, "No space left on device")


# ---------------------------------------------------------------------- what a set may name


def test_the_newest_commit_decides(tmp_path: Path) -> None:
    """Commits of this VM, and the newest one of the run, which another VM may have made."""
    known = opened(tmp_path)
    first, second, third = (chunk_of(b"%d" % number) for number in range(3))
    known.seed(CommitRef(1, 1), [whole_shard("x", first)])
    assert known.names(first)
    known.committed([whole_shard("x", second)], CommitRef(1, 2))
    assert known.names(second)
    assert not known.holds([first])
    known.seed(CommitRef(1, 1), [whole_shard("x", first)])
    known.committed([whole_shard("x", first)], CommitRef(1, 1))
    known.superseded(CommitRef(1, 1))
    assert known.holds([second]), "an older commit does not replace the newest one"
    assert not known.holds([first])
    known.superseded(CommitRef(2, 1))
    assert not known.holds([second])
    assert known.find(second.digest) is None
    known.seed(CommitRef(2, 1), [whole_shard("x", third)])
    assert known.names(third)


def test_a_chunk_is_not_known_by_its_digest_alone(tmp_path: Path) -> None:
    """Another object has the same digest in its name."""
    known = opened(tmp_path)
    known.created(CHUNKS[0], {})
    known.committed([whole_shard("x", CHUNKS[1])], CommitRef(1, 1))
    for chunk in CHUNKS[:2]:
        other = Chunk(chunk.key + "f", chunk.size_bytes)
        assert known.holds([chunk])
        assert not known.holds([other])
        assert not known.names(other)
        known.is_gone(other)
        assert known.holds([chunk])


def test_a_chunk_of_an_earlier_life_gives_way_to_one_that_this_life_has_created(
    tmp_path: Path,
) -> None:
    """The store may have lost the earlier one, which it has yet to confirm."""
    written(tmp_path)
    known, again = opened(tmp_path), chunk_of(bytes([0]), nonce="again")
    assert known.created(again, {}) == again
    assert known.find(again.digest) == knowns.Found(Extent.whole(again), is_confirmed=True)


def test_a_chunk_that_is_forgotten_while_the_store_confirms_it_stays_forgotten(
    tmp_path: Path,
) -> None:
    """The store has lost another chunk meanwhile: no manifest may name this one."""
    known = opened(tmp_path)
    known.created(CHUNKS[0], {})
    known.distrust()
    assert not known.confirmed(CHUNKS[0], 0.0)
    assert known.age_s(CHUNKS[0]) is None


def test_small_files_are_known_while_their_chunk_is(tmp_path: Path) -> None:
    known = opened(tmp_path)
    small = Extent(CHUNKS[0], 0, 1)
    known.created(CHUNKS[0], {small: knowns.SmallSums(7, b"s" * 32)})
    known.committed([whole_shard("x", CHUNKS[0])], CommitRef(1, 1))
    assert known.find(b"s" * 32) == knowns.Found(small, is_confirmed=False)
    assert [known.has_seen(*each) for each in ((7, 1), (7, 2), (8, 1))] == [True, False, False]
    known.superseded(CommitRef(1, 2))
    assert known.find(b"s" * 32) is None
    assert not known.has_seen(7, 1)
    assert opened(tmp_path).find(b"s" * 32) is None
    known.committed([whole_shard("y", CHUNKS[1])], CommitRef(1, 3))
    assert not known._small | known._seen, "they would add up over a year"
    known.created(CHUNKS[2], {Extent(CHUNKS[2], 0, 1): knowns.SmallSums(9, b"t" * 32)})
    known.distrust()
    assert not known._small | known._seen, "they would add up while the store takes no manifest"
