# SPDX-License-Identifier: Apache-2.0
"""The state of the daemon for a person: once, as a live view, and as lines of a log."""
