"""Who is not let in, and what each side says of it: in words for a person, within seconds."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from keepstep.errors import StorageError, UsageError
from keepstep_sidecar.leader.link import LeaderConnection
from keepstep_sidecar.tiers.peer.server import Server
from keepstep_sidecar.tiers.peer.tls import Tls, TlsContextSource
from tests.harness import free_port, until
from tests.leader.runs import QUICK, SECRET, Leader, Linked, credentials, leading, running
from tests.leader.wire import Raw
from tests.peer.authority import Authority, FileCredentials


async def refused(linked: Linked, *, because: str) -> None:
    """The link says why, within ten seconds, and is never connected."""
    async with running(linked):
        await until(lambda: because in linked.link.reason, within_s=10.0, what=because)
        assert linked.link.reason.startswith(f"the leader at {linked.link.address}: ")
    assert not any(connected for connected, _ in linked.changes)


async def refused_there(leader: Leader, *, because: str) -> None:
    await until(
        lambda: because in leader.server.list_refused_hosts().get("127.0.0.1", ""), within_s=10.0
    )
    assert not list(leader.hub)
    assert leader.frames == []


@pytest.mark.parametrize("other", [{"secret": SECRET + b"!"}, {"run": "bert"}])
async def test_a_wrong_secret_or_run_is_reported_on_both_sides_and_logged_once(
    other: dict[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    async with leading() as leader:
        member = Linked(leader.address, credentials(1, **other))
        same = "the secret and the run's name must be the same on all machines"
        async with running(member):
            await until(lambda: "is refused here" in member.link.reason, within_s=10.0)
            assert same in member.link.reason
            await refused_there(leader, because="our certificate is refused there")
            assert same in leader.server.list_refused_hosts()["127.0.0.1"]
            await asyncio.sleep(2.0)  # a dozen attempts
        messages = [record.message for record in caplog.records]
        assert messages.count("peer.connection_refused") == 1
        assert messages.count("leader.disconnected") == 1
        async with running(now := Linked(leader.address)):
            await until(lambda: now.link.connected)
        assert leader.server.list_refused_hosts() == {}, "it is served now"


def of(files: object) -> FileCredentials:
    return FileCredentials(files)  # type: ignore[arg-type]


async def test_a_member_of_another_run_with_the_same_authority_is_refused_on_both_sides(
    authority: Authority,
) -> None:
    async with leading(of(authority.files(0))) as leader:
        other = Linked(leader.address, of(authority.files(1, run="bert")))
        await refused(
            other, because="there is node rank 0 of run team/gpt, and here is node rank 1"
        )
    # a member that does not look whom it talks to
    async with leading(of(authority.files(0))) as leader:
        with await asyncio.to_thread(
            Raw, leader.address, own=of(authority.files(1, run="bert"))
        ) as raw:
            refusal = await asyncio.to_thread(raw.refusal)
        assert refusal == "this is node rank 1 of run team/bert; here is another run"
        await refused_there(leader, because="node rank 1 of run team/bert")


async def test_a_certificate_that_only_the_leader_refuses_is_reported_on_both_sides(
    authority: Authority,
) -> None:
    async with leading(of(authority.files(0))) as leader:
        expired = of(authority.files(1, ends=-timedelta(minutes=1)))
        await refused(Linked(leader.address, expired), because="our certificate is refused there")
        await refused_there(leader, because="its certificate is refused here: certificate has exp")


async def test_a_member_accepts_only_node_rank_0_as_leader() -> None:
    async with leading(credentials(2)) as leader:
        await refused(
            Linked(leader.address), because="there is node rank 2 of run gpt, and node rank 0 leads"
        )


async def test_a_sidecar_that_is_not_the_leader_refuses_members_with_that_reason() -> None:
    server = Server("127.0.0.1:0", credentials(0), lambda _: None)  # type: ignore[arg-type, return-value]
    server.start()
    try:
        await refused(
            Linked(f"127.0.0.1:{server.port}"), because="this sidecar does not lead the run"
        )
    finally:
        await asyncio.to_thread(server.stop)


# --- where nothing answers -----------------------------------------------------------------------


async def test_an_unresolvable_leader_name_is_retried_until_it_resolves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with leading() as leader:
        port = leader.server.port
        member = Linked(f"leader.keepstep.invalid:{port}")
        real = socket.getaddrinfo
        async with running(member):
            await until(lambda: "the name does not resolve (yet)" in member.link.reason)
            assert f"leader.keepstep.invalid:{port}" in member.link.reason
            monkeypatch.setattr(
                socket, "getaddrinfo", lambda _, port, **how: real("127.0.0.1", port, **how)
            )
            await until(lambda: member.link.connected, within_s=5.0)


async def test_each_attempt_takes_the_next_address_of_the_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with leading() as leader:
        real = socket.getaddrinfo

        def both(_: str, port: int, **how: int) -> object:
            return [*real("127.0.0.9", port, **how), *real("127.0.0.1", port, **how)]

        monkeypatch.setattr(socket, "getaddrinfo", both)
        async with running(member := Linked(f"leader:{leader.server.port}")):
            await until(lambda: member.link.connected)
        assert "127.0.0.9: Connection refused" in member.changes[0][1]


@contextlib.contextmanager
def deaf() -> Iterator[int]:
    """A port that drops what comes, as a firewall does: its queue is full."""
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            connection = stack.enter_context(socket.socket())
            connection.setblocking(False)
            connection.connect_ex(full.getsockname())
        yield full.getsockname()[1]


async def test_dropped_packets_and_a_closed_port_have_different_errors() -> None:
    with deaf() as port:
        await refused(
            Linked(f"127.0.0.1:{port}", connect_s=0.5),
            because=f"no answer of port {port} of 127.0.0.1: it is not there, or a firewall drops",
        )
    port = free_port()
    await refused(
        Linked(f"127.0.0.1:{port}"), because=f"port {port} of 127.0.0.1: Connection refused"
    )


async def test_the_error_for_a_port_of_another_program_names_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        await refused(
            Linked(f"127.0.0.1:{port}", connect_s=0.5),
            because="takes the connection, but no TLS: is it keepstep's? (after 0.5 s)",
        )


def test_an_address_without_a_port_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match="is no address"):
        LeaderConnection("leader", credentials(1), take=lambda _: None, changed=lambda: None)


async def test_a_member_without_a_certificate_reports_that_as_the_reason() -> None:
    class Later(TlsContextSource):
        own: TlsContextSource | None = None

        def current(self) -> Tls:
            if self.own is None:
                raise StorageError("the operator has issued no certificate for peers")
            return self.own.current()

    async with leading() as leader:
        later = Later()
        async with running(member := Linked(leader.address, later)):
            await until(lambda: "has issued no certificate" in member.link.reason)
            later.own = credentials(1)
            await until(lambda: member.link.connected)


# --- strangers -----------------------------------------------------------------------------------


async def test_many_idle_unauthenticated_connections_do_not_block_a_member() -> None:
    async with leading() as leader:
        with contextlib.ExitStack() as stack:
            for _ in range(100):
                stack.enter_context(
                    socket.create_connection(("127.0.0.1", leader.server.port), timeout=10)
                )
            begin = time.monotonic()
            async with running(member := Linked(leader.address, connect_s=60.0)):
                await until(lambda: member.link.connected)
            assert time.monotonic() - begin < 30.0


async def test_a_connection_that_never_sends_hello_is_closed_and_occupies_one_entry() -> None:
    async with leading(limits=QUICK) as leader:
        with contextlib.ExitStack() as stack:
            mute = [
                stack.enter_context(await asyncio.to_thread(Raw, leader.address, sidecar=None))
                for _ in range(10)
            ]
            async with running(member := Linked(leader.address, limits=QUICK)):
                await until(lambda: member.link.connected)
                assert next(str(member) for member in leader.hub).startswith("node rank 1 (")
            ends: Callable[[Raw], str] = Raw.refusal
            for raw in mute:
                with contextlib.suppress(OSError):
                    assert await asyncio.to_thread(ends, raw) in ("", "silent for 2 s")


async def test_a_closed_hub_takes_no_connection(tmp_path: Path) -> None:
    async with leading() as leader:
        leader.hub.close()
        async with running(member := Linked(leader.address)):
            await until(lambda: "the other side closed the connection" in member.link.reason)
