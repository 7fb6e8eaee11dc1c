# SPDX-License-Identifier: Apache-2.0
"""Shutdowns of the operating system, announced or not: systemd-logind over D-Bus.

A delay lock makes logind wait before it stops anything, and its signal PrepareForShutdown says that it
waits.  The lock is a file descriptor: closing it, or dying, lets the shutdown go on.
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

from swansongd.core.events import NoticeRaised, NoticeWithdrawn
from swansongd.model import DeadlineQuality, Notice, Severity
from swansongd.observe.health import HealthTracker
from swansongd.sources.base import Clock, Post
from swansongd.sources.metadata import Backoff, shortened

NAME = "logind"
SYSTEM_BUS = "unix:path=/run/dbus/system_bus_socket"
CALL_TIMEOUT_S = 1.0
"""For the bus to let us in, and for each answer."""
DEADLINE_MARGIN_S = 1.0
"""The deadline lies this long before logind stops waiting."""

_SERVICE = "org.freedesktop.login1"
_MANAGER = DBusAddress("/org/freedesktop/login1", _SERVICE, "org.freedesktop.login1.Manager")
_SIGNAL = "PrepareForShutdown"
_SIGNAL_WITH_METADATA = "PrepareForShutdownWithMetadata"
_LISTEN_S = 0.5
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
_UNDER_WAY = "org.freedesktop.login1.OperationInProgress"
_FIX_DELAY = (
    "set InhibitDelayMaxSec= in /etc/systemd/logind.conf.d/zz-swansong.conf, then "
    "`systemctl restart systemd-logind`"
)
_FIX_DENIED = "fix it with `apt-get install polkitd`, or run the daemon as root"


class LogindError(Exception):
    """logind could not be asked, or refused; ``str()`` is one line for a person."""


class NoLogind(LogindError):
    """This VM has no bus, or no logind on it."""


class CallRefused(LogindError):
    """logind refused a call; the connection is still usable."""


class UnderWay(CallRefused):
    """A shutdown has begun; no lock is given any more."""


class _Connection(DBusConnection):  # type: ignore[misc]  # jeepney has no types
    """No call waits for ever, the greeting of the bus included."""

    def send_and_get_reply(self, message: Any, *, timeout: float | None = None) -> Any:
        return super().send_and_get_reply(
            message, timeout=CALL_TIMEOUT_S if timeout is None else timeout
        )


class Logind:
    """A connection to logind.  For one thread; every call takes at most :data:`CALL_TIMEOUT_S`.

    Args:
        bus: D-Bus address.

    Raises:
        LogindError: from all methods; the connection is then of no more use, but after CallRefused.
    """

    def __init__(self, bus: str = SYSTEM_BUS) -> None:
        self._signals: deque[Any] = deque()
        with _in_words(), ExitStack() as undo:
            socket = prep_socket(get_bus(bus), enable_fds=True, timeout=CALL_TIMEOUT_S)
            undo.callback(socket.close)
            self._connection = _Connection(socket, enable_fds=True)
            undo.pop_all()

    def inhibit_delay_max_s(self) -> float:
        """How long logind waits for a delay lock, in seconds, whatever the files say."""
        return float(self._property("InhibitDelayMaxUSec")) / 1e6

    def is_preparing_for_shutdown(self) -> bool:
        return bool(self._property("PreparingForShutdown"))

    def take_delay_lock(self) -> int:
        """A file descriptor; the shutdown waits until it is closed, or for the longest delay."""
        request = new_method_call(
            _MANAGER,
            "Inhibit",
            "ssss",
            (
                "shutdown",
                "swansong",
                "Gets the checkpoint of the training run off this VM",
                "delay",
            ),
        )
        (lock,) = self._call(request)
        lock_fd = int(lock.to_raw_fd())
        os.set_inheritable(lock_fd, False)  # a child that kept it would hold the shutdown up
        return lock_fd

    def subscribe(self) -> None:
        """From now on :meth:`listen` hears of shutdowns, and of logind coming and going."""
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
        with _in_words():
            bus = Proxy(message_bus, self._connection)
            for rule in (changes, *rules):
                bus.AddMatch(rule)
            (owner,) = bus.GetNameOwner(_SERVICE)
        for rule in rules:
            # What other users of the bus send to us directly passes by the rules above.
            rule.header_fields["sender"] = owner
        for rule in (changes, *rules):
            self._connection.filter(rule, queue=self._signals)

    def listen(self, timeout_s: float) -> tuple[bool, str] | None:
        """Whether the host is going down, and how ("reboot", where logind says so); None for no news.

        Raises:
            NoLogind: it has gone, or begun anew.
        """
        with _in_words():
            try:
                signal = self._connection.recv_until_filtered(self._signals, timeout=timeout_s)
            except TimeoutError:
                return None
        member = signal.header.fields[HeaderFields.member]
        if member not in (_SIGNAL, _SIGNAL_WITH_METADATA):
            raise NoLogind("systemd-logind stopped or started anew")
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
        with _in_words():
            return unwrap_msg(self._connection.send_and_get_reply(message))


@contextmanager
def _in_words() -> Iterator[None]:
    """Turns what jeepney and the socket raise into LogindError."""
    try:
        yield
    except DBusErrorResponse as error:
        words = shortened(" ".join(str(part) for part in error.data or ()) or error.name)
        if error.name in _ABSENT:
            raise NoLogind("no systemd-logind on the system bus") from error
        if error.name in _DENIED:
            raise CallRefused(f"{words}; {_FIX_DENIED}") from error
        raise (UnderWay if error.name == _UNDER_WAY else CallRefused)(words) from error
    except FileNotFoundError as error:
        raise NoLogind("no system bus: D-Bus is not installed, or not running") from error
    except TimeoutError as error:
        raise LogindError("the system bus or systemd-logind does not answer") from error
    except OSError as error:
        raise LogindError(f"the system bus is lost: {error.strerror or error}") from error
    except (ValueError, RuntimeError) as error:  # jeepney: the other side speaks no D-Bus
        raise LogindError(f"the system bus cannot be used: {error!r:.200}") from error


def read_inhibit_delay_max_s(bus: str = SYSTEM_BUS) -> float:
    """How long logind really waits for a delay lock, in seconds.

    Raises:
        LogindError: it cannot be asked.
    """
    with Logind(bus) as logind:
        return logind.inhibit_delay_max_s()


def is_preparing_for_shutdown(bus: str = SYSTEM_BUS) -> bool:
    """Whether logind has a shutdown under way.

    Raises:
        LogindError: it cannot be asked.
    """
    with Logind(bus) as logind:
        return logind.is_preparing_for_shutdown()


class LogindSource:
    """Holds a delay lock and hears of shutdowns.  Without the lock it still hears of them.

    Args:
        bus: D-Bus address.
        wanted_delay_s: a shorter delay of logind is complained of.
        stop_grace_s: what the host gives when no lock holds it up.
        boot_id: tells the shutdowns of one boot from those of the next.
        monotonic: the clock.
        lock_fd: the delay lock of the daemon before this one.
        store_lock: stores the lock over a restart of the daemon, or removes it with None.  Called with a lock
            only while a shutdown waits, and never with ``lock_fd``: a daemon that crashes in each
            evacuation must not delay the shutdown for longer than one restart.
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
        """Of logind, as last read."""
        self._guard = threading.Lock()  # the three below; release() comes from another thread
        self._lock_fd = lock_fd
        self._is_inherited = lock_fd is not None
        self._is_shutting_down = False

    def release(self) -> None:
        """There is nothing to wait for: let the shutdown that is under way go on.

        Returns at once and may be called again and again; without a shutdown under way it does nothing,
        so that the lock stays for the next one.
        """
        with self._guard:
            if self._is_shutting_down and self._lock_fd is not None:
                self._close_lock()
                self._store_lock(None)

    def run(self, post: Post, stop: threading.Event) -> None:
        """Watch until ``stop`` is set, then close the lock; a copy that is stored stays."""
        health = HealthTracker(
            NAME, blind_after_s=_BLIND_AFTER_S, monotonic=self._monotonic, post=post
        )
        backoff = Backoff(_RETRY_FIRST_S, _RETRY_MAX_S)
        while not stop.is_set():
            try:
                with Logind(self._bus) as logind:
                    self._watch(logind, post, health, backoff, stop)
            except NoLogind as error:
                # After it has been there, its absence is a fault.
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
        # In this order nothing falls between: what comes after the subscription is heard, what came
        # before it shows in the property.
        logind.subscribe()
        refusal = self._take_lock(logind)
        self._shutdown_is(logind.is_preparing_for_shutdown(), "", post)
        retry_mono_s = self._say_health(health, refusal, backoff)
        while not stop.is_set():
            news = logind.listen(_LISTEN_S)
            if news is not None:
                going_down, how = news
                if not going_down:
                    refusal = self._take_lock(logind)
                self._shutdown_is(going_down, how, post)
            elif refusal and self._monotonic() >= retry_mono_s:
                refusal = self._take_lock(logind)
            else:
                continue
            retry_mono_s = self._say_health(health, refusal, backoff)

    def _take_lock(self, logind: Logind) -> str:
        """Take a new lock in place of the old one; why there is none, or empty."""
        try:
            taken_fd = logind.take_delay_lock()
        except UnderWay:
            return ""  # an older lock, if there is one, still counts
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

    def _shutdown_is(self, going_down: bool, how: str, post: Post) -> None:
        with self._guard:
            before, self._is_shutting_down = self._is_shutting_down, going_down
            is_held = self._lock_fd is not None
            if going_down and not before and not self._is_inherited:
                self._store_lock(self._lock_fd)
        if going_down and not before:
            self._shutdowns += 1
            post(NoticeRaised(self._notice(how, is_held)))
        elif before and not going_down:
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

    def _say_health(self, health: HealthTracker, refusal: str, backoff: Backoff) -> float:
        """Post it; returns when to try again for the lock, on the monotonic clock."""
        assert self._delay_s is not None
        if refusal:
            health.degraded(f"no delay lock, shutdowns will not wait for the flush: {refusal}")
            return self._monotonic() + backoff.next_s()
        backoff.reset()
        if self._delay_s < self._wanted_delay_s:
            health.degraded(
                f"shutdowns wait {self._delay_s:g} s at most, less than the "
                f"{self._wanted_delay_s:g} s of deadline.shutdown_delay_s; {_FIX_DELAY}"
            )
        else:
            health.ok(f"shutdowns wait {self._delay_s:g} s at most")
        return 0.0
