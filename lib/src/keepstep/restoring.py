"""One rank's way back to a step that all ranks chose, in stages that all of them go through.

A rank whose own image fits its live tensors maps that image and copies it (*direct*). Any other
assembles its state from the images of all ranks that saved the step (`keepstep.resharding`): after
a change of world size or of layout, where its own image holds only its part of a replica, or where
its own image is lost and a twin's is not. Ranks may differ in that; what counts is that all come to
the same step. Nothing is changed before every rank knows that it can get all that it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from keepstep import loading, rng
from keepstep.agreement import Decision
from keepstep.errors import KeepstepError
from keepstep.image import Layout, TensorSpec, extras
from keepstep.link import Link
from keepstep.mapping import SlotMapping
from keepstep.protocol import Opened, OpenRequest, Sources, SourcesRequest
from keepstep.resharding.loader import Loader, check_unused
from keepstep.resharding.sources import Images
from keepstep.state import Taken, TensorLeaf
from keepstep.steps import StepId, Tier
from keepstep.wrappers import after_loading

OPEN_S = 600.0
_SOURCES_S = 120.0

Stage = Callable[[Sequence[Any]], Any]


class Restoring:
    """`stages` in this order, each with what all ranks returned from the one before. `tier` and
    `bytes`: where the image came from (the farthest, of several) and what was copied."""

    def __init__(
        self,
        components: Mapping[str, Any],
        link: Link,
        decision: Decision,
        *,
        rank: int,
        take: Callable[[], Taken],
        rng: bool,
        trusted: bool,
        timeout_s: float = OPEN_S,
    ) -> None:
        """`timeout_s`: for fetching this rank's image, or one window of others'."""
        assert decision.id is not None, "there is something to restore"
        self.tier: Tier = decision.tiers[rank]
        self.bytes = 0
        self._timeout_s = timeout_s
        self._components, self._link, self._take = components, link, take
        self._id: StepId = decision.id
        self._direct = decision.direct[rank]
        self._rank, self._rng, self._trusted = rank, rng, trusted
        self._slot: SlotMapping | None = None
        self._run: Callable[[], int]
        self._rng_state: dict[str, Any] = {}

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Each may raise; then no rank goes on to the next."""
        return self._open, self._plan, self._copy

    def _open(self, _: Sequence[Any]) -> None:
        if not self._direct:
            return
        request = OpenRequest(lease=self._link.lease, id=self._id, timeout_s=self._timeout_s)
        opened = self._link.call("/v1/restore", request, Opened, timeout_s=self._timeout_s + 10)
        self.tier = opened.tier
        slot = SlotMapping(opened.path)
        control = slot.control()
        if control.id != self._id or control.rank != self._rank:
            raise KeepstepError(
                f"{opened.path} holds {control.id} of rank {control.rank}, not {self._id}"
            )
        self._slot = slot

    def _plan(self, _: Sequence[Any]) -> bytes:
        """Returns the names that this rank has no place for."""
        taken = self._take()
        if self._slot is not None and fits(self._slot.layout, taken):
            self._plan_direct(self._slot)
            return b""
        request = SourcesRequest(lease=self._link.lease, id=self._id)
        found = self._link.call("/v1/sources", request, Sources, timeout_s=_SOURCES_S)
        loader = Loader(
            self._components, taken, Images(self._link, found, self._timeout_s), rank=self._rank
        )
        loader.plan(trusted=self._trusted)
        self._rng_state = loader.rng or {}
        self._run = loader.run
        return loader.unused()

    def _plan_direct(self, slot: SlotMapping) -> None:
        begin = slot.layout.extras_begin
        size = slot.control().extras_bytes
        kept = extras.decode(bytes(slot.memory[begin : begin + size]), trusted=self._trusted)
        plan = loading.plan(self._components, slot, kept["values"])
        self._rng_state = kept.get("rng", {})
        self._run = plan.run
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            slot.register()

    def _copy(self, unused: Sequence[Any]) -> None:
        # a rank that went on from its own image has compared all names with it already
        if all(unused):
            check_unused(unused)
        self.bytes = self._run()
        after_loading(self._components)
        if self._rng:
            rng.apply(self._rng_state)


def fits(layout: Layout, taken: Taken) -> bool:
    """Whether an image of this rank alone can fill the live tensors.

    Not where it holds only this rank's part of a replica. Differences that are no matter of layout
    (another shape of the whole tensor, another dtype) are left to the comparison in `loading`.
    """
    for leaf, spec in zip(taken.tensors, taken.specs(), strict=True):
        entry = layout.entries.get(layout.aliases.get(spec.name, spec.name))
        if entry is None:
            if layout.world > 1:
                return False
            continue
        if leaf.tensor.shape != leaf.whole.shape:
            return False
        saved = entry.spec
        same_tensor = (saved.global_shape or saved.shape) == (spec.global_shape or spec.shape)
        if same_tensor and (saved.shape, saved.offsets) != (spec.shape, spec.offsets):
            return False
    known = {leaf.name: leaf for leaf in taken.tensors}
    missing = layout.entries.keys() - known.keys()
    return all(_may_be_made(layout.entries[name].spec, known) for name in missing)


def _may_be_made(saved: TensorSpec, known: Mapping[str, TensorLeaf]) -> bool:
    """State that does not exist yet is made like its parameter; a box must be the parameter's."""
    if saved.global_shape is None:
        return True
    parameter = known.get(saved.name.partition(".state.")[2].rpartition(".")[0])
    if parameter is None:
        return False
    shape = tuple(parameter.whole.shape)
    return (saved.shape, saved.offsets) == (shape, parameter.whole_offsets)
