"""The sidecar's pure rules: how often it reports, how much of a run it sees, what it may drop."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.commit_rule import ReportedTier
from keepstep.core.shard import Ranks, Shard
from keepstep.steps import EpochId, StepId, Tier
from keepstep.wire.member_reports import Report, ReportedRanks
from keepstep.wire.trainer import LeaseRequest
from keepstep_sidecar.leases import infer_served_rank_count, serves_all_ranks
from keepstep_sidecar.report.report import pressing_news
from keepstep_sidecar.report.reporter import Rhythm

chances = st.floats(0.0, 1.0)
seconds = st.floats(-1e6, 1e6)


# --- rhythm --------------------------------------------------------------------------------------


@given(seconds, seconds, chances)
def test_the_report_interval_stays_bounded_for_any_reply_of_the_operator(
    interval_s: float, gap_s: float, chance: float
) -> None:
    rhythm = Rhythm.clamped_to_bounds(interval_s, gap_s)
    assert 0.8 <= rhythm.max_report_interval_s(urgent=False, chance=chance) <= 721.0
    assert 0.05 <= rhythm.least_gap_s <= 60.0
    assert 2.0 <= rhythm.max_deferral_s <= 120.0


@given(st.integers(1, 10_000), chances)
def test_failures_are_retried_after_half_a_minute_at_the_latest(
    failures: int, chance: float
) -> None:
    assert 0.5 <= Rhythm().backoff_s(failures, chance=chance) <= 30.0
    assert 0.5 <= Rhythm().backoff_s(failures, urgent=True, chance=chance) <= 4.0, "it is awaited"


@given(chances)
def test_a_broken_connection_is_tried_again_at_once_and_another_replica_is_found_in_half_a_minute(
    chance: float,
) -> None:
    rhythm = Rhythm()
    tried_at_s = [0.0]
    for failures in range(1, 31):
        pause_s = rhythm.backoff_s(failures, broken=True, chance=chance)
        tried_at_s.append(tried_at_s[-1] + pause_s)
    assert tried_at_s[1] <= 0.5
    for led_at_s in range(1, 21):  # the Lease's end, the standby's look, its start
        assert min(tried_s for tried_s in tried_at_s if tried_s >= led_at_s) <= led_at_s + 2.0


def report_of(rank: ReportedRanks) -> Report:
    return Report(sidecar="test", started_at=1.0, sequence=1, ready=True, ranks=(rank,))


def holding(**steps: tuple[int, ...]) -> ReportedRanks:
    epoch = EpochId(1, "0" * 8)
    tiers = {
        Tier(tier): ReportedTier.from_shards(
            Shard(step_id=StepId(epoch, step), rank=0, world=2) for step in held
        )
        for tier, held in steps.items()
    }
    return ReportedRanks(ranks=Ranks.of((0,)), world=2, alive=True, tiers=tiers)


def test_only_news_that_a_commit_needs_is_reported_urgently() -> None:
    before = pressing_news(report_of(holding(memory=(3,), local=(1, 2), peer=(1,))))
    assert pressing_news(report_of(holding(memory=(3, 4), local=(2,), peer=(1, 2)))) == before
    assert pressing_news(report_of(holding(memory=(3,), local=(1, 2, 3), peer=(1,)))) != before
    dead = replace(holding(memory=(3,), local=(1, 2), peer=(1,)), alive=False)
    assert pressing_news(report_of(dead)) != before, "a vote may be near"


# --- span ----------------------------------------------------------------------------------------


def lease(*, rank: int = 0, world: int = 4, local_world: int = 0) -> LeaseRequest:
    return LeaseRequest(
        rank=rank, world=world, local_world=local_world, attempt="a", pid=1, library="1"
    )


def test_a_single_sidecar_serves_all_ranks_unless_the_local_world_size_is_given() -> None:
    assert infer_served_rank_count(lease(), environment={}, alone=True) == 4
    assert infer_served_rank_count(lease(local_world=2), environment={}, alone=True) == 2


def test_one_of_several_sidecars_treats_its_ranks_as_all_only_with_a_known_local_world_size() -> (
    None
):
    assert infer_served_rank_count(lease(), environment={}, alone=False) == 0
    assert not serves_all_ranks(lease(local_world=0))
    assert serves_all_ranks(lease(local_world=4))
    assert infer_served_rank_count(lease(world=1), environment={}, alone=False) == 1


def test_a_rank_set_in_the_container_environment_is_the_only_rank_of_the_sidecar() -> None:
    environment = {"RANK": "2", "WORLD_SIZE": "4"}
    assert infer_served_rank_count(lease(rank=2), environment=environment, alone=False) == 1
    assert infer_served_rank_count(lease(rank=3), environment=environment, alone=False) == 0
