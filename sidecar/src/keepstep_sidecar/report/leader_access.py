"""How a run is led: this machine as its leader, or as a member of it.

A machine alone leads a run of one: it has no port, no secret and no certificate, and what other
machines need is not even imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

from keepstep.core.ledger import Alarm
from keepstep.leader.leader import Leader
from keepstep.steps import EpochId, StepId
from keepstep.wire.member_reports import MemberReport, PinnedSteps, Report
from keepstep.wire.run_reports import RunPolicy
from keepstep_sidecar.concurrency import ChangeNotifier, Tasks
from keepstep_sidecar.config.sidecar import Config, OnLoss
from keepstep_sidecar.leader.host import OWN, Host
from keepstep_sidecar.report.leader_channel import Channel, LinkChannel, OwnChannel

if TYPE_CHECKING:
    from keepstep_sidecar.report.operator_reporter import OperatorReporter
    from keepstep_sidecar.report.peer_network import PeerConnectionFactory


class LeaderAccess:
    """The leader of the run if this is node rank 0, or the connection to it. `machines`: how the
    others are met; None where there are none. Raises UsageError."""

    def __init__(self, config: Config, changes: ChangeNotifier) -> None:
        self._config, self._changes = config, changes
        self._life = os.urandom(8).hex()
        self._host = Host(self._leader(), changes) if config.node_rank == OWN else None
        self.machines = _machines(config, self._host)
        self._reporter: OperatorReporter | None = None
        if self._host is not None and self.machines is not None:
            self._reporter = self.machines.operator_reporter(self._host, changes)
        self._channel: Channel | None = None

    def start(self, tasks: Tasks, alarmed: Callable[[Alarm], None]) -> None:
        """If this is the leader: begin to report the run to the operator, or without one, give
        `alarmed` what a person should look at."""
        if self._reporter is not None:
            tasks.spawn_with_retries(self._reporter.run, "report the run")
        elif self._host is not None:
            self._host.alarmed = alarmed

    def _leader(self) -> Leader:
        config, archive = self._config, self._config.archive_config
        return Leader(
            life=self._life,
            nodes=None if config.reporting is not None else config.nodes,
            run=config.run,
            way_out=config.fresh_start_command,
            grid=config.persist_grid_interval,
            policy=RunPolicy(
                keep=config.retention,
                outlives_pod=False,
                replicas=config.peer_replicas,
                persist_every=config.persist_every,
                archive_every=archive.every if archive is not None else None,
                restarts=config.on_loss is OnLoss.RESTART,
            ),
        )

    def channel(
        self,
        pinned: Collection[StepId],
        epoch: Callable[[], EpochId | None],
        leaves: Callable[[], bool],
    ) -> Channel:
        """How this machine reports. `pinned`: the steps on record here. `epoch`, `leaves`: see
        `leader_channel`."""
        config = self._config
        options: dict[str, Any] = {
            "frame": MemberReport(
                life=self._life,
                nodes=config.nodes if config.reporting is None else 0,
                report=Report(sidecar="", started_at=0.0, sequence=0),
                pins=PinnedSteps(version=1, steps=tuple(sorted(pinned)))
                if pinned
                else PinnedSteps(),
                pod=config.pod,
                node=config.node,
            ),
            "changes": self._changes,
            "epoch": epoch,
            "leaves": leaves,
        }
        link = None
        if self.machines is not None:
            link = self.machines.link(lambda frame: channel.handle_frame(frame), self._changes.ring)
        channel: Channel
        if self._host is not None:
            channel = OwnChannel(self._host, link, last=self._last, **options)
        else:
            assert link is not None, "a member has a leader elsewhere"
            channel = LinkChannel(link, **options)
        self._channel = channel
        return channel

    async def _last(self) -> None:
        if self._reporter is not None:
            await self._reporter.report_shutdown()
        if self.machines is not None:
            self.machines.close()

    def set_pins(self, pinned: Collection[StepId]) -> None:
        """From now on these steps are pinned, on all machines."""
        if self._channel is not None:
            self._channel.set_pins(pinned)

    async def trust_authorities(self, authorities: str) -> None:
        """See `PeerConnectionFactory.trust_authorities`."""
        if self.machines is not None:
            await self.machines.trust_authorities(authorities)

    def warnings(self) -> Iterator[str]:
        """What keeps the machines of the run apart."""
        if self.machines is not None:
            yield from self.machines.warnings()
        if self._host is not None:
            yield from self._host.warnings()


def _machines(config: Config, host: Host | None) -> PeerConnectionFactory | None:
    if config.alone:
        return None
    from keepstep_sidecar.report.peer_network import PeerConnectionFactory

    return PeerConnectionFactory(config, host)
