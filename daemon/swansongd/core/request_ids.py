# SPDX-License-Identifier: Apache-2.0
"""The ids of an evacuation's requests: the id of the evacuation, and a suffix for all but the first."""

from __future__ import annotations

AGAIN = ".again-"
"""Before the number of a request that repeats a failed one."""
FOLLOW_UP = ".follow-"
"""Before the monotonic time of a follow-up request, which differs between the lives of a daemon."""


def are_of_one(first_id: str, second_id: str) -> bool:
    """Whether two requests, or an evacuation and a request, belong together."""
    return evacuation_of(first_id) == evacuation_of(second_id)


def evacuation_of(request_id: str) -> str:
    """The id of the evacuation that made a request."""
    return request_id.partition(AGAIN)[0].partition(FOLLOW_UP)[0]
