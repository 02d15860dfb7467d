"""Models of which bitsandbytes has quantised the frozen part (QLoRA).

Its layers give a state dict that they do not take back. But they do not train: a step needs the
rest only, if the next life has the same frozen part. So a step holds a digest of it, which is
compared before anything is restored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from keepstep.errors import MismatchError, UsageError
from keepstep.state.wrappers import Replicated, replication_of, unwrap

_LAYERS = frozenset({"Linear4bit", "Linear8bitLt"})


class Trained(nn.Module):
    """The parameters of a model that train, and its buffers, under their names there. The tensors
    are the model's own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        kept = model.state_dict(keep_vars=True)
        trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
        self._parameters.update(trained)
        buffers = {name: one for name, one in model.named_buffers() if name in kept}
        self._buffers.update(buffers)


def is_quantized(model: nn.Module) -> bool:
    """Whether a layer of bitsandbytes is in it."""
    return any(_is_layer(one) for one in model.modules())


def _is_layer(module: nn.Module) -> bool:
    return any(
        kind.__name__ in _LAYERS and kind.__module__.partition(".")[0] == "bitsandbytes"
        for kind in type(module).__mro__
    )


def component(model: nn.Module) -> nn.Module:
    """What is kept of a model, which may be wrapped by DistributedDataParallel: `Trained` if it is
    quantised, else the model. Raises UsageError where a quantised layer trains itself.
    """
    inner = unwrap(model)
    if not is_quantized(inner):
        return model
    for name, one in inner.named_modules():
        if _is_layer(one) and getattr(one, "weight", None) is not None and one.weight.requires_grad:
            raise UsageError(
                f"{name} is quantised and trains, which keepstep cannot keep: freeze it, and train"
                " an adapter (LoRA)"
            )
    replication = replication_of(model)
    part = Trained(inner)
    return part if replication is None else Replicated(part, replication.ranks)


def digest(model: Any) -> str:
    """Of all that `component` leaves out; '' if it leaves out nothing. Reads it all once."""
    if not is_quantized(model):
        return ""
    kept = Trained(model).state_dict().keys()
    hashed = hashlib.sha256()
    for name, value in model.state_dict().items():
        if name in kept:
            continue
        hashed.update(name.encode())
        if isinstance(value, Tensor):
            plain = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            hashed.update(f"{value.dtype}{tuple(value.shape)}".encode())
            hashed.update(plain.numpy().data)
        else:
            hashed.update(repr(value).encode())
    return hashed.hexdigest()


def check_base(step: int, kept: Mapping[str, Any], base: str) -> None:
    """Raise MismatchError if the frozen part is another one than when the step was kept."""
    if kept.get("base", "") != base:
        raise MismatchError(
            f"step {step} was trained on another frozen base: it holds only what trains, beside"
            " the quantised weights of bitsandbytes, and those that this script has loaded are not"
            " the same (another model, other quantisation, other frozen layers); nothing was"
            " changed. Load the same base, or start a new run (keepstep run --run NAME)"
        )
