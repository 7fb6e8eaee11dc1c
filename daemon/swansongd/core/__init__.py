# SPDX-License-Identifier: Apache-2.0
"""The decisions: functions of (state, event, now).  No clock, disk, socket, thread or environment."""
