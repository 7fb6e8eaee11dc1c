# SPDX-License-Identifier: Apache-2.0
"""A run on an emulated spot VM of AWS that a real Prometheus watches: for the tests and for the pictures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from testkit import REPOSITORY, TRAINERS
from testkit.clouds import Aws, Bucket
from testkit.emulators.process import EmulatorProcess
from testkit.fake_nvml import FakeNvml
from testkit.prometheus import Prometheus
from testkit.raw_server import Peer, RawServer
from testkit.rig import BIN, CREDENTIALS, Process, Vm

RULES = REPOSITORY / "monitoring/prometheus/swansong.rules.yml"
RUN = "my-run"


@dataclass
class WatchedRun:
    """The run, its cloud and its Prometheus."""

    daemon: Process
    aws: Aws
    bucket: Bucket
    nvml: FakeNvml
    prometheus: Prometheus

    def evacuate(self) -> None:
        """A notice in time: SAFE.  Afterwards the notice is withdrawn, and training continues."""
        self.aws.notice("terminate", in_s=60)
        self.daemon.lines.wait(event="verdict", verdict="SAFE")
        self.aws.withdraw()
        self.daemon.lines.wait(event="notice_withdrawn")

    def evacuate_during_an_outage(self) -> None:
        """The store fails until the deadline: PARTIAL."""
        self.bucket.order("outage", seconds=600)
        self.aws.notice("terminate", in_s=3)
        self.daemon.lines.wait(event="verdict", verdict="PARTIAL")


def _accept_all(peer: Peer) -> None:
    """A receiver of notifications."""
    while peer.request() is not None:
        peer.answer(200, b"ok")


@contextmanager
def watched_run(directory: Path, *, warm: str | None = None) -> Iterator[WatchedRun]:
    """Start everything, and wait for the first periodic commit and its copy in the mirror.

    The VM has a fake library of NVIDIA with one GPU.

    Args:
        directory: an existing directory.
        warm: path of a warm Python; see ``testkit/warm.py``.
    """
    with ExitStack() as stack:
        imds = stack.enter_context(
            EmulatorProcess("testkit.emulators.aws_imds", "--port", "0"),
        )
        s3 = stack.enter_context(
            EmulatorProcess("testkit.emulators.s3_strict", "--port", "0", "--bucket", "ckpt")
        )
        aws, bucket = Aws(imds.url), Bucket(s3.url, "checkpoints")
        receiver = stack.enter_context(RawServer(_accept_all))
        nvml = FakeNvml(_made(directory / "nvml"))
        settings = {
            "metrics": {"listen": "127.0.0.1:0"},
            "trainer": {"follow_ups": False},
            "mirror": {"url": f"file://{_made(directory / 'mirror')}"},
            "notify": {"webhook_url": receiver.url},
            "retention": {"in_daemon": True},
        }
        vm = stack.enter_context(
            Vm(
                directory,
                bucket.store,
                run=RUN,
                metadata=aws.metadata,
                settings=settings,
                warm=warm,
            )
        )
        daemon = vm.start_daemon(**nvml.environment)
        command = [str(BIN / "swansong"), "--config", str(vm.config), "exporter"]
        options = ["--listen", "127.0.0.1:0", "--interval", "5s", "--price", "spot=1.20"]
        exporter = vm.spawn([*command, *options], **CREDENTIALS)
        targets = {
            job: process.lines.wait(event="metrics_served")["address"]
            for job, process in (("swansong", daemon), ("swansong-exporter", exporter))
        }
        prometheus = stack.enter_context(Prometheus(directory, targets, RULES))
        # Smaller sets are no sample of the bandwidth, and the margin would be unknown.
        sizes = ("--every-steps", "100", "--size-bytes", "3000000")
        vm.start_trainer(*sizes, script=str(TRAINERS / "witness.py"))
        daemon.lines.wait(event="mirrored")
        yield WatchedRun(daemon, aws, bucket, nvml, prometheus)


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory
