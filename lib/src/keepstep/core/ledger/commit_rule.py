"""Who holds what: the merged reports, and which steps are complete.

A step is complete on a tier when the images of one world size, on that tier or a stronger one,
cover all its ranks. That is the commit rule, and all of it: nothing else makes a commit, and it
can be recomputed from what lies on storage at any time.

A step that is not complete may still be covered: each rank whose image is gone has a twin, whose
image holds the very same boxes. Nothing is committed by that, but it can be restored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from keepstep.core.ledger.events import NEAREST_FIRST, RankReport, at_least
from keepstep.core.ledger.lineage import Lineage
from keepstep.core.shard import Shard
from keepstep.steps import Answer, EpochId, StepId, Tier

_NO_NODE = -1


class Completeness:
    """Every copy that was reported. Node ranks are kept apart, since a moved rank's old node may
    still hold some of its shards; questions are answered over all of them."""

    def __init__(self) -> None:
        self._held: dict[Place, frozenset[Shard]] = {}
        self._answers: dict[tuple[int, Tier], dict[int, Answer]] = {}
        self._gone: dict[tuple[int, Tier], set[int]] = {}
        self._archive_answer: Answer | None = None
        self._of_step: dict[StepId, Tally] = {}
        self._in_memory: dict[int, set[int]] = {}
        self._twice_in_memory: set[int] = set()
        self._complete: dict[tuple[StepId, Tier], bool] = {}
        self._coverage: dict[StepId, Coverage | None] = {}
        self._steps: list[StepId] | None = None
        self._epochs: set[EpochId] | None = None

    # --- changing ------------------------------------------------------------------------

    def replace(self, node_rank: int, rank: int, report: RankReport) -> None:
        """What this node says of this rank, for each tier that the report names.

        There is one archive: whoever looked at it last is believed, whichever node that was.
        """
        self._archive_answer = None
        for tier in NEAREST_FIRST:
            if tier in report.sealed or tier in report.answers:
                held = frozenset(report.sealed.get(tier, ()))
                self._put((_NO_NODE if tier is Tier.ARCHIVE else node_rank, rank, tier), held)
                said = _answer(held, report.answers.get(tier))
                self._answers.setdefault((rank, tier), {})[node_rank] = said
                self._gone.get((rank, tier), set()).discard(node_rank)

    def drop(self, *, node_rank: int, rank: int | None = None) -> None:
        """Forget what this node said (of this rank). What is in the archive is still there."""
        self._archive_answer = None
        for place in list(self._held):
            if place[0] == node_rank and rank in (None, place[1]):
                self._put(place, frozenset())
                del self._held[place]
        for key, said in self._answers.items():
            if rank in (None, key[0]) and said.pop(node_rank, None) is not None:
                self._gone.setdefault(key, set()).add(node_rank)

    def _put(self, place: Place, held: frozenset[Shard]) -> None:
        before = self._held.get(place, frozenset())
        self._held[place] = held
        for shard in before - held:
            self._of_step[shard.step_id].remove(place, shard)
        for shard in held - before:
            self._of_step.setdefault(shard.step_id, Tally()).add(place, shard)
        for id in {shard.step_id for shard in before ^ held}:
            self._forget_answers(id)
        if place[2] is Tier.MEMORY:
            self._note_memory(place[0], place[1], there=bool(held))

    def _note_memory(self, node_rank: int, rank: int, *, there: bool) -> None:
        nodes = self._in_memory.setdefault(rank, set())
        nodes.add(node_rank) if there else nodes.discard(node_rank)
        twice = self._twice_in_memory
        twice.add(rank) if len(nodes) > 1 else twice.discard(rank)

    def _forget_answers(self, id: StepId) -> None:
        self._coverage.pop(id, None)
        for tier in NEAREST_FIRST:
            self._complete.pop((id, tier), None)
        if not self._of_step[id].copies:
            del self._of_step[id]
        self._steps = self._epochs = None

    # --- asking --------------------------------------------------------------------------

    @property
    def steps(self) -> list[StepId]:
        """Every step that anybody holds anywhere, oldest first."""
        if self._steps is None:
            self._steps = sorted(self._of_step)
        return self._steps

    @property
    def epochs(self) -> set[EpochId]:
        """The epochs of all these steps."""
        if self._epochs is None:
            self._epochs = {id.epoch for id in self._of_step}
        return self._epochs

    def of(self, id: StepId) -> Iterator[tuple[int, Tier, Shard]]:
        """(rank, tier, image) of every copy of this step."""
        for (_, rank, tier), held in self._tally(id).copies:
            yield rank, tier, held

    def _tally(self, id: StepId) -> Tally:
        return self._of_step.get(id) or Tally()

    def ranks(self, id: StepId, tiers: Iterable[Tier]) -> set[int]:
        """The ranks of which a copy of this step lies on one of these tiers."""
        wanted = set(tiers)
        return {rank for rank, tier, _ in self.of(id) if tier in wanted}

    def worlds(self, id: StepId) -> set[int]:
        """The world sizes that copies of this step name: one, unless something is very wrong."""
        return set(self._tally(id).worlds)

    def complete(self, id: StepId, tier: Tier) -> bool:
        """Every rank of the step's world has a copy on this tier or a stronger one.

        A step of two writers is never complete: nobody can say which of both images is right.
        """
        key = (id, tier)
        if key not in self._complete:
            # THE COMMIT RULE: the sealed shards of (epoch, step) cover the whole world.
            tally = self._tally(id)
            self._complete[key] = tally.covers_world(tier) and not tally.contested
        return self._complete[key]

    def contested(self, id: StepId) -> frozenset[int]:
        """Ranks of which two different images of this step exist."""
        return frozenset(self._tally(id).contested)

    def coverage(
        self, id: StepId, tier: Tier = Tier.MEMORY, *, without: Collection[int] = ()
    ) -> Coverage | None:
        """What can be reached of the step on this tier or a stronger one, `without` these nodes.

        None: nobody can say, for there are two writers or two world sizes.
        """
        if tier is not Tier.MEMORY or without:
            return self._cover(id, tier, without)
        if id not in self._coverage:
            self._coverage[id] = self._cover(id, tier, without)
        return self._coverage[id]

    def _cover(self, id: StepId, tier: Tier, without: Collection[int]) -> Coverage | None:
        worlds = self.worlds(id)
        if len(worlds) != 1 or self.contested(id):
            return None
        return spread(self._copies(id, tier, without=without), world=min(worlds))

    def _copies(self, id: StepId, tier: Tier, *, without: Collection[int] = ()) -> Iterator[Copy]:
        wanted = at_least(tier)
        for (node_rank, rank, there), held in self._tally(id).copies:
            if there in wanted and node_rank not in without:
                yield Copy(rank, there, held.twins)

    def answer(self, rank: int, tier: Tier) -> Answer:
        """What is there of this rank, on any node; in the archive: of any rank.

        Silence is UNKNOWN.
        """
        if tier is not Tier.ARCHIVE:
            return _merged(self._answers.get((rank, tier), {}).values())
        if self._archive_answer is None:
            said = [
                one
                for key, each in self._answers.items()
                if key[1] is tier
                for one in each.values()
            ]
            held = any(held for place, held in self._held.items() if place[2] is tier)
            self._archive_answer = _merged([*said, *([Answer.STEPS] if held else [])])
        return self._archive_answer

    def out_of_reach(self, rank: int, tier: Tier) -> bool:
        """Only nodes that are gone ever told of this: nobody is there to wait for."""
        return not self._answers.get((rank, tier)) and bool(self._gone.get((rank, tier)))

    def twice_in_memory(self) -> dict[int, set[int]]:
        """rank -> node ranks, where more than one holds images of it in memory."""
        return {rank: set(self._in_memory[rank]) for rank in self._twice_in_memory}


def _merged(said: Iterable[Answer]) -> Answer:
    each = set(said)
    if Answer.UNKNOWN in each or not each:
        return Answer.UNKNOWN
    return Answer.STEPS if Answer.STEPS in each else Answer.NONE


def _answer(held: frozenset[Shard], said: Answer | None) -> Answer:
    """A report that lists steps cannot mean NONE; one that lists none must say so itself."""
    if said is Answer.UNKNOWN or (said is None and not held):
        return Answer.UNKNOWN
    return Answer.STEPS if held else said or Answer.UNKNOWN


# --- tally -----------------------------------------------------------------------------------
#
# What the copies of one step add up to, counted as they come and go.
#
# A report of one node among hundreds changes a few copies; it must not cost a look at all of
# them.


Place = tuple[int, int, Tier]
"""(node rank, rank, tier): what one report replaces. What lies in the archive is no node's."""

