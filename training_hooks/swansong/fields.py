# SPDX-License-Identifier: Apache-2.0
"""The fields of messages and rank manifests: their types, the range of each type, and their JSON.

Both distributions use this module: it belongs to the hooks, and the daemon imports it.  Standard library
only, Python 3.10 and later.

The type of a field is one of the aliases below, and :data:`FIELD_TYPES` has the range of each alias.
:func:`build` checks the range.  :func:`fitted` clamps measurements and texts to the range.  Otherwise a
loss of NaN, or an error message of a megabyte, would cost the sender its connection.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from swansong import bounds
from swansong.bounds import BoundsError

VERSION = 1
PROCESS_PREFIX = "process-"
"""Start of the id of a start without hooks, which only the daemon draws."""
PREFIXES_MAX = 256
_CAPABILITIES_MAX = 16
KEYS_MAX = 1000
"""Keys of a JSON object, unknown fields included."""

Step = int
"""Number of completed optimizer steps; -1 if unknown."""
Generation = int
"""-1 if unknown."""
Rank = int
Ranks = int
"""A number of ranks."""
Node = int
Nodes = int
"""A number of VMs."""
Count = int
Version = int
Bytes = int
Seconds = float
Metric = float
Flag = bool
Id = str
"""At most 128 characters of letters, digits and ``_ . : / ~ @ + -``."""
StartId = str
"""An :data:`Id` that is not one of a process without hooks, which only the daemon draws."""
Text = str
"""Text for people; at most 4,096 characters."""
PathText = str
"""A path on this VM."""
ShardPath = str
"""See :func:`swansong.bounds.path`."""
Capabilities = list[str]
Prefixes = list[str]
"""Beginnings of paths within a checkpoint; at most :data:`PREFIXES_MAX`."""
StepDigests = list[str]
"""See :func:`swansong.bounds.step_digest`; at most :data:`swansong.bounds.DIGESTS_MAX`."""
Metrics = dict[str, float]
Report = dict[str, Any]


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


def _integer(low: int, high: int) -> FieldType:
    return FieldType(lambda value, name: bounds.integer(value, name, low, high))


def _clamped_integer(low: int, high: int) -> FieldType:
    return FieldType(
        lambda value, name: bounds.integer(value, name, low, high),
        lambda value: min(max(operator.index(value), low), high),
    )


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


def _check_start_id(value: Any, name: str) -> str:
    start_id = bounds.identifier(value, name)
    if start_id.startswith(PROCESS_PREFIX):
        raise BoundsError(
            f"{name} is {bounds.shown(value)}, and only the daemon draws {PROCESS_PREFIX}*"
        )
    return start_id


def _check_capabilities(value: Any, name: str) -> list[str]:
    found = bounds.items(value, name, _CAPABILITIES_MAX)
    return [bounds.identifier(each, f"{name}[{number}]") for number, each in enumerate(found)]


def _check_prefixes(value: Any, name: str) -> list[str]:
    found = bounds.items(value, name, PREFIXES_MAX)
    return [bounds.prefix(each, f"{name}[{number}]") for number, each in enumerate(found)]


def _check_step_digests(value: Any, name: str) -> list[str]:
    found = bounds.items(value, name, bounds.DIGESTS_MAX)
    return [bounds.step_digest(each, f"{name}[{number}]") for number, each in enumerate(found)]


def _fit_metrics(metrics: dict[str, Any]) -> dict[str, float]:
    # The daemon reads these two names, so they come first if there are too many.
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


FIELD_TYPES = {
    "Step": _clamped_integer(-1, bounds.STEP_MAX),
    "Generation": _integer(-1, bounds.GENERATION_MAX),
    "Rank": _integer(0, bounds.RANKS_MAX),
    "Ranks": _integer(1, bounds.RANKS_MAX),
    "Node": _integer(0, bounds.NODES_MAX),
    "Nodes": _integer(1, bounds.NODES_MAX),
    "Count": _integer(0, 2**31 - 1),
    "Version": _integer(0, 2**31 - 1),
    "Bytes": _clamped_integer(0, bounds.BYTES_MAX),
    "Seconds": _clamped_number(0.0, bounds.SECONDS_MAX),
    "Metric": _clamped_number(-bounds.METRIC_MAX, bounds.METRIC_MAX),
    "Flag": FieldType(bounds.boolean),
    "Id": FieldType(bounds.identifier),
    "StartId": FieldType(_check_start_id),
    "Text": _clamped_text(bounds.TEXT_CHARS_MAX),
    "PathText": _clamped_text(bounds.TEXT_CHARS_MAX),
    "ShardPath": FieldType(bounds.path),
    "Capabilities": FieldType(_check_capabilities),
    "Prefixes": FieldType(_check_prefixes),
    "StepDigests": FieldType(_check_step_digests),
    "Metrics": FieldType(bounds.metrics, _fit_metrics),
    "Report": FieldType(lambda value, name: bounds.mapping(value, name, KEYS_MAX)),
}
"""By the name of the alias in a field's annotation, which is a string because of the __future__ import."""


def _field_type(item: dataclasses.Field[Any]) -> tuple[FieldType, bool]:
    """Return the type of a field, and whether the field may be None."""
    annotation = str(item.type)
    name = annotation.removesuffix(" | None")
    return FIELD_TYPES[name], name != annotation


def build(kind: type[Any], body: dict[str, Any], what: str) -> Any:
    """Build a message or manifest from a JSON object.

    Raises:
        ProtocolError: a field is missing, has the wrong type, or is out of range.
    """
    values: dict[str, Any] = {}
    for item in dataclasses.fields(kind):
        if item.name in body:
            field_type, is_optional = _field_type(item)
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
    for item in dataclasses.fields(sent):
        field_type, is_optional = _field_type(item)
        value = getattr(sent, item.name)
        try:
            value = value if value is None else field_type.fit(value)
        except BoundsError as error:
            raise ProtocolError(str(error)) from None
        except (TypeError, AttributeError) as error:
            raise ProtocolError(f"{item.name} is {bounds.shown(value)}: {error}") from None
        # Only seconds of NaN cannot be clamped.
        body[item.name] = 0.0 if value is None and not is_optional else value
    return body
