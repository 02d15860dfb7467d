"""A trainer without torch: fills slots with real images, speaks the protocol as the library does.

Several ranks live in one test process, each a `FakeTrainer` with connections of its own; one that
must die for real runs `main` below in a process of its own.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import mmap
import os
import secrets
import select
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from keepstep.core.restore_vote import Candidates, choose_step
from keepstep.errors import SidecarError
from keepstep.image import ControlPage, Layout, TensorRole, TensorSpec
from keepstep.steps import Epoch, EpochId, StepId
from keepstep.wire.trainer import (
    CandidatesRequest,
    DiscardSlotRequest,
    LayoutAccepted,
    LayoutRequest,
    LeaseGranted,
    LeaseRequest,
    OpenedStep,
    Problem,
    ReleaseSlotsRequest,
    RestoredRequest,
    RestoreStepRequest,
    SkippedRequest,
    SlotGranted,
    SlotRequest,
    StagedRequest,
    Waited,
    WaitRequest,
    from_json,
    to_json,
)
from tests.harness import eventually

T = TypeVar("T")


class Connection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=60)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def call(path: Path, route: str, message: Any, kind: type[T]) -> T:
    """One POST on a connection of its own. Raises SidecarError with the problem's code."""
    connection = Connection(path)
    try:
        return call_on(connection, route, message, kind)
    finally:
        connection.close()


def call_on(connection: Connection, route: str, message: Any, kind: type[T]) -> T:
    connection.request("POST", route, to_json(message), {"Content-Type": "application/json"})
    response = connection.getresponse()
    data = response.read()
    if response.status != 200:
        problem = from_json(Problem, data)
        raise SidecarError(problem.message, code=problem.code)
    return from_json(kind, data)


