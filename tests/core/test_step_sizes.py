"""The size of a step: one image of each rank, however many copies there are."""

from __future__ import annotations

from dataclasses import replace

from keepstep.core.commit_rule import ReportedTier, reports_of_ranks
from keepstep.core.ledger import Ledger, Reported
from keepstep.core.shard import Shard
from keepstep.steps import EpochId, StepId, Tier

STEP = StepId(EpochId(1, "0" * 8), 10)


def apply_sizes(ledger: Ledger, sizes: dict[int, int], tier: Tier, *, world: int = 2) -> int:
    """The size that the ledger tells after these images were reported."""
    ranks = {
        rank: {
            tier: ReportedTier.of((Shard(step_id=STEP, rank=rank, world=world, size_bytes=size),))
        }
        for rank, size in sizes.items()
    }
    ledger.apply(Reported(ranks=reports_of_ranks(ranks)))
    return ledger.size_bytes(STEP)


def test_copies_on_several_tiers_count_once() -> None:
    ledger = Ledger()
    assert apply_sizes(ledger, {0: 4096, 1: 8192}, Tier.LOCAL) == 12288
    assert apply_sizes(ledger, {0: 4096, 1: 8192}, Tier.ARCHIVE) == 12288


def test_nothing_is_said_while_a_rank_is_missing_or_silent_about_it() -> None:
    assert apply_sizes(Ledger(), {0: 4096}, Tier.LOCAL) == 0
    assert apply_sizes(Ledger(), {0: 4096, 1: 0}, Tier.LOCAL) == 0
    assert Ledger().size_bytes(STEP) == 0


def test_the_size_is_no_part_of_what_an_image_is() -> None:
    small = Shard(step_id=STEP, rank=0, world=2, root="a")
    assert small == replace(small, size_bytes=4096)


def test_an_image_of_a_rank_that_its_world_does_not_have_ends_nothing() -> None:
    shards = [Shard(step_id=STEP, rank=rank, world=1, params_digest="p") for rank in (0, 5)]
    ledger = Ledger()
    ledger.apply(
        Reported(
            ranks=reports_of_ranks(
                {shard.rank: {Tier.LOCAL: ReportedTier.of((shard,))} for shard in shards}
            )
        )
    )
    assert ledger.committed(Tier.LOCAL) == (STEP,)
