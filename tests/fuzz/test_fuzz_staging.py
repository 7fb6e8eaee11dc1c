# SPDX-License-Identifier: Apache-2.0
"""Fuzzing of all files in staging: trees, rank manifests, journals."""

from __future__ import annotations

import json
import os
import stat
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from swansong import bounds, openat, protocol
from swansong.protocol import FileEntry, ProtocolError, RankManifest
from swansongd.flush import journal as upload_journal
from swansongd.model import CommitRef
from swansongd.restore import journal as restore_journal
from swansongd.staging.seal import Scanner

from testkit.committed import named_shard
from testkit.staged import ME

PART_BYTES = 2**20
SHARDS = [
    named_shard(
        f"rank-00000/{number}", 3 * PART_BYTES, f"r/data/{number}", part_size_bytes=PART_BYTES
    )
    for number in range(3)
]
IDENTITY = restore_journal.identity_of("r", CommitRef(1, 2), SHARDS)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
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
    room = protocol.RANK_MANIFEST_MAX_BYTES - len(head)
    items = ",".join([item] * (room // (len(item) + 1)))
    data = head.replace('"files": []', f'"files": [{items}]').encode()
    assert len(data) <= protocol.RANK_MANIFEST_MAX_BYTES
    tracemalloc.start()
    with pytest.raises(ProtocolError):
        RankManifest.decode(data)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 400 * 2**20


lines = st.builds(
    lambda number, part, digest: f"{number} {part} {digest}",
    st.integers(-2, 10**12), st.integers(-2, 10**12), st.text("0123456789abcdefg", max_size=70),
)  # fmt: skip


@pytest.mark.fault("S13", "G11")
@given(
    data=st.binary(max_size=300)
    | st.lists(lines | st.text(max_size=30), max_size=6).map(
        lambda found: "\n".join([IDENTITY, *found, ""]).encode(errors="replace")
    )
)
@example(data=IDENTITY.encode() + b"\n0 0 " + b"0" * 64 + b"\n")
def test_a_restore_journal_names_parts_that_exist(data: bytes) -> None:
    """Any content gives None, or parts of these shards."""
    noted = restore_journal.parse(data, IDENTITY, SHARDS)
    for (number, part), digest in (noted or {}).items():
        assert 0 <= number < len(SHARDS)
        assert 0 <= part < 3
        assert len(digest) == 32


HEADER = {"is": "journal", "version": 1, "run": "r", "store": "file:///x"}


@given(records=st.lists(json_values, max_size=5), tail=st.binary(max_size=40))
def test_an_upload_journal_of_any_records_is_read(records: list[Any], tail: bytes) -> None:
    """A record with a valid digest and any content ends the journal without an error."""
    data, chain = b"", ""
    for record in [HEADER, *records]:
        line, chain = upload_journal._line(json.dumps(record).encode(), chain)
        data += line
    upload_journal.replay(data + tail, HEADER)


# ---------------------------------------------------------------- trees

names = st.one_of(
    st.sampled_from([
        "rank-00000.json", "rank-00000.begun", "rank-00000", "rank-00000.writing", ".metadata", "restored",
        ".swansongd", "checkpoint-5", "step=7.ckpt", "trainer_state.json",
        protocol.sealed_name(5, "abc"), protocol.sealed_name(6, "x") + ".partial",
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
