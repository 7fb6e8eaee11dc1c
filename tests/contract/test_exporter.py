# SPDX-License-Identifier: Apache-2.0
"""The exporter with the backends and their servers, and with the rights of its role."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from swansong_bucket.errors import Permanent
from swansong_bucket.model import CommitRef
from swansong_bucket.stores.base import ObjectStore
from swansong_tools.exporter.health import ReadHealth, ReadOnly
from swansong_tools.exporter.reader import StoreReader

from testkit.lost_vms import BEGUN_S, KEYS, a_run
from testkit.store_backends import Cloud

from .test_bucket_policies import Bucket


class Exporter:
    """An exporter of one store; each reading finds every run due."""

    def __init__(self, store: ObjectStore) -> None:
        self.now_s = 0.0
        self.health = ReadHealth(store.url)
        stop = threading.Event()
        self.reader = StoreReader(
            ReadOnly(store, self.health, stop),
            None,
            interval_s=60.0,
            runs_max=10,
            prices=None,
            stop=stop,
            monotonic=lambda: self.now_s,
            wall=lambda: BEGUN_S + 5000,
        )

    def read(self) -> dict[str, int]:
        """The requests of one reading, by operation."""
        before = dict(self.health.requests)
        self.now_s += 3600.0
        assert self.reader.read()
        return {name: n - before[name] for name, n in self.health.requests.items()}


def expect_figures(reader: StoreReader) -> None:
    (found,) = reader.figures()
    assert (found.run, found.generation) == ("r", 3)
    assert found.newest is not None
    assert found.newest.ref == CommitRef(1, 140)
    assert sum(found.losses.interruptions.values()) == 2


def test_each_store_is_read_once(store: ObjectStore) -> None:
    """The first reading gets each object, and the second one none."""
    a_run(store)
    exporter = Exporter(store)
    assert exporter.read()["get"] == 1 + 3 + 2
    expect_figures(exporter.reader)
    again = exporter.read()
    assert (again["get"], again["head"]) == (0, 0)
    assert 3 <= again["list"] <= 4  # the store in memory has small pages


@pytest.mark.fault("OX02")
def test_an_outage_of_a_server(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of the server are counted; the figures stay, and the next reading has them again."""
    monkeypatch.setattr("swansong_tools.exporter.health._CALL_BUDGET_S", 0.05)
    store = cloud.open()
    a_run(store)
    exporter = Exporter(store)
    exporter.read()
    cloud.order("outage", seconds=600)
    assert not exporter.reader.read()
    assert exporter.health.errors["transient"] > 0
    expect_figures(exporter.reader)
    cloud.order("clear")
    exporter.read()


def test_the_role_reads_records_and_no_data(open_cloud: Callable[[str], Cloud]) -> None:
    """The policy is enough for the exporter, also with a run that has nothing but a claim."""
    bucket = Bucket(open_cloud("s3"))
    a_run(bucket.store())
    bucket.store().put("r/pins/x.json", b"1")
    (data,) = (info.key for info in bucket.store().list("r/data/"))
    role = bucket.as_role("aws-exporter.json")
    exporter = Exporter(role)
    exporter.read()
    expect_figures(exporter.reader)
    for refused in (
        lambda: role.get(data),
        lambda: role.get("r/pins/x.json"),
        lambda: role.put(KEYS.farewell(1, "x"), b"1"),
        lambda: role.delete(data),
    ):
        with pytest.raises(Permanent):
            refused()
