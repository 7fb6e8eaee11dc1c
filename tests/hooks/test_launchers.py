# SPDX-License-Identifier: Apache-2.0
"""The position of a process in its job: from each launcher's variables, and from ``torch.distributed``."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import swansong
from swansong._ranks import position
from swansong._ranks.agreement import Ranks
from swansong._ranks.environment import PositionError, ranks_from_environment
from swansong._ranks.position import find_ranks
from swansong.protocol import Failed, Sealed

from testkit.fake_daemon import FakeDaemon
from testkit.job_store import MemoryJobStore
from testkit.training_parts import Counter
from testkit.waiting import in_threads, until

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "6",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "3",
}
SRUN = {
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "3"}
RAY_TRAIN = {
    "RANK": "2",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "NODE_RANK": "1",
}
BATCH = {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
ALONE = Ranks()
OF_SRUN = Ranks(3, 1, 7, 2, 1, 4)
OF_MPIRUN = Ranks(1, 1, 4, 4, 0, 1)


@pytest.mark.parametrize(
    ("environ", "ranks"),
    [
        ({}, ALONE),
        ({"WORLD_SIZE": "1", "RANK": "0"}, ALONE),
        (TORCHRUN, Ranks(3, 1, 6, 2, 1, 3)),
        ({"RANK": "3", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2"}, Ranks(3, 1, 6, 2, 1, 3)),
        (
            {"RANK": "5", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "3"},
            Ranks(5, 1, 6, 2, 2, 3),
        ),
        (RAY_TRAIN, Ranks(2, 0, 4, 2, 1, 2)),
        (SRUN, OF_SRUN),
        ({**SRUN, "RANK": "3", "WORLD_SIZE": "7"}, OF_SRUN),
        ({**SRUN, **TORCHRUN}, Ranks(3, 1, 6, 2, 1, 3)),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}, ALONE),
        (BATCH, ALONE),
        (MPIRUN, OF_MPIRUN),
        ({**SRUN, **MPIRUN}, OF_MPIRUN),
        (HYDRA, Ranks(2, 2, 3, 3)),
        ({"PMI_RANK": "3", "PMI_SIZE": "7", **SRUN}, OF_SRUN),
    ],
    ids=[
        *(
            "nothing",
            "one of one",
            "torchrun",
            "the least of torchrun",
            "no GROUP_RANK",
            "Ray Train",
            "srun",
        ),
        *("srun and RANK", "torchrun in srun", "srun of one task", "a batch script"),
        *("mpirun", "mpirun in srun", "hydra", "srun with PMI"),
    ],
)
def test_the_variables_of_each_launcher(environ: dict[str, str], ranks: Ranks) -> None:
    """Rank, rank on this VM, their numbers, the VM and the number of VMs."""
    assert ranks_from_environment(environ) == ranks


@pytest.mark.parametrize(
    ("environ", "error"),
    [
        ({"WORLD_SIZE": "2", "RANK": "0"}, "LOCAL_WORLD_SIZE is not set; call torch.distributed"),
        (
            {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
            "RANK is not set; start the ranks with torchrun",
        ),
        ({**TORCHRUN, "RANK": "six"}, "RANK='six' is not a number"),
        ({**TORCHRUN, "RANK": "6"}, "RANK is 6; it must be from 0 to 5, because of WORLD_SIZE"),
        ({**TORCHRUN, "LOCAL_RANK": "-1"}, "LOCAL_RANK is -1"),
        (
            {**TORCHRUN, "LOCAL_WORLD_SIZE": "7"},
            "LOCAL_WORLD_SIZE is 7; .* at most 6, as WORLD_SIZE",
        ),
        ({**TORCHRUN, "GROUP_RANK": "3"}, "GROUP_RANK is 3"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is 0"),
        ({**SRUN, "RANK": "3", "WORLD_SIZE": "2"}, "RANK is 3"),
        ({**SRUN, "RANK": "1", "WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE is not set"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2,x"}, "'2,x' is not a list of tasks per node"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "1(x999999999)"}, "is not a list of tasks"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, "contradict each other"),
        ({**SRUN, "SLURM_NODEID": "4"}, "SLURM_NODEID is 4; it must be from 0 to 3"),
        ({**SRUN, "SLURM_LOCALID": ""}, "SLURM_LOCALID is not set"),
        (
            {**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            "does not report which VM this is; call torch",
        ),
        ({**HYDRA, "PMI_RANK": "3"}, "PMI_RANK is 3"),
    ],
)
def test_impossible_variables_are_an_error_with_the_fix(
    environ: dict[str, str], error: str
) -> None:
    """The error names the variable and its value."""
    with pytest.raises(PositionError, match=error):
        ranks_from_environment(environ)


# ---------------------------------------------------------------- torch.distributed


class Group:
    """A process group of which this process is the rank that the test names."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = MemoryJobStore()
        self.own = threading.local()
        module = SimpleNamespace(
            is_available=lambda: True,
            is_initialized=lambda: self.place is not None,
            get_rank=lambda: self.place[0],
            get_world_size=lambda: self.place[1],
        )
        monkeypatch.setitem(sys.modules, "torch.distributed", module)
        monkeypatch.setattr(position, "store_of_group", lambda: self.store)

    @property
    def place(self) -> Any:
        """Rank and number of ranks for the calling thread; None without a process group."""
        return getattr(self.own, "place", None)

    def join(self, rank: int, world_size: int) -> None:
        self.own.place = rank, world_size

    def destroy(self) -> None:
        self.own.place = None


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    return Group(monkeypatch)


