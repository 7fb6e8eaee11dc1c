# SPDX-License-Identifier: Apache-2.0
"""A rank of a job over several VMs asks for the files that it reads, and for all files if it needs more."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from swansong._checkpoint.load import RestoreError, load_checkpoint
from swansong._checkpoint.restore_query import RestoreClient
from swansong._ranks.agreement import Ranks
from swansong._ranks.choice import Choice, Outcome, RestoreChoice
from swansong._torch.sharding import writers
from swansong.layout import FileEntry, RankManifest, rank_directory, rank_manifest_name
from swansong.protocol import Message, Restored, RestoreQuery, ShardsTaken, ShardVerified
from swansong.torch import TrainingState
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from testkit.training_parts import save_part, start_of

STEP = 7


class Job:
    """One rank, whose optimizer and weights differ from those of the other ranks."""

    def __init__(self, ranks: Ranks, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.ranks = ranks
        self.model = nn.Linear(6, 9)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.state = TrainingState(self.model, self.optimizer)
        self.state.ranks = ranks

    def facts(self) -> list[torch.Tensor]:
        moments = [each for state in self.optimizer.state.values() for each in state.values()]
        return [*self.model.state_dict().values(), *moments, torch.get_rng_state()]


def one_of(world_size: int, rank: int = 1) -> Ranks:
    """A rank of a job with one rank on each VM."""
    return Ranks(rank=rank, world_size=world_size, node=rank, nodes=world_size)


def saved(
    directory: Path,
    world_size: int = 2,
    change: Callable[[Job], object] = lambda _: None,
    *,
    step: int = STEP,
) -> Path:
    """A checkpoint of this number of ranks."""
    for rank in range(world_size):
        job = Job(one_of(world_size, rank), seed=rank)
        job.model(torch.ones(2, 6)).sum().backward()
        job.optimizer.step()
        change(job)
        own = save_part(job.state, directory, rank) / rank_directory(rank)
        manifest = RankManifest(
            run="run",
            step=step,
            kind="periodic",
            files=[
                FileEntry(f"{own.name}/{path.name}", path.stat().st_size) for path in own.iterdir()
            ],
            rank=rank,
            world_size=world_size,
        )
        (directory / rank_manifest_name(rank)).write_bytes(manifest.encode())
    return directory


class Daemon:
    """Provides the files that a query names, and those of the queries before it."""

    def __init__(self, commit: Path, restored: Path) -> None:
        self.queries: list[RestoreQuery] = []
        self.loses = ""
        """Beginning of the paths of files that are never provided."""
        self._commit, self._restored = commit, restored
        chosen = {"generation": 1, "step": STEP}
        choice = SimpleNamespace(for_resume=lambda _, fetch: {**chosen, **fetch(chosen)})
        self.client = RestoreClient(
            self._answer, start_of(Ranks(nodes=2)), cast("RestoreChoice", choice)
        )

    def _answer(self, message: Message) -> None:
        assert isinstance(message, RestoreQuery)
        self.queries.append(message)
        for path in self._commit.rglob("*"):
            name = str(path.relative_to(self._commit))
            is_asked = not message.prefixes or name.replace(".json", "/").startswith(
                tuple(message.prefixes)
            )
            is_lost = self.loses and name.startswith(self.loses)
            if path.is_file() and is_asked and not is_lost:
                (self._restored / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, self._restored / name)
        answer = Restored(message.query_id, path=str(self._restored), step=STEP, generation=1)
        self.client.receive(answer)

    def resume(self, job: Job) -> None:
        """Load as ``guard.restore()`` does."""
        arrivals = job.state.arrivals()
        answer = self.client.find_newest(arrivals)
        load_checkpoint(answer.path, job.ranks, job.state, wanted_step=STEP, reads=arrivals.reads)

    def prefixes(self) -> list[list[str]]:
        assert all((query.generation, query.step) == (1, STEP) for query in self.queries)
        return [query.prefixes for query in self.queries]


def of_whole_commit(commit: Path, ranks: Ranks) -> list[torch.Tensor]:
    """The state after a load from the whole commit."""
    job = Job(ranks, seed=99)
    load_checkpoint(str(commit), ranks, job.state)
    return [each.clone() for each in job.facts()]


def check_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert len(one) == len(other)
    assert all(map(torch.equal, one, other))


def test_a_rank_loads_from_its_own_files(tmp_path: Path) -> None:
    """It asks once, for its own files, and the state is that of a load from the whole commit."""
    commit = saved(tmp_path / "commit")
    daemon, job = Daemon(commit, tmp_path / "restored"), Job(one_of(2), seed=50)
    daemon.resume(job)
    assert daemon.prefixes() == [["rank-00001/"]]
    assert not (tmp_path / "restored" / "rank-00000").exists()
    facts = job.facts()
    check_equal(facts, of_whole_commit(commit, job.ranks))


def as_with_ddp(job: Job) -> None:
    common = {each.data_ptr() for each in job.model.parameters()}
    job.state._common_memory = lambda: common  # type: ignore[method-assign]


@pytest.mark.parametrize("case", ["fewer ranks", "more ranks", "other layout"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_rank_that_needs_more_asks_for_all_files(tmp_path: Path, case: str) -> None:
    """It asks for the same commit again, and the state is that of a load from the whole commit."""
    if case == "other layout":
        commit = saved(tmp_path / "commit", 2, as_with_ddp)
    else:
        commit = saved(tmp_path / "commit", 1 if case == "fewer ranks" else 3)
    daemon, job = Daemon(commit, tmp_path / "restored"), Job(one_of(2), seed=50)
    daemon.resume(job)
    assert daemon.prefixes() == [["rank-00001/"], []]
    facts = job.facts()
    check_equal(facts, of_whole_commit(commit, job.ranks))


@pytest.mark.parametrize("lost", ["rank-00001/optimizer", "rank-00000/state", "rank-00000.json"])
def test_a_file_that_is_missing_from_the_whole_commit_is_an_error(
    tmp_path: Path, lost: str
) -> None:
    """The error names the file, after a second query for all files."""
    daemon = Daemon(saved(tmp_path / "commit", 3), tmp_path / "restored")
    daemon.loses = lost
    with pytest.raises(RestoreError, match=rf"cannot restore rank 1 .*{lost}"):
        daemon.resume(Job(one_of(2)))
    assert daemon.prefixes() == [["rank-00001/"], []]


def test_a_ddp_job_asks_for_all_files(tmp_path: Path) -> None:
    """The ranks of ``DistributedDataParallel`` write a part of the weights each."""
    commit = saved(tmp_path / "commit")
    daemon, job = Daemon(commit, tmp_path / "restored"), Job(one_of(2))
    as_with_ddp(job)
    daemon.resume(job)
    assert daemon.prefixes() == [[]]


def test_a_rank_names_the_files_of_all_ranks_of_its_vm() -> None:
    """So the first query of a VM keeps what the daemon has prefetched for the others."""
    ranks = Ranks(rank=5, local_rank=1, world_size=8, local_world_size=4, node=1, nodes=2)
    arrivals = Job(ranks).state.arrivals()
    assert arrivals.prefixes == [f"rank-0000{rank}/" for rank in (4, 5, 6, 7)]
    assert arrivals.reads == {5}


@pytest.mark.fault("G30", "G26")
def test_a_rank_forgets_the_files_of_a_checkpoint_that_another_rank_refuses(tmp_path: Path) -> None:
    """It has loaded all tensors of the newer one early.  The load of the older one reads all again."""
    older = saved(tmp_path / "older")
    newer = saved(tmp_path / "newer", change=as_if_trained, step=STEP + 1)
    taken: list[str] = []

    def answer(message: Message) -> None:
        if isinstance(message, RestoreQuery) and message.step == STEP + 1:
            for path in ("state.json", "model-00000.safetensors", "optimizer-00000.safetensors"):
                taken.append(f"rank-00001/{path}")
                found = ShardVerified(message.query_id, "newer", taken[-1])
                client.receive_shard(found, os.open(newer / taken[-1], os.O_RDONLY))
        elif isinstance(message, ShardsTaken):
            assert message.count == len(taken)
            client.receive(Restored(message.query_id, str(newer), STEP + 1, 1, download="newer"))
        else:
            assert isinstance(message, RestoreQuery)
            client.receive(Restored(message.query_id, str(older), STEP, 1))

    def for_resume(_choose: object, fetch: Callable[[Choice], Outcome]) -> Choice:
        for step in (STEP + 1, STEP):
            assert fetch({"generation": 1, "step": step}) == {}
        return {"generation": 1, "step": STEP}

    choice = SimpleNamespace(for_resume=for_resume)
    client = RestoreClient(answer, start_of(Ranks(nodes=2)), cast("RestoreChoice", choice))
    job = Job(one_of(2), seed=50)
    arrivals = job.state.arrivals()
    found = client.find_newest(arrivals)
    load_checkpoint(found.path, job.ranks, job.state, reads=arrivals.reads)
    facts = job.facts()
    check_equal(facts, of_whole_commit(older, job.ranks))
    assert not torch.equal(facts[0], of_whole_commit(newer, job.ranks)[0])


def as_if_trained(job: Job) -> None:
    with torch.no_grad():
        job.model.weight += 1


@pytest.mark.parametrize(
    ("placements", "expected"),
    [
        ([Shard(0), Shard(1)], {4, 5, 6, 7}),
        ([Replicate(), Shard(0)], {0, 1, 2, 3}),
        ([Shard(0), Replicate()], {4}),
        ([Replicate(), Replicate()], {0}),
    ],
)
def test_the_first_of_equal_parts_is_read(placements: list[Any], expected: set[int]) -> None:
    """Ranks outside of the mesh, such as those of another pipeline stage, hold no part."""
    mesh = SimpleNamespace(mesh=torch.arange(8).view(2, 4))
    assert writers(mesh, placements, [4, 5, 6, 7, 8]) == expected
