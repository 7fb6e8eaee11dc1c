# SPDX-License-Identifier: Apache-2.0
"""Code that works in staging, or in a destination that others may write to, uses descriptors.

A path is resolved again at each call, and a user who may write to one of its directories decides where to.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit import REPOSITORY

ROOT = REPOSITORY
MODULES = [
    *sorted((ROOT / "daemon/swansongd/staging").glob("*.py")),
    *sorted((ROOT / "daemon/swansongd/restore").glob("*.py")),
    *sorted((ROOT / "daemon/swansongd/flush").glob("*.py")),
    *sorted((ROOT / "daemon/swansong_bucket/transfer").glob("*.py")),
    *sorted((ROOT / "daemon/swansong_tools/upkeep").glob("*.py")),
    ROOT / "daemon/swansong_tools/commands/local_sets.py",
    ROOT / "training_hooks/swansong/openat.py",
    ROOT / "training_hooks/swansong/_checkpoint/staging.py",
    ROOT / "training_hooks/swansong/_ranks/job_store.py",
]
"""All modules that work on files in staging."""

BY_NAME = {
    "access", "chmod", "chown", "link", "lstat", "makedirs", "mkdir", "mkfifo", "mknod", "open", "readlink",
    "remove", "removedirs", "rename", "renames", "replace", "rmdir", "stat", "symlink", "unlink", "utime",
}  # fmt: skip
"""Functions of ``os`` that take a name: they need a ``dir_fd``."""
BY_DESCRIPTOR = {"listdir", "scandir", "truncate", "walk", "setxattr", "getxattr", "removexattr"}
"""Functions of ``os`` that take a path or a descriptor: they need the latter."""
OF_PATHS = {
    "chmod", "exists", "glob", "hardlink_to", "is_dir", "is_file", "is_symlink", "iterdir", "lstat", "mkdir",
    "read_bytes", "read_text", "resolve", "rglob", "rmdir", "samefile", "symlink_to", "touch", "unlink",
    "write_bytes", "write_text",
}  # fmt: skip
"""Methods of ``Path`` that resolve it."""

TRUSTED = {
    ("local_sets.py", "is_dir"): "only asks whether the run has a staging directory",
    ("downloads.py", "is_dir"): "only asks whether the path of a result is still there",
    ("answers.py", "is_dir"): "only asks whether the path of an answer is still there",
    ("seal.py", "stat"): "only asks whether the path leads to the open directory",
    ("shared_link.py", "open"): "only the daemons may write to their runtime directory",
    ("target.py", "makedirs"): "the operator names the destination of swansong restore",
    ("target.py", "open()"): "reads the umask from /proc",
}
"""(module, call): why the call may resolve a path."""


def offences(module: Path) -> Iterator[str]:
    """Calls that resolve a path."""
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
            if names & {"shutil", "glob", "tempfile"}:
                yield ast.unparse(node)
        if not isinstance(node, ast.Call):
            continue
        keywords = {keyword.arg for keyword in node.keywords}
        match node.func:
            case ast.Name("open"):
                yield "open()"
            case ast.Attribute(ast.Name("os"), name) if name in BY_NAME:
                if not keywords & {"dir_fd", "src_dir_fd", "dst_dir_fd"}:
                    yield name
            case ast.Attribute(ast.Name("os"), name) if name in BY_DESCRIPTOR:
                first = ast.unparse(node.args[0])
                if not first.endswith("fd") and first != "found":
                    yield name
            case ast.Attribute(ast.Name("openat" | "os" | "entry"), _):
                pass  # an entry of os.scandir is relative to its descriptor
            case ast.Attribute(_, name) if name in OF_PATHS:
                yield name


@pytest.mark.fault("S1", "S2")
@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.name)
def test_staging_is_touched_by_descriptor_only(module: Path) -> None:
    """No call resolves a path, except those in the list."""
    found = [each for each in offences(module) if (module.name, each) not in TRUSTED]
    assert not found, "use swansong.openat"


def test_the_rule_sees_what_it_forbids(tmp_path: Path) -> None:
    """It finds each kind of offence, so an empty result is meaningful."""
    module = tmp_path / "module.py"
    module.write_text(
        "import os, shutil\n"
        "open(p); os.open(p, 0); os.mkdir('x'); os.listdir(path); p.mkdir(); p.read_text()\n"
        "os.open(n, 0, dir_fd=fd); os.listdir(run_fd); os.rename(a, b, src_dir_fd=x, dst_dir_fd=y)\n"
    )
    assert sorted(offences(module)) == [
        "import os, shutil", "listdir", "mkdir", "mkdir", "open", "open()", "read_text",
    ]  # fmt: skip


def test_every_exception_is_needed() -> None:
    """An exception whose call is gone must leave the list."""
    used = {(module.name, each) for module in MODULES for each in offences(module)}
    assert TRUSTED.keys() <= used
