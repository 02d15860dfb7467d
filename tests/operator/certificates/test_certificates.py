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
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from keepstep_operator.certificates.keeper import (
    Keeper,
    Publisher,
    Server,
    publish_in_config_map,
    publish_in_webhook,
)
from keepstep_operator.certificates.peers import AuthorityKeeper, published_with_certificates
from keepstep_operator.certificates.pki import (
    Facts,
    Pair,
    facts,
    fits,
    is_signed_by,
    make_authority,
    sign_leaf,
    split,
)
from keepstep_operator.certificates.rotation import Authority, Lifetimes, Move, due
from keepstep_operator.kube import CONFIG_MAPS, SECRETS, WEBHOOKS, Client, KubeError
from tests.operator.apiserver import ApiServer

DAY = timedelta(days=1)
NAMES = ("keepstep-reports.keepstep-system.svc",)


def _now() -> datetime:
    return datetime.now(UTC)


@pytest.fixture(scope="module")
def authority() -> Pair:
    return make_authority("keepstep-reports", now=_now(), life=3650 * DAY)


@pytest.fixture(scope="module")
def leaf(authority: Pair) -> Pair:
    return sign_leaf(authority, names=NAMES, now=_now(), life=90 * DAY)


def test_the_strictest_verification_accepts_it_too(authority: Pair, leaf: Pair) -> None:
    """Python 3.13 verifies so by default (RFC 5280: key identifiers, critical extensions)."""
    said = shakes_hands(
        leaf, bundle=authority.certificate, name=NAMES[0], flags=ssl.VERIFY_X509_STRICT
    )
    assert said == ""


def test_another_name_or_another_authority_is_refused(authority: Pair, leaf: Pair) -> None:
    said = shakes_hands(leaf, bundle=authority.certificate, name="kubernetes.default.svc")
    assert "Hostname mismatch" in said
    other = make_authority("keepstep-reports", now=_now(), life=DAY)
    assert shakes_hands(leaf, bundle=other.certificate, name=NAMES[0]) != ""


def test_a_leaf_cannot_sign(authority: Pair, leaf: Pair) -> None:
    forged = sign_leaf(leaf, names=("evil.svc",), now=_now(), life=DAY)
    assert shakes_hands(forged, bundle=authority.certificate, name="evil.svc") != ""


def test_an_expired_leaf_is_refused(authority: Pair) -> None:
    old = sign_leaf(authority, names=NAMES, now=_now() - 2 * DAY, life=DAY)
    assert "expired" in shakes_hands(old, bundle=authority.certificate, name=NAMES[0])


def test_a_clock_that_is_an_hour_behind_accepts_a_new_leaf(leaf: Pair) -> None:
    assert facts(leaf.certificate).not_before < _now() - timedelta(hours=1)


def test_a_leaf_does_not_outlive_its_authority() -> None:
    authority = make_authority("short", now=_now(), life=DAY)
    leaf = sign_leaf(authority, names=NAMES, now=_now(), life=90 * DAY)
    assert facts(leaf.certificate).not_after <= facts(authority.certificate).not_after


def test_authorities_of_one_name_are_told_apart() -> None:
    one, two = (make_authority("same", now=_now(), life=DAY) for _ in range(2))
    leaf = sign_leaf(one, names=NAMES, now=_now(), life=DAY)
    assert is_signed_by(leaf.certificate, one.certificate)
    assert not is_signed_by(leaf.certificate, two.certificate)
    bundle = two.certificate + one.certificate
    assert shakes_hands(leaf, bundle=bundle, name=NAMES[0]) == ""
    assert split(bundle) == (two.certificate, one.certificate)


def test_a_pair_fits_only_with_its_own_key(authority: Pair, leaf: Pair) -> None:
    assert fits(leaf)
    assert not fits(Pair(certificate=leaf.certificate, key=authority.key))
    assert not fits(Pair(certificate=b"", key=leaf.key))
    assert not fits(Pair(certificate=leaf.certificate, key=b"nonsense"))


