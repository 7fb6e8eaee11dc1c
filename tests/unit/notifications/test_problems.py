# SPDX-License-Identifier: Apache-2.0
"""A receiver such as PagerDuty shows open problems from the messages that it got."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from typing import Any

from hypothesis import event as label
from hypothesis import given
from hypothesis import strategies as st
from swansong_bucket.model import DRILL, Notice, Severity, Verdict
from swansongd.config.notify import NotifyConfig
from swansongd.core.events import NoticeRaised, TrainerJoined
from swansongd.core.transition import HOST_SOURCE
from swansongd.notifications.notifier import Notifier
from swansongd.notifications.sent import SentNotifications, record_file
from swansongd.notifications.webhook import AT_ONCE
from swansongd.observe.notifications import DRILLS, NOTICES, Notification
from swansongd.observe.observer import Observation

from testkit.story import Story

RECEIVERS: dict[str, Any] = {"webhook_url": "http://127.0.0.1:9", "exec": ("/bin/true",)}


class Watched(Story):
    """A daemon with a receiver.  Each message arrives at once, unless the receiver is away."""

    def __init__(self, own_fd: int, **options: Any) -> None:
        self.own_fd = own_fd
        self.shows: dict[str, bool] = {}
        """Groups, and whether each is open."""
        self.got: list[Notification] = []
        self.start_notifier()
        super().__init__(**options)

    def start_notifier(self, kinds: tuple[str, ...] = NotifyConfig().kinds) -> None:
        self.record = SentNotifications(record_file(self.own_fd), boot_id="boot")
        config = NotifyConfig(**RECEIVERS, kinds=kinds)
        self.notifier = Notifier(config, run="run", vm="vm", record=self.record, settle_s=0.0)

    def observe(self, observation: Observation) -> None:
        super().observe(observation)
        self.notifier.observe(observation)
        self.deliver()

    def deliver(self) -> None:
        sender = self.notifier._webhook
        assert sender is not None
        while sender.outbox.status().queued:
            made = sender.outbox.take().notification
            self.got.append(made)
            self.shows[made.group] = not made.is_over
            self.record.add(f"webhook {made.key}")
            sender.outbox.finish()

    def look(self) -> None:
        """The thread that looks once a second."""
        self.notifier._look_once()
        self.deliver()

    def restart(self, *, keeps_notices: bool = True) -> None:
        """The next daemon gets the starts and the notices, and the ranks connect again."""
        self.look()
        kept = self.state.notices.in_force
        earlier = self.state
        after = self.restarted()
        self.state, self.now = after.state, after.now
        self.start_notifier()
        for trainer in earlier.connected:
            self.tell(TrainerJoined(trainer))
        for notice in kept if keeps_notices else []:
            self.tell(NoticeRaised(notice))

    def save(self, step: int) -> None:
        """The trainer answers the request of the evacuation."""
        self.serve(step, f"n{step}")
        self.wait(0.1)

    @property
    def in_force(self) -> list[Notice]:
        """Notices of this VM, without drills."""
        return [n for n in self.state.notices.in_force if n.source != DRILL]

    @property
    def is_answered(self) -> bool:
        """Whether SAFE answers one of the most urgent notices."""
        evacuation = self.state.evacuation
        if evacuation is None or evacuation.verdict is not Verdict.SAFE:
            return False
        urgency = max(notice.severity for notice in self.in_force)
        answered = [n for n in self.in_force if n.identity in evacuation.identities]
        return urgency in [notice.severity for notice in answered]


def trained(own_fd: int) -> Watched:
    story = Watched(own_fd)
    story.join(step=40)
    return story


def test_the_shutdown_of_the_host_after_safe_opens_no_problem(own_fd: int) -> None:
    """It is reported, and is over from the beginning."""
    story = trained(own_fd)
    story.notice(100)
    story.save(40)
    story.notice(60, HOST_SOURCE, severity=Severity.SHUTTING_DOWN)
    assert (story.got[-1].urgency, story.got[-1].is_over) == ("shutting_down", True)
    assert story.shows == {NOTICES: False}


def test_a_verdict_that_falls_and_rises_again_is_told_each_time(own_fd: int) -> None:
    """Over a restart of the daemon, SAFE may become PARTIAL, and SAFE again."""
    story = trained(own_fd)
    story.notice(100)
    story.save(40)
    made = story.got[-1]
    assert (made.verdict, story.shows) == ("SAFE", {NOTICES: False})
    story.look()
    story.start_notifier()
    for verdict, is_over, opens in (("PARTIAL", False, True), ("SAFE", True, False)):
        key = made.key.replace("SAFE", verdict)
        changed = replace(made, key=key, is_over=is_over, verdict=verdict, summary=verdict)
        for _ in range(2):  # the second one is a repetition
            story.notifier._put(changed)
            story.deliver()
        assert story.shows == {NOTICES: opens}
    assert [n.verdict for n in story.got] == ["", "SAFE", "PARTIAL", "SAFE"]
    assert len({n.key for n in story.got}) == 4, "a receiver may ignore an id that it knows"


def test_a_restart_after_safe_tells_nothing(own_fd: int) -> None:
    story = trained(own_fd)
    story.notice(100)
    story.save(40)
    told = len(story.got)
    story.restart()
    assert story.in_force
    assert len(story.got) == told


def test_a_missed_end_runs_no_command(own_fd: int) -> None:
    """The command is for what begins: it might order another VM for the end of a notice or a drill."""
    story = trained(own_fd)
    story.notice(100)
    story.notice(100, DRILL)
    story.restart(keeps_notices=False)
    story.look()
    assert story.shows == {NOTICES: False, DRILLS: False}
    assert story.notifier._command is not None
    assert story.notifier._command.outbox.status().queued == 0


def test_a_flood_of_notices_leaves_no_problem_open(own_fd: int) -> None:
    """The rate drops messages of any kind, and never the end of a problem that the receiver knows."""
    story = trained(own_fd)
    for number in range(3 * AT_ONCE):
        story.notice(300, severity=Severity.ADVISORY, identity=f"i{number}")
        story.withdraw()
    story.notice(300, severity=Severity.ADVISORY, identity="last")
    story.withdraw()
    assert story.notifier.status().limited
    assert story.shows == {NOTICES: False}


def test_the_end_of_an_unwanted_kind_still_ends_the_problem(own_fd: int) -> None:
    """Of ``kinds = ["verdict"]``: PARTIAL is told, and then the end of its notice."""
    story = trained(own_fd)
    story.start_notifier(kinds=("verdict",))
    story.notice(30)
    story.wait(31)
    assert [n.verdict for n in story.got] == ["LOST"]
    assert story.shows == {NOTICES: True}
    story.withdraw()
    assert story.shows == {NOTICES: False}


def test_the_end_of_an_unwanted_condition_is_not_told_after_a_restart(own_fd: int) -> None:
    """Its start was not told either."""
    SentNotifications(record_file(own_fd), boot_id="boot").set_begun(
        frozenset({"stall", "blind/store", NOTICES})
    )
    story = Watched(own_fd)
    story.start_notifier(kinds=("blind", "verdict"))
    sender = story.notifier._webhook
    assert sender is not None
    assert sender.open == {"blind/store", NOTICES}


def test_a_drill_is_a_problem_of_its_own(own_fd: int) -> None:
    """SAFE on a drill does not end the problem of a real notice, which joins the drill's evacuation."""
    story = trained(own_fd)
    story.notice(100, DRILL)
    assert story.shows == {DRILLS: True}
    story.notice(90, "aws.spot")
    story.save(40)
    verdict = story.got[-1]
    assert (verdict.verdict, verdict.group, verdict.source) == ("SAFE", NOTICES, "aws.spot")
    story.withdraw(DRILL)
    assert story.shows == {NOTICES: False, DRILLS: False}


