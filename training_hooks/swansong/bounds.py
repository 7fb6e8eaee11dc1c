# SPDX-License-Identifier: Apache-2.0
"""Bounds of all input: types, ranges, lengths and counts.

Messages of the socket, rank manifests, manifests, claims, farewells, journals and metadata responses are
checked by the functions below.  Each function returns the value with its declared type, or raises a
:class:`BoundsError` that names the field in one line.  The limits are far above the values of real jobs.
They are small enough that later arithmetic cannot overflow, divide by zero, or allocate without limit.

Standard library only, Python 3.10 and later.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

STEP_MAX = 10**12 - 1
"""Twelve digits, as in the names of sealed sets and in the keys of commits."""
NEVER = STEP_MAX + 1
"""Later than any step."""
GENERATION_MAX = 10**8 - 1
"""Eight digits, as in the keys of claims and commits."""
RANKS_MAX = 10**5 - 1
NODES_MAX = 10**5 - 1
SECONDS_MAX = 10.0**9
"""31 years: longer than any save, step or notice."""
BYTES_MAX = 2**60
"""An exbibyte: larger than any checkpoint."""
METRIC_MAX = 1e300
"""Sums over all ranks stay finite."""
ID_CHARS_MAX = 128
TEXT_CHARS_MAX = 4096
"""Free text: reasons and error messages."""
PATH_CHARS_MAX = 1024
"""Relative paths of files in a checkpoint."""
PATH_LEVELS_MAX = 16
"""Names in such a path, including that of the file."""
NAME_CHARS_MAX = 200
"""Length of each name in such a path."""
FILES_MAX = 100_000
"""Files of one checkpoint on one VM."""
METRICS_MAX = 100
"""Metrics that a trainer reports with a checkpoint."""
FACTS_MAX = 100
"""Facts about the trainer in a manifest."""
DIGESTS_MAX = 32
"""Digests of steps of one rank."""
FAREWELL_DIGESTS_MAX = 256
"""Digests of steps in one farewell, of all ranks of a VM."""
DIGEST_CHARS_MAX = 1024
"""Length of the digest of one step."""
JSON_VALUES_MAX = 500_000
"""Values of one JSON object, counted by their separators.  The parsed form of a few bytes of JSON, such as
``[],[],[]``, has many times their size."""

_NAME_CHARS = "letters, digits, space and _ + = @ , . -"
_NOT_IN_PATHS = re.compile(r"[^A-Za-z0-9_+=@,. /-]")
_ID = re.compile(r"[A-Za-z0-9_.:/~@+-]*")
_RESERVED = frozenset(("", ".", ".."))
_STEP_DIGEST = re.compile(
    r"[0-9]{1,12}( [a-z]{1,16}(\.[A-Za-z0-9_]{1,64})?=[a-z0-9.+-]{1,32}){0,16}"
)


class BoundsError(ValueError):
    """An input value has the wrong type or is out of range; the text names the field."""


def integer(value: Any, field: str, low: int, high: int) -> int:
    """An integer from ``low`` to ``high``; a bool is not an integer.

    Raises:
        BoundsError: it is not.
    """
    if type(value) is not int or not low <= value <= high:
        raise BoundsError(f"{field} is {shown(value)}, not an integer from {low} to {high}")
    return value


def number(value: Any, field: str, low: float, high: float) -> float:
    """A finite number from ``low`` to ``high``; a bool is not a number.

    Raises:
        BoundsError: it is not.
    """
    is_number = type(value) is int or (type(value) is float and math.isfinite(value))
    if not is_number or not low <= value <= high:
        raise BoundsError(f"{field} is {shown(value)}, not a number from {low:g} to {high:g}")
    return float(value)


def boolean(value: Any, field: str) -> bool:
    """True or false.

    Raises:
        BoundsError: it is neither.
    """
    if type(value) is not bool:
        raise BoundsError(f"{field} is {shown(value)}, not true or false")
    return value


def text(value: Any, field: str, max_chars: int = TEXT_CHARS_MAX) -> str:
    """A string of at most ``max_chars`` characters that UTF-8 can encode.

    Raises:
        BoundsError: it is not.
    """
    if type(value) is not str:
        raise BoundsError(f"{field} is {shown(value)}, not a string")
    if len(value) > max_chars:
        raise BoundsError(f"{field} has {len(value)} characters; the limit is {max_chars}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BoundsError(f"{field} contains a lone surrogate") from None
    return value


def identifier(value: Any, field: str, max_chars: int = ID_CHARS_MAX) -> str:
    """A short string of letters, digits and ``_ . : / ~ @ + -``; may be empty.

    Raises:
        BoundsError: it is not.
    """
    if not _ID.fullmatch(text(value, field, max_chars)):
        raise BoundsError(f"{field} is {shown(value)}, which has characters that are not allowed")
    return str(value)


def step_digest(value: Any, field: str) -> str:
    """The digest of a step, as text: ``12 batch.train=0f31c9a2 weights=9b1d...``.

    Raises:
        BoundsError: it is not.
    """
    if not _STEP_DIGEST.fullmatch(text(value, field, DIGEST_CHARS_MAX)):
        raise BoundsError(f"{field} is {shown(value)}, not the digest of a step")
    return str(value)


def path(value: Any, field: str) -> str:
    """A relative path that a restore may write to: allowed characters only, and no ``.`` or ``..``.

    Raises:
        BoundsError: the path breaks a limit; names the limit and the fix.
    """
    if type(value) is not str:
        raise BoundsError(f"{field} is {shown(value)}, not a string")
    if problem := _path_problem(value):
        raise BoundsError(f"{field} is {shown(value)}, which {problem}")
    return value


def prefix(value: Any, field: str) -> str:
    """The beginning of a :func:`path`: a path, or a path and a slash.

    Raises:
        BoundsError: no path that a restore may write to begins so.
    """
    begin = text(value, field, PATH_CHARS_MAX)
    path(begin.removesuffix("/"), field)
    return begin


def _path_problem(path: str) -> str:
    names = path.split("/")
    longest = max(map(len, names))
    wrong = _NOT_IN_PATHS.search(path)
    if len(path) > PATH_CHARS_MAX:
        return f"has {len(path)} characters; the limit of a path is {PATH_CHARS_MAX}: shorten its names"
    if len(names) > PATH_LEVELS_MAX:
        return (
            f"has {len(names)} levels; the limit is {PATH_LEVELS_MAX}, with the name of the file: "
            "nest fewer directories"
        )
    if longest > NAME_CHARS_MAX:
        return f"has a name of {longest} characters; the limit is {NAME_CHARS_MAX}: shorten it"
    for reserved in _RESERVED.intersection(names):
        return f"has the name {reserved!r}, which is reserved: use another one"
    if wrong:
        return f"has the character {wrong[0]!r}, which is not allowed: use {_NAME_CHARS}"
    return ""


def items(value: Any, field: str, max_items: int) -> list[Any]:
    """A list of at most ``max_items``.

    Raises:
        BoundsError: it is not.
    """
    if type(value) is not list:
        raise BoundsError(f"{field} is {shown(value)}, not a list")
    if len(value) > max_items:
        raise BoundsError(f"{field} has {len(value)} items; the limit is {max_items}")
    return value


def mapping(value: Any, field: str, max_items: int) -> dict[str, Any]:
    """An object of at most ``max_items`` keys.

    Raises:
        BoundsError: it is not.
    """
    if type(value) is not dict:
        raise BoundsError(f"{field} is {shown(value)}, not an object")
    if len(value) > max_items:
        raise BoundsError(f"{field} has {len(value)} keys; the limit is {max_items}")
    return value


def metrics(value: Any, field: str) -> dict[str, float]:
    """An object of finite numbers, such as loss and metrics of a checkpoint.

    Raises:
        BoundsError: it is not.
    """
    return {
        text(name, f"a key of {field}", ID_CHARS_MAX): number(
            each, f"{field}[{name[:40]!r}]", -METRIC_MAX, METRIC_MAX
        )
        for name, each in mapping(value, field, METRICS_MAX).items()
    }


def facts(value: Any, field: str) -> dict[str, Any]:
    """An object of scalars: strings, integers of 64 bits, finite numbers, true, false and null.

    Raises:
        BoundsError: it is not.
    """
    return {
        text(name, f"a key of {field}", ID_CHARS_MAX): _scalar(each, f"{field}[{name[:40]!r}]")
        for name, each in mapping(value, field, FACTS_MAX).items()
    }


def _scalar(value: Any, field: str) -> Any:
    if value is None or type(value) is bool:
        return value
    if type(value) is str:
        return text(value, field)
    if type(value) is float:
        return number(value, field, -METRIC_MAX, METRIC_MAX)
    if type(value) is int:
        return integer(value, field, -(2**63), 2**63 - 1)
    raise BoundsError(f"{field} is {shown(value)}, not a string, number, true, false or null")


def json_object(
    data: bytes, what: str, max_bytes: int, *, max_values: int = JSON_VALUES_MAX
) -> dict[str, Any]:
    """Parse one JSON object: limited in size and in the number of its values, with each key once.

    The parser's recursion limit bounds the depth.  Numbers too large for a float, such as ``1e999``, become
    infinite, which :func:`number` refuses.

    Raises:
        BoundsError: the bytes are not such an object.
    """
    if len(data) > max_bytes:
        raise BoundsError(f"{what} has {len(data)} bytes; the limit is {max_bytes}")
    if sum(data.count(separator) for separator in (b",", b"[", b"{")) > max_values:
        raise BoundsError(f"{what} has more than {max_values} values")

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise BoundsError(f"{what} has the same key twice")
        return result

    def no_constant(name: str) -> None:
        raise BoundsError(f"{what} contains {name}, which is not a JSON number")

    try:
        body = json.loads(data, object_pairs_hook=without_duplicates, parse_constant=no_constant)
    except BoundsError:
        raise
    except (ValueError, RecursionError) as error:
        raise BoundsError(f"{what} is not JSON: {error!s:.120}") from None
    if type(body) is not dict:
        raise BoundsError(f"{what} is not a JSON object")
    return body


def shown(value: Any) -> str:
    """Format a value for an error message, in at most about 80 characters."""
    if type(value) is int and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"  # computing its decimal form may take minutes
    if isinstance(value, (list, dict)):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)} items"
    if isinstance(value, str) and len(value) > 60:
        return f"{value[:60]!r}..."
    return f"{value!r:.80}"
