"""The restore collective: all ranks agree on a step, on the epoch that begins, or on an error.

Each round is one small `all_gather_object`; without torch.distributed, the one rank votes alone. A
rank that fails still votes, with its error: otherwise the others would wait for it forever. Every
rank comes to the same decision with the same pure function (`core.restore_vote.choose_step`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import platform
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any, NamedTuple, TypeVar

import torch

from keepstep.client.session import SidecarClient, SidecarSession
from keepstep.core.restore_vote import (
    Candidates,
    Decision,
    choose_step,
    find_step_limit,
    nothing_is_kept,
)
from keepstep.core.suspicion import WITHIN
from keepstep.errors import (
    CoverageError,
    KeepstepError,
    MismatchError,
    RestoreError,
    SidecarError,
    UsageError,
    few,
)
from keepstep.restore.rank_restore import RankRestore
from keepstep.steps import Epoch, StepId, Tier
from keepstep.wire.trainer import (
    CandidatesRequest,
    LeaseGranted,
    RestoredRequest,
    VoteRefusedRequest,
)

log = logging.getLogger("keepstep")

T = TypeVar("T")

_CANDIDATES_S = 600.0
_REFUSED_S = 5.0
_REASON = 2000  # characters
_RANKS_NAMED = 8
_INTERRUPTED_S = 2.0
_BEGINS_S = 0.5
FIRST_S = 10.0
EVERY_S = 30.0
_AWAY = ("absent", "no-lease", "starting", "stopping")
"""What a sidecar that is started again just then is known by."""
_COMEBACKS = 3
_COMES_BACK_S = 30.0

Begin = Callable[[Decision], RankRestore]
"""Makes this rank's restore of the step that was decided on."""

Connect = Callable[[], LeaseGranted]
"""Takes this rank's lease. Raises SidecarError."""

Gather = Callable[[Any], list[Any]]
"""Gathers one value of every rank on all ranks, in rank order."""


class AgreedEpoch(NamedTuple):
    """The epoch that begins. `restoring` restored its parent step; None if there was nothing to
    restore."""

    epoch: Epoch
    restoring: RankRestore | None = None

    @property
    def rank_source_tier(self) -> Tier | None:
        """The tier from which this rank's bytes came."""
        return self.restoring.tier if self.restoring is not None else None


class RunWithoutSidecar(NamedTuple):
    """There was nothing to restore, and nothing can be kept. `reason`: which ranks have no sidecar;
    '' if no rank has one."""

    reason: str = ""


class _Failure(NamedTuple):
    """Why a stage failed on a rank. `again`: whether another step may succeed. `mismatch`: model
    and checkpoint disagree, and will at the next start. `away`: the sidecar was not there."""

    text: str
    again: bool
    mismatch: bool = False
    away: bool = False


class _Ballot(NamedTuple):
    """The vote of one rank.

    `packed`: the rank's `Candidates`, packed. Most ranks send identical bytes, which are unpacked
    once. `without`: the name of the machine if it has no sidecar, for example because admission did
    not answer when the pod was created. `step`: the step that the script asks for.
    """

    packed: bytes | None
    nonce: str
    error: str = ""
    without: str = ""
    step: int | None = None


