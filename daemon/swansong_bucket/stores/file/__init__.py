# SPDX-License-Identifier: Apache-2.0
"""A directory as an object store."""
