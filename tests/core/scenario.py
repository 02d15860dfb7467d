"""Plays scenario files: a command, `----`, what it prints; the format follows etcd raft's testdata.

A step is written 2-17: epoch 2, step 17. 2b-17 is a step of another epoch with the number 2.
An image may have its digests: 2-17:root@params. Comments begin with #.
"""

from __future__ import annotations

import copy
import functools
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from keepstep.core.commit_rule import (
    ReportedTier,
    combine_rank_reports,
    each_rank,
    is_full,
    tiers_at_least,
)
from keepstep.core.ledger import (
    Action,
    Alarm,
    EpochStarted,
    Event,
    FreshStartAcknowledged,
    Ledger,
    LedgerConfig,
    NothingToRestore,
    Reported,
    ReportedHoldingsLost,
    RestorePlan,
    StepCommittedOnTier,
    UndecidedRestore,
)
from keepstep.core.restore_vote import Candidate, Candidates, Offer, choose_step
from keepstep.core.retention import Retention
from keepstep.core.schedule import PersistPlanner, StepGrid, Write
from keepstep.core.shard import NO_RANKS, Ranks, Shard
from keepstep.core.slot_table import SlotTable
from keepstep.errors import KeepstepError
from keepstep.steps import NEAREST_FIRST, Epoch, EpochId, StepId, Tier, TierAnswer

_EPOCH = re.compile(r"(\d+)([a-f]?)")


def epoch_id(text: str) -> EpochId:
    match = _EPOCH.fullmatch(text)
    assert match, f"not an epoch: {text!r}"
    return EpochId(int(match[1]), (match[2] or "0") * 8)


def step_id(text: str) -> StepId:
    epoch, step = text.split("-")
    return StepId(epoch_id(epoch), int(step))


def short(step: StepId | None) -> str:
    return "none" if step is None else f"{short_epoch(step.epoch)}-{step.step}"


def short_epoch(epoch: EpochId) -> str:
    return f"{epoch.number}{epoch.nonce[0].strip('0')}"


_LONG = re.compile(r"(\d{4})\.(\w)\w{7}(?:-(\d{9}))?")


def shorten(text: str) -> str:
    """`text` with long names in the form that scenarios use."""

    def shortened(match: re.Match[str]) -> str:
        epoch = f"{int(match[1])}{match[2].strip('0')}"
        return f"{epoch}-{int(match[3])}" if match[3] else epoch

    return _LONG.sub(shortened, text)


def listed(ids: Iterable[StepId]) -> str:
    return " ".join(short(step) for step in ids) or "none"


def newest_on(ledger: Ledger, tiers: Collection[Tier]) -> StepId | None:
    """The newest restorable step of which these tiers have every box."""
    for step in reversed(ledger.held_steps):
        worlds = ledger.worlds(step)
        there = [held.ranks_with_twins() for held in ledger.copies(step) if held.place[1] in tiers]
        certain = (
            len(worlds) == 1
            and not ledger.find_conflicting_ranks(step)
            and ledger.lineage.is_restorable(step)
        )
        if certain and is_full(functools.reduce(operator.or_, there, 0), *worlds):
            return step
    return None


