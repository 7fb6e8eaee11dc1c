# SPDX-License-Identifier: Apache-2.0
"""Digests of steps, and their comparison after a resume."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from swansong import bounds
from swansong._checkpoint import redone
from swansong._checkpoint.redone import RedoneSteps, compare, parsed
from swansong._torch import digests
from swansong.protocol import Compared, Digested, Message, Redone, RedoneQuery
from swansong.rank_files import Snapshots

STEP = {
    "batch.loader": "aa",
    "rates.optimizer": "bb",
    "random.torch": "cc",
    "loss": "2.5",
    "weights.model": "dd",
}


def changed(**parts: str) -> dict[str, str]:
    return {**STEP, **{name.replace("__", "."): value for name, value in parts.items()}}


def text_of(
    again: dict[int, dict[str, str]], before: dict[int, dict[str, str]] | None = None
) -> Compared:
    found = compare(before or dict.fromkeys(again, STEP), again)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("part", "cause"),
    [
        ({"batch__loader": "x", "loss": "9", "weights__model": "y"}, "another one (loader loader)"),
        ({"rates__optimizer": "x", "weights__model": "y"}, "a learning rate or another option"),
        ({"random__torch": "x", "weights__model": "y"}, "(generator torch)"),
        ({"loss": "9", "weights__model": "y"}, "the loss: a state that is not saved"),
    ],
)
def test_the_first_cause_of_the_first_step_that_differs_is_named(
    part: dict[str, str], cause: str
) -> None:
    """Later steps, and parts that follow from the cause, are not named."""
    found = text_of({11: STEP, 12: changed(**part), 14: changed(weights__model="z", loss="7")})
    assert (found.first, found.last, found.differs) == (11, 12, True)
    if not cause.startswith("the loss"):
        assert cause in found.text
    else:
        assert "the loss, although the steps before it were equal to the bit" in found.text


def test_close_weights_count_as_equal_until_a_step_was_equal_to_the_bit() -> None:
    """Kernels without a fixed order of additions differ from the first step on; faulty memory does not."""
    close = changed(loss="2.500001", weights__model="x")
    found = text_of({11: close, 12: close})
    assert (found.differs, found.text) == (
        False,
        "steps 11 to 12 as before within 4e-07 of the loss, and not to the bit",
    )
    found = text_of({11: STEP, 12: close})
    assert found.differs
    assert "step 12 differs" in found.text
    assert "faulty memory" in found.text
    assert text_of({11: changed(loss="2.6", weights__model="x")}).differs
    assert text_of({11: changed(weights__model="x")}).differs, "an optimizer outside of the state"


@pytest.mark.parametrize("part", [{"random__python": "x"}, {"loss": "9"}])
def test_what_changes_neither_batches_nor_weights_is_only_mentioned(part: dict[str, str]) -> None:
    """A thread may draw random numbers, and a script may report an average as its loss."""
    before = changed(random__python="old")
    again = {name.replace("__", "."): value for name, value in part.items()}
    found = text_of({11: {**before, **again}}, {11: before})
    assert not found.differs
    assert found.text.startswith("step 11 as before, except for ")


def test_a_loss_alone_counts_if_the_weights_are_unknown() -> None:
    """Digests of weights may be left out because of their cost."""
    before = {"loss": "2.5"}
    assert text_of({11: {"loss": "2.6"}}, {11: before}).differs
    assert compare({11: before}, {12: before}) is None


def test_the_rank_is_named_in_a_job_of_several() -> None:
    """So that a GPU with faulty memory is found."""
    found = compare({11: STEP}, {11: changed(loss="9", weights__model="y")}, rank=3)
    assert found is not None
    assert "step 11 differs on rank 3 from" in found.text


class Job:
    """A rank whose messages are recorded."""

    def __init__(self, world_size: int = 1) -> None:
        self.sent: list[Message] = []
        self.is_connected = True
        self.steps = RedoneSteps(self.send, 0, world_size)
        self.steps.is_wanted = True

    def send(self, message: Message) -> bool:
        if self.is_connected:
            self.sent.append(message)
        return self.is_connected

    def train(self, first: int, last: int, loss: Callable[[int], Any] = float) -> None:
        for step in range(first, last + 1):
            if step >= self.steps.next_step:
                self.steps.note(step, loss(step), Snapshots())

    def digested(self) -> list[int]:
        texts = [text for each in self.sent if isinstance(each, Digested) for text in each.digests]
        return [parsed(text)[0] for text in texts]


def test_steps_after_a_checkpoint_are_digested_at_growing_distances() -> None:
    """The next VM restores that checkpoint, and digests the same steps."""
    job = Job()
    job.steps.begin(10)
    job.train(11, 30)
    job.steps.saved(30)
    job.train(31, 40)
    job.steps.tick()
    assert job.digested() == [11, 12, 14, 18, 26, 31, 32, 34, 38]


def test_no_step_is_digested_that_no_checkpoint_can_have() -> None:
    """The daemon refuses such a digest, and with it the rank."""
    job = Job()
    job.steps.begin(bounds.STEP_MAX - 1)
    job.train(bounds.STEP_MAX, bounds.STEP_MAX + 4)
    job.steps.tick()
    assert job.digested() == [bounds.STEP_MAX]


def test_a_rank_compares_what_the_daemon_answers() -> None:
    """A rank also digests the steps of the interrupted start.  Without a connection, the result waits."""
    first = Job()
    first.steps.begin(0)
    first.train(1, 8)
    first.steps.saved(6)  # a checkpoint that was never committed
    first.train(7, 9)
    first.steps.tick()
    (message,) = first.sent
    assert isinstance(message, Digested)
    assert message.digests[0].endswith(" loss=1")

    again = Job()
    again.steps.begin(4)
    again.steps.ask("start", 1)
    assert again.sent == [RedoneQuery(0, "start", 1)]
    again.steps.expect(Redone("another", ["5 loss=1"]))
    again.steps.expect(Redone("start", message.digests))
    again.is_connected = False
    again.train(5, 9, lambda step: torch.tensor(float(step)))
    again.steps.tick()
    again.is_connected = True
    again.steps.tick()
    again.steps.tick()
    (result,) = (each for each in again.sent if isinstance(each, Compared))
    assert result == Compared(7, 8, False, "steps 7 to 8 as before")
    assert again.steps.facts == {"redone_to": 8, "redone_differs": False}


def test_nothing_is_digested_or_asked_without_a_daemon_that_takes_it() -> None:
    """An older daemon would end the connection because of an unknown message."""
    job = Job()
    job.steps.is_wanted = False
    job.steps.begin(4)
    job.steps.ask("start", 1)
    job.train(5, 9)
    job.steps.end()
    assert job.sent == []


def test_a_step_that_a_gpu_has_not_completed_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread answers the daemon, too: it reads the step at a later tick, and at the end not at all."""
    complete = [False]
    monkeypatch.setattr(redone, "_completion", lambda _gpus: lambda: complete[0])
    job = Job()
    job.steps.begin(0)
    job.train(1, 2)
    job.steps.tick()
    assert job.digested() == []
    complete[0] = True
    job.steps.tick()
    assert job.digested() == [1, 2]
    complete[0] = False
    job.train(3, 4)
    job.steps.end()
    assert job.digested() == [1, 2]


