"""`Checkpointer`: the part of keepstep that a training script uses.

The script calls `restore()` once on every rank, before the first step; with torch.distributed
initialized, this is a collective. It calls `save(step)` after `optimizer.step()`, and `close()` at
the end. Everything else happens outside the training thread. If a framework draws random numbers
between `restore()` and the first step, the script calls `restore(rng="later")` instead, and
`restore_rng()` once it has the first batch.

Without `strict=True`, `save` raises an error of keepstep only if the first step cannot be kept.
`restore`, `wait` and `close` always raise their errors.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import os
import sys
import threading
import time
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, cast

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from keepstep import processes, tracing
from keepstep.client import embedded
from keepstep.client.session import fetch_complete_step_numbers, restore_timeout_s
from keepstep.client.slot import GrantedSlot
from keepstep.core.restore_vote import Decision
from keepstep.core.staging_interval import StageCost, is_staging_due
from keepstep.errors import (
    FormatError,
    KeepstepError,
    NotDurableError,
    SlotUnavailable,
    UsageError,
    WithinStepError,
    few,
)
from keepstep.image import Layout, extras_codec
from keepstep.restore.collective import (
    AgreedEpoch,
    Collective,
    Gather,
    RunWithoutSidecar,
    logging_waits,
)
from keepstep.restore.modules import check_loads
from keepstep.restore.rank_restore import FillGuard, RankRestore
from keepstep.restore.rehearsal import (
    COMPONENT,
    Structure,
    check_state_round_trip,
    structure_changes,
    structure_of,
)
from keepstep.save.frozen_parameters import FrozenBase, FrozenParameters
from keepstep.save.mutation_guard import MutationGuard
from keepstep.save.save_thread import SaveThread, Stats
from keepstep.save.script_failures import (
    is_raised_by_signal_handler,
    is_script_failure,
    watch_uncaught,
)
from keepstep.save.snapshot import ImageOutcome, SnapshotMaker
from keepstep.state import rng, sharding
from keepstep.state.accelerator import check_tensor_has_storage
from keepstep.state.capture import (
    StateCapture,
    UnsavedBufferDetector,
    capture_state,
    check_components,
    encode_values,
    find_changing_places,
    find_loader_names,
    largest_value,
    layout_changes,
)
from keepstep.state.sharding import ALONE, Claim
from keepstep.state.taken_state import TakenState, skeleton_text
from keepstep.state.wrappers import is_known_component, unwrap_module
from keepstep.steps import Epoch, State, StepId, Tier
from keepstep.wire.trainer import SOCKET_ENV, LeaseGranted

if TYPE_CHECKING:
    from keepstep.save.replica_check import ReplicaCheck

log = logging.getLogger("keepstep")

_CONNECT_S = 30.0
_NO_RNG = (
    'restore(rng="later") was called, but restore_rng() was not before the first save(): random'
    " numbers are not those of an undisturbed run"
)
_SLOW_VALUES_S = 0.02
_MOVES = (
    "the state was given other memory between two steps, as if it was offloaded: from now on every"
    " step is copied before save() returns, and none of the former memory is held after that"
)
_MOST_CHANGES = 2
"""After so many saves in a row at which the layout had changed, small tensors that come and go are
kept as values are."""
_STEPS = 10**18  # the name of a step has at most 18 digits

ADAPTERS = {
    "transformers.trainer": "keepstep.integrations.transformers",
    "lightning.pytorch.trainer.trainer": "keepstep.integrations.lightning",
    "pytorch_lightning.trainer.trainer": "keepstep.integrations.lightning",
    "torchtitan.trainer": "keepstep.integrations.torchtitan",
    "ultralytics.engine.trainer": "keepstep.integrations.ultralytics",
}
"""The adapter for each module that contains a framework's loop."""


