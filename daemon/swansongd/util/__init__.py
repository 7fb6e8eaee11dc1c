# SPDX-License-Identifier: Apache-2.0
"""Threads, limits and the HTTP/1.1 parser, without knowledge of checkpoints."""
