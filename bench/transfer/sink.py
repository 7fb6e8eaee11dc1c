# SPDX-License-Identifier: Apache-2.0
"""Compiles and runs the sink, and creates the certificates for its TLS."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

SOURCE = Path(__file__).resolve().parents[1] / "sink.c"
PATTERN_BYTES = 2**20
CIPHER = "TLS 1.3, AES-128-GCM"

_PACKAGES = "gcc libc6-dev libssl-dev openssl"
_LEAF = """basicConstraints=CA:FALSE
keyUsage=digitalSignature
extendedKeyUsage=serverAuth
subjectAltName=DNS:localhost,IP:127.0.0.1
"""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Behaviour of the sink."""

    name: str
    rate_bytes_s: float = 0.0
    """Limit of one connection in each direction; 0 means unlimited."""
    link_bytes_s: float = 0.0
    """Limit of all connections together; 0 means unlimited."""
    latency_s: float = 0.0
    """Delay before each answer; with a tail, its minimum and half of its median."""
    tail_s_max: float = 0.0
    """Longest delay of a Pareto distribution with the exponent 1; 0 means that all delays are equal."""
    share_503: float = 0.0
    """Share of the requests with data that get 503 SlowDown."""
    share_stall: float = 0.0
    """Share of the requests with data that stall halfway."""
    share_reset: float = 0.0
    """Share of the requests with data that are reset halfway."""
    is_hashing: bool = False
    """Decrypt every record and return the CRC32C of the body, as GCS does; this costs the sink CPU."""


DIRECT = Profile(name="direct")
HASHING = Profile(name="hashing", is_hashing=True)
PACED = Profile(name="paced", rate_bytes_s=85e6, latency_s=0.030)
LINK = Profile(name="link", rate_bytes_s=85e6, link_bytes_s=250e6, latency_s=0.030)
"""A link of 2 Gb/s, which two cores fill with ease."""
FAULTY = Profile(
    name="faulty",
    rate_bytes_s=85e6,
    latency_s=0.030,
    share_503=0.02,
    share_stall=0.002,
    share_reset=0.005,
)
TAIL = Profile(name="tail", rate_bytes_s=85e6, latency_s=0.030, tail_s_max=10.0)
"""One answer in 10 takes 0.3 s, one in 100 takes 3 s."""


def build(directory: Path) -> Path:
    """Compile the sink unless it is newer than its source.

    Raises:
        SystemExit: the compiler or the headers are missing; the message has the command that installs them.
    """
    program = directory / "sink"
    if program.exists() and program.stat().st_mtime > SOURCE.stat().st_mtime:
        return program
    if not shutil.which("gcc") or not shutil.which("openssl"):
        _install()
    command = ["gcc", "-O2", "-Wno-deprecated-declarations", "-o", str(program), str(SOURCE)]
    command += ["-lssl", "-lcrypto", "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and "openssl/" in done.stderr:
        _install()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"compiling the sink failed:\n{done.stderr}")
    return program


def _install() -> None:
    """Install the compiler and the TLS headers as root on Debian; elsewhere print the command."""
    command = f"apt-get install -y --no-install-recommends {_PACKAGES}"
    if os.geteuid() or not shutil.which("apt-get"):
        raise SystemExit(f"The sink needs a C compiler and OpenSSL's headers: sudo {command}")
    print(f"installing the compiler for the sink: {command}", file=sys.stderr)
    subprocess.run(["apt-get", "update", "-qq"], check=True)
    subprocess.run([*command.split(), "-qq"], check=True)


def certificates(directory: Path) -> None:
    """Create an authority in ``ca.pem``, and ``cert.pem`` with ``key.pem`` for localhost."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc")
    openssl(
        *("req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.pem", "-days", "30"),
        *("-subj", "/CN=bench CA", "-addext", "keyUsage=critical,keyCertSign"),
    )
    openssl("req", *curve, "-keyout", "key.pem", "-out", "leaf.csr", "-subj", "/CN=localhost")
    (directory / "leaf.ext").write_text(_LEAF)
    openssl(
        *("x509", "-req", "-in", "leaf.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-days", "30"),
        *("-CAcreateserial", "-extfile", "leaf.ext", "-out", "cert.pem"),
    )
    # For the client that reads only the system's authorities: see contestants.py.
    trust = directory / "trust"
    trust.mkdir(exist_ok=True)
    shutil.copy(directory / "ca.pem", trust / "ca-certificates.crt")
    shutil.copy(directory / "ca.pem", trust / "ca.pem")
    subprocess.run(["openssl", "rehash", str(trust)], check=True, capture_output=True)


@dataclass(frozen=True)
class Object:
    """An object that the sink has from the start: its pattern, or the content of a file."""

    key: str
    size_bytes: int
    content: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Counters:
    """Counters of the sink."""

    cpu_s: float
    bytes_in: int
    bytes_out: int
    whole_bytes: int
    made_503: int
    made_stall: int
    made_reset: int


class Sink:
    """A running sink, which ends with the context.

    Args:
        seed: of the delays and faults.
    """

    def __init__(
        self,
        program: Path,
        directory: Path,
        profile: Profile,
        objects: Sequence[Object] = (),
        *,
        seed: int = 0,
    ) -> None:
        listing = directory / "objects.tsv"
        listing.write_text(
            "".join(f"{o.key}\t{o.size_bytes}\t{o.content or '-'}\n" for o in objects)
        )
        self._process = subprocess.Popen(
            [
                str(program),
                *("--cert", str(directory / "cert.pem"), "--key", str(directory / "key.pem")),
                *("--objects", str(listing), "--pattern", str(directory / "pattern")),
                *("--rate-bytes-s", str(profile.rate_bytes_s)),
                *("--link-bytes-s", str(profile.link_bytes_s)),
                *("--latency-s", str(profile.latency_s)),
                *("--tail-s-max", str(profile.tail_s_max), "--seed", str(seed)),
                *("--hashing", str(int(profile.is_hashing))),
                *("--share-503", str(profile.share_503)),
                *("--share-stall", str(profile.share_stall)),
                *("--share-reset", str(profile.share_reset)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.endpoint = f"https://localhost:{self._line()['port']}"

    def counters(self) -> Counters:
        assert self._process.stdin
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return Counters(**self._line())

    def _line(self) -> dict[str, int]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the sink has ended")
        answer: dict[str, int] = json.loads(line)
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.stdout.read()
        self._process.stdout.close()
        self._process.wait(10)