def find_all(group: Group, monkeypatch: pytest.MonkeyPatch, sockets: list[Path]) -> list[Ranks]:
    """Find the position of each rank, which uses the socket in its place of the list."""
    monkeypatch.setattr(position, "_exchanges", iter([7] * len(sockets)))

    def find(rank: int) -> Ranks:
        group.join(rank, len(sockets))
        return find_ranks(str(sockets[rank]))

    return in_threads(len(sockets), find)


def test_ranks_without_variables_exchange_their_daemons(
    group: Group, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ranks of one daemon are on one VM, in any order."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    first, second = tmp_path / "a" / "sock", tmp_path / "b" / "sock"
    found = find_all(group, monkeypatch, [second, first, first, second, first])
    places = [(r.rank, r.local_rank, r.local_world_size, r.node) for r in found]
    assert places == [(0, 0, 2, 0), (1, 0, 3, 1), (2, 1, 3, 1), (3, 1, 2, 0), (4, 2, 3, 1)]
    assert {(r.world_size, r.nodes) for r in found} == {(5, 2)}


def test_a_bind_mounted_socket_is_the_same_daemon(
    group: Group, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The directory is the same one under another path, as in a container."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").symlink_to("a")
    sockets = [tmp_path / "a" / "sock", tmp_path / "b" / "sock", tmp_path / "a" / "other"]
    found = find_all(group, monkeypatch, sockets)
    assert [(r.node, r.nodes) for r in found] == [(0, 2), (0, 2), (1, 2)]


@pytest.mark.parametrize(
    "environ",
    [
        TORCHRUN,
        {**SRUN, "SLURM_STEP_NUM_TASKS": "2"},
        SRUN,
        {"RANK": "x", "WORLD_SIZE": "2"},
        {"WORLD_SIZE": "2"},
    ],
)
def test_torch_distributed_overrides_the_variables(
    group: Group, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, environ: dict[str, str]
) -> None:
    """Variables of an outer job, or broken ones, decide nothing, also if they fit to one of the ranks."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    group.join(0, 1)
    assert find_ranks(str(tmp_path / "sock")) == Ranks()
    found = find_all(group, monkeypatch, [tmp_path / "sock"] * 2)
    assert [(r.rank, r.local_rank, r.world_size, r.nodes) for r in found] == [
        (0, 0, 2, 1),
        (1, 1, 2, 1),
    ]


def test_the_ranks_of_a_vm_agree_on_another_start_in_a_store_that_outlives_them(
    group: Group, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The agents of torchrun keep the store over a restart.  Over several VMs the rendezvous has it."""
    (tmp_path / "b").mkdir()
    sockets = [tmp_path / "sock"] * 3
    starts = [{each.start_id for each in find_all(group, monkeypatch, sockets)} for _ in range(3)]
    assert [len(each) for each in starts] == [1, 1, 1]
    assert len(set.union(*starts, {""})) == 4
    group.store = MemoryJobStore()
    others = find_all(group, monkeypatch, [*sockets, tmp_path / "b" / "sock"])
    assert {each.start_id for each in others} == {""}


def test_a_rank_that_does_not_attach_after_a_restart_is_an_error(
    group: Group, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The store has the answers of the ranks before."""
    find_all(group, monkeypatch, [tmp_path / "sock"] * 2)
    monkeypatch.setattr(position, "ATTACH_LIMIT_S", 0.05)
    for rank in (0, 1):
        monkeypatch.setattr(position, "_exchanges", iter([7]))
        group.join(rank, 2)
        with pytest.raises(PositionError, match=f"rank {1 - rank} of 2 did not call swansong"):
            find_ranks(str(tmp_path / "sock"))


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_does_not_attach_is_named(
    group: Group,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    absent: int,
) -> None:
    """The others log a warning soon, get an error later, and do not wait forever."""
    monkeypatch.setattr(position, "ATTACH_WARNING_S", 0.01)
    monkeypatch.setattr(position, "ATTACH_LIMIT_S", 0.05)
    monkeypatch.setattr(position, "_ANSWER_LIMIT_S", 0.05)
    group.join(1 - absent, 2)
    with pytest.raises(PositionError, match=f"rank {absent} of 2 did not call swansong.attach"):
        find_ranks(str(tmp_path / "sock"))
    assert f"waiting for rank {absent} to call swansong.attach()" in caplog.text


def test_a_broken_store_is_an_error_in_words(group: Group, tmp_path: Path) -> None:
    """The store of the process group fails: attach() raises with the fix."""
    group.store.is_broken = True
    group.join(0, 2)
    with pytest.raises(PositionError, match="process group: ConnectionError: the store is gone"):
        find_ranks(str(tmp_path / "sock"))


# ---------------------------------------------------------------- the guard


def test_a_process_group_after_attach_is_refused_at_the_start(
    daemon: FakeDaemon, attach: Any, counter: Counter, group: Group
) -> None:
    """restore() and the first step raise with the fix, with and without a daemon."""
    guards = [attach({"counter": counter})]
    guards.append(swansong.attach({"counter": counter}, socket="/nowhere/sock"))
    group.join(0, 2)
    with pytest.raises(swansong.RestoreError, match="init_process_group"):
        guards[0].restore()
    for guard in guards:
        with pytest.raises(PositionError, match="but it was rank 0 of 1"):
            guard.step(1)
    guards[1].close()


def test_a_second_guard_of_one_process_is_refused(
    daemon: FakeDaemon, attach: Any, counter: Counter
) -> None:
    """The daemon would ask only one of them to save; after close() another one is allowed."""
    with attach({"counter": counter}):
        with pytest.raises(RuntimeError, match="pass all objects in one state, or close"):
            swansong.attach({"other": Counter()}, socket=daemon.path)
        swansong.attach({"counter": counter}, socket="/nowhere/sock").close()
    swansong.attach({"other": Counter()}, socket=daemon.path).close()


def test_a_contradiction_is_never_saved(
    daemon: FakeDaemon, attach: Any, counter: Counter, group: Group
) -> None:
    """A process group that appears during the training: each checkpoint fails with the reason."""
    guard = attach({"counter": counter})
    until(lambda: guard.save(1))
    daemon.wait_for(Sealed)
    guard.step(1)
    group.join(1, 2)
    daemon.request("r1")
    daemon.wait_for(swansong.protocol.Accepted)
    for step in range(2, 5):
        guard.step(step)
    assert "rank 1 of 2 in torch.distributed" in daemon.wait_for(Failed).reason
    assert not guard.save(5)
    assert len(daemon.all_of(Sealed)) == 1
    group.destroy()
    assert guard.save(6), "the process group is destroyed before the last checkpoint"
