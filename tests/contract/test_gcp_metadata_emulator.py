# SPDX-License-Identifier: Apache-2.0
"""The emulated metadata server of Compute Engine is as strict as the documented one.

The tests of the sources show its events and faults.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest
import requests

from testkit.emulators.process import EmulatorProcess
from testkit.source_run import asked, control, http
from testkit.waiting import until

BASE = "/computeMetadata/v1/"
PREEMPTED = "instance/preempted"
GOOGLE = {"Metadata-Flavor": "Google"}


@pytest.fixture(scope="module")
def process() -> Iterator[EmulatorProcess]:
    with EmulatorProcess("testkit.emulators.gcp_metadata", "--port", "0") as process:
        yield process


@pytest.fixture
def server(process: EmulatorProcess) -> str:
    control(process.url, "clear")
    control(process.url, "set", key=PREEMPTED, value="FALSE")
    return process.url


def get(url: str, key: str, **query: str) -> requests.Response:
    return http("GET", url + BASE + key, headers=GOOGLE, params=query)


class Hanging:
    """A request in a thread, known to have reached the server."""

    def __init__(self, url: str, key: str, **query: str) -> None:
        self._replies: queue.Queue[requests.Response] = queue.Queue()
        name = f"GET {BASE}{key}"
        before = asked(url, name)

        def ask() -> None:
            self._replies.put(get(url, key, wait_for_change="true", **query))

        threading.Thread(target=ask, daemon=True).start()
        until(lambda: asked(url, name) > before, what="the request to arrive")

    def reply(self) -> requests.Response:
        return self._replies.get(timeout=20)

    @property
    def hangs(self) -> bool:
        return self._replies.empty()


def test_flavor_header_is_required_and_repeated(server: str) -> None:
    """403 without the header, 404 with another value, 403 if forwarded; each response repeats it."""
    url = server + BASE + PREEMPTED
    assert http("GET", url).status_code == 403
    assert http("GET", url, headers={"Metadata-Flavor": "Amazon"}).status_code == 404
    assert http("GET", url, headers={**GOOGLE, "X-Forwarded-For": "10.0.0.1"}).status_code == 403
    reply = get(server, PREEMPTED)
    assert (reply.status_code, reply.text) == (200, "FALSE")
    assert reply.headers["Metadata-Flavor"] == "Google"
    assert reply.headers["Server"] == "Metadata Server for VM"
    assert reply.headers["Content-Type"] == "application/text"
    assert len(reply.headers["ETag"]) == 16


def test_another_etag_gets_an_immediate_response(server: str) -> None:
    """An ETag other than the current one, ``0`` above all, gets the current value without a wait."""
    for etag in ("0", "NONE", "0123456789abcdef"):
        reply = get(server, PREEMPTED, wait_for_change="true", last_etag=etag)
        assert (reply.status_code, reply.text) == (200, "FALSE")


def test_without_etag_a_request_hangs_even_if_true(server: str) -> None:
    """Without ``last_etag`` the request waits for the next change, even if the value is TRUE already."""
    control(server, "set", key=PREEMPTED, value="TRUE")
    hanging = Hanging(server, PREEMPTED)
    control(server, "set", key="instance/maintenance-event", value="NONE")
    control(server, "touch", key="instance/name")
    assert hanging.hangs
    control(server, "set", key=PREEMPTED, value="FALSE")
    assert hanging.reply().text == "FALSE"


def test_change_wakes_with_value_and_etag(server: str) -> None:
    """A change returns 200 with the new value and a new ETag; a value that returns has a third ETag."""
    etags = [get(server, PREEMPTED).headers["ETag"]]
    for value in ("TRUE", "FALSE"):
        hanging = Hanging(server, PREEMPTED, last_etag=etags[-1])
        assert hanging.hangs
        control(server, "set", key=PREEMPTED, value=value)
        reply = hanging.reply()
        assert (reply.status_code, reply.text) == (200, value)
        etags.append(reply.headers["ETag"])
    assert len(set(etags)) == 3


def test_the_same_value_ends_no_wait_and_touch_does(server: str) -> None:
    """Setting the current value changes nothing; ``touch`` makes a spurious response."""
    hanging = Hanging(server, PREEMPTED, last_etag=get(server, PREEMPTED).headers["ETag"])
    control(server, "set", key=PREEMPTED, value="FALSE")
    assert hanging.hangs
    control(server, "touch", key=PREEMPTED)
    assert hanging.reply().text == "FALSE"


def test_timeout_is_a_normal_response(server: str) -> None:
    """After ``timeout_sec`` the current value comes with 200 and its ETag."""
    etag = get(server, PREEMPTED).headers["ETag"]
    reply = get(server, PREEMPTED, wait_for_change="true", last_etag=etag, timeout_sec="1")
    assert (reply.status_code, reply.text, reply.headers["ETag"]) == (200, "FALSE", etag)


def test_waiting_parameters_count_in_the_query_only(server: str) -> None:
    """As headers they are ignored: the response is immediate."""
    etag = get(server, PREEMPTED).headers["ETag"]
    headers = {**GOOGLE, "wait_for_change": "true", "last_etag": etag}
    assert http("GET", server + BASE + PREEMPTED, headers=headers).text == "FALSE"


@pytest.mark.parametrize("key", ["instance/", "instance/service-accounts/default/token"])
def test_directories_and_tokens_cannot_be_waited_for(server: str, key: str) -> None:
    """400 for both; without a wait they return a value."""
    assert get(server, key, wait_for_change="true").status_code == 400
    assert get(server, key).status_code == 200


def test_recursive_watch_wakes_for_any_change_below(server: str) -> None:
    """A recursive request is JSON in camel case, waits for any key below, and contains no token."""
    whole = get(server, "instance/", recursive="true")
    assert whole.json()["maintenanceEvent"] == "NONE"
    assert "token" not in whole.json()["serviceAccounts"]["default"]
    etag = whole.headers["ETag"]
    hanging = Hanging(server, "instance/", recursive="true", last_etag=etag)
    control(server, "set", key="instance/scheduling/preemptible", value="FALSE")
    assert hanging.reply().json()["scheduling"]["preemptible"] == "FALSE"
    control(server, "set", key="instance/scheduling/preemptible", value="TRUE")


MAINTENANCE = "instance/maintenance-event"
TERMINATE = "TERMINATE_ON_HOST_MAINTENANCE"
TOKEN = "instance/service-accounts/default/token"


def test_only_a_watching_vm_is_warned_of_maintenance() -> None:
    """A VM gets the warning only if it has read the key since the last event."""
    with EmulatorProcess("testkit.emulators.gcp_metadata") as process:
        assert control(process.url, "maintenance", value=TERMINATE) == {"shown": False}
        assert get(process.url, MAINTENANCE).text == "NONE"
        assert control(process.url, "maintenance", value=TERMINATE) == {"shown": True}
        control(process.url, "maintenance", value="NONE")
        assert control(process.url, "maintenance", value=TERMINATE) == {"shown": False}
        assert get(process.url, MAINTENANCE).text == "NONE"


def test_a_token_is_cached_until_it_nearly_expires() -> None:
    """The same token is returned with a decreasing lifetime, then a new one."""
    with EmulatorProcess("testkit.emulators.gcp_metadata") as process:
        first, second = (get(process.url, TOKEN).json() for _ in range(2))
        assert first["access_token"] == second["access_token"]
        assert 3590 < second["expires_in"] <= first["expires_in"] <= 3599
        control(process.url, "token", life_s=600)
        assert get(process.url, TOKEN).json()["access_token"] != first["access_token"]
        assert asked(process.url, f"GET {BASE}{TOKEN}") == 3
