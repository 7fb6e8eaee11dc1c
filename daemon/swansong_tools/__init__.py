# SPDX-License-Identifier: Apache-2.0
"""The command ``swansong`` with its tools: doctor, exporter, report."""
