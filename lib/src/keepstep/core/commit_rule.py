"""Which steps are committed: who holds which images, and which steps are alive.

A step is complete on a tier when images of one world size, on that tier or a stronger one, cover
all ranks of that world. This is the commit rule: a complete step that no later epoch left behind
(`EpochLineage`) is committed, and no other step is. It can be recomputed at any time from what
lies on storage.

A step that is not complete may still be covered: each rank whose image is gone has a twin, whose
image holds the very same boxes. Such a step is not committed, but it can be restored.

A set of ranks is a bitmap in an integer: what a node holds of a step is one number, however many
ranks it has. Of an image only what the ledger asks for is kept: numbers that stand for its digests,
and its size.
"""

from __future__ import annotations

import functools
import operator
from array import array
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, NamedTuple, TypeVar

from keepstep.core.shard import Ranks, Shard, ShardsOfStep
from keepstep.steps import NEAREST_FIRST, Epoch, EpochId, StepId, StrEnum, Tier, TierAnswer

Place = tuple[int, Tier, int]
"""(node rank, tier, world). One place holds at most one image of a rank and step. Images in the
archive belong to no node (`commit_rule.NO_NODE`)."""

_Key = tuple[StepId, int]
"""A step and the world size of its images."""


def each_rank(ranks: int) -> Iterator[int]:
    """The ranks in a bitmap, ascending."""
    lowest = (ranks & -ranks).bit_length() - 1  # a node's ranks are few, and may be high
    digits = bin(ranks >> max(lowest, 0))[:1:-1]
    at = digits.find("1")
    while at >= 0:
        yield lowest + at
        at = digits.find("1", at + 1)


def rank_bitmap(ranks: Iterable[int]) -> int:
    """The bitmap of these ranks."""
    found = 0
    for rank in ranks:
        found |= 1 << rank
    return found


def is_full(ranks: int, world: int) -> bool:
    """Whether the bitmap contains all ranks of this world."""
    everybody = (1 << world) - 1
    return ranks & everybody == everybody


class RankBitmapUnion:
    """The union of many bitmaps, one for each key. `once`: bits that are in any bitmap. `twice`:
    those that are in more than one. Only a bit that leaves one of several costs a look at all."""

    __slots__ = ("_of", "once", "twice")

    def __init__(self) -> None:
        self.once = self.twice = 0
        self._of: dict[int, int] = {}

    def replace_bitmap(self, key: int, ranks: int) -> None:
        """Replace the bitmap of this key."""
        before = self._of.pop(key, 0)
        added, removed = ranks & ~before, before & ~ranks
        if ranks:
            self._of[key] = ranks
        self.once &= ~removed | self.twice
        self.twice |= self.once & added
        self.once |= added
        if removed & self.twice:
            self._count(removed & self.twice)

    def _count(self, ranks: int) -> None:
        once = twice = 0
        for value in self._of.values():
            if value & ranks:
                twice |= once & value
                once |= value
        self.once = self.once & ~ranks | once & ranks
        self.twice = self.twice & ~ranks | twice & ranks

    def find_overlapping_keys(self, ranks: int) -> list[int]:
        """The keys of the bitmaps that have any of these bits."""
        return [key for key, value in self._of.items() if value & ranks]


