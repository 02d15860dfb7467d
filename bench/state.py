"""A training's state as savers need it, and one of any total size: a GPT under AdamW.

The tensors have a GPT's shapes and number (twelve blocks, some 590 tensors), so that the overhead
per tensor is as in a real training. The memory is touched and filled beforehand.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch
from torch import Tensor, nn

_BLOCKS = 12
_BYTES_PER_PARAMETER = 12  # float32 and AdamW's two moments
_NOISE_ELEMENTS = 1 << 21
_libc = ctypes.CDLL(None)


class State:
    """Model, optimizer and progress of a training."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.progress: dict[str, Any] = {"step": -1, "loss": 0.0}

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(one.nbytes for one in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by a flat name."""
        flat = {f"model.{name}": one for name, one in self.model.state_dict().items()}
        for number, of in enumerate(self.optimizer.state.values()):
            flat |= {f"optimizer.{number}.{name}": one for name, one in of.items()}
        return flat

    def nested(self) -> dict[str, Any]:
        """What a script hands to `torch.save`."""
        return {
            # a plain dict: torch 2.11's stager fails on the class of an OrderedDict
            "model": dict(self.model.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "progress": dict(self.progress),
        }

    def components(self) -> dict[str, Any]:
        """What a script hands to `keepstep.Checkpointer`."""
        return {"model": self.model, "optimizer": self.optimizer, "progress": self.progress}

    def update(self, step: int) -> None:
        """The optimizer's step, with the gradients that are there."""
        self.optimizer.step()
        self.progress["step"] = step


def gpt(size_bytes: int) -> State:
    """A model and an optimizer with `size_bytes` together. Only the smallest parameter has a
    gradient, so that an update costs the CPU little, as if an accelerator did it."""
    model = nn.Module()
    count = size_bytes // _BYTES_PER_PARAMETER
    width = max(32, int(math.sqrt(count / (12 * _BLOCKS) * 0.9)) // 32 * 32)
    noise = torch.randn(_NOISE_ELEMENTS).mul_(0.02)
    for name, shape in _shapes(count, width):
        model.register_parameter(name.replace(".", "_"), nn.Parameter(filled(shape, noise)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    noise.abs_()
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(1.0),
            "exp_avg": filled(tuple(parameter.shape), noise),
            "exp_avg_sq": filled(tuple(parameter.shape), noise),
        }
    smallest = next(model.parameters())
    smallest.grad = torch.full_like(smallest, 1e-3)
    return State(model, optimizer)


def _shapes(count: int, width: int) -> list[tuple[str, tuple[int, ...]]]:
    block = {
        "ln_1.weight": (width,),
        "ln_1.bias": (width,),
        "attn.qkv.weight": (3 * width, width),
        "attn.qkv.bias": (3 * width,),
        "attn.out.weight": (width, width),
        "attn.out.bias": (width,),
        "ln_2.weight": (width,),
        "ln_2.bias": (width,),
        "mlp.in.weight": (4 * width, width),
        "mlp.in.bias": (4 * width,),
        "mlp.out.weight": (width, 4 * width),
        "mlp.out.bias": (width,),
    }
    shapes: list[tuple[str, tuple[int, ...]]] = [("ln_f.bias", (width,))]
    shapes += [(f"h.{i}.{name}", shape) for i in range(_BLOCKS) for name, shape in block.items()]
    rest = count - sum(math.prod(shape) for _, shape in shapes)
    return [*shapes, ("wte.weight", (max(1, rest // width), width))]


def filled(shape: tuple[int, ...], noise: Tensor) -> Tensor:
    """A new tensor in touched memory on huge pages, filled with repetitions of `noise`."""
    tensor = torch.empty(shape, dtype=noise.dtype)
    _advise_huge_pages(tensor)
    flat = tensor.view(-1)
    for begin in range(0, flat.numel(), noise.numel()):
        piece = flat[begin : begin + noise.numel()]
        piece.copy_(noise[: piece.numel()])
    return tensor


def _advise_huge_pages(tensor: Tensor) -> None:
    """Call madvise(MADV_HUGEPAGE) on new memory: its first touch is then several times cheaper."""
    begin = -(-tensor.data_ptr() // 4096) * 4096
    length = (tensor.data_ptr() + tensor.nbytes - begin) // 4096 * 4096
    if length >= 2 << 20:
        _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), 14)
