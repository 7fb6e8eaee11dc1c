# SPDX-License-Identifier: Apache-2.0
"""The rules that keep commits, prune, and locks."""