K = TypeVar("K")


class Tally:
    """Of one step. `contested`: ranks of which two different images exist."""

    def __init__(self) -> None:
        self.copies: set[tuple[Place, Shard]] = set()
        self.worlds: Counter[int] = Counter()
        self.contested: set[int] = set()
        self._ranks: dict[Tier, Counter[int]] = {tier: Counter() for tier in NEAREST_FIRST}
        self._roots: dict[int, Counter[str]] = {}

    def add(self, place: Place, held: Shard) -> None:
        """A copy that is not counted yet."""
        self.copies.add((place, held))
        self._count(place, held, +1)

    def remove(self, place: Place, held: Shard) -> None:
        """A copy that is counted."""
        self.copies.remove((place, held))
        self._count(place, held, -1)

    def covers_world(self, tier: Tier) -> bool:
        """Copies of one world size, on this tier or a stronger one, are there of all its ranks."""
        if len(self.worlds) != 1:
            return False
        (world,) = self.worlds
        ranks = self._ranks[tier]
        return len(ranks) >= world and ranks.keys() >= set(range(world))

    def _count(self, place: Place, held: Shard, by: int) -> None:
        _, rank, tier = place
        _bump(self.worlds, held.world, by)
        for weaker in NEAREST_FIRST[: NEAREST_FIRST.index(tier) + 1]:
            _bump(self._ranks[weaker], rank, by)
        if held.root is not None:
            roots = self._roots.setdefault(rank, Counter())
            _bump(roots, held.root, by)
            if len(roots) > 1:
                self.contested.add(rank)
            else:
                self.contested.discard(rank)


