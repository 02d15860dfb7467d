"""What a run holds, according to its live sidecar or, without one, to its volumes alone.

A commit is a property of storage, so both sources agree on what the volumes hold. Only a sidecar
knows what memory holds. This module locks, moves and repairs nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from keepstep import steps
from keepstep.core.history import Goodput, HistoryEvent
from keepstep.errors import KeepstepError, SidecarAbsent, StorageError, UsageError
from keepstep.steps import Epoch, StepId, Tier, merge_epochs
from keepstep.wire.status import Status, StepStatus
from keepstep_sidecar.cli import calls
from keepstep_sidecar.cli.run_dir import RunDir
from keepstep_sidecar.volume.run_tree import RunTree

if TYPE_CHECKING:
    from keepstep_sidecar.volume.run_record import RunRecord
    from keepstep_sidecar.volume.run_tree import LocalShard, RefusedFile, VolumeScan


def step_text(step: StepStatus) -> str:
    """`step 5 of epoch 2 (memory, local)`."""
    tiers = ", ".join(map(str, step.ranks))
    doubt = "; suspect" if step.suspect else ""
    return f"step {step.id.step} of epoch {step.id.epoch.number} ({tiers}{doubt})"


def step_document(step: StepStatus | None) -> dict[str, object] | None:
    """A step as JSON shows it."""
    if step is None:
        return None
    return {
        "id": step.id,
        "epoch": step.id.epoch,
        "step": step.id.step,
        "world": step.world,
        "ranks": step.holding_ranks,
        "bytes": step.bytes,
        "tiers": list(step.ranks),
        "ranks_by_tier": {str(tier): ranks for tier, ranks in step.ranks.items()},
        "committed": step.committed,
        "dead": step.dead,
        "suspect": step.suspect,
        "proven": step.proven,
        "path": step.path or None,
    }


@dataclass(frozen=True, kw_only=True)
class RunHoldings:
    """`live`: the sidecar's status, None without a sidecar. `steps` are in ascending order."""

    live: Status | None
    steps: tuple[StepStatus, ...]
    problems: tuple[str, ...] = ()

    @property
    def newest_committed(self) -> StepStatus | None:
        """The newest committed step that is not dead."""
        alive = [step for step in self.steps if step.committed and not step.dead]
        return max(alive, key=lambda step: step.id, default=None)

    @property
    def newest_complete_step(self) -> StepStatus | None:
        """The newest step that is not dead and whose images of all ranks are in some tier."""
        whole = [
            step
            for step in self.steps
            if step.holding_ranks == tuple(range(step.world)) and not step.dead
        ]
        return max(whole, key=lambda step: step.id, default=None)


def read_holdings(kept: RunDir) -> RunHoldings:
    """Ask the sidecar or, without one, scan the volumes. Raises SidecarError, StorageError."""
    try:
        live = calls.ask_status(kept.socket)
    except SidecarAbsent as error:
        if not isinstance(error.__cause__, PermissionError):
            raise
        held = holdings_on_volumes(kept)
        hidden = f"what memory holds is not shown: {kept.memory} belongs to another user"
        return replace(held, problems=(*held.problems, hidden))
    return holdings_on_volumes(kept) if live is None else holdings_of_sidecar(live)


def holdings_of_sidecar(live: Status) -> RunHoldings:
    """What the sidecar's status `live` says."""
    steps = sorted(live.steps, key=lambda step: step.id)
    return RunHoldings(live=live, steps=tuple(steps), problems=live.warnings)


def holdings_on_volumes(kept: RunDir) -> RunHoldings:
    """What the volumes hold, without the sidecar. Raises StorageError."""
    shards, problems = survey_volumes(kept)
    return RunHoldings(
        live=None,
        steps=compute_step_statuses(shards, recorded_epochs(kept), recorded_failures(kept)),
        problems=tuple(str(problem.error) for problem in problems),
    )


def run_goodput(kept: RunDir, held: RunHoldings | None) -> Goodput | None:
    """The goodput of all lives of the run; without a sidecar, up to the last event that it wrote.
    None if nothing is known. Never raises."""
    return (
        held.live.goodput
        if held is not None and held.live is not None
        else read_stored_history(kept)[1]
    )


def read_stored_history(kept: RunDir) -> tuple[Sequence[HistoryEvent], Goodput | None]:
    """The history that the last sidecar left, on the volume with the newest event, and its goodput;
    None if nothing is known. Never raises."""
    from keepstep_sidecar.volume.history_file import HistoryFile

    files = [HistoryFile(RunTree(root).history, run=kept.name) for root in kept.roots]
    found = [file.read(now=time.time()) for file in files]
    known = [(events, before) for events, before in found if events]
    if not known:
        return (), None
    events, before = max(known, key=lambda pair: pair[0][-1].until)
    return events, before.after(events).goodput(events[-1].until)


