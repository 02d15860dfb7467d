"""Resumes an epoch of a loader: it begins again as it began, and leaves out the batches that were
done.

The order of an epoch is drawn as it begins, from the random generators of the process and from
those that loaders and samplers have of their own. With workers, it is drawn when the iterator is
made. Without workers, the sampler's part is drawn when the first batch is requested. So a resumed
epoch needs the state of all these generators before its iterator was made, and the state of the
process's generators before its first batch.

`Batches` is for custom loops, with torch alone or with a framework that wraps its loaders.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from keepstep.checkpointer import Checkpointer
from keepstep.errors import UsageError
from keepstep.image import extras_codec
from keepstep.integrations import require_supported_accelerate
from keepstep.state import rng

log = logging.getLogger("keepstep")

_OWN = ("loader", "epoch")


class Batches:
    """`loader = Batches(loader)`: a loader that goes on, as a component of the `Checkpointer`.

    It yields the batches of the epoch number `epoch` that were not done yet, and sets the random
    states that were restored. A `break` does not end the epoch: the next pass begins it again.
    Length and all other attributes are the loader's.

    Pass a wrapped loader (of accelerate or Fabric) as it is. If it has already begun an epoch, that
    epoch is dropped. Raises UsageError for a version of accelerate that lacks what this needs, and
    for accelerate's Megatron-LM and FSDP1.
    """

    def __init__(self, loader: Any) -> None:
        if type(loader).__module__.partition(".")[0] == "accelerate":
            require_supported_accelerate()
            _refuse_plugins()
        self.loader, self.epoch = loader, 0
        prefetches = type(loader).__name__ == "PrefetchLoader"  # timm's
        # accelerate's `base_dataloader`, Fabric's `_dataloader`
        inner = getattr(loader, "base_dataloader", None) or getattr(loader, "_dataloader", None)
        inner = loader.loader if prefetches else inner
        self._base = loader if inner is None else inner
        self._fetches_ahead = prefetches or hasattr(loader, "base_dataloader")
        # with accelerate's `dispatch_batches`, rank 0 reads for all ranks, several batches at a
        # time
        dispatched = type(loader).__name__ == "DataLoaderDispatcher"
        self._by_index = can_skip_by_index(self._base) and not dispatched
        if getattr(self._base, "_initial_iter_for_state_dict", False):
            # accelerate began this epoch in prepare(), before anything could be restored
            self._base.load_state_dict({})
        self._done, self._begun = 0, dict[str, Any]()
        self._resumes = False
        self._checkpointer: Callable[[], Checkpointer | None] = lambda: None

    def restored_by(self, checkpointer: Checkpointer) -> None:
        """A Checkpointer, of which this is a component, begins to restore."""
        self._checkpointer = weakref.ref(checkpointer)

    def state_dict(self) -> dict[str, Any]:
        between = not self._begun
        own = capture_loader_generators([self._base]) if between else []
        return {"epoch": self.epoch, "done": self._done, "begun": self._begun, "own": own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self._done, self._begun = state["epoch"], state["done"], state["begun"]
        restore_generator_states(state["own"], [self._base])
        self._resumes = bool(self._begun)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in _OWN:
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or name in _OWN:
            super().__setattr__(name, value)
        else:
            setattr(self.loader, name, value)

    def __iter__(self) -> Iterator[Any]:
        """Raises UsageError before `restore()` of the Checkpointer that keeps this."""
        checkpointer = self._checkpointer()
        if checkpointer is None:
            raise UsageError(
                "no Checkpointer keeps this Batches, so a restart would begin its epoch again: name"
                " it, Checkpointer(..., batches=batches), and call restore() before the first batch"
            )
        if self._fetches_ahead and checkpointer.epoch is not None:
            warn_of_draws(self._base)
        for name in ("iteration", "_num_iter_calls"):  # accelerate's, Fabric's
            if name in getattr(self.loader, "__dict__", ()):
                setattr(self.loader, name, self.epoch)
        if self._resumes:
            self._resumes = False
            batches = self._go_on(checkpointer.restore_rng)
        else:
            if self.epoch:
                begin_workers(self._base)
            checkpointer.restore_rng()
            self._done = 0
            self._begun = capture_generators([self._base])
            batches = iter(self.loader)
        for batch in batches:
            self._done += 1
            yield batch
        self.epoch, self._done, self._begun = self.epoch + 1, 0, {}

    def _go_on(self, restore_rng: Callable[[], bool]) -> Iterator[Any]:
        before = rng.capture_all_generators()

        def settle() -> None:
            if not restore_rng():  # the Batches of another loader has set the states
                rng.apply_generators(before)

        if not self._by_index:
            apply_generators(self._begun, [self._base])
            batches: Iterator[Any] = iter(self.loader)
            for _ in range(self._done):
                next(batches, None)
            settle()
            return batches
        # without workers, the states are set before the first batch is read, which may draw from
        # them; a batch that is fetched ahead must not draw from them
        reads = self._base.num_workers == 0 and not self._fetches_ahead
        with skip_batches_in_iterators([self._base], self._done, self._begun) as (sampler,):
            sampler.then = settle if reads else None
            batches = iter(self.loader)
            first = list(itertools.islice(batches, 1))
        if not reads:
            settle()
        return itertools.chain(first, batches)


def _refuse_plugins() -> None:
    """Raise UsageError for plugins by which accelerate may divide a model and which were never
    tested."""
    from accelerate.state import AcceleratorState

    state = AcceleratorState()
    kind = str(state.distributed_type.value)
    if kind == "MEGATRON_LM":
        raise UsageError(
            "keepstep was never tested with accelerate's Megatron-LM plugin: use FSDP2"
            " (fsdp_version: 2), or DDP"
        )
    if kind == "FSDP" and state.fsdp_plugin.fsdp_version != 2:
        raise UsageError("keepstep keeps FSDP2, not FSDP1: set fsdp_version: 2")


def warn_of_draws(loader: Any) -> None:
    """Warn, once, if a loader fetches a batch ahead and the batches of its next epoch draw from the
    generators of the process.

    Their states cannot be restored for such a batch. Workers draw from generators of their own.
    """
    if not isinstance(loader, DataLoader) or loader.num_workers:
        return
    if not isinstance(loader.collate_fn, _Watched):
        loader.collate_fn = _Watched(loader.collate_fn)


class _Watched:
    """A collator that checks whether the second batch draws.

    When the first batch is collated, samplers have already drawn their seeds, and nothing was
    trained yet.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate
        self._batches, self._state = 0, b""

    def __call__(self, rows: Any) -> Any:
        batch = self._collate(rows)
        self._batches += 1
        if self._batches == 1:
            self._state = extras_codec.encode(rng.capture_all_generators())
        elif self._batches == 2 and self._state != extras_codec.encode(
            rng.capture_all_generators()
        ):
            log.warning(
                "keepstep: the dataset or its collator draws from the random generators of this"
                " process, and a batch is fetched ahead: after a restart that batch is drawn again,"
                " and losses from there on are not those of an undisturbed run; draw from a"
                " generator seeded by the index of the sample (docs/frameworks.md)"
                " [loader.rng_shared]"
            )
        return batch


