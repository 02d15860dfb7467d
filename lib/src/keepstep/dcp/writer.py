"""The storage of `dcp.save` and `dcp.async_save`: a rank's plan becomes its image of the step."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from typing import Any, NoReturn

from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from keepstep.client.slot import GrantedSlot
from keepstep.dcp import session as sessions
from keepstep.dcp.session import (
    AgreedSave,
    Ballot,
    SaveItems,
    choose_save_epoch,
    has_step_number,
    rank_and_world,
    step_number_of,
    warn_of_shared_group,
)
from keepstep.errors import UsageError
from keepstep.image import extras_codec
from keepstep.state import accelerator
from keepstep.steps import StepId

_LOST = "the planner loses SavePlan.storage_data: a planner must keep what is in it"


class _Save(threading.local):
    """The state of one save. DCP runs each save in one thread, and the saves of one writer may
    overlap."""

    def __init__(self, step: int | None, path: str | os.PathLike[str] | int | None) -> None:
        self.step = step if path is None else step_number_of(path)
        self.checkpoint_id = path
        self.place: tuple[int, int] = (0, 1)
        self.agreed: AgreedSave | None = None


class StorageWriter(storage.StorageWriter, BlockingAsyncStager):
    """Saves a step through the sidecar that `KEEPSTEP_SOCKET` names.

    The step is `step`, or the number that the last part of `path` (or of DCP's `checkpoint_id`) is
    or ends with. Nothing is written at that path. As with a `Checkpointer`, each step must be
    greater than the one before. After a `dcp.load` through `StorageReader()`, steps go on from the
    loaded step, in a new epoch. A process that never loaded begins an epoch without a parent: steps
    that existed before are neither continued nor deleted.

    `dcp.save` returns when the step is committed: durable on every rank. `dcp.async_save` blocks
    for a copy in the trainer's memory, and its future completes with the commit.

    `AsyncCheckpointerType.PROCESS` is refused: the rank's lease and its epoch belong to the
    training process, and the sidecar already is the other process. `use_collectives=False` is
    refused too, because without the plans of all ranks nothing can decide on an epoch.

    Values that are not tensors are kept as the bytes that the planner makes of them (pickled by
    `torch.save`). Planner data other than DefaultSavePlanner's mapping is refused.
    """

    def __init__(
        self, path: str | os.PathLike[str] | int | None = None, *, step: int | None = None
    ) -> None:
        """Raises UsageError for a path without a step."""
        if path is not None and step is not None:
            raise UsageError("either a path or a step: a path names the step that it ends with")
        BlockingAsyncStager.__init__(self)
        self._save = _Save(step, path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | int | None = None) -> None:
        """Begin a save. Raises UsageError for a checkpoint id without a step."""
        if checkpoint_id is not None:
            self._save.checkpoint_id, self._save.step = checkpoint_id, step_number_of(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Note this process's place in its group. Raises UsageError for `use_collectives=False`."""
        if not kwargs.get("use_collectives", True):
            raise UsageError(
                "use_collectives=False cannot be kept: the ranks must agree on the epoch of the"
                " step; leave it out"
            )
        if is_coordinator:
            warn_of_shared_group()
        self._save.place = rank_and_world(is_coordinator=is_coordinator, rank=kwargs.get("rank"))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Put this rank's ballot into its plan. Raises UsageError, SidecarError."""
        save = self._save
        if save.step is None:
            raise UsageError(
                'which step is this? StorageWriter("out/step-1200"), or StorageWriter(step=1200)'
            )
        session = sessions.session()
        session.ensure_joined(*save.place)
        return replace(plan, storage_data=session.make_save_ballot(save.step))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Decide on step and epoch for all ranks (coordinator only). Raises UsageError."""
        ballots = [plan.storage_data for plan in plans]
        if not all(getattr(plan, "usable", True) for plan in plans):
            # the planner cached its plans, and the answers with them: the epoch has not changed
            agreed = sessions.session().agree_without_ballots(
                self._save.step or 0, world=len(plans)
            )
        elif all(isinstance(ballot, Ballot) for ballot in ballots):
            agreed = choose_save_epoch(ballots, nonce=os.urandom(4).hex())
        else:
            raise UsageError(_LOST)
        return [
            replace(plan, storage_data=agreement)
            for plan, agreement in zip(plans, agreed, strict=True)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Stage this rank's image; returns when it is durable.

        Raises UsageError for what cannot be kept, SidecarError, NotDurableError.
        """
        save = self._save
        if not isinstance(plan.storage_data, AgreedSave) or save.step is None:
            raise UsageError(_LOST)
        save.agreed = agreed = replace(plan.storage_data, step=save.step)
        session = sessions.session()
        with session.turn:  # the next save takes a slot once this one is durable, never its slot
            session.enter_agreed_epoch(agreed)
            items = SaveItems.of(plan)
            data = extras_codec.encode({"dcp": items.serialize_non_tensors(planner)})
            taken = self._filled(items, planner, len(data))
            session.seal_and_await_durable(taken, agreed, data)
        written: Future[list[WriteResult]] = Future()
        written.set_result(_results(items, data))
        return written

    def _filled(self, items: SaveItems, planner: SavePlanner, extras_bytes: int) -> GrantedSlot:
        """A slot that holds all tensors."""
        session = sessions.session()
        taken = session.acquire_slot(items.specs, items.tree.to_skeleton_json(), extras_bytes)
        try:
            accelerator.current_accelerator().synchronize()
            taken.mapping.erase()
            items.copy_into(taken.mapping, planner.resolve_data)
        except BaseException:
            session.save_thread.put_back_slot()
            raise
        return taken

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Return when the step is committed (coordinator only). Raises NotDurableError."""
        agreed = self._save.agreed
        if agreed is None:
            raise UsageError("finish() comes after write_data(), in its thread")
        sessions.session().await_commit(StepId(agreed.epoch.id, agreed.step))

    def storage_meta(self) -> StorageMeta | None:
        """The id of the checkpoint, for planners that want it."""
        save = self._save
        checkpoint_id = save.checkpoint_id if save.checkpoint_id is not None else save.step
        return StorageMeta(checkpoint_id=None if checkpoint_id is None else str(checkpoint_id))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether the id names a step."""
        return has_step_number(checkpoint_id)

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a keepstep.dcp.StorageWriter stays in its process, which holds the rank's lease: use"
            " AsyncCheckpointerType.THREAD (the default) with dcp.async_save"
        )


def _results(items: SaveItems, extras_bytes: bytes) -> list[WriteResult]:
    """What DCP wants to see of each item. keepstep does not read it."""
    indices: list[tuple[MetadataIndex, int]] = [
        (item.index, spec.size_bytes) for item, spec in zip(items.tensors, items.specs, strict=True)
    ]
    indices += [(item.index, len(extras_bytes)) for item in items.values]
    return [
        WriteResult(index=index, size_in_bytes=size, storage_data=None) for index, size in indices
    ]
