"""A restore gets its slot, whatever others do to the slots meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keepstep.errors import NoMemoryError
from keepstep.image import Layout, TensorRole, TensorSpec
from keepstep.wire.trainer import LeaseRequest
from keepstep_sidecar.api.restoring import RestoreHandlers
from keepstep_sidecar.api.saving import SaveHandlers
from keepstep_sidecar.api.sidecar_service import SidecarService
from keepstep_sidecar.concurrency import ChangeNotifier, Tasks
from keepstep_sidecar.leases import Lease, Leases
from keepstep_sidecar.memory.slot_allocator import SlotAllocator
from keepstep_sidecar.memory.slot_directories import SlotDirectories, rank_directory
from keepstep_sidecar.memory.slot_file import SlotFile, slot_name
from keepstep_sidecar.memory.slot_pool import SlotPool, SlotSet
from keepstep_sidecar.restore.fetcher import Fetcher, MemoryImageLoader
from keepstep_sidecar.tiers.source import local_source
from keepstep_sidecar.volume.volume import Volume, VolumeSet
from tests.harness import until
from tests.volume.images import RUN, make_layout, staged, step_id

BASE = Layout.build(
    [TensorSpec("model.frozen", "F32", (6000,), TensorRole.PARAMS)], rank=0, world=1, is_base=True
)


def lease_of(attempt: str, *, training: bool = False) -> Lease:
    request = LeaseRequest(
        rank=0, world=1, attempt=attempt, pid=1, library="of the tests", local_world=1
    )
    lease = Lease(attempt, request)
    lease.training = training
    return lease


class Machine:
    """The memory of one rank, whose steps 4 and 5 lie on the drive; step 5 is planned."""

    def __init__(self, home: Path, memory: Path) -> None:
        self.layout = make_layout(world=1)
        self.volumes = VolumeSet([Volume(home / RUN, run=RUN)])
        for number in (4, 5):
            slot = staged(self.layout, number)
            self.volumes.write(slot.view, self.layout, slot.control)
        shards = {shard.step_id: shard for shard in self.volumes.scan().shards}
        self.memory, self.changes = memory, ChangeNotifier()
        self.pool = SlotPool(SlotDirectories(memory), run=RUN)
        self.slots = self.pool.rank(0)
        self.leases = Leases(self.changes)
        config: Any = SimpleNamespace(slots=2, memory_limit_bytes=None)
        self.config = config
        self.allocator = SlotAllocator(
            config=config, pool=self.pool, leases=self.leases, changes=self.changes, threads=2
        )
        self.plan = step_id(5)
        self.whole = [*shards]

        async def reject(*_: Any, **options: Any) -> None:
            pass

        self.node_host: Any = SimpleNamespace(
            get_current_ledger=lambda: SimpleNamespace(list_reachable_steps=lambda: self.whole),
            restart=SimpleNamespace(plan=lambda: SimpleNamespace(id=self.plan)),
            copies=SimpleNamespace(
                sources_of_shard=lambda image, rank: [local_source(self.volumes, shards[image])]
            ),
            remotes=SimpleNamespace(scanned=True),
            feed=lambda event: [],
            reject_copy=reject,
        )
        self.threads = ThreadPoolExecutor(4)
        self.loader = MemoryImageLoader(
            self.pool,
            self.node_host,
            Fetcher(self.pool, self.node_host, self.threads),
            changes=self.changes,
            allocator=self.allocator,
            leases=self.leases,
        )

    def take(self, lease: Lease) -> None:
        self.leases._by_rank[0] = self.leases._by_token[lease.token] = lease

    def made(self, step: int | None, layout: Layout | None = None) -> SlotSet:
        """A set with one more slot, which holds this step."""
        layout = layout or self.layout
        slot_set = self.slots.slot_sets.setdefault(layout.id, SlotSet(layout))
        path = rank_directory(self.memory, 0) / slot_name(layout, len(slot_set.files))
        file = SlotFile.create(path, layout, stop=threading.Event())
        index = slot_set.add(file)
        if step is not None:
            file.view[:] = staged(layout, step).view[:]
            slot_set.table.adopt(index, step_id(step))
        slot_set.target = len(slot_set.files)
        return slot_set

    async def repair(self) -> None:
        """One look of the watch over memory."""
        service: Any = SimpleNamespace(
            _repairing=asyncio.Lock(),
            slots=self.pool,
            leases=self.leases,
            allocator=self.allocator,
            changes=self.changes,
            ending=False,
        )
        await SidecarService.repair_memory(service)

    def close(self) -> None:
        self.allocator.stop()
        self.threads.shutdown()
        self.volumes.close()


@pytest.fixture
def machine(tmp_path: Path, memory_dir: Path) -> Iterator[Machine]:
    made = Machine(tmp_path, memory_dir)
    yield made
    made.close()


@contextlib.asynccontextmanager
async def working(machine: Machine) -> AsyncIterator[None]:
    async with Tasks() as tasks:
        for number in range(2):
            tasks.spawn_with_retries(machine.allocator.run, f"make slots {number}")
        yield


class Held:
    """Slots are made as far as their name, and then only once they are `let`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.let = threading.Semaphore(0), threading.Event()
        make = SlotFile.create

        def create(path: Path, layout: Layout, *, stop: threading.Event) -> SlotFile:
            self.reached.release()
            assert self.let.wait(60)
            return make(path, layout, stop=stop)

        monkeypatch.setattr(SlotFile, "create", create)


