"""This process's connection to its sidecar, which all writers and readers of `keepstep.dcp` share,
and what its ranks agree on.

A rank has one lease, and its images have one epoch between two loads, so each process has one
session. It ends when the process exits, or with `close`.

The ranks agree through DCP's own exchange of plans: each rank puts a `Ballot` into its local plan,
and the coordinator answers with an `AgreedSave` in each rank's part of the global plan. So keepstep
needs no collective of its own, and the group that DCP was given (a process group, or
`no_dist=True`) is the world of the step. DCP does not tell a storage writer its group, so a
separate vote would meet the wrong ranks.

The skeleton of an image of a `dcp.save` (`SavedStateTree`) has the names of the values that are not
tensors (their bytes are in the extras), which entries are boxes of one tensor (`name@0`, `name@1`),
and the planner's mapping from flat names to paths. All of it stays the same as long as the keys of
the state dict do. So DCP's `Metadata` of a step is rebuilt from the headers alone.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)

from keepstep.client import copying
from keepstep.client.slot import GrantedSlot, SlotMapping
from keepstep.core.restore_vote import Candidates, choose_step, find_step_limit
from keepstep.errors import (
    FormatError,
    NotDurableError,
    NothingCommonError,
    RestoreError,
    SlotUnavailable,
    UsageError,
)
from keepstep.image import ControlPage, Layout, TensorRole, TensorSpec, strictjson
from keepstep.image.extras_codec import capacity_for
from keepstep.restore.collective import ask_candidates, report_epoch_begin
from keepstep.save.save_thread import SaveThread
from keepstep.save.snapshot import ImageOutcome, PendingImage
from keepstep.state import accelerator
from keepstep.state.taken_state import DTYPE_OF, get_image_dtype_name
from keepstep.steps import Epoch, EpochId, State, StepId, Tier, TierAnswer
from keepstep.wire.trainer import SOCKET_ENV

_MARK = "dcp"

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, kw_only=True)
class SavedStateTree:
    """The tree of one rank's image of a `dcp.save`.

    `values`: names of the values that are not tensors. `paths`: the path of each flat name in the
    nested state dict; None if the planner did not flatten it. `foreign`: a `Checkpointer` made the
    image, which has another kind of tree.
    """

    values: tuple[str, ...] = ()
    paths: Mapping[str, KeyPath] | None = None
    foreign: bool = False

    def to_skeleton_json(self) -> str:
        """The skeleton for the header. Raises UsageError for a path that JSON would change."""
        if self.paths is not None:
            _check_paths(self.paths)
        tree = {
            _MARK: 1,
            "values": list(self.values),
            "paths": None if self.paths is None else {k: list(p) for k, p in self.paths.items()},
        }
        return json.dumps(tree, separators=(",", ":"))

    @classmethod
    def parse(cls, skeleton: str) -> SavedStateTree:
        """The inverse of `to_skeleton_json`; empty and `foreign` for an image of a `Checkpointer`.

        Raises FormatError.
        """
        try:
            tree = strictjson.loads(skeleton, what="the tree of this image") if skeleton else None
            if not isinstance(tree, dict) or _MARK not in tree:
                return cls(foreign=True)
            paths = tree["paths"]
            return cls(
                values=tuple(map(_text, tree["values"])),
                paths=None if paths is None else {k: _path(p) for k, p in paths.items()},
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise FormatError(f"the tree of this image is invalid ({error})") from error


def extract_flatten_mapping(planner_data: Any) -> Mapping[str, KeyPath] | None:
    """The mapping that the stock planner leaves in a plan; None if there is none.

    Raises UsageError for the data of another planner, which could only be pickled.
    """
    if planner_data is None:
        return None
    if not isinstance(planner_data, Mapping):
        raise UsageError(
            f"the planner's data is a {type(planner_data).__name__}, which keepstep does not keep:"
            " only the mapping of names to paths that DefaultSavePlanner makes"
        )
    return planner_data


def _check_paths(paths: Mapping[str, KeyPath]) -> None:
    for name, path in paths.items():
        if type(name) is not str or any(type(part) not in (str, int) for part in path):
            raise UsageError(f"the planner maps {name!r} to {path!r}: only strings and numbers can")


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{strictjson.quote_text(value)} is not a string")
    return value


def _path(value: object) -> KeyPath:
    if not isinstance(value, list) or any(type(part) not in (str, int) for part in value):
        raise TypeError(f"{strictjson.quote_text(value)} is not a path")
    return tuple(value)


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Ballot:
    """What one rank knows before a save.

    `epoch`: the epoch that the rank is in, if it saved before; `world`: the number of ranks of that
    epoch. `loaded`: the step that it goes on from. `highest_epoch`: the highest epoch number that
    its sidecar ever saw.
    """

    step: int
    epoch: Epoch | None
    world: int
    loaded: StepId | None
    highest_epoch: int


@dataclass(frozen=True, kw_only=True)
class AgreedSave:
    """What one rank must do: as `rank` of `world`, write its image of `step` in `epoch`."""

    step: int
    epoch: Epoch
    rank: int
    world: int


def choose_save_epoch(ballots: Sequence[Ballot], *, nonce: str) -> list[AgreedSave]:
    """Decide from the ballots of all ranks, in rank order. Pure.

    If all ranks are in one epoch of this world, they stay in it. Otherwise a new epoch begins,
    whose parent is the step that all of them loaded. An epoch has one world: otherwise a rank that
    saves alone would by itself commit a step of the other ranks. Raises UsageError if the ranks
    save different steps, or loaded different steps.
    """
    step = _same([ballot.step for ballot in ballots], "save steps")
    loaded = _same([ballot.loaded for ballot in ballots], "loaded")
    epoch = ballots[0].epoch
    world = len(ballots)
    if epoch is None or any((ballot.epoch, ballot.world) != (epoch, world) for ballot in ballots):
        number = max(ballot.highest_epoch for ballot in ballots) + 1
        epoch = Epoch(EpochId(number, nonce), loaded)
    return [AgreedSave(step=step, epoch=epoch, rank=rank, world=world) for rank in range(world)]


def _same(values: Sequence[T], what: str) -> T:
    for rank, value in enumerate(values):
        if value != values[0]:
            raise UsageError(
                f"rank 0 and rank {rank} {what} {values[0]} and {value}:"
                " all ranks must name the same step"
            )
    return values[0]


# --- which step is loaded --------------------------------------------------------------------
#
# Which step the ranks of a `dcp.load` load: `keepstep.core.restore_vote` decides, through DCP's own
# exchange.
#
# DCP plans before it exchanges anything. So each rank plans for the newest step that its own
# sidecar can bring, and its ballot travels with that plan. The coordinator answers with the newest
# step that all ranks can bring, and a rank that planned for another step plans again. As with a
# save, keepstep needs no collective of its own, and the group that DCP was given is the group that
# agrees.
#
# Only *offers* count: steps of which a sidecar can bring every byte of every rank. The rank's own
# image is not enough, because DCP's planner keeps replicated tensors in one of the ranks' images.


@dataclass(frozen=True, kw_only=True)
class LoadStepBallot:
    """What one rank knows before a load. `step`: the number that is asked for; None for the newest.
    `failed`: steps that the rank could not read."""

    vote: Candidates
    step: int | None
    failed: frozenset[StepId]


def choose_load_step(ballots: Sequence[LoadStepBallot]) -> StepId | None:
    """The newest step that all ranks can bring, from the ballots in rank order; None if nothing was
    ever kept. Pure.

    Raises UsageError if the ranks ask for different steps, and RestoreError if there are steps, but
    none that all ranks can bring.
    """
    for rank, ballot in enumerate(ballots):
        if ballot.step != ballots[0].step:
            raise UsageError(
                f"rank 0 asks for step {ballots[0].step}, rank {rank} for {ballot.step}: all ranks"
                " must name the same step, or none"
            )
    limit, exact = find_step_limit([ballot.vote for ballot in ballots])
    votes = [_offers_of(ballot) for ballot in ballots]
    for rank, (ballot, vote) in enumerate(zip(ballots, votes, strict=True)):
        if not vote.offers:
            if limit is None and ballot.step is None and all(map(_is_empty, ballots)):
                return None
            raise _nothing(rank, ballot, votes)
    failed = {step_id for ballot in ballots for step_id in ballot.failed}
    return choose_step(votes, failed, limit=limit, exact=exact, lending=False).id


def _offers_of(ballot: LoadStepBallot) -> Candidates:
    offers = tuple(offer for offer in ballot.vote.offers if ballot.step in (None, offer.id.step))
    return replace(ballot.vote, candidates=(), offers=offers)


def _is_empty(ballot: LoadStepBallot) -> bool:
    vote = ballot.vote
    return vote.answer is TierAnswer.NONE and not vote.candidates and not vote.offers


def _nothing(rank: int, ballot: LoadStepBallot, votes: Sequence[Candidates]) -> RestoreError:
    """Why this rank has nothing to bring although a step must be loaded."""
    vote, which = ballot.vote, "" if ballot.step is None else f" {ballot.step}"
    others = sorted({offer.id for each in votes for offer in each.offers})
    hint = f"; another rank can bring {others[-1]}" if others else ""
    if vote.answer is TierAnswer.UNKNOWN:
        return RestoreError(
            f"rank {rank}: the steps to load are unknown: {vote.reason}; bring that storage"
            f" back, or load a copy by its path{hint}"
        )
    own = [
        candidate.id for candidate in vote.candidates if ballot.step in (None, candidate.id.step)
    ]
    if own and not vote.offers:
        return NothingCommonError(
            f"rank {rank}: its sidecar holds step {max(own)}, but not the images of all ranks of"
            " it: dcp.load needs them within reach of every sidecar, by peers or by an archive"
            f" (or keepstep.Checkpointer, which needs a rank's own image only){hint}"
        )
    return RestoreError(
        f"rank {rank}: no committed step{which} to load{hint}: `keepstep steps` lists what is"
        " there, and keepstep.dcp.latest_step() is None when a run begins"
    )


Resolve = Callable[[WriteItem], Any]
"""Gives the tensor of an item, as `resolve_data` of a planner does."""

_BATCH_BYTES = 256 << 20
"""Resolving an item may allocate memory, so at most about this much is resolved before it is
copied."""


@dataclass(frozen=True, kw_only=True)
class SaveItems:
    """A save plan, taken apart. `tensors` and `specs` correspond one to one, in the plan's
    order."""

    tensors: tuple[WriteItem, ...]
    specs: tuple[TensorSpec, ...]
    values: tuple[WriteItem, ...]
    tree: SavedStateTree

    @classmethod
    def of(cls, plan: SavePlan) -> SaveItems:
        """Take a plan apart. Raises UsageError for an item that an image cannot hold."""
        tensors = tuple(item for item in plan.items if item.type is not WriteItemType.BYTE_IO)
        values = tuple(item for item in plan.items if item.type is WriteItemType.BYTE_IO)
        names = _entry_names(tensors)
        tree = SavedStateTree(
            values=tuple(item.index.fqn for item in values),
            paths=extract_flatten_mapping(plan.planner_data),
        )
        specs = tuple(_spec(name, tensor) for name, tensor in zip(names, tensors, strict=True))
        return cls(tensors=tensors, specs=specs, values=values, tree=tree)

    def serialize_non_tensors(self, planner: SavePlanner) -> dict[str, bytes]:
        """For each value that is not a tensor, the bytes that DCP's planner makes of it."""
        read = {}
        for item in self.values:
            stream: Any = planner.resolve_data(item)
            read[item.index.fqn] = bytes(stream.getbuffer())
        return read

    def copy_into(self, slot: SlotMapping, resolve: Resolve) -> None:
        """Copy every tensor into its place in the slot. Raises UsageError: see
        `resolve_tensors`."""
        moves: list[copying.MemoryMove] = []
        copies: list[copying.TensorCopy] = []
        held: list[Tensor] = []
        batch = 0
        for spec, tensor in self.resolve_tensors(resolve):
            entry = slot.layout.entries[spec.name]
            target, size = slot.view_tensor(entry), entry.end - entry.begin
            if size:
                if type(tensor) in (Tensor, torch.nn.Parameter) and copying.is_plain(tensor):
                    source = tensor.data_ptr()
                    moves.append(copying.MemoryMove(slot.address + entry.begin, source, size))
                else:
                    copies.append(copying.TensorCopy(target, tensor))
                held.append(tensor)
                batch += size
            if batch >= _BATCH_BYTES:
                copying.run_transfers(
                    copying.Transfers(moves, copies), threads=copying.default_threads()
                )
                moves, copies, held, batch = [], [], [], 0
        copying.run_transfers(copying.Transfers(moves, copies), threads=copying.default_threads())

    def resolve_tensors(self, resolve: Resolve) -> Iterator[tuple[TensorSpec, Tensor]]:
        """Every tensor as `resolve` gives it. Raises UsageError for a tensor that is not as
        planned."""
        for spec, item in zip(self.specs, self.tensors, strict=True):
            tensor: Any = resolve(item)
            if tuple(tensor.shape) != spec.shape or tensor.dtype != DTYPE_OF[spec.dtype]:
                raise UsageError(
                    f"{spec.name}: planned as {spec.dtype}{list(spec.shape)}, but it is"
                    f" {tensor.dtype} of {list(tensor.shape)} when it is saved"
                )
            yield spec, tensor.detach()


