"""Who holds what: the merged reports, and which steps are complete.

A step is complete on a tier when the images of one world size, on that tier or a stronger one,
cover all its ranks. That is the commit rule, and all of it: nothing else makes a commit, and it
can be recomputed from what lies on storage at any time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from keepstep.ledger.events import NEAREST_FIRST, Held, RankReport, at_least
from keepstep.steps import Answer, EpochId, StepId, Tier

_Place = tuple[int, int, Tier]
"""(node rank, rank, tier): what one report replaces."""


class Copies:
    """Every copy that was reported. Node ranks are kept apart, since a moved rank's old node may
    still hold some of its shards; questions are answered over all of them."""

    def __init__(self) -> None:
        self._held: dict[_Place, tuple[Held, ...]] = {}
        self._answers: dict[_Place, Answer] = {}
        self._of_step: dict[StepId, dict[_Place, Held]] = {}
        self._complete: dict[tuple[StepId, Tier], bool] = {}

    # --- changing ------------------------------------------------------------------------

    def replace(self, node_rank: int, rank: int, report: RankReport) -> None:
        """What this node says of this rank, for each tier that the report names."""
        for tier in NEAREST_FIRST:
            if tier in report.sealed or tier in report.answers:
                place = (node_rank, rank, tier)
                held = tuple(report.sealed.get(tier, ()))
                self._put(place, held)
                self._answers[place] = _answer(held, report.answers.get(tier))

    def drop(self, *, node_rank: int, rank: int | None = None) -> None:
        """Forget what this node said (of this rank)."""
        for place in list(self._held):
            if place[0] == node_rank and rank in (None, place[1]):
                self._put(place, ())
                del self._held[place], self._answers[place]

    def _put(self, place: _Place, held: tuple[Held, ...]) -> None:
        before, after = self._held.get(place, ()), held
        self._held[place] = after
        for one in set(before) - set(after):
            self._of_step[one.id].pop(place, None)
            self._forget_answers(one.id)
        for one in set(after) - set(before):
            self._of_step.setdefault(one.id, {})[place] = one
            self._forget_answers(one.id)

    def _forget_answers(self, id: StepId) -> None:
        for tier in NEAREST_FIRST:
            self._complete.pop((id, tier), None)
        if not self._of_step[id]:
            del self._of_step[id]

    # --- asking --------------------------------------------------------------------------

    @property
    def steps(self) -> list[StepId]:
        """Every step that anybody holds anywhere, oldest first."""
        return sorted(self._of_step)

    @property
    def epochs(self) -> set[EpochId]:
        return {id.epoch for id in self._of_step}

    def of(self, id: StepId) -> Iterator[tuple[int, Tier, Held]]:
        """(rank, tier, image) of every copy of this step."""
        for (_, rank, tier), held in self._of_step.get(id, {}).items():
            yield rank, tier, held

    def ranks(self, id: StepId, tiers: Iterable[Tier]) -> set[int]:
        """The ranks of which a copy of this step lies on one of these tiers."""
        wanted = set(tiers)
        return {rank for rank, tier, _ in self.of(id) if tier in wanted}

    def worlds(self, id: StepId) -> set[int]:
        return {held.world for _, _, held in self.of(id)}

    def complete(self, id: StepId, tier: Tier) -> bool:
        """Every rank of the step's world has a copy on this tier or a stronger one.

        A step of two writers is never complete: nobody can say which of both images is right.
        """
        key = (id, tier)
        if key not in self._complete:
            self._complete[key] = self._covers_world(id, tier) and not self.contested(id)
        return self._complete[key]

    def _covers_world(self, id: StepId, tier: Tier) -> bool:
        # THE COMMIT RULE: the sealed shards of (epoch, step) cover the whole world.
        worlds = self.worlds(id)
        ranks = self.ranks(id, at_least(tier))
        return len(worlds) == 1 and ranks.issuperset(range(*worlds))

    def contested(self, id: StepId) -> set[int]:
        """Ranks of which two different images of this step exist."""
        roots: dict[int, set[str]] = {}
        for rank, _, held in self.of(id):
            if held.root is not None:
                roots.setdefault(rank, set()).add(held.root)
        return {rank for rank, different in roots.items() if len(different) > 1}

    def nearest(self, id: StepId, rank: int) -> Tier | None:
        """The first tier that holds this rank's image of the step."""
        tiers = {tier for other, tier, _ in self.of(id) if other == rank}
        return next((tier for tier in NEAREST_FIRST if tier in tiers), None)

    def answer(self, rank: int, tier: Tier) -> Answer:
        """What is there of this rank, over all nodes. Silence is UNKNOWN."""
        said = {a for (_, r, t), a in self._answers.items() if r == rank and t is tier}
        if Answer.UNKNOWN in said or not said:
            return Answer.UNKNOWN
        return Answer.STEPS if Answer.STEPS in said else Answer.NONE

    def memory_holders(self) -> Mapping[int, set[int]]:
        """rank -> node ranks that hold images of it in memory."""
        holders: dict[int, set[int]] = {}
        for (node_rank, rank, tier), held in self._held.items():
            if tier is Tier.MEMORY and held:
                holders.setdefault(rank, set()).add(node_rank)
        return holders


def _answer(held: tuple[Held, ...], said: Answer | None) -> Answer:
    """A report that lists steps cannot mean NONE; one that lists none and says nothing is silent."""
    if said is Answer.UNKNOWN or (said is None and not held):
        return Answer.UNKNOWN
    return Answer.STEPS if held else said or Answer.UNKNOWN
