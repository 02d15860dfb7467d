"""The metrics port answers while the event loop of the process works, and says if it is stuck."""

from __future__ import annotations

import asyncio
import http.client
import threading
import time

import pytest
from prometheus_client import CollectorRegistry

from keepstep_operator import observing as module
from keepstep_operator.observing import observing
from tests.harness import until


def asked(port: int, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path)
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


async def test_health_is_answered_while_the_loop_works() -> None:
    answers: list[tuple[int, bytes]] = []
    async with observing(CollectorRegistry(), lambda: "", port=0) as port:
        asking = threading.Thread(target=lambda: answers.append(asked(port, "/healthz")))
        asking.start()
        asking.join()  # holds this loop
    assert answers == [(200, b"ok\n")]


async def test_a_loop_that_does_not_turn_is_not_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STUCK_S", 0.5)
    answers: list[tuple[int, bytes]] = []
    async with observing(CollectorRegistry(), lambda: "", port=0) as port:
        time.sleep(0.6)  # noqa: ASYNC251 - it is stuck
        asking = threading.Thread(target=lambda: answers.append(asked(port, "/healthz")))
        asking.start()
        asking.join()
        ((status, reason),) = answers
        assert (status, b"not turned" in reason) == (503, True)
        await until(lambda: asyncio.to_thread(lambda: asked(port, "/healthz")[0] == 200))
