"""Asks the places of a saved shard, the nearest first, until one gives what is wanted."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import TypeVar

from keepstep.errors import ImageError, KeepstepError, StorageError
from keepstep.image import ControlPage, Layout
from keepstep.steps import StepId
from keepstep_sidecar.commit.committer import Committer
from keepstep_sidecar.memory.slot_pool import SlotPool
from keepstep_sidecar.tiers.source import Origin

T = TypeVar("T")


class Fetcher:
    """Memory is for mapping: only headers are taken from there."""

    def __init__(self, keeper: SlotPool, committer: Committer) -> None:
        self._keeper = keeper
        self._committer = committer

    async def ask(
        self, id: StepId, saved: int, question: Callable[[Origin], Awaitable[T]]
    ) -> tuple[Origin, T]:
        """The answer of the first place that has one; a copy that fails is not asked again.

        Raises the last place's error, or StorageError when there is no place.
        """
        failure: KeepstepError = StorageError(f"step {id}: no copy of rank {saved} is in reach")
        tried: list[Origin] = []
        while (origin := await self._next(id, saved, tried)) is not None:
            tried.append(origin)
            try:
                return origin, await question(origin)
            except (ImageError, StorageError) as error:
                failure = error
                await self._committer.distrust(origin, error)
        raise failure

    async def _next(self, id: StepId, saved: int, tried: Collection[Origin]) -> Origin | None:
        """Depots are asked for what they hold only when what is here was not enough."""
        left = [one for one in self._committer.reach.origins(id, saved) if one not in tried]
        if not left and not self._committer.remotes.looked:
            await self._committer.look_beyond()
            left = [one for one in self._committer.reach.origins(id, saved) if one not in tried]
        return left[0] if left else None

    async def layout(self, id: StepId, saved: int) -> Layout:
        """Of the saved rank's image. Raises as `ask` does."""
        slots = self._keeper.ranks.get(saved)
        if slots is not None and (at := slots.find(id)) is not None:
            return at[0].layout
        return (await self.ask(id, saved, _layout))[1]

    async def control(self, id: StepId, saved: int) -> tuple[Origin, ControlPage]:
        """Of the saved rank's shard, and the place that showed it. Raises as `ask` does."""
        return await self.ask(id, saved, _control)


async def _layout(origin: Origin) -> Layout:
    return await origin.layout()


async def _control(origin: Origin) -> ControlPage:
    return await origin.control()
