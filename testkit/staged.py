# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in a staging directory, in the layouts of the hooks and of the frameworks."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swansong import layout
from swansong.layout import FileEntry, RankManifest

ME = frozenset({os.geteuid()})
START = "5a17"
"""Id of the start of the training to which sets belong that name no other."""


class Clock:
    """A monotonic clock that moves only when set."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def write_files(directory: Path, files: Mapping[str, bytes]) -> Path:
    """Create ``directory`` with these files."""
    for path, content in files.items():
        target = directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    return directory


def seal_files(
    run_directory: Path, step: int, files: Mapping[str, bytes], *, start_id: str = START
) -> dict[str, bytes]:
    """Seal a set of one rank as the hooks do, with these files; returns all files of the set."""
    entries = [FileEntry(f"rank-00000/{name}", len(content)) for name, content in files.items()]
    manifest = RankManifest(
        run=run_directory.name,
        step=step,
        kind="periodic",
        files=entries,
        rank=0,
        world_size=1,
        local_world_size=1,
        start_id=start_id,
    )
    content = {f"rank-00000/{name}": data for name, data in files.items()}
    content[layout.rank_manifest_name(0)] = manifest.encode()
    sealed = run_directory / layout.sealed_name(step, "abc")
    write_files(sealed.with_name(layout.partial_name(sealed.name)), content).rename(sealed)
    return content


def write_set(
    run_directory: Path,
    step: int = 5,
    nonce: str = "abc",
    *,
    ranks: int = 2,
    world_size: int | None = None,
    manifest_step: int | None = None,
    **facts: Any,
) -> Path:
    """A sealed set of the hooks, with one shard for each rank."""
    directory = run_directory / layout.sealed_name(step, nonce)
    for rank in range(ranks):
        shard = f"rank-{rank:05d}/model.bin"
        content = b"x" * (100 + rank)
        manifest = RankManifest(
            **{
                "run": run_directory.name,
                "step": step if manifest_step is None else manifest_step,
                "kind": "periodic",
                "files": [FileEntry(shard, len(content))],
                "rank": rank,
                "world_size": world_size or ranks,
                "local_world_size": ranks,
                "start_id": START,
                **facts,
            }
        )
        write_files(
            directory,
            {shard: content, layout.rank_manifest_name(rank): manifest.encode()},
        )
    return directory


def another_boot(run_directory: Path) -> None:
    """Make the starts that the daemon has recorded those of another boot, as after a reboot of the VM."""
    record = run_directory / ".swansongd" / "claim.json"
    body = json.loads(record.read_bytes())
    starts = [{**start, "boot_id": "another"} for start in body["starts"]]
    record.write_text(json.dumps({**body, "starts": starts}))
