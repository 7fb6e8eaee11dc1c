# SPDX-License-Identifier: Apache-2.0
"""The emulated metadata services refuse what the documented ones refuse: a lenient emulator proves nothing.

The tests of the sources show their values, waits and faults.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import requests

from testkit.emulators.process import EmulatorProcess
from testkit.source_run import control, http
from testkit.waiting import until

SPOT = "/latest/meta-data/spot/instance-action"
TTL = "X-aws-ec2-metadata-token-ttl-seconds"
BASE = "/computeMetadata/v1/"
GOOGLE = {"Metadata-Flavor": "Google"}


@pytest.fixture
def imds() -> Iterator[str]:
    with EmulatorProcess("testkit.emulators.aws_imds", "--port", "0") as process:
        yield process.url


@pytest.fixture
def server() -> Iterator[str]:
    with EmulatorProcess("testkit.emulators.gcp_metadata", "--port", "0") as process:
        yield process.url


def put_token(url: str, ttl: str | None = "60", **headers: str) -> requests.Response:
    headers |= {} if ttl is None else {TTL: ttl}
    return http("PUT", url + "/latest/api/token", headers=headers)


def test_a_token_of_aws_has_a_bounded_life_and_is_never_forwarded(imds: str) -> None:
    """1 to 21600 seconds, by PUT only; a forwarded PUT and a dated path are forbidden."""
    for ttl in ("1", "21600"):
        assert put_token(imds, ttl).headers[TTL] == ttl
    for invalid in ("0", "21601", "-1", "x", None):
        assert put_token(imds, invalid).status_code == 400
    assert http("GET", imds + "/latest/api/token").status_code == 405
    assert put_token(imds, **{"X-Forwarded-For": "10.0.0.1"}).status_code == 403
    dated = http("PUT", imds + "/2021-03-23/api/token", headers={TTL: "60"})
    assert dated.status_code == 403


def test_aws_returns_no_value_without_a_valid_token(imds: str) -> None:
    """401 without a token, with a wrong one, after its end, and after all tokens were invalidated."""

    def status(token: str | None) -> int:
        headers = {} if token is None else {"X-aws-ec2-metadata-token": token}
        return http("GET", imds + SPOT, headers=headers).status_code

    short = put_token(imds, "1").text
    assert [status(token) for token in (short, None, "wrong")] == [404, 401, 401]
    until(lambda: status(short) == 401, what="token to end")
    longer = put_token(imds).text
    control(imds, "invalidate-tokens")
    assert status(longer) == 401


def test_the_flavor_header_of_google_is_required_and_repeated(server: str) -> None:
    """403 without the header, 404 with another value, 403 if forwarded; each response repeats it."""
    url = f"{server}{BASE}instance/preempted"
    assert http("GET", url).status_code == 403
    assert http("GET", url, headers={"Metadata-Flavor": "Amazon"}).status_code == 404
    assert http("GET", url, headers={**GOOGLE, "X-Forwarded-For": "10.0.0.1"}).status_code == 403
    reply = http("GET", url, headers=GOOGLE)
    assert (reply.status_code, reply.text) == (200, "FALSE")
    assert reply.headers["Metadata-Flavor"] == "Google"


@pytest.mark.parametrize("key", ["instance/", "instance/service-accounts/default/token"])
def test_directories_and_tokens_of_google_cannot_be_waited_for(server: str, key: str) -> None:
    """400 for both; without a wait they return a value."""
    url = f"{server}{BASE}{key}"
    assert http("GET", url, headers=GOOGLE, params={"wait_for_change": "true"}).status_code == 400
    assert http("GET", url, headers=GOOGLE).status_code == 200


def test_google_warns_only_a_watching_vm_of_maintenance(server: str) -> None:
    """A VM gets the warning only if it has read the key since the last event."""
    event = "TERMINATE_ON_HOST_MAINTENANCE"
    url = f"{server}{BASE}instance/maintenance-event"
    assert control(server, "maintenance", value=event) == {"shown": False}
    assert http("GET", url, headers=GOOGLE).text == "NONE"
    assert control(server, "maintenance", value=event) == {"shown": True}
    control(server, "maintenance", value="NONE")
    assert control(server, "maintenance", value=event) == {"shown": False}
