# SPDX-License-Identifier: Apache-2.0
"""Metadata services and stores as processes on loopback."""
