"""A run that leads itself: this machine as its leader, or as a member of it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Iterable, Iterator

from keepstep.errors import UsageError
from keepstep.leader.leader import DUPLICATE, Leader
from keepstep.steps import EpochId, StepId
from keepstep.wire.reports import MemberReport, Pins, Report
from keepstep.wire.runs import RunPolicy
from keepstep_sidecar.concurrency import Changes, Tasks
from keepstep_sidecar.config.sidecar import Config, OnLoss
from keepstep_sidecar.leader.host import OWN, Host
from keepstep_sidecar.leader.link import Link
from keepstep_sidecar.log import say, warn
from keepstep_sidecar.report.leader_channel import LinkChannel, OwnChannel
from keepstep_sidecar.report.operator_reporter import OperatorReporter
from keepstep_sidecar.report.reporter import Channel
from keepstep_sidecar.tiers.peer.secret import SecretCredentials, read_secret
from keepstep_sidecar.tiers.peer.server import Join
from keepstep_sidecar.tiers.peer.tier import PeerTier
from keepstep_sidecar.tiers.peer.tls import Credentials, IssuedCredentials
from keepstep_sidecar.volume.volume import VolumeSet


class Led:
    """The leader of the run if this is node rank 0, or the connection to it. Raises UsageError."""

    def __init__(self, config: Config, changes: Changes) -> None:
        self._config, self._changes = config, changes
        self._reporting = config.reporting
        self._issued: IssuedCredentials | None = None
        self._credentials: Credentials
        if self._reporting is not None:
            self._credentials = self._issued = IssuedCredentials(self._reporting)
            self._authorities = self._reporting.authorities()
        else:
            secret = read_secret(config.secret_file)
            self._credentials = SecretCredentials(secret, config.run, config.node_rank)
        self._refused: Callable[[], Iterable[str]] = tuple
        self._life = os.urandom(8).hex()
        self._join: Join | None = None
        self._host: Host | None = None
        self._link: Link | None = None
        self._channel: OwnChannel | LinkChannel | None = None
        self._reporter: OperatorReporter | None = None
        if config.node_rank == OWN:
            self._host = Host(self._leader(), changes)
            self._join = self._host.hub.join
        if self._host is not None and self._reporting is not None:
            self._reporter = OperatorReporter(
                self._reporting,
                self._host.leader,
                changes,
                answered=self._host.answered,
                follow=self._host.follow,
            )

    def start(self, tasks: Tasks) -> None:
        """Begin to report the run, if this is its leader and there is an operator."""
        if self._reporter is not None:
            tasks.keep(self._reporter.run, "report the run")

    def _leader(self) -> Leader:
        config, archive = self._config, self._config.archive_config
        return Leader(
            life=self._life,
            nodes=None if config.reporting is not None else config.nodes,
            run=config.run,
            way_out=config.way_out,
            grid=config.persist_base,
            policy=RunPolicy(
                keep=config.retention,
                outlives_pod=False,
                replicas=config.peer_replicas,
                persist_every=config.persist_every,
                archive_every=archive.every if archive is not None else None,
                restarts=config.on_loss is OnLoss.RESTART,
            ),
        )

    def peers(self, volumes: VolumeSet) -> PeerTier:
        """The peer tier of this machine. It serves the leader's members, too."""
        config = self._config
        assert config.peer_settings is not None, "Config checks that"
        tier = PeerTier(
            config.peer_settings,
            volumes,
            run=config.run,
            credentials=self._credentials,
            keep_fresh=None if self._issued is None else self._issued.keep_fresh,
            join=self._join,
        )
        self._refused = tier.refused
        return tier

    def channel(
        self,
        pinned: Collection[StepId],
        epoch: Callable[[], EpochId | None],
        leaves: Callable[[], bool],
    ) -> Channel:
        """How this machine reports. `pinned`: the steps on record here. `epoch`, `leaves`: see
        `leader_channel`."""
        config = self._config
        options = {
            "told": MemberReport(
                life=self._life,
                nodes=config.nodes if self._reporting is None else 0,
                report=Report(sidecar="", started_at=0.0, sequence=0),
                pins=Pins(version=1, steps=tuple(sorted(pinned))) if pinned else Pins(),
                pod=config.pod,
                node=config.node,
            ),
            "changes": self._changes,
            "epoch": epoch,
            "leaves": leaves,
        }
        assert config.leader is not None, "Config checks that"
        self._link = link = Link(
            config.leader,
            self._credentials,
            take=lambda frame: channel.take(frame),
            changed=self._changes.ring,
        )
        channel: OwnChannel | LinkChannel
        if self._host is not None:
            last = None if self._reporter is None else self._reporter.last
            channel = OwnChannel(self._host, link, last=last, **options)
        else:
            channel = LinkChannel(link, **options)
        self._channel = channel
        return channel

    def pin(self, pinned: Collection[StepId]) -> None:
        """From now on these steps are pinned, on all machines."""
        if self._channel is not None:
            self._channel.pin(pinned)

    async def learn(self, authorities: str) -> None:
        """Trust these authorities of the operator from now on, in place of those known so far. A
        new authority signs only a day after it was announced, and the key of an old one may be in
        other hands."""
        if self._reporting is None or authorities in ("", self._authorities):
            return
        self._authorities = authorities
        try:
            await asyncio.to_thread(self._reporting.learn, authorities)
        except (UsageError, OSError) as error:
            warn("authorities of the operator not taken over", reason=str(error))
        else:
            say("authorities of the operator taken over")

    def warnings(self) -> Iterator[str]:
        """What keeps the machines of the run apart."""
        yield from self._refused()
        if self._host is not None:
            yield from self._host.warnings()
        if self._link is not None and self._link.reason and self._concerns(self._link.reason):
            yield self._link.reason

    def _concerns(self, reason: str) -> bool:
        """Whether a person has to mend it: node rank 0 need not find itself at --leader, but no
        other one may be there."""
        return self._host is None or DUPLICATE.partition(":")[0] in reason