def _entry_names(items: Sequence[WriteItem]) -> list[str]:
    """The name of each entry: the tensor's name, or `name@0`, `name@1` for several boxes of one
    tensor in this rank."""
    counts = Counter(item.index.fqn for item in items)
    used: Counter[str] = Counter()
    names = []
    for item in items:
        name = item.index.fqn
        if counts[name] > 1:
            used[name] += 1
            name = f"{name}@{used[name] - 1}"
        names.append(name)
    return names


def _spec(name: str, item: WriteItem) -> TensorSpec:
    data = item.tensor_data
    if data is None:
        raise UsageError(f"{item.index.fqn}: the planner plans a tensor without its box")
    return TensorSpec(
        name=name,
        dtype=get_image_dtype_name(data.properties.dtype, name=item.index.fqn),
        shape=tuple(data.chunk.sizes),
        section=TensorRole.REST,
        offsets=tuple(data.chunk.offsets),
        global_shape=tuple(data.size),
        tensor=None if name == item.index.fqn else item.index.fqn,
    )


log = logging.getLogger("keepstep")

_CONNECT_S = 30.0
_SLOT_S = 600.0
_DURABLE_S = 1800.0


class DcpSession:
    """The lease of one rank, its epoch and its layout."""

    def __init__(self, socket_path: str) -> None:
        self.socket_path = socket_path
        self._saver: SaveThread | None = None
        self._place: tuple[int, int] | None = None
        self._epoch: Epoch | None = None
        self._over: set[EpochId] = set()
        self._loaded: tuple[StepId, Tier] | None = None
        self._last_step = -1
        self.failed: set[StepId] = set()
        """Steps that a load could not read completely, since the last load that succeeded."""
        self.turn = threading.Lock()
        self._saved: StepId | None = None
        self._layout: Layout | None = None
        self._shape: tuple[Sequence[TensorSpec], str] | None = None

    @property
    def save_thread(self) -> SaveThread:
        """The save thread of the lease. Raises UsageError before `hold_rank_lease`."""
        if self._saver is None:
            raise UsageError("the session with the sidecar was closed in the middle of a save")
        return self._saver

    def ensure_joined(self, rank: int, world: int) -> None:
        """`hold_rank_lease`, unless there is already a lease: an agreed place is better than a
        guessed one."""
        if self._saver is None:
            self.hold_rank_lease(rank, world)

    def hold_rank_lease(self, rank: int, world: int) -> None:
        """Hold the lease of this rank of this world. Raises SidecarError."""
        if self._saver is not None and self._place == (rank, world):
            return
        self._let_go()
        saver = SaveThread(self.socket_path, rank=rank, world=world)
        saver.acquire_lease(timeout_s=_CONNECT_S)
        self._saver, self._place = saver, (rank, world)

    def release_lease(self) -> None:
        """Give the lease back. The next save or load goes on from the step that was last loaded or
        saved.

        Either all ranks must do this, or none, because they go on from one step.
        """
        if self._saved is not None:
            self._loaded = (self._saved, Tier.LOCAL)
        self._let_go()

    def _let_go(self) -> None:
        if self._saver is not None:
            self._saver.close()
        self._saver = self._place = self._layout = self._shape = None
        self._end_epoch()

    def _end_epoch(self) -> None:
        if self._epoch is not None:
            self._over.add(self._epoch.id)
        self._epoch = self._saved = None

    # --- looking and loading -----------------------------------------------------------------

    def candidates(self) -> Candidates:
        """What this rank's sidecar holds. Waits until the sidecar has looked at its volumes."""
        return ask_candidates(self.save_thread.session)

    def note_loaded_step(self, step_id: StepId, tier: Tier) -> None:
        """Note that this step was loaded from `tier` as the run's own step: the next save begins an
        epoch that follows it."""
        self._loaded = (step_id, tier)
        self.failed.clear()
        self._end_epoch()

    # --- saving ------------------------------------------------------------------------------

    def make_save_ballot(self, step: int) -> Ballot:
        """The ballot of this rank before a save. Raises UsageError for a step that does not
        grow."""
        if self._epoch is not None and step <= self._last_step:
            raise UsageError(
                f"step {step} comes after step {self._last_step}: steps only grow; to go back,"
                " load the older step first"
            )
        highest = self._epoch.id.number if self._epoch else self.candidates().highest_epoch
        loaded = self._loaded[0] if self._loaded else None
        world = self._place[1] if self._epoch and self._place else 0
        return Ballot(
            step=step, epoch=self._epoch, world=world, loaded=loaded, highest_epoch=highest
        )

    def agree_without_ballots(self, step: int, *, world: int) -> list[AgreedSave]:
        """The answer that `choose_save_epoch` would give to ranks that are all in this epoch.
        Raises UsageError if there is no epoch of this world.

        Needed for plans that a planner took from its cache, because they contain no ballots.
        """
        if self._epoch is None or self._place is None or self._place[1] != world:
            raise UsageError(
                "a cached plan is older than the last load, or of another group: make a new planner"
            )
        epoch = self._epoch
        return [AgreedSave(step=step, epoch=epoch, rank=rank, world=world) for rank in range(world)]

    def enter_agreed_epoch(self, agreed: AgreedSave) -> None:
        """Become the rank that was agreed on, in the agreed epoch. Raises SidecarError,
        UsageError."""
        if agreed.epoch.id in self._over:
            raise UsageError(
                f"epoch {agreed.epoch.id} ended with a load: the planner cached a plan from before"
                " it; make a new planner after a load"
            )
        before = self._place
        self.hold_rank_lease(agreed.rank, agreed.world)
        if self._epoch == agreed.epoch and self._place == before:
            return
        tier = self._loaded[1] if self._loaded else None
        report_epoch_begin(self.save_thread.session, agreed.epoch, tier)
        self._epoch = agreed.epoch
        self._last_step = agreed.epoch.parent.step if agreed.epoch.parent else -1

    def acquire_slot(
        self, specs: Sequence[TensorSpec], skeleton: str, extras_bytes: int
    ) -> GrantedSlot:
        """A slot for an image of these tensors. Waits for it; raises SlotUnavailable if none comes
        in time.

        Hand it back with `seal_and_await_durable`, or with `saver.put_back_slot`.
        """
        layout = self._layout
        if (
            layout is None
            or self._shape != (specs, skeleton)
            or layout.extras_capacity_bytes < extras_bytes
        ):
            assert self._place is not None
            rank, world = self._place
            layout = self._layout = Layout.build(
                specs,
                rank=rank,
                world=world,
                skeleton=skeleton,
                extras_capacity_bytes=capacity_for(extras_bytes),
            )
            self._shape = (specs, skeleton)
        self.save_thread.use_layout(layout)
        try:
            return self.save_thread.await_slot(timeout_s=_SLOT_S)
        except SlotUnavailable as error:
            rank = self.save_thread.session.rank
            raise SlotUnavailable(f"rank {rank}: no slot to save into: {error}") from None

    def seal_and_await_durable(self, taken: GrantedSlot, agreed: AgreedSave, extras: bytes) -> None:
        """Seal the image whose tensors are in the slot; returns when it is durable.

        Raises NotDurableError.
        """
        mapping, saver = taken.mapping, self.save_thread
        step_id = StepId(agreed.epoch.id, agreed.step)
        mapping.write_extras(extras)
        control = ControlPage.staged(
            mapping.layout,
            run=saver.session.run,
            epoch=agreed.epoch,
            step=agreed.step,
            extras_bytes=len(extras),
            staged_at=time.time(),
        )
        pending = PendingImage(taken, control, guard=None)
        pending.copy()
        pending.decide_outcome()
        pending.seal()
        saver.submit(pending)
        self._last_step = agreed.step
        if not saver.drain(timeout_s=_SLOT_S) or pending.verdict is not ImageOutcome.STAGED:
            raise NotDurableError(f"step {step_id} was not staged: {saver.stats.why_not()}")
        saver.session.wait(step_id, State.DURABLE, timeout_s=_DURABLE_S)
        self._saved = step_id

    def await_commit(self, step_id: StepId) -> None:
        """Return when the step is committed and visible to readers. Raises NotDurableError."""
        self.save_thread.session.wait(step_id, State.COMMITTED, timeout_s=_DURABLE_S)


