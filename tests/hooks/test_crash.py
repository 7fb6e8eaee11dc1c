# SPDX-License-Identifier: Apache-2.0
"""A trainer that dies during a save, before each file operation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from swansong import layout
from swansong.layout import RankManifest

from testkit.python_process import output_of

# Saves step 1, then step 2, in a child process that kills itself before its n-th file operation below
# staging, and between the two halves of each write; for n = 1, 2, ... until it survives.  A rank that
# survives saves both steps before the child starts, or after its end.
HARNESS = """
import os, signal, sys
from pathlib import Path
from swansong._checkpoint.staging import finish, write_checkpoint
from swansong.layout import RankManifest

staging_root, kind, survivor = sys.argv[1], sys.argv[2], int(sys.argv[3])
COUNTED = {
    "open", "os.mkdir", "os.rename", "os.link", "os.chmod", "os.listdir", "os.scandir", "os.remove",
    "os.rmdir", "os.truncate",
}
left = 0

def one_more():
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

def audit(event, arguments):
    if event in COUNTED and left > 0:
        where = str(arguments[0])  # relative to a descriptor, or a descriptor, or a path
        if not where.startswith("/") or where.startswith(staging_root):
            one_more()

def torn_write(descriptor, data):
    one_more()
    real_write(descriptor, data[: len(data) // 2])
    one_more()
    return len(data) // 2 + real_write(descriptor, data[len(data) // 2 :])

real_write, os.write = os.write, torn_write
os.fsync = lambda descriptor: None  # slow, and without effect on a process that is killed

def save(directory):
    for name in ("model", "optimizer"):
        with open(directory / name, "wb", buffering=0) as file:
            file.write(b"x" * 500)
            one_more()
            file.write(b"x" * 500)
        if name == "model":
            finish(directory / name)

def write(some):
    for step in (1, 2):
        for rank in some:
            manifest = RankManifest(
                run="r", step=step, kind=kind, files=[], rank=rank, world_size=2, local_world_size=2
            )
            write_checkpoint(staging, f"nonce{step}", manifest, save)

sys.addaudithook(audit)
n = 0
while True:
    n += 1
    staging = f"{staging_root}/{n:04d}"
    os.mkdir(staging)
    if survivor == 0:
        write([0])
    child = os.fork()
    if child == 0:
        left = n
        write([rank for rank in range(2) if rank != survivor])
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), status
    has_died = status != 0
    if survivor > 0:
        write([survivor])
    if not has_died:
        break
print(n)
"""


def check_sealed(directory: Path) -> None:
    """Check that both ranks' manifests are there, and every file that they list is complete."""
    for rank in range(2):
        manifest = RankManifest.decode((directory / f"rank-{rank:05d}.json").read_bytes())
        assert [entry.path for entry in manifest.files] == [
            f"rank-{rank:05d}/model",
            f"rank-{rank:05d}/optimizer",
        ]
        for entry in manifest.files:
            assert (directory / entry.path).read_bytes() == b"x" * 1000
            assert entry.size_bytes == 1000


def final_files(partial: Path) -> list[Path]:
    """Check that all files with a final name in a partial set are complete, and return them."""
    files = list(partial.glob("rank-?????/*"))
    for file in files:
        assert file.read_bytes() == b"x" * 1000, f"{file} is final, and not whole"
    return files


@pytest.mark.fault("T03", "D05")
@pytest.mark.parametrize(("kind", "survivor"), [("final", -1), ("emergency", 0), ("emergency", 1)])
def test_whenever_it_dies_what_is_sealed_is_whole(tmp_path: Path, kind: str, survivor: int) -> None:
    """After a kill before each operation of a save, every sealed set in staging is complete.

    And what has its final name is whole: the daemon may have stored it by then.  One of the two ranks may
    survive.
    """
    points = json.loads(output_of("-c", HARNESS, tmp_path, kind, survivor))
    assert points > 20 * (2 - (survivor >= 0))
    sealed_sets = []
    early: list[Path] = []
    for staging in sorted(tmp_path.iterdir()):
        sealed = [path for path in staging.iterdir() if layout.parse_sealed_name(path.name)]
        for directory in sealed:
            check_sealed(directory)
        sealed_sets.append(len(sealed))
        for partial in staging.glob(layout.partial_name("*")):
            early += final_files(partial)
    assert len(sealed_sets) == points
    assert sealed_sets == sorted(sealed_sets)
    assert (sealed_sets[0], sealed_sets[-1]) == (0, 2)
    assert set(sealed_sets) == {0, 1, 2}
    assert early, "a finished file is there before its set is sealed"
