# SPDX-License-Identifier: Apache-2.0
"""Modules that several packages share: HTTP/1.1 framing, threads, the concurrency limit."""
