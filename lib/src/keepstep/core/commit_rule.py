"""Which steps are committed: who holds which images, and which steps are alive.

A step is complete on a tier when images of one world size, on that tier or a stronger one, cover
all ranks of that world. This is the commit rule: a complete step that no later epoch left behind
(`Lineage`) is committed, and no other step is. It can be recomputed at any time from what lies on
storage.

A step that is not complete may still be covered: each rank whose image is gone has a twin, whose
image holds the very same boxes. Such a step is not committed, but it can be restored.

A set of ranks is a bitmap in an integer: what a node holds of a step is one number, however many
ranks it has. Of an image only what the ledger asks for is kept: numbers that stand for its digests,
and its size. A value that is the same for all ranks is kept once.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat
from typing import NamedTuple, Union

from keepstep.core.shard import Shard
from keepstep.steps import NEAREST_FIRST, Answer, Epoch, EpochId, StepId, StrEnum, Tier

Place = tuple[int, Tier, int]
"""(node rank, tier, world). One place holds at most one image of a rank and step. Images in the
archive belong to no node (`commit_rule.NO_NODE`)."""

Column = Union[int, "array[int]"]
"""A number for each rank that is held, in the order of ranks. A single number while it is the same
for all of them."""

_DIGESTS, _SIZES = "i", "q"
_FEW = 512


def bits(ranks: int) -> Iterator[int]:
    """The ranks in a bitmap, ascending."""
    digits = bin(ranks)[:1:-1]
    rank = digits.find("1")
    while rank >= 0:
        yield rank
        rank = digits.find("1", rank + 1)


def bitmap(ranks: Iterable[int]) -> int:
    """The bitmap of these ranks."""
    found = 0
    for rank in ranks:
        found |= 1 << rank
    return found


def is_full(ranks: int, world: int) -> bool:
    """Whether the bitmap contains all ranks of this world."""
    everybody = (1 << world) - 1
    return ranks & everybody == everybody


class RankUnion:
    """The union of many bitmaps, one for each key. Most changes of one bitmap need no look at the
    others.

    `once`: bits that are in any bitmap. `twice`: bits that are in more than one.
    """

    __slots__ = ("_of", "once", "twice")

    def __init__(self) -> None:
        self.once = self.twice = 0
        self._of: dict[int, int] = {}

    def __getitem__(self, key: int) -> int:
        return self._of.get(key, 0)

    def put(self, key: int, ranks: int) -> None:
        """Replace the bitmap of this key."""
        before = self[key]
        if before == ranks:
            return
        left, came = before & ~ranks, ranks & ~before
        if ranks:
            self._of[key] = ranks
        else:
            del self._of[key]
        if left & self.twice:
            self._add_up()
        else:
            self.once &= ~left
            self._add(came)

    def having(self, rank: int) -> set[int]:
        """The keys of the bitmaps that contain this rank."""
        return {key for key, ranks in self._of.items() if ranks >> rank & 1}

    def _add(self, ranks: int) -> None:
        self.twice |= self.once & ranks
        self.once |= ranks

    def _add_up(self) -> None:
        """Compute both sums anew. When a bit of `twice` goes from one bitmap, the sums do not show
        how many others still have it."""
        self.once = self.twice = 0
        for ranks in self._of.values():
            self._add(ranks)


class Holding:
    """The images of one step at one place.

    `doubled`: ranks of which this one place has two different images. `written_at`: when the last
    image was written, in unix seconds; 0 if no time was reported.
    """

    __slots__ = ("_params", "_roots", "_sizes", "_twins", "doubled", "place", "ranks", "written_at")

    def __init__(self, place: Place) -> None:
        self.place = place
        self.ranks = 0
        self.doubled = 0
        self.written_at = 0.0
        self._roots: Column = 0
        self._params: Column = 0
        self._sizes: Column = 0
        self._twins: dict[int, int] | None = None

    def add(self, images: Mapping[int, Shard]) -> None:
        """Add images, by rank. None of these ranks may have an image here yet."""
        ranks = sorted(images)
        told = [images[rank] for rank in ranks]
        roots = [number_of(one.root) for one in told]
        params = [number_of(one.params_digest) for one in told]
        self._roots = _put(self._roots, self.ranks, ranks, roots, _DIGESTS)
        self._params = _put(self._params, self.ranks, ranks, params, _DIGESTS)
        sizes = [one.size_bytes for one in told]
        self._sizes = _put(self._sizes, self.ranks, ranks, sizes, _SIZES)
        self.ranks |= bitmap(ranks)
        self.written_at = max(self.written_at, *(one.written_at or 0.0 for one in told))
        for rank, one in images.items():
            if group := one.alike.bits:
                self._twins = self._twins or {}
                self._twins[group] = self._twins.get(group, 0) | 1 << rank

    def remove(self, ranks: int) -> None:
        """Remove the images of these ranks. Each of them must have one here."""
        for rank in bits(ranks):
            at = _index(self.ranks, rank)
            for column in (self._roots, self._params, self._sizes):
                if not isinstance(column, int):
                    column.pop(at)
            self.ranks &= ~(1 << rank)
        self.doubled &= ~ranks
        if self._twins:
            kept = {group: told & ~ranks for group, told in self._twins.items()}
            self._twins = {group: told for group, told in kept.items() if told} or None

    def is_of(self, rank: int, shard: Shard) -> bool:
        """Whether the image of this rank that is held here is `shard`."""
        at = _index(self.ranks, rank)
        return (
            _get(self._roots, at) == number_of(shard.root)
            and _get(self._params, at) == number_of(shard.params_digest)
            and _get(self._sizes, at) == shard.size_bytes
            and (shard.written_at or 0.0) <= self.written_at
            and not self.doubled >> rank & 1
            and self._group_of(rank) == shard.alike.bits
        )

    def root(self, rank: int) -> int:
        """A number that stands for the digest of the rank's image; 0 if there is no image, or if it
        has no digest."""
        return _get(self._roots, _index(self.ranks, rank)) if self.ranks >> rank & 1 else 0

    @property
    def rooted(self) -> int:
        """All ranks held here if any image may have a digest; 0 if no image has one."""
        return 0 if self._roots == 0 else self.ranks

    def params(self) -> Iterator[tuple[int, int]]:
        """By rank, a number that stands for the digest of the parameters; 0 if there is none."""
        return _by_rank(self.ranks, self._params)

    def sizes(self) -> Iterator[tuple[int, int]]:
        """Bytes of each image, by rank."""
        return _by_rank(self.ranks, self._sizes)

    def with_twins(self) -> int:
        """Bitmap of the ranks held here, and of the ranks that have a twin among them."""
        found = self.ranks
        for group in self._twins or ():
            found |= group
        return found

    def _group_of(self, rank: int) -> int:
        for group, told in (self._twins or {}).items():
            if told >> rank & 1:
                return group
        return 0


def number_of(digest: str | None) -> int:
    """A number that stands for a digest; 0 for None.

    The numbers hold within one process only: Python salts `hash` for each process, so nobody can
    choose two digests with one number. 31 bits, because these numbers are most of what is kept of a
    step in the archive.
    """
    return 0 if digest is None else (hash(digest) & 0x7FFFFFFF) or 1


def _index(ranks: int, rank: int) -> int:
    """How many of these ranks are lower than this one: its index in their order."""
    return (ranks & ((1 << rank) - 1)).bit_count()


def _put(column: Column, there: int, ranks: list[int], values: list[int], kind: str) -> Column:
    """The column of the ranks `there`, with the values of `ranks` (ascending, none `there`) put
    in."""
    if isinstance(column, int):
        same = values[0] if not there else column
        if values.count(same) == len(values):
            return same
        column = array(kind, [column]) * there.bit_count()
    at = _index(there, ranks[0])
    if _index(there, ranks[-1]) == at:
        if len(column) > _FEW:
            column[at:at] = array(kind, values)  # thousands of pods each add a value: no copies
            return column
        return column[:at] + array(kind, values) + column[at:]  # a copy has no spare capacity
    for before, (rank, value) in enumerate(zip(ranks, values, strict=True)):
        column.insert(_index(there, rank) + before, value)
    return column


def _by_rank(ranks: int, column: Column) -> Iterator[tuple[int, int]]:
    return zip(bits(ranks), repeat(column) if isinstance(column, int) else column, strict=False)


def _get(column: Column, at: int) -> int:
    return column if isinstance(column, int) else column[at]


class Standing(StrEnum):
    """`LIVE` and `ASIDE` may be restored; `LIVE` and `DEAD` may be retired."""

    LIVE = "live"
    ASIDE = "aside"
    LOST = "lost"
    DEAD = "dead"


class Segment(NamedTuple):
    """The steps of `epoch` up to and including `last` (None: all of them)."""

    epoch: EpochId
    last: int | None
    standing: Standing


@dataclass(frozen=True)
class Lineage:
    """The chain of epochs behind the newest one.

    `segments`: newest first. `lost_before`: steps of epochs older than this cannot be judged.
    `fresh`: the newest epoch that began at step 0 beside older ones and was not acknowledged; None
    if there is none.
    """

    segments: tuple[Segment, ...] = ()
    lost_before: EpochId | None = None
    fresh: EpochId | None = None

    @property
    def current(self) -> EpochId | None:
        return self.segments[0].epoch if self.segments else None

    def standing(self, id: StepId) -> Standing:
        segment = self._of_epoch.get(id.epoch)
        if segment is not None:
            within = segment.last is None or id.step <= segment.last
            return segment.standing if within else Standing.DEAD
        if self.lost_before is not None and id.epoch < self.lost_before:
            return Standing.LOST
        beyond = self.current is None or id.epoch > self.current
        return Standing.LIVE if beyond else Standing.DEAD

    @cached_property
    def _of_epoch(self) -> Mapping[EpochId, Segment]:
        return {segment.epoch: segment for segment in self.segments}

    def restorable(self, id: StepId) -> bool:
        return self.standing(id) in (Standing.LIVE, Standing.ASIDE)


def trace(
    recorded: Mapping[EpochId, Epoch],
    *,
    seen: Iterable[EpochId] = (),
    acknowledged: Collection[EpochId] = (),
) -> Lineage:
    """Walk back from the newest epoch. `seen`: the epochs of all images, recorded or not."""
    seen = set(seen)
    known = {*recorded, *seen}
    if not known:
        return Lineage()
    oldest_seen, ordered = min(seen, default=None), list[EpochId]()
    segments: list[Segment] = []
    at, last = max(known), None
    standing, fresh = Standing.LIVE, None
    while True:
        segments.append(Segment(at, last, standing))
        if at not in recorded:
            return Lineage(tuple(segments), at, fresh)
        parent = recorded[at].parent
        if parent is not None and parent.epoch < at:
            at, last = parent.epoch, parent.step
        elif at in acknowledged or oldest_seen is None or oldest_seen >= at:
            return Lineage(tuple(segments), None, fresh)
        else:
            standing, fresh = Standing.ASIDE, fresh or at
            ordered = ordered or sorted(known)
            at, last = ordered[bisect_left(ordered, at) - 1], None


NO_NODE = -1


def at_least(tier: Tier) -> tuple[Tier, ...]:
    """This tier and the stronger ones."""
    return NEAREST_FIRST[NEAREST_FIRST.index(tier) :]


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What one node has of one rank.

    A tier that `sealed` or `answers` names is replaced as a whole, unless `gone` names it, too. Of
    such a tier, the images in `sealed` are added to what is known, and the steps in `gone` are
    removed.
    """

    sealed: Mapping[Tier, tuple[Shard, ...]] = field(default_factory=dict)
    answers: Mapping[Tier, Answer] = field(default_factory=dict)
    gone: Mapping[Tier, Collection[StepId]] = field(default_factory=dict)


