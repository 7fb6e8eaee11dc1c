# SPDX-License-Identifier: Apache-2.0
"""From the configuration to the sources of this VM."""

from __future__ import annotations

from swansongd.sources.aws import AwsSpotSource
from swansongd.sources.base import Clock, Source
from swansongd.sources.detect import detect_cloud
from swansongd.sources.gcp import GcpPreemptedSource
from swansongd.sources.metadata import DEFAULT_URL


def open_sources(
    cloud: str,
    *,
    metadata_url: str | None,
    poll_interval_s: float,
    assumed_grace_s: float,
    monotonic: Clock,
    wall: Clock,
) -> list[Source]:
    """The sources to run; nothing is asked yet.

    Args:
        cloud: ``aws``, ``gcp``, ``none``, or ``auto`` to look at the firmware.
        metadata_url: address of the metadata server, None for the one that all clouds share.
        poll_interval_s: from one poll to the next, where a source has to poll.
        assumed_grace_s: grace period of a notice that states none.
        monotonic, wall: the clocks, in seconds.
    """
    url = metadata_url or DEFAULT_URL
    match detect_cloud() if cloud == "auto" else cloud:
        case "aws":
            return [
                AwsSpotSource(
                    metadata_url=url,
                    poll_interval_s=poll_interval_s,
                    assumed_grace_s=assumed_grace_s,
                    monotonic=monotonic,
                    wall=wall,
                )
            ]
        case "gcp":
            return [
                GcpPreemptedSource(
                    metadata_url=url, assumed_grace_s=assumed_grace_s, monotonic=monotonic
                )
            ]
        case "none":
            return []
        case _:
            raise ValueError(f"no such cloud: {cloud!r}")
