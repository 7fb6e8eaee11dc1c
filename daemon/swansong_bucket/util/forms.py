# SPDX-License-Identifier: Apache-2.0
"""Forms: the fields of a record as a JSON object, each with its range, declared once for both directions."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

from swansong import bounds
from swansong.bounds import BoundsError

_KEYS_MAX = 1000

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Kind:
    """The type of a value."""

    read: Callable[[Any, str], Any]
    """Takes a JSON value and the name of its field; returns the value, or raises BoundsError."""
    write: Callable[[Any], Any] = lambda value: value
    """The inverse."""


FLAG = Kind(bounds.boolean)
ID = Kind(bounds.identifier)


def whole(low: int, high: int) -> Kind:
    """An integer."""
    return Kind(lambda value, name: bounds.integer(value, name, low, high))


def seconds(low: float = -bounds.SECONDS_MAX) -> Kind:
    """A duration or an instant of a clock."""
    return Kind(lambda value, name: bounds.number(value, name, low, bounds.SECONDS_MAX))


def text(max_chars: int = bounds.TEXT_CHARS_MAX) -> Kind:
    """A text."""
    return Kind(lambda value, name: bounds.text(value, name, max_chars))


def one_of(values: type[Enum]) -> Kind:
    """A member of an enumeration, by its value."""

    def read(value: Any, name: str) -> Enum:
        try:
            return values(value)
        except ValueError:
            raise BoundsError(f"{name} is {bounds.shown(value)}") from None

    return Kind(read, lambda member: member.value)


def optional(kind: Kind) -> Kind:
    """A value or None."""
    return Kind(
        lambda value, name: None if value is None else kind.read(value, name),
        lambda value: None if value is None else kind.write(value),
    )


def or_else(kind: Kind, default: Any) -> Kind:
    """A value that may be absent."""
    return Kind(
        lambda value, name: default if value is None else kind.read(value, name), kind.write
    )


def several(
    kind: Kind, items_max: int, collection: Callable[[list[Any]], Collection[Any]] = tuple
) -> Kind:
    """A collection of values."""

    def read(value: Any, name: str) -> Collection[Any]:
        return collection([kind.read(each, name) for each in bounds.items(value, name, items_max)])

    return Kind(read, lambda values: [kind.write(each) for each in values])


@dataclass(frozen=True, slots=True)
class Named:
    """A field whose attribute has another name."""

    attribute: str
    kind: Kind


class Form(Generic[R]):
    """The fields of a record.

    Args:
        record: makes a record from its attributes.
        fields: by name in JSON.
    """

    def __init__(self, record: Callable[..., R], /, **fields: Kind | Named) -> None:
        self._record = record
        self._fields = {
            name: field if isinstance(field, Named) else Named(name, field)
            for name, field in fields.items()
        }

    def read(self, value: Any, name: str) -> R:
        """The record of a JSON object; unknown fields are ignored.

        Raises:
            BoundsError: a field is missing, has the wrong type, or is out of range.
        """
        body = bounds.mapping(value, name, _KEYS_MAX)
        return self._record(
            **{
                field.attribute: field.kind.read(body.get(key), f"{key} of {name}")
                for key, field in self._fields.items()
            }
        )

    def write(self, record: R) -> dict[str, Any]:
        """The record as a JSON object."""
        return {
            key: field.kind.write(getattr(record, field.attribute))
            for key, field in self._fields.items()
        }

    @property
    def kind(self) -> Kind:
        """The record as the type of a field."""
        return Kind(self.read, self.write)
