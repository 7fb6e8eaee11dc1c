# SPDX-License-Identifier: Apache-2.0
"""The exporter: metrics of runs, read from their buckets, without a VM."""