_SESSION: DcpSession | None = None


def session() -> DcpSession:
    """The session of this process. Raises UsageError if KEEPSTEP_SOCKET names no sidecar."""
    global _SESSION
    socket_path = os.environ.get(SOCKET_ENV, "")
    if not socket_path:
        raise UsageError(
            f"{SOCKET_ENV} is not set: start the training with `keepstep run -- ...`, or read a"
            " step's directory: StorageReader(path)"
        )
    if _SESSION is None or _SESSION.socket_path != socket_path:
        close()
        _SESSION = DcpSession(socket_path)
        _close_at_exit()
    return _SESSION


def close() -> None:
    """Give this rank's lease back.

    The next save or load takes a new lease, and a new epoch begins that follows the last step of
    this one. keepstep calls this when the process exits. A script needs it only to pass the rank on
    earlier.
    """
    if _SESSION is not None:
        _SESSION.release_lease()


@functools.cache
def _close_at_exit() -> None:
    atexit.register(close)


# --- checkpoint ids --------------------------------------------------------------------------


_STEP = re.compile(r"^(?:.*[^0-9])?([0-9]{1,18})$")


def step_number_of(checkpoint_id: str | os.PathLike[str] | int) -> int:
    """The number that an id is or ends with: `1200`, `"1200"`, `"out/step-1200/"`.

    Raises UsageError for an id without a number.
    """
    text = ""
    if isinstance(checkpoint_id, str | os.PathLike):
        text = os.path.basename(os.fspath(checkpoint_id).rstrip("/"))
    elif isinstance(checkpoint_id, int) and not isinstance(checkpoint_id, bool):
        text = str(checkpoint_id)
    if not (match := _STEP.match(text)):
        raise UsageError(
            f"no step in {checkpoint_id!r}: let it end with the step's number, such as"
            ' "out/step-1200", or give the step: StorageWriter(step=1200), StorageReader(step=1200)'
        )
    return int(match[1])


