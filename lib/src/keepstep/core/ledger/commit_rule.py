"""Who holds what: the merged reports, and which steps are complete.

A step is complete on a tier when the images of one world size, on that tier or a stronger one,
cover all its ranks. That is the commit rule: nothing else makes a commit of a step that no later
epoch left behind (`lineage`), and it can be recomputed from what lies on storage at any time.

A step that is not complete may still be covered: each rank whose image is gone has a twin, whose
image holds the very same boxes. Nothing is committed by that, but it can be restored.

Ranks are bits of an integer: what a node holds of a step is one number, however many ranks it has.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from keepstep.core.ledger.events import RankReport, at_least
from keepstep.core.ledger.holding import Holding, Place, RankUnion, bitmap, bits, is_full
from keepstep.core.ledger.lineage import Lineage
from keepstep.core.shard import Told
from keepstep.steps import NEAREST_FIRST, Answer, EpochId, StepId, Tier

NO_NODE = -1
_FEW_COPIES = 64
_BLOCK = 64
"""Ranks whose copies are looked for together."""
_BLOCK_RANKS = (1 << _BLOCK) - 1


def _blocks(ranks: int) -> Iterator[int]:
    """Those that these ranks are of."""
    last = -1
    for rank in bits(ranks):
        if rank // _BLOCK != last:
            last = rank // _BLOCK
            yield last


class Tally:
    """The copies of one step. `contested`: ranks of which two different images exist. `known`: two
    bits for each tier, whether it was judged and whether it is complete there."""

    __slots__ = ("_near", "_reached", "_rooted", "contested", "copies", "id", "known")

    def __init__(self, id: StepId) -> None:
        self.id = id
        self.copies: list[Holding] = []
        self.contested = 0
        self.known = 0
        self._near: dict[int, list[Holding]] | None = None
        self._reached: dict[tuple[Tier, int], int] | None = {}
        self._rooted = 0

    def came(self, held: Holding, ranks: int) -> None:
        """One of the copies is of these ranks, too, or anew."""
        if self._near is not None:
            self._find(held, ranks)
        if self._reached is not None:
            self._reach_by(held)

    def went(self, held: Holding, ranks: int) -> None:
        """One of the copies is of these ranks no more, or gone with them."""
        if len(self.copies) <= _FEW_COPIES:
            self._reached = self._near = None
            return
        others = rooted = 0
        for one in self._of(ranks):
            left = one.ranks & ~ranks if one is held else one.ranks
            others |= left if one.place[1:] == held.place[1:] else 0
            rooted |= left & one.rooted
        self._lose(held, ranks)
        if self._reached is not None:
            at = held.place[1:]
            self._rooted &= ~ranks | rooted
            self._reached[at] &= ~ranks | others
            if not self._reached[at]:
                del self._reached[at]

    def _reach(self) -> dict[tuple[Tier, int], int]:
        """By tier and world all ranks of which there are copies: thousands of nodes have one each,
        and with each of them it is asked anew what is complete."""
        if self._reached is None:
            self._reached, self._rooted = {}, 0
            for held in self.copies:
                self._reach_by(held)
        return self._reached

    def _reach_by(self, held: Holding) -> None:
        assert self._reached is not None
        at = held.place[1:]
        self._reached[at] = self._reached.get(at, 0) | held.ranks
        self._rooted |= held.rooted

    def worlds(self) -> set[int]:
        return {world for _, world in self._reach()}

    def may_differ(self, ranks: int, rooted: int) -> bool:
        """Whether images that come, of `rooted` ranks with digests, can change what is contested:
        all there are need not be compared else."""
        self._reach()
        return bool(self.contested & ranks or self._rooted & rooted)

    def contest(self, ranks: int) -> None:
        """Compare all images that there are of these ranks."""
        there = [held for held in self._of(ranks) if held.ranks & ranks]
        once = twice = found = 0
        for held in there:
            twice |= once & held.ranks
            once |= held.ranks
            found |= held.doubled
        for rank in bits(twice & ranks):
            if len({held.root(rank) for held in there} - {0}) > 1:
                found |= 1 << rank
        self.contested = self.contested & ~ranks | found & ranks

    def _of(self, ranks: int) -> Iterable[Holding]:
        """All copies that may be of these ranks. Of a step with thousands of copies each report
        compares its own: which are near is worked out once."""
        if len(self.copies) <= _FEW_COPIES:
            return self.copies
        if self._near is None:
            self._near = {}
            for held in self.copies:
                self._find(held, held.ranks)
        near = (self._near.get(one, ()) for one in _blocks(ranks))
        return dict.fromkeys(held for block in near for held in block)

    def _find(self, held: Holding, ranks: int) -> None:
        assert self._near is not None
        for one in _blocks(ranks):
            block = self._near.setdefault(one, [])
            if held not in block:
                block.append(held)

    def _lose(self, held: Holding, ranks: int) -> None:
        assert self._near is not None
        left = held.ranks & ~ranks
        for one in _blocks(ranks):
            if not left >> one * _BLOCK & _BLOCK_RANKS and held in self._near.get(one, ()):
                self._near[one].remove(held)

    def ranks(self, tiers: Collection[Tier], *, without: Collection[int] = ()) -> int:
        """Ranks of which a copy lies on one of these tiers, on other nodes than these."""
        found = 0
        if not without:
            for (tier, _), ranks in self._reach().items():
                found |= ranks if tier in tiers else 0
            return found
        for held in self.copies:
            node_rank, tier, _ = held.place
            if tier in tiers and node_rank not in without:
                found |= held.ranks
        return found

    def complete(self, tier: Tier) -> bool:
        known = 2 * NEAREST_FIRST.index(tier)
        if not self.known >> known & 1:
            self.known |= (1 | self._complete(tier) << 1) << known
        return bool(self.known >> known & 2)

    def _complete(self, tier: Tier) -> bool:
        # THE COMMIT RULE: the sealed shards of (epoch, step) cover the whole world.
        worlds = self.worlds()
        if len(worlds) != 1 or self.contested:
            return False
        return is_full(self.ranks(at_least(tier)), min(worlds))


class Answers:
    """What one node said of its ranks on one tier, and of which it told before it was gone."""

    __slots__ = ("gone", "none", "steps", "unknown")

    def __init__(self) -> None:
        self.unknown = self.none = self.steps = self.gone = 0

    def say(self, answers: Mapping[int, Answer]) -> bool:
        """What it says of each rank; whether that is news."""
        before = (self.unknown, self.none, self.steps, self.gone)
        said = dict.fromkeys(Answer, 0)
        for rank, answer in answers.items():
            said[answer] |= 1 << rank
        keep = ~(said[Answer.UNKNOWN] | said[Answer.NONE] | said[Answer.STEPS])
        self.unknown = self.unknown & keep | said[Answer.UNKNOWN]
        self.none = self.none & keep | said[Answer.NONE]
        self.steps = self.steps & keep | said[Answer.STEPS]
        self.gone &= keep
        return before != (self.unknown, self.none, self.steps, self.gone)

    def leave(self, ranks: int) -> None:
        """Nobody is there any more to ask about these."""
        self.gone |= (self.unknown | self.none | self.steps) & ranks
        self.unknown, self.none, self.steps = (
            self.unknown & ~ranks,
            self.none & ~ranks,
            self.steps & ~ranks,
        )

    def merge(self, other: Answers) -> None:
        self.unknown |= other.unknown
        self.none |= other.none
        self.steps |= other.steps
        self.gone |= other.gone


_ALL_RANKS = -1


class Completeness:
    """Every copy that was reported. Node ranks are kept apart, since a moved rank's old node may
    still hold some of its shards; questions are answered over all of them.

    `changed`: steps whose copies are others than when whoever owns this emptied it last.
    """

    def __init__(self) -> None:
        self._held: dict[Place, dict[StepId, Holding]] = {}
        self._places: dict[int, dict[Place, Place]] = {}
        self._of_step: dict[StepId, Tally] = {}
        self._steps: list[StepId] = []
        self._epochs: Counter[EpochId] = Counter()
        self._contested: set[StepId] = set()
        self._answers: dict[tuple[int, Tier], Answers] = {}
        self._merged: dict[Tier, Answers] = {}
        self._in_memory = RankUnion()
        self.changed: set[StepId] = set()

    # --- changing ------------------------------------------------------------------------

    def replace(self, node_rank: int, reports: Mapping[int, RankReport]) -> None:
        """What this node says of these ranks, for each tier that a rank's report names; of all
        ranks at once, since they have the same steps.

        There is one archive: whoever looked at it last is believed, whichever node that was.
        """
        for tier in NEAREST_FIRST:
            told = {
                rank: one
                for rank, one in reports.items()
                if tier in one.sealed or tier in one.answers
            }
            if not told:
                continue
            at = NO_NODE if tier is Tier.ARCHIVE else node_rank
            images = _by_step((rank, one.sealed.get(tier, ())) for rank, one in told.items())
            gone = {rank: one.gone[tier] for rank, one in told.items() if tier in one.gone}
            self._remove(at, tier, gone)
            self._keep(at, tier, bitmap(told.keys() - gone.keys()), images)
            for each in images.values():
                self._put((at, tier, each.world), each)
            held = self.held(at, tier)
            answers = {
                rank: _answer(held >> rank & 1, one.answers.get(tier)) for rank, one in told.items()
            }
            if self._answers.setdefault((node_rank, tier), Answers()).say(answers):
                self._merged.pop(tier, None)
            if tier is Tier.MEMORY:
                self._in_memory.put(node_rank, held)

    def drop(self, *, node_rank: int, rank: int | None = None) -> None:
        """Forget what this node said (of this rank). What is in the archive is still there."""
        ranks = _ALL_RANKS if rank is None else 1 << rank
        for place in list(self._places.get(node_rank, ())):
            for id in list(self._held[place]):
                self._take_out(place, id, ranks)
        for tier in NEAREST_FIRST:
            if (said := self._answers.get((node_rank, tier))) is not None:
                said.leave(ranks)
        self._merged.clear()
        self._in_memory.put(node_rank, self._in_memory[node_rank] & ~ranks)

    def keep_newest(self, at: int, most: int) -> None:
        """Forget what is held there of older steps, on each tier."""
        for place in list(self._places.get(at, ())):
            for id in sorted(self._held[place])[:-most]:
                self._take_out(place, id, _ALL_RANKS)

    def _keep(self, at: int, tier: Tier, ranks: int, images: Mapping[_Key, _Images]) -> None:
        """Forget what is held of these ranks here, but these images."""
        for place in self._at(at, tier) if ranks else ():
            for id, held in [*self._held[place].items()]:
                if held.ranks & ranks:
                    named = images.get(_key(id, place[2]))
                    self._take_out(place, id, ranks & ~(named.ranks if named else 0))

    def _remove(self, at: int, tier: Tier, gone: Mapping[int, Iterable[StepId]]) -> None:
        of: dict[StepId, int] = {}
        for rank, ids in gone.items():
            for id in ids:
                of[id] = of.get(id, 0) | 1 << rank
        for place in self._at(at, tier) if of else ():
            for id, ranks in of.items():
                if id in self._held.get(place, ()):
                    self._take_out(place, id, ranks)

    def _put(self, place: Place, told: _Images) -> None:
        """Images of one step that are here."""
        steps = self._held.get(place)
        if steps is None:
            steps = self._held[place] = {}
            self._places.setdefault(place[0], {})[place] = place
        held, images = steps.get(told.id), told.of
        if held is None:
            tally, place = self._tally_of(told.id), self._places[place[0]][place]
            held = steps[tally.id] = Holding(place)
            tally.copies.append(held)
        else:
            there = held.ranks
            images = {
                rank: one
                for rank, one in images.items()
                if not (there >> rank & 1 and held.is_of(rank, one))
            }
            if not (images or told.doubled):
                return
            tally = self._of_step[told.id]
            held.remove(there & bitmap(images))
        ranks = bitmap(images) | told.doubled
        rooted = bitmap(rank for rank, one in images.items() if one.root is not None)
        may_differ = bool(told.doubled) or tally.may_differ(ranks, rooted)
        if images:
            held.add(images)
            tally.came(held, bitmap(images))
        held.doubled |= told.doubled
        if may_differ:
            tally.contest(ranks)
        self._note(tally.id, tally)

    def _tally_of(self, id: StepId) -> Tally:
        """Steps stay by the thousand: what is the same of them is one object."""
        tally = self._of_step.get(id)
        if tally is None:
            at = bisect_left(self._steps, id)
            beside = next((one.epoch for one in self._steps[max(0, at - 1) : at + 1]), id.epoch)
            id = StepId(beside, id.step) if beside == id.epoch else id
            tally = self._of_step[id] = Tally(id)
            self._steps.insert(at, id)
            self._epochs[id.epoch] += 1
        return tally

    def _take_out(self, place: Place, id: StepId, ranks: int) -> None:
        """These ranks' images of the step are not here any more."""
        held, tally = self._held[place][id], self._of_step[id]
        leaving = held.ranks & ranks
        if not leaving:
            return
        if leaving == held.ranks:
            del self._held[place][id]
            tally.copies.remove(held)
            if not self._held[place]:
                del self._held[place]
                self._places[place[0]].pop(place, None)
        else:
            held.remove(leaving)
        tally.went(held, leaving)
        if tally.contested & leaving:
            tally.contest(tally.contested & leaving)
        self._note(tally.id, tally)

    def _note(self, id: StepId, tally: Tally) -> None:
        tally.known = 0
        self.changed.add(id)
        if tally.contested:
            self._contested.add(id)
        elif self._contested:
            self._contested.discard(id)
        if not tally.copies:
            del self._of_step[id]
            del self._steps[bisect_left(self._steps, id)]
            self._epochs[id.epoch] -= 1
            if not self._epochs[id.epoch]:
                del self._epochs[id.epoch]

    def _at(self, at: int, tier: Tier) -> list[Place]:
        return [place for place in self._places.get(at, ()) if place[1] is tier]

    # --- asking --------------------------------------------------------------------------

    @property
    def steps(self) -> list[StepId]:
        """Every step that anybody holds anywhere, oldest first."""
        return self._steps

    @property
    def epochs(self) -> Collection[EpochId]:
        """The epochs of all these steps."""
        return self._epochs.keys()

    @property
    def contested_steps(self) -> list[StepId]:
        """Those of which two different images of a rank exist, oldest first."""
        return sorted(self._contested)

    def copies(self, id: StepId) -> Sequence[Holding]:
        """Every copy of this step."""
        return self._tally(id).copies

    def of_node(self, node_rank: int, tier: Tier) -> Iterator[tuple[StepId, Holding]]:
        """What this node holds on this tier."""
        for place in self._at(node_rank, tier):
            yield from self._held[place].items()

    def count(self, at: int) -> int:
        """How many steps it holds, each on each tier."""
        return sum(len(self._held[place]) for place in self._places.get(at, ()))

    def held(self, at: int, tier: Tier) -> int:
        """The ranks of which it holds any image on this tier."""
        found = 0
        for _, held in self.of_node(at, tier):
            found |= held.ranks
        return found

    def ranks(self, id: StepId, tiers: Iterable[Tier]) -> int:
        """The ranks of which a copy of this step lies on one of these tiers."""
        return self._tally(id).ranks(tuple(tiers))

    def worlds(self, id: StepId) -> set[int]:
        """The world sizes that copies of this step name: one, unless something is very wrong."""
        return self._tally(id).worlds()

    def complete(self, id: StepId, tier: Tier) -> bool:
        """Every rank of the step's world has a copy on this tier or a stronger one.

        A step of two writers is never complete: nobody can say which of both images is right.
        """
        tally = self._of_step.get(id)
        return tally is not None and tally.complete(tier)

    def contested(self, id: StepId) -> list[int]:
        """Ranks of which two different images of this step exist."""
        return list(bits(self._tally(id).contested))

    def _tally(self, id: StepId) -> Tally:
        return self._of_step.get(id) or Tally(id)

    def is_there(self, id: StepId) -> bool:
        """Whether anybody holds anything of it."""
        return id in self._of_step

    def interned(self, id: StepId) -> StepId:
        """The same step, as the one object that stands for it here."""
        tally = self._of_step.get(id)
        return id if tally is None else tally.id

    def coverage(
        self, id: StepId, tier: Tier = Tier.MEMORY, *, without: Collection[int] = ()
    ) -> Coverage | None:
        """What can be reached of the step on this tier or a stronger one, `without` these nodes.

        None: nobody can say, for there are two writers or two world sizes.
        """
        tally = self._tally(id)
        worlds = tally.worlds()
        if len(worlds) != 1 or tally.contested:
            return None
        return _spread(tally, at_least(tier), world=min(worlds), without=without)

    def answer(self, rank: int, tier: Tier) -> Answer:
        """What is there of this rank, on any node; in the archive: of any rank.

        Silence is UNKNOWN.
        """
        said = self._said(tier)
        if tier is Tier.ARCHIVE:
            held = bool(said.steps) or bool(self._at(NO_NODE, tier))
            return _one_of(bool(said.unknown), bool(said.none), held)
        return _one_of(said.unknown >> rank & 1, said.none >> rank & 1, said.steps >> rank & 1)

    def silent(self, tier: Tier) -> int:
        """Ranks whose answer is UNKNOWN, of those that were ever told of and all that were not."""
        if tier is Tier.ARCHIVE:
            return _ALL_RANKS if self.answer(0, tier) is Answer.UNKNOWN else 0
        said = self._said(tier)
        return said.unknown | ~(said.none | said.steps)

    def out_of_reach(self, rank: int, tier: Tier) -> bool:
        """Only nodes that are gone ever told of this: nobody is there to wait for."""
        said = self._said(tier)
        there = said.unknown | said.none | said.steps
        return bool(said.gone >> rank & 1) and not there >> rank & 1

    def _said(self, tier: Tier) -> Answers:
        merged = self._merged.get(tier)
        if merged is None:
            merged = self._merged[tier] = Answers()
            for (_, of), said in self._answers.items():
                if of is tier:
                    merged.merge(said)
        return merged

    def twice_in_memory(self) -> dict[int, set[int]]:
        """rank -> node ranks, where more than one holds images of it in memory."""
        return {rank: self._in_memory.having(rank) for rank in bits(self._in_memory.twice)}


