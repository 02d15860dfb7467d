"""Members are connected to their leader, and again after each loss; frames keep their order."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
from contextlib import AsyncExitStack
from typing import Any

import psutil
import pytest

from keepstep_sidecar.leader import hub
from keepstep_sidecar.leader.hub import MemberConnection
from keepstep_sidecar.leader.link import LeaderConnection
from keepstep_sidecar.tiers.peer.member_frames import ConnectionTimeouts, FrameKind
from tests.harness import free_port, until
from tests.leader.runs import QUICK, Leader, Linked, credentials, leading, running
from tests.leader.wire import Proxy, Raw


async def test_frames_arrive_in_order_and_are_answered() -> None:
    async with leading() as leader:
        link = Linked(leader.address)
        assert not link.link.send(b"too early")
        async with running(link):
            await until(lambda: link.link.connected)
            assert link.link.reason == ""
            for number in range(50):
                assert link.link.send(b"%d" % number)
                await until(lambda: len(leader.frames) == number + 1)  # noqa: B023
            await until(lambda: len(link.frames) == 50)
    assert leader.bodies() == [b"%d" % number for number in range(50)]
    assert link.frames == [b"re: %d" % number for number in range(50)]
    ((member, _), *_) = leader.frames
    assert (member.node_rank, member.identity.run) == (1, "gpt")
    assert member.address.startswith("127.0.0.1:")


async def test_a_member_connects_again_soon_after_the_leader_is_back() -> None:
    port = free_port()
    async with leading(port=port) as first:
        member = Linked(first.address)
        task = running(member)
        await task.__aenter__()
        await until(lambda: member.link.connected)
    await until(lambda: not member.link.connected and "Connection refused" in member.link.reason)
    assert f"the leader at 127.0.0.1:{port}" in member.link.reason
    await asyncio.sleep(3.0)  # the pauses between attempts have grown
    async with leading(port=port) as second:
        begin = time.monotonic()
        await until(lambda: member.link.connected)
        assert time.monotonic() - begin < 5.0
        member.link.send(b"everything")
        await until(lambda: second.bodies() == [b"everything"])
        await task.__aexit__(None, None, None)
    assert [connected for connected, _ in member.changes].count(True) == 2


async def test_a_reset_connection_is_re_established_and_the_member_is_listed_once() -> None:
    async with leading() as leader:
        proxy = Proxy(leader.address)
        async with proxy.running() as address:
            link = Linked(address)
            async with running(link):
                for times in range(1, 4):
                    await until(lambda: link.link.connected)
                    link.link.send(b"%d" % times)
                    await until(lambda: len(leader.frames) == times)  # noqa: B023
                    proxy.cut()
                    await until(lambda: len(leader.lost) == times)  # noqa: B023
                await until(lambda: link.link.connected)
                (member,) = leader.hub
                assert member not in leader.lost


async def test_a_newer_frame_replaces_one_that_was_not_sent_and_memory_is_bounded() -> None:
    async with leading() as leader:
        leader.answers = False
        with await asyncio.to_thread(Raw, leader.address) as slow:
            (member,) = await until(lambda: list(leader.hub))
            before = psutil.Process().memory_info().rss
            for number in range(300):
                member.send(b"%03d" % number + bytes(1 << 20))
            assert psutil.Process().memory_info().rss - before < 32 << 20

            slow.secure.setblocking(False)
            found: list[bytes] = []
            while found[-1:] != [b"299"]:
                found += [frame[:3] for frame in await until(slow.read_all) if frame]
    assert found == sorted(found)
    assert len(found) < 10, "what waits is replaced"


async def test_a_queued_frame_is_sent_after_the_previous_frame_of_any_length() -> None:
    """Also at the end of what is moved in one turn of the event loop, which is 16 pieces."""
    async with leading() as leader:
        leader.answers = False
        with await asyncio.to_thread(Raw, leader.address) as reader:
            (member,) = await until(lambda: list(leader.hub))
            reader.secure.setblocking(False)
            for pieces in range(32):
                member.send(bytes((6 << 20) + pieces * (64 << 10)))  # more than a socket takes
                member.send(b"last")
                await until(lambda: reader.read_all()[-1:] == [b"last"])


async def test_a_member_that_does_not_read_is_disconnected_and_does_not_delay_others() -> None:
    async with leading(limits=QUICK) as leader:
        with await asyncio.to_thread(Raw, leader.address) as slow:
            (member,) = await until(lambda: list(leader.hub))
            quick = Linked(leader.address, node_rank=2, limits=QUICK)
            async with running(quick):
                await until(lambda: quick.link.connected)
                member.send(bytes(8 << 20))
                while not leader.lost:
                    await asyncio.to_thread(slow.send, b"alive")  # it sends, but does not read
                    quick.link.send(b"more")
                    await asyncio.sleep(0.05)
                assert leader.lost == [member]
                assert leader.bodies(2)
                assert quick.link.connected


async def test_an_idle_connection_times_out_on_both_sides() -> None:
    async with leading(limits=QUICK) as leader:
        proxy = Proxy(leader.address)
        async with proxy.running() as address:
            member = Linked(address, limits=QUICK)
            async with running(member):
                await until(lambda: member.link.connected)
                await asyncio.sleep(2 * QUICK.silence_s)
                assert member.link.connected, "both sides say that they are there"
                assert [connected for connected, _ in member.changes] == [True]
                proxy.drops = True
                begin = time.monotonic()
                await until(lambda: leader.lost and not member.link.connected)
                assert time.monotonic() - begin < 5 * QUICK.silence_s
                assert "silent for 2 s" in member.link.reason
                proxy.drops = False
                await until(lambda: member.link.connected)


async def test_a_frame_that_is_too_long_is_refused_with_the_reason() -> None:
    limits = ConnectionTimeouts(largest_bytes=1000)
    async with leading(limits=limits) as leader:
        member = Linked(leader.address)
        async with running(member):
            await until(lambda: member.link.connected)
            member.link.send(bytes(1001))
            await until(lambda: "1001 bytes; 1000 bytes are the most" in member.link.reason)
            await until(lambda: leader.lost)
            await until(lambda: member.link.connected)
            member.link.send(bytes(1000))
            await until(lambda: leader.bodies() == [bytes(1000)])


async def test_a_frame_of_the_largest_size_passes_both_ways() -> None:
    async with leading() as leader:
        member = Linked(leader.address)
        async with running(member):
            await until(lambda: member.link.connected)
            body = bytes(range(256)) * (8 << 12)
            member.link.send(body)
            await until(lambda: leader.bodies() == [body])
            leader.frames[0][0].send(body)
            await until(lambda: body in member.frames)


async def test_a_frame_that_is_sent_too_slowly_is_refused_with_the_reason() -> None:
    async with leading(limits=QUICK) as leader:
        with await asyncio.to_thread(Raw, leader.address) as slow:

            def trickle() -> str:
                slow.secure.sendall(b"\0\0\0\x10\0")
                slow.secure.settimeout(0.1)
                while True:
                    slow.secure.sendall(b"x")
                    try:
                        return slow.refusal()
                    except TimeoutError:
                        continue

            assert await asyncio.to_thread(trickle) == "a frame was not sent within 2 s"
        await until(lambda: leader.lost)
        assert leader.frames == []


async def test_a_partial_frame_of_a_killed_member_is_discarded() -> None:
    async with leading() as leader:
        with await asyncio.to_thread(Raw, leader.address) as killed:
            killed.secure.sendall(b"\0\0\0\x10\0half of it")
            (member,) = await until(lambda: list(leader.hub))
        await until(lambda: leader.lost == [member])
        assert leader.frames == []


class Distant(LeaderConnection):
    """A member's link, from an address of its own."""

    own = ""

    def _socket(self, family: int) -> socket.socket:
        plain = super()._socket(family)
        plain.bind((self.own, 0))
        return plain


