"""Certificates by which the pods of a run know each other, and by which they know the reports API.

Of a request, only its public key gets into the certificate: namespace, run and node rank, or the
node of an agent, come from our own record of the pod. With a pod's certificate one can pose as that
pod to its own run, and nothing more; it has no DNS name. The authority is mounted, so that this
process needs no right to read Secrets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final
from urllib.parse import quote

from keepstep.wire.member_reports import AGENTS, CertificateRequest, IssuedCertificate
from keepstep_operator.api.cluster_objects import AgentRecord, PodRecord
from keepstep_operator.certificates.pki import (
    KeyPair,
    certificate_validity,
    is_matching_pair,
    sign_request,
    sign_server,
)
from keepstep_operator.log import info
from keepstep_operator.reconcile.token_auth import RequestRefused
from keepstep_operator.tls_reload import Shown, read_mounted_pair

LIFE: Final = timedelta(hours=24)
LARGEST_REQUEST: Final = 16_384


class PeerCertificates:
    """Signs with the key in `directory`. It is read each time, because the kubelet replaces it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @property
    def authorities(self) -> str:
        """PEM of all that clients must trust. Raises RequestRefused."""
        with _needed():
            return (self._directory / "ca.crt").read_text()

    def issue_certificate(self, uri: str, request: CertificateRequest) -> IssuedCertificate:
        """A certificate for this identity. Raises RequestRefused."""
        if len(request.request) > LARGEST_REQUEST:
            raise RequestRefused(400, "bad-request", "this is no certificate request")
        bundle, text, now = self.authorities, request.request.encode(), datetime.now(UTC)
        with _needed():
            authority = self._authority()
        try:
            signed = sign_request(authority, text, uri=uri, now=now, life=LIFE)
        except ValueError as error:
            raise RequestRefused(
                400, "bad-request", f"no usable certificate request: {error}"
            ) from error
        info("certificate.signed", identity=uri)
        return IssuedCertificate(certificate=signed.decode(), authorities=bundle)

    def issue_reports_api_certificate(self, *names: str) -> Callable[[], Shown]:
        """What the reports API shows, for these DNS names: it is signed anew with each authority,
        and when two thirds of its life are over."""
        signed: dict[bytes, Shown] = {}

        def shown() -> Shown:
            authority, now = self._authority(), datetime.now(UTC)
            known = signed.get(authority.certificate)
            if known is None or certificate_validity(known[0]).is_due(now):
                made = sign_server(authority, names, now=now, life=LIFE)
                signed.clear()
                known = signed[authority.certificate] = made.certificate, made.key
            return known

        return shown

    def _authority(self) -> KeyPair:
        """Raises OSError if there is none, or if one of its files was replaced and the other not
        yet: what is signed by half of each, nobody accepts."""
        certificate, key = read_mounted_pair(self._directory)
        authority = KeyPair(certificate=certificate, key=key)
        if not is_matching_pair(authority):
            raise OSError(f"certificate and key in {self._directory} do not fit together")
        return authority


@contextmanager
def _needed() -> Iterator[None]:
    """Who asks is refused while there is no authority."""
    try:
        yield
    except OSError as error:
        raise RequestRefused(503, "no-authority", f"no authority for peers yet: {error}") from error


def pod_identity(pod: PodRecord) -> str:
    """The identity of a pod's place that sidecars check:
    `keepstep://<namespace>/<run>/<node rank>`."""
    names = quote(pod.namespace, safe=""), quote(pod.run.name, safe="")
    return f"keepstep://{names[0]}/{names[1]}/{pod.node_rank}"


def agent_identity(agent: AgentRecord) -> str:
    """The identity of the agent of a node, which no pod of a run can have."""
    return f"keepstep://{AGENTS}/{quote(agent.node, safe='')}/0"
