"""Frames of members that come together are taken in together; each counts as if it came alone."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from keepstep.core.retention import Retention
from keepstep.leader.leader import Leader
from keepstep.steps import Tier
from keepstep.wire.member_reports import LeaderReply
from keepstep.wire.run_reports import RunPolicy
from keepstep_sidecar.concurrency import ChangeNotifier
from keepstep_sidecar.leader.host import _ANSWER_S, Host
from keepstep_sidecar.report.report import reduce_to_changes
from keepstep_sidecar.tiers.peer.member_frames import FrameKind, pack_frame
from tests.harness import until
from tests.leader import runs
from tests.leader.plays import Sidecar, step
from tests.leader.runs import Linked, leading, running
from tests.leader.wire import Raw

POLICY = RunPolicy(keep=Retention(last=1), outlives_pod=True, restarts=False)


def hosting(leader: runs.Leader) -> Host:
    host = Host(Leader(life="leader", nodes=None, policy=POLICY), ChangeNotifier())
    leader.hub.take, leader.hub._gone = host.receive_member_frame, host.handle_disconnect
    return host


def frame(sidecar: Sidecar, *local: int) -> bytes:
    return msgspec.json.encode(sidecar.durable(*local).report())


def answered(member: Linked) -> int:
    replies = [msgspec.json.decode(body, type=LeaderReply) for body in member.frames]
    return max((reply.answers for reply in replies), default=0)


async def test_the_last_report_of_a_disconnected_member_is_processed_before_it_is_removed() -> None:
    async with leading() as leader:
        host, linked, sidecar = hosting(leader), Linked(leader.address), Sidecar(rank=1)
        async with running(linked):
            await until(lambda: linked.link.connected)
            linked.link.send(frame(sidecar, 7))
            await until(lambda: host.leader.connected == [1])
            (member,) = leader.hub
            host.receive_member_frame(member, frame(sidecar, 8))
            member.close("it goes")
            await until(lambda: host.leader.connected == [])
            assert {
                step_id.step for step_id in host.leader.ledger.list_steps_on_node_volumes(1)
            } == {7, 8}


async def test_later_frames_of_a_refused_member_are_ignored() -> None:
    async with leading() as leader:
        host, sidecar = hosting(leader), Sidecar(rank=1)
        with await asyncio.to_thread(Raw, leader.address) as raw:
            frames = (b"{}", frame(sidecar, 7), frame(sidecar, 8))
            raw.secure.sendall(b"".join(pack_frame(FrameKind.MESSAGE, body) for body in frames))
            assert "missing required field" in await asyncio.to_thread(raw.refusal)
            await asyncio.sleep(0.2)
        assert not host.leader.ledger.list_steps_on_node_volumes(1)


async def test_an_error_in_one_report_does_not_affect_the_other_reports_of_the_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with leading() as leader:
        host, errors = hosting(leader), list[Any]()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        take = host.leader.take

        def fails_for_one(node_rank: int, report: Any, **how: Any) -> Any:
            if node_rank == 1:
                raise KeyError("an error")
            return take(node_rank, report, **how)

        monkeypatch.setattr(host.leader, "take", fails_for_one)
        linked = [Linked(leader.address, node_rank=rank) for rank in (1, 2)]
        async with running(*linked):
            await until(lambda: all(member.link.connected for member in linked))
            for rank, member in enumerate(linked, 1):
                member.link.send(frame(Sidecar(rank=rank, world=3), 7))
            await until(lambda: answered(linked[1]) == 1)
            await until(lambda: not linked[0].link.connected)
        assert [str(error["exception"]) for error in errors] == ["'an error'"]
        assert host.leader.ledger.core.held_ranks_bitmap(2, Tier.LOCAL) == 1 << 2


async def test_a_commit_is_sent_to_each_member_in_one_frame() -> None:
    async with leading() as leader:
        host, own = hosting(leader), Sidecar(rank=0, world=3).saved(7, 8)
        host.take_own_report(own.report())
        members = [Sidecar(rank=rank, world=3).saved(7) for rank in (1, 2)]
        linked = [Linked(leader.address, node_rank=member.rank) for member in members]
        async with running(*linked):
            await until(lambda: all(member.link.connected for member in linked))
            known = [member.report() for member in members]
            for link, report in zip(linked, known, strict=True):
                link.link.send(msgspec.json.encode(report))
            await until(lambda: all(answered(link) == 1 for link in linked))
            await asyncio.sleep(2 * _ANSWER_S)  # all that follows from their coming is told
            before = [len(link.frames) for link in linked]
            for link, member, report in zip(linked, members, known, strict=True):
                context = member.saved(8).report()
                context = replace(context, report=reduce_to_changes(report.report, context.report))
                assert context.report.since
                link.link.send(msgspec.json.encode(context))
            await until(lambda: all(answered(link) == 2 for link in linked))
            await asyncio.sleep(2 * _ANSWER_S)  # nothing more comes
            assert host.leader.ledger.find_newest_committed() == step(8)
            assert [len(link.frames) for link in linked] == [count + 1 for count in before]
