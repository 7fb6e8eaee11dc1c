# SPDX-License-Identifier: Apache-2.0
"""``swansong restore`` with a store that cannot be reached."""

from __future__ import annotations

from pathlib import Path

import pytest
from swansong_bucket.errors import NothingToRestore, Transient
from swansong_tools.commands import bucket_command, main

from testkit.committed import configuration
from testkit.memory_store import MemoryStore


def test_an_empty_mirror_is_no_proof_of_a_fresh_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The store may have commits: ``--fresh-ok`` fails, and no trainer starts from scratch."""
    store, mirror = MemoryStore(), MemoryStore()

    def down(*_: str) -> None:
        raise Transient("connection refused")

    store.before = down
    monkeypatch.setattr(bucket_command, "open_store", lambda *_args, **_options: store)
    monkeypatch.setattr(bucket_command, "open_mirror", lambda *_args, **_options: mirror)
    monkeypatch.setattr(bucket_command, "_CALL_BUDGET_WITH_MIRROR_S", 0.1)
    config = configuration(tmp_path, "s3://bucket", mirror="s3://mirror")
    to = tmp_path / "restored"
    code = main.main(["--config", str(config), "restore", "--to", str(to), "--fresh-ok"])
    assert code == NothingToRestore.exit_code
    assert "the store cannot be reached" in capfd.readouterr().err
    assert not to.exists()
