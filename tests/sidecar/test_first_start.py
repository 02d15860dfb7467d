"""A new run whose policy has peers: nothing is anywhere, and the operator must say so."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from operator_host import OperatorHost, make_identity
from pods import Pod
from trainer import FakeTrainer

from keepstep.steps import Answer

Trainers = Callable[..., FakeTrainer]
pytestmark = pytest.mark.timeout(90)

PEERS = {"KEEPSTEP_PEER_LISTEN": "127.0.0.1:0", "KEEPSTEP_PEER_REPLICAS": "1"}


@pytest.fixture
def operator(tmp_path: Path) -> Iterator[OperatorHost]:
    """It asks for a report every half a minute only, as the real one does."""
    host = OperatorHost(make_identity(tmp_path / "tls"), world=1)
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


def test_the_first_vote_waits_until_the_operator_has_heard_of_the_pods_that_began_later(
    operator: OperatorHost, pod: Pod, trainers: Trainers
) -> None:
    """One call of a rank that holds nothing, and a sidecar that has just reported. Another rank's
    trainer needs longer to begin than a depot is waited for that does not answer."""
    trainer = come(pod, trainers)
    later = threading.Timer(23.0, lambda: setattr(operator, "all_peers", True))
    later.start()
    found = trainer.candidates(timeout_s=60.0)
    later.join()
    assert (found.answer, found.reason) == (Answer.NONE, "")


def test_while_a_pod_has_not_reported_nobody_says_that_there_is_nothing(
    operator: OperatorHost, pod: Pod, trainers: Trainers
) -> None:
    found = come(pod, trainers).candidates()
    assert found.answer is Answer.UNKNOWN
    assert "not heard of all pods" in found.reason
