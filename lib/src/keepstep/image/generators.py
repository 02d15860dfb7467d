"""Random generators as plain data: the state of each, in bytes where it is long.

Encoding imports neither torch nor numpy: their generators exist only if the program has imported
them. A restore hands what is decoded on to the generator that is live (`state.rng.refill`).
"""

from __future__ import annotations

import importlib
import random
import sys
from array import array
from collections.abc import Callable
from typing import Any

from keepstep.image.objects import NotData

_MAX_ENTROPY = 1 << 4096
"""numpy takes long to divide a hostile number that is larger."""

_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")


def parts_of(value: Any) -> tuple[str, Any] | None:
    """A tag, and simpler values from which the generator can be made again; None for any other
    type. Raises NotData."""
    kind = type(value)
    if kind is random.Random:
        version, words, gauss = value.getstate()
        return "!random.Random", [version, array("I", words).tobytes(), gauss]
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy.random")
    if torch is not None and kind is torch.Generator:
        state = bytes(value.get_state().numpy()) if numpy else bytes(value.get_state().tolist())
        return "!torch.Generator", [str(value.device), state]
    if numpy is None:
        return None
    if kind is numpy.Generator:
        return "!numpy.random.Generator", [value.bit_generator]
    if kind is numpy.RandomState:
        state = value.get_state(legacy=False)
        return "!numpy.random.RandomState", [
            value._bit_generator,
            int(state["has_gauss"]),
            float(state["gauss"]),
        ]
    if isinstance(value, numpy.BitGenerator):
        if kind.__name__ not in _BIT_GENERATORS or kind is not getattr(numpy, kind.__name__):
            raise NotData(f"{kind.__module__}.{kind.__qualname__} is no bit generator of numpy")
        return "!numpy.random.BitGenerator", [kind.__name__, value.state, _seed(value, numpy)]
    return None


def _seed(value: Any, numpy: Any) -> Any:
    """The seed from which a bit generator spawns others."""
    seed: Any = getattr(value, "seed_seq", None)
    if type(seed) is not numpy.SeedSequence:
        return None
    key = list(map(int, seed.spawn_key))
    entropy = seed.entropy
    if entropy is not None and type(entropy) is not int:
        entropy = list(map(int, entropy))
    return [entropy, key, int(seed.pool_size), int(seed.n_children_spawned)]


def _to_random(parts: Any) -> random.Random:
    version, words, gauss = parts
    made = random.Random()
    made.setstate((version, tuple(array("I", words)), gauss))
    return made


def _to_torch(parts: Any) -> Any:
    device, state = parts
    torch = importlib.import_module("torch")
    if type(device) is not str or type(state) is not bytes or not state:
        raise TypeError("not a device and a state")
    made = torch.Generator(device)
    made.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    return made


def _to_bits(parts: Any) -> Any:
    name, state, seed = parts
    if name not in _BIT_GENERATORS:
        raise ValueError("no bit generator of numpy")
    numpy = importlib.import_module("numpy.random")
    if seed is None:
        made = getattr(numpy, name)(0)
    else:
        entropy, key, size, spawned = seed
        words = [*key, *entropy] if type(entropy) is list else [*key, entropy or 0]
        small = all(type(word) is int and 0 <= word < _MAX_ENTROPY for word in words)
        if type(size) is not int or not 4 <= size <= 64 or not small:
            raise ValueError("no seed of numpy")
        sequence = numpy.SeedSequence(
            entropy, spawn_key=tuple(key), pool_size=size, n_children_spawned=spawned
        )
        made = getattr(numpy, name)(sequence)
    made.state = state
    return made


def _to_generator(parts: Any) -> Any:
    (bits,) = parts
    numpy = importlib.import_module("numpy.random")
    if not isinstance(bits, numpy.BitGenerator):
        raise TypeError("no bit generator")
    return numpy.Generator(bits)


def _to_random_state(parts: Any) -> Any:
    bits, has_gauss, gauss = parts
    numpy = importlib.import_module("numpy.random")
    if not isinstance(bits, numpy.BitGenerator):
        raise TypeError("no bit generator")
    made = numpy.RandomState(bits)
    made.set_state({**made.get_state(legacy=False), "has_gauss": has_gauss, "gauss": gauss})
    return made


BUILDERS: dict[str, Callable[[Any], Any]] = {
    "!random.Random": _to_random,
    "!torch.Generator": _to_torch,
    "!numpy.random.BitGenerator": _to_bits,
    "!numpy.random.Generator": _to_generator,
    "!numpy.random.RandomState": _to_random_state,
}
"""Inverse of `parts_of`, by tag. The builders raise whatever the constructors raise."""
