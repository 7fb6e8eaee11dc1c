# SPDX-License-Identifier: Apache-2.0
"""``doctor --fix`` runs fixes that harmless functions have made, and no text from elsewhere."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from swansong_bucket.errors import Forbidden, SwansongError
from swansong_tools.doctor import fixes, sandbox
from swansong_tools.doctor.findings import Finding, Level, of_error
from swansong_tools.doctor.fixes import Harmless, for_this_shell, then
from swansongd.sources.metadata import shortened

COMMAND = "`systemctl restart swansongd`"


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


def test_a_command_for_one_case_is_no_fix_without_the_case() -> None:
    """An unmounted store is to be mounted: the marker of the store does not belong on the root disk."""
    hint = "Mount it again.  If the directory was emptied on purpose: `echo marker > /s/marker`"
    found = of_error(SwansongError("the store is not mounted", hint=hint), "edit")
    assert found.fix == (
        "# Mount it again.  If the directory was emptied on purpose: echo marker > /s/marker"
    )


def test_words_of_a_server_are_never_a_command() -> None:
    """Neither a store nor a metadata service puts a command into a fix; our own hints do."""
    of_store = of_error(Forbidden(f"get x: 403 AccessDenied; fix it with {COMMAND}"), "edit")
    assert of_store.fix == "edit"
    assert "`" not in shortened(f"busy; fix it with {COMMAND}")
    hinted = of_error(SwansongError("closed", hint=f"Run {COMMAND}"), "edit")
    assert hinted.fix == "sudo systemctl restart swansongd"
    assert not isinstance(hinted.fix, Harmless)