def has_step_number(checkpoint_id: object) -> bool:
    """Whether `step_number_of` finds a step in it."""
    try:
        step_number_of(checkpoint_id)  # type: ignore[arg-type]
    except UsageError:
        return False
    return True


# --- the rank in DCP's group -----------------------------------------------------------------


def rank_and_world(*, is_coordinator: bool, rank: int | None) -> tuple[int, int]:
    """This process's rank and world, as far as a storage plugin can know them before it sees the
    plans of all ranks. DCP tells the rank in its group (since torch 2.7), but not the size of the
    group."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0, 1
    own, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if rank is None:
        rank = 0 if is_coordinator else own
    # a coordinator that is not rank 0 of the job has `no_dist`, or a group of its own
    return (0, 1) if is_coordinator and own != 0 else (rank, world)


_EXECUTOR, _SAVER = "concurrent.futures.thread", "torch.distributed.checkpoint.state_dict_saver"


def warn_of_shared_group() -> None:
    """Warn before a `dcp.async_save` hangs because its thread exchanges plans on the gloo group on
    which the model trains.

    This runs within the save, in its thread. DCP does not tell a storage its group, so the group is
    looked up in the frame of DCP's own `save`.
    """
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return
    modules, given = set(), None
    frame = sys._getframe()
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        module = frame.f_globals.get("__name__", "")
        modules.add(module)
        if (module, frame.f_code.co_name) == (_SAVER, "save"):
            given = frame.f_locals
    if given is None or _EXECUTOR not in modules or given.get("no_dist"):
        return
    backends = torch.distributed.get_backend_config().split(",")
    shared = given.get("process_group") in (None, torch.distributed.group.WORLD)
    if shared and f"{accelerator.accelerator_kind() or 'cpu'}:gloo" in backends:
        _warn_once()


@functools.cache
def _warn_once() -> None:
    log.warning(
        "keepstep: dcp.async_save exchanges its plans in a thread, on the default gloo group: if"
        " the model trains on that group meanwhile, both wait for each other for ever. Give it a"
        ' group of its own, made once: process_group=dist.new_group(backend="gloo")'
        " [dcp.default_group_shared]"
    )
