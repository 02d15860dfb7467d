"""Memory and CPU of the reconciler grow with ranks that train, slowly; with nothing else."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean

from tests.harness import until
from tests.operator.promises.surface import (
    Body,
    Cluster,
    Operator,
    changed,
    foreign_pod,
    pod,
    policy,
    rank,
    reconciler,
    report,
)

PODS = 10
MEASURED = 6
"""Pods of a run whose reports are measured."""
TURNS = 5
"""Reports of each of them."""


def _ranks(node_rank: int, ranks: int, world: int, step: int) -> list[Body]:
    """What a pod's ranks hold: four images in memory, two on local."""
    first = node_rank * ranks
    memory, local = (step, step - 1, step - 2, step - 3), (step // 10 * 10, step // 10 * 10 - 10)
    return [rank(one, world, memory=memory, local=local) for one in range(first, first + ranks)]


async def test_a_rank_takes_little_memory(tmp_path: Path) -> None:
    cluster = Cluster(objects=dict([policy()]))
    sizes = {"few": 1, "many": 64}
    tokens = {
        f"{size}-{run}": [cluster.bind(pod(number, run=f"{size}-{run}")) for number in range(PODS)]
        for size in sizes
        for run in range(3)
    }
    async with reconciler(cluster, tmp_path) as operator:
        await until(lambda: operator.knows(2 * 3 * PODS), what="all pods")
        taken_mib = []
        for size, ranks in sizes.items():
            before_mib = operator.memory_mib()
            for run in range(3):
                for number, token in enumerate(tokens[f"{size}-{run}"]):
                    told = _ranks(number, ranks, PODS * ranks, 100)
                    await operator.take(report(*told), token=token)
            taken_mib.append(operator.memory_mib() - before_mib)
        few_mib, many_mib = taken_mib
        rank_kib = (many_mib - few_mib) * 1024 / (3 * PODS * 63)
        assert rank_kib <= 2.0, f"{rank_kib:.1f} KiB a rank ({few_mib:.0f}, {many_mib:.0f} MiB)"


Says = Callable[[int, int], list[Body]]
"""What the pod of a number says of its ranks in its first and its second report."""


def _bind(cluster: Cluster, run: str) -> list[str]:
    return [cluster.bind(pod(number, run=run)) for number in range(MEASURED)]


async def _costs(operator: Operator, runs: list[tuple[list[str], Says]]) -> list[float]:
    """Calls of a pod's report in each run, which tells what has changed, beyond that of one which
    says nothing, as those of the first run do. Of each pod the cheapest one: what the reconciler
    does beside a report is not in that."""
    spent_in: list[list[list[int]]] = [[] for _ in runs]
    before: dict[str, Body] = {}
    for turn in range(TURNS):
        for (tokens, says), spent in zip(runs, spent_in, strict=True):
            told = {one: report(*says(number, turn)) for number, one in enumerate(tokens)}
            bodies = {one: changed(before[one], told[one]) for one in told} if turn else told
            before |= told
            calls = [operator.calls()]
            for token, body in bodies.items():
                await operator.take(body, token=token)
                calls.append(operator.calls())
            spent.append([after - begun for begun, after in itertools.pairwise(calls)])
        await asyncio.sleep(1.1)  # no pod reports more often than each second
    # the first ones tell everything
    cheapest = [mean(map(min, zip(*spent[1:], strict=True))) for spent in spent_in]
    return [one - cheapest[0] for one in cheapest[1:]]


def _nothing(number: int, turn: int) -> list[Body]:
    return []


async def test_a_long_run_with_many_archived_steps_reports_as_cheaply(tmp_path: Path) -> None:
    def with_archive(archived: int) -> Says:
        archive = tuple(1000 * (number + 1) for number in range(archived))
        told = {name: one for name, one in rank(archive=archive).items() if "archive" in name}

        def says(number: int, turn: int) -> list[Body]:
            ranks = _ranks(number, 8, 8 * MEASURED, 1_000_000 + 10 * turn)
            return [one | told for one in ranks]

        return says

    cluster = Cluster(objects=dict([policy()]))
    runs = [(_bind(cluster, "idle"), _nothing)]
    runs += [(_bind(cluster, f"kept-{one}"), with_archive(one)) for one in (3, 120)]
    async with reconciler(cluster, tmp_path, counted=True) as operator:
        await until(lambda: operator.knows(3 * MEASURED), what="all pods")
        few, many = await _costs(operator, runs)
        assert many <= 3 * few, f"{many:.0f} calls instead of {few:.0f}"


async def test_a_report_costs_the_same_in_a_large_run(tmp_path: Path) -> None:
    cluster = Cluster(objects=dict([policy()]))
    runs, others = [(_bind(cluster, "idle"), _nothing)], {}
    for size in (1, 640):
        world, run = 8 * (MEASURED + size), f"of-{size}"
        runs.append((_bind(cluster, run), partial(_of_a_world, world)))
        for number in range(8):
            ranks = range(8 * MEASURED + number * size, 8 * MEASURED + (number + 1) * size)
            token = cluster.bind(pod(MEASURED + number, run=run))
            others[token] = [rank(one, world, local=(1_000_000,)) for one in ranks]
    async with reconciler(cluster, tmp_path, counted=True) as operator:
        await until(lambda: operator.knows(3 * MEASURED + 16), what="all pods")
        for token, told in others.items():
            await operator.take(report(*told), token=token)
        small, large = await _costs(operator, runs)
        assert large <= 1.6 * small, f"{large:.0f} calls instead of {small:.0f}"


def _of_a_world(world: int, number: int, turn: int) -> list[Body]:
    return _ranks(number, 8, world, 1_000_000 + 10 * turn)


async def test_pods_of_others_take_no_memory(tmp_path: Path) -> None:
    alone, beside = Cluster(), Cluster(objects=dict(foreign_pod(one) for one in range(1500)))
    async with (
        reconciler(alone, tmp_path / "alone") as one,
        reconciler(beside, tmp_path / "beside") as other,
    ):
        await asyncio.gather(_listed(one, alone), _listed(other, beside))
        grown_mib = other.memory_mib() - one.memory_mib()
        assert grown_mib <= 12, f"{grown_mib:.0f} MiB for 1,500 pods of others"


async def _listed(operator: Operator, cluster: Cluster) -> None:
    """Wait until it has seen all pods that it looks at."""
    await until(lambda: sum('"following"' in line for line in operator.log) >= 3, what="lists")
    await until(lambda: "batch.kubernetes.io/job-name" in str(cluster.requests), what="jobs")