@dataclass(frozen=True, slots=True)
class Restored:
    """What `restore` brought back.

    `seconds`: time since `restore` was called. `bytes`: the bytes that this rank copied.
    """

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
        frozen_once: bool = False,
        dir: str | os.PathLike[str] | None = None,
        run: str | None = None,
        **named: Any,
    ) -> None:
        """Name the components to keep: modules, optimizers, schedulers, plain dicts.

        Pass them in a dict, or as keywords (`Checkpointer(model=model, optimizer=optimizer)`), or
        both. A component that has the name of one of these options must be in the dict:

        - `lazy`: copy parameters and optimizer state during the next forward and backward pass.
        - `strict`: let `save` raise if the step is not kept. For a free slot it waits up to a
          minute, where it would leave the step out otherwise.
        - `rng`: keep the states of the random generators.
        - `trusted`: pickle values that JSON cannot hold, and unpickle them at restore. Use it only
          for checkpoints that you wrote.
        - `replicated`: how the ranks divide the staging of tensors that they hold alike
          (DistributedDataParallel, the replicas of a mesh). With "PerNode", the ranks of each node
          stage them in parts, so that every node has a whole copy. With "Spread", all ranks share
          the parts: each stages fewer bytes, but the loss of a node loses its parts.
        - `frozen_once`: keep parameters that need no gradient once, beside the steps. A write of
          few elements past torch's version counters (`p.data[i] = x`) is seen some saves later:
          wrap it in `mutating()`.
        - `dir`: if no sidecar was started for this process (by `keepstep run`, or in its pod),
          start one on this machine. It keeps the run below this directory, is started again when it
          dies, and ends when it has had no trainer for five minutes. The environment holds its
          settings, which are those of `keepstep start`.
        - `run`: with `dir`, the name of the run below it, which then has a sidecar of its own,
          even if one was started for this process. So one process can train several times.

        Raises UsageError for components that keepstep cannot take or cannot put back.
        """
        if replicated not in ("PerNode", "Spread"):
            raise UsageError(f'replicated={replicated!r}: it is "PerNode" or "Spread"')
        options = {"lazy": lazy, "strict": strict, "rng": rng, "trusted": trusted}
        options["frozen_once"] = frozen_once
        for option, value in options.items():
            if isinstance(value, dict) or hasattr(value, "state_dict"):
                raise UsageError(
                    f"{option}= is an option, True or False; name a component so in the dict:"
                    f' Checkpointer({{"{option}": ...}})'
                )
        if not isinstance(run, str | None):
            raise UsageError(
                "run= is an option, the name of a run; name a component so in the dict:"
                ' Checkpointer({"run": ...})'
            )
        self._components = check_components(_joined(components, named))
        self._spread = replicated == "Spread"
        self._topology = ALONE
        self._lazy, self._strict, self._rng, self._trusted = lazy, strict, rng, trusted
        self._rank, self._world = _rank_and_world()
        self._saver: SaveThread | None = None
        self._snapshots: SnapshotMaker | None = None
        self._frozen_once, self._frozen = frozen_once, FrozenParameters()
        self._replicas: ReplicaCheck | None = None
        self._epoch: Epoch | None = None
        self._probed: TakenState | None = None
        self._restored: Layout | None = None
        self._taking = StateCapture(self._components)
        self._layout_changes = 0
        self._structure: Structure = {}
        self._changed: frozenset[str] = frozenset()
        self._refused: tuple[Structure, str] = {}, ""
        self._unsaved: UnsavedBufferDetector | None = None
        self._slow_reported = False
        self._cost, self._grid = StageCost(), (1, False)
        self._last_step = self._called_step = self._unhealthy = self._kept_step = -1
        self._moved = self._hinted = False
        self._left: UnslottedStep | None = None
        self._raised = False
        self._unclosed = ""
        # what `restore_rng` will set: None before restore(rng="later"), {} once it is set
        self._rng_later: dict[str, Any] | None = None
        # RLock is C code, so no exception can come between acquiring it and holding it
        self._turn = threading.RLock()
        self._saving = False
        self._stats = Stats()
        self._off, self._off_reported = "", False
        self._restore_timeout_s = restore_timeout_s()
        self._socket = embedded.ensure_sidecar(dir, run)
        if self._socket:
            keeper = embedded.sidecar_restarter(dir, run)
            self._saver = SaveThread(
                self._socket, rank=self._rank, world=self._world, keeper=keeper
            )
            self._stats = self._saver.stats
            # if close() is never called: at the end of the process, or of this object
            self._end = weakref.finalize(self, self._saver.shut_down_at_exit)
        else:
            log.warning(
                "keepstep: %s is not set, so no step is kept; start the training with"
                " `keepstep run -- ...`, or name a directory: Checkpointer(..., dir=...), which the"
                " adapters of frameworks take, too [save.disabled]",
                SOCKET_ENV,
            )
        _LIVE.add(self)
        _hook_optimizers()
        _hook_storages()
        _hook_loading()
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
        """The steps of this run that this rank's sidecar believes can be restored, ascending.

        These are the committed steps, and the steps of which the sidecar knows the images of all
        ranks, including images in shared memory.

        This is no collective. The answer is a snapshot: steps come and go, and other ranks may see
        other steps. Only `restore` makes the ranks agree. The list is empty without a sidecar
        (KEEPSTEP_SOCKET is not set). Waits until the sidecar has looked at its volumes. Raises
        SidecarAbsent, SidecarError.
        """
        return (
            sorted(fetch_complete_step_numbers(self._socket, timeout_s=_CONNECT_S))
            if self._socket
            else []
        )

    def preview(self, name: str) -> tuple[int, dict[str, Any]] | None:
        """The number of the step that `restore` would bring back now, and what it holds of `name`,
        a component that is a dict; {} if it has none. None if there is nothing to restore.

        Call it before `restore()`, when the components that the restore fills have to be made as
        the step says (parameter groups that were added, layers). Only that component is read, and
        nothing is changed. This is a collective, like `restore`, and raises as `restore` does.
        """
        if self._epoch is not None:
            raise UsageError("preview() comes before restore(), which was called already")
        found: dict[str, Any] = {}
        session = self._saver.session if self._saver is not None else None
        collective = Collective(session, rank=self._rank, world=self._world, quiet=True)
        nothing: Callable[[Gather], None] = lambda _: None  # noqa: E731

        def begin(decision: Decision) -> RankRestore:
            assert session is not None
            found.clear()
            return RankRestore(
                {name: found},
                session,
                decision,
                rank=self._rank,
                take=lambda: capture_state({name: found}),
                rng=False,
                trusted=self._trusted,
                partial=FillGuard(),
                timeout_s=self._restore_timeout_s,
                whole=False,
            )

        with logging_waits(self._socket, lambda: collective.doing, rank=self._rank):
            agreed = collective.restore(self._connect, begin, meet=nothing, begin_fresh=nothing)
        parent = agreed.epoch.parent if isinstance(agreed, AgreedEpoch) else None
        return None if parent is None else (parent.step, found)

    def restore(
        self, *, step: int | None = None, rng: Literal["now", "later"] = "now"
    ) -> Restored | None:
        """Bring back the newest step that every rank can restore, in place; None if there was none.

        `step`: go back to this step, one of `all_steps`, instead. The steps after it are dead from
        then on: no later restore takes them. The script goes back each time that it makes this
        call, so also each time that it is started again; the step is kept as long as it does.
        `keepstep run --restore-from` goes back only once, and takes precedence over `step`.
        `rng="later"` leaves the random generators to `restore_rng`, which a `Batches` among the
        components calls: then it need not be said.

        This is a collective: every rank must call it. It starts a new epoch. If there is nothing to
        restore and some ranks have no sidecar, all ranks train on and nothing is kept.

        Raises:

        - RestoreError (it names ranks, steps, tiers and what to do) if there is something to
          restore but it cannot be restored, for example because some ranks have no sidecar; also if
          `step` does not exist, or not on every rank.
        - SidecarAbsent if KEEPSTEP_SOCKET names a sidecar that does not answer. Starting over
          silently would lose the run.
        - UsageError, on every rank, if a component on any rank cannot be kept. It names the
          component, and is raised whether or not there is anything to restore.
        """
        started, grad = time.perf_counter(), torch.is_grad_enabled()
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
        for component in self._components.values():
            if hasattr(type(component), "restored_by"):  # a `Batches`
                component.restored_by(self)
                self._rng_later = {}
        self._hint()
        self._warn_of_loaders()
        check_components(self._components)  # an adapter completes them after `preview`
        session = self._saver.session if self._saver is not None else None
        collective = Collective(session, rank=self._rank, world=self._world, step=step)
        try:
            waits = logging_waits(self._socket, lambda: collective.doing, rank=self._rank)
            # a restore makes many small objects, and no garbage
            with waits, processes.pause_garbage_collection(), FillGuard() as partial:
                begin = functools.partial(self._restoring, partial)
                agreed = collective.restore(
                    self._connect, begin, meet=self._meet, begin_fresh=self._begin_fresh
                )
        finally:
            probed, self._probed = self._probed, None
            torch.set_grad_enabled(grad)  # an interrupt may come within torch.no_grad()
        if isinstance(agreed, RunWithoutSidecar):
            if agreed.reason:
                self._let_go(agreed.reason, timeout_s=5.0)
            return None
        seconds = time.perf_counter() - started
        parent, restoring = agreed.epoch.parent, agreed.restoring
        layout = None
        if restoring is not None:
            if self._rng_later is not None and self._rng:
                self._rng_later = restoring.rng
            layout = restoring.layout
            if self._frozen_once:
                self._frozen = FrozenParameters(restoring.base)
            restoring.unmap_image()
        collective.report_epoch_to_sidecar(agreed, seconds=time.perf_counter() - started)
        self._compare_replicas(agreed.epoch)
        self._taking, self._restored = StateCapture(self._components, probed), layout
        if probed is not None and self._frozen_once:
            self._frozen.watch_base_candidates(probed)
        self._order_slots()
        if self._saver is not None:
            self._follow_grid(self._saver)
        if parent is not None and restoring is not None:
            self._last_step = parent.step
        self._epoch = agreed.epoch  # last: what interrupts a restore before lets it be called again
        if parent is None or restoring is None:
            return None
        if self._rank == 0 and self._socket in _SAVED_IN:
            log.warning(
                "keepstep: this process has kept steps of this run before: this Checkpointer goes"
                " on from step %d of that training. A second training needs a run of its own:"
                " Checkpointer(..., dir=DIR, run=NAME), or another process and `keepstep run --run"
                " NAME` [restore.run_continued]",
                parent.step,
            )
        if self._rank == 0:
            log.warning(
                "keepstep: restored step %d of epoch %s from %s in %.2f s [restore.finished]",
                *(parent.step, parent.epoch.number, restoring.tier, seconds),
            )
        restored = Restored(
            step=parent.step,
            epoch=agreed.epoch.id.number,
            tier=restoring.tier,
            seconds=seconds,
            bytes=restoring.bytes,
        )
        tracing.record_span(
            "checkpoint_load",
            seconds,
            step=restored.step,
            epoch=restored.epoch,
            tier=str(restored.tier),
            bytes=restored.bytes,
            rank=self._rank,
        )
        return restored

    def _compare_replicas(self, epoch: Epoch) -> None:
        if self._world > 1 and (saver := self._saver) is not None:
            from keepstep.save.replica_check import ReplicaCheck

            several = len(set(self._topology.nodes)) > 1
            self._replicas = ReplicaCheck(
                rank=self._rank,
                epoch=epoch.id,
                warn=saver.warn_in_log_and_status,
                world=self._world if several else 0,
            )
            weakref.finalize(self, self._replicas.close)

    def restore_rng(self) -> bool:
        """Set the random generators to their state at the restored step; returns whether it did.

        Call it after `restore(rng="later")`, once everything that draws random numbers before the
        first batch (a loader's iterator, its sampler and workers) has done so. Only the first call
        sets the generators, so the call may stand inside the loop. It also returns False if no step
        was restored, or if the step lacks the random states of this rank. Raises UsageError if
        `restore(rng="later")` was not called.
        """
        if self._rng_later is None:
            raise UsageError(
                'there is no random state to set: call restore(rng="later") first (a plain'
                " restore() has set it already)"
            )
        state, self._rng_later = self._rng_later, {}
        rng.apply_generators(state)
        return bool(state)

    def _hint(self) -> None:
        """If a framework owns the loop, name its adapter: once, and only on rank 0."""
        ask = self._saver is not None and self._rank == 0 and not self._hinted
        if ask and (adapter := _adapter()):
            self._hinted = True
            log.warning(
                "keepstep: a framework owns this loop: no step has the place in its data and its"
                " counters; %s keeps them by one line (docs/frameworks.md)"
                " [integration.adapter_available]",
                adapter,
            )

    def _warn_of_loaders(self) -> None:
        """A loader draws random numbers when its iteration begins."""
        if not self._rng or self._rng_later is not None or self._rank:
            return
        if names := find_loader_names(self._components):
            log.warning(
                "keepstep: %s draws random numbers after restore() has set the random states, so"
                ' they will differ after a restart: call restore(rng="later"), and restore_rng()'
                " once the first batch is there (docs/add-keepstep.md, Where the data loader"
                " stands) [rng.restored_too_early]",
                few(names, 4),
            )

    def _connect(self) -> LeaseGranted:
        assert self._saver is not None
        return self._saver.session.granted or self._saver.acquire_lease(timeout_s=_CONNECT_S)

    def _meet(self, gather: Gather) -> None:
        """Agree which rank has which tensors, so that every rank knows what to stage.

        Foreign objects are left out: to ask one for its state before it was loaded may change it.
        Raises UsageError, on all ranks, if one of them has something that cannot be kept.
        """
        if self._world == 1:
            self._probed = self._probe(self._known())
        else:
            self._agree(gather, self._known)

    def _begin_fresh(self, gather: Gather) -> None:
        """Agree again, on the whole state, as there is nothing to restore. Raises UsageError as
        `_meet` does."""
        if self._world > 1:
            self._agree(gather, lambda: self._components, check=self._check_loads)
            return
        taken = self._probed
        if taken is None or len(taken.components) < len(self._components):
            taken = self._probe(self._components)
        self._check_loads(taken)

    def _check_loads_once(self, taken: TakenState, structure: Structure) -> None:
        """The same where a model has another structure than at `restore`, such as a layer that
        quantises its weights with the first batch. Other objects may take back a state only while
        they are new."""
        known, error = self._refused
        if known != structure:
            error = ""
            try:
                self._check_loads(taken, models_only=True)
            except UsageError as refusal:
                error = str(refusal)
            self._refused = structure, error
        if error:
            raise UsageError(error)

    def _check_loads(self, taken: TakenState, *, models_only: bool = False) -> None:
        """Raise UsageError for what could be kept, but never restored."""
        check_loads(taken)
        check_state_round_trip(taken, trusted=self._trusted, models_only=models_only)

    def _known(self) -> dict[str, Any]:
        """The components that give their state without running foreign code: modules, optimizers
        and dicts."""
        return {
            name: component
            for name, component in self._components.items()
            if is_known_component(component)
        }

    def _agree(
        self,
        gather: Gather,
        components: Callable[[], Mapping[str, Any]],
        *,
        check: Callable[[TakenState], None] = lambda _: None,
    ) -> None:
        def claims() -> frozenset[Claim]:
            taken = self._probe(components())
            check(taken)
            return taken.claims

        self._topology = sharding.agree_on_topology(
            claims,
            gather,
            rank=self._rank,
            world=self._world,
            node=sharding.derive_machine_name(self._socket),
            spread=self._spread,
        )

    def _probe(self, components: Mapping[str, Any]) -> TakenState:
        """Lay out the state of these components once.

        So the script learns what cannot be kept before the first step, and not from the log of a
        run that kept nothing. Raises UsageError.
        """
        taken = capture_state(components)
        names = dict.fromkeys(self._components, COMPONENT)
        self._structure = {**structure_of(taken), **names}
        for leaf in taken.tensors:
            check_tensor_has_storage(leaf.tensor, leaf.name)
        try:
            Layout.build(taken.specs, **self._layout_options(taken, len(self._encode(taken))))
        except FormatError as error:
            raise UsageError(f"this state cannot be kept: {error}") from error
        return taken

    def _take(self) -> TakenState:
        """What a restore compares with: the taken state without foreign objects. While a single
        rank restores, this is the result of `_probe`: no part of the state is replaced before every
        tensor is filled."""
        return self._probed or capture_state(self._known(), self._topology)

    def _restoring(self, partial: FillGuard, decision: Decision) -> RankRestore:
        assert self._saver is not None
        return RankRestore(
            self._components,
            self._saver.session,
            decision,
            rank=self._rank,
            take=self._take,
            rng=self._rng,
            rng_later=self._rng_later is not None,
            trusted=self._trusted,
            partial=partial,
            reader=self._topology.lowest_rank_here,
            timeout_s=self._restore_timeout_s,
            frozen_once=self._frozen_once,
        )

    def _order_slots(self) -> None:
        """Have the memory of images made from now on, if the layout is known: as that of what was
        restored, or without. A new optimizer has no state before its first step."""
        if self._saver is None:
            return
        if self._restored is not None:
            self._saver.use_layout(self._restored, self._frozen.base)
            return
        # a foreign object is not asked for its state before the first save: a loader may begin then
        for component in self._components.values():
            inner = unwrap_module(component)
            if not is_known_component(component) or (
                isinstance(inner, torch.optim.Optimizer) and not inner.state
            ):
                return
        with contextlib.suppress(Exception):  # the first save raises it again
            taken = self._taking.take(self._topology)
            self._snapshots_for(self._saver, taken, len(self._encode(taken)))

    # --- save --------------------------------------------------------------------------------

    def should_save(self, step: int) -> bool:
        """Whether `save(step)` would stage the step.

        It would if there is a sidecar, `restore` was called, the step is newer than the last one,
        and `--stage-every` does not leave it out.

        Use it to skip data that is expensive to collect for a step. Still call `save` for the other
        steps: it returns at once, and `close` makes the very last step durable.
        """
        number = _whole(step)
        if self._saver is None or self._epoch is None or number is None:
            return False
        return number > self._last_step and self._is_due(number)

    def _is_due(self, step: int) -> bool:
        every, trials = self._grid
        return is_staging_due(step, every, trials=trials)

    def save(self, step: int, *, healthy: bool = True) -> bool:
        """Keep this step. Returns at once; False if the step is not kept (the log says why).

        Call it after `optimizer.step()`, in the thread that trains, on every rank. Steps are whole
        numbers from 0, and each must be greater than the one before. True means that the step will
        be staged, or that its loss is logged and counted in `stats`. Saving the last step again
        returns True and does nothing if the step is kept or on its way: what is kept stays as it
        is.

        The first save of a life waits until memory for its image was made (at most a minute). It
        raises UsageError, even without `strict`, if the state cannot be kept, so that no run goes
        on for hours and keeps nothing. If the machine has too little memory, training goes on: the
        log says so with the sizes, once a minute, and every status does.

        Pass `healthy=False` if, for example, the loss or the gradients are not finite. The step is
        then not kept, and counts as a failure of the step that this life was restored from, like an
        error that ends the script. After two such failures within 20 steps, the next restore goes
        further back.
        """
        saver = self._saver
        if saver is None:
            return self._warn_off(step)
        started, grad = time.perf_counter(), torch.is_grad_enabled()
        number = _whole(step)
        if healthy and number is not None and self._epoch is not None:
            # the flag alone may be stale: an exception may come just where it is reset
            inside = self._saving and _is_running(Checkpointer._save)
            if number >= self._called_step and not inside:
                self._called_step, self._moved = number, False
            if not self._is_due(number):
                self._measure_cost(saver, started, due=False)
                return False
        if healthy and number == self._last_step and self._has(saver, number):
            return True
        try:
            if number is None:
                raise UsageError(f"save({step!r}): a step is a whole number, 0 to 10**18 - 1")
            if not healthy:
                return self._refuse_unhealthy(saver, number)
            self._measure_cost(saver, started, due=True)
            kept = self._save_alone(saver, number, started)
            if kept and tracing.MODULE in sys.modules:
                seconds = time.perf_counter() - started
                tracing.record_span("checkpoint_save", seconds, step=number, rank=self._rank)
            return kept
        except _Unkeepable as error:
            first, self._raised = self._kept_step < 0 and not self._raised, True
            if first or self._strict:
                raise UsageError(f"step {number} cannot be kept: {error}") from error.__cause__
            saver.skip(number, str(error), unkeepable=True)
            return False
        except Exception as error:
            if is_raised_by_signal_handler(error):
                self._interrupted(saver, number, error)
                raise
            if self._strict:
                raise
            saver.skip(number, str(error) or type(error).__name__)
            return False
        except BaseException as error:
            self._interrupted(saver, number, error)
            raise
        finally:
            if torch.is_grad_enabled() is not grad:  # a signal came just where no_grad() ends
                torch.set_grad_enabled(grad)
            self._count_blocked(started)
            saver.stats.saves += 1

    def _measure_cost(self, saver: SaveThread, started: float, *, due: bool) -> None:
        self._follow_grid(saver)
        kept, blocked_s = self._kept_step == self._last_step, self._stats.last_blocked_s
        self._cost.note_save(started, due=due, kept=kept, blocked_s=blocked_s)
        if due:  # it is reported with a staged step
            self._stats.staging_cost = self._cost.added_fraction

    def _follow_grid(self, saver: SaveThread) -> None:
        """Take over which steps are staged. Only `save` does, once it has decided about its own
        step: so it decides as `should_save` did, after which a script has collected the state."""
        self._grid = saver.stage_every, saver.stage_trials

    def _interrupted(self, saver: SaveThread, step: int | None, error: BaseException) -> None:
        """A signal's handler raised inside `save`. A step that is on its way is not lost."""
        if step is not None and not saver.is_known_step(step):
            saver.skip(step, f"{type(error).__name__} inside save()")

    def _has(self, saver: SaveThread, step: int) -> bool:
        """Whether the last step is kept, or on its way."""
        parent = self._epoch.parent if self._epoch is not None else None
        pending = saver.pending_image
        return (
            saver.find_staging_error(step) == ""
            or (pending is not None and pending.step == step)
            or (parent is not None and parent.step == step)
        )

    def _refuse_unhealthy(self, saver: SaveThread, step: int) -> bool:
        if self._epoch is None:
            raise UsageError("call restore() before the first save(): it agrees on the epoch")
        # `close` must not stage this state as an earlier step
        self._unhealthy, self._moved = step, True
        saver.skip(step, "the script says that it is not healthy")
        self._report_failure("save(healthy=False)")
        return False

    def _report_failure(self, reason: str) -> None:
        """Tell the sidecar that the script itself failed. A sidecar that is away does not learn of
        it."""
        step = max(self._last_step, self._called_step, self._unhealthy)
        if self._saver is not None and self._epoch is not None and step >= 0:
            self._saver.session.report_script_failure(StepId(self._epoch.id, step), reason)

    def _warn_off(self, step: object) -> bool:
        if self._off and not self._off_reported:
            self._off_reported = True
            log.warning(
                "keepstep: rank %d: step %s is not kept: %s [save.step_skipped]",
                *(self._rank, step, self._off),
            )
        return False

    def _save_alone(self, saver: SaveThread, step: int, started: float) -> bool:
        with self._turn:
            if self._saving and _is_running(Checkpointer._save):
                raise UsageError(
                    "save() was called inside save(), by a signal handler: let the handler set a"
                    " flag, and call save() in the training loop"
                )
            try:
                self._saving = True
                return self._save(saver, step, started)
            finally:
                self._saving = False

    def _save(
        self, saver: SaveThread, step: int, started: float, *, patience_s: float | None = None
    ) -> bool:
        """An exception at any line costs only this step; see `SaveThread.repair_after_error`."""
        saver.repair_after_error()
        if self._epoch is None:
            raise UsageError("call restore() before the first save(): it agrees on the epoch")
        if step <= self._last_step:
            only_grow = "steps only grow within an epoch"
            if self._strict:
                raise UsageError(f"step {step} comes after step {self._last_step}: {only_grow}")
            # the reason has no step numbers, because reasons are counted and logged by kind
            begin = "after a restore the loop begins at restore().step + 1"
            saver.skip(step, f"this step or a newer one was saved before: {only_grow}; {begin}")
            return False
        if self._kept_step < 0:
            self._hint()
        if self._rng_later:
            saver.warn("rng.not_restored", _NO_RNG)
        self._last_step, self._left = step, None
        _SAVED_IN.add(self._socket)
        saver.await_free_tensors(decided=False)
        try:
            state = self._laid_out(saver)
        except Exception as error:
            if is_raised_by_signal_handler(error) or isinstance(error, WithinStepError):
                raise
            raise _Unkeepable(str(error) or type(error).__name__) from error
        if self._replicas is not None:
            self._replicas.sample_replicas(state.taken, step)
        self._report_unsaved(saver, state.taken)
        lazy = self._lazy and not saver.copies_eagerly
        try:
            slot = saver.await_slot(timeout_s=patience_s, must_keep=self._strict)
        except SlotUnavailable as error:
            self._left = UnslottedStep.create_if_watchable(step, state)
            if self._strict:
                raise SlotUnavailable(f"step {step} is not kept: {error}") from None
            # no fault of the script's, and memory may be given later: training goes on
            saver.skip(step, str(error), unkeepable=bool(saver.refusal))
            return False
        doubted, saver.eager_next = saver.eager_next and self._lazy, False
        self._fill(saver, slot, state, step=step, lazy=lazy, started=started)
        if doubted:
            saver.watch_eager_copy(state.snapshots.guard_of_lazy(state.taken))
        return True

    def _fill(
        self,
        saver: SaveThread,
        slot: GrantedSlot,
        state: LaidOutState,
        *,
        step: int,
        lazy: bool,
        started: float,
    ) -> None:
        assert self._epoch is not None
        begin = state.snapshots.begin
        try:
            pending = begin(
                slot, state.taken, state.extras, step=step, epoch=self._epoch, lazy=lazy
            )
            if not lazy:
                pending.copy()
                pending.decide_outcome()
                if pending.verdict is ImageOutcome.VALID:
                    pending.seal()
            pending.thread = saver.trains or pending.thread
            pending.blocked_s = time.perf_counter() - started
            saver.submit(pending)
        except BaseException:
            saver.put_back_slot()
            raise
        self._kept_step = step

    def _laid_out(self, saver: SaveThread) -> LaidOutState:
        """The state as it is now.

        A layout that changes at each save costs the training thread a wait for new memory each
        time. So small tensors that come and go move to the extras, which have room for more.
        """
        taken = self._taking.take(self._topology)
        data, before = self._encode(taken), self._snapshots
        found: dict[str, str] = {}
        if before is not None and not before.fits_state(taken, len(data)):
            found = layout_changes(before.joined, taken)
        self._layout_changes = self._layout_changes + 1 if found else 0
        if self._layout_changes >= _MOST_CHANGES:
            loose = self._taking.loose | find_changing_places(found, taken)
            if loose != self._taking.loose:
                self._taking.loose, self._taking.before = loose, None
                taken = self._taking.take(self._topology)
                data = self._encode(taken)
        if self._layout_changes > _MOST_CHANGES:
            names = few([f"{name} {what}" for name, what in found.items()], 5)
            saver.warn(
                "save.layout_changing",
                f"the layout of the state has changed at each of the last {self._layout_changes}"
                f" saves, and each time save() waits for new memory: {names}. Keep what grows as a"
                " list of numbers, or in a tensor of its final size",
            )
        return LaidOutState(taken, data, self._snapshots_for(saver, taken, len(data)))

    def _snapshots_for(
        self, saver: SaveThread, taken: TakenState, extras_bytes: int
    ) -> SnapshotMaker:
        """The snapshots for this state's layout. Builds a new layout when tensors were added or
        removed, or changed their shape."""
        base, snapshots = self._base(saver, taken), self._snapshots
        fits = snapshots is not None and snapshots.fits_state(taken, extras_bytes)
        if snapshots is None or not fits or snapshots.base is not base:
            self._report_changes(saver, taken)
            options = self._layout_options(taken, extras_bytes, base)
            specs = [spec for spec in taken.specs if base is None or spec.name not in base.names]
            layout = Layout.build(specs, before=self._restored, **options)
            self._restored = None
            snapshots = SnapshotMaker(layout, taken, run=saver.session.run, base=base)
            self._snapshots = snapshots
            saver.use_layout(layout, base)
        return snapshots

    def _base(self, saver: SaveThread, taken: TakenState) -> FrozenBase | None:
        """The base to which this state's image refers."""
        if not self._frozen_once:
            return None
        lazy = self._lazy and not saver.copies_eagerly
        base = self._frozen.find_base(
            taken, rank=self._rank, world=self._world, may=self._lazy, lazy=lazy
        )
        if self._frozen.unseen:
            names = few(sorted(self._frozen.unseen), 4)
            message = (
                f"frozen parameters were changed past torch's version counters: {names}. Step"
                f" {self._last_step} has the new values, some steps before it the former. Wrap such"
                " changes in checkpointer.mutating()"
            )
            # again where others are found later
            saver.warn("save.frozen_parameters_changed", message, per=names)
        if not self._lazy and self._frozen.left_bytes:
            saver.warn(
                "save.frozen_copied",
                f"each image holds {self._frozen.left_bytes:,} bytes of frozen parameters, which"
                " could be kept once: lazy=False copies all that may change",
            )
        return base

    def _report_changes(self, saver: SaveThread, taken: TakenState) -> None:
        """Name what a restart could not restore unless the script builds it first."""
        now = {**structure_of(taken), **dict.fromkeys(taken.components, COMPONENT)}
        found = structure_changes(self._structure, now)
        if found:
            self._check_loads_once(taken, now)
        texts = [found[name] for name in sorted(found.keys() - self._changed)]
        self._structure, self._changed = now, self._changed | found.keys()
        if texts:
            log.warning(
                "keepstep: rank %d: since restore() %s. Build this before restore(), or the next"
                " start ends in an error; latest_step(), called first, tells which step it must fit"
                " (docs/add-keepstep.md, Models that change) [model.built_after_restore]",
                *(self._rank, few(texts, 4)),
            )

    def _layout_options(
        self, taken: TakenState, extras_bytes: int, base: FrozenBase | None = None
    ) -> dict[str, Any]:
        """The arguments of a layout other than the tensors. `base`: what names tied tensors in the
        place of the layout."""
        elsewhere: frozenset[str] = frozenset() if base is None else base.names
        return {
            "rank": self._rank,
            "world": self._world,
            "aliases": {
                alias: name for alias, name in taken.aliases.items() if name not in elsewhere
            },
            "skeleton": skeleton_text(taken.skeleton),
            "extras_capacity_bytes": extras_codec.capacity_for(extras_bytes),
            "twins": taken.twins,
            "parameters": taken.parameters,
        }

    def _encode(self, taken: TakenState) -> bytes:
        captured = rng.capture_all_generators() if self._rng else None
        started = time.thread_time()
        difference = self._replicas.difference if self._replicas is not None else ""
        base = self._frozen.base
        reloaded = str(base.ref.step) if base and base.ref and base.reloaded else ""
        data = encode_values(
            taken, rng=captured, trusted=self._trusted, difference=difference, reloaded=reloaded
        )
        if time.thread_time() - started > _SLOW_VALUES_S and not self._slow_reported:
            self._slow_reported = True
            log.warning(
                "keepstep: rank %d: each save takes %.0f ms for values that are no tensors, most of"
                " it for %s; make arrays or tensors of numbers, or keep less of it"
                " [save.values_slow]",
                *(
                    self._rank,
                    1000 * (time.thread_time() - started),
                    largest_value(taken, self._trusted),
                ),
            )
        return data

    def _report_unsaved(self, saver: SaveThread, taken: TakenState) -> None:
        if self._unsaved is None:
            self._unsaved = UnsavedBufferDetector(self._components)
        if names := self._unsaved.changed(taken):
            saver.warn(
                "save.buffer_left_out",
                f"{few(names, 4)}: changes while training, but is in no checkpoint, as it has"
                " persistent=False; register it with persistent=True, or keep it in a dict of the"
                " Checkpointer, too",
            )

    def fence(self) -> None:
        """Return when no copy reads the live tensors any more.

        keepstep does this before every optimizer step; `mutating()` is its public form.
        """
        self._fence(decided=True)

    def _fence(self, *, decided: bool) -> None:
        """`decided`: wait also until it is certain whether the image is whole. Who changes tensors
        from here on where no stream of this thread waits for the comparison could spoil it."""
        saver = self._saver
        if saver is None:
            return
        self._moved = True
        started = time.perf_counter()
        try:
            saver.await_free_tensors(decided=decided)
            if self._taking.has_moved_optimizer_tensors():
                saver.copy_all_eagerly(_MOVES)
        except Exception as error:
            if self._strict:
                raise
            text = "the wait for the copy of the last step failed, which may cost this step"
            saver.warn("save.wait_failed", f"{text}: {error!r}")
        finally:
            self._count_blocked(started, new=False)

    def _keeps(self, module: nn.Module) -> bool:
        """Whether a part of this module is one of the components, or a part of one."""
        if self._saver is None or self._epoch is None:
            return False
        kept = {
            id(part)
            for component in self._components.values()
            if isinstance(inner := unwrap_module(component), nn.Module)
            for part in inner.modules()
        }
        return any(id(part) in kept for part in module.modules())

    @contextlib.contextmanager
    def mutating(self) -> Iterator[None]:
        """Wrap code that changes parameters or optimizer state outside `optimizer.step()`."""
        self.fence()
        self._frozen.note_mutation()
        yield

    # --- wait and close ----------------------------------------------------------------------

    def wait(self, step: int, state: State | str = State.COMMITTED, timeout: float = 60.0) -> None:
        """Return when `step` itself is `staged`, `durable` or `committed`; `timeout` in seconds.

        The step is persisted now, even if the schedule would not persist it. Raises NotDurableError
        with the reason if the step is lost, or has not reached the state in time. Raises UsageError
        for a step that was never saved here, or is older than the last 10,000 saved steps.
        """
        saver = self._saver
        if saver is None or self._epoch is None:
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
        self._await_staged(saver, number, timeout)
        if state is State.STAGED:
            return
        step_id = StepId(self._epoch.id, number)
        saver.session.wait(step_id, state, timeout_s=_left_s(deadline))

    def _await_staged(self, saver: SaveThread, step: int, timeout_s: float) -> None:
        pending = saver.pending_image
        asked = pending is not None and pending.step == step
        if (asked or saver.find_staging_error(step) is None) and not saver.drain(
            timeout_s=timeout_s
        ):
            raise NotDurableError(f"step {step} is not staged after {timeout_s:.0f} s")
        outcome = saver.find_staging_error(step)
        if outcome is None and step <= self._called_step and not self._is_due(step):
            outcome = f"one in {self._grid[0]} steps is (--stage-every)"
        if outcome is None:
            raise UsageError(f"step {step} was never saved here, or longer ago than is remembered")
        if outcome:
            raise NotDurableError(f"step {step} was not staged: {outcome}")

    def close(self, timeout: float = 300.0) -> None:
        """Make the last step durable on every rank, then let go of the sidecar.

        The last step is the last one that `save` was called for. If `--stage-every` left it out, it
        is staged now, so call `close` while the state is still the state of that step. If there is
        an archive, the last step is uploaded even if it is not due.

        Raises NotDurableError, which names the step, if the step is not durable within `timeout`
        seconds. If it is only not archived by then, this is an error only with `strict`, and is
        logged otherwise. A second call does nothing, or raises the same error again at once.

        Call it before the state changes, for example before the best weights are loaded. If the
        script changed the state while the last step was copied, that step is lost. This is only
        logged if an earlier step of this life is durable; with `strict` it is an error.
        """
        if self._unclosed:
            raise NotDurableError(self._unclosed)
        saver = self._saver
        if saver is None:
            return
        deadline = time.monotonic() + timeout
        try:
            if self._epoch is not None and max(self._last_step, self._called_step) >= 0:
                self._close_last(saver, timeout)
        except BaseException as error:
            last = max(self._last_step, self._called_step)
            self._unclosed = (
                str(error)
                if isinstance(error, KeepstepError)
                else f"close() was interrupted ({_named(error)}) before step {last} was durable"
            )
            raise
        finally:
            self._let_go("close() was called", timeout_s=deadline - time.monotonic())

    def _let_go(self, reason: str, *, timeout_s: float) -> None:
        saver, self._saver, self._off = self._saver, None, reason
        self._taking.before = self._snapshots = self._left = None  # they hold the script's tensors
        _LIVE.discard(self)
        if self._replicas is not None:
            self._replicas.close(timeout_s=max(0.0, min(timeout_s, 1.0)))
        if saver is not None:
            saver.close(timeout_s=max(0.2, min(timeout_s, 5.0)))
            self._end.detach()

    def _close_last(self, saver: SaveThread, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        assert self._epoch is not None
        last = max(self._last_step, self._called_step)
        if not saver.drain(timeout_s=timeout_s):
            raise NotDurableError(f"step {last} is not staged after {timeout_s:.0f} s")
        why_not = self._stage_last(saver, deadline)
        if saver.find_staging_error(last) is None and _is_running(Checkpointer._save):
            why_not = why_not or "close() was called inside its save()"
        newest = saver.staged_step
        if newest is None:
            if self._epoch.parent is not None and last == self._epoch.parent.step:
                return
            raise NotDurableError(f"no step was staged: {why_not or saver.stats.why_not()}")
        saver.session.wait(newest.control.step_id, State.COMMITTED, timeout_s=_left_s(deadline))
        if newest.step != last:
            why_not = why_not or saver.find_staging_error(last) or saver.stats.why_not()
            text = f"step {last} was not staged; the newest durable one is {newest.step}: {why_not}"
            if self._strict or saver.mutated_step != last:
                raise NotDurableError(text)
            log.warning(
                "keepstep: rank %d: %s; call close() first, then load other weights"
                " [save.last_step_lost]",
                *(self._rank, text),
            )
        if saver.session.archive:
            self._archive_last(saver, newest.control.step_id, _left_s(deadline))

    def _stage_last(self, saver: SaveThread, deadline: float) -> str:
        """Stage the last step if `--stage-every` left it out, or if there was no slot for it.
        Returns why that was not possible, or ''."""
        left, step = self._left, self._called_step
        if unstaged := step > self._last_step:  # or its save() ended early
            if self._moved:
                if error := saver.find_staging_error(step):
                    return f"{error}; the state has changed since"
                if self._is_due(step):
                    return "its save() ended early, and the state has changed since"
                return "not every step is staged, and the state has changed since (--stage-every)"
            saver.eager_next = True
        elif left is None:
            return ""
        elif culprit := left.guard.find_changed_tensor():
            return f"{saver.find_staging_error(left.step)}; {culprit} has changed since"
        started = time.perf_counter()
        saver.stats.saves += 1
        try:
            if unstaged:
                with self._turn:
                    self._save(saver, step, started, patience_s=_left_s(deadline))
            elif left is not None:
                slot, step = saver.await_slot(timeout_s=_left_s(deadline)), left.step
                self._fill(saver, slot, left.state, step=step, lazy=False, started=started)
        except Exception as error:
            return str(error) or type(error).__name__
        saver.drain(timeout_s=_left_s(deadline))
        return saver.find_staging_error(step) or ""

    def _archive_last(self, saver: SaveThread, step_id: StepId, timeout_s: float) -> None:
        try:
            saver.session.wait(step_id, State.ARCHIVED, timeout_s=timeout_s)
        except NotDurableError as error:
            if self._strict:
                raise
            log.warning(
                "keepstep: step %d is committed, but not in the archive yet; the sidecar goes on"
                " uploading until it ends: %s [archive.upload_pending]",
                step_id.step,
                error,
            )

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        if kind is None:
            self.close()
        elif self._saver is not None:
            self._saver.drain(timeout_s=1.0)
            if is_script_failure(error):
                self._report_failure(_named(error))
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


class _Unkeepable(UsageError):
    """The state itself cannot be kept, now and at the next save."""


class LaidOutState(NamedTuple):
    """A state, its extras, and the snapshots for its layout."""

    taken: TakenState
    extras: bytes
    snapshots: SnapshotMaker


class UnslottedStep(NamedTuple):
    """A step for which there was no slot, and what `close` needs to stage it if nothing changed."""

    step: int
    state: LaidOutState
    guard: MutationGuard

    @classmethod
    def create_if_watchable(cls, step: int, state: LaidOutState) -> UnslottedStep | None:
        """None if a later change of the state could not be noticed."""
        guard = state.snapshots.guard_of_all(state.taken)
        return None if guard is None else cls(step, state, guard)


def _left_s(deadline: float) -> float:
    return max(0.1, deadline - time.monotonic())


def _joined(components: Mapping[str, Any] | None, named: Mapping[str, Any]) -> Mapping[str, Any]:
    """One view of both mappings; it shows later replacements of entries. Raises UsageError."""
    if components is None:
        return named
    if not named or not isinstance(components, Mapping):
        return components
    if twice := sorted(components.keys() & named.keys()):
        raise UsageError(f"{', '.join(twice)}: named in the dict and as a keyword")
    # the Checkpointer only reads what it is given
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
_SAVED_IN: set[str] = set()
"""The sockets of the runs of which this process has saved a step."""


@functools.cache
def _hook_optimizers() -> None:
    """Run the fence before every optimizer step of this process."""

    def before(*_: object) -> None:
        for checkpointer in list(_LIVE):
            if checkpointer._saver is not None:
                checkpointer._saver.trains = threading.get_ident()
            checkpointer._fence(decided=False)

    # torch.compile traces an optimizer's step together with its hooks, and a traced fence would
    # compare other versions (`torch.compiler.disable` would import torch._dynamo at this point)
    register_optimizer_step_pre_hook(torch._disable_dynamo(before))  # type: ignore[attr-defined]


@functools.cache
def _hook_storages() -> None:
    """Run the fence before the memory of a storage is freed while a copy reads it. A copy of memory
    that is gone would end the process."""

    def fenced(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def after_the_copy(storage: torch.UntypedStorage, *args: Any, **options: Any) -> Any:
            for checkpointer in list(_LIVE):
                saver = checkpointer._saver
                if saver is not None and saver.reads(storage):
                    checkpointer._fence(decided=True)
            return method(storage, *args, **options)

        return after_the_copy

    for name in ("resize_", "_share_fd_cpu_", "_share_filename_cpu_"):
        setattr(torch.UntypedStorage, name, fenced(getattr(torch.UntypedStorage, name)))


@functools.cache
def _hook_loading() -> None:
    """Run the fence before `load_state_dict` of a module that is kept, as before an optimizer step.

    The loaded optimizer state is made of new tensors, and a copy holds the old ones.
    """
    load = nn.Module.load_state_dict

    @functools.wraps(load, assigned=("__name__", "__qualname__", "__doc__"))
    def load_state_dict(module: nn.Module, *args: Any, **options: Any) -> Any:
        for checkpointer in list(_LIVE):
            if checkpointer._keeps(module):
                checkpointer._fence(decided=True)
        return load(module, *args, **options)

    setattr(nn.Module, "load_state_dict", load_state_dict)  # noqa: B010


@functools.cache
def _hook_failures() -> None:
    """Report an error that ends the script. Hooks once per process."""

    def report(error: BaseException) -> None:
        for checkpointer in list(_LIVE):
            checkpointer._report_failure(_named(error))

    watch_uncaught(report)


def _named(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}"


def _whole(step: object) -> int | None:
    """`step` as a number; None if it is not a valid step."""
    if isinstance(step, bool):
        return None
    try:
        number = operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        return None
    return number if 0 <= number < _STEPS else None


def _is_running(function: Any) -> bool:
    """Whether this thread is inside `function`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None


def _adapter() -> str:
    """The adapter for the loop that makes this call.

    Empty if the loop is the script's own, or if the adapter is already imported: then the script
    uses it, or knows of it.
    """
    frame = sys._getframe(1)
    while frame is not None:
        found = ADAPTERS.get(frame.f_globals.get("__name__", ""), "")
        if found:
            return "" if found in sys.modules else found
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def _switch_off_in_child() -> None:
    """Switch off in a forked child, which is no trainer: it has copies of its parent's objects, but
    neither its saver nor its lease."""
    for checkpointer in list(_LIVE):
        saver = checkpointer._saver
        if saver is not None and saver.closed:
            checkpointer._saver = None
            checkpointer._off = "this process was forked from the trainer, and is none"
            checkpointer._end.detach()
            _LIVE.discard(checkpointer)


# runs after the save thread's hook, whose module is imported first: handlers run in the order of
# registration
os.register_at_fork(after_in_child=_switch_off_in_child)
