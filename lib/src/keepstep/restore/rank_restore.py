"""The stages in which one rank restores the step that all ranks chose; all ranks go through them
together.

A rank whose own image fits its live tensors goes on from that image alone (*direct*). Any other
rank assembles its state from the images of all ranks that saved the step. This is the case after a
change of world size or of layout, if its own image holds only its part of a replica, or if its own
image is lost and a twin's is not. If its sidecar cannot bring them all, other ranks lend it the
images (`keepstep.restore.images`). Ranks may differ in this; what counts is that all come to the
same step.

Nothing is changed before every rank knows that it can get everything that it needs. No component
gets its values before every rank has filled its tensors. So a failure in between leaves only
tensors that the next attempt fills, or that cannot be trained on (`FillGuard`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from keepstep import processes
from keepstep.client.session import RESTORE_S, SidecarSession
from keepstep.client.slot import SlotMapping, unmap_in_background
from keepstep.core.restore_vote import Decision
from keepstep.errors import (
    CoverageError,
    ForeignError,
    ImageError,
    MismatchError,
    RestoreError,
    SidecarError,
    few,
)
from keepstep.image import ControlPage, Layout, TensorSpec, check_control, extras_codec
from keepstep.restore.images import (
    ChunkExchange,
    ImagesLentByRanks,
    LentStepMetadata,
    StepImages,
    lend_images,
)
from keepstep.restore.loader import Loader, check_unused
from keepstep.restore.targets import boxes_of_tensor
from keepstep.save.frozen_parameters import FrozenBase, find_tensors_unlike_base, restored_base
from keepstep.state import rng
from keepstep.state.taken_state import TakenState, TensorLeaf, values_from_extras
from keepstep.state.wrappers import unwrap_module, update_wrappers
from keepstep.steps import StepId, Tier
from keepstep.wire.trainer import ChunkRun, OpenedStep, RestoreStepRequest

log = logging.getLogger("keepstep")

_BAD_SLOTS = 3
"""After more bad slots than this, the step is left out: the sidecar must be handing out the same
slot again."""

Stage = Callable[[Sequence[Any]], Any]


class RankRestore:
    """One rank's restore of a step.

    `stage_functions` run in this order; each gets what all ranks returned from the stage before.
    `tier`: where the image came from; of several images, the farthest tier. `bytes`: what was
    copied. `rng`: the random states of this rank, {} if the step has none. `base`: the base from
    which frozen parameters came, if this rank may refer to it again.
    """

    def __init__(
        self,
        components: Mapping[str, Any],
        link: SidecarSession,
        decision: Decision,
        *,
        rank: int,
        take: Callable[[], TakenState],
        rng: bool,
        trusted: bool,
        partial: FillGuard,
        rng_later: bool = False,
        reader: int | None = None,
        timeout_s: float = RESTORE_S,
        whole: bool = True,
        frozen_once: bool = False,
    ) -> None:
        """`timeout_s`: for fetching this rank's image, or one window of other images. `partial`:
        what earlier attempts have changed. `reader`: the first rank of this node. `rng_later`: the
        caller sets the random generators, from `rng`. `whole` False: the components are only some
        of the step's, or even none of them; only their own bytes are read, from any image.
        `frozen_once`: the caller keeps on referring to the base."""
        assert decision.id is not None, "there is something to restore"
        self.tier: Tier = decision.tiers[rank]
        self.bytes = 0
        self.rng: dict[str, Any] = {}
        self._timeout_s = timeout_s
        self._components, self._link, self._take = components, link, take
        self._id: StepId = decision.id
        self._whole, self._frozen_once = whole, frozen_once
        self._direct = whole and decision.direct[rank]
        self._lent = bool(decision.lent) and decision.lent[rank]
        self._lenders = decision.lenders
        self._shows: StepImages | None = None
        self._lending: ChunkExchange | None = None
        self._rank, self._rng, self._trusted = rank, rng, trusted
        self._rng_later = rng_later
        self._partial, self._reader = partial, reader
        self._slot: SlotMapping | None = None
        self._under: SlotMapping | None = None
        self.base: FrozenBase | None = None
        self._reloaded = False
        self._taken: TakenState
        self._control: ControlPage
        self._loader: Loader
        self._kept: dict[str, Any] = {}

    @property
    def stage_functions(self) -> tuple[Stage, ...]:
        """The stages. Each may raise; then no rank goes on to the next."""
        if self._lenders:
            return self._open, self._show, self._plan, self._copy, self._finish
        return self._open, self._plan, self._copy, self._finish

    @property
    def layout(self) -> Layout | None:
        """That of this rank's own image, until `unmap_image`; None if it went on from others, or if
        its base cannot be used again."""
        if self._slot is None or (self._under is None) is not (self.base is None):
            return None
        return self._slot.layout

    def _open(self, _: Sequence[Any]) -> None:
        if not self._direct:
            return
        bad, failures = "", 0
        while self._slot is None:
            request = RestoreStepRequest(
                lease=self._link.lease_token, id=self._id, timeout_s=self._timeout_s, bad=bad
            )
            within_s = self._timeout_s + 10
            opened = self._link.call_apart("/v1/restore", request, OpenedStep, timeout_s=within_s)
            self.tier = opened.tier
            try:
                self._map(opened.path, opened.base)
            except (ImageError, OSError) as error:
                failures += 1
                if failures > _BAD_SLOTS:
                    raise SidecarError(
                        f"step {self._id}: no slot that the sidecar opened verifies; the last one"
                        f" ({opened.tier}): {error}",
                        code="not-verified",
                    ) from error
                log.warning(
                    "keepstep: rank %d: step %s from %s does not verify (%s): another copy is"
                    " asked for [restore.copy_refused]",
                    *(self._rank, self._id, opened.tier, error),
                )
                bad = opened.path

    def _show(self, _: Sequence[Any]) -> LentStepMetadata | None:
        """Show all ranks what this rank lends, if it is a lender."""
        if self._rank not in self._lenders:
            return None
        self._shows = self._all_images(every=True)  # a twin's does not replace a rank's own
        return lend_images(self._shows)

    def unmap_image(self) -> None:
        """Unmap the image; see `unmap_in_background`."""
        held: list[object] = [self._slot, self._under, self._loader, self._shows, self._lending]
        self._slot = self._under = self._shows = self._lending = None
        del self._loader
        unmap_in_background(held)

    @processes.pause_garbage_collection()
    def _map(self, path: str, base: str) -> None:
        """Map a slot, and the `base` to which its image refers, and read everything in it that is
        not a tensor.

        Raises ImageError or OSError if it is not the expected image, MismatchError for an image of
        `keepstep.dcp`.
        """
        slot = SlotMapping(path)
        control = slot.control()
        check_control(control, slot.layout, step_id=self._id, path=path)
        if control.rank != self._rank:
            raise ForeignError(f"it holds rank {control.rank}", path=path)
        refuse_dcp_image(slot.layout.skeleton, self._id)
        begin = slot.layout.extras_begin
        text = bytes(slot.memory[begin : begin + control.extras_bytes])
        self._kept = extras_codec.decode(text, trusted=self._trusted)
        values_from_extras(self._kept)
        under = SlotMapping(base) if base else None
        if control.base is not None and (
            under is None or not control.base.matches_control_page(under.control())
        ):
            raise ForeignError("its base is another one", path=path)
        self._control, self._slot, self._under = control, slot, under

    @processes.pause_garbage_collection()
    def _plan(self, shown: Sequence[Any]) -> tuple[bytes, tuple[ChunkRun, ...]]:
        """Plan this rank's copies. Returns the saved names for which this rank has no place, and
        the chunks that other ranks are to lend it."""
        taken = self._taken = self._take()
        slot = self._slot
        if slot is not None:
            under = None if self._under is None else self._under.layout
            slot = slot if fits_own_image(slot.layout.merge_with_base(under), taken) else None
        if self._lenders:
            self._lending = ChunkExchange(shown, rank=self._rank, own=self._shows)
        if self._lent:
            images: StepImages = ImagesLentByRanks(self._link, self._id, shown)
            self._refuse_dcp(images)
        elif slot is not None:
            images = StepImages.of_slot(self._link, slot, self._control, self._under)
        else:
            images = self._all_images()
        try:
            self._plan_from(images, taken, kept=None if slot is None else self._kept)
        except CoverageError:
            if self._lent or not images.index.left_out:
                raise
            # only with all images read is it certain whether boxes contradict each other
            self._plan_from(self._all_images(every=True), taken)
        self._partial.check_tensors_refilled(self._id, self._lasting(taken), self._loader.targets)
        self._compare_base(taken)
        return self._loader.compress_unused_names(), images.requested

    def _compare_base(self, taken: TakenState) -> None:
        """Compare what the script has of the base with the base.

        Whether it loads the frozen parameters or draws them at random shows in the second life: if
        that had the same, others are an error, else only worth a line.
        """
        under = self._under
        if under is None or self._control.base is None or not self._frozen_once:
            return
        self._reloaded = self._kept.get("reloaded") == str(self._control.base.step)
        if self._partial.has_begun:  # some of them are a failed attempt's
            return
        others = find_tensors_unlike_base(taken, under, self._control.base)
        if others and self._reloaded:
            raise MismatchError(
                f"step {self._id}: the frozen parameters that this script has loaded are not those"
                f" of this run, which earlier lives had loaded alike: {few(others, 4)}; nothing was"
                " changed. Load the same base (another revision?), or start a new run"
                " (keepstep run --run NAME); frozen_once=False goes on with those of the run"
            )
        if others:
            log.warning(
                "keepstep: rank %d: this script built other frozen parameters than step %s"
                " has, and now has those of the step: %s. If it loads a base from files, their"
                " revision may have changed [restore.base_differs]",
                *(self._rank, self._id, few(others, 4)),
            )
        self._reloaded = others == []

    def _plan_from(
        self, images: StepImages, taken: TakenState, *, kept: dict[str, Any] | None = None
    ) -> None:
        self._loader = Loader(
            self._components,
            taken,
            images,
            rank=self._rank,
            reader=self._reader,
            trusted=self._trusted,
            kept=kept,
        )
        self._loader.compare_and_plan(whole=self._whole)

    def _lasting(self, taken: TakenState) -> Iterator[Tensor]:
        """The tensors of modules. All other tensors last only if they are filled; otherwise, what
        the step holds replaces them."""
        modules = {
            name
            for name, component in self._components.items()
            if isinstance(unwrap_module(component), nn.Module)
        }
        for path, leaf in taken.by_path.items():
            if path[0] in modules:
                yield from (
                    part
                    for part, _ in boxes_of_tensor(leaf.whole, leaf.whole_offsets, leaf.flat_box)
                )

    def _all_images(self, *, every: bool = False) -> StepImages:
        """`every`: see `StepImages.locate_step`. What this rank lends is asked for once, and is
        all."""
        if self._shows is not None:
            return self._shows
        every = every or not self._whole  # a twin's values may differ from this rank's
        images = StepImages.locate_step(self._link, self._id, self._timeout_s, every=every)
        self._refuse_dcp(images)
        return images

    def _refuse_dcp(self, images: StepImages) -> None:
        refuse_dcp_image(images.skeleton(images.choose_source_rank(self._rank)), self._id)

    def _copy(self, planned: Sequence[Any]) -> None:
        unused = [names for names, _ in planned]
        lent = [run for _, runs in planned for run in runs]
        chunks = iter(()) if self._lending is None else self._lending.iter_needed_chunks(lent)
        try:
            # a rank that goes on from its own image has already compared all names with it
            if all(unused):
                check_unused(unused)
            self._partial.begin(self._loader.targets)
            self.bytes = self._loader.copy(chunks)
            if self._under is not None and self._control.base is not None:
                self.base = restored_base(self._taken, self._under, self._control.base)
                if self.base is not None:
                    self.base.reloaded = self._reloaded
        finally:
            for _ in chunks:  # the other ranks are waiting, whatever went wrong here
                pass
        if self._shows is not None:
            self._shows.check_unchanged()

    def _finish(self, _: Sequence[Any]) -> None:
        self._loader.load_components()
        if not self._whole:
            return
        update_wrappers(self._components)
        self.rng = self._loader.rng or {}
        if self._loader.difference and self._rank == 0:
            log.warning(
                "keepstep: step %d was saved while its replicas differed, so what is restored mixes"
                " them: %s [restore.replicas_differ]",
                *(self._id.step, self._loader.difference),
            )
        if self._rng and not self._rng_later:
            rng.apply_generators(self.rng)
        if self._rng and not self.rng and not self._direct:
            log.warning(
                "keepstep: rank %d goes on from what other ranks saved of step %s: the state of its"
                " random generators is out of reach, they stay as they are [rng.unavailable]",
                self._rank,
                self._id,
            )


def fits_own_image(layout: Layout, taken: TakenState) -> bool:
    """Whether this rank's image alone can fill the live tensors.

    It cannot if it holds only this rank's part of a replica. Differences that do not concern the
    layout (another shape of the whole tensor, another dtype) are left to the comparison in
    `Loader`.
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
        if saved.whole_shape == spec.whole_shape and _box_of(saved) != _box_of(spec):
            return False
    known = {leaf.name: leaf for leaf in taken.tensors}
    missing = layout.entries.keys() - known.keys()
    return all(_may_be_made(layout.entries[name].spec, known) for name in missing)