def can_skip_by_index(loader: Any) -> bool:
    """Whether batches can be left out without reading them."""
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


def capture_generators(loaders: list[Any]) -> dict[str, Any]:
    """How an epoch of these loaders will begin: the states of all generators that may determine its
    order, and whether the iterators are new."""
    return {
        "process": rng.capture_all_generators(),
        "own": capture_loader_generators(loaders),
        "fresh": [is_next_iterator_new(loader) for loader in loaders],
    }


def apply_generators(state: dict[str, Any], loaders: list[Any]) -> None:
    """Set the generators to the states in `capture_generators`'s result."""
    rng.apply_generators(state["process"])
    restore_generator_states(state["own"], loaders)


def capture_loader_generators(loaders: list[Any]) -> list[bytes]:
    """The states of the generators that loaders and their samplers have of their own."""
    return [bytes(generator.get_state().tolist()) for generator in _generators(loaders)]


def restore_generator_states(states: list[bytes], loaders: list[Any]) -> None:
    """Set the states that `capture_loader_generators` returned."""
    for state, generator in zip(states, _generators(loaders), strict=False):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _generators(loaders: list[Any]) -> list[torch.Generator]:
    found: dict[int, torch.Generator] = {}
    # a batch sampler has a sampler, or wraps another batch sampler, as accelerate's does for many
    # ranks
    places, seen = list(loaders), set[int]()
    for place in places:
        if id(place) in seen:
            continue
        seen.add(id(place))
        generator = getattr(place, "generator", None)
        if isinstance(generator, torch.Generator):
            found[id(generator)] = generator
        inner = (getattr(place, name, None) for name in ("batch_sampler", "sampler"))
        places += [place for place in inner if place is not None]
    return list(found.values())


