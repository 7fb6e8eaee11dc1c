# SPDX-License-Identifier: Apache-2.0
"""The contestants: their settings, command lines and virtual environments."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

BENCH = Path(__file__).resolve().parents[1]
CLIENTS = Path(__file__).resolve().parent / "clients"
BUCKET = "bench"
PREFIX = "checkpoint"
RUN = "run"
"""Name of the run for Swansong, which chooses its own keys."""

REFERENCE = "bare"
OURS = "swansong"


@dataclass(frozen=True, kw_only=True)
class Where:
    """The values in a command line."""

    python: Path
    """Interpreter of the contestant's environment; its programs are in the same directory."""
    job: Path
    directory: Path
    endpoint: str
    ca: Path

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}/{PREFIX}"

    def program(self, name: str) -> str:
        return str(self.python.parent / name)


Command = Callable[[Where, str], Sequence[str]]
"""Returns the command line for an operation."""


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """One client with one configuration."""

    name: str
    environment: str | None
    """Suffix of its ``requirements-*.txt``; None if it needs only the project itself."""
    command: Command
    trusts_system_only: bool = False
    """Accepts no CA file: runs in a mount namespace with the CA in the system's directory."""
    is_for_faults: bool = False
    is_peer: bool = True


def client(script: str, *options: str) -> Command:
    """A Python client, which reports its own start and end."""

    def command(where: Where, operation: str) -> Sequence[str]:
        del operation
        return [str(where.python), str(CLIENTS / script), str(where.job), *options]

    return command


def _s5cmd(*options: str) -> Command:
    def command(where: Where, operation: str) -> Sequence[str]:
        # The Go program itself: the script that the wheel installs is a Python wrapper.
        found = next(where.python.parent.parent.glob("lib/python*/site-packages/s5cmd/bin/s5cmd"))
        start = [str(found), "--endpoint-url", where.endpoint, "--log", "error", "cp"]
        if operation == "upload":
            return [*start, *options, f"{where.directory}/", f"{where.url}/"]
        return [*start, *options, f"{where.url}/*", f"{where.directory}/"]

    return command


def _aws(where: Where, operation: str) -> Sequence[str]:
    start = [where.program("aws"), "--endpoint-url", where.endpoint, "s3", "cp"]
    ends = [str(where.directory), where.url]
    if operation == "download":
        ends.reverse()
    return [*start, "--recursive", "--only-show-errors", *ends]


def _rclone(*options: str) -> Command:
    def command(where: Where, operation: str) -> Sequence[str]:
        remote = f":s3:{BUCKET}/{PREFIX}"
        ends = [str(where.directory), remote]
        if operation == "download":
            ends.reverse()
        return [
            *(where.program("rclone"), "--config", "/dev/null", "copy", *ends),
            *("--s3-provider", "Other", "--s3-endpoint", where.endpoint, "--s3-env-auth"),
            *("--s3-force-path-style", "--s3-no-check-bucket", "--ca-cert", str(where.ca)),
            # The sink has no MD5, because it does not decrypt bodies.
            *("--s3-use-multipart-etag=false", "--ignore-checksum", *options),
        ]

    return command


CONTESTANTS: Mapping[str, Contestant] = {
    one.name: one
    for one in (
        Contestant(
            name=REFERENCE,
            environment=None,
            command=client("bare.py"),
            is_peer=False,
        ),
        Contestant(
            name=f"{REFERENCE} x 32",
            environment=None,
            command=client("bare.py", "connections=32"),
            is_peer=False,
        ),
        Contestant(
            name=OURS,
            environment=None,
            command=client("swansong_client.py"),
            is_for_faults=True,
            is_peer=False,
        ),
        Contestant(
            name=f"{OURS} to GCS",
            environment=None,
            command=client("swansong_client.py", "gcs"),
            is_peer=False,
        ),
        Contestant(
            name="boto3",
            environment="boto3",
            command=client("boto3_client.py"),
            is_for_faults=True,
        ),
        Contestant(
            name="boto3 tuned",
            environment="boto3",
            command=client("boto3_client.py", "tuned"),
        ),
        Contestant(
            name="boto3 CRT",
            environment="crt",
            command=client("crt_client.py"),
        ),
        Contestant(
            name="obstore",
            environment="obstore",
            command=client("obstore_client.py"),
        ),
        Contestant(
            name="obstore tuned",
            environment="obstore",
            command=client("obstore_client.py", "tuned"),
        ),
        Contestant(
            name="obstore x 32",
            environment="obstore",
            command=client("obstore_client.py", "tuned", "concurrency=32"),
            is_for_faults=True,
        ),
        Contestant(
            name="s3torchconnector",
            environment="s3torchconnector",
            command=client("s3torch_client.py"),
            trusts_system_only=True,
        ),
        Contestant(
            name="gcs transfer_manager",
            environment="gcs",
            command=client("gcs_client.py"),
        ),
        Contestant(
            name="s5cmd",
            environment="s5cmd",
            command=_s5cmd(),
            is_for_faults=True,
        ),
        Contestant(name="aws s3 cp", environment="awscli", command=_aws),
        Contestant(name="rclone", environment="rclone", command=_rclone()),
        Contestant(
            name="rclone tuned",
            environment="rclone",
            command=_rclone(
                *("--transfers", "8", "--checkers", "16", "--s3-chunk-size", "16Mi"),
                *("--s3-upload-concurrency", "8", "--s3-disable-checksum"),
                *("--s3-use-unsigned-payload", "true", "--multi-thread-streams", "8"),
            ),
        ),
    )
}


def trusting(command: Sequence[str], trust: Path) -> list[str]:
    """The command in its own mount namespace, where ``trust`` replaces the system's certificates."""
    script = 'mount --bind "$1" /etc/ssl/certs && shift && exec "$@"'
    options = ["--mount"] if os.geteuid() == 0 else ["--map-root-user", "--mount"]
    return ["unshare", *options, "sh", "-c", script, "sh", str(trust), *command]


def interpreter(environment: str | None, directory: Path) -> Path:
    """The Python of a virtual environment, created if it is missing or has other packages."""
    if environment is None:
        return Path(sys.executable)
    wanted = BENCH / f"requirements-{environment}.txt"
    place = directory / f"venv-{environment}"
    python, stamp = place / "bin" / "python", place / "installed.txt"
    if not stamp.exists() or stamp.read_text() != wanted.read_text():
        print(f"installing {wanted.name}", file=sys.stderr)
        venv.create(place, clear=True, with_pip=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--requirement", str(wanted)], check=True)
        stamp.write_text(wanted.read_text())
    return python
