# SPDX-License-Identifier: Apache-2.0
"""Fuzzing of all files in staging: trees, rank manifests, the restore journal, known chunks."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from swansong import bounds, layout, openat
from swansong.fields import ProtocolError
from swansong.layout import FileEntry, RankManifest
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.model import CHUNK_BYTES_MAX, CommitRef
from swansong_bucket.transfer import journal as restore_journal
from swansongd.flush import known as known_chunks
from swansongd.flush.known import KnownChunks
from swansongd.staging.seal import Scanner

from testkit.committed import named_shard
from testkit.forked import peak_bytes
from testkit.staged import ME
from testkit.strategies import json_values

SHARDS = [named_shard(f"rank-00000/{number}", 3000) for number in range(3)]
CHUNKS = [extent.chunk for shard in SHARDS for extent in shard.extents]
IDENTITY = restore_journal.identity_of("r", CommitRef(1, 2), 1)

honest = RankManifest(run="r1", step=5, kind="periodic", files=[FileEntry("rank-00000/a", 1)])


@st.composite
def altered(draw: st.DrawFn) -> bytes:
    """A rank manifest with some fields replaced by any value, or with some bytes changed."""
    body: dict[str, Any] = json.loads(honest.encode())
    for name in draw(st.lists(st.sampled_from(sorted(body)), max_size=4)):
        body[name] = draw(json_values)
    data = bytearray(json.dumps(body).encode())
    for place in draw(st.lists(st.integers(0, len(data) - 1), max_size=3)):
        data[place] = draw(st.integers(0, 255))
    return bytes(data)


@pytest.mark.fault("S13")
@given(data=st.binary(max_size=300) | altered())
def test_a_rank_manifest_is_understood_or_refused(data: bytes) -> None:
    """Any bytes lead to a manifest within bounds, or to a ProtocolError of one line."""
    refusal = ""
    try:
        manifest = RankManifest.decode(data)
    except ProtocolError as error:
        refusal = str(error)
    else:
        assert 0 <= manifest.rank < 10**6
        assert all(bounds.path(entry.path, "path") for entry in manifest.files)
    assert "\n" not in refusal
    assert len(refusal) < 500


@pytest.mark.fault("S7", "S13")
@pytest.mark.parametrize("item", ['{"path":"a","size_bytes":1}', "[]", "0", '""', '{"a":{"b":{}}}'])
def test_the_largest_rank_manifest_costs_bounded_memory(item: str) -> None:
    """A file of the largest accepted size with the cheapest items needs less than 400 MB."""
    head = json.dumps(json.loads(honest.encode()) | {"files": []})
    room = layout.RANK_MANIFEST_MAX_BYTES - len(head)
    items = ",".join([item] * (room // (len(item) + 1)))
    data = head.replace('"files": []', f'"files": [{items}]').encode()
    assert len(data) <= layout.RANK_MANIFEST_MAX_BYTES

    def refused() -> None:
        with pytest.raises(ProtocolError):
            RankManifest.decode(data)

    assert peak_bytes(refused) < 400 * 2**20


@pytest.mark.fault("S13", "G11")
@given(
    data=st.binary(max_size=300)
    | st.lists(st.integers(-2, 10**12).map(str) | st.text(max_size=30), max_size=6).map(
        lambda lines: "\n".join([IDENTITY, *lines, ""]).encode(errors="replace")
    )
)
@example(
    data=IDENTITY.encode() + b"\n" + restore_journal.line(CHUNKS[0], is_of_store=True) + b"8\n9\n"
)
def test_a_restore_journal_names_chunks_that_exist(data: bytes) -> None:
    """Any content gives None, or chunks of these shards."""
    assert set(restore_journal.parse(data, IDENTITY, CHUNKS) or ()) <= set(CHUNKS)


texts = st.one_of(
    st.text(max_size=100),
    st.builds(
        lambda run, generation, digest, nonce, size: f"{run}/data/{generation}/{digest}-{nonce} {size}",
        st.sampled_from(["r", "", "other", "../r"]), st.sampled_from(["00000001", "1", "x"]),
        st.text("0123456789abcdefg", min_size=63, max_size=65) | st.just("0" * 64),
        st.text("0az-/", max_size=3), st.integers(-1, 2**29) | st.just("9" * 5000),
    ),
)  # fmt: skip


@pytest.mark.fault("S13")
@given(lines=st.lists(texts.map(known_chunks._line) | st.binary(max_size=100), max_size=6))
@example(lines=[known_chunks._line(f"r/data/00000001/{'0' * 64}-a 1")])
def test_any_file_of_known_chunks_is_read(
    lines: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Any content gives chunks of this run, and is replaced by a file that gives the same ones."""
    own, is_data = tmp_path_factory.mktemp("own"), RunKeys("r").is_data
    file = own / known_chunks.FILE_NAME
    file.write_bytes(known_chunks._line("swansong-chunks-1 r u") + b"\n".join(lines))
    found = KnownChunks(own, run="r", store_url="u", is_data=is_data)._created
    for digest, chunk in found.items():
        assert is_data(chunk.key)
        assert chunk.digest == digest
        assert 0 < chunk.size_bytes <= CHUNK_BYTES_MAX
    assert KnownChunks(own, run="r", store_url="u", is_data=is_data)._created == found


# ---------------------------------------------------------------- trees

names = st.one_of(
    st.sampled_from([
        "rank-00000.json", "rank-00000.begun", "rank-00000", "rank-00000.writing", ".metadata", "restored",
        ".swansongd", "checkpoint-5", "step=7.ckpt", "trainer_state.json",
        layout.sealed_name(5, "abc"), layout.sealed_name(6, "x") + ".partial",
    ]),
    st.text(min_size=1, max_size=12).filter(lambda name: "/" not in name and "\0" not in name),
)  # fmt: skip
leaves = st.one_of(
    altered(),
    st.binary(max_size=50),
    st.sampled_from(["link", "fifo", "loop", "outside", "sparse"]),
)
trees = st.recursive(leaves, lambda inner: st.dictionaries(names, inner, max_size=4), max_leaves=12)


def plant(name: str, tree: Any, fd: int) -> None:
    """Create one entry of a directory, unless the file system refuses its name."""
    try:
        if isinstance(tree, dict):
            inner = openat.make_directory(name, dir_fd=fd, mode=0o700)
            for each, below in tree.items():
                plant(each, below, inner)
            os.close(inner)
        elif tree == "fifo":
            os.mkfifo(name, dir_fd=fd)
        elif tree in ("link", "loop", "outside"):
            target = {"link": "rank-00000", "loop": name, "outside": "/etc/passwd"}[tree]
            os.symlink(target, name, dir_fd=fd)
        else:
            file = openat.create_file(name, dir_fd=fd)
            if tree == "sparse":
                os.ftruncate(file, 2**44)
            else:
                openat.write_all(file, tree)
            os.close(file)
    except (OSError, UnicodeError):
        pass


@pytest.mark.fault("S1", "S4", "S6", "S7")
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(tree=st.dictionaries(names, trees, max_size=5))
def test_any_tree_in_staging_is_scanned(
    tree: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """No content of staging raises; staged files are regular files within the tree."""
    run = tmp_path_factory.mktemp("fuzz") / "r1"
    run.mkdir()
    fd = openat.open_directory(run)
    try:
        for name, content in tree.items():
            plant(name, content, fd)
        scanner = Scanner(run, run_fd=fd, allowed_uids=ME, settle_s=0.0, monotonic=lambda: 0.0)
        for _ in range(2):
            for staged in scanner.scan().staged:
                for file in staged.files:
                    path = run / staged.directory / file.path
                    path = path if path.exists() else run / staged.directory
                    assert stat.S_ISREG(os.lstat(path).st_mode)
    finally:
        openat.empty_directory(fd)
        os.close(fd)
        Path(run).rmdir()
