# SPDX-License-Identifier: Apache-2.0
"""The state consists of parts, and one module of the core writes each of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from swansongd import core
from swansongd.core.state import State

OWNERS = {
    "notices": "notices",
    "gpus": "gpus",
    "ranks": "ranks",
    "starts": "starts",
    "staging": "staged_sets",
    "flush": "flight",
    "commits": "commits",
    "learned": "learning",
    "requests": "request",
    "evacuation": "course",
    "course": "course",
}


def written(source: str) -> Iterator[str]:
    """The parts that a module replaces, in the state or by themselves."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "replace":
            replaced = ast.unparse(node.args[0]).rpartition(".")[2]
            names = (
                [keyword.arg for keyword in node.keywords] if replaced == "state" else [replaced]
            )
            yield from (name for name in names if name in OWNERS)


def test_the_state_consists_of_the_settings_and_the_parts() -> None:
    assert {field.name for field in fields(State)} == {"settings", *OWNERS}


def test_each_part_is_written_by_its_owner_only() -> None:
    modules = Path(core.__file__).parent.glob("*.py")
    writers = {(name, path.stem) for path in modules for name in written(path.read_text())}
    assert writers == set(OWNERS.items())
