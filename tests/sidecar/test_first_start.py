"""Before the operator has said who the others are: nothing is here, and they may hold something."""

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
from tests.harness import eventually

Trainers = Callable[..., FakeTrainer]

PEERS = {"KEEPSTEP_PEER_LISTEN": "127.0.0.1:0", "KEEPSTEP_PEER_REPLICAS": "1"}


@pytest.fixture
def operator(tmp_path: Path) -> Iterator[OperatorHost]:
    """It asks for a report every half a minute only, as the real one does."""
    host = OperatorHost(make_identity(tmp_path / "tls"))
    host.interval_s = 30.0
    yield host.start()
    host.stop()


@pytest.fixture
def pod(operator: OperatorHost, tmp_path: Path) -> Iterator[Pod]:
    memory = Path(tempfile.mkdtemp(prefix="keepstep-first-", dir="/dev/shm"))
    ca = (tmp_path / "tls/tls.crt").read_text()
    made = Pod(0, memory=memory, home=tmp_path / "pod", url=operator.url, ca=ca)
    yield made.start(**PEERS)
    made.end()
    shutil.rmtree(memory, ignore_errors=True)


def come(pod: Pod, trainers: Trainers) -> FakeTrainer:
    trainer = trainers(pod.socket)
    trainer.connect()
    return trainer


def test_a_new_run_of_one_pod_begins_although_there_is_no_peer_to_name(
    operator: OperatorHost, pod: Pod, trainers: Trainers
) -> None:
    operator.all_peers = True
    found = come(pod, trainers).candidates()
    assert (found.answer, found.reason) == (Answer.NONE, "")


@pytest.fixture
def archive(operator: OperatorHost, pod: Pod, trainers: Trainers, tmp_path: Path) -> Path:
    """It holds a step of the pod that has no drive and no memory any more, and is down."""
    made = tmp_path / "archive"
    made.mkdir()
    operator.all_peers = True
    pod.end()
    pod.start(**PEERS, **archived(made))
    trainer = come(pod, trainers).begin_run()
    assert trainer.wait(trainer.stage(10), "committed", flush=True).reached
    eventually(lambda: list(made.rglob("step.json")))
    pod.end()
    pod.lose_memory()
    shutil.rmtree(pod.volume)
    return made


def archived(archive: Path) -> dict[str, str]:
    return {"KEEPSTEP_ARCHIVE": str(archive), "KEEPSTEP_ARCHIVE_EVERY": "1"}


def test_a_rank_that_finds_an_archived_step_waits_for_pods_that_may_hold_a_newer_one(
    operator: OperatorHost, pod: Pod, trainers: Trainers, archive: Path
) -> None:
    """The operator was made anew at the same time, and has not heard of them yet."""
    operator.all_peers = False
    trainer = come(pod.start(**PEERS, **archived(archive)), trainers)
    eventually(lambda: pod.text().count("not heard of all pods") >= 2)
    later = threading.Timer(8.0, lambda: setattr(operator, "all_peers", True))
    later.start()
    found = trainer.candidates(timeout_s=60.0)
    assert operator.all_peers, "it was heard before the vote"
    later.join()
    assert [(one.id.step, one.tier) for one in found.candidates] == [(10, Tier.ARCHIVE)]


def test_without_an_operator_a_rank_goes_on_from_the_archive_after_a_while(
    operator: OperatorHost, pod: Pod, trainers: Trainers, archive: Path
) -> None:
    operator.stop()
    trainer = come(pod.start(**PEERS, **archived(archive)), trainers)
    began = time.monotonic()
    found = trainer.candidates(timeout_s=5.0)
    assert time.monotonic() - began >= 5.0, "it might have come back"
    assert [one.id.step for one in found.candidates] == [10]
