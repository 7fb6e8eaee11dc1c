# SPDX-License-Identifier: Apache-2.0
"""``swansong finished`` for a damaged end of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.model import CheckpointKind
from swansong_tools.commands import main

from testkit.committed import commit, configuration, file_store, object_path


@pytest.mark.fault("T18")
def test_a_damaged_end_does_not_finish_a_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The next start resumes from the commit before: a scheduler must not take the run for finished."""
    store, command = file_store(tmp_path / "bucket"), ["--config", str(configuration(tmp_path))]
    commit(store, {"a": b"x"}, step=10)
    end = commit(store, {"a": b"y"}, step=20, kind=CheckpointKind.FINAL, nonce="b1")
    assert main.main([*command, "finished"]) == 0
    object_path(tmp_path / "bucket", RunKeys("r").commit(end.ref, 0, 1)).write_bytes(b"")
    assert main.main([*command, "finished"]) == 8
    assert f"{end.ref} is damaged" in capfd.readouterr().err
