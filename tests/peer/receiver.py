"""A buddy as a process of its own, for tests that kill it: `receiver.py DRIVES RANK CERT KEY CA`.

Prints its address and then serves until it is killed.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests.peer.authority import Files
from tests.peer.nodes import Node, running


async def main() -> None:
    drives, rank, certificate, key, authorities = sys.argv[1:]
    files = Files(certificate=Path(certificate), key=Path(key), authorities=Path(authorities))
    node = Node(Path(drives), int(rank), files)
    node.knows()
    async with running(node):
        print(node.address, flush=True)
        await asyncio.Event().wait()


asyncio.run(main())
