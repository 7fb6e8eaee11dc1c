# SPDX-License-Identifier: Apache-2.0
"""Notifications for operators: webhook, heartbeat, and a command of the operator.

:mod:`swansongd.observe.notifications` decides which there are.  Threads of this package send them, so that no
receiver delays a decision.
"""
