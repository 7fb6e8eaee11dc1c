# SPDX-License-Identifier: Apache-2.0
"""The daemon's copies: newest first, paused during evacuations, and without effect on anything else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs
from swansong_bucket.errors import Permanent, Transient
from swansong_bucket.format.keys import RunKeys
from swansong_bucket.format.manifest import Manifest
from swansong_bucket.mirror.fence import promote
from swansong_bucket.model import CommitRef, Verdict
from swansong_bucket.runs import catalog, commit
from swansongd.core.events import Event, FenceFound
from swansongd.flush import mirroring
from swansongd.flush.mirroring import Mirroring
from swansongd.observe.status import MirrorState

from testkit import committed
from testkit.memory_store import MemoryStore
from testkit.waiting import until

KEYS = RunKeys("r")
FILES = {"weights": bytes(range(251)) * 20, "index.json": b"{}"}


def state_with(*, evacuation: Any = None, flight: Any = None, must_yield: bool = False) -> Any:
    """The fields of the state that the limits read."""
    flush = SimpleNamespace(flight=flight)
    return SimpleNamespace(evacuation=evacuation, flush=flush, must_yield=must_yield)


class Rig:
    """A daemon's mirroring between two stores in memory, with the state that a test sets."""

    def __init__(self) -> None:
        self.primary, self.mirror = MemoryStore(), MemoryStore()
        self.mirror.url = "memory://mirror"
        self.state = state_with()
        self.looks = 0
        """Number of looks at the state."""
        self.stop = threading.Event()
        self.events: list[Event] = []
        self.claimed = commit.claim_generation(self.primary, KEYS, identity={}, start_id="vm1")
        self.mirroring = self.made()

    def made(self) -> Mirroring:
        return Mirroring(
            self.primary,
            self.mirror,
            KEYS,
            state=self.look,
            post=self.events.append,
            stop=self.stop,
            connections=2,
            budget_s=0.05,
        )

    def look(self) -> Any:
        self.looks += 1
        return self.state

    def commit(self, step: int) -> Manifest:
        """A commit whose chunks are all new."""
        return committed.commit(self.primary, FILES, step=step, nonce=f"s{step}")

    def steps(self) -> list[int]:
        return [each.ref.step for each in catalog.list_commits(self.mirror, KEYS)]

    def until_state(self, state: MirrorState) -> None:
        until(lambda: self.mirroring.status().state is state, what=f"state {state}")


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """A rig that retries at once."""
    monkeypatch.setattr(mirroring, "_RETRY_S_FIRST", 0.01)
    made = Rig()
    yield made
    made.stop.set()
    made.mirroring.check_fence()


def test_each_commit_reaches_the_mirror(rig: Rig) -> None:
    """The lag counts commits, seconds and bytes while they wait, and is zero afterwards."""
    rig.mirroring.committed(rig.commit(100))
    rig.mirroring.committed(rig.commit(200))
    waiting = rig.mirroring.status()
    assert (waiting.state, waiting.lag.commits) == (MirrorState.STARTING, 2)
    assert waiting.lag.bytes == 2 * sum(map(len, FILES.values()))
    rig.mirroring.start()
    rig.until_state(MirrorState.OK)
    done = rig.mirroring.status()
    assert (done.lag.commits, done.lag.seconds, done.lag.bytes) == (0, 0.0, 0)
    assert (done.newest, done.copied_commits) == (CommitRef(1, 200), 2)
    assert rig.steps() == [200, 100]
    rig.mirroring.committed(rig.commit(300))
    until(lambda: rig.steps() == [300, 200, 100], what="the next commit")
    assert rig.mirroring.status().newest == CommitRef(1, 300)


