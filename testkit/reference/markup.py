# SPDX-License-Identifier: Apache-2.0
"""Templates, tables and links of the reference pages."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import is_dataclass
from enum import Enum
from itertools import pairwise
from os.path import relpath
from pathlib import Path

_TEMPLATES = Path(__file__).parent / "templates"
_PAGE = re.compile(r"\bdocs/([\w/-]+\.md)(#[\w-]+)?")


def filled(template: str, **parts: str) -> str:
    """The template, with each part in the place of ``{{ name }}``."""
    text = (_TEMPLATES / template).read_text(encoding="utf-8")
    places = re.findall(r"\{\{ (\w+) \}\}", text)
    assert sorted(places) == sorted(parts), f"{template}: {places}"
    return re.sub(r"\{\{ (\w+) \}\}", lambda place: parts[place[1]], text)


def linked(text: str) -> str:
    """The text with a link for each page of docs/ that it names."""
    return _PAGE.sub(_link, text)


def _link(match: re.Match[str]) -> str:
    page = Path(match[1])
    name = page.parent.name if page.stem == "README" else page.stem
    return f"[{name}]({relpath(page, 'reference')}{match[2] or ''})"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; the pages that its cells name become links."""
    lines = [list(heads), ["---"] * len(heads), *(map(_cell, row) for row in rows)]
    return "\n".join(re.sub(r"  +", " ", f"| {' | '.join(cells)} |") for cells in lines)


def _cell(text: str) -> str:
    return linked(text).replace("|", r"\|").strip()


def sentences(text: str) -> str:
    """The text with a line for each sentence."""
    return re.sub(r"(?<=[.!?])\s+(?=[A-Z0-9`])", "\n", " ".join(text.split()))


def member_docs(kind: type[Enum]) -> dict[str, str]:
    """The docstring below each member of an enumeration."""
    docs = field_docs(kind)
    assert docs.keys() == kind.__members__.keys(), f"{kind.__name__} has members without docstrings"
    return docs


def field_docs(kind: type) -> dict[str, str]:
    """The docstrings below members and fields of a class, and of the dataclasses that it extends."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    docs = {}
    for base in kind.__bases__:
        if is_dataclass(base):
            docs |= field_docs(base)
    for member, text in pairwise(tree.body):
        match member, text:
            case (
                ast.Assign(targets=[ast.Name(name)]) | ast.AnnAssign(target=ast.Name(name)),
                ast.Expr(ast.Constant(str(doc))),
            ):
                docs[name] = " ".join(doc.split())
    return docs
