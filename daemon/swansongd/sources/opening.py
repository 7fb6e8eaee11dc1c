# SPDX-License-Identifier: Apache-2.0
"""From the configuration to the sources of this VM."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

from swansongd.model import Health, SourceStatus
from swansongd.sources.aws import NOTICE_S as SPOT_NOTICE_S
from swansongd.sources.aws import AwsSource, AwsSpotSource, ImdsSession
from swansongd.sources.aws_events import AwsAsgSource, AwsRebalanceSource, AwsScheduledSource
from swansongd.sources.base import Clock, Source
from swansongd.sources.detect import DMI_DIRECTORY, describe_firmware, detect_cloud
from swansongd.sources.fixed import DeadlineSource, end_after, end_at
from swansongd.sources.gcp import GcpPreemptedSource
from swansongd.sources.gcp_events import (
    GPU_MAINTENANCE_S,
    GcpMaintenanceSource,
    GcpStopSource,
    GcpUpcomingSource,
)
from swansongd.sources.metadata import DEFAULT_URL

_SCHEDULED_POLLS = 10
"""Scheduled events on AWS come days ahead: they are asked for once in so many intervals."""


def open_sources(
    cloud: str,
    *,
    metadata_url: str | None,
    poll_interval_s: float,
    assumed_grace_s: float,
    monotonic: Clock,
    wall: Clock,
    gcp_preemption_notice_s: float | None = None,
    asg_grace_s: float | None = None,
) -> list[Source]:
    """The sources to run; nothing is asked yet.

    Args:
        cloud: ``aws``, ``gcp``, ``none``, or ``auto`` to look at the firmware.
        metadata_url: address of the metadata server, None for the one that all clouds share.
        poll_interval_s: from one poll to the next, where a source has to poll.
        assumed_grace_s: grace period of a notice that states none.
        monotonic, wall: the clocks, in seconds.
        gcp_preemption_notice_s: what a Spot VM on GCP was created with, 0 or 120; None to learn it.
        asg_grace_s: how long the Auto Scaling group's lifecycle hook holds a VM on AWS; None to assume
            what is assumed of any notice.
    """
    url = metadata_url or DEFAULT_URL
    match detect_cloud() if cloud == "auto" else cloud:
        case "aws":
            session = ImdsSession()

            def aws(kind: type[AwsSource], interval_s: float, grace_s: float) -> AwsSource:
                return kind(
                    metadata_url=url,
                    session=session,
                    poll_interval_s=interval_s,
                    assumed_grace_s=grace_s,
                    monotonic=monotonic,
                    wall=wall,
                )

            return [
                aws(AwsSpotSource, poll_interval_s, assumed_grace_s),
                aws(AwsRebalanceSource, poll_interval_s, assumed_grace_s),
                aws(AwsAsgSource, poll_interval_s, asg_grace_s or assumed_grace_s),
                aws(AwsScheduledSource, _SCHEDULED_POLLS * poll_interval_s, assumed_grace_s),
            ]
        case "gcp":
            return [
                GcpPreemptedSource(
                    metadata_url=url,
                    assumed_grace_s=assumed_grace_s,
                    notice_s=gcp_preemption_notice_s,
                    monotonic=monotonic,
                ),
                GcpMaintenanceSource(
                    metadata_url=url, grace_s=GPU_MAINTENANCE_S, monotonic=monotonic, wall=wall
                ),
                GcpUpcomingSource(
                    metadata_url=url, grace_s=GPU_MAINTENANCE_S, monotonic=monotonic, wall=wall
                ),
                GcpStopSource(
                    metadata_url=url, grace_s=assumed_grace_s, monotonic=monotonic, wall=wall
                ),
            ]
        case "none":
            return []
        case _:
            raise ValueError(f"no such cloud: {cloud!r}")


def unknown_firmware(
    cloud: str, *, now_mono_s: float, dmi_directory: str = DMI_DIRECTORY
) -> SourceStatus | None:
    """What to report when ``sources.cloud`` is ``auto`` and the firmware names no known cloud; else None."""
    if cloud != "auto" or detect_cloud(dmi_directory) != "none":
        return None
    return SourceStatus(
        source="cloud",
        health=Health.DEGRADED,
        reason=f"{describe_firmware(dmi_directory)}: no cloud is watched, only the shutdown of the OS; set "
        'sources.cloud to "aws", "gcp" or, if that is intended, "none"',
        since_mono_s=now_mono_s,
    )


def shortest_grace_s(names: Collection[str], *, assumed_grace_s: float) -> float:
    """How long before the end word may come at the latest, where these sources watch."""
    return SPOT_NOTICE_S if AwsSpotSource.name in names else assumed_grace_s


def open_deadline(
    instant: datetime | None,
    max_run_duration_s: float | None,
    *,
    lead_s: float,
    boot_id: str,
    since_boot: Clock,
    monotonic: Clock,
    wall: Clock,
) -> list[Source]:
    """The source of the ends that are configured; none where none is.

    Args:
        instant: of ``sources.end_at``.
        max_run_duration_s: counted from the boot.
        lead_s: so long before the end the notice becomes imminent.
        boot_id: of the kernel.
        since_boot, monotonic, wall: the clocks, in seconds.
    """
    ends = []
    if instant is not None:
        ends.append(end_at(instant, wall=wall))
    if max_run_duration_s is not None:
        ends.append(end_after(max_run_duration_s, boot_id=boot_id, since_boot=since_boot))
    if not ends:
        return []
    return [DeadlineSource(tuple(ends), lead_s=lead_s, monotonic=monotonic)]
