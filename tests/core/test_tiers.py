"""A run on several nodes with far tiers, replicas and changing worlds, as a state machine.

Memory, volumes, the copies of buddies and the archive are sets of names. The test works out from
these sets alone which step may be restored. The real code makes every decision: a ledger on each
node (like a sidecar's), a ledger that all nodes report to (like the operator's), and the vote.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from keepstep.core.commit_rule import (
    RankReport,
    ReportedTier,
    combine_rank_reports,
    each_rank,
    tiers_at_least,
)
from keepstep.core.ledger import (
    EpochStarted,
    Ledger,
    LedgerConfig,
    Reported,
    ReportedHoldingsLost,
    RestartAction,
    RestartOutlook,
    RestorePlan,
    restart_outlook,
)
from keepstep.core.restore_vote import Candidate, Candidates, Decision, Offer, choose_step
from keepstep.core.retention import Retention
from keepstep.core.shard import NO_RANKS, Ranks, Shard
from keepstep.errors import RestoreError
from keepstep.steps import Epoch, EpochId, StepId, Tier, TierAnswer
from tests.core.scenario import newest_on

_KEEP = {
    Tier.LOCAL: Retention(last=2),
    Tier.PEER: Retention(last=1),
    Tier.ARCHIVE: Retention(last=3),
}
_SOME = st.sets(st.integers(0, 5), max_size=2)
"""A few ranks or nodes."""

Image = tuple[StepId, int]
"""A step, and the rank whose image it is. `worlds` has the number of ranks that saved a step."""


@dataclass
class Node:
    """One node. `kept`: its copies for other nodes. `up`: its pod exists; without the pod, nothing
    on the node can be reached. `listed`: ranks that it has reported. If such a rank has lost its
    last copy, the node must report it as empty."""

    memory: set[Image] = field(default_factory=set)
    local: set[Image] = field(default_factory=set)
    kept: set[Image] = field(default_factory=set)
    epochs: set[Epoch] = field(default_factory=set)
    listed: set[int] = field(default_factory=set)
    up: bool = True


class Tiers(RuleBasedStateMachine):
    """The run. It is small, so that rare interleavings become likely."""

    @initialize(
        nodes=st.integers(2, 3),
        per_node=st.integers(1, 2),
        replicated=st.booleans(),
        peers=st.booleans(),
        archive=st.booleans(),
        fleeting=st.booleans(),
    )
    def begin(
        self,
        nodes: int,
        per_node: int,
        replicated: bool,
        peers: bool,
        archive: bool,
        fleeting: bool = False,
    ) -> None:
        self.fleeting = fleeting
        self.nodes = [Node() for _ in range(nodes)]
        self.per_node = per_node
        self.replicated, self.peers, self.has_archive = replicated, peers, archive
        self.archive: set[Image] = set()
        self.archive_epochs: set[Epoch] = set()
        self.worlds: dict[StepId, int] = {}
        self.epoch: Epoch | None = None  # of the live trainers
        self.at: dict[int, int] = {}  # rank -> the last step that it staged
        self.lives = 0
        self.config = LedgerConfig(tiers=tuple(self._tiers()))
        self._go_on(choose_step([Candidates(answer=TierAnswer.NONE)] * self.world))

    def _tiers(self) -> Iterator[Tier]:
        yield from (Tier.MEMORY, Tier.LOCAL)
        if self.peers:
            yield Tier.PEER
        if self.has_archive:
            yield Tier.ARCHIVE

    @property
    def world(self) -> int:
        return len(self.nodes) * self.per_node

    def _twins(self, rank: int, world: int) -> tuple[int, ...]:
        """The twins of a rank if the run is replicated: every node has a whole replica, divided in
        the same way."""
        if not self.replicated:
            return ()
        per_node = world // len(self.nodes)
        return tuple(index for index in range(rank % per_node, world, per_node) if index != rank)

    def _alike(self, rank: int, world: int) -> Ranks:
        twins = self._twins(rank, world)
        return Ranks.of((rank, *twins)) if twins else NO_RANKS

    # --- ledgers -------------------------------------------------------------------------

    def _rebuild(self) -> None:
        """Restart the operator: its ledger is built anew from the epochs and reports of the nodes
        that are up."""
        self.ledger = Ledger(self.config)
        for epoch in self._epochs():
            self.ledger.apply(EpochStarted(epoch))
        self._report()
        self.newest_commit = self.ledger.watermark(Tier.LOCAL)

    def _report(self) -> None:
        before = self.ledger.watermark(Tier.LOCAL)
        for number, node in enumerate(self.nodes):
            if node.up:
                self.ledger.apply(self._reported(number, self._archived()))
                doomed = [
                    (
                        tier,
                        step_id,
                        set(each_rank(self.ledger.compute_rank_mask_on_tier(step_id, tier))),
                    )
                    for tier, policy in _KEEP.items()
                    if tier in self.config.tiers
                    for step_id in self.ledger.expendable(tier, policy)
                ]
                for tier, step_id, ranks in doomed:
                    self._retire(tier, step_id, ranks)
        for number, node in enumerate(self.nodes):
            if node.up:
                self.ledger.apply(self._reported(number, self._archived()))
        after = self.ledger.watermark(Tier.LOCAL)
        assert before is None or (after is not None and after >= before), "a commit was retired"

    def _retire(self, tier: Tier, step_id: StepId, ranks: Collection[int]) -> None:
        doomed = {(step_id, rank) for rank in ranks}
        if tier is Tier.ARCHIVE:
            self.archive -= doomed
            return
        for node in self.nodes:
            shelf = node.local if tier is Tier.LOCAL else node.kept
            if node.up:
                shelf -= doomed

    def _archived(self) -> set[Image]:
        return self.archive if self.has_archive else set()

    def _reported(self, number: int, archive: set[Image]) -> Reported:
        """A sidecar's report: its own ranks, the ranks of its copies, and those in the archive."""
        node = self.nodes[number]
        shelves = {Tier.MEMORY: node.memory, Tier.LOCAL: node.local}
        if self.peers:
            shelves[Tier.PEER] = node.kept
        if self.has_archive:
            shelves[Tier.ARCHIVE] = archive
        own = range(number * self.per_node, (number + 1) * self.per_node)
        node.listed |= {*own, *(rank for shelf in shelves.values() for _, rank in shelf)}
        ranks = {rank: self._rank_report(shelves, rank) for rank in node.listed}
        return Reported(node_rank=number, ranks=combine_rank_reports(ranks))

    def _rank_report(self, shelves: dict[Tier, set[Image]], rank: int) -> RankReport:
        sealed = {
            tier: tuple(self._held(step_id, rank) for step_id, of in sorted(shelf) if of == rank)
            for tier, shelf in shelves.items()
        }
        return {tier: ReportedTier.from_shards(held) for tier, held in sealed.items()}

    def _held(self, step_id: StepId, rank: int) -> Shard:
        world = self.worlds[step_id]
        return Shard(step_id=step_id, rank=rank, world=world, alike=self._alike(rank, world))

    # --- what is there -------------------------------------------------------------------

    def _epochs(self) -> set[Epoch]:
        each = [node.epochs for node in self.nodes if node.up]
        return set.union(self.archive_epochs if self.has_archive else set(), *each)

    def _within_reach(self, number: int) -> dict[Tier, set[Image]]:
        """The images that the sidecar of a node can bring, by tier."""
        node, others = self.nodes[number], self.nodes if self.peers else []
        far = {
            image
            for other in others
            if other.up
            for image in other.kept | (other.local if other is not node else set())
        }
        return {
            Tier.MEMORY: node.memory,
            Tier.LOCAL: node.local,
            Tier.PEER: far,
            Tier.ARCHIVE: self._archived(),
        }

    def _alive(self, step_id: StepId, epochs: set[Epoch]) -> bool:
        """Whether the chain of parents of the newest epoch passes through this step."""
        at, last = self._back_to(step_id, epochs)
        return at == step_id.epoch and (last is None or step_id.step <= last)

    def _not_dead(self, step_id: StepId, epochs: set[Epoch]) -> bool:
        """Whether it does, or breaks off before, where the record of an epoch is lost."""
        at, _ = self._back_to(step_id, epochs)
        unknown = all(at != epoch.id for epoch in epochs)
        return self._alive(step_id, epochs) or (at > step_id.epoch and unknown)

    def _back_to(self, step_id: StepId, epochs: set[Epoch]) -> tuple[EpochId, int | None]:
        """Where the chain of parents of the newest epoch gets to, at most back to this step's."""
        parents = {epoch.id: epoch.parent for epoch in epochs}
        at, last = max(parents, default=step_id.epoch), None
        while at > step_id.epoch and at in parents and (parent := parents[at]) is not None:
            at, last = parent.epoch, parent.step
        return at, last

    def _covered(self, images: set[Image], step_id: StepId) -> bool:
        world = self.worlds[step_id]
        return all(
            any((step_id, holder) in images for holder in (rank, *self._twins(rank, world)))
            for rank in range(world)
        )

    # --- training ------------------------------------------------------------------------

    def _training(self) -> bool:
        return self.epoch is not None

    @precondition(_training)
    @rule(
        rounds=st.lists(st.tuples(st.integers(1, 2), _SOME, _SOME, _SOME), min_size=1, max_size=3)
    )
    def the_run_goes_on(self, rounds: list[tuple[int, set[int], set[int], set[int]]]) -> None:
        """Stage, write, send and upload steps. Some ranks or nodes are left out now and then."""
        for steps, not_writing, not_sending, not_uploading in rounds:
            for _ in range(steps):
                self._stage(set(range(self.world)))
            self._write(but=not_writing)
            self._report()
            self._send(but=not_sending)
            self._report()
            self._upload(but=not_uploading)
            self._report()

    @precondition(_training)
    @rule(ahead=_SOME)
    def some_ranks_are_a_step_ahead(self, ahead: set[int]) -> None:
        self._stage({rank % self.world for rank in ahead})
        self._report()

    def _stage(self, ranks: set[int]) -> None:
        """Stage the next step of these ranks in lock step: no rank gets more than one step ahead.
        The newest two images of a rank stay in memory."""
        assert self.epoch is not None
        slowest = min(self.at.values())
        for rank in (rank for rank in ranks if self.at[rank] == slowest):
            self.at[rank] += 1
            step_id = StepId(self.epoch.id, self.at[rank])
            self.worlds[step_id] = self.world
            memory = self.nodes[rank // self.per_node].memory
            memory.add((step_id, rank))
            held = sorted(image for image in memory if image[1] == rank)
            memory -= set(held[:-2])

    def _write(self, *, but: set[int]) -> None:
        """All ranks that are not left out write the newest step that all ranks have staged."""
        assert self.epoch is not None
        step_id = StepId(self.epoch.id, min(self.at.values()))
        for rank in set(range(self.world)) - but:
            node = self.nodes[rank // self.per_node]
            node.local |= node.memory & {(step_id, rank)}

    def _send(self, *, but: set[int]) -> None:
        for number, node in enumerate(self.nodes):
            buddy = self.nodes[(number + 1) % len(self.nodes)]
            if self.peers and node.up and buddy.up and number not in but:
                buddy.kept |= node.local

    def _upload(self, *, but: set[int]) -> None:
        committed = self.ledger.committed(Tier.LOCAL)
        for number, node in enumerate(self.nodes):
            if self.has_archive and node.up and number not in but:
                self.archive |= {image for image in node.local if image[0] in committed}
                self.archive_epochs |= node.epochs

    # --- faults --------------------------------------------------------------------------

    @precondition(_training)
    @rule()
    def the_trainers_are_killed(self) -> None:
        self.epoch = None

    @precondition(lambda self: all(node.up for node in self.nodes) or self._training())
    @rule(number=st.integers(0, 2))
    def a_node_is_lost(self, number: int) -> None:
        number %= len(self.nodes)
        self.nodes[number] = Node(up=False)
        self.epoch = None
        self.ledger.apply(ReportedHoldingsLost(number))
        left = set.union(self._archived(), *(node.local | node.kept for node in self.nodes))
        alive = {step_id for step_id, _ in left if self.ledger.lineage.is_restorable(step_id)}
        expected = newest_on(self.ledger, tiers_at_least(Tier.LOCAL))
        assert expected == max(
            (step_id for step_id in alive if self._covered(left, step_id)), default=None
        )

    @precondition(lambda self: any(node.up for node in self.nodes))  # else it gets no reports
    @rule()
    def the_operator_is_restarted(self) -> None:
        self._rebuild()

    # --- restoring -----------------------------------------------------------------------

    @precondition(lambda self: not self._training())
    @rule(per_node=st.integers(1, 2), turned=st.integers(0, 2))
    def the_trainers_start(self, per_node: int, turned: int) -> None:
        """`turned`: by how many places the machines come back in another order. Not with an
        archive: the ledger sees an image on any machine, while a rank that moved may see it in the
        archive alone, and so goes on from a newer step of its twin."""
        self.per_node = per_node
        turned = 0 if self.has_archive else turned % len(self.nodes)
        self.nodes = [*self.nodes[turned:], *self.nodes[:turned]]
        for node in self.nodes:
            node.up = True
        self._rebuild()
        votes = [self._vote(rank) for rank in range(self.world)]
        exact, covered = self._expected()
        outlook_ = restart_outlook(self.ledger, world=self.world, fleeting=self.fleeting)
        try:
            decision = choose_step(votes)
        except RestoreError:
            assert not covered, "there was a step that all could restore"
            assert not self.fleeting, "what is missing cannot come back"
            assert outlook_.restart is RestartAction.WAITS
            self._remove_the_run()
            return
        self._check_outlook(outlook_, decision)
        self._check(decision, exact, covered)
        self._go_on(decision)

    def _vote(self, rank: int) -> Candidates:
        ledger, reach = self._of_node(rank // self.per_node)
        own = {
            step_id: tier
            for tier in reversed(reach)
            for step_id, of in reach[tier]
            if of == rank and not ledger.is_dead(step_id)
        }
        whole = set(ledger.list_reachable_steps())
        there: dict[StepId, int] = {}
        images: dict[StepId, set[int]] = {}
        for shelf in reach.values():
            for step_id, of in shelf:
                images.setdefault(step_id, set()).add(of)
                if not ledger.is_dead(step_id) and step_id not in whole:
                    ranks = self._alike(of, self.worlds[step_id]).bits | 1 << of
                    there[step_id] = there.get(step_id, 0) | ranks
        return Candidates(
            answer=TierAnswer.STEPS if own or whole or there else TierAnswer.NONE,
            candidates=tuple(
                Candidate(id=step_id, tier=own[step_id], world=self.worlds[step_id])
                for step_id in sorted(own)
            ),
            highest_epoch=ledger.highest_epoch(),
            offers=tuple(
                Offer(
                    id=step_id,
                    tier=Tier.LOCAL,
                    world=self.worlds[step_id],
                    images=Ranks.of(images.get(step_id, ())),
                )
                for step_id in sorted(whole)
            ),
            parts=tuple(
                Offer(
                    id=step_id,
                    tier=Tier.LOCAL,
                    world=self.worlds[step_id],
                    ranks=Ranks.of(each_rank(ranks)),
                    images=Ranks.of(images[step_id]),
                )
                for step_id, ranks in sorted(there.items())
            ),
            epochs=ledger.epochs,
            fleeting=self.fleeting,
        )

    def _of_node(self, number: int) -> tuple[Ledger, dict[Tier, set[Image]]]:
        """The ledger of a node's sidecar, and the images that the sidecar can bring."""
        reach, ledger = self._within_reach(number), Ledger(self.config)
        for epoch in self._epochs() if self.peers else self.nodes[number].epochs:
            ledger.apply(EpochStarted(epoch))
        for epoch in self.archive_epochs if self.has_archive else ():
            ledger.apply(EpochStarted(epoch))
        ranks = {rank for shelf in reach.values() for _, rank in shelf}
        shelves = {tier: reach[tier] for tier in self.config.tiers}
        reports = {rank: self._rank_report(shelves, rank) for rank in ranks}
        ledger.apply(Reported(ranks=combine_rank_reports(reports)))
        return ledger, reach

    def _expected(self) -> tuple[set[StepId], set[StepId]]:
        """The steps of which every rank's own image can be reached, and the steps that all images
        together cover, because ranks lend each other what they reach."""
        reached = set[Image]()
        for number in range(len(self.nodes)):
            reached |= set.union(*self._within_reach(number).values())
        own = {step_id for step_id, world in self.worlds.items() if world == self.world}
        exact = {
            step_id
            for step_id in own
            if all((step_id, rank) in reached for rank in range(self.world))
        }
        covered = {step_id for step_id in self.worlds if self._covered(reached, step_id)}
        alive = {step_id for step_id in covered if self._alive(step_id, self._epochs())}
        usable = alive or {
            step_id for step_id in covered if self._not_dead(step_id, self._epochs())
        }
        return exact & usable, usable

    def _check(self, decision: Decision, exact: set[StepId], covered: set[StepId]) -> None:
        if decision.id is None:
            images = set.union(
                *(value for n in range(len(self.nodes)) for value in self._within_reach(n).values())
            )
            left = {step_id for step_id, _ in images if self._not_dead(step_id, self._epochs())}
            if decision.lost is None:
                assert left == set(decision.incomplete), "something was there"
            else:
                assert self.fleeting
                assert decision.lost == max(left)
            assert not covered
            return
        assert decision.id in covered
        assert decision.id >= max(exact, default=decision.id), "a newer one was whole"
        assert decision.world == self.worlds[decision.id]
        if not self.replicated:
            assert decision.id == max(covered)
        if all(decision.direct):
            assert decision.id in exact
        plan = self.ledger.plan(range(self.world))
        if isinstance(plan, RestorePlan):
            assert plan.id >= decision.id, "the operator sees all that a sidecar sees"
            assert not self.ledger.is_dead(plan.id)

    def _check_outlook(self, outlook_: RestartOutlook, decision: Decision) -> None:
        """What people are told before a restart is what the restart does."""
        if decision.id is not None:
            assert outlook_ == RestartOutlook(RestartAction.GOES_ON, decision.id), (
                outlook_,
                decision,
            )
        elif decision.lost is not None:
            assert outlook_ == RestartOutlook(RestartAction.BEGINS_AGAIN, decision.lost)
        else:
            assert outlook_.restart in (RestartAction.BEGINS, RestartAction.BEGINS_AGAIN)

    def _go_on(self, decision: Decision) -> None:
        self.lives += 1
        epoch = decision.make_epoch(f"{self.lives:08x}")
        assert all(epoch.id > known.id for known in self._epochs())
        if decision.id is None:
            self._forget_all()
        for node in self.nodes:
            node.epochs.add(epoch)
            # a restore drops dead images from memory; the image that was restored stays
            node.memory = {image for image in node.memory if self._alive(image[0], self._epochs())}
        self.epoch = epoch
        self.at = dict.fromkeys(range(self.world), decision.id.step if decision.id else -1)
        self._rebuild()

    def _remove_the_run(self) -> None:
        """A user has read the error and starts the run from nothing."""
        self._forget_all()
        self._rebuild()

    def _forget_all(self) -> None:
        self.nodes = [Node() for _ in self.nodes]
        self.archive.clear()
        self.archive_epochs.clear()

    # --- what always holds ---------------------------------------------------------------

    @invariant()
    def a_commit_is_what_lies_durable_of_every_rank_and_nothing_else(self) -> None:
        durable = set.union(self._archived(), *(node.local | node.kept for node in self.nodes))
        complete = {
            step_id
            for step_id, _ in durable
            if all((step_id, rank) in durable for rank in range(self.worlds[step_id]))
            and self.ledger.lineage.is_restorable(step_id)
        }
        assert set(self.ledger.committed(Tier.LOCAL)) == complete

    @invariant()
    def what_is_planned_can_be_reached_and_is_never_dead(self) -> None:
        plan = self.ledger.plan(range(self.world))
        if isinstance(plan, RestorePlan):
            images = set.union(
                self._archived(), *(node.memory | node.local | node.kept for node in self.nodes)
            )
            assert self._covered(images, plan.id)
            assert not self.ledger.is_dead(plan.id)
            newest = self.ledger.watermark(Tier.MEMORY)
            assert newest is None or plan.id >= newest


TestTiers = Tiers.TestCase
TestTiers.settings = settings(max_examples=40, stateful_step_count=40, print_blob=True)


def test_a_complete_step_from_an_unknown_epoch_is_restored_rather_than_starting_at_step_0() -> None:
    """Epoch 5 went on in another world and archived step 1. Its successors' records are lost with
    the nodes, one after the other. The archive also has step 0 of the world that runs now."""
    run = Tiers()
    run.begin(nodes=2, per_node=1, replicated=True, peers=False, archive=True)
    run.the_run_goes_on([(1, set(), set(), set())])
    run.a_node_is_lost(0)
    run.the_trainers_start(per_node=2, turned=0)
    run.the_run_goes_on([(1, set(), set(), set())])
    assert run.epoch is not None
    newest = StepId(run.epoch.id, 1)
    for number in (0, 1):
        run.a_node_is_lost(number)
        run.the_trainers_start(per_node=1, turned=0)
    run.some_ranks_are_a_step_ahead({0, 1})
    for number in (0, 1, 0):
        run.a_node_is_lost(number)
        run.the_trainers_start(per_node=1, turned=0)
    assert run.ledger.find_parent_step(run.epoch.id) == newest


def test_a_step_from_replicas_is_preferred_over_an_exact_step_from_an_earlier_world_size() -> None:
    """Step 1 is of four ranks, and whole by twins, as node 0 is lost. Two ranks went on from it."""
    run = Tiers()
    run.begin(nodes=2, per_node=1, replicated=True, peers=True, archive=False)
    run.the_run_goes_on([(1, set(), set(), set())])
    run.the_trainers_start(per_node=2, turned=0)
    run.the_run_goes_on([(1, set(), {0}, set())])
    run.a_node_is_lost(0)
    run.the_trainers_start(per_node=1, turned=0)
    run.some_ranks_are_a_step_ahead({0})
    run.the_trainers_start(per_node=1, turned=0)
    assert set(run.at.values()) == {2}


def test_an_exact_step_that_is_spread_over_sidecars_is_preferred_over_a_step_from_replicas() -> (
    None
):
    """Node 0 is lost. Its ranks can get step 0 from node 1 and step 1 by twins. Ranks 2 and 3 have
    step 0 in the memory of their node, which node 0 does not see."""
    run = Tiers()
    run.begin(nodes=2, per_node=2, replicated=True, peers=True, archive=False)
    run.the_run_goes_on([(1, {2}, set(), set()), (1, set(), {0}, set())])
    run.a_node_is_lost(0)
    run.the_trainers_start(per_node=2, turned=0)
    assert set(run.at.values()) == {0}


def test_no_step_from_replicas_comes_between_an_exact_step_and_the_newest_one() -> None:
    """Step 0 is exact, and nearby for rank 1, which has no image of step 2. Rank 0 has one of step
    2, and of step 0 only in the archive; of step 1 it has none, either."""
    run = Tiers()
    run.begin(nodes=3, per_node=1, replicated=True, peers=True, archive=True)
    run.the_run_goes_on([(1, set(), set(), set()), (2, set(), {1}, {1, 2})])
    run.a_node_is_lost(0)
    run.the_trainers_start(per_node=1, turned=0)
    assert set(run.at.values()) == {2}
    run.a_node_is_lost(1)
    run.the_trainers_start(per_node=1, turned=0)
    assert set(run.at.values()) == {0}