class StepImagesAtPlace:
    """The images of one step at one place.

    `doubled`: ranks of which this one place has two different images. `written_at`: when the last
    image was written, in unix seconds; 0 if no time was reported.
    """

    __slots__ = ("_columns", "_twins", "doubled", "id", "place", "ranks", "written_at")

    def __init__(self, step_id: StepId, place: Place) -> None:
        self.id = step_id
        self.place = place
        self.ranks = 0
        self.doubled = 0
        self.written_at = 0.0
        self._columns = array("i"), array("i"), array("q")
        """In the order of ranks: the numbers of both digests, and the bytes of the image."""
        self._twins: dict[int, int] = {}

    def put(self, ranks: Ranks, shards: ShardsOfStep) -> int:
        """Hold these images of these ranks in place of those that are held. Returns the bitmap of
        the ranks whose images have changed, which may be more than really did."""
        of, below = ranks.bits, (1 << ranks.first) - 1
        there = self.ranks & ((2 << ranks.last) - 1) & ~below
        if there & ~of:  # images of other ranks lie between, as in the archive
            each = (
                self.put(Ranks.of((rank,)), shards.select_rank_at(at))
                for at, rank in enumerate(ranks)
            )
            return functools.reduce(operator.or_, each, 0)
        begin = (self.ranks & below).bit_count()
        at, none = slice(begin, begin + there.bit_count()), bytes(4 * len(ranks))
        columns = (
            array("i", map(_number_of, shards.roots) if shards.roots else none),
            array("i", map(_number_of, shards.params_digests) if shards.params_digests else none),
            array("q", shards.sizes),
        )
        twins = self._twins_without(of)
        for rank, alike in zip(ranks, shards.alike, strict=False):
            if alike:
                twins[alike.bits] = twins.get(alike.bits, 0) | 1 << rank
        written_at = max(self.written_at, shards.written_at or 0.0)
        if (
            (there, self.doubled & of) == (of, 0)
            and (twins, written_at) == (self._twins, self.written_at)
            and all(held[at] == now for held, now in zip(self._columns, columns, strict=True))
        ):
            return 0
        for held, now in zip(self._columns, columns, strict=True):
            held[at] = now
        self._twins, self.written_at = twins, written_at
        self.ranks |= of
        self.doubled &= ~of
        return of

    def note_conflicting_image(self, rank: int, root: str | None) -> int:
        """There is another image of this rank, which is held here. Returns the bitmap of the rank
        if it is a different one."""
        known, number = self.get_image_digest_number(rank), _number_of(root)
        found = 1 << rank if known and number and known != number else 0
        self.doubled |= found
        return found

    def remove(self, ranks: int) -> None:
        """Remove the images of these ranks. Each of them must have one here."""
        if ranks == self.ranks:  # as nearly always
            self._columns = array("i"), array("i"), array("q")
        else:
            for at in reversed([_index(self.ranks, rank) for rank in each_rank(ranks)]):
                for column in self._columns:
                    column.pop(at)
        self.ranks &= ~ranks
        self.doubled &= ~ranks
        self._twins = self._twins_without(ranks)

    def _twins_without(self, ranks: int) -> dict[int, int]:
        """The ranks that have twins, without these."""
        return {group: left for group, members in self._twins.items() if (left := members & ~ranks)}

    @property
    def has_digests(self) -> bool:
        """Whether any image here can be compared. Those in memory cannot."""
        return any(self._columns[0]) or bool(self.doubled)

    def get_image_digest_number(self, rank: int) -> int:
        """A number that stands for the digest of the rank's image; 0 if there is no image, or if it
        has no digest."""
        return self._columns[0][_index(self.ranks, rank)] if self.ranks >> rank & 1 else 0

    def equals(self, other: StepImagesAtPlace) -> bool:
        """Whether the other one has images of the same ranks with the same digests, as a buddy
        has."""
        return self.ranks == other.ranks and self._columns[0] == other._columns[0]

    def iterate_parameter_digests(self) -> Iterator[tuple[int, int]]:
        """By rank, a number that stands for the digest of the parameters; 0 if there is none."""
        return zip(each_rank(self.ranks), self._columns[1], strict=True)

    def sizes(self) -> Iterator[tuple[int, int]]:
        """Bytes of each image, by rank."""
        return zip(each_rank(self.ranks), self._columns[2], strict=True)

    @property
    def has_twins(self) -> bool:
        """Whether an image here stands for that of another rank."""
        return bool(self._twins)

    def ranks_with_twins(self) -> int:
        """Bitmap of the ranks held here, and of the ranks that have a twin among them."""
        return functools.reduce(operator.or_, self._twins, self.ranks)


def _number_of(digest: str | None) -> int:
    """A number that stands for a digest; 0 for None.

    The numbers hold within one process only: Python salts `hash` for each process, so nobody can
    choose two digests with one number. 31 bits, because these numbers are most of what is kept of a
    step in the archive.
    """
    return 0 if digest is None else (hash(digest) & 0x7FFFFFFF) or 1


def _index(ranks: int, rank: int) -> int:
    """How many of these ranks are lower than this one: its index in their order."""
    return (ranks & ((1 << rank) - 1)).bit_count()