_Key = tuple[int, int, str, int]


def _key(id: StepId, world: int) -> _Key:
    """Stands for both: a report names each step for each of its ranks, and these are quick."""
    return id.step, id.epoch.number, id.epoch.nonce, world


class _Images:
    """What is told of one step: an image of each of these ranks, of some (`doubled`) another."""

    __slots__ = ("doubled", "id", "of", "ranks", "world")

    def __init__(self, id: StepId, world: int) -> None:
        self.id = id
        self.world = world
        self.of: dict[int, Told] = {}
        self.ranks = self.doubled = 0


def _by_step(sealed: Iterable[tuple[int, Iterable[Told]]]) -> dict[_Key, _Images]:
    """What is told of each rank."""
    found: dict[_Key, _Images] = {}
    for rank, shards in sealed:
        bit = 1 << rank
        for one in shards:
            id = one.step_id
            key = _key(id, one.world)
            images = found.get(key)
            if images is None:
                images = found[key] = _Images(id, one.world)
            images.ranks |= bit
            first = images.of.setdefault(rank, one)
            if first.root != one.root and None not in (first.root, one.root):
                images.doubled |= bit
    return found


def _one_of(unknown: object, none: object, steps: object) -> Answer:
    if unknown or not (none or steps):
        return Answer.UNKNOWN
    return Answer.STEPS if steps else Answer.NONE


