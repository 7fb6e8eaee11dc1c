# SPDX-License-Identifier: Apache-2.0
"""The emulated EC2 metadata service is as strict as the documented one.

The tests of the sources show its notices and faults.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import requests

from testkit.emulators.process import EmulatorProcess
from testkit.source_run import control, http
from testkit.waiting import until

META = "/latest/meta-data/"
SPOT = META + "spot/instance-action"
TTL = "X-aws-ec2-metadata-token-ttl-seconds"


@pytest.fixture(scope="module")
def process() -> Iterator[EmulatorProcess]:
    with EmulatorProcess(
        "testkit.emulators.aws_imds", "--port", "0", "--role", "trainer"
    ) as process:
        yield process


@pytest.fixture
def imds(process: EmulatorProcess) -> str:
    control(process.url, "clear")
    control(process.url, "quiet")
    return process.url


def put_token(url: str, ttl: str | None = "60", **headers: str) -> requests.Response:
    headers |= {} if ttl is None else {TTL: ttl}
    return http("PUT", url + "/latest/api/token", headers=headers)


def get(url: str, path: str) -> requests.Response:
    return http("GET", url + path, headers={"X-aws-ec2-metadata-token": put_token(url).text})


@pytest.mark.parametrize(
    ("ttl", "status"),
    [("1", 200), ("21600", 200), ("0", 400), ("21601", 400), ("-1", 400), ("x", 400), (None, 400)],
)
def test_token_life_must_be_within_bounds(imds: str, ttl: str | None, status: int) -> None:
    """A token has a lifetime of 1 to 21600 seconds, and the response repeats it."""
    reply = put_token(imds, ttl)
    assert reply.status_code == status
    assert status != 200 or reply.headers[TTL] == ttl


def test_token_only_by_put_and_never_forwarded(imds: str) -> None:
    """Another method is refused; a forwarded PUT and a dated path are forbidden."""
    assert http("GET", imds + "/latest/api/token").status_code == 405
    assert put_token(imds, **{"X-Forwarded-For": "10.0.0.1"}).status_code == 403
    dated = http("PUT", imds + "/2021-03-23/api/token", headers={TTL: "60"})
    assert dated.status_code == 403


def test_no_value_without_a_valid_token(imds: str) -> None:
    """401 without a token, with a wrong one, after its end, and after all tokens were invalidated."""
    token = {"X-aws-ec2-metadata-token": put_token(imds, "1").text}
    assert http("GET", imds + SPOT, headers=token).status_code == 404
    assert http("GET", imds + SPOT).status_code == 401
    wrong = {"X-aws-ec2-metadata-token": "wrong"}
    assert http("GET", imds + SPOT, headers=wrong).status_code == 401
    until(lambda: http("GET", imds + SPOT, headers=token).status_code == 401, what="token to end")
    longer = {"X-aws-ec2-metadata-token": put_token(imds).text}
    control(imds, "invalidate-tokens")
    assert http("GET", imds + SPOT, headers=longer).status_code == 401


def test_a_token_is_an_option_with_v1() -> None:
    """With ``--v1`` no token is needed, but a wrong one is refused."""
    with EmulatorProcess("testkit.emulators.aws_imds", "--v1") as process:
        assert http("GET", process.url + SPOT).status_code == 404
        wrong = {"X-aws-ec2-metadata-token": "wrong"}
        assert http("GET", process.url + SPOT, headers=wrong).status_code == 401


@pytest.mark.parametrize(
    ("path", "idle"),
    [
        (META + "events/recommendations/rebalance", None),
        (META + "autoscaling/target-lifecycle-state", None),
        (META + "events/maintenance/scheduled", "[]"),
        (META + "events/maintenance/history", "[]"),
        (META + "instance-life-cycle", "spot"),
        (META + "instance-action", "none"),
        (META + "iam/security-credentials/", "trainer"),
    ],
)
def test_idle_values(imds: str, path: str, idle: str | None) -> None:
    """Without an announcement each path returns its documented value: 404, or an idle value."""
    reply = get(imds, path)
    assert (reply.status_code, reply.text) == (200, idle) if idle else reply.status_code == 404
