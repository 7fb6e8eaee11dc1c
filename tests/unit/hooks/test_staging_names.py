# SPDX-License-Identifier: Apache-2.0
"""Only ``swansong.layout`` formats and parses the names that trainer and daemon share in staging."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from swansong import layout

from testkit import REPOSITORY

LAYOUT = REPOSITORY / "training_hooks/swansong/layout.py"
MODULES = [
    module
    for package in ("daemon", "training_hooks/swansong")
    for module in sorted((REPOSITORY / package).rglob("*.py"))
    if module != LAYOUT
]
NAME = re.compile(
    r"\brank-|\bstep-|\bstep=|checkpoint-[^a-z]|\.partial$|\.writing|\.begun|^restored$"
)
"""Parts of names in staging, as they occur in string constants."""
PART = re.compile(r"rank-|step-|step=|checkpoint-|\.partial|\.writing|\.begun|restored")
"""A module without such a part contains no name either, and is not parsed."""
ALLOWED = {
    ("format/resumption.py", "restored"): "a field of the record of a resume",
    ("doctor/host.py", "restored"): "a directory that an operator chooses",
    ("doctor/rehearsal.py", "restored"): "a temporary directory outside of staging",
    (
        "swansong/transformers.py",
        "checkpoint-*",
    ): "the Trainer's own name, below a rank's directory",
}
"""(module, constant): why it is not a name in staging."""


def names_in(module: Path) -> Iterator[str]:
    """String constants of a module, other than docstrings, that contain a part of a name in staging."""
    source = module.read_text()
    if not PART.search(source):
        return
    tree = ast.parse(source)
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in docstrings:
            text = node.value.decode("latin-1") if isinstance(node.value, bytes) else node.value
            # An option of a command, such as --step-time, is no name of a file.
            if isinstance(text, str) and NAME.search(text) and not text.startswith("--"):
                yield text


def is_allowed(module: Path, text: str) -> bool:
    return any(str(module).endswith(place) and text == name for place, name in ALLOWED)


def test_no_other_module_formats_or_parses_a_name_in_staging() -> None:
    """Two modules with patterns of their own drift apart, and the daemon then misses a checkpoint."""
    found = {
        f"{module.relative_to(REPOSITORY)}: {text!r}"
        for module in MODULES
        for text in names_in(module)
        if not is_allowed(module, text)
    }
    assert not found, "use the functions of swansong.layout"


def test_the_rule_finds_each_kind_of_name(tmp_path: Path) -> None:
    """An empty result means that there is nothing to find."""
    module = tmp_path / "module.py"
    constants = [
        layout.sealed_name(1, "a"),
        layout.partial_name("x"),
        layout.rank_manifest_name(0),
        layout.rank_begun_name(0),
        layout.writing_directory(0),
        layout.RESTORED_DIRECTORY,
        "checkpoint-7",
        "rank-[0-9]+",
    ]
    module.write_text(f'"""Writes rank-00000.json."""\nNAMES = {constants!r}\n')
    assert sorted(names_in(module)) == sorted(constants)


@pytest.mark.parametrize(
    ("framework", "name", "step"),
    [
        ("checkpoint-n", "checkpoint-40", 40),
        ("checkpoint-n", "checkpoint-40-best", None),
        ("dcp", "step_40", 40),
        ("dcp", "latest", -1),
        ("ckpt", "epoch=1-step=40.ckpt", 40),
        ("ckpt", "last.ckpt", None),
    ],
)
def test_names_of_other_frameworks(framework: str, name: str, step: int | None) -> None:
    """The step; -1 for a name that fits without one; None for a name that does not fit."""
    assert layout.parse_adopted_name(framework, name) == step


@pytest.mark.parametrize("rank", [0, 7, 99_999])
def test_names_of_a_rank_can_be_recognised(rank: int) -> None:
    """Each name by its own function, and all of them as entries of that rank and of no other."""
    own, writing = layout.rank_directory(rank), layout.writing_directory(rank)
    manifest, begun = layout.rank_manifest_name(rank), layout.rank_begun_name(rank)
    assert layout.rank_of_directory(own) == rank
    assert layout.is_rank_manifest(manifest)
    assert layout.is_rank_begun(begun)
    assert layout.is_writing_directory(writing)
    assert layout.rank_of_writing_directory(writing) == rank
    assert layout.rank_of_writing_directory(own) == -1
    assert [layout.is_final(path) for path in (manifest, f"{own}/a", begun, f"{writing}/a")] == [
        True,
        True,
        False,
        False,
    ]
    for name in (own, writing, manifest, begun, f".{manifest}.1f", f".{begun}.1f"):
        assert layout.is_of_rank(name, rank)
        assert not layout.is_of_rank(name, rank + 1)
