"""Gives the values of a restored step to the objects that a script holds.

Whoever else refers to a dict, a list or a random generator of the script then sees what was
restored: a loop variable, a sampler. Every saved object has one place to go, however often it is
met, in whatever component: `pair_objects` finds it for all components, before `placed_object`
changes anything.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from keepstep.errors import few
from keepstep.image import codecs
from keepstep.state import rng

log = logging.getLogger("keepstep")

_SHOWN = 20
_ATOMS = frozenset({int, float, str, bool, type(None), bytes, complex})
_DICTS = frozenset({dict, Counter, OrderedDict, defaultdict})


class LiveObjectIndex:
    """The live object of each saved one, for one restore."""

    def __init__(self) -> None:
        self._live: dict[int, Any] = {}
        self._used: set[int] = set()
        self._placed: dict[int, Any] = {}
        self._saved: list[Any] = []  # keeps them alive, so that ids stay theirs

    def pair_objects(self, live: Any, saved: Any, *, whatever: bool = False) -> None:
        """Find the live objects that take what the saved ones hold. `whatever`: the live one is a
        component, which stays in place even if the saved one is of another kind.

        An object that is live in two places whose saved ones differ becomes two. A saved object
        that was live as two becomes one.
        """
        if type(saved) in _ATOMS or id(saved) in self._live:
            return
        if isinstance(saved, Tensor):
            if _is_same(
                live, saved
            ):  # a parameter of a model, say, and not another over its memory
                self._live[id(saved)] = live
                self._saved.append(saved)
            return
        if whatever or _suits(live, saved):
            if id(live) in self._used:
                return
            self._used.add(id(live))
            self._live[id(saved)] = live
            self._saved.append(saved)
        elif type(live) is not type(saved):
            return
        for first, other in _children(live, saved):
            self.pair_objects(first, other)

    def placed_object(self, saved: Any) -> Any:
        """What belongs in the place of `saved`: its live object, refilled, or itself, if there is
        none. What is inside is placed, too."""
        kind = type(saved)
        if kind in _ATOMS:
            return saved
        if id(saved) in self._placed:
            return self._placed[id(saved)]
        target = self._live.get(id(saved), saved)
        if rng.is_generator(saved):
            if target is not saved:
                rng.refill_generator(target, saved)
            return target
        if isinstance(saved, tuple):
            items = [self.placed_object(item) for item in saved]
            same = all(item is other for item, other in zip(items, saved, strict=True))
            return saved if same else tuple.__new__(kind, items)
        if kind in _DICTS or kind is list or kind is deque or _has_fields(saved):
            self._placed[id(saved)] = target
            self._saved.append(saved)
            self._fill(target, saved)
        return target

    def _fill(self, target: Any, saved: Any) -> None:
        if isinstance(saved, dict):
            pairs = [(key, self.placed_object(value)) for key, value in saved.items()]
            target.clear()
            for key, item in pairs:  # not `update`: that of a Counter counts the pairs
                target[key] = item
            if type(saved) is OrderedDict and type(target) is OrderedDict:
                vars(target).update(vars(saved))  # as the `_metadata` of a module's state
        elif isinstance(saved, list | deque):
            plain = set(map(type, saved)) <= _ATOMS
            items = list(saved) if plain else [self.placed_object(item) for item in saved]
            target.clear()
            target.extend(items)
        else:
            attributes = codecs.attributes_of(saved)
            codecs.set_fields(
                target,
                {key: self.placed_object(attribute) for key, attribute in attributes.items()},
            )


def put_back_component(name: str, live: Any, saved: Any, refill: LiveObjectIndex) -> None:
    """Make the component `live` equal to what was saved: the same keys in the same order, nothing
    else. `refill` has paired the two.

    Dicts, lists and deques that exist on both sides are refilled, as are objects of fields and
    random generators, so that other references to them see the restored content. Everything else is
    replaced.
    """
    dropped = [repr(key) for key in live if key not in saved] if isinstance(live, dict) else []
    if dropped:
        log.warning(
            "keepstep: %s: %s: not in the restored step, so removed here; set it after restore()"
            " if this script needs it [restore.script_keys_dropped]",
            name,
            few(dropped, _SHOWN),
        )
    refill.placed_object(saved)


def _is_same(live: Any, saved: Tensor) -> bool:
    """Whether both are the same tensor: of one kind, over the same memory."""
    return (
        type(live) is type(saved)
        and live.requires_grad is saved.requires_grad
        and (live.dtype, live.device, live.shape) == (saved.dtype, saved.device, saved.shape)
        and live.data_ptr() == saved.data_ptr() != 0
        and live.stride() == saved.stride()
    )


def _suits(live: Any, saved: Any) -> bool:
    """Whether `live` can become what `saved` is, in place."""
    if rng.is_generator(saved):
        return rng.is_state_compatible(live, saved)
    if isinstance(live, dict):
        # a plain saved dict fits any kind of dict that the script has chosen
        return type(saved) is dict or (
            type(saved) is type(live)
            and getattr(saved, "default_factory", None) is getattr(live, "default_factory", None)
        )
    if type(live) is deque:
        return type(saved) is deque and saved.maxlen == live.maxlen
    if _has_fields(saved):
        parameters = getattr(type(saved), "__dataclass_params__", None)
        return type(live) is type(saved) and not (parameters is not None and parameters.frozen)
    return type(live) is list and type(saved) is list


def _children(live: Any, saved: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(saved, dict):
        return [(dict.get(live, key), value) for key, value in saved.items()]
    if isinstance(saved, list | deque):
        here = [] if set(map(type, saved)) <= _ATOMS else live
        return zip(here, saved, strict=False)
    if isinstance(saved, tuple):
        return zip(live, saved, strict=False)
    if _has_fields(saved):
        here = codecs.attributes_of(live)
        return [
            (here.get(key), attribute) for key, attribute in codecs.attributes_of(saved).items()
        ]
    return ()


def _has_fields(value: Any) -> bool:
    kind = type(value)
    return codecs.is_namespace(kind) or dataclasses.is_dataclass(kind)


def pair_generators(
    refill: LiveObjectIndex, live: Iterable[dict[str, Any]], saved: Iterable[dict[str, Any]]
) -> None:
    """Find the live generators among the options of an optimizer's groups."""
    for here, group in zip(live, saved, strict=True):
        for key, value in group.items():
            if rng.is_generator(value):
                refill.pair_objects(here.get(key), value)


def restore_live_generators(
    refill: LiveObjectIndex, live: Iterable[dict[str, Any]], saved: Iterable[dict[str, Any]]
) -> None:
    """Put them back, with the saved states: `load_state_dict` has made copies of the options."""
    for here, group in zip(live, saved, strict=True):
        here.update(
            {
                key: refill.placed_object(value)
                for key, value in group.items()
                if rng.is_generator(value)
            }
        )
