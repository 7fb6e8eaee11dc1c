# SPDX-License-Identifier: Apache-2.0
"""Verify, repair, and the lifecycle rules of a bucket."""
