# SPDX-License-Identifier: Apache-2.0
"""The manifest: what is encoded comes back, and nothing else is believed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swansongd.errors import CorruptError
from swansongd.manifest import Manifest, decode, encode
from swansongd.model import CheckpointKind, CommitRef, StoredShard

SHARD = StoredShard(
    path="rank-00000/model.pt",
    size_bytes=3000,
    digest="blake3-parts:" + "0a" * 32,
    key="my-run/data/00000001/000000000100-abc-a1/00000/rank-00000/model.pt",
    part_size_bytes=1000,
    crc32c=0x00C0FFEE,
)
MANIFEST = Manifest(
    run="my-run",
    generation=1,
    step=100,
    kind=CheckpointKind.EMERGENCY,
    node=0,
    nodes=2,
    nonce="feed",
    shards=(SHARD, replace(SHARD, path="optim.pt", size_bytes=0)),
    parent=CommitRef(1, 90),
    framework="swansong",
    health={"loss": 0.25, "grad_norm": 3},
    trainer={"world_size": 8, "note": "Grüße", "mesh": [2, 4]},
    created="2030-01-01T00:00:00Z",
)

counts = st.integers(0, 2**63 - 1)
paths = st.lists(
    st.text("abcXYZ019_+=@,. -", min_size=1, max_size=8).filter(
        lambda part: part not in (".", "..")
    ),
    min_size=1,
    max_size=4,
).map("/".join)
shards = st.builds(
    StoredShard,
    path=paths,
    size_bytes=st.integers(0, 2**40),
    digest=st.binary(min_size=32, max_size=32).map(lambda raw: f"blake3-parts:{raw.hex()}"),
    key=paths.map(lambda path: f"my-run/data/{path}"),
    part_size_bytes=st.integers(5 * 2**20, 2**30),
    crc32c=st.integers(0, 2**32 - 1),
)


def are_one_directory(made: list[StoredShard]) -> bool:
    names = [shard.path for shard in made]
    return not any(other.startswith(f"{name}/") for name in names for other in names)


manifests = st.builds(
    Manifest,
    run=st.just("my-run"),
    generation=counts,
    step=counts,
    kind=st.sampled_from(CheckpointKind),
    node=st.integers(0, 7),
    nodes=st.integers(8, 99),
    nonce=st.text(),
    shards=st.lists(shards, max_size=4, unique_by=lambda shard: shard.path)
    .filter(are_one_directory)
    .map(tuple),
    parent=st.none() | st.builds(CommitRef, counts, counts),
    framework=st.text(),
    health=st.dictionaries(st.text(), st.floats(allow_nan=False, allow_infinity=False)),
    trainer=st.dictionaries(st.text(), st.none() | st.booleans() | st.text() | counts),
    created=st.text(),
)


def signed(**changes: Any) -> bytes:
    """A manifest with fields changed and a digest that is right all the same: a forgery."""
    body = json.loads(encode(MANIFEST)) | changes
    del body["digest"]
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    body["digest"] = f"sha256:{hashlib.sha256(canonical).hexdigest()}"
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def with_shard(**changes: Any) -> bytes:
    shard = json.loads(encode(MANIFEST))["shards"][0]
    return signed(shards=[shard | changes])


@given(manifest=manifests)
def test_round_trip(manifest: Manifest) -> None:
    """What was encoded is decoded to the same value, and encodes to the same bytes."""
    data = encode(manifest)
    assert decode(data) == manifest
    assert encode(decode(data)) == data


@pytest.mark.fault("G08")
def test_every_flipped_bit_is_refused() -> None:
    """No single flipped bit goes unseen, wherever it is."""
    data = encode(MANIFEST)
    assert decode(data) == MANIFEST
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptError):
            decode(bytes(flipped))


@pytest.mark.fault("G08")
@given(manifest=manifests, data=st.data())
def test_a_flipped_bit_is_refused_in_any_manifest(manifest: Manifest, data: st.DataObject) -> None:
    """The same for arbitrary manifests, whatever their strings hold."""
    flipped = bytearray(encode(manifest))
    bit = data.draw(st.integers(0, 8 * len(flipped) - 1))
    flipped[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptError):
        decode(bytes(flipped))


@pytest.mark.fault("G08")
def test_a_manifest_that_was_cut_short_is_refused() -> None:
    """Every true prefix is refused, the empty one included; and so is anything appended."""
    data = encode(MANIFEST)
    for cut in range(len(data)):
        with pytest.raises(CorruptError):
            decode(data[:cut])
    for appended in (b" ", b"\n", b"{}", b"\0"):
        with pytest.raises(CorruptError):
            decode(data + appended)


@pytest.mark.parametrize(
    "data",
    [
        b"[1]",
        b"null",
        b"{}",
        b'{"format":"swansong-manifest"}',
        b"[" * 100_000,
        b"\xff\xfe",
        b'{"format":"swansong-manifest","version":1,"health":{"loss":NaN},"digest":""}',
        b'{"format":"swansong-manifest","version":true}',
        b'{"format":"other","version":1}',
    ],
)
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    """Other JSON, other formats and no JSON at all are corrupt, not a crash."""
    with pytest.raises(CorruptError):
        decode(data)


@given(data=st.binary(max_size=200))
def test_noise_is_refused(data: bytes) -> None:
    """No bytes crash the decoder."""
    with pytest.raises(CorruptError):
        decode(data)


@pytest.mark.fault("G09")
def test_a_newer_format_is_refused_with_a_way_out() -> None:
    """A manifest of a later version is not guessed at; the hint says to upgrade."""
    with pytest.raises(CorruptError, match="version 2") as caught:
        decode(signed(version=2))
    assert "upgrade" in caught.value.hint


def test_unknown_fields_are_passed_over() -> None:
    """A field added within the version does not keep older readers out."""
    assert decode(signed(added_later={"x": 1})) == MANIFEST


HOSTILE = [
    "",
    "/",
    "/etc/passwd",
    "../x",
    "a/../../x",
    "a/..",
    ".",
    "a//b",
    "a/",
    "a\n",
    "a\x00b",
    "a\\..\\b",
    "~/x\u202e",
    "x" * 300,
    "/".join(["d"] * 40),
]


@pytest.mark.fault("S6", "S24", "G16")
@pytest.mark.parametrize("path", HOSTILE)
def test_a_path_that_leads_out_is_refused(path: str) -> None:
    """However well the manifest is signed, no unsafe path is taken from it."""
    with pytest.raises(CorruptError, match="path"):
        decode(with_shard(path=path))


@pytest.mark.fault("S6", "G16")
@given(path=st.text())
def test_only_plain_relative_paths_are_taken(path: str) -> None:
    """Whatever is accepted stays below the directory, in plain characters."""
    try:
        decode(with_shard(path=path))
    except CorruptError:
        return
    assert path.isascii()
    assert path.isprintable()
    assert not {"", ".", ".."} & set(path.split("/"))


@pytest.mark.fault("G16")
@pytest.mark.parametrize(
    "key",
    [
        "other-run/data/00000001/x",
        "my-run/commits/00000001/x",
        "my-run/data/../../other/x",
        "my-run/data/./x",
        "my-run/data//x",
        "my-run/data/",
        "my-run/data/\ud800",
        "/my-run/data/x",
    ],
)
def test_a_key_that_is_not_among_the_data_of_the_run_is_refused(key: str) -> None:
    """A manifest cannot make a restore read other objects than the data of its run."""
    with pytest.raises(CorruptError, match="key"):
        decode(with_shard(key=key))


@pytest.mark.parametrize(
    ("make", "about"),
    [
        (lambda: with_shard(size_bytes=-1), "size_bytes"),
        (lambda: with_shard(size_bytes=1.5), "size_bytes"),
        (lambda: with_shard(size_bytes=True), "size_bytes"),
        (lambda: with_shard(size_bytes=2**63), "size_bytes"),
        (lambda: with_shard(part_size_bytes=0), "part size"),
        (lambda: with_shard(part_size_bytes=2**31), "part size"),
        (lambda: with_shard(part_size_bytes=1, size_bytes=2**40), "part size"),
        (lambda: with_shard(digest="md5:00"), "digest"),
        (lambda: with_shard(crc32c=1), "crc32c"),
        (lambda: with_shard(crc32c="C0FFEE00"), "CRC32C"),
        (lambda: with_shard(crc32c="123"), "CRC32C"),
        (lambda: signed(shards=[1]), "shard"),
        (lambda: signed(shards={}), "shards"),
        (lambda: signed(kind="sometimes"), "kind"),
        (lambda: signed(step=-1), "step"),
        (lambda: signed(node=2), "node 2 of 2"),
        (lambda: signed(nodes=0), "node 0 of 0"),
        (lambda: signed(health={"loss": "low"}), "health"),
        (lambda: signed(parent=3), "parent"),
        (lambda: signed(run=None), "run"),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused(make: Callable[[], bytes], about: str) -> None:
    """Wrong types, negative sizes and impossible numbers are named, and refused."""
    with pytest.raises(CorruptError, match=about):
        decode(make())


@pytest.mark.parametrize("missing", sorted(json.loads(encode(MANIFEST)).keys() - {"parent"}))
def test_a_missing_field_is_refused(missing: str) -> None:
    """No field has a silent default."""
    body = json.loads(signed())
    del body[missing]
    if missing not in ("digest", "format", "version"):
        del body["digest"]
        canonical = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
        body["digest"] = f"sha256:{hashlib.sha256(canonical).hexdigest()}"
    with pytest.raises(CorruptError, match=missing if missing != "format" else "not a manifest"):
        decode(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


@pytest.mark.fault("G16")
@pytest.mark.parametrize(
    ("first", "second"), [("a/b", "a/b"), ("a", "a/b"), ("a/b/c", "a/b"), ("a", "a/b/c")]
)
def test_paths_that_cannot_lie_in_one_directory_are_refused(first: str, second: str) -> None:
    """The same path twice, or a file that is also a directory."""
    shard = json.loads(encode(MANIFEST))["shards"][0]
    with pytest.raises(CorruptError):
        decode(signed(shards=[shard | {"path": first}, shard | {"path": second}]))


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_number_that_json_does_not_have_is_not_encoded(number: float) -> None:
    """Encoding refuses what decoding would."""
    with pytest.raises(ValueError, match="JSON"):
        encode(replace(MANIFEST, health={"loss": number}))
