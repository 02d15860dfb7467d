"""Before the leader has heard of all pods: nothing is here, and they may hold something."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from operator_host import OperatorHost, make_identity
from pods import Pod
from trainer import FakeTrainer

from keepstep.steps import Answer, Tier
from tests.harness import eventually, free_port

Trainers = Callable[..., FakeTrainer]


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[list[Pod]]:
    """Two pods of a run (not started), and an operator that signs for them."""
    memory = Path(tempfile.mkdtemp(prefix="keepstep-first-", dir="/dev/shm"))
    identity, leader = make_identity(tmp_path / "tls"), free_port()
    operator = OperatorHost(identity).start()
    made = [
        Pod(
            node,
            memory=memory / str(node),
            home=tmp_path / str(node),
            url=operator.url,
            ca=identity.pem,
            leader=leader,
        )
        for node in range(2)
    ]
    yield made
    for one in made:
        one.end()
    operator.stop()
    shutil.rmtree(memory, ignore_errors=True)


def test_a_new_run_of_one_pod_begins_although_there_is_no_peer_to_name(
    pods: list[Pod], trainers: Trainers
) -> None:
    trainer = trainers(pods[0].start().socket)
    trainer.connect()
    found = trainer.candidates()
    assert (found.answer, found.reason) == (Answer.NONE, "")


@pytest.fixture
def archive(pods: list[Pod], trainers: Trainers, tmp_path: Path) -> dict[str, str]:
    """The variables of one that holds a step of both pods, which have nothing else any more and are
    down."""
    made = tmp_path / "archive"
    made.mkdir()
    variables = {"KEEPSTEP_ARCHIVE": str(made), "KEEPSTEP_ARCHIVE_EVERY": "1"}
    ranks = [trainers(one.start(**variables).socket, one.node, 2) for one in pods]
    for one in ranks:
        one.begin_run(local_world=1)
    ids = [one.stage(10) for one in ranks]
    for one, id in zip(ranks, ids, strict=True):
        assert one.wait(id, "committed", flush=True).reached
    eventually(lambda: list(made.rglob("step.json")))
    for pod in pods:
        pod.end()
        pod.lose_memory()
        shutil.rmtree(pod.volume)
    return variables


def come(pod: Pod, trainers: Trainers) -> FakeTrainer:
    trainer = trainers(pod.socket, pod.node, 2)
    trainer.connect(local_world=1)
    return trainer


def test_a_rank_that_finds_an_archived_step_waits_for_pods_that_may_hold_a_newer_one(
    pods: list[Pod], trainers: Trainers, archive: dict[str, str]
) -> None:
    first, second = pods
    trainer = come(first.start(**archive), trainers)
    eventually(lambda: first.text().count("not heard of all machines") >= 2)
    came: list[FakeTrainer] = []
    later = threading.Timer(8.0, lambda: came.append(come(second.start(**archive), trainers)))
    later.start()
    found = trainer.candidates(timeout_s=60.0)
    assert came, "it came before the vote"
    later.join()
    assert [(one.id.step, one.tier) for one in found.candidates] == [(10, Tier.ARCHIVE)]


def test_without_the_others_a_rank_goes_on_from_the_archive_after_a_while(
    pods: list[Pod], trainers: Trainers, archive: dict[str, str]
) -> None:
    trainer = come(pods[0].start(**archive), trainers)
    began = time.monotonic()
    found = trainer.candidates(timeout_s=5.0)
    assert time.monotonic() - began >= 5.0, "they might have come"
    assert [one.id.step for one in found.candidates] == [10]
