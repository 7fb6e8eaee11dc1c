# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of the hooks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import swansong

from testkit.fake_daemon import FakeDaemon
from testkit.training_parts import Attach, Counter, Restore
from testkit.warm import python_of


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "SWANSONG_CHECK",
        "SWANSONG_FIND_NAN",
        "SWANSONG_SOCKET",
        "SWANSONG_RESTORE",
    ):
        monkeypatch.delenv(name, raising=False)
    for name in os.environ:
        if name.startswith(("SLURM_", "OMPI_", "PMI_", "PMIX_", "MPI_")):
            monkeypatch.delenv(name)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path) as daemon:
        yield daemon


@pytest.fixture
def counter() -> Counter:
    return Counter()


@pytest.fixture
def attach(tmp_path: Path) -> Iterator[Attach]:
    """``swansong.attach`` to the socket of the fake daemon; all guards are closed at the end.

    A second call for the same rank ends the first guard, as the end of its process would.
    """
    guards: list[swansong.Guard] = []

    def attach(state: dict[str, Any] | None = None, **options: Any) -> swansong.Guard:
        for guard in guards:
            if guard._ranks.rank == int(os.environ.get("RANK", "0")):
                guard._end("restarted")
        guards.append(swansong.attach(state, socket=tmp_path / "trainer.sock", **options))
        return guards[-1]

    yield attach
    for guard in guards:
        guard._end("test over")


@pytest.fixture
def restore_from(monkeypatch: pytest.MonkeyPatch) -> Restore:
    """Makes the next start restore this set, without a daemon."""

    def choose(directory: Path) -> None:
        monkeypatch.setenv("SWANSONG_RESTORE", str(directory))
        monkeypatch.setenv("SWANSONG_SOCKET", str(directory / "no-daemon"))

    return choose


@pytest.fixture
def process_group() -> Iterator[None]:
    """The process group of a job of one rank."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def warm_python() -> str:
    """Path of a Python that starts scripts in processes that have torch already; see ``testkit/warm.py``."""
    return python_of(os.environ["SWANSONG_TEST_WARM"], "torch")


@pytest.fixture(scope="session")
def warm_frameworks() -> str:
    """Path of a warm Python that has lightning, transformers and accelerate, too."""
    return python_of(os.environ["SWANSONG_TEST_WARM"], "frameworks")
