"""`KEEPSTEP_ON_LOSS`: what a run does when a part of every step is lost."""

from __future__ import annotations

from keepstep.steps import StrEnum


class OnLoss(StrEnum):
    """`WAIT`: the storage may come back. `RESTART`: what a pod kept goes with that pod for good, so
    the run begins again."""

    WAIT = "wait"
    RESTART = "restart"
