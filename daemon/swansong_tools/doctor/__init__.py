# SPDX-License-Identifier: Apache-2.0
"""`swansong doctor`: checks of the installation, one family per module."""