def test_what_cannot_be_read_is_no_certificate() -> None:
    assert split(b"nonsense") == ()
    assert split(b"") == ()
    assert not is_signed_by(b"", b"")
    with pytest.raises(ValueError, match="PEM"):
        facts(b"nonsense")


# The timeline of an authority and its leaf: a clock is passed in, and whole lives go by.


START = datetime(2026, 1, 1, tzinfo=UTC)
LIFETIMES = Lifetimes(authority=3650 * DAY, leaf=90 * DAY, overlap=30 * DAY)


def _certificate(begin: datetime, life: timedelta, *, names: tuple[str, ...] = ()) -> Facts:
    return Facts(not_before=begin, not_after=begin + life, serial=1, names=names)


def _ca(begin: datetime = START) -> Facts:
    return _certificate(begin, LIFETIMES.authority)


def _due(authority: Authority, at: datetime) -> Move:
    return due(authority, now=at, lifetimes=LIFETIMES)


def test_an_expired_signer_is_replaced_at_once_by_the_next_or_a_new_one() -> None:
    after = START + 3651 * DAY
    assert _due(Authority(signer=_ca()), after) is Move.BEGIN
    assert _due(Authority(signer=_ca(), next=_ca(after - DAY)), after) is Move.PROMOTE
    assert _due(Authority(signer=_ca(), next=_ca()), after) is Move.BEGIN


def test_somebody_may_ask_for_another_authority() -> None:
    assert _due(Authority(signer=_ca(), asked=True), START + DAY) is Move.ADD_NEXT
    rotating = Authority(signer=_ca(), next=_ca(), since=START, asked=True)
    assert _due(rotating, START + DAY) is Move.NONE


# Rounds against an API server, with a clock that is turned by years: at every moment each
# client that learned of a bundle within the overlap accepts what the server shows.


Body = dict[str, Any]
NAMESPACE = "keepstep-system"
SERVICE = "keepstep-reports"
NAME = f"{SERVICE}.{NAMESPACE}.svc"


@dataclass
class Clock:
    now: datetime

    def __call__(self) -> datetime:
        return self.now


@dataclass(kw_only=True)
class Kept:
    """A keeper of the reports API's certificates, its clock, and the cluster it writes to."""

    server: ApiServer
    keeper: Keeper
    clock: Clock

    async def after(self, time: timedelta) -> Facts:
        """Turn the clock, and do a round."""
        self.clock.now += time
        return await self.keeper.round()

    def secret(self, kind: str) -> dict[str, bytes]:
        body = self.server.take(SECRETS, f"{SERVICE}-{kind}", namespace=NAMESPACE)
        return {name: base64.b64decode(value) for name, value in body["data"].items()}

    @property
    def shown(self) -> Pair:
        leaf = self.secret("tls")
        return Pair(certificate=leaf["tls.crt"], key=leaf["tls.key"])

    @property
    def published(self) -> bytes:
        body = self.server.take(CONFIG_MAPS, f"{SERVICE}-ca", namespace=NAMESPACE)
        bundle: str = body["data"]["ca.crt"]
        return bundle.encode()


@asynccontextmanager
async def _kept(*, at: datetime | None = None) -> AsyncIterator[Kept]:
    async with ApiServer().running() as running, Client(running.access) as client:
        clock = Clock(at or datetime(2020, 1, 1, tzinfo=UTC))
        publish = partial(publish_in_config_map, client, NAMESPACE, f"{SERVICE}-ca")
        served = Server(service=SERVICE, publish=publish, lifetimes=LIFETIMES)
        keeper = Keeper(client, served, namespace=NAMESPACE, clock=clock)
        yield Kept(server=running, keeper=keeper, clock=clock)


def _trusts(bundle: bytes, pair: Pair) -> bool:
    return any(is_signed_by(pair.certificate, one) for one in split(bundle))


