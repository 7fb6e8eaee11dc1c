# SPDX-License-Identifier: Apache-2.0
"""Webhook, heartbeat and command against real servers and processes that misbehave."""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
from swansongd.config.notify import NotifyConfig
from swansongd.core.events import NoticeRaised
from swansongd.host.sdnotify import SystemdNotifier
from swansongd.host.stored_document import SystemdMemory
from swansongd.notifications import delivery, exec_command
from swansongd.notifications.delivery import Deliverer, HttpRequest, NotDelivered
from swansongd.notifications.exec_command import Command, environment, run_bounded
from swansongd.notifications.heartbeat import Heartbeat
from swansongd.notifications.heartbeat import request_for as heartbeat_request
from swansongd.notifications.notifier import Notifier
from swansongd.notifications.sent import SentNotifications
from swansongd.notifications.webhook import Webhook
from swansongd.notifications.webhook import request_for as webhook_request
from swansongd.observe.notifications import Notification, NotificationKind, Origin, fields, sample
from swansongd.observe.observer import Observation
from swansongd.observe.status import SenderStatus

from testkit.emulators import tls
from testkit.raw_server import Peer, RawServer, Script
from testkit.story import Story, a_notice
from testkit.waiting import Clock, is_running, until

NO_SYSTEMD = SystemdNotifier({})
ORIGIN = Origin(run="run", vm="vm", host="host")
SECRET = "T0SECRET0B0"


@pytest.fixture
def log_lines() -> Iterator[list[dict[str, Any]]]:
    with structlog.testing.capture_logs() as lines:
        yield lines


def notice(
    key: str = "n", kind: NotificationKind = NotificationKind.NOTICE, **facts: Any
) -> Notification:
    return replace(sample(time.time()), key=key, kind=kind, **facts)


def record() -> SentNotifications:
    """A record that no other daemon reads."""
    place = SystemdMemory("notifications", None, NO_SYSTEMD, max_bytes=2**20)
    return SentNotifications(place, boot_id="a")


def webhook(url: str, *, total_s: float = 10.0, **settings: Any) -> Webhook:
    config = NotifyConfig(webhook_url=url, **settings)
    made = Webhook(config, ORIGIN, record(), deliverer=Deliverer(total_s=total_s), backoff_s=0.01)
    made.start()
    return made


def notifier(kept: SentNotifications | None = None, **settings: Any) -> Notifier:
    config = NotifyConfig(**settings)
    return Notifier(config, run="run", vm="vm", record=kept or record())


def settled(made: Webhook | Command, count: int = 1) -> SenderStatus:
    """The status once this many notifications were sent or given up."""

    def done() -> SenderStatus | None:
        sender = made.outbox.status()
        return sender if sender.sent + sender.failed >= count else None

    found = until(done, what="the end of all attempts")
    assert found is not None
    return found


def answers(*replies: Callable[[Peer], None]) -> tuple[Script, list[Any]]:
    """A script that answers the requests in this order, the last one again and again."""
    left, bodies = list(replies), list[Any]()

    def script(peer: Peer) -> None:
        while (request := peer.request()) is not None:
            bodies.append(json.loads(request.body) if request.body else request.line)
            (left.pop(0) if len(left) > 1 else left[0])(peer)

    return script, bodies


def sent_to(script: Script, **settings: Any) -> SenderStatus:
    """The status after one notification to a server with this script."""
    with RawServer(script) as server:
        made = webhook(server.url, **settings)
        made.put(notice())
        return settled(made)


def deliver(url: str, *, total_s: float = 10.0, **facts: Any) -> None:
    Deliverer(total_s=total_s).send(HttpRequest(url, data=b"{}", **facts))


def secret_file(directory: Path, text: str) -> str:
    file = directory / "secret"
    file.write_text(text)
    file.chmod(0o400)
    return str(file)


def hang(peer: Peer) -> None:
    peer.wait_for_end()


def status(code: int, body: bytes = b"", *headers: str) -> Callable[[Peer], None]:
    return lambda peer: peer.answer(code, body, *headers)


