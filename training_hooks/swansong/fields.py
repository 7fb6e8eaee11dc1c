# SPDX-License-Identifier: Apache-2.0
"""The fields of messages and rank manifests: their types, the range of each type, and their JSON.

Both distributions use this module: it belongs to the hooks, and the daemon imports it.  Standard library
only, Python 3.10 and later.

The type of a field is one of the aliases below, each with its range.  :func:`build` checks the range.
:func:`fitted` clamps measurements and texts to the range.  Otherwise a loss of NaN, or an error message of a
megabyte, would cost the sender its connection.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from swansong import bounds
from swansong.bounds import BoundsError

VERSION = 1
PROCESS_PREFIX = "process-"
"""Start of the id of a start without hooks, which only the daemon draws."""
PREFIXES_MAX = 256
_CAPABILITIES_MAX = 16
KEYS_MAX = 1000
"""Keys of a JSON object, unknown fields included."""


class ProtocolError(ValueError):
    """A malformed message or rank manifest; the text names the field and the reason."""


def parse_object(data: bytes, limit_bytes: int, what: str) -> dict[str, Any]:
    """Parse one JSON object.

    Raises:
        ProtocolError: the bytes are not such an object.
    """
    try:
        return bounds.json_object(data, what, limit_bytes)
    except BoundsError as error:
        raise ProtocolError(str(error)) from None


@dataclass(frozen=True)
class FieldType:
    """The range of a field."""

    check: Callable[[Any, str], Any]
    """Takes value and name of a field; returns the value, or raises BoundsError."""
    fit: Callable[[Any], Any] = lambda value: value
    """Clamps a value of the sender to the range; returns None if that is impossible."""


def _integer(low: int, high: int, fit: Callable[[Any], Any] = lambda value: value) -> FieldType:
    return FieldType(lambda value, name: bounds.integer(value, name, low, high), fit)


def _clamped_integer(low: int, high: int) -> FieldType:
    return _integer(low, high, lambda value: min(max(operator.index(value), low), high))


def _clamped_number(low: float, high: float) -> FieldType:
    return FieldType(
        lambda value, name: bounds.number(value, name, low, high),
        lambda value: _clamp(value, low, high),
    )


def _clamp(value: Any, low: float, high: float) -> float | None:
    try:
        number = float(value)
    except OverflowError:  # an integer beyond all floats
        number = math.inf if value > 0 else -math.inf
    return None if math.isnan(number) else min(max(number, low), high)


def _clamped_text(max_chars: int) -> FieldType:
    return FieldType(
        lambda value, name: bounds.text(value, name, max_chars),
        lambda value: _cut(value, max_chars),
    )


def _cut(text: str, max_chars: int) -> str:
    """Cut a text to ``max_chars`` characters, and replace lone surrogates, which file names may contain."""
    return text[:max_chars].encode(errors="replace").decode()


def _check_given_id(value: Any, name: str) -> str:
    if value == "":
        raise BoundsError(f"{name} is empty")
    return bounds.identifier(value, name)


def _check_start_id(value: Any, name: str) -> str:
    start_id = bounds.identifier(value, name)
    if start_id.startswith(PROCESS_PREFIX):
        raise BoundsError(
            f"{name} is {bounds.shown(value)}, and only the daemon draws {PROCESS_PREFIX}*"
        )
    return start_id


def _list(check: Callable[[Any, str], str], max_items: int) -> FieldType:
    def check_all(value: Any, name: str) -> list[str]:
        found = bounds.items(value, name, max_items)
        return [check(each, f"{name}[{number}]") for number, each in enumerate(found)]

    return FieldType(check_all)


def _fit_metrics(metrics: dict[str, Any]) -> dict[str, float]:
    # The daemon reads these names, so they come first if there are too many.
    names = sorted(
        metrics, key=lambda name: name not in ("loss", "loss_is_finite", "loss_is_usual")
    )
    limit = bounds.METRIC_MAX
    fitted = {
        _cut(name, bounds.ID_CHARS_MAX): number
        for name in names
        if (number := _clamp(metrics[name], -limit, limit)) is not None
    }
    return dict(list(fitted.items())[: bounds.METRICS_MAX])


Step = Annotated[int, _clamped_integer(-1, bounds.STEP_MAX)]
"""Number of completed optimizer steps; -1 if unknown."""
Generation = Annotated[int, _integer(-1, bounds.GENERATION_MAX)]
"""-1 if unknown."""
Rank = Annotated[int, _integer(0, bounds.RANKS_MAX)]
Ranks = Annotated[int, _integer(1, bounds.RANKS_MAX)]
"""A number of ranks."""
Node = Annotated[int, _integer(0, bounds.NODES_MAX)]
Nodes = Annotated[int, _integer(1, bounds.NODES_MAX)]
"""A number of VMs."""
Count = Annotated[int, _integer(0, 2**31 - 1)]
Version = Annotated[int, _integer(0, 2**31 - 1)]
Bytes = Annotated[int, _clamped_integer(0, bounds.BYTES_MAX)]
Seconds = Annotated[float, _clamped_number(0.0, bounds.SECONDS_MAX)]
Metric = Annotated[float, _clamped_number(-bounds.METRIC_MAX, bounds.METRIC_MAX)]
Flag = Annotated[bool, FieldType(bounds.boolean)]
Id = Annotated[str, FieldType(bounds.identifier)]
"""At most 128 characters of letters, digits and ``_ . : / ~ @ + -``."""
GivenId = Annotated[str, FieldType(_check_given_id)]
"""An :data:`Id` that is not empty: the daemon takes it for its own request."""
StartId = Annotated[str, FieldType(_check_start_id)]
"""An :data:`Id` that is not one of a process without hooks, which only the daemon draws."""
Text = Annotated[str, _clamped_text(bounds.TEXT_CHARS_MAX)]
"""Text for people; at most 4,096 characters."""
PathText = Annotated[str, _clamped_text(bounds.TEXT_CHARS_MAX)]
"""A path on this VM."""
ShardPath = Annotated[str, FieldType(bounds.path)]
"""See :func:`swansong.bounds.path`."""
Capabilities = Annotated[list[str], _list(bounds.identifier, _CAPABILITIES_MAX)]
Prefixes = Annotated[list[str], _list(bounds.prefix, PREFIXES_MAX)]
"""Beginnings of paths within a checkpoint; at most :data:`PREFIXES_MAX`."""
StepDigests = Annotated[list[str], _list(bounds.step_digest, bounds.DIGESTS_MAX)]
"""See :func:`swansong.bounds.step_digest`; at most :data:`swansong.bounds.DIGESTS_MAX`."""
Metrics = Annotated[dict[str, float], FieldType(bounds.metrics, _fit_metrics)]
Report = Annotated[
    dict[str, Any], FieldType(lambda value, name: bounds.mapping(value, name, KEYS_MAX))
]


@functools.cache
def field_types(kind: Any) -> dict[str, tuple[FieldType, bool]]:
    """Return, by field of a message or manifest, its :class:`FieldType`, and whether it may be None."""
    found = {}
    hints = get_type_hints(kind, include_extras=True)
    for item in dataclasses.fields(kind):
        hint = hints[item.name]
        is_optional = get_origin(hint) is not Annotated
        bare = get_args(hint)[0] if is_optional else hint
        found[item.name] = (bare.__metadata__[0], is_optional)
    return found


def build(kind: Any, body: dict[str, Any], what: str) -> Any:
    """Build a message or manifest from a JSON object.

    Raises:
        ProtocolError: a field is missing, has the wrong type, or is out of range.
    """
    values: dict[str, Any] = {}
    types = field_types(kind)
    for item in dataclasses.fields(kind):
        if item.name in body:
            field_type, is_optional = types[item.name]
            value = body[item.name]
            try:
                is_null = is_optional and value is None
                values[item.name] = None if is_null else field_type.check(value, item.name)
            except (BoundsError, ProtocolError) as error:
                raise ProtocolError(f"{what}: {error}") from None
        elif item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            raise ProtocolError(f"{what}: {item.name} is missing")
    return kind(**values)


def fitted(sent: Any) -> dict[str, Any]:
    """Return the fields of a message or manifest, with measurements and texts clamped to their ranges.

    Raises:
        ProtocolError: a field has the wrong type.
    """
    body: dict[str, Any] = {}
    for name, (field_type, is_optional) in field_types(sent.__class__).items():
        value = getattr(sent, name)
        try:
            value = value if value is None else field_type.fit(value)
        except BoundsError as error:
            raise ProtocolError(str(error)) from None
        except (TypeError, AttributeError) as error:
            raise ProtocolError(f"{name} is {bounds.shown(value)}: {error}") from None
        # Only seconds of NaN cannot be clamped.
        body[name] = 0.0 if value is None and not is_optional else value
    return body
