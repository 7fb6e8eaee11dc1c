# SPDX-License-Identifier: Apache-2.0
"""The local tree that trainers write to: prepare, scan, seal, observe."""