def distant(leader: Leader, count: int) -> list[Linked]:
    """Members, each on a machine of its own: strangers of one address push each other out."""
    every = [Linked(leader.address, node_rank=rank + 1, connect_s=60.0) for rank in range(count)]
    for rank, member in enumerate(every, 1):
        member.link.__class__ = Distant
        member.link.own = f"127.3.{rank >> 8}.{rank % 256}"  # type: ignore[attr-defined]
    return every


async def test_300_members_cost_no_threads_and_little_memory() -> None:
    async with leading() as leader:
        threads = threading.active_count()
        every = distant(leader, 300)
        gc.collect()
        before = psutil.Process().memory_info().rss
        async with running(*every):
            await until(lambda: all(member.link.connected for member in every))
            for member in every:
                member.link.send(b"x" * 1000)
            await until(lambda: len(leader.frames) == 300)
            await until(lambda: threading.active_count() <= threads)
            grown = psutil.Process().memory_info().rss - before
            assert len(list(leader.hub)) == 300
            assert grown < 300 * (256 << 10), "both ends of each connection"
        await until(lambda: len(leader.lost) == 300)


async def test_many_members_that_connect_at_once_succeed_at_the_first_attempt() -> None:
    async with leading() as leader:
        every = distant(leader, 200)
        async with running(*every):
            await until(lambda: all(member.link.connected for member in every))
        again = [member for member in every if member.changes != [(True, "")]]
        assert len(again) < 20, "a machine may be slow"


# --- one node rank, several sidecars -------------------------------------------------------------


