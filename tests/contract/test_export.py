# SPDX-License-Identifier: Apache-2.0
"""``swansong export`` gives the files of a commit back: to a directory, SeaweedFS, or fake-gcs-server."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

import boto3
import pytest
from google.cloud import storage
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.stores.file.store import FileStore
from swansong_bucket.transfer.target import RestoreTarget
from swansong_tools.commands import export, main, plain_files
from swansong_tools.commands.plain_files import PlainFiles

from testkit.committed import commit, configuration, file_store, flip_bit, object_path, tree
from testkit.foreign_servers import BUCKET, fake_gcs
from testkit.store_backends import BUCKET as S3_BUCKET

NOISE = random.Random(4)
FILES = {
    "rank-00000/model.bin": NOISE.randbytes(25_000),
    "rank-00000/optimizer.bin": NOISE.randbytes(9_000),
    "rank-00000/empty": b"",
    "config.json": b"{}",
}


class Place:
    """The target of an export: its URL, and the files there."""

    def __init__(
        self, url: str, files: Callable[[], dict[str, bytes]], written: Callable[[str], object]
    ) -> None:
        self.url = url
        self.files = files
        self.written = written
        """Identifies one write of a file."""


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return file_store(tmp_path / "store")


@pytest.fixture(params=["directory", "s3", "gcs"])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    with ExitStack() as stack:
        match request.param:
            case "directory":
                to = tmp_path / "exported"
                yield Place(str(to), lambda: tree(to), lambda path: (to / path).stat().st_ino)
            case "s3":
                server = request.getfixturevalue("open_cloud")("seaweedfs").server
                for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
                    monkeypatch.setenv(f"AWS_{name}", "test")
                monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
                monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
                yield _in_s3(f"export-{tmp_path.name}/")
            case _:
                server = stack.enter_context(fake_gcs(tmp_path))
                monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
                monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "project")
                yield _in_gcs(f"export-{tmp_path.name}/")


def _in_s3(prefix: str) -> Place:
    client: Any = boto3.client("s3")

    def files() -> dict[str, bytes]:
        listed = client.list_objects_v2(Bucket=S3_BUCKET, Prefix=prefix).get("Contents", [])
        return {
            each["Key"].removeprefix(prefix): client.get_object(Bucket=S3_BUCKET, Key=each["Key"])[
                "Body"
            ].read()
            for each in listed
        }

    def written(path: str) -> object:
        return client.head_object(Bucket=S3_BUCKET, Key=prefix + path)["LastModified"]

    return Place(f"s3://{S3_BUCKET}/{prefix}", files, written)


def _in_gcs(prefix: str) -> Place:
    bucket: Any = storage.Client().bucket(BUCKET)

    def files() -> dict[str, bytes]:
        found = bucket.client.list_blobs(BUCKET, prefix=prefix)
        return {blob.name.removeprefix(prefix): blob.download_as_bytes() for blob in found}

    def written(path: str) -> object:
        return bucket.get_blob(prefix + path).generation

    return Place(f"gs://{BUCKET}/{prefix}", files, written)


def exported(store: FileStore, tmp_path: Path, *words: str) -> int:
    config = str(configuration(tmp_path, store.url))
    return main.main(["--config", config, "export", "--quiet", *words])


@pytest.mark.parametrize("batch_bytes", [10_000, 2**30])
def test_the_files_are_those_of_the_commit(
    store: FileStore,
    place: Place,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    batch_bytes: int,
) -> None:
    """Each byte of each file, in one batch or in several; other files there stay."""
    monkeypatch.setattr(export, "BATCH_BYTES", batch_bytes)
    commit(store, FILES, step=100, chunk_bytes=4000)
    commit(store, {"other": b"newer"}, step=200, nonce="a2")
    assert exported(store, tmp_path, "--to", place.url) == 0
    assert place.files() == {"other": b"newer"}
    assert exported(store, tmp_path, "100", "--to", place.url) == 0
    assert place.files() == {**FILES, "other": b"newer"}


def test_an_interrupted_export_continues(
    store: FileStore, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket gets no file twice; a file of other bytes is replaced."""
    monkeypatch.setattr(export, "BATCH_BYTES", 1)
    commit(store, {**FILES, "config.json": b"[]"}, step=100)
    assert exported(store, tmp_path, "--to", place.url) == 0
    before = place.written("rank-00000/model.bin")
    commit(store, FILES, step=200, nonce="a2")
    assert exported(store, tmp_path, "--to", place.url) == 0
    assert place.files() == FILES
    if "://" in place.url:
        assert place.written("rank-00000/model.bin") == before