class Scenario:
    """The state of one scenario: a ledger, a planner, a slot table and votes."""

    def __init__(self) -> None:
        self.ledger, self.keep = Ledger(), {Tier.LOCAL: Retention(last=2)}
        self.planner = PersistPlanner((0, 1), StepGrid())
        self.table = SlotTable(4)
        self.votes: dict[int, Candidates] = {}

    def run(self, command: str) -> str:
        name, *words = command.split()
        arguments = dict(word.split("=", 1) for word in words if "=" in word)
        plain = [word for word in words if "=" not in word]
        function: Callable[..., Iterable[str]] = getattr(self, f"_do_{name}")
        return "".join(f"{shorten(line)}\n" for line in function(*plain, **arguments)) or "ok\n"

    # --- ledger --------------------------------------------------------------------------

    def _do_ledger(
        self, tiers: str = "memory,local", keep: str = "2", world: str = "", stale_after: str = "6"
    ) -> Iterable[str]:
        named = tuple(Tier(tier) for tier in tiers.split(","))
        self.ledger = Ledger(
            LedgerConfig(
                tiers=named,
                world=int(world) if world else None,
                stale_after=int(stale_after),
            )
        )
        self.keep = {tier: Retention(last=int(keep)) for tier in NEAREST_FIRST[1:] if tier in named}
        return []

    def _apply(self, event: Event) -> list[str]:
        """The ledger's actions, and what may be retired then."""
        actions = self.ledger.apply(event)
        alarms = [_action(action) for action in actions if isinstance(action, Alarm)]
        return [
            *(_action(action) for action in actions if not isinstance(action, Alarm)),
            *self._retirements(),
            *alarms,
        ]

    def _retirements(self) -> Iterator[str]:
        for tier, policy in self.keep.items():
            for step in self.ledger.expendable(tier, policy):
                if ranks := self.ledger.compute_rank_mask_on_tier(step, tier):
                    named = ",".join(map(str, each_rank(ranks)))
                    yield f"retire {short(step)} on {tier}, ranks {named}"

    def _do_report(
        self,
        node: str = "0",
        ranks: str = "0",
        world: str = "2",
        epochs: str = "",
        sequence: str = "0",
        twins: str = "",
        **tiers: str,
    ) -> Iterable[str]:
        alike = tuple(int(word) for word in twins.split(",") if word)
        reports = {
            int(rank): {
                Tier(t): replace(
                    ReportedTier.from_shards(_held(text, int(rank), int(world), alike)),
                    answer=_answer(text),
                )
                for t, text in tiers.items()
            }
            for rank in ranks.split(",")
        }
        return self._apply(
            Reported(
                node_rank=int(node),
                ranks=combine_rank_reports(reports),
                epochs=tuple(Epoch(epoch_id(word)) for word in epochs.split(",") if word),
                sequence=int(sequence),
            )
        )

    def _do_epoch(self, epoch: str, parent: str = "") -> Iterable[str]:
        started = Epoch(epoch_id(epoch), step_id(parent) if parent else None)
        return self._apply(EpochStarted(started))

    def _do_acknowledge(self, epoch: str = "") -> Iterable[str]:
        return self._apply(FreshStartAcknowledged(epoch_id(epoch) if epoch else None))

    def _do_lost(self, node: str = "0", rank: str = "") -> Iterable[str]:
        return self._apply(ReportedHoldingsLost(int(node), int(rank) if rank else None))

    def _do_plan(self, world: str = "2") -> Iterable[str]:
        plan = self.ledger.plan(range(int(world)))
        if isinstance(plan, RestorePlan):
            places = " ".join(
                f"{rank}:{tier}{'(twin)' if rank in plan.by_twins else ''}"
                for rank, tier in sorted(plan.tiers.items())
            )
            return [f"restore {short(plan.id)} from {places}"]
        if isinstance(plan, NothingToRestore):
            return ["nothing: begin at step 0"]
        assert isinstance(plan, UndecidedRestore)
        return [f"{'wait' if plan.waits_for else 'refuse'}: {plan.reason}"]

    def _do_whole(self) -> Iterable[str]:
        return [listed(self.ledger.list_reachable_steps())]

    def _do_without(self, *nodes: str, tier: str = "local") -> Iterable[str]:
        """Print what could be restored if each of these nodes were gone."""
        for node in nodes:
            left = copy.deepcopy(self.ledger)
            left.apply(ReportedHoldingsLost(int(node)))
            yield f"node {node}: {short(newest_on(left, tiers_at_least(Tier(tier))))}"

    def _do_watermarks(self) -> Iterable[str]:
        for tier in self.ledger.config.tiers:
            yield f"{tier}: {listed(self.ledger.committed(tier))}"

    def _do_standing(self, *ids: str) -> Iterable[str]:
        for step in ids:
            yield f"{step} {self.ledger.lineage.step_liveness(step_id(step))}"

    # --- planner -------------------------------------------------------------------------

    def _do_planner(self, ranks: str = "0,1", every: str = "1", slots: str = "4") -> Iterable[str]:
        self.planner = PersistPlanner(
            [int(rank) for rank in ranks.split(",")],
            StepGrid(int(every)),
            slots=int(slots),
        )
        return []

    def _do_sealed(self, step: str, ranks: str = "0,1") -> Iterable[str]:
        for rank in ranks.split(","):
            yield from _writes(self.planner.sealed(int(rank), step_id(step)))

    def _do_written(self, step: str, ranks: str = "0,1", ok: str = "yes") -> Iterable[str]:
        for rank in ranks.split(","):
            yield from _writes(self.planner.on_write_end(int(rank), step_id(step), ok=ok == "yes"))

    def _do_overwritten(self, step: str, ranks: str = "0,1") -> Iterable[str]:
        for rank in ranks.split(","):
            yield from _writes(self.planner.on_overwritten(int(rank), step_id(step)))

    def _do_gone(self, ranks: str = "0,1") -> Iterable[str]:
        for rank in ranks.split(","):
            yield from _writes(self.planner.record_trainer_death(int(rank)))

    def _do_forget(self, epoch: str) -> Iterable[str]:
        return _writes(self.planner.forget_dead_steps(lambda step: step.epoch == epoch_id(epoch)))

    def _do_flush(self, *ids: str, newest: str = "2") -> Iterable[str]:
        steps = [step_id(step) for step in ids] or None
        return _writes(self.planner.flush(steps, newest=int(newest)))

    def _do_counts(self) -> Iterable[str]:
        counts, planner = self.planner.counts, self.planner
        yield f"durable {short(planner.durable)}, in flight {short(planner.step_in_flight)}"
        yield (
            f"persisted {counts.persisted}, skipped {counts.skipped}, "
            f"abandoned {counts.abandoned}, failed {counts.failed}"
        )
        yield f"every {planner.grid.interval(10**9)} steps"

    # --- slots ---------------------------------------------------------------------------

    def _do_slots(self, count: str) -> Iterable[str]:
        self.table = SlotTable(int(count))
        return []

    def _do_stage(self, *ids: str) -> Iterable[str]:
        """Assign and seal slots, as a trainer does."""
        for step in ids:
            if (index := self.table.assign()) is None:
                yield f"{step} waits"
                return
            was = self.table.slots[index].id
            self.table.seal(index, step_id(step))
            yield f"{step} in slot {index}" + (f", was {short(was)}" if was else "")

    def _do_assign(self) -> Iterable[str]:
        if (index := self.table.assign()) is None:
            return ["none"]
        was = self.table.slots[index].id
        return [f"slot {index}" + (f", was {short(was)}" if was else "")]

    def _do_release(self, index: str, keep: str = "") -> Iterable[str]:
        self.table.release(int(index), step_id(keep) if keep else None)
        return []

    def _do_pin(self, step: str) -> Iterable[str]:
        index = self.table.find_slot(step_id(step))
        assert index is not None
        self.table.pin(index)
        return []

    def _do_unpin(self, index: str) -> Iterable[str]:
        self.table.unpin(int(index))
        return []

    def _do_protect(self, *ids: str) -> Iterable[str]:
        self.table.protect_steps(step_id(step) for step in ids)
        return []

    def _do_reserve(self, *expendable: str) -> Iterable[str]:
        index = self.table.reserve_slot_for_load({step_id(step) for step in expendable})
        return ["none" if index is None else f"slot {index}"]

    def _do_bury(self, epoch: str, after: str) -> Iterable[str]:
        last = int(after)
        dead = self.table.mark_dead_images(
            lambda step: step.epoch == epoch_id(epoch) and step.step > last
        )
        return [f"dead: {listed(dead)}"]

    def _do_memory(self) -> Iterable[str]:
        return [listed(self.table.list_sealed_steps())]

    # --- votes ---------------------------------------------------------------------------

    def _do_votes(self) -> Iterable[str]:
        """Forget all votes."""
        self.votes.clear()
        return []

    def _do_vote(
        self,
        held: str,
        ranks: str = "",
        rank: str = "0",
        world: str = "2",
        tier: str = "memory",
        epoch: str = "1",
        offers: str = "",
        parts: str = "",
        epochs: str = "",
        fleeting: str = "no",
        again: str = "no",
    ) -> Iterable[str]:
        """Add votes. `offers`: 1-8/4 is step 1-8, saved by 4 ranks and offered from `local`.
        `parts`: 1-8:0+2/4 is the same, but of ranks 0 and 2 only. Either may end with the ranks
        whose own images these are: 1-8/4!0+2. `epochs`: 2=1-5 is epoch 2, which
        went on from step 1-5."""
        images = tuple(
            Candidate(id=shard.step_id, tier=Tier(tier), world=shard.world)
            for shard in _held(held, 0, int(world))
        )
        for number in (ranks or rank).split(","):
            self.votes[int(number)] = Candidates(
                answer=_answer(held),
                candidates=images,
                highest_epoch=int(epoch),
                reason="the volume does not answer" if held == "unknown" else "",
                offers=tuple(_offer(word, world) for word in offers.split(",") if word),
                parts=tuple(_part(word, world) for word in parts.split(",") if word),
                epochs=tuple(_epoch(word) for word in epochs.split(",") if word),
                fleeting=fleeting == "yes",
                begin_again=again == "yes",
            )
        return []

    def _do_choose(self, *excluded: str, limit: str = "", exact: str = "no") -> Iterable[str]:
        votes = [self.votes[rank] for rank in sorted(self.votes)]
        try:
            decision = choose_step(
                votes,
                {step_id(step) for step in excluded},
                limit=step_id(limit) if limit else None,
                exact=exact == "yes",
            )
        except KeepstepError as error:
            return [f"{type(error).__name__}: {error}"]
        what = f"restore {short(decision.id)}" if decision.id else "begin at step 0"
        without = f" without {listed(decision.incomplete)}" if decision.incomplete else ""
        lent = decision.lent or (False,) * len(decision.tiers)
        ways = zip(decision.tiers, decision.direct, lent, strict=True)
        tiers = " ".join(_way(*way) for way in ways)
        by = f" by {','.join(map(str, decision.lenders))}" if decision.lenders else ""
        without += f" without {short(decision.lost)}" if decision.lost else ""
        return [f"{what}{without} as epoch {decision.epoch_number} {tiers}{by}".rstrip()]