async def test_a_sidecar_can_replace_its_own_connection_and_a_different_sidecar_is_refused() -> (
    None
):
    async with leading() as leader:

        async def connected(sidecar: bytes, count: int) -> Raw:
            raw = await asyncio.to_thread(Raw, leader.address, sidecar=sidecar)
            await asyncio.to_thread(raw.read)
            assert len(list(leader.hub)) == count
            return raw

        with await connected(b"a" * 16, 1), await connected(b"a" * 16, 1) as again:
            (member,) = leader.hub
            assert len(leader.lost) == 1
            with await connected(b"b" * 16, 2) as other:
                other.send(b"other")
                await until(lambda: leader.frames)
                assert leader.frames[0][0] is not member
                with await asyncio.to_thread(Raw, leader.address, sidecar=b"c" * 16) as third:
                    assert "have the same node rank, 1" in await asyncio.to_thread(third.refusal)
                leader.frames[0][0].refuse("node rank 1 is at another address")
                assert await asyncio.to_thread(other.refusal) == "node rank 1 is at another address"
            await until(lambda: len(leader.lost) == 2)
            assert list(leader.hub) == [member]
            again.send(b"still here")
            await until(lambda: len(leader.frames) == 2)


async def test_a_sidecar_that_missed_a_keep_alive_is_replaced_by_a_new_connection() -> None:
    limits = ConnectionTimeouts(keep_alive_s=0.2, silence_s=60.0)
    async with leading(limits=limits) as leader:
        with await asyncio.to_thread(Raw, leader.address, sidecar=b"a" * 16):
            (lost,) = await until(lambda: list(leader.hub))
            await until(lambda: lost.quiet_s > 0.3)
            with await asyncio.to_thread(Raw, leader.address, sidecar=b"b" * 16):
                await until(lambda: leader.lost == [lost])
                (member,) = leader.hub
                assert isinstance(member, MemberConnection)
                assert member.sidecar == b"b" * 16


async def test_a_refused_member_reports_the_reason_that_the_leader_sent() -> None:
    async with leading() as leader:
        link = Linked(leader.address)
        async with running(link):
            (member,) = await until(lambda: list(leader.hub))
            member.refuse("this run has a world of 8 ranks, and not of 16")
            await until(lambda: "this run has a world of 8 ranks" in link.link.reason)
            assert leader.lost == [member]


async def test_a_node_rank_that_the_run_cannot_have_is_refused() -> None:
    async with leading(nodes=4) as leader:
        for rank, why in ((4, "the run has 4 nodes at most"), (3, "")):
            member = Linked(leader.address, node_rank=rank)
            async with running(member):
                await until(lambda: member.link.connected or (why and why in member.link.reason))  # noqa: B023
                assert member.link.connected is not bool(why)


async def test_of_a_run_in_pods_the_number_of_members_is_bounded_and_not_their_node_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hub, "_MOST_NODES", 2)
    async with leading() as leader, AsyncExitStack() as stack:
        members = [Linked(leader.address, node_rank=rank) for rank in (1, 10_000, 10_001)]
        for member in members[:2]:
            await stack.enter_async_context(running(member))
            await until(lambda: member.link.connected)  # noqa: B023
        await stack.enter_async_context(running(members[2]))
        await until(lambda: "a run has 2 nodes at most" in members[2].link.reason)
        assert not members[2].link.connected


async def test_a_connection_that_violates_the_frame_order_is_refused() -> None:
    async with leading() as leader:
        with await asyncio.to_thread(Raw, leader.address, sidecar=None) as raw:
            raw.send(b"no hello")
            assert "says hello once" in await asyncio.to_thread(raw.refusal)
        with await asyncio.to_thread(Raw, leader.address) as raw:
            raw.secure.sendall(bytes([FrameKind.HELLO]) + b"\0\0\0\x10" + b"s" * 16)
            assert "says hello once" in await asyncio.to_thread(raw.refusal)
        with await asyncio.to_thread(Raw, leader.address) as raw:
            raw.secure.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert "no kind of frame: 71" in await asyncio.to_thread(raw.refusal)
        assert leader.frames == []


async def test_an_error_in_a_message_handler_closes_one_connection_and_not_the_hub(
    caplog: object,
) -> None:
    leader = Leader(credentials(0))
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    leader.hub.take = lambda member, frame: (
        1 / 0 if frame == b"bad" else leader._take(member, frame)
    )
    member, other = Linked(leader.address), Linked(leader.address, node_rank=2)
    async with running(member, other):
        await until(lambda: member.link.connected and other.link.connected)
        member.link.send(b"bad")
        await until(lambda: leader.lost)
        other.link.send(b"good")
        await until(lambda: leader.bodies(2))
        await until(lambda: member.link.connected)
    await leader.close()
    assert len(errors) == 1


async def test_an_unforeseen_error_does_not_end_the_link() -> None:
    async with leading() as leader:
        member = Linked(leader.address)
        real = member.link._credentials.current

        def fails() -> Any:
            member.link._credentials.current = real  # type: ignore[method-assign]
            raise ZeroDivisionError("of the tests")

        member.link._credentials.current = fails  # type: ignore[method-assign]
        async with running(member):
            await until(lambda: member.link.connected)
        assert "of the tests" in member.changes[0][1]
