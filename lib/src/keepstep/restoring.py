"""One rank's way back to a step that all ranks chose, in stages that all of them go through.

A rank whose own image fits its live tensors maps that image and copies it (*direct*). Any other
assembles its state from the images of all ranks that saved the step (`keepstep.resharding`): after
a change of world size or of layout, where its own image holds only its part of a replica, or where
its own image is lost and a twin's is not. Ranks may differ in that; what counts is that all come to
the same step. Nothing is changed before every rank knows that it can get all that it needs, and
no component gets its values before every rank has filled its tensors: what a failure in between
leaves behind are tensors that the next attempt fills, or nobody can train on (`torn`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from keepstep import loading, rng
from keepstep.agreement import Decision
from keepstep.errors import ForeignError, ImageError, SidecarError
from keepstep.image import Layout, TensorSpec, check_control, extras
from keepstep.kinds import refuse_dcp
from keepstep.leaves import values_of
from keepstep.link import Link
from keepstep.mapping import SlotMapping
from keepstep.protocol import Opened, OpenRequest
from keepstep.resharding.loader import Loader, check_unused
from keepstep.resharding.sources import Images
from keepstep.state import Taken, TensorLeaf
from keepstep.steps import StepId, Tier
from keepstep.timeouts import RESTORE_S
from keepstep.torn import Torn
from keepstep.wrappers import after_loading, unwrap

log = logging.getLogger("keepstep")

_BAD_SLOTS = 3
"""More than these, and the step is left out: a sidecar that hands out the same slot again."""

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
        torn: Torn,
        reader: int | None = None,
        timeout_s: float = RESTORE_S,
    ) -> None:
        """`timeout_s`: for fetching this rank's image, or one window of others'. `torn`: what
        earlier attempts have changed. `reader`: the first rank of this node."""
        assert decision.id is not None, "there is something to restore"
        self.tier: Tier = decision.tiers[rank]
        self.bytes = 0
        self._timeout_s = timeout_s
        self._components, self._link, self._take = components, link, take
        self._id: StepId = decision.id
        self._direct = decision.direct[rank]
        self._rank, self._rng, self._trusted = rank, rng, trusted
        self._torn, self._reader = torn, reader
        self._slot: SlotMapping | None = None
        self._loader: Loader | loading.Loading
        self._kept: dict[str, Any] = {}
        self._rng_state: dict[str, Any] = {}

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Each may raise; then no rank goes on to the next."""
        return self._open, self._plan, self._copy, self._finish

    def _open(self, _: Sequence[Any]) -> None:
        if not self._direct:
            return
        bad, failures = "", 0
        while self._slot is None:
            opened = self._ask(bad)
            self.tier = opened.tier
            try:
                self._map(opened.path)
            except (ImageError, OSError) as error:
                failures += 1
                if failures > _BAD_SLOTS:
                    raise SidecarError(
                        f"step {self._id}: no slot that the sidecar opened verifies; the last one"
                        f" ({opened.tier}): {error}",
                        code="not-verified",
                    ) from error
                log.warning(
                    "keepstep: rank %d: step %s from %s does not verify (%s): the next copy is"
                    " asked for",
                    *(self._rank, self._id, opened.tier, error),
                )
                bad = opened.path

    def _ask(self, bad: str) -> Opened:
        request = OpenRequest(
            lease=self._link.lease, id=self._id, timeout_s=self._timeout_s, bad=bad
        )
        return self._link.call("/v1/restore", request, Opened, timeout_s=self._timeout_s + 10)

    def _map(self, path: str) -> None:
        """Map a slot and read all that is no tensor. Raises ImageError or OSError when it is not
        the image that it should be, MismatchError for one of `keepstep.dcp`."""
        slot = SlotMapping(path)
        control = slot.control()
        check_control(control, slot.layout, id=self._id, path=path)
        if control.rank != self._rank:
            raise ForeignError(f"it holds rank {control.rank}", path=path)
        refuse_dcp(slot.layout.skeleton, self._id)
        begin = slot.layout.extras_begin
        text = bytes(slot.memory[begin : begin + control.extras_bytes])
        self._kept = extras.decode(text, trusted=self._trusted)
        self._slot = slot

    def _plan(self, _: Sequence[Any]) -> bytes:
        """Returns the names that this rank has no place for."""
        taken = self._take()
        unused = b""
        if self._slot is not None and fits(self._slot.layout, taken):
            self._loader = self._plan_direct(self._slot, taken)
        else:
            self._loader = loader = self._plan_assembly(taken)
            unused = loader.unused()
        # all else lives on only where it is filled: it gives way to what the step holds
        modules = {
            name for name, one in self._components.items() if isinstance(unwrap(one), nn.Module)
        }
        live = [one.whole.detach() for path, one in taken.by_path.items() if path[0] in modules]
        self._torn.check(self._id, live, self._loader.targets)
        return unused

    def _plan_assembly(self, taken: Taken) -> Loader:
        images = Images.find(self._link, self._id, self._timeout_s)
        refuse_dcp(images.skeleton(images.stand_in(self._rank)), self._id)
        loader = Loader(self._components, taken, images, rank=self._rank, reader=self._reader)
        loader.plan(trusted=self._trusted)
        self._rng_state = loader.rng or {}
        return loader

    def _plan_direct(self, slot: SlotMapping, taken: Taken) -> loading.Loading:
        plan = loading.plan(self._components, slot, values_of(self._kept), taken)
        self._rng_state = self._kept.get("rng", {})
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            slot.register()
        return plan

    def _copy(self, unused: Sequence[Any]) -> None:
        # a rank that went on from its own image has compared all names with it already
        if all(unused):
            check_unused(unused)
        self._torn.begin(self._loader.targets)
        self.bytes = self._loader.copy()

    def _finish(self, _: Sequence[Any]) -> None:
        self._loader.finish()
        after_loading(self._components)
        if self._rng:
            rng.apply(self._rng_state)
        if self._rng and not self._rng_state and not self._direct:
            log.warning(
                "keepstep: rank %d goes on from what other ranks saved of step %s: the state of its"
                " random generators is out of reach, they stay as they are",
                self._rank,
                self._id,
            )


def fits(layout: Layout, taken: Taken) -> bool:
    """Whether an image of this rank alone can fill the live tensors.

    Not where it holds only this rank's part of a replica. Differences that are no matter of layout
    (another shape of the whole tensor, another dtype) are left to the comparison in `loading`.
    """
    for leaf, spec in zip(taken.tensors, taken.specs, strict=True):
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
