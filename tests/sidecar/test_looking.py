"""A look at depots is shared by all who ask meanwhile, but not by who asks for what is new."""

from __future__ import annotations

import asyncio

from keepstep.steps import Answer, Epoch, EpochId, Tier
from keepstep_sidecar.depots import DepotStatus, Inventory
from keepstep_sidecar.remotes import Remotes

MET = Epoch(EpochId(1, "0000000a"))


class Peers:
    """Answers when it is let, with what it knew when it was asked."""

    tier = Tier.PEER

    def __init__(self) -> None:
        self.known: tuple[Epoch, ...] = ()
        self.asked = 0
        self.answers = asyncio.Event()

    async def look(self) -> Inventory:
        self.asked += 1
        known = self.known
        await self.answers.wait()
        return Inventory(answer=Answer.NONE, epochs=known)

    def status(self) -> DepotStatus:
        return DepotStatus(tier=Tier.PEER, where="peers")


async def _let_begin(work: asyncio.Task[bool]) -> None:
    for _ in range(5):
        await asyncio.sleep(0)
    assert not work.done()


def test_what_was_asked_before_a_pod_was_named_does_not_answer_for_it() -> None:
    async def story() -> None:
        peers = Peers()
        remotes = Remotes([peers])  # type: ignore[list-item]
        before = asyncio.create_task(remotes.look())
        await _let_begin(before)
        peers.known = (MET,)
        shared, new, newer = (
            asyncio.create_task(remotes.look(anew=anew)) for anew in (False, True, True)
        )
        await _let_begin(new)
        assert peers.asked == 1
        peers.answers.set()
        await asyncio.gather(before, shared, new, newer)
        assert peers.asked == 2, "one look for both who asked after it was named"
        assert remotes.epochs == (MET,)

    asyncio.run(story())
