# SPDX-License-Identifier: Apache-2.0
"""``logind``: shutdowns of the operating system, from systemd-logind over D-Bus.

A delay lock makes logind wait before it stops any service; its signal PrepareForShutdown announces that wait.
The lock is a file descriptor.  When it is closed, or the process ends, the shutdown continues.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self

from jeepney import (
    DBusAddress,
    DBusErrorResponse,
    HeaderFields,
    MatchRule,
    Properties,
    new_method_call,
)
from jeepney.bus import get_bus
from jeepney.bus_messages import message_bus
from jeepney.io.blocking import DBusConnection, Proxy, prep_socket
from jeepney.wrappers import unwrap_msg
from swansong_bucket.model import DeadlineQuality, Notice, Severity

from swansongd.core.events import NoticeRaised, NoticeWithdrawn
from swansongd.observe.health import HealthTracker
from swansongd.sources.metadata import Backoff, shortened
from swansongd.sources.source import Clock, Post

NAME = "logind"
SYSTEM_BUS = "unix:path=/run/dbus/system_bus_socket"
CALL_TIMEOUT_S = 1.0
"""Timeout of the connection to the bus, and of each call."""
DEADLINE_MARGIN_S = 1.0
"""The deadline is this long before logind's delay ends."""

_SERVICE = "org.freedesktop.login1"
_MANAGER = DBusAddress("/org/freedesktop/login1", _SERVICE, "org.freedesktop.login1.Manager")
_SIGNAL = "PrepareForShutdown"
_SIGNAL_WITH_METADATA = "PrepareForShutdownWithMetadata"
_SIGNAL_TIMEOUT_S = 0.5
_BLIND_AFTER_S = 30.0
_RETRY_FIRST_S = 1.0
_RETRY_MAX_S = 10.0
_ABSENT = (
    "org.freedesktop.DBus.Error.ServiceUnknown",
    "org.freedesktop.DBus.Error.NameHasNoOwner",
    "org.freedesktop.DBus.Error.Spawn.ServiceNotFound",
)
_DENIED = (
    "org.freedesktop.DBus.Error.AccessDenied",
    "org.freedesktop.DBus.Error.InteractiveAuthorizationRequired",
)
_IN_PROGRESS = "org.freedesktop.login1.OperationInProgress"
_FIX_DELAY = (
    "set InhibitDelayMaxSec= in /etc/systemd/logind.conf.d/zz-swansong.conf, then "
    "`systemctl restart systemd-logind`"
)
_FIX_DENIED = "fix it with `apt-get install polkitd`, or run the daemon as root"


class LogindError(Exception):
    """A call to logind failed or was refused; ``str()`` is one line for operators."""


class NoLogind(LogindError):
    """This VM has no system bus, or no logind on it."""


class CallRefused(LogindError):
    """logind refused a call; the connection is still usable."""


class ShutdownInProgress(CallRefused):
    """A shutdown has begun; logind grants no more locks."""


class _Connection(DBusConnection):  # type: ignore[misc]  # jeepney has no types
    """A connection with a timeout on each call, including the first one to the bus."""

    def send_and_get_reply(self, message: Any, *, timeout: float | None = None) -> Any:
        return super().send_and_get_reply(
            message, timeout=CALL_TIMEOUT_S if timeout is None else timeout
        )