def survey_volumes(kept: RunDir) -> tuple[tuple[LocalShard, ...], tuple[RefusedFile, ...]]:
    """Every shard on all volumes, and every file that was refused as a shard. Raises
    StorageError."""
    scans = [_scan(root, kept.name) for root in kept.roots]
    shards = tuple(shard for scan in scans for shard in scan.shards)
    return shards, tuple(problem for scan in scans for problem in scan.problems)


def list_peer_copies_on_volumes(kept: RunDir) -> tuple[LocalShard, ...]:
    """The shards of other machines that the volumes hold as copies. Raises StorageError."""
    from keepstep_sidecar.tiers.peer.kept_copies import DIRECTORY

    return tuple(
        shard for root in kept.roots for shard in _scan(root / DIRECTORY, kept.name).shards
    )


def _scan(root: Path, run: str) -> VolumeScan:
    from keepstep_sidecar.volume import run_tree

    try:
        return run_tree.scan_shards(root, run=run)
    except OSError as error:
        raise StorageError(f"cannot read {root}: {error}") from error


def compute_step_statuses(
    shards: Iterable[LocalShard], epochs: Sequence[Epoch], failures: Iterable[StepId] = ()
) -> tuple[StepStatus, ...]:
    """The status of each step that has a shard in `shards`, ascending. `recorded_failures`: the
    steps at which the script failed by itself."""
    from keepstep.core.commit_rule import StepLiveness, trace_lineage
    from keepstep.core.suspicion import Failure, SuspectSteps

    by_step: defaultdict[StepId, list[LocalShard]] = defaultdict(list)
    for shard in shards:
        by_step[shard.step_id].append(shard)
    lineage = trace_lineage(
        {epoch.id: epoch for epoch in epochs}, seen={step_id.epoch for step_id in by_step}
    )
    parents = {epoch.id: epoch.parent for epoch in epochs}
    alive = {
        step_id for step_id in by_step if lineage.step_liveness(step_id) is not StepLiveness.DEAD
    }

    def is_live(step_id: StepId) -> bool:
        return lineage.step_liveness(step_id) is StepLiveness.LIVE

    doubt = SuspectSteps.from_failures(
        (Failure.from_failed_step(at, parents.get, is_live) for at in failures), alive
    )
    return tuple(
        replace(
            _of_found(step_id, found),
            dead=step_id not in alive,
            suspect=step_id in alive and doubt.is_suspect(step_id),
            proven=step_id in alive and doubt.is_proven(step_id),
        )
        for step_id, found in sorted(by_step.items())
    )


def _of_found(step_id: StepId, found: Sequence[LocalShard]) -> StepStatus:
    worlds = {shard.world for shard in found}
    ranks = tuple(sorted({shard.rank for shard in found}))
    world = max(worlds)
    # the commit rule: sealed shards cover the whole world. Of several machines each has a part, and
    # shows a step only once it was committed on all of them.
    whole = len(worlds) == 1 and ranks == tuple(range(world))
    committed = whole or any(shard.published for shard in found)
    shown = min(found, key=lambda shard: (not shard.published, shard.rank))
    return StepStatus(
        id=step_id,
        world=world,
        ranks={Tier.LOCAL: ranks},
        bytes=sum(shard.size_bytes for shard in found),
        committed=committed,
        path=str(shown.path.parent),
    )


def recorded_epochs(kept: RunDir) -> tuple[Epoch, ...]:
    """The epochs in the volumes' run records. An unreadable record is skipped: then more steps
    count as alive, never fewer."""
    return merge_epochs(epoch for record in _records(kept) for epoch in record.epochs)


def recorded_failures(kept: RunDir) -> frozenset[StepId]:
    """The steps at which the script failed by itself, from the volumes' run records."""
    return frozenset(at for record in _records(kept) for at in record.failures)


def _records(kept: RunDir) -> Iterator[RunRecord]:
    from keepstep_sidecar.volume import run_record

    for root in kept.roots:
        with contextlib.suppress(KeepstepError, OSError):
            yield run_record.load_run_record(RunTree(root).record, run=kept.name)


def choose_steps(held: Sequence[StepStatus], words: Iterable[str]) -> tuple[StepStatus, ...]:
    """The steps that `words` name. Raises UsageError that names the choices."""
    by_id = {status.id: status for status in held}
    found = []
    for word in dict.fromkeys(words):
        if (step_id := choose_step(word, by_id)) is None:
            there = ", ".join(str(status.id) for status in held[-5:]) or "none"
            raise UsageError(f"no step {word} on the volumes; the newest there: {there}")
        found.append(by_id[step_id])
    return tuple(found)


def choose_step(word: str, ids: Iterable[StepId]) -> StepId | None:
    """The step that `word` names: `0003.1f9c2d7a-000001200`, or `1200` if only one epoch has that
    step. None if there is none. Raises UsageError that names the choices."""
    found = steps.steps_named(word, ids)
    if len(found) > 1:
        names = ", ".join(map(str, found))
        raise UsageError(f"several epochs have a step {word}; name one of: {names}")
    return found[0] if found else None
