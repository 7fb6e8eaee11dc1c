# SPDX-License-Identifier: Apache-2.0
"""The logger of the hooks."""

import logging

log = logging.getLogger("swansong")
