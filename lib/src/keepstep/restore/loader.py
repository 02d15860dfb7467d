"""Loads a step into modules, optimizers, dicts and schedulers; every restore goes this way.

TensorRestorePlanner are found by name and box, in whatever images hold them: only in this rank's
own image, if it fits (`is_only_saved_image`), else in those of all ranks that saved. Values
(parameter groups, a scheduler's counters, plain dicts) come from the saved rank of the same
number, or from its stand-in. Everything is compared before anything is changed: one MismatchError
lists all differences.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from keepstep.compile_cache import CompileCache, is_compile_cache
from keepstep.errors import KeepstepError, MismatchError
from keepstep.image import split_local_name
from keepstep.image.codecs import ArrayForm
from keepstep.restore.fill_plan import make_fill_plan
from keepstep.restore.images import StepImages, fill_targets, list_chunks_in_plan_order
from keepstep.restore.modules import ModuleLoader
from keepstep.restore.optimizers import OptimizerLoader, parameter_numbers_by_group
from keepstep.restore.targets import (
    ADVICE,
    Live,
    SavedTree,
    TensorRestorePlanner,
    iterate_non_view_tensors,
    raise_differences,
    target_of,
)
from keepstep.state.refill import put_back_component
from keepstep.state.rng import is_generator, is_state_compatible
from keepstep.state.taken_state import TakenState, iterate_tensor_forms
from keepstep.state.wrappers import is_zero, unwrap_module
from keepstep.wire.trainer import ChunkRun


class Loader(TensorRestorePlanner):
    """One rank's share of a restore.

    `plan` changes nothing, `unused` gives the saved names that it has no place for, `copy` fills
    tensors, and `finish` hands each component its values. `difference`: what was known of replicas
    that differ when the step was saved. `rng`: the random states of the saved rank of the same
    number; None if there are none.
    """

    def __init__(
        self,
        components: Mapping[str, Any],
        taken: TakenState,
        images: StepImages,
        *,
        rank: int,
        reader: int | None = None,
        trusted: bool = False,
        kept: Mapping[str, Any] | None = None,
    ) -> None:
        """`reader`: see `plan.make`. `kept`: see `TensorRestorePlanner`."""
        super().__init__(images, rank=rank, trusted=trusted, kept=kept)
        self._components, self._taken, self._reader = components, taken, reader
        self.rng: dict[str, Any] | None = None
        self.difference = ""

    def compare_and_plan(self, *, whole: bool = True) -> None:
        """Compare and plan. Raises MismatchError, CoverageError, FormatError, SidecarError.

        `whole` False: the step may have components that are not here, and the other way round.
        """
        own = self._images.choose_source_rank(self._rank)
        trees, live = self._trees_of(own), self._live()
        self._lives = {
            name: live[name] for name in live if isinstance(self._components[name], dict)
        }
        if own == self._rank:
            self.rng = self._extras(own).get("rng")
            self.difference = str(self._extras(own).get("difference", ""))
        for name in sorted(trees.keys() - self._components.keys()) if whole else ():
            tree = trees[name]
            if not is_compile_cache(key for key, _ in tree.branches_of(tree.node)):
                self.note_diff(f"{name}: in the checkpoint, but not given to Checkpointer")
        keys = self._live_keys()
        # modules first: a dict may hold the same tensors, and must not keep them from the modules.
        # Then in the order of the save: what stands in two places is found at its first place
        order = {name: at for at, name in enumerate(trees)}
        names = sorted(self._components, key=lambda name: order.get(name, len(order)))
        for name in sorted(names, key=self._is_no_module):
            if name in trees:
                component = unwrap_module(self._components[name])
                self._component(name, component, trees[name], live.get(name, {}), keys.get(name))
            elif whole and not isinstance(self._components[name], CompileCache):
                self.note_diff(f"{name}: given to Checkpointer, but not in the checkpoint")
        if self.is_only_saved_image:
            for name in self._unused():
                self.note_diff(_missing(name))
        raise_differences(self._differences)
        self._plan = make_fill_plan(
            self._requests,
            self._images.index,
            rank=self._rank,
            nearness=self._images.nearness_by_rank,
            reader=self._reader,
        )
        # announced before any rank begins to copy, so that the ranks of a node know of each other's
        # chunks
        self._images.announce_needed_chunks(
            list_chunks_in_plan_order(
                self._plan, [target.dtype for target in self.targets], self._images
            )
        )

    def _unused(self) -> list[str]:
        """Saved names that a module here could hold and does not."""
        keyed = tuple(f"{name}." for name in self._components if not self._is_no_module(name))
        return sorted(name for name in self.names.unused if name.startswith(keyed))

    def compress_unused_names(self) -> bytes:
        """The saved names that a module here could hold and does not, compressed. Some other rank
        must have a place for each of them. Empty if this rank's own image was already compared with
        its state."""
        if self.is_only_saved_image:
            return b""
        return zlib.compress("\n".join(self._unused()).encode("utf-8", "surrogatepass"))

    def copy(self, lent: Iterator[tuple[ChunkRun, Tensor]]) -> int:
        """Fill all tensors; returns the bytes copied. Images that are lent come in chunks.

        Raises SidecarError; some tensors have changed by then, see `images.fill_targets`.
        """
        self._images.set_chunk_stream(lent)
        try:
            with torch.no_grad():
                filled = fill_targets(self._plan, self.targets, self._images)
            self._images.check_unchanged()
            return filled
        except BaseException:
            self._images.announce_no_more_chunks()
            raise

    def load_components(self) -> None:
        """Hand each component its values."""
        for name, finish in self._finishers:
            _load(name, finish)
        # the finishers and this loader refer to each other: release window and slots now, not at
        # some later garbage collection
        self._finishers.clear()
        self._images.close()

    # --- live and saved trees ------------------------------------------------------------------

    def _is_no_module(self, name: str) -> bool:
        return not isinstance(unwrap_module(self._components[name]), nn.Module)

    def _live(self) -> dict[str, Live]:
        """The live tensors of each component, by the keys that lead to them."""
        leaves = {leaf.name: leaf for leaf in self._taken.tensors if not leaf.fresh}
        aliases = self._taken.aliases
        return {
            component: {
                path: target_of(leaf, name)
                for path, name in iterate_non_view_tensors(node, self._taken.values)
                if (leaf := leaves.get(aliases.get(name, name))) is not None
            }
            for component, node in self._taken.skeleton[1]
        }

    def _live_keys(self) -> dict[str, frozenset[Any]]:
        """The keys of each component that was taken."""
        values = self._taken.values
        return {
            name: frozenset(
                values[node[1]] or () if node[0] == "v" else (key for key, _ in node[1])
            )
            for name, node in self._taken.skeleton[1]
            if not self._is_no_module(name)
        }

    # --- components ----------------------------------------------------------------------------

    def _component(
        self,
        name: str,
        component: Any,
        saved: SavedTree,
        live: Live,
        keys: frozenset[Any] | None,
    ) -> None:
        if isinstance(component, nn.Module):
            ModuleLoader(self, name, component).plan(saved, live, keys or frozenset())
        elif isinstance(component, torch.optim.Optimizer):
            self._optimizer(name, component, saved, live)
        elif isinstance(component, dict) or is_generator(component):
            tree = self._tree(saved, live)
            if is_generator(component) and not is_state_compatible(component, tree):
                self.note_diff(f"{name}: {_kind(tree)} in the checkpoint, {_kind(component)} here")
            self.refill.pair_objects(component, tree, whatever=True)
            self.call_after_fill(
                name, lambda: put_back_component(name, component, tree, self.refill)
            )
        else:
            tree = self._tree(saved, {})
            self.call_after_fill(
                name, lambda: component.load_state_dict(self.refill.placed_object(tree))
            )

    def _optimizer(
        self, name: str, optimizer: torch.optim.Optimizer, saved: SavedTree, live: Live
    ) -> None:
        groups = parameter_numbers_by_group(saved.without_tensors())
        if groups is None:  # a custom state_dict: only its load_state_dict can read it
            tree = self.build_part(
                saved, saved.node, lambda path, tensor: self.new_tensor(tensor, live.get(path))
            )
            self.call_after_fill(name, lambda: optimizer.load_state_dict(tree))
        else:
            movable = not is_zero(self._components[name])
            loader = OptimizerLoader(
                self, self._images, name, optimizer, self._components, movable=movable
            )
            loader.plan(saved, groups, live, rank=self._images.choose_source_rank(self._rank))

    def _tree(self, saved: SavedTree, live: Live) -> Any:
        """A saved tree whose tensors are the live ones, filled in place, where possible, and new
        ones otherwise."""
        values = saved.values
        arrays = {
            split_local_name(name)[0]
            for name, form in iterate_tensor_forms(saved.node, values)
            if type(form) is ArrayForm
        }
        return self.build_part(
            saved,
            saved.node,
            lambda path, name: self.reuse_or_create_tensor(
                name, None if name in arrays else live.get(path)
            ),
        )


def _load(name: str, finish: Callable[[], None]) -> None:
    try:
        finish()
    except KeepstepError:
        raise
    except Exception as error:  # foreign code may raise anything
        raise MismatchError(
            f"{name}: its load_state_dict() refuses what was saved: {error!r}.\n{ADVICE}"
        ) from error


def _kind(value: Any) -> str:
    return f"a {type(value).__module__}.{type(value).__qualname__}"


def _missing(name: str) -> str:
    return f"{name}: in the checkpoint, missing here"


def check_unused(everyone: Sequence[bytes]) -> None:
    """Raise MismatchError for names that no rank has a place for. `everyone`: `unused()` of all
    ranks."""
    left: set[str] | None = None
    for chunk in everyone:
        names = set(zlib.decompress(chunk).decode("utf-8", "surrogatepass").split("\n")) - {""}
        left = names if left is None else left & names
    raise_differences([_missing(name) for name in sorted(left or ())])
