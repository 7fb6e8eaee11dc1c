# SPDX-License-Identifier: Apache-2.0
"""A trainer that attacks the daemon through its staging directory and its socket.

Run as the trainer's user, with the hooks installed::

    python hostile_trainer.py link|partials|exchange RUN_DIRECTORY SOCKET TARGET

TARGET is a directory that the daemon may write to and the trainer may not.  The script tries to put links to
TARGET, forged partial restores and forged state of the daemon into the staging directory of the run.  It then
sends a restore query, and prints the successful attacks and the answer as JSON.  The kernel may refuse every
attack: the test examines TARGET afterwards.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from swansong import layout, protocol

RESTORED, OWN = layout.RESTORED_DIRECTORY, ".swansongd"
ANSWER_S = 60.0


def attempt(do: Callable[[], object]) -> bool:
    """Whether the kernel permitted the action."""
    try:
        do()
    except OSError:
        return False
    return True


def put_aside(path: Path) -> None:
    """Rename an entry to free its name, if the kernel permits it."""
    attempt(lambda: os.rename(path, path.with_name(f"aside-{secrets.token_hex(4)}")))


def forge_partial(parent: Path, name: str, target: Path) -> None:
    """Create the files of an interrupted restore, with a link in place of the directory for its files."""
    planted = parent / f".{name}.partial-0123456789abcdef"
    planted.mkdir(parents=True)
    os.symlink(target, planted / "files")
    (planted / "journal").write_text("swansong-restore-1\n")
    for path in (parent, planted):
        attempt(lambda path=path: path.chmod(0o777))


def forge_state(run: Path, target: Path) -> None:
    put_aside(run / OWN)
    (run / OWN).mkdir(0o777)
    os.symlink(target, run / OWN / "removing")


def plant(mode: str, run: Path, target: Path) -> list[str]:
    """Try all ways to lead the daemon from staging to ``target``; returns those that the kernel permitted."""
    restored = run / RESTORED
    put_aside(restored)
    tricks: dict[str, Callable[[], None]] = {
        "link for a set": lambda: os.symlink(target, run / layout.sealed_name(9, "planted")),
        "link for a leftover": lambda: os.symlink(target, run / ".removing.planted"),
        "partial beside restored": lambda: forge_partial(run, RESTORED, target),
        "the daemon's state": lambda: forge_state(run, target),
    }
    if mode == "partials":
        tricks["partial in restored"] = lambda: forge_partial(restored, ".aws", target)
        tricks["link in restored"] = lambda: os.symlink(target, restored / "planted")
    else:
        tricks["link for restored"] = lambda: os.symlink(target, restored)
    return [name for name, trick in tricks.items() if attempt(trick)]


@contextlib.contextmanager
def exchanging(run: Path, target: Path) -> Iterator[None]:
    """Swap ``restored`` all the time between a directory of the trainer and a link."""
    stop = threading.Event()
    real, link = run / "exchange-real", run / "exchange-link"
    attempt(lambda: real.mkdir(0o777))
    attempt(lambda: os.symlink(target, link))

    def work() -> None:
        while not stop.is_set():
            for name in (real, link):
                put_aside(run / RESTORED)
                attempt(lambda name=name: os.rename(name, run / RESTORED))
                attempt(lambda: real.mkdir(0o777))
                attempt(lambda: os.symlink(target, link))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def ask(path: Path) -> dict[str, Any]:
    """Send a restore query, and return the daemon's answer."""
    start_id = secrets.token_hex(8)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.settimeout(ANSWER_S)
        peer.connect(str(path))
        peer.send(protocol.encode(protocol.Hello("", start_id=start_id)))
        query = protocol.RestoreQuery(secrets.token_hex(8), start_id=start_id)
        peer.send(protocol.encode(query))
        while True:
            body: dict[str, Any] = json.loads(peer.recv(65536))
            if body["type"] in ("restored", "refused"):
                return body


def main() -> None:
    mode = sys.argv[1]
    run, path, target = map(Path, sys.argv[2:])
    planted = plant(mode, run, target)
    with exchanging(run, target) if mode == "exchange" else contextlib.nullcontext():
        answer = ask(path)
    print(json.dumps({"planted": planted, "answer": answer}))


if __name__ == "__main__":
    main()
