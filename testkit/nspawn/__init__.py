# SPDX-License-Identifier: Apache-2.0
"""Containers with a real systemd."""
