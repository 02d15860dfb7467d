"""Before the leader has heard of all pods: nothing is here, and they may hold something."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from operator_host import OperatorHost
from pods import Pod
from trainer import FakeTrainer

from keepstep.steps import Tier, TierAnswer
from tests.harness import eventually, files_below

Trainers = Callable[..., FakeTrainer]


@pytest.fixture
def both(pods: Callable[[str], list[Pod]], operator: OperatorHost) -> list[Pod]:
    return pods(operator.url)


def test_a_new_run_of_a_single_pod_starts_without_any_peer(
    both: list[Pod], trainers: Trainers
) -> None:
    trainer = trainers(both[0].start().socket)
    trainer.connect()
    found = trainer.candidates()
    assert (found.answer, found.reason) == (TierAnswer.NONE, "")


@pytest.fixture
def archive(both: list[Pod], trainers: Trainers, tmp_path: Path) -> dict[str, str]:
    """The variables of one that holds a step of both pods, which have nothing else any more and are
    down."""
    made = tmp_path / "archive"
    made.mkdir()
    variables = {"KEEPSTEP_ARCHIVE": str(made), "KEEPSTEP_ARCHIVE_EVERY": "1"}
    ranks = [trainers(machine.start(**variables).socket, machine.node, 2) for machine in both]
    for rank in ranks:
        rank.begin_run(local_world=1)
    ids = [rank.stage(10) for rank in ranks]
    for rank, step_id in zip(ranks, ids, strict=True):
        assert rank.wait(step_id, "committed", flush=True).reached
    eventually(lambda: files_below(made, "step.json"))
    for pod in both:
        pod.end()
        pod.lose_memory()
        shutil.rmtree(pod.volume)
    return variables


def come(pod: Pod, trainers: Trainers) -> FakeTrainer:
    trainer = trainers(pod.socket, pod.node, 2)
    trainer.connect(local_world=1)
    return trainer


def test_a_rank_that_finds_an_archived_step_waits_for_pods_that_may_hold_a_newer_one(
    both: list[Pod], trainers: Trainers, archive: dict[str, str]
) -> None:
    first, second = both
    trainer = come(first.start(**archive), trainers)
    eventually(lambda: first.text().count("not all machines of the run have reported") >= 2)
    comes = threading.Event()
    later = threading.Timer(8.0, lambda: (comes.set(), come(second.start(**archive), trainers)))
    later.start()
    found = trainer.candidates(timeout_s=60.0)
    assert comes.is_set(), "it came before the vote"
    later.join()
    assert [(candidate.id.step, candidate.tier) for candidate in found.candidates] == [
        (10, Tier.ARCHIVE)
    ]


def test_a_rank_resumes_from_the_archive_when_other_pods_do_not_appear_in_time(
    both: list[Pod], trainers: Trainers, archive: dict[str, str]
) -> None:
    trainer = come(both[0].start(**archive), trainers)
    began = time.monotonic()
    found = trainer.candidates(timeout_s=5.0)
    assert time.monotonic() - began >= 5.0, "they might have come"
    assert [candidate.id.step for candidate in found.candidates] == [10]
