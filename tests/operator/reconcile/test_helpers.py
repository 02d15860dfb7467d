"""Shards that a pod left on its old node: served by a helper pod, and cleaned in the end."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.steps import StepId
from keepstep.wire.reports import Peer, Report, ReportReply
from keepstep_operator.api.model import NodeRecord, PodRecord
from keepstep_operator.reconcile.helpers import cleanup, pod_spec
from keepstep_operator.reconcile.helpers.cleanup import Cleaning, RunDirectories
from keepstep_operator.reconcile.helpers.pod_spec import HelperDefaults
from keepstep_operator.reconcile.state import helper_plan
from keepstep_operator.reconcile.state.helper_plan import Helper
from keepstep_operator.reconcile.state.registry import Registry
from keepstep_operator.reconcile.state.run import Run
from tests.operator.reconcile.samples import KEY, T0, Play, Sidecar, later, pod, run_object, step

PATH = "/mnt/nvme0"
DEFAULTS = HelperDefaults(
    image="keepstep/sidecar:1",
    namespace="keepstep-system-helpers",
    account="keepstep-helpers",
    reports_url="https://reports.keepstep-system.svc:443",
    reports_ca=lambda: "-----BEGIN CERTIFICATE-----",
)


class Move(Play):
    """Two pods on hostPath volumes, step 40 committed; then the second one moves."""

    def __init__(self, *, prefixes: tuple[str, ...] = (PATH,)) -> None:
        super().__init__()
        self.registry = Registry(helper_paths=prefixes)
        self.first = pod(0, host_paths=(PATH,))
        self.second = pod(1, host_paths=(PATH,))
        self.a, self.b = Sidecar(rank=0), Sidecar(rank=1)
        for node in ("node-0", "node-1", "node-2"):
            self.registry.node_seen(NodeRecord(name=node))
        for one in (self.first, self.second):
            self.see(one)
        self.find(run_object())
        self.a.staged(40).durable(40)
        self.b.staged(40).durable(40)
        self.hear_all((self.first, self.a), (self.second, self.b))

    @property
    def run(self) -> Run:
        return self.registry.runs[KEY]

    def wanted(self) -> list[Helper]:
        return helper_plan.wanted(self.run)

    def move(self, to: str = "node-2", *, told: bool = True) -> None:
        self.lose(self.second)
        self.moved = pod(1, life=2, node=to, host_paths=(PATH,))
        self.see(self.moved)
        if told:
            self.hear(self.moved, Sidecar(rank=1, started_at=T0 + 9, epochs=[]).report())

    def serve(self, *numbers: int) -> PodRecord:
        (wanted,) = self.wanted()
        body = pod_spec.serving(wanted, DEFAULTS)
        body["metadata"]["uid"] = "helper-1"
        helper = pod_spec.record(body)
        assert helper is not None
        self.registry.helper_seen(helper)
        self.hear(helper, _served(1, *map(step, numbers)))
        return helper


def _served(rank: int, *ids: StepId) -> Report:
    like = Sidecar(rank=0, kept={rank: list(ids)}, address="10.0.0.9:9465").report()
    return replace(like, ranks=tuple(one for one in like.ranks if one.rank == rank), library="")


def test_a_pod_that_moved_is_served_from_the_node_it_left() -> None:
    play = Move()
    assert play.wanted() == []
    play.move()
    assert play.wanted() == [Helper(run=KEY, node="node-1", node_ranks=(1,), paths=(PATH,))]
    told = play.told(play.moved)
    assert told.peers == ()
    assert "node-1" in told.awaits
    assert play.told(play.first).awaits == "", "only who left something waits for it"
    assert play.condition("LeftShardsServed")[:2] == ("False", "Starting")
    assert play.run.ledger.plan() is None

    helper = play.serve(39, 40)
    assert play.run.ledger.plan() == step(40), "it counts as reachable"
    told = play.told(play.moved)
    assert told.awaits == ""
    assert told.peers == (Peer(node_rank=helper.node_rank, address="10.0.0.9:9465"),)
    assert told.plan == step(40)
    assert play.condition("LeftShardsServed")[0] == "True"
    assert "node-1" in play.events("LeftShardsServed")[0]
    assert play.told(helper) == ReportReply(), "a helper is told nothing"


def test_a_helper_stays_until_a_newer_step_is_committed_without_it() -> None:
    play = Move()
    play.move()
    helper = play.serve(40)
    epoch = later(2, 40)
    b = Sidecar(rank=1, started_at=T0 + 9, epochs=[]).restored(epoch).staged(41, epoch=epoch)
    play.a.restored(epoch).staged(41, epoch=epoch)
    play.hear_all((play.first, play.a), (play.moved, b))
    assert play.wanted() != [], "restored, but nothing newer is on a drive"
    play.a.durable(41, epoch=epoch)
    b.durable(41, epoch=epoch)
    play.hear_all((play.first, play.a), (play.moved, b))
    assert play.wanted() == []
    play.note(play.registry.helper_gone(helper.uid, at=play.now))
    assert play.run.ledger.committed() == step(41, epoch)
    assert play.told(play.moved).peers == ()
    assert [one.node for one in play.status.holders] == ["node-0", "node-2"]


def test_no_helper_is_started_on_a_guess() -> None:
    play = Move()
    play.move(told=False)
    assert play.wanted() == [], "the new pod has not told yet what it finds"
    play = Move()
    play.move()
    play.registry.node_seen(NodeRecord(name="node-1", ready=False))
    assert play.wanted() == [], "its node is down"
    assert play.told(play.moved).awaits == ""
    play.registry.node_seen(NodeRecord(name="node-1"))
    assert play.wanted() != []
    play.registry.node_gone("node-1")
    assert play.wanted() == [], "its node is gone"


def test_a_pod_that_has_not_looked_yet_is_told_to_wait_for_what_it_left() -> None:
    play = Move()
    play.move(told=False)
    early = Sidecar(rank=1, started_at=T0 + 9, epochs=[], ready=False).report()
    play.hear(play.moved, early)
    assert play.wanted() == []
    assert "node-1" in play.told(play.moved).awaits, "its vote must not come before"
    assert play.told(play.first).awaits == ""


def test_nothing_outside_the_allowed_directories_is_mounted() -> None:
    play = Move(prefixes=("/srv",))
    play.move()
    assert play.wanted() == []
    assert helper_plan.allowed(("/a/../etc", "/a/x", "/ab"), ("/a",)) == ("/a/x",)


def test_a_reconciler_that_begins_anew_knows_from_the_status_what_lies_where() -> None:
    before = Move()
    before.move()
    written = before.status
    assert {one.node: one.node_ranks for one in written.holders} == {"node-0": "0", "node-1": "1"}

    play = Play()
    play.registry = Registry(helper_paths=(PATH,))
    for one in (before.first, before.moved):
        play.see(one)
    play.find(run_object(written))
    run = play.registry.runs[KEY]
    assert helper_plan.wanted(run) == []
    play.hear(before.first, before.a.report())
    play.hear(before.moved, Sidecar(rank=1, started_at=T0 + 9, epochs=[]).report())
    (one,) = helper_plan.wanted(run)
    assert (one.node, one.node_ranks) == ("node-1", (1,))


def test_a_serving_pod_may_read_its_runs_directories_and_nothing_else() -> None:
    one = Helper(run=KEY, node="node-1", node_ranks=(1, 3), paths=(PATH, "/mnt/nvme1"))
    spec = pod_spec.serving(one, DEFAULTS)["spec"]
    (container,) = spec["containers"]
    below = f"{KEY.namespace}/{KEY.name}"
    mounts = [at for at in container["volumeMounts"] if at["name"] != "token"]
    assert sorted(at["subPath"] for at in mounts) == sorted([f"{below}/1", f"{below}/3"] * 2)
    assert all(at["readOnly"] for at in container["volumeMounts"])
    assert container["command"][1:] == ["relay", *(at["mountPath"] for at in mounts)]
    security = container["securityContext"]
    assert security["runAsNonRoot"]
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert not spec["automountServiceAccountToken"]
    assert spec["serviceAccountName"] == "keepstep-helpers"
    assert {one["hostPath"]["type"] for one in spec["volumes"] if "hostPath" in one} == {
        "Directory"
    }


# --- what a run that is gone left behind ---------------------------------------------------------

NODES = {"a": NodeRecord(name="a"), "b": NodeRecord(name="b", ready=False)}
GRAVE = RunDirectories(run=KEY, nodes={"a": (PATH,), "b": (PATH,), "c": (PATH,)})


def test_a_run_that_is_there_is_never_cleaned_nor_one_that_came_back() -> None:
    assert cleanup.judged(GRAVE, {KEY: 1}, at=T0).gone_since is None
    gone = cleanup.judged(GRAVE, {}, at=T0)
    assert gone.gone_since == T0
    assert cleanup.judged(gone, {}, at=T0 + 5) == gone
    back = cleanup.judged(gone, {KEY: 1}, at=T0 + 5)
    assert list(cleanup.due(back, NODES, grace_s=0, at=T0 + 9)) == []


def test_only_nodes_that_are_up_are_cleaned_and_others_are_waited_for() -> None:
    gone = replace(GRAVE, gone_since=T0)
    assert list(cleanup.due(gone, NODES, grace_s=10, at=T0 + 9)) == []
    (one,) = cleanup.due(gone, NODES, grace_s=10, at=T0 + 10)
    assert one == Cleaning(run=KEY, node="a", paths=(PATH,), gone_since=T0)
    left = cleanup.cleaned(gone, "a")
    assert set(left.nodes) == {"b", "c"}
    late = cleanup.without_lost_nodes(left, NODES, at=T0 + cleanup.FORGET_S)
    assert set(late.nodes) == {"b"}, "c is no node of the cluster any more"


@given(
    alive=st.lists(st.booleans(), min_size=1, max_size=12),
    grace=st.integers(0, 5),
)
def test_nothing_is_cleaned_before_the_whole_time_of_grace_without_the_run(
    alive: list[bool], grace: int
) -> None:
    grave = RunDirectories(run=KEY, nodes={"a": (PATH,)})
    for second, there in enumerate(alive):
        grave = cleanup.judged(grave, {KEY: 1} if there else {}, at=T0 + second)
        due = list(cleanup.due(grave, NODES, grace_s=grace, at=T0 + second))
        window = alive[max(0, second - grace) : second + 1]
        assert bool(due) == (len(window) == grace + 1 and not any(window))


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"run": "{"},
        {"run": "[]"},
        {"run": '{"run": "x"}'},
        {"run": '{"run": "../x", "namespace": "team", "nodes": {}}'},
        {"run": '{"run": "x", "namespace": "../team", "nodes": {}}'},
    ],
)
def test_a_note_that_makes_no_sense_is_left_alone(data: dict[str, str]) -> None:
    assert cleanup.parse({"metadata": {"name": "x"}, "data": data}) is None


def test_a_cleaning_pod_is_root_with_one_capability_on_that_node_alone() -> None:
    body = pod_spec.cleaning(Cleaning(run=KEY, node="a", paths=(PATH,), gone_since=T0), DEFAULTS)
    (container,) = body["spec"]["containers"]
    where = f"/host/0/{KEY.namespace}/{KEY.name}"
    assert container["command"][1:] == ["clean", "--gone-since", f"{T0:.0f}", where]
    assert container["securityContext"]["capabilities"] == {
        "drop": ["ALL"],
        "add": ["DAC_OVERRIDE"],
    }
    assert pod_spec.about(body) == ("clean", KEY, "a")
    assert pod_spec.record(body) is None, "it reports nothing"
