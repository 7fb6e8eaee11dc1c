# SPDX-License-Identifier: Apache-2.0
"""The default ACL of the staging directory of a run.

A trainer creates files as its own user, and the daemon must read and later delete them.  Group permissions
would give the same rights to each other member of the group.  A default ACL names only the daemon, and each
new file below inherits it, with any umask of the trainer.  The kernel's format is documented in
``linux/posix_acl_xattr.h``.
"""

from __future__ import annotations

import os
import struct

_DEFAULT_ACL = "system.posix_acl_default"
_VERSION = struct.Struct("<I")
_ENTRY = struct.Struct("<HHI")
_NO_ID = 0xFFFFFFFF
_OWNER, _USER, _GROUP, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x10, 0x20
_READ, _WRITE, _ENTER = 4, 2, 1


def set_default(fd: int, uid: int) -> None:
    """Let ``uid`` and the owner, and no other user, read and delete new entries of an open directory.

    The group gets no rights: a member who can reach a file can add a hard link to it, and a set with hard
    links is rejected.

    Raises:
        OSError: the file system has no ACLs, or the directory belongs to another user.
    """
    everything = _READ | _WRITE | _ENTER
    entries = (
        (_OWNER, everything, _NO_ID),
        (_USER, everything, uid),
        (_GROUP, 0, _NO_ID),
        (_MASK, everything, _NO_ID),
        (_OTHER, 0, _NO_ID),
    )
    value = _VERSION.pack(2) + b"".join(_ENTRY.pack(*entry) for entry in entries)
    os.setxattr(fd, _DEFAULT_ACL, value)
