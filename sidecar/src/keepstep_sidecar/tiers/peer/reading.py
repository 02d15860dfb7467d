"""Lists shards at the peers of a static list, for a command. It keeps no copies for others."""

from __future__ import annotations

import asyncio

from keepstep.errors import KeepstepError
from keepstep_sidecar.config.sidecar import PeerSettings
from keepstep_sidecar.tiers.peer.client import Calls, Links, PeerSource
from keepstep_sidecar.tiers.peer.protocol import Listing
from keepstep_sidecar.tiers.peer.tls import FileCredentials

_LOOK_TIMEOUT_S = 10.0


async def look(settings: PeerSettings, *, run: str) -> tuple[list[PeerSource], tuple[str, ...]]:
    """All that the peers hold, and which peers do not answer and why. If the operator names the
    peers and signs for them, none of them can be asked from here."""
    if settings.files is None:
        return [], ("peers, as only the sidecar has a certificate for them",)
    credentials = FileCredentials(settings.files)
    calls = Calls(credentials)
    found: list[PeerSource] = []
    silent: list[str] = []

    async def ask(address: str) -> None:
        try:
            async with asyncio.timeout(_LOOK_TIMEOUT_S):
                listing = await calls.run(_listing, address)
        except (KeepstepError, TimeoutError) as error:
            silent.append(f"{address} ({error or 'no answer in time'})")
            return
        found.extend(
            PeerSource(
                shard=one.shard(one.rank),
                address=address,
                expected=None,
                run=run,
                credentials=credentials,
                received=lambda size_bytes, seconds: None,
            )
            for one in listing.shards
        )

    try:
        await asyncio.gather(*map(ask, settings.peers))
    finally:
        calls.close()
    return found, tuple(silent)


def _listing(links: Links) -> Listing:
    with links.taken() as link:
        return link.listing()
