"""A shard in an archive as a source, and the parts of it that are asked for alone."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

from keepstep.core.shard import Shard
from keepstep.errors import DigestError, ForeignError, ImageError
from keepstep.image import PAGE_BYTES, ControlPage
from keepstep.steps import Tier
from keepstep_sidecar.tiers.archive.store import Store
from keepstep_sidecar.tiers.source import Cancel, Read

IN_FLIGHT = 6
"""Ranges of one shard that are asked for at once: a link of 10 Gbit/s with 40 ms is kept full."""


@dataclass(frozen=True, kw_only=True)
class ArchiveSource:
    """See `ShardSource`. Stores speak on the event loop `loop`; whoever reads does not."""

    shard: Shard
    where: str
    run: str
    name: str
    store: Store = field(compare=False, repr=False)
    loop: asyncio.AbstractEventLoop = field(compare=False, repr=False)
    received: Callable[[int, float], None] = field(compare=False, repr=False)
    """Told of bytes and seconds."""

    tier: Tier = Tier.ARCHIVE
    streams: int = IN_FLIGHT
    run_chunks: int = 1
    verified_loads: bool = True
    adopted_by: str = ""

    @contextmanager
    def opened(self, cancel: Cancel) -> Iterator[Read]:
        began, sizes = time.monotonic(), [0]

        def read(begin: int, into: Sequence[memoryview]) -> Iterator[memoryview]:
            for view in into:
                _on_loop(self.loop, cancel, self.store.read(self.name, begin, view))
                sizes.append(len(view))
                yield view
                begin += len(view)

        yield read
        self.received(sum(sizes), time.monotonic() - began)


def _on_loop(
    loop: asyncio.AbstractEventLoop, cancel: Cancel, work: Coroutine[None, None, None]
) -> None:
    """Wait, on a thread, until `work` has ended on the loop: also when it is cancelled."""
    result: Future[None] = Future()

    async def watched() -> None:
        try:
            await work
            result.set_result(None)
        except BaseException as error:
            result.set_exception(error)

    def begin() -> None:
        task = loop.create_task(watched())
        cancel.add(functools.partial(_call_soon, loop, task.cancel))

    loop.call_soon_threadsafe(begin)
    result.result()


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended, and with it all tasks
        loop.call_soon_threadsafe(call)


async def control_page(store: Store, name: str, shard: Shard, *, run: str) -> ControlPage:
    """Of the object `name`. Raises StorageError, ImageError: also when it is not what `shard`
    says."""
    buffer = bytearray(PAGE_BYTES)
    await store.read(name, max(0, shard.size_bytes - PAGE_BYTES), memoryview(buffer))
    try:
        control = ControlPage.from_bytes(bytes(buffer))
        found = (control.run, control.id, control.rank, control.world)
        if found != (run, shard.step_id, shard.rank, shard.world):
            raise ForeignError(
                f"step {control.id}, rank {control.rank} of {control.world} of run {control.run!r},"
                f" not step {shard.step_id}, rank {shard.rank} of {shard.world} of run {run!r}"
            )
        if control.root is None:
            raise DigestError("sealed in memory only: it has no digests")
    except ImageError as error:
        raise type(error)(error.reason, path=f"{store.where}/{name}") from None
    return control
