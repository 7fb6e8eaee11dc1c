# SPDX-License-Identifier: Apache-2.0
"""The messages between trainer and daemon."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swansong import protocol
from swansong.protocol import FileEntry, ProtocolError, RankManifest, decode, encode

TEXT = st.text(max_size=40)
INT = st.integers(-(2**63), 2**63 - 1)
FLOAT = st.floats(allow_nan=False, allow_infinity=False)
BY_ANNOTATION: dict[str, st.SearchStrategy[Any]] = {
    "int": INT,
    "float": FLOAT,
    "str": TEXT,
    "bool": st.booleans(),
    "list[str]": st.lists(TEXT, max_size=4),
    "dict[str, Any]": st.dictionaries(TEXT, st.none() | INT | TEXT, max_size=4),
    "dict[str, float]": st.dictionaries(TEXT, FLOAT, max_size=4),
}
KINDS = (*protocol.FROM_TRAINER, *protocol.FROM_DAEMON)


def messages() -> st.SearchStrategy[protocol.Message]:
    def build(kind: type[protocol.Message]) -> st.SearchStrategy[protocol.Message]:
        fields = {}
        for item in dataclasses.fields(kind):
            annotation = str(item.type)
            strategy = BY_ANNOTATION[annotation.removesuffix(" | None")]
            fields[item.name] = st.none() | strategy if annotation.endswith("None") else strategy
        return st.builds(kind, **fields)

    return st.sampled_from(KINDS).flatmap(build)


@given(messages())
def test_every_message_comes_back_as_it_was(message: protocol.Message) -> None:
    """Encoding and decoding loses nothing of any message."""
    assert decode(encode(message)) == message


@pytest.mark.fault("S12", "S13")
@given(st.binary(max_size=300))
def test_random_bytes_are_refused_and_nothing_else(data: bytes) -> None:
    """Whatever arrives, decoding ends with a message or a ProtocolError."""
    try:
        decode(data)
    except ProtocolError:
        pass


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.fault("S13")
@given(st.sampled_from(KINDS), st.data())
def test_wrong_fields_are_refused_and_nothing_else(
    kind: type[protocol.Message], data: st.DataObject
) -> None:
    """A message of known type with any JSON in its fields is understood or refused, never a crash."""
    body = {item.name: data.draw(JSON) for item in dataclasses.fields(kind)}
    try:
        decode(json.dumps({"type": kind.TYPE, **body}).encode())
    except ProtocolError:
        pass


@pytest.mark.fault("S12", "S13")
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"null",
        b'"hello"',
        b'{"type": "nonsense"}',
        b'{"type": ["hello"], "run": ""}',
        b'{"type": "hello"}',
        b'{"type": "hello", "run": 7}',
        b'{"type": "hello", "run": "", "run": "other"}',
        b'{"type": "hello", "run": "", "rank": true}',
        b'{"type": "hello", "run": "", "rank": 9223372036854775808}',
        b'{"type": "hello", "run": "", "rank": 1.0}',
        b'{"type": "hello", "run": "", "capabilities": [1]}',
        b'{"type": "progress", "step": 1, "loss": NaN}',
        b'{"type": "progress", "step": 1, "loss": 1e999}',
        b'{"type": "hello", "run": "", "rank": ' + b"9" * 5000 + b"}",
        b"[" * 50000,
        b'{"a":' * 10000 + b"1" + b"}" * 10000,
        b'{"type": "hello", "run": "' + b"x" * protocol.MAX_MESSAGE_BYTES + b'"}',
    ],
    ids=lambda data: repr(data[:40]),
)
def test_json_tricks_are_refused(data: bytes) -> None:
    """Oversize, nesting, duplicate keys, huge and non-finite numbers, wrong types: each is refused."""
    with pytest.raises(ProtocolError):
        decode(data)


def test_unknown_fields_are_ignored() -> None:
    """Either side may be upgraded first."""
    data = b'{"type": "bye", "reason": "done", "invented_later": {"a": 1}}'
    assert decode(data) == protocol.Bye("done")


def test_what_is_too_large_is_not_sent() -> None:
    """A message that the other side would refuse is refused before it is sent."""
    with pytest.raises(ProtocolError, match="limit"):
        encode(protocol.Bye("x" * protocol.MAX_MESSAGE_BYTES))


@given(
    st.lists(
        st.builds(FileEntry, path=st.from_regex(r"\A[a-z0-9]{1,9}(/[a-z]{1,5})?\Z"), size_bytes=INT)
    ),
    st.dictionaries(TEXT, FLOAT, max_size=3),
)
def test_a_rank_manifest_comes_back_as_it_was(
    files: list[FileEntry], health: dict[str, float]
) -> None:
    """Encoding and decoding loses nothing of a rank manifest."""
    manifest = RankManifest(run="r", step=3, kind="final", files=files, health=health)
    assert RankManifest.decode(manifest.encode()) == manifest


@pytest.mark.parametrize(
    "path", ["../x", "/etc/passwd", "a/../b", "a//b", "", ".", "a/.", "a\0b", "a\nb", "x" * 2000]
)
def test_a_rank_manifest_with_an_unsafe_path_is_refused(path: str) -> None:
    """Nobody follows a path out of the set."""
    manifest = RankManifest(run="r", step=3, kind="final", files=[FileEntry(path, 1)])
    with pytest.raises(ProtocolError):
        RankManifest.decode(manifest.encode())


@given(st.integers(0, 10**12 - 1), st.from_regex(r"\A[A-Za-z0-9]{1,64}\Z"))
def test_sealed_names_can_be_read_back(step: int, nonce: str) -> None:
    """The name of a set says its step and nonce."""
    name = protocol.sealed_name(step, nonce)
    assert protocol.parse_sealed_name(name) == (step, nonce)
    assert protocol.parse_sealed_name(name + protocol.PARTIAL_SUFFIX) is None