def test_a_notification_arrives_once() -> None:
    script, bodies = answers(status(200, b"ok"))
    with RawServer(script) as server:
        made = webhook(f"{server.url}/{SECRET}")
        made.put(notice())
        sender = settled(made)
        made.put(notice())  # the record has it
        made.put(notice("v", NotificationKind.VERDICT))
        sender = settled(made, 2)
    assert (sender.sent, sender.failed, sender.last_error) == (2, 0, None)
    assert [body["kind"] for body in bodies] == ["notice", "verdict"]


@pytest.mark.fault("W02")
@pytest.mark.parametrize("failure", [status(500), status(503), status(429), Peer.reset])
def test_a_failure_that_may_pass_is_retried_with_the_same_id(
    failure: Callable[[Peer], None],
) -> None:
    script, bodies = answers(failure, failure, status(204))
    assert sent_to(script).sent == 1
    assert len(bodies) == 3
    assert len({body["id"] for body in bodies}) == 1


@pytest.mark.fault("W02")
@pytest.mark.parametrize("code", [400, 401, 404, 410, 301, 307])
def test_a_refusal_and_a_redirect_are_final(code: int, log_lines: list[dict[str, Any]]) -> None:
    """A redirect would take the notification and the token to another host."""
    script, bodies = answers(status(code, b"no_service", "Location: http://127.0.0.1:9/stolen"))
    sender = sent_to(script)
    assert len(bodies) == sender.failed == 1
    assert str(sender.last_error).startswith(f"HTTP {code}")
    (line,) = log_lines
    assert (line["event"], line["attempts"]) == ("notification_failed", 1)


def test_retry_after_is_bounded() -> None:
    """A receiver cannot silence notifications for a day."""
    script, _ = answers(status(429, b"", "Retry-After: 86400"))
    with RawServer(script) as server, pytest.raises(NotDelivered) as error:
        deliver(server.url)
    assert error.value.retry_after_s == delivery.RETRY_AFTER_S_MAX


def drip(peer: Peer) -> None:
    """One byte of a header at a time: no timeout of a socket ends this."""
    peer.send(b"HTTP/1.1 200 OK\r\n")
    while True:
        peer.send(b"x")
        time.sleep(0.05)


def endless(peer: Peer) -> None:
    peer.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    chunk = b"10000\r\n" + b"x" * 2**16 + b"\r\n"
    while True:
        peer.send(chunk)


@pytest.mark.fault("W01")
@pytest.mark.parametrize("misbehaviour", [hang, drip])
def test_a_receiver_that_never_finishes_is_abandoned(misbehaviour: Script) -> None:
    def script(peer: Peer) -> None:
        peer.head()
        misbehaviour(peer)

    with RawServer(script) as server, pytest.raises(NotDelivered, match="no complete reply"):
        deliver(server.url, total_s=0.3)


@pytest.mark.fault("W01")
def test_abandoned_requests_are_bounded() -> None:
    """A receiver that hangs costs a few threads and no more."""
    with RawServer(hang) as server:
        deliverer = Deliverer(total_s=0.02)
        for _ in range(delivery.ABANDONED_MAX):
            with pytest.raises(NotDelivered, match="no complete reply"):
                deliverer.send(HttpRequest(server.url))
        before = server.accepted
        with pytest.raises(NotDelivered, match="earlier requests still hang"):
            deliverer.send(HttpRequest(server.url))
        assert server.accepted <= max(before, delivery.ABANDONED_MAX)


@pytest.mark.fault("W01")
def test_a_huge_reply_is_not_read() -> None:
    def script(peer: Peer) -> None:
        peer.request()
        endless(peer)

    with RawServer(script) as server:
        deliver(server.url, total_s=5.0)


def test_tls_is_verified_with_the_configured_authority(tmp_path: Path) -> None:
    ca, pem = tls.make(tmp_path)
    script, bodies = answers(status(200))
    with RawServer(script, pem) as server:
        deliver(server.url, ca_bundle=ca)
        with pytest.raises(NotDelivered, match="the certificate is not valid"):
            deliver(server.url)
    assert bodies == [{}]


