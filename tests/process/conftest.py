# SPDX-License-Identifier: Apache-2.0
"""The emulated clouds, one for all tests of this directory; a new bucket prefix and new VMs for each test."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from testkit import EXAMPLES, TRAINERS
from testkit.clouds import Aws, Azure, Bucket, Gcp
from testkit.emulators.process import EmulatorProcess
from testkit.fake_nvml import FakeNvml, has_compiler
from testkit.rig import CREDENTIALS, Process, Vm, control
from testkit.warm import python_of

NewVm = Callable[..., Vm]
WITNESS = str(TRAINERS / "witness.py")


@pytest.fixture(scope="session")
def imds() -> Iterator[EmulatorProcess]:
    with EmulatorProcess("testkit.emulators.aws_imds", "--port", "0") as emulator:
        yield emulator


@pytest.fixture(scope="session")
def s3() -> Iterator[EmulatorProcess]:
    with EmulatorProcess(
        "testkit.emulators.s3_strict", "--port", "0", "--bucket", "ckpt"
    ) as emulator:
        yield emulator


@pytest.fixture(scope="session")
def gcs() -> Iterator[EmulatorProcess]:
    with EmulatorProcess(
        "testkit.emulators.gcs_server", "--port", "0", "--bucket", "ckpt"
    ) as emulator:
        yield emulator


@pytest.fixture
def aws(imds: EmulatorProcess) -> Iterator[Aws]:
    """The instance metadata of the VM, without a notice."""
    yield Aws(imds.url)
    control(imds.url, "withdraw")
    control(imds.url, "clear")


@pytest.fixture
def gcp() -> Iterator[Gcp]:
    """The metadata server of the VM; ``preempted`` is FALSE."""
    with EmulatorProcess("testkit.emulators.gcp_metadata", "--port", "0") as emulator:
        yield Gcp(emulator.url)


@pytest.fixture
def azure() -> Iterator[Azure]:
    """The metadata service of the VM, without an event."""
    with EmulatorProcess("testkit.emulators.azure_imds", "--port", "0") as emulator:
        yield Azure(emulator.url)


@pytest.fixture
def bucket(s3: EmulatorProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """An empty prefix in a bucket without faults; the test can read it with the client of the daemon."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    yield Bucket(s3.url, secrets.token_hex(4))
    control(s3.url, "clear")


@pytest.fixture(scope="session")
def warm_python() -> str:
    """Path of a Python that starts scripts in processes that have the daemon, boto3 and numpy already."""
    return python_of(os.environ["SWANSONG_TEST_WARM"], "swansongd")


@pytest.fixture(scope="session")
def warm_torch() -> str:
    """Path of a Python that starts scripts in processes that have torch already; see ``testkit/warm.py``."""
    return python_of(os.environ["SWANSONG_TEST_WARM"], "torch")


@pytest.fixture
def new_vm(tmp_path: Path, warm_python: str) -> Iterator[NewVm]:
    """Make VMs: ``new_vm("a", store, metadata=...)``.  They are shut down after the test.

    Their processes are forks of a warm Python; ``warm=None`` starts the installed programs.
    """
    with ExitStack() as vms:

        def make(
            name: str, store: dict[str, str], *, follow_ups: bool = False, **options: Any
        ) -> Vm:
            # Most tests count the checkpoints of one notice: they have no follow-ups.
            disk = tmp_path / name
            disk.mkdir()
            settings = options.pop("settings", None) or {}
            trainer = {"follow_ups": follow_ups, **settings.get("trainer", {})}
            options = {"warm": warm_python, **options}
            options["settings"] = {**settings, "trainer": trainer}
            return vms.enter_context(Vm(disk, store, **options))

        yield make


@pytest.fixture
def witness() -> str:
    """Script of the small trainer that prints each message of the daemon."""
    return WITNESS


@pytest.fixture(scope="session")
def weights_after() -> Callable[[int], str]:
    """SHA-256 of the weights of ``char_lm.py`` after this number of steps without interruption."""
    known: dict[int, str] = {}

    def digest(steps: int) -> str:
        if steps not in known:
            command = [sys.executable, str(EXAMPLES / "char_lm.py"), "--steps", str(steps)]
            trainer = Process(command, lines_on="stdout", SWANSONG_SOCKET="/nonexistent/socket")
            assert trainer.wait() == 0
            known[steps] = trainer.lines.all()[-1]["weights_sha256"]
        return known[steps]

    return digest


@pytest.fixture
def nvml(tmp_path: Path) -> Iterator[FakeNvml]:
    """A library with two healthy GPUs."""
    if not has_compiler():
        pytest.skip("no C compiler: apt-get install gcc libc6-dev")
    directory = tmp_path / "nvml"
    directory.mkdir()
    fake = FakeNvml(directory)
    fake.set(count=2)
    yield fake
    fake.set(hang=0)
