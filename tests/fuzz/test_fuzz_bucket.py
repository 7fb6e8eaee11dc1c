# SPDX-License-Identifier: Apache-2.0
"""Fuzzing of all objects of the bucket: manifests, claims, farewells, and keys."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from swansong import bounds
from swansong_bucket.errors import CorruptError
from swansong_bucket.format import claim, farewell, manifest, resumption
from swansong_bucket.format.claim import ClaimObject
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.model import CommitRef, Verdict
from swansong_bucket.runs import catalog, pins
from swansong_bucket.runs.pins import Pin

from testkit import committed, records
from testkit.lost_vms import RESUMPTION
from testkit.memory_store import MemoryStore
from testkit.records import changed, record_of
from testkit.strategies import json_values

KEYS = RunKeys("r")
MANIFEST = committed.commit(MemoryStore(), {"a": b"1" * 3000, "b/c": b""}, step=5)
CLAIM = ClaimObject(run="r", generation=7, start="5d41~1", identity={"boot_id": "b", "host": "h"})
PIN = Pin(run="r", name="paper", ref=CommitRef(3, 120), note="figure 2")
HONEST = {
    manifest: manifest.encode(MANIFEST),
    claim: claim.encode(CLAIM),
    resumption: resumption.encode(RESUMPTION),
    farewell: records.farewell(Verdict.SAFE, CommitRef(3, 120)),
    pins: pins.encode(PIN),
}
"""A record of each form, by the module that decodes it."""


@st.composite
def altered(draw: st.DrawFn, honest: bytes) -> bytes:
    """A record with a matching digest, in which some fields are missing or have any value."""
    body: dict[str, Any] = json.loads(honest)
    inner = [value[0] if isinstance(value, list) else value for value in body.values() if value]
    part = draw(st.sampled_from([body, *(each for each in inner if isinstance(each, dict))]))
    names = st.sampled_from([*sorted(part), "other"])
    values = json_values | st.sampled_from([..., "../x", "/etc/x", -1, 0, 2**70])
    for name, value in draw(st.dictionaries(names, values, min_size=1, max_size=2)).items():
        part[name] = value
        if value is ...:
            del part[name]
    return record_of(body)


@st.composite
def damaged(draw: st.DrawFn, honest: bytes) -> bytes:
    """A record in which some bytes are others, or are missing."""
    body = bytearray(honest)
    for place in draw(st.lists(st.integers(0, len(honest) - 1), max_size=3)):
        body[place] = draw(st.integers(0, 255))
    return bytes(body[: draw(st.integers(0, len(honest)))])


@pytest.mark.fault("G08", "G16", "S6", "S13", "S25", "O41")
@pytest.mark.parametrize("form", HONEST, ids=lambda form: form.__name__.rpartition(".")[2])
@given(noise=st.binary(max_size=300), data=st.data())
def test_a_record_is_understood_or_refused(form: Any, noise: bytes, data: st.DataObject) -> None:
    """Any fields and any bytes lead to a record that its writer encodes again, or to a CorruptError.

    Noise always leads to one.
    """
    honest = HONEST[form]
    with pytest.raises(CorruptError):
        form.decode(noise)
    try:
        found = form.decode(data.draw(altered(honest) | damaged(honest)))
    except CorruptError:
        return
    assert getattr(found, "generation", 1) <= bounds.GENERATION_MAX
    if form is claim:
        assert found.generation >= 1
        assert found.start
        assert all(type(value) is str for value in found.identity.values())
    if form is not farewell:  # a reader's farewell is another type than a writer's
        assert form.decode(form.encode(found)) == found


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
