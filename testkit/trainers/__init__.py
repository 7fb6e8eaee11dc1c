# SPDX-License-Identifier: Apache-2.0
"""Training scripts that tests start as processes."""
