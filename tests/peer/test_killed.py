"""The receiver is killed at any byte of a copy: what it promised is there, the rest goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from keepstep.steps import TierAnswer
from keepstep.wire.member_reports import Peer
from keepstep_sidecar.tiers.peer import protocol
from keepstep_sidecar.volume import files
from tests.harness import until
from tests.peer.authority import Authority
from tests.peer.nodes import BIG, Node, running, same
from tests.tiers import reading
from tests.tiers.local import durable, gone
from tests.volume.images import empty_slot
from tests.volume.points import FAULT_POINTS

POINTS = [point for point in FAULT_POINTS if point.startswith("peer.")]
Make = Callable[..., Node]
Start = Callable[..., tuple[str, "subprocess.Popen[str]"]]


@pytest.fixture
def receiver(tmp_path: Path, authority: Authority) -> Iterator[Start]:
    """Starts the buddy of node rank 1, with faults; ends it after the test."""
    started: list[subprocess.Popen[str]] = []

    def start(armed: str = "") -> tuple[str, subprocess.Popen[str]]:
        pem = authority.files(1)
        paths = [str(path) for path in (pem.certificate, pem.key, pem.authorities)]
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.peer.receiver", str(tmp_path / "drives"), "1", *paths],
            env={**os.environ, files.FAULTS_ENV: armed},
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        return process.stdout.readline().strip(), process

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def introduce(node: Node, address: str) -> None:
    node.remote_tier.peers_are((Peer(node_rank=1, address=address, buddy=True),))


@pytest.mark.parametrize(
    ("point", "kept"),
    [(point, 0) for point in POINTS if point != "peer.data"]
    + [("peer.data", 0), ("peer.data@4", 3)],
)
async def test_a_copy_resumes_where_the_killed_receiver_stopped(
    node: Make, receiver: Start, point: str, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # one chunk after the other: of several at once, none may be whole when the receiver dies
    monkeypatch.setattr(protocol, "STREAMS", 1)
    here = node(0)
    async with running(here):
        slot, found = here.write(5, rank=0, parameters=BIG)
        name, at, hit = point.partition("@")
        address, dying = receiver(f"{name}:kill{at}{hit}")
        introduce(here, address)
        durable(here.remote_tier, found)
        await until(lambda: dying.poll() is not None, what=f"death at {point}")
        address, _ = receiver()
        introduce(here, address)
        await until(lambda: not here.remote_tier.status().backlog)
        whole = slot.layout.digests_begin
        sent = here.remote_tier.status().sent_bytes
        if point == "peer.data@4":
            assert 0 < sent <= whole - kept * (8 << 20) + (8 << 20)
        elif point not in ("peer.create", "peer.allocate", "peer.data"):
            assert sent == 0, "all chunks had arrived before it died"
        here.volume.delete_step(found.step_id)
        gone(here.remote_tier, [found.step_id])
        seen = await here.remote_tier.scan()
        assert seen.answer is TierAnswer.STEPS
        view = empty_slot(slot.layout)
        await reading.load(here.remote_tier, seen.shards[0], view)
        assert same(view, slot)


async def test_a_partial_copy_of_a_killed_receiver_is_never_offered(
    node: Make, receiver: Start
) -> None:
    here = node(0)
    async with running(here):
        _, found = here.write(5, rank=0, parameters=BIG)
        address, dying = receiver("peer.control-sync:kill")
        introduce(here, address)
        durable(here.remote_tier, found)
        await until(lambda: dying.poll() is not None)
        await until(lambda: here.remote_tier.status().trouble)
        assert here.remote_tier.status().backlog == 1
    buddy = node(1)
    async with running(buddy):
        buddy.knows()
        assert (await buddy.remote_tier.scan()).answer is TierAnswer.NONE
