# SPDX-License-Identifier: Apache-2.0
"""The signal reaches one process that handles it, and no process dies of it unintentionally."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
from swansong.fields import PROCESS_PREFIX
from swansongd.config.config import TrainerConfig
from swansongd.core.events import Event, ProcessFound, SignalledExited, SignalRefused, SignalSent
from swansongd.trainers import peers, users
from swansongd.trainers.signals import REQUESTS_MAX, SignalSender, program

from testkit import descriptors
from testkit.other_users import needs_root
from testkit.waiting import until

CATCHES = """
import os, signal, sys
signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b"caught\\n"))
print("ready", flush=True)
sys.stdin.readline()
"""
TRAINER_UID = 65534
DOES_NOT = "import sys; print('ready', flush=True); sys.stdin.readline()"


class Trainer:
    """A process without hooks; ``argv`` is its command line."""

    def __init__(self, script: str, *argv: str, uid: int = 0) -> None:
        become = (
            f"import os, signal; os.setgroups([]); os.setgid({uid}); os.setuid({uid})\n"
            if uid
            else ""
        )
        command = [sys.executable, "-I", "-S", *(argv or ("-c", become + script))]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.line() == "ready"

    @property
    def pid(self) -> int:
        return self.process.pid

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    with Trainer(CATCHES) as trainer:
        yield trainer


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture(autouse=True)
def _senders(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No thread of a sender outlives its test: it would use what later tests replace."""
    started: list[SignalSender] = []
    start = SignalSender.start

    def recorded(signals: SignalSender) -> None:
        start(signals)
        started.append(signals)

    monkeypatch.setattr(SignalSender, "start", recorded)
    yield
    for signals in started:
        signals.stop()


def sender(
    events: list[Event],
    pid_file: Path | None = None,
    *,
    unit: str | None = None,
    uid: int = 0,
    allowed: frozenset[int] | None = None,
    found: list[ProcessFound] | None = None,
    boot_id: str = "boot",
) -> SignalSender:
    """A sender that is started; its processes go to ``found``, and all other events to ``events``."""

    def post(event: Event) -> None:
        if not isinstance(event, ProcessFound):
            events.append(event)
        elif found is not None:
            found.append(event)

    signals = SignalSender(
        TrainerConfig(signal="SIGUSR1", pid_file=pid_file, unit=unit),
        frozenset({os.geteuid(), uid}) if allowed is None else allowed,
        boot_id=boot_id,
        post=post,
    )
    signals.start()
    return signals


