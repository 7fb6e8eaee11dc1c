# SPDX-License-Identifier: Apache-2.0
"""A reader that shares no code with the daemon restores what the daemon committed: docs/read_bucket.py."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from testkit import REPOSITORY
from testkit.clouds import Bucket
from testkit.committed import flip_bit, tree
from testkit.staged import seal_files

READER = REPOSITORY / "docs/read_bucket.py"
CHUNK_BYTES = 2**20
CODE_LINES_MAX = 150


def read(bucket: Path, to: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(READER), str(bucket), "run", str(to)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_reader_of_the_format_page_restores_a_bucket(
    bucket: Bucket, new_vm: Any, tmp_path: Path
) -> None:
    """Files that share a chunk, and one of which a chunk changed; then damage, which it passes over."""
    source = random.Random(5)
    files = {f"small-{number}": source.randbytes(number * 50) for number in range(40)}
    files["large"] = source.randbytes(2 * CHUNK_BYTES + 1000)
    vm = new_vm("vm", bucket.store, settings={"flush": {"chunk_bytes": CHUNK_BYTES}})
    daemon = vm.start_daemon()
    first = seal_files(vm.run_directory, 20, files)
    daemon.lines.wait(event="committed", step=20)
    files["large"] = files["large"][:CHUNK_BYTES] + b"x" * CHUNK_BYTES + files["large"][-1000:]
    second = seal_files(vm.run_directory, 40, files)
    daemon.lines.wait(event="committed", step=40)
    vm.power_off()
    newest, older = bucket.manifests()[:2]
    (large,) = (shard for shard in newest["shards"] if shard["path"].endswith("large"))
    (old_large,) = (shard for shard in older["shards"] if shard["path"].endswith("large"))
    small = [extent for shard in newest["shards"] for extent in shard["extents"] if shard != large]
    assert any(isinstance(extent, list) for extent in small), (
        "no shared chunk: the test proves less"
    )

    copy = tmp_path / "copy"
    for key, data in bucket.objects().items():
        (copy / key).parent.mkdir(parents=True, exist_ok=True)
        (copy / key).write_bytes(data)
    done = read(copy, tmp_path / "newest")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "generation 1 step 40\n"
    assert tree(tmp_path / "newest") == second
    pairs = (newest, large), (older, old_large)
    names = [{made["chunks"][n][0] for n in shard["extents"]} for made, shard in pairs]
    (changed,) = names[0] - names[1]
    flip_bit(copy / "run/data" / changed, 12345)
    done = read(copy, tmp_path / "older")
    assert done.stdout == "generation 1 step 20\n"
    assert "does not match its name" in done.stderr
    assert tree(tmp_path / "older") == first


def test_the_reader_is_short_and_imports_nothing_of_the_daemon() -> None:
    """It is a part of the documentation: the page must be enough to write it."""
    text = READER.read_text()
    assert len(text.splitlines()) <= CODE_LINES_MAX
    assert "import swansong" not in text
    assert "from swansong" not in text
