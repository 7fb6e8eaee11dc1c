# SPDX-License-Identifier: Apache-2.0
"""The store emulators break connections at the point that a test orders.

Their checksums, preconditions and pages are shown by test_our_emulators_lack_nothing and by the contract.
"""

from __future__ import annotations

import pytest
import requests

from testkit.emulators.store_control import POINTS
from testkit.store_backends import Cloud
from testkit.store_by_hand import signed


@pytest.mark.fault("O01")
@pytest.mark.parametrize("point", POINTS)
def test_a_connection_breaks_where_it_was_ordered(cloud: Cloud, point: str) -> None:
    """A request takes effect only if the break is after its last byte."""
    # requests does not detect a truncated head of a response without a body.
    method = "GET" if point == "in_answer" else "PUT"
    cloud.order("break", kind="reset", at=point, method=method)
    broken = (requests.ConnectionError, requests.exceptions.ChunkedEncodingError)
    with pytest.raises(broken):
        signed(cloud, method, b"x" * 1000)
    asked = [method for method, _ in cloud.requests()]
    assert asked == ([method] if point in POINTS[-2:] else [])
    cloud.order("break", kind="stall", at=point, method=method)
    with pytest.raises((requests.Timeout, requests.ConnectionError)):
        signed(cloud, method, b"x" * 1000, timeout_s=0.3)
