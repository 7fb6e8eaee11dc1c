# SPDX-License-Identifier: Apache-2.0
"""Readers of configuration values, one for each kind of value.

A reader takes a TOML value and returns the value that the daemon uses, or raises :class:`InvalidValue`.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import signal
from collections.abc import Callable
from dataclasses import MISSING, dataclass
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from swansong.bounds import BYTES_MAX, STEP_MAX

from swansong_bucket.model import CHUNK_BYTES_MAX

CHUNK_BYTES_MIN = 2**20
"""Smaller chunks cost more for their requests than for their bytes."""

DAYS_MAX = 36_500
"""A hundred years: the limit of S3 and GCS for a retention."""
RATE_BYTES_PER_S_MIN = 100_000
"""At this rate one window takes ten seconds.  Below it, a throttled request would look stalled."""

COUNT_MAX = 100_000


class InvalidValue(Exception):
    """A value is not valid: ``problem`` describes the value, ``remedy`` a valid one."""

    def __init__(self, problem: str, remedy: str, *, shown: object = MISSING) -> None:
        super().__init__(problem)
        self.problem = problem
        self.remedy = remedy
        self.shown = shown
        """Shown in the error instead of the value, which may contain a secret."""


Reader = Callable[[object], Any]


def key(
    reader: Reader, default: Any = MISSING, *, about: str, unset: str = "", example: Any = None
) -> Any:
    """A key of a section.  The reference page and the example file show this declaration.

    Args:
        reader: returns the value that the daemon uses.
        default: in the form of the file; None: the key may be absent.
        about: the meaning of the key, for operators.
        unset: what applies without the key, if it has no default.
        example: a value for a key without a default, in the form of the file.
    """
    is_plain = default is MISSING or default is None
    return dataclasses.field(
        default=default if is_plain else reader(default),
        metadata={
            "reader": reader,
            "default": default,
            "about": about,
            "unset": unset,
            "example": example,
        },
    )


_NUMBER = r"([0-9]+(?:\.[0-9]+)?)"
_DURATION = re.compile(
    rf"(?:{_NUMBER}d)?(?:{_NUMBER}h)?(?:{_NUMBER}m(?!s))?(?:{_NUMBER}s)?(?:{_NUMBER}ms)?"
)
_DURATION_UNITS_S = (86400.0, 3600.0, 60.0, 1.0, 0.001)
_SIZE = re.compile(rf"{_NUMBER} ?([KMGT]?i?B)")
_SIZE_UNITS = {"B": 1} | {
    f"{letter}{infix}B": base**power
    for power, letter in enumerate("KMGT", start=1)
    for infix, base in (("", 1000), ("i", 1024))
}
_RT_SIGNAL = re.compile(r"SIGRTM(?:IN(?:\+([0-9]{1,2}))?|AX(?:-([0-9]{1,2}))?)")
_SIGNALS = ("SIGUSR1", "SIGUSR2", "SIGTERM", "SIGHUP")
_HOST_PORT = re.compile(r"(?:\[([^\[\]]+)\]|([^\[\]:]+)):([0-9]{1,5})")
_USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}")


def text(pattern: str, remedy: str) -> Reader:
    def read(value: object) -> str:
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise InvalidValue("has an invalid format", remedy)
        return value

    return read


run_name = text(
    r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}",
    "use up to 100 letters, digits, dots, dashes and underscores; start with a letter or digit",
)


def one_of(*words: str) -> Reader:
    def read(value: object) -> str:
        if not isinstance(value, str) or value not in words:
            raise InvalidValue("is not one of the choices", f"use one of {', '.join(words)}")
        return value

    return read


def yes_or_no(value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidValue("is not a boolean", "write true or false, without quotes")
    return value


def path(value: object) -> Path:
    good = isinstance(value, str) and value.isprintable() and value.startswith("/")
    if not good or ".." in str(value).split("/"):
        raise InvalidValue(
            "is not an absolute path", "give a path that starts with / and contains no .."
        )
    return Path(str(value))


def socket_path(value: object) -> Path:
    socket = path(value)
    if len(bytes(socket)) > 107:
        raise InvalidValue("is too long for a socket path", "give a path of at most 107 bytes")
    return socket


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """A TCP port, or a Unix socket if ``path`` is set."""

    host: str = ""
    """An IP address."""
    port: int = 0
    """0: any free port."""
    path: Path | None = None

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches it."""
        return self.path is not None or ip_address(self.host).is_loopback

    def __str__(self) -> str:
        if self.path is not None:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def listen_address(value: object) -> ListenAddress:
    """An IP address with a port, or ``unix:`` with the path of a socket."""
    remedy = 'give "127.0.0.1:9469", "[::1]:9469" or "unix:/run/swansong/metrics.sock"'
    if not isinstance(value, str):
        raise InvalidValue("is not an address", remedy)
    if value.startswith("unix:"):
        return ListenAddress(path=socket_path(value.removeprefix("unix:")))
    match = _HOST_PORT.fullmatch(value)
    host = (match[1] or match[2]) if match else ""
    try:
        is_bracketed = ip_address(host).version == 6
    except ValueError:
        raise InvalidValue("is not an IP address with a port", remedy) from None
    if match is None or is_bracketed != bool(match[1]) or int(match[3]) > 65535:
        raise InvalidValue("is not an IP address with a port", remedy)
    return ListenAddress(host=host, port=int(match[3]))


