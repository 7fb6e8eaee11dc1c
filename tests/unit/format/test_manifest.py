# SPDX-License-Identifier: Apache-2.0
"""Manifests: encoding and decoding are inverse, and any other bytes are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swansong import bounds
from swansong_bucket.errors import CorruptError
from swansong_bucket.format import manifest as manifests_module
from swansong_bucket.format.manifest import Manifest, decode, encode
from swansong_bucket.model import (
    CHUNK_BYTES_MAX,
    CheckpointKind,
    Chunk,
    CommitRef,
    Extent,
    StoredShard,
)

from testkit.committed import chunk_of, named_shard
from testkit.records import changed, record_of


def name_of(content: str) -> str:
    """The name of a chunk, as the manifest has it."""
    return a_chunk(content, 1).key.removeprefix("my-run/data/")


def a_chunk(content: str, size_bytes: int) -> Chunk:
    return chunk_of(content.encode(), run="my-run", size_bytes=size_bytes)


def a_shard(path: str, size_bytes: int = 3000, *, chunk_bytes: int = 3000) -> StoredShard:
    return named_shard(path, size_bytes, run="my-run", chunk_bytes=chunk_bytes)


NAME = name_of("x")
SHARD = a_shard("rank-00000/model.pt")
OTHERS = a_chunk("others", 9000)
PIECES = StoredShard(
    path="pieces",
    size_bytes=3000,
    extents=(
        Extent(OTHERS, 0, 500),
        Extent(SHARD.extents[0].chunk, 500, 1000),
        Extent(OTHERS, 7500, 1500),
    ),
)
"""Two of its extents are in a chunk of several files, and one is in that of SHARD."""
MANIFEST = Manifest(
    run="my-run",
    generation=1,
    step=100,
    kind=CheckpointKind.EMERGENCY,
    node=0,
    nodes=2,
    nonce="feed",
    shards=(SHARD, a_shard("optim.pt", 0), PIECES, a_shard("large", chunk_bytes=500)),
    parent=CommitRef(1, 90),
    framework="swansong",
    health={"loss": 0.25, "grad_norm": 3},
    trainer={"world_size": 8, "note": "Grüße", "is_sharded": True, "scale": 0.5, "parent": None},
    created="2030-01-01T00:00:00Z",
)

generations = st.integers(0, bounds.GENERATION_MAX)
steps = st.integers(0, bounds.STEP_MAX)
words = st.text(max_size=bounds.ID_CHARS_MAX)
numbers = st.floats(-bounds.METRIC_MAX, bounds.METRIC_MAX)
paths = st.lists(
    st.text("abcXYZ019_+=@,. -", min_size=1, max_size=8).filter(
        lambda part: part not in (".", "..")
    ),
    min_size=1,
    max_size=4,
).map("/".join)


@st.composite
def drawn_shards(draw: st.DrawFn) -> StoredShard:
    """A shard in up to three pieces of chunks."""
    path = draw(paths)
    extents: list[Extent] = []
    for number in range(draw(st.integers(0, 3))):
        length = draw(st.integers(1, CHUNK_BYTES_MAX))
        before = draw(st.just(0) | st.integers(0, CHUNK_BYTES_MAX - length))
        after = draw(st.just(0) | st.integers(0, CHUNK_BYTES_MAX - length - before))
        chunk = a_chunk(f"{path} {number}", before + length + after)
        extents.append(Extent(chunk, before, length))
    size_bytes = sum(extent.size_bytes for extent in extents)
    return StoredShard(path=path, size_bytes=size_bytes, extents=tuple(extents))


def are_one_directory(made: list[StoredShard]) -> bool:
    names = [shard.path for shard in made]
    return not any(other.startswith(f"{name}/") for name in names for other in names)


manifests = st.builds(
    Manifest,
    run=st.just("my-run"),
    generation=generations,
    step=steps,
    kind=st.sampled_from(CheckpointKind),
    node=st.integers(0, 7),
    nodes=st.integers(8, 99),
    nonce=words,
    shards=st.lists(drawn_shards(), max_size=4, unique_by=lambda shard: shard.path)
    .filter(are_one_directory)
    .map(tuple),
    parent=st.none() | st.builds(CommitRef, generations, steps),
    framework=words,
    health=st.dictionaries(words, numbers),
    trainer=st.dictionaries(
        words,
        st.none() | st.booleans() | words | numbers | st.integers(-(2**63), 2**63 - 1),
    ),
    created=words,
)


def forged(**changes: Any) -> bytes:
    """A manifest with changed fields, and a digest that matches them."""
    return changed(encode(MANIFEST), **changes)


def with_shard(**changes: Any) -> bytes:
    """A forged manifest with one shard, which is one chunk."""
    body = json.loads(encode(MANIFEST))
    return forged(shards=[body["shards"][0] | changes], chunks=body["chunks"][:1])


def with_chunk(name: Any = NAME, size_bytes: Any = 3000) -> bytes:
    """A forged manifest with one shard in this chunk."""
    body = json.loads(encode(MANIFEST))
    return forged(shards=body["shards"][:1], chunks=[[name, size_bytes]])


@given(manifest=manifests)
def test_round_trip(manifest: Manifest) -> None:
    """A decoded manifest equals the encoded one, and encodes to the same bytes."""
    data = encode(manifest)
    assert decode(data) == manifest
    assert encode(decode(data)) == data


@pytest.mark.fault("G08")
def test_every_flipped_bit_is_refused() -> None:
    """Every bit of a manifest, one at a time."""
    data = encode(MANIFEST)
    assert decode(data) == MANIFEST
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptError):
            decode(bytes(flipped))


@pytest.mark.fault("G09")
def test_a_newer_format_is_refused_with_a_hint() -> None:
    """The hint is to upgrade."""
    with pytest.raises(CorruptError, match="version 2") as caught:
        decode(forged(version=2))
    assert "upgrade" in caught.value.hint


def test_unknown_fields_are_ignored() -> None:
    """An additional field within the version does not break older readers."""
    assert decode(forged(added_later={"x": 1})) == MANIFEST


@pytest.mark.fault("S6", "G16")
@given(path=st.text())
def test_only_plain_relative_paths_are_accepted(path: str) -> None:
    """An accepted path is below the directory and has plain characters."""
    try:
        decode(with_shard(path=path))
    except CorruptError:
        return
    assert path.isascii()
    assert path.isprintable()
    assert not {"", ".", ".."} & set(path.split("/"))


@pytest.mark.fault("G16")
@pytest.mark.parametrize(
    "name",
    [
        "x",
        "",
        "../../other/x",
        f"./{NAME}",
        f"/{NAME}",
        f"{NAME}/",
        NAME.upper(),
        NAME.partition("/")[2],
        NAME.partition("-")[0],
        "00000001/rank-00000/model.pt",
        "00000001/" + 62 * "0" + "-a1",
    ],
)
def test_a_name_that_is_not_that_of_a_chunk_is_refused(name: str) -> None:
    """A manifest cannot make a restore read other objects than the chunks of its run."""
    with pytest.raises(CorruptError, match="not the name of a chunk"):
        decode(with_chunk(name))


@pytest.mark.parametrize(
    ("make", "about"),
    [
        (lambda: with_shard(size_bytes=-1), "size_bytes"),
        (lambda: with_shard(size_bytes=1.5), "size_bytes"),
        (lambda: with_shard(size_bytes=True), "size_bytes"),
        (lambda: with_shard(size_bytes=2**63), "size_bytes"),
        (lambda: with_shard(path="x" * 5000), "path"),
        (lambda: with_chunk(name="x" * 5000), "chunk"),
        (lambda: with_chunk(name=None), "chunk"),
        (lambda: with_chunk(size_bytes=2999), "extents"),
        (lambda: with_chunk(size_bytes=0), "chunk"),
        (lambda: with_chunk(size_bytes=CHUNK_BYTES_MAX + 1), "chunk"),
        (lambda: with_chunk(size_bytes=True), "chunk"),
        (lambda: with_shard(extents=[]), "extents"),
        (lambda: with_shard(extents=[[0, 0, 2999]]), "extents"),
        (lambda: with_shard(extents=[[0, 1, 3000]]), "extent"),
        (lambda: with_shard(extents=[1]), "extent"),
        (lambda: with_shard(extents=[-1]), "extent"),
        (lambda: with_shard(extents=[True]), "extent"),
        (lambda: with_shard(extents=[0, [0, 0, 0]]), "extent"),
        (lambda: with_shard(extents=[[0, 0]]), "extent"),
        (lambda: with_shard(extents=3), "extents"),
        (lambda: forged(chunks=[[name_of("a"), 9]] * 2), "twice"),
        (lambda: forged(chunks=[[name_of("a"), 9, 9]]), "chunk"),
        (lambda: forged(chunks={}), "chunks"),
        (lambda: forged(shards=[]), "without bytes"),
        (lambda: forged(shards=[1]), "shard"),
        (lambda: forged(shards={}), "shards"),
        (lambda: forged(kind="sometimes"), "kind"),
        (lambda: forged(step=-1), "step"),
        (lambda: forged(step=10**12), "step"),
        (lambda: forged(generation=10**8), "generation"),
        (lambda: forged(nodes=10**5), "nodes"),
        (lambda: forged(parent={"generation": 10**8, "step": 0}), "generation"),
        (lambda: forged(nonce="x" * 200), "nonce"),
        (lambda: forged(framework=["x"]), "framework"),
        (lambda: forged(created="\ud800"), "created"),
        (lambda: forged(health={"loss": 10**400}), "health"),
        (lambda: forged(health={f"m{n}": 1 for n in range(200)}), "health"),
        (lambda: forged(trainer={"deep": {"x": 1}}), "trainer"),
        (lambda: forged(trainer={"n": 2**63}), "trainer"),
        (lambda: forged(trainer={f"f{n}": 1 for n in range(200)}), "trainer"),
        (lambda: forged(trainer={"note": "x" * 5000}), "trainer"),
        (lambda: forged(node=2), "node 2 of 2"),
        (lambda: forged(nodes=0), "node 0 of 0"),
        (lambda: forged(health={"loss": "low"}), "health"),
        (lambda: forged(parent=3), "parent"),
        (lambda: forged(run=None), "run"),
    ],
)
def test_a_value_out_of_bounds_is_refused(make: Callable[[], bytes], about: str) -> None:
    """Wrong types, negative sizes and numbers out of range are refused; the error names the field."""
    with pytest.raises(CorruptError, match=about):
        decode(make())


@pytest.mark.parametrize("missing", sorted(json.loads(encode(MANIFEST)).keys() - {"parent"}))
def test_a_missing_field_is_refused(missing: str) -> None:
    """No field has an implicit default."""
    body = json.loads(encode(MANIFEST))
    del body[missing]
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    if missing not in ("digest", "format", "version"):
        canonical = record_of(body)
    with pytest.raises(CorruptError, match=missing if missing != "format" else "not a manifest"):
        decode(canonical)


@pytest.mark.fault("G16")
@pytest.mark.parametrize(
    ("first", "second"), [("a/b", "a/b"), ("a", "a/b"), ("a/b/c", "a/b"), ("a", "a/b/c")]
)
def test_paths_that_cannot_exist_together_are_refused(first: str, second: str) -> None:
    """The same path twice, or a file that is also a directory."""
    shard = json.loads(encode(MANIFEST))["shards"][0]
    with pytest.raises(CorruptError):
        decode(forged(shards=[shard | {"path": first}, shard | {"path": second}]))


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_number_that_json_does_not_have_is_not_encoded(number: float) -> None:
    """The encoder refuses values that the decoder would refuse."""
    with pytest.raises(ValueError, match="JSON"):
        encode(replace(MANIFEST, health={"loss": number}))


# ---------------------------------------------------------------- numbers that cost more than they weigh


def test_a_checkpoint_of_four_tebibytes_fits_into_a_manifest() -> None:
    """As one file, in chunks of 64 MiB."""
    large = named_shard("large", 2**42, run="my-run", chunk_bytes=2**26)
    made = replace(MANIFEST, shards=(large,))
    assert decode(encode(made)) == made


def test_as_many_files_as_a_scan_accepts_fit_into_a_manifest() -> None:
    """bounds.FILES_MAX files with long paths fit; one more file is refused."""
    paths = [f"{'d' * 60}/file-{number:06d}" for number in range(bounds.FILES_MAX)]
    made = replace(MANIFEST, shards=tuple(a_shard(path, 9) for path in paths))
    assert decode(encode(made)) == made
    with pytest.raises(CorruptError, match="shards"):
        decode(forged(shards=[1] * (bounds.FILES_MAX + 1)))


BYTES_MAX = manifests_module.BYTES_MAX
SHARE = 8
"""Content that is parsed fills an eighth of the limit, and may cost an eighth: larger ones take a minute."""
VALUES = manifests_module.VALUES_MAX // SHARE - 1000
COSTLY: dict[str, Callable[[], bytes]] = {
    "lists": lambda: b'{"a":[' + b"[]," * (BYTES_MAX // 3 - 10) + b"[]]}",
    "keys": lambda: forged(added={f"{n:x}": n for n in range(VALUES)}),
    "text": lambda: forged(added="x" * (BYTES_MAX - 3000) + "\U0001f600"),
    "deep": lambda: b"[" * 400_000,
    "one byte too many": lambda: b" " * (BYTES_MAX + 1),
    "extents": lambda: with_shard(extents=[[0, 0, 1]] * (VALUES // 4)),
    "chunks": lambda: forged(chunks=[[name_of(f"{n}"), 9] for n in range(VALUES // 4)]),
}

MEASURE = """
import re, sys, time
from pathlib import Path
from swansong_bucket.errors import CorruptError
from swansong_bucket.format.manifest import decode

def peak_kb():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

data = Path(sys.argv[1]).read_bytes()
Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
before_kb = peak_kb()
began_s = time.process_time()
try:
    decode(data)
except CorruptError:
    pass
print((peak_kb() - before_kb) // 1024)
print(time.process_time() - began_s)
"""


@pytest.mark.fault("S13", "G08")
@pytest.mark.parametrize("name", COSTLY)
def test_no_manifest_costs_more_than_is_stated(tmp_path: Path, name: str) -> None:
    """Memory and processor time of decoding are below the documented limits, measured in a subprocess."""
    path = tmp_path / "manifest"
    path.write_bytes(COSTLY[name]())
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    grown_mib, seconds = done.stdout.split()
    share = 1 if name in ("lists", "text", "deep", "one byte too many") else SHARE
    assert int(grown_mib) < 768 / share
    assert float(seconds) < 10 / share
