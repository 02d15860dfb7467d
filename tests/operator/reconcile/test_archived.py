"""The archive as many pods tell of it: each of its own ranks all, two of the others the newest."""

from __future__ import annotations

from dataclasses import replace

from keepstep.wire.reports import Report, ReportedRank, ReportedShard
from keepstep_operator.api.tiers import Archive, Bucket
from keepstep_operator.reconcile.status.tier_conditions import RESTORE_FROM
from tests.operator.reconcile.samples import (
    IMAGE_BYTES,
    KEY,
    Play,
    Sidecar,
    elsewhere,
    pod,
    policy,
    run_object,
    step,
)

NUMBERS = list(range(1000, 11000, 1000))
NEWEST = NUMBERS[-3:]


def told(rank: int, *numbers: int) -> ReportedRank:
    """What a pod says of another one's rank: only what it saw archived."""
    held = tuple(
        ReportedShard(id=step(one), world=2, root=f"{step(one)}/{rank}", bytes=IMAGE_BYTES)
        for one in numbers
    )
    return ReportedRank(
        rank=rank,
        world=2,
        alive=False,
        tiers=elsewhere(archive=held),
    )


class Run:
    """Two pods, both of which also tell of the other's rank."""

    def __init__(self) -> None:
        archive = Archive(store=Bucket(kind="s3", name="ckpt"), every=100)
        self.pods = [pod(rank) for rank in (0, 1)]
        self.play = Play(*self.pods, known_policy=policy(archive=archive))
        self.sidecars = [Sidecar(rank=rank).staged(10001).durable(10000) for rank in (0, 1)]
        for one in self.sidecars:
            one.archive = [step(number) for number in NUMBERS]

    def report(self, rank: int, *elsewhere: int) -> Report:
        mine = self.sidecars[rank].report()
        return replace(mine, ranks=(*mine.ranks, told(1 - rank, *elsewhere)))

    def hear(self, *elsewhere: int, who: tuple[int, ...] = (0, 1)) -> None:
        for rank in who:
            self.play.hear(self.pods[rank], self.report(rank, *elsewhere))

    def archived(self) -> list[int]:
        return [id.step for id in self.play.registry.runs[KEY].ledger.archived()]


def test_who_names_the_newest_steps_of_another_rank_hides_none_of_the_older_ones() -> None:
    run = Run()
    for _ in range(3):
        for rank in (0, 1):
            run.hear(*NEWEST, who=(rank,))
            run.hear(*NEWEST, who=(1 - rank,))
            assert run.archived() == NUMBERS


def test_an_older_archived_step_can_be_gone_back_to_by_its_number() -> None:
    run = Run()
    run.hear(*NEWEST)
    run.hear(*NEWEST)
    run.play.find(run_object(restore_from="2000", generation=2))
    assert run.play.registry.reply(run.pods[0].uid, at=run.play.now).restore_from == step(2000)
    assert run.play.condition(RESTORE_FROM)[1] != "Unresolved"


def test_older_steps_are_still_known_while_the_pod_that_told_of_them_is_gone() -> None:
    run = Run()
    run.hear(*NEWEST)
    run.play.lose(run.pods[1])
    run.hear(*NEWEST, who=(0,))
    assert run.archived() == NUMBERS


def test_what_a_rank_s_own_pod_no_longer_finds_is_gone_whatever_another_one_says() -> None:
    run = Run()
    run.hear(*NUMBERS)
    for one in run.sidecars:
        one.archive = [step(number) for number in NUMBERS[2:]]
    run.hear(*NUMBERS)
    assert run.archived() == NUMBERS[2:]


def test_a_step_among_the_newest_that_went_is_gone_though_only_another_pod_looks() -> None:
    run = Run()
    run.hear(*NEWEST)
    run.play.lose(run.pods[1])
    run.hear(NEWEST[0], NEWEST[2], who=(0,))
    assert run.archived() == [number for number in NUMBERS if number != NEWEST[1]]


def test_the_first_pod_of_a_restarted_operator_tells_for_a_pod_that_is_gone() -> None:
    run = Run()
    run.hear(*NEWEST, who=(0,))
    assert run.archived() == NEWEST