@pytest.mark.parametrize("place", ["s3", "gcs"], indirect=True)
@pytest.mark.parametrize("read", [1, 2])
def test_a_stop_ends_an_upload(
    store: FileStore,
    place: Place,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    read: int,
) -> None:
    """Each file is whole or absent, and the next export continues.  The end of the file is not awaited."""
    files = {"a": NOISE.randbytes(9 * 2**20), "b": b"2"}
    commit(store, files, step=100, chunk_bytes=2**22)
    reads = count(1)
    real = plain_files._Source.read

    def read_and_stop(self: plain_files._Source, size_bytes: int | None = -1) -> bytes:
        if next(reads) == read:
            self._stop.set()
        return real(self, size_bytes)

    monkeypatch.setattr(plain_files._Source, "read", read_and_stop)
    assert exported(store, tmp_path, "--to", place.url) == 9
    assert place.files().items() < files.items()
    assert exported(store, tmp_path, "--to", place.url) == 0
    assert place.files() == files


def test_an_export_to_a_bucket_that_is_stopped_keeps_no_chunks(
    store: FileStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Its scratch directory is deleted, so the error must not name it for the next restore."""
    commit(store, FILES, step=100, chunk_bytes=4000)
    monkeypatch.setattr(plain_files, "opened", lambda _: _Bucket(keeps=True, stored=bytes))
    note = RestoreTarget.note
    for to, is_kept in (("s3://b/", False), (str(tmp_path / "exported"), True)):
        notes = count(1)

        def note_and_stop(*words: Any, notes: Iterator[int] = notes, **options: Any) -> None:
            note(*words, **options)
            if next(notes) == 1:  # a second signal ends the process
                signal.raise_signal(signal.SIGTERM)

        monkeypatch.setattr(RestoreTarget, "note", note_and_stop)
        if is_kept:
            monkeypatch.setattr(plain_files, "opened", lambda _: None)
        assert exported(store, tmp_path, "--to", to) == 9
        assert ("The fetched chunks stay" in capfd.readouterr().err) == is_kept


def test_a_damaged_commit_is_not_exported(store: FileStore, tmp_path: Path) -> None:
    """Nothing unverified is written, and no older commit in the place of the one that was named."""
    commit(store, FILES, step=100)
    made = commit(store, {"model": b"m" * 500}, step=200, nonce="a2")
    flip_bit(object_path(tmp_path / "store", made.chunks[0].key), 77)
    assert exported(store, tmp_path, "200", "--to", str(tmp_path / "exported")) == 17
    assert not (tmp_path / "exported").exists()


@pytest.mark.parametrize(
    "url", ["ftp://x/y", "s3://", "s3:/bucket", "s3://[x", "s3://bucket?x", "s3://bucket/\udcff"]
)
def test_the_url_is_checked(
    store: FileStore, tmp_path: Path, capsys: pytest.CaptureFixture[str], url: str
) -> None:
    """Another scheme or no bucket is an error that names the option and the value."""
    assert exported(store, tmp_path, "--to", url) == 2
    assert f"--to: {url!r} is not s3://" in capsys.readouterr().err


def test_a_failure_of_the_sdk_is_an_error_of_the_store(
    store: FileStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also one that occurs before the first request."""
    commit(store, FILES, step=100)
    monkeypatch.setenv("AWS_PROFILE", "missing")
    assert exported(store, tmp_path, "--to", "s3://b/p") == 16
    assert "no credentials for s3://b/p/: The config profile (missing)" in capsys.readouterr().err


class _Bucket(PlainFiles):
    """A bucket in memory.

    Args:
        keeps: the metadata of an object that it returns.
        stored: the bytes that it stores in place of the file's.
    """

    def __init__(self, *, keeps: bool, stored: Callable[[bytes], bytes | None]) -> None:
        super().__init__("s3://b/", (OSError,))
        self.keeps, self.stored = keeps, stored
        self.objects: dict[str, tuple[bytes, str | None]] = {}
        self.writes = 0

    def _found(self, path: str) -> tuple[int, str | None] | None:
        found = self.objects.get(path)
        return None if found is None else (len(found[0]), found[1])

    def _upload(self, path: str, metadata: Mapping[str, str], file: BinaryIO) -> None:
        self.writes += 1
        stored = self.stored(file.read())
        if stored is not None:
            (identity,) = metadata.values()
            self.objects[path] = (stored, identity if self.keeps else None)


@pytest.mark.parametrize("keeps", [False, True])
def test_a_store_without_metadata_gets_all_files(
    store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, keeps: bool
) -> None:
    """The export succeeds, and a second one writes the files again, which metadata would prevent."""
    commit(store, FILES, step=100)
    bucket = _Bucket(keeps=keeps, stored=lambda data: data)
    monkeypatch.setattr(plain_files, "opened", lambda _: bucket)
    for _ in range(2):
        assert exported(store, tmp_path, "--to", "s3://b/") == 0
    assert {path: data for path, (data, _) in bucket.objects.items()} == FILES
    assert bucket.writes == len(FILES) * (1 if keeps else 2)


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        (lambda _: None, "it is not there afterwards"),
        (lambda data: data[1:], "1 other bytes are there in place of 2"),
    ],
)
def test_a_file_that_is_not_stored_as_it_was_written_is_an_error(
    store: FileStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    *,
    stored: Callable[[bytes], bytes | None],
    words: str,
) -> None:
    """Also in a store without metadata; the error says whether the file is missing or another one."""
    commit(store, {"config.json": b"{}"}, step=100)
    monkeypatch.setattr(plain_files, "opened", lambda _: _Bucket(keeps=False, stored=stored))
    assert exported(store, tmp_path, "--to", "s3://b/") == 16
    assert f"writing s3://b/config.json failed: {words}" in capfd.readouterr().err