class Tally:
    """The copies of one step.

    `contested`: bitmap of the ranks of which two different images exist. `known`: by tier, whether
    the step is complete there, as far as that was judged.
    """

    __slots__ = ("_reach", "contested", "copies", "id", "known", "rooted")

    def __init__(self, id: StepId) -> None:
        self.id = id
        self.copies: list[Holding] = []
        self.contested = 0
        self.known: dict[Tier, bool] = {}
        self._reach: dict[tuple[Tier, int], RankUnion] = {}
        self.rooted = 0

    def changed(self, held: Holding, ranks: int) -> None:
        """`held` has got or lost images of these ranks."""
        self._reach.setdefault(held.place[1:], RankUnion()).put(held.place[0], held.ranks)
        self.rooted |= held.rooted & ranks

    @property
    def reach(self) -> Mapping[tuple[Tier, int], int]:
        """By (tier, world), the bitmap of all ranks of which there are copies. It is kept, because
        thousands of nodes may have one copy each, and each of their reports asks for it."""
        return {at: union.once for at, union in self._reach.items() if union.once}

    def worlds(self) -> set[int]:
        return {world for _, world in self.reach}

    def contest(self, ranks: int) -> None:
        """Compare all images of these ranks that have digests, and update `contested`."""
        there = [held for held in self.copies if held.rooted & ranks]
        once = twice = found = 0
        for held in there:
            twice |= once & held.ranks
            once |= held.ranks
            found |= held.doubled
        for rank in bits(twice & ranks):
            if len({held.root(rank) for held in there} - {0}) > 1:
                found |= 1 << rank
        self.contested = self.contested & ~ranks | found & ranks

    def ranks(self, tiers: Collection[Tier], *, without: Collection[int] = ()) -> int:
        """Bitmap of the ranks of which a copy lies on one of these tiers, on a node that is not in
        `without`."""
        found = 0
        if not without:
            for (tier, _), ranks in self.reach.items():
                found |= ranks if tier in tiers else 0
            return found
        for held in self.copies:
            node_rank, tier, _ = held.place
            if tier in tiers and node_rank not in without:
                found |= held.ranks
        return found

    def complete(self, tier: Tier) -> bool:
        if tier not in self.known:
            self.known[tier] = self._complete(tier)
        return self.known[tier]

    def _complete(self, tier: Tier) -> bool:
        # THE COMMIT RULE: the sealed shards of (epoch, step) cover the whole world.
        worlds = self.worlds()
        if len(worlds) != 1 or self.contested:
            return False
        return is_full(self.ranks(at_least(tier)), min(worlds))


