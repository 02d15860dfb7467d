"""Certificates that real TLS clients accept, their timeline, and what keeps them in a cluster."""

from __future__ import annotations

import base64
import os
import re
import socket
import ssl
import sys
import tempfile
import threading
from asyncio import create_subprocess_exec, subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from keepstep_operator.certificates.keeper import CertificateKeeper, KeptCertificate
from keepstep_operator.certificates.pki import (
    KeyPair,
    Validity,
    certificate_validity,
    is_matching_pair,
    make_authority,
    make_server,
    sign_request,
    sign_server,
    split_bundle,
)
from keepstep_operator.certificates.ring import CertificateRing, RingAction, due_move
from keepstep_operator.kube.client import KubeClient
from keepstep_operator.kube.errors import KubeError
from keepstep_operator.kube.resources import SECRETS, WEBHOOKS
from tests.certificates import pem_of
from tests.operator.apiserver import ApiServer

DAY = timedelta(days=1)
NAMES = ("keepstep-reports.keepstep-system.svc",)


def _now() -> datetime:
    return datetime.now(UTC)


@pytest.fixture(scope="module")
def authority() -> KeyPair:
    return make_authority("keepstep-peers", now=_now(), life=3650 * DAY)


@pytest.fixture(scope="module")
def leaf(authority: KeyPair) -> KeyPair:
    return sign_server(authority, NAMES, now=_now(), life=DAY)


def test_strict_x509_verification_accepts_self_signed_and_ca_signed_certificates(
    authority: KeyPair, leaf: KeyPair
) -> None:
    """Python 3.13 verifies so by default (RFC 5280: key identifiers, critical extensions)."""
    alone = make_server(NAMES, now=_now(), life=90 * DAY)
    for pair, bundle in ((leaf, authority.certificate), (alone, alone.certificate)):
        message = shakes_hands(pair, bundle=bundle, name=NAMES[0], flags=ssl.VERIFY_X509_STRICT)
        assert message == ""


def test_another_name_or_another_authority_is_refused(authority: KeyPair, leaf: KeyPair) -> None:
    message = shakes_hands(leaf, bundle=authority.certificate, name="kubernetes.default.svc")
    assert "Hostname mismatch" in message
    other = make_authority("keepstep-peers", now=_now(), life=DAY)
    assert shakes_hands(leaf, bundle=other.certificate, name=NAMES[0]) != ""


def test_a_server_that_signs_itself_cannot_sign_another() -> None:
    alone = make_server(NAMES, now=_now(), life=DAY)
    with pytest.raises(Exception, match="SubjectKeyIdentifier"):
        sign_server(alone, ("evil.svc",), now=_now(), life=DAY)


def test_a_pod_cannot_pose_as_the_server_of_the_same_authority(authority: KeyPair) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    names = x509.SubjectAlternativeName([x509.DNSName(NAMES[0])])
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, NAMES[0])])
    asked = x509.CertificateSigningRequestBuilder().subject_name(name)
    request = asked.add_extension(names, critical=False).sign(key, hashes.SHA256())
    signed = sign_request(
        authority,
        request.public_bytes(serialization.Encoding.PEM),
        uri="keepstep://a/b/0",
        now=_now(),
        life=DAY,
    )
    pod = KeyPair(certificate=signed, key=pem_of(key))
    assert is_matching_pair(pod)
    assert "mismatch" in shakes_hands(pod, bundle=authority.certificate, name=NAMES[0])


def test_a_clock_that_is_an_hour_behind_accepts_a_new_leaf(leaf: KeyPair) -> None:
    assert certificate_validity(leaf.certificate).begins < _now() - timedelta(hours=1)


def test_a_leaf_does_not_outlive_its_authority() -> None:
    authority = make_authority("short", now=_now(), life=DAY)
    leaf = sign_server(authority, NAMES, now=_now(), life=90 * DAY)
    assert (
        certificate_validity(leaf.certificate).ends
        <= certificate_validity(authority.certificate).ends
    )


