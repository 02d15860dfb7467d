"""Certificates by which the pods of a run know each other. Their sidecars ask for them.

Of a request, only its public key gets into the certificate: namespace, run and node rank, or the
node of an agent, come from our own record of the pod. The authority differs from those of the
webhook and of the reports API: with a pod's certificate one can pose as that pod to its own run,
and nothing more. The authority is mounted, so that this process needs no right to read Secrets.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final
from urllib.parse import quote

from keepstep.wire.reports import AGENTS, CertificateRequest, IssuedCertificate
from keepstep_operator.api.model import AgentRecord, PodRecord
from keepstep_operator.journal import say
from keepstep_operator.reconcile.token_auth import Refused

LIFE: Final = timedelta(hours=24)
LARGEST_REQUEST: Final = 16_384
_CERTIFICATES: Final = ("tls.crt", "next.crt", "previous.crt")
"""The certificates in the Secret of an authority (`certificates.secrets`). All are trusted."""


class PeerCertificates:
    """Signs with the key in `directory`. It is read each time, because the kubelet replaces it."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory

    def issue(self, uri: str, request: CertificateRequest) -> IssuedCertificate:
        """A certificate for this identity. Raises Refused."""
        from keepstep_operator.certificates import peers  # large: only with peers

        if len(request.request) > LARGEST_REQUEST:
            raise Refused(400, "bad-request", "this is no certificate request")
        authority, bundle = self._read()
        try:
            signed = peers.sign(
                authority, request.request.encode(), uri=uri, now=datetime.now(UTC), life=LIFE
            )
        except ValueError as error:
            raise Refused(400, "bad-request", f"no usable certificate request: {error}") from error
        say("peer certificate signed", identity=uri)
        return IssuedCertificate(certificate=signed.decode(), authorities=bundle.decode())

    def _read(self) -> tuple[tuple[bytes, bytes], bytes]:
        if self._directory is None:
            raise Refused(503, "no-authority", "no authority for peers (--peer-ca-dir)")
        try:
            signer = (self._directory / "tls.crt").read_bytes()
            key = (self._directory / "tls.key").read_bytes()
            paths = (self._directory / name for name in _CERTIFICATES)
            bundle = b"".join(path.read_bytes() for path in paths if path.exists())
        except OSError as error:
            raise Refused(503, "no-authority", f"no authority for peers yet: {error}") from error
        return (signer, key), bundle


def of_pod(pod: PodRecord) -> str:
    """The identity of a pod's place that sidecars check:
    `keepstep://<namespace>/<run>/<node rank>`."""
    names = quote(pod.namespace, safe=""), quote(pod.run.name, safe="")
    return f"keepstep://{names[0]}/{names[1]}/{pod.node_rank}"


def of_agent(agent: AgentRecord) -> str:
    """The identity of the agent of a node, which no pod of a run can have."""
    return f"keepstep://{AGENTS}/{quote(agent.node, safe='')}/0"