def textfile(value: object) -> Path:
    """A file for the textfile collector of node_exporter, which reads ``*.prom`` only."""
    file = path(value)
    if file.suffix != ".prom" or not file.stem:
        remedy = "give a path such as /var/lib/node_exporter/textfile_collector/swansong.prom"
        raise InvalidValue("does not end in .prom", remedy)
    return file


def _seconds(value: object, remedy: str) -> float:
    if isinstance(value, str) and value and (match := _DURATION.fullmatch(value)):
        amounts = (float(amount or 0) for amount in match.groups())
        return sum(
            amount * unit_s for amount, unit_s in zip(amounts, _DURATION_UNITS_S, strict=True)
        )
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    raise InvalidValue("is not a duration", remedy)


def duration(value: object) -> float:
    """A duration in seconds."""
    remedy = 'give seconds as a number, or a string such as "500ms", "5s" or "1h30m"'
    seconds = _seconds(value, remedy)
    if not 0 < seconds < math.inf:
        raise InvalidValue("is not greater than 0 and finite", remedy)
    return seconds


def preemption_notice(value: object) -> float | None:
    """The preemption notice of a Spot VM on GCP in seconds; None for ``learn``."""
    remedy = 'use 0, 120 (seconds) or "learn"'
    seconds = None if value == "learn" else _seconds(value, remedy)
    if seconds not in (None, 0.0, 120.0):
        raise InvalidValue("is not one of the choices", remedy)
    return seconds


def interval(value: object) -> float | None:
    """A duration in seconds; None for ``auto``."""
    return None if value == "auto" else duration(value)


