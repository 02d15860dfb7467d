"""Which pod is whose buddy, and what is sent next. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from keepstep.steps import StepId


def buddies(own: int, others: Iterable[int], replicas: int) -> list[int]:
    """The next `replicas` node ranks after `own`, in a ring. So every pod keeps as many copies as
    it sends, and the loss of two neighbours costs the copies of one pod, not of several."""
    known = sorted(set(others) - {own})
    after = [rank for rank in known if rank > own] + [rank for rank in known if rank < own]
    return after[:replicas]


def better(one: StepId, other: StepId | None) -> StepId:
    """Which of two steps to send when the link cannot keep up: the one on the coarser grid.

    Every pod chooses by itself, and a step survives a node only if all its shards were sent. So
    pods that skip steps must skip the same ones. They choose the step of the later epoch, then the
    one with the most trailing zeros in binary, then the newer one.
    """
    return one if other is None or _merit(one) > _merit(other) else other


def _merit(id: StepId) -> tuple[int, int, StepId]:
    zeros = (id.step & -id.step).bit_length() if id.step else 64
    return id.epoch.number, zeros, id