async def test_the_first_round_makes_everything_and_a_real_client_accepts_it() -> None:
    async with _kept(at=datetime.now(UTC)) as kept:
        leaf = await kept.after(timedelta())
        assert set(leaf.names) == {NAME, f"{NAME}.cluster.local"}
        assert shakes_hands(kept.shown, bundle=kept.published, name=NAME) == ""
        assert kept.secret("tls")["ca.crt"] == kept.published
        body = kept.server.take(SECRETS, f"{SERVICE}-tls", namespace=NAMESPACE)
        assert body["type"] == "kubernetes.io/tls"


async def test_over_ten_years_every_client_accepts_every_server_within_the_overlap() -> None:
    """Clients know a bundle that is up to 28 days old, servers show a leaf that is up to 14."""
    async with _kept() as kept:
        await kept.after(timedelta())
        bundles, shown, signers = [kept.published], [kept.shown], set()
        for _ in range(0, 3650, 14):
            leaf = await kept.after(14 * DAY)
            assert kept.clock.now < leaf.not_after - 15 * DAY, "renewed in good time"
            bundles.append(kept.published)
            shown.append(kept.shown)
            signers.add(kept.secret("ca")["tls.crt"])
            for bundle in bundles[-3:]:
                assert _trusts(bundle, shown[-1])
            assert _trusts(bundles[-1], shown[-2])
        assert len(signers) == 2
        assert max(len(split(one)) for one in bundles) == 2
        assert len(split(bundles[-1])) == 1


async def _ask(server: ApiServer) -> None:
    """As `kubectl annotate secret ... keepstep.dev/rotate-ca=now` does."""
    body = server.take(SECRETS, f"{SERVICE}-ca", namespace=NAMESPACE)
    annotations = body["metadata"].setdefault("annotations", {})
    server.put(
        SECRETS,
        {
            **body,
            "metadata": {
                **body["metadata"],
                "namespace": NAMESPACE,
                "annotations": {**annotations, "keepstep.dev/rotate-ca": "now"},
            },
        },
    )


async def test_nothing_is_promoted_while_it_could_not_be_published() -> None:
    async with _kept() as kept:
        await kept.after(timedelta())
        await _ask(kept.server)
        refuse = _Refusing(kept.server, "configmaps")
        with pytest.raises(KubeError):
            await kept.after(DAY)
        with pytest.raises(KubeError):
            await kept.after(100 * DAY)
        refuse.over()
        await kept.after(DAY)
        assert len(split(kept.published)) == 2
        signer = kept.secret("ca")["tls.crt"]
        assert signer == split(kept.published)[0], "the overlap begins with the publication"
        await kept.after(LIFETIMES.overlap)
        assert kept.secret("ca")["tls.crt"] == split(kept.published)[0] != signer


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


async def test_a_lost_authority_is_replaced_and_what_clients_trusted_stays_trusted() -> None:
    async with _kept() as kept:
        await kept.after(timedelta())
        old, shown = kept.published, kept.shown
        kept.server.delete(SECRETS, f"{SERVICE}-ca", namespace=NAMESPACE)
        await kept.after(DAY)
        assert kept.shown == shown, "no new leaf before the new bundle had time to spread"
        assert set(split(kept.published)) > set(split(old))
        await kept.after(timedelta(minutes=2))
        assert kept.shown != shown
        assert _trusts(kept.published, kept.shown)


def _of_a_service(path: str | None = None) -> Body:
    service = {"name": "keepstep-admission", **({} if path is None else {"path": path})}
    webhook = {"name": "inject", "clientConfig": {"service": service}}
    return {"metadata": {"name": "keepstep"}, "webhooks": [webhook]}


def _path(server: ApiServer) -> str:
    (webhook,) = server.take(WEBHOOKS, "keepstep")["webhooks"]
    return str(webhook["clientConfig"]["service"].get("path"))


