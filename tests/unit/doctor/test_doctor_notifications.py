# SPDX-License-Identifier: Apache-2.0
"""The checks of ``[notify]``: they send nothing unless asked to, and show no secret."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from swansong_tools.doctor import reporting
from swansong_tools.doctor.findings import Finding, examine
from swansong_tools.doctor.installation import Options

from testkit.raw_server import Peer, RawServer
from tests.unit.doctor.test_doctor import installation


def findings(*, send: bool = False, **settings: Any) -> dict[str, Finding]:
    vm = installation(options=Options(send_notification=send), notify=settings)
    return {finding.name: finding for finding in examine(vm, reporting.AS_DAEMON)}


def test_without_notifications_there_are_no_checks() -> None:
    assert findings(send=True) == {}


def test_only_an_explicit_request_sends_something() -> None:
    bodies: list[bytes] = []

    def script(peer: Peer) -> None:
        while (request := peer.request()) is not None:
            bodies.append(request.body)
            peer.answer(200)

    with RawServer(script) as server:
        settings = {"webhook_url": server.url, "heartbeat_url": server.url}
        quiet = findings(**settings)
        assert [f.level for f in quiet.values()] == ["ok", "ok"]
        assert bodies == []
        sent = findings(send=True, **settings)
    assert [f.level for f in sent.values()] == ["ok"] * 4
    webhook, heartbeat = bodies
    assert json.loads(webhook)["kind"] == "test"
    assert heartbeat == b""


@pytest.mark.fault("W05")
def test_a_secret_that_others_may_read_is_reported_and_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "webhook"
    file.write_text("https://localhost/geheim")
    file.chmod(0o444)
    found = findings(webhook_url_file=str(file))["webhook"]
    assert found.level == "warning"
    assert "other users may read it" in found.found
    assert f"chmod 0400 {file}" in found.fix
    file.chmod(0o400)
    good = findings(webhook_url_file=str(file))["webhook"]
    assert good.level == "ok"
    assert "geheim" not in found.found + found.fix + good.found


def test_a_template_and_a_name_that_cannot_work_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = tmp_path / "template"
    template.write_text('{"a": "$nothing"}')
    url = "https://localhost/x"
    found = findings(webhook_url=url, template_file=str(template))["webhook"]
    assert "unknown placeholder" in found.found

    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    found = findings(heartbeat_url="https://no-such-host.invalid/x")["heartbeat"]
    assert found.level == "warning"
    assert "resolving no-such-host.invalid failed" in found.found


def test_a_test_notification_that_is_refused_is_a_failure() -> None:
    with RawServer(lambda peer: (peer.request(), peer.answer(404, b"no_service"))) as server:  # type: ignore[arg-type, return-value]
        found = findings(send=True, webhook_url=server.url)["test notification"]
    assert found.level == "failure"
    assert "HTTP 404: no_service" in found.found


@pytest.mark.parametrize(
    ("mode", "level", "words"),
    [
        (0o755, "ok", "runs at notice"),
        (0o644, "warning", "is not an executable file"),
        (0o777, "warning", "other users can change"),
    ],
)
def test_the_program_must_run_and_belong_to_the_operator(
    tmp_path: Path, mode: int, level: str, words: str
) -> None:
    program = tmp_path / "replace"
    program.write_text("#!/bin/sh\n")
    program.chmod(mode)
    found = findings(exec=[str(program)])["notify.exec"]
    assert found.level == level
    assert words in found.found


def test_a_missing_program_is_reported(tmp_path: Path) -> None:
    found = findings(exec=[str(tmp_path / "missing")])["notify.exec"]
    assert "cannot run: No such file" in found.found
