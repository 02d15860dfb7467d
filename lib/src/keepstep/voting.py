"""The restore collective: all ranks agree on a step, on the epoch that begins, or on an error.

One small `all_gather_object` a round; without torch.distributed the one rank votes alone. A rank
that fails still votes, with its error: otherwise the others would wait for it forever. Every rank
comes to the same decision by the same pure function (`agreement.choose`).
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from keepstep.agreement import choose
from keepstep.errors import KeepstepError, RestoreError, SidecarError
from keepstep.protocol import (
    Candidates,
    CandidatesRequest,
    Opened,
    OpenRequest,
    RestoredRequest,
)
from keepstep.stager import Stager
from keepstep.steps import Epoch, StepId

log = logging.getLogger("keepstep")

T = TypeVar("T")

_OPEN_S = 600.0


@dataclass(frozen=True)
class Agreed:
    """The epoch that begins; its parent is in `opened`, this rank's verified image of it."""

    epoch: Epoch
    opened: Opened | None
    stage_every: int


@dataclass(frozen=True)
class _Ballot:
    candidates: Candidates | None
    nonce: str
    error: str = ""
    inactive: bool = False


class Voter:
    """One rank's part in the collective."""

    def __init__(self, stager: Stager | None, *, rank: int, world: int) -> None:
        self._stager = stager
        self._rank, self._world = rank, world
        self._stage_every = 1

    def decide(self, *, timeout_s: float) -> Agreed | None:
        """Agree with all ranks; None if no rank has a sidecar. Raises RestoreError and kin."""
        ballots = self._gather(self._ballot(timeout_s))
        if all(ballot.inactive for ballot in ballots):
            return None
        self._raise_errors(ballots)
        votes = [ballot.candidates for ballot in ballots if ballot.candidates is not None]
        excluded: set[StepId] = set()
        while True:
            decision = choose(votes, excluded)
            epoch = decision.epoch(ballots[0].nonce)
            if decision.id is None:
                if decision.incomplete and self._rank == 0:
                    log.warning(
                        "keepstep: beginning anew without %s: only some ranks hold it",
                        ", ".join(map(str, decision.incomplete)),
                    )
                return Agreed(epoch, None, self._stage_every)
            opened, error = self._open(decision.id)
            failures = [one for one in self._gather(error) if one]
            if not failures:
                return Agreed(epoch, opened, self._stage_every)
            log.warning("keepstep: step %s is not used: %s", decision.id.step, "; ".join(failures))
            # grows by one a round, on all ranks alike: `choose` raises when nothing is left
            excluded.add(decision.id)

    def together(self, work: Callable[[], T]) -> T:
        """Do `work`; if it fails on any rank, raise on all, so that none trains on alone."""
        result: Any = None
        failure: Exception | None = None
        try:
            result = work()
        except Exception as error:  # whatever it is, the other ranks are waiting
            failure = error
        failures = self._gather(f"rank {self._rank}: {failure}" if failure else "")
        if failure is not None:
            raise failure
        if any(failures):
            raise RestoreError("; ".join(one for one in failures if one))
        return result  # type: ignore[no-any-return]

    def announce(self, agreed: Agreed, *, seconds: float) -> None:
        """Tell the sidecar which epoch began. Raises SidecarError."""
        stager = self._connected()
        stager.link.call(
            "/v1/restored",
            RestoredRequest(
                lease=stager.link.lease,
                epoch=agreed.epoch,
                tier=agreed.opened.tier if agreed.opened else None,
                seconds=seconds,
            ),
            dict,
            timeout_s=60.0,
        )

    def _connected(self) -> Stager:
        if self._stager is None:
            raise KeepstepError("no sidecar")
        return self._stager

    def _ballot(self, timeout_s: float) -> _Ballot:
        nonce = secrets.token_hex(4)
        if self._stager is None:
            return _Ballot(None, nonce, error="KEEPSTEP_SOCKET is not set", inactive=True)
        try:
            granted = self._stager.connect(timeout_s=timeout_s)
            self._stage_every = granted.stage_every
            candidates = self._stager.link.call(
                "/v1/candidates",
                CandidatesRequest(lease=granted.lease, timeout_s=_OPEN_S),
                Candidates,
                timeout_s=_OPEN_S + 10,
            )
        except SidecarError as error:
            return _Ballot(None, nonce, error=str(error))
        return _Ballot(candidates, nonce)

    def _open(self, id: StepId) -> tuple[Opened | None, str]:
        stager = self._connected()
        request = OpenRequest(lease=stager.link.lease, id=id, timeout_s=_OPEN_S)
        try:
            opened = stager.link.call("/v1/restore", request, Opened, timeout_s=_OPEN_S + 10)
        except SidecarError as error:
            return None, f"rank {self._rank}: {error}"
        return opened, ""

    def _raise_errors(self, ballots: list[_Ballot]) -> None:
        errors = [f"rank {rank}: {one.error}" for rank, one in enumerate(ballots) if one.error]
        if errors:
            raise RestoreError("cannot tell what there is to restore: " + "; ".join(errors))

    def _gather(self, mine: T) -> list[T]:
        if self._world == 1:
            return [mine]
        everyone: list[Any] = [None] * self._world
        torch.distributed.all_gather_object(everyone, mine)
        return everyone
