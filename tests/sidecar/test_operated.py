"""A run of two pods on Kubernetes, with an operator that comes and goes: real sidecars."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from operator_host import OperatorHost, make_identity
from pods import Pod, members
from trainer import FakeTrainer, content, read_image

from keepstep.core.restore_vote import choose_step, find_step_limit
from keepstep.core.retention import Retention
from keepstep.steps import Epoch, EpochId, StepId
from keepstep.wire.run_reports import AdvisoryKind, MemberState, RunPolicy
from tests.harness import eventually, free_port

OPTIONS = ("--persist-every", "1", "--keep", "1")
POLICY = RunPolicy(keep=Retention(last=1), outlives_pod=False, persist_every=1, restarts=False)


class Team:
    """The pods, their ranks, and the operator of today."""

    def __init__(self, directory: Path, trainers: Callable[..., FakeTrainer]) -> None:
        self._identity = make_identity(directory / "tls")
        self._trainers = trainers
        self._directory = directory
        self._memory = Path(tempfile.mkdtemp(prefix="keepstep-operated-", dir="/dev/shm"))
        self.operator = OperatorHost(self._identity).start()
        self._leader = free_port()
        self.pods = [self.make(node, "first") for node in range(2)]
        self.made = [*self.pods]
        self.ranks: list[FakeTrainer] = []
        self.ask()

    def make(self, node: int, name: str) -> Pod:
        places = {
            "memory": self._memory / f"{name}-{node}",
            "home": self._directory / f"{name}-{node}",
        }
        url, ca = self.operator.url, self._identity.pem
        pod = Pod(node, **places, url=url, ca=ca, leader=self._leader)
        pod.uid = f"{name}-{node}"
        return pod

    def ask(self) -> None:
        self.operator.ask(members=members(self.pods), complete=True, policy=POLICY)

    def replace(self, node: int) -> Pod:
        """The pod is gone with all it had; its successor starts."""
        self.pods[node].kill()
        self.pods[node] = self.make(node, "second")
        self.made.append(self.pods[node])
        self.ask()
        return self.pods[node].start(*OPTIONS)

    def come(self) -> list[FakeTrainer]:
        """New trainers, which have not restored yet."""
        for rank in self.ranks:
            rank.disconnect()
        self.ranks = [self._trainers(pod.socket, pod.node, 2) for pod in self.pods]
        for rank in self.ranks:
            rank.connect(local_world=1)
        return self.ranks

    def reach(self, step: int) -> StepId:
        """Both stage a step, and see it committed."""
        (step_id,) = {rank.stage(step) for rank in self.ranks}
        for rank in self.ranks:
            assert rank.wait(step_id, "committed", flush=True).reached
        return step_id

    def restart(self, epoch: str) -> StepId | None:
        """The trainers are replaced: vote, restore, begin the next epoch."""
        votes = [trainer.candidates() for trainer in self.come()]
        limit, exact = find_step_limit(votes)
        decision = choose_step(votes, limit=limit, exact=exact)
        for rank in self.ranks:
            if decision.id is not None:
                opened = rank.open(decision.id)
                assert read_image(rank.layout, opened.path) == content(
                    rank.layout, decision.id.step
                )
            rank.restored(decision.make_epoch(epoch))
            rank.register()
        return decision.id

    def away(self) -> None:
        self.operator.stop()

    def back(self) -> OperatorHost:
        """Another process of the operator, which has the record of the first."""
        before = self.operator
        self.operator = OperatorHost(self._identity, port=before.port)
        self.operator.record, self.operator.requested = before.record, before.requested
        return self.operator.start()

    def end(self) -> None:
        for pod in self.made:
            pod.end()
        self.operator.stop()
        shutil.rmtree(self._memory, ignore_errors=True)


@pytest.fixture
def team(tmp_path: Path, trainers: Callable[..., FakeTrainer]) -> Iterator[Team]:
    made = Team(tmp_path, trainers)
    for pod in made.pods:
        pod.start(*OPTIONS)
    for trainer in made.come():
        trainer.go_on()
    yield made
    made.end()


def held(team: Team, *steps: int) -> None:
    for pod in team.pods:
        eventually(lambda pod=pod: pod.steps() == {*steps}, what=lambda pod=pod: f"{pod.steps()}")


def test_a_run_reports_to_the_operator_and_continues_while_it_is_unreachable(team: Team) -> None:
    step_id = team.reach(1)
    report = eventually(
        lambda: (found := team.operator.newest) and found.committed == step_id and found
    )
    assert (report.world, report.alive, report.known) == (2, 2, 2)
    assert [(node.pod, node.node, node.local) for node in report.nodes] == [
        ("first-0", "node-0", 1),
        ("first-1", "node-1", 1),
    ]
    assert sorted(team.operator.seen.signed) == [0, 1], "one certificate for each"
    team.away()
    for step in (2, 3):
        step_id = team.reach(step)
    held(team, 3)
    for pod in team.pods:  # both sidecars are replaced meanwhile, and no one signs
        pod.kill()
        pod.start(*OPTIONS)
    assert team.restart("00000002") == step_id
    step_id = team.reach(4)
    held(team, 4)
    back = team.back()
    report = eventually(lambda: (found := back.newest) and found.sequence > 1 and found)
    assert (report.committed, report.settled) == (step_id, True)
    restored = eventually(lambda: back.newest and back.newest.recent, within_s=60)
    assert (restored[0].type, restored[0].step) == ("Restored", 3)
    assert back.newest is not None
    assert back.newest.record.restarts == 1
    assert back.seen.signed == []


def test_a_run_executes_pins_and_rollbacks_that_the_operator_passes_on(team: Team) -> None:
    """Pins, and going back to one of them."""
    first = team.reach(1)
    team.operator.ask(pins=(first,))
    eventually(
        lambda: (
            (found := team.operator.newest)
            and [checkpoint.step for checkpoint in found.kept] == [str(first)]
        )
    )
    team.reach(2)
    team.reach(3)
    held(team, 1, 3)
    team.operator.ask(restore_from="1")
    eventually(
        lambda: (
            (found := team.operator.newest) and found.restore_known and found.record.restore_from
        )
    )
    assert team.restart("00000002") == first
    done = eventually(
        lambda: next(
            (
                event
                for event in team.operator.seen.reports[-1].recent
                if event.type == "RolledBack"
            ),
            None,
        )
    )
    assert done.step == 1
    newest = team.reach(2)
    assert team.restart("00000003") == newest, "later restarts are as usual"


def test_a_replacement_pod_takes_over_the_node_rank_of_its_predecessor(team: Team) -> None:
    team.reach(1)
    eventually(lambda: (found := team.operator.newest) and found.sequence > 1)
    team.pods[1].kill()
    team.operator.ask(members=members(team.pods[:1]))
    report = eventually(
        lambda: (
            (found := team.operator.newest)
            and [node.state for node in found.nodes][1:] == [MemberState.GONE]
            and found.doubts
            and found
        )
    )
    assert AdvisoryKind.NOTHING_KEPT in [doubt.kind for doubt in report.doubts]
    team.replace(1)
    for trainer in team.come():
        trainer.restored(Epoch(EpochId(2, "00000002")))
        trainer.register()
    step_id = team.reach(0)
    report = eventually(
        lambda: (found := team.operator.newest) and found.committed == step_id and found
    )
    assert [node.pod for node in report.nodes] == ["first-0", "second-1"]


def test_commits_resume_soon_after_the_leader_returns_even_without_an_operator(team: Team) -> None:
    team.reach(1)
    team.away()
    team.pods[0].kill()
    team.pods[0].start(*OPTIONS)
    assert team.restart("00000002") is not None
    began = time.monotonic()
    team.reach(2)
    assert time.monotonic() - began < 15
