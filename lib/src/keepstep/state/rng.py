"""Random number generators whose state is part of a step: torch, accelerators, numpy, random.

The state is captured at `save`. Restoring it makes dropout, shuffling and augmentation go on as if
there had been no interruption. numpy is included only if the program imported it.
"""

from __future__ import annotations

import logging
import random
import sys
from array import array
from typing import Any

import torch

from keepstep.state import accelerator

log = logging.getLogger("keepstep")

_HOST = ("torch", "random", "numpy")
"""The keys of a state other than those of accelerators, which are the names of their kinds."""


def capture_all_generators() -> dict[str, Any]:
    """States of all generators of this process, as values that `image.extras_codec` can encode."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state().numpy().tobytes()
        if "numpy" in sys.modules
        else bytes(torch.get_rng_state().tolist()),
        "random": [version, array("I", words).tobytes(), gauss],
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = _numpy_state(numpy.random.get_state(legacy=False))
    return state | accelerator.generator_states()


def is_generator(value: Any) -> bool:
    """Whether this is a generator whose state can be set in place."""
    kind = type(value)
    if kind is torch.Generator or kind is random.Random:
        return True
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is None:
        return False
    return (
        kind is numpy.Generator
        or kind is numpy.RandomState
        or (isinstance(value, numpy.BitGenerator) and kind.__module__.startswith("numpy.random."))
    )


def is_state_compatible(live: Any, saved: Any) -> bool:
    """Whether the generator `live` can take the state of `saved`."""
    if type(live) is not type(saved):
        return False
    if type(saved) is torch.Generator:
        return bool(live.device.type == saved.device.type)
    if type(saved) is random.Random or hasattr(saved, "seed_seq"):  # or a bit generator
        return True
    return type(_bits(live)) is type(_bits(saved))


def refill_generator(live: Any, saved: Any) -> None:
    """Give the generator `live` the state of `saved`, which it suits."""
    if type(saved) is torch.Generator:
        live.set_state(saved.get_state())
    elif type(saved) is random.Random:
        live.setstate(saved.getstate())
    elif hasattr(saved, "seed_seq"):
        _refill_bits(live, saved)
    else:
        _refill_bits(_bits(live), _bits(saved))
        if hasattr(saved, "set_state"):  # a RandomState has half of a normal pair, too
            live.set_state(saved.get_state(legacy=False))


def _bits(generator: Any) -> Any:
    found = getattr(generator, "bit_generator", None)
    return generator._bit_generator if found is None else found


def _refill_bits(live: Any, saved: Any) -> None:
    try:
        live.__setstate__((saved.state, saved.seed_seq))  # also what `spawn` goes on from
    except (TypeError, ValueError):  # before numpy 2
        live.state = saved.state


def _numpy_state(state: dict[str, Any]) -> Any:
    if state["bit_generator"] != "MT19937":  # after `numpy.random.set_bit_generator`
        return state
    name, inner, gauss = state["bit_generator"], state["state"], state["gauss"]
    return [name, inner["key"].tobytes(), int(inner["pos"]), int(state["has_gauss"]), float(gauss)]


def apply_generators(state: dict[str, Any]) -> None:
    """Set every generator whose state was captured."""
    if "torch" in state:
        torch.set_rng_state(_byte_tensor(state["torch"]))
    if "random" in state:
        version, words, gauss = state["random"]
        random.setstate((version, tuple(array("I", words)), gauss))
    if "numpy" in state:
        _apply_numpy(state["numpy"])
    for kind in state.keys() - set(_HOST):
        _apply_devices(kind, state[kind])


def _apply_numpy(state: Any) -> None:
    import numpy

    if not isinstance(state, dict):
        name, keys, position, has_gauss, cached = state
        state = name, numpy.frombuffer(keys, dtype=numpy.uint32), position, has_gauss, cached
    try:
        numpy.random.set_state(state)
    except (ValueError, TypeError) as error:
        log.warning(
            "keepstep: numpy's random generator stays as it is, as another kind of generator was"
            " kept (%s); call numpy.random.set_bit_generator() before restore()"
            " [rng.numpy_not_restored]",
            error,
        )


def _apply_devices(kind: str, states: Any) -> None:
    count = (
        accelerator.torch_module(kind).device_count()
        if kind == accelerator.accelerator_kind()
        else 0
    )
    if len(states) != count:
        log.warning(
            "keepstep: the step has random states of %d devices (%s), and %d are here: the others"
            " are not set"
            " [rng.device_count_differs]",
            len(states),
            kind,
            count,
        )
    for at, state in zip(range(count), states, strict=False):
        accelerator.set_generator(kind, _byte_tensor(state), at)


def _byte_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
