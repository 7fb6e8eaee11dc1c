# SPDX-License-Identifier: Apache-2.0
"""The notifications of transitions and of lasting conditions, and the condition of the heartbeat."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from swansong_bucket.model import DRILL, CommitRef, Health, NoticeKind, Severity
from swansongd.core.events import NoticeRaised, Tick, TrainerProgress
from swansongd.core.state import State
from swansongd.observe import notifications
from swansongd.observe.accounting import MeasuredResume, Milestones, Training
from swansongd.observe.all_well import GAP_S, Stretch, continued, why_silent
from swansongd.observe.conditions import Watch
from swansongd.observe.notifications import (
    Notification,
    NotificationKind,
    Origin,
    caused,
    fields,
    of_resume,
)
from swansongd.observe.observer import Observation
from swansongd.observe.status import STORE_HEALTH

from testkit.story import Story, a_notice

WALL_S = 1_800_000_000.0
STEP = 40


class Told(Story):
    """A story that collects the notifications of each event."""

    def __init__(self, **options: Any) -> None:
        self.found: list[Notification] = []
        super().__init__(**options)

    def observe(self, observation: Observation) -> None:
        super().observe(observation)
        before, after, _, actions, now_mono_s = observation
        self.found += caused(
            before, after, actions, step=STEP, now_mono_s=now_mono_s, wall_s=WALL_S
        )

    def shown(self) -> list[str]:
        return [f"{n.kind} {'over ' if n.is_over else ''}{n.verdict}".strip() for n in self.found]


def evacuated() -> Told:
    story = Told()
    story.join(step=40)
    story.notice(60)
    story.serve(40)
    return story


def test_an_evacuation_has_a_notice_and_a_verdict_of_one_group() -> None:
    story = evacuated()
    notice, verdict = story.found
    assert story.shown() == ["notice", "verdict over SAFE"]
    assert notice.group == verdict.group != ""
    assert notice.step == STEP
    assert (notice.seconds_left, notice.urgency, notice.source) == (60.0, "imminent", "aws.spot")
    assert (verdict.step, verdict.generation, verdict.importance) == (41, 2, "info")
    assert "will be terminated in 60 s" in notice.summary


def test_a_repeated_notice_and_a_further_commit_of_the_same_verdict_have_the_same_key() -> None:
    """A source repeats its notice with each poll; follow-up checkpoints repeat the verdict."""
    story = evacuated()
    story.tell(NoticeRaised(a_notice(deadline_mono_s=story.now + 50)))
    assert len(story.found) == 2
    story.commit(45)
    assert len({n.key for n in story.found}) == 2


def test_a_restarted_daemon_finds_the_same_keys() -> None:
    """Notice and evacuation id come from the file descriptor store, so the record knows both keys."""
    first = evacuated()
    (stored,) = first.state.notices.live.values()
    second = Told()
    second.now = first.now + 1
    second.join(step=42)
    second.tell(NoticeRaised(stored))
    second.serve(42)
    assert [n.key for n in second.found] == [n.key for n in first.found]


def test_a_notice_that_gets_more_urgent_is_told_again() -> None:
    story = Told()
    story.notice(900, severity=Severity.ADVISORY)
    story.notice(60, severity=Severity.IMMINENT)
    assert [n.urgency for n in story.found if not n.is_over] == ["advisory", "imminent"]
    assert len({n.key for n in story.found if not n.is_over}) == 2


def test_an_outlived_notice_is_over() -> None:
    story = evacuated()
    story.wait(80)
    assert story.shown()[-1] == "notice over"
    assert "outlived" in story.found[-1].reason


def test_a_notice_of_another_vm_is_its_own_to_report() -> None:
    """Otherwise each of many VMs would report the one notice and its verdict."""
    story = Told()
    story.join(step=40, nodes=2)
    story.notice(60, "peer")
    story.wait(70)
    assert story.verdicts
    assert story.found == []


def test_a_drill_is_named_in_its_notice_and_its_verdict() -> None:
    """An operator who is paged sees that the VM is not terminated."""
    story = Told()
    story.join(step=40)
    story.notice(60, DRILL)
    story.wait(70)
    notice, verdict = story.found[:2]
    assert notice.summary == "Drill: an evacuation is rehearsed, and this VM continues"
    assert verdict.summary.startswith("Verdict of a drill LOST")
    assert {notice.importance, verdict.importance} == {"info"}


def test_a_notice_without_training_ends_without_an_alarm() -> None:
    """Nothing was lost: the verdict is information, and the problem of the notice is over."""
    story = Told()
    story.notice(60)
    story.scan()
    story.wait(70)
    assert story.shown() == ["notice", "verdict over NO_TRAINING"]
    assert story.found[1].importance == "info"
    assert "no training was seen on this VM" in story.found[1].reason


def test_a_resumption_is_told_once_with_its_step() -> None:
    """The first VM of a job reports it for all."""
    measured = MeasuredResume(3, Milestones(start_step=120), Training())
    made = of_resume(measured, WALL_S)
    assert made is not None
    assert (made.kind, made.step, made.generation) == (NotificationKind.RESUMPTION, 120, 3)
    assert made.summary == "Training runs at step 120, as generation 3"
    assert of_resume(replace(measured, training=Training(node=1, nodes=2)), WALL_S) is None


def test_texts_of_trainers_are_short_and_printable() -> None:
    story = Told()
    notice = replace(a_notice(deadline_mono_s=story.now + 60), detail="\x1b[31m\n\0" + "a" * 10_000)
    story.tell(NoticeRaised(notice))
    (made,) = story.found
    assert made.reason.isprintable()
    assert len(made.reason) <= notifications.TEXT_CHARS_MAX


def test_fields_are_json_with_null_for_unknown_values() -> None:
    origin = Origin(run="run", vm="vm", host="host")
    facts = fields(origin, notifications.sample(WALL_S))
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    assert facts["step"] is facts["verdict"] is facts["seconds_left"] is None
    assert facts["time"] == "2027-01-15T08:00:00.000Z"
    other = fields(replace(origin, vm="another boot"), notifications.sample(WALL_S))
    assert other["id"] != facts["id"]


# ---------------------------------------------------------------- conditions


def seeing(health: Health) -> State:
    """A state in which the source ``aws.spot`` has this health."""
    story = Story()
    story.health("aws.spot", health)
    return story.state


def look(watch: Watch, state: State, *at_s: float) -> list[Notification]:
    return [
        made for s in at_s for made in watch.look(state, step=STEP, now_mono_s=s, wall_s=WALL_S + s)
    ]


def test_a_blind_source_is_told_after_it_lasts_and_when_it_is_over() -> None:
    watch = Watch(settle_s=15.0)
    state = seeing(Health.BLIND)
    assert look(watch, state, 0.0, 14.0) == []
    (begun,) = look(watch, state, 15.0, 16.0, 500.0)
    assert (begun.kind, begun.source, begun.is_over) == (NotificationKind.BLIND, "aws.spot", False)
    assert "a notice would be missed" in begun.summary
    half = seeing(Health.DEGRADED)
    assert look(watch, half, 500.0, 600.0) == []
    recovered = seeing(Health.OK)
    (over,) = look(watch, recovered, 601.0, 616.0, 700.0)
    assert over.is_over
    assert over.group == begun.group


def test_a_problem_that_flickers_is_not_told() -> None:
    watch = Watch(settle_s=15.0)
    bad = seeing(Health.BLIND)
    good = seeing(Health.OK)
    for at_s in range(0, 200, 10):
        assert look(watch, bad, at_s) + look(watch, good, at_s + 5) == []


def test_the_time_in_which_a_condition_is_unknown_does_not_count() -> None:
    watch = Watch(settle_s=15.0)
    bad = seeing(Health.BLIND)
    half = seeing(Health.DEGRADED)
    assert look(watch, bad, 0.0) + look(watch, half, 1.0, 100.0) + look(watch, bad, 101.0) == []
    assert len(look(watch, bad, 116.0)) == 1


def test_a_problem_that_outlasts_a_restart_is_neither_repeated_nor_forgotten() -> None:
    """The new daemon does not know the health of the source at first: nothing follows from that."""
    watch = Watch(settle_s=15.0, begun={"blind/aws.spot"})
    assert look(watch, Story().state, 0.0, 20.0) == []
    bad = seeing(Health.BLIND)
    assert look(watch, bad, 21.0, 60.0) == []
    good = seeing(Health.OK)
    assert [n.is_over for n in look(watch, good, 61.0, 80.0)] == [True]


def test_a_negative_margin_is_told_and_not_during_an_evacuation() -> None:
    story = Story(notice_kinds=(NoticeKind(source="gcp.preempted", grace_s=25.0),))
    story.join(step=40, save_s=100.0, save_bytes=10**9)
    story.state = replace(
        story.state, learned=replace(story.state.learned, bandwidth_bytes_per_s=1e8)
    )
    watch = Watch(settle_s=15.0)
    (begun,) = look(watch, story.state, 0.0, 15.0)
    assert (begun.kind, begun.source) == (NotificationKind.MARGIN, "gcp.preempted")
    assert "s late" in begun.summary
    story.notice(10)
    assert look(Watch(settle_s=15.0), story.state, 30.0, 90.0) == []


def test_what_a_restarted_daemon_has_not_measured_yet_ends_no_problem() -> None:
    """Neither a stall before a rank reports a step, nor a margin before a save is measured."""
    story = Story(notice_kinds=(NoticeKind(source="gcp.preempted", grace_s=25.0),))
    story.join(step=40)
    watch = Watch(settle_s=15.0, begun={"stall", "margin/gcp.preempted"})
    assert look(watch, story.state, 0.0, 60.0) == []


def test_metrics_that_are_not_served_are_told_with_the_reason() -> None:
    failure, watch = "a process of user 12004 listens at 127.0.0.1:9469", Watch(settle_s=15.0)
    facts: dict[str, Any] = {"step": STEP, "wall_s": WALL_S, "metrics_failure": failure}
    assert watch.look(Story().state, now_mono_s=0.0, **facts) == []
    (begun,) = watch.look(Story().state, now_mono_s=15.0, **facts)
    assert (begun.kind, begun.importance) == (NotificationKind.METRICS, "error")
    assert begun.reason == failure


def test_a_stall_is_told_with_its_ranks() -> None:
    story = Story()
    story.join(step=40)
    story.tell(TrainerProgress(1, STEP, step_s=0.1))
    story.wait(600)
    (begun,) = look(Watch(settle_s=15.0), story.state, story.now, story.now + 15.0)
    assert (begun.kind, begun.importance) == (NotificationKind.STALL, "error")
    assert begun.summary.endswith(f"since step {STEP}: rank 0")
    assert begun.step == STEP


# ---------------------------------------------------------------- the heartbeat


def silent(
    state: State,
    stretch: Stretch | None = None,
    *,
    now: float = 1000.0,
    decided: float | None = None,
    metrics_failure: str = "",
) -> str:
    return why_silent(
        state,
        stretch,
        decided_mono_s=now if decided is None else decided,
        now_mono_s=now,
        heartbeat_interval_s=300.0,
        metrics_failure=metrics_failure,
    )


def well() -> Story:
    story = Story()
    story.health(STORE_HEALTH, Health.OK)
    return story


def test_without_a_trainer_a_reachable_store_suffices() -> None:
    assert silent(well().state) == ""
    assert silent(Story().state) == "the store is not reached yet"


@pytest.mark.parametrize(
    ("source", "health", "reason"),
    [
        (STORE_HEALTH, Health.DEGRADED, "store: no answer"),
        ("aws.spot", Health.BLIND, "source aws.spot is blind"),
        ("aws.spot", Health.DEGRADED, ""),
    ],
)
def test_a_bad_health_silences_the_heartbeat(source: str, health: Health, reason: str) -> None:
    story = well()
    story.health(source, health)
    assert silent(story.state) == reason


def test_a_decision_loop_that_hangs_silences_the_heartbeat() -> None:
    """The thread of the heartbeat still runs then."""
    assert silent(well().state, now=1011.0, decided=1000.0) == "the decision loop hangs"


def test_metrics_that_are_not_served_silence_the_heartbeat() -> None:
    """Another process may answer the scrapes, so the silence is the only alarm."""
    assert silent(well().state, metrics_failure="x") == "the metrics are not served: x"


class Trained(Story):
    """A run with a checkpoint due each 200 s, whose heartbeat is examined at any time."""

    def __init__(self) -> None:
        self.stretch: Stretch | None = None
        super().__init__(checkpoint_interval_s=200.0)
        self.health(STORE_HEALTH, Health.OK)

    def observe(self, observation: Observation) -> None:
        super().observe(observation)
        self.stretch = continued(self.stretch, self.state, self.now)

    def train(self, *, takes_periodic: bool = True) -> None:
        """A trainer connects."""
        self.join(step=40, takes_periodic=takes_periodic)

    def crash(self, *, after_s: float) -> None:
        self.wait(after_s)
        self.leave()

    def commit(self) -> None:
        """A commit of an earlier set becomes whole."""
        last = self.state.commits.last_complete
        newest = CommitRef(1, 1 if last is None else last.step + 1)
        self.state = replace(self.state, commits=replace(self.state.commits, last_complete=newest))
        self.tell(Tick())

    def silent(self, *, after_s: float = 0.0) -> str:
        self.wait(after_s)
        return silent(self.state, self.stretch, now=self.now)


def test_training_without_a_commit_silences_the_heartbeat_after_three_intervals() -> None:
    story = Trained()
    story.train()
    assert story.silent(after_s=600) == ""
    assert story.silent(after_s=1) == "no commit for 601 s"
    own = Trained()
    own.train(takes_periodic=False)
    assert own.silent(after_s=10_000) == ""


def test_a_crash_loop_without_a_commit_silences_the_heartbeat() -> None:
    """Each start of the trainer is shorter than an interval; the heartbeat also stops between two starts."""
    story = Trained()
    found = []
    for _ in range(10):
        story.train()
        found.append(story.silent(after_s=90))
        story.crash(after_s=10)
        found.append(story.silent(after_s=20))
    assert found[:8] == [""] * 8
    assert all(reason.startswith("no commit for") for reason in found[11:])
    story.commit()
    assert story.silent() == ""
    story.train()
    assert story.silent(after_s=590) == ""


def test_a_trainer_that_ends_does_not_silence_the_heartbeat() -> None:
    """No commit is expected without a trainer, and the next trainer has the usual time."""
    story = Trained()
    story.train()
    story.crash(after_s=500)
    assert all(story.silent(after_s=100) == "" for _ in range(10))
    story.train()
    assert story.silent(after_s=590) == ""
    story.crash(after_s=100)
    assert story.silent().startswith("no commit for")
    assert story.silent(after_s=GAP_S + 1) == ""