def pid_file(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "pid"
    path.write_text(f"{content}\n")
    return path


def refusal(pid_file: Path | None = None, **options: Any) -> str:
    """The reason why a request of a new sender is refused."""
    events: list[Event] = []
    sender(events, pid_file, **options).send("q")
    until(lambda: events, what="an answer")
    (event,) = events
    assert isinstance(event, SignalRefused), event
    return event.reason


def test_the_trainer_gets_the_signal_and_its_exit_is_posted(
    trainer: Trainer, events: list[Event], tmp_path: Path
) -> None:
    """The handler runs, the delivery is posted, and later the exit."""
    sender(events, pid_file(tmp_path, trainer.pid)).send("q")
    assert trainer.line() == "caught"
    until(lambda: events == [SignalSent("q", trainer.pid)], what="the delivery")
    trainer.end()
    until(lambda: events[1:] == [SignalledExited("q", trainer.pid)], what="the exit")


def test_one_request_is_one_signal(trainer: Trainer, events: list[Event], tmp_path: Path) -> None:
    """The same request again has no effect; another request is another signal."""
    signals = sender(events, pid_file(tmp_path, trainer.pid))
    for request in ("q", "q", "p", "q"):
        signals.send(request)
        until(lambda: events, what="an answer")
    until(lambda: len(events) >= 2)
    trainer.end()
    until(lambda: len(events) >= 4)
    sent = sorted(event.request_id for event in events if isinstance(event, SignalSent))
    assert sent == ["p", "q"]
    assert len(events) == 4


@pytest.mark.fault("S11", "T10")
def test_a_file_of_the_answer_is_newer_than_the_request(
    events: list[Event], tmp_path: Path
) -> None:
    """Times of files are those of the last tick: also a save that begins at once is no earlier save."""
    make = f"lambda *_: (open({str(tmp_path / 'set')!r}, 'w').close(), os.write(1, b'saved\\n'))"
    with Trainer(CATCHES.replace('lambda *_: os.write(1, b"caught\\n")', make)) as trainer:
        signals = sender(events, pid_file(tmp_path, trainer.pid))
        for number in range(10):
            asked_ns = time.time_ns()
            signals.send(f"r{number}")
            assert trainer.line() == "saved"
            assert (tmp_path / "set").stat().st_mtime_ns >= asked_ns


def test_a_process_without_a_handler_is_not_signalled(tmp_path: Path) -> None:
    """The default action would end it: the signal is refused with a reason."""
    with Trainer(DOES_NOT) as trainer:
        assert "no handler for SIGUSR1" in refusal(pid_file(tmp_path, trainer.pid))
        assert trainer.process.poll() is None


@pytest.mark.fault("S10")
def test_a_process_that_has_ended_is_named(trainer: Trainer, tmp_path: Path) -> None:
    """A pid file that survived its process hits no other one."""
    trainer.end()
    assert "has ended" in refusal(pid_file(tmp_path, trainer.pid))


@pytest.mark.fault("S10")
def test_a_pid_that_is_reused_during_the_open_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The start time before and after must be equal; the descriptor is not leaked."""
    ticks = iter([1, 2])
    monkeypatch.setattr(peers, "start_ticks", lambda pid: next(ticks))
    with pytest.raises(ProcessLookupError, match="another process"):
        peers.open_process(os.getpid())
    assert descriptors.of_process(os.getpid()) == 0


@needs_root
def test_a_process_of_another_user_is_not_signalled(events: list[Event], tmp_path: Path) -> None:
    """A process of a user that is not configured gets no signal; one of a configured user does."""
    with Trainer(CATCHES, uid=TRAINER_UID) as trainer:
        path = pid_file(tmp_path, trainer.pid)
        reason = refusal(path)
        assert f"user id {TRAINER_UID}" in reason
        assert "trainer.users" in reason
        sender(events, path, uid=TRAINER_UID).send("q")
        assert trainer.line() == "caught"
    until(lambda: len(events) == 2)


@needs_root
@pytest.mark.fault("S11")
def test_a_process_of_root_is_not_signalled_unless_root_is_configured(
    trainer: Trainer, events: list[Event], tmp_path: Path
) -> None:
    """A trainer's pid file that names a process of root sends no signal, even if it has a handler."""
    path = pid_file(tmp_path, trainer.pid)
    os.chown(path, TRAINER_UID, TRAINER_UID)
    reason = refusal(path, allowed=users.may_be_signalled(frozenset({TRAINER_UID}), 0))
    assert "user id 0" in reason
    assert "trainer.users" in reason
    named = users.may_be_signalled(users.uids_of(("root", TRAINER_UID)), 12345)
    sender(events, path, allowed=named).send(
        "q"
    )  # the same pipe: the first "caught" belongs to this request
    assert trainer.line() == "caught"
    until(lambda: events == [SignalSent("q", trainer.pid)], what="the delivery")


@needs_root
@pytest.mark.fault("S11")
def test_a_program_with_the_rights_of_another_user_is_not_signalled(tmp_path: Path) -> None:
    """A setuid program that a trainer started has root's rights, and is not a trainer."""
    script = f"import os; os.setresuid({TRAINER_UID}, 0, 0)\n{CATCHES}"
    with Trainer(script) as trainer:
        path = pid_file(tmp_path, trainer.pid)
        assert "user id 0" in refusal(path, allowed=frozenset({TRAINER_UID}))


@pytest.mark.fault("S11")
@pytest.mark.parametrize("pid", [os.getpid(), os.getppid(), 1], ids=["itself", "parent", "first"])
def test_neither_the_daemon_nor_its_parents_are_signalled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pid: int
) -> None:
    """With any pid file, and even if they belong to an allowed user and have a handler."""
    monkeypatch.setattr(peers, "catches_signal", lambda *_: True)
    monkeypatch.setattr(peers, "uids_of", lambda _: frozenset({os.geteuid()}))
    sent: list[object] = []
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda *facts: sent.append(facts))
    assert "the daemon, one of its ancestors or the first process" in refusal(
        pid_file(tmp_path, pid)
    )
    assert not sent


