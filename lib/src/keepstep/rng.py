"""Random number generators whose state is part of a step: torch, CUDA, numpy, random.

The state of a generator is what it is at `save`; restoring it makes dropout, shuffling and
augmentation go on as if nothing had happened. numpy counts only if the program imported it.
"""

from __future__ import annotations

import random
import sys
from array import array
from typing import Any

import torch


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
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = [name, keys.tobytes(), int(position), int(has_gauss), float(cached)]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = bytes(torch.cuda.get_rng_state().tolist())
    return state


def apply(state: dict[str, Any]) -> None:
    """Set every generator whose state was captured."""
    if "torch" in state:
        torch.set_rng_state(_byte_tensor(state["torch"]))
    if "random" in state:
        version, words, gauss = state["random"]
        random.setstate((version, tuple(array("I", words)), gauss))
    if "numpy" in state:
        import numpy

        name, keys, position, has_gauss, cached = state["numpy"]
        words = numpy.frombuffer(keys, dtype=numpy.uint32)
        numpy.random.set_state((name, words, position, has_gauss, cached))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_byte_tensor(state["cuda"]))


def _byte_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
