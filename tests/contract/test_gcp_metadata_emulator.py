# SPDX-License-Identifier: Apache-2.0
"""The emulated metadata server of Compute Engine behaves as the real one is documented to."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest
import requests
from emulators.process import EmulatorProcess
from source_run import asked, control, http
from waiting import until

BASE = "/computeMetadata/v1/"
PREEMPTED = "instance/preempted"
GOOGLE = {"Metadata-Flavor": "Google"}


@pytest.fixture(scope="module")
def process() -> Iterator[EmulatorProcess]:
    with EmulatorProcess("emulators.gcp_metadata", "--port", "0") as process:
        yield process


@pytest.fixture
def server(process: EmulatorProcess) -> str:
    control(process.url, "clear")
    control(process.url, "set", key=PREEMPTED, value="FALSE")
    return process.url


def get(url: str, key: str, **query: str) -> requests.Response:
    return http("GET", url + BASE + key, headers=GOOGLE, params=query)


class Hanging:
    """A request that is on its way in a thread of its own, known to have reached the server."""

    def __init__(self, url: str, key: str, **query: str) -> None:
        self._replies: queue.Queue[requests.Response | None] = queue.Queue()
        name = f"GET {BASE}{key}"
        before = asked(url, name)

        def ask() -> None:
            try:
                self._replies.put(get(url, key, wait_for_change="true", **query))
            except requests.ConnectionError:
                self._replies.put(None)

        self._thread = threading.Thread(target=ask, daemon=True)
        self._thread.start()
        until(lambda: asked(url, name) > before, what="the request to arrive")

    def reply(self) -> requests.Response:
        reply = self.end()
        assert reply is not None, "the server hung up"
        return reply

    def end(self) -> requests.Response | None:
        reply = self._replies.get(timeout=20)
        self._thread.join(20)
        return reply

    @property
    def hangs(self) -> bool:
        return self._replies.empty()


def test_flavor_header_is_demanded_and_repeated(server: str) -> None:
    """Without the header 403, with another value 404, forwarded 403; every answer repeats it."""
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


def test_other_etag_is_answered_at_once(server: str) -> None:
    """An ETag that is not the present one, ``0`` above all, gets the present value without waiting."""
    for etag in ("0", "NONE", "0123456789abcdef"):
        reply = get(server, PREEMPTED, wait_for_change="true", last_etag=etag)
        assert (reply.status_code, reply.text) == (200, "FALSE")


def test_hangs_although_true_without_etag(server: str) -> None:
    """Without ``last_etag`` the request waits for the next change, even if the value is TRUE by now."""
    control(server, "set", key=PREEMPTED, value="TRUE")
    hanging = Hanging(server, PREEMPTED)
    control(server, "set", key="instance/maintenance-event", value="NONE")
    control(server, "touch", key="instance/name")
    assert hanging.hangs
    control(server, "set", key=PREEMPTED, value="FALSE")
    assert hanging.reply().text == "FALSE"


def test_change_wakes_with_value_and_etag(server: str) -> None:
    """A change answers 200 with the new value and a new ETag; a value that returns has a third one."""
    etags = [get(server, PREEMPTED).headers["ETag"]]
    for value in ("TRUE", "FALSE"):
        hanging = Hanging(server, PREEMPTED, last_etag=etags[-1])
        assert hanging.hangs
        control(server, "set", key=PREEMPTED, value=value)
        reply = hanging.reply()
        assert (reply.status_code, reply.text) == (200, value)
        etags.append(reply.headers["ETag"])
    assert len(set(etags)) == 3


def test_same_value_wakes_nobody_and_touch_does(server: str) -> None:
    """Setting the value that is there changes nothing; ``touch`` makes a spurious wake-up."""
    hanging = Hanging(server, PREEMPTED, last_etag=get(server, PREEMPTED).headers["ETag"])
    control(server, "set", key=PREEMPTED, value="FALSE")
    assert hanging.hangs
    control(server, "touch", key=PREEMPTED)
    assert hanging.reply().text == "FALSE"


def test_timeout_is_a_normal_answer(server: str) -> None:
    """After ``timeout_sec`` the present value comes with 200 and the ETag that it had."""
    etag = get(server, PREEMPTED).headers["ETag"]
    reply = get(server, PREEMPTED, wait_for_change="true", last_etag=etag, timeout_sec="1")
    assert (reply.status_code, reply.text, reply.headers["ETag"]) == (200, "FALSE", etag)


def test_waiting_parameters_count_in_the_query_only(server: str) -> None:
    """As headers they are ignored: the answer comes at once."""
    etag = get(server, PREEMPTED).headers["ETag"]
    headers = {**GOOGLE, "wait_for_change": "true", "last_etag": etag}
    assert http("GET", server + BASE + PREEMPTED, headers=headers).text == "FALSE"


@pytest.mark.parametrize("key", ["instance/", "instance/service-accounts/default/token"])
def test_directories_and_tokens_cannot_be_waited_for(server: str, key: str) -> None:
    """400 for both; without waiting they are answered."""
    assert get(server, key, wait_for_change="true").status_code == 400
    assert get(server, key).status_code == 200


def test_recursive_watch_wakes_for_any_change_below(server: str) -> None:
    """A recursive request is JSON in camel case, waits for any key below, and shows no token."""
    whole = get(server, "instance/", recursive="true")
    assert whole.json()["maintenanceEvent"] == "NONE"
    assert "token" not in whole.json()["serviceAccounts"]["default"]
    etag = whole.headers["ETag"]
    hanging = Hanging(server, "instance/", recursive="true", last_etag=etag)
    control(server, "set", key="instance/scheduling/preemptible", value="FALSE")
    assert hanging.reply().json()["scheduling"]["preemptible"] == "FALSE"
    control(server, "set", key="instance/scheduling/preemptible", value="TRUE")


def test_directories_list_and_redirect(server: str) -> None:
    """A directory lists its entries; without the slash at its end it redirects to itself with one."""
    assert "preempted\n" in get(server, "instance/").text
    assert "scheduling/\n" in get(server, "instance/").text
    reply = get(server, "instance")
    assert (reply.status_code, reply.headers["Location"]) == (301, BASE + "instance/")


def test_absent_keys(server: str) -> None:
    """The stop state is 404 until it is set, and again after it is taken away."""
    key = "instance/shutdown-details/stop-state"
    assert get(server, key).status_code == 404
    control(server, "set", key=key, value="PENDING_STOP")
    assert get(server, key).text == "PENDING_STOP"
    control(server, "set", key=key, value=None)
    assert get(server, key).status_code == 404


def test_idle_values(server: str) -> None:
    """The keys that may announce something are idle, the facts are those of a Spot VM with a GPU."""
    assert get(server, "instance/maintenance-event").text == "NONE"
    assert get(server, "instance/upcoming-maintenance").text == "NONE"
    assert get(server, "instance/scheduling/preemptible").text == "TRUE"
    assert get(server, "instance/scheduling/on-host-maintenance").text == "TERMINATE"
    assert get(server, "instance/service-accounts/default/token").json()["token_type"] == "Bearer"


def test_dead_answers_nothing(server: str) -> None:
    """Once dead nothing is answered, not even who hangs already; until it is brought back."""
    hanging = Hanging(server, PREEMPTED, last_etag=get(server, PREEMPTED).headers["ETag"])
    control(server, "dead", after_s=0)
    control(server, "set", key=PREEMPTED, value="TRUE")
    until(
        lambda: asked(server, f"GET {BASE}{PREEMPTED}", "hang"), what="the answer to be held back"
    )
    assert hanging.hangs
    with pytest.raises(requests.ReadTimeout):
        http("GET", server + BASE + PREEMPTED, headers=GOOGLE, timeout=0.2)
    control(server, "dead", after_s=None)
    assert hanging.end() is None
    assert get(server, PREEMPTED).text == "TRUE"
