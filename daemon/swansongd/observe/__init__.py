# SPDX-License-Identifier: Apache-2.0
"""What operators see: status, timeline, health, log."""
