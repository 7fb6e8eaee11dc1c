# SPDX-License-Identifier: Apache-2.0
"""``doctor --fix`` runs fixes that harmless functions have made, and no text from elsewhere."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from swansong_bucket.errors import Forbidden, SwansongError
from swansong_tools.doctor import fixes, sandbox
from swansong_tools.doctor.findings import Finding, Level, failure, of_error
from swansong_tools.doctor.fixes import Harmless, for_this_shell, then


def test_a_chain_is_harmless_only_if_each_command_is() -> None:
    """One command that deletes, and no command at all, leave the fix to the operator."""
    enable = fixes.harmless("systemctl enable swansongd.service")
    assert isinstance(then(enable, "", fixes.drop_in("paths", "ReadWritePaths=/a")), Harmless)
    assert not isinstance(then(enable, fixes.as_root("rm /etc/x")), Harmless)
    assert not isinstance(then("", ""), Harmless)


def test_a_command_that_runs_here_stays_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without sudo it is the same fix; a comment is not harmless."""
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.delenv("SUDO_USER", raising=False)
    adapted = for_this_shell(fixes.harmless("chmod o-w /etc/x"))
    assert (adapted, type(adapted)) == ("chmod o-w /etc/x", Harmless)
    assert not isinstance(for_this_shell(fixes.harmless("no-such-tool x")), Harmless)


def test_owner_and_mode_of_an_existing_directory_stay(tmp_path: Path) -> None:
    """A directory is only created: the configured path may be mistyped as ``/home``."""
    assert isinstance(fixes.directory(tmp_path / "staging", "2750"), Harmless)
    assert not isinstance(fixes.directory(tmp_path, "2750"), Harmless)


def test_a_finding_of_another_process_is_never_harmless() -> None:
    """Checks run as the daemon's user, who must not choose a command of root."""
    finding = Finding("staging", "staging", Level.FAILURE, "gone", fixes.harmless("install -d /x"))
    found = sandbox.finding_of(json.dumps(asdict(finding)).encode())
    assert found == finding
    assert not isinstance(found.fix, Harmless)


def test_only_the_command_of_an_error_is_a_fix_and_never_its_words() -> None:
    """Neither a server's words nor a command for one case in a hint become a command to run."""
    words = "put x: 403 AccessDenied; fix it with `reboot`"
    for hint in ("Mount it.  If it was emptied: `reboot`", "If it was emptied, run `reboot`"):
        error = Forbidden(words, hint=hint)
        assert of_error(error, "edit") == failure(f"{words}. {hint}", "edit")
        assert of_error(error, "") == failure(words, f"# {hint}")
    closed = SwansongError("closed", hint="Start it", command="systemctl start swansongd")
    found = of_error(closed, "edit")
    assert found == failure("closed", "sudo systemctl start swansongd")
    assert not isinstance(found.fix, Harmless)
    assert closed.line() == "closed. Start it: `systemctl start swansongd`"
