# SPDX-License-Identifier: Apache-2.0
"""docs/format.md states the keys, fields, bounds and digests of the code."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from swansong import bounds
from swansong_bucket.format import claim as claims
from swansong_bucket.format import farewell as farewells
from swansong_bucket.format import manifest as manifests
from swansong_bucket.format import resumption as resumptions
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.model import CHUNK_BYTES_MAX, CheckpointKind, CommitRef
from swansong_bucket.runs import catalog
from swansongd.flush.ledger import YIELD_S
from swansongd.observe.samples import SAMPLES_MAX
from swansongd.observe.timeline import ENTRIES_MAX, NOTICES_MAX

from testkit import REPOSITORY
from testkit.committed import chunk_of, whole_shard
from testkit.lost_vms import RESUMPTION
from testkit.records import KEY
from tests.unit.format.test_farewell import full as full_farewell

DOCS = REPOSITORY / "docs"
PAGE = (DOCS / "format.md").read_text(encoding="utf-8")
KEYS = RunKeys("my-run")
REF = CommitRef(7, 4200)
CHUNK = chunk_of(b"abc", run="my-run", generation=7, nonce="9e2d")
MANIFEST = manifests.Manifest(
    run="my-run", generation=7, step=4200, kind=CheckpointKind.PERIODIC, node=0, nodes=2, nonce="0af1",
    shards=(whole_shard("rank-00000/model.bin", CHUNK),),
    parent=CommitRef(7, 4100),
)  # fmt: skip
CLAIM = claims.ClaimObject(run="my-run", generation=7, start="5d41")
FORMS = {
    "<run>": r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}",
    "<generation>": r"[0-9]{8}",
    "<step>": r"[0-9]{12}",
    "<node>": r"[0-9]{5}",
    "<nodes>": r"[0-9]{5}",
    "<digest>": r"[0-9a-f]{64}",
    "<nonce>": r"[0-9a-z]{1,32}",
    "<name>": r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}",
    "<time>": r"[0-9]{8}T[0-9]{6}Z",
    "<hex>": r"[0-9a-f]+",
}


def section(title: str) -> str:
    """The text below a heading, down to the next heading."""
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#+ |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"no section {title}"
    return found[1]


def rows(text: str) -> list[list[str]]:
    """Cells of the rows of all tables, without heads and rules."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    is_rule = [bool(re.fullmatch(r"[| -]+", line)) for line in lines]
    return [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line, rule, head in zip(lines, is_rule, [*is_rule[1:], False], strict=True)
        if not (rule or head)
    ]


def first_names(text: str) -> list[str]:
    """The names in the first cells of a table."""
    return [name for cells in rows(text) for name in re.findall(r"`([^`]+)`", cells[0])]


def snippet(title: str) -> dict[str, Any]:
    """The names that the Python code of a section defines."""
    code = re.search(r"```python\n(.*?)```", section(title), re.DOTALL)
    assert code, f"no Python in {title}"
    names: dict[str, Any] = {}
    exec(code[1], names)
    return names


def test_every_key_of_the_code_has_a_form_on_the_page() -> None:
    """Each row is the form of one kind of key, and each part of a form is explained."""
    forms = [name for name in first_names(section("Layout")) if "/" in name]
    made = [
        KEYS.generation(7),
        CHUNK.key,
        KEYS.commit(REF, 0, 2),
        KEYS.commit(replace(REF, is_final=True), 0, 2),
        KEYS.farewell(7, "20261121T024201Z-0af1"),
        KEYS.resumption(7),
        KEYS.suspect(REF, 0),
        KEYS.pin("paper"),
        f"{KEYS.probes}doctor-0af1/",
    ]
    for form, key in zip(forms, made, strict=True):
        pattern = re.escape(form)
        for word, regex in FORMS.items():
            pattern = pattern.replace(re.escape(word), regex)
        assert re.fullmatch(pattern, key), (form, key)
    explained = [name for name in first_names(section("Layout")) if "/" not in name]
    assert explained == list(FORMS)


def test_the_forms_of_numbers_are_those_of_the_code() -> None:
    """The digits on the page are the ranges that the code formats."""
    digits = {
        name: int(match[1])
        for cells in rows(section("Layout"))
        if (match := re.match(r"([0-9]+) digits", cells[1]))
        for name in re.findall(r"<(\w+)>", cells[0])
    }
    largest = {
        "generation": bounds.GENERATION_MAX,
        "step": bounds.STEP_MAX,
        "node": bounds.NODES_MAX,
        "nodes": bounds.NODES_MAX,
    }
    assert {name: 10**count - 1 for name, count in digits.items()} == largest