def _answer(held: int, said: Answer | None) -> Answer:
    """A report that lists steps cannot mean NONE; one that lists none must say so itself."""
    if held and said is not Answer.UNKNOWN:
        return Answer.STEPS
    return said or Answer.UNKNOWN


# --- coverage --------------------------------------------------------------------------------
#
# Boxes are counted by rank, never one by one: twins are ranks whose images have the very same
# boxes (`image.Layout.twins`), so that an image of any of them stands for all.


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """`found`: by tier, nearest first, the ranks that find their boxes there, each once; of those
    in `twins` a twin's. `world`: how many ranks saved the step."""

    found: tuple[tuple[Tier, int], ...]
    twins: int
    world: int

    @property
    def tiers(self) -> Mapping[int, Tier]:
        """Per rank, the nearest tier that holds its image or, of those in `by_twins`, a twin's."""
        each = {rank: tier for tier, ranks in self.found for rank in bits(ranks)}
        return {rank: each[rank] for rank in sorted(each)}

    @property
    def by_twins(self) -> list[int]:
        """Ranks whose own image is gone."""
        return list(bits(self.twins))

    @property
    def lost(self) -> list[int]:
        """Ranks whose boxes nobody holds. Worked out when asked for: a world is what somebody
        said, and may be far larger than all that is there."""
        return list(bits(~self._all & ((1 << self.world) - 1)))

    @property
    def whole(self) -> bool:
        """Every box is there."""
        return is_full(self._all, self.world)

    @property
    def _all(self) -> int:
        found = 0
        for _, ranks in self.found:
            found |= ranks
        return found

    def on(self, tiers: Collection[Tier]) -> int:
        """Ranks that find their boxes on one of these tiers."""
        found = 0
        for tier, ranks in self.found:
            found |= ranks if tier in tiers else 0
        return found


