# SPDX-License-Identifier: Apache-2.0
"""Runs a source in a thread, as the service does, and sends orders to an emulator."""

from __future__ import annotations

import threading
import time
from typing import Any, Self

import pytest
import requests
from swansong_bucket.model import Health, Notice, SourceStatus
from swansongd.core.events import Event, NoticeRaised, NoticeWithdrawn, SourceChanged
from swansongd.sources.source import Source

from testkit.waiting import until


class SourceRun:
    """Runs ``source`` until the end of the block, and records its events."""

    def __init__(self, source: Source) -> None:
        self.events: list[Event] = []
        self.began_mono_s = 0.0
        self.stop = threading.Event()
        self.thread = threading.Thread(
            target=source.run, args=(self.events.append, self.stop), daemon=True
        )

    @property
    def notices(self) -> list[Notice]:
        return [event.notice for event in self.events if isinstance(event, NoticeRaised)]

    @property
    def withdrawals(self) -> list[NoticeWithdrawn]:
        return [event for event in self.events if isinstance(event, NoticeWithdrawn)]

    @property
    def statuses(self) -> list[SourceStatus]:
        return [event.status for event in self.events if isinstance(event, SourceChanged)]

    def is_now(self, health: Health) -> bool:
        return bool(self.statuses) and self.statuses[-1].health is health

    def await_health(self, health: Health, words: str = "") -> None:
        """Wait until this is the health, with these words in its reason."""

        def is_so() -> bool:
            return self.is_now(health) and words in self.statuses[-1].reason

        until(is_so, what=f"{health} {words}; {self.statuses}")

    def await_notice(self, number: int = 1) -> Notice:
        """Wait for the notice with this number, counted from 1; it must be the newest one."""
        until(lambda: len(self.notices) >= number, what=f"notice {number}")
        assert len(self.notices) == number
        return self.notices[-1]

    def await_withdrawal(self, number: int = 1) -> NoticeWithdrawn:
        """Wait for the withdrawal with this number, counted from 1; it must be the newest one."""
        until(lambda: len(self.withdrawals) >= number, what=f"withdrawal {number}")
        assert len(self.withdrawals) == number
        return self.withdrawals[-1]

    def leaves(self, seconds: float) -> bool:
        """Whether the deadline is this long after the newest notice was seen, between the start and now."""
        deadline_mono_s = self.notices[-1].deadline_mono_s
        return self.began_mono_s + seconds <= deadline_mono_s <= time.monotonic() + seconds

    def __enter__(self) -> Self:
        self.began_mono_s = time.monotonic()
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join(60)
        assert not self.thread.is_alive(), "the source did not stop"


def http(method: str, url: str, **options: Any) -> requests.Response:
    """One HTTP exchange that ignores proxy variables of the test."""
    with requests.Session() as session:
        session.trust_env = False
        return session.request(method, url, allow_redirects=False, **{"timeout": 20, **options})


def set_proxies(monkeypatch: pytest.MonkeyPatch, url: str, *more: str) -> None:
    """Set all proxy variables to this URL, and these variables too."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", *more):
        monkeypatch.setenv(name, url)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)


def control(url: str, order: str, **body: object) -> Any:
    """Send an order to an emulator."""
    reply = http("POST", f"{url}/_control/{order}", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def polls(url: str, request: str, more: int = 3) -> None:
    """Wait until the source has sent this many further requests."""
    goal = asked(url, request) + more
    until(lambda: asked(url, request) >= goal, what=f"{more} more of {request}")


def woken(url: str, key: str, more: int = 2) -> None:
    """Wait until a source of GCP has sent this many further requests; responses without a change end them."""
    request = f"GET /computeMetadata/v1/{key}"
    goal = asked(url, request) + more
    until(
        lambda: control(url, "touch", key=key) or asked(url, request) >= goal,
        what=f"{more} more of {request}",
    )


def asked(url: str, request: str, outcome: str = "total") -> int:
    """The number of requests ``"GET /path"`` that an emulator counted, or of requests with some outcome."""
    counts = http("GET", f"{url}/_control/requests").json()
    return int(counts.get(request, {}).get(outcome, 0))
