# SPDX-License-Identifier: Apache-2.0
"""The form of keys and records in a bucket.  Pure."""