class Collective:
    """The part of one rank in the collective."""

    def __init__(
        self,
        session: SidecarSession | None,
        *,
        rank: int,
        world: int,
        step: int | None = None,
        quiet: bool = False,
    ) -> None:
        """`step`: the step to go back to; None for the newest. `quiet`: log nothing of a decision,
        which another collective logs. `doing`: what takes time at the moment."""
        self._quiet = quiet
        self.doing = "waiting until all ranks have called it"
        self._session = session
        self._rank, self._world, self._step = rank, world, step

    def restore(
        self,
        connect: Connect,
        begin: Begin,
        *,
        meet: Callable[[Gather], None],
        begin_fresh: Callable[[Gather], None],
    ) -> AgreedEpoch | RunWithoutSidecar:
        """Agree with all ranks on a step, and restore it.

        A step that some rank cannot restore is left out, and all ranks vote again. If some ranks
        have no sidecar, the run may begin unkept, but may not go on from a step. `meet` is called
        before the step is chosen, once all ranks can gather; it agrees on what each rank has.
        `begin_fresh` is called if there is nothing to restore. If any rank fails, RestoreError or a
        related error is raised on all ranks, so that none trains on alone.
        """
        if self._world == 1 and self._session is not None:
            # there is only this rank: it lays out its state while the sidecar looks for steps
            ballot: Future[_Ballot] = Future()
            thread = _beside(ballot, lambda: self._ballot(connect))
            try:
                thread.start()
                meet(self._gather)
                ballots = [ballot.result()]
            except Exception:
                ballot.exception()  # wait, so that closing finds the lease taken or not
                raise
            except BaseException:  # Ctrl-C: nothing goes on behind the back of the script
                with self._session.interrupt_calls():
                    # the interrupt may have come before the thread began
                    wait([ballot], timeout=_INTERRUPTED_S if thread.is_alive() else _BEGINS_S)
                raise
        else:
            ballots = self._gather(self._ballot(connect))
        self._check_same_step(ballots)
        if all(ballot.without for ballot in ballots):
            if self._step is None:
                return RunWithoutSidecar()
            raise RestoreError(
                f"going back to step {self._step} was asked for, but no rank has a sidecar"
                " (KEEPSTEP_SOCKET is not set): start the training with `keepstep run -- ...`"
            )
        self._raise_errors(ballots)
        votes = _votes(ballots)
        if reason := _without(ballots):
            if self._step is None and nothing_is_kept(votes):
                return RunWithoutSidecar(reason)
            raise RestoreError(f"this run may have steps, so it does not begin again: {reason}")
        if self._world > 1:
            meet(self._gather)
        excluded: set[StepId] = set()
        failures: list[str] = []
        comebacks = _COMEBACKS
        while True:
            decision = self._choose(votes, excluded, failures)
            epoch = decision.make_epoch(ballots[0].nonce)
            for text in _news(decision, votes) if self._rank == 0 and not self._quiet else ():
                log.warning("keepstep: %s [restore.step_chosen]", text)
            if decision.id is None:
                begin_fresh(self._gather)
                return AgreedEpoch(epoch)
            restoring = begin(decision)
            self.doing = f"bringing step {decision.id.step} back from {restoring.tier}"
            failed = self._together(restoring)
            if not failed:
                return AgreedEpoch(epoch, restoring)
            failures = [failure.text for failure in failed]
            if comebacks and any(failure.away for failure in failed):
                # the step itself is whole: the sidecar that was to bring it was started again
                comebacks -= 1
                log.warning(
                    "keepstep: step %s is asked for again, because a sidecar went away: %s"
                    " [restore.sidecar_absent]",
                    *(decision.id.step, "; ".join(failures)),
                )
                if self._session is not None:
                    self._session.await_connection(timeout_s=_COMES_BACK_S)
                continue
            log.warning(
                "keepstep: step %s is not used: %s [restore.step_refused]",
                *(decision.id.step, "; ".join(failures)),
            )
            # grows by one each round, the same on all ranks: `choose_step` raises when no step is
            # left
            excluded.add(decision.id)

    def _choose(
        self, votes: list[Candidates], excluded: set[StepId], failures: list[str]
    ) -> Decision:
        try:
            limit, exact = find_step_limit(votes, self._step)
            return choose_step(votes, excluded, limit=limit, exact=exact)
        except RestoreError as error:
            text = f"{error}. The last attempt: {'; '.join(failures)}" if failures else str(error)
            if self._session is not None and not self._quiet:
                report_refusal(self._session, text)
            if not failures:
                raise
            raise type(error)(text) from error

    def _together(self, restoring: RankRestore) -> list[_Failure]:
        """Go through all stages; each begins once all ranks have finished the one before.

        Returns why this step must be tried again, or another one. Raises, on all ranks, an error
        that no other step can avoid.
        """
        values: list[Any] = [None] * self._world
        for stage in restoring.stage_functions:
            error, failure, value = None, None, None
            try:
                value = stage(values)
            except Exception as caught:  # of any kind: the other ranks are waiting
                error = caught
                again = isinstance(caught, SidecarError | CoverageError)
                mismatch = isinstance(caught, MismatchError)
                away = isinstance(caught, SidecarError) and caught.code in _AWAY
                failure = _Failure(f"rank {self._rank}: {caught}", again, mismatch, away)
            answers = self._gather((value, failure))
            failures = [failure for _, failure in answers if failure is not None]
            if any(not failure.again for failure in failures):
                if error is not None:
                    raise error
                kind = (
                    MismatchError if any(failure.mismatch for failure in failures) else RestoreError
                )
                raise kind("; ".join(failure.text for failure in failures))
            if failures:
                return failures
            values = [value for value, _ in answers]
        return []

    def report_epoch_to_sidecar(self, agreed: AgreedEpoch, *, seconds: float) -> None:
        """Tell the sidecar which epoch began. Raises SidecarError."""
        if self._session is None:
            raise KeepstepError("no sidecar")
        report_epoch_begin(
            self._session, agreed.epoch, agreed.rank_source_tier, seconds=seconds, asked=self._step
        )

    def _ballot(self, connect: Connect) -> _Ballot:
        """Take this rank's lease, and ask what it could restore."""
        mine = _Ballot(None, os.urandom(4).hex(), step=self._step)
        if self._session is None:
            mine = mine._replace(without=platform.node() or "?")
        else:
            try:
                connect()
            except SidecarError as error:
                mine = mine._replace(error=str(error))
        # a sidecar is asked for its candidates only once all ranks have joined: so one that waits
        # for its neighbours need not guess how long their trainers take to start
        if any(self._gather(mine.error)) or self._session is None:
            return mine
        self.doing = "waiting until all ranks know what there is"
        try:
            ballot = zlib.compress(pickle.dumps(ask_candidates(self._session)), 1)
        except SidecarError as error:
            return mine._replace(error=str(error))
        return mine._replace(packed=ballot)

    def _raise_errors(self, ballots: list[_Ballot]) -> None:
        errors = [
            f"rank {rank}: {ballot.error}" for rank, ballot in enumerate(ballots) if ballot.error
        ]
        if errors:
            raise RestoreError("cannot tell what there is to restore: " + "; ".join(errors))

    def _check_same_step(self, ballots: list[_Ballot]) -> None:
        asked = {ballot.step: rank for rank, ballot in enumerate(ballots)}
        if len(asked) > 1:
            calls = ", ".join(f"restore(step={step}) on rank {asked[step]}" for step in asked)
            raise UsageError(f"all ranks go back to the same step, but it is {calls}")

    def _gather(self, mine: T) -> list[T]:
        if self._world == 1:
            return [mine]
        everyone: list[Any] = [None] * self._world
        torch.distributed.all_gather_object(everyone, mine)
        return everyone


