# SPDX-License-Identifier: Apache-2.0
"""fake-gcs-server, by another project: reads work, and writes are refused with a clear error."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from urllib.parse import quote

import pytest
from swansong_bucket.errors import NotFound, Permanent
from swansong_bucket.stores.base import Body, ObjectInfo
from swansong_bucket.stores.gcs.settings import GcsSettings
from swansong_bucket.stores.wrappers.retry import Retrying

from testkit.foreign_servers import BUCKET, ForeignServer, fake_gcs
from testkit.store_backends import get_range, retrying, store_at

KEY = "rank-0/a b+c%20d=é.bin"


@pytest.fixture(scope="module")
def server(
    cloud_environment: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ForeignServer]:
    with fake_gcs(tmp_path_factory.mktemp("fake-gcs")) as server:
        yield server


def filled(server: ForeignServer, prefix: str, objects: dict[str, bytes]) -> Retrying:
    """A store with these objects, which were created by the JSON interface.

    Its calls are retried, as in the daemon: this server resets connections that it has kept open.
    """
    for key, data in objects.items():
        name = quote(f"{prefix}/{key}", safe="")
        url = f"{server.url}/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name={name}"
        with urllib.request.urlopen(urllib.request.Request(url, data, method="POST"), timeout=60):
            pass
    return retrying(store_at(f"gs://{BUCKET}/{prefix}", server.url), budget_s=30.0)


def test_objects_of_a_foreign_gcs_are_read(server: ForeignServer) -> None:
    """Listings of several pages, sizes, ranges, and a missing object."""
    many = {f"many/{number:04d}": b"1" for number in range(1005)}
    store = filled(server, "read", {KEY: b"0123456789", "empty": b"", **many})
    store.check()
    assert {info.key for info in store.list("many/")} == set(many)
    assert list(store.list("rank-0")) == [ObjectInfo(KEY, 10)]
    assert (store.head(KEY), store.head("empty")) == (ObjectInfo(KEY, 10), ObjectInfo("empty", 0))
    assert (store.get(KEY), store.get("empty")) == (b"0123456789", b"")
    assert get_range(store, KEY, 3, 4) == b"3456"
    for offset, size_bytes in ((3, 8), (10, 1)):
        with pytest.raises(Permanent):
            get_range(store, KEY, offset, size_bytes)
    store.delete("empty")
    store.delete("empty")
    assert store.head("empty") is None
    with pytest.raises(NotFound):
        store.get("empty")
    with pytest.raises(NotFound):
        store_at("gs://no-such-bucket/read", server.url).head(KEY)


def test_settings_of_a_foreign_gcs_are_read(server: ForeignServer) -> None:
    """The client of Google's library reads them; a right that the server cannot report is an error."""

    def settings() -> GcsSettings:  # each on a connection of its own: see filled()
        return store_at(f"gs://{BUCKET}/read", server.url).settings

    assert not settings().is_versioned()
    assert not settings().has_lock()
    assert settings().lifecycle_rules() == []
    with pytest.raises(NotFound):
        settings().rights(["storage.objects.delete"])


def test_a_gcs_without_the_xml_interface_is_refused(server: ForeignServer) -> None:
    """Writes are Permanent errors, not an endless retry."""
    store = filled(server, "write", {})
    with pytest.raises(Permanent):
        store.put("key", b"1", if_absent=True)
    with pytest.raises(Permanent):
        store.create("key", Body(b"1"))
