"""A minute of 200 runs with 2,000 pods, one rank each, in simulated time: prints what it cost.

    python -m tests.operator.reconcile.load [RUNS] [PODS OF A RUN] [RANKS OF A POD]

Reports come as often as the replies allow, each with a new step; statuses are rendered as the
writer would, and counted instead of sent.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path

import msgspec

from keepstep.core.shard import Shard
from keepstep.steps import StepId, Tier
from keepstep.wire.reports import Report, ReportedRank
from keepstep_operator.api.model import RunKey
from keepstep_operator.api.run import as_json
from keepstep_operator.reconcile import main  # all that the process imports
from keepstep_operator.reconcile.parsing import parse_pod_record, parse_policy_record
from keepstep_operator.reconcile.ratelimit import Pacer, Throttle
from keepstep_operator.reconcile.state.actions import EmitEvent, WriteStatus
from keepstep_operator.reconcile.state.registry import Registry
from keepstep_operator.reconcile.writers.status_writer import status_of
from tests.operator.reconcile.samples import FIRST, T0, listed, pod_body

SECONDS = 60


def body_of(run: int, index: int) -> dict[str, object]:
    body = pod_body(index)
    body["metadata"]["uid"] = f"00000000-0000-4000-8000-{run:06d}{index:06d}"
    body["metadata"]["name"] = f"train-{run}-worker-{index}"
    body["metadata"]["labels"]["keepstep.dev/run-key"] = f"train-{run}-1a2b3c4d"
    return body


def report_of(index: int, ranks: int, world: int, number: int) -> bytes:
    """What a sidecar would send: four images in memory, two steps on local."""
    memory = [StepId(FIRST.id, max(1, number - back)) for back in range(4)]
    local = [StepId(FIRST.id, number // 10 * 10 + 10 - back) for back in (0, 10)]
    told = tuple(
        ReportedRank(
            rank=rank,
            world=world,
            alive=True,
            tiers={
                Tier.MEMORY: listed(
                    Shard(step_id=id, rank=rank, world=world, written_at=T0)
                    for id in dict.fromkeys(memory)
                ),
                Tier.LOCAL: listed(
                    Shard(
                        step_id=id,
                        rank=rank,
                        world=world,
                        root=f"{rank:032x}",
                        params_digest=f"{rank:032x}",
                    )
                    for id in local
                    if id.step > 0
                ),
            },
            staged=memory[0],
        )
        for rank in range(index * ranks, (index + 1) * ranks)
    )
    return msgspec.json.encode(
        Report(
            sidecar="0.1.0",
            started_at=T0,
            sequence=number,
            sent_at=T0,
            ready=True,
            library="0.1.0",
            pinned="locked",
            epochs=(FIRST,),
            ranks=told,
        )
    )


def simulate(runs: int, pods: int, ranks: int, *, seconds: int = SECONDS) -> dict[str, float]:
    """Costs of a simulated minute."""
    assert main.Reconciler
    registry, pacer, throttle = Registry(), Pacer[RunKey](), Throttle()
    policy = {
        "metadata": {"name": "default", "namespace": "team", "generation": 1},
        "spec": {"memory": {"limit": "1Gi"}, "volumes": [{"name": "a", "emptyDir": {}}]},
    }
    registry.policy_seen(parse_policy_record(policy, allowed_paths=()))
    uids = []
    for run in range(runs):
        for index in range(pods):
            record = parse_pod_record(body_of(run, index))
            assert record is not None
            registry.pod_seen(record, at=T0)
            uids.append((record.uid, index))
    decode = msgspec.json.Decoder(Report).decode
    reports = writes = events = status_bytes = 0
    spent = 0.0
    gap_s = {uid: 1.0 for uid, _ in uids}
    reported = {uid: T0 - place / len(uids) for place, (uid, _) in enumerate(uids)}
    for tenth in range(seconds * 10):
        at = T0 + tenth / 10
        due = [one for one in uids if at - reported[one[0]] >= gap_s[one[0]]]
        bodies = [report_of(index, ranks, pods * ranks, 1 + tenth) for _, index in due]
        begun = time.process_time()
        for (uid, _), body in zip(due, bodies, strict=True):
            reported[uid] = at
            for action in registry.reported(uid, decode(body), at=at):
                if isinstance(action, WriteStatus):
                    pacer.mark(action.run, at=at, soon=action.soon)
                elif isinstance(action, EmitEvent):
                    thing = (action.reason, action.topic)
                    events += throttle.allows(action.run, thing, period_s=action.period_s, at=at)
            reply = registry.reply(uid, at=at)
            gap_s[uid] = reply.least_gap_s
            msgspec.json.encode(reply)
        if tenth % 10 == 0:
            list(registry.tick(at=at))
        for key in pacer.take(at=at):
            status = status_of(registry, key, at=at)
            assert status is not None
            writes += 1
            status_bytes += len(msgspec.json.encode(as_json(status)))
        spent += time.process_time() - begun
        reports += len(due)
    gc.collect()
    return {
        "reports": reports,
        "status_writes": writes,
        "events": events,
        "status_bytes_each": round(status_bytes / max(1, writes)),
        "milliseconds_per_report": round(spent / max(1, reports) * 1000, 3),
        "cores": round(spent / seconds, 3),
        "least_gap_s": round(max(gap_s.values()), 1),
        "peak_rss_mib": round(_peak_rss_kib() / 1024, 1),
    }


def _peak_rss_kib() -> int:
    """Of this program: getrusage would count what the process was before it became this one."""
    status = Path("/proc/self/status").read_text()
    (line,) = [one for one in status.splitlines() if one.startswith("VmHWM:")]
    return int(line.split()[1])


if __name__ == "__main__":
    sizes = [int(one) for one in sys.argv[1:]] or [200, 10, 1]
    print(json.dumps(simulate(*sizes)))
