"""`Checkpointer`: what a training script sees of keepstep.

Duties of the script: call `restore()` once, before the first step and on every rank (it is a
collective when torch.distributed is up); call `save(step)` after `optimizer.step()`; call `close()`
at the end. Everything else happens beside the training thread. Where a framework draws random
numbers between the two: `restore(rng="later")`, and `restore_rng()` when the first batch is there.

No error of ours reaches `save` unless `strict=True`; `restore`, `wait` and `close` always say the
truth.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import operator
import os
import sys
import threading
import time
import weakref
from collections import ChainMap
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal, NoReturn, cast

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from keepstep.client import embedded
from keepstep.client.session import held_steps, restore_timeout_s
from keepstep.core.vote import Decision
from keepstep.errors import FormatError, NotDurableError, SlotUnavailable, UsageError
from keepstep.image import Layout, extras
from keepstep.restore.collective import Collective, Gather, Unkept
from keepstep.restore.restore import PartialRestore, Restore
from keepstep.restore.waiting import telling
from keepstep.save import loops
from keepstep.save.agent import Agent
from keepstep.save.script_failures import is_own, on_uncaught
from keepstep.save.snapshot import Snapshots
from keepstep.save.stats import Stats
from keepstep.state import rng, topology
from keepstep.state.leaves import Taken
from keepstep.state.memory import check_memory
from keepstep.state.take import check_components, encode, take
from keepstep.state.topology import ALONE
from keepstep.steps import Epoch, State, StepId, Tier
from keepstep.wire.trainer import SOCKET_ENV, LeaseGranted

log = logging.getLogger("keepstep")

_CONNECT_S = 30.0
_NO_RNG = (
    'restore(rng="later") was called, but restore_rng() was not before the first save(): random'
    " numbers are not those of an undisturbed run"
)
_STEPS = 10**18  # the name of a step has at most so many digits


@dataclass(frozen=True, slots=True)
class Restored:
    """What `restore` brought back. `seconds` counts from the call; `bytes` were copied."""

    step: int
    epoch: int
    tier: Tier
    seconds: float
    bytes: int


class Checkpointer:
    """Keeps the state of one training process: `restore` once, `save` every step, then `close`."""

    def __init__(
        self,
        components: Mapping[str, Any] | None = None,
        *,
        lazy: bool = True,
        strict: bool = False,
        rng: bool = True,
        trusted: bool = False,
        replicated: str = "PerNode",
        dir: str | os.PathLike[str] | None = None,
        **named: Any,
    ) -> None:
        """Name what to keep: modules, optimizers, schedulers, plain dicts.

        In a dict, or as keywords, `Checkpointer(model=model, optimizer=optimizer)`, or both; a
        component that is called as one of the options below goes into the dict.
        `lazy`: copy parameters and optimizer state during the next forward and backward pass.
        `strict`: let `save` raise. `rng`: keep the states of random generators. `trusted`: pickle
        what JSON cannot hold, and unpickle it at restore (only for checkpoints you wrote).
        `replicated`: what all ranks have alike (DistributedDataParallel, the replicas of a mesh) is
        staged in parts, by the ranks of each node ("PerNode": every node has a whole copy), or by
        all of them ("Spread": fewer bytes each, but the loss of a node loses its parts).
        `dir`: where nobody has started a sidecar (`keepstep run`, a pod's), start one on this
        machine that keeps the run below this directory, is started again when it dies, and ends
        when no trainer was there for five minutes; its settings are those of `keepstep start`,
        from the environment.
        Raises UsageError for components that can be neither taken nor put back.
        """
        if replicated not in ("PerNode", "Spread"):
            raise UsageError(f'replicated={replicated!r}: it is "PerNode" or "Spread"')
        options = {"lazy": lazy, "strict": strict, "rng": rng, "trusted": trusted}
        for option, value in options.items():
            if isinstance(value, dict) or hasattr(value, "state_dict"):
                raise UsageError(
                    f"{option}= is an option, True or False; name a component so in the dict:"
                    f' Checkpointer({{"{option}": ...}})'
                )
        self._components = check_components(_joined(components, named))
        self._spread = replicated == "Spread"
        self._topology = ALONE
        self._lazy, self._strict, self._rng, self._trusted = lazy, strict, rng, trusted
        self._rank, self._world = _rank_and_world()
        self._agent: Agent | None = None
        self._snapshots: Snapshots | None = None
        self._epoch: Epoch | None = None
        self._probed: Taken | None = None
        self._stage_every = 1
        self._last_step = self._off_grid = self._unhealthy = -1
        self._moved = self._hinted = False
        # what `restore_rng` is to set: None before restore(rng="later"), {} once it is set
        self._rng_later: dict[str, Any] | None = None
        # C code throughout, so that no exception comes between taking it and having it
        self._turn = threading.RLock()
        self._saving = False
        self._stats = Stats()
        self._off, self._off_said = "", False
        self._restore_timeout_s = restore_timeout_s()
        self._socket = embedded.socket(dir)
        if self._socket:
            keeper = embedded.keeper(dir)
            self._agent = Agent(self._socket, rank=self._rank, world=self._world, keeper=keeper)
            self._stats = self._agent.stats
            # where nobody calls close(): at the end of the process, or of this object
            self._end = weakref.finalize(self, self._agent.end)
        else:
            log.warning(
                "keepstep: %s is not set, so no step is kept; start the training with"
                " `keepstep run -- ...`, or say Checkpointer(..., dir=...)",
                SOCKET_ENV,
            )
        _LIVE.add(self)
        _hook_optimizers()
        _hook_failures()

    @property
    def epoch(self) -> Epoch | None:
        """The epoch that `restore` began; None before."""
        return self._epoch

    # --- restore -----------------------------------------------------------------------------

    def latest_step(self) -> int | None:
        """The newest of `all_steps`; None if there is none."""
        return max(self.all_steps(), default=None)

    def all_steps(self) -> list[int]:
        """Steps of this run that could be restored as far as this rank's sidecar knows, in order:
        committed ones, and those of which it knows the images of all ranks, in shared memory too.

        No collective, and only a look: steps come and go meanwhile, other ranks may see others,
        and `restore` is what they agree by. Empty without a sidecar (KEEPSTEP_SOCKET is not set).
        Waits until the sidecar has looked at its volumes. Raises SidecarAbsent, SidecarError.
        """
        return sorted(held_steps(self._socket, timeout_s=_CONNECT_S)) if self._socket else []

    def restore(
        self, *, step: int | None = None, rng: Literal["now", "later"] = "now"
    ) -> Restored | None:
        """Bring back the newest step that every rank holds, in place; None if there was none.

        `step`: go back to this one instead, one of `all_steps`. What came after it is dead from
        then on: no later restore takes it. It is meant each time that the script comes here, so a
        script that is started again goes back again; `keepstep run --restore-from` goes back once,
        and counts before this. `rng="later"` leaves the random generators to `restore_rng`.

        A collective: every rank must call it. Starts a new epoch. Raises RestoreError (with
        ranks, steps, tiers and what to do) when something is there but cannot be restored, also as
        some ranks have no sidecar (where nothing is there, all train on and nothing is kept), and
        SidecarAbsent when KEEPSTEP_SOCKET names a sidecar that does not answer: to start over in
        silence would be to lose the run; and where `step` is not there, or not on every rank.
        Raises UsageError, on every rank, for a component that cannot be kept on one of them; by
        name, and whether there is anything to restore or not.
        """
        started = time.perf_counter()
        if self._epoch is not None:
            raise UsageError("restore() was called already; it starts an epoch, once per process")
        if rng not in ("now", "later"):
            raise UsageError(f'restore(rng={rng!r}): it is "now" or "later"')
        if step is not None and (step := _whole(asked := step)) is None:
            raise UsageError(f"restore(step={asked!r}): a step is a whole number, 0 to 10**18 - 1")
        if rng == "later":
            if not self._rng:
                raise UsageError('restore(rng="later"): this Checkpointer was made with rng=False')
            self._rng_later = {}
        self._hint()
        session = self._agent.session if self._agent is not None else None
        collective = Collective(session, rank=self._rank, world=self._world, step=step)
        try:
            waits = telling(self._socket, lambda: collective.doing, rank=self._rank)
            with waits, PartialRestore() as partial:
                begin = functools.partial(self._restoring, partial)
                agreed = collective.restore(self._connect, begin, meet=self._meet)
        finally:
            self._probed = None
        if isinstance(agreed, Unkept):
            if agreed.reason:
                self._let_go(agreed.reason, timeout_s=5.0)
            return None
        seconds = time.perf_counter() - started
        parent, restoring = agreed.epoch.parent, agreed.restoring
        if restoring is not None:
            self._rng_later = None if self._rng_later is None else restoring.rng
            restoring.release()
        collective.announce(agreed, seconds=time.perf_counter() - started)
        self._stage_every, self._epoch = agreed.stage_every, agreed.epoch
        if parent is None or restoring is None:
            return None
        self._last_step = parent.step
        if self._rank == 0:
            log.warning(
                "keepstep: restored step %d of epoch %s from %s in %.2f s",
                *(parent.step, parent.epoch.number, restoring.tier, seconds),
            )
        return Restored(
            step=parent.step,
            epoch=agreed.epoch.id.number,
            tier=restoring.tier,
            seconds=seconds,
            bytes=restoring.bytes,
        )

    def restore_rng(self) -> bool:
        """Set the random generators to where the restored step had left them; whether it did.

        After `restore(rng="later")`, when whatever draws random numbers on the way to the first
        batch (a loader's iterator, its sampler and workers) has done so. Only the first call sets
        anything, so that it may stand in the loop; nor is there anything to set where no step was
        restored, or one without the random states of this rank: then it returns False. Raises
        UsageError where `restore(rng="later")` was not called.
        """
        if self._rng_later is None:
            raise UsageError(
                'there is no random state to set: call restore(rng="later") first (a plain'
                " restore() has set it already)"
            )
        state, self._rng_later = self._rng_later, {}
        rng.apply(state)
        return bool(state)

    def _hint(self) -> None:
        """Name the adapter where a framework owns the loop: once, and from rank 0."""
        ask = self._agent is not None and self._rank == 0 and not self._hinted
        if ask and (adapter := loops.adapter()):
            self._hinted = True
            log.warning(
                "keepstep: this loop is a framework's: where its data stood, and what else it"
                " counts, is in no step; %s keeps that, too, by one line (docs/frameworks.md)",
                adapter,
            )

    def _connect(self) -> LeaseGranted:
        assert self._agent is not None
        return self._agent.connect(timeout_s=_CONNECT_S)

    def _meet(self, gather: Gather) -> None:
        """Agree on who has what: from here on, every rank knows what to stage. Raises UsageError,
        on all ranks, where one of them has what cannot be kept."""
        if self._world == 1:
            self._probed = self._probe()
        else:
            self._topology = topology.agree(
                lambda: self._probe().claims,
                gather,
                rank=self._rank,
                world=self._world,
                node=topology.node_name(self._socket),
                spread=self._spread,
            )

    def _probe(self) -> Taken:
        """All that is to be kept, laid out once: what cannot be kept is known before the first
        step, and not in the log of a run that kept none. Raises UsageError."""
        taken = take(self._components)
        for leaf in taken.tensors:
            check_memory(leaf.tensor, leaf.name)
        try:
            Layout.check(taken.specs, **self._layout_options(taken, len(self._encode(taken))))
        except FormatError as error:
            raise UsageError(f"this state cannot be kept: {error}") from error
        return taken

    def _take(self) -> Taken:
        """While a rank alone restores, what it was probed with is all there is: nothing of a state
        is replaced before every tensor is filled."""
        return self._probed or take(self._components, self._topology)

    def _restoring(self, partial: PartialRestore, decision: Decision) -> Restore:
        assert self._agent is not None
        return Restore(
            self._components,
            self._agent.session,
            decision,
            rank=self._rank,
            take=self._take,
            rng=self._rng,
            rng_later=self._rng_later is not None,
            trusted=self._trusted,
            partial=partial,
            reader=self._topology.first_here,
            timeout_s=self._restore_timeout_s,
        )

    # --- save --------------------------------------------------------------------------------

    def should_save(self, step: int) -> bool:
        """Whether `save(step)` would stage it: a sidecar is there, not every step is staged
        (`--stage-every`) and this is one of those that are, and it is newer than the last.

        For what is costly to bring together for a step. Call `save` for the others, too: it
        returns at once, and `close` makes the very last one durable.
        """
        number = _whole(step)
        if self._agent is None or self._epoch is None or number is None:
            return False
        return number > self._last_step and number % self._stage_every == 0

    def save(self, step: int, *, healthy: bool = True) -> bool:
        """Keep this step. Returns at once; False if the step is not kept (the log says why).

        Call it after `optimizer.step()`, in the thread that trains, on every rank, with steps
        (whole numbers from 0) that only grow. True: it will be staged, or its loss is logged and
        counted in `stats`. The last step again, if it is kept or on its way, is True and nothing
        more: what is kept stays as it is. `healthy=False`, as for a loss or gradients that are
        not finite: it is not kept, and held against the step that this life went on from, as an
        error that ends the script is. After two such failures within 20 steps the next restore goes
        further back.
        """
        agent = self._agent
        if agent is None:
            return self._say_off(step)
        started, grad = time.perf_counter(), torch.is_grad_enabled()
        number = _whole(step)
        if healthy and number is not None and number % self._stage_every:
            self._off_grid, self._moved = max(number, self._off_grid), False
            return False
        if healthy and number == self._last_step and self._has(agent, number):
            return True
        try:
            if number is None:
                raise UsageError(f"save({step!r}): a step is a whole number, 0 to 10**18 - 1")
            if not healthy:
                return self._refuse_unhealthy(agent, number)
            return self._save_alone(agent, number, started)
        except Exception as error:
            if self._strict:
                raise
            agent.skip(-1 if number is None else number, str(error) or type(error).__name__)
            return False
        except BaseException as error:  # a signal handler's; only what is not on its way is lost
            if number is not None and not agent.knows_of(number):
                agent.skip(number, f"{type(error).__name__} inside save()")
            raise
        finally:
            if torch.is_grad_enabled() is not grad:  # a signal struck just where no_grad() ends
                torch.set_grad_enabled(grad)
            self._count_blocked(started)
            agent.stats.saves += 1

    def _has(self, agent: Agent, step: int) -> bool:
        """Whether the step that came last is kept, or on its way."""
        parent = self._epoch.parent if self._epoch is not None else None
        pending = agent.pending
        return (
            agent.outcome(step) == ""
            or (pending is not None and pending.step == step)
            or (parent is not None and parent.step == step)
        )

    def _refuse_unhealthy(self, agent: Agent, step: int) -> bool:
        if self._epoch is None:
            raise UsageError("call restore() before the first save(): it agrees on the epoch")
        self._unhealthy, self._moved = step, True  # nor is it what `close` stages for one before it
        agent.skip(step, "the script says that it is not healthy")
        self._tell_failure("save(healthy=False)")
        return False

    def _tell_failure(self, reason: str) -> None:
        """The script itself failed. A sidecar that is away does not hear of it."""
        step = max(self._last_step, self._off_grid, self._unhealthy)
        if self._agent is not None and self._epoch is not None and step >= 0:
            self._agent.session.failed(StepId(self._epoch.id, step), reason)

    def _say_off(self, step: object) -> bool:
        if self._off and not self._off_said:
            self._off_said = True
            log.warning("keepstep: rank %d: step %s is not kept: %s", self._rank, step, self._off)
        return False

    def _save_alone(self, agent: Agent, step: int, started: float) -> bool:
        with self._turn:
            # a flag alone may be stale, if an exception struck just where it is taken back
            if self._saving and _is_running(Checkpointer._save):
                raise UsageError(
                    "save() was called inside save(), by a signal handler: let the handler set a"
                    " flag, and call save() in the training loop"
                )
            try:
                self._saving = True
                return self._save(agent, step, started)
            finally:
                self._saving = False

    def _save(
        self, agent: Agent, step: int, started: float, *, patience_s: float | None = None
    ) -> bool:
        """Any exception, at any line, costs this step only: see `Agent.heal`."""
        agent.heal()
        if self._epoch is None:
            raise UsageError("call restore() before the first save(): it agrees on the epoch")
        if step <= self._last_step:
            only_grow = "steps only grow within an epoch"
            if self._strict:
                raise UsageError(f"step {step} comes after step {self._last_step}: {only_grow}")
            # one reason for all of them, without their numbers: it is counted and logged by kind
            agent.skip(step, f"a newer one, or itself, came before: {only_grow}")
            return False
        if self._snapshots is None:
            self._hint()
        if self._rng_later:
            agent.warn("rng-later", _NO_RNG)
        self._last_step = step
        agent.settle()
        taken = self._take()
        data = self._encode(taken)
        snapshots = self._snapshots_for(agent, taken, len(data))
        try:
            slot = agent.await_slot(timeout_s=patience_s)
        except SlotUnavailable as error:
            if self._strict:
                raise SlotUnavailable(f"step {step} is not kept: {error}") from None
            agent.skip(step, str(error))
            return False
        lazy = self._lazy and not agent.copies_eagerly
        agent.eager_next = False
        try:
            pending = snapshots.begin(slot, taken, data, step=step, epoch=self._epoch, lazy=lazy)
            if not lazy:
                pending.copy()
                pending.judge()
                pending.seal()
            pending.thread = agent.trains or pending.thread
            pending.blocked_s = time.perf_counter() - started
            agent.submit(pending)
        except BaseException:
            agent.put_back()
            raise
        return True

    def _snapshots_for(self, agent: Agent, taken: Taken, extras_bytes: int) -> Snapshots:
        """The layout of this state; a new one when tensors came, went or changed their shape."""
        snapshots = self._snapshots
        if snapshots is None or not snapshots.fits(taken, extras_bytes):
            layout = Layout.build(taken.specs, **self._layout_options(taken, extras_bytes))
            snapshots = self._snapshots = Snapshots(layout, taken, run=agent.session.run)
            agent.use_layout(layout)
        return snapshots

    def _layout_options(self, taken: Taken, extras_bytes: int) -> dict[str, Any]:
        """What a layout takes beside the tensors."""
        return {
            "rank": self._rank,
            "world": self._world,
            "aliases": taken.aliases,
            "skeleton": json.dumps(taken.skeleton, separators=(",", ":")),
            "extras_capacity_bytes": extras.capacity_for(extras_bytes),
            "twins": taken.twins,
            "parameters": taken.parameters,
        }

    def _encode(self, taken: Taken) -> bytes:
        captured = rng.capture() if self._rng else None
        return encode(taken, rng=captured, trusted=self._trusted)

    def fence(self) -> None:
        """Return when no copy reads the live tensors any more.

        Called for you before every optimizer step; `mutating()` is its public form.
        """
        agent = self._agent
        if agent is None:
            return
        self._moved = True
        if agent.pending is None:
            return
        started = time.perf_counter()
        try:
            agent.settle()
        except Exception as error:
            if self._strict:
                raise
            agent.warn("fence", f"the fence failed: {error!r}")
        finally:
            self._count_blocked(started, new=False)

    @contextlib.contextmanager
    def mutating(self) -> Iterator[None]:
        """Wrap code that changes parameters or optimizer state outside `optimizer.step()`."""
        self.fence()
        yield

    # --- wait and close ----------------------------------------------------------------------

    def wait(self, step: int, state: State | str = State.COMMITTED, timeout: float = 60.0) -> None:
        """Return when `step` itself is `staged`, `durable` or `committed`; `timeout` in seconds.

        The step is persisted now even if the schedule would not. Raises NotDurableError with the
        reason when the step is lost, or not there when the time is up, and UsageError for a step
        that was never saved here (or longer ago than the last 10,000).
        """
        agent = self._agent
        if agent is None or self._epoch is None:
            why = self._off or "there is no sidecar, or restore() was not called"
            raise UsageError(f"nothing is kept: {why}")
        deadline = time.monotonic() + timeout
        number = _whole(step)
        if number is None:
            raise UsageError(f"wait({step!r}): a step is a whole number, 0 to 10**18 - 1")
        try:
            state = State(state)
        except ValueError as error:
            raise UsageError(f"nothing to wait for: {error}") from None
        self._await_staged(agent, number, timeout)
        if state is State.STAGED:
            return
        id = StepId(self._epoch.id, number)
        agent.session.wait(id, state, timeout_s=max(0.1, deadline - time.monotonic()))

    def _await_staged(self, agent: Agent, step: int, timeout_s: float) -> None:
        pending = agent.pending
        asked = pending is not None and pending.step == step
        if (asked or agent.outcome(step) is None) and not agent.drain(timeout_s=timeout_s):
            raise NotDurableError(f"step {step} is not staged after {timeout_s:.0f} s")
        outcome = agent.outcome(step)
        if outcome is None and step % self._stage_every and step <= self._off_grid:
            outcome = f"one in {self._stage_every} steps is (--stage-every)"
        if outcome is None:
            raise UsageError(f"step {step} was never saved here, or longer ago than is remembered")
        if outcome:
            raise NotDurableError(f"step {step} was not staged: {outcome}")

    def close(self, timeout: float = 300.0) -> None:
        """Make the last step durable on every rank, then let go of the sidecar.

        The last step is the last that `save` was called for, also where not every step is staged:
        it is staged now, so call `close` with the state that it had. Where there is an archive,
        the last step goes there, too, be it due or not. Raises NotDurableError that names the step
        if that was not possible in `timeout` seconds; for a step that is not archived by then only
        when `strict`, else that is logged. Safe to call twice.
        """
        agent = self._agent
        if agent is None:
            return
        deadline = time.monotonic() + timeout
        try:
            if self._epoch is not None and max(self._last_step, self._off_grid) >= 0:
                self._close_last(agent, timeout)
        finally:
            self._let_go("close() was called", timeout_s=deadline - time.monotonic())

    def _let_go(self, reason: str, *, timeout_s: float) -> None:
        agent, self._agent, self._off = self._agent, None, reason
        _LIVE.discard(self)
        if agent is not None:
            self._end.detach()
            agent.close(timeout_s=max(0.2, min(timeout_s, 5.0)))

    def _close_last(self, agent: Agent, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        assert self._epoch is not None
        last = max(self._last_step, self._off_grid)
        if not agent.drain(timeout_s=timeout_s):
            raise NotDurableError(f"step {last} is not staged after {timeout_s:.0f} s")
        why_not = self._stage_off_grid(agent, deadline)
        newest = agent.staged_step
        if newest is None:
            if self._epoch.parent is not None and last == self._epoch.parent.step:
                return
            raise NotDurableError(f"no step was staged: {why_not or agent.stats.why_not()}")
        agent.session.wait(
            newest.control.id, State.COMMITTED, timeout_s=max(0.1, deadline - time.monotonic())
        )
        if newest.step != last:
            why_not = why_not or agent.outcome(last) or agent.stats.why_not()
            raise NotDurableError(
                f"step {last} was not staged; the newest durable one is {newest.step}: {why_not}"
            )
        if agent.session.archive:
            self._archive_last(agent, newest.control.id, max(0.1, deadline - time.monotonic()))

    def _stage_off_grid(self, agent: Agent, deadline: float) -> str:
        """The last step, if it is one that was left out. Returns why that was not possible."""
        step = self._off_grid
        if step <= self._last_step:
            return ""
        if self._moved:
            return "not every step is staged, and the state has changed since (--stage-every)"
        agent.eager_next = True
        agent.stats.saves += 1
        try:
            left_s = max(0.1, deadline - time.monotonic())
            with self._turn:
                self._save(agent, step, time.perf_counter(), patience_s=left_s)
        except Exception as error:
            return str(error) or type(error).__name__
        agent.drain(timeout_s=max(0.1, deadline - time.monotonic()))
        return agent.outcome(step) or ""

    def _archive_last(self, agent: Agent, id: StepId, timeout_s: float) -> None:
        try:
            agent.session.wait(id, State.ARCHIVED, timeout_s=timeout_s)
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        if kind is None:
            self.close()
        elif self._agent is not None:
            self._agent.drain(timeout_s=1.0)
            if is_own(error):
                self._tell_failure(_named(error))
            self._let_go("an error ended the `with` block", timeout_s=5.0)

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a Checkpointer cannot be copied or pickled: it holds this rank's lease, for this"
            " process"
        )

    @property
    def stats(self) -> Stats:
        """Counters of this process; see `Stats`."""
        return self._stats

    def _count_blocked(self, started: float, *, new: bool = True) -> None:
        stats, seconds = self._stats, time.perf_counter() - started
        stats.blocked_s += seconds
        stats.last_blocked_s = seconds if new else stats.last_blocked_s + seconds


def _joined(components: Mapping[str, Any] | None, named: Mapping[str, Any]) -> Mapping[str, Any]:
    """One view of both: an entry that is replaced later is seen. Raises UsageError."""
    if components is None:
        return named
    if not named or not isinstance(components, Mapping):
        return components
    if twice := sorted(components.keys() & named.keys()):
        raise UsageError(f"{', '.join(twice)}: named in the dict and as a keyword")
    # it only reads what it is given
    return ChainMap(dict(named), cast("MutableMapping[str, Any]", components))


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
            if checkpointer._agent is not None:
                checkpointer._agent.trains = threading.get_ident()
            checkpointer.fence()

    # torch.compile traces an optimizer's step with its hooks, and the versions that a traced fence
    # compares are others (`torch.compiler.disable` would import torch._dynamo here and now)
    register_optimizer_step_pre_hook(torch._disable_dynamo(before))  # type: ignore[attr-defined]


@functools.cache
def _hook_failures() -> None:
    """What ends the script is told, once a process."""

    def tell(error: BaseException) -> None:
        for checkpointer in list(_LIVE):
            checkpointer._tell_failure(_named(error))

    on_uncaught(tell)


def _named(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}"


def _whole(step: object) -> int | None:
    """A step as a number; None for what is none."""
    if isinstance(step, bool):
        return None
    try:
        number = operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        return None
    return number if 0 <= number < _STEPS else None


def _is_running(function: Any) -> bool:
    """Whether this thread is inside of it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None


def _switch_off_in_child() -> None:
    """A forked child is no trainer: it has its parent's objects, and neither agent nor lease."""
    for checkpointer in list(_LIVE):
        agent = checkpointer._agent
        if agent is not None and agent.closed:
            checkpointer._agent = None
            checkpointer._off = "this process was forked from the trainer, and is none"
            checkpointer._end.detach()
            _LIVE.discard(checkpointer)


# after the agent's own: imported first, called first
os.register_at_fork(after_in_child=_switch_off_in_child)