def make_layout(
    rank: int = 0, world: int = 1, *, size: int = 64 << 10, name: str = "w", **more: Any
) -> Layout:
    """An image of about `size` bytes: parameters and optimizer state."""
    specs = [
        TensorSpec(
            name=f"model.{name}", dtype="F32", shape=(size // 8,), section=TensorRole.PARAMS
        ),
        TensorSpec(
            name=f"opt.{name}", dtype="U8", shape=(size // 2,), section=TensorRole.OPTIMIZER
        ),
    ]
    return Layout.build(specs, rank=rank, world=world, **more)


def content(layout: Layout, step: int) -> bytes:
    """The tensors' bytes at a step: different for every step and rank."""
    begin, end = len(layout.header), layout.extras_begin
    seed = hashlib.blake2b(f"{layout.rank}/{step}".encode(), digest_size=64).digest()
    return (seed * ((end - begin) // 64 + 1))[: end - begin]


class FakeTrainer:
    """One rank."""

    def __init__(self, path: Path, rank: int = 0, world: int = 1, *, size: int = 64 << 10) -> None:
        self.path, self.rank, self.world = path, rank, world
        self.layout = make_layout(rank, world, size=size)
        self.attempt = secrets.token_hex(8)
        self.epoch = Epoch(EpochId(1, "00000001"))
        self.granted: LeaseGranted | None = None
        self.slot: SlotGranted | None = None
        self._lease: Connection | None = None

    # --- lease -------------------------------------------------------------------------------

    def connect(self, *, holding: tuple[str, ...] = (), **fields: Any) -> LeaseGranted:
        request = LeaseRequest(
            rank=self.rank,
            world=self.world,
            attempt=self.attempt,
            pid=os.getpid(),
            library="test",
            holding=holding,
            **fields,
        )
        self.disconnect()
        self._lease = Connection(self.path)
        self._lease.request("POST", "/v1/lease", to_json(request))
        self._sock = self._lease.sock
        response = self._lease.getresponse()
        if response.status != 200:
            problem = from_json(Problem, response.read())
            self._lease.close()
            self._lease = None
            raise SidecarError(problem.message, code=problem.code)
        self._stream = response
        self.granted = from_json(LeaseGranted, response.readline())
        return self.granted

    def disconnect(self) -> None:
        if self._lease is not None:
            with contextlib.suppress(OSError):  # the sidecar may have been first
                self._sock.shutdown(socket.SHUT_RDWR)
            self._stream.close()
            self._lease.close()
        self._lease = None

    def news(self, kind: type[T]) -> T:
        """The next line of the lease's stream; waits for it."""
        return from_json(kind, self._stream.readline())

    def release(self) -> None:
        self.call("/v1/release", ReleaseSlotsRequest(lease=self.lease), dict)
        self.disconnect()

    def id_of(self, step: int) -> StepId:
        return StepId(self.epoch.id, step)

    @property
    def ended(self) -> bool:
        """Whether the sidecar has ended the lease; reads what it has sent until now."""
        if self._lease is None:
            return True
        while self._has_more():
            if not self._stream.readline():
                return True
        return False

    def _has_more(self) -> bool:
        """Whether a line, or the end, has come. No select shows what was read ahead: it is behind
        the end of the chunk that was the last line."""
        self._sock.setblocking(False)
        ahead = self._stream.fp.peek(1).removeprefix(b"\r\n")
        self._sock.settimeout(60)
        return bool(ahead) or bool(select.select([self._sock], [], [], 0)[0])

    @property
    def lease(self) -> str:
        assert self.granted is not None
        return self.granted.lease

    def call(self, route: str, message: Any, kind: type[T]) -> T:
        return call(self.path, route, message, kind)

    # --- restore -----------------------------------------------------------------------------

    def candidates(self, timeout_s: float = 10.0) -> Candidates:
        request = CandidatesRequest(lease=self.lease, timeout_s=timeout_s)
        return self.call("/v1/candidates", request, Candidates)

    def open(self, step_id: StepId) -> OpenedStep:
        return self.call(
            "/v1/restore", RestoreStepRequest(lease=self.lease, id=step_id), OpenedStep
        )

    def restored(self, epoch: Epoch) -> None:
        self.epoch = epoch
        self.call("/v1/restored", RestoredRequest(lease=self.lease, epoch=epoch), dict)

    # --- save --------------------------------------------------------------------------------

    def register(self, layout: Layout | None = None) -> LayoutAccepted:
        self.layout = layout or self.layout
        header = base64.b64encode(self.layout.header).decode()
        request = LayoutRequest(lease=self.lease, header=header)
        return self.call("/v1/layout", request, LayoutAccepted)

    def take_slot(self, *, timeout_s: float = 20.0) -> SlotGranted:
        request = SlotRequest(lease=self.lease, layout=self.layout.id, timeout_s=timeout_s)
        self.slot = self.call("/v1/slot", request, SlotGranted)
        return self.slot

    def begin(self, *, timeout_s: float = 20.0) -> Path:
        """Zero a slot, as a trainer does before it fills it. Returns its path."""
        if self.slot is None or self.slot.slot is None:
            self.take_slot(timeout_s=timeout_s)
        assert self.slot is not None
        assert self.slot.slot is not None, "no slot became free"
        self._write(b"\0" * 4096, self.layout.control_begin)
        return Path(self.slot.path)

    def fill(self, step: int) -> None:
        """Write tensors and, last, the seal."""
        self.copy(step, 0, self.layout.size_bytes)
        self.seal(self.control(step))

    def control(self, step: int) -> ControlPage:
        """What an image of this step that is begun now is sealed with."""
        return ControlPage(
            run=self.granted.run if self.granted else "run",
            layout=self.layout.id,
            epoch=self.epoch,
            rank=self.rank,
            world=self.world,
            step=step,
            extras_bytes=0,
            staged_at=time.time(),
        )

    def copy(self, step: int, begin: int, end: int) -> None:
        """Write what of the tensors lies in these bytes of the image."""
        first = len(self.layout.header)
        begin, end = max(begin, first), min(end, self.layout.extras_begin)
        self._write(content(self.layout, step)[begin - first : end - first], begin)

    def seal(self, control: ControlPage) -> None:
        self._write(control.to_bytes(), self.layout.control_begin)

    def report(self, step: int, *, cost: float | None = None) -> SlotGranted:
        """Say that the image is complete. Returns (and keeps) the next slot."""
        assert self.slot is not None
        request = StagedRequest(
            lease=self.lease,
            slot=str(self.slot.slot),
            generation=self.slot.generation,
            epoch=self.epoch,
            step=step,
            copy_s=0.25,
            blocked_s=0.125,
            cost=cost,
        )
        self.slot = self.call("/v1/staged", request, SlotGranted)
        return self.slot

    def stage(self, step: int) -> StepId:
        self.begin()
        self.fill(step)
        self.report(step)
        return StepId(self.epoch.id, step)

    def discard(self, step: int, reason: str = "a tensor changed") -> SlotGranted:
        assert self.slot is not None
        request = DiscardSlotRequest(
            lease=self.lease,
            slot=str(self.slot.slot),
            generation=self.slot.generation,
            step=step,
            reason=reason,
        )
        self.slot = self.call("/v1/discard", request, SlotGranted)
        return self.slot

    def skip(self, step: int, reason: str) -> None:
        request = SkippedRequest(lease=self.lease, step=step, reason=reason)
        self.call("/v1/skipped", request, dict)

    def wait(
        self, step_id: StepId, state: str, *, timeout_s: float = 20.0, flush: bool = False
    ) -> Waited:
        request = WaitRequest(
            lease=self.lease, id=step_id, state=state, timeout_s=timeout_s, flush=flush
        )
        return self.call("/v1/wait", request, Waited)

    def begin_run(self, **fields: Any) -> FakeTrainer:
        """Lease, a fresh epoch, layout. `fields`: of the lease's request."""
        self.connect(**fields)
        return self.go_on()

    def go_on(self) -> FakeTrainer:
        """After `connect`: a fresh epoch, layout."""
        self.restored(self.epoch)
        self.register()
        return self

    def _write(self, data: bytes, offset: int) -> None:
        assert self.slot is not None
        with open(self.slot.path, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            memory[offset : offset + len(data)] = data


def come_back(trainer: FakeTrainer) -> None:
    """As the library does when its lease has ended: it fills nothing that it had before."""
    eventually(lambda: trainer.ended, what="the sidecar ends the lease")
    trainer.connect()
    trainer.register()
    trainer.slot = None


class Ranks:
    """One rank at each of the sockets: the trainers of a run of several machines."""

    def __init__(self, trainers: Callable[..., FakeTrainer]) -> None:
        self._trainers = trainers
        self.ranks: list[FakeTrainer] = []

    def come(self, sockets: list[Path], *, local_world: int = 1) -> list[FakeTrainer]:
        """Ranks that have not restored yet."""
        self.ranks = [self._trainers(path, at, len(sockets)) for at, path in enumerate(sockets)]
        for rank in self.ranks:
            rank.connect(local_world=local_world)
        return self.ranks

    def restore(self, epoch: str = "00000002") -> StepId:
        """As the library does: vote, open, verify, begin the next epoch."""
        decision = choose_step([rank.candidates() for rank in self.ranks])
        assert decision.id is not None
        for rank in self.ranks:
            opened = rank.open(decision.id)
            assert read_image(rank.layout, opened.path) == content(rank.layout, decision.id.step)
        for rank in self.ranks:
            rank.restored(decision.make_epoch(epoch))
            rank.register()
        return decision.id

    def stage(self, step: int) -> StepId:
        (step_id,) = {rank.stage(step) for rank in self.ranks}
        return step_id

    def reach(self, step: int, state: str = "committed", *, timeout_s: float = 20.0) -> StepId:
        """Stage a step on all, and wait until all see it in this state."""
        step_id = self.stage(step)
        for rank in self.ranks:
            assert rank.wait(step_id, state, flush=True, timeout_s=timeout_s).reached, state
        return step_id

    def disconnect(self) -> None:
        for rank in self.ranks:
            rank.disconnect()


def read_image(layout: Layout, path: str | Path) -> bytes:
    """The tensors' bytes of an image."""
    with open(path, "rb") as file:
        file.seek(len(layout.header))
        return file.read(layout.extras_begin - len(layout.header))


def lose_memory_and_damage(root: Path, memory_dir: Path, layout: Layout) -> None:
    """While the sidecar is gone: every image in memory too, and one bit of the committed shard."""
    for path in memory_dir.glob("rank-*/*"):
        path.unlink()
    shard = next(root.glob("0*/rank-*"))
    damaged = bytearray(shard.read_bytes())
    damaged[layout.extras_begin // 2] ^= 1
    shard.write_bytes(damaged)


def main(path: str, steps: int, until: str) -> None:
    """Train `steps` steps as rank 0; then stop at `until` (filling, sealed), say so, and hang."""
    trainer = FakeTrainer(Path(path), size=64 << 10).begin_run()
    for step in range(steps):
        trainer.stage(step)
    trainer.begin()
    if until == "sealed":
        trainer.fill(steps)
    print("ready", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
