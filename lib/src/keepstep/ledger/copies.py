"""Who holds what: the merged reports, and which steps are complete.

A step is complete on a tier when the images of one world size, on that tier or a stronger one,
cover all its ranks. That is the commit rule, and all of it: nothing else makes a commit, and it
can be recomputed from what lies on storage at any time.

A step that is not complete may still be covered: each rank whose image is gone has a twin, whose
image holds the very same boxes. Nothing is committed by that, but it can be restored.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from keepstep.ledger.coverage import Copy, Coverage, spread
from keepstep.ledger.events import NEAREST_FIRST, Held, RankReport, at_least
from keepstep.ledger.tally import Place, Tally
from keepstep.steps import Answer, EpochId, StepId, Tier

_NO_NODE = -1


class Copies:
    """Every copy that was reported. Node ranks are kept apart, since a moved rank's old node may
    still hold some of its shards; questions are answered over all of them."""

    def __init__(self) -> None:
        self._held: dict[Place, frozenset[Held]] = {}
        self._answers: dict[tuple[int, Tier], dict[int, Answer]] = {}
        self._gone: dict[tuple[int, Tier], set[int]] = {}
        self._archive_answer: Answer | None = None
        self._of_step: dict[StepId, Tally] = {}
        self._in_memory: dict[int, set[int]] = {}
        self._twice_in_memory: set[int] = set()
        self._complete: dict[tuple[StepId, Tier], bool] = {}
        self._coverage: dict[StepId, Coverage | None] = {}

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

    def _put(self, place: Place, held: frozenset[Held]) -> None:
        before = self._held.get(place, frozenset())
        self._held[place] = held
        for one in before - held:
            self._of_step[one.id].remove(place, one)
        for one in held - before:
            if one.id not in self._of_step:
                self._of_step[one.id] = Tally()
            self._of_step[one.id].add(place, one)
        for id in {one.id for one in before ^ held}:
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

    # --- asking --------------------------------------------------------------------------

    @property
    def steps(self) -> list[StepId]:
        """Every step that anybody holds anywhere, oldest first."""
        return sorted(self._of_step)

    @property
    def epochs(self) -> set[EpochId]:
        """The epochs of all these steps."""
        return {id.epoch for id in self._of_step}

    def of(self, id: StepId) -> Iterator[tuple[int, Tier, Held]]:
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


def _answer(held: frozenset[Held], said: Answer | None) -> Answer:
    """A report that lists steps cannot mean NONE; one that lists none must say so itself."""
    if said is Answer.UNKNOWN or (said is None and not held):
        return Answer.UNKNOWN
    return Answer.STEPS if held else said or Answer.UNKNOWN
