"""Names the file system that a volume lies on, so that its replacement by another one is noticed.

A new drive is empty, so nothing on it can tell that it is new: the operator compares this name with
the one that it knows (docs/adr/0017-ranks-lend-each-other-a-step.md). Nothing is named that may
change by itself: device numbers change when a node starts, and so does `f_fsid` of XFS, which is
one.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import struct
import uuid
from pathlib import Path
from typing import Final

_UUID_BYTES: Final = 16

_QUERIES: Final = {
    # EXT4_IOC_GETFSUUID, from Linux 6.0 on: struct fsuuid, which says how long the UUID may be
    "ext4": (0x8008662C, struct.pack("II", _UUID_BYTES, 0), 8),
    # XFS_IOC_FSGEOMETRY_V1: struct xfs_fsop_geom_v1
    "xfs": (0x80705864, bytes(64), 64),
}
"""By type of the file system: the request, what the argument begins with, and where in it the
answer has the UUID."""
_ANSWER_BYTES: Final = 112
"""The longest answer."""


def drive_id(fd: int) -> str:
    """`UUID@position` of the open directory `fd`; "" if the UUID is not known.

    The UUID was made with the file system and lies in it. `position` is a digest of the path within
    the file system of what is mounted. A drive that is *not mounted* has its directory on another
    file system, too, but at another position: /mnt/nvme/keepstep instead of /keepstep.
    """
    try:
        kind, root = _mounted(_mount_id(fd))
        request, head, at = _QUERIES[kind]
        answer = bytearray(head.ljust(_ANSWER_BYTES, b"\0"))
        fcntl.ioctl(fd, request, answer)
    except (OSError, LookupError, ValueError):
        return ""
    found = uuid.UUID(bytes=bytes(answer[at : at + _UUID_BYTES]))
    position = hashlib.sha256(os.fsencode(root)).hexdigest()[:16]
    return f"{found}@{position}" if found.int else ""


def _mount_id(fd: int) -> str:
    lines = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
    return dict(line.split(":", 1) for line in lines)["mnt_id"].strip()


def _mounted(mount_id: str) -> tuple[str, str]:
    """The type of a mounted file system, and which directory of it is mounted."""
    for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
        fields = line.split(" ")
        if fields[0] == mount_id:
            return fields[fields.index("-") + 1], fields[3]
    raise LookupError(mount_id)