class Answers:
    """What one node answered for its ranks on one tier. `of`: by answer, a bitmap. `gone`: ranks
    for which the node had answered before it, or the rank, was gone."""

    __slots__ = ("gone", "of")

    def __init__(self) -> None:
        self.of = dict.fromkeys(Answer, 0)
        self.gone = 0

    @property
    def there(self) -> int:
        """The ranks with any answer."""
        return self.of[Answer.UNKNOWN] | self.of[Answer.NONE] | self.of[Answer.STEPS]

    def say(self, answers: Mapping[int, Answer]) -> bool:
        """Take in an answer for each rank. Returns whether anything changed."""
        before, others = (self.of, self.gone), ~bitmap(answers)
        self.of = {answer: ranks & others for answer, ranks in self.of.items()}
        self.gone &= others
        for rank, answer in answers.items():
            self.of[answer] |= 1 << rank
        return before != (self.of, self.gone)

    def leave(self, ranks: int) -> None:
        """Nobody can answer for these ranks any more."""
        self.gone |= self.there & ranks
        self.of = {answer: of & ~ranks for answer, of in self.of.items()}

    def merge(self, other: Answers) -> None:
        self.of = {answer: ranks | other.of[answer] for answer, ranks in self.of.items()}
        self.gone |= other.gone


