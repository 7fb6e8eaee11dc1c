# SPDX-License-Identifier: Apache-2.0
"""Creates the sources that the configuration names; they send no request before they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from swansong_bucket.model import GpuRecord, Health, NoticeKind, SourceStatus

from swansongd.config.config import DeadlineConfig, SourcesConfig
from swansongd.core.state import SCHEDULED_LEAD_S
from swansongd.sources import host, logind
from swansongd.sources.asg import LifecycleHook
from swansongd.sources.aws import NOTICE_S as SPOT_NOTICE_S
from swansongd.sources.aws import AwsSpotSource, ImdsSession
from swansongd.sources.aws_events import AwsAsgSource, AwsRebalanceSource, AwsScheduledSource
from swansongd.sources.azure import NOTICE_S as AZURE_NOTICE_S
from swansongd.sources.azure import AzureDeletionSource, AzureScheduledSource
from swansongd.sources.command import CommandSource
from swansongd.sources.detect import DMI_DIRECTORY, describe_firmware, detect_cloud, has_nvml
from swansongd.sources.fixed import DeadlineSource, end_after, end_at
from swansongd.sources.gcp import LONG_NOTICE_S as GCP_LONG_NOTICE_S
from swansongd.sources.gcp import MARGIN_S as GCP_MARGIN_S
from swansongd.sources.gcp import GcpOptions, GcpPreemptedSource
from swansongd.sources.gcp_events import (
    GPU_MAINTENANCE_S,
    GcpMaintenanceSource,
    GcpStopSource,
    GcpUpcomingSource,
)
from swansongd.sources.metadata import DEFAULT_URL
from swansongd.sources.polled import PollOptions
from swansongd.sources.source import Clocks, Source

_SCHEDULED_POLLS = 10
"""Scheduled events are announced minutes to days ahead: their source polls once in this many intervals."""
_ALL_CLOCKS = Clocks()


def open_sources(
    config: SourcesConfig,
    deadline: DeadlineConfig,
    *,
    boot_id: str,
    clocks: Clocks = _ALL_CLOCKS,
    gpus_before: GpuRecord | None = None,
) -> list[Source]:
    """The sources of the cloud, of the operator's program, of the configured deadlines, and of the GPUs.

    Args:
        config, deadline: of the daemon.
        boot_id: of the kernel.
        clocks: of this VM.
        gpus_before: the record of the previous life of the daemon in this boot.
    """
    cloud = detect_cloud() if config.cloud == "auto" else config.cloud
    opened: list[Source] = []
    if cloud == "aws":
        opened += _aws(config, deadline, clocks)
    elif cloud == "gcp":
        opened += _gcp(config, deadline, boot_id, clocks)
    elif cloud == "azure":
        opened += _azure(config, deadline, clocks)
    if config.command_socket is not None:
        grace_s = deadline.assumed_grace_s
        opened.append(CommandSource(config.command_socket, assumed_grace_s=grace_s, clocks=clocks))
    return opened + _deadlines(config, boot_id, clocks) + _gpus(config, clocks, gpus_before)


def _aws(config: SourcesConfig, deadline: DeadlineConfig, clocks: Clocks) -> list[Source]:
    session, options = ImdsSession(), _poll_options(config, deadline, clocks)
    hook_grace_s = config.asg_grace_s or deadline.assumed_grace_s
    return [
        AwsSpotSource(options, session),
        AwsRebalanceSource(options, session),
        AwsAsgSource(replace(options, assumed_grace_s=hook_grace_s), session),
        AwsScheduledSource(_rarely(options), session),
    ]


def _azure(config: SourcesConfig, deadline: DeadlineConfig, clocks: Clocks) -> list[Source]:
    options = _poll_options(config, deadline, clocks)
    return [
        AzureDeletionSource(options, approves=config.azure_approve),
        AzureScheduledSource(_rarely(options), approves=config.azure_approve),
    ]


def _poll_options(config: SourcesConfig, deadline: DeadlineConfig, clocks: Clocks) -> PollOptions:
    return PollOptions(
        metadata_url=config.metadata_url or DEFAULT_URL,
        poll_interval_s=config.poll_interval_s,
        assumed_grace_s=deadline.assumed_grace_s,
        clocks=clocks,
    )


def _rarely(options: PollOptions) -> PollOptions:
    return replace(options, poll_interval_s=_SCHEDULED_POLLS * options.poll_interval_s)


def _gcp(
    config: SourcesConfig, deadline: DeadlineConfig, boot_id: str, clocks: Clocks
) -> list[Source]:
    def options(grace_s: float) -> GcpOptions:
        return GcpOptions(
            metadata_url=config.metadata_url or DEFAULT_URL,
            assumed_grace_s=grace_s,
            boot_id=boot_id,
            clocks=clocks,
        )

    soon, maintenance = options(deadline.assumed_grace_s), options(GPU_MAINTENANCE_S)
    return [
        GcpPreemptedSource(soon, notice_s=config.gcp_preemption_notice_s),
        GcpMaintenanceSource(maintenance),
        GcpUpcomingSource(maintenance),
        GcpStopSource(soon),
    ]


def _deadlines(config: SourcesConfig, boot_id: str, clocks: Clocks) -> list[Source]:
    """One source for all configured deadlines; no source without a deadline."""
    ends = []
    if config.end_at is not None:
        ends.append(end_at(config.end_at, wall=clocks.wall))
    if config.max_run_duration_s is not None:
        ends.append(
            end_after(config.max_run_duration_s, boot_id=boot_id, since_boot=clocks.since_boot)
        )
    if not ends:
        return []
    return [DeadlineSource(tuple(ends), lead_s=config.end_lead_s, monotonic=clocks.monotonic)]


def _gpus(config: SourcesConfig, clocks: Clocks, before: GpuRecord | None) -> list[Source]:
    """The source of GPU health; no source without NVML's library."""
    if config.gpu == "off" or not has_nvml():
        return []
    from swansongd.sources.gpu import GpuSource  # noqa: PLC0415 - only VMs with GPUs load it

    return [GpuSource(monotonic=clocks.monotonic, before=before)]


