# SPDX-License-Identifier: Apache-2.0
"""The trainer channel, its peers, and the signal for trainers without hooks."""
