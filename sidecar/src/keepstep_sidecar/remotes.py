"""What depots hold, as last seen, in the order in which a restore prefers it.

A depot that does not answer keeps what it was last seen to hold (a restore will find out), but its
answer is UNKNOWN: no run starts anew because an archive was away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace

from keepstep.errors import ImageError
from keepstep.ledger import NEAREST_FIRST, Held, RankReport
from keepstep.steps import Answer, Epoch, StepId, Tier
from keepstep_sidecar.depots import Ancestor, Depot, Inventory, Remote
from keepstep_sidecar.journal import warn
from keepstep_sidecar.origins import RemoteOrigin

_NOT_ASKED = Inventory(answer=Answer.UNKNOWN, reason="it was not asked yet")
_TOO_EARLY = Inventory(
    answer=Answer.UNKNOWN, reason="not before it is known what this run has of its own"
)


class Remotes:
    """The depots of this sidecar. `looked`: all of them were asked at least once. `index`: grows
    when something is seen to be different."""

    def __init__(self, depots: Sequence[Depot] = ()) -> None:
        self.depots = tuple(
            sorted(depots, key=lambda one: NEAREST_FIRST.index(one.tier))
        )  # nearest first
        self.ancestor = next((one for one in depots if isinstance(one, Ancestor)), None)
        self.looked = not depots
        self.index = 0
        self._inventories = [_NOT_ASKED for _ in self.depots]
        self._refused: set[tuple[Tier, str, StepId, int]] = set()
        self._at: dict[StepId, dict[int, list[RemoteOrigin]]] = {}
        self._of_rank: dict[int, dict[Tier, list[Held]]] = {}
        self._looking: asyncio.Task[bool] | None = None

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The tiers that there are, nearest first."""
        return tuple(dict.fromkeys(one.tier for one in self.depots))

    def has(self, tier: Tier) -> bool:
        return tier in self.tiers

    # --- looking -----------------------------------------------------------------------------

    async def look(self, *, anew: bool = False) -> bool:
        """Ask every depot what it holds. Returns whether anything is different from before.

        Whoever asks meanwhile waits for the same answers; `anew`: only for those to a question that
        begins from now on.
        """
        if anew and self._looking is not None and not self._looking.done():
            await asyncio.wait({self._looking})
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look(), name="look at depots")
        return await asyncio.shield(self._looking)

    async def _look(self) -> bool:
        found = self._ancestor_last(await asyncio.gather(*(one.look() for one in self.depots)))
        before = (self._inventories, self.looked)
        self._inventories = [
            _with_last_seen(new, old) for new, old in zip(found, self._inventories, strict=True)
        ]
        self.looked = True
        for depot, old, new in zip(self.depots, before[0], self._inventories, strict=True):
            if new.answer is Answer.UNKNOWN and new.reason != old.reason:
                warn("depot does not answer", tier=str(depot.tier), reason=new.reason)
        if changed := before != (self._inventories, True):
            self._index()
        return changed

    def _ancestor_last(self, found: Sequence[Inventory]) -> list[Inventory]:
        """Another run's step counts once all others have told what this run has of its own."""
        pairs = list(zip(self.depots, found, strict=True))
        silent = any(
            one.answer is Answer.UNKNOWN for depot, one in pairs if depot is not self.ancestor
        )
        return [_TOO_EARLY if silent and depot is self.ancestor else one for depot, one in pairs]

    def distrust(self, origin: RemoteOrigin, error: Exception) -> None:
        """This copy could not be used. One that did not pass its verification is not offered any
        more; one that was out of reach may be there the next time."""
        one, damaged = origin.remote, isinstance(error, ImageError)
        warn(
            "copy refused" if damaged else "copy out of reach",
            tier=str(one.tier),
            where=one.where,
            rank=one.rank,
            step=str(one.id),
            reason=str(error),
        )
        if damaged:
            self._refused.add((one.tier, one.where, one.id, one.rank))
            self._index()

    def _index(self) -> None:
        self.index += 1
        self._at, self._of_rank = {}, {}
        for depot, inventory in zip(self.depots, self._inventories, strict=True):
            for one in inventory.shards:
                if (one.tier, one.where, one.id, one.rank) not in self._refused:
                    places = self._at.setdefault(one.id, {}).setdefault(one.rank, [])
                    places.append(RemoteOrigin(remote=one, depot=depot))
                    tiers = self._of_rank.setdefault(one.rank, {})
                    tiers.setdefault(one.tier, []).append(held(one))

    # --- asking ------------------------------------------------------------------------------

    @property
    def ids(self) -> Iterable[StepId]:
        return self._at.keys()

    @property
    def ranks(self) -> Iterable[int]:
        """Every rank of which a depot holds something."""
        return self._of_rank.keys()

    def of(self, id: StepId) -> dict[int, list[RemoteOrigin]]:
        """rank -> its copies of this step, nearest first."""
        return self._at.get(id, {})

    @property
    def epochs(self) -> tuple[Epoch, ...]:
        """Every epoch that a depot knows of, oldest first."""
        known = {epoch.id: epoch for each in self._inventories for epoch in each.epochs}
        return tuple(known[id] for id in sorted(known))

    def told_by(self, tier: Tier) -> tuple[Epoch, ...]:
        """The epochs that depots of this tier know of."""
        pairs = zip(self.depots, self._inventories, strict=True)
        return tuple(epoch for depot, one in pairs if depot.tier is tier for epoch in one.epochs)

    @property
    def complete(self) -> frozenset[StepId]:
        """Steps of which a depot itself says that all shards are there."""
        return frozenset().union(*(one.complete for one in self._inventories))

    @property
    def unknown(self) -> str:
        """Why it is not known what is there; '' when it is."""
        return "; ".join(
            f"{depot.status().where}: {one.reason or 'it does not answer'}"
            for depot, one in zip(self.depots, self._inventories, strict=True)
            if one.answer is Answer.UNKNOWN
        )

    def report(self, rank: int) -> RankReport:
        """What depots hold of a rank, for the ledger."""
        sealed = {tier: tuple(self._of_rank.get(rank, {}).get(tier, ())) for tier in self.tiers}
        return RankReport(
            sealed=sealed, answers={tier: self._answer(tier, sealed[tier]) for tier in self.tiers}
        )

    def _answer(self, tier: Tier, found: Sequence[Held]) -> Answer:
        said = [
            one.answer
            for depot, one in zip(self.depots, self._inventories, strict=True)
            if depot.tier is tier
        ]
        if Answer.UNKNOWN in said:
            return Answer.UNKNOWN
        return Answer.STEPS if found else Answer.NONE


def held(one: Remote) -> Held:
    """A copy in a depot as the ledger hears of it."""
    return Held(
        id=one.id,
        world=one.world,
        root=one.root,
        params_digest=one.params_digest,
        twins=one.twins,
        bytes=one.bytes,
    )


def _with_last_seen(new: Inventory, old: Inventory) -> Inventory:
    """A depot that is away tells nothing: what it held before is still to be tried."""
    if new.answer is not Answer.UNKNOWN or new.shards:
        return new
    return replace(new, shards=old.shards, epochs=old.epochs, complete=old.complete)
