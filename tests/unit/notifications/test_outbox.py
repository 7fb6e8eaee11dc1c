# SPDX-License-Identifier: Apache-2.0
"""The outbox: its order, its bound, retries and the drain at the end of the daemon."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from swansongd.notifications.outbox import Outbox
from swansongd.observe.notifications import Notification, NotificationKind, sample

from testkit.staged import Clock


def made(
    name: str, kind: NotificationKind = NotificationKind.STALL, group: str = ""
) -> Notification:
    return replace(sample(0.0), key=name, group=group or name, kind=kind)


def put(outbox: Outbox, **kinds: NotificationKind) -> None:
    """Put a notification of each kind, in this order."""
    for name, kind in kinds.items():
        outbox.put(made(name, kind))


def taken(outbox: Outbox, count: int) -> list[str]:
    names = []
    for _ in range(count):
        names.append(outbox.take().notification.key)
        outbox.finish()
    return names


def test_urgent_notifications_overtake_the_others() -> None:
    outbox = Outbox()
    put(outbox, a=NotificationKind.STALL, b=NotificationKind.MARGIN, v=NotificationKind.VERDICT)
    assert taken(outbox, 3) == ["v", "a", "b"]


@pytest.mark.fault("W03")
def test_a_full_outbox_drops_the_oldest_one_that_is_not_urgent_and_counts_it() -> None:
    outbox = Outbox(3)
    put(outbox, n=NotificationKind.NOTICE, a=NotificationKind.STALL, b=NotificationKind.STALL)
    outbox.put(made("c"))
    assert outbox.status().dropped == 1
    assert taken(outbox, 3) == ["n", "b", "c"]
    for number in range(5):
        outbox.put(made(f"v{number}", NotificationKind.VERDICT))
    assert taken(outbox, 3) == ["v2", "v3", "v4"]
    assert (outbox.status().dropped, outbox.status().queued) == (3, 0)


def test_a_retry_waits_while_other_notifications_are_sent() -> None:
    clock = Clock(0.0)
    outbox = Outbox(monotonic=clock)
    outbox.put(made("a"))
    outbox.take()
    outbox.retry(10.0, "HTTP 503")
    assert outbox.status().last_error == "HTTP 503"
    outbox.put(made("b"))
    assert taken(outbox, 1) == ["b"]
    clock.now_s = 10.0
    entry = outbox.take()
    assert (entry.notification.key, entry.attempts) == ("a", 2)


def test_a_retry_keeps_the_order_of_its_group() -> None:
    """A problem whose start arrives after its end would stay open.  A new message ends a pause."""
    clock = Clock(0.0)
    outbox = Outbox(monotonic=clock)
    outbox.put(made("begin", group="g"))
    outbox.take()
    outbox.retry(60.0, "HTTP 503")
    outbox.put(made("end", group="g"))
    assert outbox.take().notification.key == "begin"
    outbox.retry(60.0, "HTTP 503")
    outbox.put(made("other"))
    assert taken(outbox, 1) == ["other"]
    clock.now_s = 60.0
    assert taken(outbox, 2) == ["begin", "end"]


def test_the_drain_keeps_the_order_of_a_group() -> None:
    outbox = Outbox()
    for name in ("begin", "end"):
        outbox.put(made(name, NotificationKind.VERDICT, group="g"))
    assert outbox.take().notification.key == "begin"
    outbox.retry(60.0, "HTTP 503")
    outbox.begin_drain()
    assert outbox.take().notification.key == "begin"
    outbox.retry(60.0, "HTTP 503")
    assert taken(outbox, 1) == ["end"]


def test_the_drain_attempts_urgent_ones_at_once_and_returns_in_time() -> None:
    """A retry that is due in a minute is attempted now, once."""
    outbox = Outbox()
    outbox.put(made("v", NotificationKind.VERDICT))
    outbox.take()
    outbox.retry(60.0, "HTTP 503")
    attempted: list[str] = []

    def work() -> None:
        attempted.append(outbox.take().notification.key)
        outbox.retry(60.0, "HTTP 503")

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    assert outbox.drain(10.0)
    worker.join(60)
    assert attempted == ["v"]
    assert (outbox.status().failed, outbox.status().queued) == (1, 0)