def test_authorities_with_the_same_name_are_distinguished() -> None:
    pair, two = (make_authority("same", now=_now(), life=DAY) for _ in range(2))
    leaf = sign_server(pair, NAMES, now=_now(), life=DAY)
    bundle = two.certificate + pair.certificate
    assert shakes_hands(leaf, bundle=bundle, name=NAMES[0]) == ""
    assert split_bundle(bundle) == (two.certificate, pair.certificate)


def test_a_certificate_matches_only_its_own_key(authority: KeyPair, leaf: KeyPair) -> None:
    assert is_matching_pair(leaf)
    assert not is_matching_pair(KeyPair(certificate=leaf.certificate, key=authority.key))
    assert not is_matching_pair(KeyPair(certificate=b"", key=leaf.key))
    assert not is_matching_pair(KeyPair(certificate=leaf.certificate, key=b"nonsense"))


def test_an_unreadable_certificate_is_refused() -> None:
    assert split_bundle(b"nonsense") == ()
    assert split_bundle(b"") == ()
    with pytest.raises(ValueError, match="PEM"):
        certificate_validity(b"nonsense")


# The timeline of a ring: a clock is passed in, and whole lives go by.


START = datetime(2026, 1, 1, tzinfo=UTC)
OVERLAP = 30 * DAY


def _made(begin: datetime = START) -> KeyPair:
    return make_authority("a", now=begin, life=3650 * DAY)


def test_an_expired_certificate_is_replaced_at_once() -> None:
    after, old = START + 3651 * DAY, _made()
    assert due_move(CertificateRing(used=old), now=after, overlap=OVERLAP) is RingAction.BEGIN
    newer = CertificateRing(used=old, next=_made(after - DAY))
    assert due_move(newer, now=after, overlap=OVERLAP) is RingAction.PROMOTE
    assert (
        due_move(CertificateRing(used=old, next=_made()), now=after, overlap=OVERLAP)
        is RingAction.BEGIN
    )


def test_a_rotation_of_the_certificate_can_be_requested() -> None:
    asked = CertificateRing(used=_made(), asked=True)
    assert due_move(asked, now=START + DAY, overlap=OVERLAP) is RingAction.ADD_NEXT
    rotating = CertificateRing(used=_made(), next=_made(START), asked=True)
    assert due_move(rotating, now=START + DAY, overlap=OVERLAP) is RingAction.NONE


# Rounds against an API server, with a clock that is turned by years: at every moment each
# client that learned of a bundle within the overlap accepts what is in use.


Body = dict[str, Any]
NAMESPACE = "keepstep-system"
SECRET = "keepstep-admission-tls"
NAME = f"keepstep-admission.{NAMESPACE}.svc"


@dataclass
class Clock:
    now: datetime

    def __call__(self) -> datetime:
        return self.now


@dataclass(kw_only=True)
class Running:
    """A keeper of the webhook's certificate, its clock, and the cluster it writes to."""

    server: ApiServer
    keeper: CertificateKeeper
    clock: Clock

    async def after(self, time: timedelta) -> Validity:
        """Turn the clock, and do a round."""
        self.clock.now += time
        return await self.keeper.round()

    def secret(self) -> dict[str, bytes]:
        body = self.server.take(SECRETS, SECRET, namespace=NAMESPACE)
        return {name: base64.b64decode(value) for name, value in body["data"].items()}

    @property
    def shown(self) -> KeyPair:
        secret = self.secret()
        return KeyPair(certificate=secret["tls.crt"], key=secret["tls.key"])

    @property
    def published(self) -> bytes:
        return base64.b64decode(self._client_config["caBundle"])

    @property
    def path(self) -> str:
        return str(self._client_config["service"].get("path"))

    @property
    def _client_config(self) -> Body:
        (webhook,) = self.server.take(WEBHOOKS, "keepstep")["webhooks"]
        found: Body = webhook["clientConfig"]
        return found


@asynccontextmanager
async def _running(*, at: datetime | None = None) -> AsyncIterator[Running]:
    async with ApiServer().running() as server, KubeClient(server.access) as client:
        server.put(WEBHOOKS, _webhook())
        clock = Clock(at or datetime(2020, 1, 1, tzinfo=UTC))
        kept = KeptCertificate(
            secret=SECRET, life=3650 * DAY, overlap=OVERLAP, names=(NAME,), webhook="keepstep"
        )
        keeper = CertificateKeeper(client, kept, namespace=NAMESPACE, clock=clock)
        yield Running(server=server, keeper=keeper, clock=clock)


