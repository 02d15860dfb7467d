"""The state that is saved: the parameters of a GPT and AdamW's moments, of any total size.

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


class Weights(nn.Module):
    """Parameters of a GPT with `count` weights, up to a difference of one row of the embedding."""

    def __init__(self, count: int, *, device: str = "cpu", dtype: torch.dtype = torch.float32):
        super().__init__()
        width = max(32, int(math.sqrt(count / (12 * _BLOCKS) * 0.9)) // 32 * 32)
        noise = torch.randn(_NOISE_ELEMENTS, device=device).mul_(0.02).to(dtype)
        for name, shape in _shapes(count, width):
            self.register_parameter(
                name.replace(".", "_"), nn.Parameter(filled(shape, noise, device=device))
            )


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


def filled(shape: tuple[int, ...], noise: Tensor, *, device: str = "cpu") -> Tensor:
    """A new tensor in touched memory, filled with repetitions of `noise`; huge pages on a CPU."""
    tensor = torch.empty(shape, dtype=noise.dtype, device=device)
    if device == "cpu":
        advise_huge_pages(tensor)
    flat = tensor.view(-1)
    for begin in range(0, flat.numel(), noise.numel()):
        piece = flat[begin : begin + noise.numel()]
        piece.copy_(noise[: piece.numel()])
    return tensor


def advise_huge_pages(tensor: Tensor) -> None:
    """Call madvise(MADV_HUGEPAGE) on new memory: its first touch is then several times cheaper."""
    begin = -(-tensor.data_ptr() // 4096) * 4096
    length = (tensor.data_ptr() + tensor.nbytes - begin) // 4096 * 4096
    if length >= 2 << 20:
        _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), 14)


class TrainingState:
    """A model and an optimizer with `size_bytes` together, as a training would have them."""

    def __init__(self, size_bytes: int, *, device: str = "cpu") -> None:
        self.model = Weights(size_bytes // _BYTES_PER_PARAMETER, device=device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        noise = torch.randn(_NOISE_ELEMENTS, device=device).abs_().mul_(1e-3)
        for parameter in self.model.parameters():
            self.optimizer.state[parameter] = {
                "step": torch.tensor(1.0),
                "exp_avg": filled(tuple(parameter.shape), noise, device=device),
                "exp_avg_sq": filled(tuple(parameter.shape), noise, device=device),
            }
        self.progress: dict[str, Any] = {"step": -1, "loss": 0.0}
        self._tiny = next(iter(self.model.parameters()))
        self._gradient = torch.full_like(self._tiny, 1e-3)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by a flat name."""
        flat = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                flat[f"optimizer.{key}.{name}"] = value
        return flat

    def nested(self) -> dict[str, Any]:
        """The state as a script would pass it to `torch.save`."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": dict(self.progress),
        }

    def components(self) -> dict[str, Any]:
        """The components that a script would pass to `keepstep.Checkpointer`."""
        return {"model": self.model, "optimizer": self.optimizer, "progress": self.progress}

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def step_off_cpu(self, step: int) -> None:
        """A real optimizer step that costs the CPU little: only the smallest parameter has a
        gradient, as if an accelerator updated the others."""
        self.progress["step"] = step
        self._tiny.grad = self._gradient
        self.optimizer.step()
        self._tiny.grad = None
