"""An epoch of a loader begins again as it began, and leaves out what was done.

What its order depends on is drawn as it begins, from the random generators of the process and from
those that loaders and samplers have of their own: with workers when the iterator is made, without
them the sampler's part when the first batch is asked for. So what a resumed epoch needs is the
state of all of these before its iterator was made, and of the process's before its first batch.

For a loop of one's own, on torch alone or a framework that wraps its loaders: `Batches`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from keepstep.checkpointer import Checkpointer
from keepstep.errors import UsageError
from keepstep.image import extras
from keepstep.integrations import require_accelerate
from keepstep.state import rng

log = logging.getLogger("keepstep")


class Batches:
    """What is left of each epoch of a loader; a component, to be named to the `Checkpointer`.

    `epoch`: the one that `left` gives the rest of. A loader that wraps another, as those of
    accelerate and Fabric do, goes in as it is. An epoch of it that was begun already is dropped.
    Raises UsageError for a version of accelerate that was never tested, and for its DeepSpeed,
    Megatron-LM and FSDP1.
    """

    def __init__(self, loader: Any) -> None:
        if type(loader).__module__.partition(".")[0] == "accelerate":
            require_accelerate()
            _refuse_plugins()
        self.loader, self.epoch = loader, 0
        # accelerate's `base_dataloader`, Fabric's `_dataloader`
        inner = getattr(loader, "base_dataloader", None) or getattr(loader, "_dataloader", None)
        self._base = loader if inner is None else inner
        self._fetches_ahead = hasattr(loader, "base_dataloader")
        # of accelerate's `dispatch_batches` rank 0 reads for all, several at a time
        dispatched = type(loader).__name__ == "DataLoaderDispatcher"
        self._by_index = by_index(self._base) and not dispatched
        if getattr(self._base, "_initial_iter_for_state_dict", False):
            # accelerate began it in prepare(), before anything could be restored
            self._base.load_state_dict({})
        self._done, self._begun = 0, dict[str, Any]()
        self._resumes = False

    def state_dict(self) -> dict[str, Any]:
        between = not self._begun
        own = own_generators([self._base]) if between else []
        return {"epoch": self.epoch, "done": self._done, "begun": self._begun, "own": own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self._done, self._begun = state["epoch"], state["done"], state["begun"]
        set_own_generators(state["own"], [self._base])
        self._resumes = bool(self._begun)

    def left(self, checkpointer: Checkpointer) -> Iterator[Any]:
        """The batches of this epoch that were not done. Sets the random states that
        `checkpointer.restore(rng="later")` left, where they belong; raises UsageError where that
        was not called. A `break` ends no epoch: the next `left` begins the same one anew."""
        if self._fetches_ahead and checkpointer.epoch is not None:
            tell_of_draws(self._base)
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
            self._begun = capture([self._base])
            batches = iter(self.loader)
        for batch in batches:
            self._done += 1
            yield batch
        self.epoch, self._done, self._begun = self.epoch + 1, 0, {}

    def _go_on(self, restore_rng: Callable[[], bool]) -> Iterator[Any]:
        before = rng.capture()

        def settle() -> None:
            if not restore_rng():  # the Batches of another loader has done so
                rng.apply(before)

        if not self._by_index:
            apply(self._begun, [self._base])
            batches: Iterator[Any] = iter(self.loader)
            for _ in range(self._done):
                next(batches, None)
            settle()
            return batches
        # without workers the first batch may draw as it is read, but not what was read ahead
        reads = self._base.num_workers == 0 and not self._fetches_ahead
        with behind([self._base], self._done, self._begun) as (sampler,):
            sampler.then = settle if reads else None
            batches = iter(self.loader)
            first = list(itertools.islice(batches, 1))
        if not reads:
            settle()
        return itertools.chain(first, batches)


def _refuse_plugins() -> None:
    """Raises UsageError for what accelerate may divide a model by and nobody has tried."""
    from accelerate.state import AcceleratorState

    state = AcceleratorState()
    kind = str(state.distributed_type.value)
    if kind in ("DEEPSPEED", "MEGATRON_LM"):
        name = {"DEEPSPEED": "DeepSpeed", "MEGATRON_LM": "Megatron-LM"}[kind]
        raise UsageError(
            f"keepstep was never tested with accelerate's {name} plugin: use FSDP2"
            " (fsdp_version: 2), or DDP"
        )
    if kind == "FSDP" and state.fsdp_plugin.fsdp_version != 2:
        raise UsageError("keepstep keeps FSDP2, not FSDP1: set fsdp_version: 2")


def tell_of_draws(loader: Any) -> None:
    """For a loader of which a batch is fetched ahead: it is said, once, where the batches of its
    next epoch draw from the generators of the process, as nobody can give those their states back.
    Workers draw from their own."""
    if not isinstance(loader, DataLoader) or loader.num_workers:
        return
    if not isinstance(loader.collate_fn, _Watched):
        loader.collate_fn = _Watched(loader.collate_fn)


class _Watched:
    """A collator that looks whether the second batch draws: behind the first one samplers have
    drawn their seeds, and nothing is trained yet."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate
        self._batches, self._state = 0, b""

    def __call__(self, rows: Any) -> Any:
        batch = self._collate(rows)
        self._batches += 1
        if self._batches == 1:
            self._state = extras.encode(rng.capture())
        elif self._batches == 2 and self._state != extras.encode(rng.capture()):
            log.warning(
                "keepstep: the dataset or its collator draws from the random generators of this"
                " process, and a batch is fetched ahead: after a restart that batch is drawn anew,"
                " and losses from there on are not those of an undisturbed run; draw from a"
                " generator seeded by the index of the sample (docs/frameworks.md)"
            )
        return batch