def _news(decision: Decision, votes: list[Candidates]) -> Iterator[str]:
    """What the user should know of a decision."""
    if decision.id is None:
        if left := "; ".join(dict.fromkeys(vote.never_whole for vote in votes if vote.never_whole)):
            yield (
                f"the run begins at step 0: there are {left}, which were never whole, because not"
                " every rank saved them"
            )
        if decision.incomplete:
            named = ", ".join(map(str, decision.incomplete))
            yield f"the run begins at step 0 without {named}, which only some ranks hold"
        if decision.lost is not None:
            gone = any(vote.fleeting for vote in votes)
            yield f"the run begins again at step 0: of step {decision.lost}, a part " + (
                "went for good with the pod or the drive that held it"
                if gone
                else "is out of reach, and a person asked to begin again"
            )
        return
    if decision.suspects:
        yield (
            f"going back to step {decision.id.step}: the script failed twice within {WITHIN} steps"
            f" after step {max(decision.suspects)} was restored, or one before it. To go on from"
            " there nonetheless, name it (--restore-from, spec.restoreFrom) or pin it"
        )
    if decision.unsure:
        yield (
            f"going on from step {decision.id}, the newest that is whole. The record of a later"
            " epoch is lost, so the run may once have gone back to before this step"
        )
    if any(decision.lent):
        lacking = few([str(at) for at, lent in enumerate(decision.lent) if lent], _RANKS_NAMED)
        lenders = few([str(rank) for rank in decision.lenders], _RANKS_NAMED)
        yield (
            f"step {decision.id} is out of reach of rank {lacking}: rank {lenders} sends it, of"
            " what is left"
        )


