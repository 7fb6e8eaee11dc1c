# SPDX-License-Identifier: Apache-2.0
"""``swansong doctor``: checks an installation before anyone depends on it."""
