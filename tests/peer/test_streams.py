"""Several connections of one transfer: how many, and that none waits for another one's buffer."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from keepstep_sidecar.tiers.peer import client
from keepstep_sidecar.tiers.peer.copies import Copies
from keepstep_sidecar.tiers.peer.protocol import STREAMS
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


def test_a_body_that_is_shorter_than_what_was_asked_for_is_refused_before_it_is_waited_for() -> (
    None
):
    response = SimpleNamespace(length=3, fp=io.BufferedReader(io.BytesIO(b"abcdef")))
    with pytest.raises(client.http.client.HTTPException, match="1 bytes too early"):
        client._fill(response, None, memoryview(bytearray(4)))  # type: ignore[arg-type]