class StepLiveness(StrEnum):
    """`LIVE` and `ASIDE` may be restored, `LOST` where nothing else is whole; `LIVE` and `DEAD` may
    be retired."""

    LIVE = "live"
    ASIDE = "aside"
    LOST = "lost"
    DEAD = "dead"


RESTORABLE = (StepLiveness.LIVE, StepLiveness.ASIDE)


class EpochSegment(NamedTuple):
    """The steps of `epoch` up to and including `last` (None: all of them)."""

    epoch: EpochId
    last: int | None
    standing: StepLiveness


@dataclass(frozen=True)
class EpochLineage:
    """The chain of epochs behind the newest one.

    `segments`: newest first. `lost_before`: steps of epochs older than this cannot be judged.
    `fresh`: the newest epoch that began at step 0 beside older ones and was not acknowledged; None
    if there is none.
    """

    segments: tuple[EpochSegment, ...] = ()
    lost_before: EpochId | None = None
    fresh: EpochId | None = None

    @property
    def current_epoch(self) -> EpochId | None:
        return self.segments[0].epoch if self.segments else None

    def step_liveness(self, step_id: StepId) -> StepLiveness:
        segment = self._of_epoch.get(step_id.epoch)
        if segment is not None:
            within = segment.last is None or step_id.step <= segment.last
            return segment.standing if within else StepLiveness.DEAD
        if self.lost_before is not None and step_id.epoch < self.lost_before:
            return StepLiveness.LOST
        beyond = self.current_epoch is None or step_id.epoch > self.current_epoch
        return StepLiveness.LIVE if beyond else StepLiveness.DEAD

    @cached_property
    def _of_epoch(self) -> Mapping[EpochId, EpochSegment]:
        return {segment.epoch: segment for segment in self.segments}

    def is_restorable(self, step_id: StepId) -> bool:
        return self.step_liveness(step_id) in RESTORABLE


def trace_lineage(
    recorded: Mapping[EpochId, Epoch],
    *,
    seen: Iterable[EpochId] = (),
    acknowledged: Collection[EpochId] = (),
) -> EpochLineage:
    """Walk back from the newest epoch. `seen`: the epochs of all images, recorded or not."""
    seen = set(seen)
    known = {*recorded, *seen}
    if not known:
        return EpochLineage()
    oldest_seen, ordered = min(seen, default=None), list[EpochId]()
    segments: list[EpochSegment] = []
    at, last = max(known), None
    standing, fresh = StepLiveness.LIVE, None
    while True:
        segments.append(EpochSegment(at, last, standing))
        if at not in recorded:
            return EpochLineage(tuple(segments), at, fresh)
        parent = recorded[at].parent
        if parent is not None and parent.epoch < at:
            at, last = parent.epoch, parent.step
        elif at in acknowledged or oldest_seen is None or oldest_seen >= at:
            return EpochLineage(tuple(segments), None, fresh)
        else:
            standing, fresh = StepLiveness.ASIDE, fresh or at
            ordered = ordered or sorted(known)
            at, last = ordered[bisect_left(ordered, at) - 1], None


NO_NODE = -1


@functools.cache
def tiers_at_least(tier: Tier) -> tuple[Tier, ...]:
    """This tier and the stronger ones."""
    return NEAREST_FIRST[NEAREST_FIRST.index(tier) :]


@dataclass(frozen=True, kw_only=True)
class ReportedTier:
    """What a tier of one node holds of one rank, or of several of which it holds the same steps.
    `gone`: the removed steps, if `shards` lists only what was added since the last report; None:
    `shards` lists everything."""

    answer: TierAnswer
    shards: tuple[ShardsOfStep, ...] = ()
    gone: tuple[StepId, ...] | None = None

    @classmethod
    def from_shards(
        cls, shards: Iterable[Shard], *, nothing: TierAnswer = TierAnswer.NONE
    ) -> ReportedTier:
        """All that the tier holds of one rank. `nothing`: the answer if that is nothing."""
        listed = tuple(map(ShardsOfStep.from_shard, shards))
        return cls(answer=TierAnswer.STEPS if listed else nothing, shards=listed)

    @property
    def grouping_key(self) -> object:
        """What ranks must have in common to be reported together."""
        return self.answer, self.gone, tuple((shard.step_id, shard.world) for shard in self.shards)

    @classmethod
    def joined(cls, each: Sequence[ReportedTier]) -> ReportedTier:
        """What it holds of all these ranks, from that of each rank alone, in ascending order."""
        columns = zip(*(report.shards for report in each), strict=True)
        return replace(each[0], shards=tuple(map(ShardsOfStep.joined, columns)))

    def extract_rank(self, index: int) -> ReportedTier:
        """What it holds of one of the ranks alone."""
        return replace(self, shards=tuple(shard.select_rank_at(index) for shard in self.shards))


