"""Who is let in, and what a stranger is told; nothing is deleted because of one."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from keepstep.errors import UsageError
from keepstep.steps import TierAnswer
from keepstep_sidecar.config.sidecar import PeerSettings
from keepstep_sidecar.tiers.peer.tls import PodIdentity
from keepstep_sidecar.volume.run_tree import scan_shards
from tests.harness import until
from tests.peer.authority import Authority, FileCredentials, Files
from tests.peer.nodes import Node, running
from tests.tiers.local import durable
from tests.volume.images import RUN

Make = Callable[..., Node]


def test_an_identity_with_any_names_survives_a_round_trip() -> None:
    odd = PodIdentity(namespace="a/b", run="gpt 100% ü", node_rank=12)
    assert PodIdentity.parse(odd.uri) == odd
    names = "keepstep://a/b"
    odd_spellings = (
        f"{names}/0\n",
        f"{names}/00",
        f"{names}/\u0661",
        f"{names}/0/1",
        "keepstep://%61/b/0",
    )
    for wrong in ("keepstep://a/b", "keepstep://a/b/x", "https://a/b/0", *odd_spellings):
        with pytest.raises(ValueError, match="identity"):
            PodIdentity.parse(wrong)


def strangers(tmp_path: Path, authority: Authority) -> dict[str, tuple[Files, str]]:
    other = Authority(tmp_path / "certificates", "others")
    fake = other.files(1)
    return {
        "another run": (authority.files(1, run="bert"), "of run team/bert"),
        "another namespace": (authority.files(1, namespace="else"), "of run else/gpt"),
        "an expired certificate": (authority.files(1, ends=-timedelta(minutes=1)), "expired"),
        "another authority": (
            dataclasses.replace(fake, authorities=authority.files(1).authorities),
            "unknown ca|unable to get local issuer|certificate is refused",
        ),
    }


@pytest.mark.parametrize(
    "kind", ["another run", "another namespace", "an expired certificate", "another authority"]
)
async def test_a_peer_without_a_valid_certificate_is_refused_in_both_directions_with_the_reason(
    node: Make, authority: Authority, tmp_path: Path, kind: str
) -> None:
    files, why = strangers(tmp_path, authority)[kind]
    pod = node(0)
    stranger = Node(tmp_path / "strange", 1, files)
    stranger.knows(pod, buddies=(pod,))
    pod.knows(stranger)
    pod.write(3, rank=0)
    async with running(pod, stranger):
        _, found = stranger.write(5, rank=1)
        durable(stranger.remote_tier, found)
        await until(lambda: stranger.remote_tier.status().trouble)
        seen, own = await stranger.remote_tier.scan(), await pod.remote_tier.scan()
    # both sides refuse, whoever calls
    for inventory in (seen, own):
        assert (inventory.answer, inventory.shards) == (TierAnswer.UNKNOWN, ())
    assert any(text in seen.reason for text in why.split("|")) or "alert" in seen.reason
    assert any(text in own.reason for text in why.split("|")), own.reason
    assert pod.copies() == []
    assert [found.step_id.step for found in scan_shards(pod.root, run=RUN).shards] == [3]
    assert [found.step_id.step for found in scan_shards(stranger.root, run=RUN).shards] == [5]


async def test_a_peer_at_the_address_of_another_one_is_refused(node: Make) -> None:
    here, two = node(0), node(2)
    two.node_rank = 1  # as an operator says that has not seen yet who is there now
    here.knows(two)
    async with running(here, two):
        assert (
            "is node rank 2 of run team/gpt, not node rank 1"
            in (await here.remote_tier.scan()).reason
        )


async def test_new_certificates_are_used_from_the_next_connection_on(
    node: Make, authority: Authority
) -> None:
    here, other = node(0), node(1)
    here.knows(other)
    async with running(here, other):
        assert (await here.remote_tier.scan()).answer is TierAnswer.NONE
        expired = authority.files(0, ends=-timedelta(minutes=1))
        shutil.copy(expired.certificate, here.files.certificate)
        # half of a new pair: the old one stays
        assert (await here.remote_tier.scan()).answer is TierAnswer.NONE
        shutil.copy(expired.key, here.files.key)
        assert "expired" in (await here.remote_tier.scan()).reason
        good = authority.files(0)
        shutil.copy(good.key, here.files.key)
        shutil.copy(good.certificate, here.files.certificate)
        assert (await here.remote_tier.scan()).answer is TierAnswer.NONE


def test_unusable_certificates_are_refused_at_start(authority: Authority) -> None:
    none, two = authority.files(0, uris=["https://example"]), authority.files(1)
    with pytest.raises(UsageError, match="exactly one keepstep://"):
        FileCredentials(none)
    with pytest.raises(UsageError, match="are unusable"):
        FileCredentials(dataclasses.replace(two, key=none.key))
    with pytest.raises(UsageError, match="cannot read"):
        FileCredentials(dataclasses.replace(two, key=two.key.with_name("absent")))


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(UsageError):
        PeerSettings(listen="nowhere")


async def test_a_scan_answers_unknown_until_the_peers_are_known(
    node: Make, authority: Authority
) -> None:
    first, away = node(0), node(1)
    await away.remote_tier.close()  # nobody listens there any more
    first.knows(away)
    async with running(first):
        seen = await first.remote_tier.scan()
        assert seen.answer is TierAnswer.UNKNOWN
        assert seen.reason.startswith("node rank 1: ")
        first.knows()
        assert (await first.remote_tier.scan()).answer is TierAnswer.NONE
    away.volume.close()