_ALL_RANKS = -1
_IN_ORDER = (Answer.UNKNOWN, Answer.NONE, Answer.STEPS)


class Completeness:
    """Every copy that was reported.

    Copies are kept by node rank, because the old node of a rank that moved may still hold some of
    its shards. Answers cover all nodes. `changed`: steps whose copies changed since the owner last
    emptied this set.
    """

    def __init__(self) -> None:
        self._held: dict[int, dict[Place, dict[StepId, Holding]]] = {}
        self._of_step: dict[StepId, Tally] = {}
        self._steps: list[StepId] = []
        self._epochs_held: Counter[EpochId] = Counter()
        self._contested: set[StepId] = set()
        self._answers: dict[tuple[int, Tier], Answers] = {}
        self._merged: dict[Tier, Answers] = {}
        self._in_memory = RankUnion()
        self.changed: set[StepId] = set()

    # --- changing ------------------------------------------------------------------------

    def replace(self, node_rank: int, reports: Mapping[int, RankReport]) -> None:
        """Take in what this node reports of these ranks, for each tier that a rank's report names.
        All ranks are taken in at once, because they have the same steps.

        There is one archive, so the last report of it counts, whichever node sent it.
        """
        for tier in NEAREST_FIRST:
            told = {
                rank: one
                for rank, one in reports.items()
                if tier in one.sealed or tier in one.answers
            }
            if not told:
                continue
            at = NO_NODE if tier.shared else node_rank
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
        """Forget what this node reported of this rank (None: of all ranks). Images in the archive
        are not forgotten."""
        ranks = _ALL_RANKS if rank is None else 1 << rank
        for place, steps in list(self._held.get(node_rank, {}).items()):
            for id in list(steps):
                self._take_out(place, id, ranks)
        for tier in NEAREST_FIRST:
            if (said := self._answers.get((node_rank, tier))) is not None:
                said.leave(ranks)
        self._merged.clear()
        self._in_memory.put(node_rank, self._in_memory[node_rank] & ~ranks)

    def keep_newest(self, at: int, most: int) -> None:
        """Forget all but the newest `most` steps that are held at `at`, on each tier."""
        for place, steps in list(self._held.get(at, {}).items()):
            for id in sorted(steps)[:-most]:
                self._take_out(place, id, _ALL_RANKS)

    def _keep(self, at: int, tier: Tier, ranks: int, images: Mapping[_Key, _Images]) -> None:
        """Forget the images of these ranks here, except `images`."""
        for place, steps in self._at(at, tier) if ranks else ():
            for id, held in list(steps.items()):
                if held.ranks & ranks:
                    named = images.get((id, place[2]))
                    self._take_out(place, id, ranks & ~(named.ranks if named else 0))

    def _remove(self, at: int, tier: Tier, gone: Mapping[int, Iterable[StepId]]) -> None:
        of: dict[StepId, int] = {}
        for rank, ids in gone.items():
            for id in ids:
                of[id] = of.get(id, 0) | 1 << rank
        for place, steps in self._at(at, tier) if of else ():
            for id, ranks in of.items():
                if id in steps:
                    self._take_out(place, id, ranks)

    def _put(self, place: Place, told: _Images) -> None:
        """Take in images of one step at this place."""
        steps = self._held.setdefault(place[0], {}).setdefault(place, {})
        held, images = steps.get(told.id), told.of
        tally = self._tally_of(told.id)
        if held is None:
            held = steps[told.id] = Holding(place)
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
            held.remove(there & bitmap(images))
        ranks = bitmap(images) | told.doubled
        compare = told.doubled | tally.contested & ranks | tally.rooted & ranks
        if images:
            held.add(images)
            tally.changed(held, bitmap(images))
        held.doubled |= told.doubled
        if compare:
            tally.contest(ranks)
        self._note(told.id, tally)

    def _tally_of(self, id: StepId) -> Tally:
        """The step's tally, made if there is none."""
        tally = self._of_step.get(id)
        if tally is None:
            tally = self._of_step[id] = Tally(id)
            insort(self._steps, id)
            self._epochs_held[id.epoch] += 1
        return tally

    def _take_out(self, place: Place, id: StepId, ranks: int) -> None:
        """Remove the images of these ranks and this step from this place."""
        steps, tally = self._held[place[0]][place], self._of_step[id]
        held = steps[id]
        leaving = held.ranks & ranks
        if not leaving:
            return
        if leaving == held.ranks:
            del steps[id]
            tally.copies.remove(held)
            held.ranks = 0
            if not steps:
                del self._held[place[0]][place]
        else:
            held.remove(leaving)
        tally.changed(held, leaving)
        if tally.contested & leaving:
            tally.contest(tally.contested & leaving)
        self._note(id, tally)

    def _note(self, id: StepId, tally: Tally) -> None:
        tally.known.clear()
        self.changed.add(id)
        if tally.contested:
            self._contested.add(id)
        elif self._contested:
            self._contested.discard(id)
        if not tally.copies:
            del self._of_step[id]
            del self._steps[bisect_left(self._steps, id)]
            self._epochs_held[id.epoch] -= 1
            if not self._epochs_held[id.epoch]:
                del self._epochs_held[id.epoch]

    def _at(self, at: int, tier: Tier) -> list[tuple[Place, dict[StepId, Holding]]]:
        return [one for one in self._held.get(at, {}).items() if one[0][1] is tier]

    # --- asking --------------------------------------------------------------------------

    @property
    def steps(self) -> list[StepId]:
        """Every step of which any node or the archive holds an image, oldest first."""
        return self._steps

    @property
    def contested_steps(self) -> list[StepId]:
        """Steps of which two different images of one rank exist, oldest first."""
        return sorted(self._contested)

    def copies(self, id: StepId) -> Sequence[Holding]:
        """Every copy of this step."""
        return self._tally(id).copies

    def of_node(self, node_rank: int, tier: Tier) -> Iterator[tuple[StepId, Holding]]:
        """The steps that this node holds on this tier, each with its copies."""
        for _, steps in self._at(node_rank, tier):
            yield from steps.items()

    def steps_at(self, at: int) -> int:
        """How many steps are held at `at`. A step counts once for each tier and world."""
        return sum(map(len, self._held.get(at, {}).values()))

    def held(self, at: int, tier: Tier) -> int:
        """Bitmap of the ranks of which any image is held at `at` on this tier."""
        found = 0
        for _, held in self.of_node(at, tier):
            found |= held.ranks
        return found

    def holders(self, id: StepId, tier: Tier) -> int:
        """Bitmap of the ranks whose image of the step is on exactly this tier."""
        return self._tally(id).ranks((tier,))

    def worlds(self, id: StepId) -> set[int]:
        """The world sizes that copies of this step name. More than one means a serious error."""
        return self._tally(id).worlds()

    def complete(self, id: StepId, tier: Tier) -> bool:
        """Whether every rank of the step's world has a copy on this tier or a stronger one.

        A step with two writers is never complete, because nobody can say which image is right.
        """
        tally = self._of_step.get(id)
        return tally is not None and tally.complete(tier)

    def contested(self, id: StepId) -> list[int]:
        """Ranks of which two different images of this step exist."""
        return list(bits(self._tally(id).contested))

    def _tally(self, id: StepId) -> Tally:
        return self._of_step.get(id) or Tally(id)

    def is_there(self, id: StepId) -> bool:
        """Whether any copy of this step is held anywhere."""
        return id in self._of_step

    def coverage(
        self, id: StepId, tier: Tier = Tier.MEMORY, *, without: Collection[int] = ()
    ) -> Coverage | None:
        """What can be reached of the step on this tier or a stronger one, `without` these nodes.

        None if nobody can say, because there are two writers or two world sizes, or no copy at all.
        """
        tally = self._tally(id)
        worlds = tally.worlds()
        if len(worlds) != 1 or tally.contested:
            return None
        return _spread(tally, at_least(tier), world=min(worlds), without=without)

    def answer(self, rank: int, tier: Tier) -> Answer:
        """The answer for this rank on this tier, over all nodes. For the archive: the answer for
        the whole run.

        Without any answer it is UNKNOWN.
        """
        unknown, none, steps = (self._said(tier).of[one] for one in _IN_ORDER)
        if tier.shared:
            return _one_of(unknown, none, steps or self._at(NO_NODE, tier))
        return _one_of(unknown >> rank & 1, none >> rank & 1, steps >> rank & 1)

    def silent(self, tier: Tier) -> int:
        """Bitmap of the ranks whose answer is UNKNOWN, including all ranks of which nobody ever
        reported. So it may have infinitely many bits (a negative number)."""
        if tier.shared:
            return _ALL_RANKS if self.answer(0, tier) is Answer.UNKNOWN else 0
        said = self._said(tier)
        return said.of[Answer.UNKNOWN] | ~said.there

    def out_of_reach(self, rank: int, tier: Tier) -> bool:
        """Whether only nodes that are gone ever answered for this rank and tier, so that waiting
        for an answer is useless."""
        said = self._said(tier)
        return bool(said.gone & ~said.there & 1 << rank)

    def _said(self, tier: Tier) -> Answers:
        merged = self._merged.get(tier)
        if merged is None:
            merged = self._merged[tier] = Answers()
            for (_, of), said in self._answers.items():
                if of is tier:
                    merged.merge(said)
        return merged

    def twice_in_memory(self) -> dict[int, set[int]]:
        """rank -> node ranks, for each rank whose images are in the memory of more than one."""
        return {rank: self._in_memory.having(rank) for rank in bits(self._in_memory.twice)}