def _bump(counter: Counter[K], key: K, by: int) -> None:
    counter[key] += by
    if not counter[key]:
        del counter[key]


# --- coverage --------------------------------------------------------------------------------
#
# Which boxes of a step can be reached, and where.
#
# Boxes are counted by rank, never one by one: twins are ranks whose images have the very same
# boxes (`image.Layout.twins`), so that an image of any of them stands for all.


class Copy(NamedTuple):
    """One copy of a rank's image."""

    rank: int
    tier: Tier
    twins: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """`tiers`: per rank, the nearest one that holds its image or, of those in `by_twins`, a twin's.
    `world`: how many ranks saved the step."""

    tiers: Mapping[int, Tier]
    by_twins: frozenset[int]
    world: int

    @property
    def lost(self) -> frozenset[int]:
        """Ranks whose boxes nobody holds. Worked out when asked for: a world is what somebody
        said, and may be far larger than all that is there."""
        return frozenset(range(self.world)) - self.tiers.keys()

    @property
    def whole(self) -> bool:
        """Every box is there."""
        return len(self.tiers) == self.world


def spread(copies: Iterable[Copy], *, world: int) -> Coverage:
    """Where each rank of the world finds its boxes."""
    nearest_first = sorted(copies, key=lambda one: NEAREST_FIRST.index(one.tier))
    own = {one.rank: one.tier for one in reversed(nearest_first) if one.rank < world}
    twins: dict[int, Tier] = {}
    for one in nearest_first:
        if len(own) + len(twins) == world:
            break
        for rank in one.twins:
            if rank not in own and rank < world:
                twins.setdefault(rank, one.tier)
    found = {**twins, **own}
    return Coverage(
        tiers={rank: found[rank] for rank in sorted(found)},
        by_twins=frozenset(twins),
        world=world,
    )


# --- restorable ------------------------------------------------------------------------------
#
# Which steps could be restored, whole, from what can be reached: pure questions over the copies.
#
# This is more than what is committed: a step may be whole by twins alone, after its other replica
# was lost with a node. It never makes a commit, and never lets anything be deleted.


def whole(copies: Completeness, lineage: Lineage) -> tuple[StepId, ...]:
    """Restorable steps of which every box can be reached somewhere, oldest first.

    A twin has the boxes of a rank, but not its buffers, RNG and extras. So a step in which twins
    stand in for ranks is left out when these ranks have their own images of the newest complete
    step before it nearby: a crash, or the loss of a node with a buddy, goes on from there, exactly,
    at most a few steps back.
    """
    covered = {
        id: coverage
        for id in copies.steps
        if lineage.restorable(id)
        and (coverage := copies.coverage(id)) is not None
        and coverage.whole
    }
    found, complete = [], None
    for id, coverage in covered.items():
        if not coverage.by_twins:
            complete = coverage
        if complete is None or not _nearby(coverage.by_twins, complete, world=coverage.world):
            found.append(id)
    return tuple(found)


def _nearby(ranks: Collection[int], complete: Coverage, *, world: int) -> bool:
    near = (Tier.MEMORY, Tier.LOCAL, Tier.PEER)
    return (
        bool(ranks)
        and complete.world == world
        and all(complete.tiers[rank] in near for rank in ranks)
    )


def without(
    copies: Completeness, lineage: Lineage, node_ranks: Collection[int], tier: Tier
) -> StepId | None:
    """The newest step that this tier and stronger ones would still hold, whole, without what these
    nodes told of."""
    for id in reversed(copies.steps):
        if lineage.restorable(id):
            left = copies.coverage(id, tier, without=node_ranks)
            if left is not None and left.whole:
                return id
    return None
