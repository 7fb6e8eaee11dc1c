# SPDX-License-Identifier: Apache-2.0
"""The daemon keeps the newest digests of steps, and answers the trainer that repeats them."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any, cast

import pytest
from swansong import bounds, protocol
from swansong_bucket.errors import CorruptError
from swansong_bucket.format import farewell as farewells
from swansong_bucket.format.keys import RunKeys
from swansongd.observe.decision_log import DecisionLog
from swansongd.observe.facts import StepsCompared, StepsDigested
from swansongd.observe.notifications import of_comparison
from swansongd.observe.observer import Observation
from swansongd.observe.step_digests import RedoneWatch
from swansongd.restore.context import RestoreContext
from swansongd.restore.digests_query import RedoneAnswers
from swansongd.staging.prepare import RunDirectory
from swansongd.trainers.translate import event_of

from testkit.memory_store import MemoryStore
from testkit.records import farewell
from testkit.story import Story

KEYS = RunKeys("r")


class Watched(Story):
    """A story whose digests are kept."""

    def __init__(self) -> None:
        self.watch = RedoneWatch(DecisionLog())
        super().__init__()

    def observe(self, observation: Observation) -> None:
        super().observe(observation)
        self.watch.observe(observation)


def texts(first: int, last: int) -> tuple[str, ...]:
    return tuple(f"{step} loss=1" for step in range(first, last + 1))


def test_the_newest_digests_of_the_newest_two_starts_are_kept() -> None:
    """The start that trains, and the one that it continues, however many digests a trainer sends."""
    story = Watched()
    story.join(1, start_id="a")
    for first in range(0, 100, 10):
        story.tell(StepsDigested(1, texts(first, first + 9)))
    assert story.watch.of_rank("a", 0) == texts(68, 99)
    story.tell(StepsDigested(9, texts(1, 1)))  # of no connection
    for connection, start_id in ((2, "b"), (3, "c")):
        story.leave(connection - 1)
        story.join(connection, start_id=start_id, pid=100 + connection)
        story.tell(StepsDigested(connection, texts(5, 6)))
    assert story.watch.of_rank("a", 0) == ()
    assert story.watch.of_rank("b", 0) == story.watch.of_rank("c", 0) == texts(5, 6)
    assert story.watch.of_rank("c", 1) == ()


def test_a_farewell_has_the_digests_of_its_generation_only() -> None:
    """A start without that generation is another training; many ranks have fewer digests each."""
    story = Watched()
    story.join(1, start_id="a", ranks=100)
    for rank in range(1, 100):
        story.join(rank + 1, rank=rank, start_id="a", ranks=100)
    for connection in range(1, 101):
        story.tell(StepsDigested(connection, texts(1, 32)))
    start = story.state.start
    assert start is not None
    assert start.generation is not None
    found = story.watch.for_farewell(story.state, start.generation)
    assert sum(map(len, found.values())) == bounds.FAREWELL_DIGESTS_MAX
    assert found[0] == texts(29, 32)
    assert story.watch.for_farewell(story.state, start.generation - 1) == {}


def test_a_result_is_of_the_newest_start() -> None:
    """A restarted trainer has compared nothing yet; a rank that reconnects keeps its result."""
    story = Watched()
    story.join(1, start_id="a")
    result = StepsCompared(1, False, "steps 1 to 2 as before")
    story.tell(result)
    story.join(2, start_id="a")
    assert story.watch.compared == {0: result}
    story.leave(2)
    story.join(3, start_id="b", pid=200)
    assert story.watch.compared == {}


def test_the_text_of_a_trainer_is_printable() -> None:
    """It reaches logs and terminals."""
    event = event_of(1, protocol.Compared(1, 2, True, "\x1b[2J" + "x" * 4000))
    assert isinstance(event, StepsCompared)
    assert "\x1b" not in event.text
    assert len(event.text) < 600


def test_a_notification_is_sent_if_steps_differ() -> None:
    """One for each rank and start; none if the steps are as before."""
    story = Watched()
    story.join(1, start_id="a")
    same, other = StepsCompared(1, False, "as before"), StepsCompared(1, True, "step 3 differs")
    assert of_comparison(same, story.state, 0.0) is None
    made = of_comparison(other, story.state, 0.0)
    assert made is not None
    assert (made.kind, made.importance) == ("redone", "warning")
    assert made.summary == "The resume is not exact: step 3 differs"


def with_digests(digests: object, written: str = "2030-01-01T00:00:00Z") -> bytes:
    """A farewell of generation 1 with these digests."""
    body = json.loads(farewell(written=written))
    for name in ("format", "version", "digest"):
        del body[name]
    return farewells.record.encode(farewells.FORMAT, {**body, "digests": digests})


@pytest.mark.parametrize(
    "digests",
    [
        [],
        {"x": []},
        {"-1": []},
        {"0": "1 loss=1"},
        {"0": ["1 loss=1"] * 33},
        {"0": ["loss=1"]},
        {"0": ["1 loss=" + "1" * 2000]},
        {"0": ["1 loss=\x1b"]},
        {str(rank): [] for rank in range(257)},
        {"9" * 5000: []},
    ],
)
def test_a_farewell_with_other_digests_is_damaged(digests: object) -> None:
    """Any writer of the bucket may have written them."""
    assert farewells.decode(with_digests({"7": ["1 loss=1"]})).digests == {7: ("1 loss=1",)}
    with pytest.raises(CorruptError):
        farewells.decode(with_digests(digests))


class Rig:
    """Answers from a store with farewells of generation 1, which was restored."""

    def __init__(self) -> None:
        self.story, self.store = Watched(), MemoryStore()
        put = self.store.objects
        put[KEYS.farewell(1, "b")] = with_digests({"0": ["5 loss=old"]}, "2030-01-01T00:00:00Z")
        put[KEYS.farewell(1, "a")] = with_digests({"0": ["7 loss=new"]}, "2030-01-01T00:00:01Z")
        put[KEYS.farewell(1, "c")] = b"damaged"
        put[KEYS.farewell(2, "a")] = with_digests({"0": ["9 loss=2"]})
        state = self.story.state
        context = RestoreContext(
            cast("Any", self.store),
            KEYS,
            cast("RunDirectory", Path("/nonexistent")),
            lambda: state,
            threading.Event(),
        )
        self.answers = RedoneAnswers(context, self.story.watch, lambda: 1)
        self.answers.start()

    def ask(self, rank: int, parent: str, generation: int) -> list[str]:
        answered, found = threading.Event(), []

        def reply(message: protocol.Message, fd: int = -1) -> None:
            del fd
            found.append(message)
            answered.set()

        self.answers.ask(protocol.RedoneQuery(rank, parent, generation), reply)
        assert answered.wait(30)
        (message,) = found
        assert isinstance(message, protocol.Redone)
        return message.digests


def test_a_trainer_gets_the_newest_digests_of_the_restored_generation() -> None:
    """They are read once for all ranks; no other generation is read, whatever a trainer asks for."""
    rig = Rig()
    assert rig.ask(0, "a", 1) == ["7 loss=new"]
    requests = len(rig.store.requests)
    assert rig.ask(1, "a", 1) == []
    assert rig.ask(0, "a", 2) == []
    assert rig.ask(0, "a", -1) == []
    assert len(rig.store.requests) == requests
    rig.story.join(1, start_id="here")
    rig.story.tell(StepsDigested(1, texts(1, 2)))
    assert rig.ask(0, "here", -1) == list(texts(1, 2))
