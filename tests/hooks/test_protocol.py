# SPDX-License-Identifier: Apache-2.0
"""The messages between trainer and daemon."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swansong import bounds, fields, layout, protocol
from swansong.fields import ProtocolError
from swansong.layout import FileEntry, RankManifest
from swansong.protocol import decode, encode

from testkit.strategies import json_values

TEXT = st.text(st.characters(codec="utf-8"), max_size=40)
ID = st.from_regex(r"\A[A-Za-z0-9_.:/~@+-]{0,128}\Z")
BY_TYPE: dict[str, st.SearchStrategy[Any]] = {
    "Step": st.integers(-1, bounds.STEP_MAX),
    "Generation": st.integers(-1, bounds.GENERATION_MAX),
    "Rank": st.integers(0, bounds.RANKS_MAX),
    "Ranks": st.integers(1, bounds.RANKS_MAX),
    "Node": st.integers(0, bounds.NODES_MAX),
    "Nodes": st.integers(1, bounds.NODES_MAX),
    "Count": st.integers(0, 2**31 - 1),
    "Version": st.integers(0, 2**31 - 1),
    "Bytes": st.integers(0, bounds.BYTES_MAX),
    "Seconds": st.floats(0, bounds.SECONDS_MAX),
    "Metric": st.floats(-bounds.METRIC_MAX, bounds.METRIC_MAX),
    "Flag": st.booleans(),
    "Id": ID,
    "GivenId": ID.filter(bool),
    "StartId": ID.filter(lambda start_id: not start_id.startswith(fields.PROCESS_PREFIX)),
    "Text": TEXT,
    "PathText": TEXT,
    "Capabilities": st.lists(ID, max_size=16),
    "ShardPath": st.from_regex(r"\A[a-z]{1,9}/[a-z]{1,9}\Z"),
    "StepDigests": st.lists(
        st.from_regex(r"[0-9]{1,12} batch\.a=[0-9a-f]{8} loss=-?[0-9.]{1,9}", fullmatch=True),
        max_size=bounds.DIGESTS_MAX,
    ),
    "Prefixes": st.lists(
        st.from_regex(r"\A(rank-[0-9]{5}/?|[a-z]{1,9}/[a-z]{1,9})\Z"), max_size=256
    ),
    "Report": st.dictionaries(TEXT, st.none() | st.integers(-(2**63), 2**63) | TEXT, max_size=4),
}
"""Values in the range of each alias."""
KINDS = (*protocol.FROM_TRAINER, *protocol.FROM_DAEMON)


FROM_TRAINER = """
    hello progress accepted agreed peer_request finish begin request_query sealed failed declined
    restore_query shards_taken digested redone_query compared bye
    status_query notify notify_withdrawn take_over
"""
FROM_DAEMON = """
    welcome refused request not_requested target withdrawn committed fenced finished start_drawn restoring
    shard_verified restored redone status noted
