# SPDX-License-Identifier: Apache-2.0
"""The connection to the daemon."""