def test_the_newest_commit_goes_first(rig: Rig) -> None:
    """The next VM would resume from it: older ones are copied after it, and count for the lag until then."""
    for step in (100, 200, 300):
        rig.mirroring.committed(rig.commit(step))
    seen: list[tuple[list[int], float]] = []

    def after(what: str, key: str) -> None:
        if what == "put" and key.startswith(KEYS.commits):
            seen.append((rig.steps(), rig.mirroring.status().lag.commits))

    rig.mirror.after = after
    rig.mirroring.start()
    rig.until_state(MirrorState.OK)
    assert [steps for steps, _ in seen] == [[300], [300, 200], [300, 200, 100]]
    assert rig.mirroring.status().lag.commits == 0


def test_a_daemon_copies_all_that_are_newer_than_the_mirror(rig: Rig) -> None:
    """A mirror that was away for a while has no gap in its newest part."""
    for step in (100, 200):
        rig.commit(step)
    rig.mirroring.start()
    rig.until_state(MirrorState.OK)
    for step in (300, 400):
        rig.commit(step)
    rig.mirroring = rig.made()
    rig.mirroring.start()
    rig.until_state(MirrorState.OK)
    assert rig.steps() == [400, 300, 200]


@pytest.mark.fault("M01", "M03")
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Transient("connection refused"), "connection refused"),
        (
            Permanent("access denied", hint="Grant s3:PutObject"),
            "access denied. Grant s3:PutObject",
        ),
    ],
)
def test_a_mirror_that_fails_is_retried(rig: Rig, error: Exception, reason: str) -> None:
    """The state and the reason are shown, the lag grows, and the copies resume when the mirror is back."""

    def away(*_: str) -> None:
        raise error

    rig.mirror.before = away
    with capture_logs() as logs:
        rig.mirroring.start()
        rig.until_state(MirrorState.FAILING)
        rig.mirroring.committed(rig.commit(100))
        status = rig.mirroring.status()
        assert status.reason == reason
        assert status.lag.commits == 1
        until(lambda: rig.mirroring.status().lag.seconds > 0, what="a growing lag")
        rig.mirror.before = lambda *_: None
        rig.until_state(MirrorState.OK)
        # The log has a state a moment after the status.
        until(lambda: "mirror_recovered" in [each["event"] for each in logs], what="the log")
    assert rig.steps() == [100]
    assert [each["event"] for each in logs if each["event"].startswith("mirror_")] == [
        "mirror_failing",
        "mirror_recovered",
    ]
    assert rig.events == [], "no event reaches the decision loop"


