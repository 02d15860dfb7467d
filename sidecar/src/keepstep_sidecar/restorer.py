"""What a rank could go on from, and bringing it into memory, verified, before it is asked for.

The ledger's plan is a hint that saves time: the shard that it names is read and hashed while the
trainer still imports torch. The trainers' own vote decides.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from keepstep.errors import ImageError, StorageError
from keepstep.image import ControlPage
from keepstep.ledger import Unknown
from keepstep.protocol import Candidate, Candidates, Opened
from keepstep.steps import Answer, StepId, Tier
from keepstep_sidecar.bank import Bank
from keepstep_sidecar.catalog import Catalog
from keepstep_sidecar.changes import Changes
from keepstep_sidecar.journal import say, warn
from keepstep_sidecar.leases import Lease
from keepstep_sidecar.problems import refuse
from keepstep_sidecar.scan import Found
from keepstep_sidecar.slotkeeper import RankSlots, Slotkeeper
from keepstep_sidecar.span import sees_all
from keepstep_sidecar.unwritable import UnwritableVolume
from keepstep_sidecar.volume import Volume


class Restorer:
    """Candidates, prefetch and the opening of images, for every rank of this machine."""

    def __init__(
        self,
        keeper: Slotkeeper,
        catalog: Catalog,
        *,
        changes: Changes,
        loaders: int,
        grow: Callable[[RankSlots, Bank], None],
        restores: Callable[[int], bool],
    ) -> None:
        """`restores`: whether a rank is about to restore; one that trains needs its slots."""
        self._keeper = keeper
        self._catalog = catalog
        self._changes = changes
        self._grow = grow
        self._restores = restores
        self._pins: dict[int, tuple[Bank, int]] = {}
        self._agreed: dict[int, StepId] = {}
        self._loading: dict[tuple[int, StepId], asyncio.Task[None]] = {}
        self._executor = ThreadPoolExecutor(loaders, thread_name_prefix="load")

    # --- candidates --------------------------------------------------------------------------

    def candidates(self, lease: Lease) -> Candidates:
        """What this rank may vote for. Call it when the scan is done.

        Where this sidecar serves all ranks, it knows which steps cannot be restored because some
        rank lacks them. A step that was never complete was never kept: when there are only such
        ones, the answer is NONE. But a step that *was* committed and is not whole any more is
        UNKNOWN, and the run does not start over in silence.
        """
        slots, ledger = self._keeper.rank(lease.rank), self._catalog.look()
        held = self._held(slots)
        if sees_all(lease.request):
            whole = set(ledger.committed(Tier.MEMORY))
            # a step of another world stays on the list: the vote names the difference
            held = {id: one for id, one in held.items() if id in whole or one.world != lease.world}
        plan = self._catalog.plan()
        answer, reason = self._answer(lease, held)
        return Candidates(
            answer=answer,
            candidates=tuple(held[id] for id in sorted(held)),
            highest_epoch=ledger.highest_epoch(),
            plan=plan.id if plan else None,
            reason=reason,
        )

    def _held(self, slots: RankSlots) -> dict[StepId, Candidate]:
        dead, found = self._catalog.ledger.is_dead, {}
        for id, shards in self._catalog.shards.items():
            if (one := shards.get(slots.rank)) is not None and not dead(id):
                found[id] = Candidate(id=id, tier=Tier.LOCAL, world=one.world, bytes=one.bytes)
        for id in slots.sealed():
            bank, index = _at(slots, id)
            if not dead(id):
                found[id] = Candidate(
                    id=id,
                    tier=bank.tier(index),
                    world=bank.layout.world,
                    bytes=bank.layout.size_bytes,
                )
        return found

    def _answer(self, lease: Lease, held: dict[StepId, Candidate]) -> tuple[Answer, str]:
        if held:
            return Answer.STEPS, ""
        if self._catalog.unreadable:
            return Answer.UNKNOWN, self._catalog.unreadable
        failed = [v for v in self._catalog.volumes.volumes if v.failed and not _is_read_only(v)]
        if failed:
            return Answer.UNKNOWN, f"{failed[0].root}: {failed[0].failed}"
        if published := self._catalog.ever_published():
            plan = self._catalog.ledger.plan(range(lease.world))
            why = plan.reason if isinstance(plan, Unknown) else "it is not whole any more"
            return Answer.UNKNOWN, f"step {max(published)} was committed, but {why}"
        return Answer.NONE, ""

    # --- ahead of time -----------------------------------------------------------------------

    async def prefetch(self) -> None:
        """Bring the planned step into memory for every rank that will restore it from a volume."""
        if (plan := self._catalog.plan()) is None:
            return
        async with asyncio.TaskGroup() as group:
            for rank, tier in plan.tiers.items():
                found = self._catalog.holds(rank, plan.id)
                if tier is Tier.LOCAL and found is not None and self._restores(rank):
                    group.create_task(self._prefetch(found), name=f"prefetch {rank}")

    async def _prefetch(self, found: Found) -> None:
        try:
            await self._bring(found)
        except (ImageError, StorageError) as error:
            warn("prefetch failed", rank=found.rank, step=str(found.id), reason=str(error))

    # --- open --------------------------------------------------------------------------------

    async def open(self, lease: Lease, id: StepId, *, timeout_s: float) -> Opened:
        """The verified image of this step in a slot, pinned until `let_go`.

        Raises SidecarError: `unknown-step`, `not-verified` (the shard is quarantined: vote again),
        `no-slot`.
        """
        started = time.monotonic()
        self.let_go(lease.rank)
        slots = self._keeper.rank(lease.rank)
        if slots.find(id) is None:
            self._agreed[lease.rank] = id
            self._changes.ring()
            await self._fetch(lease, id, timeout_s=timeout_s)
        bank, index = _at(slots, id)
        bank.table.pin(index)
        self._pins[lease.rank] = (bank, index)
        file = bank.files[index]
        return Opened(
            slot=file.name,
            path=str(file.path),
            tier=bank.tier(index),
            bytes=len(file.view),
            seconds=time.monotonic() - started,
        )

    async def _fetch(self, lease: Lease, id: StepId, *, timeout_s: float) -> None:
        found = self._catalog.holds(lease.rank, id)
        if found is None:
            raise refuse("unknown-step", f"rank {lease.rank} does not hold step {id} here")
        try:
            async with asyncio.timeout(timeout_s):
                await self._bring(found)
        except (ImageError, StorageError) as error:
            raise refuse("not-verified", f"step {id}: {error}") from error
        except TimeoutError as error:
            raise refuse("no-slot", f"step {id} could not be read in {timeout_s:.0f} s") from error

    def let_go(self, rank: int) -> None:
        """The rank has copied what it opened, or will not."""
        self._agreed.pop(rank, None)
        if pinned := self._pins.pop(rank, None):
            bank, index = pinned
            bank.table.unpin(index)
            self._changes.ring()

    # --- reading -----------------------------------------------------------------------------

    async def _bring(self, found: Found) -> None:
        """Read a shard into a slot, once, whoever asks; on failure it is a candidate no more."""
        key = (found.rank, found.id)
        if (task := self._loading.get(key)) is None:
            task = asyncio.create_task(self._load(found), name=f"load {found.id} {found.rank}")
            self._loading[key] = task
            task.add_done_callback(lambda _: self._loading.pop(key, None))
        await asyncio.shield(task)

    async def _load(self, found: Found) -> None:
        slots = self._keeper.rank(found.rank)
        if slots.find(found.id) is not None:
            return
        bank, index = await self._reserve(slots, found)
        self._catalog.opening(found.id, on=True)
        started = time.monotonic()
        try:
            control = await self._read(found, bank, index)
        except (ImageError, StorageError):
            bank.table.release(index)
            await self._catalog.scan()
            raise
        except BaseException:
            bank.table.release(index)
            raise
        finally:
            self._catalog.opening(found.id, on=False)
        bank.seal(index, control.id, tier=Tier.LOCAL)
        say(
            "loaded",
            rank=found.rank,
            step=str(found.id),
            bytes=found.bytes,
            seconds=round(time.monotonic() - started, 4),
        )
        self._changes.ring()

    async def _read(self, found: Found, bank: Bank, index: int) -> ControlPage:
        load, view = self._catalog.volumes.load, bank.files[index].view
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, load, found.path, view)

    async def _reserve(self, slots: RankSlots, found: Found) -> tuple[Bank, int]:
        """A slot of the shard's layout that holds no candidate; waits while one is being made."""
        bank = slots.banks.setdefault(found.layout.id, Bank(found.layout))
        slots.world = slots.world or found.world
        index: int | None = None

        def reserved() -> bool:
            nonlocal index
            index = bank.table.reserve(self._expendable(slots))
            if index is None and not bank.failure:
                self._grow(slots, bank)
            return index is not None or bool(bank.failure)

        await self._changes.until(reserved, timeout_s=600.0)
        if index is None:
            raise StorageError(f"no slot to read step {found.id} into: {bank.failure}")
        return bank, index

    def _expendable(self, slots: RankSlots) -> set[StepId]:
        """Images that no rank will vote for: older than the planned step, or not whole.

        Where other ranks are elsewhere nobody here knows what is whole; but once all have agreed on
        a step, a newer one is not held by all.
        """
        sealed = slots.sealed()
        agreed = self._agreed.get(slots.rank)
        beyond = {id for id in sealed if agreed is not None and id > agreed}
        if (plan := self._catalog.plan()) is None:
            return beyond
        whole = set(self._catalog.ledger.committed(Tier.MEMORY))
        unlike = {id for id in sealed if id not in whole and plan.id in whole}
        return {id for id in sealed if id < plan.id} | unlike | beyond

    def stop(self) -> None:
        """For the end of the process."""
        self._executor.shutdown(wait=True, cancel_futures=True)


def _is_read_only(volume: Volume) -> bool:
    """Whether it was seen what is there, although nothing can be written."""
    return isinstance(volume, UnwritableVolume)


def _at(slots: RankSlots, id: StepId) -> tuple[Bank, int]:
    found = slots.find(id)
    assert found is not None, f"step {id} of rank {slots.rank} is gone"
    return found
