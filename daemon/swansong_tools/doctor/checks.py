# SPDX-License-Identifier: Apache-2.0
"""The table of all checks, in their order: causes before consequences.

docs/reference/doctor.md is made of it.  The probes are in the other modules, one for each subject.
"""

from __future__ import annotations

from functools import partial

from swansongd.sources import aws, aws_events, azure

from swansong_tools.doctor import cloud, daemon, fixes, host, reporting, staging, store
from swansong_tools.doctor.bucket import BucketChecks
from swansong_tools.doctor.findings import Check, Probe, ok
from swansong_tools.doctor.installation import Installation
from swansong_tools.doctor.rehearsal import FLUSH_S
from swansong_tools.doctor.store import StoreProbe, of_bucket, probed


def _edit(vm: Installation) -> str:
    return fixes.edit(vm.path)


# ---------------------------------------------------------------- configuration and host

_configuration, _host = partial(Check, "configuration"), partial(Check, "host")

CONFIGURATION = _configuration(
    "configuration",
    "every problem of the file",
    lambda vm: ok(f"{vm.path} is valid; run {vm.config.run.name}"),
)
CLOUD = _configuration("cloud", "`sources.cloud` against the firmware", cloud.cloud)
INSTALLED = (
    _host(
        "packages",
        "all packages can be imported",
        host.packages,
        fix=lambda _: fixes.PROVISION,
        limit_s=60.0,
    ),
    _host("polkit", "polkit is installed; without it logind refuses the delay lock", host.polkit),
    _host("users", "the user of the daemon, and the group of the trainers", host.users),
    _host("unit file", "the unit exists and starts at boot", host.unit_file),
    _host("unit syntax", "systemd accepts all units", host.unit_syntax, ("unit file",)),
    _host("logind drop-in", "our drop-in sets the delay of a shutdown", host.logind_drop_in),
    _host("permissions", "the rights of the daemon's user", host.permissions, ("users",)),
)
"""Checks of an installed unit; systemd need not run."""
HOST = (
    _host(
        "logind delay",
        "a shutdown is delayed long enough, and less than the cloud allows",
        host.logind_delay,
    ),
    _host("unit", "the unit's time to stop, watchdog and restarts", host.unit),
    _host(
        "sandbox",
        "the daemon can write to staging and to a `file://` store",
        host.sandbox,
        applies=lambda _: host.is_run_by_systemd(),
    ),
)

# ---------------------------------------------------------------- as the daemon: cloud


def _metadata(of: str, name: str, shows: str, probe: Probe, *needs: str) -> Check:
    return Check(
        "metadata",
        name,
        shows,
        probe,
        needs,
        fix=cloud.metadata_fix,
        applies=lambda vm: vm.cloud == of,
        limit_s=cloud.METADATA_LIMIT_S,
    )


def _aws(name: str, shows: str, path: str, judge: cloud.Judge = cloud.judge_optional) -> Check:
    return _metadata("aws", name, shows, cloud.metadata(path, judge), "IMDS token")


def _gcp(name: str, shows: str, key: str, judge: cloud.Judge = cloud.judge_optional) -> Check:
    return _metadata("gcp", name, shows, cloud.metadata(key, judge), "metadata server")


_AS_DAEMON_CLOUD = (
    _configuration(
        "environment", "variables that would redirect metadata requests", cloud.environment
    ),
    Check(
        "network",
        "network",
        "the names of store and metadata service resolve, and a route exists",
        cloud.network,
        applies=cloud.hosts,
        settle_s=5.0,
    ),
    Check(
        "metadata",
        "metadata service",
        "skipped: no cloud is configured or detected",
        cloud.no_metadata,
        applies=lambda vm: vm.cloud == "none",
    ),
    _metadata(
        "aws",
        "IMDS token",
        "a token; a hop limit that is too low has its own message",
        cloud.instance,
        "network",
    ),
    _aws(
        "instance-life-cycle",
        "whether this is a spot instance",
        aws_events.LIFE_CYCLE_PATH,
        cloud.judge_life_cycle,
    ),
    _aws("spot notice", "a notice of termination", aws.SPOT_PATH, cloud.judge_spot),
    _aws("rebalance", "a rebalance recommendation", aws_events.REBALANCE_PATH),
    _aws("Auto Scaling", "the target lifecycle state", aws_events.ASG_PATH),
    _aws("scheduled events", "maintenance that is due", aws_events.SCHEDULED_PATH),
    _aws("event history", "maintenance that is over", aws_events.HISTORY_PATH),
    _metadata("gcp", "metadata server", "the flavor header", cloud.instance, "network"),
    _gcp(
        "preemptible",
        "whether this is a Spot VM",
        "scheduling/preemptible",
        cloud.judge_preemptible,
    ),
    _gcp("preempted", "a preemption in progress", "preempted", cloud.judge_preempted),
    _gcp("maintenance-event", "maintenance in progress", "maintenance-event"),
    _gcp("upcoming-maintenance", "maintenance that is due", "upcoming-maintenance"),
    _gcp("stop-state", "a stop in progress", "shutdown-details/stop-state"),
    _metadata("azure", "instance metadata", "the name of the VM", cloud.instance, "network"),
    _metadata(
        "azure",
        "Scheduled Events",
        "events that are due; the first answer can take two minutes",
        cloud.metadata(azure.EVENTS_PATH, cloud.judge_events),
        "instance metadata",
    ),
    Check(
        "metadata",
        "clock (metadata)",
        "this VM's clock against the metadata service",
        cloud.metadata_clock,
        ("IMDS token", "metadata server", "instance metadata"),
        applies=lambda vm: vm.cloud != "none",
        limit_s=cloud.METADATA_LIMIT_S,
    ),
)

