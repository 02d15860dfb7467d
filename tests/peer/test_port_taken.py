"""The port for peers is another process's: the trainer's, or another pod's."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from keepstep_sidecar.config.sidecar import PeerSettings
from keepstep_sidecar.tiers.peer.tier import PeerTier
from keepstep_sidecar.volume.volume import Volume, VolumeSet
from tests.harness import free_port, until
from tests.peer.authority import Authority, FileCredentials
from tests.volume.images import RUN


def _tier(tmp_path: Path, authority: Authority, *, port: int, by_hand: bool) -> PeerTier:
    files = authority.files(0)
    settings = PeerSettings(
        listen=f"127.0.0.1:{port}",
        advertise=f"10.0.0.7:{port}",
        fixed=by_hand,
    )
    volumes = VolumeSet([Volume(tmp_path / RUN, run=RUN)])
    return PeerTier(settings, volumes, run=RUN, credentials=FileCredentials(files))


async def test_another_port_is_used_and_reported_to_the_operator_if_the_peer_port_is_taken(
    tmp_path: Path, authority: Authority
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as trainer:
        port = trainer.getsockname()[1]
        tier = _tier(tmp_path, authority, port=port, by_hand=False)
        host, _, named_port = tier.address.rpartition(":")
        assert (host, named_port != str(port)) == ("10.0.0.7", True)
        assert f"Port {named_port} is used" in tier.warning
        assert "sidecar.ports.peer" in tier.warning
        socket.create_connection(("127.0.0.1", int(named_port))).close()
        await tier.close()


async def test_the_configured_peer_port_is_used_if_it_is_free(
    tmp_path: Path, authority: Authority
) -> None:
    port = free_port()
    tier = _tier(tmp_path, authority, port=port, by_hand=False)
    assert (tier.address, tier.warning) == (f"10.0.0.7:{port}", "")
    await tier.close()


async def test_a_taken_peer_port_is_used_once_it_is_free_if_peers_are_configured_statically(
    tmp_path: Path, authority: Authority
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as trainer:
        port = trainer.getsockname()[1]
        tier = _tier(tmp_path, authority, port=port, by_hand=True)
        running = asyncio.create_task(tier.run())
        assert tier.address == ""
        assert "peers are not served" in tier.warning
        assert "--peer-listen" in tier.warning
    await until(lambda: tier.address)
    assert (tier.address, tier.warning) == (f"10.0.0.7:{port}", "")
    running.cancel()
    await tier.close()
