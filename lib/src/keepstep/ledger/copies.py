"""Who holds what: the merged reports, and which steps are complete.

A step is complete on a tier when the images of one world size, on that tier or a stronger one,
cover all its ranks. That is the commit rule, and all of it: nothing else makes a commit, and it
can be recomputed from what lies on storage at any time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from keepstep.ledger.events import NEAREST_FIRST, Held, RankReport, at_least
from keepstep.steps import Answer, EpochId, StepId, Tier

_Place = tuple[int, int, Tier]
"""(node rank, rank, tier): what one report replaces."""


class Copies:
    """Every copy that was reported. Node ranks are kept apart, since a moved rank's old node may
    still hold some of its shards; questions are answered over all of them."""

    def __init__(self) -> None:
        self._held: dict[_Place, frozenset[Held]] = {}
        self._answers: dict[tuple[int, Tier], dict[int, Answer]] = {}
        self._of_step: dict[StepId, set[tuple[_Place, Held]]] = {}
        self._complete: dict[tuple[StepId, Tier], bool] = {}
        self._contested: dict[StepId, frozenset[int]] = {}

    # --- changing ------------------------------------------------------------------------

    def replace(self, node_rank: int, rank: int, report: RankReport) -> None:
        """What this node says of this rank, for each tier that the report names."""
        for tier in NEAREST_FIRST:
            if tier in report.sealed or tier in report.answers:
                held = frozenset(report.sealed.get(tier, ()))
                self._put((node_rank, rank, tier), held)
                said = _answer(held, report.answers.get(tier))
                self._answers.setdefault((rank, tier), {})[node_rank] = said

    def drop(self, *, node_rank: int, rank: int | None = None) -> None:
        """Forget what this node said (of this rank)."""
        for place in list(self._held):
            if place[0] == node_rank and rank in (None, place[1]):
                self._put(place, frozenset())
                del self._held[place]
                self._answers[place[1:]].pop(node_rank, None)

    def _put(self, place: _Place, held: frozenset[Held]) -> None:
        before = self._held.get(place, frozenset())
        self._held[place] = held
        for one in before - held:
            self._of_step[one.id].discard((place, one))
        for one in held - before:
            self._of_step.setdefault(one.id, set()).add((place, one))
        for id in {one.id for one in before ^ held}:
            self._forget_answers(id)

    def _forget_answers(self, id: StepId) -> None:
        self._contested.pop(id, None)
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
        """The epochs of all these steps."""
        return {id.epoch for id in self._of_step}

    def of(self, id: StepId) -> Iterator[tuple[int, Tier, Held]]:
        """(rank, tier, image) of every copy of this step."""
        for (_, rank, tier), held in self._of_step.get(id, ()):
            yield rank, tier, held

    def ranks(self, id: StepId, tiers: Iterable[Tier]) -> set[int]:
        """The ranks of which a copy of this step lies on one of these tiers."""
        wanted = set(tiers)
        return {rank for rank, tier, _ in self.of(id) if tier in wanted}

    def worlds(self, id: StepId) -> set[int]:
        """The world sizes that copies of this step name: one, unless something is very wrong."""
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
        return len(worlds) == 1 and self.ranks(id, at_least(tier)).issuperset(range(*worlds))

    def contested(self, id: StepId) -> frozenset[int]:
        """Ranks of which two different images of this step exist."""
        if id not in self._contested:
            roots: dict[int, set[str]] = {}
            for rank, _, held in self.of(id):
                if held.root is not None:
                    roots.setdefault(rank, set()).add(held.root)
            self._contested[id] = frozenset(rank for rank, each in roots.items() if len(each) > 1)
        return self._contested[id]

    def nearest(self, id: StepId) -> dict[int, Tier]:
        """Per rank, the first tier that holds its image of the step."""
        nearest_last = sorted(self.of(id), key=lambda one: -NEAREST_FIRST.index(one[1]))
        return {rank: tier for rank, tier, _ in nearest_last}

    def answer(self, rank: int, tier: Tier) -> Answer:
        """What is there of this rank, over all nodes. Silence is UNKNOWN."""
        said = set(self._answers.get((rank, tier), {}).values())
        if Answer.UNKNOWN in said or not said:
            return Answer.UNKNOWN
        return Answer.STEPS if Answer.STEPS in said else Answer.NONE

    def memory_holders(self) -> dict[int, set[int]]:
        """rank -> node ranks that hold images of it in memory."""
        holders: dict[int, set[int]] = {}
        for (node_rank, rank, tier), held in self._held.items():
            if tier is Tier.MEMORY and held:
                holders.setdefault(rank, set()).add(node_rank)
        return holders


def _answer(held: frozenset[Held], said: Answer | None) -> Answer:
    """A report that lists steps cannot mean NONE; one that lists none must say so itself."""
    if said is Answer.UNKNOWN or (said is None and not held):
        return Answer.UNKNOWN
    return Answer.STEPS if held else said or Answer.UNKNOWN
