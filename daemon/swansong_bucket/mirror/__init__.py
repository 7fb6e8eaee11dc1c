# SPDX-License-Identifier: Apache-2.0
"""Copies the commits of a run to a second store, verified, and promotes that store after a disaster."""