async def test_a_restore_gets_another_slot_when_the_one_that_it_opened_lost_its_name(
    machine: Machine,
) -> None:
    machine.take(lease_of("a"))
    async with working(machine):
        await machine.loader.bring_image(step_id(5), 0)
        slot = machine.slots.find(step_id(5))
        assert slot is not None
        slot.file.path.unlink()
        assert machine.pool.find_verified(0, step_id(5), bad={str(slot.file.path)}) is None
        await asyncio.wait_for(machine.loader.bring_image(step_id(5), 0), 30)
    assert machine.pool.find_verified(0, step_id(5)) is not None


async def test_a_shortage_of_memory_that_has_passed_refuses_no_restore(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **options: Any) -> SlotFile:
        raise NoMemoryError("no room for a slot", code="no-memory")

    async with working(machine):
        with monkeypatch.context() as patched:
            patched.setattr(SlotFile, "create", fails)
            with pytest.raises(NoMemoryError, match="no room for a slot"):
                await machine.loader.bring_image(step_id(5), 0)
        machine.take(lease_of("a"))
        await asyncio.wait_for(machine.loader.bring_image(step_id(5), 0), 30)


def trainer_comes(machine: Machine) -> None:
    machine.pool.unlink(machine.slots.bases.drop_unsealed())


def rank_stages(machine: Machine) -> None:
    machine.pool.unlink(machine.slots.free_unused_bases())


def directory_is_removed(machine: Machine) -> None:
    shutil.rmtree(rank_directory(machine.memory, 0))


@pytest.mark.parametrize("act", [trainer_comes, rank_stages, directory_is_removed])
async def test_a_base_is_read_although_its_slot_is_given_up_while_it_is_made(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, act: Callable[[Machine], None]
) -> None:
    held = Held(monkeypatch)
    async with working(machine):
        waits = asyncio.create_task(machine.allocator.allocate_base_slot(machine.slots, BASE))
        await asyncio.to_thread(held.reached.acquire)
        act(machine)
        held.let.set()
        await asyncio.sleep(0.2)
        await machine.repair()
        slot = await asyncio.wait_for(waits, 30)
    assert slot.file.path.exists()
    assert machine.slots.bases.sets[BASE.id] is slot.slot_set


@pytest.mark.parametrize("removed", ["directory", "file"])
async def test_slots_whose_files_are_removed_while_they_are_made_are_made_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, removed: str
) -> None:
    slot_set = machine.made(None)
    machine.slots.current, slot_set.target = slot_set, 3
    fails, made = threading.Event(), SlotFile.create
    reached = threading.Event()

    def create(path: Path, layout: Layout, *, stop: threading.Event) -> SlotFile:
        if not reached.is_set():
            reached.set()
            assert fails.wait(60)
            raise FileNotFoundError("its name went")
        return made(path, layout, stop=stop)

    monkeypatch.setattr(SlotFile, "create", create)
    async with working(machine):
        machine.allocator.fill(slot_set)
        await asyncio.to_thread(reached.wait)
        if removed == "directory":
            directory_is_removed(machine)
            await machine.repair()
        fails.set()
        await until(lambda: not machine.allocator._making)
        await machine.repair()
        await until(lambda: slot_set.count == 3)


