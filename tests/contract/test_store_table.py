# SPDX-License-Identifier: Apache-2.0
"""The table in docs/operations/stores.md equals the results of the servers.

``WRITE_STORES_TABLE=1 pytest tests/contract/test_store_table.py`` writes the columns of the servers that run.
``make test-stores`` runs more of them than ``make test``.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable

import pytest
from swansong_bucket.errors import Changed, Exists, StoreError
from swansong_bucket.stores.azure.auth import content_md5
from swansong_bucket.stores.base import Body, ObjectInfo

from testkit import REPOSITORY
from testkit.foreign_servers import BUCKET, azure_status
from testkit.store_backends import MIB, OURS, SERVERS, Cloud, get_range
from testkit.store_by_hand import signed

PAGE = REPOSITORY / "docs" / "operations" / "stores.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
CONTENT = os.urandom(5 * MIB + 1)
WRONG = base64.b64encode(b"none").decode()


def moves_objects(cloud: Cloud) -> bool:
    """put, get, head, list, delete, create, get_range, check."""
    store = cloud.open()
    store.check()
    store.put("a/small", b"1")
    store.create("a/shard", Body(CONTENT))
    seen = store.get("a/small") == b"1" and get_range(store, "a/shard", 7, 1000) == CONTENT[7:1007]
    seen = seen and [info.size_bytes for info in store.list("a/")] == [len(CONTENT), 1]
    store.delete("a/small")
    return bool(seen and store.head("a/small") is None)


def creates_only_if_absent(cloud: Cloud) -> bool:
    store = cloud.open()
    store.put("claim", b"1", if_absent=True)
    try:
        store.put("claim", b"2", if_absent=True)
    except Exists:
        return True
    return False


def deletes_only_if_unchanged(cloud: Cloud) -> bool:
    """Else a conditional delete deletes the object that has replaced the listed one."""
    store = cloud.open()
    store.put("key", b"old")
    [old] = store.list("")
    store.put("key", b"newer")
    try:
        store.delete("key", if_tag=old.tag)
    except Changed:
        return True
    return False


def lists_in_byte_order(cloud: Cloud) -> bool:
    """Not required: listings may have any order."""
    store = cloud.open()
    keys = ["rank-0.json", "rank-0/model", "rank-0/optimizer", "rank-1"]
    for key in keys:
        store.put(key, b"1")
    return [info.key for info in store.list("")] == keys


def returns_checksums_of_objects(cloud: Cloud) -> bool:
    store = cloud.open()
    store.create("chunk", Body(b"abc"))
    wanted = ObjectInfo("chunk", 3), store._checksum(Body(b"abc"))
    return bool(store._found("chunk", is_checked=True) == wanted)


def keeps_a_chunk(cloud: Cloud) -> bool:
    """Sent again under its key: the same bytes count as stored, others are refused."""
    store = cloud.open()
    for _ in range(2):
        store.create("chunk", Body(b"ours"))
    try:
        store.create("chunk", Body(b"else"))
    except Exists:
        return True
    return False


def refuses_a_wrong_checksum(cloud: Cloud) -> bool:
    if cloud.is_azure:
        wrong = {"x-ms-blob-type": "BlockBlob", "content-md5": content_md5(memoryview(b"else"))}
        return azure_status("PUT", _url(cloud), b"1234", wrong) == 400
    if not cloud.is_s3:
        return _put(cloud, {"x-goog-hash": f"crc32c={WRONG}"}) == 400
    headers = {"x-amz-checksum-crc32c": WRONG, "x-amz-content-sha256": "UNSIGNED-PAYLOAD"}
    return _put(cloud, headers) == 400


def refuses_a_wrong_signature(cloud: Cloud) -> bool | None:
    if cloud.is_azure:
        return azure_status("GET", _url(cloud), key=WRONG) == 403
    if not cloud.is_s3:
        return None  # tokens instead
    return signed(cloud, "PUT", secret_key="guessed").status_code == 403


def _url(cloud: Cloud) -> str:
    return f"{cloud.server.url}/{BUCKET}/{cloud.prefix}/by-hand"


def _put(cloud: Cloud, headers: dict[str, str], body: bytes = b"1234") -> int:
    return signed(cloud, "PUT", body, headers).status_code


ROWS: dict[str, Callable[[Cloud], bool | None]] = {
    "objects: put, get, head, list, delete, create, get_range, check": moves_objects,
    "put if absent": creates_only_if_absent,
    "delete of an unchanged object only": deletes_only_if_unchanged,
    "create again: the same bytes count as stored, others are refused": keeps_a_chunk,
    "listings in byte order": lists_in_byte_order,
    "checksums of objects": returns_checksums_of_objects,
    "a wrong checksum in a header is refused": refuses_a_wrong_checksum,
    "a wrong signature is refused": refuses_a_wrong_signature,
}
WORDS = {True: "yes", False: "**no**"}


COLUMNS = [name for name in SERVERS if name not in OURS and not name.endswith("-tls")]


def asked(ask: Callable[[Cloud], bool | None], cloud: Cloud) -> bool | None:
    """The result of a check; False if the server refuses the call."""
    try:
        return ask(cloud)
    except StoreError:
        return False


@pytest.fixture
def measured(open_cloud: Callable[[str], Cloud]) -> dict[str, list[str]]:
    """The column of each server."""
    return {
        name: [WORDS[bool(asked(ask, open_cloud(name)))] for ask in ROWS.values()]
        for name in COLUMNS
    }


def columns(table: str) -> dict[str, list[str]]:
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.split("\n")]
    return {name: list(words) for name, _, *words in zip(*lines, strict=True)}


def written(table: dict[str, list[str]]) -> str:
    lines = [[name, "---", *words] for name, words in table.items()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in zip(*lines, strict=True))


def test_the_table_is_true(measured: dict[str, list[str]]) -> None:
    """The columns of the page equal the results of the servers that run."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    table, _, after = rest.partition(END)
    found = columns(table.strip())
    if os.environ.get("WRITE_STORES_TABLE"):
        # In the order of the page; new servers are last.
        new = {**found, **measured, "call": list(ROWS)}
        PAGE.write_text(f"{before}{BEGIN}\n{written(new)}\n{END}{after}")
        return
    assert found["call"] == list(ROWS)
    assert {name: found.get(name) for name in measured} == measured


@pytest.mark.parametrize("name", OURS)
def test_our_emulators_lack_nothing(open_cloud: Callable[[str], Cloud], name: str) -> None:
    """The page says so, and has no columns for them."""
    assert [row for row, ask in ROWS.items() if asked(ask, open_cloud(name)) is False] == []
