# SPDX-License-Identifier: Apache-2.0
"""The record of sent notifications, and the files with secrets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from swansongd.notifications import secret_files
from swansongd.notifications import sent as records
from swansongd.notifications.secret_files import UnusableSecret
from swansongd.notifications.sent import SentNotifications, record_file


def test_the_record_survives_the_daemon_and_not_the_boot(own_fd: int) -> None:
    first = SentNotifications(record_file(own_fd), boot_id="a")
    first.add("webhook notice/1")
    first.set_begun(frozenset({"stall"}))
    again = SentNotifications(record_file(own_fd), boot_id="a")
    assert again.has("webhook notice/1")
    assert again.begun == {"stall"}
    rebooted = SentNotifications(record_file(own_fd), boot_id="b")
    assert not rebooted.has("webhook notice/1")
    assert rebooted.begun == frozenset()


def test_the_record_is_bounded(own_fd: int) -> None:
    record = SentNotifications(record_file(own_fd), boot_id="a")
    for number in range(records.SENT_MAX + 10):
        record._sent[f"k{number}"] = None
    record.add("last")
    again = SentNotifications(record_file(own_fd), boot_id="a")
    assert again.has("last")
    assert not again.has("k5")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"boot_id": "a", "sent": [1], "begun": []}', b"\0" * 2**21]
)
def test_a_damaged_record_is_reported_and_counts_as_empty(
    own_fd: int, tmp_path: Path, content: bytes
) -> None:
    """No notification is lost: all are sent, one perhaps for the second time, and the log says why."""
    (tmp_path / "notifications.json").write_bytes(content)
    with capture_logs() as lines:
        record = SentNotifications(record_file(own_fd), boot_id="a")
    assert [(line["event"], line["what"]) for line in lines] == [
        ("stored_state_ignored", "notifications")
    ]
    assert not record.has("k")
    record.add("k")
    assert SentNotifications(record_file(own_fd), boot_id="a").has("k")


@pytest.mark.fault("D02")
def test_a_full_disk_costs_no_notification(tmp_path: Path) -> None:
    """The record then lasts as long as the daemon, and the log has one line."""
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    record = SentNotifications(record_file(fd), boot_id="a")
    os.close(fd)  # each write fails
    with capture_logs() as lines:
        record.add("k")
        record.add("l")
    assert record.has("k")
    assert [line["event"] for line in lines] == ["state_not_stored"]


# ---------------------------------------------------------------- secrets


def secret(path: Path, text: str, mode: int = 0o400) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_a_secret_is_read_again_for_each_request(tmp_path: Path) -> None:
    """A new secret needs no restart."""
    file = secret(tmp_path / "token", "first\n", 0o600)
    assert secret_files.token(file) == "first"
    secret(tmp_path / "token", "second\n", 0o600)
    assert secret_files.token(file) == "second"


@pytest.mark.fault("W05")
@pytest.mark.parametrize("mode", [0o440, 0o404, 0o660])
def test_a_secret_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    file = secret(tmp_path / "token", "geheim", mode)
    with pytest.raises(UnusableSecret, match="other users may read it") as error:
        secret_files.token(file)
    assert "geheim" not in error.value.line()


def test_a_credential_of_systemd_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """systemd keeps other users away, and gives the file a mode of its own."""
    secret(tmp_path / "hook", "https://hooks.example.org/T/S\n", 0o440)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    found = secret_files.address(None, "credential:hook", allow_http=False)
    assert found == "https://hooks.example.org/T/S"
    monkeypatch.delenv("CREDENTIALS_DIRECTORY")
    with pytest.raises(UnusableSecret, match="no LoadCredential=") as error:
        secret_files.read("credential:hook")
    assert "LoadCredential=hook:FILE" in error.value.hint


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("http://hooks.example.org/secret", "without encryption"),
        ("ftp://hooks.example.org/secret", "is not an HTTP address"),
        ("https://user:secret@example.org/", "contains a user name"),
        ("https://example.org/secret\nX: y", "is not an HTTP address"),
        ("", "is not an HTTP address"),
    ],
)
def test_an_address_that_is_not_valid_is_refused_and_not_shown(
    tmp_path: Path, text: str, found: str
) -> None:
    file = secret(tmp_path / "url", text)
    with pytest.raises(UnusableSecret, match=found) as error:
        secret_files.address(None, file, allow_http=False)
    assert "secret" not in error.value.line()


def test_a_token_with_a_line_break_is_refused(tmp_path: Path) -> None:
    """It would add a header to the request."""
    file = secret(tmp_path / "token", "abc\r\nX-Other: 1")
    with pytest.raises(UnusableSecret, match="contains no token"):
        secret_files.token(file)
