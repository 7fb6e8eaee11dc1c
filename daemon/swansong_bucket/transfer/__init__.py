# SPDX-License-Identifier: Apache-2.0
"""Reads chunks, verifies them by their names, and writes the files of a commit."""