@pytest.mark.fault("M01")
def test_a_mirror_that_is_away_for_weeks_costs_no_memory(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest manifests wait, and the lag counts from the first commit that the mirror lacks."""
    monkeypatch.setattr(mirroring, "WAITING_MAX", 2)
    now_mono_s = 0.0
    monkeypatch.setattr(mirroring, "time", SimpleNamespace(monotonic=lambda: now_mono_s))
    for step in (100, 200, 300, 400):
        rig.mirroring.committed(rig.commit(step))
        now_mono_s += 60.0
    lag = rig.mirroring.status().lag
    assert (lag.commits, lag.seconds) == (2, 240.0)
    monkeypatch.undo()
    rig.mirroring.start()
    rig.until_state(MirrorState.OK)
    assert rig.steps() == [400, 300]


@pytest.mark.fault("M05")
def test_a_damaged_commit_does_not_hold_up_the_others(rig: Rig) -> None:
    """It is logged and counted; the older and the newer commits are copied."""
    made = [rig.commit(step) for step in (100, 200, 300)]
    rig.primary.objects[made[1].chunks[0].key] = b"v" * 1_000
    for each in made:
        rig.mirroring.committed(each)
    with capture_logs() as logs:
        rig.mirroring.start()
        rig.until_state(MirrorState.OK)
    assert rig.steps() == [300, 100]
    assert rig.mirroring.status().damaged == 1
    assert rig.mirroring.status().lag.commits == 0
    (line,) = [each for each in logs if each["event"] == "commit_not_mirrored"]
    assert line["commit"] == "generation 1 step 200"


@pytest.mark.parametrize("failures", [1, 3])
def test_a_copy_that_makes_progress_is_finished_before_a_newer_one(rig: Rig, failures: int) -> None:
    """On a slow link a newer commit waits whenever a request fails: the mirror still gets one whole."""
    rig.mirroring.committed(rig.commit(100))
    created = 0

    def before(what: str, _key: str) -> None:
        nonlocal created, failures
        created += what == "create"
        if what == "create" and created % 4 == 3 and failures:
            failures -= 1
            rig.mirroring.committed(rig.commit(200 + created))
            raise Permanent("connection reset")

    whole: list[list[int]] = []

    def after(what: str, key: str) -> None:
        if what == "put" and key.startswith(KEYS.commits):
            whole.append(rig.steps())

    rig.mirror.before, rig.mirror.after = before, after
    rig.mirroring.start()
    until(lambda: rig.steps() and rig.mirroring.status().lag.commits == 0, what="all", timeout_s=30)
    assert whole[0] == [100]


def test_a_copy_without_progress_makes_way_for_a_newer_one(rig: Rig) -> None:
    """One chunk that the store does not return holds up its own commit, and no other one."""
    stuck = rig.commit(100)
    key = stuck.chunks[0].key

    def before(what: str, asked: str) -> None:
        if (what, asked) == ("get", key):
            raise Permanent("the object is in an archive")

    rig.primary.before = before
    rig.mirroring.committed(stuck)
    rig.mirroring.start()
    rig.until_state(MirrorState.FAILING)
    rig.mirroring.committed(rig.commit(200))
    until(lambda: rig.steps() == [200], what="the newer commit")


@pytest.mark.fault("M06")
def test_a_promoted_mirror_fences_the_daemon(rig: Rig) -> None:
    """The claim is found at the start of the daemon, and at the next copy."""
    rig.mirroring.committed(rig.commit(100))
    rig.mirroring.start()
    rig.until_state(MirrorState.OK)
    promoted = promote(rig.mirror, KEYS, host="op").generation
    rig.mirroring.committed(rig.commit(200))
    rig.until_state(MirrorState.PROMOTED)
    assert rig.events[0] == FenceFound(promoted, in_mirror=True)
    assert rig.steps() == [100]
    rig.events.clear()
    rig.mirroring = rig.made()
    rig.mirroring.start()
    until(lambda: rig.events == [FenceFound(promoted, in_mirror=True)], what="the fence")


@pytest.mark.parametrize("reason", ["undecided", "sending", "another job"])
def test_nothing_is_copied_while_a_checkpoint_needs_the_link(rig: Rig, reason: str) -> None:
    """Copies pause for the evacuation and for each flush; after the verdict they continue."""
    if reason == "undecided":
        rig.state = state_with(evacuation=SimpleNamespace(verdict=None))
    elif reason == "another job":
        rig.state = state_with(must_yield=True)
    else:
        evacuation = SimpleNamespace(verdict=Verdict.SAFE)
        rig.state = state_with(evacuation=evacuation, flight=object())
    rig.mirroring.committed(rig.commit(100))
    rig.mirroring.start()
    until(lambda: rig.looks > 3, what="the pause")
    assert not rig.mirror.requests
    rig.state = state_with(evacuation=SimpleNamespace(verdict=Verdict.SAFE))
    rig.until_state(MirrorState.OK)
    assert rig.steps() == [100]


def test_the_farewell_reaches_the_mirror_before_the_vm_ends(rig: Rig) -> None:
    """After the verdict the records are copied at once, also if the evacuation needs no commit."""
    rig.mirroring.start()
    rig.until_state(MirrorState.OK)
    rig.state = state_with(evacuation=SimpleNamespace(verdict=None))
    rig.mirroring.expedite()
    rig.primary.put("r/farewells/00000001-x.json", b"{}")
    rig.state = state_with(evacuation=SimpleNamespace(verdict=Verdict.SAFE))
    until(lambda: "r/farewells/00000001-x.json" in rig.mirror.objects, what="the farewell")
