# SPDX-License-Identifier: Apache-2.0
"""The cost of interruptions, and advice that lowers it."""
