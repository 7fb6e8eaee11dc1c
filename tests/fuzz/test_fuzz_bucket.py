# SPDX-License-Identifier: Apache-2.0
"""Fuzzing of all objects of the bucket: manifests, claims, farewells, and keys."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from swansong_bucket.errors import CorruptError
from swansong_bucket.format import claim, manifest
from swansong_bucket.format.claim import ClaimObject
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.model import Verdict
from swansong_bucket.runs import catalog

from testkit import committed, records
from testkit.memory_store import MemoryStore
from testkit.records import changed, record_of

KEYS = RunKeys("r")
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=10,
)


def honest_manifest() -> dict[str, Any]:
    made = committed.commit(MemoryStore(), {"a": b"1" * 3000, "b/c": b""}, step=5)
    body: dict[str, Any] = json.loads(manifest.encode(made))
    return body


HONEST = honest_manifest()


@st.composite
def altered(draw: st.DrawFn) -> bytes:
    """A manifest with a matching digest, in which some fields have any value."""
    body = json.loads(json.dumps(HONEST))
    for name in draw(st.lists(st.sampled_from(sorted(body)), max_size=3)):
        body[name] = draw(json_values)
    shards = body.get("shards")
    if isinstance(shards, list) and shards and isinstance(shards[0], dict):
        for name in draw(st.lists(st.sampled_from(sorted(HONEST["shards"][0])), max_size=2)):
            shards[0][name] = draw(json_values | st.sampled_from(["../x", "/etc/x", -1, 2**70]))
    return record_of(body)


@pytest.mark.fault("G08", "G16", "S6")
@given(data=st.binary(max_size=200) | altered())
def test_a_manifest_is_understood_or_refused(data: bytes) -> None:
    """Any bytes lead to a manifest that the writer's own code encodes again, or to a CorruptError."""
    try:
        found = manifest.decode(data)
    except CorruptError:
        return
    assert manifest.decode(manifest.encode(found)) == found


@pytest.mark.fault("S25")
@given(
    data=st.binary(max_size=200)
    | st.dictionaries(
        st.sampled_from(["run", "generation", "start", "identity", "x"]), json_values
    ).map(lambda body: record_of({"format": claim.FORMAT, "version": 1, **body}))
)
def test_a_claim_is_understood_or_refused(data: bytes) -> None:
    try:
        found = claim.decode(data)
    except CorruptError:
        return
    assert claim.decode(claim.encode(found)) == found


instants = st.sampled_from(
    [
        "0001-01-01",
        "9999-12-31T23:59:59+00:00",
        "2026-13-01",
        "1e9",
        "",
        "0001-01-01T00:00:00+23:59",
    ]
)


hostile = st.dictionaries(
    st.sampled_from(["run", "generation", "verdict", "written", "timeline", "training"]),
    json_values,
)


@given(
    farewells=st.lists(st.binary(max_size=60) | hostile, max_size=4),
    claimed=instants | st.text(max_size=30),
    written=instants | st.text(max_size=30),
)
@example(farewells=[], claimed="0001-01-01", written="9999-12-31T23:59:59+00:00")
def test_the_history_of_a_hostile_bucket_is_an_estimate(
    farewells: list[Any], claimed: str, written: str
) -> None:
    """Any claims, farewells and clocks lead to numbers, and raise nothing."""
    store = MemoryStore()
    for number in (1, 2):
        made = ClaimObject(
            run="r", generation=number, start="s", identity={"boot_id": "b", "claimed": claimed}
        )
        store.put(KEYS.generation(number), claim.encode(made))
    verdict = changed(records.farewell(Verdict.SAFE), written=written)
    for number, content in enumerate([verdict, *farewells]):
        data = content if isinstance(content, bytes) else changed(verdict, **content)
        store.put(KEYS.farewell(1, f"stamp-{number}"), data)
    found = catalog.history(store, KEYS, 2)
    assert 0.0 <= found.observed_s < 10**9
    assert found.uncovered in (0, 1)


key_texts = st.one_of(
    st.text("0123456789/.-ofjsn", max_size=45),
    st.builds(
        lambda a, b, c, d: f"{a:08d}/{b:012d}/{c:05d}-of-{d:05d}.json",
        st.integers(0, 10**9), st.integers(0, 10**13), st.integers(0, 10**6), st.integers(0, 10**6),
    ),
)  # fmt: skip


@pytest.mark.fault("G16")
@given(names=st.lists(key_texts, max_size=6))
def test_any_keys_among_the_commits_are_commits_or_an_error(names: list[str]) -> None:
    """A key that no writer formats is never ignored."""
    store = MemoryStore()
    for name in names:
        if name and not name.endswith("/"):
            store.put(KEYS.commits + name, b"{}")
    try:
        commits = catalog.list_commits(store, KEYS)
    except CorruptError:
        return
    listed = {key for commit in commits for key in commit.manifest_keys.values()}
    assert listed == {info.key for info in store.list(KEYS.commits)}
