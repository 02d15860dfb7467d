"""Reports that tell changes leave the operator where whole ones would."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

import msgspec
import pytest

from keepstep.core.shard import Shard
from keepstep.steps import NEAREST_FIRST, Epoch, EpochId, StepId, Tier
from keepstep.wire.reports import Report, ReportedRank, ReportReply
from keepstep_operator.api.run import as_json
from keepstep_operator.reconcile.state.registry import Registry
from keepstep_operator.reconcile.writers.status_writer import status_of
from keepstep_sidecar.report.report import changes
from tests.operator.reconcile.samples import FIRST, KEY, T0, elsewhere, listed, pod, policy, step

PODS, EACH = 3, 2
WORLD = PODS * EACH
_decode = msgspec.json.Decoder(Report).decode


def shard(id: StepId, rank: int, *, rooted: bool = True) -> Shard:
    root = f"{id}/{rank}" if rooted else None
    return Shard(step_id=id, rank=rank, world=WORLD, root=root, written_at=T0, size_bytes=10)


@dataclass
class Ranked:
    """What one sidecar has of one of its ranks."""

    memory: list[StepId] = field(default_factory=list)
    local: list[StepId] = field(default_factory=list)
    alive: bool = True
    skipped: int = 0


@dataclass
class Told:
    """One sidecar, and what it knows of the operator, as the reporter does."""

    number: int
    life: int = 1
    started_at: float = T0
    sequence: int = 0
    ready: bool = True
    epochs: list[Epoch] = field(default_factory=lambda: [FIRST])
    ranks: dict[int, Ranked] = field(default_factory=dict)
    copies: dict[int, list[StepId]] = field(default_factory=dict)
    archive: list[StepId] = field(default_factory=list)
    known: Report | None = None

    def __post_init__(self) -> None:
        first = self.number * EACH
        self.ranks = self.ranks or {rank: Ranked() for rank in range(first, first + EACH)}

    def report(self) -> Report:
        self.sequence += 1
        own = tuple(self._own(rank, one) for rank, one in self.ranks.items())
        return Report(
            sidecar="0.1.0",
            started_at=self.started_at,
            sequence=self.sequence,
            ready=self.ready,
            epochs=tuple(self.epochs),
            ranks=(*own, *self._others()),
        )

    def _own(self, rank: int, one: Ranked) -> ReportedRank:
        return ReportedRank(
            rank=rank,
            world=WORLD,
            alive=one.alive,
            staged=max(one.memory, default=None),
            skipped=one.skipped,
            tiers={
                Tier.MEMORY: listed(shard(id, rank, rooted=False) for id in one.memory),
                Tier.LOCAL: listed(shard(id, rank) for id in one.local),
                Tier.ARCHIVE: listed(shard(id, rank) for id in self.archive),
            },
        )

    def _others(self) -> list[ReportedRank]:
        """Copies, and of the first and the last pod all that is archived."""
        tells = self.number in (0, PODS - 1)
        found = []
        for rank in range(WORLD):
            copies = self.copies.get(rank, []) if rank not in self.ranks else []
            archived = self.archive if tells and rank not in self.ranks else []
            if copies or archived:
                found.append(
                    ReportedRank(
                        rank=rank,
                        world=WORLD,
                        alive=False,
                        tiers=elsewhere(
                            peer=(shard(id, rank) for id in copies),
                            archive=(shard(id, rank) for id in archived),
                        ),
                    )
                )
        return found


class Twice:
    """Two operators: one hears changes, the other whole reports, at the same moments."""

    def __init__(self, chance: Random) -> None:
        self.chance = chance
        self.sidecars = [Told(number) for number in range(PODS)]
        self.archive: list[StepId] = []
        self.told_changes = 0
        self.begin()

    def begin(self) -> None:
        """Both operators begin anew."""
        self.operators = Registry(), Registry()
        for operator in self.operators:
            operator.policy_seen(policy())
            for one in self.sidecars:
                operator.pod_seen(self.pod(one), at=T0)

    def pod(self, one: Told):
        return replace(
            pod(one.number, life=one.life), created_at=f"2026-11-21T07:{one.life:02d}:00Z"
        )

    def exchange(self, one: Told, outcome: str = "answered") -> None:
        whole = one.report()
        told, one.known = changes(one.known, whole), None
        self.told_changes += bool(told.since)
        uid = self.pod(one).uid
        if outcome == "lost":
            return
        reply = ReportReply()
        for _ in range(2 if outcome == "twice" else 1):
            for operator, said in zip(self.operators, (told, whole), strict=True):
                operator.reported(uid, _decode(msgspec.json.encode(said)), at=T0)
                if self._place(one) != whole.sequence:
                    break  # changes that it cannot follow: it asks for all of it
            reply = self.operators[0].reply(uid, at=T0)
        if outcome != "unanswered" and reply.changes_since == whole.sequence:
            one.known = whole

    def _place(self, one: Told) -> int:
        """The last report of this sidecar that the first operator took in."""
        place = self.operators[0].runs[KEY].ledger.places.get(one.number)
        known = place is not None and place.sidecar.started_at == one.started_at
        return place.sidecar.sequence if place is not None and known else 0

    def happen(self) -> None:
        one = self.chance.choice(self.sidecars)
        rank = self.chance.choice(list(one.ranks))
        number = step(self.chance.randint(1, 6), self.chance.choice(one.epochs))
        self.chance.choice(self._happenings)(one, one.ranks[rank], rank, number)

    @property
    def _happenings(self) -> list[Callable[[Told, Ranked, int, StepId], None]]:
        often = [self._stage, self._durable, self._see]
        rare = [self._retire, self._archive, self._copy, self._uncopy, self._skip, self._leave]
        rarer = [self._come, self._epoch, self._restart, self._replace, self._operator]
        return [*often, *often, *rare, *rarer]

    def _stage(self, one: Told, state: Ranked, rank: int, id: StepId) -> None:
        state.memory = sorted({*state.memory, id})[-4:]

    def _durable(self, one: Told, state: Ranked, rank: int, id: StepId) -> None:
        for each in one.ranks.values():
            each.local = sorted({*each.local, id})

    def _retire(self, one: Told, state: Ranked, rank: int, id: StepId) -> None:
        state.local = state.local[1:]

    def _archive(self, one: Told, state: Ranked, rank: int, id: StepId) -> None:
        self.archive = sorted({*self.archive, id})

    def _see(self, one: Told, state: Ranked, rank: int, id: StepId) -> None:
        one.archive = self.archive

    def _copy(self, one: Told, state: Ranked, rank: int, id: StepId) -> None:
        other = self.chance.randrange(WORLD)
        one.copies[other] = sorted({*one.copies.get(other, []), id})

    def _uncopy(self, one: Told, state: Ranked, rank: int, id: StepId) -> None:
        one.copies.pop(self.chance.randrange(WORLD), None)

    def _skip(self, one: Told, state: Ranked, rank: int, id: StepId) -> None:
        state.skipped += 1

    def _leave(self, one: Told, state: Ranked, rank: int, id: StepId) -> None:
        state.alive = False

    def _come(self, one: Told, state: Ranked, rank: int, id: StepId) -> None:
        state.alive = True

    def _epoch(self, one: Told, state: Ranked, rank: int, id: StepId) -> None:
        later = Epoch(EpochId(2, "bbbbbbbb"), step(2))
        for each in self.sidecars:
            each.epochs += [] if later in each.epochs else [later]

    def _restart(self, one: Told, state: Ranked, rank: int, id: StepId) -> None:
        one.started_at, one.sequence, one.known = one.started_at + 1, 0, None
        for each in one.ranks.values():
            each.memory = []

    def _replace(self, one: Told, state: Ranked, rank: int, id: StepId) -> None:
        for operator in self.operators:
            operator.pod_gone(self.pod(one).uid, at=T0)
        one.life += 1
        self._restart(one, state, rank, id)
        for each in one.ranks.values():
            each.local = []
        one.copies, one.archive = {}, []
        for operator in self.operators:
            operator.pod_seen(self.pod(one), at=T0)

    def _operator(self, one: Told, state: Ranked, rank: int, id: StepId) -> None:
        self.begin()

    def known(self, operator: Registry) -> object:
        """All that it says to anybody."""
        run = operator.runs[KEY]
        status = status_of(operator, KEY, at=T0)
        assert status is not None
        told = as_json(status)
        replies = [operator.reply(self.pod(one).uid, at=T0) for one in self.sidecars]
        ledger = run.ledger
        return (
            {name: told.get(name) for name in told if name not in ("recent", "restarts")},
            [replace(reply, changes_since=0) for reply in replies],
            [ledger.core.committed(tier) for tier in NEAREST_FIRST],
            ledger.core.whole(),
            [[ledger.core.holders(id, tier) for tier in Tier] for id in ledger.core.steps],
            [ledger.core.size_bytes(id) for id in ledger.core.steps],
            ledger.doubt(),
            ledger.safety(),
            ledger.settled,
        )


OUTCOMES = ("answered",) * 6 + ("lost", "unanswered", "twice")


@pytest.mark.parametrize("seed", range(8))
def test_any_changes_losses_repetitions_and_restarts_end_where_whole_reports_would(
    seed: int,
) -> None:
    for number in range(25):
        chance = Random(f"{seed} {number}")
        _play(chance)


def _play(chance: Random) -> None:
    twice = Twice(chance)
    for _ in range(chance.randint(1, 60)):
        twice.happen()
        if chance.random() < 0.6:
            twice.exchange(chance.choice(twice.sidecars), chance.choice(OUTCOMES))
    for _ in range(3):  # what could not be followed is told whole, and then nothing has changed
        for one in twice.sidecars:
            one.archive = twice.archive
            twice.exchange(one)
    by_changes, by_whole = map(twice.known, twice.operators)
    assert by_changes == by_whole
    assert all(one.known is not None for one in twice.sidecars), "from now on changes are told"
