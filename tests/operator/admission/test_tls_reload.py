"""A listening server takes up a new certificate without a restart."""

from __future__ import annotations

import asyncio
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from aiohttp import web

from keepstep.errors import UsageError
from keepstep_operator.certificates.pki import Pair, facts, make_authority, sign_leaf
from keepstep_operator.serving import health_routes, listening
from keepstep_operator.tls import ServerTls
from tests.harness import until
from tests.operator.admission.reviews import NAME, write_pair

_DAY = timedelta(days=1)


def _leaf(authority: Pair) -> Pair:
    return sign_leaf(authority, names=(NAME,), now=datetime.now(UTC), life=_DAY)


async def _serial(port: int, authority: Pair) -> int:
    """Of the certificate that a new connection is shown, and accepts."""
    trust = ssl.create_default_context(cadata=authority.certificate.decode())
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust, server_hostname=NAME)
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    await writer.wait_closed()
    return facts(ssl.DER_cert_to_PEM_cert(shown).encode()).serial


async def test_new_connections_get_the_new_certificate(tls_dir: Path, authority: Pair) -> None:
    tls = ServerTls(tls_dir)
    app = web.Application()
    app.add_routes(health_routes(lambda: ""))
    async with listening(app, port=0, host="127.0.0.1", ssl_context=tls.context) as port:
        first = await _serial(port, authority)
        assert not tls.reload(), "nothing changed"
        new = _leaf(authority)
        write_pair(tls_dir, new)
        task = asyncio.create_task(tls.keep_fresh(every_s=0.01))

        async def changed() -> bool:
            return await _serial(port, authority) != first

        await until(changed)
        task.cancel()
        assert await _serial(port, authority) == facts(new.certificate).serial


async def test_a_half_written_pair_is_left_alone_until_it_fits(
    tls_dir: Path, authority: Pair
) -> None:
    tls = ServerTls(tls_dir)
    app = web.Application()
    app.add_routes(health_routes(lambda: ""))
    async with listening(app, port=0, host="127.0.0.1", ssl_context=tls.context) as port:
        first = await _serial(port, authority)
        new = _leaf(authority)
        (tls_dir / "tls.crt").write_bytes(new.certificate)
        assert not tls.reload()
        assert await _serial(port, authority) == first
        (tls_dir / "tls.key").unlink()
        assert not tls.reload()
        (tls_dir / "tls.key").write_bytes(new.key)
        assert tls.reload()
        assert await _serial(port, authority) == facts(new.certificate).serial


def test_no_tickets_are_made_for_sessions_that_nobody_resumes(tls_dir: Path) -> None:
    assert ServerTls(tls_dir).context.num_tickets == 0


def test_a_server_does_not_begin_without_a_pair(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"keepstep-operator certificates"):
        ServerTls(tmp_path)
    authority = make_authority("test", now=datetime.now(UTC), life=_DAY)
    other = make_authority("other", now=datetime.now(UTC), life=_DAY)
    write_pair(tmp_path, Pair(certificate=authority.certificate, key=other.key))
    with pytest.raises(UsageError, match=r"holds no usable tls.crt and tls.key"):
        ServerTls(tmp_path)


async def test_a_listener_that_ends_leaves_no_handshake_behind(
    tmp_path: Path, authority: Pair
) -> None:
    write_pair(
        tmp_path, sign_leaf(authority, names=(NAME,), now=datetime.now(UTC), life=timedelta(1))
    )
    app = web.Application()
    context = ServerTls(tmp_path).context
    async with listening(app, port=0, host="127.0.0.1", ssl_context=context) as port:
        answers, asks = await asyncio.open_connection("127.0.0.1", port)
        asks.write(b"\x16\x03")  # the first bytes of a hello that never ends
        await asks.drain()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(answers.read(1), timeout=0.3)  # it waits for more
    try:
        assert await asyncio.wait_for(answers.read(), timeout=2) == b""
    except ConnectionResetError:
        pass
    finally:
        asks.close()
