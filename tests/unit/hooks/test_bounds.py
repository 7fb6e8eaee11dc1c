# SPDX-License-Identifier: Apache-2.0
"""Bounds of input values: each check returns the declared type, or names the field in one line."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swansong import bounds
from swansong.bounds import BoundsError
from swansong.fields import VERSION, ProtocolError
from swansong.layout import RankManifest
from swansong_bucket.errors import CorruptError
from swansong_bucket.format.manifest import check_paths

from testkit.strategies import json_values

CHECKS: list[tuple[Callable[[Any], Any], type]] = [
    (lambda value: bounds.integer(value, "field", 0, 10), int),
    (lambda value: bounds.number(value, "field", 0.0, 10.0), float),
    (lambda value: bounds.boolean(value, "field"), bool),
    (lambda value: bounds.text(value, "field", 10), str),
    (lambda value: bounds.identifier(value, "field", 10), str),
    (lambda value: bounds.items(value, "field", 10), list),
    (lambda value: bounds.mapping(value, "field", 10), dict),
    (lambda value: bounds.metrics(value, "field"), dict),
    (lambda value: bounds.facts(value, "field"), dict),
]


@pytest.mark.fault("S13")
@given(value=json_values)
def test_a_check_returns_its_type_or_names_the_field(value: Any) -> None:
    """No value raises another error, and the message is one short line."""
    for check, kind in CHECKS:
        try:
            assert type(check(value)) is kind
        except BoundsError as error:
            message = str(error)
            assert "field" in message
            assert message.isprintable() or "\\n" in message
            assert len(message) < 300


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, 1e999, 10**400, -1, 11, True, "1", None, [1]]
)
def test_only_a_finite_number_within_the_range_is_a_number(value: Any) -> None:
    with pytest.raises(BoundsError, match="cost"):
        bounds.number(value, "cost", 0, 10)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b'{"a": 1, "a": 2}', "same key twice"),
        (b'{"a": NaN}', "NaN"),
        (b"[" * 100_000, "not JSON"),
        (b'{"a":' * 100_000, "not JSON"),
        (b'{"a": ' + b"1" * 100_000 + b"}", "not JSON"),
        (b"\xff\xfe{}", "not JSON"),
        (b"[]", "not a JSON object"),
        (b" " * 2_000_000, "limit"),
    ],
)
def test_hostile_json_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(BoundsError, match=reason):
        bounds.json_object(data, "the answer", 1_000_000)


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_bytes_are_an_object_or_refused(data: bytes) -> None:
    try:
        assert isinstance(bounds.json_object(data, "it", 1000), dict)
    except BoundsError:
        pass


def test_a_large_integer_is_not_printed_in_full() -> None:
    """Its decimal form takes quadratic time, and Python refuses it above 4,300 digits."""
    assert bounds.shown(10**10_000) == "an integer of 33220 bits"
    assert json.dumps(bounds.shown("x" * 10_000)).count("x") == 60


def test_facts_are_flat_scalars() -> None:
    """Facts are the entries of a manifest about its trainer."""
    good = {"a": 1, "b": -(2**63), "c": 0.5, "d": "text", "e": True, "f": None}
    assert bounds.facts(good, "trainer") == good
    for bad in (2**63, math.inf, [1], {}, "x" * 5000, "\ud800", b"x"):
        with pytest.raises(BoundsError, match="trainer"):
            bounds.facts({"x": bad}, "trainer")
    with pytest.raises(BoundsError, match="trainer"):
        bounds.facts({str(n): n for n in range(bounds.FACTS_MAX + 1)}, "trainer")


@pytest.mark.fault("S13")
def test_json_of_too_many_values_is_refused_before_it_is_parsed() -> None:
    """Three bytes of JSON would take seventy bytes of memory."""
    count = bounds.JSON_VALUES_MAX
    for many in (b"[],", b"{},", b"0,"):
        data = b'{"x":[' + many * count + b"0]}"
        with pytest.raises(BoundsError, match="values"):
            bounds.json_object(data, "the thing", len(data))


LONG = "/".join(["d" * 150] * 7)
PATHS = [
    ("/".join("d" * 17), "17 levels; the limit is 16"),
    (LONG, f"{len(LONG)} characters; the limit of a path is 1024"),
    ("d/" + "n" * 201, "a name of 201 characters; the limit is 200"),
    ("a/../b", r"the name '\.\.', which is reserved"),
    ("./b", r"the name '\.', which is reserved"),
    ("/etc/passwd", "the name '', which is reserved"),
    ("a//b", "the name '', which is reserved"),
    ("", "the name '', which is reserved"),
    ("a\nb", r"the character '\\n', which is not allowed"),
    ("ü", "the character 'ü', which is not allowed"),
    (7, "not a string"),
]


@pytest.mark.fault("S6", "S7")
@pytest.mark.parametrize(("path", "reason"), PATHS)
def test_each_limit_of_a_path_is_named(path: Any, reason: str) -> None:
    """The error has the limit of length, depth, names or characters in one line."""
    with pytest.raises(BoundsError, match=f"^the file .*{reason}") as caught:
        bounds.path(path, "the file")
    assert "\n" not in str(caught.value)
    files = [{"path": path, "size_bytes": 1}]
    body = {"version": VERSION, "run": "r", "step": 3, "kind": "periodic", "files": files}
    with pytest.raises(ProtocolError, match=reason):
        RankManifest.decode(json.dumps(body).encode())
    with pytest.raises(CorruptError, match=reason):
        check_paths([path])


def test_the_longest_path_is_accepted() -> None:
    """Each limit can be reached."""
    levels = ["d"] * (bounds.PATH_LEVELS_MAX - 1)
    for path in ("/".join([*levels, "f"]), "a" * bounds.NAME_CHARS_MAX, "a b/+=@,.-_9"):
        assert bounds.path(path, "the file") == path