async def test_the_webhook_gets_a_path_that_nobody_can_guess_and_keeps_it() -> None:
    async with ApiServer().running() as server, Client(server.access) as client:
        server.put(WEBHOOKS, _of_a_service("/inject"))
        publish = partial(publish_in_webhook, client, "keepstep")
        served = Server(service="keepstep-admission", publish=publish, lifetimes=LIFETIMES)
        clock = Clock(datetime.now(UTC))
        keeper = Keeper(client, served, namespace=NAMESPACE, clock=clock)
        await keeper.round()
        path = _path(server)
        assert re.fullmatch(r"/inject-[0-9a-f]{32}", path), "parts of DNS names, as it is checked"

        def stored() -> str:
            secret = server.take(SECRETS, "keepstep-admission-tls", namespace=NAMESPACE)
            return base64.b64decode(secret["data"]["path"]).decode()

        assert stored() == path
        clock.now += 60 * DAY  # the leaf is made anew, and the webhook is replaced
        server.put(WEBHOOKS, _of_a_service())
        await keeper.round()
        assert (stored(), _path(server)) == (path, path)
        server.delete(SECRETS, "keepstep-admission-tls", namespace=NAMESPACE)
        await keeper.round()
        assert (stored(), _path(server)) == (path, path), "the API server's is taken over"


async def test_the_command_without_a_cluster_fails_with_a_sentence(tmp_path: Path) -> None:
    process = await create_subprocess_exec(
        sys.executable, "-m", "keepstep_operator.cli", "certificates", "--once",
        "--namespace", NAMESPACE,
        stderr=subprocess.PIPE,
        env={**os.environ, "KUBECONFIG": str(tmp_path / "absent")},
    )  # fmt: skip
    _, err = await process.communicate()
    assert process.returncode == 2
    assert b"absent" in err
    assert b"Traceback" not in err


# --- beside cert-manager -------------------------------------------------------------------------


async def test_beside_cert_manager_the_ca_of_reports_is_published_and_nothing_else_is_touched() -> (
    None
):
    async with _kept() as made:
        await made.after(timedelta())
        theirs = made.secret("tls")
    async with ApiServer().running() as server, Client(server.access) as client:
        publisher = _publisher(client)
        with pytest.raises(KubeError):  # it is not there yet
            await publisher.round()
        _put_secret(server, {**theirs, "ca.crt": b""})
        with pytest.raises(KubeError, match=r"ca\.crt.*issuer"):
            await publisher.round()
        _put_secret(server, theirs)
        leaf = await publisher.round()
        assert leaf.not_after == facts(theirs["tls.crt"]).not_after
        bundle = server.take(CONFIG_MAPS, "keepstep-reports-ca", namespace=NAMESPACE)["data"]
        assert bundle == {"ca.crt": theirs["ca.crt"].decode()}
        asked = {path.rpartition("/")[2] for _, path in server.calls() if "/secrets" in path}
        assert asked == {f"{SERVICE}-tls"}
        writes = [path for method, path in server.calls() if method != "GET"]
        assert all("/configmaps" in path for path in writes)


def _publisher(client: Client) -> Publisher:
    server = Server(
        service=SERVICE,
        publish=partial(publish_in_config_map, client, NAMESPACE, "keepstep-reports-ca"),
        lifetimes=LIFETIMES,
    )
    return Publisher(client, server, namespace=NAMESPACE)


def _put_secret(server: ApiServer, data: dict[str, bytes]) -> None:
    encoded = {name: base64.b64encode(value).decode() for name, value in data.items()}
    metadata = {"name": f"{SERVICE}-tls", "namespace": NAMESPACE}
    server.put(SECRETS, {"metadata": metadata, "data": encoded})


# The authority of sidecars' certificates is kept with the rights that the chart gives.


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


# A real TLS handshake over a socket pair: would this client accept this server?


def shakes_hands(
    leaf: Pair, *, bundle: bytes, name: str, flags: ssl.VerifyFlags = ssl.VERIFY_DEFAULT
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


def _serve(raw: socket.socket, leaf: Pair) -> None:
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
