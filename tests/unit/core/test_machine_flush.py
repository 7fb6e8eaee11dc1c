# SPDX-License-Identifier: Apache-2.0
"""The flush during an evacuation: early shards, the measured bandwidth, and the plans that follow from it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from swansong_bucket.model import CheckpointId, CommitRef, Parent, Severity, Staged, StagedFile
from swansongd.core.events import (
    CancelFlush,
    CommitFailed,
    CommitManifest,
    Flushed,
    FlushFailed,
    FlushProgress,
    Rescan,
    StartBegun,
    StartFlush,
    TrainerFailed,
)
from swansongd.core.flight import EARLY_EVERY_S, RETRY_URGENT_S
from swansongd.core.planner import BANDWIDTH_MEMORY_S

from testkit.story import MIB, Story, a_set, joined, shards_of


def sends(story: Story, rate_bytes_per_s: float, seconds: float, *, every_s: float = 0.25) -> None:
    """The flush in flight sends at this rate for this time, and reports progress."""
    for _ in range(round(seconds / every_s)):
        story.now += every_s
        flight = story.flight
        sent = flight.bytes_sent + round(rate_bytes_per_s * every_s)
        story.tell(FlushProgress(flight.flush_id, flight.bytes_before + sent, sent))


def growing(story: Story, *sizes_bytes: int, step: int = 9, nonce: str = "emg") -> Staged:
    """The set that answers the request, with this number of final files."""
    whole = a_set(step, nonce, request_id=story.request_id)
    files = tuple(
        StagedFile(path=f"rank-00000/{n}.bin", size_bytes=size, mtime_ns=1, inode=n)
        for n, size in enumerate(sizes_bytes)
    )
    return replace(whole, directory=f"{whole.directory}.partial", files=files)


def asked(**facts: float) -> Story:
    """A trainer that saves for a request, without a final file so far."""
    story = Story(reserve_s=5)
    story.join(step=8, save_s=20.0, save_bytes=400 * MIB)
    story.notice(in_s=facts.get("in_s", 120.0))
    story.accept(8)
    return story


# ---------------------------------------------------------------------------- early shards


def test_final_files_are_sent_before_the_set_is_sealed() -> None:
    """The first file starts a flush, more files continue it, and the sealed set finishes it."""
    story = asked()
    one = growing(story, 100 * MIB)
    story.scan(growing=(one,))
    assert [(o.staged, o.is_sealed) for o in story.all(StartFlush)] == [(one, False)]
    story.tell(FlushProgress(story.flight.flush_id, 50 * MIB, 50 * MIB))
    two = growing(story, 100 * MIB, 200 * MIB)
    story.scan(growing=(two,))
    assert len(story.all(StartFlush)) == 1, "not for every file at once"
    story.tell(FlushProgress(story.flight.flush_id, 100 * MIB, 100 * MIB))
    assert [(o.staged, o.is_sealed) for o in story.all(StartFlush)][1:] == [(two, False)]
    assert story.flight.bytes_before == 100 * MIB
    story.wait(EARLY_EVERY_S)
    three = growing(story, 100 * MIB, 200 * MIB, MIB)
    story.scan(growing=(three,))
    assert story.last(StartFlush).staged == three
    sealed = story.answer(9)
    last = story.last(StartFlush)
    assert (last.staged, last.is_sealed) == (sealed, True)
    assert not story.all(CancelFlush), "that would cut short the parts in flight"
    story.store_all()
    assert story.verdicts == ["SAFE generation 2 step 9"]


def test_a_growing_set_that_is_ordered_again_shows_the_same_bandwidth() -> None:
    """Parts in flight continue.  Otherwise the bytes before the first progress of each order are missing."""
    story = asked()
    sizes: list[int] = []
    sent_bytes = 0
    for _ in range(10):
        sizes.append(20 * MIB)
        story.scan(growing=(growing(story, *sizes),))
        before_bytes = sent_bytes
        for _ in range(2):
            story.wait(0.3)
            story.wait(0.2)
            sent_bytes += 5 * MIB
            flight = story.flight
            story.tell(FlushProgress(flight.flush_id, sent_bytes, sent_bytes - before_bytes))
    assert len(story.all(StartFlush)) == 10
    assert story.state.learned.bandwidth_bytes_per_s == pytest.approx(10 * MIB, rel=0.3)


def test_an_unsealed_flush_never_leads_to_a_commit() -> None:
    """Even if the engine reported that everything is stored: only a sealed set counts."""
    story = asked()
    story.scan(growing=(growing(story, MIB),))
    story.tell(Flushed(story.flight.flush_id, ()))
    assert not story.state.commits.stored


def test_sealed_sets_that_fit_are_sent_first() -> None:
    """Early shards get the link only if no sealed set can be completed."""
    story = asked()
    story.seal(5)
    story.scan(growing=(growing(story, MIB),))
    assert story.flushes == [5]
    story.flushed(after_s=1)
    assert story.flushes == [5, 9]


def test_early_shards_replace_a_set_that_cannot_be_completed() -> None:
    """A sealed set that does not fit is replaced by the newer one that will."""
    story = Story(reserve_s=5)
    story.commit(3, after_s=1)  # 100 MiB/s
    story.seal(5)
    story.flushed(after_s=1)
    story.commit_fails(conflict=True)
    story.seal(4, size_bytes=20_000 * MIB)
    story.join(step=8, save_s=1.0)
    story.notice(in_s=60)
    story.accept(8)
    assert story.flight.staged.id.step == 4, "no other set could use the time better"
    story.scan(growing=(growing(story, MIB),))
    assert story.flight.staged.id.step == 9
    assert not story.flight.is_sealed


@pytest.mark.parametrize("spoil", ["another request", "no file", "a precaution", "failed"])
def test_only_the_answer_to_an_urgent_request_is_sent_early(spoil: str) -> None:
    """Every other set waits until it is sealed."""
    story = Story(reserve_s=5)
    story.join(step=8)
    story.notice(severity=Severity.ADVISORY if spoil == "a precaution" else Severity.IMMINENT)
    story.accept(8)
    part = growing(story, MIB)
    if spoil == "another request":
        part = replace(part, id=CheckpointId(7, "n"), request_id="")
    if spoil == "no file":
        part = replace(part, files=())
    if spoil == "failed":
        story.leave()
        story.now += 1
        story.scan()
    story.scan(growing=(part,))
    assert story.flushes == []


@pytest.mark.fault("T03")
@pytest.mark.parametrize("is_withdrawn", [False, True])
def test_a_torn_save_or_the_end_of_the_notice_ends_early_shards(*, is_withdrawn: bool) -> None:
    """Nothing more of the set is sent, and the remaining time is for the other sets."""
    story = asked()
    story.scan(growing=(growing(story, 100 * MIB),))
    started = story.flight
    if is_withdrawn:
        story.withdraw()
    else:
        story.scan()
    assert [order.flush_id for order in story.all(CancelFlush)] == [started.flush_id]
    assert story.state.flush.flight is None
    assert not story.state.flush.stored_bytes


@pytest.mark.fault("D03", "D09")
def test_a_growing_set_that_cannot_be_read_waits_for_its_seal() -> None:
    """Sealing renames the set, perhaps right now: a read error voids nothing."""
    story = asked()
    part = growing(story, 100 * MIB)
    story.scan(growing=(part,))
    story.tell(FlushFailed(story.flight.flush_id, "no such file", void=True))
    story.wait(RETRY_URGENT_S / 2)
    assert story.state.flush.flight is None, "it is not retried until it is sealed"
    story.answer(9)
    story.wait(RETRY_URGENT_S / 2)
    story.store_all()
    assert story.verdicts == ["SAFE generation 2 step 9"]


def test_staging_is_scanned_often_while_the_trainer_saves() -> None:
    """No event reports a final file: scans find it, from the target to the seal."""
    story = asked()
    before = len(story.all(Rescan))
    for _ in range(20):
        story.wait(0.1)
    assert 8 <= len(story.all(Rescan)) - before <= 12
    story.answer(9)
    before = len(story.all(Rescan))
    for _ in range(20):
        story.wait(0.1)
    assert len(story.all(Rescan)) == before


# ---------------------------------------------------------------------------- what is kept


@pytest.mark.fault("O03")
def test_stored_bytes_of_a_set_count_when_it_is_sent_again() -> None:
    """A set that was replaced when most of it was stored needs less time than its size suggests."""
    story = Story(reserve_s=5)
    story.commit(1, size_bytes=100 * MIB, after_s=1)  # 100 MiB/s
    story.seal(10, size_bytes=2000 * MIB)
    story.notice(in_s=45)
    sends(story, 100 * MIB, 15)
    story.seal(11, size_bytes=1000 * MIB)  # fits as well, and is newer
    assert story.flushes == [1, 10, 11]
    left = {c.id.step: c.bytes_left for c in story.state.candidates}
    assert left == {10: 500 * MIB, 11: 1000 * MIB}
    sends(story, 100 * MIB, 2)
    sends(story, 25 * MIB, 4)  # 700 MiB do not fit any more, 500 MiB do
    assert story.flushes == [1, 10, 11, 10]
    assert story.flight.bytes_before == 1500 * MIB


def test_stored_bytes_are_forgotten_with_their_set() -> None:
    """A daemon runs for months, and sets come and go."""
    story = Story(reserve_s=5)
    lost = story.seal(10)
    story.tell(FlushProgress(story.flight.flush_id, MIB, MIB))
    assert story.state.flush.stored_bytes == {lost.id: MIB}
    story.lose(lost)
    assert not story.state.flush.stored_bytes


# ---------------------------------------------------------------------------- bandwidth


def measured_at(rate_bytes_per_s: float, **facts: float) -> Story:
    """In the middle of a flush at that speed, during an evacuation."""
    story = Story(reserve_s=5)
    story.commit(1, after_s=100 * MIB / rate_bytes_per_s)
    story.seal(2, size_bytes=10_000 * MIB)
    story.notice(in_s=facts.get("in_s", 300.0))
    sends(story, rate_bytes_per_s, 5)
    assert story.state.learned.bandwidth_bytes_per_s == pytest.approx(rate_bytes_per_s, rel=0.1)
    return story


@pytest.mark.fault("O02", "O03")
def test_a_flush_without_progress_shows_by_ticks_alone() -> None:
    """Without progress no event arrives; ticks lower the estimate."""
    story = measured_at(100 * MIB)
    for _ in range(20):
        story.wait(0.1)
    assert story.state.learned.bandwidth_bytes_per_s is not None
    assert story.state.learned.bandwidth_bytes_per_s < 25 * MIB


def test_a_slow_start_does_not_lower_the_bandwidth() -> None:
    """Handshakes and first parts take time, which does not count against the store."""
    story = measured_at(100 * MIB)
    story.seal(3, size_bytes=1000 * MIB)
    assert story.flushes[-1] == 3
    before = story.state.learned.bandwidth_bytes_per_s
    for _ in range(9):
        story.wait(0.1)
    assert story.state.learned.bandwidth_bytes_per_s == before


def test_bytes_that_were_not_sent_are_not_measured() -> None:
    """A set that is stored already, or referenced, shows nothing about the link, nor does a small one."""
    story = Story()
    story.seal(1, size_bytes=10_000 * MIB)
    story.now += 0.1
    flight = story.flight
    story.tell(FlushProgress(flight.flush_id, 9_999 * MIB, 0))
    story.tell(Flushed(flight.flush_id, (), bytes_referenced=9_999 * MIB, bytes_sent=MIB))
    assert story.state.learned.bandwidth_bytes_per_s is None
    story = Story()
    story.seal(1, size_bytes=3 * MIB)
    sends(story, MIB, 2)
    assert story.state.learned.bandwidth_bytes_per_s is None


def test_the_background_limit_is_not_taken_for_the_bandwidth() -> None:
    """A flush at the limit only shows a lower bound; one far below the limit shows the store.

    The time of a flush that began before the notice includes time at the limit.
    """
    story = Story(background_limit_bytes_per_s=50 * MIB)
    story.seal(1, size_bytes=1000 * MIB)
    sends(story, 50 * MIB, 5)
    assert story.state.learned.bandwidth_bytes_per_s is None
    sends(story, 10 * MIB, 5)
    assert story.state.learned.bandwidth_bytes_per_s == pytest.approx(10 * MIB, rel=0.1)
    story.notice(in_s=100)
    sends(story, 200 * MIB, 4 * BANDWIDTH_MEMORY_S)
    sends(story, 50 * MIB, 4 * BANDWIDTH_MEMORY_S)  # a notice lifts the limit: it is the store
    assert story.state.learned.bandwidth_bytes_per_s == pytest.approx(50 * MIB, rel=0.1)
    sends(story, 200 * MIB, 4 * BANDWIDTH_MEMORY_S)
    assert story.state.learned.bandwidth_bytes_per_s == pytest.approx(200 * MIB, rel=0.1)
    story.flushed()
    assert story.state.learned.pace.send_s_per_byte is None


def test_a_short_drop_of_bandwidth_does_not_end_the_wait_for_the_trainer() -> None:
    """Two seconds without a break below the needed bandwidth end the wait for its checkpoint."""
    story = Story(reserve_s=5)
    story.commit(1, after_s=1)  # 100 MiB/s
    story.join(step=8, save_s=1.0)
    story.seal(2, size_bytes=2000 * MIB)
    story.notice(in_s=60)
    story.accept(8)
    sends(story, 100 * MIB, 1)
    sends(story, 0, 1.75)
    assert story.evacuation.request is not None
    assert story.evacuation.request.too_late_mono_s is not None
    sends(story, 100 * MIB, 3)
    assert story.evacuation.request is not None
    assert story.evacuation.request.is_waiting
    sends(story, 0, 8)
    assert not story.evacuation.request.is_waiting


@pytest.mark.fault("O03")
def test_two_sets_do_not_alternate() -> None:
    """A fluctuating bandwidth makes the flush change once, not with every fluctuation."""
    story = Story(reserve_s=5)
    story.commit(1, after_s=1)  # 100 MiB/s
    story.staging += [a_set(10, size_bytes=1000 * MIB), a_set(20, size_bytes=5000 * MIB)]
    story.notice(in_s=60)
    story.scan()
    for second in range(54):
        if story.state.flush.flight is None or story.flight.bytes_unsent == 0:
            break
        sends(story, (60 if second % 2 else 130) * MIB, 1)
    assert len(story.flushes) <= 4, story.flushes
    story.store_all()
    assert story.state.commits.last is not None
    assert story.state.commits.last >= CommitRef(2, 10)


# ---------------------------------------------------------------------------- deltas


def test_comparing_does_not_lower_the_measured_bandwidth() -> None:
    """Ten seconds pass while parts are compared and nothing is sent."""
    story = asked()
    story.seal(5)
    sends(story, 10 * MIB, 5)
    known = story.state.learned.bandwidth_bytes_per_s
    flight = story.flight
    for step in range(1, 41):
        story.now += 0.25
        story.tell(
            FlushProgress(
                flight.flush_id,
                flight.bytes_before + flight.bytes_sent,
                flight.bytes_sent,
                bytes_compared=step * MIB,
            )
        )
    assert story.state.learned.bandwidth_bytes_per_s == known
    story.wait(5)
    assert (story.state.learned.bandwidth_bytes_per_s or 0) < (known or 0) / 10, (
        "the link stands still"
    )


def test_a_short_flush_after_a_comparison_measures_only_the_sending() -> None:
    """Three seconds of comparing, then 20 MiB in half a second."""
    story = asked()
    staged = story.seal(5)
    flight = story.flight
    for step in range(1, 13):
        story.now += 0.25
        story.tell(FlushProgress(flight.flush_id, 0, 0, bytes_compared=step * MIB))
    referenced = staged.size_bytes - 20 * MIB
    story.now += 0.5
    story.tell(Flushed(flight.flush_id, shards_of(staged), bytes_referenced=referenced))
    assert story.state.learned.bandwidth_bytes_per_s == pytest.approx(40 * MIB)


def test_a_set_with_obsolete_references_is_flushed_again() -> None:
    """The store and the set are not to blame: no backoff, and the set is not void."""
    story = asked()
    story.seal(5)
    story.flushed(after_s=1)
    story.tell(
        CommitFailed(story.last(CommitManifest).flush_id, "obsolete", False, is_obsolete=True)
    )
    assert story.flushes == [5, 5]
    story.store_all(after_s=1)
    assert story.state.commits.last is not None
    assert story.state.commits.last.step == 5


def test_newer_sets_never_replace_the_answer_that_can_improve_a_verdict() -> None:
    """The notice was PARTIAL at first; training that continues would otherwise keep any flush from ending."""
    story = joined()
    story.starts(0)
    story.commit(10)
    story.notice(60)
    story.tell(TrainerFailed(1, story.request_id, "a rank hangs"))
    story.leave()
    assert story.conclude() == ["PARTIAL generation 2 step 10"]
    story.join(2, pid=200, start_id="b")
    story.starts(10, 2, start_id="b", parent=Parent("a", 10))
    story.accept(11, 2)
    story.answer(12, connection=2)
    story.tell(StartBegun(2, "b~1"))
    for step in (15, 18, 21):
        story.wait(1)
        story.seal(step, f"later{step}", start_id="b~1")
    assert story.flushes[-1] == 12
    story.store_all()
    assert story.verdicts[-1] == "SAFE generation 3 step 12"
