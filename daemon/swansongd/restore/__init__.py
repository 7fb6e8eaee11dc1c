# SPDX-License-Identifier: Apache-2.0
"""Fetches the newest whole commit, and answers trainers that resume."""