class Logind:
    """A connection to logind, for one thread.  Each call takes at most :data:`CALL_TIMEOUT_S`.

    Args:
        bus: D-Bus address.

    Raises:
        LogindError: from all methods; only after CallRefused is the connection still usable.
    """

    def __init__(self, bus: str = SYSTEM_BUS) -> None:
        self._signals: deque[Any] = deque()
        with _as_logind_error(), ExitStack() as undo:
            socket = prep_socket(get_bus(bus), enable_fds=True, timeout=CALL_TIMEOUT_S)
            undo.callback(socket.close)
            self._connection = _Connection(socket, enable_fds=True)
            undo.pop_all()

    def inhibit_delay_max_s(self) -> float:
        """Longest delay of a shutdown, in seconds, as logind applies it now."""
        return float(self._property("InhibitDelayMaxUSec")) / 1e6

    def is_preparing_for_shutdown(self) -> bool:
        return bool(self._property("PreparingForShutdown"))

    def take_delay_lock(self) -> int:
        """A file descriptor that delays shutdowns until it is closed, for at most the longest delay."""
        request = new_method_call(
            _MANAGER,
            "Inhibit",
            "ssss",
            (
                "shutdown",
                "swansong",
                "Uploads the checkpoint of the training run",
                "delay",
            ),
        )
        (lock,) = self._call(request)
        lock_fd = int(lock.to_raw_fd())
        os.set_inheritable(lock_fd, False)  # a child process with a copy would delay the shutdown
        return lock_fd

    def subscribe(self) -> None:
        """Have :meth:`next_signal` return shutdowns, and raise when logind stops or restarts."""
        changes = MatchRule(
            type="signal",
            sender=message_bus.bus_name,
            interface=message_bus.interface,
            member="NameOwnerChanged",
            path=message_bus.object_path,
        )
        changes.add_arg_condition(0, _SERVICE)
        rules = [
            MatchRule(
                type="signal",
                sender=_SERVICE,
                interface=_MANAGER.interface,
                member=member,
                path=_MANAGER.object_path,
            )
            for member in (_SIGNAL, _SIGNAL_WITH_METADATA)
        ]
        with _as_logind_error():
            bus = Proxy(message_bus, self._connection)
            for rule in (changes, *rules):
                bus.AddMatch(rule)
            (owner,) = bus.GetNameOwner(_SERVICE)
        for rule in rules:
            # Messages that other users of the bus send directly bypass the rules: check the sender too.
            rule.header_fields["sender"] = owner
        for rule in (changes, *rules):
            self._connection.filter(rule, queue=self._signals)

    def next_signal(self, timeout_s: float) -> tuple[bool, str] | None:
        """Whether the host shuts down, and the kind ("reboot") if logind states it; None after the timeout.

        Raises:
            NoLogind: logind stopped or restarted.
        """
        with _as_logind_error():
            try:
                signal = self._connection.recv_until_filtered(self._signals, timeout=timeout_s)
            except TimeoutError:
                return None
        member = signal.header.fields[HeaderFields.member]
        if member not in (_SIGNAL, _SIGNAL_WITH_METADATA):
            raise NoLogind("systemd-logind stopped or restarted")
        metadata = signal.body[1] if member == _SIGNAL_WITH_METADATA else {}
        how = metadata.get("type", ("s", ""))[1]
        return bool(signal.body[0]), shortened(str(how))

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _property(self, name: str) -> Any:
        ((_signature, value),) = self._call(Properties(_MANAGER).get(name))
        return value

    def _call(self, message: Any) -> Any:
        with _as_logind_error():
            return unwrap_msg(self._connection.send_and_get_reply(message))


@contextmanager
def _as_logind_error() -> Iterator[None]:
    """Turns exceptions of jeepney and the socket into LogindError."""
    try:
        yield
    except DBusErrorResponse as error:
        words = shortened(" ".join(str(part) for part in error.data or ()) or error.name)
        if error.name in _ABSENT:
            raise NoLogind("systemd-logind is not on the system bus") from error
        if error.name in _DENIED:
            raise CallRefused(f"{words}; {_FIX_DENIED}") from error
        raise (ShutdownInProgress if error.name == _IN_PROGRESS else CallRefused)(words) from error
    except FileNotFoundError as error:
        raise NoLogind(
            "the system bus is missing: D-Bus is not installed, or not running"
        ) from error
    except TimeoutError as error:
        raise LogindError("the system bus or systemd-logind does not respond") from error
    except OSError as error:
        raise LogindError(f"lost the system bus: {error.strerror or error}") from error
    except (ValueError, RuntimeError) as error:  # jeepney: the peer violates the protocol
        raise LogindError(f"the system bus cannot be used: {error!r:.200}") from error


def read_inhibit_delay_max_s(bus: str = SYSTEM_BUS) -> float:
    """Longest delay of a shutdown, in seconds, as logind applies it now.

    Raises:
        LogindError: the call failed.
    """
    with Logind(bus) as logind:
        return logind.inhibit_delay_max_s()


def is_preparing_for_shutdown(bus: str = SYSTEM_BUS) -> bool:
    """Whether a shutdown is in progress.

    Raises:
        LogindError: the call failed.
    """
    with Logind(bus) as logind:
        return logind.is_preparing_for_shutdown()


