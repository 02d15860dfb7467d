"""Random number generators whose state is part of a step: torch, CUDA, numpy, random.

The state of a generator is what it is at `save`; restoring it makes dropout, shuffling and
augmentation go on as if nothing had happened. numpy counts only if the program imported it.
"""

from __future__ import annotations

import logging
import random
import sys
from array import array
from typing import Any

import torch

log = logging.getLogger("keepstep")


def capture() -> dict[str, Any]:
    """States of all generators of this process, as values that `image.extras` can encode."""
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
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        # of all GPUs: a model may lie on several, each with a generator of its own
        state["cuda"] = [bytes(one.tolist()) for one in torch.cuda.get_rng_state_all()]
    return state


def _numpy_state(state: dict[str, Any]) -> Any:
    if state["bit_generator"] != "MT19937":  # after `numpy.random.set_bit_generator`
        return state
    name, inner, gauss = state["bit_generator"], state["state"], state["gauss"]
    return [name, inner["key"].tobytes(), int(inner["pos"]), int(state["has_gauss"]), float(gauss)]


def apply(state: dict[str, Any]) -> None:
    """Set every generator whose state was captured."""
    if "torch" in state:
        torch.set_rng_state(_byte_tensor(state["torch"]))
    if "random" in state:
        version, words, gauss = state["random"]
        random.setstate((version, tuple(array("I", words)), gauss))
    if "numpy" in state:
        _apply_numpy(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        _apply_cuda(state["cuda"])


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
            " kept (%s); call numpy.random.set_bit_generator() before restore()",
            error,
        )


def _apply_cuda(states: Any) -> None:
    if isinstance(states, bytes):  # kept before there was one for each GPU
        torch.cuda.set_rng_state(_byte_tensor(states))
        return
    if len(states) != torch.cuda.device_count():
        log.warning(
            "keepstep: random states of %d GPUs were kept, and there are %d here",
            len(states),
            torch.cuda.device_count(),
        )
    for device, one in zip(range(torch.cuda.device_count()), states, strict=False):
        torch.cuda.set_rng_state(_byte_tensor(one), device)


def _byte_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
