# SPDX-License-Identifier: Apache-2.0
"""Status, timeline, health and log: the operators' view of the daemon."""