def _webhook() -> Body:
    webhook = {"name": "inject", "clientConfig": {"service": {"name": "keepstep-admission"}}}
    return {"metadata": {"name": "keepstep"}, "webhooks": [webhook]}


async def test_the_first_round_creates_a_certificate_that_a_real_tls_client_accepts() -> None:
    async with _running(at=datetime.now(UTC)) as kept:
        await kept.after(timedelta())
        assert shakes_hands(kept.shown, bundle=kept.published, name=NAME) == ""
        assert kept.secret()["ca.crt"] == kept.published
        body = kept.server.take(SECRETS, SECRET, namespace=NAMESPACE)
        assert body["type"] == "kubernetes.io/tls"


async def test_over_ten_years_every_client_accepts_every_server_within_the_overlap() -> None:
    """Clients know a bundle that is up to 28 days old, servers show a pair that is up to 14."""
    async with _running() as kept:
        await kept.after(timedelta())
        bundles, shown = [kept.published], [kept.shown]
        for _ in range(0, 3650, 14):
            used = await kept.after(14 * DAY)
            assert kept.clock.now < used.ends - 15 * DAY, "replaced in good time"
            bundles.append(kept.published)
            shown.append(kept.shown)
            for bundle in bundles[-3:]:
                assert shown[-1].certificate in split_bundle(bundle)
            assert shown[-2].certificate in split_bundle(bundles[-1])
        assert len({pair.certificate for pair in shown}) == 2
        assert max(len(split_bundle(bundle)) for bundle in bundles) == 2
        assert len(split_bundle(bundles[-1])) == 1


async def _ask(server: ApiServer) -> None:
    """As `kubectl annotate secret ... keepstep.dev/rotate-ca=now` does."""
    body = server.take(SECRETS, SECRET, namespace=NAMESPACE)
    annotations = {**body["metadata"].get("annotations", {}), "keepstep.dev/rotate-ca": "now"}
    metadata = {**body["metadata"], "namespace": NAMESPACE, "annotations": annotations}
    server.put(SECRETS, {**body, "metadata": metadata})


async def test_a_certificate_is_not_used_before_its_authority_is_published() -> None:
    async with _running() as kept:
        await kept.after(timedelta())
        await _ask(kept.server)
        before, shown = kept.published, kept.shown
        refuse = _Refusing(kept.server, "mutatingwebhook")
        for time in (DAY, 100 * DAY):
            with pytest.raises(KubeError):
                await kept.after(time)
        refuse.over()
        assert (kept.shown, kept.published) == (shown, before)
        await kept.after(DAY)
        assert (kept.shown, len(split_bundle(kept.published))) == (shown, 2)
        assert "keepstep.dev/rotate-ca" not in str(
            kept.server.take(SECRETS, SECRET, namespace=NAMESPACE)["metadata"]
        )
        await kept.after(OVERLAP)
        assert kept.shown.certificate == split_bundle(kept.published)[0] != shown.certificate


async def test_the_replaced_certificate_stays_trusted_for_the_overlap_after_a_long_downtime() -> (
    None
):
    async with _running() as kept:
        await kept.after(timedelta())
        await _ask(kept.server)
        await kept.after(DAY)
        shown = kept.shown
        for _ in range(2):
            await kept.after(100 * DAY if kept.shown == shown else timedelta(minutes=1))
            assert shown != kept.shown
            assert shown.certificate in split_bundle(kept.published)
        await kept.after(OVERLAP)
        assert shown.certificate not in split_bundle(kept.published)


class _Refusing:
    """503 to whatever touches a kind."""

    def __init__(self, server: ApiServer, plural: str) -> None:
        self._server = server

        def before(method: str, path: str) -> None:
            server.down = plural in path

        server.before = before

    def over(self) -> None:
        self._server.before = lambda method, path: None
        self._server.down = False


