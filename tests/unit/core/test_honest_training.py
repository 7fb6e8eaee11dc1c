# SPDX-License-Identifier: Apache-2.0
"""For any history: SAFE is never false, and training that does its part gets SAFE.

A witness knows the true position of the training, and the state in each commit.  Training is honest if it
resumes from the newest state that it may use, and answers each request in time.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from swansong.protocol import RestoreQuery
from swansong_bucket.model import CommitRef, Parent, Verdict
from swansongd.core import machine, resume
from swansongd.core.events import (
    AskTrainers,
    CommitManifest,
    Conclude,
    GenerationClaimed,
    NoticeRaised,
    Prune,
    RestoreAsked,
    RolledBack,
    RunRead,
    StartBegun,
    TrainerFailed,
    TrainerSealed,
)

from testkit.story import Story, a_set

State = tuple[str, int]
"""A state of the training: the start that made it, and its step."""
FRESH: State = ("", 0)
NOTICE_S = 60.0
ANSWERED_S = 12.0
"""A verdict waits at most ten seconds for a set that settles."""


class Life:
    """One training with one start at a time, whose daemon and processes end and start again."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.story = Story()
        self.commits: dict[CommitRef, State] = {}
        self.seen = 0
        self.number = 0
        self.connections: list[int] = []
        self.start_id, self.step, self.loaded = "", 0, FRESH
        self.asked: State = FRESH
        """Position at the newest request, or at the notice."""
        self.begin()

    # ------------------------------------------------------------------ the daemon and the store

    def sync(self) -> None:
        """Follow what the daemon has ordered: manifests, requests and removals."""
        new, self.seen = self.story.actions[self.seen :], len(self.story.actions)
        for action in new:
            if isinstance(action, CommitManifest):
                id_ = action.staged.id
                ref = CommitRef(action.generation, id_.step, id_.is_final)
                self.commits.setdefault(ref, (id_.start, id_.step))
            elif isinstance(action, AskTrainers) and action.is_urgent:
                self.asked = self.position
            elif isinstance(action, Prune):
                gone = set(action.directories)
                staging = self.story.staging
                staging[:] = [staged for staged in staging if staged.directory not in gone]

    def wait(self, seconds: float, *, stores: bool = True) -> None:
        self.story.scan()
        if stores:
            self.story.store_all()
        self.story.wait(seconds)
        self.sync()

    def restart_daemon(self, *, scans: bool = True) -> None:
        """The next life of the daemon; without ``scans``, ranks connect before its first scan."""
        self.sync()
        self.story = self.story.restarted(claimed=False)
        self.seen = 0
        if scans:
            self.read_store()

    def read_store(self) -> None:
        newest = max(self.commits, default=None)
        owner = "" if newest is None else self.commits[newest][0]
        self.story.scan()
        self.story.tell(RunRead(newest, owner))
        own = [start for start in self.story.state.starts.known if start.generation is not None]
        if own:
            generation = own[-1].generation or 0
            self.story.tell(GenerationClaimed(own[-1].id, generation, newest, owner))
        self.sync()

    # ------------------------------------------------------------------ the trainer

    @property
    def position(self) -> State:
        return self.start_id, self.step

    def begin(self, load: State | None = None, *, says: bool = True) -> None:
        """A new start in new processes, from the newest state or from this one."""
        self.number += 1
        self.start_id, self.step, self.loaded = f"start{self.number}", -1, FRESH
        self.join(is_new=True)
        self.story.tell(RestoreAsked(self.start_id))
        if self.story.state.staging.first_scan_mono_s is None:
            self.read_store()
        while not resume.may_answer(self.story.state, RestoreQuery("q", start_id=self.start_id)):
            self.wait(5.0)
        self.loaded = self.newest if load is None else load
        self.report_start(says=says)

    @property
    def newest(self) -> State:
        """The state that a restore query gets."""
        committed = max(self.commits, default=None)
        local = resume.newest_local(self.story.state, committed)
        if local is not None:
            return local.id.start, local.id.step
        return FRESH if committed is None else self.commits[committed]

    def join(self, *, is_new: bool = False) -> None:
        """All ranks connect, one after the other; only rank 0 knows a new start."""
        first = 1 + max(self.connections, default=0)
        self.connections = list(range(first, first + self.ranks))
        for rank, connection in enumerate(self.connections):
            self.story.join(
                connection,
                rank=rank,
                ranks=self.ranks,
                pid=1000 * int(self.start_id.partition("~")[0][5:]) + rank,
                step=self.step,
                start_id="" if is_new and rank else self.start_id,
            )
            self.sync()

    def report_start(self, *, says: bool = True) -> None:
        self.step = self.loaded[1]
        parent = Parent(*self.loaded) if says else Parent()
        for connection in self.connections:
            self.story.starts(self.step, connection, start_id=self.start_id, parent=parent)
        self.sync()

    def train(self, steps: int) -> None:
        self.step += steps
        for connection in self.connections:
            self.story.progress(self.step, connection)

    def leave(self, *, exited: bool = True, is_goodbye: bool = False) -> None:
        for connection in self.connections:
            self.story.leave(connection, exited=exited, is_goodbye=is_goodbye)
        self.sync()

    def seal(self, request_id: str = "") -> int:
        """Size of the set."""
        self.number += 1
        staged = a_set(self.step, f"n{self.number}", start_id=self.start_id, request_id=request_id)
        self.story.staging.append(staged)
        return staged.size_bytes

    def roll_back(self, load: State) -> None:
        """All ranks return to this state in the same processes."""
        self.number += 1
        self.start_id = f"{self.start_id.partition('~')[0]}~{self.number}"
        for connection in self.connections:
            self.story.tell(StartBegun(connection, self.start_id))
        self.story.tell(RolledBack(load[1]))
        self.loaded = load
        self.report_start()

    @property
    def open_request(self) -> str:
        evacuation = self.story.state.evacuation
        if evacuation is None or evacuation.request is None or evacuation.verdict is not None:
            return ""
        return evacuation.request.request_id if evacuation.request.is_waiting else ""

    def accept(self) -> str:
        request_id = self.open_request
        for connection in self.connections if request_id else ():
            self.story.accept(self.step, connection)
        return request_id

    def answer(self) -> None:
        """Agree, make one more step, and save, if a request is open."""
        request_id = self.accept()
        if request_id:
            self.train(1)
            size_bytes = self.seal(request_id)
            for connection in self.connections:
                self.story.tell(TrainerSealed(connection, request_id, self.step, 2.0, size_bytes))

    # ------------------------------------------------------------------ events

    def do(self, event: str) -> None:  # noqa: PLR0915 - one case for each event
        older = min(self.commits.values(), key=lambda state: state[1], default=FRESH)
        match event:
            case "steps":
                self.train(3)
            case "save":
                self.seal()
            case "scan":
                self.story.scan()
            case "store":
                self.wait(1.0)
            case "a minute":
                self.wait(60.0)
            case "the daemon restarts":
                self.restart_daemon()
                self.join()
            case "the daemon restarts, ranks return late":
                self.restart_daemon()
                self.wait(20.0)
                self.join()
            case "the decision loop fails":
                self.story.state = machine.rebuilt(self.story.state)
                self.story.scan()
            case "the trainer crashes":
                self.leave()
                self.begin()
            case "the trainer ends":
                self.leave(is_goodbye=True)
                self.begin()
            case "the trainer crashes while no daemon runs":
                self.restart_daemon()
                self.begin()
            case "the trainer crashes while no daemon runs, and connects before the scan":
                self.restart_daemon(scans=False)
                self.begin()
            case "a trainer that no daemon saw":
                self.restart_daemon(scans=False)
                self.number += 1
                self.start_id, self.loaded = f"start{self.number}", self.position
                self.seal()
                self.begin()
            case "the connection is lost":
                self.leave(exited=False)
                self.story.wait(2.0)
                self.join()
            case "the operator goes back":
                self.leave()
                self.begin(older)
            case "the script loads an older state by itself":
                self.leave()
                self.begin(older, says=False)
            case "the ranks roll back":
                if older[0] and older[1] < self.step:
                    self.roll_back(older)
            case "a notice is withdrawn":
                self.alarm(answers=False)
            case "a notice is answered and withdrawn":
                self.alarm(answers=True)
        self.sync()

    def alarm(self, *, answers: bool) -> None:
        """A notice that the cloud withdraws.  After a minute, the next one is not one too many."""
        self.story.notice(NOTICE_S)
        self.sync()
        if answers:
            self.answer()
        self.story.withdraw()
        self.wait(100.0)

    def end(self, ending: str) -> list[Conclude]:  # noqa: PLR0915 - one case for each ending
        """A notice; returns the verdicts of the last daemon."""
        if ending == "training has ended":
            self.train(1)
            self.seal()
            self.wait(1.0)
            self.leave(is_goodbye=True)
        elif ending == "crashed before":
            self.leave()
        self.asked = self.position
        self.wait(ANSWERED_S)
        earlier = len(self.story.actions)
        raised = self.story.notice(NOTICE_S)
        self.sync()
        limit_s = NOTICE_S + 1
        match ending:
            case "answers":
                self.answer()
                limit_s = ANSWERED_S
            case "the daemon restarts, then answers":
                self.resume_notice(raised.source)
                earlier = 0
                self.join()
                self.answer()
                limit_s = ANSWERED_S
            case "answers, then everything restarts":
                self.answer()
                self.resume_notice(raised.source)
                earlier = 0
                self.begin_while_asked()
                limit_s = ANSWERED_S
            case "answers, then starts again":
                self.answer()
                self.story.scan()
                self.leave(is_goodbye=True)
                self.begin_while_asked()
                limit_s = ANSWERED_S
            case "accepts, then crashes":
                self.accept()
                self.leave()
            case "crashes, then starts again":
                self.train(1)
                self.asked = self.position
                self.seal()
                self.story.scan()
                self.leave()
                self.begin_while_asked()
            case "rolls back":
                older = min(self.commits.values(), key=lambda state: state[1], default=FRESH)
                if older[0]:
                    self.roll_back(older)
                self.answer()
            case "fails":
                pass
        for _ in range(round(limit_s)):
            self.wait(1.0)
            if ending == "fails" and self.accept():
                self.story.tell(
                    TrainerFailed(self.connections[0], self.story.request_id, "disk full")
                )
        made = self.story.actions[earlier:]
        return [each for each in made if isinstance(each, Conclude) and each.is_final]

    def resume_notice(self, source: str) -> None:
        notice = self.story.state.notices.live[source]
        self.restart_daemon(scans=False)
        self.story.tell(NoticeRaised(notice))
        self.read_store()

    def begin_while_asked(self) -> None:
        """The next start asks for its checkpoint, is asked for one, and then trains a few steps."""
        asked = self.asked
        self.number += 1
        self.start_id, self.step = f"start{self.number}", -1
        self.join(is_new=True)
        self.story.tell(RestoreAsked(self.start_id))
        self.sync()
        was_asked = self.asked != asked
        self.accept()
        self.wait(0.1, stores=False)
        self.loaded = self.newest
        if was_asked:
            self.asked = self.loaded
        self.report_start()
        self.train(3)

    def is_true(self, verdict: Conclude) -> bool:
        """Whether the next VM resumes from the position at the request, if the verdict is SAFE."""
        if verdict.verdict is not Verdict.SAFE:
            return True
        found = self.commits[max(self.commits)]
        return (found[0] == self.asked[0] and found[1] >= self.asked[1]) or (
            found == self.loaded and self.asked == (self.start_id, self.loaded[1])
        )


