# SPDX-License-Identifier: Apache-2.0
"""The bucket: its format, its stores, and the readers and writers of a run.  No daemon is needed."""
