# SPDX-License-Identifier: Apache-2.0
"""Read the configuration: one TOML file becomes frozen dataclasses, and one error lists all problems.

``swansong.example.toml`` explains each key to operators.  No environment variable overrides a key.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
import os
import threading
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, get_type_hints

from swansong.protocol import DEFAULT_SOCKET
from swansong_bucket.config import values as read
from swansong_bucket.config.sections import (
    ORPHANS_AFTER_S_MIN,
    MirrorConfig,
    RetentionConfig,
    StoreConfig,
)
from swansong_bucket.config.values import InvalidValue, ListenAddress, directory_of
from swansong_bucket.config.values import key as _key
from swansong_bucket.errors import ConfigError

from swansongd.config import notify
from swansongd.config.notify import NotifyConfig

DEFAULT_PATH = Path("/etc/swansong/swansong.toml")
TOML_BYTES_MAX = 2**20
RESOLVE_TIMEOUT_S = 1.0
METADATA_TIMEOUT_S = 2.0
"""Longest time that one request to the metadata service may take."""
KEEP_WITHIN_S_MIN = 3600.0
"""Much longer than a request that was sent before another VM took the run over."""

_HINT = "swansong.example.toml shows every key"


# ---------------------------------------------------------------- the sections


_section = dataclass(frozen=True, slots=True, kw_only=True)


@_section
class RunConfig:
    """The training job."""

    name: str = _key(
        read.run_name,
        about="Name of the training job, the same on every VM that continues the job. Two jobs "
        "never share a name. Up to 100 letters, digits, dots, dashes and underscores.",
        example="my-run",
    )
    checkpoint_interval_s: float | None = _key(
        read.interval,
        "auto",
        about="Training time between two periodic checkpoints, for trainers that leave the "
        'schedule to the daemon (`attach()` without `every_steps=` and `every_s=`). "auto" '
        "computes the optimum from the measured cost of a save and the observed rate of "
        "preemptions, at least one minute: see docs/operations/retention.md.",
    )
    mtbf_s: float = _key(
        read.duration,
        "4h",
        about="First guess of the mean time between two losses of a VM without a SAFE verdict. "
        "The history in the bucket corrects the guess.",
    )
    handover: bool = _key(
        read.yes_or_no,
        False,
        about="Whether the next VM starts while the preempted one still trains. The next VM then "
        "fetches its checkpoints, and its trainer waits until that VM has ended. Set the same "
        "value on all VMs. See docs/operations/replacement.md.",
    )


@_section
class StagingConfig:
    """The local directory of checkpoints."""

    path: Path = _key(
        read.path,
        about="Directory that trainers write checkpoints to: local NVMe, or a tmpfs if memory "
        "allows. Each run has a subdirectory. See docs/operations/install.md.",
        example="/var/lib/swansong/staging",
    )


@_section
class SourcesConfig:
    """The sources of notices."""

    cloud: str = _key(
        read.one_of("auto", "aws", "gcp", "azure", "none"),
        "auto",
        about="Cloud whose metadata service reports notices: `aws`, `gcp`, `azure`, or `none`, "
        "which watches only the shutdown of the operating system. `auto` reads the firmware.",
    )
    metadata_url: str | None = _key(
        read.http_url,
        None,
        about="Address of the metadata service, for emulators.",
        unset="the cloud's",
        example="http://127.0.0.1:1338",
    )
    poll_interval_s: float = _key(
        read.duration,
        "1s",
        about="Time between two requests to the metadata service of AWS or Azure. A notice can be "
        "this late.",
    )
    gcp_preemption_notice_s: float | None = _key(
        read.preemption_notice,
        "learn",
        about="Preemption notice that a Spot VM on GCP was created with: 0 or 120 seconds. A VM "
        'cannot query the value. With "learn" the daemon expects 120 s only if the VM still runs '
        "15 s after the notice.",
    )
    asg_name: str | None = _key(
        read.text(r"[^:\x00-\x1f]{1,255}", "give the name of the Auto Scaling group"),
        None,
        about="Auto Scaling group of this VM, on AWS. The key needs `sources.asg_hook`.",
        unset="no group",
        example="trainers",
    )
    asg_hook: str | None = _key(
        read.text(r"[A-Za-z0-9/_-]{1,255}", "give the name of the lifecycle hook"),
        None,
        about="Lifecycle hook of the group for terminating instances. The daemon holds the hook "
        "during an evacuation and completes it after SAFE or PARTIAL. The VM's role must allow "
        "autoscaling:RecordLifecycleActionHeartbeat and autoscaling:CompleteLifecycleAction.",
        unset="no hook",
        example="swansong",
    )
    asg_grace_s: float | None = _key(
        read.duration,
        None,
        about="Heartbeat timeout of that hook.",
        unset="`deadline.assumed_grace_s`",
        example="5m",
    )
    azure_approve: bool = _key(
        read.yes_or_no,
        False,
        about="Whether the daemon approves an event of Azure after SAFE, if the event names this "
        "VM only. Azure then need not wait for the time of the event.",
    )
    command_socket: Path | None = _key(
        read.socket_path,
        None,
        about="Socket for the output of a program of yours that watches another cloud. See "
        "docs/operations/notices.md.",
        unset="no such program",
        example="/run/swansong/notices.sock",
    )
    end_at: datetime | None = _key(
        read.utc_instant,
        None,
        about="Known end of this VM, with a time zone. AWS terminates a VM of a Capacity Block 30 "
        "minutes before the purchased end.",
        unset="no end",
        example="2026-03-01T11:30:00Z",
    )
    max_run_duration_s: float | None = _key(
        read.duration,
        None,
        about="Known end of this VM, counted from the boot. With `sources.end_at`, the earlier "
        "end applies.",
        unset="no end",
        example="24h",
    )
    end_lead_s: float = _key(
        read.duration,
        "2m",
        about="Time before a known end at which an evacuation starts.",
    )
    gpu: str = _key(
        read.one_of("auto", "off"),
        "auto",
        about="Health of the NVIDIA GPUs, where NVML's library is installed. A failed GPU causes "
        "an evacuation without a new checkpoint, a degraded one a further checkpoint. `off` "
        "ignores the health. See docs/operations/gpu-health.md.",
    )
    system_bus: str | None = _key(
        read.bus_address,
        None,
        about="Address of the D-Bus system bus, for emulators.",
        unset="the host's",
        example="unix:path=/run/dbus/system_bus_socket",
    )


@_section
class TrainerConfig:
    """The training processes on this VM."""

    socket: Path = _key(
        read.socket_path,
        DEFAULT_SOCKET,
        about="Socket that trainers and the `swansong` command connect to. For "
        "`/etc/swansong/JOB/swansong.toml` the default is `/run/swansong/JOB/trainer.sock`.",
    )
    signal: str = _key(
        read.trainer_signal,
        "none",
        about="Signal for trainers without hooks: `none`, `SIGUSR1`, `SIGUSR2`, `SIGTERM`, "
        "`SIGHUP` or `SIGRTMIN+N`. The daemon sends the signal only to a process that handles it. "
        "The key needs `trainer.pid_file` or `trainer.unit`.",
    )
    pid_file: Path | None = _key(
        read.path,
        None,
        about="File with the process id to signal, owned by root or one of `trainer.users`, and "
        "writable only by its owner.",
        unset="no process",
        example="/run/train.pid",
    )
    unit: str | None = _key(
        read.text(
            r"[A-Za-z0-9:_.\\@-]{1,240}\.(service|scope)", "give a unit such as train.service"
        ),
        None,
        about="systemd unit whose main process is signalled, instead of a `trainer.pid_file`.",
        unset="no process",
        example="train.service",
    )
    users: tuple[str | int, ...] = _key(
        read.users,
        [],
        about="Users (names or uids) that may use the socket and own staged files, in addition to "
        "root and the daemon's user. `trainer.signal` reaches only processes of these users: "
        "root's only if the list names `root`, and the daemon's user's only if the list is empty.",
    )
    settle_s: float = _key(
        read.duration,
        "2s",
        about="Time without a change after which a checkpoint without a completion marker counts "
        "as complete.",
    )
    follow_ups: bool = _key(
        read.yes_or_no,
        True,
        about="After the verdict, request follow-up checkpoints while another one fits: see "
        "docs/operations/notices.md.",
    )
    stall_steps: float = _key(
        read.factor,
        20,
        about="A rank has stalled after this many times its usual step time without a step or a "
        "poll, and after `trainer.stall_min_s`.",
    )
    stall_min_s: float = _key(
        read.duration,
        "1m",
        about="Minimum time without a step or a poll before a rank counts as stalled.",
    )


@_section
class DeadlineConfig:
    """The time that an evacuation may take."""

    reserve_s: float = _key(
        read.duration,
        "3s",
        about="Time before the deadline that is reserved for the commit; no data is sent in it. A "
        "low value risks the commit, a high value wastes time that a larger checkpoint could use.",
    )
    assumed_grace_s: float = _key(
        read.duration,
        "25s",
        about="Grace period of a notice that states no deadline, or one in the past. AWS states a "
        "deadline; GCP gives 30 s.",
    )
    sigterm_grace_s: float = _key(
        read.duration,
        "25s",
        about="Grace period when the host stops the daemon; at most `TimeoutStopSec=` of the unit.",
    )
    shutdown_delay_s: float = _key(
        read.duration,
        "20s",
        about="Time that logind must delay a shutdown for the daemon. If `InhibitDelayMaxSec=` of "
        "logind is shorter, `swansong status` shows the source `logind` as degraded.",
    )


@_section
class FlushConfig:
    """The upload of checkpoints."""

    connections: int = _key(
        read.connections,
        32,
        about="Maximum number of concurrent connections to the store. Each busy connection holds "
        "a chunk in memory, at most 512 MiB together.",
    )
    chunk_bytes: int = _key(
        read.chunk_size,
        "16MiB",
        about="Size of a chunk, the unit of an upload, 1MiB to 256MiB. Larger chunks need fewer "
        "requests, but a failed one costs more to repeat, and more is sent where little has "
        "changed. Files over 64 GiB have larger ones.",
    )
    background_bytes_per_s: float | None = _key(
        read.rate,
        0,
        about='Maximum rate of uploads while no evacuation is open, such as "200MB" per second; 0 '
        "for no limit. Any notice lifts the limit, also an advisory one.",
    )


@_section
class RestoreConfig:
    """Downloads for the trainer."""

    prefetch: bool = _key(
        read.yes_or_no,
        True,
        about="Fetch the newest whole commit when the daemon starts, and each newer one until a start "
        "of the training begins on this VM. The prefetch leaves room in staging for two further "
        "checkpoints, and pauses during an evacuation. See docs/operations/restore.md.",
    )


@_section
class MetricsConfig:
    """The metrics of the daemon: see docs/operations/monitoring.md."""

    listen: ListenAddress | None = _key(
        read.listen_address,
        None,
        about='Address at which Prometheus scrapes the daemon, such as "127.0.0.1:9469", '
        '"[::1]:9469" or "unix:/run/swansong/metrics.sock". The metrics have no password: keep '
        "other machines out.",
        unset="not served",
        example="127.0.0.1:9469",
    )
    textfile: Path | None = _key(
        read.textfile,
        None,
        about="File `*.prom` for the textfile collector of node_exporter, written every 15 s.",
        unset="no file",
        example="/var/lib/node_exporter/textfile_collector/swansong.prom",
    )


@_section
class LogConfig:
    """The log of the daemon, on standard error."""

    format: str = _key(
        read.one_of("json", "console"),
        "json",
        about="`json`, one object a line; or `console`, for people.",
    )
    level: str = _key(
        read.one_of("debug", "info", "warning", "error"),
        "info",
        about="Lowest level that is logged: `debug`, `info`, `warning` or `error`.",
    )


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


# ---------------------------------------------------------------- reading the file


def load(path: Path) -> Config:
    """Read the configuration file.

    A file ``/etc/swansong/JOB/swansong.toml`` is for ``swansongd@JOB.service``, which has another default of
    ``trainer.socket``.

    Raises:
        ConfigError: the file is missing or not TOML, or contains a key or value that is not valid.
    """
    hint = "copy swansong.example.toml there, or name another file with --config"
    body = read_toml(path, hint=hint)
    trainer = body.setdefault("trainer", {})
    if isinstance(trainer, dict):
        trainer.setdefault("socket", _socket_of(path))
    return parse(body)


def _socket_of(path: Path) -> str:
    """The socket of a daemon with this configuration file, if the file names none."""
    socket, folder = Path(DEFAULT_SOCKET), Path(os.path.abspath(path)).parent
    is_job = path.name == DEFAULT_PATH.name and folder.parent == DEFAULT_PATH.parent
    return str(socket.parent / folder.name / socket.name) if is_job else DEFAULT_SOCKET


def read_toml(path: Path, *, hint: str, form: str = _HINT) -> dict[str, Any]:
    """The content of a TOML file.

    Args:
        hint: the fix if the file cannot be read.
        form: the fix if it is not TOML.

    Raises:
        ConfigError: the file is missing, too large or not TOML.
    """
    try:
        with path.open("rb") as file:
            data = file.read(TOML_BYTES_MAX + 1)
        if len(data) > TOML_BYTES_MAX:
            raise ConfigError(
                [f"reading {path} failed: it has more than {TOML_BYTES_MAX} bytes"], hint=hint
            )
        return tomllib.loads(data.decode("utf-8"))
    except FileNotFoundError:
        raise ConfigError([f"reading {path} failed: no such file"], hint=hint) from None
    except OSError as error:
        raise ConfigError([f"reading {path} failed: {error.strerror}"], hint=hint) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            [f"reading {path} failed: byte {error.start} is not UTF-8"], hint=form
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([f"parsing {path} failed: {error}"], hint=form) from None


def parse(body: Mapping[str, object]) -> Config:
    """Turn parsed TOML into a configuration.

    Errors do not show the value of an unknown name: it may be a secret under a mistyped key.

    Raises:
        ConfigError: lists every key that is missing, unknown, invalid or in conflict with another key.
    """
    problems = [
        f"{name}: unknown section; {_nearest(name, list(_SECTIONS))}"
        for name in body
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
        problems.append(f"{name}: is not a table; start the section with [{name}]")
        return {}
    known = _fields(section)
    problems += [
        f"{name}.{key}: unknown key; {_nearest(key, list(known))}"
        for key in table
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
    if values["run"].get("handover") and trainer.get("signal", "none") != "none":
        remedy = "remove the key, or trainer.signal"
        problems.append(
            _problem("run.handover", "needs a trainer with hooks, which waits", "true", remedy)
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
    lock_days = values["store"].get("lock_days", 0)
    if lock_days and urls["store"].startswith(("file:", "az:")):
        remedy = "set it to 0; on Azure, an immutability policy of the container keeps all blobs"
        problems.append(_problem("store.lock_days", "needs S3 or GCS", lock_days, remedy))
    problems += _directories(values["staging"].get("path"), urls)
    listen = values["metrics"].get("listen")
    if listen is not None and listen.path is not None and listen.path == trainer.get("socket"):
        remedy = 'choose another path, such as "unix:/run/swansong/metrics.sock"'
        problems.append(
            _problem("metrics.listen", "is the socket of trainers", str(listen), remedy)
        )
    mirror = urls["mirror"].rstrip("/")
    if mirror and mirror == urls["store"].rstrip("/") and directory_of(mirror) is None:
        remedy = "choose a store in another region or cloud, with another bucket or prefix"
        problems.append(_problem("mirror.url", "is the URL of the store", urls["mirror"], remedy))
    return problems


def _directories(staging: Path | None, urls: Mapping[str, str]) -> list[str]:
    """Problems with the directories of staging, the store and the mirror."""
    shown = {"staging.path": str(staging), **{f"{name}.url": url for name, url in urls.items()}}
    paths = {"staging.path": staging, **{f"{n}.url": directory_of(u) for n, u in urls.items()}}
    found = {key: look_up(path) for key, path in paths.items() if path is not None}
    real = {key: path for key, (path, is_usable) in found.items() if is_usable}
    files = [key for key in found if key not in real]
    remedy = "choose separate directories; symbolic links are followed"
    return [_problem(key, "is a file", shown[key], "choose a directory") for key in files] + [
        _problem(key, f"overlaps {other}", shown[key], remedy)
        for (other, first), (key, second) in itertools.combinations(real.items(), 2)
        if first.is_relative_to(second) or second.is_relative_to(first)
    ]


def look_up(path: Path) -> tuple[Path, bool]:
    """The path without symbolic links, and whether it is a directory or absent.

    While its file system does not answer, this is the path itself: a command such as ``swansong notify`` must
    not wait for a file server.
    """
    found = [(path, True)]

    def look() -> None:
        is_usable = os.path.isdir(path) or not os.path.exists(path)
        found.append((Path(os.path.realpath(path)), is_usable))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(RESOLVE_TIMEOUT_S)
    return found[-1]


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
