# SPDX-License-Identifier: Apache-2.0
"""Sends sealed sets from staging to the object store, and commits them."""