class LogindSource:
    """Holds a delay lock and watches for shutdowns; without a lock it still watches.

    Args:
        bus: D-Bus address.
        wanted_delay_s: a shorter delay of logind makes the source degraded.
        stop_grace_s: grace period of a shutdown without a lock.
        boot_id: part of the identity of each notice.
        monotonic: the clock.
        lock_fd: the delay lock of the previous daemon.
        store_lock: stores the lock over a restart of the daemon; None removes it.  It is called with a lock
            only during a shutdown, and never with ``lock_fd``: a daemon that crashes in each evacuation must
            not delay the shutdown for longer than one restart.
    """

    name = NAME

    def __init__(
        self,
        *,
        bus: str = SYSTEM_BUS,
        wanted_delay_s: float,
        stop_grace_s: float,
        boot_id: str,
        monotonic: Clock,
        lock_fd: int | None = None,
        store_lock: Callable[[int | None], None] = lambda _: None,
    ) -> None:
        self._bus = bus
        self._store_lock = store_lock
        self._wanted_delay_s = wanted_delay_s
        self._stop_grace_s = stop_grace_s
        self._boot_id = boot_id
        self._monotonic = monotonic
        self._shutdowns = 0
        self._delay_s: float | None = None
        """Longest delay of a shutdown, as last read from logind."""
        self._guard = threading.Lock()  # the three below; release() comes from another thread
        self._lock_fd = lock_fd
        self._is_inherited = lock_fd is not None
        self._is_shutting_down = False
        self.has_earlier = False
        """Whether a notice of an earlier life of the daemon is in force, until logind has answered."""

    def release(self) -> None:
        """Let a shutdown in progress continue.

        Returns immediately, and may be called repeatedly.  Without a shutdown in progress it does nothing, so
        that the lock stays for the next one.
        """
        with self._guard:
            if self._is_shutting_down and self._lock_fd is not None:
                self._close_lock()
                self._store_lock(None)

    def run(self, post: Post, stop: threading.Event) -> None:
        """Watch until ``stop`` is set, then close the lock; a stored copy stays open."""
        health = HealthTracker(
            NAME, blind_after_s=_BLIND_AFTER_S, monotonic=self._monotonic, post=post
        )
        backoff = Backoff(_RETRY_FIRST_S, _RETRY_MAX_S)
        while not stop.is_set():
            try:
                with Logind(self._bus) as logind:
                    self._watch(logind, post, health, backoff, stop)
            except NoLogind as error:
                # If logind was there before, its absence is a failure.
                (health.unsupported if self._delay_s is None else health.failed)(str(error))
            except Exception as error:
                expected = isinstance(error, LogindError)
                health.failed(str(error) if expected else f"internal error: {error!r:.200}")
            stop.wait(backoff.next_s())
        with self._guard:
            self._close_lock()

    def _watch(
        self,
        logind: Logind,
        post: Post,
        health: HealthTracker,
        backoff: Backoff,
        stop: threading.Event,
    ) -> None:
        self._delay_s = logind.inhibit_delay_max_s()
        # In this order no shutdown is missed: a later one arrives as a signal, an earlier one shows in the
        # property.
        logind.subscribe()
        refusal = self._take_lock(logind)
        self._record_shutdown(logind.is_preparing_for_shutdown(), "", post)
        retry_mono_s = self._post_health(health, refusal, backoff)
        while not stop.is_set():
            signal = logind.next_signal(_SIGNAL_TIMEOUT_S)
            if signal is not None:
                is_shutting_down, how = signal
                if not is_shutting_down:
                    refusal = self._take_lock(logind)
                self._record_shutdown(is_shutting_down, how, post)
            elif refusal and self._monotonic() >= retry_mono_s:
                refusal = self._take_lock(logind)
            else:
                continue
            retry_mono_s = self._post_health(health, refusal, backoff)

    def _take_lock(self, logind: Logind) -> str:
        """Replace the lock by a new one; returns why it was refused, or an empty string."""
        try:
            taken_fd = logind.take_delay_lock()
        except ShutdownInProgress:
            return ""  # an older lock stays valid
        except CallRefused as error:
            return str(error)
        with self._guard:
            self._close_lock()
            self._store_lock(None)
            self._lock_fd, self._is_inherited = taken_fd, False
        return ""

    def _close_lock(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _record_shutdown(self, is_shutting_down: bool, how: str, post: Post) -> None:
        with self._guard:
            before, self._is_shutting_down = self._is_shutting_down, is_shutting_down
            is_held = self._lock_fd is not None
            if is_shutting_down and not before and not self._is_inherited:
                self._store_lock(self._lock_fd)
        had_earlier, self.has_earlier = self.has_earlier, False
        if is_shutting_down and not before:
            self._shutdowns += 1
            post(NoticeRaised(self._notice(how, is_held)))
        elif (before or had_earlier) and not is_shutting_down:
            post(NoticeWithdrawn(NAME, "the shutdown was cancelled"))

    def _notice(self, how: str, is_held: bool) -> Notice:
        left_s = self._stop_grace_s
        if is_held and self._delay_s is not None:
            left_s = max(0.0, self._delay_s - DEADLINE_MARGIN_S)
        return Notice(
            source=NAME,
            kind="os-shutdown",
            identity=f"{NAME}:{self._boot_id}:{self._shutdowns}",
            severity=Severity.SHUTTING_DOWN,
            deadline_mono_s=self._monotonic() + left_s,
            deadline_quality=DeadlineQuality.DERIVED if is_held else DeadlineQuality.ASSUMED,
            detail=how or "PrepareForShutdown",
        )

    def _post_health(self, health: HealthTracker, refusal: str, backoff: Backoff) -> float:
        """Report the state of the lock; returns the monotonic time of the next attempt to take it."""
        assert self._delay_s is not None
        if refusal:
            health.degraded(f"no delay lock, so a shutdown does not wait for the flush: {refusal}")
            return self._monotonic() + backoff.next_s()
        backoff.reset()
        if self._delay_s < self._wanted_delay_s:
            health.degraded(
                f"logind delays a shutdown by at most {self._delay_s:g} s, less than the "
                f"{self._wanted_delay_s:g} s of deadline.shutdown_delay_s; {_FIX_DELAY}"
            )
        else:
            health.ok(f"logind delays a shutdown by at most {self._delay_s:g} s")
        return 0.0
