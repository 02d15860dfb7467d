"""What a trainer says first, checked: which protocol it speaks, and how its images look. Pure."""

from __future__ import annotations

import base64
import binascii

from keepstep.errors import ImageError
from keepstep.image import Layout
from keepstep.protocol import PROTOCOL_MAX, PROTOCOL_MIN, LeaseRequest
from keepstep_sidecar import __version__
from keepstep_sidecar.problems import refuse

LARGEST_WORLD = 65536
"""As the operator takes it in a report."""


def common_version(request: LeaseRequest) -> int:
    """The newest protocol that both sides speak. Raises SidecarError `protocol`."""
    version = min(PROTOCOL_MAX, request.protocol_max)
    if version < max(PROTOCOL_MIN, request.protocol_min):
        raise refuse(
            "protocol",
            f"the library {request.library} speaks protocol {request.protocol_min} to"
            f" {request.protocol_max}, this sidecar ({__version__}) {PROTOCOL_MIN} to"
            f" {PROTOCOL_MAX}: bring both within two minor versions of each other",
        )
    return version


def check_rank(request: LeaseRequest) -> None:
    """Raises SidecarError `bad-request` for a rank that no world has: directories and images are
    named by it."""
    if not 0 <= request.rank < request.world <= LARGEST_WORLD:
        raise refuse(
            "bad-request",
            f"rank {request.rank} of {request.world} cannot be: ranks begin at 0 and end below the"
            f" world size, which is at most {LARGEST_WORLD}",
        )


def parse_layout(header: str) -> Layout:
    """A layout from its header in base64. Raises SidecarError `bad-image`."""
    try:
        data = base64.b64decode(header, validate=True)
        return Layout.parse(memoryview(data))
    except (binascii.Error, ImageError) as error:
        raise refuse("bad-image", f"the layout's header is not valid: {error}") from error
