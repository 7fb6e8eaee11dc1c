# SPDX-License-Identifier: Apache-2.0
"""Values from outside, made safe for a log line or a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping

_TEXT_MAX = 500
_ITEMS_MAX = 50
_DEPTH_MAX = 4


def printable(value: object, depth: int = 0) -> object:
    """A copy for JSON: strings shortened and without control characters, large containers cut."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if depth < _DEPTH_MAX and isinstance(value, Mapping):
        items = list(value.items())[:_ITEMS_MAX]
        return {str(printable(str(key))): printable(item, depth + 1) for key, item in items}
    if depth < _DEPTH_MAX and isinstance(value, (list, tuple, set, frozenset)):
        return [printable(item, depth + 1) for item in list(value)[:_ITEMS_MAX]]
    text = str(value)
    if len(text) > _TEXT_MAX:
        text = f"{text[:_TEXT_MAX]}... ({len(text)} characters)"
    return escaped(text)


def escaped(text: str) -> str:
    """The text, with an escape such as ``\\x1b`` for each character that a terminal may not get."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