SOURCES = st.sampled_from(["aws.spot", "aws.rebalance", "gcp.preempted", HOST_SOURCE, DRILL])
STEPS = st.one_of(
    st.tuples(st.just("notice"), SOURCES, st.sampled_from(list(Severity))),
    st.tuples(st.just("withdraw"), SOURCES),
    st.tuples(st.sampled_from(["save", "wait", "restart"])),
)


@given(st.lists(STEPS, max_size=12))
def test_the_receiver_shows_a_problem_as_long_as_a_notice_needs_an_answer(
    steps: list[tuple[Any, ...]],
) -> None:
    """After any history: from a notice, or a verdict that falls, until SAFE or the end of all notices."""
    with tempfile.TemporaryDirectory() as directory:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            _follow(trained(fd), steps)
        finally:
            os.close(fd)


def _follow(story: Watched, steps: list[tuple[Any, ...]]) -> None:
    saved, needs, raised = 40, False, set[tuple[str, Severity]]()
    for step in steps:
        told = len(story.got)
        match step:
            case ("notice", source, severity):
                story.notice(600, source, severity=severity)
            case ("withdraw", source):
                story.withdraw(source)
            case ("wait",):
                story.wait(100)
            case ("restart",):
                story.restart()
            case _:
                saved += 10
                story.progress(saved)
                if story.state.evacuation is not None and story.state.evacuation.request:
                    story.save(saved)
        live = {(n.identity, n.severity) for n in story.in_force}
        has_fallen = any(
            n.verdict not in ("", "SAFE") and n.group == NOTICES for n in story.got[told:]
        )
        needs = (
            bool(live) and not story.is_answered and (needs or has_fallen or bool(live - raised))
        )
        raised = live
        label(f"needs an answer: {needs}")
        story.look()
        assert story.shows.get(NOTICES, False) == needs