def test_the_fields_of_a_manifest() -> None:
    """The page lists exactly the fields of the object."""
    body = json.loads(manifests.encode(MANIFEST))
    of_manifest, of_shard = section("The manifest").split("| field of a shard")
    assert sorted(first_names(of_manifest)) == sorted(body)
    assert sorted(first_names(f"| {of_shard}")) == sorted(body["shards"][0])


def test_the_fields_of_a_claim() -> None:
    """The page lists exactly the fields of the object."""
    body = json.loads(claims.encode(CLAIM))
    assert sorted(first_names(section("The claim"))) == sorted(body)


def test_the_fields_of_a_farewell() -> None:
    """The page lists exactly the fields of the object."""
    body = full_farewell()
    text = section("The farewell")
    of_farewell, of_training = text.split("| field of `training`")
    assert sorted(first_names(of_farewell)) == sorted(body)
    assert sorted(first_names(f"| {of_training}")) == sorted(body["training"])
    assert set(re.findall(r"`(\w+)`", text)) >= set(body["part"])
    assert set(re.findall(r"`(\w+)`", text)) >= set(body["notices"][0])
    for limit in (NOTICES_MAX, ENTRIES_MAX, SAMPLES_MAX):
        assert f"at most {limit}" in text


def test_the_fields_of_a_resumption() -> None:
    """The page lists exactly the fields of the object."""
    body = json.loads(resumptions.encode(RESUMPTION))
    of_resumption, of_earlier = section("The resumption").split("| field of `earlier`")
    assert sorted(first_names(of_resumption)) == sorted(body)
    assert sorted(first_names(f"| {of_earlier}")) == sorted(body["earlier"])
    assert f"waits {YIELD_S:g} s" in PAGE


def number(text: str) -> int:
    """The number in a cell: 20,000, 16 MiB, 2^60."""
    value, _, unit = text.replace(",", "").partition(" ")
    base, _, exponent = value.partition("^")
    power: int = int(base) ** int(exponent or 1)
    return power * {"": 1, "KiB": 2**10, "MiB": 2**20}[unit]


BOUNDS = {
    "bytes of a manifest": manifests.BYTES_MAX,
    "bytes of all manifests of a commit": catalog.COMMIT_BYTES_MAX,
    "shards of a manifest": bounds.FILES_MAX,
    "characters of a path": bounds.PATH_CHARS_MAX,
    "characters of a name in a path": bounds.NAME_CHARS_MAX,
    "names in a path": bounds.PATH_LEVELS_MAX,
    "bytes of all shards of a manifest": bounds.BYTES_MAX,
    "bytes of a chunk": CHUNK_BYTES_MAX,
    "characters of `run`, `kind`, `nonce`, `framework`, `created`": bounds.ID_CHARS_MAX,
    "entries of `health`": bounds.METRICS_MAX,
    "entries of `trainer`": bounds.FACTS_MAX,
    "commas, opening brackets and opening braces of a manifest": manifests.VALUES_MAX,
    "the same of any other object": bounds.JSON_VALUES_MAX,
    "bytes of a claim": claims.BYTES_MAX,
    "bytes of a farewell": farewells.BYTES_MAX,
    "bytes of a resumption": resumptions.BYTES_MAX,
    "manifests of a run that a reader holds, the newest ones; claims likewise": catalog.LISTED_MAX,
}


def test_the_bounds() -> None:
    """The page has the limits that readers apply."""
    found = {cells[0]: number(cells[1]) for cells in rows(section("Bounds"))}
    assert found == BOUNDS
    assert f"{catalog.EXAMINE_CPU_S:g} s of processor time" in PAGE


def test_the_name_of_a_chunk() -> None:
    """The function on the page returns what the code returns."""
    name = snippet("Chunks")["name"]
    assert KEYS.data + name(b"abc", 7, "9e2d") == CHUNK.key


def test_the_signatures() -> None:
    """The functions on the page return the tag and the signature of the code."""
    on_page = snippet("Signatures")
    url, key = "s3://bucket/runs", KEYS.generation(7)
    assert on_page["tag"](KEY.secret, url, key) == KEY.tag(url, key)
    assert on_page["signature"](KEY.secret, url, key, b"{}") == KEY.signature(url, key, b"{}")