def _votes(ballots: list[_Ballot]) -> list[Candidates]:
    """The candidates of the ranks that have a sidecar."""
    texts = [ballot.packed for ballot in ballots if ballot.packed is not None]
    read: dict[bytes, Candidates] = {
        chunk: pickle.loads(zlib.decompress(chunk)) for chunk in dict.fromkeys(texts)
    }
    return [read[text] for text in texts]


def _without(ballots: list[_Ballot]) -> str:
    """Which ranks have no sidecar, and what to do; '' if every rank has one. The same on
    all ranks."""
    named = [
        f"rank {rank} ({ballot.without})" for rank, ballot in enumerate(ballots) if ballot.without
    ]
    if not named:
        return ""
    return (
        f"no sidecar (KEEPSTEP_SOCKET is not set): {few(named, _RANKS_NAMED)}; all other ranks have"
        " a sidecar. Delete the pods without, so that their job makes them again, or start every"
        " rank with `keepstep run -- ...`"
    )


def ask_candidates(link: SidecarSession) -> Candidates:
    """What a rank's sidecar can bring, once it has looked at all tiers. Raises SidecarError."""
    request = CandidatesRequest(lease=link.lease_token, timeout_s=_CANDIDATES_S)
    return link.call_apart("/v1/candidates", request, Candidates, timeout_s=_CANDIDATES_S + 10)


def report_refusal(link: SidecarSession, reason: str) -> None:
    """Tell the sidecar that the vote refused, for its status and reports. Raises nothing."""
    request = VoteRefusedRequest(lease=link.lease_token, reason=reason[:_REASON])
    with contextlib.suppress(KeepstepError):
        link.call_apart("/v1/refused", request, dict, timeout_s=_REFUSED_S)


def report_epoch_begin(
    link: SidecarSession,
    epoch: Epoch,
    tier: Tier | None,
    *,
    seconds: float = 0.0,
    asked: int | None = None,
) -> None:
    """Tell the sidecar which epoch begins, from which tier its parent step came, and the step that
    the script `asked` for. Raises SidecarError."""
    request = RestoredRequest(
        lease=link.lease_token, epoch=epoch, tier=tier, seconds=seconds, asked=asked
    )
    link.call_apart("/v1/restored", request, dict, timeout_s=60.0)


def _beside(future: Future[T], work: Callable[[], T]) -> threading.Thread:
    """A daemon thread that runs `work`. It does not keep the process from ending (at Ctrl-C, for
    example)."""

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    return threading.Thread(target=run, name="keepstep-vote", daemon=True)


# --- what a slow restore waits for, in the trainer's own log ---------------------------------


@contextlib.contextmanager
def logging_waits(path: str, doing: Callable[[], str], *, rank: int) -> Iterator[None]:
    """Log what this rank waits for after 10 s, and every 30 s from then on.

    `path`: the socket of the sidecar, which knows why a rank may not vote yet and what it has
    fetched. `doing`: what the collective is doing. Only rank 0 logs it, because it is the same for
    all ranks.
    """
    if not path:
        yield
        return
    began, done = time.monotonic(), threading.Event()

    def report() -> None:
        wait_s = FIRST_S
        while not done.wait(wait_s):
            wait_s = EVERY_S
            text = _waits_for(path, doing() if rank == 0 else "", rank)
            if text and not done.is_set():
                seconds = time.monotonic() - began
                log.warning(
                    "keepstep: restore() goes on after %.0f s: %s [restore.waiting]", seconds, text
                )

    thread = threading.Thread(target=report, name="keepstep-waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()


def _waits_for(path: str, doing: str, rank: int) -> str:
    from keepstep.wire.status import Status  # a fast restore does not pay for this import

    try:
        with contextlib.closing(SidecarClient(path)) as client:
            status = client.get("/v1/status", Status, timeout_s=5.0)
    except KeepstepError as error:
        return f"{doing}; the sidecar: {error}" if doing else ""
    why = next((status.waits for status in status.ranks if status.rank == rank), "")
    if why:
        return f"rank {rank} waits: {why}"
    fetched = sum(tier.received_bytes for tier in status.tiers.values())
    return f"{doing} ({fetched / 1e6:.0f} MB fetched so far)" if doing and fetched else doing
