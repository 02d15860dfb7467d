"""How the machines of a run meet: their credentials, this one's port, the way to the leader."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator

from keepstep.errors import UsageError
from keepstep.leader.leader import DUPLICATE
from keepstep_sidecar.concurrency import ChangeNotifier
from keepstep_sidecar.config.sidecar import Config
from keepstep_sidecar.leader.host import Host
from keepstep_sidecar.leader.hub import Hub
from keepstep_sidecar.leader.link import LeaderConnection
from keepstep_sidecar.log import info, warn
from keepstep_sidecar.report.operator_reporter import OperatorReporter
from keepstep_sidecar.tiers.peer.secret import SecretCredentials, read_secret
from keepstep_sidecar.tiers.peer.tier import PeerTier
from keepstep_sidecar.tiers.peer.tls import IssuedCredentials, TlsContextSource
from keepstep_sidecar.volume.volume import VolumeSet


class PeerConnectionFactory:
    """The other machines of the run, as this one reaches them. `host`: that of the leader, if it is
    here. Raises UsageError."""

    def __init__(self, config: Config, host: Host | None) -> None:
        self._config = config
        self._reporting = config.reporting
        self._issued: IssuedCredentials | None = None
        self._credentials: TlsContextSource
        if self._reporting is not None:
            self._credentials = self._issued = IssuedCredentials(self._reporting)
            self._authorities = self._reporting.authorities()
        else:
            secret = read_secret(config.secret_file)
            self._credentials = SecretCredentials(secret, config.run, config.node_rank)
        self._hub: Hub | None = None
        if host is not None:
            self._hub = Hub(
                host.receive_member_frame,
                host.handle_disconnect,
                nodes=host.leader.nodes,
            )
        self._refused: Callable[[], Iterable[str]] = tuple
        self._link: LeaderConnection | None = None

    def build_peer_tier(self, volumes: VolumeSet) -> PeerTier:
        """The peer tier of this machine. It serves the leader's members, too."""
        config = self._config
        assert config.peer_settings is not None, "Config checks that"
        tier = PeerTier(
            config.peer_settings,
            volumes,
            run=config.run,
            credentials=self._credentials,
            keep_fresh=None if self._issued is None else self._issued.keep_fresh,
            join=None if self._hub is None else self._hub.join,
        )
        self._refused = tier.refused
        return tier

    def link(self, take: Callable[[bytes], None], changed: Callable[[], None]) -> LeaderConnection:
        """The connection to the leader. See `LeaderConnection`."""
        assert self._config.leader is not None, "Config checks that"
        self._link = LeaderConnection(
            self._config.leader, self._credentials, take=take, changed=changed
        )
        return self._link

    def operator_reporter(self, host: Host, changes: ChangeNotifier) -> OperatorReporter | None:
        """What reports the run to the operator; None without one."""
        if self._reporting is None:
            return None
        return OperatorReporter(
            self._reporting,
            host.leader,
            changes,
            answered=host.answered,
            follow=host.run_periodic_checks,
        )

    async def trust_authorities(self, authorities: str) -> None:
        """Trust these authorities of the operator from now on, in place of those known so far. A
        new authority signs only a day after it was announced, and the key of an old one may be in
        other hands."""
        if self._reporting is None or authorities in ("", self._authorities):
            return
        self._authorities = authorities
        try:
            await asyncio.to_thread(self._reporting.trust_authorities, authorities)
        except (UsageError, OSError) as error:
            warn("certificate.authorities_update_failed", error=str(error))
        else:
            info("certificate.authorities_updated")

    def warnings(self) -> Iterator[str]:
        """What keeps the machines of the run apart."""
        yield from self._refused()
        if self._link is not None and self._link.reason and self._concerns(self._link.reason):
            yield self._link.reason

    def _concerns(self, reason: str) -> bool:
        """Whether a person has to mend it: node rank 0 need not find itself at --leader, but no
        other one may be there."""
        return self._hub is None or DUPLICATE.partition(":")[0] in reason

    def close(self) -> None:
        """End the members' connections."""
        if self._hub is not None:
            self._hub.close()