def _spread(
    tally: Tally, tiers: Collection[Tier], *, world: int, without: Collection[int]
) -> Coverage:
    """Where each rank of the world finds its boxes."""
    everybody = (1 << world) - 1
    own = {tier: tally.ranks((tier,), without=without) & everybody for tier in tiers}
    taken, twins, found = 0, 0, {}
    for tier in tiers:
        found[tier] = own[tier] & ~taken
        taken |= own[tier]
    for tier in tiers if taken != everybody else ():
        for held in tally.copies:
            node_rank, there, _ = held.place
            if there is tier and node_rank not in without:
                news = held.with_twins() & everybody & ~(taken | twins)
                twins |= news
                found[tier] |= news
    by_tier = tuple((tier, ranks) for tier, ranks in found.items() if ranks)
    return Coverage(found=by_tier, twins=twins, world=world)


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
    return tuple(reversed(list(_whole(copies, lineage))))


def newest_whole(copies: Completeness, lineage: Lineage) -> StepId | None:
    """The last of them, found without a look at those before it."""
    return next(_whole(copies, lineage), None)


def _whole(copies: Completeness, lineage: Lineage) -> Iterator[StepId]:
    """Newest first."""
    for place in reversed(range(len(copies.steps))):
        id = copies.steps[place]
        if not lineage.restorable(id):
            continue
        if copies.complete(id, Tier.MEMORY):
            yield id
            continue
        coverage = copies.coverage(id)
        if coverage is not None and coverage.whole:
            older = reversed(copies.steps[:place])
            before = (
                one
                for one in older
                if copies.complete(one, Tier.MEMORY) and lineage.restorable(one)
            )
            complete = next(before, None)
            if complete is None or not _nearby(coverage, copies.coverage(complete)):
                yield id


def _nearby(of: Coverage, complete: Coverage | None) -> bool:
    """Whether its ranks without an image of their own have one of the complete step nearby."""
    near = (Tier.MEMORY, Tier.LOCAL, Tier.PEER)
    return complete is not None and complete.world == of.world and not of.twins & ~complete.on(near)


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
