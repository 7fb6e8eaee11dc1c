# SPDX-License-Identifier: Apache-2.0
"""``swansong run``: start a trainer, and a daemon if none serves this machine.

Neither systemd nor root is needed.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import re
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from swansong import openat
from swansong_bucket.config.values import duration, store_url
from swansong_bucket.config.values import path as path_value
from swansong_bucket.errors import ConfigError, StagingError, Unreachable
from swansongd.config.config import DEFAULT_PATH, Config, load
from swansongd.flush.claim_record import record_end_of_starts
from swansongd.staging.scan import OWN_DIRECTORY

from swansong_tools.commands.common import argument, note, run_argument, whole
from swansong_tools.commands.configuring import configured, is_example
from swansong_tools.commands.daemon_client import DaemonClient
from swansong_tools.commands.run_processes import supervised
from swansong_tools.commands.run_supervisor import Supervisor
from swansong_tools.doctor.fixes import WRITTEN_BY_RUN
from swansong_tools.paths import exists

NOTES = """\
The trainer gets SWANSONG_SOCKET, resumes from the newest commit, and is restarted after a failure.
A configured daemon of this machine serves the trainer. Without a configuration the command starts one, in
$XDG_STATE_HOME/swansong/RUN (default ~/.local/state/swansong/RUN), without root or systemd, and starts it
again if it crashes or does not answer for 45 s.
Ctrl-C and SIGTERM save a checkpoint, await the verdict and end the trainer; Ctrl-C twice ends all at once.
A configured daemon takes this request only from root and its own user; for others the trainer ends at its
last commit.
The exit code is the trainer's: 0 if it has finished, 75 (swansong.EXIT_SAVED) if a checkpoint is saved.
After Ctrl-C or SIGTERM, 75 means SAFE. A signal N that ends the trainer gives 128 + N, Ctrl-C twice 130."""
EXAMPLES = {
    "Train on a laptop, with checkpoints on its disk.": "swansong run -- python train.py",
    "Train on a rented spot VM; the same command line resumes the run on the next one.": (
        "swansong run --run my-run --store s3://my-bucket/checkpoints -- torchrun train.py --epochs 20"
    ),
    "Use a configuration of your own, with a daemon that this command starts.": (
        "swansong --config swansong.toml run -- python train.py"
    ),
}
_SOCKET_BYTES_MAX = 107
_LOCK = "lock"
_CONFIG = "swansong.toml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--run",
        type=run_argument,
        metavar="RUN",
        help="name of the run, the same on every machine that continues it (default: made of the "
        "working directory)",
    )
    parser.add_argument(
        "--store",
        type=argument(store_url),
        metavar="URL",
        help="store of the checkpoints, as store.url (default: a directory of this machine, which "
        "is lost with its disk)",
    )
    parser.add_argument(
        "--staging",
        type=argument(path_value),
        metavar="DIR",
        help="existing directory that the trainer writes checkpoints to, such as a local NVMe disk "
        "(default: a private directory)",
    )
    parser.add_argument(
        "--grace",
        type=argument(duration),
        metavar="TIME",
        help="time for a checkpoint after Ctrl-C or SIGTERM, as deadline.sigterm_grace_s (default 25s)",
    )
    parser.add_argument(
        "--restarts",
        type=whole("a number of restarts, such as 3", 10**6, least=0),
        default=3,
        metavar="N",
        help="restarts of the trainer after failures without a newer commit between them (default 3)",
    )
    parser.add_argument(
        "trainer", nargs=argparse.REMAINDER, metavar="CMD", help="command line of the trainer"
    )


def run(args: argparse.Namespace) -> int:
    words = args.trainer[1:] if args.trainer[:1] == ["--"] else args.trainer
    if not words:
        raise ConfigError(["CMD: is missing (got nothing); add -- and the command of the trainer"])
    is_chosen = args.config != DEFAULT_PATH
    is_own = args.store is not None or args.staging is not None
    if is_chosen and is_own:
        fix = f"remove --store and --staging, and set store.url and staging.path in {args.config}"
        raise ConfigError([f"--config: excludes --store and --staging (got both); {fix}"])
    config = None
    if is_chosen or (not is_own and exists(args.config)):
        config = load(args.config)
        if not is_chosen and not _answers(config, is_required=not is_example(args.config)):
            config = None
    if config is not None and args.run not in (None, config.run.name):
        fix = "remove --run, or name a store with --store to start a daemon for this run"
        raise ConfigError(
            [f"--run: is not {config.run.name!r}, as in {args.config} (got {args.run!r}); {fix}"]
        )
    if config is not None and args.grace is not None:
        fix = f"remove it, and set deadline.sigterm_grace_s in {args.config}"
        raise ConfigError([f"--grace: excludes a configuration (got {args.grace:g} s); {fix}"])
    name = config.run.name if config else args.run or _name_here(args.store)
    path: Path | None = args.config
    try:
        directory = _private_directory(name)
        lock = _lock(directory, name)  # the child inherits it: it is held until both have ended
        if config is None:
            path, config = _generated(directory, name, args)
            # The lock proves that no process of an earlier start is left.
            record_end_of_starts(config.staging.path / name / OWN_DIRECTORY)
    except OSError as error:
        where = f"{error.strerror} {error.filename or ''}".rstrip()
        fix = "Set XDG_STATE_HOME to a directory of this user, or remove the files of other users"
        raise StagingError(f"preparing run {name} failed: {where}", hint=fix) from None
    if path == args.config and (not is_chosen or _answers(config, is_required=False)):
        path = None
    note(f"run {name}, store {config.store.url}")
    if args.store is None and path == directory / _CONFIG:
        note(
            "the checkpoints are only on this machine; to keep them if its disk is lost, add --store URL"
        )
    if path is not None:
        note(f"starting swansongd; look at it with: swansong --config {path} status")
    supervisor = Supervisor(
        socket=config.trainer.socket,
        config=path,
        log=directory / "swansongd.log",
        sigterm_grace_s=config.deadline.sigterm_grace_s,
        command=words,
        restarts=args.restarts,
    )
    with openat.held(lock):
        return supervised(supervisor.run)


def _name_here(store: str | None) -> str:
    """A name for the run of this directory; two directories have different ones."""
    here = Path.cwd()
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", here.name).strip(".-")[:50] or "run"
    if store is not None:
        fix = f"name the run as on every machine that continues it, such as --run {plain}"
        raise ConfigError([f"--run: is missing (got nothing); {fix}"])
    return f"{plain}-{hashlib.sha256(bytes(here)).hexdigest()[:6]}"


def _answers(config: Config, *, is_required: bool) -> bool:
    """Whether the daemon of a configuration serves this user.

    The daemon of the system is required where it is configured: a trainer of another daemon, with another
    store, would train from scratch.
    """
    try:
        with DaemonClient(config.trainer.socket) as daemon:
            daemon.status()
    except Unreachable as error:
        if is_required:
            error.hint += "; or name a store with --store to start another daemon"
            raise
        return False
    return True


def _private_directory(name: str) -> Path:
    """The directory of a run below the state of this user, which no other user can have changed."""
    base = os.environ.get("XDG_STATE_HOME", "")
    path = Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    for each in ("swansong", name):
        path /= each
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        with openat.held(openat.open_directory(path, owners={os.geteuid()})) as fd:
            mode = os.fstat(fd).st_mode & 0o777
        if mode & 0o077:
            raise StagingError(
                f"using {path} failed: its mode is {mode:o}, and other users may have changed it",
                hint=f"Remove it, or run: chmod 700 {path}",
            )
    return path


def _lock(directory: Path, name: str) -> int:
    """Lock the run for this command; returns the descriptor that holds the lock."""
    fd = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        first = os.pread(fd, 20, 0).decode("ascii", "replace")
        os.close(fd)
        raise StagingError(
            f"starting run {name} failed: process {first} already runs it",
            hint=f"Stop that process with: kill {first}; or choose another name with --run",
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, str(os.getpid()).encode(), 0)
    return fd


def _generated(directory: Path, name: str, args: argparse.Namespace) -> tuple[Path, Config]:
    """Write the configuration of a daemon for this run only."""
    store, staging = args.store, args.staging
    if store is None:
        (directory / "store").mkdir(mode=0o700, exist_ok=True)
        store = f"file://{quote(str(directory / 'store'))}"
    if staging is None:
        staging = directory / "staging"
        staging.mkdir(mode=0o700, exist_ok=True)
    socket = directory / "trainer.sock"
    if len(bytes(socket)) > _SOCKET_BYTES_MAX:
        raise ConfigError(
            [f"--run: makes {socket} too long for a socket; shorten it or XDG_STATE_HOME"]
        )
    values = {
        "run.name": name,
        "store.url": store,
        "staging.path": str(staging),
        "trainer.socket": str(socket),
        "log.format": "console",
    }
    if args.grace is not None:
        values["deadline.sigterm_grace_s"] = f"{args.grace:g}s"
    text, config = configured(values)
    with openat.held(openat.open_directory(directory, owners={os.geteuid()})) as fd:
        openat.replace_file(_CONFIG, f"{WRITTEN_BY_RUN}\n{text}".encode(), dir_fd=fd)
    return directory / _CONFIG, config