async def test_the_webhook_gets_a_random_path_that_does_not_change() -> None:
    async with _running() as kept:
        await kept.after(timedelta())
        path = kept.path
        assert re.fullmatch(r"/inject-[0-9a-f]{32}", path), "parts of DNS names, as it is checked"
        assert kept.secret()["path"] == path.encode()
        kept.server.put(WEBHOOKS, _webhook())
        await kept.after(2500 * DAY)
        await kept.after(OVERLAP)
        assert (kept.secret()["path"].decode(), kept.path) == (path, path)


async def test_the_certificate_of_an_older_release_stays_trusted_and_missing_fields_are_added() -> (
    None
):
    """A certificate that an authority signed is trusted as it is."""
    async with _running(at=datetime.now(UTC)) as kept:
        older = make_authority("keepstep-admission", now=_now(), life=DAY)
        leaf = sign_server(older, (NAME,), now=_now(), life=DAY)
        data = {"tls.crt": leaf.certificate, "tls.key": leaf.key, "ca.crt": older.certificate}
        encoded = {name: base64.b64encode(value).decode() for name, value in data.items()}
        metadata = {"name": SECRET, "namespace": NAMESPACE}
        kept.server.put(SECRETS, {"metadata": metadata, "data": encoded})
        await kept.after(timedelta())
        assert kept.shown == leaf
        assert kept.published == leaf.certificate == kept.secret()["ca.crt"]
        assert kept.secret()["path"] == kept.path.encode() != b""


async def test_the_certificates_command_without_a_cluster_fails_with_a_clear_message(
    tmp_path: Path,
) -> None:
    process = await create_subprocess_exec(
        sys.executable, "-m", "keepstep_operator.cli", "certificates",
        "--namespace", NAMESPACE,
        stderr=subprocess.PIPE,
        env={**os.environ, "KUBECONFIG": str(tmp_path / "absent")},
    )  # fmt: skip
    _, err = await process.communicate()
    assert process.returncode == 2
    assert b"absent" in err
    assert b"Traceback" not in err


# The authority of sidecars is kept with the rights that the chart gives.


async def test_the_peer_certificate_keeper_accesses_only_its_own_secret() -> None:
    async with ApiServer().running() as server, KubeClient(server.access) as client:
        kept = KeptCertificate(secret="keepstep-peers-ca", life=3650 * DAY, overlap=2 * DAY)
        clock = Clock(datetime(2026, 1, 1, tzinfo=UTC))
        await CertificateKeeper(client, kept, namespace=NAMESPACE, clock=clock).round()
        made = server.take(SECRETS, "keepstep-peers-ca", namespace=NAMESPACE)["data"]
        assert set(made) == {"tls.crt", "tls.key", "ca.crt"}
        assert {path.rpartition("/")[2] for _, path in server.calls()} == {
            "secrets",
            "keepstep-peers-ca",
        }


# A real TLS handshake over a socket pair: would this client accept this server?


def shakes_hands(
    leaf: KeyPair, *, bundle: bytes, name: str, flags: ssl.VerifyFlags = ssl.VERIFY_DEFAULT
) -> str:
    """Why a client that trusts `bundle` and calls `name` refuses the server; '' if it accepts."""
    client_socket, server_socket = socket.socketpair()
    server = threading.Thread(target=_serve, args=(server_socket, leaf))
    server.start()
    try:
        trust = ssl.create_default_context(cadata=bundle.decode())
        trust.verify_flags |= flags
        client_socket.settimeout(10)
        with trust.wrap_socket(client_socket, server_hostname=name) as client:
            assert client.recv(2) == b"ok"
        return ""
    except ssl.SSLError as error:
        return str(error)
    finally:
        client_socket.close()
        server.join()


def _serve(raw: socket.socket, leaf: KeyPair) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    with tempfile.TemporaryDirectory() as directory:
        both = Path(directory) / "both.pem"
        both.write_bytes(leaf.certificate + leaf.key)
        context.load_cert_chain(both)
    raw.settimeout(10)
    with raw:
        try:
            with context.wrap_socket(raw, server_side=True) as server:
                server.sendall(b"ok")
        except OSError:
            return  # the client did not accept us
