"""The storage of `dcp.load`: a committed step, verified, for any world size and layout."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from keepstep.client.session import restore_timeout_s
from keepstep.dcp import session as sessions
from keepstep.dcp.agreement import LoadBallot, choose
from keepstep.dcp.path_reader import Folder, is_directory
from keepstep.dcp.session import group_place, names_step, step_of
from keepstep.dcp.step_reader import StepReader
from keepstep.errors import (
    CoverageError,
    ImageError,
    RestoreError,
    SidecarAbsent,
    SidecarError,
    UsageError,
)
from keepstep.steps import StepId

log = logging.getLogger("keepstep")

_LOST = "rank {}: its plan holds no ballot: it loads by a path, or not at all, or its planner loses"
_LOST += " LoadPlan.storage_data; all ranks must load alike, and a planner keep what is in a plan"


def latest_step() -> int | None:
    """The step that `StorageReader()` would load, as far as this rank's sidecar knows; None at the
    very beginning of a run.

    Raises RestoreError if steps were kept but cannot be found now. So None always means that a
    start at step 0 loses nothing. Waits until the sidecar has looked at all tiers. This is no
    collective, so ranks on several machines may see different steps; `dcp.load` takes the newest
    step that all have.
    """
    session = _joined()
    found = choose([_ballot(session, None)])
    return None if found is None else found.step


def _joined() -> sessions.Session:
    session = sessions.session()
    session.meet(*group_place(is_coordinator=False, rank=None))
    return session


def _ballot(session: sessions.Session, step: int | None) -> LoadBallot:
    failed = frozenset() if step is not None else frozenset(session.failed)
    return LoadBallot(vote=session.candidates(), step=step, failed=failed)


class StorageReader(storage.StorageReader):
    """Loads a committed step.

    With a `path` (or a `checkpoint_id`) that is the directory of a step, it loads that directory,
    no matter which run it belongs to. This needs no sidecar, and has no effect on steps that are
    saved later. Every chunk that any rank needs is verified *before* any rank loads anything.
    Without the `xxhash` package, this is very slow.

    With any other path, it loads the step of the run that the path names (the number at the end of
    its last part), as `StorageWriter(path)` saved it. `step` names it likewise.

    With neither, it loads the run's newest step that the sidecars of all ranks can bring, from
    memory, local volumes, other pods or the archive. The ranks agree on it. Bytes that are not in
    memory are verified chunk by chunk as they arrive. A step that cannot be read completely raises
    on all ranks; some tensors may have changed by then, and the next `dcp.load` takes another step.

    `KEEPSTEP_RESTORE_TIMEOUT` bounds each fetch, as for a `Checkpointer`. The next `dcp.save` goes
    on from the loaded step in a new epoch: later steps of the old epoch are dead.
    """

    def __init__(
        self, path: str | os.PathLike[str] | int | None = None, *, step: int | None = None
    ) -> None:
        if path is not None and step is not None:
            raise UsageError("either a path or a step: a path names one step only")
        self._path: Path | None = None
        self._step = step
        if path is not None:
            self._name(path)
        self._is_coordinator = False
        self._ballot: LoadBallot | None = None
        self._opened: StepReader | None = None
        self._loaded: StepId | None = None

    @property
    def loaded_step(self) -> int | None:
        """The step that was loaded last, the same on all ranks; None before the first load."""
        return None if self._loaded is None else self._loaded.step

    def reset(self, checkpoint_id: str | os.PathLike[str] | int | None = None) -> None:
        """Begin a load. Raises UsageError for an id that is no directory and names no step."""
        self._opened = self._ballot = self._loaded = None
        if checkpoint_id is not None:
            self._name(checkpoint_id)

    def _name(self, path: str | os.PathLike[str] | int) -> None:
        """Set what to load: a directory, or a step of the run."""
        self._path = self._step = None
        if not isinstance(path, int) and is_directory(Path(path)):
            self._path = Path(path)
        else:
            self._step = step_of(path)

    # no **kwargs: with them, DCP would call this a second time, for the metadata of one rank, and
    # hide the error
    def read_metadata(self) -> Metadata:
        """Read all headers of the step: of the directory, or of the newest step that this rank's
        sidecar can bring.

        Raises RestoreError (there is no such step, or it is incomplete), ImageError, CoverageError,
        SidecarError. Newer versions of torch wrap these in an AssertionError with the same text.
        """
        if self._path is not None:
            self._opened = StepReader.open(Folder(self._path))
        else:
            self._opened = self._newest(_joined())
        return self._opened.metadata()

    def _newest(self, session: sessions.Session) -> StepReader:
        """The newest step whose headers can be read. Steps whose headers cannot be read do not get
        this rank's vote.
        """
        self._ballot = _ballot(session, self._step)
        why: Exception | None = None
        while True:
            try:
                id = choose([self._ballot])
            except RestoreError as error:
                raise (type(error)(f"{error}. The last attempt: {why}") if why else error) from why
            if id is None:
                raise RestoreError(
                    "no committed step to load: keepstep.dcp.latest_step() is None when a run"
                    " begins, and `keepstep steps` lists what is there"
                )
            try:
                return _reach(session, id)
            except SidecarAbsent:
                raise
            except (SidecarError, CoverageError, ImageError) as error:
                log.warning("keepstep: step %d is not used: %s", id.step, error)
                why = error
                self._ballot = replace(self._ballot, failed=self._ballot.failed | {id})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Note whether this rank is the coordinator. `read_metadata` has already read the
        metadata.
        """
        self._is_coordinator = is_coordinator

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Check everything that this rank will read, and put its ballot into its plan.

        Raises DigestError; then nothing is loaded on any rank.
        """
        self._step_at_hand.check(plan)
        return replace(plan, storage_data=self._ballot or self._step_at_hand.id)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Decide on the step for all ranks (coordinator only). Raises UsageError, RestoreError."""
        if self._path is not None:
            _check_same(plans)
            return plans
        ballots = [one.storage_data for one in plans]
        for rank, ballot in enumerate(ballots):
            if not isinstance(ballot, LoadBallot):
                raise UsageError(_LOST.format(rank))
        id = choose(ballots)
        assert id is not None, "this rank has planned for one"
        return [replace(one, storage_data=id) for one in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Load the agreed step into the planner's tensors. Raises ImageError, RestoreError."""
        opened = self._step_at_hand
        if self._path is None:
            self._read_agreed(opened, plan, planner)
        else:
            opened.load(plan, planner)
        self._loaded = self._step_at_hand.id
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_agreed(self, opened: StepReader, plan: LoadPlan, planner: LoadPlanner) -> None:
        if not isinstance(plan.storage_data, StepId):
            raise UsageError(_LOST.format("this one"))
        session, id = sessions.session(), plan.storage_data
        try:
            if opened.id != id:
                opened, plan = self._again(session, opened, plan, planner)
            opened.load(plan, planner)
        except (SidecarError, CoverageError, ImageError) as error:
            session.failed.add(id)
            raise RestoreError(
                f"step {id} was not read to the end: {error}. Tensors may be changed in part: call"
                " dcp.load again, which takes another step, or StorageReader(step=...) to try this"
                " one again"
            ) from error
        finally:
            opened.close()
        session.resume(id, opened.tier(plan))

    def _again(
        self, session: sessions.Session, planned: StepReader, plan: LoadPlan, planner: LoadPlanner
    ) -> tuple[StepReader, LoadPlan]:
        """The agreed step, and a plan for it. The existing plan is used again if both steps look
        alike.
        """
        planned.close()
        id = plan.storage_data
        self._opened = opened = _reach(session, id)
        metadata = opened.metadata()
        before = planned.metadata()
        if (metadata.state_dict_metadata, metadata.planner_data) == (
            before.state_dict_metadata,
            before.planner_data,
        ):
            return opened, plan
        return opened, self._replanned(planner, metadata, id)

    def _replanned(self, planner: LoadPlanner, metadata: Metadata, id: StepId) -> LoadPlan:
        if not isinstance(planner, DefaultLoadPlanner):
            raise UsageError(
                f"all ranks have step {id}, this one planned for a newer step of other shapes or"
                f" names, and {type(planner).__name__} cannot plan again: name the step,"
                f" StorageReader(step={id.step})"
            )
        planner.set_up_planner(planner.original_state_dict, metadata, self._is_coordinator)
        plan = planner.finish_plan(planner.create_local_plan())
        self._step_at_hand.check(plan)
        return plan

    @property
    def _step_at_hand(self) -> StepReader:
        if self._opened is None:
            raise UsageError("read_metadata() comes first")
        return self._opened

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether the id is a directory of a step, or names a step."""
        return is_directory(Path(checkpoint_id)) or names_step(checkpoint_id)


def _reach(session: sessions.Session, id: StepId) -> StepReader:
    link = session.agent.session
    reached = StepReader.reach(link, id, timeout_s=restore_timeout_s())
    if reached.foreign:
        log.warning(
            "keepstep: step %s was saved by keepstep.Checkpointer: its tensors can be loaded under"
            " its names (component.parameter), nothing else of it; keepstep.Checkpointer restores"
            " all",
            id,
        )
    return reached


def _check_same(plans: list[LoadPlan]) -> None:
    for rank, plan in enumerate(plans):
        if plan.storage_data != plans[0].storage_data:
            raise UsageError(
                f"rank 0 loads step {plans[0].storage_data}, rank {rank} step"
                f" {plan.storage_data}: name one, StorageReader(step=...)"
            )
