"""`Checkpointer`: what a training script sees of keepstep.

Duties of the script: call `restore()` once, before the first step and on every rank (it is a
collective when torch.distributed is up); call `save(step)` after `optimizer.step()`; call `close()`
at the end. Everything else happens beside the training thread.

No error of ours reaches `save` unless `strict=True`; `restore`, `wait` and `close` always say the
truth.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from keepstep import rng, state, topology
from keepstep.agreement import Decision
from keepstep.errors import FormatError, KeepstepError, NotDurableError, UsageError
from keepstep.image import Layout, extras
from keepstep.imaging import Imaging
from keepstep.protocol import SOCKET_ENV
from keepstep.restoring import Restoring
from keepstep.stager import Stager
from keepstep.stats import Stats
from keepstep.steps import Epoch, State, StepId, Tier
from keepstep.timeouts import restore_timeout_s
from keepstep.topology import ALONE, Claim
from keepstep.torn import Torn
from keepstep.voting import Gather, Voter

log = logging.getLogger("keepstep")

_CONNECT_S = 30.0


@dataclass(frozen=True, slots=True)
class Restored:
    """What `restore` brought back. `seconds` counts from the call; `bytes` were copied."""

    step: int
    epoch: int
    tier: Tier
    seconds: float
    bytes: int


class Checkpointer:
    """Keeps the state of one training process; see the module for the three calls."""

    def __init__(
        self,
        components: Mapping[str, Any],
        *,
        lazy: bool = True,
        strict: bool = False,
        rng: bool = True,
        trusted: bool = False,
        replicated: str = "PerNode",
    ) -> None:
        """Name what to keep: modules, optimizers, schedulers, plain dicts.

        `lazy`: copy parameters and optimizer state during the next forward and backward pass.
        `strict`: let `save` raise. `rng`: keep the states of random generators. `trusted`: pickle
        what JSON cannot hold, and unpickle it at restore (only for checkpoints you wrote).
        `replicated`: what all ranks have alike (DistributedDataParallel, the replicas of a mesh) is
        staged in parts, by the ranks of each node ("PerNode": every node has a whole copy), or by
        all of them ("Spread": fewer bytes each, but the loss of a node loses its parts).
        Raises UsageError for components that can be neither taken nor put back.
        """
        if replicated not in ("PerNode", "Spread"):
            raise UsageError(f'replicated={replicated!r}: it is "PerNode" or "Spread"')
        self._components = state.check_components(components)
        self._spread = replicated == "Spread"
        self._topology = ALONE
        self._lazy, self._strict, self._rng, self._trusted = lazy, strict, rng, trusted
        self._rank, self._world = _rank_and_world()
        self._stager: Stager | None = None
        self._imaging: Imaging | None = None
        self._epoch: Epoch | None = None
        self._stage_every = 1
        self._last_step = -1
        self._restore_timeout_s = restore_timeout_s()
        self._socket = os.environ.get(SOCKET_ENV, "")
        if self._socket:
            self._stager = Stager(self._socket, rank=self._rank, world=self._world)
        else:
            log.warning(
                "keepstep: %s is not set, so no step is kept; start the training with"
                " `keepstep run -- ...`",
                SOCKET_ENV,
            )
        _LIVE.add(self)
        _hook_optimizers()

    @property
    def epoch(self) -> Epoch | None:
        """The epoch that `restore` began; None before."""
        return self._epoch

    # --- restore -----------------------------------------------------------------------------

    def restore(self) -> Restored | None:
        """Bring back the newest step that every rank holds, in place; None if there was none.

        A collective: every rank must call it. Starts a new epoch. Raises RestoreError (with
        ranks, steps, tiers and what to do) when something is there but cannot be restored, and
        SidecarAbsent when KEEPSTEP_SOCKET names a sidecar that does not answer: to start over in
        silence would be to lose the run. Raises UsageError, on every rank, for a component that
        cannot be kept on one of them; by name, and whether there is anything to restore or not.
        """
        started = time.perf_counter()
        if self._epoch is not None:
            raise UsageError("restore() was called already; it starts an epoch, once per process")
        voter = Voter(self._stager, rank=self._rank, world=self._world)
        with Torn() as torn:
            begin = functools.partial(self._restoring, torn)
            decision = voter.restore(begin, timeout_s=_CONNECT_S, meet=self._meet)
        if decision is None:
            return None
        self._stage_every = decision.stage_every
        restored = None
        if decision.restoring is not None:
            parent = decision.epoch.parent
            assert parent is not None
            restored = Restored(
                step=parent.step,
                epoch=decision.epoch.id.number,
                tier=decision.restoring.tier,
                seconds=time.perf_counter() - started,
                bytes=decision.restoring.bytes,
            )
        voter.announce(decision, seconds=time.perf_counter() - started)
        self._epoch = decision.epoch
        self._last_step = restored.step if restored else -1
        if restored and self._rank == 0:
            log.warning(
                "keepstep: restored step %d of epoch %s from %s in %.2f s",
                restored.step,
                decision.epoch.parent and decision.epoch.parent.epoch.number,
                restored.tier,
                restored.seconds,
            )
        return restored

    def _meet(self, gather: Gather) -> None:
        """Agree on who has what: from here on, every rank knows what to stage. Raises UsageError,
        on all ranks, where one of them has what cannot be kept."""
        if self._world == 1:
            self._claims()
        else:
            self._topology = topology.agree(
                self._claims,
                gather,
                rank=self._rank,
                world=self._world,
                node=topology.node_name(self._socket),
                spread=self._spread,
            )

    def _claims(self) -> frozenset[Claim]:
        """Of all that is to be kept, laid out once: what cannot be kept is known before the first
        step, and not in the log of a run that kept none."""
        taken = state.take(self._components)
        try:
            self._layout_of(taken, len(self._encode(taken)))
        except FormatError as error:
            raise UsageError(f"this state cannot be kept: {error}") from error
        return taken.claims

    def _take(self) -> state.Taken:
        return state.take(self._components, self._topology)

    def _restoring(self, torn: Torn, decision: Decision) -> Restoring:
        assert self._stager is not None
        return Restoring(
            self._components,
            self._stager.link,
            decision,
            rank=self._rank,
            take=self._take,
            rng=self._rng,
            trusted=self._trusted,
            torn=torn,
            reader=self._topology.first_here,
            timeout_s=self._restore_timeout_s,
        )

    # --- save --------------------------------------------------------------------------------

    def save(self, step: int) -> bool:
        """Keep this step. Returns at once; False if the step is not kept (the log says why).

        Call it after `optimizer.step()`, on every rank, with steps that only grow.
        """
        if self._stager is None or (self._stage_every > 1 and step % self._stage_every):
            return False
        started = time.perf_counter()
        try:
            return self._save(step, started)
        except Exception as error:
            if self._strict:
                raise
            self._stager.skip(step, str(error) or type(error).__name__)
            return False
        finally:
            self._count_blocked(started)
            self._stager.stats.saves += 1

    def _save(self, step: int, started: float) -> bool:
        stager = self._stager
        assert stager is not None
        if self._epoch is None:
            raise UsageError("call restore() before the first save(): it agrees on the epoch")
        if step <= self._last_step:
            raise UsageError(
                f"step {step} comes after step {self._last_step}: steps only grow within an epoch"
            )
        id = StepId(self._epoch.id, step)
        self._last_step = step
        stager.settle()
        taken = self._take()
        data = self._encode(taken)
        imaging = self._imaging_for(taken, len(data))
        slot = stager.take_slot()
        if isinstance(slot, str):
            if self._strict:
                raise KeepstepError(f"step {step} is not kept: {slot}")
            stager.skip(step, slot)
            return False
        lazy = self._lazy and not stager.eager_next
        stager.eager_next = False
        try:
            pending = imaging.begin(slot, taken, data, id=id, epoch=self._epoch, lazy=lazy)
            if not lazy:
                pending.copy()
                pending.judge()
                pending.slot.seal(pending.control)
        except BaseException:
            stager.put_back()
            raise
        pending.blocked_s = time.perf_counter() - started
        stager.submit(pending)
        return True

    def _imaging_for(self, taken: state.Taken, extras_bytes: int) -> Imaging:
        """The layout of this state; a new one when tensors came, went or changed their shape."""
        imaging = self._imaging
        if imaging is not None and imaging.fits(taken, extras_bytes):
            return imaging
        assert self._stager is not None
        layout = self._layout_of(taken, extras_bytes)
        self._imaging = Imaging(layout, taken, run=self._run_name())
        self._stager.use_layout(layout)
        return self._imaging

    def _layout_of(self, taken: state.Taken, extras_bytes: int) -> Layout:
        return Layout.build(
            taken.specs(),
            rank=self._rank,
            world=self._world,
            aliases=taken.aliases,
            skeleton=json.dumps(taken.skeleton, separators=(",", ":")),
            extras_capacity_bytes=extras.capacity_for(extras_bytes),
            twins=taken.twins,
        )

    def _encode(self, taken: state.Taken) -> bytes:
        captured = rng.capture() if self._rng else None
        return state.encode(taken, rng=captured, trusted=self._trusted)

    def _run_name(self) -> str:
        assert self._stager is not None
        return self._stager.link.run

    def fence(self) -> None:
        """Return when no copy reads the live tensors any more.

        Called for you before every optimizer step; `mutating()` is its public form.
        """
        stager = self._stager
        if stager is None or stager.pending is None:
            return
        started = time.perf_counter()
        try:
            stager.settle()
        except Exception as error:
            if self._strict:
                raise
            stager.warn("fence", f"the fence failed: {error!r}")
        finally:
            self._count_blocked(started, new=False)

    @contextlib.contextmanager
    def mutating(self) -> Iterator[None]:
        """Wrap code that changes parameters or optimizer state outside `optimizer.step()`."""
        self.fence()
        yield

    # --- wait and close ----------------------------------------------------------------------

    def wait(self, step: int, state: State | str = State.COMMITTED, timeout: float = 60.0) -> None:
        """Return when `step` is `staged`, `durable` or `committed`; `timeout` in seconds.

        The step is persisted now even if the schedule would not. Raises NotDurableError when the
        time is up, with what is missing, and UsageError for a step that was never saved here.
        """
        stager = self._stager
        if stager is None or self._epoch is None:
            raise UsageError("nothing is kept: there is no sidecar, or restore() was not called")
        deadline = time.monotonic() + timeout
        try:
            id, state = StepId(self._epoch.id, step), State(state)
        except ValueError as error:
            raise UsageError(f"nothing to wait for: {error}") from None
        if not stager.drain(timeout_s=timeout):
            raise NotDurableError(f"step {step} is not staged after {timeout:.0f} s")
        newest = stager.staged_step
        if newest is None or newest.id < id:
            raise NotDurableError(f"step {step} was not staged: {stager.stats.why_not()}")
        if state is State.STAGED:
            return
        stager.link.wait(id, state, timeout_s=max(0.1, deadline - time.monotonic()))

    def close(self, timeout: float = 300.0) -> None:
        """Make the last step durable on every rank, then let go of the sidecar.

        Where there is an archive, the last step goes there, too, be it due or not. Raises
        NotDurableError that names the step if that was not possible in `timeout` seconds; for a
        step that is not archived by then only when `strict`, else that is logged. Safe to call
        twice.
        """
        stager, self._stager = self._stager, None
        _LIVE.discard(self)
        if stager is None:
            return
        try:
            if self._epoch is not None and self._last_step >= 0:
                self._close_last(stager, timeout)
        finally:
            stager.close()

    def _close_last(self, stager: Stager, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        assert self._epoch is not None
        if not stager.drain(timeout_s=timeout_s):
            raise NotDurableError(f"step {self._last_step} is not staged after {timeout_s:.0f} s")
        newest = stager.staged_step
        if newest is None:
            if self._epoch.parent is not None and self._last_step == self._epoch.parent.step:
                return
            raise NotDurableError(f"no step was staged: {stager.stats.why_not()}")
        stager.link.wait(
            newest.id, State.COMMITTED, timeout_s=max(0.1, deadline - time.monotonic())
        )
        if newest.id.step != self._last_step:
            raise NotDurableError(
                f"step {self._last_step} was not staged; the newest durable one is"
                f" {newest.id.step}: {stager.stats.why_not()}"
            )
        if stager.link.archive:
            self._archive_last(stager, newest.id, max(0.1, deadline - time.monotonic()))

    def _archive_last(self, stager: Stager, id: StepId, timeout_s: float) -> None:
        try:
            stager.link.wait(id, State.ARCHIVED, timeout_s=timeout_s)
        except NotDurableError as error:
            if self._strict:
                raise
            log.warning(
                "keepstep: step %d is committed, but not in the archive yet; the sidecar goes on"
                " uploading until it ends: %s",
                id.step,
                error,
            )

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        elif self._stager is not None:
            self._stager.drain(timeout_s=1.0)
            self._stager.close()

    @property
    def stats(self) -> Stats:
        """Counters of this process; see `Stats`."""
        return self._stager.stats if self._stager is not None else Stats()

    def _count_blocked(self, started: float, *, new: bool = True) -> None:
        if self._stager is None:
            return
        stats, seconds = self._stager.stats, time.perf_counter() - started
        stats.blocked_s += seconds
        stats.last_blocked_s = seconds if new else stats.last_blocked_s + seconds


def _rank_and_world() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        raise UsageError(
            f"WORLD_SIZE is {world}, but torch.distributed is not initialized: call"
            " torch.distributed.init_process_group() before you make the Checkpointer"
        )
    return int(os.environ.get("RANK", "0")), 1


_LIVE: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


@functools.cache
def _hook_optimizers() -> None:
    """The fence, before every optimizer step of this process."""

    def before(*_: object) -> None:
        for checkpointer in list(_LIVE):
            checkpointer.fence()

    register_optimizer_step_pre_hook(before)
