# SPDX-License-Identifier: Apache-2.0
"""The process that listens at a port, as the kernel reports it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from swansongd.util.listeners import holder


@pytest.mark.parametrize(
    ("bound", "wanted", "is_held"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("0.0.0.0", "127.0.0.1", True),
        ("::", "127.0.0.1", True),
        ("127.0.0.1", "0.0.0.0", True),
        ("::1", "::1", True),
        ("127.0.0.2", "127.0.0.1", False),
        ("::1", "127.0.0.1", False),
    ],
)
def test_a_listener_is_found_where_it_keeps_others_from_listening(
    bound: str, wanted: str, is_held: bool
) -> None:
    """At the address itself, and where one of the two is each address of the machine.

    Another process may listen at the same port of the other address.
    """
    with socket.socket(socket.AF_INET6 if ":" in bound else socket.AF_INET) as other:
        other.bind((bound, 0))
        other.listen()
        found = holder(wanted, other.getsockname()[1])
    assert found.startswith(f"process {os.getpid()} (") == is_held


def test_a_name_of_a_process_is_printable(tmp_path: Path) -> None:
    """A program chooses its name; a process that cannot be read and a user without a name remain."""
    table = tmp_path / "net" / "tcp"
    table.parent.mkdir()
    line = "{}: 0100007F:24FD 00000000:0000 0A 0:0 00:0 0 4294967294 0 77 1 0 100 0 0 10 0\n"
    table.write_text("head\n" + line.format(0))
    assert holder("127.0.0.1", 9469, proc=tmp_path) == "a process of user 4294967294"
    (tmp_path / "7" / "fd").mkdir(parents=True)
    (tmp_path / "7" / "fd" / "3").symlink_to("socket:[77]")
    (tmp_path / "7" / "comm").write_text("a\x1b[2J\n")
    assert holder("127.0.0.1", 9469, proc=tmp_path) == r"process 7 (a\x1b[2J) of user 4294967294"
