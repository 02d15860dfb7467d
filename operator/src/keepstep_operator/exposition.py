"""`/metrics`, made in parts: others are answered between two of them.

With a thousand runs it takes a tenth of a second, and whoever reaches the port may ask as often as
they like. So all who ask within a while are told the same: to make it never takes more than a tenth
of the loop's time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Final

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

_AT_ONCE: Final = 500
"""Samples of a part: a few milliseconds."""
_SHARE: Final = 0.1


class Exposition:
    """What a registry tells; `answer` is the handler."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._making: asyncio.Task[bytes] | None = None
        self._good_until = 0.0

    async def answer(self, request: web.Request) -> web.Response:
        if self._making is None or (self._making.done() and time.monotonic() >= self._good_until):
            self._making = asyncio.create_task(self._make(), name="tell metrics")
        text = await asyncio.shield(self._making)  # somebody else may wait for it, too
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    async def _make(self) -> bytes:
        found, spent_s, parts = list[bytes](), 0.0, _parts(self._registry)
        while True:
            begun_s = time.thread_time()
            part = next(parts, None)
            spent_s += time.thread_time() - begun_s
            if part is None:
                break
            found.append(part)
            await asyncio.sleep(0)
        self._good_until = time.monotonic() + spent_s / _SHARE
        return b"".join(found)


class _Part(Collector):
    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterator[Metric]:
        yield self._family


def _parts(registry: CollectorRegistry) -> Iterator[bytes]:
    """The text; what stands above a family's samples stands there once."""
    for family in registry.collect():
        samples = family.samples
        for first in range(0, max(1, len(samples)), _AT_ONCE):
            family.samples = samples[first : first + _AT_ONCE]
            text = generate_latest(_Part(family))
            yield text if first == 0 else _samples(text)


def _samples(text: bytes) -> bytes:
    return b"".join(line for line in text.splitlines(True) if not line.startswith(b"# "))
