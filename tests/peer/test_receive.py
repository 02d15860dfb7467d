"""An unfinished copy under several connections at once, and what a request may name and weigh."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keepstep.errors import StorageError
from keepstep.image import PAGE_BYTES
from keepstep.image.layout import CHUNK_BYTES
from keepstep.steps import shard_name
from keepstep_sidecar.tiers.incoming_copy import IncomingCopy
from keepstep_sidecar.tiers.peer import client, handlers
from keepstep_sidecar.tiers.peer.kept_copies import KeptCopies
from keepstep_sidecar.volume.files import Filesystem, aligned_buffer
from keepstep_sidecar.volume.run_tree import ShardName
from keepstep_sidecar.volume.volume import Volume
from tests.volume.images import RUN, make_layout, staged, step_id


class Slow(Filesystem):
    """Stops within the first write, or read, that it was told to."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.reached, self.go_on = threading.Event(), threading.Event()
        real = getattr(self, name)

        def slow(*arguments: Any) -> Any:
            self.reached.set()
            assert self.go_on.wait(20)
            return real(*arguments)

        setattr(self, name, slow)


@pytest.fixture
def sender(tmp_path: Path) -> Iterator[Volume]:
    made = Volume(tmp_path / "sender" / RUN, run=RUN)
    yield made
    made.close()


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Volume]:
    made = Volume(tmp_path / "keeper" / RUN, run=RUN)
    yield made
    made.close()


def sealed(volume: Volume, rank: int) -> tuple[ShardName, bytes, bytes]:
    """Name, manifest and first chunk of a shard."""
    slot = staged(make_layout(rank=rank), 1)
    data = volume.write(slot.view, slot.layout, slot.control).shard.path.read_bytes()
    begin, end = len(slot.layout.header), slot.layout.digests_begin
    manifest = data[:begin] + data[end:]
    return ShardName(id=step_id(1), rank=rank, world=2), manifest, data[: min(end, CHUNK_BYTES)]


def begun(copies: KeptCopies, name: ShardName, manifest: bytes) -> IncomingCopy:
    part = copies.begin(name, memoryview(manifest), whose="the test")
    assert part is not None
    return part


def in_thread(work: Any) -> tuple[threading.Thread, list[BaseException]]:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, failed


def test_a_copy_that_is_closed_within_a_write_never_writes_into_another_file(
    sender: Volume, keeper: Volume, tmp_path: Path
) -> None:
    name, manifest, chunk = sealed(sender, 0)
    slow = Slow("write")
    keeper.filesystem = slow
    copies = KeptCopies([keeper], run=RUN)
    part = begun(copies, name, manifest)
    with aligned_buffer(len(chunk)) as buffer:
        buffer[:] = chunk
        writer, failed = in_thread(lambda: part.write(0, memoryview(buffer), whose="the test"))
        assert slow.reached.wait(20)
        part.close()
        others = [os.open(tmp_path / f"other-{n}", os.O_CREAT | os.O_RDWR) for n in range(9)]
        slow.go_on.set()
        writer.join(20)
    assert failed == []
    assert [os.fstat(fd).st_size for fd in others] == [0] * 9
    for fd in others:
        os.close(fd)
    with pytest.raises(StorageError, match="from its beginning"):
        part.write(0, memoryview(chunk), whose="the test")
    copies.close()


def test_a_copy_that_could_not_be_read_is_found_by_a_later_scan(
    sender: Volume, keeper: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in (0, 1):
        path = sender.write(*_slot(rank)).shard.path
        target = keeper.root / "peers" / str(step_id(1)) / shard_name(rank, 2)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    copies = KeptCopies([keeper], run=RUN)
    real = os.open

    def failing(path: Any, *rest: Any, **more: Any) -> int:
        if Path(path).name == shard_name(0, 2):
            raise OSError(5, "Input/output error")
        return real(path, *rest, **more)

    with monkeypatch.context() as broken:
        broken.setattr(os, "open", failing)
        copies.scan()
    assert ("Input/output" in copies.unreadable, [shard.rank for shard in copies.all()]) == (
        True,
        [1],
    )
    copies.scan()
    assert (copies.unreadable, [shard.rank for shard in copies.all()]) == ("", [0, 1])


def _slot(rank: int) -> tuple[Any, Any, Any]:
    slot = staged(make_layout(rank=rank), 1)
    return slot.view, slot.layout, slot.control


class Announced:
    """A connection that announces a large body and sends next to nothing of it."""

    def __init__(self, size: int, context: handlers.ServerContext) -> None:
        self.headers = {"Content-Length": str(size)}
        self.command, self.path, self.context = "POST", "/v1/copies", context
        self._may_be_large = False
        self.asked: list[int] = []
        self.rfile = SimpleNamespace(read=self._read)

    def _length(self) -> int:
        return handlers.Handler._length(self)  # type: ignore[arg-type]

    def _read(self, size: int) -> bytes:
        self.asked.append(size)
        return b"" if len(self.asked) > 1 else b"x" * PAGE_BYTES


def test_a_request_body_allocates_only_the_memory_that_has_arrived() -> None:
    context = handlers.ServerContext(None, None)  # type: ignore[arg-type]
    server = Announced(150 << 20, context)
    with pytest.raises(ConnectionError):
        handlers.Handler._body(server, handlers._LARGEST_MANIFEST)  # type: ignore[arg-type]
    assert max(server.asked) <= 1 << 20
    assert not context.large.acquire(blocking=False), "one large body at a time"


def test_a_response_shorter_than_requested_is_refused_without_waiting() -> None:
    response = SimpleNamespace(length=3, fp=io.BufferedReader(io.BytesIO(b"abcdef")))
    with pytest.raises(client.http.client.HTTPException, match="1 bytes too early"):
        client._fill(response, None, memoryview(bytearray(4)))  # type: ignore[arg-type]
