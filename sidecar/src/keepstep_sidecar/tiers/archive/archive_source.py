"""A shard in an archive as a source, and the parts of it that are read separately."""

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
from keepstep.image import PAGE_BYTES, ControlPage, Layout
from keepstep.image.layout import CHUNK_BYTES, read_length
from keepstep.steps import Tier
from keepstep_sidecar.tiers.archive.step_record import find_pieces_not_in_base
from keepstep_sidecar.tiers.archive.store import Store, StoredObject
from keepstep_sidecar.tiers.remote_tier import RemoteShard
from keepstep_sidecar.tiers.source import Read, ReadCancellation, ShardSource
from keepstep_sidecar.tiers.verified_chunks import Manifests

_FIRST_BYTES = 64 << 10
"""How much is read first. Most headers are shorter."""

IN_FLIGHT = 6
"""Ranges of one shard that are read at once. This keeps a link of 10 Gbit/s with 40 ms full."""


@dataclass(frozen=True, kw_only=True)
class ShardObject:
    """A shard's object. `rest`: the shard whose object has what this one leaves out. `own`: the
    pieces that this one has then, empty until they were needed."""

    name: str
    stored_bytes: int
    rest: RemoteShard | None = None
    own: list[int] = field(default_factory=list, compare=False)


@dataclass(frozen=True, kw_only=True)
class ArchiveSource(ShardSource):
    """See `ShardSource`. Stores work on the event loop `loop`; readers are on other threads."""

    place: ShardObject = field(repr=False)
    store: Store = field(compare=False, repr=False)
    loop: asyncio.AbstractEventLoop = field(compare=False, repr=False)
    received: Callable[[int, float], None] = field(compare=False, repr=False)
    """Called with the bytes and seconds of a read."""

    rest: ArchiveSource | None = field(default=None, compare=False, repr=False)
    """Where the rest is, if this is a twin's difference only."""

    tier: Tier = Tier.ARCHIVE
    streams: int = IN_FLIGHT

    @contextmanager
    def opened(self, cancel: ReadCancellation) -> Iterator[Read]:
        began, sizes = time.monotonic(), [0]

        def get(name: str, begin: int, view: memoryview) -> None:
            _on_loop(self.loop, cancel, self.store.read_range(name, begin, view))
            sizes.append(len(view))

        parts = self._in_one_file if self.rest is None else self._in_two_files(self.rest, get)

        def read(begin: int, into: Sequence[memoryview]) -> Iterator[memoryview]:
            for view in into:
                for name, at, part in parts(begin, view):
                    get(name, at, part)
                yield view
                begin += len(view)

        yield read
        self.received(sum(sizes), time.monotonic() - began)

    def _in_one_file(self, begin: int, view: memoryview) -> Iterator[_Part]:
        yield self.place.name, begin, view

    def _in_two_files(
        self, rest: ArchiveSource, get: _Get
    ) -> Callable[[int, memoryview], Iterator[_Part]]:
        own = self.place.own
        if not own:
            own[:] = self._own_pieces(rest, get)
        position = {piece: at for at, piece in enumerate(own)}

        def parts(begin: int, view: memoryview) -> Iterator[_Part]:
            done = 0
            while done < len(view):
                piece, inside = divmod(begin + done, CHUNK_BYTES)
                size = min(len(view) - done, CHUNK_BYTES - inside)
                at = position.get(piece)
                with view[done : done + size] as part:  # else it would hold the whole buffer
                    if at is None:
                        yield rest.place.name, begin + done, part
                    else:
                        yield self.place.name, at * CHUNK_BYTES + inside, part
                done += size

        return parts

    def _own_pieces(self, rest: ArchiveSource, get: _Get) -> list[int]:
        """The own pieces, from both tables. Our header is in the first piece, our table last."""
        left_out = self.shard.size_bytes - self.place.stored_bytes

        def own(begin: int, into: Sequence[memoryview]) -> Iterator[memoryview]:
            in_table = begin >= CHUNK_BYTES
            return _in_a_row(get, self.place.name, begin - left_out * in_table, into)

        def theirs(begin: int, into: Sequence[memoryview]) -> Iterator[memoryview]:
            return _in_a_row(get, rest.place.name, begin, into)

        manifests = Manifests()
        return find_pieces_not_in_base(manifests.read(self, own), manifests.read(rest, theirs))


_Part = tuple[str, int, memoryview]
"""Name of an object, an offset in it, and the buffer that is read from there."""
_Get = Callable[[str, int, memoryview], None]


def _in_a_row(get: _Get, name: str, begin: int, into: Sequence[memoryview]) -> Iterator[memoryview]:
    for view in into:
        get(name, begin, view)
        yield view
        begin += len(view)


def _on_loop(
    loop: asyncio.AbstractEventLoop, cancel: ReadCancellation, work: Coroutine[None, None, None]
) -> None:
    """Wait, on a thread, until `work` has ended on the loop, also if it is cancelled."""
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


async def read_image_size(store: Store, stored: StoredObject) -> int:
    """The image's size, from the header of an object. Raises StorageError, ImageError."""
    data, size = b"", min(_FIRST_BYTES, stored.bytes)
    try:
        while len(data) < size:
            buffer = bytearray(size - len(data))
            await store.read_range(stored.name, len(data), memoryview(buffer))
            data += buffer
            size = min(read_length(data), stored.bytes)
        return Layout.parse(data).size_bytes
    except ImageError as error:
        raise type(error)(error.reason, path=f"{store.where}/{stored.name}") from None


async def control_page(
    store: Store, stored: StoredObject, shard: Shard, *, run: str
) -> ControlPage:
    """The control page at the end of an object. Raises StorageError, ImageError; also if the page
    does not agree with `shard`."""
    buffer = bytearray(PAGE_BYTES)
    await store.read_range(stored.name, max(0, stored.bytes - PAGE_BYTES), memoryview(buffer))
    try:
        control = ControlPage.from_bytes(bytes(buffer))
        found = (control.run, control.step_id, control.rank, control.world)
        if found != (run, shard.step_id, shard.rank, shard.world):
            raise ForeignError(
                f"step {control.step_id}, rank {control.rank} of {control.world} of run"
                f" {control.run!r}, not step {shard.step_id}, rank {shard.rank} of {shard.world}"
                f" of run {run!r}"
            )
        if control.root is None:
            raise DigestError("sealed in memory only: it has no digests")
    except ImageError as error:
        raise type(error)(error.reason, path=f"{store.where}/{stored.name}") from None
    return control
