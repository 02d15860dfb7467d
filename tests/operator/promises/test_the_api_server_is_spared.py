"""What the API server says about itself is heeded: when to come again, and that it is silent."""

from __future__ import annotations

from pathlib import Path

from tests.harness import until
from tests.operator.promises.surface import Cluster, dead_watch_noticed_after_s, reconciler

LATER_S = 3.0


async def test_who_is_told_to_come_later_comes_later(tmp_path: Path) -> None:
    cluster = Cluster(busy_part="/pods", busy_s=LATER_S)
    async with reconciler(cluster, tmp_path):

        def asked_twice() -> bool:
            return bool(cluster.busy_at) and all(len(one) > 1 for one in cluster.busy_at.values())

        await until(asked_twice, what="a second list of pods")
    told = [one for one in cluster.busy_at.values() if len(one) > 1]
    after_s = min(again - first for first, again, *_ in told)
    assert after_s >= LATER_S - 0.1, f"asked again after {after_s:.1f} s instead of {LATER_S}"


def test_a_dead_watch_is_noticed_soon_after_a_missed_bookmark() -> None:
    assert dead_watch_noticed_after_s() <= 90.0