"""


def test_the_names_on_the_wire_stay() -> None:
    """Daemon and hooks may be of different versions: a renamed class keeps its name on the wire."""
    assert sorted(kind.TYPE for kind in protocol.FROM_TRAINER) == sorted(FROM_TRAINER.split())
    assert sorted(kind.TYPE for kind in protocol.FROM_DAEMON) == sorted(FROM_DAEMON.split())


def messages() -> st.SearchStrategy[protocol.Message]:
    def build(kind: type[protocol.Message]) -> st.SearchStrategy[protocol.Message]:
        fields = {}
        for item in dataclasses.fields(kind):
            annotation = str(item.type)
            strategy = BY_TYPE[annotation.removesuffix(" | None")]
            fields[item.name] = st.none() | strategy if annotation.endswith("None") else strategy
        return st.builds(kind, **fields)

    return st.sampled_from(KINDS).flatmap(build)


@given(messages())
def test_every_message_comes_back_as_it_was(message: protocol.Message) -> None:
    """Encoding and decoding changes no message."""
    assert decode(encode(message)) == message


@pytest.mark.fault("S12", "S13")
@given(st.binary(max_size=300))
def test_random_bytes_are_refused_and_nothing_else(data: bytes) -> None:
    """For all bytes, decoding returns a message or raises ProtocolError."""
    try:
        decode(data)
    except ProtocolError:
        pass


@pytest.mark.fault("S13")
@given(st.sampled_from(KINDS), st.data())
def test_wrong_fields_are_refused_and_nothing_else(
    kind: type[protocol.Message], data: st.DataObject
) -> None:
    """A message of known type with any JSON in its fields is decoded or refused."""
    body = {item.name: data.draw(json_values) for item in dataclasses.fields(kind)}
    try:
        decode(json.dumps({"type": kind.TYPE, **body}).encode())
    except ProtocolError:
        pass


OUT_OF_RANGE = [
    (protocol.Progress(1), "step", [-2, 10**12, 1.0, "1", None, True]),
    (protocol.Progress(1), "snapshot_s", [-5, -1e-300, 1.1e9, 10**400, "1"]),
    (protocol.Progress(1), "step_s", [-1]),
    (protocol.Progress(1), "own_s", [-1, "1"]),
    (protocol.Progress(1), "save_s", [-0.1]),
    (protocol.Progress(1), "save_bytes", [-1, 2**60 + 1, 1.5]),
    (protocol.Progress(1), "loss", [1e301, 10**400, "nan"]),
    (protocol.Progress(1), "loss_is_finite", [1, "true"]),
    (protocol.Progress(1), "loss_is_usual", [1, "true"]),
    (protocol.Hello("r"), "rank", [-1, 100_000]),
    (protocol.Hello("r"), "world_size", [0, -1, 100_000]),
    (protocol.Hello("r"), "local_world_size", [0]),
    (protocol.Hello("r"), "nodes", [0, 10**6]),
    (protocol.Hello("r"), "version", [-1, 2**31]),
    (protocol.Hello("r"), "run", ["x" * 4097, "\ud800"]),
    (protocol.Hello("r"), "start_id", ["x" * 129, "a b", "process-1~a"]),
    (protocol.Hello("r"), "parent", ["x" * 129, "a b"]),
    (protocol.Hello("r"), "parent_step", [-2, 10**12]),
    (protocol.Hello("r"), "capabilities", [["a"] * 17, ["a b"], [1], "periodic"]),
    (protocol.Accepted("q", 1), "request_id", ["x" * 129, "a b", "a\nb", "\u00e4", 1]),
    (protocol.RestoreQuery("q"), "query_id", ["x" * 129]),
    (protocol.RestoreQuery("q"), "rollback", [-1, 2**31]),
    (protocol.RestoreQuery("q"), "before_step", [-2]),
    (protocol.RestoreQuery("q"), "generation", [-2, 10**8]),
    (protocol.RestoreQuery("q"), "start_id", ["x" * 129, "process-a"]),
    (
        protocol.RestoreQuery("q"),
        "prefixes",
        [["a"] * 257, ["../a"], ["/a"], ["a//"], [""], ["x" * 1025], [1], "rank-00000/"],
    ),
    (protocol.Begin("i"), "start_id", ["x" * 129, "a;b", "process-"]),
    (protocol.StartDrawn("i"), "start_id", ["x" * 129, "a;b"]),
    (protocol.PeerRequest("q", "r", 1.0), "seconds_left", [-1.0, 1e10]),
    (protocol.PeerRequest("q", "r", 1.0), "request_id", ["", " "]),
    (protocol.Sealed(1, "d", 1.0, 1), "size_bytes", [-1]),
    (protocol.Failed("q", 1, "r"), "reason", ["x" * 4097]),
    (protocol.Notify("n", 1.0), "nonce", ["x" * 129]),
    (protocol.Committed(1, 1), "generation", [10**8]),
    (protocol.Restoring("q", 1, 1), "bytes_total", [-1]),
    (protocol.Status({}), "report", [{str(n): n for n in range(1001)}]),
]


@pytest.mark.fault("S13")
@pytest.mark.parametrize(
    ("message", "name", "value"),
    [(message, name, value) for message, name, values in OUT_OF_RANGE for value in values],
    ids=lambda value: repr(value)[:30],
)
def test_a_value_out_of_range_is_refused_with_its_field(
    message: protocol.Message, name: str, value: Any
) -> None:
    """The error names the message and the field, and is one short line."""
    body = {"type": message.TYPE, **dataclasses.asdict(message), name: value}
    with pytest.raises(ProtocolError) as caught:
        decode(json.dumps(body).encode())
    assert str(caught.value).startswith(f"{message.TYPE}: {name}")
    assert len(str(caught.value)) < 250


ODD_NUMBER = st.floats() | st.integers(-(2**70), 2**70) | st.sampled_from([10**400, -(10**400)])
ODD_TEXT = st.text(max_size=50) | st.just("\ud800")


@given(ODD_NUMBER, st.integers(-(2**70), 2**70), ODD_TEXT)
def test_measurements_of_the_sender_are_clamped(number: Any, integer: int, text: str) -> None:
    """The peer accepts a message with any duration, loss, size, step or reason."""
    text *= 5000
    for message in (
        protocol.Progress(integer, number, None, None, number, number, number, integer, number),
        protocol.Sealed(integer, text, number, integer, "q"),
        protocol.Failed("q", integer, text),
        protocol.Hello(text, step=integer, parent_step=integer),
        protocol.PeerRequest("q", text, number),
        protocol.Request("q", text, number),
        protocol.Target("q", integer),
        protocol.Restored("q", text, integer, error=text),
        protocol.Welcome(text, text, grace_s=number),
    ):
        decoded = decode(encode(message))
        assert type(decoded) is type(message)
    manifest = RankManifest("r", integer, "final", [FileEntry("a", integer)], health={text: number})
    RankManifest.decode(manifest.encode())


def test_a_report_that_is_not_json_is_refused_before_it_is_sent() -> None:
    for value in (math.inf, math.nan, b"bytes"):
        with pytest.raises(ProtocolError, match="message status is not JSON"):
            encode(protocol.Status({"x": value}))
    assert decode(encode(protocol.Status({"x": "\udc80"}))) == protocol.Status({"x": "\udc80"})


def test_values_in_range_are_sent_unchanged() -> None:
    """Other values become the nearest value in range; an optional NaN is omitted."""
    odd = protocol.Progress(-7, loss=math.nan, step_s=-1.0, save_s=math.inf, save_bytes=-1)
    assert decode(encode(odd)) == protocol.Progress(
        -1, loss=None, step_s=0.0, save_s=bounds.SECONDS_MAX, save_bytes=0
    )
    assert decode(encode(protocol.Request("q", "r", math.nan))) == protocol.Request("q", "r", 0.0)


def test_a_rank_manifest_keeps_the_loss_among_too_many_metrics() -> None:
    """With a thousand metrics the checkpoint is taken; loss and health are kept in any order."""
    health = {f"m{number}": 1.0 for number in range(1000)} | {"loss": 2.0, "loss_is_finite": 1.0}
    manifest = RankManifest("r", 3, "final", [], health=health | {"nan": math.nan})
    found = RankManifest.decode(manifest.encode()).health
    assert len(found) == bounds.METRICS_MAX
    assert (found["loss"], found["loss_is_finite"]) == (2.0, 1.0)


def test_a_rank_manifest_that_readers_would_refuse_is_not_written() -> None:
    """The save fails with the reason, before the daemon would refuse the set."""
    files = [FileEntry(f"f{number}", 1) for number in range(bounds.FILES_MAX + 1)]
    with pytest.raises(ProtocolError, match="files has 100001 items; the limit is 100000"):
        RankManifest("r", 3, "final", files).encode()


@pytest.mark.fault("S13")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("health", {"loss": 10**400}),
        ("health", {"loss": "1"}),
        ("health", {str(n): 1.0 for n in range(101)}),
        ("health", {"x" * 129: 1.0}),
        ("step", 10**12),
        ("files", [{"path": "a", "size_bytes": -1}]),
        ("files", [{"path": "a"}]),
        ("files", ["a"]),
        ("files", [{"path": "a", "size_bytes": 1}] * 100_001),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_rank_manifest_out_of_range_is_refused_with_its_field(name: str, value: Any) -> None:
    """Counts, sizes and metrics have ranges; ``1e999`` and huge integers are out of range."""
    body = {"run": "r", "step": 3, "kind": "final", "files": [], name: value}
    with pytest.raises(ProtocolError, match=f"^rank manifest: .*{name}"):
        RankManifest.decode(json.dumps(body).encode())


@pytest.mark.fault("S12", "S13")
@pytest.mark.parametrize(
    "data",
    [
        b"[]",
        b'{"type": "nonsense"}',
        b'{"type": ["hello"], "run": ""}',
        b'{"type": "hello"}',
        b'{"type": "hello", "run": 7}',
        b'{"type": "progress", "step": 1, "loss": 1e999}',
        b'{"type": "hello", "run": "' + b"x" * protocol.MAX_MESSAGE_BYTES + b'"}',
    ],
    ids=lambda data: repr(data[:40]),
)
def test_hostile_json_is_refused(data: bytes) -> None:
    """Oversize, a number beyond all floats, and a type or a field that is missing or wrong."""
    with pytest.raises(ProtocolError):
        decode(data)


@pytest.mark.fault("H14")
def test_unknown_fields_are_ignored() -> None:
    """Either side may be upgraded first."""
    data = b'{"type": "bye", "reason": "done", "invented_later": {"a": 1}}'
    assert decode(data) == protocol.Bye("done")


def test_a_message_that_is_too_large_is_not_sent() -> None:
    """encode() refuses it before the peer would."""
    with pytest.raises(ProtocolError, match="limit"):
        encode(protocol.Status({"x": "x" * protocol.MAX_MESSAGE_BYTES}))


@given(
    st.lists(
        st.builds(
            FileEntry,
            path=st.from_regex(r"\A[a-z0-9]{1,9}(/[a-z]{1,5})?\Z"),
            size_bytes=BY_TYPE["Bytes"],
        )
    ),
    st.dictionaries(TEXT, BY_TYPE["Metric"], max_size=3),
)
def test_a_rank_manifest_comes_back_as_it_was(
    files: list[FileEntry], health: dict[str, float]
) -> None:
    """Encoding and decoding changes no rank manifest."""
    manifest = RankManifest(run="r", step=3, kind="final", files=files, health=health)
    assert RankManifest.decode(manifest.encode()) == manifest


@given(st.integers(0, 10**12 - 1), st.from_regex(r"\A[A-Za-z0-9]{1,64}\Z"))
def test_sealed_names_can_be_read_back(step: int, nonce: str) -> None:
    """The name of a set contains its step and nonce."""
    name = layout.sealed_name(step, nonce)
    assert layout.parse_sealed_name(name) == (step, nonce)
    partial = layout.partial_name(name)
    assert layout.parse_partial_name(partial) == (step, nonce)
    assert layout.parse_sealed_name(partial) is None
    assert layout.parse_partial_name(name) is None
