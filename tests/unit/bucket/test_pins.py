# SPDX-License-Identifier: Apache-2.0
"""Pins: created once, checked when read, signed with the run's key."""

from __future__ import annotations

import json

import pytest
from swansong.bounds import BoundsError
from swansongd.bucket import pins
from swansongd.bucket.keys import RunKeys
from swansongd.bucket.pins import Pin, Pins
from swansongd.bucket.signing import Signer
from swansongd.errors import CorruptError, Exists, NotFound
from swansongd.model import CommitRef

from testkit.memory_store import MemoryStore

KEYS = RunKeys("r")
SIGNED = RunKeys("r", Signer(b"k" * 32))
PIN = Pin(
    run="r", name="paper", ref=CommitRef(3, 120, is_final=True), note="figure 2\n", created=""
)


def test_a_pin_returns_as_it_was_created() -> None:
    """With and without a signature."""
    for keys in (KEYS, SIGNED):
        store = MemoryStore()
        pins.create(store, keys, PIN)
        assert Pins(store, keys).now() == [PIN]
        assert list(store.objects) == ["r/pins/paper.json"]


def test_a_name_marks_one_commit() -> None:
    """The same pin again succeeds; another commit or note under the name does not."""
    store = MemoryStore()
    pins.create(store, KEYS, PIN)
    pins.create(store, KEYS, PIN)
    other = Pin(run="r", name="paper", ref=CommitRef(3, 121))
    with pytest.raises(Exists, match=r"paper is taken by generation 3 step 120 \(final\)"):
        pins.create(store, KEYS, other)
    pins.remove(store, KEYS, "paper")
    with pytest.raises(NotFound):
        pins.remove(store, KEYS, "paper")
    pins.create(store, KEYS, other)


@pytest.mark.parametrize("name", ["", ".x", "a/b", "a b", "x" * 101, "a\n", "ä"])
def test_a_name_is_a_safe_part_of_a_key(name: str) -> None:
    """Letters, digits, dots, dashes and underscores."""
    with pytest.raises(BoundsError):
        KEYS.pin(name)
    assert KEYS.parse_pin(f"r/pins/{name}.json") is None


def test_an_unchanged_pin_is_read_once() -> None:
    """A pin of the same name that was removed and created again is read again."""
    store = MemoryStore()
    found = Pins(store, KEYS)
    pins.create(store, KEYS, PIN)
    assert (found.now(), found.now()) == ([PIN], [PIN])
    assert store.count("get") == 1
    other = Pin(run="r", name="paper", ref=CommitRef(3, 121))
    pins.remove(store, KEYS, "paper")
    pins.create(store, KEYS, other)
    assert found.now() == [other]


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"format": "swansong-claim"},
        {"run": "other"},
        {"name": "other"},
        {"generation": -1},
        {"step": "7"},
        {"final": 1},
        {"note": "x" * 5000},
        {"signature": "hmac-sha256:00"},
    ],
)
def test_an_invalid_pin_is_an_error(change: dict[str, object]) -> None:
    """Prune must not delete a commit whose pin it cannot read."""
    store = MemoryStore()
    pins.create(store, SIGNED, PIN)
    (key,) = store.objects
    store.objects[key] = json.dumps(json.loads(store.objects[key]) | change).encode()
    with pytest.raises(CorruptError, match=r"paper\.json is not a valid pin"):
        Pins(store, SIGNED).now()


def test_a_foreign_object_below_pins_is_an_error() -> None:
    """Except for the empty objects that consoles create to show folders."""
    store = MemoryStore()
    store.put("r/pins/", b"")
    assert Pins(store, KEYS).now() == []
    store.put("r/pins/paper.yaml", b"{}")
    with pytest.raises(CorruptError, match=r"paper\.yaml"):
        Pins(store, KEYS).now()
