# SPDX-License-Identifier: Apache-2.0
"""packer/sources.sh: the sources of the wheels, with the version of the commit."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from testkit import REPOSITORY

PARTS = ("training_hooks", "daemon")
SOURCE_DATE_EPOCH = "315532800"  # as in the Makefile


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The folders that sources.sh copies, without a git repository."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    made = tmp_path / "clone"
    ignored = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
    for part in PARTS:
        shutil.copytree(REPOSITORY / part, made / part, ignore=ignored)
    (made / "packer").mkdir()
    for script in ("sources.sh", "release.sh"):
        shutil.copy(REPOSITORY / "packer" / script, made / "packer")
    return made


def git(directory: Path, *arguments: str, date: str = "2026-01-31T23:59:59Z") -> None:
    person = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
    dates = {"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
    subprocess.run(
        ["git", *person, *arguments], cwd=directory, check=True, capture_output=True,
        env={"PATH": os.environ["PATH"], "HOME": str(directory), **dates},
    )  # fmt: skip


def commit(clone: Path, date: str) -> None:
    git(clone, "add", "--all")
    git(clone, "commit", "--allow-empty", "--message", "m", date=date)


def copied(clone: Path, target: Path, umask: int = 0o022, path: str | None = None) -> Path:
    environment = {"PATH": os.environ["PATH"] if path is None else path}
    command = [clone / "packer" / "sources.sh", target]
    subprocess.run(command, check=True, umask=umask, env=environment)
    return target


def version(sources: Path) -> str:
    """The common version of both distributions."""
    texts = [
        (sources / init).read_text()
        for init in ("daemon/swansongd/__init__.py", "training_hooks/swansong/__init__.py")
    ]
    found = {re.findall(r'^__version__ = "(.*)"$', text, re.MULTILINE)[0] for text in texts}
    (one,) = found
    return one


def wheel(sources: Path, target: Path) -> tuple[str, bytes]:
    """Name and bytes of the daemon's wheel."""
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index"]
    build += ["--no-build-isolation", "--wheel-dir", str(target)]
    subprocess.run(
        [*build, str(sources / "daemon")], check=True,
        env={**os.environ, "SOURCE_DATE_EPOCH": SOURCE_DATE_EPOCH},
    )  # fmt: skip
    (path,) = target.iterdir()
    return path.name, path.read_bytes()


def test_each_commit_has_a_higher_version(clone: Path, tmp_path: Path) -> None:
    """The version ends with time and hash of the commit; uncommitted changes are marked."""
    git(clone, "init", "--quiet")
    seen = [version(copied(clone, tmp_path / "before"))]
    for number, date in enumerate(("2026-01-31T23:59:59Z", "2026-02-01T00:00:00+00:00")):
        commit(clone, date)
        seen.append(version(copied(clone, tmp_path / f"commit-{number}")))
    (clone / "daemon" / "swansong_bucket" / "errors.py").write_text("# changed\n")
    seen.append(version(copied(clone, tmp_path / "changed")))
    plain = seen[0]
    assert "+" not in plain
    assert re.fullmatch(re.escape(plain) + r"\+20260131235959\.g[0-9a-f]{12}", seen[1])
    assert re.fullmatch(re.escape(plain) + r"\+20260201000000\.g[0-9a-f]{12}", seen[2])
    assert seen[3] == f"{seen[2]}.dirty"
    assert sorted(seen, key=Version) == seen


def test_without_a_clone_or_git_the_version_is_plain(clone: Path, tmp_path: Path) -> None:
    """A tarball, a tarball inside another repository, and a machine without git can be built."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("bash", "dirname", "mkdir", "realpath", "tar", "sed"):
        (tools / tool).symlink_to(shutil.which(tool) or "")
    plain = version(REPOSITORY)
    assert version(copied(clone, tmp_path / "tarball")) == plain
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "commit", "--allow-empty", "--message", "not ours")
    assert version(copied(clone, tmp_path / "vendored")) == plain
    git(clone, "init", "--quiet")
    commit(clone, "2026-01-31T23:59:59Z")
    assert version(copied(clone, tmp_path / "no git", path=str(tools))) == plain


CHANGELOG = """# Changelog

## [Unreleased]

Rehearse.

### Upload

- Faster.

## [0.0.1] - 2026-01-01

- First.
"""


def test_a_release_is_one_command(clone: Path, tmp_path: Path) -> None:
    """It sets the version, dates the notes, commits and tags; wheels of the tag have the plain version."""
    (clone / "CHANGELOG.md").write_text(CHANGELOG)
    git(clone, "init", "--quiet")
    commit(clone, "2026-01-31T23:59:59Z")
    for name, value in {"user.name": "n", "user.email": "e"}.items():
        git(clone, "config", name, value)

    def release(version: str) -> subprocess.CompletedProcess[str]:
        command = [clone / "packer" / "release.sh", version]
        return subprocess.run(command, check=False, capture_output=True, text=True)

    (clone / "new").touch()
    assert "uncommitted changes" in release("7.8.9").stderr
    (clone / "new").unlink()
    assert "must look like 1.2.3" in release("7.8").stderr
    done = release("7.8.9")
    assert done.returncode == 0, done.stderr
    assert version(copied(clone, tmp_path / "tagged")) == "7.8.9"
    assert '"swansong==7.8.9"' in (clone / "daemon" / "pyproject.toml").read_text()
    assert re.search(
        r"## \[Unreleased\]\n\n## \[7.8.9\] - 20\d\d-.*\n\nRehearse",
        (clone / "CHANGELOG.md").read_text(),
    )
    show = ["git", "tag", "--list", "--format=%(contents)", "v7.8.9"]
    notes = subprocess.run(show, cwd=clone, check=True, capture_output=True, text=True).stdout
    assert notes.rstrip() == "Swansong 7.8.9\n\n\nRehearse.\n\n### Upload\n\n- Faster."
    assert "nothing below [Unreleased]" in release("7.9.0").stderr
    (clone / "daemon" / "swansong_bucket" / "errors.py").write_text("# changed\n")
    assert version(copied(clone, tmp_path / "changed")).endswith(".dirty")


def test_two_builds_of_a_commit_are_equal(clone: Path, tmp_path: Path) -> None:
    """With any umask and file times, the wheel has the same bytes."""
    git(clone, "init", "--quiet")
    commit(clone, "2026-01-31T23:59:59Z")
    first = wheel(copied(clone, tmp_path / "1"), tmp_path / "wheels-1")
    for path in clone.rglob("*.py"):
        os.utime(path, (1e9, 1e9))
        path.chmod(0o600)
    git(clone, "config", "core.fileMode", "false")
    second = wheel(copied(clone, tmp_path / "2", umask=0o077), tmp_path / "wheels-2")
    assert "+20260131235959.g" in first[0]
    assert first == second
