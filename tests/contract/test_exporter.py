# SPDX-License-Identifier: Apache-2.0
"""The exporter with the rights of its role."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from swansong_bucket.errors import Permanent
from swansong_bucket.model import CommitRef
from swansong_tools.exporter.own_health import ReadHealth, ReadOnly
from swansong_tools.exporter.readings import StoreReader

from testkit.lost_vms import BEGUN_S, KEYS, a_run
from testkit.store_backends import Cloud

from .test_bucket_policies import Bucket


def test_the_role_reads_records_and_no_data(open_cloud: Callable[[str], Cloud]) -> None:
    """The policy is enough for the exporter, also with a run that has nothing but a claim."""
    bucket = Bucket(open_cloud("s3"))
    a_run(bucket.store())
    bucket.store().put("r/pins/x.json", b"1")
    (data,) = (info.key for info in bucket.store().list("r/data/"))
    role = bucket.as_role("aws-exporter.json")
    stop = threading.Event()
    reader = StoreReader(
        ReadOnly(role, ReadHealth(role.url), stop),
        None,
        interval_s=60.0,
        runs_max=10,
        prices=None,
        stop=stop,
        wall=lambda: BEGUN_S + 5000,
    )
    assert reader.read()
    (found,) = reader.figures()
    assert found.newest is not None
    assert found.newest.ref == CommitRef(1, 140)
    assert sum(found.losses.interruptions.values()) == 2
    for refused in (
        lambda: role.get(data),
        lambda: role.get("r/pins/x.json"),
        lambda: role.put(KEYS.farewell(1, "x"), b"1"),
        lambda: role.delete(data),
    ):
        with pytest.raises(Permanent):
            refused()
