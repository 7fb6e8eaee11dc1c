# SPDX-License-Identifier: Apache-2.0
"""Read the configuration: one TOML file becomes frozen dataclasses, and one error lists all problems.

``swansong.example.toml`` explains each key to operators.  No environment variable overrides a key.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, get_type_hints
from urllib.parse import unquote, urlsplit

from swansong.protocol import DEFAULT_SOCKET

from swansongd.config import notify
from swansongd.config import values as read
from swansongd.config.notify import NotifyConfig
from swansongd.config.values import InvalidValue, ListenAddress
from swansongd.config.values import key as _key
from swansongd.errors import ConfigError

DEFAULT_PATH = Path("/etc/swansong/swansong.toml")
METADATA_TIMEOUT_S = 2.0
"""Longest time that one request to the metadata service may take."""
KEEP_WITHIN_S_MIN = 3600.0
"""Much longer than a request that was sent before another VM took the run over."""
ORPHANS_AFTER_S_MIN = 24 * 3600.0

_HINT = "swansong.example.toml shows every key"


# ---------------------------------------------------------------- the sections


_section = dataclass(frozen=True, slots=True, kw_only=True)


@_section
class RunConfig:
    name: str = _key(read.run_name)
    checkpoint_interval_s: float | None = _key(read.interval, default=None)
    """None: computed from the measured cost of a save and the observed rate of preemptions."""
    mtbf_s: float = _key(read.duration, default=4 * 3600.0)


@_section
class StagingConfig:
    path: Path = _key(read.path)


@_section
class StoreAccess:
    """How to reach a store: the keys that a store and its mirror share."""

    url: str | None = _key(read.store_url, default=None)
    """None: there is no such store."""
    endpoint: str | None = _key(read.http_url, default=None)
    region: str | None = _key(
        read.text(r"[a-z0-9-]{1,40}", "give a region such as us-east-1"), default=None
    )
    profile: str | None = _key(
        read.text(r"[^\x00-\x1f\]]{1,128}", "give a profile of the AWS configuration"), default=None
    )
    ca_bundle: Path | None = _key(read.path, default=None)
    """None: the certificate authorities of the system."""
    addressing: Literal["auto", "path", "virtual"] = _key(
        read.one_of("auto", "path", "virtual"), default="auto"
    )


@_section
class StoreConfig(StoreAccess):
    url: str = _key(read.store_url)
    signing_key_file: Path | None = _key(read.path, default=None)
    """None: manifests and claims are not signed, and signatures are not checked."""
    lock_days: int = _key(read.days, default=0)
    """0: the store does not lock manifests and data."""
    lock_mode: Literal["governance", "compliance"] = _key(
        read.one_of("governance", "compliance"), default="governance"
    )


@_section
class MirrorConfig(StoreAccess):
    background_bytes_per_s: float | None = _key(read.rate, default=None)
    """None: no limit.  After the verdict of an evacuation the limit does not apply."""
    connections: int = _key(read.connections, default=4)


@_section
class SourcesConfig:
    cloud: str = _key(read.one_of("auto", "aws", "gcp", "none"), default="auto")
    metadata_url: str | None = _key(read.http_url, default=None)
    """None: the default address of the cloud."""
    poll_interval_s: float = _key(read.duration, default=1.0)
    gcp_preemption_notice_s: float | None = _key(read.preemption_notice, default=None)
    """None: learned from the first notice."""
    asg_name: str | None = _key(
        read.text(r"[^:\x00-\x1f]{1,255}", "give the name of the Auto Scaling group"), default=None
    )
    asg_hook: str | None = _key(
        read.text(r"[A-Za-z0-9/_-]{1,255}", "give the name of the lifecycle hook"), default=None
    )
    asg_grace_s: float | None = _key(read.duration, default=None)
    """None: ``deadline.assumed_grace_s``."""
    end_at: datetime | None = _key(read.utc_instant, default=None)
    max_run_duration_s: float | None = _key(read.duration, default=None)
    end_lead_s: float = _key(read.duration, default=120.0)
    gpu: str = _key(read.one_of("auto", "off"), default="auto")
    system_bus: str | None = _key(read.bus_address, default=None)
    """None: the system bus of the host."""


@_section
class TrainerConfig:
    socket: Path = _key(read.socket_path, default=Path(DEFAULT_SOCKET))
    signal: str = _key(read.trainer_signal, default="none")
    pid_file: Path | None = _key(read.path, default=None)
    unit: str | None = _key(
        read.text(
            r"[A-Za-z0-9:_.\\@-]{1,240}\.(service|scope)", "give a unit such as train.service"
        ),
        default=None,
    )
    users: tuple[str | int, ...] = _key(read.users, default=())
    """Users that may connect to the socket and own staged files, besides root and the daemon's user."""
    settle_s: float = _key(read.duration, default=2.0)
    follow_ups: bool = _key(read.yes_or_no, default=True)
    stall_steps: float = _key(read.factor, default=20.0)
    stall_min_s: float = _key(read.duration, default=60.0)

    @property
    def signal_number(self) -> int | None:
        """Number of the configured signal on this machine; None if the key is ``none``."""
        return read.signal_number(self.signal)


