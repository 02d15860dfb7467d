"""The size of a step: one image of each rank, however many copies there are."""

from __future__ import annotations

from dataclasses import replace

from keepstep.core.commit_rule import ReportedTier, combine_rank_reports
from keepstep.core.ledger import Ledger, Reported
from keepstep.core.shard import Shard
from keepstep.steps import EpochId, StepId, Tier

STEP = StepId(EpochId(1, "0" * 8), 10)


def apply_sizes(ledger: Ledger, sizes: dict[int, int], tier: Tier, *, world: int = 2) -> int:
    """The size that the ledger tells after these images were reported."""
    ranks = {
        rank: {
            tier: ReportedTier.from_shards(
                (Shard(step_id=STEP, rank=rank, world=world, size_bytes=size),)
            )
        }
        for rank, size in sizes.items()
    }
    ledger.apply(Reported(ranks=combine_rank_reports(ranks)))
    return ledger.size_bytes(STEP)


def test_the_size_of_a_step_counts_copies_on_several_tiers_once() -> None:
    ledger = Ledger()
    assert apply_sizes(ledger, {0: 4096, 1: 8192}, Tier.LOCAL) == 12288
    assert apply_sizes(ledger, {0: 4096, 1: 8192}, Tier.ARCHIVE) == 12288


def test_the_size_of_a_step_is_unknown_until_every_rank_has_reported_it() -> None:
    assert apply_sizes(Ledger(), {0: 4096}, Tier.LOCAL) == 0
    assert apply_sizes(Ledger(), {0: 4096, 1: 0}, Tier.LOCAL) == 0
    assert Ledger().size_bytes(STEP) == 0


def test_shards_compare_equal_regardless_of_their_size() -> None:
    small = Shard(step_id=STEP, rank=0, world=2, root="a")
    assert small == replace(small, size_bytes=4096)


def test_an_image_of_a_rank_outside_its_world_raises_no_error() -> None:
    shards = [Shard(step_id=STEP, rank=rank, world=1, params_digest="p") for rank in (0, 5)]
    ledger = Ledger()
    ledger.apply(
        Reported(
            ranks=combine_rank_reports(
                {shard.rank: {Tier.LOCAL: ReportedTier.from_shards((shard,))} for shard in shards}
            )
        )
    )
    assert ledger.committed(Tier.LOCAL) == (STEP,)
