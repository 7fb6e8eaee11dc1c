# SPDX-License-Identifier: Apache-2.0
"""The metric families of the daemon; docs/reference/metrics.md shows them."""

from __future__ import annotations

from swansongd.observe.families import Family, counter, gauge, histogram

_DAEMON = (
    Family("swansong_build_info", "info", "Version of the daemon", ("version", "python")),
    gauge("swansong_start_timestamp_seconds", "Start of the daemon"),
    gauge(
        "swansong_state", "1 for the state that swansong status shows, 0 for all others", "state"
    ),
    gauge("swansong_generation", "Generation that this VM has claimed"),
    counter(
        "swansong_decision_faults_total",
        "Faults of the daemon itself, each of which cost one event",
    ),
    counter(
        "swansong_log_lines_dropped_total",
        "Log lines that were dropped because standard error blocked",
    ),
)
_COMMITS = (
    gauge("swansong_last_commit_timestamp_seconds", "Time of the newest whole commit"),
    gauge("swansong_last_commit_step", "Step of the newest whole commit"),
    counter(
        "swansong_commits_total", "Commits of this daemon: periodic, emergency or final", "kind"
    ),
    counter("swansong_commit_failures_total", "Manifests that could not be created"),
    gauge("swansong_replication_lag_seconds", "Age of the newest whole commit"),
    gauge("swansong_replication_lag_steps", "Steps that a power cut would lose now"),
    gauge(
        "swansong_replication_lag_bytes", "Sealed bytes that may be sent next and are not stored"
    ),
    gauge("swansong_checkpoint_interval_seconds", "Training time between two periodic checkpoints"),
    gauge("swansong_checkpoint_size_bytes", "Size of the newest checkpoint of this VM"),
    gauge("swansong_unsent_sets", "Sealed sets that wait for their upload"),
    counter(
        "swansong_dropped_sets_total", "Sealed sets that newer ones superseded before their upload"
    ),
    counter("swansong_save_failures_total", "Checkpoints that the trainer could not write"),
)
_FLUSH = (
    counter("swansong_flush_bytes_total", "Bytes sent to the store"),
    counter(
        "swansong_flush_referenced_bytes_total",
        "Bytes not sent because an earlier commit has stored them",
    ),
    gauge(
        "swansong_flush_bandwidth_bytes_per_second",
        "Bandwidth to the store, as measured by recent flushes",
    ),
    counter("swansong_flush_failures_total", "Flushes that failed"),
    gauge(
        "swansong_flush_consecutive_failures",
        "Failures since the last flush or commit that succeeded",
    ),
    gauge(
        "swansong_store_up",
        "1 while the store works, 0 while it is not healthy or was not reached yet",
    ),
    counter(
        "swansong_store_errors_total",
        "Failed attempts at requests: transient, refused, not_found, exists, changed, locked or too_large",
        "kind",
    ),
    gauge("swansong_staging_size_bytes", "Size of the file system of staging"),
    gauge("swansong_staging_free_bytes", "Free bytes on the file system of staging"),
)
_SOURCES = (
    gauge(
        "swansong_source_up",
        "1 if a notice would be seen now, 0 if the source is blind or has not answered yet",
        "source",
    ),
    gauge(
        "swansong_source_health",
        "1 for the health of the source, 0 for all others",
        "source",
        "health",
    ),
    counter("swansong_notices_total", "Notices that were raised", "source"),
    gauge("swansong_notices_in_force", "Notices in force", "severity"),
    gauge(
        "swansong_evacuation_needed_seconds",
        "Time from a notice right now to the commit, in nine of ten cases and with the reserve",
        "notice",
    ),
    gauge("swansong_evacuation_available_seconds", "Grace period of a notice right now", "notice"),
    gauge(
        "swansong_evacuation_margin_seconds",
        "Available minus needed seconds: negative if a notice right now would lose training",
        "notice",
    ),
    gauge(
        "swansong_evacuation_fits",
        "1 if a notice right now would end with SAFE, 0 otherwise; `swansong status` has the reason",
        "notice",
    ),
)
_EVACUATIONS = (
    gauge("swansong_evacuation_open", "1 during an evacuation, 0 otherwise"),
    gauge("swansong_evacuation_deadline_timestamp_seconds", "Deadline of the open evacuation"),
    counter(
        "swansong_evacuations_total",
        "Verdicts; a verdict that improves counts again",
        "source",
        "verdict",
    ),
    histogram("swansong_evacuation_duration_seconds", "Time from the opening to the first verdict"),
    histogram(
        "swansong_evacuation_phase_seconds",
        "Time of each phase: request, agree, save, flush, commit or peers",
        "phase",
    ),
    gauge(
        "swansong_last_verdict",
        "1 for the newest verdict of this daemon, 0 for all others; drills apart",
        "verdict",
        "drill",
    ),
    gauge(
        "swansong_last_verdict_timestamp_seconds",
        "Time of the newest verdict; drills apart",
        "drill",
    ),
    gauge(
        "swansong_last_evacuation_expected_seconds",
        "Forecast of the newest evacuation, from the request to the commit",
    ),
    gauge("swansong_last_evacuation_took_seconds", "The same time as it was"),
    counter("swansong_follow_ups_total", "Follow-up checkpoints that were requested"),
    counter(
        "swansong_precautions_total",
        "Checkpoints that were requested because of an advisory notice",
        "source",
    ),
)
_TRAINER = (
    gauge("swansong_trainers_connected", "Ranks that are connected"),
    gauge(
        "swansong_trainers_joined_timestamp_seconds",
        "Time at which the first of the connected ranks connected",
    ),
    gauge("swansong_trainers_stalled", "Ranks that are stalled"),
    gauge(
        "swansong_trainers_unhealthy",
        "Ranks whose loss is not finite, or far above the losses before",
    ),
    gauge(
        "swansong_trainers_slow",
        "Ranks that take 30 % longer than the others for the part of a step in which they wait for none",
    ),
    gauge(
        "swansong_trainers_redone_differ",
        "Ranks whose repeated steps differ from the interrupted run",
    ),
    counter(
        "swansong_trainers_refused_total",
        "Processes that were refused because another one has their rank",
    ),
    gauge("swansong_trainer_step", "Newest step that a rank has completed"),
    gauge("swansong_trainer_step_seconds", "Usual duration of a step"),
    gauge(
        "swansong_trainer_own_seconds",
        "Time from a step to the end of the next forward pass, of the slowest rank",
    ),
    gauge("swansong_trainer_save_seconds", "Duration of the last save of the slowest rank"),
    gauge(
        "swansong_stall_seconds",
        "Time since the last report of the rank that has stalled longest, 0 without a stall",
    ),
    counter(
        "swansong_standstill_seconds_total", "Time for which training stood still for checkpoints"
    ),
    counter("swansong_resumptions_total", "Resumptions that this daemon recorded"),
    counter(
        "swansong_preemption_loss_gpu_seconds_total",
        "GPU seconds lost before those resumptions, by part of the loss",
        "part",
    ),
)
_MIRROR = (
    gauge(
        "swansong_mirror_state",
        "1 for the state of the mirror, 0 for all others; absent without a mirror",
        "state",
    ),
    gauge(
        "swansong_mirror_lag_seconds",
        "Age of the oldest commit that is newer than the newest one in the mirror",
    ),
    gauge("swansong_mirror_lag_commits", "Commits that wait for their copy"),
    gauge("swansong_mirror_lag_bytes", "Bytes that these commits have and the mirror lacks"),
    counter("swansong_mirror_commits_total", "Commits that were copied"),
    counter("swansong_mirror_bytes_total", "Bytes that were copied"),
    gauge(
        "swansong_mirror_damaged_commits",
        "Commits that were not copied because their stored bytes are damaged",
    ),
    gauge(
        "swansong_prune_timestamp_seconds", "Time of the last prune by this daemon that succeeded"
    ),
    counter("swansong_prune_failures_total", "Prunes by this daemon that failed"),
    counter("swansong_pruned_commits_total", "Commits that this daemon deleted"),
    counter("swansong_pruned_bytes_total", "Bytes that this daemon deleted"),
    gauge("swansong_prune_kept_bytes", "Bytes of the commits that the last prune kept"),
)
_GPUS = (
    gauge("swansong_gpus", "GPUs that are known"),
    gauge(
        "swansong_gpu_health",
        "1 for the health of the GPU, 0 for all others: ok, degraded, dying or lost",
        "gpu",
        "health",
    ),
    counter(
        "swansong_gpu_xid_errors_total",
        "Xids of the kernel log or of NVML, by class: application, degraded or dying",
        "gpu",
        "class",
    ),
)
_NOTIFICATIONS = (
    counter(
        "swansong_notifications_total",
        "Notifications by channel (webhook, exec or heartbeat) and outcome (sent, failed or dropped)",
        "channel",
        "outcome",
    ),
)
SUBJECTS = {
    "The daemon": _DAEMON,
    "Commits and lag": _COMMITS,
    "Flush and store": _FLUSH,
    "Sources, notices and margin": _SOURCES,
    "Evacuations": _EVACUATIONS,
    "Trainer and loss": _TRAINER,
    "Mirror and retention": _MIRROR,
    "GPUs": _GPUS,
    "Notifications": _NOTIFICATIONS,
}
FAMILIES = tuple(family for families in SUBJECTS.values() for family in families)
LABELS = {
    "source": "Source of the notice: see docs/operations/notices.md",
    "state": "State of the daemon, or of the mirror: see docs/reference/status.md",
    "notice": "Source of the notice; a second, longer grace period has `.long` after the name",
    "verdict": "`SAFE`, `PARTIAL`, `LOST` or `NO_TRAINING`",
    "drill": "`yes` or `no`; a drill never replaces the newest verdict of a real evacuation, and a real "
    "notice during a drill makes the drill real",
    "part": "Part of the preemption loss: see docs/operations/loss.md",
    "gpu": "Index of the GPU in `nvidia-smi`, or its address on the bus if the driver does not list it",
}
"""The meaning of labels, beyond the help texts."""
