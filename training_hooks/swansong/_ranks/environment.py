# SPDX-License-Identifier: Apache-2.0
"""The position of this process in its job, as the launcher's environment variables describe it.

The variables of torchrun come first.  Those of MPI come before those of SLURM, because ``mpirun`` starts its
own daemons with ``srun``, and their variables reach the ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from swansong._ranks.agreement import Ranks

_MPI = {
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MPICH or Intel MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
"""By launcher: names of the variables for rank, number of ranks, and both on this VM."""
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")
"""One entry of SLURM's list of tasks per node: ``2`` or ``2(x3)``."""
_NODES_MAX = 2**16
INIT_FIRST = "call torch.distributed.init_process_group() before swansong.attach()"


class PositionError(ValueError):
    """The position of this process in its job is unknown or contradictory; the text contains the fix."""


def ranks_from_environment(environ: Mapping[str, str]) -> Ranks:
    """Return the position that the launcher has set; without a launcher, that of the only process.

    Args:
        environ: the environment variables.

    Raises:
        PositionError: a variable is missing, is not a number or is out of range.
    """
    variables = _Variables(environ)
    if not variables.has("WORLD_SIZE"):
        return next(_others(variables), Ranks())
    world_size = variables.count("WORLD_SIZE")
    if world_size == 1 or variables.has("LOCAL_WORLD_SIZE"):
        return _torchrun(variables, world_size)
    rank = variables.index("RANK", "WORLD_SIZE", world_size)
    for found in _others(variables):
        if (found.rank, found.world_size) == (rank, world_size):
            return found
    raise PositionError(
        f"WORLD_SIZE is {world_size} but LOCAL_WORLD_SIZE is not set; {INIT_FIRST}, or set RANK, LOCAL_RANK"
        " and LOCAL_WORLD_SIZE, the number of ranks on this VM, as torchrun does"
    )


def _torchrun(variables: _Variables, world_size: int) -> Ranks:
    rank = 0
    if world_size > 1 or variables.has("RANK"):
        rank = variables.index("RANK", "WORLD_SIZE", world_size)
    local_world_size = 1
    if variables.has("LOCAL_WORLD_SIZE"):
        local_world_size = variables.count("LOCAL_WORLD_SIZE", "WORLD_SIZE", world_size)
    nodes = -(-world_size // local_world_size)
    if variables.has("GROUP_WORLD_SIZE"):
        nodes = variables.count("GROUP_WORLD_SIZE", "WORLD_SIZE", world_size)
    node, local_rank = divmod(rank, local_world_size)
    # Ray Train sets NODE_RANK instead of GROUP_RANK.
    for name in ("NODE_RANK", "GROUP_RANK"):
        if variables.has(name):
            node = variables.index(name, "the number of VMs", nodes)
    if variables.has("LOCAL_RANK"):
        local_rank = variables.index("LOCAL_RANK", "LOCAL_WORLD_SIZE", local_world_size)
    return Ranks(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        node=node,
        nodes=nodes,
    )


def _others(variables: _Variables) -> Iterator[Ranks]:
    """Yield the position that each launcher other than torchrun has set."""
    for launcher in _MPI:
        yield from _mpi(variables, launcher)
    yield from _slurm(variables)


def _mpi(variables: _Variables, launcher: str) -> Iterator[Ranks]:
    names = _MPI[launcher]
    if not all(variables.has(name) for name in names):
        return
    rank_name, size_name, local_rank_name, local_size_name = names
    world_size = variables.count(size_name)
    local_world_size = variables.count(local_size_name, size_name, world_size)
    if local_world_size < world_size:
        # mpirun does not report the number of the VM, and its options determine the order of the ranks.
        raise PositionError(
            f"{size_name} is {world_size} and {local_size_name} is {local_world_size}: {launcher} does not"
            f" report which VM this is; {INIT_FIRST}"
        )
    yield Ranks(
        rank=variables.index(rank_name, size_name, world_size),
        local_rank=variables.index(local_rank_name, local_size_name, local_world_size),
        world_size=world_size,
        local_world_size=local_world_size,
    )


def _slurm(variables: _Variables) -> Iterator[Ranks]:
    # Only srun sets SLURM_STEP_NUM_TASKS.  A batch script is one process, although it has SLURM_NTASKS and
    # SLURM_PROCID.
    size_name, tasks_name = "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"
    if not variables.has(size_name) or variables.count(size_name) == 1:
        return
    world_size = variables.count(size_name)
    tasks = variables.tasks(tasks_name)
    if sum(tasks) != world_size:
        raise PositionError(
            f"{tasks_name}={variables.text(tasks_name)!r:.100} and {size_name}={world_size} contradict each"
            f" other; {INIT_FIRST}"
        )
    node = variables.index("SLURM_NODEID", tasks_name, len(tasks))
    yield Ranks(
        rank=variables.index("SLURM_PROCID", size_name, world_size),
        local_rank=variables.index("SLURM_LOCALID", tasks_name, tasks[node]),
        world_size=world_size,
        local_world_size=tasks[node],
        node=node,
        nodes=len(tasks),
    )


class _Variables:
    """Environment variables as numbers within their ranges; each error contains name, value and fix."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def has(self, name: str) -> bool:
        """Whether the variable is set and not empty."""
        return bool(self._environ.get(name))

    def text(self, name: str) -> str:
        """The value; empty if the variable is not set."""
        return self._environ.get(name, "")

    def count(self, name: str, limit_name: str = "", limit: int | None = None) -> int:
        """A positive number, of at most ``limit``."""
        value = self._number(name)
        if value < 1 or (limit is not None and value > limit):
            above = "" if limit is None else f" and at most {limit}, as {limit_name} is"
            raise PositionError(f"{name} is {value}; it must be positive{above}")
        return value

    def index(self, name: str, limit_name: str, limit: int) -> int:
        """A number from 0 to below ``limit``."""
        value = self._number(name)
        if not 0 <= value < limit:
            raise PositionError(
                f"{name} is {value}; it must be from 0 to {limit - 1}, because of {limit_name}"
            )
        return value

    def tasks(self, name: str) -> list[int]:
        """The number of tasks of each node; SLURM writes ``2(x3),1`` for four nodes."""
        counts: list[int] = []
        for entry in self.text(name).split(","):
            match = _TASKS.fullmatch(entry)
            if match is None or int(match[2] or 1) > _NODES_MAX:
                raise PositionError(
                    f"{name}={self.text(name)!r:.100} is not a list of tasks per node, such as '2(x3),1';"
                    f" {INIT_FIRST}"
                )
            counts += [int(match[1])] * int(match[2] or 1)
        return counts

    def _number(self, name: str) -> int:
        text = self.text(name)
        if not re.fullmatch(r"-?[0-9]{1,9}", text):
            found = f"{name}={text!r:.100} is not a number" if text else f"{name} is not set"
            raise PositionError(f"{found}; start the ranks with torchrun, or {INIT_FIRST}")
        return int(text)
