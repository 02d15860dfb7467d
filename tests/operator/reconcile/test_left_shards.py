"""Shards that a pod left on its old node: the agent of that node serves them."""

from __future__ import annotations

from typing import Any

from keepstep.leader.orphaned_shards import OrphanedShard
from keepstep_operator.api.model import AgentRecord, NodeRecord
from keepstep_operator.reconcile.parsing import parse_agent
from keepstep_operator.reconcile.state import left_shards
from keepstep_operator.reconcile.state.run import Run
from tests.operator.reconcile.samples import KEY, T0, Play, Sidecar, later, pod, run_object, step

LEFT = {"node-1": "10.1.0.1:26741"}


def agent(node: str = "node-1", *, ready: bool = True, uid: str = "") -> AgentRecord:
    address = f"10.1.0.{node[-1]}:26741" if ready else ""
    return AgentRecord(uid=uid or f"agent-{node}", node=node, address=address)


class Move(Play):
    """Two pods on hostPath volumes, step 40 committed; then the second one moves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = pod(0), pod(1)
        self.a, self.b = Sidecar(rank=0), Sidecar(rank=1)
        for node in ("node-0", "node-1", "node-2"):
            self.registry.node_seen(NodeRecord(name=node))
            self.registry.agent_seen(agent(node))
        for one in (self.first, self.second):
            self.see(one)
        self.find(run_object())
        self.a.staged(40).durable(40)
        self.b.staged(40).durable(40)
        self.hear_all((self.first, self.a), (self.second, self.b))

    @property
    def run(self) -> Run:
        return self.registry.runs[KEY]

    def move(self, to: str = "node-2") -> None:
        self.lose(self.second)
        self.moved = pod(1, life=2, node=to)
        self.see(self.moved)
        self.hear(self.moved, Sidecar(rank=1, started_at=T0 + 9, epochs=[]).report())


def test_a_pod_that_moved_is_named_the_agent_of_the_node_it_left() -> None:
    play = Move()
    assert play.told(play.second).agents == {}
    play.move()
    told = play.told(play.moved)
    assert (told.agents, told.awaits, told.peers) == (LEFT, "", ())
    assert play.told(play.first).agents == {}, "only who left something is"
    status, reason, message = play.condition("LeftShardsServed")
    assert (status, reason) == ("True", "Served")
    assert message == "shards of node ranks 1 are served by the agent of node node-1"
    assert play.events("LeftShardsServed") == [message]
    assert play.status.committed is not None
    assert play.status.committed.step == 40, "it lies there still"
    assert play.condition("Protected")[1] != "PartGone"


def test_the_agent_is_named_until_a_newer_step_is_committed_without_it() -> None:
    play = Move()
    play.move()
    epoch = later(2, 40)
    b = Sidecar(rank=1, started_at=T0 + 9, epochs=[]).restored(epoch).staged(41, epoch=epoch)
    play.a.restored(epoch).staged(41, epoch=epoch)
    play.hear_all((play.first, play.a), (play.moved, b))
    assert play.told(play.moved).agents == LEFT, "restored, but nothing newer is on a drive"
    play.a.durable(41, epoch=epoch)
    b.durable(41, epoch=epoch)
    play.hear_all((play.first, play.a), (play.moved, b))
    assert play.told(play.moved).agents == {}
    assert play.run.ledger.committed() == step(41, epoch)
    assert [one.node for one in play.status.holders] == ["node-0", "node-2"]
    assert all(one.type != "LeftShardsServed" for one in play.status.conditions)


def test_an_agent_that_is_not_ready_is_waited_for_unless_its_node_is_down() -> None:
    play = Move()
    play.registry.agent_seen(agent(ready=False))
    play.move()
    told = play.told(play.moved)
    assert told.agents == {}
    assert "node-1, whose agent is not ready yet" in told.awaits, "its vote must not come before"
    assert play.told(play.first).awaits == ""
    assert play.condition("LeftShardsServed")[:2] == ("False", "NoAgent")
    assert play.condition("Protected")[:2] == ("False", "PartGone")
    play.registry.node_seen(NodeRecord(name="node-1", ready=False))
    assert play.told(play.moved).awaits == ""
    play.registry.node_gone("node-1")
    assert play.told(play.moved).awaits == ""
    play.registry.node_seen(NodeRecord(name="node-1"))
    play.registry.agent_seen(agent())
    assert play.told(play.moved).agents == LEFT


def test_a_node_without_an_agent_is_not_waited_for() -> None:
    play = Move()
    play.registry.agent_gone("agent-node-1")
    play.move()
    told = play.told(play.moved)
    assert (told.agents, told.awaits) == ({}, "")


def test_an_agent_that_was_replaced_does_not_take_the_new_one_with_it() -> None:
    play = Move()
    play.registry.agent_seen(agent(uid="new"))
    play.registry.agent_gone("agent-node-1")
    play.move()
    assert play.told(play.moved).agents == LEFT


def test_shards_that_were_left_on_two_nodes_are_served_from_both() -> None:
    play = Move()
    play.move("node-0")
    play.run.ledger.orphans._held["node-2", 1] = OrphanedShard(
        node="node-2", node_rank=1, step=step(40)
    )
    assert set(play.told(play.moved).agents) == {"node-1", "node-2"}
    assert left_shards.served(play.run).count("node ranks 1") == 2


def test_a_reconciler_that_begins_anew_knows_from_the_status_what_lies_where() -> None:
    before = Move()
    before.move()
    written = before.status
    assert {one.node: one.node_ranks for one in written.holders} == {"node-0": "0", "node-1": "1"}

    play = Play()
    play.registry.agent_seen(agent())
    for one in (before.first, before.moved):
        play.see(one)
    play.find(run_object(written))
    assert play.told(before.moved).agents == LEFT, "with the first reply"


def _pod(*, ready: str = "True", **metadata: Any) -> dict[str, Any]:
    return {
        "metadata": {"uid": "a", **metadata},
        "spec": {"nodeName": "node-1"},
        "status": {"podIP": "fd00::1", "conditions": [{"type": "Ready", "status": ready}]},
    }


def test_an_agent_has_an_address_while_its_pod_is_ready_and_stays() -> None:
    assert parse_agent(_pod()).address == "[fd00::1]:26741"
    assert parse_agent(_pod(ready="False")).address == ""
    assert parse_agent(_pod(deletionTimestamp="2026-11-27T12:00:00Z")).address == ""
    assert parse_agent({"metadata": {"uid": "a"}, "spec": {}}).address == ""
