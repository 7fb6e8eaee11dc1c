# SPDX-License-Identifier: Apache-2.0
"""The guard and a loss that is not finite, rollbacks and pauses; with a fake daemon on a real socket."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import swansong
from swansong._checkpoint.saver import SaveCost
from swansong._checkpoint.training_health import LossMonitor
from swansong._daemon import progress_reports
from swansong._daemon.progress_reports import PauseWatch, Reporter
from swansong.layout import RankManifest
from swansong.protocol import (
    Accepted,
    Bye,
    Hello,
    Message,
    Progress,
    Request,
    RequestQuery,
    RestoreQuery,
    Sealed,
    Withdrawn,
    decode,
    encode,
)

from testkit.fake_daemon import FakeDaemon
from testkit.training_parts import Attach, Counter, set_rank, start_of
from testkit.waiting import until


class Tensor:
    """A loss that blocks on a device when it is read."""

    def __init__(self, value: float) -> None:
        self.value = value
        self.reads = 0

    def __float__(self) -> float:
        self.reads += 1
        return self.value


def health_in(directory: Path) -> dict[str, float]:
    return RankManifest.decode((directory / "rank-00000.json").read_bytes()).health


def step_to(guard: swansong.Guard, counter: Counter, last: int, loss: Any = 1.0) -> None:
    for step in range(counter.value + 1, last + 1):
        counter.value = step
        guard.step(step, loss=loss)


# ---------------------------------------------------------------- the loss


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_loss_is_noticed_at_its_step(
    attach: Attach, counter: Counter, caplog: pytest.LogCaptureFixture, bad: float
) -> None:
    """One warning names the step; ``healthy`` is true again with the next finite loss."""
    guard = attach({"counter": counter})
    assert guard.healthy, "the loss is unknown"
    until(lambda: guard._session.staging, what="the welcome")
    step_to(guard, counter, 6)
    assert guard.healthy
    step_to(guard, counter, 9, bad)
    assert not guard.healthy
    warnings = [message for message in caplog.messages if "not finite" in message]
    assert warnings == ["the loss of step 7 is not finite; checkpoints continue, marked unhealthy"]
    step_to(guard, counter, 10)
    assert guard.healthy


def test_a_tensor_is_read_only_when_a_checkpoint_is_taken(
    daemon: FakeDaemon, attach: Attach, counter: Counter
) -> None:
    """Reading a tensor blocks on its device; the checkpoint has the mark anyway."""
    guard = attach({"counter": counter})
    daemon.wait_connected()
    loss = Tensor(math.nan)
    step_to(guard, counter, 9, loss)
    assert loss.reads == 0
    until(lambda: guard.save(9), what="the welcome")
    assert loss.reads > 0
    assert health_in(daemon.wait_sealed(1)[0]) == {"loss_is_finite": 0.0}
    assert not guard.healthy


def test_a_report_contains_whether_the_loss_is_finite(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A finite loss is included, a tensor is not read, and a poll alone causes a report."""
    monkeypatch.setattr(progress_reports, "INTERVAL_S", 0.0)
    said: list[Message] = []
    health = LossMonitor()
    reporter = Reporter(said.append, start_of(), health, SaveCost())
    tensor = Tensor(1.0)
    for step, loss, polls in (
        (1, 0.5, 0),
        (2, math.nan, 0),
        (3, tensor, 0),
        (3, tensor, 0),
        (3, tensor, 1),
    ):
        health.loss = loss
        reporter.tick(step, polls)
    facts = [(p.step, p.loss, p.loss_is_finite) for p in said if isinstance(p, Progress)]
    assert facts == [(1, 0.5, True), (2, None, False), (3, None, None), (3, None, None)]
    assert tensor.reads == 0


