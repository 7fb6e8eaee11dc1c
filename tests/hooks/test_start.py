# SPDX-License-Identifier: Apache-2.0
"""One start of the training: all ranks have one id, and report what the start has loaded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
import swansong
from swansong._checkpoint import restore_query
from swansong._daemon import session
from swansong._ranks.agreement import Ranks
from swansong._ranks.rendezvous import Rendezvous
from swansong.layout import RankManifest
from swansong.protocol import (
    PARENT_NONE,
    PARENT_UNKNOWN,
    Begin,
    Declined,
    Finish,
    Hello,
    Progress,
    Refused,
    Restored,
    RestoreQuery,
    StartDrawn,
)

from testkit.fake_daemon import FakeDaemon
from testkit.job_store import MemoryJobStore
from testkit.training_parts import Attach, Counter, set_rank
from testkit.waiting import in_threads, until

T = TypeVar("T")
AttachRank = Callable[[int], swansong.Guard]
UNKNOWN = (PARENT_UNKNOWN, -1)


@pytest.fixture
def rank(attach: Attach, monkeypatch: pytest.MonkeyPatch) -> AttachRank:
    """Function that attaches this rank of a job with two ranks on one VM."""

    def attach_rank(rank: int) -> swansong.Guard:
        set_rank(monkeypatch, rank)
        return attach({"counter": Counter()})

    return attach_rank


def together(*calls: Callable[[], T]) -> list[T]:
    """Call the functions in one thread each, as the ranks of a job do; returns their results."""
    return in_threads(len(calls), lambda number: calls[number]())


def saved(daemon: FakeDaemon, step: int, *guards: swansong.Guard) -> tuple[Path, str]:
    """Save a set of this step with all ranks; returns its path, and the start that all parts name."""
    count = len(daemon.sealed())
    assert all(together(*(partial(guard.save, step) for guard in guards)))
    (found,) = [path for path in daemon.wait_sealed(count + 1) if f"{step:012d}." in path.name]
    parts = [RankManifest.decode(path.read_bytes()) for path in found.glob("rank-*.json")]
    assert len(parts) == len(guards)
    (start_id,) = {part.start_id for part in parts}
    return found, start_id


def starts_in(daemon: FakeDaemon) -> list[tuple[int, str, tuple[str, int]]]:
    """Return first step, id and parent of each start that the ranks have reported."""
    reports = [report for report in daemon.all_of(Progress) if report.start_id]
    return [(each.step, each.start_id, (each.parent, each.parent_step)) for each in reports]


def parent_of(hello: Hello) -> tuple[str, int]:
    return hello.parent, hello.parent_step


# ---------------------------------------------------------------- one id for all ranks


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_all_ranks_of_a_vm_have_the_start_of_rank_0(
    daemon: FakeDaemon, rank: AttachRank, order: tuple[int, int]
) -> None:
    """In any order of attach(): rank 0 has it in its first Hello, and rank 1 waits for it in restore()."""
    first = rank(order[0])
    restoring = threading.Thread(target=first.restore)
    restoring.start()
    daemon.wait_for(Hello)
    second = rank(order[1])
    second.restore()
    restoring.join(60)
    _, start_id = saved(daemon, 5, first, second)
    hellos = {hello.rank: hello.start_id for hello in daemon.all_of(Hello)}
    assert hellos == {0: start_id, 1: ""}
    until(lambda: len(starts_in(daemon)) == 2)
    assert {query.start_id for query in daemon.all_of(RestoreQuery)} == {start_id}
    assert set(starts_in(daemon)) == {(0, start_id, (PARENT_NONE, 0))}


def test_a_rank_that_has_its_start_from_the_store_takes_none_from_the_daemon(
    daemon: FakeDaemon, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for no rank 0 at the daemon, and a rank 0 of another launch may be connected there."""
    ranks = Ranks(1, 1, world_size=2, local_world_size=2, start_id="own")
    monkeypatch.setattr(swansong.guard, "find_ranks", lambda _: ranks)
    guard = attach({"counter": Counter()})
    daemon.send(StartDrawn("another"))
    assert guard.restore() == 0
    assert daemon.wait_for(Hello).start_id == daemon.wait_for(RestoreQuery).start_id == "own"


def test_a_rank_without_rank_0_does_not_train(
    daemon: FakeDaemon, rank: AttachRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """restore() fails with the fix, a request is declined, and nothing is saved."""
    monkeypatch.setattr(restore_query, "PATIENCE_S", 0.1)
    guard = rank(1)
    daemon.wait_connected()
    with pytest.raises(
        swansong.RestoreError,
        match=rf"rank 0 .* not connected to the daemon at {daemon.path} .*: call swansong.attach\(\) on",
    ):
        guard.restore()
    guard.step(1)
    daemon.request()
    assert "rank 0" in daemon.wait_for(Declined).reason
    assert not guard.save(1)
    assert daemon.partial() == []
    rank(0)
    until(lambda: guard.save(1), what="the start")
    until(lambda: starts_in(daemon), what="the report of the start")
    assert starts_in(daemon)[0] == (0, daemon.wait_for(Hello, 2).start_id, UNKNOWN)


def test_a_refused_rank_does_not_wait_for_rank_0(
    daemon: FakeDaemon, rank: AttachRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has the reason of the daemon."""
    monkeypatch.setattr(restore_query, "PATIENCE_S", 1000.0)
    guard = rank(1)
    errors: list[str] = []

    def restore_it() -> None:
        with pytest.raises(swansong.RestoreError) as caught:
            guard.restore()
        errors.append(str(caught.value))

    threading.Thread(target=restore_it, daemon=True).start()
    daemon.wait_connected()
    daemon.send(Refused("another run"))
    until(lambda: errors, what="the error")
    assert "refuses this process: another run" in errors[0]


def test_without_a_daemon_no_rank_waits(rank: AttachRank) -> None:
    """Rank 1 starts at step 0."""
    assert rank(1).restore() == 0


def test_a_rank_keeps_its_start(daemon: FakeDaemon, rank: AttachRank) -> None:
    """After a reconnect each Hello has the same start, and a start of another id changes nothing."""
    guards = rank(0), rank(1)
    together(*(guard.restore for guard in guards))
    start_id = daemon.wait_for(RestoreQuery).start_id
    daemon.send(StartDrawn("another"))
    daemon.stop()
    daemon.received.clear()
    daemon.start()
    daemon.wait_for(Hello, 2)
    assert {hello.start_id for hello in daemon.all_of(Hello)} == {start_id}
    assert {parent_of(hello) for hello in daemon.all_of(Hello)} == {(PARENT_NONE, 0)}
    assert daemon.all_of(Begin) == []
    assert saved(daemon, 5, *guards)[1] == start_id


# ---------------------------------------------------------------- further starts


def test_a_rollback_begins_the_next_start_on_all_ranks(
    daemon: FakeDaemon, rank: AttachRank
) -> None:
    """Each rank announces it before its query; sets and reports name it, and its parent is what it loads."""
    guards = rank(0), rank(1)
    together(*(guard.restore for guard in guards))
    for guard in guards:
        guard.step(10)
    found, first = saved(daemon, 10, *guards)
    daemon.restorable = lambda: (found, 10)
    for number in (1, 2):
        daemon.received.clear()
        for guard in guards:
            guard.step(20)
        assert together(*(guard.rollback for guard in guards)) == [10, 10]
        until(lambda: len(starts_in(daemon)) == 2)
        begun, *_, asked = [m for m in daemon.received if isinstance(m, Begin | RestoreQuery)]
        assert begun == Begin(f"{first}~{number}")
        assert isinstance(asked, RestoreQuery)
        queries = {(query.rollback, query.start_id) for query in daemon.all_of(RestoreQuery)}
        assert queries == {(number, f"{first}~{number}")}
        assert set(starts_in(daemon)) == {(10, f"{first}~{number}", (first, 10))}
    assert saved(daemon, 11, *guards)[1] == f"{first}~2"


def test_a_reconnect_in_a_rollback_repeats_the_start_before_the_query(
    daemon: FakeDaemon, attach: Attach
) -> None:
    """A restarted daemon knows the new start when it gets the query."""
    guard = attach({"counter": Counter()})
    guard.restore()
    guard.step(10)
    found, first = saved(daemon, 10, guard)
    daemon.on_query = lambda _: None
    rolling_back = threading.Thread(target=guard.rollback)
    rolling_back.start()
    daemon.wait_for(RestoreQuery, 2)
    daemon.stop()
    daemon.received.clear()
    daemon.start()
    query = daemon.wait_for(RestoreQuery)
    assert [type(message) for message in daemon.received[:3]] == [Hello, Begin, RestoreQuery]
    assert daemon.wait_for(Begin).start_id == query.start_id == f"{first}~1"
    assert parent_of(daemon.wait_for(Hello)) == UNKNOWN
    daemon.send(Restored(query.query_id, str(found), 10, 1))
    rolling_back.join(60)
    until(lambda: (10, f"{first}~1", (first, 10)) in starts_in(daemon))


def test_a_rollback_that_finds_nothing_counts(daemon: FakeDaemon, attach: Attach) -> None:
    """Training continues as the start that the last rollback has announced, with an unknown parent."""
    guard = attach({"counter": Counter()})
    guard.restore()
    guard.step(10)
    for _ in range(2):
        with pytest.raises(swansong.RestoreError, match="no healthy checkpoint"):
            guard.rollback()
    first = daemon.wait_for(Hello).start_id
    starts = list(dict.fromkeys(begun.start_id for begun in daemon.all_of(Begin)))
    assert starts == [f"{first}~1", f"{first}~2"]
    assert saved(daemon, 10, guard)[1] == f"{first}~2"
    daemon.drop()
    assert parent_of(daemon.wait_for(Hello, 2)) == UNKNOWN


def test_a_second_restore_begins_the_next_start(daemon: FakeDaemon, attach: Attach) -> None:
    """The query names it, so that the daemon does not repeat the first answer."""
    guard = attach({"counter": Counter()})
    guard.restore()
    guard.step(10)
    found, first = saved(daemon, 10, guard)
    daemon.restorable = lambda: (found, 10)
    assert guard.restore() == 10
    daemon.wait_for(RestoreQuery, 2)
    assert [query.start_id for query in daemon.all_of(RestoreQuery)] == [first, f"{first}~1"]
    assert daemon.wait_for(Begin).start_id == f"{first}~1"
    until(lambda: starts_in(daemon)[1:] == [(10, f"{first}~1", (first, 10))])


@pytest.mark.fault("T09")
@pytest.mark.parametrize("reconnects", [False, True])
def test_a_failed_restore_begins_the_start_over(
    daemon: FakeDaemon, attach: Attach, tmp_path: Path, reconnects: bool
) -> None:
    """A rank that has asked counts as one that loads the newest state, until the daemon learns better."""
    guard = attach({"counter": Counter()})
    daemon.restorable = lambda: (tmp_path, 5)
    with pytest.raises(swansong.RestoreError, match="cannot restore"):
        guard.restore()
    begun = daemon.wait_for(Begin)
    assert begun.start_id == daemon.wait_for(RestoreQuery).start_id
    if reconnects:
        daemon.drop()
        assert daemon.wait_for(Begin, 2) == begun


def test_a_script_that_loads_an_older_state_begins_the_next_start(
    daemon: FakeDaemon, rank: AttachRank
) -> None:
    """At the step itself, and not at a report: all ranks give their next set the same start."""
    guards = rank(0), rank(1)
    together(*(guard.restore for guard in guards))
    for step in (1, 2, 3):
        guards[0].step(step)
    guards[1].step(3)
    found, first = saved(daemon, 3, *guards)
    for guard in guards:
        guard.step(2)
        guard.step(3)
    repeated, second = saved_again(daemon, 3, found, *guards)
    assert second == f"{first}~1"
    assert repeated != found, "the state of the first time is another one"
    until(lambda: len(starts_in(daemon)) == 4)
    assert set(starts_in(daemon)[2:]) == {(1, second, UNKNOWN)}
    assert {begun.start_id for begun in daemon.all_of(Begin)} == {second}


def test_ranks_agree_on_a_start_that_began_without_a_daemon(
    tmp_path: Path, rank: AttachRank
) -> None:
    """Rank 0 tells a later daemon the further start; the other ranks count it themselves."""
    guards = rank(0), rank(1)
    for guard in guards:
        guard.step(3)
        guard.step(2)
    with FakeDaemon(tmp_path) as daemon:
        daemon.wait_connected(2)
        until(lambda: len(starts_in(daemon)) == 2)
        ((_, start_id, _),) = set(starts_in(daemon))
        assert start_id.endswith("~1")
        assert saved(daemon, 2, *guards)[1] == start_id


def saved_again(
    daemon: FakeDaemon, step: int, known: Path, *guards: swansong.Guard
) -> tuple[Path, str]:
    """Save another set of a step that ``known`` has; returns its path and its start."""
    assert all(together(*(partial(guard.save, step) for guard in guards)))
    (found,) = [path for path in daemon.wait_sealed(2) if path != known]
    return found, RankManifest.decode((found / "rank-00001.json").read_bytes()).start_id


# ---------------------------------------------------------------- what the start has loaded


@pytest.mark.parametrize("how", ["the daemon", "SWANSONG_RESTORE", "from_directory", "no start"])
def test_a_restored_start_names_its_parent(
    daemon: FakeDaemon, attach: Attach, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """From any source, and in each Hello since; a manifest without a start is an unknown parent."""
    earlier = attach({"counter": Counter()})
    earlier.restore()
    earlier.step(7)
    found, first = saved(daemon, 7, earlier)
    expected = first, 7
    if how == "no start":
        manifest = found / "rank-00000.json"
        manifest.write_text(manifest.read_text().replace(first, ""))
        expected = UNKNOWN
    until(lambda: starts_in(daemon), what="the report of the earlier start")
    daemon.received.clear()
    guard = attach({"counter": Counter()})
    assert parent_of(daemon.wait_for(Hello)) == UNKNOWN, "nothing was loaded yet"
    if how == "the daemon":
        daemon.restorable = lambda: (found, 7)
    elif how == "SWANSONG_RESTORE":
        monkeypatch.setenv("SWANSONG_RESTORE", str(found))
    assert guard.restore(found if how in ("from_directory", "no start") else None) == 7
    until(lambda: starts_in(daemon), what="the report of the start")
    ((step, second, parent),) = starts_in(daemon)
    assert (step, parent) == (7, expected)
    assert second != first
    daemon.drop()
    again = daemon.wait_for(Hello, 2)
    assert (again.start_id, parent_of(again)) == (second, expected)


def test_a_fresh_run_without_a_daemon_is_fresh_for_a_later_one(
    tmp_path: Path, attach: Attach
) -> None:
    """The daemon that starts later learns from the Hello that nothing was loaded."""
    guard = attach({"counter": Counter()})
    guard.restore()
    guard.step(5)
    with FakeDaemon(tmp_path) as daemon:
        hello = daemon.wait_for(Hello)
        assert (hello.step, parent_of(hello)) == (5, (PARENT_NONE, 0))
        until(lambda: starts_in(daemon) == [(0, hello.start_id, (PARENT_NONE, 0))])


# ---------------------------------------------------------------- several VMs


@pytest.fixture
def vms(tmp_path: Path) -> Iterator[list[FakeDaemon]]:
    """The daemons of two VMs."""
    with ExitStack() as opened:
        daemons = []
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            daemons.append(opened.enter_context(FakeDaemon(tmp_path / name)))
        yield daemons


def test_over_several_vms_the_rendezvous_names_the_start(
    vms: list[FakeDaemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it a rank saves and reports nothing; its report follows Begin at once.  A rollback is ``~1``."""
    for name in ("TICK_S", "WATCHFUL_TICK_S"):
        monkeypatch.setattr(f"swansong.guard.{name}", 1000.0)
    store = MemoryJobStore()
    monkeypatch.setattr(session, "Rendezvous", partial(Rendezvous, open_store=store.connect))
    guards = []
    with ExitStack() as opened:
        for number, daemon in enumerate(vms):
            set_rank(monkeypatch, number, local_world_size=1)
            guards.append(swansong.attach({"counter": Counter()}, socket=daemon.path))
            opened.callback(guards[-1]._end, "test over")
            if number == 0:
                daemon.wait_connected()
                guards[0].step(1)
                assert not guards[0].save(1)
        guards[1].step(1)
        for daemon in vms:
            until(lambda daemon=daemon: len(starts_in(daemon)) == 1)
            first = daemon.wait_for(Begin).start_id
            assert daemon.wait_for(Hello).start_id == ""
            assert starts_in(daemon) == [(0, first, UNKNOWN)]
            named = [type(each) for each in daemon.received if getattr(each, "start_id", "")]
            assert named == [Finish, Begin, Progress]
        for guard, daemon in zip(guards, vms, strict=True):
            found, start_id = one_part(daemon, guard, 1)
            assert start_id == first
            daemon.restorable = lambda found=found: (found, 1)
            guard.step(2)
        assert together(*(guard.rollback for guard in guards)) == [1, 1]
        for daemon in vms:
            assert daemon.wait_for(Begin, 2).start_id == f"{first}~1"
            until(lambda daemon=daemon: starts_in(daemon)[1:] == [(1, f"{first}~1", (first, 1))])
            assert daemon.all_of(RestoreQuery)[-1].start_id == f"{first}~1"
            daemon.drop()
            assert daemon.wait_for(Begin, 3).start_id == f"{first}~1"


def one_part(daemon: FakeDaemon, guard: swansong.Guard, step: int) -> tuple[Path, str]:
    """Save a VM's part of a set; returns its path and its start."""
    assert guard.save(step)
    (found,) = daemon.wait_sealed(1)
    (part,) = found.glob("rank-*.json")
    return found, RankManifest.decode(part.read_bytes()).start_id
