"""The page of one run in a pod: on a socket that the sidecar listens on, until it is not used.

All containers of the pod reach the pod's loopback; on the host's network, all of the node do. So
the page asks for a secret, which is the pod's UID: `kubectl keepstep ui` reads it from the API.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import Callable
from typing import Final

from aiohttp import web

from keepstep_sidecar.ui.access import Access
from keepstep_sidecar.ui.server import serving
from keepstep_sidecar.ui.view import RunPage

SECRET: Final = "KEEPSTEP_UI_SECRET"
_UNUSED_S: Final = 30.0
_LEAST_NICE: Final = 19
_MEMORY_BYTES: Final = 160 << 20
"""The sidecar's memory limit counts for the page, too: rather the page fails than the sidecar."""


async def serve(
    fd: int, run: str, *, read: Callable[[str], RunPage], text: Callable[[str], str]
) -> None:
    """Serve the page of `run` on the listening socket `fd`. Returns when it had no connection for
    half a minute. `read`, `text`: see `serving`."""
    os.nice(_LEAST_NICE)
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
    access = Access("kubectl keepstep ui", secret=os.environ.get(SECRET, ""))
    place = f"pod {socket.gethostname()}"
    async with serving(
        socket.socket(fileno=fd), access, place=place, names=lambda: (run,), read=read, text=text
    ) as server:
        await _unused(server)


async def _unused(server: web.Server) -> None:
    unused_s = 0.0
    while unused_s < _UNUSED_S:
        await asyncio.sleep(1.0)
        unused_s = 0.0 if server.connections else unused_s + 1.0
