"""Several connections of one transfer: how many, and that none waits for another one's buffer."""

from __future__ import annotations

import io
import socket
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from keepstep_sidecar.tiers.peer import client, handlers
from keepstep_sidecar.tiers.peer.body import receive
from keepstep_sidecar.tiers.peer.copies import Copies
from keepstep_sidecar.tiers.peer.protocol import STREAMS
from keepstep_sidecar.tiers.peer.tls import FileCredentials
from tests.harness import until
from tests.peer.nodes import BIG, Node, running
from tests.tiers.local import durable

Make = Callable[..., Node]


class Crowd:
    """Counts who is within `write` at once, and holds them until `wanted` are, or nobody comes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, wanted: int) -> None:
        self.most, self._now, self._lock = 0, 0, threading.Lock()
        self._enough = threading.Event()
        write = Copies.write

        def crowded(copies: Copies, *arguments: object, **more: str) -> None:
            with self._lock:
                self._now += 1
                self.most = max(self.most, self._now)
            if self.most >= wanted:
                self._enough.set()
            self._enough.wait(10)
            write(copies, *arguments, **more)  # type: ignore[arg-type]
            with self._lock:
                self._now -= 1

        monkeypatch.setattr(Copies, "write", crowded)


async def copied(here: Node, buddy: Node) -> None:
    """A large shard, from one node to the other."""
    async with running(here, buddy):
        _, found = here.write(5, rank=0, parameters=BIG)
        durable(here.remote_tier, found)
        await until(lambda: buddy.copies() == [(5, 0)])


async def test_chunks_of_a_copy_arrive_while_others_are_digested_and_written(
    node: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, buddy = node(0), node(1)
    here.knows(buddy, buddies=(buddy,))
    crowd = Crowd(monkeypatch, wanted=STREAMS)
    await copied(here, buddy)
    assert crowd.most == STREAMS


async def test_a_connection_that_asks_for_nothing_keeps_no_buffer(
    node: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handlers, "_MOST_BUFFERS", 1)
    monkeypatch.setattr(handlers, "_BUFFER_WAIT_S", 5.0)
    here, other = node(0), node(1)
    async with running(here, other):
        _, found = other.write(5, rank=1)
        size = found.size_bytes
        seen = []

        def ask() -> None:
            own = FileCredentials(here.files)
            with client.Link(other.address, own) as one, client.Link(other.address, own) as two:
                for link in (one, two, one, two):
                    into = memoryview(bytearray(size))
                    with link.range(found, 0, size) as fill:
                        fill(into)
                    seen.append(bytes(into))

        await here.remote_tier._calls.here(ask)
        assert seen == [found.path.read_bytes()] * 4


def test_buffers_are_used_again_and_given_back_when_a_connection_ends() -> None:
    buffers = handlers.Buffers()
    with buffers.taken() as view:
        view[:4] = b"mine"
    with buffers.taken() as first:
        assert first[:4] == b"mine"
        with buffers.taken() as second:
            assert second[:4] == bytes(4)
    buffers.trim()
    assert not buffers._idle
    with buffers.taken() as view:
        assert view[:4] == bytes(4)


def test_what_was_read_with_the_head_is_the_beginning_of_the_body() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, ours.makefile("rb") as buffered:
        theirs.sendall(b"head\n" + bytes(range(256)) * 64)
        assert buffered.readline() == b"head\n"
        parts = [memoryview(bytearray(size)) for size in (3, 10_000, 256 * 64 - 10_003)]
        assert [receive(buffered, ours, part) for part in parts] == [len(one) for one in parts]
        assert b"".join(parts) == bytes(range(256)) * 64
        theirs.sendall(b"end")
        theirs.close()
        assert receive(buffered, ours, memoryview(bytearray(9))) == 3


def test_a_body_that_is_shorter_than_what_was_asked_for_is_refused_before_it_is_waited_for() -> (
    None
):
    response = SimpleNamespace(length=3, fp=io.BufferedReader(io.BytesIO(b"abcdef")))
    with pytest.raises(client.http.client.HTTPException, match="1 bytes too early"):
        client._fill(response, None, memoryview(bytearray(4)))  # type: ignore[arg-type]
