"""A run that leads itself: this machine as its leader, or as a member of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator

from keepstep.leader.leader import DUPLICATE, Leader
from keepstep.steps import EpochId, StepId, Tier
from keepstep.wire.reports import Pins
from keepstep_sidecar.concurrency import Changes
from keepstep_sidecar.config.sidecar import Config
from keepstep_sidecar.leader.host import OWN, Host
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
        self.refused: Callable[[], Iterable[str]] = tuple
        self._config, self._changes = config, changes
        self._life = os.urandom(8).hex()
        self._host: Host | None = None
        self._link: Link | None = None
        self._channel: OwnChannel | LinkChannel | None = None
        if config.node_rank == OWN:
            self._host = Host(self._leader(), changes)
            self.join = self._host.hub.join

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

    def channel(self, pinned: Collection[StepId], epoch: Callable[[], EpochId | None]) -> Channel:
        """How this machine reports. `pinned`: the steps on record here. `epoch`: see
        `leader_channel`."""
        options = {
            "life": self._life,
            "nodes": self._config.nodes,
            "changes": self._changes,
            "epoch": epoch,
            "pins": Pins(version=1, steps=tuple(sorted(pinned))) if pinned else Pins(),
        }
        assert self._config.leader is not None, "Config checks that"
        self._link = link = Link(
            self._config.leader,
            self.credentials,
            take=lambda frame: channel.take(frame),
            changed=self._changes.ring,
        )
        channel: OwnChannel | LinkChannel
        if self._host is not None:
            channel = OwnChannel(self._host, link, **options)
        else:
            channel = LinkChannel(link, **options)
        self._channel = channel
        return channel

    def pin(self, pinned: Collection[StepId]) -> None:
        """From now on these steps are pinned, on all machines."""
        if self._channel is not None:
            self._channel.pin(pinned)

    def warnings(self) -> Iterator[str]:
        """What keeps the machines of the run apart."""
        yield from self.refused()
        if self._host is not None:
            yield from self._host.warnings()
        if self._link is not None and self._link.reason and self._concerns(self._link.reason):
            yield self._link.reason

    def _concerns(self, reason: str) -> bool:
        """Whether a person has to mend it: node rank 0 need not find itself at --leader, but no
        other one may be there."""
        return self._host is None or DUPLICATE.partition(":")[0] in reason