_Key = tuple[StepId, int]
"""A step and the world size of its images."""


class _Images:
    """What a report says of one step. `of`: an image of each rank in the bitmap `ranks`. `doubled`:
    ranks of which the report names a second, different image."""

    __slots__ = ("doubled", "id", "of", "ranks", "world")

    def __init__(self, id: StepId, world: int) -> None:
        self.id = id
        self.world = world
        self.of: dict[int, Shard] = {}
        self.ranks = self.doubled = 0


def _by_step(sealed: Iterable[tuple[int, Iterable[Shard]]]) -> dict[_Key, _Images]:
    """Group the reported images, given by rank, by step and world."""
    found: dict[_Key, _Images] = {}
    for rank, shards in sealed:
        for one in shards:
            images = found.get((one.step_id, one.world))
            if images is None:
                images = _Images(one.step_id, one.world)
                found[one.step_id, one.world] = images
            images.ranks |= 1 << rank
            first = images.of.setdefault(rank, one)
            if first.root != one.root and None not in (first.root, one.root):
                images.doubled |= 1 << rank
    return found


def _one_of(unknown: object, none: object, steps: object) -> Answer:
    if unknown or not (none or steps):
        return Answer.UNKNOWN
    return Answer.STEPS if steps else Answer.NONE


def _answer(held: int, said: Answer | None) -> Answer:
    """The answer of a report. A report that lists steps cannot mean NONE. One that lists no steps
    means NONE only if it says so itself."""
    if held and said is not Answer.UNKNOWN:
        return Answer.STEPS
    return said or Answer.UNKNOWN


