"""A leader with an operator, on a clock of the test: sidecars report, and it posts its run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from keepstep.core.commit_rule import ReportedTier
from keepstep.core.retention import Retention
from keepstep.core.shard import NO_RANKS, Ranks, Shard
from keepstep.leader.leader import Leader
from keepstep.leader.run_report import build_run_report, fit_to_size
from keepstep.steps import Epoch, EpochId, StepId, Tier, TierAnswer
from keepstep.wire.member_reports import (
    MemberReport,
    Report,
    ReportedRanks,
    ReportedRestore,
    ReportReply,
)
from keepstep.wire.run_reports import (
    LARGEST_BYTES,
    LeaderAnswer,
    LeaderRecord,
    MemberPod,
    RunPolicy,
    RunReport,
)
from keepstep_operator.reconcile.reports_api import check_bounds

T0 = 1_790_000_000.0
FIRST = Epoch(EpochId(1, "aaaaaaaa"))
WAY_OUT = "the command"
IMAGE_BYTES = 1 << 20


def step(number: int, epoch: Epoch = FIRST) -> StepId:
    return StepId(epoch.id, number)


def later(number: int, parent: int | None, *, after: Epoch = FIRST) -> Epoch:
    """The epoch `number`, which went on from a step of the one before (None: at step 0)."""
    return Epoch(EpochId(number, "bbbbbbbb"), None if parent is None else step(parent, after))


@dataclass(kw_only=True)
class Sidecar:
    """One sidecar with one rank, in a pod on a node. Change its fields, then `report()`."""

    rank: int
    world: int = 2
    pod: str = ""
    node: str = ""
    started_at: float = T0
    epochs: list[Epoch] = field(default_factory=lambda: [FIRST])
    memory: list[StepId] = field(default_factory=list)
    local: list[StepId] = field(default_factory=list)
    restores: list[ReportedRestore] = field(default_factory=list)
    alive: bool = True
    ready: bool = True
    archive: list[StepId] | None = None
    address: str = ""
    acknowledged: int = 0
    leaving: bool = False
    alike: Ranks = NO_RANKS
    more: dict[str, Any] = field(default_factory=dict)
    sequence: int = 0

    def __post_init__(self) -> None:
        self.pod = self.pod or f"pod-{self.rank}"
        self.node = self.node or f"node-{self.rank}"
        self.address = self.address or f"10.0.0.{self.rank % 256}:9465"

    def staged(self, *numbers: int, epoch: Epoch = FIRST) -> Sidecar:
        self.memory = (self.memory + [step(number, epoch) for number in numbers])[-4:]
        return self

    def durable(self, *numbers: int, epoch: Epoch = FIRST) -> Sidecar:
        self.local += [step(number, epoch) for number in numbers]
        return self

    def saved(self, *numbers: int, epoch: Epoch = FIRST) -> Sidecar:
        return self.staged(*numbers, epoch=epoch).durable(*numbers, epoch=epoch)

    def restored(self, epoch: Epoch, *, tier: Tier | None = Tier.MEMORY, lost: int = 0) -> Sidecar:
        self.epochs.append(epoch)
        event = {"rank": self.rank, "epoch": epoch, "tier": tier, "lost_steps": lost}
        self.restores.append(ReportedRestore(**event, seconds=1.5, at=T0))
        return self

    def report(self) -> MemberReport:
        self.sequence += 1
        report = Report(
            sidecar="0.1.0",
            started_at=self.started_at,
            sequence=self.sequence,
            epochs=tuple(self.epochs),
            ranks=(self._rank(),),
            restores=tuple(self.restores),
            **{
                "ready": self.ready,
                "library": "0.1.0",
                "pinned": "mlock",
                "peer_address": self.address,
                **self.more,
            },
        )
        life = f"{self.pod}-{self.started_at}"
        frame = {"life": life, "pod": self.pod, "node": self.node, "heard": self.acknowledged}
        return MemberReport(nodes=0, report=report, leaving=self.leaving, **frame)

    def _rank(self) -> ReportedRanks:
        local = ReportedTier.from_shards(self._held(self.local, root=True))
        tiers = {
            Tier.MEMORY: ReportedTier.from_shards(self._held(self.memory, root=False)),
            Tier.LOCAL: local if self.ready else replace(local, answer=TierAnswer.UNKNOWN),
        }
        if self.archive is not None:
            tiers[Tier.ARCHIVE] = ReportedTier.from_shards(self._held(self.archive, root=True))
        return ReportedRanks(
            ranks=Ranks.of((self.rank,)),
            world=self.world,
            alive=self.alive,
            staged=max(self.memory, default=None),
            tiers=tiers,
        )

    def _held(self, ids: list[StepId], *, root: bool) -> tuple[Shard, ...]:
        return tuple(
            Shard(
                step_id=step_id,
                rank=self.rank,
                world=self.world,
                root=f"{step_id}/{self.rank}" if root else None,
                size_bytes=IMAGE_BYTES,
                alike=self.alike,
            )
            for step_id in ids
        )


def member(sidecar: Sidecar, **state: Any) -> MemberPod:
    """Its pod, as the operator names it."""
    place = {"node_rank": sidecar.rank, "pod": sidecar.pod, "node": sidecar.node}
    return MemberPod(**place, name=f"worker-{sidecar.rank}", **state)


class Play:
    """A leader, and an operator that answers what `answer` says and keeps the record."""

    def __init__(
        self, *sidecars: Sidecar, record: LeaderRecord | None = None, **policy: Any
    ) -> None:
        plain = {"keep": Retention(last=1), "outlives_pod": True, "restarts": False}
        self.policy = RunPolicy(**{**plain, **policy})
        self.now = T0
        self.record = record or LeaderRecord()
        self.answer = LeaderAnswer(
            complete=True, policy=self.policy, members=tuple(map(member, sidecars))
        )
        self._lives = 0
        self.lead()
        self.deliver(*sidecars)

    def lead(self) -> None:
        """A leader begins. It knows what its own pod was given."""
        self._lives += 1
        own = replace(self.policy, outlives_pod=False)
        life = f"leader-{self._lives}"
        self.leader = Leader(life=life, nodes=None, policy=own, run="gpt", way_out=WAY_OUT)
        self._sequence = 1

    def deliver(self, *sidecars: Sidecar) -> None:
        for sidecar in sidecars:
            self.leader.take(sidecar.rank, sidecar.report(), at=self.now)
        self.leader.draw_conclusions(at=self.now)

    def replies(self, sidecar: Sidecar) -> ReportReply:
        """The newest reply to this member, which acts on it."""
        self.leader.news(sidecar.rank)
        sent = self.leader._members[sidecar.rank].sent
        assert sent is not None
        sidecar.acknowledged = sent.number
        return sent.reply

    def observe(self) -> RunReport:
        """The run now, as it is sent."""
        self.leader.advance_clock(at=self.now)
        self.leader.draw_conclusions(at=self.now)
        found = build_run_report(self.leader, sequence=self._sequence, at=self.now)
        found = fit_to_size(found, lambda report: len(msgspec.json.encode(report)))
        body = msgspec.json.encode(found)
        assert len(body) <= LARGEST_BYTES
        return check_bounds(msgspec.json.decode(body, type=RunReport))

    def post(self, **asked: Any) -> RunReport:
        """The run after the operator was told of it and has answered. `asked`: what it asks from
        now on."""
        self.answer = replace(self.answer, **asked)
        report = self.observe()
        self.record = report.record if self._sequence > 1 else self.record
        record = self.record if self._sequence == 1 else None
        self.leader.handle_operator_answer(replace(self.answer, record=record), at=self.now)
        self._sequence += 1
        return self.observe()

    def wait(self, seconds: float) -> None:
        self.now += seconds
