"""A run that leads itself: this machine as its leader, or as a member of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from keepstep.leader.leader import Leader
from keepstep.steps import EpochId, Tier
from keepstep.wire.reports import Pins
from keepstep_sidecar.concurrency import Changes
from keepstep_sidecar.config.sidecar import Config
from keepstep_sidecar.leader.host import OWN, Host
from keepstep_sidecar.leader.hub import Hub
from keepstep_sidecar.leader.link import Link
from keepstep_sidecar.report.leader_channel import LinkChannel, OwnChannel
from keepstep_sidecar.report.reporter import Channel
from keepstep_sidecar.tiers.peer.secret import SecretCredentials, read_secret
from keepstep_sidecar.tiers.peer.server import Join


class Led:
    """The leader of the run if this is node rank 0, or the connection to it. `join`: takes members'
    connections; None if this is not the leader. Raises UsageError."""

    def __init__(self, config: Config, changes: Changes) -> None:
        secret = read_secret(config.secret_file)
        self.credentials = SecretCredentials(secret, config.run, config.node_rank)
        self.join: Join | None = None
        self._config, self._changes = config, changes
        self._life = os.urandom(8).hex()
        self._host: Host | None = None
        self._link: Link | None = None
        if config.node_rank == OWN:
            self._host = Host(self._leader(), changes)
            hub = Hub(self._host.take, self._host.gone, nodes=config.nodes)
            self._host.connect(hub)
            self.join = hub.join

    def _leader(self) -> Leader:
        config = self._config
        archive = (Tier.ARCHIVE,) if config.archive is not None else ()
        return Leader(
            life=self._life,
            nodes=config.nodes,
            keep=config.retention,
            beyond=(Tier.PEER, *archive),
            replicas=config.peer_replicas,
        )

    def channel(self, pins: Pins, epoch: Callable[[], EpochId | None]) -> Channel:
        """How this machine reports. `pins`: those on record here. `epoch`: see `leader_channel`."""
        options = {
            "life": self._life,
            "nodes": self._config.nodes,
            "changes": self._changes,
            "epoch": epoch,
            "pins": pins,
        }
        if self._host is not None:
            return OwnChannel(self._host, **options)
        assert self._config.leader is not None, "Config checks that"
        self._link = link = Link(
            self._config.leader,
            self.credentials,
            take=lambda frame: channel.take(frame),
            changed=self._changes.ring,
        )
        channel = LinkChannel(link, **options)
        return channel

    def warnings(self) -> Iterable[str]:
        """What keeps the machines of the run apart."""
        if self._host is not None:
            return self._host.warnings()
        if self._link is not None and not self._link.connected:
            return (self._link.reason,)
        return ()