EVENTS = [
    "steps",
    "save",
    "scan",
    "store",
    "a minute",
    "the daemon restarts",
    "the daemon restarts, ranks return late",
    "the decision loop fails",
    "the trainer crashes",
    "the trainer ends",
    "the trainer crashes while no daemon runs",
    "the trainer crashes while no daemon runs, and connects before the scan",
    "a trainer that no daemon saw",
    "the connection is lost",
    "the operator goes back",
    "the script loads an older state by itself",
    "the ranks roll back",
    "a notice is withdrawn",
    "a notice is answered and withdrawn",
]
HONEST = [
    "answers",
    "the daemon restarts, then answers",
    "answers, then everything restarts",
    "answers, then starts again",
    "training has ended",
]
OTHERS = [
    "crashed before",
    "accepts, then crashes",
    "crashes, then starts again",
    "rolls back",
    "fails",
]
HISTORIES = st.lists(st.sampled_from(EVENTS), max_size=12)


@given(ranks=st.sampled_from([1, 2]), events=HISTORIES, ending=st.sampled_from(HONEST))
@settings(max_examples=200, deadline=None)
def test_honest_training_gets_safe_after_any_history(
    ranks: int, events: list[str], ending: str
) -> None:
    """Within 12 s of its answer, and by the deadline if it had ended with everything committed."""
    life = Life(ranks)
    for event in events:
        life.do(event)
    verdicts = life.end(ending)
    assert verdicts
    assert verdicts[-1].verdict is Verdict.SAFE, verdicts[-1].reason
    assert life.is_true(verdicts[-1]), (verdicts[-1], life.asked, life.commits)


@given(ranks=st.sampled_from([1, 2]), events=HISTORIES, ending=st.sampled_from(OTHERS))
@settings(max_examples=200, deadline=None)
def test_safe_is_never_false(ranks: int, events: list[str], ending: str) -> None:
    """The next VM resumes from the position at the request, or from the state that was loaded since."""
    life = Life(ranks)
    for event in events:
        life.do(event)
    verdicts = life.end(ending)
    assert verdicts
    assert all(life.is_true(each) for each in verdicts), (verdicts, life.asked, life.commits)
