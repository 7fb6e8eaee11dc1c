# SPDX-License-Identifier: Apache-2.0
"""The pin: the object by which a user keeps a commit under a name, whatever the rules of retention are.

docs/format.md describes the bytes.  A pin is created by create-if-absent, so a name marks one commit
until the pin is removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from swansong import bounds

from swansong_bucket.errors import CorruptError, Exists, NotFound, TooLarge
from swansong_bucket.format import record
from swansong_bucket.format.keys import UNSIGNED, RunKeys
from swansong_bucket.model import CommitRef
from swansong_bucket.runs.catalog import foreign_objects, is_folder
from swansong_bucket.stores.base import ObjectStore
from swansong_bucket.util.forms import FLAG, Form, Kind, Named, text, whole

FORMAT = "swansong-pin"
BYTES_MAX = 64 * 2**10
NOTE_CHARS_MAX = bounds.TEXT_CHARS_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """Content of a pin."""

    run: str
    name: str
    ref: CommitRef
    note: str = ""
    created: str = ""
    """UTC, informational."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPin:
    """An object below ``pins/``."""

    key: str
    name: str
    pin: Pin | None
    """None: it is damaged."""
    problem: str = ""
    age_s: float | None = None
    """By the store's clock, when the pins were listed."""

    def may_mean(self, ref: CommitRef, age_s: float | None) -> bool:
        """Whether it keeps a commit of this age: a damaged pin keeps every commit that is older.

        Args:
            age_s: at a listing of the commits that is not older than that of the pins.
        """
        if self.pin is not None:
            return self.pin.ref == ref
        return self.age_s is None or age_s is None or age_s >= self.age_s


def _pin(*, generation: int, step: int, is_final: bool, **texts: str) -> Pin:
    return Pin(ref=CommitRef(generation, step, is_final), **texts)


_TEXTS = {
    "run": text(bounds.ID_CHARS_MAX),
    "name": text(bounds.ID_CHARS_MAX),
    "note": text(NOTE_CHARS_MAX),
    "created": text(bounds.ID_CHARS_MAX),
}
_REF: dict[str, Kind | Named] = {
    "generation": whole(0, bounds.GENERATION_MAX),
    "step": whole(0, bounds.STEP_MAX),
    "final": Named("is_final", FLAG),
}


def encode(pin: Pin) -> bytes:
    """The pin as the bytes of its object."""
    return record.encode(
        FORMAT, Form(Pin, **_TEXTS).write(pin) | Form(CommitRef, **_REF).write(pin.ref)
    )


def decode(data: bytes) -> Pin:
    """Parse and check the bytes of a pin.

    Raises:
        CorruptError: a field is missing or out of bounds.
    """
    return record.read(data, FORMAT, BYTES_MAX, Form(_pin, **_TEXTS, **_REF))


def create(store: ObjectStore, keys: RunKeys, pin: Pin) -> None:
    """Create the pin.  A pin with the same content that exists already is a success.

    Raises:
        Exists: the name is taken.
        StoreError: the store failed.
    """
    key, data = keys.pin(pin.name), encode(pin)
    decode(data)  # fails before a pin that no reader accepts
    try:
        store.put(key, data, if_absent=True)
    except Exists:
        found = read(store, keys, key)
        if found is not None and (found.ref, found.note) == (pin.ref, pin.note):
            return  # also an attempt whose reply was lost
        held = "an unreadable pin" if found is None else str(found.ref)
        raise Exists(f"the name {pin.name} is taken by {held}") from None


def remove(store: ObjectStore, keys: RunKeys, name: str) -> bool:
    """Remove a pin; False: the run has no such pin.

    Raises:
        StoreError: the store failed, or the role may not delete.
    """
    found = store.head(keys.pin(name))
    if found is not None:
        store.delete(found.key, if_tag=found.tag)
    return found is not None


def read(store: ObjectStore, keys: RunKeys, key: str) -> Pin | None:
    """The pin under a key; None if it was removed.

    Raises:
        CorruptError: the object is not a valid pin of this key.
        StoreError: the store failed.
    """
    try:
        pin = decode(store.get(key))
    except NotFound:
        return None
    except (CorruptError, TooLarge) as error:
        raise _invalid(store, key, str(error)) from None
    if (pin.run, pin.name) != (keys.run, keys.parse_pin(key)):
        raise _invalid(store, key, f"it is the pin {pin.name!r:.100} of run {pin.run!r:.100}")
    return pin


class Pins:
    """Reads the pins of a run; a pin that was read before is not read again.

    Safe to use from several threads.
    """

    def __init__(self, store: ObjectStore, keys: RunKeys) -> None:
        self._store = store
        self._keys = keys
        self._known: Mapping[tuple[str, str], Pin] = {}
        """By key and tag: the tag distinguishes a pin from an earlier one of the same name."""

    def now(self) -> list[StoredPin]:
        """The pins in the store now, by name; damaged ones, too.

        Raises:
            CorruptError: an object below ``pins/`` has a key that no swansong wrote.
            StoreError: the store failed.
        """
        found: dict[tuple[str, str], Pin] = {}
        stored: list[StoredPin] = []
        for info in self._store.list(self._keys.pins):
            if is_folder(info) or info.key.endswith(UNSIGNED):
                continue
            name = self._keys.parse_pin(info.key)
            if name is None:
                raise foreign_objects(self._store, [info.key])
            pin, problem = self._known.get((info.key, info.tag)), ""
            try:
                pin = pin or read(self._store, self._keys, info.key)
            except CorruptError as error:
                problem = error.line()
            if pin is not None:
                found[info.key, info.tag] = pin
            if pin is not None or problem:
                stored.append(
                    StoredPin(key=info.key, name=name, pin=pin, problem=problem, age_s=info.age_s)
                )
        self._known = {identity: pin for identity, pin in found.items() if identity[1]}
        return sorted(stored, key=lambda pin: pin.name)


def _invalid(store: ObjectStore, key: str, why: str) -> CorruptError:
    return CorruptError(
        f"{store.url}/{key} is not a valid pin of this run: {why}",
        hint="Repair it with swansong verify --repair, or delete it with swansong unpin; "
        "upgrade swansong if a newer version wrote it",
    )
