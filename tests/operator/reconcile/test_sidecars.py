"""Two real sidecars, each with a rank, and a real reconciler between them."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.core.vote import choose
from keepstep.steps import StepId, Tier
from keepstep.wire.trainer import RestoredRequest
from tests.harness import eventually, until
from tests.operator.apiserver import ApiServer, bound_to
from tests.operator.reconcile.pod_bodies import pod_body, pod_path
from tests.operator.reconcile.serving import Served, serving
from tests.sidecar.pods import Pod
from tests.sidecar.trainer import FakeTrainer

RUN = "/apis/keepstep.dev/v1alpha1/namespaces/team/checkpointruns/gpt-1a2b3c4d"
NODES = (0, 1)


def cluster() -> ApiServer:
    made = ApiServer()
    for node in NODES:
        made.objects[pod_path(f"gpt-worker-{node}")] = pod_body(node)
        made.tokens[f"node-{node}"] = bound_to("team", f"gpt-worker-{node}", f"pod-{node}")
    return made


@pytest.fixture
def memory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="keepstep-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def start(served: Served, memory: Path, home: Path) -> list[Pod]:
    url, ca = f"https://127.0.0.1:{served.port}", (home / "tls.crt").read_text()
    return [
        Pod(node, memory=memory / str(node), home=home / str(node), url=url, ca=ca).start()
        for node in NODES
    ]


def train(pods: list[Pod]) -> list[FakeTrainer]:
    """Three steps on both."""
    ranks = [FakeTrainer(pod.socket, rank, len(NODES)) for rank, pod in enumerate(pods)]
    for one in ranks:
        one.begin_run(local_world=1)
    for step in (1, 2, 3):
        stage(ranks, step)
    return ranks


def stage(ranks: list[FakeTrainer], step: int) -> None:
    for one in ranks:
        one.stage(step)


def come_back(pods: list[Pod]) -> tuple[list[FakeTrainer], StepId]:
    """Both trainers died; new ones restore what they agree on."""
    ranks = [FakeTrainer(pod.socket, rank, len(NODES)) for rank, pod in enumerate(pods)]
    for one in ranks:
        one.connect(local_world=1)
    decision = eventually(lambda: _agreed(ranks), what="a step that both hold")
    for one in ranks:
        one.open(decision.id)
    epoch = decision.epoch("00000002")
    for one in ranks:
        told = RestoredRequest(lease=one.lease, epoch=epoch, tier=Tier.MEMORY, seconds=0.2)
        one.call("/v1/restored", told, dict)
    return ranks, decision.id


def history_id(pod: Pod) -> str:
    """'' while the sidecar has not written its history yet."""
    path = pod.root / "history.jsonl"
    return str(json.loads(path.read_text().partition("\n")[0])["id"]) if path.exists() else ""


def _agreed(ranks: list[FakeTrainer]):  # type: ignore[no-untyped-def]
    decision = choose([one.candidates() for one in ranks])
    return decision if decision.id is not None else None


def test_two_sidecars_commit_and_restore_together_and_the_run_tells_of_it(
    tmp_path: Path, memory: Path
) -> None:
    async def play() -> None:
        async with serving(cluster(), tmp_path) as served:
            await until(lambda: not served.parts.ready())
            pods = await asyncio.to_thread(start, served, memory, tmp_path)
            ranks: list[FakeTrainer] = []
            try:
                ranks = await asyncio.to_thread(train, pods)
                await scene(served, pods, ranks)
            finally:
                for one in ranks:
                    one.disconnect()
                for pod in pods:
                    await asyncio.to_thread(pod.end)

    async def scene(served: Served, pods: list[Pod], ranks: list[FakeTrainer]) -> None:
        def status(name: str) -> object:
            return served.cluster.objects.get(RUN, {}).get("status", {}).get(name)

        await until(lambda: status("step") == 3, within_s=20)
        await until(lambda: status("committed"), within_s=20)
        # a pod hears of it with the reply to its next report
        await asyncio.to_thread(stage, ranks, 4)
        await until(lambda: all(pod.published() for pod in pods), within_s=20)
        assert status("world") == 2
        assert status("protected") == "True"
        assert status("phase") == "Running"
        await until(lambda: status("step") == 4, within_s=20)
        for one in ranks:
            one.disconnect()
        ranks[:], step = await asyncio.to_thread(come_back, pods)
        assert step.step == 4
        await until(lambda: status("restarts") == 1, within_s=20)
        assert status("lostSteps") is None or status("lostSteps") == 0
        events = [one.body for one in served.cluster.asked("POST", "/events")]
        (restored,) = {one["note"] for one in events if one["reason"] == "Restored"}
        assert restored == "restored step 4 from memory in 0.20 s; no step lost"
        (tally,) = status("goodput")["tallies"]  # type: ignore[index]
        assert tally["id"] == await until(lambda: history_id(pods[0]), within_s=20)

    asyncio.run(play())
