"""A run that is not as expected costs itself what it costs, and nobody else anything."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.operator.promises.surface import (
    Cluster,
    pod,
    policy,
    rank,
    reconciler_here,
    report,
    spoil,
)


@pytest.mark.parametrize("part", ["tick", "checkpoints"])
async def test_a_run_that_raises_does_not_end_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    cluster = Cluster(objects=dict([policy()]))
    poisoned, good = (cluster.bind(pod(0, run=name)) for name in ("poisoned", "good"))
    spoil(monkeypatch, part, "poisoned")
    async with reconciler_here(cluster, tmp_path) as served:
        for token in (poisoned, good, good):
            body = json.dumps(report(rank(0, 1, local=(1,)))).encode()
            status, _ = await served.post(body, token=token)
            assert status == 200
            await asyncio.sleep(1.2)  # a round of each task that looks at all runs