def _may_be_made(saved: TensorSpec, known: Mapping[str, TensorLeaf]) -> bool:
    """Whether a saved tensor that is not live yet can be made. State is made like its parameter, so
    its box must be the parameter's box."""
    if saved.global_shape is None:
        return True
    parameter = known.get(saved.name.partition(".state.")[2].rpartition(".")[0])
    if parameter is None:
        return False
    place = tuple(parameter.whole.shape), parameter.whole_offsets, parameter.flat_box
    return _box_of(saved) == place


def _box_of(spec: TensorSpec) -> tuple[Any, ...]:
    return spec.shape, spec.offsets, spec.flat


# --- tensors that an attempt has begun to fill -----------------------------------------------
#
# An attempt can fail half-way, on this rank or on another: every copy of a chunk may be damaged, or
# a sidecar may be gone. Some tensors then hold a mixture of their old values and of a step that is
# not used. The next attempt, at another step, must fill all of these tensors. If there is no next
# attempt, every floating point number in them becomes NaN. So nobody can train on such a mixture,
# not even a script that goes on after the error.


_Place = tuple[torch.device, int, int]


class FillGuard:
    """The tensors that one rank has begun to fill in one `restore()`. If the context ends with an
    error, they are made useless, so that no script trains on them."""

    def __init__(self) -> None:
        self._begun: dict[_Place, Tensor] = {}

    def __enter__(self) -> FillGuard:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if error is not None and self._begun:
            self._spoil()

    @property
    def has_begun(self) -> bool:
        """Whether any tensor is noted."""
        return bool(self._begun)

    def begin(self, targets: Iterable[Tensor]) -> None:
        """Note that these tensors are being filled from now on."""
        self._begun.update({_place(target): target for target in targets if target.numel()})

    def check_tensors_refilled(
        self, step_id: StepId, live: Iterable[Tensor], targets: Iterable[Tensor]
    ) -> None:
        """Raise RestoreError if step `step_id` would leave a live tensor in the state in which an
        earlier attempt at another step left it. `targets`: the tensors that the step fills."""
        if not self._begun:
            return
        stale = self._begun.keys() - {_place(target) for target in targets}
        left = [tensor for tensor in live if _place(tensor) in stale]
        if left:
            shapes = ", ".join(str(list(tensor.shape)) for tensor in left[:4])
            raise RestoreError(
                f"step {step_id} does not hold {len(left)} tensors (of shapes {shapes}) that a"
                " newer"
                " step, which failed while it was restored, has changed already; restart this job,"
                " so that the model is built again"
            )

    def _spoil(self) -> None:
        with torch.no_grad():
            for tensor in self._begun.values():
                if tensor.is_floating_point() or tensor.is_complex():
                    with contextlib.suppress(RuntimeError):  # a dtype that cannot be filled
                        tensor.fill_(float("nan"))
        log.error(
            "keepstep: the restore failed while tensors were being filled; %d of them hold NaN now."
            " Do not train on: restart this job, so that the model is built again [restore.failed]",
            len(self._begun),
        )


def _place(tensor: Tensor) -> _Place:
    return tensor.device, tensor.data_ptr(), tensor.numel() * tensor.element_size()


# --- Checkpointer's images and keepstep.dcp's ------------------------------------------------
#
# Both make the same kind of image, with other names and trees. The skeleton in the header tells
# them apart: it is a list for a `Checkpointer`, and an object for `dcp.save` (docs/format.md).


_DCP = '{"dcp"'


def refuse_dcp_image(skeleton: str, step_id: StepId) -> None:
    """Raise MismatchError for an image of `dcp.save`, which a `Checkpointer` cannot restore."""
    if skeleton.startswith(_DCP):
        raise MismatchError(
            f"step {step_id} was saved by dcp.save (keepstep.dcp.StorageWriter), which keepstep."
            "Checkpointer cannot restore; nothing was changed. Load it with dcp.load and"
            " keepstep.dcp.StorageReader(), or start a new run (keepstep run --run NAME)"
        )