# ---------------------------------------------------------------- as the daemon: store

_store = partial(Check, "store", fix=store.by_hand)
_remote = partial(_store, applies=store.is_remote)
_directory = partial(_store, applies=store.is_directory)
_setting = partial(_store, needs=("bucket",), applies=store.has_settings)
_data = partial(_store, limit_s=FLUSH_S + 15)

REHEARSAL = (
    _store("write", "a generation is claimed", probed(StoreProbe.write), ("bucket",)),
    _store(
        "create-if-absent",
        "the second create of the claim is refused",
        probed(StoreProbe.create_again),
        ("write",),
    ),
    _data(
        "upload",
        "a set of two files, of 4 KiB and 2 MiB, is flushed",
        probed(StoreProbe.upload),
        ("write",),
    ),
    _store(
        "commit",
        "the manifest is created, listed and read back",
        probed(StoreProbe.commit),
        ("upload",),
    ),
    _data(
        "read back",
        "the commit is found as a reader finds it, restored, and compared byte by byte",
        probed(StoreProbe.read_back),
        ("commit",),
    ),
    _store("delete", "everything is deleted", probed(StoreProbe.delete), ("bucket",)),
)
SETTINGS = (
    _setting(
        "lifecycle rule",
        "no rule deletes checkpoints by age or moves them offline",
        of_bucket(BucketChecks.lifecycle, "lifecycle rules"),
    ),
    _setting(
        "versioning",
        "a deleted or overwritten object can be brought back",
        of_bucket(BucketChecks.versioning, "versioning"),
    ),
    _setting(
        "object lock",
        "`store.lock_days` works",
        of_bucket(BucketChecks.lock, "object lock"),
    ),
    _setting(
        "bucket policy",
        "the bucket enforces create-if-absent",
        of_bucket(BucketChecks.policy, "bucket policy"),
    ),
)
STORE = (
    _store(
        "signing key",
        "the daemon can read the key and accepts it",
        store.signing_key,
        applies=lambda vm: vm.config.store.signing_key_file,
    ),
    _remote(
        "credentials",
        "credentials for the store exist",
        probed(StoreProbe.credentials),
        ("network",),
    ),
    _remote(
        "clock (store)",
        "this VM's clock against the store",
        probed(StoreProbe.clock),
        ("network",),
    ),
    _directory("store disk", "the directory of the store outlives the VM", probed(StoreProbe.disk)),
    _store(
        "bucket", "the store can be listed, over TLS", probed(StoreProbe.reach), ("credentials",)
    ),
    _directory(
        "store space",
        "the store has room for two checkpoints",
        probed(StoreProbe.space),
        ("bucket",),
    ),
    *REHEARSAL,
    *SETTINGS,
    _store(
        "container settings",
        "unknown: Azure shows them elsewhere, see docs/operations/stores.md",
        store.azure_settings,
        ("bucket",),
        applies=lambda vm: store.is_remote(vm) and not store.has_settings(vm),
    ),
    _store(
        "speed",
        "with `--speed`: the bandwidth, and the bytes that fit into a notice",
        probed(StoreProbe.speed),
        ("upload",),
        applies=lambda vm: vm.options.speed,
        limit_s=store.SPEED_LIMIT_S,
    ),
    Check(
        "store",
        "mirror",
        "the mirror can be listed and written, and honours create-if-absent",
        store.mirror,
        applies=lambda vm: vm.config.mirror.url,
    ),
)

# ---------------------------------------------------------------- as the daemon: staging, reports

_staging = partial(Check, "staging", fix=staging.made)
_metrics, _notify = partial(Check, "metrics"), partial(Check, "notify")