async def test_a_prefetch_takes_no_slot_of_a_rank_that_trains(machine: Machine) -> None:
    slot_set = machine.made(8)
    machine.made(9)
    machine.whole = [step_id(number) for number in (4, 5, 8, 9)]
    machine.config.memory_limit_bytes = machine.pool.made_bytes
    lease = lease_of("a")
    machine.take(lease)
    async with working(machine):
        for index in (0, 1):
            slot_set.table.pin(index)  # they are being written
        prefetch = asyncio.create_task(machine.loader.bring_image(step_id(5), 0))
        await asyncio.sleep(0.2)
        assert not prefetch.done()
        lease.training, machine.plan = True, step_id(9)  # the vote chose what is in memory
        for index in (0, 1):
            slot_set.table.unpin(index)
        machine.changes.ring()
        with pytest.raises(NoMemoryError, match="rank 0 trains already"):
            await prefetch
    assert machine.slots.list_sealed_steps() == [step_id(8), step_id(9)]


async def test_the_slot_of_a_failed_read_goes_to_a_restore_that_waits(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.made(None)
    machine.config.memory_limit_bytes = machine.pool.made_bytes
    machine.take(lease_of("a"))
    load, fails = Fetcher.load, asyncio.Event()

    async def loads(self: Fetcher, source: Any, view: memoryview) -> Any:
        if source.shard.step_id == step_id(5):
            await fails.wait()
            raise NoMemoryError("of the tests", code="no-slot")
        return await load(self, source, view)

    monkeypatch.setattr(Fetcher, "load", loads)
    async with working(machine):
        prefetch = asyncio.create_task(machine.loader.bring_image(step_id(5), 0))
        await asyncio.sleep(0.2)
        restore = asyncio.create_task(machine.loader.bring_image(step_id(4), 0))
        await asyncio.sleep(0.2)
        fails.set()
        with pytest.raises(NoMemoryError, match="of the tests"):
            await prefetch
        await asyncio.wait_for(restore, 30)


async def test_a_trainer_that_dies_while_it_waits_does_not_hand_over_the_slot_of_a_live_one(
    machine: Machine,
) -> None:
    """The first process has closed without a goodbye, as its copy still runs."""
    first, second, third = (lease_of(name) for name in "abc")
    slot_set = machine.made(None)
    machine.made(None)
    machine.slots.current = slot_set
    assigned = slot_set.assign()
    assert assigned is not None
    first.ended, first.pidfd = True, 1 << 20  # alive, as far as the kernel knows
    handlers: Any = SimpleNamespace(
        slots=machine.pool,
        leases=machine.leases,
        allocator=machine.allocator,
        changes=machine.changes,
        node_host=machine.node_host,
        update_served_ranks=lambda: None,
        _last={0: first},
        _node=SimpleNamespace(is_dead=lambda step: False),
    )
    handlers._take_back = lambda rank: SaveHandlers._take_back(handlers, rank)
    machine.leases.stop_watching = lambda lease: None  # type: ignore[method-assign]
    waits = asyncio.create_task(SaveHandlers._settle(handlers, second))
    await asyncio.sleep(0.1)
    waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits
    second.ended = second.died = True
    await SaveHandlers._settle(handlers, third)
    granted = slot_set.assign()
    assert granted is None or granted.index != assigned.index


async def test_a_trainer_gets_its_answer_once_the_removed_memory_directory_is_there_again(
    machine: Machine,
) -> None:
    machine.made(None)
    handlers: Any = SimpleNamespace(slots=machine.pool, repair=machine.repair)
    shutil.rmtree(machine.memory)
    waits = asyncio.create_task(RestoreHandlers._rescue_images(handlers))
    await asyncio.sleep(0.2)
    assert not waits.done()
    machine.memory.mkdir()
    await asyncio.wait_for(waits, 30)
    assert not machine.pool.damaged_ranks()
