"""A sidecar gets a certificate for its own place in its run, whatever it asks for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from keepstep.errors import StorageError
from keepstep.wire.member_reports import CERTIFICATES_PATH, CertificateRequest, IssuedCertificate
from keepstep_operator.certificates.pki import make_authority, sign_request
from keepstep_operator.reconcile.peer_certificates import PeerCertificates
from keepstep_operator.reconcile.token_auth import RequestRefused
from keepstep_operator.tls_reload import ServerTls
from keepstep_sidecar.config.sidecar import OperatorAccess
from keepstep_sidecar.tiers.peer.tls import IssuedCredentials, PodIdentity
from tests.harness import until
from tests.operator.apiserver import ApiServer, bound_to
from tests.operator.reconcile.samples import pod_body, pod_path
from tests.operator.reconcile.serving import Served, serving

GOOD, AGENT, POSER = "good-token", "agent-token", "poser-token"
SYSTEM = "keepstep-system"


def request_of(
    key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey, *, uri: str = "keepstep://team/other/9"
) -> bytes:
    """A request that asks to be somebody else."""
    names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)])
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    signed = builder.add_extension(names, critical=False).sign(key, hashes.SHA256())
    return signed.public_bytes(serialization.Encoding.PEM)


@asynccontextmanager
async def playing(tmp_path: Path, *, ca: bool = True) -> AsyncIterator[Served]:
    cluster = ApiServer(
        tokens={
            GOOD: bound_to("team", "gpt-worker-0", "pod-0"),
            AGENT: bound_to(SYSTEM, "keepstep-agent-x", "agent-0"),
            POSER: bound_to("team", "keepstep-agent-y", "agent-1"),
        }
    )
    cluster.objects[pod_path("gpt-worker-0")] = pod_body(0)
    for name, namespace, uid in (("x", SYSTEM, "agent-0"), ("y", "team", "agent-1")):
        body = {
            "metadata": {
                "name": f"keepstep-agent-{name}",
                "namespace": namespace,
                "uid": uid,
                "resourceVersion": "1",
                "labels": {"keepstep.dev/agent": "true"},
            },
            "spec": {"nodeName": "node-7.zone"},
        }
        cluster.objects[pod_path(f"keepstep-agent-{name}", namespace)] = body
    authority = tmp_path / "peer-ca"
    authority.mkdir()
    if ca:
        made = make_authority("peers", now=datetime.now(UTC), life=timedelta(days=30))
        (authority / "tls.crt").write_bytes(made.certificate)
        (authority / "tls.key").write_bytes(made.key)
        old = make_authority("peers", now=datetime.now(UTC), life=timedelta(days=3))
        (authority / "ca.crt").write_bytes(made.certificate + old.certificate)
    more = {"host_paths": ("/mnt/nvme0",), "namespace": SYSTEM}
    async with serving(cluster, tmp_path, **more) as served:
        served.parts.reports._signing = PeerCertificates(authority)
        await until(lambda: not served.parts.why_not_ready(), what="policies and runs are listed")
        yield served


async def ask(served: Served, request: bytes, *, token: str = GOOD) -> tuple[int, bytes]:
    url = f"https://127.0.0.1:{served.port}{CERTIFICATES_PATH}"
    body = msgspec.json.encode(CertificateRequest(request=request.decode()))
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with served.session.post(url, data=body, headers=headers) as response:
        return response.status, await response.read()


async def test_the_certificate_contains_the_identity_of_the_pod_and_not_the_requested_name(
    tmp_path: Path,
) -> None:
    key = ec.generate_private_key(ec.SECP256R1())

    async with playing(tmp_path) as served:
        status, body = await ask(served, request_of(key))
        assert status == 200
        issued = msgspec.json.decode(body, type=IssuedCertificate)
        read = x509.load_pem_x509_certificate(issued.certificate.encode())
        assert _uris(issued) == ["keepstep://team/gpt-1a2b3c4d/0"]
        assert read.public_key() == key.public_key()
        assert read.not_valid_after_utc - datetime.now(UTC) <= timedelta(hours=24)
        current, previous = x509.load_pem_x509_certificates(issued.authorities.encode())
        read.verify_directly_issued_by(current)
        assert previous != current


def _uris(issued: IssuedCertificate) -> list[str]:
    read = x509.load_pem_x509_certificate(issued.certificate.encode())
    names = read.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return names.get_values_for_type(x509.UniformResourceIdentifier)


async def test_a_sidecar_obtains_a_certificate_that_is_valid_for_client_and_server(
    tmp_path: Path,
) -> None:
    async with playing(tmp_path) as served:
        (tmp_path / "token").write_text(GOOD)
        reporting = OperatorAccess(
            url=f"https://127.0.0.1:{served.port}",
            ca=(tmp_path / "tls.crt").read_text(),
            token_file=tmp_path / "token",
        )
        issued = IssuedCredentials(reporting)
        with pytest.raises(StorageError, match="issued no certificate"):
            issued.current()
        keeping = asyncio.create_task(issued.keep_fresh())
        try:
            await until(lambda: issued._tls, what="a certificate")
        finally:
            keeping.cancel()
        identity = issued.current().identity
        assert identity == PodIdentity(namespace="team", run="gpt-1a2b3c4d", node_rank=0)


async def test_only_a_real_agent_gets_a_certificate_with_the_name_of_its_node(
    tmp_path: Path,
) -> None:
    request = request_of(ec.generate_private_key(ec.SECP256R1()))
    async with playing(tmp_path) as served:
        status, body = await ask(served, request, token=AGENT)
        issued = msgspec.json.decode(body, type=IssuedCertificate)
        assert (status, _uris(issued)) == (200, [PodIdentity.for_agent_of_node("node-7.zone").uri])
        assert (await ask(served, request, token=POSER))[0] == 403
        assert (await served.post(b"{}", token=AGENT))[0] == 403, "it reports nothing"


@pytest.mark.parametrize("token", ["", "wrong"])
async def test_without_a_good_token_nothing_is_signed(tmp_path: Path, token: str) -> None:
    async with playing(tmp_path) as served:
        request = request_of(ec.generate_private_key(ec.SECP256R1()))
        assert (await ask(served, request, token=token))[0] == 401


@pytest.mark.parametrize("kind", ["nonsense", "rsa", "foreign key", "another curve"])
async def test_an_invalid_certificate_request_is_refused(tmp_path: Path, kind: str) -> None:
    chunk, other = (request_of(ec.generate_private_key(ec.SECP256R1())) for _ in range(2))
    requests = {
        "nonsense": b"-----BEGIN nothing",
        "rsa": request_of(rsa.generate_private_key(65537, 2048)),
        "another curve": request_of(ec.generate_private_key(ec.SECP521R1())),
        "foreign key": _with_signature_of(chunk, other),
    }

    async with playing(tmp_path) as served:
        status, body = await ask(served, requests[kind])
        assert (status, b"bad-request" in body) == (400, True)


async def test_a_request_larger_than_any_certificate_needs_is_not_read(tmp_path: Path) -> None:
    """Many of them at once would fill the reconciler."""

    async with playing(tmp_path) as served:
        status, body = await ask(served, b"x" * (512 << 10))
        assert (status, b"bad-request" in body) == (413, True)


def _with_signature_of(signed: bytes, other: bytes) -> bytes:
    """Bytes of `one` under the signature of `other`."""
    first, second = (x509.load_pem_x509_csr(text) for text in (signed, other))
    der = first.public_bytes(serialization.Encoding.DER)
    forged = bytearray(der)
    at = der.index(first.tbs_certrequest_bytes) + 60
    assert first.signature != second.signature
    forged[at] ^= 1
    try:
        return x509.load_der_x509_csr(bytes(forged)).public_bytes(serialization.Encoding.PEM)
    except ValueError:
        return b"-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----\n"


async def test_a_signing_request_without_a_configured_authority_returns_503(tmp_path: Path) -> None:
    async with playing(tmp_path, ca=False) as served:
        request = request_of(ec.generate_private_key(ec.SECP256R1()))
        status, body = await ask(served, request)
        assert (status, b"no-authority" in body) == (503, True)


def test_no_certificate_is_signed_while_key_and_certificate_of_the_authority_do_not_match(
    tmp_path: Path,
) -> None:
    """The kubelet replaces the two files of a Secret while they are read; or a person has."""
    now, life = datetime.now(UTC), timedelta(days=30)
    old, new = (make_authority("peers", now=now, life=life) for _ in range(2))
    (tmp_path / "ca.crt").write_bytes(old.certificate + new.certificate)
    (tmp_path / "tls.crt").write_bytes(old.certificate)
    (tmp_path / "tls.key").write_bytes(old.key)
    signing = PeerCertificates(tmp_path)
    tls = ServerTls(signing.issue_reports_api_certificate("reports.svc"))
    request = CertificateRequest(
        request=request_of(ec.generate_private_key(ec.SECP256R1())).decode()
    )
    for broken in (new.certificate, b"nonsense"):
        (tmp_path / "tls.crt").write_bytes(broken)
        assert not tls.reload()
        with pytest.raises(RequestRefused, match="do not fit together"):
            signing.issue_certificate("keepstep://a/b/0", request)
    (tmp_path / "tls.crt").write_bytes(new.certificate)
    (tmp_path / "tls.key").write_bytes(new.key)
    assert tls.reload()
    signed = signing.issue_certificate("keepstep://a/b/0", request).certificate.encode()
    leaf, issuer = map(x509.load_pem_x509_certificate, (signed, new.certificate))
    leaf.verify_directly_issued_by(issuer)


def test_a_certificate_does_not_outlive_its_authority() -> None:
    now = datetime.now(UTC)
    made = make_authority("peers", now=now, life=timedelta(hours=2))
    request = request_of(ec.generate_private_key(ec.SECP256R1()))
    signed = sign_request(
        made,
        request,
        uri="keepstep://a/b/0",
        now=now,
        life=timedelta(days=1),
    )
    ends = x509.load_pem_x509_certificate(signed).not_valid_after_utc
    assert ends <= now + timedelta(hours=2)