STAGING = (
    _staging("staging", "the directory exists", staging.exists),
    _staging("staging rights", "the daemon can write to staging", staging.rights, ("staging",)),
    _staging("staging parents", "no other user can replace staging", staging.parents, ("staging",)),
    _staging(
        "file system",
        "the run and staging are on one file system",
        staging.file_system,
        ("staging",),
    ),
    _staging("free space", "staging has room for two checkpoints", staging.space, ("staging",)),
    _staging(
        "disk speed",
        "the time to write and read 64 MiB",
        staging.speed,
        ("staging rights",),
    ),
)
REPORTS = (
    _metrics(
        "metrics textfile",
        "the daemon can write to the directory of `metrics.textfile`",
        reporting.textfile,
        applies=lambda vm: vm.config.metrics.textfile,
    ),
    _notify(
        "webhook",
        "secrets are private, the address resolves, the template becomes JSON",
        reporting.resolves(reporting.webhook_request),
        applies=lambda vm: vm.config.notify.has_webhook,
    ),
    _notify(
        "test notification",
        "with `--send-notification`: the receiver accepts a notification",
        reporting.is_accepted(reporting.webhook_request),
        ("webhook",),
        applies=lambda vm: vm.config.notify.has_webhook and vm.options.send_notification,
    ),
    _notify(
        "heartbeat",
        "the secret is private, the address resolves",
        reporting.resolves(reporting.heartbeat_request),
        applies=lambda vm: vm.config.notify.has_heartbeat,
    ),
    _notify(
        "test heartbeat",
        "with `--send-notification`: the receiver accepts a call",
        reporting.is_accepted(reporting.heartbeat_request),
        ("heartbeat",),
        applies=lambda vm: vm.config.notify.has_heartbeat and vm.options.send_notification,
    ),
    _notify(
        "notify.exec",
        "the program can run, and no other user can change it",
        reporting.program,
        applies=lambda vm: vm.config.notify.exec,
    ),
)
AS_DAEMON = (*_AS_DAEMON_CLOUD, *STORE, *STAGING, *REPORTS)
"""Checks that must run as the daemon: another user could create files that the daemon cannot change."""
PREREQUISITES = ("users", "permissions", "sandbox")
"""Checks that must succeed before anything can run as the daemon."""

# ---------------------------------------------------------------- the daemon and its trainers

_daemon = partial(Check, "daemon", fix=daemon.show_log)
_trainers = partial(Check, "trainers")
_CAUSES = (
    "users", "trainer users", "permissions", "unit file", "sandbox", "as the daemon",
    "signing key", "staging", "staging rights", "socket directory",
)  # fmt: skip
"""Checks whose failure prevents the daemon from running."""

DAEMON = (
    _trainers("trainer users", "all `trainer.users` exist", daemon.trainer_users, ("users",)),
    _trainers(
        "socket directory", "the directory of `trainer.socket` exists", daemon.socket_directory
    ),
    _daemon(
        "daemon",
        "the daemon runs, and if not, why",
        daemon.runs,
        _CAUSES,
    ),
    _daemon(
        "running configuration",
        "the daemon was started with the current configuration and unit",
        daemon.is_current,
        ("daemon",),
    ),
    _daemon("version", "the daemon runs the installed version", daemon.version, ("daemon",)),
    _daemon(
        "store health",
        "the daemon reaches its store",
        daemon.store_health,
        ("daemon", "network", "credentials", "bucket", "write", "create-if-absent", "read back"),
        settle_s=daemon.SETTLE_S,
    ),
    _daemon("ranks", "no two connected trainers have one rank", daemon.ranks, ("daemon",)),
    _metrics(
        "metrics address",
        "the daemon serves `metrics.listen`, or the address is free; otherwise the process that has it",
        reporting.metrics_address,
        applies=lambda vm: vm.config.metrics.listen,
    ),
    _trainers(
        "socket",
        "`trainer.users` reach the socket, by their groups or by `SupplementaryGroups=` of a unit",
        daemon.socket,
        ("daemon",),
    ),
    _trainers("signal", "the trainer catches `trainer.signal`", daemon.signal, fix=_edit),
    _trainers(
        "unconnected trainers",
        "no unconnected process holds a GPU",
        daemon.unconnected_trainers,
        ("daemon",),
    ),
)

# ---------------------------------------------------------------- an image

_image = partial(Check, "image")

IMAGE = (
    _image(
        "sandbox",
        "the unit and its drop-ins let the daemon write to staging and to a `file://` store",
        host.sandbox_of_image,
        applies=lambda vm: vm.configured,
    ),
    _image(
        "secrets",
        "no credential in any home, in `/etc/swansong` or in drop-ins",
        host.secrets,
    ),
    _image("identity", "the image has no machine id", host.identity),
)
ALL = (CONFIGURATION, CLOUD, *INSTALLED, *HOST, *AS_DAEMON, *DAEMON, *IMAGE)
