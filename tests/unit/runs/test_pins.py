# SPDX-License-Identifier: Apache-2.0
"""Pins: created once, and checked when read."""

from __future__ import annotations

from dataclasses import replace

import pytest
from swansong.bounds import BoundsError
from swansong_bucket.errors import CorruptError, Exists
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.model import CommitRef
from swansong_bucket.runs import pins
from swansong_bucket.runs.pins import Pin, Pins

from testkit.memory_store import MemoryStore
from testkit.records import changed

KEYS = RunKeys("r")
PIN = Pin(
    run="r", name="paper", ref=CommitRef(3, 120, is_final=True), note="figure 2\n", created=""
)


def test_a_name_marks_one_commit() -> None:
    """The same pin again succeeds; another commit or note under the name does not."""
    store = MemoryStore()
    pins.create(store, KEYS, PIN)
    pins.create(store, KEYS, PIN)
    other = Pin(run="r", name="paper", ref=CommitRef(3, 121))
    with pytest.raises(Exists, match=r"paper is taken by generation 3 step 120 \(final\)"):
        pins.create(store, KEYS, other)
    assert pins.remove(store, KEYS, "paper")
    assert not pins.remove(store, KEYS, "paper")
    pins.create(store, KEYS, other)


@pytest.mark.parametrize("name", ["", ".x", "a/b", "a b", "x" * 101, "a\n", "ä", f"a.{'0' * 32}"])
def test_a_name_is_a_safe_part_of_a_key(name: str) -> None:
    """Letters, digits, dots, dashes and underscores."""
    with pytest.raises(BoundsError):
        KEYS.pin(name)
    assert KEYS.parse_pin(f"r/pins/{name}.json") is None


def test_an_unchanged_pin_is_read_once() -> None:
    """It returns as it was created.  A pin of the same name that was created again is read again."""
    store = MemoryStore()
    found = Pins(store, KEYS)
    pins.create(store, KEYS, PIN)
    assert list(store.objects) == ["r/pins/paper.json"]
    assert [stored.pin for stored in (*found.now(), *found.now())] == [PIN, PIN]
    assert store.count("get") == 1
    other = Pin(run="r", name="paper", ref=CommitRef(3, 121))
    pins.remove(store, KEYS, "paper")
    pins.create(store, KEYS, other)
    assert [stored.pin for stored in found.now()] == [other]


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
    ],
)
def test_a_damaged_pin_costs_that_pin(change: dict[str, object]) -> None:
    """It is named with the reason; it may mean every commit that is older, and the others are read."""
    store = MemoryStore()
    pins.create(store, KEYS, PIN)
    pins.create(store, KEYS, replace(PIN, name="other"))
    key = KEYS.pin("paper")
    store.objects[key] = changed(store.objects[key], **change)
    store.clock = lambda: 1000.0
    store.written_unix_s[key] = 900.0
    other, damaged = Pins(store, KEYS).now()
    assert other.pin == replace(PIN, name="other")
    assert (damaged.name, damaged.pin, damaged.age_s) == ("paper", None, 100.0)
    assert "paper.json is not a valid pin" in damaged.problem
    ages_s = (99.0, 100.0, 5000.0, None)
    assert [damaged.may_mean(CommitRef(1, 1), age_s) for age_s in ages_s] == [
        False,
        True,
        True,
        True,
    ]
    assert [other.may_mean(ref, 5000.0) for ref in (PIN.ref, CommitRef(1, 1))] == [True, False]


def test_a_foreign_object_below_pins_is_an_error() -> None:
    """Except for the empty objects that consoles create to show folders."""
    store = MemoryStore()
    store.put("r/pins/", b"")
    assert Pins(store, KEYS).now() == []
    store.put("r/pins/paper.yaml", b"{}")
    with pytest.raises(CorruptError, match=r"paper\.yaml"):
        Pins(store, KEYS).now()