# --- coverage --------------------------------------------------------------------------------
#
# Boxes are counted by rank, never one by one. Twins are ranks whose images have the very same boxes
# (`image.Layout.twins`), so an image of any of them stands for all.


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """Where the ranks of a step find their boxes.

    `found`: for each tier, nearest first, the bitmap of the ranks that find their boxes there. Each
    rank is named once. `twins`: the ranks among them for which only a twin's image was found.
    `world`: how many ranks saved the step.
    """

    found: tuple[tuple[Tier, int], ...]
    twins: int
    world: int

    @property
    def tiers(self) -> Mapping[int, Tier]:
        """By rank, the nearest tier that holds its image; for ranks in `by_twins`, a twin's."""
        each = {rank: tier for tier, ranks in self.found for rank in bits(ranks)}
        return {rank: each[rank] for rank in sorted(each)}

    @property
    def by_twins(self) -> list[int]:
        """Ranks whose own image is gone and for which a twin's stands in."""
        return list(bits(self.twins))

    @property
    def lost(self) -> list[int]:
        """Ranks whose boxes nobody holds. Computed only when asked for: the world size is what a
        report said, and may be far larger than the number of images."""
        return list(bits(~self._all & ((1 << self.world) - 1)))

    @property
    def whole(self) -> bool:
        """Whether every box can be reached."""
        return is_full(self._all, self.world)

    @property
    def _all(self) -> int:
        found = 0
        for _, ranks in self.found:
            found |= ranks
        return found

    def on(self, tiers: Collection[Tier]) -> int:
        """Bitmap of the ranks that find their boxes on one of these tiers."""
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
