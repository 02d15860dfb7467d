"""An epoch of a loader begins again as it began, and leaves out what was done.

What its order depends on is drawn as it begins, from the random generators of the process and from
those that loaders and samplers have of their own: with workers when the iterator is made, without
them the sampler's part when the first batch is asked for. So what a resumed epoch needs is the
state of all of these before its iterator was made, and of the process's before its first batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from keepstep.state import rng


def by_index(loader: Any) -> bool:
    """Whether batches can be left out without being read."""
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


def capture(loaders: Iterable[Any]) -> dict[str, Any]:
    """States of all generators that the order of these loaders may come from."""
    return {"process": rng.capture(), "own": own_generators(loaders)}


def apply(state: dict[str, Any], loaders: Iterable[Any]) -> None:
    """Set what `capture` had."""
    rng.apply(state["process"])
    set_own_generators(state["own"], loaders)


def own_generators(loaders: Iterable[Any]) -> list[bytes]:
    """States of the generators that loaders and their samplers have of their own."""
    return [bytes(one.get_state().tolist()) for one in _generators(loaders)]


def set_own_generators(states: list[bytes], loaders: Iterable[Any]) -> None:
    """Set what `own_generators` had."""
    for state, generator in zip(states, _generators(loaders), strict=False):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _generators(loaders: Iterable[Any]) -> list[torch.Generator]:
    found: dict[int, torch.Generator] = {}
    for loader in loaders:
        one: Any = loader
        places = [one]
        # a batch sampler has a sampler, and that may be a distributed one around another
        for name in ("batch_sampler", "sampler", "sampler"):
            one = getattr(one, name, None)
            places.append(one)
        places.append(getattr(loader, "sampler", None))
        for place in places:
            generator = getattr(place, "generator", None)
            if isinstance(generator, torch.Generator):
                found[id(generator)] = generator
    return list(found.values())


def is_fresh(loader: Any) -> bool:
    """Whether its next iterator is a new one: with `persistent_workers` only the first is."""
    lasts = getattr(loader, "persistent_workers", False) and loader.num_workers > 0
    return not lasts or getattr(loader, "_iterator", None) is None


@contextlib.contextmanager
def behind(loaders: list[Any], batches: int, fresh: list[bool]) -> Iterator[list[_Behind]]:
    """The iterators that are made in here leave out the first `batches`, once they draw.

    For loaders that are `by_index`; `fresh`: `is_fresh` of each, when the epoch began.
    """
    samplers: list[_Behind] = []
    put_back: list[tuple[Any, str, Any]] = []
    for loader, anew in zip(loaders, fresh, strict=True):
        if anew and not is_fresh(loader):
            loader._iterator = None
        elif not anew and is_fresh(loader):
            iter(loader)
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
