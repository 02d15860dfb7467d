"""A job under fault: where its parts are, what it did so far, and what must be true of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from keepstep.steps import StepId
from tests.e2e import dump, jobs, runs, stores, tiers
from tests.e2e.cluster import HOST_PATH, NAMESPACE, ROOT, Cluster
from tests.e2e.kubectl import Kubectl, Object
from tests.e2e.lineage import Lineage, epochs_on

_TINY = ("--layers", "1", "--width", "32", "--batch", "4", "--context", "32", "--dropout", "0")
"""Without dropout: a rank that goes on from its twin's image has the same state, but generators of
its own. That a rank's own come back is what the end-to-end tests check."""

STEP_S = 0.4
STEPS = 100_000
"""Also of the reference: the learning rate depends on it."""
SIDECAR = tiers.SIDECAR
MASTER, WORKER = "gpt-master-0", "gpt-worker-0"
PODS = (MASTER, WORKER)
SCRATCH = ROOT / "build" / "soak"
"""Where to look after a failure."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A team at a moment. `life`: of rank 0; `committed`, `peer`, `archived`: numbers of steps, -1
    for none."""

    life: jobs.Life
    epoch: str
    committed: int
    peer: int
    archived: int


@dataclass(kw_only=True)
class Team:
    """A job of two replicas on two nodes, its archive, and the losses of all of its lives. `seat`:
    a resource of which its worker asks for one, '' for none."""

    name: str
    cluster: Cluster
    nodes: tuple[str, str]
    drive: str = HOST_PATH
    seat: str = ""
    losses: dict[int, str] = field(default_factory=dict)
    busy: threading.Lock = field(default_factory=threading.Lock)

    @property
    def kubectl(self) -> Kubectl:
        return self.cluster.kubectl.namespaced(self.name)

    @property
    def job(self) -> Object:
        body = tiers.job(*self.nodes, run=self.name)
        tiny(body, "--step-seconds", str(STEP_S))
        if self.seat:
            worker = body["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
            worker["containers"][0]["resources"] = {"limits": {self.seat: "1"}}
        return body

    @property
    def store(self) -> str:
        """The archive's directory on the first node; it outlives the store's pod."""
        return f"/var/lib/keepstep-soak/{self.name}"

    def directory(self, node_rank: int) -> str:
        return f"{self.drive}/{self.name}/{self.name}/{node_rank}/{self.name}"

    def published(self, node_rank: int) -> int:
        """The newest step in a pod's directory that readers see: committed, as its sidecar
        knows."""
        command = ("ls", self.directory(node_rank))
        names = self.cluster.on_node(self.nodes[node_rank], *command).split()
        return max(StepId.parse(name).step for name in names if name[0].isdigit())

    def start(self) -> None:
        """Make everything; `seen` tells when it trains."""
        self.cluster.kubectl("create", "namespace", self.name)
        volume = {"name": "data", "hostPath": {"path": self.store, "type": "DirectoryOrCreate"}}
        stores.start(
            self.kubectl,
            volumes=[volume],
            nodeSelector={"kubernetes.io/hostname": self.nodes[0]},
        )
        self.kubectl.apply(tiers.policy(self.drive), self.job)

    # --- what it does ------------------------------------------------------------------------

    def seen(self) -> Seen:
        """Raises RuntimeError, KeyError while it cannot be said."""
        life = jobs.life(self.kubectl, MASTER)
        if life is None:
            raise RuntimeError(f"{self.name} does not train")
        self.learn(life)
        status = runs.status(self.kubectl)
        marks = status.get("watermarks", {})
        local, peer, archived = (_step(marks.get(tier)) for tier in ("local", "peer", "archive"))
        return Seen(life=life, epoch=status["epoch"], committed=local, peer=peer, archived=archived)

    def learn(self, life: jobs.Life) -> None:
        """Whatever was trained twice, by this or that life, was the same."""
        for step, loss in life.losses.items():
            known = self.losses.setdefault(step, loss)
            assert known == loss, f"{self.name}: step {step} gave {known} and then {loss}"

    def well(self, *, within_s: float = 180.0) -> Seen:
        """Wait until every container runs and every tier has steps of the present epoch."""

        def probe() -> Seen | None:
            if not self._runs():
                return None
            marks = runs.status(self.kubectl).get("watermarks", {})
            now = self.seen()
            fresh = all(
                now.epoch and str(marks.get(tier, "")).startswith(now.epoch)
                for tier in ("local", "peer", "archive")
            )
            # of the life before, as long as a new reconciler has not heard of this one
            stale = now.committed > now.life.last + 1
            return now if fresh and not stale and now.life.last >= now.life.first + 3 else None

        found: Seen = self.kubectl.eventually(
            probe, within_s=within_s, what=f"{self.name}: every tier has a step of this life"
        )
        return found

    def lives_on(self, before: Seen, *, ends: bool, within_s: float) -> Seen:
        """Wait until rank 0 has finished a step: of a new life where the fault `ends` the old one,
        else of the old one, which must not have ended."""

        def probe() -> Seen | None:
            now = self.seen()
            if now.life.began_at != before.life.began_at:
                assert ends, f"{self.name}: the trainers ended, though nothing of them was touched"
                return now if now.life.last >= now.life.first else None
            after.setdefault("step", now.life.last)
            return now if not ends and now.life.last > after["step"] else None

        after: dict[str, int] = {}
        found: Seen = self.kubectl.eventually(
            probe, within_s=within_s, what=f"{self.name} makes a new step"
        )
        return found

    def ended(self, before: Seen) -> jobs.Life:
        """How far the life that ended had come, as far as its log is left."""
        killed = jobs.life(self.kubectl, MASTER, previous=True)
        if killed is None or killed.began_at != before.life.began_at:
            return before.life
        self.learn(killed)
        return killed

    def lineage(self) -> Lineage:
        """The epochs that the first pod's volume knows of."""
        return Lineage((), epochs_on(self.cluster, self.nodes[0], self.directory(0)))

    def check_parent(self) -> None:
        """The newest epoch went on from a step that no earlier life had left behind."""
        epochs = self.lineage().epochs
        if len(epochs) > 1 and (parent := epochs[-1].parent) is not None:
            older = Lineage((), epochs[:-1])
            assert older.alive(parent), f"{self.name}: epoch {epochs[-1]} goes on from a dead step"

    def _runs(self) -> bool:
        for pod in map(self.pod, PODS):
            status = pod["status"]
            sidecars = [
                status for status in status["initContainerStatuses"] if status["name"] == SIDECAR
            ]
            for container in (*status["containerStatuses"], *sidecars):
                if not container["state"].get("running") or "deletionTimestamp" in pod["metadata"]:
                    return False
        return True

    def pod(self, name: str) -> Object:
        body = self.kubectl.get("pod", name)
        if body is None:
            raise RuntimeError(f"no pod {name}")
        return body


@contextmanager
def training(
    cluster: Cluster, count: int, *, small_mib: int = 0, seat: str = ""
) -> Iterator[list[Team]]:
    """Jobs that train. `small_mib`: of the first one's drive on the first node, 0 for that of the
    node; `seat`: of each worker, with the team's number behind it."""
    system = cluster.kubectl.namespaced(NAMESPACE)
    (pod,) = system.list("pods", "app.kubernetes.io/component=reconcile")
    first = pod["spec"]["nodeName"]  # this node stays; the other one is switched off at times
    (second,) = [worker for worker in cluster.workers() if worker != first]
    stamp = f"{int(time.time()) % 10**6:06d}"
    teams = [
        Team(
            name=f"soak-{stamp}-{number}",
            cluster=cluster,
            nodes=(first, second),
            seat=seat and f"{seat}-{number}",
        )
        for number in range(count)
    ]
    with ExitStack() as stack:
        if small_mib:
            teams[0].drive = f"{HOST_PATH}/soak-{stamp}"
            drive = tiers.small_drive(cluster, first, teams[0].drive, mib=small_mib)
            stack.enter_context(drive)
        stack.callback(_swept, cluster, teams)
        for team in teams:
            team.start()
        try:
            for team in teams:
                team.well(within_s=300)
            yield teams
        except BaseException:
            for team in teams:
                dump.stacks(cluster, team.kubectl, SCRATCH / "teams" / team.name)
            raise


def _swept(cluster: Cluster, teams: list[Team]) -> None:
    """What explains a failure, and nothing left behind."""
    for team in teams:
        dump.namespace(cluster, team.kubectl, SCRATCH / "teams" / team.name)
        cluster.kubectl.attempt("delete", "namespace", team.name, timeout_s=180)
        cluster.on_node(team.nodes[0], "rm", "-rf", team.store)
        for node in team.nodes:
            cluster.on_node(node, "rm", "-rf", f"{team.drive}/{team.name}")


def tiny(job: Object, *arguments: str) -> None:
    """Make a job's trainers small."""
    for replica in job["spec"]["pytorchReplicaSpecs"].values():
        (container,) = replica["template"]["spec"]["containers"]
        container["args"] = ["--steps", str(STEPS), "--log-file", "-", *_TINY, *arguments]


def reference(cluster: Cluster, node: str, steps: int) -> dict[int, str]:
    """Step -> exact loss of the same job on one node, not kept and not interrupted."""
    name = f"soak-reference-{int(time.time())}"
    kubectl = cluster.kubectl.namespaced(name)
    cluster.kubectl("create", "namespace", name)
    job = jobs.pytorch_job(policy=None)
    tiny(job, "--no-keepstep")
    for replica in job["spec"]["pytorchReplicaSpecs"].values():
        replica["template"]["spec"]["nodeSelector"] = {"kubernetes.io/hostname": node}
    kubectl.apply(job)
    try:
        return dict(runs.training_beyond(kubectl, steps, within_s=900).losses)
    finally:
        cluster.kubectl("delete", "namespace", name, "--wait=false")


def _step(mark: Any) -> int:
    return StepId.parse(mark).step if mark else -1
