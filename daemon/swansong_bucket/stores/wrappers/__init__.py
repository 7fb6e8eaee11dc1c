# SPDX-License-Identifier: Apache-2.0
"""Stores around a store: retries and a rate limit."""
