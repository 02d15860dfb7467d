"""A training's state as savers need it, and one of any total size: a GPT of twelve blocks (some 590
tensors) under AdamW."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

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
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by a flat name."""
        flat = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        for number, of in enumerate(self.optimizer.state.values()):
            flat |= {f"optimizer.{number}.{name}": value for name, value in of.items()}
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


@dataclass(frozen=True)
class Shape:
    """A GPT. A step has `batch` sequences of `context` tokens."""

    name: str
    layers: int
    width: int
    heads: int
    vocabulary: int = 32768
    context: int = 1024
    batch: int = 4

    @property
    def parameters(self) -> int:
        """The approximate number of weights."""
        return self.layers * 12 * self.width**2 + 2 * self.vocabulary * self.width


class Gpt(nn.Module):
    """Token embeddings, blocks of attention and a perceptron, head. Its value is the loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        block = nn.TransformerEncoderLayer(
            shape.width, shape.heads, 4 * shape.width, dropout=0.0, activation="gelu",
            batch_first=True, norm_first=True,
        )  # fmt: skip
        self.blocks = nn.TransformerEncoder(block, shape.layers, enable_nested_tensor=False)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        mask = nn.Transformer.generate_square_subsequent_mask(shape.context)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks(self.embedding(tokens), mask=self.mask, is_causal=True)
        return functional.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


def gpt(size_bytes: int) -> State:
    """A model and an optimizer with `size_bytes` together, in touched memory. Only the smallest
    parameter has a gradient, so that an update costs the CPU little, as if an accelerator did
    it."""
    count = size_bytes // _BYTES_PER_PARAMETER
    width = max(32, int(math.sqrt(count / (12 * _BLOCKS) * 0.9)) // 32 * 32)
    words = max(1, (count - _BLOCKS * (12 * width + 13) * width) // (2 * width))
    with torch.device("meta"):
        model = Gpt(Shape("", _BLOCKS, width, heads=1, vocabulary=words, context=1))
    model.to_empty(device="cpu")
    noise = torch.randn(_NOISE_ELEMENTS).mul_(0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        fill(parameter, noise)
    noise.abs_()
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(1.0),
            "exp_avg": fill(torch.empty_like(parameter), noise),
            "exp_avg_sq": fill(torch.empty_like(parameter), noise),
        }
    smallest = min(model.parameters(), key=Tensor.numel)
    smallest.grad = torch.full_like(smallest, 1e-3)
    return State(model, optimizer)


def fill(tensor: Tensor, noise: Tensor) -> Tensor:
    """Fill new memory, on huge pages where it can be, with repetitions of `noise`."""
    _advise_huge_pages(tensor)
    flat = tensor.detach().view(-1)
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