def test_a_failing_digest_costs_no_step(caplog: pytest.LogCaptureFixture) -> None:
    """One warning, and no further digest."""

    class Failing(Snapshots):
        def digests(self) -> dict[str, Any]:
            raise RuntimeError("no memory")

    job = Job()
    job.steps.begin(0)
    job.steps.note(1, None, Failing())
    assert job.steps.next_step == bounds.NEVER
    assert "steps are not digested any more" in caplog.text


def test_digests_of_weights_stay_within_their_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a digest of one second, none follows for a hundred seconds, except where one is compared."""
    now = [0.0]

    class Slow(Snapshots):
        def digests(self, *, with_weights: bool) -> dict[str, Any]:
            now[0] += with_weights
            return {"weights.model": "aa"} if with_weights else {}

    monkeypatch.setattr(redone.time, "monotonic", lambda: now[0])
    job = Job()
    job.steps.begin(0)
    for step, at_s in ((1, 0.0), (2, 50.0), (4, 102.0)):
        now[0] = at_s
        job.steps.note(step, None, Slow())
    job.steps.tick()
    (message,) = job.sent
    assert isinstance(message, Digested)
    assert ["weights.model" in parsed(text)[1] for text in message.digests] == [True, False, True]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(1, 1001, dtype=torch.float32),
        torch.arange(1, 1002, dtype=torch.bfloat16),
        torch.arange(1, 1001, dtype=torch.float64),
        torch.arange(1, 1001, dtype=torch.float32).reshape(20, 50).T,
        torch.arange(1, 1001, dtype=torch.float32)[3:-2],
        torch.tensor(1.5),
        torch.full((9,), 1 + 2j),
    ],
)
def test_each_flipped_bit_changes_the_digest_of_the_weights(tensor: torch.Tensor) -> None:
    """A flipped bit at the start, in the middle or at the end changes the sum, in each type and layout."""
    module = torch.nn.ParameterList([torch.nn.Parameter(tensor, requires_grad=False)])
    before = value_of(module)
    bits = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    bits = bits.view(digests._INTEGERS[bits.element_size()])
    for place in {0, bits.numel() // 2, bits.numel() - 1}:
        index = tuple(int(each) for each in torch.unravel_index(torch.tensor(place), bits.shape))
        bits[index] ^= 1
        assert value_of(module) != before
        bits[index] ^= 1
    assert value_of(module) == before


def value_of(module: torch.nn.Module) -> str:
    (part,) = digests.of_weights({"model": module}).values()
    assert callable(part)
    value = part()
    assert value is not None
    return value


def test_a_digest_of_many_objects_fits_its_bounds() -> None:
    """The longest names, and more objects than have a digest each."""
    names = [letter * 64 for letter in "abcd"]
    objects: dict[str, Any] = {}
    for name in names:
        objects[name] = torch.nn.Linear(1, 1)
        objects[f"o{name[:-1]}"] = torch.optim.SGD(objects[name].parameters(), lr=0.1)
    job = Job()
    job.steps.begin(0)
    for count in (2, 4, 8):
        kept = dict(list(objects.items())[:count])
        found = digests.of_step(kept) | digests.of_weights(kept)
        state = Snapshots()
        state.digests = lambda found=found, **_: found  # type: ignore[misc]
        job.steps.note(count, 1.0, state)
    job.steps.tick()
    (message,) = job.sent
    assert isinstance(message, Digested)
    for text in message.digests:
        bounds.step_digest(text, "digest")
