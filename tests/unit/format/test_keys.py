# SPDX-License-Identifier: Apache-2.0
"""The layout of the bucket."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swansong.bounds import BoundsError
from swansong_bucket.format.keys import ManifestPlace, RunKeys
from swansong_bucket.model import Chunk, CommitRef

KEYS = RunKeys("my-run")
GENERATIONS = st.integers(0, 10**8 - 1)
STEPS = st.integers(0, 10**12 - 1)
NODES = st.integers(1, 10**5 - 1)


@given(generation=GENERATIONS, step=STEPS, nodes=NODES, data=st.data())
def test_formatting_and_parsing_are_inverse(
    generation: int, step: int, nodes: int, data: st.DataObject
) -> None:
    """For commits and for generations."""
    node = data.draw(st.integers(0, nodes - 1))
    ref = CommitRef(generation, step, is_final=data.draw(st.booleans()))
    parsed = KEYS.parse_commit(KEYS.commit(ref, node, nodes))
    assert parsed == ManifestPlace(ref=ref, node=node, nodes=nodes)
    assert KEYS.parse_generation(KEYS.generation(generation)) == generation


@given(refs=st.lists(st.builds(CommitRef, GENERATIONS, STEPS), max_size=20))
def test_a_listing_is_in_numeric_order(refs: list[CommitRef]) -> None:
    """Keys sort as their numbers."""
    by_number = [KEYS.commit(ref, 0, 1) for ref in sorted(refs)]
    assert by_number == sorted(by_number)


@pytest.mark.parametrize(
    "key",
    [
        "my-run/commits/00000001/000000000100/00000-of-00001.json\n",
        "my-run/commits/00000001/000000000100/00000-of-00001.json.tmp",
        "my-run/commits/1/100/0-of-1.json",
        "my-run/commits/00000001/000000000100-last/00000-of-00001.json",
        "my-run/commits/00000001/000000000100-final-final/00000-of-00001.json",
        "my-run/commits/٠٠٠٠٠٠٠١/000000000100/00000-of-00001.json",
        "my-run/commits/",
        "my-run/commits/00000001/000000000100/00001-of-00001.json",
        "my-run/commits/00000001/000000000100/00000-of-00000.json",
        "other/commits/00000001/000000000100/00000-of-00001.json",
        "00000001/000000000100/00000-of-00001.json",
        "my-run/generations/1.json",
        "my-run/generations/00000001.json\n",
        "x/generations/00000001.json",
    ],
)
def test_only_exact_keys_parse(key: str) -> None:
    """A key parses only if it is exactly one that a writer formats."""
    assert KEYS.parse_commit(key) is None
    assert KEYS.parse_generation(key) is None


@pytest.mark.fault("G16")
@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: KEYS.generation(10**8), "generation"),
        (lambda: KEYS.generation(-1), "generation"),
        (lambda: KEYS.commit(CommitRef(10**8, 1), 0, 1), "generation"),
        (lambda: KEYS.commit(CommitRef(1, 10**12), 0, 1), "step"),
        (lambda: KEYS.commit(CommitRef(1, 1), 0, 10**5), "nodes"),
        (lambda: KEYS.parts(CommitRef(1, -1)), "step"),
        (lambda: KEYS.farewell(10**8, "x"), "generation"),
        (lambda: KEYS.chunk(10**8, bytes(32), "n"), "generation"),
        (lambda: KEYS.chunk(1.5, bytes(32), "n"), "generation"),  # type: ignore[arg-type]
    ],
)
def test_a_number_beyond_the_format_never_gets_into_a_key(
    make: Callable[[], str], field: str
) -> None:
    """No reader would parse such a key: formatting raises an error that names the field."""
    with pytest.raises(BoundsError, match=field):
        make()


@given(
    generation=GENERATIONS,
    digest=st.binary(min_size=32, max_size=32),
    nonce=st.from_regex(r"[0-9a-z]{1,32}", fullmatch=True),
)
def test_a_chunk_is_recognised_by_its_key(generation: int, digest: bytes, nonce: str) -> None:
    """It has the generation, the digest and the nonce; other keys, of another run too, are not of chunks."""
    key = KEYS.chunk(generation, digest, nonce)
    assert key == f"{KEYS.data}{generation:08d}/{digest.hex()}-{nonce}"
    assert KEYS.is_data(key)
    assert Chunk(key, 1).digest == digest
    assert not RunKeys("other").is_data(key)
    name, head = digest.hex(), key.partition("-run")[0]
    for wrong in (
        f"{KEYS.data}{name}-{nonce}", key.replace(name, name[:-1]), f"{KEYS.data}00000001/{name}",
        f"{KEYS.data}00000001/{name}-", f"{key}/", f"{key}\n", f"{key}.", f"{head}{key}",
        f"{KEYS.data}1/{name}-{nonce}", f"{KEYS.data}00000001/{'A' * 64}-{nonce}", KEYS.data, "",
        f"{KEYS.data}00000001/{name}-{'a' * 33}",
    ):  # fmt: skip
        assert not KEYS.is_data(wrong)