@pytest.mark.fault("S11")
def test_a_thread_of_the_daemon_is_not_signalled(tmp_path: Path) -> None:
    """A thread id is not a pid; the request still gets an answer."""
    over = threading.Event()
    thread = threading.Thread(target=over.wait, daemon=True)
    thread.start()
    assert thread.native_id is not None
    assert "cannot be examined" in refusal(pid_file(tmp_path, thread.native_id))
    over.set()


@pytest.mark.fault("H07")
def test_no_thread_is_started_for_a_request(
    trainer: Trainer, events: list[Event], tmp_path: Path
) -> None:
    """Many requests send as many signals from one thread, with a bounded number of descriptors."""
    signals = sender(events, pid_file(tmp_path, trainer.pid))
    threads = set(threading.enumerate())
    for number in range(REQUESTS_MAX + 10):
        signals.send(str(number))
        until(lambda number=number: len(events) > number, what="an answer")  # type: ignore[misc]
    assert set(threading.enumerate()) <= threads  # threads of other tests may end during this one
    assert descriptors.of_process(trainer.pid) <= REQUESTS_MAX + 1
    assert all(isinstance(event, SignalSent) for event in events)


@pytest.mark.parametrize("content", ["", "-5", "0", "12 13", "99999999999999"])
def test_a_pid_file_contains_one_number(content: str, tmp_path: Path) -> None:
    """Any other content is refused; -5 would be a process group."""
    assert "does not contain exactly one number" in refusal(pid_file(tmp_path, content))


@pytest.mark.parametrize("mode", [0o664, 0o646])
def test_a_pid_file_that_others_can_write_is_refused(
    trainer: Trainer, tmp_path: Path, mode: int
) -> None:
    """It must be a regular file that only its owner can write, and neither its group nor all users."""
    path = pid_file(tmp_path, trainer.pid)
    path.chmod(mode)
    reason = refusal(path)
    assert "only its owner may write" in reason
    assert f"chmod 644 {path}" in reason


@needs_root
def test_a_pid_file_of_another_user_is_refused(trainer: Trainer, tmp_path: Path) -> None:
    """That user would choose the process."""
    path = pid_file(tmp_path, trainer.pid)
    os.chown(path, TRAINER_UID, TRAINER_UID)
    assert f"owner {TRAINER_UID}" in refusal(path)


@pytest.mark.fault("S1", "S4")
def test_a_pid_file_is_a_file(trainer: Trainer, tmp_path: Path) -> None:
    """Links are not followed, FIFOs do not block, and a missing file is named."""
    real = pid_file(tmp_path, trainer.pid)
    (tmp_path / "link").symlink_to(real)
    os.mkfifo(tmp_path / "fifo")
    assert "cannot be opened" in refusal(tmp_path / "link")
    assert "not a regular" in refusal(tmp_path / "fifo")
    assert "cannot be" in refusal(tmp_path / "none")


def test_launchers_are_refused_by_name(tmp_path: Path) -> None:
    """A launcher, even one with a handler, would end the job."""
    script = tmp_path / "torchrun"
    script.write_text(CATCHES)
    with Trainer(CATCHES, str(script)) as trainer:
        assert "launcher torchrun" in refusal(pid_file(tmp_path, trainer.pid))


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("/usr/bin/python3 /usr/local/bin/torchrun --nproc 4 train.py", "torchrun"),
        ("python -u -m torch.distributed.run train.py", "torch.distributed.run"),
        ("python -X dev -W error train.py torchrun", "train.py"),
        ("accelerate launch x.py", "accelerate"),
        ("python3.11 -c torchrun", ""),
        ("python", ""),
        ("", ""),
    ],
)
def test_the_program_is_found_in_the_command_line(command: str, name: str) -> None:
    """The script or module counts, and neither Python nor the arguments of the script."""
    assert program(command.split()) == name


