"""The authority of sidecars' certificates is kept with the rights that the chart gives."""

from __future__ import annotations

from datetime import UTC, datetime

from keepstep_operator.certificates.keeper import Server
from keepstep_operator.certificates.peers import AuthorityKeeper, published_with_certificates
from keepstep_operator.certificates.rotation import Lifetimes
from keepstep_operator.kube import SECRETS, Client
from tests.operator.apiserver import ApiServer
from tests.operator.certificates.test_keeper import LIFETIMES, NAMESPACE


async def test_no_secret_but_its_own_is_asked_for() -> None:
    async with ApiServer().running() as server, Client(server.access) as client:
        await _keeper(client, LIFETIMES).round()
        assert server.take(SECRETS, "keepstep-peers-ca", namespace=NAMESPACE)["data"]
        asked = {path.rpartition("/")[2] for _, path in server.calls() if "/secrets/" in path}
        assert asked == {"keepstep-peers-ca"}


def _keeper(client: Client, lifetimes: Lifetimes) -> AuthorityKeeper:
    served = Server(
        service="keepstep-peers", publish=published_with_certificates, lifetimes=lifetimes
    )
    return AuthorityKeeper(
        client, served, namespace=NAMESPACE, clock=lambda: datetime(2026, 1, 1, tzinfo=UTC)
    )
