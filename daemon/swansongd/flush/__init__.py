# SPDX-License-Identifier: Apache-2.0
"""Moves sealed sets from staging to the store, and commits them."""
