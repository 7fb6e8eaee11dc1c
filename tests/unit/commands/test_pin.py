# SPDX-License-Identifier: Apache-2.0
"""``swansong pin``: the commit that it keeps."""

from __future__ import annotations

from pathlib import Path

import pytest
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.model import CommitRef
from swansong_bucket.runs.pins import Pins
from swansong_tools.commands import main

from testkit.committed import commit, configuration, file_store, object_path


def test_a_pin_keeps_the_commit_that_a_restore_takes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A damaged one of a newer generation is skipped with its reason; one that is named is an error."""
    store, command = file_store(tmp_path / "bucket"), ["--config", str(configuration(tmp_path))]
    commit(store, {"a": b"x"}, step=10)
    newer = commit(store, {"a": b"y"}, generation=2, step=10, nonce="b1")
    object_path(tmp_path / "bucket", RunKeys("r").commit(newer.ref, 0, 1)).write_bytes(b"")
    to = tmp_path / "restored"
    assert main.main([*command, "restore", "--step", "10", "--to", str(to)]) == 0
    assert (to / "a").read_bytes() == b"x"
    capfd.readouterr()
    assert main.main([*command, "pin", "10", "--name", "best"]) == 0
    assert f"skipped {newer.ref}: " in capfd.readouterr().err
    (stored,) = Pins(store, RunKeys("r")).now()
    assert stored.pin is not None
    assert stored.pin.ref == CommitRef(1, 10)
    assert main.main([*command, "pin", "10", "--generation", "2", "--name", "other"]) == 17
    assert f"has no whole commit: {newer.ref}: " in capfd.readouterr().err