def _way(tier: Tier, direct: bool, lent: bool) -> str:
    if direct:
        return str(tier)
    return f"lent:{tier}" if lent else f"resharded:{tier}"


def _held(text: str, rank: int, world: int, twins: tuple[int, ...] = ()) -> tuple[Shard, ...]:
    if text in ("none", "unknown", "steps"):
        return ()
    return tuple(_image(word, rank, world, twins) for word in text.split(","))


def _image(text: str, rank: int, world: int, twins: tuple[int, ...]) -> Shard:
    rest, _, params = text.partition("@")
    name, _, root = rest.partition(":")
    return Shard(
        step_id=step_id(name),
        rank=rank,
        world=world,
        root=root or None,
        params_digest=params or None,
        alike=Ranks.of((rank, *twins)) if twins else NO_RANKS,
    )


def _offer(text: str, world: str) -> Offer:
    rest, _, images = text.partition("!")
    name, _, saved = rest.partition("/")
    return Offer(
        id=step_id(name), tier=Tier.LOCAL, world=int(saved or world), images=_ranks(images)
    )


def _part(text: str, world: str) -> Offer:
    text, _, images = text.partition("!")
    rest, _, saved = text.partition("/")
    name, _, ranks = rest.partition(":")
    return Offer(
        id=step_id(name),
        tier=Tier.LOCAL,
        world=int(saved or world),
        ranks=_ranks(ranks),
        images=_ranks(images),
    )


