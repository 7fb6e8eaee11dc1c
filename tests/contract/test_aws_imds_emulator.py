# SPDX-License-Identifier: Apache-2.0
"""The emulated EC2 metadata service behaves like the documented one."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from datetime import datetime
from email.utils import parsedate_to_datetime

import pytest
import requests

from testkit.emulators.process import EmulatorProcess
from testkit.source_run import asked, control, http
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


def get(url: str, path: str, method: str = "GET") -> requests.Response:
    return http(method, url + path, headers={"X-aws-ec2-metadata-token": put_token(url).text})


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


def test_v1_and_life_on_get_are_options() -> None:
    """With ``--v1`` no token is needed, but a wrong one is refused; GET can return the lifetime."""
    options = ("--v1", "--ttl-on-get", "--scheduled-404")
    with EmulatorProcess("testkit.emulators.aws_imds", *options) as process:
        assert http("GET", process.url + SPOT).status_code == 404
        wrong = {"X-aws-ec2-metadata-token": "wrong"}
        assert http("GET", process.url + SPOT, headers=wrong).status_code == 401
        assert 0 < int(get(process.url, SPOT).headers[TTL]) <= 60
        assert get(process.url, META + "events/maintenance/scheduled").status_code == 404


def test_notice_time_is_pinned_once(imds: str) -> None:
    """The stated time is fixed with the notice, also in the past; a withdrawal returns 404."""
    assert get(imds, SPOT).status_code == 404
    stated = control(imds, "notice", action="terminate", in_s=120)
    first = get(imds, SPOT)
    assert first.json() == stated
    assert get(imds, META + "spot/termination-time").text == stated["time"]
    now_s = parsedate_to_datetime(first.headers["Date"]).timestamp()
    assert 110 < datetime.fromisoformat(stated["time"]).timestamp() - now_s <= 121
    assert get(imds, SPOT).text == first.text
    control(imds, "notice", action="stop", time="2020-01-01T00:00:00Z")
    assert get(imds, SPOT).json() == {"action": "stop", "time": "2020-01-01T00:00:00Z"}
    assert get(imds, META + "spot/termination-time").status_code == 404
    control(imds, "withdraw")
    assert get(imds, SPOT).status_code == 404


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


def test_any_path_can_be_set(imds: str) -> None:
    """Rebalance, target state and events exist once set, and vanish when set to null."""
    path = "autoscaling/target-lifecycle-state"
    control(imds, "set", path=path, value="Terminated")
    assert get(imds, META + path).text == "Terminated"
    assert get(imds, META + "autoscaling/").text == "target-lifecycle-state"
    control(imds, "set", path=path, value=None)
    assert get(imds, META + path).status_code == 404


def test_recommendation_is_pinned(imds: str) -> None:
    """Its time is fixed with the recommendation, which vanishes with the withdrawal."""
    path = META + "events/recommendations/rebalance"
    control(imds, "rebalance")
    first = get(imds, path).json()
    assert first.keys() == {"noticeTime"}
    assert abs(datetime.fromisoformat(first["noticeTime"]).timestamp() - time.time()) < 5
    assert get(imds, path).json() == first
    control(imds, "quiet")
    assert get(imds, path).status_code == 404


def test_scheduled_events_move_to_the_history(imds: str) -> None:
    """Events are listed together with fixed dates; a finished one is in the history, with a tag."""
    scheduled, history = META + "events/maintenance/scheduled", META + "events/maintenance/history"
    first = control(imds, "schedule", code="system-reboot", in_s=3600, event_id="e-1")
    second = control(imds, "schedule", code="instance-stop", in_s=60, event_id="e-2")
    assert get(imds, scheduled).json() == [first, second]
    assert first["State"] == "active"
    assert re.fullmatch(r"[1-9]\d? [A-Z][a-z]{2} \d{4} \d\d:\d\d:\d\d GMT", first["NotBefore"])
    in_s = parsedate_to_datetime(first["NotBefore"]).timestamp() - time.time()
    assert 3590 < in_s <= 3600
    moved = control(imds, "schedule", code="system-reboot", in_s=7200, event_id="e-1")
    assert get(imds, scheduled).json() == [second, moved]
    control(imds, "finish", event_id="e-1", state="canceled")
    control(imds, "finish", event_id="e-2", state="completed")
    assert get(imds, scheduled).text == "[]"
    canceled, completed = get(imds, history).json()
    assert (canceled["State"], completed["State"]) == ("canceled", "completed")
    assert canceled["Description"].startswith("[Canceled] ")
    assert completed["Description"].startswith("[Completed] ")
    reply = http("POST", f"{imds}/_control/finish", json={"event_id": "e-9", "state": "canceled"})
    assert reply.status_code == 400


def test_life_cycle_and_end_of_events_are_options() -> None:
    """The VM can be on-demand; without events the path can return 404, also after the last one."""
    options = ("--life-cycle", "on-demand", "--scheduled-404")
    with EmulatorProcess("testkit.emulators.aws_imds", *options) as process:
        assert get(process.url, META + "instance-life-cycle").text == "on-demand"
        control(process.url, "schedule", code="system-reboot", in_s=9, event_id="e")
        control(process.url, "finish", event_id="e", state="completed")
        assert get(process.url, META + "events/maintenance/scheduled").status_code == 404


def test_scenarios_can_be_listed(imds: str) -> None:
    """Each preset is listed, with its orders in order of their times."""
    listed = http("GET", f"{imds}/_control/scenarios").json()
    assert listed.keys() == {
        "no-notice", "aws-120s", "aws-39s", "aws-hibernate", "aws-stop", "aws-withdrawn",
        "aws-rebalance-then-notice", "aws-rebalance-only", "aws-asg", "aws-scheduled",
        "aws-scheduled-cancelled",
    }  # fmt: skip
    for steps in listed.values():
        times = [at_s for at_s, _order, _body in steps]
        assert times == sorted(times)


@pytest.mark.fault("N12")
def test_scenario_without_notice_ends_without_responses() -> None:
    """The end has no announcement; after it the service does not respond."""
    options = ("--scenario", "no-notice", "--speed", "60")
    with EmulatorProcess("testkit.emulators.aws_imds", *options) as process:
        answers = set()

        def silent() -> bool:
            try:
                token = http(
                    "PUT", process.url + "/latest/api/token", headers={TTL: "60"}, timeout=1
                )
                headers = {"X-aws-ec2-metadata-token": token.text}
                answers.add(http("GET", process.url + SPOT, headers=headers, timeout=1).status_code)
            except requests.Timeout:
                return True
            return False

        until(silent, what="no response")
        assert answers <= {404}


def test_identity_and_credentials(imds: str) -> None:
    """Identity document and role credentials have the fields that SDKs read; HEAD has no body."""
    document = get(imds, "/latest/dynamic/instance-identity/document").json()
    assert {"region", "instanceId", "accountId", "instanceType"} <= document.keys()
    credentials = get(imds, META + "iam/security-credentials/trainer").json()
    assert credentials["Code"] == "Success"
    assert {"AccessKeyId", "SecretAccessKey", "Token", "Expiration"} <= credentials.keys()
    head = get(imds, META + "instance-id", "HEAD")
    assert (head.status_code, head.text) == (200, "")


def test_faults_hit_the_path_and_the_number_ordered(imds: str) -> None:
    """A fault with a count affects that number of requests of its path, and no others; all are counted."""
    control(imds, "fault", path=SPOT, kind="status", value=503, count=2)
    assert get(imds, META + "instance-id").status_code == 200
    before = asked(imds, f"GET {SPOT}")
    assert [get(imds, SPOT).status_code for _ in range(3)] == [503, 503, 404]
    assert asked(imds, f"GET {SPOT}") - before == 3


@pytest.mark.parametrize("kind", ["reset", "truncate"])
def test_broken_connections(imds: str, kind: str) -> None:
    """Reset and truncation reach the client as broken connections, and not as responses."""
    control(imds, "fault", path=META + "instance-id", kind=kind)
    with pytest.raises(requests.RequestException):
        get(imds, META + "instance-id")


@pytest.mark.parametrize("kind", ["hang", "stall"])
def test_clear_ends_hang_and_stall(imds: str, kind: str) -> None:
    """Hang and stall block the client; clearing the faults closes its connection."""
    path = META + "instance-id"
    control(imds, "fault", path=path, kind=kind)
    headers = {"X-aws-ec2-metadata-token": put_token(imds).text}
    with pytest.raises(requests.RequestException):
        http("GET", imds + path, headers=headers, timeout=0.2)
    assert asked(imds, f"GET {path}", kind)
    control(imds, "clear")
    assert get(imds, path).status_code == 200


def test_delayed_and_slow_responses_are_complete(imds: str) -> None:
    path = META + "instance-life-cycle"
    for kind, at_least_s in (("delay", 0.1), ("slow", 0.3)):
        control(imds, "fault", path=path, kind=kind, value=0.1, count=1)
        started = time.monotonic()
        assert get(imds, path).text == "spot"
        assert time.monotonic() - started >= at_least_s


def test_bodies_redirects_and_missing_headers(imds: str) -> None:
    """A body can be replaced, a request redirected, and the headers of the cloud omitted."""
    path = META + "instance-id"
    control(imds, "fault", path=path, kind="body", value="{", count=1)
    assert get(imds, path).text == "{"
    control(imds, "fault", path=path, kind="redirect", value="http://127.0.0.1:1/", count=1)
    reply = get(imds, path)
    assert (reply.status_code, reply.headers["Location"]) == (302, "http://127.0.0.1:1/")
    control(imds, "fault", path=path, kind="bare", count=1)
    assert get(imds, path).headers.keys() == {"Content-Length"}


def test_invalid_orders_are_refused(imds: str) -> None:
    """An unknown order, fault, field or action returns 400 with the reason."""
    for order, body in (
        ("nonsense", {}),
        ("fault", {"kind": "nonsense"}),
        ("fault", {"kind": "hang", "nonsense": 1}),
        ("notice", {"action": "nonsense"}),
    ):
        reply = http("POST", f"{imds}/_control/{order}", data=json.dumps(body))
        assert (reply.status_code, "error" in reply.json()) == (400, True)