def _whole(low: int, high: int, problem: str, remedy: str = "") -> Reader:
    def read(value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise InvalidValue(problem, remedy or f"give a whole number from {low} to {high}")
        return value

    return read


days = _whole(0, DAYS_MAX, "is not a number of days")
count = _whole(0, COUNT_MAX, "is not a count")
connections = _whole(1, 128, "is not a number of connections")
_steps = _whole(0, STEP_MAX, "is not a number of steps", "give a whole number; 0 for no rule")


def factor(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1 < value < math.inf:
        raise InvalidValue("is not a number above 1", "give a number such as 20")
    return float(value)


def steps(value: object) -> int | None:
    """A number of steps; None for 0, which means no rule."""
    return _steps(value) or None


def _size(value: object, remedy: str) -> float:
    if isinstance(value, str) and (match := _SIZE.fullmatch(value)) and match[2] in _SIZE_UNITS:
        unit_bytes: int = _SIZE_UNITS[match[2]]
        return float(match[1]) * unit_bytes
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise InvalidValue("is not a size", remedy)


def size(value: object) -> int:
    """A size in bytes."""
    remedy = 'give bytes as a number, or a string such as "84GB"'
    found = _size(value, remedy)
    if not 1 <= found <= BYTES_MAX:
        raise InvalidValue("is not between 1 byte and 1 EiB", remedy)
    return round(found)


def chunk_size(value: object) -> int:
    """The size of a chunk in bytes."""
    remedy = 'give bytes as a number, or a string such as "16MiB", from 1MiB to 256MiB'
    size = _size(value, remedy)
    if size != int(size):
        raise InvalidValue("is not a whole number of bytes", remedy)
    if not CHUNK_BYTES_MIN <= size <= CHUNK_BYTES_MAX:
        raise InvalidValue("is out of range", remedy)
    return int(size)


def rate(value: object) -> float | None:
    """A rate in bytes per second; None for 0, which means no limit."""
    remedy = 'give bytes per second as a number, or a string such as "200MB"; 0 for no limit'
    size = _size(value, remedy)
    if size and not RATE_BYTES_PER_S_MIN <= size < math.inf:
        raise InvalidValue(
            f"is below the minimum of {RATE_BYTES_PER_S_MIN} bytes per second", remedy
        )
    return size or None


def utc_instant(value: object) -> datetime:
    """An instant, from an RFC 3339 string or a TOML date-time."""
    remedy = 'give a time with its zone, such as "2026-03-01T11:30:00Z"'
    if isinstance(value, str) and re.match(r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ][0-9]{2}:", value):
        try:
            value = datetime.fromisoformat(value.upper())
        except ValueError:
            raise InvalidValue("is not a time", remedy) from None
    if not isinstance(value, datetime):
        raise InvalidValue("is not a time", remedy)
    if value.tzinfo is None:
        raise InvalidValue("has no time zone", remedy)
    return value.astimezone(UTC)


bus_address = text(
    r"unix:(path=/|abstract=)[A-Za-z0-9_./%-]{1,200}",
    "give a D-Bus address such as unix:path=/run/dbus/system_bus_socket",
)


def _split(value: str) -> tuple[str, str, str, str]:
    """Scheme, host, path and the rest (query, fragment) of a URL."""
    parts = urlsplit(value)
    if "@" in parts.netloc:
        shown = parts._replace(netloc="***@" + parts.netloc.rpartition("@")[2]).geturl()
        raise InvalidValue(
            "contains a credential", "remove it; the daemon uses the VM's identity", shown=shown
        )
    return parts.scheme, parts.netloc, parts.path, parts.query + parts.fragment


_AZURE_HOST = re.compile(r"az://([^/@]*@)?[^/@]*\.(blob|dfs)\.")
"""The form of adlfs and Hadoop, ``container@account.blob.core.windows.net``, in which @ precedes no host."""
_BUCKET = (
    re.compile(r"[a-z0-9][a-z0-9._-]{2,221}(/.*)?"),
    "lacks a bucket name of 3 to 222 lowercase letters, digits, dots, dashes and underscores",
)
_STORES = {
    "s3": ("s3://BUCKET/PREFIX", *_BUCKET),
    "gs": ("gs://BUCKET/PREFIX", *_BUCKET),
    "az": (
        "az://ACCOUNT/CONTAINER/PREFIX",
        re.compile(r"[a-z0-9]{3,24}/(?=[^/]{3,63}(/|\Z))[a-z0-9]+(-[a-z0-9]+)*(/.*)?"),
        "lacks an account and a container of lowercase letters and digits (3 to 24, and 3 to 63)",
    ),
    "file": ("file:///ABSOLUTE/PATH", re.compile(r"/+[^/].*"), "lacks an absolute path"),
}
"""By scheme: the form of a URL, its host and path, and the problem of others."""


def store_url(value: object) -> str:
    *forms, last = [form for form, _, _ in _STORES.values()]
    remedy = f"give {', '.join(forms)} or {last}"
    if isinstance(value, str) and _AZURE_HOST.match(value):
        raise InvalidValue("has the host of an account", f"give {_STORES['az'][0]}")
    try:
        scheme, host, path, rest = _split(value if isinstance(value, str) else "")
    except ValueError:
        raise InvalidValue("is not a URL", remedy) from None
    if scheme not in _STORES:
        raise InvalidValue("does not start with s3://, gs://, az:// or file:///", remedy)
    form, places, problem = _STORES[scheme]
    if not unquote(path).isprintable():
        raise InvalidValue("has a character that is not printable", f"give {form} without it")
    if rest:
        raise InvalidValue("has a query or a fragment", f"give {form} without ? and #")
    if ".." in unquote(path).split("/"):
        raise InvalidValue("contains ..", f"give {form} without it")
    if not places.fullmatch(f"{host}{path}"):
        raise InvalidValue(problem, f"give {form}")
    return str(value)


def directory_of(url: str | None) -> Path | None:
    """The directory of a ``file://`` store; None for others."""
    parts = urlsplit(url or "")
    return Path(os.path.normpath(unquote(parts.path))) if parts.scheme == "file" else None


def http_url(value: object) -> str:
    remedy = "give http://HOST:PORT or https://HOST"
    try:
        scheme, host, _, rest = _split(value if isinstance(value, str) else "")
    except ValueError:
        raise InvalidValue("is not a URL", remedy) from None
    if scheme not in ("http", "https") or not host or rest or not str(value).isprintable():
        raise InvalidValue("is not an HTTP address", remedy)
    return str(value).rstrip("/")


def signal_number(name: str) -> int | None:
    """The number of a signal that may be sent to a trainer; None for any other name."""
    if name in _SIGNALS:
        return int(signal.Signals[name])
    if match := _RT_SIGNAL.fullmatch(name):
        low, high = int(signal.SIGRTMIN), int(signal.SIGRTMAX)
        number = low + int(match[1] or 0) if "MIN" in name else high - int(match[2] or 0)
        return number if low <= number <= high else None
    return None


def trainer_signal(value: object) -> str:
    if not isinstance(value, str) or (value != "none" and signal_number(value) is None):
        raise InvalidValue(
            "is not a signal for trainers",
            f"use none, {', '.join(_SIGNALS)} or SIGRTMIN+N",
        )
    return value


def users(value: object) -> tuple[str | int, ...]:
    remedy = 'give a list of user names and uids, such as ["ubuntu", 1001]'
    if not isinstance(value, list):
        raise InvalidValue("is not a list", remedy)
    for item in value:
        is_uid = isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**32 - 1
        if not is_uid and not (isinstance(item, str) and _USER.fullmatch(item)):
            raise InvalidValue(f"contains {item!r:.40}, which is not a user", remedy)
    return tuple(value)
