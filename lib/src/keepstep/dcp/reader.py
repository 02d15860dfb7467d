"""The storage of `dcp.load`: a committed step, at whatever world size and layout, verified."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from keepstep.dcp import session as sessions
from keepstep.dcp.contents import Contents
from keepstep.dcp.folder import Folder, Shard, verify
from keepstep.dcp.names import names_step, step_of
from keepstep.dcp.place import group_place
from keepstep.digests import HAVE_FAST
from keepstep.errors import MismatchError, RestoreError, UsageError
from keepstep.steps import StepId

log = logging.getLogger("keepstep")


def newest_step() -> int | None:
    """The step that `StorageReader()` would load; None at the very beginning of a run.

    Raises RestoreError when steps were committed but cannot be found now: None always means that a
    start at step 0 loses nothing. Asks this rank's sidecar; no collective.
    """
    found = _joined().committed(None)
    return None if found is None else found[0].step


def _joined() -> sessions.Session:
    session = sessions.session()
    session.meet(*group_place(is_coordinator=False, rank=None))
    return session


class StorageReader(storage.StorageReader):
    """Loads a committed step.

    With `path`, or a `checkpoint_id` that is a directory: that directory, whoever it belongs to;
    no sidecar is needed, and nothing follows from it for the steps that are saved later.

    Without: the run's newest committed step, or the one with the number `step` (or the number that
    `checkpoint_id` ends with), as this process's sidecar knows it. The next `dcp.save` goes on from
    it in a new epoch: later steps of the old one are dead.

    Every chunk that any rank needs is verified against its digest *before* any rank loads anything
    (in `prepare_local_plan`, whose errors DCP brings to all ranks). Memory: the files are mapped,
    nothing is held beside the tensors. Without the `xxhash` package verifying is very slow.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, step: int | None = None
    ) -> None:
        if path is not None and step is not None:
            raise UsageError("either a path or a step: a directory holds one step only")
        self._path = None if path is None else Path(path)
        self._step = step
        self._place: tuple[int, int] = (0, 1)
        self._contents: Contents | None = None
        self._resumes: StepId | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | int | None = None) -> None:
        """A load begins. Raises UsageError for an id that is no directory and names no step."""
        self._contents = None
        if checkpoint_id is None:
            return
        is_path = not isinstance(checkpoint_id, int) and Path(checkpoint_id).is_dir()
        self._path = Path(checkpoint_id) if is_path else None  # type: ignore[arg-type]
        self._step = None if is_path else step_of(checkpoint_id)

    # no **kwargs: DCP would call it a second time, for metadata of one rank, and hide the error
    def read_metadata(self) -> Metadata:
        """Read all headers of the step.

        Raises RestoreError (no such step, or incomplete), ImageError, CoverageError, SidecarError;
        newer versions of torch wrap it in an AssertionError with its text.
        """
        self._contents = Contents.of(Folder.open(self._directory()))
        metadata = self._contents.metadata()
        metadata.storage_meta = StorageMeta(checkpoint_id=str(self._contents.folder.path))
        return metadata

    def _directory(self) -> Path:
        self._resumes = None
        if self._path is not None:
            return self._path
        session = _joined()
        found = session.committed(self._step)
        if found is None:
            which = "no committed step" if self._step is None else f"no committed step {self._step}"
            raise RestoreError(
                f"{which} to load: `keepstep steps` lists what is there, and"
                " keepstep.dcp.newest_step() is None when a run begins"
            )
        self._resumes, path = found
        return path

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing to set up: `read_metadata` has read it."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Verify all that this rank is going to read. Raises DigestError; nothing is loaded then.

        MismatchError for a box that does not fit the plan.
        """
        if not HAVE_FAST:
            log.warning("keepstep: without the xxhash package, verifying is very slow")
        verify(self._ranges(plan))
        return replace(plan, storage_data=self._read.folder.id)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """See that all ranks load the same step (coordinator). Raises UsageError."""
        for rank, plan in enumerate(plans):
            if plan.storage_data != plans[0].storage_data:
                raise UsageError(
                    f"rank 0 loads step {plans[0].storage_data}, rank {rank} step"
                    f" {plan.storage_data}: name one, StorageReader(step=...)"
                )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy from the mapped files into the planner's tensors. Raises ImageError."""
        verify(self._ranges(plan))  # again only what a global plan added
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                name = item.storage_index.fqn
                planner.load_bytes(item, io.BytesIO(self._read.values[name].value(name)))
            else:
                self._copy(item, planner)
        if self._resumes is not None:
            sessions.session().resume(self._resumes)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _copy(self, item: ReadItem, planner: LoadPlanner) -> None:
        stored = self._read.stored(item.storage_index)
        source = stored.shard.tensor(stored.entry)
        for dim, (begin, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            source = source.narrow(dim, begin, length)
        target = planner.resolve_tensor(item).detach()
        if target.size() != source.size():
            raise MismatchError(
                f"{item.storage_index.fqn}: {list(source.size())} in {stored.shard.path},"
                f" {list(target.size())} here"
            )
        target.copy_(source)
        planner.commit_tensor(item, target)

    def _ranges(self, plan: LoadPlan) -> Iterator[tuple[Shard, int, int]]:
        """The bytes that a plan reads, whole rows of the first dimension at least."""
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                shard = self._read.values[item.storage_index.fqn]
                begin = shard.layout.extras_begin
                yield shard, begin, begin + shard.control.extras_bytes
            else:
                stored = self._read.stored(item.storage_index)
                entry = stored.entry
                rows = entry.spec.shape[0] if entry.spec.shape else 1
                row_bytes = (entry.end - entry.begin) // max(rows, 1)
                first, count = (
                    (item.storage_offsets[0], item.lengths[0]) if entry.spec.shape else (0, 1)
                )
                begin = entry.begin + first * row_bytes
                yield stored.shard, begin, begin + count * row_bytes

    @property
    def _read(self) -> Contents:
        if self._contents is None:
            raise UsageError("read_metadata() comes first")
        return self._contents

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a directory, or names a step."""
        return Path(checkpoint_id).is_dir() or names_step(checkpoint_id)