@pytest.mark.parametrize(
    ("loss", "sent", "is_finite"),
    [(10**400, None, False), (-(10**400), None, False), (1e305, 1e300, True), (True, 1.0, True)],
    ids=["huge", "huge-negative", "large", "bool"],
)
def test_an_odd_loss_does_not_cost_the_connection(
    monkeypatch: pytest.MonkeyPatch, loss: float, sent: float | None, is_finite: bool
) -> None:
    """The daemon can decode the report with any plain number as the loss."""
    monkeypatch.setattr(progress_reports, "INTERVAL_S", 0.0)
    said: list[Message] = []
    odd = SaveCost(save_s=math.nan, snapshot_s=-1.0, size_bytes=-5)
    health = LossMonitor()
    health.loss = loss
    Reporter(said.append, start_of(), health, odd).tick(1)
    (report,) = said
    assert decode(encode(report)) == Progress(
        1, sent, is_finite, loss_is_usual=True, save_s=None, save_bytes=0, snapshot_s=0.0
    )


# ---------------------------------------------------------------- a loss that explodes


def noisy(step: int, around: float = 2.3) -> float:
    """A loss with a spread of a few percent."""
    return around * (1 + 0.05 * math.sin(7.0 * step))


def train(guard: swansong.Guard, steps: range, loss: Callable[[int], Any] = noisy) -> list[int]:
    """Report these steps; return those after which the guard is not healthy."""
    unhealthy = []
    for step in steps:
        guard.step(step, loss=loss(step))
        if not guard.healthy:
            unhealthy.append(step)
    return unhealthy


def test_a_loss_that_explodes_is_unhealthy_from_the_fifth_step(
    attach: Attach, counter: Counter, caplog: pytest.LogCaptureFixture
) -> None:
    """Although it is finite, and until it is usual again; one warning names step, loss and limit."""
    guard = attach({"counter": counter})
    assert train(guard, range(1, 201)) == []
    assert train(guard, range(201, 211), lambda _: 1e10) == [*range(205, 211)]
    assert train(guard, range(211, 220)) == []
    (warning,) = [message for message in caplog.messages if "marked unhealthy" in message]
    assert "the loss is 1e+10 at step 205, and above its limit of " in warning
    assert "since step 201" in warning


@pytest.mark.parametrize(
    "loss",
    [
        lambda step: 10.8 * math.exp(-step / 100) + noisy(step),
        lambda step: noisy(step) * (1 + step / 100),
        lambda step: noisy(step, 40.0) if step % 9 == 0 else noisy(step),
        lambda step: noisy(step, 900.0) if 100 <= step < 104 else noisy(step),
        lambda step: 0.0 if step < 300 else noisy(step),
        lambda step: -noisy(step, 5.0),
        lambda step: 1.0 if step < 300 else 1.9,
        lambda step: 1.0 + 1e-6 * math.sin(step) if step < 300 else 1.9,
    ],
    ids=[
        *("falls", "rises slowly", "heavy batches", "four"),
        *("zero first", "negative", "constant", "almost constant"),
    ],
)
def test_an_ordinary_loss_is_healthy(
    attach: Attach, counter: Counter, loss: Callable[[int], float]
) -> None:
    """Neither slow changes nor a few high losses in a row are an explosion."""
    assert train(attach({"counter": counter}), range(1, 600), loss) == []