@_section
class DeadlineConfig:
    reserve_s: float = _key(read.duration, default=3.0)
    assumed_grace_s: float = _key(read.duration, default=25.0)
    sigterm_grace_s: float = _key(read.duration, default=25.0)
    shutdown_delay_s: float = _key(read.duration, default=20.0)


@_section
class FlushConfig:
    connections: int = _key(read.connections, default=32)
    chunk_bytes: int = _key(read.chunk_size, default=16 * 2**20)
    background_bytes_per_s: float | None = _key(read.rate, default=None)
    """None: no limit.  An evacuation ignores the limit."""


@_section
class RestoreConfig:
    prefetch: bool = _key(read.yes_or_no, default=True)
    """Fetch the newest whole commit when the daemon starts, before a trainer asks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionConfig:
    """The rules that keep commits; see :mod:`swansongd.bucket.retention`."""

    keep_last: int = _key(read.count, default=3)
    keep_within_s: float = _key(read.duration, default=24 * 3600.0)
    """No commit that is younger is deleted."""
    keep_starts_s: float = _key(read.duration, default=7 * 24 * 3600.0)
    """The newest commit of each start that is younger: without a signing key, another writer can pass for a
    later start of the run."""
    keep_hourly: int = _key(read.count, default=24)
    keep_daily: int = _key(read.count, default=7)
    keep_weekly: int = _key(read.count, default=4)
    keep_monthly: int = _key(read.count, default=0)
    keep_every_steps: int | None = _key(read.steps, default=None)
    keep_best: int = _key(read.count, default=1)
    best_metric: str = _key(
        read.text(r"[^\x00-\x1f]{1,100}", "give a metric such as loss"), default="loss"
    )
    best_is_highest: bool = _key(read.yes_or_no, default=False)
    orphans_after_s: float = _key(read.duration, default=7 * 24 * 3600.0)
    """No flush lasts longer: an older object that no manifest names is an orphan."""
    in_daemon: bool = _key(read.yes_or_no, default=False)
    """The daemon prunes the run itself; its role then needs the right to delete."""


@_section
class MetricsConfig:
    listen: ListenAddress | None = _key(read.listen_address, default=None)
    """None: the metrics are not served."""
    textfile: Path | None = _key(read.textfile, default=None)
    """None: no textfile is written."""


@_section
class LogConfig:
    format: str = _key(read.one_of("json", "console"), default="json")
    level: str = _key(read.one_of("debug", "info", "warning", "error"), default="info")


@_section
class Config:
    run: RunConfig
    staging: StagingConfig
    store: StoreConfig
    mirror: MirrorConfig
    sources: SourcesConfig
    trainer: TrainerConfig
    deadline: DeadlineConfig
    flush: FlushConfig
    restore: RestoreConfig
    retention: RetentionConfig
    metrics: MetricsConfig
    notify: NotifyConfig
    log: LogConfig


_SECTIONS: dict[str, type[Any]] = get_type_hints(Config)


def section_keys() -> dict[str, tuple[str, ...]]:
    """All keys, by section."""
    return {name: tuple(_fields(section)) for name, section in _SECTIONS.items()}


# ---------------------------------------------------------------- reading the file


def load(path: Path) -> Config:
    """Read the configuration file.

    Raises:
        ConfigError: the file is missing or not TOML, or contains a key or value that is not valid.
    """
    return parse(read_toml(path))


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a TOML file.

    Raises:
        ConfigError: the file is missing or not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            [f"reading {path} failed: no such file"],
            hint="copy swansong.example.toml there, or name another file with --config",
        ) from None
    except OSError as error:
        raise ConfigError([f"reading {path} failed: {error.strerror}"]) from None
    except UnicodeDecodeError as error:
        raise ConfigError([f"reading {path} failed: byte {error.start} is not UTF-8"]) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([f"parsing {path} failed: {error}"], hint=_HINT) from None


def parse(body: Mapping[str, object]) -> Config:
    """Turn parsed TOML into a configuration.

    Raises:
        ConfigError: lists every key that is missing, unknown, invalid or in conflict with another key.
    """
    problems = [
        _problem(name, "unknown section", value, _nearest(name, list(_SECTIONS)))
        for name, value in body.items()
        if name not in _SECTIONS
    ]
    values = {
        name: read_section(name, section, body.get(name, {}), problems)
        for name, section in _SECTIONS.items()
    }
    problems += _impossible(values) + notify.conflicts(values["notify"])
    if problems:
        raise ConfigError(problems, hint=_HINT)
    return Config(**{name: section(**values[name]) for name, section in _SECTIONS.items()})


def read_section(
    name: str, section: type[Any], table: object, problems: list[str]
) -> dict[str, Any]:
    """The values of a section by key, defaults included; invalid values are left out."""
    if not isinstance(table, dict):
        problems.append(_problem(name, "is not a table", table, f"start the section with [{name}]"))
        return {}
    known = _fields(section)
    problems += [
        _problem(f"{name}.{key}", "unknown key", value, _nearest(key, list(known)))
        for key, value in table.items()
        if key not in known
    ]
    values = {}
    for key, item in known.items():
        where = f"{name}.{key}"
        try:
            if key in table:
                values[key] = item.metadata["reader"](table[key])
            elif item.default is MISSING:
                problems.append(f"{where}: is missing (got nothing); {_remedy(item)}")
            else:
                values[key] = item.default
        except InvalidValue as error:
            shown = table[key] if error.shown is MISSING else error.shown
            problems.append(_problem(where, error.problem, shown, error.remedy))
    return values


def _impossible(values: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Conflicts between values that are each valid."""
    trainer, deadline = values["trainer"], values["deadline"]
    problems = []
    targets = [key for key in ("pid_file", "unit") if trainer.get(key) is not None]
    if trainer.get("signal", "none") != "none" and len(targets) != 1:
        got = " and ".join(targets) or "neither"
        problems.append(
            f"trainer.signal: needs exactly one process to signal (got {got}); "
            "set either trainer.pid_file or trainer.unit"
        )
    reserve_s = deadline.get("reserve_s", 0.0)
    problems += [
        _problem(
            "deadline.reserve_s",
            f"leaves no time of deadline.{key} = {deadline[key]:g}",
            reserve_s,
            "set a smaller value",
        )
        for key in ("assumed_grace_s", "sigterm_grace_s")
        if reserve_s >= deadline.get(key, math.inf)
    ]
    poll_interval_s = values["sources"].get("poll_interval_s", 0.0)
    found_s = poll_interval_s + METADATA_TIMEOUT_S
    if reserve_s < deadline.get("assumed_grace_s", math.inf) <= found_s + reserve_s:
        problems.append(
            _problem(
                "sources.poll_interval_s",
                f"detects a notice after up to {found_s:g} s, but deadline.assumed_grace_s minus "
                f"deadline.reserve_s is {deadline['assumed_grace_s'] - reserve_s:g} s",
                poll_interval_s,
                "set a smaller value",
            )
        )
    retention = values["retention"]
    problems += [
        _problem(
            f"retention.{key}", f"is shorter than {shown}", retention[key], "set a larger value"
        )
        for key, least_s, shown in (
            ("keep_within_s", KEEP_WITHIN_S_MIN, "an hour"),
            ("orphans_after_s", ORPHANS_AFTER_S_MIN, "a day"),
        )
        if retention.get(key, math.inf) < least_s
    ]
    hook = [key for key in ("asg_hook", "asg_name") if values["sources"].get(key) is not None]
    if len(hook) == 1:
        problems.append(
            f"sources.asg_hook: must be set together with sources.asg_name (got {hook[0]} only); "
            "set both or neither"
        )
    urls = {name: str(values[name].get("url") or "") for name in ("store", "mirror")}
    staging = values["staging"].get("path")
    for name, url in urls.items():
        if staging is not None and url.startswith("file://"):
            store = Path(unquote(urlsplit(url).path))
            if store == staging or staging in store.parents:
                where = f"{name}.url"
                problems.append(
                    _problem(where, "lies below staging.path", url, "choose another directory")
                )
    listen = values["metrics"].get("listen")
    if listen is not None and listen.path is not None and listen.path == trainer.get("socket"):
        remedy = 'choose another path, such as "unix:/run/swansong/metrics.sock"'
        problems.append(
            _problem("metrics.listen", "is the socket of trainers", str(listen), remedy)
        )
    if urls["mirror"] and _place(urls["mirror"]) == _place(urls["store"]):
        remedy = "choose a store in another region or cloud"
        problems.append(_problem("mirror.url", "is the store itself", urls["mirror"], remedy))
    return problems


def _place(url: str) -> str:
    """The bucket and prefix of a store, or its directory, without a slash at the end."""
    return unquote(url).rstrip("/")


def _fields(section: type[Any]) -> dict[str, dataclasses.Field[Any]]:
    """The fields of a section, by name: each key of the file is the name of a field."""
    return {item.name: item for item in dataclasses.fields(section)}


def _remedy(item: dataclasses.Field[Any]) -> str:
    try:
        item.metadata["reader"](None)
    except InvalidValue as error:
        return error.remedy
    return "set a value"


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"valid names are {', '.join(known)}"


def _problem(where: str, problem: str, value: object, remedy: str) -> str:
    return f"{where}: {problem} (got {value!r:.80}); {remedy}"