def test_a_proxy_of_the_environment_does_not_see_local_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("https_proxy", "http://proxy.example.org:3128")
    monkeypatch.delenv("no_proxy", raising=False)
    script, bodies = answers(status(200))
    with RawServer(script) as server:
        deliver(server.url)
    assert bodies == [{}]
    assert delivery._proxies("https://hooks.example.org/x")["https"].endswith(":3128")


# ---------------------------------------------------------------- secrets


def broken(peer: Peer) -> None:
    """A reply with a malformed header, about which urllib3 logs a warning with the address."""
    peer.send(b"HTTP/1.1 500 X\r\nbad header without colon\r\n: x\r\nContent-Length: 0\r\n\r\n")
    peer.sock.shutdown(socket.SHUT_WR)


def echo(peer: Peer) -> None:
    peer.answer(404, f"Cannot POST /services/{SECRET}".encode())


def encoded_echo(peer: Peer) -> None:
    peer.answer(403, f"token t0ken\\u0067eheim: {SECRET[:-1]} is unknown".encode())


@pytest.mark.fault("W05")
@pytest.mark.parametrize("failure", [broken, echo, encoded_echo, Peer.reset, status(500), None])
def test_no_failure_reveals_the_address_or_the_token(
    failure: Callable[[Peer], None] | None,
    tmp_path: Path,
    log_lines: list[dict[str, Any]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Log, status and errors, for a reply that repeats the address, and for a refused connection."""
    monkeypatch.setattr("swansongd.notifications.webhook.ATTEMPTS_MAX", 2)
    token = secret_file(tmp_path, "t0kengeheim")
    script, _ = answers(failure or status(200))
    with RawServer(script) as server:
        url = server.url if failure else "http://127.0.0.1:9"
        made = webhook(f"{url}/services/{SECRET}", token_file=token)
        made.put(notice())
        sender = settled(made)
    shown = str([sender, log_lines]) + caplog.text
    assert sender.failed == 1
    assert sender.last_error
    assert SECRET[:-1] not in shown
    assert "eheim" not in shown


def test_a_reply_is_shown_only_if_no_secret_is_in_a_file(tmp_path: Path) -> None:
    file = secret_file(tmp_path, "https://example.org/x")
    from_file = NotifyConfig(webhook_url_file=file, heartbeat_url_file=file)
    plain = NotifyConfig(webhook_url="http://127.0.0.1:9", heartbeat_url="http://127.0.0.1:9")
    for config in (from_file, plain):
        assert webhook_request(config, ORIGIN, notice()).has_secret is (config is from_file)
        assert heartbeat_request(config).has_secret is (config is from_file)


def test_the_token_is_sent_to_the_receiver_alone(tmp_path: Path) -> None:
    seen: list[str | None] = []

    def script(peer: Peer) -> None:
        request = peer.request()
        assert request is not None
        seen.append(request.header("authorization"))
        peer.answer(200)

    assert sent_to(script, token_file=secret_file(tmp_path, "abc")).sent == 1
    assert seen == ["Bearer abc"]


# ---------------------------------------------------------------- the decision thread


@pytest.mark.fault("W01")
def test_a_receiver_that_hangs_costs_the_decision_thread_microseconds(tmp_path: Path) -> None:
    """``observe`` with a webhook, a command and a heartbeat that all hang, during an evacuation."""
    story = Story()
    observations: list[Observation] = []
    for number in range(200):
        before = story.state
        event = NoticeRaised(a_notice(deadline_mono_s=story.now + 100, identity=f"n{number}"))
        actions = story.tell(event)
        observations.append(Observation(before, story.state, event, actions, story.now))
    with RawServer(hang) as server:
        urls = {"webhook_url": server.url, "heartbeat_url": server.url}
        made = notifier(**urls, exec=("/bin/sleep", "600"), exec_timeout_s=600.0)
        made.start()
        for observation in observations[:5]:
            made.observe(observation)
        until(lambda: server.accepted, what="a request that hangs")
        took = []
        for observation in observations[5:]:
            began_s = time.perf_counter()  # unlike the CPU time, it contains a wait
            made.observe(observation)
            took.append(time.perf_counter() - began_s)
        made.close(webhook_by_mono_s=0.0, command_by_mono_s=0.0)
    assert statistics.median(took) < 1e-3
    assert sum(took) < 2.0  # no single call waits for a receiver, whose limits are seconds


@pytest.mark.fault("W01", "W04")
def test_at_the_end_of_the_daemon_a_webhook_that_hangs_costs_the_command_no_time(
    tmp_path: Path,
) -> None:
    """The command has its own, longer limit.  It ends by itself after that of the webhook."""
    gate, done = tmp_path / "gate", tmp_path / "done"
    os.mkfifo(gate)
    with RawServer(hang) as server:
        script = f"read line <{gate}; echo ended >{done}"
        made = notifier(webhook_url=server.url, exec=("/bin/sh", "-c", script))
        made.start()
        made._put(notice())
        until(lambda: server.accepted, what="a request that hangs")
        now = time.monotonic()
        limits = {"webhook_by_mono_s": now + 0.05, "command_by_mono_s": now + 60.0}
        made.begin_close()
        closing = threading.Thread(target=made.close, kwargs=limits, daemon=True)
        closing.start()
        until(lambda: time.monotonic() > now + 0.2, what="the limit of the webhook")
        assert closing.is_alive()
        gate.write_text("go\n")
        closing.join(30)
        assert not closing.is_alive()
    assert done.read_text() == "ended\n"
    assert made.status().exec == SenderStatus(queued=0, sent=1, failed=0, dropped=0)


@pytest.mark.fault("W04")
def test_at_the_end_of_the_daemon_a_command_that_hangs_is_killed(tmp_path: Path) -> None:
    """At its limit, and the next command does not begin."""
    pids = tmp_path / "pids"
    made = notifier(exec=("/bin/sh", "-c", f"echo $$ >>{pids}; exec sleep 600"))
    made.start()
    for key in ("a", "b"):
        made._put(notice(key))
    until(lambda: pids.exists() and pids.read_text().endswith("\n"), what="the command")
    began_mono_s = time.monotonic()
    made.close(webhook_by_mono_s=0.0, command_by_mono_s=began_mono_s + 0.1)
    assert time.monotonic() - began_mono_s < 60  # by itself it would end after 600 s
    sender = until(
        lambda: (found := made.status().exec) and found.failed == 2 and found,
        what="the end of both",
    )
    assert sender.sent == 0
    (pid,) = pids.read_text().split()
    until(lambda: not Path("/proc", pid).exists(), what="the end of the program")


def test_a_flood_of_notices_is_limited_and_counted() -> None:
    """Each has another identity, as those of a forged metadata service: it orders a handful of VMs."""
    made = notifier(webhook_url="http://127.0.0.1:9", exec=("/bin/true",))
    for number in range(100):
        made._put(notice(f"n{number}"))
    shown = made.status()
    assert shown.limited == 80
    assert shown.webhook == SenderStatus(queued=20, sent=0, failed=0, dropped=0)
    assert shown.exec == SenderStatus(queued=3, sent=0, failed=0, dropped=97)


def test_a_notice_that_comes_again_is_sent_again_and_runs_no_second_command() -> None:
    kept = record()
    made = notifier(kept, webhook_url="http://127.0.0.1:9", exec=("/bin/true",))
    begun = notice("notice/i/imminent")
    over = notice("notice/i/over/1", is_over=True, ends="notice/i/")
    for each in (begun, begun, over):
        made._put(each)
    kept.add("webhook notice/i/imminent")
    kept.add("exec notice/i/imminent")
    made._put(notice("notice/i/over/2", is_over=True, ends="notice/i/"))
    made._put(begun)
    shown = made.status()
    assert shown.webhook == SenderStatus(queued=4, sent=0, failed=0, dropped=0)
    assert shown.exec == SenderStatus(queued=1, sent=0, failed=0, dropped=0)


# ---------------------------------------------------------------- the heartbeat


def test_the_heartbeat_is_called_only_while_all_is_well() -> None:
    script, lines = answers(status(200))
    reason = ["the store is away"]
    with RawServer(script) as server:
        config = NotifyConfig(heartbeat_url=f"{server.url}/ping", heartbeat_interval_s=0.01)
        made = Heartbeat(config, lambda: reason[0])
        assert made._beat() == 1.0
        assert (made.status().silent, made.status().sent) == ("the store is away", 0)
        reason[0] = ""
        assert made._beat() == 0.01
    assert lines == ["GET /ping HTTP/1.1"]
    assert (made.status().silent, made.status().sent) == (None, 1)


def test_a_heartbeat_that_fails_is_counted_and_logged_once(
    log_lines: list[dict[str, Any]],
) -> None:
    config = NotifyConfig(heartbeat_url=f"http://127.0.0.1:9/{SECRET}")
    made = Heartbeat(config, lambda: "")
    assert made._beat() == made._beat() == 30.0
    assert made.status().failed == 2
    (line,) = log_lines
    assert "refused" in line["reason"]
    assert SECRET not in str([made.status(), line])


# ---------------------------------------------------------------- the command


def run(*words: str, timeout_s: float = 30.0, **facts: str) -> Any:
    variables = {"PATH": os.environ["PATH"], **facts}
    return run_bounded(words, variables, timeout_s=timeout_s, stop=threading.Event())


def test_the_command_gets_the_facts_and_no_other_variable(tmp_path: Path) -> None:
    made = notice(seconds_left=118.5, source="aws.spot", reason="it's $(reboot)")
    secrets = {"PATH": "/bin", "CREDENTIALS_DIRECTORY": "/run/x", "AWS_SECRET_ACCESS_KEY": "x"}
    variables = environment(fields(ORIGIN, made), secrets)
    assert not variables.keys() & {"CREDENTIALS_DIRECTORY", "AWS_SECRET_ACCESS_KEY"}
    script = 'echo "$SWANSONG_EVENT $SWANSONG_SECONDS_LEFT $SWANSONG_REASON [$SWANSONG_STEP]"'
    done = run_bounded(("/bin/sh", "-c", script), variables, timeout_s=30.0, stop=threading.Event())
    assert (done.code, done.output) == (0, "notice 118.5 it's $(reboot) []")


class Paused(threading.Event):
    """Takes the place of ``stop``: its wait ends under this condition, a minute later by the clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, condition: Callable[[], object]) -> None:
        super().__init__()
        self._condition, self._clock = condition, Clock()
        monkeypatch.setattr(exec_command, "time", self._clock)

    def wait(self, timeout: float | None = None) -> bool:
        until(self._condition, what="the end of the pause")
        self._clock.advance(60.0)
        return False


@pytest.mark.fault("W04")
def test_a_command_that_hangs_is_killed_with_its_children(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The children hold the pipe of the output, and one of them ignores SIGTERM."""
    file = tmp_path / "child"
    script = f"(trap '' TERM; sleep 600) & sleep 600 & echo $! >{file}; wait"
    paused = Paused(monkeypatch, lambda: file.exists() and file.read_text().endswith("\n"))
    done = run_bounded(("/bin/sh", "-c", script), os.environ, timeout_s=30.0, stop=paused)
    assert done.code is None
    child = int(file.read_text())
    until(lambda: not is_running(child), what="the end of the child")


@pytest.mark.fault("W04")
def test_a_command_that_ended_is_not_reported_as_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon did not run between its end and the time limit."""
    pids: list[int] = []
    has_ended = exec_command._has_ended

    def recorded(pid: int) -> bool:
        pids.append(pid)
        return len(pids) > 1 and has_ended(pid)

    monkeypatch.setattr(exec_command, "_has_ended", recorded)
    paused = Paused(monkeypatch, lambda: has_ended(pids[0]))
    done = run_bounded(("/bin/sh", "-c", "echo sent"), os.environ, timeout_s=30.0, stop=paused)
    assert (done.code, done.output) == (0, "sent")


@pytest.mark.fault("W04")
def test_children_that_a_command_leaves_behind_are_killed() -> None:
    done = run("/bin/sh", "-c", "sleep 600 & echo $!")
    assert done.code == 0
    assert done.seconds < 20
    until(lambda: not is_running(int(done.output)), what="the end of the child")


@pytest.mark.fault("W04")
def test_an_unexpected_error_leaves_no_process_and_the_next_command_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pid"
    has_ended = exec_command._has_ended
    seen: list[int] = []

    def fails_once(pid: int) -> bool:
        seen.append(pid)
        if pid == seen[0]:
            raise ValueError
        return has_ended(pid)

    monkeypatch.setattr(exec_command, "_has_ended", fails_once)
    made = Command(NotifyConfig(exec=("/bin/sh", "-c", f"echo >{file}")), ORIGIN, record())
    made.put(notice("a"))
    made.put(notice("b"))
    made.start()
    sender = settled(made, 2)
    assert (sender.failed, sender.sent) == (1, 1)
    assert not Path(f"/proc/{seen[0]}").exists()


@pytest.mark.fault("W04")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_process_that_cannot_be_killed_holds_the_thread_for_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exec_command, "_REAP_S", 0.05)
    with monkeypatch.context() as patched:
        patched.setattr(os, "killpg", lambda *_: None)
        assert run("/bin/sleep", "5", timeout_s=0.1).seconds < 4


@pytest.mark.fault("W04")
def test_a_flood_of_output_costs_little_time_and_memory() -> None:
    began_s = time.process_time()
    done = run("/usr/bin/yes", timeout_s=0.5)
    assert done.code is None
    assert len(done.output) <= 400
    assert time.process_time() - began_s < 0.3


def test_a_command_that_does_not_exist_is_an_exit_code() -> None:
    done = run("/nonexistent/command")
    assert done.code == 127
    assert "No such file" in done.output


def test_the_command_runs_once_for_a_begin_and_not_for_drills(tmp_path: Path) -> None:
    kept = record()
    file = tmp_path / "ran"
    config = NotifyConfig(
        exec=("/bin/sh", "-c", f"echo $SWANSONG_ID >>{file}"), exec_on=("notice", "verdict")
    )
    made = Command(config, ORIGIN, kept)
    made.put(notice("a", source="drill"))
    made.put(notice("b", is_over=True, ends="notice/"))
    made.put(notice("c", NotificationKind.STALL))
    made.put(notice("d"))
    made.put(notice("e", NotificationKind.VERDICT, is_over=True))
    assert made.outbox.status().queued == 2
    made.start()
    assert settled(made, 2).sent == 2
    again = Command(config, ORIGIN, kept)  # as after a restart
    again.put(notice("d"))
    assert again.outbox.status().queued == 0
    assert len(file.read_text().split()) == 2


def test_a_notice_that_becomes_more_urgent_orders_no_second_vm() -> None:
    """The command runs once for the urgent notice, and before that once for an advisory one."""
    made = Command(NotifyConfig(exec=("/bin/true",)), ORIGIN, record())
    for urgency in ("advisory", "scheduled", "imminent", "shutting_down"):
        made.put(notice(f"notice/gpu:1/{urgency}", urgency=urgency))
    made.put(notice("notice/gpu:2/imminent", urgency="imminent"))
    assert made.outbox.status().queued == 3
    made.start()
    assert settled(made, 3).sent == 3
    made.put(notice("notice/gpu:1/shutting_down", urgency="shutting_down"))
    assert made.outbox.status().queued == 0


@pytest.mark.fault("W04")
def test_a_command_never_runs_twice_although_the_daemon_died_meanwhile() -> None:
    """Its start is recorded before it: two VMs are worse than none."""
    kept = record()
    config = NotifyConfig(exec=(sys.executable, "-c", "import time; time.sleep(600)"))
    made = Command(config, ORIGIN, kept)
    made.put(notice("d"))
    made.start()
    until(lambda: kept.has("exec d"), what="the record")
    assert made.outbox.status().sent == 0
    made.stop()
    assert settled(made).failed == 1
