"""A sidecar's reports are taken however long its run is, whatever others send, and while the API
server is away."""

from __future__ import annotations

import base64
import json
from pathlib import Path

from keepstep_operator.injection import inject
from tests.operator.injection import pods
from tests.operator.promises.surface import (
    Cluster,
    Identities,
    epoch,
    pod,
    policy,
    rank,
    reconciler,
    report,
)


async def test_a_run_reports_after_its_five_thousandth_restart(tmp_path: Path) -> None:
    cluster = Cluster(objects=dict([policy()]))
    token = cluster.bind(pod(0))
    epochs = [{"id": epoch(number + 1, f"{number:08x}")} for number in range(5000)]
    async with reconciler(cluster, tmp_path) as operator:
        status, answer = await operator.report(report(rank(0, 1), epochs=epochs), token=token)
        assert status == 200, answer


async def test_a_reply_carries_the_authority_that_reports_are_to_trust(tmp_path: Path) -> None:
    cluster = Cluster(objects=dict([policy()]))
    token = cluster.bind(pod(0))
    (tmp_path / "ca.crt").write_text(pods.DEFAULTS.reports_ca)  # of the Secret of the certificate
    async with reconciler(cluster, tmp_path) as operator:
        reply = await operator.take(report(rank(0, 1)), token=token)
    assert reply["authorities"] == pods.DEFAULTS.reports_ca


async def test_good_tokens_stay_known_while_wrong_ones_come() -> None:
    identities = Identities()
    good = [f"good-{number}" for number in range(10)]
    for number in range(20_100):
        await identities.known(f"wrong-{number}")
        if number % 1000 == 0:  # they report all the time
            for one in good:
                await identities.known(one)
    asked = [one for one in identities.server.asked if one in good]
    assert len(asked) == len(good), "the API server is asked about good tokens again"


def _token(expires: float) -> str:
    claims = base64.urlsafe_b64encode(json.dumps({"exp": expires}).encode()).decode()
    return f"good.{claims}.signature"


async def test_an_hour_without_the_api_server_ends_no_injected_pods_identity() -> None:
    """The kubelet, which renews a token after four fifths of its life, is cut off, too."""
    identities = Identities()
    injected = inject(pods.pytorch_job(rank=0), pods.policy(), pods.DEFAULTS)
    (volume,) = [one for one in injected["spec"]["volumes"] if one["name"] == "keepstep-token"]
    life_s = volume["projected"]["sources"][0]["serviceAccountToken"]["expirationSeconds"]
    token = _token(identities.now + life_s / 5)
    assert await identities.known(token)
    identities.server.away = True
    for _ in range(120):
        identities.now += 30.0
        assert await identities.known(token)


async def test_known_sidecars_report_through_an_outage_of_the_api_server() -> None:
    identities = Identities()
    token = _token(identities.now + 3600.0)
    known = [await identities.known(token)]
    identities.server.away = True
    for _ in range(5):
        identities.now += 600.0
        known.append(await identities.known(token))
    identities.now += 660.0
    known.append(await identities.known(token))
    assert known == [True] * 6 + [False]
