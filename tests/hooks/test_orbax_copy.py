# SPDX-License-Identifier: Apache-2.0
"""The daemon accepts the copies of Orbax's files in staging.  The test needs no JAX."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
from swansong._checkpoint.staging import write_checkpoint
from swansong.layout import RankManifest
from swansongd.staging.seal import Scanner


@pytest.mark.fault("S3")
@pytest.mark.parametrize("can_share", [True, False], ids=["copy_file_range", "copy"])
def test_the_daemon_accepts_copies_of_orbax_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_share: bool
) -> None:
    """On one file system, too, where a hard link to Orbax's file would be refused."""
    monkeypatch.setitem(sys.modules, "jax", ModuleType("jax"))
    monkeypatch.delitem(sys.modules, "swansong.orbax", raising=False)
    orbax = importlib.import_module("swansong.orbax")
    if not can_share:

        def refused(*_: object) -> int:
            raise OSError(18, "Invalid cross-device link")

        monkeypatch.setattr(os, "copy_file_range", refused)
    step = tmp_path / "orbax" / "7"
    (step / "default").mkdir(parents=True)
    content = {"_METADATA": b"{}", "default/data": os.urandom(100_000), "default/empty": b""}
    for name, data in content.items():
        (step / name).write_bytes(data)
    run = tmp_path / "run"
    run.mkdir()
    manifest = RankManifest(run="run", step=7, kind="periodic", files=[], start_id="a")
    written = write_checkpoint(
        str(run),
        "n",
        manifest,
        lambda target: orbax._copy_step(step.parent, 7, target),
    )
    scanner = Scanner(
        run, allowed_uids=frozenset({os.geteuid()}), settle_s=0.0, monotonic=lambda: 0.0
    )
    found = scanner.scan()
    assert [staged.directory for staged in found.staged] == [written.directory], found.rejected
    for name, data in content.items():
        assert (run / written.directory / "rank-00000" / "7" / name).read_bytes() == data
        assert (step / name).read_bytes() == data