@pytest.mark.usefixtures("daemon")
def test_only_losses_in_a_row_count(
    attach: Attach, counter: Counter, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if the script never reads ``healthy``: a usual loss between them is judged, too."""
    guard = attach({"counter": counter})
    until(lambda: guard._session.staging, what="the welcome")
    for step in range(1, 601):
        guard.step(step, loss=1e10 if step > 500 and step % 5 else noisy(step))
    assert "marked unhealthy" not in caplog.text
    for step in range(601, 611):
        guard.step(step, loss=1e10)
    assert "at step 605" in caplog.text


def test_tensors_that_are_read_count_like_numbers(attach: Attach, counter: Counter) -> None:
    guard = attach({"counter": counter})
    assert train(guard, range(1, 41), lambda step: Tensor(noisy(step))) == []
    assert train(guard, range(41, 47), lambda _: Tensor(100.0)) == [45, 46]


def test_the_rule_can_be_switched_off(attach: Attach, counter: Counter) -> None:
    guard = attach({"counter": counter}, spike=None)
    assert train(guard, range(1, 201)) == []
    assert train(guard, range(201, 211), lambda _: 1e10) == []
    with pytest.raises(ValueError, match=r"spike=0 must be positive, or None"):
        swansong.attach({"counter": counter}, spike=0)


def test_a_checkpoint_is_marked_at_the_first_unusual_loss(
    daemon: FakeDaemon, attach: Attach, counter: Counter
) -> None:
    """A rollback then finds the checkpoint before it."""
    guard = attach({"counter": counter})
    daemon.wait_connected()
    train(guard, range(1, 101))
    until(lambda: guard.save(100), what="the welcome")
    guard.step(101, loss=1e10)
    assert guard.save(101)
    health = [health_in(path) for path in sorted(daemon.wait_sealed(2))]
    assert [each["loss_is_usual"] for each in health] == [1.0, 0.0]
    train(guard, range(102, 106), lambda _: 1e10)
    with pytest.raises(swansong.RestoreError, match="no healthy checkpoint"):
        guard.rollback()
    assert daemon.wait_for(RestoreQuery).before_step == 100


def test_a_resumed_run_keeps_the_limit(
    daemon: FakeDaemon, attach: Attach, counter: Counter
) -> None:
    """Otherwise the first losses of an exploded run would be its usual ones."""
    guard = attach({"counter": counter})
    train(guard, range(1, 101))
    until(lambda: guard.save(100), what="the welcome")
    (found,) = daemon.wait_sealed(1)
    guard.close()
    daemon.restorable = lambda: (found, 100)
    again = attach({"counter": Counter()})
    assert again.restore() == 100
    assert train(again, range(101, 110), lambda _: 1e10) == [*range(105, 110)]


# ---------------------------------------------------------------- rollback


def saved_at_10(attach: Attach, counter: Counter) -> swansong.Guard:
    """A guard that has saved step 10."""
    guard = attach({"counter": counter})
    step_to(guard, counter, 10)
    until(lambda: guard.save(10), what="the welcome")
    return guard


def offer(daemon: FakeDaemon, step: int) -> None:
    """Make the daemon offer the set of this step for a rollback."""
    (found,) = [path for path in daemon.sealed() if f"{step:012d}." in path.name]
    daemon.restorable = lambda: (found, step)


def test_a_rollback_restores_the_state_and_continues(
    daemon: FakeDaemon, attach: Attach, counter: Counter
) -> None:
    """The query is for a step before the suspect one; a set at the next step follows."""
    guard = saved_at_10(attach, counter)
    daemon.wait_sealed(1)
    step_to(guard, counter, 19)
    step_to(guard, counter, 22, math.nan)
    offer(daemon, 10)
    assert guard.rollback() == 10
    query = daemon.wait_for(RestoreQuery)
    assert (query.rollback, query.before_step) == (1, 19), "step 20 began with what step 19 left"
    assert counter.value == 10
    assert guard.healthy
    step_to(guard, counter, 11)
    assert daemon.wait_for(Sealed, 2).step == 11


def test_after_a_rollback_the_same_step_is_saved_again(
    daemon: FakeDaemon, attach: Attach, counter: Counter
) -> None:
    """The set of the first time does not answer a request at the repeated step."""
    guard = saved_at_10(attach, counter)
    step_to(guard, counter, 11, math.nan)
    assert guard.save(11)
    daemon.wait_sealed(2)
    offer(daemon, 10)
    guard.rollback()
    step_to(guard, counter, 11)
    sets = [path for path in daemon.wait_sealed(3) if "011." in path.name]
    assert sorted(health_in(path)["loss_is_finite"] for path in sets) == [0.0, 1.0]


@pytest.mark.fault("T09")
def test_a_request_that_was_answered_before_a_rollback_is_answered_again(
    daemon: FakeDaemon, attach: Attach, counter: Counter
) -> None:
    """A restarted daemon asks again: the answer of the earlier start would be SAFE for this one."""
    guard = saved_at_10(attach, counter)
    daemon.wait_sealed(1)
    daemon.request()
    daemon.wait_for(Accepted)
    step_to(guard, counter, 11)
    daemon.wait_sealed(2)
    offer(daemon, 10)
    guard.rollback()
    step_to(guard, counter, 30)
    daemon.request()
    assert daemon.wait_for(Accepted, 2).step == 30


def test_a_rollback_for_another_reason_excludes_the_current_step(
    daemon: FakeDaemon, attach: Attach, counter: Counter
) -> None:
    """With a finite loss, only checkpoints before the current step are candidates."""
    guard = attach({"counter": counter})
    daemon.wait_connected()
    step_to(guard, counter, 10)
    with pytest.raises(swansong.RestoreError, match="no healthy checkpoint"):
        guard.rollback()
    assert daemon.wait_for(RestoreQuery).before_step == 10
    assert counter.value == 10


def test_rollbacks_without_progress_end(
    daemon: FakeDaemon, attach: Attach, counter: Counter
) -> None:
    """Three return to one step; the fourth is an error.  A newer checkpoint gives three more."""
    guard = saved_at_10(attach, counter)
    daemon.wait_sealed(1)
    offer(daemon, 10)
    for _ in range(3):
        step_to(guard, counter, 12, math.nan)
        assert guard.rollback() == 10
    step_to(guard, counter, 20)
    assert guard.save(20)
    daemon.wait_sealed(2)
    offer(daemon, 20)
    for _ in range(3):
        step_to(guard, counter, 22, math.nan)
        assert guard.rollback() == 20
    step_to(guard, counter, 22, math.nan)
    with pytest.raises(swansong.RestoreError, match="3 rollbacks to step 20 or before it"):
        guard.rollback()


def test_without_loaders_no_batches_can_be_skipped(
    daemon: FakeDaemon, attach: Attach, counter: Counter
) -> None:
    """The error comes before anything is loaded."""
    guard = saved_at_10(attach, counter)
    offer(daemon, 10)
    step_to(guard, counter, 12, math.nan)
    with pytest.raises(ValueError, match=r"TrainingState with a ResumableLoader"):
        guard.rollback(skip_batches=True)
    assert not daemon.all_of(RestoreQuery)


# ---------------------------------------------------------------- periodic checkpoints


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ({}, set()),
        ({"every_steps": 3}, {"periodic"}),
        ({"every_s": 3.0}, {"periodic"}),
        ({"stop_after_save": True}, {"follow_ups"}),
    ],
)
def test_hello_contains_what_the_daemon_may_request(
    daemon: FakeDaemon, attach: Attach, counter: Counter, options: dict[str, Any], missing: set[str]
) -> None:
    """It schedules periodic checkpoints unless the script does, and follow-ups if training continues."""
    attach({"counter": counter}, **options)
    assert {"periodic", "follow_ups"} - set(daemon.wait_for(Hello).capabilities) == missing


def test_a_periodic_request_is_a_periodic_checkpoint_and_does_not_stop_the_trainer(
    daemon: FakeDaemon, attach: Attach, counter: Counter
) -> None:
    """Its kind is ``periodic`` and should_stop stays False; a withdrawn request leaves no files."""
    guard = attach({"counter": counter}, stop_after_save=True)
    daemon.wait_connected()
    step_to(guard, counter, 4)
    daemon.send(Request("periodic-1", "due", 300.0, urgency="drain"))
    until(lambda: guard.request is not None, what="the request")
    step_to(guard, counter, 5)
    assert daemon.wait_for(Sealed).request_id == "periodic-1"
    (directory,) = daemon.wait_sealed(1)
    manifest = RankManifest.decode((directory / "rank-00000.json").read_bytes())
    assert (manifest.kind, manifest.step) == ("periodic", 5)
    assert not guard.should_stop
    daemon.sends_targets = False
    daemon.send(Request("periodic-2", "due", 300.0, urgency="drain"))
    until(lambda: guard.request is not None, what="the second request")
    daemon.send(Withdrawn("periodic-2", "another set was sealed"))
    until(lambda: guard.request is None, what="the withdrawal")
    step_to(guard, counter, 9)
    assert len(daemon.sealed()) == 1


# ---------------------------------------------------------------- pauses


def test_a_pause_longer_than_the_grace_period_causes_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No warning before the first step, while the loop polls, or with an unknown grace period."""
    watch = PauseWatch()
    grace_s = 0.02

    def pauses(*args: int) -> bool:
        watch.tick(*args, grace_s)
        return bool(caplog.messages)

    patience = threading.Event()
    for polls in range(5):
        for step, grace in ((-1, grace_s), (3, 0.0)):
            watch.tick(step, polls, grace)
        patience.wait(2 * grace_s)
        watch.tick(3, polls + 1, grace_s)
    assert not caplog.messages
    until(lambda: pauses(3, 5), what="the warning")
    for _ in range(3):
        patience.wait(grace_s)
        watch.tick(3, 5, grace_s)
    (line,) = caplog.messages
    assert "after step 3" in line
    assert "guard.poll()" in line
    assert caplog.records[0].levelno == logging.WARNING


@pytest.mark.parametrize("requested", [(True, False), (False, True), (False, False)])
def test_ranks_that_get_sigterm_wait_for_a_request_or_leave_together(
    daemon: FakeDaemon,
    attach: Attach,
    monkeypatch: pytest.MonkeyPatch,
    requested: tuple[bool, bool],
) -> None:
    """A request that reaches one of them a little too late does not part them: the first one decides."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr("swansong.guard.SIGTERM_LIMIT_S", 0.0)
    guards = []
    for rank in range(2):
        set_rank(monkeypatch, rank)
        guards.append(attach({"model": torch.nn.Linear(2, 1)}))
    until(lambda: all(each._session.staging and each._session.start.id for each in guards))
    for guard, is_requested in zip(guards, requested, strict=True):
        ids = iter(["r1" if is_requested else "", "r1"])  # a late one comes during a longer wait
        guard._agreement.wait_requested = lambda *_, ids=ids, **__: next(ids)  # type: ignore[method-assign,misc]
        guard._agreement.ask_for_request = guard._agreement.wait_requested  # type: ignore[method-assign]
        guard._agreement.wait_taken = lambda *_: True  # type: ignore[method-assign]
        guard._answer()
    assert [guard._has_left for guard in guards] == [requested[0]] * 2


def test_after_sigterm_a_trainer_waits_for_the_answer_of_its_daemon(
    daemon: FakeDaemon, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon may be slow; it gets the query again when a connection is lost.

    It asks again after a request that is withdrawn, perhaps for the notice of a termination.
    """
    counter = Counter()
    guard = attach({"counter": counter}, stop_after_save=True)
    until(lambda: guard._session.staging)
    step_to(guard, counter, 3)
    guard._answer()
    assert len(daemon.all_of(RequestQuery)) == 1, (
        "it ends after the answer that there is no request"
    )
    answers: list[list[Message]] = [[], *([Request(name, "test", 60.0)] for name in ("r1", "r2"))]
    monkeypatch.setattr(daemon, "on_request_query", lambda: answers.pop(0))
    ending = threading.Thread(target=guard._answer)
    ending.start()
    daemon.wait_for(RequestQuery, 2)
    daemon.drop()
    until(lambda: guard.request is not None or not ending.is_alive())
    daemon.send(Withdrawn("r1", "a notice"))
    until(lambda: guard.request is not None and guard.request.id == "r2")
    step_to(guard, counter, 5)
    assert guard.should_stop
    monkeypatch.setattr(guard, "_is_request_taken", lambda: pytest.fail("it waits again"))
    again = threading.Thread(target=guard._answer)  # the checkpoint was saved before SIGTERM
    again.start()
    guard.close()
    ending.join()
    again.join()


def test_an_older_daemon_is_not_asked_for_a_request(
    daemon: FakeDaemon, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would refuse the unknown message, and close the connection."""
    monkeypatch.setattr("swansong.guard.UNASKED_S", 0.0)
    daemon.takes_request_query = False
    guard = attach({"counter": Counter()})
    until(lambda: guard._session.staging)
    guard._answer()
    guard.close()
    daemon.wait_for(Bye)
    assert not daemon.all_of(RequestQuery)
