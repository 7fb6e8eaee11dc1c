# SPDX-License-Identifier: Apache-2.0
"""systemd: notifications and its file descriptor store."""
