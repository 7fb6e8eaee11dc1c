# SPDX-License-Identifier: Apache-2.0
"""The inbox of the decision loop: in order, bounded, with priority over events from trainers."""

from __future__ import annotations

import threading

import pytest
from swansongd.core.events import NoticeRaised, Tick, TrainerProgress, WokeUp
from swansongd.service.inbox import Inbox

from testkit.story import a_notice
from testkit.waiting import until


def test_events_are_returned_in_the_order_of_arrival() -> None:
    inbox = Inbox()
    for number in range(10):
        inbox.put(TrainerProgress(1, number))
        inbox.put(WokeUp(number))
    found = [inbox.get(0.0) for _ in range(20)]
    assert [event for event in found if isinstance(event, WokeUp)] == [
        WokeUp(number) for number in range(10)
    ]
    assert [event.step for event in found if isinstance(event, TrainerProgress)] == list(range(10))
    assert inbox.get(0.0) is None


@pytest.mark.fault("S12")
def test_a_flood_of_messages_does_not_delay_a_notice() -> None:
    """Earlier messages of trainers are read after it."""
    inbox = Inbox()
    for number in range(5000):
        inbox.put(TrainerProgress(1, number))
    notice = NoticeRaised(a_notice(deadline_mono_s=1.0))
    inbox.put(notice)
    assert inbox.get(0.0) == notice
    assert inbox.get(0.0) == TrainerProgress(1, 0)


@pytest.mark.fault("H07")
def test_a_thread_that_posts_to_a_full_inbox_waits_for_room() -> None:
    """No event is lost, and the events of trainers take no room from the others."""
    inbox = Inbox(events_max=3)
    over = threading.Event()

    def flood() -> None:
        for number in range(100):
            inbox.put(TrainerProgress(1, number))
        over.set()

    threading.Thread(target=flood, daemon=True).start()
    until(lambda: len(inbox._of_trainers) == 3, what="a full inbox")
    other = threading.Thread(target=inbox.put, args=(Tick(),), daemon=True)
    other.start()
    other.join(60)
    assert not other.is_alive()
    assert inbox.get(0.0) == Tick()
    assert not over.is_set()
    for number in range(100):
        assert inbox.get(20.0) == TrainerProgress(1, number)
        assert len(inbox._of_trainers) <= 3
    assert over.wait(60)


@pytest.mark.fault("H07")
def test_the_decision_loop_posts_to_a_full_inbox() -> None:
    """Only the decision loop makes room, so its own posts never block."""
    inbox = Inbox(events_max=2)
    for number in range(10):
        inbox.put(WokeUp(number))
        inbox.put(TrainerProgress(1, number))
    assert inbox.get(0.0) == WokeUp(0)


def test_a_closed_inbox_blocks_no_thread() -> None:
    """The thread of the channel still has messages to post when the decision loop has ended."""
    inbox = Inbox(events_max=1)
    inbox.put(Tick())
    waiting = threading.Thread(target=inbox.put, args=(Tick(),), daemon=True)
    waiting.start()
    inbox.close()
    waiting.join(60)
    assert not waiting.is_alive()
