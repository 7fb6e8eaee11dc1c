# SPDX-License-Identifier: Apache-2.0
"""The records of a run in its bucket: read, written and signed."""
