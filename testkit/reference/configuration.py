# SPDX-License-Identifier: Apache-2.0
"""The keys of the configuration: their page and the example file."""

from __future__ import annotations

import dataclasses
import inspect
import json
import textwrap
from collections.abc import Iterator
from typing import Any, get_type_hints

from swansongd.config.config import Config

from testkit.reference.markup import filled, linked, table

_WIDTH = 110


@dataclasses.dataclass(frozen=True, slots=True)
class _Key:
    name: str
    about: str
    default: Any
    unset: str
    example: Any

    @property
    def is_required(self) -> bool:
        return self.default is dataclasses.MISSING


@dataclasses.dataclass(frozen=True, slots=True)
class _Section:
    name: str
    about: str
    keys: tuple[_Key, ...]


def section_keys() -> dict[str, tuple[str, ...]]:
    """All keys of the configuration, by section."""
    return {section.name: tuple(key.name for key in section.keys) for section in _sections()}


def _sections() -> Iterator[_Section]:
    first: dict[int, str] = {}
    """Key at which a declaration occurs first: the sections of stores share some."""
    for name, kind in get_type_hints(Config).items():
        keys = []
        for field in dataclasses.fields(kind):
            facts = {k: v for k, v in field.metadata.items() if k != "reader"}
            known = first.setdefault(id(field.metadata), f"{name}.{field.name}")
            if known != f"{name}.{field.name}":
                facts["about"] = f"As `{known}`."
            keys.append(_Key(field.name, **facts))
        yield _Section(name, inspect.cleandoc(kind.__doc__), tuple(keys))


def page() -> str:
    """docs/reference/configuration.md."""
    parts = []
    for section in _sections():
        rows = [(f"`{section.name}.{key.name}`", _default(key), key.about) for key in section.keys]
        parts += [f"## {section.name}", linked(section.about)]
        parts.append(table(("key", "default", "meaning"), rows))
    return filled("configuration.md", sections="\n\n".join(parts))


def _default(key: _Key) -> str:
    if key.is_required:
        return "required"
    return key.unset if key.default is None else f"`{json.dumps(key.default)}`"


def example() -> str:
    """daemon/swansongd/swansong.example.toml."""
    parts = []
    for section in _sections():
        parts.append(f"[{section.name}]\n{_comment(section.about)}")
        for key in section.keys:
            value, hint, sign = key.default, "", ""
            if key.is_required:
                value, hint = key.example, " Required."
            elif key.default is None:
                value, hint, sign = key.example, f" Default: {key.unset}.", "# "
            parts.append(f"{_comment(key.about + hint)}\n{sign}{key.name} = {json.dumps(value)}")
    return filled("swansong.example.toml", sections="\n\n".join(parts))


def _comment(text: str) -> str:
    lines = textwrap.wrap(" ".join(text.split()), _WIDTH, break_on_hyphens=False)
    return "\n".join(f"# {line}" for line in lines)
