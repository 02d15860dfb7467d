"""What a restart of a run would do now, as far as reports show.

The ranks decide by their own vote (`keepstep.core.vote`). This is the same decision over what their
sidecars reported, for whoever tells people about a run before it restarts: the tests compare both.
"""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.core.holding import bits
from keepstep.core.ledger import Ledger
from keepstep.core.vote import is_early
from keepstep.steps import EpochId, StepId, StrEnum


class Restart(StrEnum):
    """What a restart does: go on from a step, begin because nothing was kept, begin again because
    what was kept is gone for good, or wait for what may come back."""

    GOES_ON = "goes-on"
    BEGINS = "begins"
    BEGINS_AGAIN = "begins-again"
    WAITS = "waits"


@dataclass(frozen=True)
class Outlook:
    """`step`: the step that the restart goes on from; for `BEGINS_AGAIN` and `WAITS`, the newest
    step of which anything is left."""

    restart: Restart
    step: StepId | None = None


def outlook(ledger: Ledger, *, world: int, fleeting: bool) -> Outlook:
    """What a restart of `world` ranks would do now.

    `fleeting`: what is out of reach went with its pod or its drive, and the run may begin again.
    """
    if (step := ledger.restart_step(world=world or None)) is not None:
        return Outlook(Restart.GOES_ON, step)
    left = [
        (id, held)
        for id in ledger.steps
        if ledger.lineage.restorable(id)
        for held in ledger.copies(id)
    ]
    if not left:
        return Outlook(Restart.BEGINS)
    newest = max(id for id, _ in left)
    if fleeting:
        return Outlook(Restart.BEGINS_AGAIN, newest)
    by_rank: dict[tuple[int, EpochId], set[int]] = {}
    for id, held in left:
        for rank in bits(held.ranks):
            by_rank.setdefault((rank, id.epoch), set()).add(id.step)
    same_world = all(held.place[2] == world for _, held in left)
    early = same_world and all(map(is_early, by_rank.values()))
    return Outlook(Restart.BEGINS if early else Restart.WAITS, newest)