def _ranks(text: str) -> Ranks:
    return Ranks.of(map(int, text.split("+"))) if text else NO_RANKS


def _epoch(text: str) -> Epoch:
    number, _, parent = text.partition("=")
    return Epoch(step_id(f"{number}-0").epoch, step_id(parent) if parent else None)


def _answer(text: str) -> TierAnswer:
    return TierAnswer(text) if text in ("none", "unknown", "steps") else TierAnswer.STEPS


def _action(action: Action) -> str:
    if isinstance(action, StepCommittedOnTier):
        return f"committed {short(action.id)} on {action.tier}"
    assert isinstance(action, Alarm)
    return f"alarm {action.kind}: {action.text}"


def _writes(writes: Sequence[Write]) -> list[str]:
    return [f"write {short(write.id)}, rank {write.rank}" for write in writes]


def play(text: str) -> str:
    """The scenario with the output that its commands print now, in place of the old output."""
    scenario, output, lines = Scenario(), [], iter(text.splitlines())
    for line in lines:
        if not line or line.startswith("#"):
            output.append(f"{line}\n")
            continue
        output.append(f"{line}\n----\n{scenario.run(line)}\n")
        for _ in iter(lambda: next(lines, ""), ""):
            pass  # the expected output ends at an empty line
    return "".join(output).rstrip("\n") + "\n"
