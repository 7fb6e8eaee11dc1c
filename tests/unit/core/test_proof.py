# SPDX-License-Identifier: Apache-2.0
"""SAFE is proved from the position of the training and the newest whole commit: one history for each rule.

``tests/unit/core/test_no_false_safe.py`` has the longer histories.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from swansong_bucket.model import CommitRef, GpuHealth, Parent, Start, Verdict
from swansongd.core.events import (
    CommitDone,
    CommitFailed,
    CommitManifest,
    CommitSkipped,
    Conclude,
    FenceFound,
    GenerationClaimed,
    NoticeRaised,
    Rescan,
    RestoreAsked,
    RolledBack,
    RunRead,
    SignalSent,
    SignalTrainer,
    StartBegun,
    TrainerFailed,
)
from swansongd.core.transition import HOST_SOURCE

from testkit.story import Story, a_set, joined

pytestmark = pytest.mark.fault("T09", "T17")

NEWEST = CommitRef(1, 448)
"""The newest commit of the run when the VM starts, of the start ``earlier``."""


def committed(step: int = 448, *, ranks: int = 1) -> Story:
    """Start ``a`` has trained from scratch, and its set of step 448 is committed; it is at ``step``."""
    story = Story()
    for rank in range(ranks):
        story.join(rank + 1, rank=rank, ranks=ranks, start_id="" if rank else "a")
        story.starts(0, rank + 1)
    story.commit(448)
    for rank in range(ranks):
        story.progress(step, rank + 1)
    return story


def resumed(step: int, parent: Parent | None = None) -> Story:
    """The VM has a new start, which has loaded ``parent`` and is at ``step``."""
    story = Story(newest=NEWEST)
    story.join()
    story.starts(step if parent is None else parent.step, parent=parent)
    story.progress(step)
    return story


def not_claimed() -> Story:
    """The restore unit has fetched the newest commit, and the claim gets no answer: another VM may commit."""
    story = Story(newest=NEWEST)
    story.grants = False
    story.join()
    story.starts(448, parent=NEWEST_IS_LOADED)
    return refused(story, 448)


def refused(story: Story, *steps: int, fails: bool = True, first: int = 1) -> Story:
    """Ranks accept each request at these steps, and no checkpoint comes; ``first`` is a connection."""
    story.notice(60)
    for _ in range(60):
        evacuation = story.state.evacuation
        if evacuation and evacuation.request and evacuation.request.is_waiting:
            for connection, step in enumerate(steps, start=first):
                story.accept(step, connection)
            if fails:
                story.tell(TrainerFailed(1, story.request_id, "disk full"))
        story.scan()
        story.wait(1)
    return story


def answered() -> Story:
    story = committed(460)
    story.notice(60)
    story.serve(460)
    return story


def left(step: int, *, is_goodbye: bool) -> Story:
    story = committed(step)
    story.leave(is_goodbye=is_goodbye)
    story.notice(60)
    return story


def attaches_again() -> Story:
    """Over several VMs, rank 0 gives its start to any process with the rank."""
    story = committed()
    story.leave(is_goodbye=True)
    story.join(2, start_id="a")
    story.notice(60)
    story.tell(TrainerFailed(2, story.request_id, "disk full"))
    return story


def disconnected() -> Story:
    story = committed()
    story.leave(exited=False)
    story.notice(60)
    return story


def one_rank_hangs() -> Story:
    return refused(committed(ranks=4), 448, 448, 448, fails=False)


def one_rank_never_came() -> Story:
    """The launcher started three of four ranks."""
    story = Story(newest=NEWEST)
    for rank in range(3):
        story.join(rank + 1, rank=rank, ranks=4, start_id="" if rank else "a")
        story.starts(448, rank + 1, parent=Parent("earlier", 448))
    return refused(story, 448, 448, 448, fails=False)


def rank_0_never_came() -> Story:
    story = Story(newest=NEWEST)
    story.join(rank=1, ranks=2, start_id="")
    return refused(story, 448)


def one_rank_says_goodbye() -> Story:
    story = committed(ranks=2)
    story.progress(449, 2)
    story.leave(2, is_goodbye=True)
    return refused(story, 448)


def restoring(
    *,
    is_sealed: bool = False,
    fails: bool = False,
    skips: bool = False,
    skips_another: bool = False,
) -> Story:
    """A start waits for its checkpoint; with ``is_sealed``, that is a set which the store has not got yet.

    With ``fails`` it cannot load the checkpoint, and may load another one by itself.
    With ``skips`` the daemon has found the newest commit damaged.
    With ``skips_another`` it has found a later one, which no daemon has written.
    """
    story = committed()
    if is_sealed:
        story.seal(455, "late")
    story.leave()
    story.join(2, pid=200, start_id="b")
    story.tell(RestoreAsked("b"))
    if skips:
        newest = story.state.commits.last_complete
        assert newest is not None
        story.tell(CommitSkipped(newest))
        story.tell(CommitSkipped(replace(newest, step=newest.step - 1)))
    if skips_another:
        story.tell(CommitSkipped(CommitRef(99_999_999, 1)))
    if fails:
        story.tell(StartBegun(2, "b"))
    story.notice(60)
    story.accept(-1, 2)
    story.tell(TrainerFailed(2, story.request_id, "restoring"))
    return story


def restoring_a_set_of_another_boot() -> Story:
    """Another VM has claimed since, so the set is not committed; the start loads it all the same."""
    late = a_set(455, "late", start_id="earlier")
    boot_before = Start(id="earlier", generation=1, is_of_boot=False, is_open=False)
    story = Story(newest=NEWEST, generation=3, staged=[late], recorded=[boot_before])
    story.join()
    story.tell(RestoreAsked("a"))
    story.notice(60)
    story.accept(-1)
    return story


def loaded_after_the_request() -> Story:
    """The rank accepted while it waited for its checkpoint, which it has loaded since."""
    story = restoring(is_sealed=True)
    story.starts(455, 2, start_id="b", parent=Parent("a", 455))
    story.store_all()
    return story


def sealed_unseen() -> Story:
    """The training has sealed a set since the last scan.  It starts again, and loads that set."""
    story = committed()
    story.staging.append(a_set(455, "late"))
    story.wait(1)
    story.leave()
    story.join(2, pid=200, start_id="b")
    story.tell(RestoreAsked("b"))
    story.notice(60)
    story.accept(-1, 2)
    assert not story.verdicts, "the set will be committed"
    story.tell(TrainerFailed(2, story.request_id, "restoring"))
    return story


def sealed_by_an_unknown_process() -> Story:
    """Its set was sealed after the last scan, and it ended before it could reconnect to the daemon."""
    before = committed()
    story = before.restarted()
    story.notice(60)
    story.scan()
    story.wait(1)
    story.staging.append(a_set(455, "late"))
    assert Rescan() in story.join(2, pid=200, start_id="b")
    story.starts(448, 2, start_id="b", parent=Parent("a", 448))
    story.accept(448, 2)
    story.tell(TrainerFailed(2, story.request_id, "disk full"))
    assert not story.verdicts, "the set will be committed"
    return story


def loads_an_older_state() -> Story:
    """A set is not committed yet, and the training starts again from the checkpoint before it."""
    story = committed()
    story.seal(460, "late")
    story.leave()
    story.join(2, pid=200, start_id="b")
    story.starts(448, 2, start_id="b", parent=Parent("a", 448))
    refused(story, 448, fails=False, first=2)
    story.store_all()
    return story


def commit_is_obsolete() -> Story:
    """The store broke off.  When it answers again, the chunks are too old; then the training rolls back."""
    story = committed()
    story.seal(460, "late")
    story.flushed()
    story.commit_fails()
    story.wait(20)
    flush_id = story.last(CommitManifest).flush_id
    story.tell(CommitFailed(flush_id, "old chunks", conflict=False, is_obsolete=True))
    story.tell(StartBegun(1, "a~1"))
    story.tell(RolledBack(448))
    story.starts(448, start_id="a~1", parent=Parent("a", 448))
    return refused(story, 448)


def suspect_manifest_without_an_answer() -> Story:
    """After SAFE a GPU fails.  The manifest of the next set may exist when the one before is confirmed."""
    story = answered()
    story.seal(465, "sound")
    story.flushed()
    sound = story.last(CommitManifest)
    story.read_gpus(GpuHealth.LOST)
    story.seal(470, "late")
    story.flushed()
    story.commit_fails()
    story.tell(CommitDone(sound.flush_id, CommitRef(sound.generation, 465)))
    return story


def ends(*, is_final: bool) -> Story:
    """Both ranks have ended, with or without the end of the run.  Rank 1 of another launch is connected."""
    story = committed(ranks=2)
    if is_final:
        story.commit(448, "end", is_final=True)
    for connection in (1, 2):
        story.leave(connection, is_goodbye=True)
    story.join(3, rank=1, ranks=2, pid=300, step=500, start_id="")
    story.notice(60)
    assert story.evacuation.request is not None, "it may train"
    return story


def notebook(*, is_answered: bool = False) -> Story:
    """While the training is not connected, a script loads its checkpoint, and ends."""
    story = committed()
    story.leave(exited=False)
    story.join(2, pid=200, start_id="b")
    story.starts(448, 2, start_id="b", parent=Parent("a", 448))
    story.leave(2, is_goodbye=True)
    story.join(3, pid=100, step=480)
    if is_answered:
        story.notice(60)
        story.serve(480, connection=3)
    return story if is_answered else refused(story, 480, first=3)


def beside_an_earlier_process() -> Story:
    """The next start has loaded the checkpoint, and the process before it still trains from there."""
    story = committed()
    story.join(2, pid=200, start_id="b")
    story.starts(448, 2, start_id="b", parent=Parent("a", 448))
    return refused(story, 448, first=2)


def beside_another_job(*, ends: bool) -> Story:
    """The process before, of a job with fewer ranks, has no connection when the next start loads its set."""
    story = committed()
    story.leave(exited=False)
    for rank in range(2):
        connection = 2 + rank
        story.join(connection, rank=rank, ranks=2, pid=200 + rank, start_id="b")
        story.starts(448, connection, start_id="b", parent=Parent("a", 448))
    if ends:
        story.leave()
    return refused(story, 448, 448, first=2)


def record_is_lost() -> Story:
    """The daemon starts without its claim record.  The newest commit shows that the earlier start is over."""
    loaded = a_set(448, "loaded", start_id="earlier", written_ns=9)
    story = Story(claimed=False, generation=3, staged=[loaded])
    story.grants = False
    story.scan()
    story.tell(RunRead(NEWEST, "earlier"))
    story.join()
    story.grants = True
    story.tell(FenceFound(2, start_id="earlier"))
    story.starts(448, parent=NEWEST_IS_LOADED)
    return refused(story, 448)


def commit_is_unknown() -> Story:
    """The manifest of a later set may exist: the store broke off.  The next start loads the one before."""
    story = committed()
    story.seal(460, "late")
    story.flushed()
    story.leave()
    story.join(2, pid=200, start_id="b")
    story.commit_fails()
    story.starts(448, 2, start_id="b", parent=Parent("a", 448))
    return refused(story, 448, fails=False, first=2)


def final() -> Story:
    story = committed()
    story.seal(460, "end", is_final=True)
    story.leave()
    story.store_all()
    story.notice(60)
    return story


def trains_past_its_end(*, is_connected: bool = True) -> Story:
    story = committed()
    story.commit(460, "end", is_final=True)
    if is_connected:
        story.progress(470)
    else:
        story.leave(exited=False)
    story.notice(60)
    return story


def loads_by_itself() -> Story:
    """The script does not query a checkpoint, and has not reported yet what it loads."""
    story = Story(newest=NEWEST)
    story.join()
    return refused(story, -1)


def answers_twice() -> Story:
    """The first request failed and was repeated.  Both sets come, and the second one is never stored."""
    story = committed(460)
    story.notice(60)
    story.accept(460)
    first = story.request_id
    story.tell(TrainerFailed(1, first, "a rank hangs"))
    story.wait(1)
    assert story.request_id != first
    story.seal(461, "late", request_id=first)
    story.flushed()
    story.accept(464)
    story.answer(465)
    story.committed()
    return story


def process(*, is_asked: bool = True, answers: bool = True, begins_again: bool = False) -> Story:
    """A trainer without hooks, which may seal a set after its signal, and may be started again then."""
    story = Story(signals_trainer=is_asked)
    story.process("process-a")
    story.commit(448, framework="checkpoint-n", written_ns=2)
    story.notice(60)
    if is_asked:
        story.tell(SignalSent(story.last(SignalTrainer).request_id, 900))
    if answers:
        story.now += 2
        story.seal(461, framework="checkpoint-n", written_ns=3)
    if begins_again:
        story.process("process-b", 901)
    if answers:
        story.store_all()
    return story


def answered_and_started_again(*, from_step: int) -> Story:
    story = committed(460)
    story.notice(60)
    story.accept(460)
    story.answer(461)
    story.leave(is_goodbye=True)
    story.join(2, pid=200, start_id="b")
    story.starts(from_step, 2, start_id="b", parent=Parent("a", from_step))
    return story


def begins_again_after_its_answer() -> Story:
    """The script exits after its checkpoint, and systemd starts it again before the set is committed."""
    story = answered_and_started_again(from_step=461)
    story.store_all()
    return story


def goes_back_after_its_answer(*, answers: bool = False) -> Story:
    """The next start loads an older state, and has sealed a set when the answer is committed."""
    story = answered_and_started_again(from_step=448)
    story.seal(450, "older", start_id="b", written_ns=9)
    story.flushed()
    story.committed()
    if answers:
        story.serve(450, "newer", connection=2)
    return story


def rolls_back_after_its_answer() -> Story:
    """The same processes go back while the answer is committed, too late for another request."""
    story = committed(460)
    story.notice(60)
    story.accept(460)
    story.answer(461)
    story.flushed()
    story.wait(59)
    story.tell(StartBegun(1, "a~1"))
    story.tell(RolledBack(448))
    story.starts(448, start_id="a~1", parent=Parent("a", 448))
    story.committed()
    return story


def answered_before_a_restart(*, reconnects: bool) -> Story:
    """The set is sealed; then the daemon is killed, and perhaps the trainer as well."""
    story = committed(460)
    raised = story.notice(60)
    story.accept(460)
    story.answer(461)
    after = story.restarted(claimed=False)
    after.tell(NoticeRaised(story.state.notices.live[raised.source]))
    after.scan()
    after.tell(RunRead(story.state.commits.last_complete, "a"))
    if reconnects:
        after.join(step=470)
    after.store_all()
    return after


def the_lowest_rank_came_last() -> Story:
    """The notice came before rank 0, so the request names no start."""
    story = Story(newest=NEWEST)
    story.join(2, rank=1, ranks=2, start_id="")
    story.notice(60)
    story.join(1, rank=0, ranks=2)
    for connection in (1, 2):
        story.starts(448, connection, parent=Parent("earlier", 448))
        story.accept(448, connection)
    story.tell(TrainerFailed(1, story.request_id, "disk full"))
    return story


def gpu_failed() -> Story:
    """The answer is sealed by training that used a GPU which has failed meanwhile."""
    story = committed(460)
    story.notice(60)
    story.accept(460)
    story.read_gpus(GpuHealth.LOST)
    story.seal(461, "late")
    story.leave(is_goodbye=True)
    story.store_all()
    return story


def seals_after_its_gpu_failed() -> Story:
    """A sound set of the position is committed, and a later one of the same start waits."""
    story = committed()
    story.read_gpus(GpuHealth.OK)
    story.seal(460, "sound")
    story.notice(60)
    story.accept(460)
    story.read_gpus(GpuHealth.LOST)
    story.seal(462, "suspect")
    story.flushed()
    story.committed()
    return story


def loses_a_suspect_set() -> Story:
    """As before, but the reply to the manifest of the later set is lost, and the set is gone."""
    story = seals_after_its_gpu_failed()
    story.flushed()
    story.commit_fails()
    story.lose(story.staging[-1])
    return story


def fenced() -> Story:
    story = Story(newest=NEWEST)
    story.join(nodes=2, ranks=1)
    story.tell(FenceFound(9))
    story.notice(60)
    return story


def nothing_trained(*, has_commit: bool) -> Story:
    story = Story(newest=NEWEST if has_commit else None)
    story.notice(60)
    return story


def fresh() -> Story:
    story = joined()
    story.starts(0)
    return refused(story, 5)


def manifest_without_an_answer() -> Story:
    story = joined()
    story.starts(0)
    story.seal(4)
    story.flushed()
    return refused(story, 5)


Case = tuple[str, Callable[[], Story], str, str]
NEWEST_IS_LOADED = Parent("earlier", 448)
CASES: list[Case] = [
    ("answered", answered, "SAFE", "training was at step 461"),
    ("accepted at the commit", lambda: refused(committed(), 448), "SAFE", "at step 448"),
    (
        "accepted after it",
        lambda: refused(committed(460), 460),
        "PARTIAL",
        "of step 448, not of step 460",
    ),
    ("goodbye at it", lambda: left(448, is_goodbye=True), "SAFE", "at step 448"),
    (
        "goodbye after it",
        lambda: left(460, is_goodbye=True),
        "PARTIAL",
        "of step 448, not of step 460",
    ),
    ("crash", lambda: left(448, is_goodbye=False), "PARTIAL", "did not say that it has finished"),
    ("goodbye, then again", attaches_again, "PARTIAL", "the position of rank 0 is unknown"),
    ("no connection", disconnected, "PARTIAL", "the position of rank 0 is unknown"),
    ("rank hangs", one_rank_hangs, "PARTIAL", "the position of rank 3 is unknown: ranks [3]"),
    ("rank never came", one_rank_never_came, "PARTIAL", "the position of a rank is unknown"),
    ("no rank 0", rank_0_never_came, "PARTIAL", "the start of rank 1 is unknown"),
    ("one goodbye", one_rank_says_goodbye, "PARTIAL", "of step 448, not of step 449"),
    ("nothing since the load", lambda: refused(resumed(448, NEWEST_IS_LOADED), 448), "SAFE", ""),
    ("loaded before the claim", not_claimed, "PARTIAL", "has not taken the run over yet"),
    ("earlier process", beside_an_earlier_process, "PARTIAL", "a process of another start"),
    (
        "another job",
        lambda: beside_another_job(ends=False),
        "PARTIAL",
        "a process of another start",
    ),
    ("another job ends", lambda: beside_another_job(ends=True), "SAFE", ""),
    ("record lost", record_is_lost, "SAFE", "step 448"),
    ("steps since", lambda: refused(resumed(460, NEWEST_IS_LOADED), 460), "PARTIAL", "not of step"),
    ("load unknown", lambda: refused(resumed(448), 448), "PARTIAL", "has not said what it loaded"),
    ("older load", lambda: refused(resumed(448, Parent("earlier", 400)), 448), "PARTIAL", "400"),
    ("other start", lambda: refused(resumed(448, Parent("x", 448)), 448), "PARTIAL", "began at"),
    ("restoring", restoring, "SAFE", "completed no step"),
    ("restore failed", lambda: restoring(fails=True), "PARTIAL", "of rank 0 is unknown"),
    (
        "restoring an older one",
        lambda: restoring(skips=True),
        "PARTIAL",
        "could not use generation",
    ),
    ("a planted commit", lambda: restoring(skips_another=True), "SAFE", "is committed"),
    ("restoring a set", lambda: restoring(is_sealed=True), "PARTIAL", "448"),
    ("restoring a set of another boot", restoring_a_set_of_another_boot, "PARTIAL", "in staging"),
    ("restoring an unseen set", sealed_unseen, "PARTIAL", "448"),
    ("unseen set of an unknown process", sealed_by_an_unknown_process, "PARTIAL", "448"),
    ("loaded after the request", loaded_after_the_request, "SAFE", ""),
    ("older load before a commit", loads_an_older_state, "PARTIAL", "460"),
    ("commit unknown", commit_is_unknown, "PARTIAL", "448"),
    ("commit obsolete", commit_is_obsolete, "PARTIAL", "step 460 may exist"),
    ("ranks of no start", lambda: ends(is_final=False), "PARTIAL", "the start of rank 1"),
    ("ranks after the end", lambda: ends(is_final=True), "PARTIAL", "the start of rank 1"),
    ("notebook", notebook, "PARTIAL", "the start of rank 0"),
    ("answer beside a notebook", lambda: notebook(is_answered=True), "SAFE", "step 481"),
    ("end of the run", final, "SAFE", "step 460"),
    ("steps after the end", trains_past_its_end, "PARTIAL", "the position of rank 0 is unknown"),
    (
        "no connection after the end",
        lambda: trains_past_its_end(is_connected=False),
        "PARTIAL",
        "the position of rank 0 is unknown",
    ),
    ("no query", loads_by_itself, "PARTIAL", "has not said what it loaded"),
    ("two answers", answers_twice, "SAFE", "training was at step 461"),
    ("process answers", process, "SAFE", "at step 461"),
    ("process is silent", lambda: process(answers=False), "PARTIAL", "sealed nothing since"),
    ("process not asked", lambda: process(is_asked=False), "PARTIAL", "was not asked"),
    ("process begins again", lambda: process(begins_again=True), "SAFE", "at step 461"),
    ("start after the answer", begins_again_after_its_answer, "SAFE", "at step 461"),
    ("older load after the answer", goes_back_after_its_answer, "PARTIAL", "of rank 0 is unknown"),
    ("rollback after the answer", rolls_back_after_its_answer, "PARTIAL", "of rank 0 is unknown"),
    ("answers again", lambda: goes_back_after_its_answer(answers=True), "SAFE", "at step 451"),
    ("reconnects", lambda: answered_before_a_restart(reconnects=True), "SAFE", "at step 461"),
    ("gone", lambda: answered_before_a_restart(reconnects=False), "PARTIAL", "has not reconnected"),
    ("rank 0 last", the_lowest_rank_came_last, "SAFE", "at step 448"),
    ("GPU", gpu_failed, "PARTIAL", "GPU"),
    ("GPU and a later set", seals_after_its_gpu_failed, "PARTIAL", "step 460 stands"),
    ("GPU and a lost set", loses_a_suspect_set, "PARTIAL", "step 462 may exist"),
    ("GPU and a lost reply", suspect_manifest_without_an_answer, "SAFE", "step 461 is committed"),
    ("fenced", fenced, "PARTIAL", "on other VMs as generation 9"),
    ("no training", lambda: nothing_trained(has_commit=True), "NO_TRAINING", "step 448 stands"),
    ("empty run", lambda: nothing_trained(has_commit=False), "NO_TRAINING", "no training was seen"),
    ("no commit", fresh, "LOST", "training was at step 5"),
    ("no answer", manifest_without_an_answer, "PARTIAL", "step 4 may exist"),
]


@pytest.mark.fault("O24")
def test_a_run_that_was_never_read_is_not_lost() -> None:
    """The store may have a whole checkpoint.  Once the run is read, the verdict names it."""
    story = Story(claimed=False)
    story.grants = False
    story.scan()
    story.join()
    story.starts(5)
    story.notice(in_s=30)
    story.wait(30)
    assert story.verdicts == ["PARTIAL None"]
    assert "the store could not be read" in story.last(Conclude).reason
    story.tell(RunRead(CommitRef(1, 4), "earlier"))
    assert story.verdicts == ["PARTIAL None", "PARTIAL generation 1 step 4"]
    assert "generation 1 step 4 stands" in story.last(Conclude).reason


@pytest.mark.fault("O24")
def test_a_verdict_waits_for_the_commits_of_the_run() -> None:
    """The host shuts down after the end of the training, and the restarted daemon has not read the run."""
    story = resumed(448, NEWEST_IS_LOADED).restarted(claimed=False)
    story.scan()
    story.join()
    story.starts(448, parent=NEWEST_IS_LOADED)
    story.leave(is_goodbye=True)
    story.notice(60, HOST_SOURCE)
    story.scan()
    story.wait(20)
    assert not story.verdicts
    story.tell(RunRead(NEWEST, "earlier"))
    assert story.last(Conclude).verdict is Verdict.SAFE


def test_a_verdict_waits_for_the_claim() -> None:
    """The rank has trained nothing since it loaded the newest commit, and has declined all requests."""
    story = Story(newest=NEWEST)
    story.grants = False
    story.join()
    story.starts(448, parent=NEWEST_IS_LOADED)
    story.notice(600)
    for _ in range(300):
        evacuation = story.state.evacuation
        if evacuation and evacuation.request and evacuation.request.is_waiting:
            story.accept(448)
            story.tell(TrainerFailed(1, story.request_id, "disk full"))
        story.scan()
        story.wait(1)
    assert not story.verdicts
    story.tell(GenerationClaimed("a", 2, NEWEST, "earlier"))
    assert story.last(Conclude).verdict is Verdict.SAFE


@pytest.mark.parametrize(
    ("history", "word", "reason"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_the_verdict_and_its_reason(history: Callable[[], Story], word: str, reason: str) -> None:
    """Until the deadline: the position is that of the request, whatever training did after it."""
    story = history()
    for _ in range(61):
        story.scan()
        story.wait(1)
    concluded = [done for done in story.all(Conclude) if done.is_final]
    assert concluded, "a notice ends with a verdict"
    assert (concluded[-1].verdict, reason in concluded[-1].reason) == (word, True), concluded[-1]
