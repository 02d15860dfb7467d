"""Two lives of a trainer in one process: a real image in a real slot, no sidecar between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keepstep
from keepstep.client.slot import GrantedSlot, SlotMapping
from keepstep.core.restore_vote import Decision
from keepstep.image import Layout
from keepstep.restore.rank_restore import FillGuard, RankRestore
from keepstep.save.snapshot import SnapshotMaker
from keepstep.state.capture import capture_state
from keepstep.state.wrappers import is_known_component
from keepstep.steps import Epoch, EpochId, StepId, Tier
from keepstep.wire.trainer import ImageSource, OpenedStep, SlotGranted, Sources

_EPOCH = Epoch(EpochId(1, "00c0ffee"), None)
_ID = StepId(_EPOCH.id, 0)


class _Link:
    lease_token = ""

    def __init__(self, path: Path) -> None:
        self._path = path

    def call_apart(self, route: str, *_: Any, **__: Any) -> OpenedStep | Sources:
        path = str(self._path)
        if route == "/v1/restore":
            return OpenedStep(path=path, tier=Tier.MEMORY)
        size, extras = self._path.stat().st_size, SlotMapping(path).control().extras_bytes
        source = ImageSource(rank=0, tier=Tier.MEMORY, bytes=size, extras_bytes=extras, path=path)
        return Sources(id=_ID, world=1, sources=(source,))


def keep(components: dict[str, Any], path: Path) -> None:
    """Save one step of `components` into a slot at `path`."""
    checkpointer = keepstep.Checkpointer(components, rng=False)
    taken = capture_state(components)
    extras = checkpointer._encode(taken)
    layout = Layout.build(taken.specs, **checkpointer._layout_options(taken, len(extras)))
    path.write_bytes(layout.header.ljust(layout.size_bytes, b"\0"))
    slot = GrantedSlot(SlotGranted(slot="0", path=str(path)), SlotMapping(str(path), layout))
    snapshots = SnapshotMaker(layout, taken, run="run")
    pending = snapshots.begin(slot, taken, extras, step=_ID.step, epoch=_EPOCH, lazy=True)
    pending.copy()
    pending.decide_outcome()
    pending.seal()


def bring_back(
    components: dict[str, Any],
    path: Path,
    *,
    direct: bool = True,
    partial: FillGuard | None = None,
) -> None:
    """Restore the step in the slot at `path`, as `Checkpointer.restore` does once it is chosen:
    from the rank's own image, or put together as for another world."""
    decision = Decision(id=_ID, tiers=(Tier.MEMORY,), epoch_number=2, direct=(direct,), world=1)
    with partial or FillGuard() as partial:
        restoring = RankRestore(
            components,
            _Link(path),
            decision,
            rank=0,
            take=lambda: capture_state(
                {
                    name: component
                    for name, component in components.items()
                    if is_known_component(component)
                }
            ),
            rng=False,
            trusted=False,
            partial=partial,
        )
        for stage in restoring.stage_functions:
            stage([])
        restoring.unmap_image()