def by_index(loader: Any) -> bool:
    """Whether batches can be left out without being read."""
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


def capture(loaders: list[Any]) -> dict[str, Any]:
    """How an epoch of these loaders is to begin: states of all generators that their order may come
    from, and whether their iterators are new ones."""
    return {
        "process": rng.capture(),
        "own": own_generators(loaders),
        "fresh": [is_fresh(one) for one in loaders],
    }


def apply(state: dict[str, Any], loaders: list[Any]) -> None:
    """Set the generators to what `capture` had."""
    rng.apply(state["process"])
    set_own_generators(state["own"], loaders)


def own_generators(loaders: list[Any]) -> list[bytes]:
    """States of the generators that loaders and their samplers have of their own."""
    return [bytes(one.get_state().tolist()) for one in _generators(loaders)]


def set_own_generators(states: list[bytes], loaders: list[Any]) -> None:
    """Set what `own_generators` had."""
    for state, generator in zip(states, _generators(loaders), strict=False):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _generators(loaders: list[Any]) -> list[torch.Generator]:
    found: dict[int, torch.Generator] = {}
    # a batch sampler has a sampler, or wraps another one, as accelerate's for many ranks does
    places, seen = list(loaders), set[int]()
    for place in places:
        if id(place) in seen:
            continue
        seen.add(id(place))
        generator = getattr(place, "generator", None)
        if isinstance(generator, torch.Generator):
            found[id(generator)] = generator
        inner = (getattr(place, name, None) for name in ("batch_sampler", "sampler"))
        places += [one for one in inner if one is not None]
    return list(found.values())


def is_fresh(loader: Any) -> bool:
    """Whether its next iterator is a new one: with `persistent_workers` only the first is."""
    return not _lasts(loader) or getattr(loader, "_iterator", None) is None


def _lasts(loader: Any) -> bool:
    return bool(getattr(loader, "persistent_workers", False)) and loader.num_workers > 0


def begin_workers(loader: Any) -> None:
    """Those that last, if there are none yet: so that the next epoch draws no seed for them, as it
    is none's first. Leaves all generators where they are."""
    if _lasts(loader) and is_fresh(loader):
        before = capture([loader])
        iter(loader)
        apply(before, [loader])


@contextlib.contextmanager
def seeded_aside(loader: Any) -> Iterator[None]:
    """Within, seeds of workers of this loader, and of copies of it, are drawn from a generator that
    nobody else has."""
    own, loader.generator = loader.generator, torch.Generator()
    try:
        yield
    finally:
        loader.generator = own


@contextlib.contextmanager
def behind(loaders: list[Any], batches: int, begun: dict[str, Any]) -> Iterator[list[_Behind]]:
    """The iterators that are made in here begin as `begun`, what `capture` had, and leave out the
    first `batches`, once they draw. For loaders that are `by_index`."""
    for loader, anew in zip(loaders, begun["fresh"], strict=True):
        if anew and not is_fresh(loader):
            loader._iterator = None
        elif not anew and is_fresh(loader):
            iter(loader)
    apply(begun, loaders)
    samplers: list[_Behind] = []
    put_back: list[tuple[Any, str, Any]] = []
    for loader in loaders:
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        sampler = _Behind(getattr(loader, name), batches)
        samplers.append(sampler)
        # past DataLoader.__setattr__, which forbids it for good reasons that are none here
        put_back.append((loader, name, vars(loader)[name]))
        vars(loader)[name] = sampler
        if not is_fresh(loader):
            loader._iterator._index_sampler = sampler
    try:
        yield samplers
    finally:
        for loader, name, sampler_before in put_back:
            vars(loader)[name] = sampler_before


class _Behind:
    """A sampler, and its iterator, whose first pass begins behind what is left out."""

    def __init__(self, sampler: Any, left_out: int) -> None:
        self._sampler, self._left_out = sampler, left_out
        self._rest: Iterator[Any] = iter(())
        self.then: Callable[[], Any] | None = None
        """Called once, when what is left out is."""

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
