# SPDX-License-Identifier: Apache-2.0
"""A trainer that attacks the daemon by way of its staging directory and its socket.

Run as the trainer's user, with the hooks installed::

    python hostile_trainer.py RUN_DIRECTORY SOCKET TARGET

TARGET is a directory that the daemon may write to and the trainer may not.  The script puts links to it,
forged partial restores and forged state of the daemon wherever the staging directory of the run lets it,
asks for a restore while it exchanges directories for links, and prints the answers as JSON.  Every refusal
by the kernel is expected: the test looks at what TARGET holds afterwards.
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

from swansong import protocol

RESTORED, OWN = protocol.RESTORED_DIRECTORY, ".swansongd"
ANSWER_S = 60.0


def attempt(do: Callable[[], object]) -> bool:
    """Whether the kernel let it happen."""
    try:
        do()
    except OSError:
        return False
    return True


def plant(run: Path, target: Path) -> list[str]:
    """Everything that can lead the daemon from the staging directory to ``target``; what succeeded."""
    nonce = "0123456789abcdef"

    def link(name: str) -> None:
        attempt(lambda: os.rename(run / name, run / f"aside-{secrets.token_hex(4)}"))
        os.symlink(target, run / name)

    def partial(parent: Path, name: str) -> None:
        planted = parent / f".{name}.partial-{nonce}"
        planted.mkdir(parents=True)
        os.symlink(target, planted / "files")
        (planted / "journal").write_text("swansong-restore-1\n")
        planted.chmod(0o777)

    def forge_state() -> None:
        attempt(lambda: os.rename(run / OWN, run / f"aside-{secrets.token_hex(4)}"))
        (run / OWN).mkdir(0o777)
        os.symlink(target, run / OWN / "removing")

    tricks: dict[str, Callable[[], None]] = {
        "link for restored": lambda: link(RESTORED),
        "link for the daemon's directory": lambda: link(OWN),
        "the daemon's directory": forge_state,
        "partial beside restored": lambda: partial(run, RESTORED),
        "partial in restored": lambda: partial(run / RESTORED, ".aws"),
        "link in restored": lambda: os.symlink(target, run / RESTORED / "planted"),
        "leftover that is a link": lambda: os.symlink(target, run / ".removing.planted"),
        "set that is a link": lambda: os.symlink(target, run / protocol.sealed_name(9, "planted")),
    }
    return [name for name, trick in tricks.items() if attempt(trick)]


@contextlib.contextmanager
def exchanging(run: Path, target: Path) -> Iterator[None]:
    """All the while, ``restored`` is a directory of the trainer's for one moment and a link for the next."""
    stop = threading.Event()
    real, link = run / "exchange-real", run / "exchange-link"
    attempt(lambda: real.mkdir(0o777))
    attempt(lambda: os.symlink(target, link))

    def work() -> None:
        while not stop.is_set():
            for name in (real, link):
                attempt(lambda: os.rename(run / RESTORED, run / f"aside-{secrets.token_hex(4)}"))
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
    """The daemon's answer to a restore query."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.settimeout(ANSWER_S)
        peer.connect(str(path))
        peer.send(protocol.encode(protocol.Hello("")))
        peer.send(protocol.encode(protocol.RestoreQuery(secrets.token_hex(8))))
        while True:
            body: dict[str, Any] = json.loads(peer.recv(65536))
            if body["type"] in ("restored", "refused"):
                return body


def main() -> None:
    run, path, target = map(Path, sys.argv[1:])
    planted = plant(run, target)
    with exchanging(run, target):
        answers = [ask(path)]
    planted += plant(run, target)
    answers.append(ask(path))
    print(json.dumps({"planted": sorted(set(planted)), "answers": answers}))


if __name__ == "__main__":
    main()
