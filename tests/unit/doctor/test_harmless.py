# SPDX-License-Identifier: Apache-2.0
"""The fixes that ``doctor --fix`` runs without the operator's decision."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from swansong_tools.doctor import fixes
from swansong_tools.doctor.harmless import is_harmless

START = "sudo systemctl enable swansongd.service && sudo systemctl restart swansongd.service"


@pytest.mark.parametrize(
    "fix",
    [
        START,
        "systemctl unmask --runtime swansongd@bert.service",
        "systemctl daemon-reload",
        fixes.drop_in("paths", "ReadWritePaths=/a /b"),
        "install -d -m 2750 -o swansong /nonexistent/staging",
        "install -d /",
        "chmod go-w '/a && b'",
        "usermod --append --groups swansong-trainers me",
        "systemd-sysusers swansong.conf && systemd-tmpfiles --create swansong.conf",
    ],
)
def test_what_starts_enables_or_creates_is_harmless(fix: str) -> None:
    """A chain of known commands is harmless, with sudo or without."""
    assert is_harmless(fix)


@pytest.mark.parametrize(
    "fix",
    [
        "",
        "# only if no other VM runs it: systemctl restart swansongd.service",
        "rm /etc/systemd/logind.conf.d/other.conf",
        "chmod a+x /home/me",
        "chmod -R go-w /",
        "chown swansong: /mnt/nvme",
        "sudoedit /etc/swansong/swansong.toml",
        "systemctl restart sshd.service",
        "systemctl stop swansongd.service",
        "systemctl restart swansongd.service sshd.service",
        "printf '%s\\n' x >/etc/passwd",
        "printf '%s\\n' x | tee /etc/passwd >/dev/null",
        "chmod go-w 'an open quote",
    ],
)
def test_all_others_are_for_the_operator(fix: str) -> None:
    """Deletions, owners, opened rights, other services and other files need a decision."""
    assert not is_harmless(fix)


def test_owner_and_mode_of_an_existing_directory_stay(tmp_path: Path) -> None:
    """``install -d -m`` is harmless only if it creates the directory: the path may be mistyped as /home."""
    assert not is_harmless(f"install -d -m 2750 -o swansong {tmp_path}")
    assert is_harmless(f"install -d -m 2750 -o swansong {tmp_path}/staging")


@given(st.text(max_size=40))
@example("x; rm -rf /")
@example("$(rm -rf /)")
@example("`rm -rf /`")
@example("x\nrm -rf /")
@example("x || rm -rf /")
def test_a_name_from_outside_is_never_a_command(name: str) -> None:
    """A name is harmless if quoted; without its quotes only if the shell reads it as the same single word."""
    assert is_harmless(f"chmod go-w {shlex.quote(name)}") or name in ("&&", "|", ">")
    assert not is_harmless(f"chmod go-w {name}") or shlex.quote(name) == name