RankReport = Mapping[Tier, ReportedTier]
"""What one node has of one rank. A tier that is not named is left as it was."""
AnyReport = TypeVar("AnyReport", bound="RanksReport")


@dataclass(frozen=True, kw_only=True)
class RanksReport:
    """What one node has of these ranks, each of which has the same steps on the same tiers: one
    entry for all ranks of a machine, as nearly always. A tier that is not named is left as it
    was."""

    ranks: Ranks
    tiers: RankReport = field(default_factory=dict)

    @cached_property
    def bits(self) -> int:
        """The ranks as a bitmap."""
        return self.ranks.bits

    @property
    def grouping_key(self) -> object:
        """What ranks must have in common to be reported together."""
        return tuple((tier, report.grouping_key) for tier, report in self.tiers.items())

    def each(self: AnyReport) -> Iterator[tuple[int, AnyReport]]:
        """Each rank, with what is said of it alone."""
        for index, rank in enumerate(self.ranks):
            tiers = {tier: report.extract_rank(index) for tier, report in self.tiers.items()}
            yield rank, replace(self, ranks=Ranks.of((rank,)), tiers=tiers)


def merge_equal_reports(each: Iterable[AnyReport]) -> tuple[AnyReport, ...]:
    """Merge equal reports into one entry for all their ranks. Each of `each` is of one rank."""
    alike: dict[object, list[AnyReport]] = {}
    for report in each:
        alike.setdefault(report.grouping_key, []).append(report)
    return tuple(map(_joined, alike.values()))


def _joined(each: list[AnyReport]) -> AnyReport:
    if len(each) == 1:
        return each[0]
    each = sorted(each, key=lambda report: report.ranks.last)
    tiers = {
        tier: ReportedTier.joined([report.tiers[tier] for report in each]) for tier in each[0].tiers
    }
    return replace(each[0], ranks=Ranks.of(report.ranks.last for report in each), tiers=tiers)


def combine_rank_reports(reports: Mapping[int, RankReport]) -> tuple[RanksReport, ...]:
    """The reports of these ranks, together."""
    return merge_equal_reports(
        RanksReport(ranks=Ranks.of((rank,)), tiers=tiers) for rank, tiers in reports.items()
    )


_PART: Final = 64


