# SPDX-License-Identifier: Apache-2.0
"""GPUs: a failed one ends requests for checkpoints, and makes later sets unhealthy."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from swansong import bounds
from swansong.protocol import Request, Withdrawn
from swansong_bucket.model import (
    GPU_IS_SOUND,
    CommitRef,
    GpuHealth,
    Parent,
    Severity,
    is_healthy,
)
from swansongd.core import arrival, machine
from swansongd.core.events import (
    CommitManifest,
    Conclude,
    Log,
    Mark,
    NoticeRaised,
    RunRead,
    Scanned,
    SignalSent,
    SignalTrainer,
)
from swansongd.core.gpus import KNOWN_MAX, SOURCE
from swansongd.core.planner import choose
from swansongd.core.staged_sets import marked
from swansongd.core.state import StartState

from testkit.story import Story, a_set, joined

DYING_S = 600.0
SPOT_S = 120.0


def trained(**facts: object) -> Story:
    """Training with a committed step 3, which has reached step 5."""
    story = Story(**facts)  # type: ignore[arg-type]
    story.join(step=3, start_id="first")
    story.commit(3, start_id="first")
    story.progress(5)
    story.read_gpus(GpuHealth.OK, GpuHealth.OK)
    return story


def suspect(health: GpuHealth = GpuHealth.DYING) -> Story:
    """Training at step 5, one of whose GPUs has failed."""
    story = trained()
    story.read_gpus(health, GpuHealth.OK)
    return story


def with_late_set() -> Story:
    """Step 4 was sealed before a GPU failed, and step 5 after it; neither is committed."""
    story = trained()
    story.seal(4, start_id="first")
    story.read_gpus(GpuHealth.DYING, GpuHealth.OK)
    story.seal(5, "late", start_id="first")
    return story


def plans(story: Story) -> list[object]:
    """The plan of each evacuation."""
    return [dict(mark.facts).get("plan") for mark in story.all(Mark) if mark.phase == "notice"]


@pytest.mark.fault("X01")
@pytest.mark.parametrize("health", [GpuHealth.DYING, GpuHealth.LOST])
def test_a_failed_gpu_flushes_what_is_sealed_and_asks_for_nothing(health: GpuHealth) -> None:
    """The verdict does not count the steps that only the trainer has."""
    story = trained()
    story.seal(4, start_id="first")
    story.read_gpus(GpuHealth.OK, health)
    story.notice(DYING_S, SOURCE)
    assert plans(story) == ["FLUSH"]
    story.store_all()
    assert story.conclude() == ["PARTIAL generation 2 step 4"]
    assert not story.all(Request)


@pytest.mark.fault("X01")
def test_the_verdict_is_safe_if_no_step_is_lost() -> None:
    """Training accepted the request at the step of a sound commit, before the failure was read."""
    story = joined(step=3, start_id="first")
    story.seal(3, start_id="first")
    story.read_gpus(GpuHealth.OK)
    story.notice(SPOT_S)
    story.accept(3)
    story.read_gpus(GpuHealth.DYING)
    story.store_all()
    assert story.conclude() == ["SAFE generation 2 step 3"]


@pytest.mark.fault("X01")
@pytest.mark.parametrize(("pending", "verdict"), [((), "SAFE"), (("checkpoint-4",), "PARTIAL")])
def test_nothing_is_safe_while_a_set_of_suspect_training_settles(
    pending: tuple[str, ...], verdict: str
) -> None:
    """The set that answered the signal is sound; the next VM would resume from the one after it."""
    story = Story(signals_trainer=True)
    story.process("process-a")
    story.read_gpus(GpuHealth.OK)
    story.notice(SPOT_S)
    story.tell(SignalSent(story.last(SignalTrainer).request_id, 900))
    story.seal(3, framework="transformers", written_ns=2)
    story.flushed()
    story.read_gpus(GpuHealth.DYING)
    story.tell(Scanned(story.now, tuple(story.staging), pending=pending))
    story.committed()
    story.wait(SPOT_S)
    assert story.verdicts == [f"{verdict} generation 2 step 3"]


@pytest.mark.fault("X01")
def test_the_verdict_does_not_rise_when_the_trainer_dies() -> None:
    """Its steps stay lost.  Most processes end soon after their GPU has failed."""
    story = suspect(GpuHealth.LOST)
    story.notice(DYING_S, SOURCE)
    story.scan()
    story.wait(1)
    story.leave(exited=True)
    story.scan()
    story.wait(1)
    assert story.verdicts == ["PARTIAL generation 2 step 3"]


@pytest.mark.fault("X01")
def test_a_commit_from_after_the_failure_is_not_safe() -> None:
    """The next VM would resume from a state that may be wrong: the verdict names the sound commit."""
    story = suspect()
    story.commit(5, start_id="first")
    story.notice(SPOT_S)
    assert story.conclude() == ["PARTIAL generation 2 step 5"]
    assert "generation 2 step 3 is the newest sound one" in story.last(Conclude).reason


@pytest.mark.fault("X01")
def test_the_sound_set_is_sent_before_the_doubtful_one() -> None:
    """The time may suffice for one of them only."""
    story = with_late_set()
    found = {each.id.step: each.is_sound for each in story.state.candidates}
    assert found == {4: True, 5: False}
    chosen = choose(story.state.candidates, left_s=1000.0, bandwidth_bytes_per_s=None)
    assert chosen is not None
    assert chosen.id.step == 4


def test_suspect_training_that_reconnects_during_a_request_is_not_asked() -> None:
    """A rank of another start was asked first; the request is not passed on to the suspect one."""
    story = suspect()
    (first,) = story.state.connected
    story.leave(first.connection, exited=False)
    story.join(5, rank=1, ranks=2, pid=70, start_id="other")
    story.notice(SPOT_S)
    story.join(6, ranks=2, pid=first.pid, start_id="first")
    assert {sent.connections for sent in story.sent(Request)} == {(5,)}


@pytest.mark.fault("X01")
def test_a_request_in_progress_ends_when_a_gpu_fails() -> None:
    """Ranks that wait are released, and the set does not lead to SAFE."""
    story = trained()
    story.notice(SPOT_S)
    request_id = story.request_id
    story.read_gpus(GpuHealth.DYING, GpuHealth.OK)
    assert story.last(Withdrawn).request_id == request_id
    answered = story.answer(6)
    story.store_all()
    story.wait(1)
    assert answered.id in story.state.staging.suspect
    assert all(verdict.startswith("PARTIAL") for verdict in story.verdicts)
    assert len(story.all(Request)) == 1


def test_a_rebuilt_state_recognises_the_same_suspect_sets() -> None:
    """Its next scan is a first scan, and the record of this life takes the place of the earlier one."""
    story = with_late_set()
    suspect = story.state.staging.suspect
    assert len(suspect) == 1
    story.state = machine.rebuilt(story.state)
    assert not story.state.staging.staged
    story.scan()
    assert story.state.staging.suspect == suspect


def test_adopted_sets_are_suspect_while_a_gpu_has_failed() -> None:
    """The process that wrote them is not known."""
    story = Story()
    story.read_gpus(GpuHealth.LOST)
    story.seal(4, framework="adopted")
    story.read_gpus(GpuHealth.OK)
    story.seal(5, "b", framework="adopted")
    marks = {s.id.step: s.health.get(GPU_IS_SOUND) for s in story.state.staging.staged}
    assert marks == {4: 0.0, 5: None}


def test_sets_of_the_first_scan_are_not_suspect() -> None:
    """They predate the daemon, which saw no failure then."""
    story = Story(claimed=False)
    story.read_gpus(GpuHealth.LOST)
    story.seal(4, framework="adopted")
    assert not story.state.staging.suspect


@pytest.mark.parametrize("health", [GpuHealth.LOST, GpuHealth.OK])
def test_no_signal_is_sent_to_an_unknown_process_while_a_gpu_has_failed(health: GpuHealth) -> None:
    """Its GPUs may include the failed one."""
    story = Story(signals_trainer=True)
    story.read_gpus(health)
    story.notice(SPOT_S)
    assert bool(story.all(SignalTrainer)) is (health is GpuHealth.OK)


def test_changes_are_logged_once() -> None:
    """Xid counts alone change no health."""
    story = trained()
    for _ in range(3):
        story.read_gpus(GpuHealth.DEGRADED, GpuHealth.OK)
    story.read_gpus(GpuHealth.OK, GpuHealth.OK)
    lines = [dict(line.facts) for line in story.all(Log) if line.event == "gpu_health"]
    assert [line["health"] for line in lines] == ["degraded", "ok"]


def test_the_report_lists_the_gpus() -> None:
    """One entry for each GPU."""
    story = trained()
    story.read_gpus(GpuHealth.LOST)
    story.now += 5
    (gpu,) = story.status.gpus
    assert (gpu.index, gpu.health, gpu.xids) == (0, "lost", {"dying": 1})


def test_the_mark_fits_into_a_manifest() -> None:
    """A set with as many metrics as allowed gets the mark, and keeps its loss."""
    metrics = {f"a{number:03}": 1.0 for number in range(98)}
    health = {**metrics, "loss": 1.0, "loss_is_finite": 1.0}
    found = marked(replace(a_set(3), health=health)).health
    assert bounds.metrics(dict(found), "health") == found
    assert {"loss", "loss_is_finite", GPU_IS_SOUND} <= found.keys()


@pytest.mark.fault("X01")
def test_after_a_restart_a_milder_notice_does_not_end_the_evacuation() -> None:
    """The stored notice stays imminent: the Xid is not known any more, and NVML shows a row to replace."""
    story = suspect()
    story = story.restarted()
    story.notice(DYING_S, SOURCE)
    story.join(step=5, start_id="first")
    story.notice(3600, SOURCE, severity=Severity.ADVISORY)
    story.scan()
    story.wait(1)
    assert not story.evacuation.is_precaution
    assert not story.all(Request)


@pytest.mark.fault("X09")
def test_a_restart_confuses_no_sets() -> None:
    """Sets from before the failure stay sound, and those from after it stay in doubt."""
    story = with_late_set()
    story.staging.append(a_set(6, "gap", start_id="first"))
    after = story.restarted(claimed=False).restarted()
    found = {staged.id.step: is_healthy(staged.health) for staged in after.state.staging.staged}
    assert found == {3: None, 4: None, 5: False, 6: False}


@pytest.mark.fault("X09")
def test_a_restarted_daemon_trusts_a_set_that_it_found_before_a_failure() -> None:
    """Only a set from the time without a daemon may have been sealed after the failure."""
    after = trained().restarted()
    after.join(step=5, start_id="first")
    after.read_gpus(GpuHealth.OK, GpuHealth.OK)
    after.seal(6, start_id="first")
    after.read_gpus(GpuHealth.LOST, GpuHealth.OK)
    assert not after.state.staging.suspect


@pytest.mark.fault("X09")
@pytest.mark.parametrize("is_retried", [True, False])
def test_a_doubtful_commit_whose_reply_was_lost_stays_doubtful(is_retried: bool) -> None:
    """The next life of the daemon reads it from the bucket, and a later start has loaded it.

    With ``is_retried``, the manifest of a later set is ordered and never written.
    """
    story = suspect()
    story.seal(5, start_id="first")
    story.flushed()
    order = story.last(CommitManifest)
    written = CommitRef(order.generation, 5)
    story.commit_fails()
    if is_retried:
        story.wait(30)
        story.committed()
        story.seal(6, start_id="first")
        story.flushed()
    after = story.restarted(claimed=False).restarted(newest=written)
    after.leave(exited=True)
    after.join(2, step=-1, pid=2, start_id="second")
    after.starts(5, 2, start_id="second", parent=Parent("first", 5))
    after.notice(SPOT_S)
    after.accept(5, 2)
    after.wait(1)
    assert not after.verdicts
    after.wait(SPOT_S)
    assert after.verdicts == ["PARTIAL generation 2 step 5"]


@pytest.mark.fault("X09")
def test_a_doubtful_commit_stays_doubtful_although_its_claim_is_not_known() -> None:
    """The record of the claims is lost, and the start that sealed it gets no generation again."""
    story = suspect()
    story.commit(5, start_id="first")
    after = story.restarted(claimed=False)
    after.state = replace(after.state, starts=StartState())
    after.scan()
    after.tell(RunRead(story.state.commits.last_complete, "first"))
    after.join(2, step=-1, pid=2, start_id="second")
    after.starts(5, 2, start_id="second", parent=Parent("first", 5))
    after.notice(SPOT_S)
    after.accept(5, 2)
    assert after.conclude() == ["PARTIAL generation 2 step 5"]


@pytest.mark.fault("X09")
@pytest.mark.parametrize("reconnects", [True, False])
def test_the_verdict_counts_the_steps_of_training_that_runs_on(reconnects: bool) -> None:
    """Suspect training is not awaited, because it is not asked: its steps are unknown until it reports."""
    story = suspect()
    after = story.restarted()
    after.notice(DYING_S, SOURCE)
    after.scan()
    after.wait(1)
    assert after.verdicts == ["PARTIAL generation 2 step 3"]
    if reconnects:
        after.join(step=5, start_id="first")
        after.progress(5)
    after.wait(2 * arrival.RECONNECT_S)
    after.scan()
    after.wait(1)
    assert after.verdicts == ["PARTIAL generation 2 step 3"]
    assert not after.all(Request)


@pytest.mark.fault("X09")
def test_no_signal_is_sent_after_a_restart() -> None:
    """The process has the same start for the next daemon; another process got working GPUs."""
    story = Story(signals_trainer=True)
    story.process("process-a")
    story.read_gpus(GpuHealth.LOST)
    for start_id in ("process-a", "process-b"):
        after = story.restarted()
        after.process(start_id)
        after.notice(SPOT_S)
        after.wait(1)
        assert bool(after.all(SignalTrainer)) is (start_id == "process-b")


@pytest.mark.parametrize(("name", "is_asked"), [("first", False), ("second", True)])
def test_a_rank_is_not_asked_before_its_start_is_known(name: str, *, is_asked: bool) -> None:
    """After a restart a rank of suspect training may connect next to a late process of another start."""
    after = suspect().restarted()
    after.join(7, pid=7, rank=1, ranks=2, start_id="late")
    after.join(1, rank=1, ranks=2, start_id="")
    after.notice(SPOT_S)
    assert not after.all(Request)
    after.leave(7)
    after.join(2, pid=102, ranks=2, start_id=name)
    assert bool(after.all(Request)) is is_asked


def test_a_new_start_of_the_same_process_stays_suspect() -> None:
    """After a rollback it still uses the failed GPU, also if it began without a daemon."""
    story = suspect()
    story.starts(3, start_id="first~1")
    after = story.restarted()
    after.join(2, step=3, start_id="first~2")
    for each in (story, after):
        each.notice(SPOT_S)
        assert not each.all(Request)


EVENTS = (
    "trainer starts",
    "trainer ends",
    "connection ends",
    "GPU fails",
    "restart",
    "restart, GPU fails",
    "GPU recovers",
)


def test_a_process_of_an_earlier_job_without_a_connection_stays_suspect() -> None:
    """The next job has another number of ranks.  The earlier process seals a set after the failure."""
    story = trained()
    story.leave(exited=False)
    for rank in range(2):
        story.join(2 + rank, rank=rank, ranks=2, pid=200 + rank, start_id="second")
    story.read_gpus(GpuHealth.LOST, GpuHealth.OK)
    late = story.seal(6, "late", start_id="first")
    assert late.id in story.state.staging.suspect


@pytest.mark.fault("X01", "X09")
@given(st.lists(st.sampled_from(EVENTS), max_size=12))
@settings(max_examples=60)
@example(["trainer starts", "GPU fails", "GPU recovers"])
@example(["trainer starts", "GPU fails", "trainer ends", "trainer starts"])
@example(["trainer starts", "GPU fails", "restart", "restart"])
@example(["trainer starts", "restart", "GPU fails"])
@example(["trainer starts", "restart, GPU fails"])
@example(["trainer starts", "connection ends", "restart, GPU fails"])
def test_only_starts_after_the_last_failure_are_asked(events: list[str]) -> None:
    """For any sequence of failures, resets, restarts of the daemon and starts of the training."""
    story = Story()
    story.read_gpus(GpuHealth.OK)
    start, used_failed_gpu = 0, False
    for number, event in enumerate(events, 1):
        if "restart" in event:
            story = story.restarted()
        if "fails" in event:
            story.read_gpus(GpuHealth.OK)
            story.read_gpus(GpuHealth.LOST)
            used_failed_gpu = True
        if event == "GPU recovers":
            story.read_gpus(GpuHealth.OK)
        if event.startswith("trainer"):
            story.leave(start)
            start, used_failed_gpu = number * (event == "trainer starts"), False
        if event == "connection ends":
            story.leave(start, exited=False)
        elif start and (event == "trainer starts" or "restart" in event):
            story.join(start, pid=start, step=5, start_id=f"start-{start}")
    if start and not story.state.connected:
        story.join(start, pid=start, step=5, start_id=f"start-{start}")
    story.notice(SPOT_S)
    assert bool(story.all(Request)) is (start > 0 and not used_failed_gpu)


@pytest.mark.parametrize("scans_first", [True, False])
def test_a_set_of_the_time_without_a_daemon_is_doubtful_in_any_order(scans_first: bool) -> None:
    """The first scan may come before the kernel log with the failure is read, or after it."""
    before = trained()
    before.staging.append(a_set(6, "gap", start_id="first"))
    story = before.restarted(claimed=False)
    if scans_first:
        story.scan()
        story.read_gpus(GpuHealth.DYING, GpuHealth.OK)
    else:
        story.read_gpus(GpuHealth.DYING, GpuHealth.OK)
        story.scan()
    found = {staged.id.step: is_healthy(staged.health) for staged in story.state.staging.staged}
    assert found == {3: None, 6: False}


@pytest.mark.parametrize("is_stored", [True, False])
def test_a_set_that_is_sent_when_the_failure_is_read_is_marked(is_stored: bool) -> None:
    """Its manifest is written later, and carries the mark."""
    before = trained()
    before.staging.append(a_set(6, "gap", start_id="first"))
    story = before.restarted()
    assert story.flushes == [6]
    if is_stored:
        story.state = replace(
            story.state, flush=replace(story.state.flush, retry_mono_s=story.now + 5)
        )  # the manifest waits
        story.flushed()
    story.read_gpus(GpuHealth.DYING, GpuHealth.OK)
    if not is_stored:
        story.flushed()
    story.wait(10)
    assert is_healthy(story.last(CommitManifest).staged.health) is False


def test_the_list_of_suspect_starts_is_bounded() -> None:
    """Any number of processes can fail one after the other; those that run now stay suspect."""
    story = Story()
    for number in range(2 * KNOWN_MAX):
        story.leave(number)
        story.join(number + 1, pid=number + 1, start_id=f"start-{number}")
        story.read_gpus(GpuHealth.OK)
        story.read_gpus(GpuHealth.LOST)
    starts = story.state.gpus.suspect_starts
    assert len(starts) == KNOWN_MAX
    assert f"start-{2 * KNOWN_MAX - 1}" in starts


@pytest.mark.fault("X09")
def test_a_restarted_daemon_repeats_safe_for_no_commit_of_suspect_training() -> None:
    """Its GPU fails after the verdict; the next VM would resume what the training has sealed since."""
    story = trained()
    story.notice(SPOT_S)
    story.serve(5)
    assert story.verdicts == ["SAFE generation 2 step 6"]
    (live,) = story.state.notices.live.values()
    after = story.restarted()
    after.tell(NoticeRaised(live))
    after.read_gpus(GpuHealth.LOST, GpuHealth.OK)
    after.commit(12, "late", start_id="first")
    after.join(step=9, start_id="first")
    assert after.conclude()[-1] == "PARTIAL generation 2 step 12"
