"""What a person should look at: functions from the ledger's state to the alarms that stand now."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence

from keepstep.core.ledger.commit_rule import Completeness
from keepstep.core.ledger.events import Alarm, AlarmKind
from keepstep.core.lineage import Lineage
from keepstep.steps import EpochId, StepId

_NAMED = 8


def few(numbers: Collection[int]) -> str:
    """These numbers as text, at most the lowest `_NAMED` of them."""
    named = [str(number) for number in sorted(numbers)[:_NAMED]]
    return ", ".join(named) + (", ..." if len(numbers) > _NAMED else "")


def epoch_conflicts(
    parents: Mapping[EpochId, Collection[StepId | None]], epochs: Collection[EpochId]
) -> Iterator[Alarm]:
    """Two lives of the run at once: an epoch with two parents, or two epochs with one number."""
    for id, named in parents.items():
        if len(named) > 1:
            names = " and ".join(sorted(str(parent) for parent in named))
            yield Alarm(AlarmKind.EPOCH_CONFLICT, f"epoch {id} has two parents: {names}")
    by_number: dict[int, list[EpochId]] = {}
    for id in epochs:
        by_number.setdefault(id.number, []).append(id)
    for ids in by_number.values():
        if len(ids) > 1:
            text = f"epochs {' and '.join(map(str, sorted(ids)))} began side by side"
            yield Alarm(AlarmKind.EPOCH_CONFLICT, text)


def two_writers(copies: Completeness) -> Iterator[Alarm]:
    """One rank was written twice: different images of one step, or memory on two nodes."""
    for id in copies.contested_steps:
        text = f"two different images of step {id}, rank {few(copies.contested(id))}"
        yield Alarm(AlarmKind.TWO_WRITERS, text)
    for rank, nodes in sorted(copies.twice_in_memory().items()):
        text = f"rank {rank} is in the memory of node ranks {few(nodes)}"
        yield Alarm(AlarmKind.TWO_WRITERS, text)


def world_changed(
    copies: Completeness, newest: StepId | None, *, world: int | None
) -> Iterator[Alarm]:
    """`newest`, a complete step, was saved by another number of ranks than run now (`world`)."""
    if newest is not None and world is not None:
        for saved in copies.worlds(newest) - {world}:
            text = f"step {newest} was saved by {saved} ranks, but {world} are running"
            yield Alarm(AlarmKind.WORLD_CHANGED, text)


def fresh_start(lineage: Lineage) -> Iterator[Alarm]:
    """A run began at step 0 beside older steps."""
    if lineage.fresh is not None:
        yield Alarm(
            AlarmKind.FRESH_START,
            f"epoch {lineage.fresh} began at step 0 although older steps exist; they are kept "
            "until somebody acknowledges the fresh start",
        )


class Signatures:
    """The digests of the parameters in the newest `kept` commits. They are remembered here because
    shards are retired."""

    def __init__(self, *, kept: int) -> None:
        self._kept = kept
        self._of_step: dict[StepId, array[int]] = {}

    def add(self, ids: Sequence[StepId], copies: Completeness) -> None:
        """Take in steps that were committed on a durable tier, oldest first."""
        for id in ids[-self._kept :]:
            (world,) = copies.worlds(id)
            digests = array("i", [0]) * world
            for held in copies.copies(id):
                for rank, digest in held.params():
                    if digest and rank < world:
                        digests[rank] = digest
            self._of_step[id] = digests
        for old in sorted(self._of_step)[: -self._kept]:
            del self._of_step[old]

    def stale(self) -> Iterator[Alarm]:
        """The steps advance within one epoch, but no rank's parameters change."""
        ids = sorted(self._of_step)
        if len(ids) < self._kept or ids[0].epoch != ids[-1].epoch:
            return
        first, *others = (self._of_step[id] for id in ids)
        if 0 not in first and all(other == first for other in others):
            # The text names no step, so that a standing alarm is said once, not with each commit.
            yield Alarm(
                AlarmKind.STALE_SNAPSHOT,
                f"the parameters of all ranks were the same in the last {len(ids)} commits of "
                f"epoch {ids[0].epoch}: is the model that is trained the one that is saved?",
            )