def is_next_iterator_new(loader: Any) -> bool:
    """Whether the loader's next iterator is a new one. With `persistent_workers`, only the first is
    new."""
    return not _lasts(loader) or getattr(loader, "_iterator", None) is None


def _lasts(loader: Any) -> bool:
    return bool(getattr(loader, "persistent_workers", False)) and loader.num_workers > 0


def begin_workers(loader: Any) -> None:
    """Start persistent workers if there are none yet, so that the next epoch draws no seed for
    them: it is not their first epoch. Leaves all generators as they are."""
    if _lasts(loader) and is_next_iterator_new(loader):
        before = capture_generators([loader])
        iter(loader)
        apply_generators(before, [loader])


@contextlib.contextmanager
def seeds_drawn_aside(loader: Any) -> Iterator[None]:
    """In this context, the seeds of workers of this loader, and of its copies, are drawn from a
    separate generator."""
    own, loader.generator = loader.generator, torch.Generator()
    try:
        yield
    finally:
        loader.generator = own


@contextlib.contextmanager
def skip_batches_in_iterators(
    loaders: list[Any], batches: int, begun: dict[str, Any]
) -> Iterator[list[_Behind]]:
    """In this context, new iterators of these loaders begin as `begun` (from `capture_generators`)
    says, and leave out the first `batches` once they draw. For loaders that are
    `can_skip_by_index`."""
    for loader, fresh in zip(loaders, begun["fresh"], strict=True):
        if fresh and not is_next_iterator_new(loader):
            loader._iterator = None
        elif not fresh and is_next_iterator_new(loader):
            iter(loader)
    apply_generators(begun, loaders)
    samplers: list[_Behind] = []
    put_back: list[tuple[Any, str, Any]] = []
    for loader in loaders:
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        sampler = _Behind(getattr(loader, name), batches)
        samplers.append(sampler)
        # bypass DataLoader.__setattr__, which forbids this for reasons that do not apply here
        put_back.append((loader, name, vars(loader)[name]))
        vars(loader)[name] = sampler
        if not is_next_iterator_new(loader):
            loader._iterator._index_sampler = sampler
    try:
        yield samplers
    finally:
        for loader, name, sampler_before in put_back:
            vars(loader)[name] = sampler_before


class _Behind:
    """A sampler, and its iterator, whose first pass begins after the batches that are left out."""

    def __init__(self, sampler: Any, left_out: int) -> None:
        self._sampler, self._left_out = sampler, left_out
        self._rest: Iterator[Any] = iter(())
        self.then: Callable[[], Any] | None = None
        """Called once, when the batches to leave out were left out."""

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_sampler"], name)

    def __iter__(self) -> _Behind:
        self._rest = iter(self._sampler)
        return self

    def __next__(self) -> Any:
        self.skip()
        return next(self._rest)

    def skip(self) -> None:
        while self._left_out:
            self._left_out -= 1
            next(self._rest, None)
        if self.then is not None:
            self.then()
            self.then = None
