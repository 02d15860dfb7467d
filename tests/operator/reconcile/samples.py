"""Pods and sidecars as the reconciler sees them, short enough to read a scenario at one glance."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from keepstep.core.commit_rule import ReportedTier
from keepstep.core.shard import Shard
from keepstep.steps import Answer, Epoch, EpochId, StepId, Tier
from keepstep.wire.reports import (
    Report,
    ReportedRank,
    ReportedRestore,
    ReportReply,
)
from keepstep_operator.api.model import (
    Job,
    PodRecord,
    PolicyRecord,
    RunKey,
    RunObject,
)
from keepstep_operator.api.policy import Policy, VolumeKind
from keepstep_operator.api.run import RunStatus, as_json
from keepstep_operator.reconcile.state.actions import Action, EmitEvent
from keepstep_operator.reconcile.state.registry import Registry
from keepstep_operator.reconcile.writers.status_writer import status_of

KEY = RunKey("team", "gpt-1a2b3c4d")
JOB = Job(api_version="kubeflow.org/v1", kind="PyTorchJob", name="gpt", uid="job-1")
T0 = 1_790_000_000.0
FIRST = Epoch(EpochId(1, "aaaaaaaa"))


IMAGE_BYTES = 1 << 20


def step(number: int, epoch: Epoch = FIRST) -> StepId:
    return StepId(epoch.id, number)


def later(
    number: int, parent: int | None, *, after: Epoch = FIRST, nonce: str = "bbbbbbbb"
) -> Epoch:
    """The epoch `number`, which went on from a step of the one before (None: at step 0)."""
    return Epoch(EpochId(number, nonce), None if parent is None else step(parent, after))


def pod(node_rank: int = 0, *, life: int = 1, **changes: Any) -> PodRecord:
    """Pod `gpt-worker-<node_rank>`; a new `life` is a new pod of that name."""
    record = PodRecord(
        uid=f"pod-{node_rank}-{life}",
        namespace=KEY.namespace,
        name=f"gpt-worker-{node_rank}",
        injected=True,
        run=KEY,
        node_rank=node_rank,
        node=f"node-{node_rank}",
        phase="Running",
        created_at=f"2026-11-21T07:{life:02d}:00Z",
        training=True,
        volumes=(VolumeKind.HOST_PATH,),
        policy="default",
        policy_generation=1,
        job=JOB,
    )
    return replace(record, **changes)


def accepted(**changes: Any) -> Policy:
    plain = Policy(
        namespace=KEY.namespace,
        name="default",
        generation=1,
        memory_limit_bytes=1 << 30,
        volumes=(),
        spec={},
    )
    return replace(plain, **changes)


def policy(*, problem: tuple[str, str] | None = None, **changes: Any) -> PolicyRecord:
    held = accepted(**changes)
    return PolicyRecord(
        namespace=held.namespace,
        name=held.name,
        generation=held.generation,
        policy=None if problem else held,
        problem=problem,
    )


def run_object(status: RunStatus | None = None, **changes: Any) -> RunObject:
    body = as_json(status) if status is not None else {}
    return replace(RunObject(key=KEY, uid="run-1", status=body), **changes)


def listed(shards: Iterable[Shard]) -> ReportedTier:
    """A tier that holds these."""
    found = tuple(shards)
    return ReportedTier(answer=Answer.STEPS if found else Answer.NONE, shards=found)


def each_shard(report: Report, **changed: Any) -> Report:
    """The report with this changed in all shards of all tiers."""

    def of(told: ReportedTier) -> ReportedTier:
        return replace(told, shards=tuple(replace(one, **changed) for one in told.shards))

    ranks = (
        replace(one, tiers={tier: of(told) for tier, told in one.tiers.items()})
        for one in report.ranks
    )
    return replace(report, ranks=tuple(ranks))


def elsewhere(
    *, peer: Iterable[Shard] = (), archive: Iterable[Shard] = ()
) -> dict[Tier, ReportedTier]:
    """What a pod says of the rank of another pod."""
    found = {Tier.PEER: listed(peer), Tier.ARCHIVE: listed(archive)}
    here = {Tier.MEMORY: listed(()), Tier.LOCAL: listed(())}
    return here | {tier: told for tier, told in found.items() if told.shards}


@dataclass(kw_only=True)
class Sidecar:
    """One sidecar with one rank. Change its fields, then `report()`.

    `kept`: steps of other ranks of which it keeps copies. `archive`: what it saw there of its own.
    """

    rank: int
    world: int = 2
    started_at: float = T0
    epochs: list[Epoch] = field(default_factory=lambda: [FIRST])
    memory: list[StepId] = field(default_factory=list)
    local: list[StepId] = field(default_factory=list)
    restores: list[ReportedRestore] = field(default_factory=list)
    library: str = "0.1.0"
    alive: bool = True
    ready: bool = True
    more: dict[str, Any] = field(default_factory=dict)
    kept: dict[int, list[StepId]] = field(default_factory=dict)
    archive: list[StepId] | None = None
    address: str = ""
    sequence: int = 0

    def staged(self, *numbers: int, epoch: Epoch = FIRST) -> Sidecar:
        self.memory = (self.memory + [step(number, epoch) for number in numbers])[-4:]
        return self

    def durable(self, *numbers: int, epoch: Epoch = FIRST) -> Sidecar:
        self.local += [step(number, epoch) for number in numbers]
        return self

    def restored(self, epoch: Epoch, *, tier: Tier | None = Tier.MEMORY, lost: int = 0) -> Sidecar:
        self.epochs.append(epoch)
        self.restores.append(
            ReportedRestore(
                rank=self.rank, epoch=epoch, tier=tier, seconds=1.5, at=T0, lost_steps=lost
            )
        )
        return self

    def report(self) -> Report:
        self.sequence += 1
        return Report(
            sidecar="0.1.0",
            started_at=self.started_at,
            sequence=self.sequence,
            ready=self.ready,
            library=self.library,
            pinned="locked",
            epochs=tuple(self.epochs),
            ranks=(self._rank(), *(self._copies(rank) for rank in self.kept)),
            peer_address=self.address,
            restores=tuple(self.restores),
            **self.more,
        )

    def _rank(self) -> ReportedRank:
        return ReportedRank(
            rank=self.rank,
            world=self.world,
            alive=self.alive,
            staged=max(self.memory, default=None),
            tiers=self._tiers(),
        )

    def _tiers(self) -> dict[Tier, ReportedTier]:
        local = listed(self._held(self.local, root=True))
        found = {
            Tier.MEMORY: listed(self._held(self.memory, root=False)),
            Tier.LOCAL: local if self.ready else replace(local, answer=Answer.UNKNOWN),
        }
        if self.archive is not None:
            found[Tier.ARCHIVE] = listed(self._held(self.archive, root=True))
        return found

    def _copies(self, rank: int) -> ReportedRank:
        held = tuple(
            Shard(step_id=id, rank=rank, world=self.world, root=f"{id}/{rank}")
            for id in self.kept[rank]
        )
        return ReportedRank(
            rank=rank,
            world=self.world,
            alive=False,
            tiers=elsewhere(peer=held),
        )

    def _held(self, ids: list[StepId], *, root: bool) -> tuple[Shard, ...]:
        return tuple(
            Shard(
                step_id=id,
                rank=self.rank,
                world=self.world,
                root=f"{id}/{self.rank}" if root else None,
                size_bytes=IMAGE_BYTES,
            )
            for id in ids
        )


class Play:
    """A book, its pods and a clock: the stage of a scenario."""

    def __init__(self, *pods: PodRecord, known_policy: PolicyRecord | None = None) -> None:
        self.registry = Registry()
        self.now = T0
        self.actions: list[Action] = []
        self.note(self.registry.policy_seen(known_policy or policy()))
        for one in pods:
            self.see(one)

    def note(self, actions: Iterable[Action]) -> None:
        self.actions += actions

    def see(self, one: PodRecord) -> None:
        self.note(self.registry.pod_seen(one, at=self.now))

    def lose(self, one: PodRecord) -> None:
        self.note(self.registry.pod_gone(one.uid, at=self.now))

    def hear(self, one: PodRecord, report: Report) -> None:
        self.note(self.registry.reported(one.uid, report, at=self.now))

    def hear_all(self, *pairs: tuple[PodRecord, Sidecar]) -> None:
        for one, sidecar in pairs:
            self.hear(one, sidecar.report())

    def told(self, one: PodRecord, *, holds: str = "") -> ReportReply:
        """The reply as it is sent."""
        reply = self.registry.reply(one.uid, holds=holds, at=self.now)
        return msgspec.json.decode(msgspec.json.encode(reply), type=ReportReply)

    def find(self, object: RunObject) -> None:
        self.note(self.registry.object_seen(object, at=self.now))

    def wait(self, seconds: float) -> None:
        """Time passes, with a tick at its end."""
        self.now += seconds
        self.note(self.registry.tick(at=self.now))

    @property
    def status(self) -> RunStatus:
        status = status_of(self.registry, KEY, at=self.now)
        assert status is not None
        return status

    def condition(self, type: str) -> tuple[str, str, str]:
        """(status, reason, message)"""
        found = next(one for one in self.status.conditions if one.type == type)
        return found.status, found.reason, found.message

    def events(self, reason: str) -> list[str]:
        return [
            one.message
            for one in self.actions
            if isinstance(one, EmitEvent) and one.reason == reason
        ]


# Training pods as the API server has them, and where they lie there.


Body = dict[str, Any]


def pod_path(name: str, namespace: str = "team") -> str:
    return f"/api/v1/namespaces/{namespace}/pods/{name}"


def pod_body(node_rank: int = 0, *, injected: bool = True) -> Body:
    """A PyTorchJob's pod as the API server has it, after admission or without."""
    said = {
        "policy": "default",
        "generation": 1,
        "image": "keepstep/sidecar:0.1.0",
        "version": "0.1.0",
        "container": "pytorch",
        "job": {
            "api_version": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "name": "gpt",
            "uid": "1a2b3c4d-0000",
        },
    }
    labels = {"training.kubeflow.org/job-name": "gpt"}
    annotations = {"keepstep.dev/policy": "default"}
    if injected:
        labels |= {
            "keepstep.dev/injected": "true",
            "keepstep.dev/run-key": "gpt-1a2b3c4d",
            "keepstep.dev/node-rank": str(node_rank),
        }
        annotations["keepstep.dev/status"] = json.dumps(said)
    return {
        "metadata": {
            "name": f"gpt-worker-{node_rank}",
            "namespace": "team",
            "uid": f"pod-{node_rank}",
            "resourceVersion": "1",
            "creationTimestamp": "2026-11-21T07:00:00Z",
            "labels": labels,
            "annotations": annotations,
            "ownerReferences": [
                {
                    "apiVersion": "kubeflow.org/v1",
                    "kind": "PyTorchJob",
                    "name": "gpt",
                    "uid": "1a2b3c4d-0000",
                    "controller": True,
                }
            ],
            "managedFields": [{"fieldsV1": {"f:metadata": {}}}],
        },
        "spec": {
            "nodeName": f"node-{node_rank}",
            "initContainers": [{"name": "keepstep-sidecar", "env": []}] if injected else [],
            "containers": [
                {
                    "name": "pytorch",
                    "image": "team/train:1",
                    "env": [{"name": "RANK", "value": str(node_rank)}],
                    "command": ["python", "train.py"],
                }
            ],
            "volumes": [
                {"name": "keepstep-memory", "emptyDir": {"medium": "Memory"}},
                {"name": "keepstep-volume-nvme0", "hostPath": {"path": "/mnt/nvme0"}},
            ],
        },
        "status": {
            "phase": "Running",
            "containerStatuses": [
                {"name": "pytorch", "restartCount": 0, "state": {"running": {"startedAt": "x"}}}
            ],
        },
    }
