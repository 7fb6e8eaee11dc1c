# SPDX-License-Identifier: Apache-2.0
"""Grace periods that are known before a notice."""

from __future__ import annotations

from swansongd.config.config import Config
from swansongd.sources.aws import NOTICE_S
from swansongd.sources.gcp import LONG_NOTICE_S


def grace_s(config: Config, cloud: str) -> float:
    """The grace period of a notice of this cloud, in seconds."""
    if cloud == "aws":
        return NOTICE_S
    if cloud == "gcp" and config.sources.gcp_preemption_notice_s:
        return config.sources.gcp_preemption_notice_s
    return config.deadline.assumed_grace_s


def longest_grace_s(config: Config, cloud: str) -> float:
    """The longest grace period that may be in progress when systemd stops the daemon."""
    deadline, sources = config.deadline, config.sources
    may_be_long = cloud == "gcp" and sources.gcp_preemption_notice_s != 0
    return max(
        deadline.sigterm_grace_s,
        deadline.assumed_grace_s,
        grace_s(config, cloud),
        LONG_NOTICE_S if may_be_long else 0.0,
    )
