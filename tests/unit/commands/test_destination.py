# SPDX-License-Identifier: Apache-2.0
"""The target directory of ``swansong restore`` and ``swansong export``."""

from __future__ import annotations

from pathlib import Path

import pytest
from swansong_bucket.errors import StagingError
from swansong_tools.commands import main
from swansong_tools.commands.plain_files import expect_outside_of_stores
from swansongd.config.config import load

from testkit.committed import commit, configuration, file_store


@pytest.mark.parametrize("command", ["restore", "export", "restore --local"])
@pytest.mark.parametrize(
    ("key", "directory"),
    [("store.url", "store/below"), ("store.url", "link"), ("staging.path", "staging/r/below")],
)
def test_no_files_are_written_to_the_store_or_to_staging(
    command: str, key: str, directory: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The daemon would take them for a set, and the store for objects; a link above changes nothing."""
    store = file_store(tmp_path / "store")
    commit(store, {"model.bin": b"weights"}, step=1)
    (tmp_path / "link").symlink_to(tmp_path / "store")
    config = configuration(tmp_path, store.url)
    to = tmp_path / directory / "to"
    assert main.main(["--config", str(config), *command.split(), "--to", str(to)]) == (
        StagingError.exit_code
    )
    error = capfd.readouterr().err
    below = to if directory != "link" else tmp_path / "store/to"
    assert f"--to: {below} lies in {tmp_path}" in error
    assert f"a directory of {key}. Choose a directory outside it" in error
    assert not to.exists()


@pytest.mark.parametrize(
    ("store", "to", "is_inside"),
    [
        ("s3://bkt/p", "s3://bkt/p", True),
        ("s3://bkt/p", "s3://bkt/p/r/commits/1", True),
        ("s3://bkt/p/", "s3://bkt/p/exports", True),
        ("s3://bkt/p", "s3://bkt/p2", False),
        ("s3://bkt/p", "s3://bkt", False),
        ("s3://bkt/p", "s3://others/p", False),
        ("s3://bkt/p", "gs://bkt/p", False),
        ("gs://bkt", "gs://bkt/r/commits", True),
        ("gs://bkt", "gs://bkt/exports", False),
        ("gs://other/p", "s3://mirror/m/x", True),
    ],
)
def test_no_file_is_exported_into_the_store(
    store: str, to: str, is_inside: bool, tmp_path: Path
) -> None:
    """A foreign key below the commits of a run ends all its restores."""
    config = load(configuration(tmp_path, store, mirror="s3://mirror/m"))
    if is_inside:
        with pytest.raises(StagingError, match="lies in"):
            expect_outside_of_stores(to, config, "r")
    else:
        expect_outside_of_stores(to, config, "r")
