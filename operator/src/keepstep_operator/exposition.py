"""`/metrics`, made in parts, between which other requests are answered.

With a thousand runs the text takes a tenth of a second, and any client of the port may ask as often
as it likes. So all requests within some time get the same text: making it never takes more than a
tenth of the loop's time.
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
"""Samples in one part, which takes a few milliseconds."""
_SHARE: Final = 0.1


class Exposition:
    """The metrics of a registry. `answer` is the handler."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._making: asyncio.Task[bytes] | None = None
        self._good_until = 0.0

    async def answer(self, request: web.Request) -> web.Response:
        if self._making is None or (self._making.done() and time.monotonic() >= self._good_until):
            self._making = asyncio.create_task(self._make(), name="tell metrics")
        text = await asyncio.shield(self._making)  # other requests may wait for it, too
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
    """The text in parts. The comment lines of a family appear only once, before its samples."""
    for family in registry.collect():
        samples = family.samples
        for first in range(0, max(1, len(samples)), _AT_ONCE):
            family.samples = samples[first : first + _AT_ONCE]
            text = generate_latest(_Part(family))
            yield text if first == 0 else _samples(text)


def _samples(text: bytes) -> bytes:
    return b"".join(line for line in text.splitlines(True) if not line.startswith(b"# "))
