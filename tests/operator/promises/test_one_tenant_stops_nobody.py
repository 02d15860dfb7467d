"""Whatever one pod of one namespace sends, or opens, the operator goes on for all others."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from pathlib import Path

from tests.harness import until
from tests.operator.injection.pods import policy_body, pytorch_job
from tests.operator.promises.surface import (
    Cluster,
    Operator,
    idle_connections,
    pod,
    policy,
    promised,
    rank,
    reconciler,
    report,
    still_open,
    unfinished_reviews,
    webhook,
)


async def test_the_pace_that_a_reply_asks_for_is_enforced(tmp_path: Path) -> None:
    cluster = Cluster(objects=dict([policy()]))
    token = cluster.bind(pod(0))
    async with reconciler(cluster, tmp_path) as operator:
        told = [await operator.report(report(rank(0, 1)), token=token) for _ in range(20)]
        statuses = [status for status, _ in told]
        assert statuses[0] == 200
        assert statuses.count(429) >= 10, statuses


async def _holds_idle_connections(operator: Operator) -> None:
    memory_mib = operator.memory_mib()
    connections = await idle_connections(operator.url, 300)
    try:
        grown_mib = operator.memory_mib() - memory_mib
        left = f"{still_open(connections)} of 300 stay open, for {grown_mib:.0f} MiB"
        assert grown_mib <= 32, left
        await promised(lambda: still_open(connections) <= 16, left, within_s=6.0)
    finally:
        for one in connections:
            one.close()


async def test_idle_connections_do_not_fill_the_reconciler(tmp_path: Path) -> None:
    async with reconciler(Cluster(), tmp_path) as operator:
        await _holds_idle_connections(operator)


async def test_idle_connections_do_not_fill_admission(tmp_path: Path) -> None:
    async with webhook(tmp_path, policy_body()) as admission:
        await _holds_idle_connections(admission.operator)


async def test_what_strangers_send_as_reviews_does_not_fill_admission(tmp_path: Path) -> None:
    """Whoever reaches the port is read: the API server shows no certificate."""
    async with webhook(tmp_path, policy_body()) as admission:
        before_mib = most_mib = admission.operator.memory_mib()
        senders = await unfinished_reviews(admission.operator.url, 60, sent_bytes=3 << 20)

        def all_are_taken_or_ended() -> bool:
            nonlocal most_mib
            most_mib = max(most_mib, admission.operator.memory_mib())
            return not any(one.transport.get_write_buffer_size() for one in senders)

        await until(all_are_taken_or_ended, what="the bodies")
        created, warnings = await admission.create(pytorch_job())
        assert "keepstep-sidecar" in json.dumps(created), warnings
        for one in senders:
            one.transport.abort()
        assert most_mib - before_mib <= 96, f"{most_mib - before_mib:.0f} MiB"


def _forged(number: int) -> str:
    """As a kubelet's token looks, but signed by nobody."""
    claims = {
        "aud": ["reports.keepstep.dev"],
        "exp": int(time.time()) + 3600,
        "kubernetes.io": {"namespace": "evil", "pod": {"name": "p", "uid": f"u-{number}"}},
    }
    parts = [{"alg": "RS256"}, claims, {"signature": number}]
    encoded = [base64.urlsafe_b64encode(json.dumps(one).encode()) for one in parts]
    return b".".join(one.rstrip(b"=") for one in encoded).decode()


async def test_wrong_tokens_do_not_flood_the_api_server(tmp_path: Path) -> None:
    cluster = Cluster()
    async with reconciler(cluster, tmp_path) as operator:
        wrong = [operator.report(b"{}", token=_forged(number)) for number in range(250)]
        statuses = {status for status, _ in await asyncio.gather(*wrong)}
        assert statuses <= {401, 429}
        reviews = len(cluster.asked("POST", "/tokenreviews"))
        assert reviews <= 60, f"{reviews} TokenReviews for 250 wrong tokens"