def notice_kinds(
    sources: Sequence[Source], config: SourcesConfig, deadline: DeadlineConfig
) -> tuple[NoticeKind, ...]:
    """The notices of these sources and of the host, each with its grace period."""
    found = {host.NAME, logind.NAME, *(source.name for source in sources)}
    return tuple(kind for kind in possible_notice_kinds(config, deadline) if kind.source in found)


def possible_notice_kinds(
    config: SourcesConfig, deadline: DeadlineConfig
) -> tuple[NoticeKind, ...]:
    """The notices of any cloud and of the host whose length is known before they come.

    Without ``sources.gcp_preemption_notice_s`` a Spot VM on GCP may have the long notice or none.

    Not among them are ``aws.rebalance`` and ``gpu``, which announce no end, and notices by hand and of other
    VMs.  Without a lifecycle hook an Auto Scaling group shuts the VM down at once, which is ``logind``.
    """
    assumed_s = deadline.assumed_grace_s
    long_s = GCP_LONG_NOTICE_S - GCP_MARGIN_S
    of_gcp_s = {None: (assumed_s, long_s), 0.0: (assumed_s,)}.get(
        config.gcp_preemption_notice_s, (long_s,)
    )
    asg_s = [config.asg_grace_s or assumed_s] if config.asg_hook or config.asg_grace_s else []
    scheduled = (
        AwsScheduledSource.name,
        GcpMaintenanceSource.name,
        GcpUpcomingSource.name,
        AzureScheduledSource.name,
    )
    return (
        NoticeKind(source=AwsSpotSource.name, grace_s=SPOT_NOTICE_S),
        *(NoticeKind(source=AwsAsgSource.name, grace_s=grace_s) for grace_s in asg_s),
        *(NoticeKind(source=GcpPreemptedSource.name, grace_s=grace_s) for grace_s in of_gcp_s),
        NoticeKind(source=GcpStopSource.name, grace_s=assumed_s),
        NoticeKind(source=AzureDeletionSource.name, grace_s=AZURE_NOTICE_S),
        *(
            NoticeKind(source=source, grace_s=SCHEDULED_LEAD_S, is_scheduled=True)
            for source in scheduled
        ),
        NoticeKind(source=DeadlineSource.name, grace_s=config.end_lead_s, is_scheduled=True),
        NoticeKind(
            source=logind.NAME,
            grace_s=max(0.0, deadline.shutdown_delay_s - logind.DEADLINE_MARGIN_S),
        ),
        NoticeKind(source=host.NAME, grace_s=deadline.sigterm_grace_s),
    )


def open_lifecycle_hook(config: SourcesConfig) -> LifecycleHook | None:
    """The lifecycle hook of the Auto Scaling group; None without configuration."""
    if config.asg_hook is None or config.asg_name is None:
        return None
    return LifecycleHook(
        hook=config.asg_hook,
        group=config.asg_name,
        metadata_url=config.metadata_url or DEFAULT_URL,
    )


def unknown_firmware(
    cloud: str, *, now_mono_s: float, dmi_directory: str = DMI_DIRECTORY
) -> SourceStatus | None:
    """A degraded status if ``sources.cloud`` is ``auto`` and the firmware names no known cloud; else None."""
    if cloud != "auto" or detect_cloud(dmi_directory) != "none":
        return None
    return SourceStatus(
        source="cloud",
        health=Health.DEGRADED,
        reason=f"{describe_firmware(dmi_directory)}: only shutdowns of the operating system are watched, "
        'and no cloud; set sources.cloud to "aws", "gcp", "azure" or, if that is intended, "none"',
        since_mono_s=now_mono_s,
    )


def shortest_grace_s(sources: list[Source], *, assumed_grace_s: float) -> float:
    """The shortest time between a notice of these sources and the end of the VM."""
    watches_spot = any(source.name == AwsSpotSource.name for source in sources)
    return SPOT_NOTICE_S if watches_spot else assumed_grace_s