@pytest.mark.parametrize("plant", ["file", "directory"])
def test_a_link_in_the_directory_is_not_followed(
    store: FileStore, tmp_path: Path, plant: str
) -> None:
    """Another user may write to the directory; nothing outside it changes."""
    commit(store, FILES, step=100)
    to, outside = tmp_path / "exported", tmp_path / "outside"
    to.mkdir()
    outside.mkdir()
    if plant == "directory":
        (to / "rank-00000").symlink_to(outside)
        assert exported(store, tmp_path, "--to", str(to)) != 0
    else:
        (outside / "victim").write_bytes(b"as before")
        (to / "config.json").symlink_to(outside / "victim")
        assert exported(store, tmp_path, "--to", str(to)) == 0
        assert tree(to) == FILES
        assert not (to / "config.json").is_symlink()
    assert tree(outside) == ({} if plant == "directory" else {"victim": b"as before"})


def test_nothing_is_written_beside_a_mount_point(
    store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent is on another file system: its space does not count, and no file is renamed from there."""
    commit(store, FILES, step=100)
    to = tmp_path / "mounts" / "exported"
    to.mkdir(parents=True)
    monkeypatch.setattr(os.path, "ismount", to.__eq__)
    before = to.parent.stat().st_mtime_ns
    assert exported(store, tmp_path, "--to", str(to)) == 0
    assert tree(to) == FILES
    assert to.parent.stat().st_mtime_ns == before


def test_a_directory_that_cannot_be_looked_up_is_an_error(
    store: FileStore, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As one that this user may not search: a line that names it, and no traceback."""
    commit(store, FILES, step=100)
    assert exported(store, tmp_path, "--to", str(tmp_path / ("n" * 300))) == 15
    assert "File name too long" in capfd.readouterr().err


def test_a_damaged_manifest_is_passed_over(store: FileStore, tmp_path: Path) -> None:
    """As by a restore: the newest whole commit is exported, and with a step and no other commit none is."""
    commit(store, FILES, step=100)
    made = commit(store, {"model": b"m"}, step=200, nonce="a2")
    key = RunKeys("r").commit(made.ref, 0, 1)
    flip_bit(object_path(tmp_path / "store", key), 77)
    to = tmp_path / "exported"
    assert exported(store, tmp_path, "200", "--to", str(to)) == 17
    assert not to.exists()
    assert exported(store, tmp_path, "--to", str(to)) == 0
    assert tree(to) == FILES