def _parts(ranks: int) -> set[int]:
    """In which parts of the world these ranks are, each of `_PART` ranks."""
    lowest, highest = (ranks & -ranks).bit_length() // _PART, ranks.bit_length() // _PART
    if lowest == highest:
        return {lowest}  # as nearly always
    return {(rank + 1) // _PART for rank in each_rank(ranks)}


class StepCopies:
    """The copies of one step.

    `contested`: bitmap of the ranks of which two different images exist. `reach`: by (tier, world),
    all ranks of which there are copies. `known`: by tier, whether the step is complete there, as
    far as that was judged. Thousands of nodes may have one copy each, so a change of one looks at
    few others: `_near` has the copies by part of the world.
    """

    __slots__ = ("_near", "contested", "copies", "known", "reach")

    def __init__(self) -> None:
        self.copies: dict[Place, StepImagesAtPlace] = {}
        self._near: dict[int, dict[Place, StepImagesAtPlace]] = {}
        self.contested = 0
        self.known: dict[Tier, bool] = {}
        self.reach: dict[tuple[Tier, int], RankBitmapUnion] = {}

    def add_images(self, held: StepImagesAtPlace, ranks: int) -> None:
        """Images of these ranks were added to this copy."""
        self.copies[held.place] = held
        self._changed(held)
        if held.has_digests:
            for part in _parts(ranks):
                self._near.setdefault(part, {})[held.place] = held
            self._compare(ranks)
        else:  # what was there in its place may have had digests
            self._compare(ranks & self.contested)

    def remove_ranks(self, held: StepImagesAtPlace, ranks: int) -> None:
        """Images of these ranks were removed from this copy."""
        if not held.ranks:
            del self.copies[held.place]
        self._changed(held)
        for part in _parts(ranks) - _parts(held.ranks):
            self._near.get(part, {}).pop(held.place, None)
        self._compare(ranks & self.contested)

    def _changed(self, held: StepImagesAtPlace) -> None:
        self.known.clear()
        node_rank, tier, world = held.place
        union = self.reach.setdefault((tier, world), RankBitmapUnion())
        union.replace_bitmap(node_rank, held.ranks)
        if not union.once:
            del self.reach[tier, world]

    def _compare(self, ranks: int) -> None:
        """Compare all images of these ranks that have digests, and update `contested`."""
        if not ranks:
            return
        near = (self._near.get(part, {}).values() for part in _parts(ranks))
        there = [held for part in near for held in part if held.ranks & ranks]
        once = twice = found = 0
        for held in there:
            twice |= once & held.ranks
            once |= held.ranks
            found |= held.doubled
        if twice & ranks and not all(there[0].equals(held) for held in there[1:]):
            for rank in each_rank(twice & ranks):
                if len({held.get_image_digest_number(rank) for held in there} - {0}) > 1:
                    found |= 1 << rank
        self.contested = self.contested & ~ranks | found & ranks

    @property
    def worlds(self) -> set[int]:
        return {world for _, world in self.reach}

    def ranks(self, tiers: Collection[Tier]) -> int:
        """Bitmap of the ranks of which a copy lies on one of these tiers."""
        there = (ranks.once for (tier, _), ranks in self.reach.items() if tier in tiers)
        return functools.reduce(operator.or_, there, 0)

    def _is_covered(self, tiers: Collection[Tier]) -> bool:
        """Whether all copies are of one world, and every rank of it has one on these tiers."""
        covered = world = 0
        for (tier, of), ranks in self.reach.items():
            if world and of != world:
                return False
            world = of
            if tier in tiers:
                covered |= ranks.once
        return bool(world) and is_full(covered, world)

    def complete(self, tier: Tier) -> bool:
        if tier not in self.known:
            # THE COMMIT RULE: the sealed shards of (epoch, step) cover the whole world.
            self.known[tier] = not self.contested and self._is_covered(tiers_at_least(tier))
        return self.known[tier]


ALL_RANKS = -1
"""Bitmap of every rank."""
_AnswerCounts = dict[TierAnswer | None, int]
"""By answer, the bitmap of the ranks for which it was given. None: a node had answered for these
ranks before it, or the rank, was gone."""


def _no_answers() -> _AnswerCounts:
    return dict.fromkeys((*TierAnswer, None), 0)


class ReportedCopies:
    """Every copy that was reported.

    Copies are kept by node rank, because the old node of a rank that moved may still hold some of
    its shards. Answers cover all nodes. `changed`: steps whose copies changed since the owner last
    emptied this set.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[int, Tier], dict[_Key, StepImagesAtPlace]] = {}
        self._of_step: dict[StepId, StepCopies] = {}
        self._steps: list[StepId] = []
        self._epochs_held: Counter[EpochId] = Counter()
        self._contested: set[StepId] = set()
        self._answers: dict[tuple[int, Tier], _AnswerCounts] = {}
        self._merged: dict[Tier, _AnswerCounts] = {}
        self._in_memory = RankBitmapUnion()
        self.changed: set[StepId] = set()

    # --- changing ------------------------------------------------------------------------

    def replace(self, node_rank: int, reports: Iterable[RanksReport]) -> None:
        """Take in what this node reports of these ranks, for each tier that a report names. No
        rank may be in two of the reports.

        There is one archive, so the last report of it counts, whichever node sent it.
        """
        for tier in NEAREST_FIRST:
            pairs = [(report, report.tiers[tier]) for report in reports if tier in report.tiers]
            if pairs:
                at = NO_NODE if tier.shared else node_rank
                self._take_in(at, tier, pairs)
                held = self.held_ranks_bitmap(at, tier)
                self._count_answers(node_rank, tier, pairs, held=held)
                if tier is Tier.MEMORY:
                    self._in_memory.replace_bitmap(node_rank, held)

    def _take_in(
        self, at: int, tier: Tier, pairs: Iterable[tuple[RanksReport, ReportedTier]]
    ) -> None:
        images: dict[_Key, list[tuple[RanksReport, ShardsOfStep]]] = {}
        whole, gone = 0, dict[StepId, int]()
        for group, report in pairs:
            for shards in report.shards:
                images.setdefault((shards.step_id, shards.world), []).append((group, shards))
            for step_id in report.gone or ():
                gone[step_id] = gone.get(step_id, 0) | group.bits
            whole |= group.bits if report.gone is None else 0
        there = self._held.get((at, tier), {}) if whole or gone else {}
        named = (
            [*there.items()] if whole else [(key, there[key]) for key in there if key[0] in gone]
        )
        for key, held in named:
            unnamed = whole & held.ranks
            for group, _ in images.get(key, ()) if unnamed else ():
                unnamed &= ~group.bits
            self._take_out(held, unnamed | gone.get(key[0], 0))
        for key, listed in images.items():
            self._put(at, tier, key, listed)

    def _put(
        self, at: int, tier: Tier, key: _Key, listed: Iterable[tuple[RanksReport, ShardsOfStep]]
    ) -> None:
        """Take in images of one step at this place. Of two different images of one rank, the first
        is held, and the rank is `doubled`."""
        step_id, world = key
        here = self._held.setdefault((at, tier), {})
        held = here.get(key) or StepImagesAtPlace(step_id, (at, tier, world))
        changed = listed_before = 0
        for group, shards in listed:
            if not listed_before & group.bits:
                changed |= held.put(group.ranks, shards)
            else:
                for rank, root in zip(group.ranks, shards.roots, strict=False):
                    changed |= held.note_conflicting_image(rank, root)
            listed_before |= group.bits
        if not changed:
            return
        tally = self._of_step.get(step_id)
        if tally is None:
            tally = self._of_step[step_id] = StepCopies()
            insort(self._steps, step_id)
            self._epochs_held[step_id.epoch] += 1
        here[key] = held
        tally.add_images(held, changed)
        self._note(step_id, tally)

    def forget_reports(self, *, node_rank: int, rank: int | None = None) -> None:
        """Forget what this node reported of this rank (None: of all ranks). Images in the archive
        are not forgotten."""
        ranks = ALL_RANKS if rank is None else 1 << rank
        for tier in NEAREST_FIRST:
            for held in list(self._held.get((node_rank, tier), {}).values()):
                self._take_out(held, ranks)
            if (answers := self._answers.get((node_rank, tier))) is not None:
                for answer in TierAnswer:
                    answers[None] |= answers[answer] & ranks
                    answers[answer] &= ~ranks
        self._merged.clear()
        self._in_memory.replace_bitmap(node_rank, self.held_ranks_bitmap(node_rank, Tier.MEMORY))

    def _take_out(self, held: StepImagesAtPlace, ranks: int) -> None:
        """Remove the images of these ranks from this copy."""
        leaving = held.ranks & ranks
        if not leaving:
            return
        held.remove(leaving)
        node_rank, tier, world = held.place
        if not held.ranks:
            del self._held[node_rank, tier][held.id, world]
        tally = self._of_step[held.id]
        tally.remove_ranks(held, leaving)
        self._note(held.id, tally)

    def _note(self, step_id: StepId, tally: StepCopies) -> None:
        self.changed.add(step_id)
        if tally.contested:
            self._contested.add(step_id)
        else:
            self._contested.discard(step_id)
        if not tally.copies:
            del self._of_step[step_id]
            del self._steps[bisect_left(self._steps, step_id)]
            self._epochs_held[step_id.epoch] -= 1
            if not self._epochs_held[step_id.epoch]:
                del self._epochs_held[step_id.epoch]

    def _count_answers(
        self,
        node_rank: int,
        tier: Tier,
        pairs: Iterable[tuple[RanksReport, ReportedTier]],
        *,
        held: int,
    ) -> None:
        before = self._answers.get((node_rank, tier)) or _no_answers()
        answers = self._answers[node_rank, tier] = dict(before)
        for group, report in pairs:
            of = group.bits
            # a report that lists steps cannot mean NONE
            lists = held & of if report.answer is not TierAnswer.UNKNOWN else 0
            for answer in answers:
                answers[answer] &= ~of
            answers[TierAnswer.STEPS] |= lists
            answers[report.answer] |= of & ~lists
        if answers != before:
            self._merged.pop(tier, None)

    # --- asking --------------------------------------------------------------------------

    @property
    def held_steps(self) -> list[StepId]:
        """Every step of which any node or the archive holds an image, oldest first."""
        return self._steps

    @property
    def steps_with_conflicting_images(self) -> list[StepId]:
        """Steps of which two different images of one rank exist, oldest first."""
        return sorted(self._contested)

    def copies(self, step_id: StepId) -> Collection[StepImagesAtPlace]:
        """Every copy of this step."""
        return self._tally(step_id).copies.values()

    def copies_of_node(
        self, node_rank: int, tier: Tier
    ) -> Iterator[tuple[StepId, StepImagesAtPlace]]:
        """The steps that this node holds on this tier, each with its copies."""
        return ((held.id, held) for held in self._held.get((node_rank, tier), {}).values())

    def rank_mask_at(self, step_id: StepId, place: Place) -> int:
        """Bitmap of the ranks of which an image of the step is at this place."""
        held = self._tally(step_id).copies.get(place)
        return 0 if held is None else held.ranks

    def count_steps_on_node(self, at: int) -> int:
        """How many steps are held at `at`. A step counts once for each tier and world."""
        return sum(len(self._held.get((at, tier), ())) for tier in NEAREST_FIRST)

    def held_ranks_bitmap(self, at: int, tier: Tier) -> int:
        """Bitmap of the ranks of which any image is held at `at` on this tier."""
        found = 0  # a loop, because each report asks for all tiers
        for held in self._held.get((at, tier), {}).values():
            found |= held.ranks
        return found

    def compute_rank_mask_on_tier(self, step_id: StepId, tier: Tier) -> int:
        """Bitmap of the ranks whose image of the step is on exactly this tier."""
        return self._tally(step_id).ranks((tier,))

    def worlds(self, step_id: StepId) -> set[int]:
        """The world sizes that copies of this step name. More than one means a serious error."""
        return self._tally(step_id).worlds

    def complete(self, step_id: StepId, tier: Tier) -> bool:
        """Whether every rank of the step's world has a copy on this tier or a stronger one.

        A step with two writers is never complete, because nobody can say which image is right.
        """
        tally = self._of_step.get(step_id)
        return tally is not None and tally.complete(tier)

    def find_conflicting_ranks(self, step_id: StepId) -> list[int]:
        """Ranks of which two different images of this step exist."""
        return list(each_rank(self._tally(step_id).contested))

    def _tally(self, step_id: StepId) -> StepCopies:
        return self._of_step.get(step_id) or StepCopies()

    def find_reachable_boxes(self, step_id: StepId) -> BoxSources | None:
        """What can be reached of the step.

        None if nobody can say, because there are two writers or two world sizes, or no copy at all.
        """
        tally = self._tally(step_id)
        if len(tally.worlds) != 1 or tally.contested:
            return None
        return _spread(tally, world=min(tally.worlds))

    def combine_answers(self, rank: int, tier: Tier) -> TierAnswer:
        """The answer for this rank on this tier, over all nodes. For the archive: the answer for
        the whole run.

        Without any answer it is UNKNOWN.
        """
        ranks = ALL_RANKS if tier.shared else 1 << rank
        answers = self._answers_of(tier)
        steps = answers[TierAnswer.STEPS] & ranks or (
            tier.shared and self.count_steps_on_node(NO_NODE)
        )
        if answers[TierAnswer.UNKNOWN] & ranks or not (answers[TierAnswer.NONE] & ranks or steps):
            return TierAnswer.UNKNOWN
        return TierAnswer.STEPS if steps else TierAnswer.NONE

    def compute_unknown_ranks_mask(self, tier: Tier) -> int:
        """Bitmap of the ranks whose answer is UNKNOWN, including all ranks of which nobody ever
        reported. So it may have infinitely many bits (a negative number)."""
        if tier.shared:
            return ALL_RANKS if self.combine_answers(0, tier) is TierAnswer.UNKNOWN else 0
        answers = self._answers_of(tier)
        return answers[TierAnswer.UNKNOWN] | ~(answers[TierAnswer.NONE] | answers[TierAnswer.STEPS])

    def are_reporters_gone(self, rank: int, tier: Tier) -> bool:
        """Whether only nodes that are gone ever answered for this rank and tier, so that waiting
        for an answer is useless."""
        answers = self._answers_of(tier)
        return bool(answers[None] >> rank & 1) and not any(
            answers[answer] >> rank & 1 for answer in TierAnswer
        )

    def _answers_of(self, tier: Tier) -> _AnswerCounts:
        """What all nodes answered on this tier."""
        if tier not in self._merged:
            merged = self._merged[tier] = _no_answers()
            for (_, of), answers in self._answers.items():
                for answer, ranks in answers.items() if of is tier else ():
                    merged[answer] |= ranks
        return self._merged[tier]

    def find_ranks_on_several_nodes(self) -> dict[int, set[int]]:
        """rank -> node ranks, for each rank whose images are in the memory of more than one."""
        memory = self._in_memory
        return {
            rank: {*memory.find_overlapping_keys(1 << rank)} for rank in each_rank(memory.twice)
        }


# --- coverage --------------------------------------------------------------------------------
#
# Boxes are counted by rank, never one by one. Twins are ranks whose images have the very same boxes
# (`image.Layout.twins`), so an image of any of them stands for all.


@dataclass(frozen=True, kw_only=True)
class BoxSources:
    """Where the ranks of a step find their boxes.

    `found`: for each tier, nearest first, the bitmap of the ranks that find their boxes there. Each
    rank is named once. `twins`: the ranks among them for which only a twin's image was found.
    `world`: how many ranks saved the step.
    """

    found: tuple[tuple[Tier, int], ...]
    twins: int
    world: int

    @property
    def nearest_tier_by_rank(self) -> Mapping[int, Tier]:
        """By rank, the nearest tier that holds its image; for ranks in `ranks_covered_by_twins`, a
        twin's."""
        each = {rank: tier for tier, ranks in self.found for rank in each_rank(ranks)}
        return {rank: each[rank] for rank in sorted(each)}

    @property
    def ranks_covered_by_twins(self) -> list[int]:
        """Ranks whose own image is gone and for which a twin's stands in."""
        return list(each_rank(self.twins))

    @property
    def lost_ranks(self) -> list[int]:
        """Ranks whose boxes nobody holds. Computed only when asked for: the world size is what a
        report said, and may be far larger than the number of images."""
        return list(each_rank(~self._all & ((1 << self.world) - 1)))

    @property
    def covers_all_boxes(self) -> bool:
        """Whether every box can be reached."""
        return is_full(self._all, self.world)

    @property
    def _all(self) -> int:
        return self.find_ranks_on_tiers(NEAREST_FIRST)

    def find_ranks_on_tiers(self, tiers: Collection[Tier]) -> int:
        """Bitmap of the ranks that find their boxes on one of these tiers."""
        found = 0
        for tier, ranks in self.found:
            found |= ranks if tier in tiers else 0
        return found


def _spread(tally: StepCopies, *, world: int) -> BoxSources:
    """Where each rank of the world finds its boxes."""
    everybody = (1 << world) - 1
    own = {tier: tally.ranks((tier,)) & everybody for tier in NEAREST_FIRST}
    taken, twins, found = 0, 0, {}
    for tier in NEAREST_FIRST:
        found[tier] = own[tier] & ~taken
        taken |= own[tier]
    lenders = [held for held in tally.copies.values() if held.has_twins]
    for tier in NEAREST_FIRST if taken != everybody else ():
        for held in lenders:
            if held.place[1] is tier:
                news = held.ranks_with_twins() & everybody & ~(taken | twins)
                twins |= news
                found[tier] |= news
    by_tier = tuple((tier, ranks) for tier, ranks in found.items() if ranks)
    return BoxSources(found=by_tier, twins=twins, world=world)