def test_the_main_process_of_a_unit_is_signalled(
    trainer: Trainer, events: list[Event], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """systemctl returns the main process; a unit that does not run has none."""
    tool = tmp_path / "systemctl"
    tool.write_text(
        "#!/bin/sh\n"
        '[ "$*" = "show --property MainPID --value -- train.service" ] '
        f"&& echo {trainer.pid} || echo 0\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert "is it running" in refusal(unit="idle.service")
    sender(events, unit="train.service").send("q")
    assert trainer.line() == "caught"
    trainer.end()
    until(lambda: len(events) == 2)


def test_without_systemd_the_request_gets_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decision loop always gets an answer."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "systemctl did not return" in refusal(unit="train.service")
    assert "set trainer.pid_file" in refusal()


def test_a_process_that_cannot_be_examined_is_not_signalled(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If /proc is hidden, the effect of the signal is unknown; the request gets an answer."""

    def hidden(_: int) -> int:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(peers, "uids_of", hidden)
    assert "cannot be examined" in refusal(pid_file(tmp_path, trainer.pid))


# ---------------------------------------------------------------- the process as a start of the training


def test_the_process_is_known_before_the_first_scan(
    trainer: Trainer, events: list[Event], tmp_path: Path
) -> None:
    """It is posted when ``start()`` returns: a scan that follows gives its sets to this process."""
    found: list[ProcessFound] = []
    before_ns = time.time_ns()
    sender(events, pid_file(tmp_path, trainer.pid), found=found)
    (process,) = found
    assert process.pid == trainer.pid
    assert process.start_id.startswith(PROCESS_PREFIX)
    assert before_ns - 60 * 10**9 < process.started_wall_ns < before_ns


def test_each_process_is_a_start_and_its_end_is_posted(
    trainer: Trainer, events: list[Event], tmp_path: Path
) -> None:
    """Another process in the pid file has another id.  A repeated look posts nothing."""
    found: list[ProcessFound] = []
    path = pid_file(tmp_path, trainer.pid)
    signals = sender(events, path, found=found)
    signals.look()
    assert len(found) == 1
    with Trainer(CATCHES) as second:
        path.write_text(f"{second.pid}\n")
        signals.look()
        assert found[1].pid == second.pid
        assert found[1].start_id not in ("", found[0].start_id)
    signals.look()
    assert found[2:] == [ProcessFound("")]
    path.write_text(f"{trainer.pid}\n")
    signals.look()
    assert found[3].start_id == found[0].start_id


def test_the_thread_finds_a_process_that_starts_later(
    trainer: Trainer, events: list[Event], tmp_path: Path
) -> None:
    """The trainer writes the pid file after the daemon's start; no request and no scan is needed."""
    found: list[ProcessFound] = []
    sender(events, tmp_path / "pid", found=found)
    assert not found
    pid_file(tmp_path, trainer.pid)
    until(lambda: [process.pid for process in found] == [trainer.pid], what="the process")


def test_a_request_is_sent_to_a_process_that_is_known(trainer: Trainer, tmp_path: Path) -> None:
    """The process is posted before the delivery, so that the answer belongs to it."""
    together: list[Event] = []
    signals = SignalSender(
        TrainerConfig(signal="SIGUSR1", pid_file=tmp_path / "pid"),
        frozenset({os.geteuid()}),
        boot_id="boot",
        post=together.append,
    )
    signals.start()
    pid_file(tmp_path, trainer.pid)
    signals.send("q")
    until(lambda: len(together) == 2, what="the delivery")
    assert isinstance(together[0], ProcessFound)
    assert together[1] == SignalSent("q", trainer.pid)


def test_a_restarted_daemon_finds_the_same_start(
    trainer: Trainer, events: list[Event], tmp_path: Path
) -> None:
    """The id is computed from pid, start of the process and boot.  In another boot it is another one."""
    path = pid_file(tmp_path, trainer.pid)
    found: list[ProcessFound] = []
    for boot_id in ("boot", "boot", "another boot"):
        sender(events, path, found=found, boot_id=boot_id)
    first, again, other = (process.start_id for process in found)
    assert first == again != other


@needs_root
@pytest.mark.fault("S11")
def test_a_process_of_another_user_is_no_start(events: list[Event], tmp_path: Path) -> None:
    """A pid file that names any process of the VM claims no generation for it."""
    found: list[ProcessFound] = []
    with Trainer(CATCHES, uid=TRAINER_UID) as other:
        sender(events, pid_file(tmp_path, other.pid), found=found).look()
    assert not found
